"""Every rule that a call must keep, and the sentence that says how to mend a call that does not.

`check_operands` holds the rules of shapes and dtypes; the primitive's abstract evaluation runs it, so the same error is
raised in eager code, under `jit`, `grad` and `eval_shape`. The other functions turn one static option each into its
normal form. All of this is for `varlen_attention`; `check_append_operands` does the same for `append_kv`, and
`check_context_parallel` adds what is peculiar to `context_parallel_attention`. `values.py` looks into arrays whose values are
known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.export
import numpy as np

MAX_HEAD_DIM = 512
DTYPES = ("float32", "bfloat16", "float16")
E4M3 = "float8_e4m3fn"  # of pools, beside the dtype of q
UNBOUNDED = -1
_INT32_MAX = 2**31 - 1


def check_operands(ops: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError unless the operands, by name, are those of one attention call.

    `ops` maps names of `varlen_attention`'s array arguments to anything with `shape` and `dtype`; absent ones are left out.
    """
    paged = "block_table" in ops
    _check_qkv(ops["q"], ops["k"], ops["v"], paged=paged)
    _check_dtypes(ops["q"], ops["k"], ops["v"], paged=paged)
    batch = _check_offsets(ops)
    for name in ("seqused_q", "seqused_k"):
        if name in ops:
            _check_seqused(name, ops[name], batch)
    if paged:
        _check_paged(ops, batch)
    for name in ("k_scale", "v_scale"):
        if name in ops:
            _check_kv_scale(name, ops[name], ops["k"], paged=paged)
    num_heads = ops["q"].shape[1]
    if "alibi_slopes" in ops:
        _check_alibi_slopes(ops["alibi_slopes"], batch, num_heads)
    if "sinks" in ops and ops["sinks"].shape != (num_heads,):
        raise ValueError(
            f"sinks must have shape (num_heads,) = ({num_heads},), one logit per query head, got {ops['sinks'].shape}."
        )
    if "softmax_scale" in ops and ops["softmax_scale"].shape != ():
        raise ValueError(
            f"softmax_scale must be a scalar, got shape {ops['softmax_scale'].shape}. A scale per head goes into q: "
            "q * scale[:, None], with softmax_scale=1.0."
        )


def _check_qkv(q, k, v, *, paged: bool) -> None:
    if len(q.shape) != 3:
        raise ValueError(
            f"q must have rank 3 (total_q, num_heads, head_dim), got rank {len(q.shape)} {q.shape}.{_padded_hint(q.shape)}"
        )
    for name, x in (("k", k), ("v", v)):
        _check_kv_rank(name, x, paged=paged)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all but the last dimension (head_dim_v may differ), got k {k.shape} and v {v.shape}."
        )
    if q.shape[2] != k.shape[-1]:
        raise ValueError(
            f"q and k must have the same head_dim, got q {q.shape} with head_dim {q.shape[2]} and k {k.shape} with "
            f"head_dim {k.shape[-1]}. Only v may differ (head_dim_v)."
        )
    _check_heads(q, k)
    for name, x in (("q and k", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim of {name} must be between 1 and {MAX_HEAD_DIM}, got {x.shape[-1]} in {x.shape}.")


def _padded_hint(shape: tuple[int, ...]) -> str:
    if len(shape) != 4 or not all(isinstance(n, int) for n in shape):
        return " Tokens of all sequences stand behind each other in one axis, with no batch axis."
    batch, seqlen, heads, head_dim = shape
    offsets = ", ".join(str(b * seqlen) for b in range(min(batch, 3) + 1)) + (", ..." if batch > 3 else "")
    return (
        f" A padded (batch, seqlen, heads, head_dim) array is packed with q.reshape({batch * seqlen}, {heads}, {head_dim}) "
        f"and cu_seqlens [{offsets}], or with jax_varlen.pack when lengths differ; (batch, heads, seqlen, head_dim) must be "
        "transposed first."
    )


def _check_kv_rank(name: str, x, *, paged: bool) -> None:
    rank, dim = len(x.shape), "head_dim" if name == "k" else "head_dim_v"
    if paged and rank != 4:
        raise ValueError(
            f"{name} must have rank 4 (num_blocks, block_size, num_kv_heads, {dim}) because block_table is given, got rank "
            f"{rank} {x.shape}. For packed keys (total_k, num_kv_heads, {dim}) leave block_table out."
        )
    if not paged and rank != 3:
        meant = (
            " A paged KV cache (num_blocks, block_size, num_kv_heads, head_dim) needs block_table as well; a padded batch is "
            "packed first, like q."
            if rank == 4
            else ""
        )
        raise ValueError(
            f"{name} must have rank 3 (total_k, num_kv_heads, {dim}) because block_table is not given, got rank {rank} "
            f"{x.shape}.{meant}"
        )


def _check_heads(q, k) -> None:
    num_heads, num_kv_heads = q.shape[1], k.shape[-2]
    if num_heads == 0 or num_kv_heads == 0:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, got q {q.shape} and k {k.shape}.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} query heads in q {q.shape} and {num_kv_heads} kv "
            f"heads in k {k.shape}. Query head h reads kv head h // (num_heads // num_kv_heads)."
        )


