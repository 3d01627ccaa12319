"""How a call on sharded arrays is split among devices: over heads, as every head is attended to on its own.

Under plain `jit` XLA asks for the split when it compiles, and a device then runs the same call on its own heads. All other axes
are gathered, since a row may belong to any sequence. Where there are fewer kv heads than devices, several devices have query
heads of one kv head, and its gradient is the sum over them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def _with_tangents(heads: dict[str, int]) -> dict[str, int]:
    return heads | {name + suffix: axis for name, axis in heads.items() for suffix in ("_dot", "_dot2")}


# The axis of the heads in every operand and result that has one.
_QUERY_HEADS = _with_tangents({"q": 1, "out": 1, "dout": 1, "lse": 0, "delta": 0, "sinks": 0, "alibi_slopes": -1})
_KV_HEADS = _with_tangents({"k": -2, "v": -2, "k_cache": -2, "v_cache": -2, "k_scale": -1, "v_scale": -1})
_HEADS = _QUERY_HEADS | _KV_HEADS
_LARGE = ("q", "k_cache", "v_cache", "k", "v")  # the first of these that is sharded says how the call is split


def lower_fun(call: Callable, results: tuple[str, ...]) -> Callable:
    """The lowering rule of a primitive that is `call` of operands with `names`. `results` are the names of what it returns.

    With one device, inside `jax.shard_map` and in `jax.export` that is `call` as it stands.
    """
    whole = mlir.lower_fun(call, multiple_results=True)

    def rule(ctx, *operands, names, **options):
        mesh = _mesh(ctx)
        if mesh is None:
            return whole(ctx, *operands, names=names, **options)
        # To XLA a split is an address, which a cache of programs may leave out of its keys: an operand tells calls apart.
        text = np.frombuffer(repr((names, options)).encode(), np.uint8)
        part = lambda _, *operands: tuple(call(*operands, names=names, **options))
        split = _Split(part, mesh, ("text", *names), results).partitioned([text, *ctx.avals_in], ctx.avals_out)
        lower = mlir.lower_fun(functools.partial(split, text), multiple_results=True)
        return lower(_with_devices(ctx, mesh), *operands)

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
    """`ctx` with what `custom_partitioning` looks for: devices, and arrays whose types have no sharding."""
    module = ctx.module_context
    axis_context = dataclasses.replace(module.axis_context, device_assignment=tuple(mesh.devices.flat))
    avals_in = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    return ctx.replace(module_context=module.replace(axis_context=axis_context), avals_in=avals_in)


class _Split:
    """A call that XLA may split over the axes of a mesh."""

    def __init__(self, call: Callable, mesh: Mesh, names: tuple[str, ...], results: tuple[str, ...]):
        self.call, self.mesh, self.names, self.results = call, mesh, names, results

    def partitioned(self, operands, results) -> Callable:
        rule = _sharding_rule(zip(self.names, operands, strict=True), zip(self.results, results, strict=True))
        call = custom_partitioning(self.call)
        call.def_partition(self.partition, self.result_shardings, decode_shardings=False, sharding_rule=rule)
        return call

    def partition(self, _, operands, results):
        """What each device runs, and how results and operands must be sharded for that."""
        query, kv = self.split_heads(operands)
        self.warn_of_gathers(operands, query, kv)
        local = lambda *operands: self.local(operands, query[len(kv) :])
        of_results, of_operands = (self.shardings(*x, query, kv) for x in ((self.results, results), (self.names, operands)))
        return self.mesh, local, of_results, of_operands

    def result_shardings(self, _, operands, results):
        return self.shardings(self.results, results, *self.split_heads(operands))

    def split_heads(self, operands) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of the mesh that split the query heads, and the first of them, that split the kv heads too.

        Devices along the others share kv heads. Each must have query heads of one kv head alone.
        """
        ops = dict(zip(self.names, operands, strict=True))
        asked = next(filter(None, (self.axes(ops[name], _HEADS[name]) for name in _LARGE if name in ops)), ())
        num_kv_heads = next(ops[name].shape[-2] for name in ("k_cache", "k") if name in ops)
        query = self.dividing(asked, ops["q"].shape[1] if "q" in ops else num_kv_heads)
        kv = self.dividing(query, num_kv_heads)
        shared = num_kv_heads // self.size(kv)
        return (query if self.size(query[len(kv) :]) % shared == 0 else kv), kv

    def axes(self, x, axis: int) -> tuple[str, ...]:
        """The axes of the mesh that split `axis` of x, major first: those along which the second device has another part."""
        if x.sharding is None or not x.shape:
            return ()
        parts = x.sharding.devices_indices_map((self.mesh.size,) * len(x.shape))
        starts = np.reshape([parts[device][axis].start or 0 for device in self.mesh.devices.flat], self.mesh.devices.shape)
        second = {name: starts[tuple(int(name == other) for other in self.mesh.axis_names)] for name in self.mesh.axis_names}
        return tuple(sorted((name for name in second if second[name]), key=lambda name: -second[name]))

    def dividing(self, axes: tuple[str, ...], num_heads: int) -> tuple[str, ...]:
        """As many of the first axes as divide the heads."""
        return next(axes[:n] for n in range(len(axes), -1, -1) if num_heads % self.size(axes[:n]) == 0)

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def shardings(self, names, arrays, query, kv) -> tuple[NamedSharding, ...]:
        specs = (_spec(name, x, kv if name in _KV_HEADS else query) for name, x in zip(names, arrays, strict=True))
        return tuple(NamedSharding(self.mesh, spec) for spec in specs)

    def warn_of_gathers(self, operands, query, kv) -> None:
        def is_gathered(name, x):
            *others, heads = (self.axes(x, axis) for axis in np.roll(range(len(x.shape)), -1 - _HEADS[name]))
            return any(others) or len(heads) > len(kv if name in _KV_HEADS else query)

        gathered = [name for name, x in zip(self.names, operands, strict=True) if name in _LARGE and is_gathered(name, x)]
        if gathered:
            warnings.warn(
                f"Each device gathers {', '.join(gathered)} for a call of jax_varlen: under jit arrays stay sharded over their "
                "heads alone, and over these where they divide evenly. Shard tokens inside jax.shard_map, with a packed batch "
                "of its own on each device.",
                stacklevel=2,
            )

    def local(self, operands, sharing: tuple[str, ...]):
        """The call on one device. Those along the axes `sharing` have the same kv heads, and query heads of one of these."""
        if not sharing:
            return self.call(*operands)
        kv_heads = next(x.shape[-2] for name, x in zip(self.names, operands, strict=True) if name == "k")
        head = jax.lax.axis_index(sharing) * kv_heads // self.size(sharing)

        def take(name, x):
            return jax.lax.dynamic_slice_in_dim(x, head, 1, x.ndim + _KV_HEADS[name]) if name in _KV_HEADS else x

        def total(name, x):
            if name not in _KV_HEADS:
                return x
            axis = x.ndim + _KV_HEADS[name]
            heads = jnp.zeros((*x.shape[:axis], kv_heads, *x.shape[axis + 1 :]), x.dtype)
            return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(heads, x, head, axis), sharing)

        results = self.call(*map(take, self.names, operands))
        return tuple(map(total, self.results, results))


