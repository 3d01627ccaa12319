"""How a call on sharded arrays is split among devices: over heads, as every head is attended to on its own.

Under plain `jit` XLA asks for the split when it compiles, and a device then runs the same call on its own heads. All other axes
are gathered, since a row may belong to any sequence. Where there are fewer kv heads than devices, several devices have query
heads of one kv head, and its gradient is the sum over them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The axis of the heads of every operand and result that has one.
_QUERY_HEADS = {"q": 1, "out": 1, "dout": 1, "lse": 0, "delta": 0, "sinks": 0, "alibi_slopes": -1}
_KV_HEADS = {"k": -2, "v": -2, "k_cache": -2, "v_cache": -2, "k_scale": -1, "v_scale": -1}
_HEADS = _QUERY_HEADS | _KV_HEADS
_LARGE = ("q", "k", "v", "k_cache", "v_cache")


def lower_fun(call: Callable, results: tuple[str, ...]) -> Callable:
    """The lowering rule of a primitive that is `call` of operands with `names`. `results` are the names of what it returns.

    With one device, in `jax.shard_map` and in `jax.export` that is `call` as it stands.
    """
    whole = mlir.lower_fun(call, multiple_results=True)

    def rule(ctx, *operands, names, **options):
        mesh = _mesh(ctx)
        if mesh is None:
            return whole(ctx, *operands, names=names, **options)
        split = _Split(lambda *operands: tuple(call(*operands, names=names, **options)), mesh, names, results)
        return mlir.lower_fun(split.primitive(ctx), multiple_results=True)(_with_devices(ctx, mesh), *operands)

    return rule


def _mesh(ctx) -> Mesh | None:
    """The devices of a program whose shardings XLA finds, with an axis for each prime factor of each axis of their mesh.

    Prime, since XLA splits 2 heads over half of an axis of 4. Which devices these are plays no part: a split speaks of places.
    """
    module = ctx.module_context
    size = getattr(module.axis_context, "num_devices", 1)
    if size == 1 or module.backend is None or module.lowering_parameters.for_export:
        return None
    meshes = (x.sharding.mesh for x in ctx.avals_in)
    axis_sizes = next((mesh.axis_sizes for mesh in meshes if mesh.size == size), (size,))
    primes = [prime for n in axis_sizes for prime in _primes(n)]
    devices = np.array(module.backend.devices()[:size]).reshape(primes)
    return Mesh(devices, [f"axis{i}" for i in range(len(primes))], axis_types=(AxisType.Auto,) * len(primes))


def _primes(n: int) -> list[int]:
    if n == 1:
        return []
    prime = next(i for i in range(2, n + 1) if n % i == 0)
    return [prime, *_primes(n // prime)]


def _with_devices(ctx, mesh: Mesh):
    """`custom_partitioning` wants devices in the context, where JAX gives them to its own primitives alone."""
    module = ctx.module_context
    axis_context = dataclasses.replace(module.axis_context, device_assignment=tuple(mesh.devices.flat))
    avals_in = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    return ctx.replace(module_context=module.replace(axis_context=axis_context), avals_in=avals_in)


class _Split:
    """A call that XLA may split over the axes of a mesh."""

    def __init__(self, call: Callable, mesh: Mesh, names: tuple[str, ...], results: tuple[str, ...]):
        self.call, self.mesh, self.names, self.results = call, mesh, names, results

    def primitive(self, ctx) -> Callable:
        split = custom_partitioning(self.call)
        operands, results = zip(self.names, ctx.avals_in, strict=True), zip(self.results, ctx.avals_out, strict=True)
        rule = _sharding_rule(operands, results)
        split.def_partition(self.partition, self.infer_results, decode_shardings=False, sharding_rule=rule)
        return split

    def partition(self, _, operands, outputs):
        """What a device runs, and how its results and operands must be sharded."""
        ops = dict(zip(self.names, operands, strict=True))
        query, kv = self.axes(ops)
        _warn_of_gathers({name: self.gathered(x, name, query) for name, x in ops.items() if name in _LARGE})
        local = lambda *operands: self.local(query[len(kv) :], operands)
        return (
            self.mesh,
            local,
            self.shardings(self.results, outputs, query, kv),
            self.shardings(self.names, operands, query, kv),
        )

    def infer_results(self, _, operands, outputs):
        return self.shardings(self.results, outputs, *self.axes(dict(zip(self.names, operands, strict=True))))

    def axes(self, ops) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of the mesh that split query heads, as q is split or else k or v, and the first of them: these split kv heads.

        The other axes are devices that share kv heads. Each must have query heads of one kv head alone.
        """
        asked = next(filter(None, (self.axes_of(ops[name], _HEADS[name]) for name in _LARGE if name in ops)), ())
        num_kv_heads = next(ops[name].shape[-2] for name in ("k", "k_cache") if name in ops)
        num_heads = ops["q"].shape[1] if "q" in ops else num_kv_heads
        query = self.divisors(asked, num_heads)
        kv = self.divisors(query, num_kv_heads)
        shared = num_kv_heads // self.size(kv)
        return (query if self.size(query[len(kv) :]) % shared == 0 else kv), kv

    def axes_of(self, x, axis: int) -> tuple[str, ...]:
        """The axes of the mesh that split `axis` of x, major first: where the part of the second device along each begins."""
        if x.sharding is None or not x.shape:
            return ()
        parts = x.sharding.devices_indices_map((self.mesh.size,) * len(x.shape))
        starts = np.array([parts[device][axis].start or 0 for device in self.mesh.devices.flat]).reshape(
            self.mesh.devices.shape
        )
        strides = {name: starts[tuple(int(name == other) for other in self.mesh.axis_names)] for name in self.mesh.axis_names}
        return tuple(sorted(filter(strides.get, strides), key=strides.__getitem__, reverse=True))

    def divisors(self, axes: tuple[str, ...], heads: int) -> tuple[str, ...]:
        """As many of the first axes as divide the heads."""
        return max((axes[:n] for n in range(len(axes) + 1) if heads % self.size(axes[:n]) == 0), key=len)

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def gathered(self, x, name: str, query: tuple[str, ...]) -> bool:
        """Whether x is split over other axes than its heads, or these over more devices than the query heads can be."""
        axes = [self.axes_of(x, axis) for axis in range(len(x.shape))]
        heads = axes.pop(_HEADS[name])
        return any(axes) or len(heads) > len(query)

    def shardings(self, names, arrays, query, kv) -> tuple[NamedSharding, ...]:
        axes = {name: kv if name in _KV_HEADS else query for name in _HEADS}
        specs = (_spec(name, len(x.shape), axes.get(name)) for name, x in zip(names, arrays, strict=True))
        return tuple(NamedSharding(self.mesh, spec) for spec in specs)

    def local(self, sharing: tuple[str, ...], operands):
        """The call on one device. Devices along the axes `sharing` have the same kv heads and different query heads."""
        if not sharing:
            return self.call(*operands)
        ops = dict(zip(self.names, operands, strict=True))
        kv_heads = ops["k"].shape[-2]
        mine = jax.lax.axis_index(sharing) * kv_heads // self.size(sharing)
        own = lambda name, x: jax.lax.dynamic_slice_in_dim(x, mine, 1, x.ndim + _KV_HEADS[name]) if name in _KV_HEADS else x
        results = self.call(*(own(name, x) for name, x in ops.items()))

        def total(name, x):
            if name not in _KV_HEADS:
                return x
            axis = x.ndim + _KV_HEADS[name]
            zeros = jnp.zeros((*x.shape[:axis], kv_heads, *x.shape[axis + 1 :]), x.dtype)
            return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, x, mine, axis), sharing)

        return tuple(total(name, x) for name, x in zip(self.results, results, strict=True))