def _check_dtypes(q, k, v, *, paged: bool) -> None:
    if k.dtype == v.dtype == E4M3:
        if not paged:
            raise TypeError(
                f"k and v may be {E4M3} only as pools of blocks, with block_table, got k {k.shape} without one. Cast "
                "them to the dtype of q and multiply them by their scales."
            )
    elif not q.dtype == k.dtype == v.dtype:
        pools = f" Pools of blocks may both be {E4M3}." if paged else ""
        raise TypeError(
            f"q, k and v must have one dtype, got q {q.dtype}, k {k.dtype} and v {v.dtype}. Cast them to the same, for example "
            f"with .astype(q.dtype).{pools}"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v must be {', '.join(DTYPES)}, got {q.dtype}. Cast them, for example to bfloat16.")


def _check_offsets(ops) -> int:
    """Returns the batch size."""
    cu_seqlens_q = ops["cu_seqlens_q"]
    batch = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    if "cu_seqlens_k" in ops:
        cu_seqlens_k = ops["cu_seqlens_k"]
        _check_int32("cu_seqlens_k", cu_seqlens_k)
        if cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                "cu_seqlens_k must have the same shape (batch + 1,) as cu_seqlens_q, got "
                f"{cu_seqlens_k.shape} and {cu_seqlens_q.shape}."
            )
    elif "block_table" not in ops and ops["k"].shape[0] != ops["q"].shape[0]:
        raise ValueError(
            "cu_seqlens_k may be left out only when q and k hold the same tokens (total_k == total_q), got q "
            f"{ops['q'].shape} and k {ops['k'].shape}. Give cu_seqlens_k with the offsets of k and v."
        )
    return batch


def _check_cu_seqlens(name: str, cu_seqlens) -> int:
    """Returns the batch size."""
    _check_int32(name, cu_seqlens)
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"{name} must have shape (batch + 1,) and at least one entry, got {cu_seqlens.shape}. From lengths: "
            "jax_varlen.cu_seqlens_from_lengths(lengths)."
        )
    return cu_seqlens.shape[0] - 1


def _check_int32(name: str, x) -> None:
    if x.dtype != np.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype} {x.shape}.")


def _check_seqused(name: str, x, batch: int) -> None:
    _check_int32(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} must have shape (batch,) = ({batch},), one length per sequence, got {x.shape}.")


def _check_paged(ops, batch: int) -> None:
    _check_block_table(ops["block_table"], batch, "cu_seqlens_q")
    if ops["k"].shape[1] == 0:
        raise ValueError(f"block_size must be at least 1, got 0 in k {ops['k'].shape} (num_blocks, block_size, ...).")
    if "seqused_k" not in ops and "cu_seqlens_k" not in ops:
        raise ValueError(
            "With block_table the lengths of the keys must be given: seqused_k (batch,), or cu_seqlens_k (batch + 1,) whose "
            "differences are the lengths. Got neither."
        )


def _check_kv_scale(name: str, scale, k, *, paged: bool) -> None:
    if not paged or k.dtype != E4M3:
        raise ValueError(
            f"{name} may be given only with block_table and pools of {E4M3}, got k {k.dtype} {k.shape}"
            f"{'' if paged else ' without block_table'}. Leave it out: "
            + ("put it into softmax_scale." if name == "k_scale" else "multiply out by it.")
        )
    num_kv_heads = k.shape[-2]
    if scale.shape != (num_kv_heads,):
        raise ValueError(
            f"{name} must be a scalar or have shape (num_kv_heads,) = ({num_kv_heads},), one scale per kv head, got "
            f"{scale.shape}."
        )


