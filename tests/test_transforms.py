"""The derivative under JAX's transformations: what is computed, how often, what is kept, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from conftest import DTYPES
from test_primitives import CHECKS, DTYPE

from jax_varlen import varlen_attention

CASE = Case("", "", (70, 0, 58), (64, 7, 57), 4, 2, 64, sinks="random", alibi="heads", options={"causal": True})
(Q, K, V, CU_Q, CU_K), OPTIONS = CASE.inputs(DTYPE)
Q, K, V = (jnp.asarray(x) for x in (Q, K, V))
SINKS, SLOPES = (jnp.asarray(OPTIONS[name]) for name in ("sinks", "alibi_slopes"))


def attend(q=Q, k=K, v=V, sinks=SINKS, slopes=SLOPES, **options):
    options = {"causal": True, "deterministic": True, "return_lse": True} | options
    return varlen_attention(q, k, v, CU_Q, CU_K, sinks=sinks, alibi_slopes=slopes, **options)


def loss(q=Q, k=K, v=V, sinks=SINKS, slopes=SLOPES, **options):
    out, lse = attend(q, k, v, sinks, slopes, **options)
    return (out.astype(jnp.float32) ** 2).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def close(actual, expected, ulps=4, dtype=None):
    """But for how XLA orders the sums around the kernel, and what it rounds to `dtype` (by default that of the results) or
    keeps in float32, which differ from program to program."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        tolerance = ulps * oracle.eps(dtype or y.dtype)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


@functools.cache
def expected():
    """The gradients of `loss` in q, k, v and sinks."""
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(Q, K, V, SINKS)


def calls(f, *args):
    """How often the forward and the backward kernel stand in the program of `f`."""
    text = str(jax.make_jaxpr(f)(*args))
    return text.count("jax_varlen_fwd["), text.count("jax_varlen_bwd[")


def test_value_and_grad_run_each_kernel_once():
    f = jax.value_and_grad(loss, (0, 1, 2, 3))
    assert calls(f, Q, K, V, SINKS) == (1, 1)
    value, gradient = jax.jit(f)(Q, K, V, SINKS)
    np.testing.assert_allclose(value, loss(), rtol=1e-5)
    close(gradient, expected())


@pytest.mark.parametrize("argnums", [0, 1, 2, 3, (1, 2), (0, 3)], ids=str)
def test_gradient_in_some_of_the_arguments(argnums):
    actual = jax.jit(jax.grad(loss, argnums))(Q, K, V, SINKS)
    close(actual, [expected()[i] for i in np.atleast_1d(argnums)])


def test_residuals_serve_twice():
    results, backward = jax.vjp(lambda *args: attend(*args), Q, K, V, SINKS)
    cotangents = jax.tree.map(jnp.ones_like, results)
    for x, y in zip(backward(cotangents), backward(cotangents), strict=True):
        np.testing.assert_array_equal(x, y)


def test_cotangents_add_up():
    """That of out alone and that of lse alone: the one that is not there is no array of zeros."""
    dout, dlse = jnp.cos(jnp.arange(Q.size, dtype=jnp.float32)).reshape(Q.shape), jnp.ones((4, 128), jnp.float32)
    of_out = lambda q, sinks: (attend(q, sinks=sinks, return_lse=False).astype(jnp.float32) * dout).sum()
    of_lse = lambda q, sinks: (attend(q, sinks=sinks)[1] * dlse).sum()
    both = lambda q, sinks: of_out(q, sinks) + of_lse(q, sinks)
    a, b, c = (jax.jit(jax.grad(f, (0, 1)))(Q, SINKS) for f in (of_out, of_lse, both))
    assert all(x.any() for x in (*a, *b))
    close([x + y for x, y in zip(a, b, strict=True)], c, ulps=8)


def test_nothing_quadratic_is_kept():
    _, backward = jax.vjp(lambda *args: attend(*args), Q, K, V, SINKS)
    kept = sum(x.size for x in jax.tree.leaves(backward))
    arrays = [Q, K, V, SINKS, SLOPES, CU_Q, CU_K, *attend()]
    assert kept <= sum(x.size for x in arrays)


KEEP = jax.checkpoint_policies.save_only_these_names("jax_varlen_out", "jax_varlen_lse")


@pytest.mark.parametrize("policy, forward_calls", [(KEEP, 1), (None, 2)], ids=["kept", "recomputed"])
def test_checkpoint(policy, forward_calls):
    """With the policy that keeps out and lse the forward kernel does not run again."""
    f = jax.grad(jax.checkpoint(lambda *args: loss(*args), policy=policy), (0, 1, 2, 3))
    assert calls(f, Q, K, V, SINKS) == (forward_calls, 1)
    close(jax.jit(f)(Q, K, V, SINKS), expected())


@pytest.mark.parametrize("policy", [None, KEEP], ids=["all", "kept"])
def test_scan_over_layers(policy):
    """Slopes are an input of each layer, and no gradient is asked of them."""
    weights = jnp.array([0.5, 1.0, 1.5], DTYPE)

    def layer(q, inputs):
        weight, slopes = inputs
        return attend(q, jnp.nan_to_num(K) * weight, slopes=slopes, return_lse=False), None

    def scanned(q, weights):
        body = layer if policy is None else jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(body, q, (weights, jnp.stack([SLOPES] * 3)))[0].astype(jnp.float32).sum()

    def looped(q, weights):
        return functools.reduce(lambda q, w: layer(q, (w, SLOPES))[0], weights, q).astype(jnp.float32).sum()

    actual, wanted = (jax.jit(jax.grad(f, (0, 1)))(Q, weights) for f in (scanned, looped))
    close(actual, wanted, ulps=16)


