"""The public function."""

from __future__ import annotations

from typing import Any

from . import derivatives, primitives, shapes, values


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    block_table=None,
    softmax_scale=None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    alibi_slopes=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    r"""Attention of every sequence of a packed batch over its own keys.

    For query row $i$ of sequence $b$, with $len_q$, $len_k$ its lengths and $p = i + len_k - len_q$,

    $$out_i = \sum_j P_{ij} v_j, \qquad P_{ij} = \exp(s_{ij} - lse_i), \qquad lse_i = \log \sum_j \exp(s_{ij})$$

    over the visible keys $j$ of sequence $b$, where $s_{ij} = scale \cdot q_i \cdot k_j$, then
    $s \leftarrow c \tanh(s / c)$ with a softcap $c$, then $s \leftarrow s - slope \cdot |p - j|$ with ALiBi. With a sink, its
    logit is one more term of the sum in $lse$. Key $j$ is visible iff $p - left \le j \le p + right$; `causal` caps $right$
    at 0, so the last query sees all keys (bottom-right alignment).

    **Arguments:**

    - `q`: `(total_q, num_heads, head_dim)`, the tokens of all sequences behind each other; float32, bfloat16 or float16 (on a
        GPU bfloat16 or float16).
    - `k`, `v`: `(total_k, num_kv_heads, head_dim)` and `(total_k, num_kv_heads, head_dim_v)`. Query head `h` reads kv head
        `h // (num_heads // num_kv_heads)`. With `block_table` they are the pools of a paged KV cache,
        `(num_blocks, block_size, num_kv_heads, head_dim)` and `(..., head_dim_v)`, of the dtype of `q` or float8_e4m3fn.
    - `cu_seqlens_q`: integers `(batch + 1,)`; sequence `b` owns the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of `q`.
        Other rows belong to nobody: their `out` is 0, their `lse` is -inf.
    - `cu_seqlens_k`: the same for `k` and `v`; by default `cu_seqlens_q`. With `block_table` its differences are the lengths
        of the sequences, and it may be left out where `seqused_k` is given.
    - `seqused_q`, `seqused_k`: integers `(batch,)`; only the first `seqused[b]` rows of a sequence count. By default all.
    - `block_table`: integers `(batch, max_blocks)`; key `j` of sequence `b` is row `j % block_size` of block
        `block_table[b, j // block_size]` of the pools. Entries behind the last block that holds a key may be anything, and what
        stands in a block behind the last key is not read. Forward only: there is no gradient.
    - `softmax_scale`: a number or a scalar array, by default `head_dim ** -0.5`.
    - `causal`: a query sees no later key.
    - `window_size`: `(left, right)` in tokens, both ends included, None (or -1) for no bound. A window of W tokens that ends
        with the query itself is `(W - 1, 0)`.
    - `softcap`: a positive number, or None.
    - `alibi_slopes`: float32 `(num_heads,)` or `(batch, num_heads)`.
    - `sinks`: `(num_heads,)`, one extra logit per query head that takes part in the denominator only.
    - `k_scale`, `v_scale`: numbers or float32 `(num_kv_heads,)`, what the elements of float8_e4m3fn pools are multiplied by; by
        default 1.
    - `deterministic`: bitwise repeatable gradients. The forward pass always is; with `block_table` and on a GPU the bits of a
        sequence may depend on the lengths of the others, and this flag makes them depend on its own inputs alone: then its
        keys are not divided among multiprocessors, which is slow for few long sequences.
    - `return_lse`: whether to return `lse` too.

    **Returns:** `out (total_q, num_heads, head_dim_v)` in the dtype of `q`; with `return_lse`, `(out, lse)` with
    `lse (num_heads, total_q)` in float32, natural logarithm. A query that sees no key has `out` 0 and `lse` -inf (with a sink:
    `lse` is the sink).

    **Raises:** `ValueError` or `TypeError` for a wrong call, when it is traced; `NotImplementedError` for a right one that this
    build or platform cannot do. Wrong values in offsets and block tables are errors on CPU, and at trace time for NumPy
    arrays; on a GPU they are clamped, or make every row nobody's where offsets fall, and never read or write outside the
    arrays; with the environment variable JAX_VARLEN_CHECK=1 they are errors there too.

    `q`, `k`, `v` and `sinks` have derivatives in both modes, up to the second: `jax.grad` runs kernels alone, other modes run
    plain JAX beside them.

    Under `jax.vmap` the examples become one packed batch and one call; where `softmax_scale`, `sinks`, `k_scale` or `v_scale`
    differ between them, a loop.

    Under `jax.jit` arrays that are sharded over heads stay so. Other axes are gathered, with a warning; on a mesh with explicit
    axes they are an error.

    No argument depends on the longest length, so nothing is compiled again when lengths change. Algorithm: online softmax in
    tiles (Dao, FlashAttention-2, arXiv:2307.08691); ALiBi: Press et al., arXiv:2108.12409; sinks: Xiao et al.,
    arXiv:2309.17453, as a learnt logit per head; paged KV cache: Kwon et al., arXiv:2309.06180.

    !!! example

        ```python
        lengths = jnp.array([3, 500, 41])
        out = jax_varlen.varlen_attention(q, k, v, jax_varlen.cu_seqlens_from_lengths(lengths), causal=True)
        ```

        One new token of each sequence, whose key is in the cache already:

        ```python
        cu_seqlens_q = jnp.arange(batch + 1)
        out = jax_varlen.varlen_attention(
            q, k_pool, v_pool, cu_seqlens_q, seqused_k=lengths, block_table=block_table, causal=True
        )
        ```
    """
    if cu_seqlens_q is None:
        raise TypeError(
            "cu_seqlens_q must be given: the offsets (batch + 1,) of the sequences in q, for example [0, q.shape[0]] for one."
        )
    offsets = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    ops = {name: shapes.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    ops |= {name: shapes.as_int32(name, x) for name, x in offsets.items() if x is not None}
    if block_table is not None:
        ops["block_table"] = shapes.as_block_table(block_table)
    if softmax_scale is not None:
        ops["softmax_scale"] = shapes.scale_value(softmax_scale)
    if alibi_slopes is not None:
        ops["alibi_slopes"] = shapes.as_slopes(alibi_slopes)
    if sinks is not None:
        ops["sinks"] = shapes.as_float32("sinks", sinks)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    ops |= {name: shapes.as_kv_scale(name, x, ops["k"]) for name, x in scales.items() if x is not None}
    left, right = shapes.window_bounds(window_size, causal)
    values.check(ops)
    results = primitives.fwd(
        primitives.same_varying(ops),
        window_left=left,
        window_right=right,
        softcap=shapes.softcap_value(softcap),
        deterministic=shapes.flag("deterministic", deterministic),
    )
    return results if shapes.flag("return_lse", return_lse) else results[0]


derivatives.register()
