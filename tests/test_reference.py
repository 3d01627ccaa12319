import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import SELECTED, Case, padded
from pools import as_float8, paged
from test_shapes import ERRORS

from jax_varlen import reference

SMALL = [case for case in SELECTED if sum(case.lens_q) + case.tail <= 512]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 1)},
    "softcap": {"softcap": 0.7},
    "scale": {"softmax_scale": 0.9},
    "everything": {"causal": True, "window_size": (5, None), "softcap": 0.9, "seqused_q": (3, 2, 5), "seqused_k": (4, 2, 7)},
}
RAGGED = Case("ragged", "", (4, 2, 6), (5, 3, 9), 4, 2, 8, 6, gap=1, tail=2)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases(case):
    args, options = case.inputs(jnp.float32)
    if args[0].size == 0 or args[1].size == 0:
        actual = reference.varlen_attention(*args, **options, return_lse=True)
    else:  # in buffers of one size, so that cases share compiled code
        padded_args, padded_options = padded(args, options)
        out, lse = reference.varlen_attention(*padded_args, **padded_options, return_lse=True)
        total = args[0].shape[0]
        assert not out[total:].any() and jnp.all(lse[:, total:] == -jnp.inf)
        actual = out[:total], lse[:, :total]
    oracle.check(actual, *args, **options)


@pytest.mark.parametrize("low_precision", ["bfloat16", "float16"])
def test_low_precision_inputs(low_precision):
    args, options = RAGGED.inputs(jnp.dtype(low_precision))
    oracle.check(reference.varlen_attention(*args, **options, return_lse=True), *args, **options)


def _loss(args, options):
    out, lse = reference.varlen_attention(*args, **options, return_lse=True)
    weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return (out * weights).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def _numeric_gradient(f, x, direction, step=1e-6):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradient_is_that_of_finite_differences(options):
    case = Case("", "", RAGGED.lens_q, RAGGED.lens_k, 4, 2, 8, 6, alibi="batch", sinks="random", options=options)
    with jax.enable_x64(True):
        (q, k, v, *offsets), options = case.inputs(np.float64)
        options = {"softmax_scale": 8**-0.5} | options
        arrays = {"q": q, "k": k, "v": v} | {n: np.float64(options.pop(n)) for n in ("softmax_scale", "alibi_slopes", "sinks")}

        def loss(x):
            return _loss((x["q"], x["k"], x["v"], *offsets), options | {n: x[n] for n in x if n not in "qkv"})

        arrays = {name: jnp.nan_to_num(jnp.asarray(x)) for name, x in arrays.items()}
        value_and_grad = jax.jit(jax.value_and_grad(loss))
        gradient = value_and_grad(arrays)[1]
        for name, x in arrays.items():
            direction = jnp.asarray(np.random.default_rng(3).normal(size=x.shape))
            numeric = _numeric_gradient(lambda y, name=name: value_and_grad(arrays | {name: y})[0], x, direction)
            np.testing.assert_allclose((gradient[name] * direction).sum(), numeric, rtol=1e-6, atol=1e-8, err_msg=name)


def test_nan_of_nobody_and_of_a_neighbour_reaches_no_gradient():
    args, options = RAGGED.inputs(np.float32)
    q, k, v = (x.copy() for x in args[:3])
    cu_q, cu_k = args[3:]
    clean = [np.nan_to_num(x) for x in (q, k, v)]
    q[cu_q[1] : cu_q[2]] = k[cu_k[1] : cu_k[2]] = v[cu_k[1] : cu_k[2]] = np.nan
    gradient = jax.jit(jax.grad(lambda *x: _loss((*x, cu_q, cu_k), options), argnums=(0, 1, 2)))
    for x, y, cu in zip(gradient(q, k, v), gradient(*clean), (cu_q, cu_k, cu_k), strict=True):
        row = np.arange(len(x))
        kept = (row < cu[1]) | (row >= cu[2])
        np.testing.assert_array_equal(x[kept], y[kept])
        assert not y[: cu[0]].any() and not y[cu[-1] :].any()


def test_rows_that_see_nothing_have_zero_gradient():
    args, options = Case("", "", (3, 2), (0, 4), 2, 1, 4).inputs(np.float32)
    sinks = jnp.array([0.5, -1.0], jnp.float32)

    def loss(q, k, v, sinks):
        out, lse = reference.varlen_attention(q, k, v, *args[3:], **options, sinks=sinks, return_lse=True)
        return (out**2).sum() + lse[:, :3].sum()

    dq, _, _, dsinks = jax.grad(loss, argnums=(0, 1, 2, 3))(*args[:3], sinks)
    assert not dq[:3].any()
    assert jnp.isfinite(dq).all()
    # The first three rows have lse = sink, the other two only enter through out.
    alone = jax.grad(lambda s: loss(*args[:3], s) - 3 * s.sum())(sinks)
    np.testing.assert_allclose(dsinks - alone, 3.0, rtol=1e-6)