def test_donated_arguments():
    def step(arrays):
        gradient = jax.grad(lambda arrays: loss(*arrays))(arrays)
        return [x - g for x, g in zip(arrays, gradient, strict=True)]

    wanted = jax.jit(step)([Q, K, V, SINKS])
    close(jax.jit(step, donate_argnums=0)([jnp.array(x) for x in (Q, K, V, SINKS)]), wanted)


def test_one_trace_for_many_offsets():
    traces = 0

    @jax.jit
    def gradient(q, cu_seqlens):
        nonlocal traces
        traces += 1
        return jax.grad(lambda q: varlen_attention(q, q, q, cu_seqlens).astype(jnp.float32).sum())(q)

    for offsets in ([0, 30, 60, 100], [0, 0, 0, 100], [0, 1, 2, 3], [50, 60, 60, 61]):
        actual = np.asarray(gradient(Q, np.array(offsets)))
        assert actual.any() and not actual[: offsets[0]].any() and not actual[offsets[-1] :].any()
    assert traces == 1


REFUSED = {
    "alibi_slopes": (lambda x: loss(slopes=x), SLOPES, r"alibi_slopes has no gradient. .*jax.lax.stop_gradient\(slopes\)"),
    "softmax_scale": (lambda x: loss(softmax_scale=x), jnp.float32(0.1), "softmax_scale has no gradient. Put a learnt scale"),
}


@pytest.mark.parametrize("f, x, text", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_gradient_that_does_not_exist_is_refused(f, x, text, wrap):
    with pytest.raises(NotImplementedError, match=text):
        jax.grad(wrap(f))(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_constants_are_not_refused(wrap):
    f = wrap(lambda q, slopes, scale: loss(q, slopes=slopes, softmax_scale=scale))
    assert jnp.isfinite(jax.grad(f)(Q, SLOPES, jnp.float32(0.1)).astype(jnp.float32)).all()
    assert not jax.grad(lambda slopes: f(Q, jax.lax.stop_gradient(slopes), jnp.float32(0.1)))(SLOPES).any()


WRONG = {
    "rank": lambda q: varlen_attention(q[None], K, V, CU_Q, CU_K),
    "dtype": lambda q: varlen_attention(q, K.astype(jnp.float8_e5m2), V, CU_Q, CU_K),
    "offsets": lambda q: varlen_attention(q, K, V, CU_Q.astype(np.float32), CU_K),
    "heads": lambda q: varlen_attention(q[:, :3], K, V, CU_Q, CU_K),
    "slopes": lambda q: varlen_attention(q, K, V, CU_Q, CU_K, alibi_slopes=SLOPES[:3]),
    "paged": lambda q: varlen_attention(
        q, K[None], V[None], CU_Q, seqused_k=np.ones(3, np.int32), block_table=np.ones((3, 1), np.int32)
    ),
}


@pytest.mark.parametrize("f", WRONG.values(), ids=WRONG)
def test_a_wrong_call_reads_the_same_under_grad(f):
    with pytest.raises(Exception) as error:
        f(Q)
    assert error.type in (ValueError, TypeError, NotImplementedError)
    for gradient in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(error.type, match=re.escape(str(error.value))):
            gradient(lambda q: f(q).astype(jnp.float32).sum())(Q)


def test_no_gradient_is_asked_of_what_is_stopped():
    gradient = jax.grad(lambda x: x * jax.lax.stop_gradient(loss()))(1.0)
    np.testing.assert_allclose(gradient, loss(), rtol=1e-5)


def _export(platform, dtype, head_dim=64, **options):
    (q, k, v, *offsets), _ = Case("", "", (40, 3), (50, 9), head_dim=head_dim).inputs(jnp.dtype(dtype))
    f = jax.jit(jax.grad(lambda q, k, v: varlen_attention(q, k, v, *offsets, **options).astype(jnp.float32).sum(), (0, 1, 2)))
    return jax.export.export(f, platforms=(platform,), disabled_checks=CHECKS)(q, k, v).mlir_module()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("platform, dtype", [("cuda", "bfloat16"), ("cuda", "float16"), ("cpu", "float32")])
def test_lowers_to_one_call_of_the_kernel(platform, dtype, deterministic):
    module = _export(platform, dtype, deterministic=deterministic)
    assert len(re.findall(r"custom_call @jax_varlen_bwd_v1", module)) == 1
    assert "stablehlo.while" not in module


@pytest.mark.parametrize("platform, head_dim", [("cuda", 320), ("tpu", 64), ("rocm", 64)])
def test_lowers_to_the_tiles_in_jax_where_there_is_no_kernel(platform, head_dim):
    module = _export(platform, "bfloat16", head_dim)
    assert "jax_varlen_bwd_v1" not in module
    assert "stablehlo.while" in module


def test_dtypes_of_gradients():
    """A gradient has the dtype of its argument, sinks of a lower precision included."""
    for name in DTYPES:
        q, k, v, sinks = (jnp.nan_to_num(x).astype(name) for x in (Q, K, V, SINKS))
        gradient = jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks)
        assert [x.dtype for x in gradient] == [jnp.dtype(name)] * 4
