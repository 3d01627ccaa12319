"""Forward mode, and second derivatives in every order of the two modes, against differences of the oracle in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_bwd
import pytest
from cases import SELECTED, Case, cotangents
from conftest import DTYPES
from test_primitives import DTYPE
from test_transforms import CU_K, CU_Q, SLOPES, K, Q, V, close, loss

from jax_varlen import reference, varlen_attention

# Differences in float64 say little where logits are 1e4 and more.
EXTREME = ("far_below_zero", "masked_key_far_above", "softcap_saturated")
CASES = [case for case in SELECTED if case.name not in EXTREME]
HESSIANS = ("no_k_sinks", "no_sequence", "rows_without_keys", "sink_alone", "gap_and_tail", "causal_short_k", "everything")
OTHER_ORDERS = ("no_sequence", "rows_without_keys", "everything")
EVERYTHING = next(case for case in CASES if case.name == "everything")
STEP = 1e-4
OFFSETS, ONES = (CU_Q, CU_K), np.ones(3, np.int32)


class Problem:
    """A case with tangents and cotangents, NaN where the rows are nobody's, as a function of q, k, v and sinks by name."""

    def __init__(self, case: Case, dtype):
        (q, k, v, *offsets), options = case.inputs(dtype)
        self.arrays = {"q": q, "k": k, "v": v} | ({"sinks": options.pop("sinks")} if "sinks" in options else {})
        self.offsets, self.options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False)), options
        rng = np.random.default_rng(5)
        self.tangents = {
            name: np.where(np.isnan(x), np.nan, rng.normal(size=x.shape)).astype(x.dtype) for name, x in self.arrays.items()
        }
        self.cotangents = cotangents((q, k, v, *offsets), options)

    def attend(self, arrays):
        return varlen_attention(**arrays, **self.offsets, **self.options, return_lse=True)

    def derivative(self, f):
        """Of `f(q=, k=, v=, sinks=, options)` along the tangents; 0 where both ends are -inf."""

        def at(step):
            moved = jax.tree.map(lambda x, t: np.float64(x) + step * np.float64(t), self.arrays, self.tangents)
            return f(**moved, **self.offsets, **self.options)

        def slope(x, y):
            with np.errstate(invalid="ignore"):
                return np.where(np.isneginf(x), 0, (x - y) / (2 * STEP))

        return jax.tree.map(slope, at(STEP), at(-STEP))


def check(name, actual, expected, dtype):
    """Free are four units in the last place of the largest result, and 32 of float32 for the order of the sums."""
    actual = np.asarray(actual).astype(np.float64)
    assert np.isfinite(actual).all(), name
    tolerance = (4 * oracle.eps(dtype) + 32 * oracle.eps(np.float32)) * max(oracle._largest(expected), 1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=name)


def push(problem):
    return lambda arrays: jax.jvp(problem.attend, (arrays,), (problem.tangents,))[1]


def gradient(problem):
    return lambda arrays: jax.vjp(problem.attend, arrays)[1](problem.cotangents)[0]


SECOND = {
    "forward_over_reverse": lambda p: jax.jvp(gradient(p), (p.arrays,), (p.tangents,))[1],
    "reverse_over_reverse": lambda p: jax.vjp(gradient(p), p.arrays)[1](p.tangents)[0],
    "reverse_over_forward": lambda p: jax.vjp(push(p), p.arrays)[1](p.cotangents)[0],
}


@pytest.mark.parametrize(
    "case, dtype", [(case, DTYPES[0]) for case in CASES] + [(EVERYTHING, name) for name in DTYPES[1:]], ids=str
)
def test_forward_mode(case, dtype):
    problem = Problem(case, jnp.dtype(dtype))
    expected = problem.derivative(oracle.attention)
    for name, x, y in zip(("out", "lse"), jax.jit(push(problem))(problem.arrays), expected, strict=True):
        check(name, x, y, jnp.dtype(dtype))


@pytest.mark.parametrize(
    "case, order",
    [
        *((case, "forward_over_reverse") for case in CASES if case.name in HESSIANS),
        *((case, order) for case in CASES if case.name in OTHER_ORDERS for order in list(SECOND)[1:]),
    ],
    ids=str,
)
def test_hessian_vector_products(case, order):
    """The Hessian of a function that is linear in out and lse, which is symmetric: all orders give the same."""
    problem = Problem(case, DTYPE)
    dout, dlse = problem.cotangents
    expected = problem.derivative(lambda *args, **options: oracle_bwd.gradients(*args, **options, dout=dout, dlse=dlse).values)
    actual = jax.jit(lambda: SECOND[order](problem))()
    for name, y in expected.items():
        check(name, actual[name], y, DTYPE)


def test_forward_over_forward():
    """In the direction t of the inputs and y of the results it is t . Hessian t, of the function that is linear in y."""
    problem = Problem(EVERYTHING, DTYPE)
    second = jax.jit(lambda: jax.jvp(push(problem), (problem.arrays,), (problem.tangents,))[1])()
    hessian = jax.jit(lambda: SECOND["forward_over_reverse"](problem))()
    dot = lambda x, y: np.nansum(np.float64(x) * np.float64(y))
    actual = sum(map(dot, second, problem.cotangents))
    expected = sum(dot(x, hessian[name]) for name, x in problem.tangents.items())
    np.testing.assert_allclose(actual, expected, rtol=64 * oracle.eps(DTYPE))


def test_a_third_derivative_is_refused():
    gradient = lambda f: lambda q: jax.grad(f)(q).astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match=r"can be differentiated twice. jax_varlen.reference.varlen_attention has"):
        jax.eval_shape(gradient(gradient(gradient(loss))), Q)