def _check_block_table(block_table, batch: int, cu_seqlens_name: str) -> None:
    _check_int32("block_table", block_table)
    if len(block_table.shape) != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must have shape (batch, max_blocks) with batch = {batch} rows, as {cu_seqlens_name} has batch + 1 "
            f"entries, got {block_table.shape}."
        )


def _check_alibi_slopes(slopes, batch: int, num_heads: int) -> None:
    if slopes.shape not in ((num_heads,), (batch, num_heads)):
        raise ValueError(
            f"alibi_slopes must have shape (num_heads,) = ({num_heads},) or (batch, num_heads) = ({batch}, {num_heads}), got "
            f"{slopes.shape}."
        )


def check_bwd_operands(ops: Mapping[str, Any]) -> None:
    """Raises ValueError unless dout, lse and delta are those of a call with the other operands."""
    q, v = ops["q"], ops["v"]
    rows = (q.shape[1], q.shape[0])
    for name, shape in (("dout", (*q.shape[:2], v.shape[-1])), ("lse", rows), ("delta", rows)):
        if ops[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {ops[name].shape}.")


def check_folded(examples: Mapping[str, Any], size: int) -> None:
    """Raises ValueError where `jax.vmap` over `size` examples of the arrays needs an offset, or an id, beyond int32."""
    for name, x in examples.items():
        total = size * x.shape[0]
        if not jax.export.is_symbolic_dim(total) and total > _INT32_MAX:
            what = "blocks" if len(x.shape) == 4 else "rows"
            raise ValueError(
                f"jax.vmap over {size} examples of {name} {x.shape} makes one array of {total} {what}, more than the "
                f"{_INT32_MAX} that int32 can count. Map over fewer at once: jax.lax.map(..., batch_size=...)."
            )


def check_append_operands(ops: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError unless the operands, by name, are those of one call of `append_kv`."""
    _check_pools(ops["k_cache"], ops["v_cache"])
    for name, dim in (("k", "head_dim"), ("v", "head_dim_v")):
        _check_new_tokens(name, ops[name], f"{name}_cache", ops[f"{name}_cache"], dim)
    if ops["k"].shape[0] != ops["v"].shape[0]:
        raise ValueError(f"k and v must hold the same tokens, got k {ops['k'].shape} and v {ops['v'].shape}.")
    _check_append_dtypes(ops)
    batch = _check_cu_seqlens("cu_seqlens", ops["cu_seqlens"])
    _check_seqused("seqused_k", ops["seqused_k"], batch)
    _check_block_table(ops["block_table"], batch, "cu_seqlens")


def _check_pools(k_cache, v_cache) -> None:
    for name, pool, dim in (("k_cache", k_cache, "head_dim"), ("v_cache", v_cache, "head_dim_v")):
        if len(pool.shape) != 4 or 0 in pool.shape[1:]:
            raise ValueError(
                f"{name} must be a pool (num_blocks, block_size, num_kv_heads, {dim}) with all but num_blocks at least 1, got "
                f"{pool.shape}."
            )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must agree in all but the last dimension (head_dim_v may differ), got k_cache "
            f"{k_cache.shape} and v_cache {v_cache.shape}."
        )


def _check_new_tokens(name: str, x, pool_name: str, pool, dim: str) -> None:
    num_kv_heads, width = pool.shape[2:]
    if len(x.shape) != 3 or x.shape[1:] != pool.shape[2:]:
        raise ValueError(
            f"{name} must have shape (total, num_kv_heads, {dim}) = (total, {num_kv_heads}, {width}) as {pool_name} is "
            f"{pool.shape}, got {x.shape}. Tokens of all sequences stand behind each other in one axis, with no batch axis."
        )


def _check_append_dtypes(ops) -> None:
    k_cache, v_cache, k, v = (ops[name] for name in ("k_cache", "v_cache", "k", "v"))
    if k.dtype != v.dtype or k.dtype not in DTYPES:
        raise TypeError(f"k and v must both be one of {', '.join(DTYPES)}, got k {k.dtype} and v {v.dtype}. Cast them.")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache and v_cache must have one dtype, got k_cache {k_cache.dtype} and v_cache {v_cache.dtype}.")
    quantized = k_cache.dtype == E4M3
    if not quantized and k_cache.dtype != k.dtype:
        raise TypeError(
            f"k_cache and v_cache must have the dtype of k and v, or {E4M3}, got pools of {k_cache.dtype} and k of {k.dtype}. "
            "Cast the tokens: k.astype(k_cache.dtype), v.astype(v_cache.dtype)."
        )
    for name in ("k_scale", "v_scale"):
        if name not in ops:
            continue
        if not quantized:
            raise TypeError(f"{name} is for pools of {E4M3}, got pools of {k_cache.dtype}, which hold k and v as they are.")
        if ops[name].shape not in ((), (k.shape[1],)):
            raise ValueError(
                f"{name} must be a scalar or have shape (num_kv_heads,) = ({k.shape[1]},), got shape {ops[name].shape}."
            )


def mesh_axis_size(axis_name) -> int:
    """The number of devices along a manual mesh axis, or a tuple of them; a ValueError for anything else."""
    try:
        return jax.lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        raise ValueError(
            f"axis_name must be a mesh axis, or a tuple of them, that jax.shard_map has made manual where the call stands, got "
            f"{axis_name!r}. Call it inside jax.shard_map(..., mesh=mesh, in_specs=(PartitionSpec({axis_name!r}), ...))."
        ) from None


def check_context_parallel(ops: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError unless the operands, by name, are those of one call of `context_parallel_attention`."""
    cu_seqlens, seqused = ops["cu_seqlens"], ops.get("seqused")
    batch = _check_cu_seqlens("cu_seqlens", cu_seqlens)
    if seqused is not None:
        _check_seqused("seqused", seqused, batch)
    others = {name: x for name, x in ops.items() if name not in ("cu_seqlens", "seqused")}
    check_operands(others | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens})
    q, k = ops["q"], ops["k"]
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q, k and v must hold the same tokens, an equal share on each device, got q {q.shape} and k {k.shape}. Attention "
            "to the keys of other sequences has no context-parallel form here."
        )


