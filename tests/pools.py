"""The same batch with its keys and values in the blocks of a pool, and everything around them hostile."""

import itertools

import numpy as np

NO_BLOCKS = (2**31 - 1, -1, -(2**31), 10**6)


def paged(args, options, block_size, *, order="shuffled", lengths="seqused_k", spare=3, seed=0):
    """(q, k, v, cu_seqlens_q) and options of a packed call, in pools of blocks.

    The pools hold NaN wherever no key stands: in `spare` blocks of nobody, and in a block behind its last key. The table has
    one column too many, and its unused entries name blocks of NaN or none at all. `order` is how the blocks lie in the pool:
    "shuffled", "reversed" or "straight". `lengths` names what tells the lengths: "seqused_k", "cu_seqlens_k" or "both".
    """
    q, k, v, cu_q, *cu_k = args
    cu_k = cu_k[0] if cu_k else cu_q
    options = dict(options)
    used = options.pop("seqused_k", np.diff(cu_k)).astype(np.int32)
    blocks = -(-used // block_size)
    rng = np.random.default_rng(seed)
    table = hostile_table(rng, blocks, spare, order)
    pools = [np.full((int(blocks.sum()) + spare, block_size, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        for b, length in enumerate(used):
            for j in range(0, length, block_size):
                n = min(block_size, length - j)
                pool[table[b, j // block_size], :n] = x[cu_k[b] + j : cu_k[b] + j + n]
    options["block_table"] = table
    if lengths != "cu_seqlens_k":
        options["seqused_k"] = used
    if lengths != "seqused_k":
        owned = used if lengths == "cu_seqlens_k" else used + rng.integers(0, 2 * block_size, used.size)
        options["cu_seqlens_k"] = np.cumsum([100, *owned]).astype(np.int32)
    return (q, *pools, cu_q), options


def hostile_table(rng, blocks, spare, order="shuffled"):
    """(batch, max_blocks): sequence b has the blocks table[b, : blocks[b]] of a pool of blocks.sum() + spare."""
    num_blocks = int(blocks.sum()) + spare
    ids = {"shuffled": rng.permutation(num_blocks), "reversed": np.arange(num_blocks)[::-1], "straight": np.arange(num_blocks)}
    free = ids[order]
    table = np.zeros((blocks.size, int(blocks.max(initial=0)) + 1), np.int32)
    unused = itertools.cycle((*NO_BLOCKS, *free[blocks.sum() :]))
    for b, n in enumerate(blocks):
        table[b, :n] = free[blocks[:b].sum() :][:n]
        table[b, n:] = [next(unused) for _ in range(table.shape[1] - n)]
    return table


def as_float8(args, options, seed=0, scales="heads"):
    """The same call with pools of float8_e4m3fn, and scales: one for each kv head, or the same for all."""
    import ml_dtypes

    q, k, v, cu_q = args
    rng = np.random.default_rng(seed)
    num_kv_heads = k.shape[2]
    scale = lambda: rng.uniform(0.2, 3.0, num_kv_heads if scales == "heads" else None)
    pools = (x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for x in (k, v))
    return (q, *pools, cu_q), options | {"k_scale": np.float32(scale()), "v_scale": np.float32(scale())}
