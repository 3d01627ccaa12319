"""The attention once more, as a loop over sequences in float64 NumPy, and the tolerance that follows from it.

Shares no code with the package.
"""

import numpy as np


def attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    low_precision=False,
):
    """(out, lse) in float64. `low_precision` computes in float32 and rounds P and out to q's dtype, as a kernel does."""
    dtype, compute = q.dtype, np.float32 if low_precision else np.float64
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    (total_q, num_heads, head_dim), head_dim_v = q.shape, v.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = np.zeros((total_q, num_heads, head_dim_v)), np.full((num_heads, total_q), -np.inf)
    for b in range(len(cu_seqlens_q) - 1):
        len_q = cu_seqlens_q[b + 1] - cu_seqlens_q[b] if seqused_q is None else seqused_q[b]
        len_k = cu_seqlens_k[b + 1] - cu_seqlens_k[b] if seqused_k is None else seqused_k[b]
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b] + len_q)
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b] + len_k)
        slopes = alibi_slopes[b] if np.ndim(alibi_slopes) == 2 else alibi_slopes
        seen = visible(len_q, len_k, causal, window_size)
        k_b, v_b = (_per_query_head(_clear(x[keys], ~seen.any(0)).astype(compute), num_heads) for x in (k, v))
        logits = _logits(np.einsum("qhd,khd->hqk", q[rows].astype(compute), k_b) * compute(scale), softcap, slopes)
        logits[:, ~seen] = -np.inf
        p, lse[:, rows] = _softmax(logits, sinks)
        if low_precision:
            p = p.astype(dtype).astype(compute)
        out[rows] = np.einsum("hqk,khd->qhd", p, v_b)
    return out.astype(dtype).astype(np.float64) if low_precision else out, lse


def _per_query_head(x, num_heads):
    return np.repeat(x, num_heads // x.shape[1], axis=1)


def _clear(x, rows):
    x = x.copy()
    x[rows] = 0  # a key that no row sees may be NaN
    return x


def _offset(len_q, len_k):
    """Of each key from the row's diagonal: negative to the left."""
    i, j = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
    return j - (i + len_k - len_q)


def visible(len_q, len_k, causal, window_size):
    offset = _offset(len_q, len_k)
    left, right = (None if bound == -1 else bound for bound in window_size)
    result = np.ones((len_q, len_k), bool)
    if left is not None:
        result &= offset >= -left
    if right is not None:
        result &= offset <= right
    return result & (offset <= 0) if causal else result


def _logits(logits, softcap, slopes):
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if slopes is not None:
        distance = np.abs(_offset(*logits.shape[1:])).astype(logits.dtype)
        logits = logits - np.asarray(slopes, logits.dtype)[:, None, None] * distance
    return logits


def _softmax(logits, sinks):
    top = logits.max(-1, initial=-np.inf)
    if sinks is not None:
        sinks = np.broadcast_to(np.asarray(sinks, logits.dtype)[:, None], top.shape)
        top = np.maximum(top, sinks)
    shift = np.where(top == -np.inf, 0, top)
    p = np.exp(logits - shift[..., None])
    total = p.sum(-1) + (0 if sinks is None else np.exp(sinks - shift))
    empty = total == 0
    total = np.where(empty, 1, total)
    return p / total[..., None], np.where(empty, -np.inf, np.log(total) + shift)


def gather(k, v, block_table, lengths, k_scale=None, v_scale=None):
    """Packed k and v in float64, and their cu_seqlens, of the keys that a block table finds in its pools."""
    packed = []
    for pool, scale in ((k, k_scale), (v, v_scale)):
        block_size, num_kv_heads, dim = pool.shape[1:]
        scale = np.broadcast_to(1.0 if scale is None else np.float64(scale), num_kv_heads)[:, None]
        rows = [np.zeros((0, num_kv_heads, dim))]
        for b, length in enumerate(lengths):
            for j in range(length):
                block = pool[block_table[b, j // block_size]]
                rows.append(block[j % block_size].astype(np.float64)[None] * scale)
        packed.append(np.concatenate(rows))
    return *packed, np.cumsum([0, *lengths])


def check_paged(
    actual, q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, block_table, seqused_k=None, k_scale=None, v_scale=None, **options
):
    """`check` of a call with a block table."""
    lengths = np.diff(cu_seqlens_k) if seqused_k is None else seqused_k
    k, v, cu_seqlens_k = gather(k, v, block_table, lengths, k_scale, v_scale)
    check(actual, q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def check(actual, q, k, v, *offsets, factor=2.0, **options):
    """Asserts that (out, lse) is right: its error is at most `factor` times that of the same loop in low precision.

    Half a unit in the last place of the largest result and four of the largest logit are free, as sums may be taken in
    another order; so is 1e-7, as values that a format holds with fewer bits may be flushed to 0.
    """
    expected = attention(q, k, v, *offsets, **options)
    rounded = attention(q, k, v, *offsets, **options, low_precision=True)
    logit_error = eps(np.float32) * max(_largest(expected[1]), 1)
    for name, dtype, x, y, z in zip(("out", "lse"), (q.dtype, np.float32), actual, expected, rounded, strict=True):
        floor = (0.5 * eps(dtype) + 4 * logit_error) * _largest(y) + 1e-7
        _assert_close(name, x, y, z, dtype, factor, floor)


def _largest(x) -> float:
    return np.abs(x[np.isfinite(x)]).max(initial=0)


def _assert_close(name, actual, expected, rounded, dtype, factor, floor):
    assert actual.dtype == dtype, f"{name} is {actual.dtype}"
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, not {expected.shape}"
    actual = np.asarray(actual).astype(np.float64)
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected), f"where {name} is -inf")
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), f"where {name} is NaN")
    finite = np.isfinite(expected)
    if not finite.any():
        return
    actual, expected, rounded = actual[finite], expected[finite], rounded[finite]
    error = np.abs(actual - expected)
    bound = factor * np.abs(rounded - expected).max() + floor
    worst = error.argmax()
    if error[worst] > bound:
        raise AssertionError(
            f"{name}: error {error[worst]:.3g} of {actual[worst]:.6g} for {expected[worst]:.6g}, allowed {bound:.3g}"
        )


def eps(dtype) -> float:
    """The unit in the last place of 1: bfloat16 is no NumPy type of its own, so np.finfo does not know it."""
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[np.dtype(dtype).name]
