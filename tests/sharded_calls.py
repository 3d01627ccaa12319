"""Calls on sharded arrays against the same on one device; run by test_sharding in a process with eight CPU devices."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pools import as_float8, paged

from jax_varlen import append_kv, varlen_attention

COLLECTIVE = re.compile(r" = .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[\w-]*\(")
BY_HEADS = {
    "q": P(None, "x", None),
    "k": P(None, "x", None),
    "v": P(None, "x", None),
    "sinks": P("x"),
    "alibi_slopes": P(None, "x"),
    "k_scale": P("x"),
    "v_scale": P("x"),
}
BY_HEADS_PAGED = BY_HEADS | {"k": P(None, None, "x", None), "v": P(None, None, "x", None)}


def mesh(*sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes))


def inputs(num_heads=8, num_kv_heads=4, is_paged=False, float8=False):
    case = Case(
        "", "", (30, 0, 34), (50, 7, 7), num_heads, num_kv_heads, 16, 24, options={"causal": True}, alibi="batch", sinks="random"
    )
    args, options = case.inputs(np.float32)
    if is_paged:
        args, options = paged(args, options, 8)
    if float8:
        args, options = as_float8(args, options)
    arrays = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), args, strict=False))
    return arrays | {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}, options


def put(arrays, mesh, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}


def attend(options):
    return lambda arrays: varlen_attention(**arrays, **options, return_lse=True)


def gradient(options, names=("q", "k", "v", "sinks")):
    def loss(wanted, arrays):
        out, lse = varlen_attention(**arrays, **wanted, **options, return_lse=True)
        return (out * jnp.cos(out)).sum() + jnp.where(lse == -jnp.inf, 0, jnp.sin(lse)).sum()

    def run(arrays):
        wanted = {name: arrays[name] for name in names if name in arrays}
        return jax.grad(loss)(wanted, {name: x for name, x in arrays.items() if name not in wanted})

    return run


def collectives(call, *args):
    return COLLECTIVE.findall(jax.jit(call).lower(*args).compile().as_text())


def check(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(np.where(np.isfinite(y), y, 0)).max())


@pytest.mark.parametrize("replicated", [(), ("sinks", "alibi_slopes")])
@pytest.mark.parametrize("derive", [attend, gradient])
def test_heads(derive, replicated):
    arrays, options = inputs()
    specs = {name: spec for name, spec in BY_HEADS.items() if name not in replicated}
    sharded = put(arrays, mesh(4), specs)
    check(jax.jit(derive(options))(sharded), derive(options)(arrays))
    print(collectives(derive(options), sharded))
    print([x.sharding for x in jax.tree.leaves(jax.jit(derive(options))(sharded))])

@pytest.mark.parametrize("float8", [False, True])
def test_paged(float8):
    arrays, options = inputs(is_paged=True, float8=float8)
    sharded = put(arrays, mesh(4), BY_HEADS_PAGED)
    check(jax.jit(attend(options))(sharded), attend(options)(arrays))
    print(collectives(attend(options), sharded))


@pytest.mark.parametrize("derive", [attend, gradient])
@pytest.mark.parametrize("num_heads, num_kv_heads, devices", [(8, 1, 8), (8, 2, 8), (8, 2, 4), (12, 3, 6), (12, 4, 6), (6, 3, 4), (12,3,4)])
def test_few_kv(num_heads, num_kv_heads, devices, derive):
    arrays, options = inputs(num_heads, num_kv_heads)
    sharded = put(arrays, mesh(devices), {n: s for n, s in BY_HEADS.items() if n in ("q", "sinks") and num_heads % devices == 0})
    check(jax.jit(derive(options))(sharded), derive(options)(arrays))
    print(num_heads, num_kv_heads, devices, collectives(derive(options), sharded))