def test_paged_equals_contiguous():
    (q, k, v, cu_q, cu_k), _ = Case("", "", (3, 1, 4), (5, 0, 9), 4, 2, 8).inputs(np.float32)
    block_size, lens_k = 2, np.diff(cu_k)
    pool_k, pool_v = (np.full((12, block_size, *x.shape[1:]), np.nan, np.float32) for x in (k, v))
    table = np.full((3, 6), 2**30, np.int32)
    free = iter(np.random.default_rng(0).permutation(12))
    for b, n in enumerate(lens_k):
        for j in range(n):
            if j % block_size == 0:
                table[b, j // block_size] = next(free)
            block = table[b, j // block_size]
            pool_k[block, j % block_size], pool_v[block, j % block_size] = k[cu_k[b] + j], v[cu_k[b] + j]
    expected = reference.varlen_attention(q, k, v, cu_q, cu_k, causal=True)
    for lengths in ({"seqused_k": lens_k}, {"cu_seqlens_k": cu_k}, {"seqused_k": lens_k, "cu_seqlens_k": cu_k + 5}):
        actual = reference.varlen_attention(q, pool_k, pool_v, cu_q, block_table=table, causal=True, **lengths)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="block_table needs the lengths"):
        reference.varlen_attention(q, pool_k, pool_v, cu_q, block_table=table)


@pytest.mark.parametrize("block_size, lengths", [(1, "both"), (7, "seqused_k"), (16, "cu_seqlens_k")])
def test_pools(block_size, lengths):
    case = Case("", "", (3, 1, 4), (20, 0, 40), 4, 2, 8, 6, alibi="heads", sinks="random", options={"window_size": (17, 0)})
    args, options = paged(*case.inputs(np.float32), block_size, lengths=lengths)
    oracle.check_paged(reference.varlen_attention(*args, **options, return_lse=True), *args, **options)
    args, options = as_float8(args, options)
    oracle.check_paged(reference.varlen_attention(*args, **options, return_lse=True), *args, **options)


def test_scales_are_factors_of_k_and_v():
    args, options = RAGGED.inputs(np.float32)
    q, k, v, *offsets = (jnp.asarray(x) for x in args)
    scales = jnp.array([0.5, 3.0], jnp.float32)
    expected = reference.varlen_attention(q, k * scales[None, :, None], v * 2, *offsets, **options)
    actual = reference.varlen_attention(q, k, v, *offsets, **options, k_scale=scales, v_scale=2.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_vmap_and_traced_options():
    (q, k, v, cu_q, cu_k), _ = RAGGED.inputs(np.float32)
    batch = [jnp.stack([jnp.asarray(x), jnp.asarray(x) * 2]) for x in (q, k, v)]
    scales = jnp.array([0.3, 0.0], jnp.float32)
    attend = lambda q, k, v, scale: reference.varlen_attention(q, k, v, cu_q, cu_k, softmax_scale=scale)
    out = jax.vmap(attend)(*batch, scales)
    for i in range(2):
        np.testing.assert_allclose(out[i], attend(*(x[i] for x in batch), scales[i]), rtol=1e-5, atol=1e-6)


# What the kernels cannot do, and the definition can: it takes k_scale and v_scale as factors of any k and v.
KERNELS_ALONE = ("head_dim_513", "head_dim_v_513", "paged", "k_scale_packed", "v_scale_not_float8")


@pytest.mark.parametrize("name", [name for name in ERRORS if name not in KERNELS_ALONE])
def test_what_varlen_attention_refuses_is_refused(name):
    args, options = ERRORS[name][0]
    with pytest.raises((TypeError, ValueError)):
        reference.varlen_attention(*args, **options)


def test_errors():
    (q, k, v, cu_q, cu_k), _ = RAGGED.inputs(np.float32)
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 4 and 3"):
        reference.varlen_attention(q, jnp.concatenate([k, k[:, :1]], 1), v, cu_q, cu_k)
    with pytest.raises(TypeError, match="cu_seqlens must hold integers, got float32"):
        reference.varlen_attention(q, k, v, cu_q.astype(np.float32), cu_k)
    with pytest.raises(ValueError, match=r"at least 0, got \(-3, None\)"):
        reference.varlen_attention(q, k, v, cu_q, cu_k, window_size=(-3, None))