def check_shares(x, num_devices: int, axis: int) -> None:
    """Raises ValueError or TypeError unless the tokens of `x`, at `axis`, can be shared out equally."""
    if not isinstance(num_devices, (int, np.integer)) or num_devices < 1:
        raise ValueError(f"num_devices must be a Python int of 1 or more, as it is part of a shape, got {num_devices!r}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} axes of x, got {axis} for {x.shape}.")
    total = x.shape[axis]
    if total % num_devices:
        more = -total % num_devices
        raise ValueError(
            f"x must have a multiple of num_devices = {num_devices} tokens at axis {axis}, got {total} in {x.shape}. Append "
            f"{more} that belong to nobody, behind cu_seqlens[-1]: they take no part."
        )


def check_states(out_a, lse_a, out_b, lse_b) -> None:
    """Raises ValueError or TypeError unless `merge_attention` is given two results of the same queries."""
    for name, x in (("out_a", out_a), ("out_b", out_b)):
        if len(x.shape) != 3:
            raise ValueError(f"{name} must have rank 3 (total_q, num_heads, head_dim_v), got rank {len(x.shape)} {x.shape}.")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be {', '.join(DTYPES)}, got {x.dtype}. Cast it.")
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_a and out_b must have one shape, as they are of the same queries, got {out_a.shape} and {out_b.shape}."
        )
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        if x.shape != out_a.shape[1::-1]:
            raise ValueError(
                f"{name} must have shape (num_heads, total_q) = {out_a.shape[1::-1]} as out_a is {out_a.shape}, got {x.shape}. "
                "It comes from the same call as out, with return_lse=True."
            )
        if x.dtype != np.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}: a lower precision would shift the weights of the two.")


