"""The gradients of `oracle.attention`, written out as a loop over sequences in NumPy, and the tolerance that follows."""

from typing import NamedTuple

import numpy as np
import oracle

NAMES = ("q", "k", "v", "sinks")


class Gradients(NamedTuple):
    """By name, as far as the call has the argument."""

    values: dict  # in float64
    sizes: dict  # the values where every term of the sums that they are counts as positive
    largest_lse: float
    sinks_deviation: float  # the standard deviation of the gradient of sinks where out comes from a kernel


def gradients(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    dout,
    dlse,
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
    """In float64; `low_precision` computes in float32 and rounds out, P, dS and the results to q's dtype, as a kernel does."""
    compute = np.float32 if low_precision else np.float64
    rounded = (lambda x: x.astype(q.dtype).astype(compute)) if low_precision else lambda x: x
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    arrays = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    values, sizes = ({name: np.zeros(x.shape) for name, x in arrays.items()} for _ in range(2))
    largest_lse, variance = 0.0, np.zeros(q.shape[1])
    for b in range(len(cu_seqlens_q) - 1):
        len_q = cu_seqlens_q[b + 1] - cu_seqlens_q[b] if seqused_q is None else seqused_q[b]
        len_k = cu_seqlens_k[b + 1] - cu_seqlens_k[b] if seqused_k is None else seqused_k[b]
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b] + len_q)
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b] + len_k)
        seen = oracle.visible(len_q, len_k, causal, window_size)
        sees = seen.any(1)
        q_b, dout_b = (_by_head(x[rows], sees).astype(compute) for x in (q, dout))
        k_b, v_b = (_by_head(x[keys], seen.any(0), q.shape[1]).astype(compute) for x in (k, v))
        # A row without keys has the sink alone, whose gradient is dlse, and without a sink nothing.
        dlse_b = np.where(sees | (sinks is not None), dlse[:, rows], 0).astype(compute)
        slopes = alibi_slopes[b] if np.ndim(alibi_slopes) == 2 else alibi_slopes
        s = q_b @ k_b.swapaxes(1, 2) * compute(scale)
        logits = oracle._logits(s, softcap, slopes)
        logits[:, ~seen] = -np.inf
        p, lse = oracle._softmax(logits, sinks)
        out = rounded(rounded(p) @ v_b)
        dp, delta = dout_b @ v_b.swapaxes(1, 2), (dout_b * out).sum(-1) - dlse_b
        slope = 1 if softcap is None else 1 - np.tanh(s / compute(softcap)) ** 2
        ds, terms = rounded(p * (dp - delta[..., None]) * slope), p * (np.abs(dp) + np.abs(delta)[..., None]) * slope
        for result, ds_b, p_b, sign in ((values, ds * scale, rounded(p), np.array), (sizes, terms * abs(scale), p, np.abs)):
            result["q"][rows] = np.moveaxis(ds_b @ sign(k_b), 0, 1)
            result["k"][keys] = _of_kv_heads(ds_b.swapaxes(1, 2) @ sign(q_b), k.shape[1])
            result["v"][keys] = _of_kv_heads(p_b.swapaxes(1, 2) @ sign(dout_b), k.shape[1])
            if sinks is not None:
                result["sinks"] += (_sink_probability(sinks, lse) * sign(-delta)).sum(1)
        if sinks is not None:
            of_out = out**2 + p**2 @ v_b**2
            variance += (_sink_probability(sinks, lse) ** 2 * (dout_b**2 * of_out).sum(-1)).sum(1)
        largest_lse = max(largest_lse, oracle._largest(lse))
    if low_precision:
        values = {name: x.astype(arrays[name].dtype).astype(np.float64) for name, x in values.items()}
    return Gradients(values, sizes, largest_lse, oracle.eps(q.dtype) * (variance.max(initial=0) / 12) ** 0.5)


def _sink_probability(sinks, lse):
    return np.exp(np.asarray(sinks, lse.dtype)[:, None] - lse)


def _by_head(x, rows, num_heads=None):
    """(num_heads, rows, columns), zero but in `rows`: elsewhere x may be NaN."""
    x = oracle._clear(x, ~rows)
    return np.moveaxis(x if num_heads is None else oracle._per_query_head(x, num_heads), 1, 0)


def _of_kv_heads(x, num_kv_heads):
    num_heads, keys, columns = x.shape
    return np.moveaxis(x.reshape(num_kv_heads, num_heads // num_kv_heads, keys, columns).sum(1), 0, 1)


def check(actual, q, k, v, *offsets, factor=3.0, **options):
    """Asserts that the gradients, by name, are right: the error is at most `factor` times that of the loop in low precision.

    Four units in the last place of the largest result are free, and of the float32 terms that the results are sums of. The
    gradient of sinks is float32, a sum of P * dout * out over rows and columns, where each `out` and each term P * v of it is
    rounded to q's dtype. An error that is uniform over a unit in the last place deviates by eps / sqrt(12), and independent
    ones add as squares. Three deviations are free: the few numbers that the loop has there can all happen to be near.
    """
    expected = gradients(q, k, v, *offsets, **options)
    rounded = gradients(q, k, v, *offsets, **options, low_precision=True)
    assert set(actual) == set(expected.values)
    for name, x in actual.items():
        dtype = np.dtype(np.float32) if name == "sinks" else q.dtype
        y, z, size = expected.values[name], rounded.values[name], oracle._largest(expected.sizes[name])
        of_terms = oracle.eps(np.float32) * (1 + expected.largest_lse) * size
        floor = 4 * (oracle.eps(dtype) * oracle._largest(y) + of_terms) + 1e-7
        if name == "sinks":
            floor += 3 * expected.sinks_deviation
        assert np.isfinite(np.asarray(x).astype(np.float64)).all(), f"d{name} is not finite"
        oracle._assert_close(f"d{name}", x, y, z, dtype, factor, floor)
