"""A paged KV cache in float8_e4m3fn, with scales."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import Case
from pools import as_float8, paged
from test_fwd import attend
from test_paged import MIXED, check, same

from jax_varlen import varlen_attention


@pytest.mark.parametrize("scales", ["heads", "one"])
@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_float8(block_size, scales, dtype):
    """The only error is that of the kernel: every float8_e4m3fn is a number of the other dtypes too."""
    case = Case("", "", **MIXED, num_heads=8, head_dim=72, head_dim_v=50, options={"causal": True})
    check(*as_float8(*paged(*case.inputs(dtype), block_size), scales=scales))


def test_float8_with_all_options(dtype):
    options = {"softcap": 4.0, "window_size": (120, 9), "softmax_scale": 0.2, "seqused_q": (1, 33, 4, 0, 1, 69)}
    options["seqused_k"] = (333, 30, 77, 9, 0, 199)
    case = Case("", "", **MIXED, num_heads=6, head_dim=64, alibi="batch", sinks="random", options=options)
    check(*as_float8(*paged(*case.inputs(dtype), 16)))


def test_float8_of_long_contexts(dtype):
    case = Case("", "", (1, 2), (5000, 3500), 8, 2, 128, options={"causal": True})
    check(*as_float8(*paged(*case.inputs(dtype), 16)))


def test_float8_without_scales(dtype):
    args, options = as_float8(*paged(*Case("", "", **MIXED).inputs(dtype), 16))
    for name in ("k_scale", "v_scale"):
        without = {n: x for n, x in options.items() if n != name}
        check(args, without)
        same(attend(args, without), attend(args, without | {name: 1.0}))


@pytest.mark.parametrize("rows", [1, 40])
def test_every_float8_is_exact(rows, dtype):
    """A row that sees one key alone is the value of that key, and its logit the product."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = codes.astype(np.float64)
    pool = np.tile(codes[:, None, None, None], (1, 1, 1, 16))  # block i holds one key, whose elements are all code i
    lengths, table = np.ones(256, np.int32), np.arange(256, dtype=np.int32)[:, None]
    q = np.zeros((256 * rows, 1, 16), dtype)
    q[:, :, 0] = 1
    options = {"seqused_k": lengths, "block_table": table, "softmax_scale": 1.0, "v_scale": 0.5, "k_scale": np.float32([2.0])}
    out, lse = attend((q, pool, pool, rows * np.arange(257)), options)
    nan = np.isnan(values)
    assert nan.sum() == 2
    values = np.repeat(values, rows)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(
        out[finite].astype(np.float64), np.broadcast_to(values[finite, None, None] / 2, (finite.sum(), 1, 16))
    )
    np.testing.assert_allclose(lse[0, finite], 2 * values[finite], rtol=1e-6)  # kernels take exponents of 2
    assert np.isnan(out[~finite].astype(np.float32)).all() and np.isnan(lse[0, ~finite]).all()


def test_traced_scales_are_no_new_trace(any_dtype):
    args, options = as_float8(*paged(*Case("", "", **MIXED).inputs(any_dtype), 16))
    args = [jnp.asarray(x) for x in args]
    attend = jax.jit(lambda k_scale: varlen_attention(*args, **options | {"k_scale": k_scale}, return_lse=True))
    for scale in (0.5, -2.0, 0.0):
        actual = [np.asarray(x) for x in attend(jnp.float32(scale))]
        numpy_args = [np.asarray(x) for x in args]
        oracle.check_paged(actual, *numpy_args, **options | {"k_scale": scale})
    assert attend._cache_size() == 1