def as_array(name: str, x) -> jax.Array:
    """`x` as an array of JAX; a TypeError for what is no array at all."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}.")
    return jax.numpy.asarray(x)


def as_int32(name: str, x) -> jax.Array | np.ndarray:
    """`x` as int32; a TypeError for anything but integers, since an offset that was rounded is a wrong offset."""
    array = _integers(name, x)
    if isinstance(array, np.ndarray) and array.size and not -_INT32_MAX <= array.min() <= array.max() <= _INT32_MAX:
        raise ValueError(f"{name} must fit in int32, got values from {array.min()} to {array.max()}.")
    return _clipped_to_int32(array)


def as_block_table(x) -> jax.Array | np.ndarray:
    """`x` as int32. Entries that hold no key may be anything, also beyond int32."""
    return _clipped_to_int32(_integers("block_table", x))


def _integers(name: str, x) -> jax.Array | np.ndarray:
    array = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x, None if np.size(x) else np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{name} must hold integers, got {array.dtype} {array.shape}. Cast it where it is made: {name}.astype(jnp.int32)."
        )
    return array


def _clipped_to_int32(array) -> jax.Array | np.ndarray:
    """A value beyond int32 stays too large, or too small, and does not wrap into the array."""
    info = np.iinfo(array.dtype)
    if info.max > _INT32_MAX:
        array = array.clip(max(info.min, -_INT32_MAX), _INT32_MAX)
    return array.astype(np.int32)


def as_float32(name: str, x) -> jax.Array | np.ndarray:
    """`x` as float32; a TypeError for anything but real numbers."""
    array = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x)
    if not (jax.numpy.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name} must hold real numbers, got {array.dtype} {array.shape}.")
    return array.astype(np.float32)


def as_kv_scale(name: str, x, k) -> jax.Array | np.ndarray:
    """`x` as float32; a scalar is that of every kv head."""
    scale = as_float32(name, x)
    return scale if scale.shape else jax.numpy.broadcast_to(scale, k.shape[-2:-1])


def as_slopes(x) -> jax.Array | np.ndarray:
    """`x` if it is float32 (or plain Python numbers): slopes of a lower precision would shift every logit."""
    array = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x, np.float32)
    if array.dtype != np.float32:
        raise TypeError(
            f"alibi_slopes must be float32, got {array.dtype} {array.shape}. Cast it: alibi_slopes.astype(jnp.float32)."
        )
    return array


def window_bounds(window_size, causal: bool) -> tuple[int, int]:
    """The (left, right) window bounds with UNBOUNDED for no bound and `causal` folded in."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size must be a pair (left, right) of token counts, None for no bound, got {window_size!r}. A window of W "
            "tokens that ends with the query itself is (W - 1, 0)."
        )
    left, right = (_window_bound(window_size, side) for side in window_size)
    return left, 0 if flag("causal", causal) else right


def one_sided_window(bounds: tuple[int, int], total: int, *, alibi: bool) -> tuple[int, int]:
    """The bounds, where a stripe of the tokens can have them: none, or a right one of 0. Those beyond `total` are none."""
    left, right = (UNBOUNDED if bound >= max(total, 1) else bound for bound in bounds)
    if right != 0 and (left, right) != (UNBOUNDED, UNBOUNDED):
        raise NotImplementedError(
            f"context_parallel_attention has windows that end with the query alone, (left, 0), got {bounds} (-1 is no bound). "
            "For others share out heads in place of tokens: varlen_attention inside jax.shard_map."
        )
    if right != 0 and alibi:
        raise NotImplementedError(
            "context_parallel_attention has alibi_slopes with causal=True alone, got causal=False. Give it, or share out "
            "heads in place of tokens: varlen_attention inside jax.shard_map."
        )
    return left, right


def one_of(name: str, x, choices: tuple[str, ...]) -> str:
    """`x` if it is one of the choices."""
    if x not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {x!r}.")
    return x


def flag(name: str, x) -> bool:
    """`x` if it is a Python bool."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool, got {x!r}: it is fixed when the call is traced.")
    return bool(x)


def _window_bound(window_size, bound) -> int:
    if bound is None:
        return UNBOUNDED
    try:
        bound = operator.index(bound)
    except TypeError:
        raise TypeError(
            f"window_size must hold Python integers or None, got {window_size!r}: the window is fixed when the call is traced."
        ) from None
    if bound < UNBOUNDED:
        raise ValueError(f"window_size must hold bounds of 0 or more, or None (or -1) for no bound, got {window_size!r}.")
    return UNBOUNDED if bound >= _INT32_MAX else bound


def softcap_value(softcap) -> float:
    """The softcap as a float, 0.0 for none."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, jax.core.Tracer):
        raise TypeError("softcap must be a Python number, got a traced value: it is fixed when the call is traced.")
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float, np.integer, np.floating)):
        raise TypeError(f"softcap must be a Python number or None, got {softcap!r}.")
    softcap = float(softcap)
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # kernels hold it in float32
    if not smallest <= softcap <= largest:
        raise ValueError(f"softcap must be greater than 0 and finite in float32, or None for no cap, got {softcap}.")
    return softcap


def scale_value(softmax_scale) -> jax.Array | np.ndarray:
    """The scale as a float32 scalar array; a value that is known at trace time must be finite. A device's value is not read."""
    scale = as_float32("softmax_scale", softmax_scale)
    if isinstance(scale, np.ndarray) and scale.shape == () and not math.isfinite(scale.item()):
        raise ValueError(f"softmax_scale must be finite, got {scale.item()}.")
    return scale