def _spec(name: str, x, heads) -> P:
    """Split over heads alone."""
    parts: list[Any] = [None] * len(x.shape)
    if name in _HEADS and parts:
        parts[_HEADS[name]] = heads or None
    return P(*parts)


def _sharding_rule(operands: Iterable, results: Iterable) -> str:
    """Query heads are split alike wherever they are, and so are kv heads. Other axes have nothing to do with each other."""
    others = (f"other{i}" for i in itertools.count())

    def factors(name, x):
        parts = [next(others) for _ in x.shape]
        if name in _HEADS and parts:
            parts[_HEADS[name]] = "kv" if name in _KV_HEADS else "query"
        return " ".join(parts)

    return " -> ".join(", ".join(factors(*x) for x in arrays) for arrays in (operands, results))


def check_explicit(ops: dict[str, Any]) -> None:
    """Raises ValueError where the types of the arrays say another sharding than one over heads, the same for all."""
    first = next(name for name in _LARGE if name in ops)
    first_heads = ops[first].sharding.spec[_HEADS[first]]
    for name, x in ops.items():
        spec, wanted = x.sharding.spec, _spec(name, x, first_heads)
        heads = spec[_HEADS[name]] if name in _HEADS and x.shape else None
        if spec != _spec(name, x, heads):
            raise ValueError(
                f"On a mesh with explicit axes {name} {x.shape} must be sharded over its heads or not at all, as a row may "
                f"belong to any sequence, got {spec}. Write {name} = jax.sharding.reshard({name}, {wanted}), or call it inside "
                "jax.shard_map with a packed batch of its own on each device."
            )
        if _as_tuple(heads) != _as_tuple(first_heads)[: len(_as_tuple(heads))]:
            raise ValueError(
                f"On a mesh with explicit axes the heads of {name} must be sharded as those of {first}, over {first_heads!r}, "
                f"or not at all, got {heads!r}. Write {name} = jax.sharding.reshard({name}, {wanted}), or shard {first} so too."
            )


def _as_tuple(axes) -> tuple:
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def result_aval(ops: dict[str, Any], name: str, x) -> jax.core.ShapedArray:
    """The abstract value of a result like x: on the mesh of the operands, its heads sharded as theirs."""
    like = name if name in ops else "q"
    mesh, spec = ops[like].sharding.mesh, ops[like].sharding.spec
    if mesh.empty:
        return jax.core.ShapedArray(x.shape, x.dtype)
    sharding = NamedSharding(mesh, _spec(name, x, spec[_HEADS[like]]))
    return jax.core.ShapedArray(x.shape, x.dtype, sharding=sharding, manual_axis_type=ops[like].manual_axis_type)


def sharded_as(like, x):
    """x with the sharding of `like`, where that is part of its type."""
    sharding = jax.typeof(like).sharding
    return x if jax.typeof(x).sharding.spec == sharding.spec else jax.sharding.reshard(x, sharding)
