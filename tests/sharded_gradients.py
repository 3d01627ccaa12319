"""Gradients inside `jax.shard_map` over two devices against those of one; run by test_transforms in a process of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from jax.sharding import PartitionSpec as P

from jax_varlen import varlen_attention

CASE = Case("", "", (30, 0, 34), (50, 7, 7), 4, 1, 16, sinks="random", alibi="heads", options={"causal": True})


def by_heads(q, k, v, sinks, slopes, *offsets):
    """Query heads are split; the one kv head is on both devices."""
    out, lse = varlen_attention(q, k, v, *offsets, causal=True, sinks=sinks, alibi_slopes=slopes, return_lse=True)
    return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum()


def split_by_heads(loss, check_vma):
    specs = (P(None, "x", None), P(), P(), P("x"), P("x"), P(), P())
    total = lambda *args: jax.lax.psum(loss(*args), "x")
    return jax.shard_map(total, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)


def by_data(x, w, cu_seqlens):
    """Each device has a packed batch of its own; the weights are on both."""
    qkv = jnp.einsum("td,dhe->the", x[0], w)
    out = varlen_attention(qkv, qkv, qkv, cu_seqlens[0], causal=True)
    return (out * jnp.cos(out)).sum()


def split_by_data(check_vma):
    total = lambda *args: jax.lax.psum(by_data(*args), "x")
    specs = (P("x", None, None), P(), P("x", None))
    return jax.shard_map(total, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)


def gradient_inside():
    """`jax.grad` inside `shard_map`: the gradient of weights that are on all devices is summed over them."""
    specs = (P("x", None, None), P(), P("x", None))
    return jax.shard_map(jax.grad(by_data, 1), mesh=MESH, in_specs=specs, out_specs=P())


def hessian_vector(loss):
    """Forward mode over reverse mode, in q, k, v and sinks."""
    return lambda *args: jax.jvp(jax.grad(lambda *x: loss(*x, *args[4:]), (0, 1, 2, 3)), args[:4], args[:4])


def reverse_twice(loss):
    def of_gradient(*args):
        return sum(jnp.sin(x).sum() for x in jax.grad(loss, (0, 1, 2, 3))(*args))

    return jax.grad(of_gradient, (0, 1, 2, 3))


def check(name, actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max(), err_msg=name)


if __name__ == "__main__":
    assert jax.device_count() == 2
    MESH = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    (q, k, v, *offsets), options = CASE.inputs(np.float32)
    args = (q, k, v, options["sinks"], options["alibi_slopes"], *offsets)
    expected = jax.jit(jax.grad(by_heads, (0, 1, 2, 3)))(*args)
    for check_vma in (True, False):
        actual = jax.jit(jax.grad(split_by_heads(by_heads, check_vma), (0, 1, 2, 3)))(*args)
        check(f"heads, check_vma={check_vma}", actual, expected)
    for second in (hessian_vector, reverse_twice):
        actual = jax.jit(second(split_by_heads(by_heads, True)))(*args)
        check(f"heads, {second.__name__}", actual, jax.jit(second(by_heads))(*args))

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 40, 8)).astype(np.float32), rng.normal(size=(8, 2, 16)).astype(np.float32)
    cu_seqlens = np.array([[0, 10, 40], [0, 25, 30]], np.int32)
    loss = lambda x, w: sum(by_data(x[i : i + 1], w, cu_seqlens[i : i + 1]) for i in range(2))
    expected = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    for check_vma in (True, False):
        actual = jax.jit(jax.grad(split_by_data(check_vma), (0, 1)))(x, w, cu_seqlens)
        check(f"data, check_vma={check_vma}", actual, expected)
    check("inside", jax.jit(gradient_inside())(x, w, cu_seqlens), expected[1])
