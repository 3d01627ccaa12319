"""`context_parallel_attention` over several devices against the loop in float64; test_context_parallel runs it in a process.

`python context_parallel_devices.py 4` wants four devices. Rows of nobody hold NaN.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_bwd
from cases import Case, cotangents
from jax.sharding import PartitionSpec as P

import jax_varlen as jv

LENGTHS = (30, 0, 1, 5, 2, 0, 0, 41, 3, 17)  # no multiples of anything; many shorter than the number of devices
USED = (30, 0, 1, 2, 0, 0, 0, 33, 3, 16)
CAUSAL = {"causal": True}


def case(name, **options):
    """Tokens of nobody in front, and behind, where there are at least enough for equal shares."""
    return functools.partial(Case, name, "", LENGTHS, gap=3, **options)


# (case, dtype, method, check_vma)
CASES = (
    (case("all", num_kv_heads=1, sinks="random", options={"softcap": 2.0}), "float32", "ring", True),
    (case("causal", head_dim=24, head_dim_v=40, options=CAUSAL), "float32", "ring", False),
    (case("causal", options=CAUSAL | {"softmax_scale": -0.3}), "bfloat16", "ring", True),
    (case("window", sinks="random", alibi="heads", options={"window_size": (9, 0)}), "float32", "ring", True),
    (case("short window", sinks=0.5, options={"window_size": (1, 0)}), "float32", "ring", False),
    (case("one", options={"window_size": (0, 0)}), "float32", "all_gather", True),
    (case("short window", alibi="batch", options=CAUSAL | {"window_size": (1, None)}), "float32", "all_gather", False),
    (case("used", sinks="random", options={"seqused_q": USED, "seqused_k": USED}), "float32", "all_gather", True),
    (case("used", alibi="batch", options=CAUSAL | {"seqused_q": USED, "seqused_k": USED}), "float32", "ring", True),
    (case("causal", alibi="negative", sinks="random", options=CAUSAL | {"softcap": 3.0}), "float16", "all_gather", True),
)


def sharded(mesh, attend, check_vma=True):
    specs = (P("x"), P("x"), P("x"), P(), P(), P())
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(P("x"), P(None, "x")), check_vma=check_vma)


def check(mesh, case, dtype, method, check_vma):
    n = mesh.size
    (q, k, v, cu_seqlens), options = case.inputs(jnp.dtype(dtype))
    static = {name: options[name] for name in ("causal", "window_size", "softcap") if name in options}
    traced = {
        "softmax_scale": np.float32(options.get("softmax_scale", q.shape[2] ** -0.5)),
        "seqused": options.get("seqused_q"),
    }
    traced |= {"alibi_slopes": options.get("alibi_slopes")}
    static |= {"axis_name": "x", "method": method, "return_lse": True}

    def attend(q, k, v, sinks, traced, cu_seqlens):
        return jv.context_parallel_attention(q, k, v, cu_seqlens, sinks=sinks, **traced, **static)

    def whole(arrays, traced, cu_seqlens):
        q, k, v = (jv.stripe(arrays[name], n) for name in ("q", "k", "v"))
        out, lse = sharded(mesh, attend, check_vma)(q, k, v, arrays.get("sinks"), traced, cu_seqlens)
        return jv.unstripe(out, n), jv.unstripe(lse, n, axis=1)

    @jax.jit
    def run(arrays, traced, cu_seqlens, of_results):
        results, backward = jax.vjp(lambda arrays: whole(arrays, traced, cu_seqlens), arrays)
        return results, backward(of_results)[0]

    arrays = {"q": q, "k": k, "v": v} | ({"sinks": options["sinks"]} if "sinks" in options else {})
    dout, dlse = cotangents((q, k, v, cu_seqlens), options)
    results, grads = run(arrays, traced, cu_seqlens, (dout, dlse))
    oracle.check(results, q, k, v, cu_seqlens, **options)
    grads = {name: np.asarray(x) for name, x in grads.items()}
    oracle_bwd.check(grads, q, k, v, cu_seqlens, dout=dout, dlse=dlse, **options)


def check_gradient_inside(mesh):
    """`jax.grad` inside `shard_map` and outside of it: that of weights and sinks, which are on all devices, is a sum."""
    n = mesh.size
    rng = np.random.default_rng(0)
    x, w, sinks = (rng.normal(size=shape).astype(np.float32) for shape in ((16 * n, 8), (8, 2, 16), (2,)))
    cu_seqlens = jnp.array([0, 5, 5, 16 * n - 2])

    def loss(attend, x, w, sinks):
        qkv = jnp.einsum("td,dhe->the", x, w)
        out = attend(qkv, qkv, qkv, cu_seqlens, causal=True, sinks=sinks)
        return (out * jnp.cos(out)).sum()

    own = functools.partial(loss, functools.partial(jv.context_parallel_attention, axis_name="x"))
    expected = jax.jit(jax.grad(functools.partial(loss, jv.varlen_attention), (1, 2)))(x, w, sinks)
    options = {"mesh": mesh, "in_specs": (P("x"), P(), P()), "out_specs": P()}
    inside = jax.shard_map(jax.grad(own, (1, 2)), **options)
    summed = jax.shard_map(lambda *args: jax.lax.psum(jax.grad(own, (1, 2))(*args), "x"), **options, check_vma=False)
    outside = jax.grad(jax.shard_map(lambda *args: jax.lax.psum(own(*args), "x"), **options), (1, 2))
    for f in (jax.jit(inside), inside, jax.jit(summed), jax.jit(outside)):
        for actual, wanted in zip(f(jv.stripe(x, n), w, sinks), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def check_second_derivative(mesh):
    """Reverse mode twice, through both results, against one device."""
    n = mesh.size
    (q, k, v, cu_seqlens), _ = Case("", "", (9, 0, 12), gap=1, tail=2, head_dim=8).inputs(np.dtype("float32"))
    arrays = *(np.nan_to_num(x) for x in (q, k, v)), np.float32([0.5, -0.5, 0.0, 1.0])

    def ring(q, k, v, sinks):
        def attend(q, k, v, sinks, *_):
            return jv.context_parallel_attention(q, k, v, cu_seqlens, axis_name="x", sinks=sinks, **options)

        out, lse = sharded(mesh, attend)(*(jv.stripe(x, n) for x in (q, k, v)), sinks, None, None)
        return jv.unstripe(out, n), jv.unstripe(lse, n, axis=1)

    def second(attend):
        def loss(*arrays):
            out, lse = attend(*arrays)
            return (out * jnp.cos(out)).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()

        sines = lambda *arrays: sum(jnp.sin(x).sum() for x in jax.grad(loss, (0, 1, 2, 3))(*arrays))
        return jax.jit(jax.grad(sines, (0, 1, 2, 3)))(*arrays)

    options = {"causal": True, "return_lse": True}
    whole = lambda q, k, v, sinks: jv.varlen_attention(q, k, v, cu_seqlens, sinks=sinks, **options)
    for actual, expected in zip(second(ring), second(whole), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def check_two_axes():
    """Tokens over both axes of a mesh, and heads or batches over a third: others take no part."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 24, 2, 16))
    cu_seqlens = jnp.array([1, 9, 22])
    expected = jax.jit(functools.partial(jv.varlen_attention, causal=True))(q, k, v, cu_seqlens)
    for axes, heads, n in ((("a", "b"), None, 4), ("b", "a", 2)):
        attend = functools.partial(jv.context_parallel_attention, axis_name=axes, causal=True)
        specs = (P(axes, heads),) * 3
        f = jax.shard_map(attend, mesh=mesh, in_specs=(*specs, P()), out_specs=P(axes, heads))
        actual = jv.unstripe(jax.jit(f)(*(jv.stripe(x, n) for x in (q, k, v)), cu_seqlens), n)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def main(n):
    assert jax.device_count() == n
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tail = -(3 + sum(LENGTHS)) % n
    for make, dtype, method, check_vma in CASES:
        case = dataclasses.replace(make(), tail=tail)
        try:
            check(mesh, case, dtype, method, check_vma)
        except Exception as error:
            error.add_note(f"{case.name}, {dtype}, {method}, check_vma={check_vma}, {n} devices")
            raise
    check_gradient_inside(mesh)
    if n == 2:
        check_second_derivative(mesh)
    else:
        check_two_axes()


if __name__ == "__main__":
    main(int(sys.argv[1]))