def _spec(name: str, ndim: int, heads) -> P:
    """Split over heads alone."""
    parts: list[Any] = [None] * ndim
    if name in _HEADS and ndim:
        parts[_HEADS[name]] = heads or None
    return P(*parts)


def _sharding_rule(operands, results) -> str:
    """Query heads are split alike wherever they are, and so are kv heads. No other axes have to do with each other."""
    others = (f"other{i}" for i in itertools.count())

    def factors(name, x):
        parts = [next(others) for _ in x.shape]
        if name in _HEADS and parts:
            parts[_HEADS[name]] = "kv" if name in _KV_HEADS else "query"
        return " ".join(parts)

    return " -> ".join(", ".join(factors(*x) for x in arrays) for arrays in (operands, results))


def _warn_of_gathers(gathered: dict[str, bool]) -> None:
    names = ", ".join(name for name, is_gathered in gathered.items() if is_gathered)
    if names:
        warnings.warn(
            f"Every device gathers {names} for a call of jax_varlen, as under jit such a call is split over heads alone, by a "
            "divisor of their number. Shard heads, or call it inside jax.shard_map with a packed batch of its own on each device.",
            stacklevel=2,
        )


def check_explicit(ops: dict[str, Any]) -> None:
    """Raises ValueError where arrays on a mesh of explicit axes are sharded over more than their heads, or these differently."""
    heads = next((x.sharding.spec[_HEADS[name]] for name, x in ops.items() if name in _LARGE), None)
    for name, x in ops.items():
        expected = _spec(name, x.ndim, heads)
        if x.sharding.spec not in (expected, P(*[None] * x.ndim)):
            raise ValueError(
                f"On a mesh of explicit axes {name} must be sharded as its heads are in {next(iter(ops))}, {expected}, or not at "
                f"all, got {x.sharding.spec}. Write {name} = jax.sharding.reshard({name}, jax.P(...)), or call it inside jax.shard_map."
            )


def like(ops: dict[str, Any], name: str, shape: tuple[int, ...], dtype) -> jax.core.ShapedArray:
    """The abstract value of a result: on the mesh of the operands, with their manual axes, its heads sharded as theirs."""
    x = ops.get(name, ops["q"])
    if x.sharding.mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    heads = x.sharding.spec[_HEADS[name if name in ops else "q"]]
    sharding = NamedSharding(x.sharding.mesh, _spec(name, len(shape), heads))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=x.manual_axis_type)