def test_linearize():
    """One run of the forward kernel, and any number of tangents; nothing quadratic is kept."""
    f = lambda q, k, v: varlen_attention(q, k, v, *OFFSETS, causal=True, return_lse=True)
    results, push = jax.linearize(f, Q, K, V)
    tangents = [(Q, K, V), (jnp.cos(Q), jnp.sin(K), jnp.cos(V))]
    for primal, x in zip(results, f(Q, K, V), strict=True):
        np.testing.assert_array_equal(primal, x)
    for t in tangents:
        close(push(*t), jax.jvp(f, (Q, K, V), t)[1])
    kept = sum(x.size for x in jax.tree.leaves(push))
    assert kept <= sum(x.size for x in (Q, K, V, *OFFSETS, *results))


def test_the_kernels_that_each_mode_runs():
    """Reverse mode has nothing but the two kernels; forward mode keeps the forward kernel."""
    names = ("fwd", "bwd", "tangent", "tangent2", "hessian")

    def counts(f):
        text = str(jax.make_jaxpr(f)(Q, K, V))
        return {name: n for name in names if (n := text.count(f"jax_varlen_{name}["))}

    gradient = jax.grad(loss, (0, 1, 2))
    pushed = lambda f: lambda *args: jax.jvp(f, args, args)[1]
    assert counts(gradient) == {"fwd": 1, "bwd": 1}
    assert counts(pushed(loss)) == {"fwd": 1, "tangent": 1}
    assert counts(pushed(gradient)) == {"fwd": 1, "tangent": 1, "bwd": 2, "hessian": 1}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_wrapped(wrap):
    close(jax.jvp(wrap(loss), (Q,), (Q,)), jax.jvp(loss, (Q,), (Q,)), ulps=16, dtype=DTYPE)
    hvp = lambda f: jax.jit(lambda q: jax.jvp(jax.grad(f), (q,), (q,))[1])
    close(hvp(wrap(loss))(Q), hvp(loss)(Q), ulps=16)


def test_scan_over_layers():
    def layers(q):
        layer = lambda q, _: (varlen_attention(q, K, V, *OFFSETS, causal=True), None)
        return jax.lax.scan(layer, q, length=2)[0].astype(jnp.float32).sum()

    def looped(q):
        for _ in range(2):
            q = varlen_attention(q, K, V, *OFFSETS, causal=True)
        return q.astype(jnp.float32).sum()

    for transform in (lambda f: lambda q: jax.jvp(f, (q,), (q,)), lambda f: lambda q: jax.jvp(jax.grad(f), (q,), (q,))[1]):
        close(jax.jit(transform(layers))(Q), jax.jit(transform(looped))(Q), ulps=16, dtype=DTYPE)


def test_vmap():
    """The examples are one packed batch here too: bits may differ by how XLA orders the sums around the kernels."""
    qs = jnp.stack([Q, -Q])
    for f in (lambda q: jax.jvp(loss, (q,), (q,)), lambda q: jax.jvp(jax.grad(loss), (q,), (q,))[1]):
        program = jax.jit(f)
        expected = jax.tree.map(lambda *x: jnp.stack(x), *(program(q) for q in qs))
        close(jax.jit(jax.vmap(f))(qs), expected, ulps=32)


def test_jacobians():
    """`jax.jacfwd` is one call for all columns, by vmap, and `jax.hessian` of both modes: a small call, against reference."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(5, 2, 3)), DTYPE) for _ in range(3))
    sinks, cu = jnp.array([0.5, -0.5]), np.array([0, 2, 5])

    def f(attend):
        return lambda *args: attend(*args[:3], cu, causal=True, sinks=args[3], return_lse=True)

    def of_sum(attend):
        return lambda *args: sum(jnp.sin(x.astype(jnp.float32)).sum() for x in f(attend)(*args))

    args = tuple(x.astype(jnp.float32) for x in (q, k, v, sinks))
    for transform, g in ((jax.jacfwd, f), (jax.jacrev, f), (jax.hessian, of_sum)):
        with jax.numpy_dtype_promotion("standard"):  # JAX makes one basis for arguments of all dtypes
            expected = jax.jit(transform(g(reference.varlen_attention), (0, 1, 2, 3)))(*args)
            actual = jax.jit(transform(g(varlen_attention), (0, 1, 2, 3)))(q, k, v, sinks)
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            check(transform.__name__, x, np.asarray(y, np.float64), DTYPE)


REFUSED = {
    "alibi_slopes": (lambda x: loss(slopes=x), SLOPES, r"alibi_slopes has no gradient"),
    "softmax_scale": (lambda x: loss(softmax_scale=x), jnp.float32(0.1), "softmax_scale has no gradient. Put a learnt scale"),
    "block_table": (
        lambda q: varlen_attention(q, K[None], V[None], CU_Q, seqused_k=ONES, block_table=ONES[:, None] - 1),
        Q,
        "With block_table varlen_attention has no gradient",
    ),
}


@pytest.mark.parametrize("f, x, text", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_tangent_that_does_not_exist_is_refused(f, x, text, wrap):
    with pytest.raises(NotImplementedError, match=text):
        jax.jvp(wrap(f), (x,), (x,))
    with pytest.raises(NotImplementedError, match=text):
        jax.jit(lambda x: jax.jvp(wrap(f), (x,), (x,)))(x)


def test_slopes_have_no_second_derivative_either():
    with pytest.raises(NotImplementedError, match="alibi_slopes has no gradient"):
        jax.grad(lambda slopes: jax.grad(loss)(Q, slopes=slopes).astype(jnp.float32).sum())(SLOPES)
