"""One packed batch whose tokens are shared out among devices: every device attends with its queries to the keys of all.

Tokens are dealt out like cards: token i of the batch is row i // n of device i % n. So every device has its part of every
sequence, early and late tokens alike, and under a causal mask all devices have the same work. The rows of a sequence on one
device are again a packed sequence, and the part of a mask that lies between the queries of one device and the keys of another
is again a causal mask, bottom-right aligned once the keys that no query sees are left off.

In step t a device meets the keys of the device t places before it. The keys travel along the ring, or come all at once. The
states of the steps merge; each step of the backward pass takes the merged lse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from . import derivatives, primitives, shapes, values
from .merge import merge_attention
from .packing import segment_ids


def context_parallel_attention(
    q,
    k,
    v,
    cu_seqlens,
    *,
    axis_name,
    seqused=None,
    softmax_scale=None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    alibi_slopes=None,
    sinks=None,
    deterministic: bool = False,
    return_lse: bool = False,
    method: str = "ring",
) -> Any:
    r"""Self-attention of a packed batch whose tokens are shared out among the devices of a mesh axis, for `jax.shard_map`.

    On every device the rows of `varlen_attention` over the whole batch that belong to its queries: token $i$ of `total` is row
    $\lfloor i / n \rfloor$ of device $i \bmod n$, for $n$ devices. `stripe` puts the tokens of an array in that order, so that
    equal slices of it are the devices' own, and `unstripe` takes it back.

    **Arguments:**

    - `q`, `k`, `v`: `(total // n, num_heads, head_dim)`, `(total // n, num_kv_heads, head_dim)` and `(total // n, num_kv_heads,
        head_dim_v)`, the device's own tokens.
    - `cu_seqlens`: integers `(batch + 1,)`, the same on all devices: the offsets of the sequences in the whole batch, in the
        order before `stripe`. Lengths need not be multiples of n. Other tokens belong to nobody.
    - `axis_name`: the mesh axis, or a tuple of them, that the tokens are shared out over.
    - `seqused`: integers `(batch,)`, the same on all devices; only the first `seqused[b]` tokens of a sequence count.
    - `softmax_scale`, `softcap`, `sinks`, `deterministic`, `return_lse`: as in `varlen_attention`. `sinks` are the same on all
        devices.
    - `causal`: a query sees no later key.
    - `window_size`: `(left, right)` in tokens of the whole batch, as in `varlen_attention`; with a bound, the right one must be
        0, which `causal` makes it.
    - `alibi_slopes`: float32 `(num_heads,)` or `(batch, num_heads)`, with `causal` alone.
    - `method`: "ring": keys and values go from device to device while the device attends to those it has; beside its own it
        holds two slices of them. "all_gather": one collective before the first step, for few devices or short batches; a device
        holds all keys and values. The results agree to rounding.

    **Returns:** `out (total // n, num_heads, head_dim_v)` in the dtype of `q`; with `return_lse`, `(out, lse)` with
    `lse (num_heads, total // n)` in float32. Both have gradients, in q, k, v and `sinks`; with `deterministic` they repeat.

    **Raises:** `ValueError` or `TypeError` for a wrong call, when it is traced, and for an `axis_name` that `jax.shard_map` has
    not made manual; `NotImplementedError` for a window that ends behind the query, and for ALiBi that is not causal. Wrong
    values in offsets are errors at trace time for NumPy arrays; others are seen where they are wrong for one of the devices, as
    `varlen_attention` sees them.

    States merge in float32, by their lse. Ring: Liu et al., arXiv:2310.01889; stripes: Brandon et al., arXiv:2311.09431.

    !!! example

        ```python
        def attend(q, k, v, cu_seqlens):
            return jax_varlen.context_parallel_attention(q, k, v, cu_seqlens, axis_name="x", causal=True)


        attend = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"))
        q, k, v = (jax_varlen.stripe(x, mesh.shape["x"]) for x in (q, k, v))
        out = jax_varlen.unstripe(attend(q, k, v, cu_seqlens), mesh.shape["x"])
        ```
    """
    size = shapes.mesh_axis_size(axis_name)
    ops: dict[str, Any] = {name: shapes.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    ops["cu_seqlens"] = shapes.as_int32("cu_seqlens", cu_seqlens)
    if seqused is not None:
        ops["seqused"] = shapes.as_int32("seqused", seqused)
    if softmax_scale is not None:
        ops["softmax_scale"] = shapes.scale_value(softmax_scale)
    if alibi_slopes is not None:
        ops["alibi_slopes"] = shapes.as_slopes(alibi_slopes)
    if sinks is not None:
        ops["sinks"] = shapes.as_float32("sinks", sinks)
    shapes.check_context_parallel(ops)
    values.check_context_parallel(ops, size)
    total = size * ops["q"].shape[0]
    left, right = shapes.one_sided_window(shapes.window_bounds(window_size, causal), total, alibi="alibi_slopes" in ops)
    method = shapes.one_of("method", method, tuple(_METHODS))
    fixed = shapes.softcap_value(softcap), shapes.flag("deterministic", deterministic)
    options = Options(axis_name, size, method, left, right, *fixed)
    results: Any = _compiled(options, primitives.same_varying(ops | {"index": jax.lax.axis_index(axis_name)}))
    return results if shapes.flag("return_lse", return_lse) else results[0]


def stripe(x, num_devices: int, *, axis: int = 0) -> Array:
    """The tokens of a packed batch in the order in which equal slices of them are those of `context_parallel_attention`.

    Device d of n has the tokens d, d + n, d + 2n and so on. What goes with tokens (ids, labels, `positions`) is striped like
    them; offsets stay as they are. Best done once, where a batch is made: on a sharded array it moves nearly all tokens.

    **Arguments:** `x`: an array with the tokens at `axis`; `num_devices`: their static number.

    **Returns:** an array of the shape and dtype of `x`.

    **Raises:** `ValueError` where the tokens cannot be shared out equally.
    """
    return _deal(x, num_devices, axis, lambda rows: (rows // num_devices, num_devices))


def unstripe(x, num_devices: int, *, axis: int = 0) -> Array:
    """The inverse of `stripe`: `unstripe(stripe(x, n), n)` is `x`. The tokens of an `lse` are at axis 1."""
    return _deal(x, num_devices, axis, lambda rows: (num_devices, rows // num_devices))


def _deal(x, num_devices: int, axis: int, split: Callable[[int], tuple[int, int]]) -> Array:
    x = shapes.as_array("x", x)
    shapes.check_shares(x, num_devices, axis)
    axis %= x.ndim
    split_shape = (*x.shape[:axis], *split(x.shape[axis]), *x.shape[axis + 1 :])
    return x.reshape(split_shape).swapaxes(axis, axis + 1).reshape(x.shape)


class Options(NamedTuple):
    """What is fixed when a call is traced."""

    axis_name: Any
    size: int  # the number of devices
    method: str
    window_left: int  # in tokens of the whole batch, as window_right
    window_right: int
    softcap: float
    deterministic: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, ops: dict[str, Array]):
    return _merged(options, ops)


_compiled = jax.jit(_attention, static_argnums=0)  # Outside jit, jax.shard_map takes no derivative rule with symbolic zeros.


def _merged(options: Options, ops: dict[str, Array]) -> tuple[Array, Array]:
    shards = _METHODS[options.method].shards(options, ops["index"], (ops["k"], ops["v"]))
    states = (_Step(options, ops, t).fwd(k, v) for t, (k, v) in enumerate(shards))
    out, lse = functools.reduce(lambda a, b: merge_attention(*a, *b), states)
    return out.astype(ops["q"].dtype), lse


def _attention_fwd(options: Options, ops):
    derivatives.refuse_gradients(name for name, x in ops.items() if x.perturbed)
    ops = {name: x.value for name, x in ops.items()}
    out, lse = _merged(options, ops)
    out, lse = checkpoint_name(out, "jax_varlen_out"), checkpoint_name(lse, "jax_varlen_lse")
    return (out, lse), (ops, out, lse)


def _attention_bwd(options: Options, residuals, cotangents):
    ops, out, lse = residuals
    dout, dlse = cotangents
    dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
    delta = derivatives.rowsum(out, dout)
    delta = delta if isinstance(dlse, SymbolicZero) else delta - dlse
    method, dq = _METHODS[options.method], []

    def steps() -> Iterator[tuple[Array, Array]]:
        for t, (k, v) in enumerate(method.shards(options, ops["index"], (ops["k"], ops["v"]))):
            grads = _Step(options, ops, t).bwd(k, v, dout, lse, delta)
            dq_step, dk, dv = (x.astype(jnp.float32) for x in grads)
            dq.append(dq_step)
            yield dk, dv

    dkv = method.home(options, ops["index"], steps())
    grads = zip(("q", "k", "v"), (functools.reduce(jnp.add, dq), *dkv), strict=True)
    of_ops: dict[str, Any] = dict.fromkeys(ops) | {name: x.astype(ops[name].dtype) for name, x in grads}
    if "sinks" in ops:
        of_ops["sinks"] = derivatives.sinks_gradient(ops["sinks"], lse, delta)
    return (of_ops,)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


class _Step(NamedTuple):
    """The attention of a device's own queries to the keys of the device `t` places before it.

    Row r of the queries is n * (r - s) + t tokens behind row s of the keys. Where the ring has gone round it is n less, and row
    r - 1 is the last that row r may see. Counted from the last one it is the same everywhere: n tokens a row, and t.
    """

    options: Options
    ops: dict[str, Array]
    t: int

    def fwd(self, k, v) -> tuple[Array, Array]:
        """The state, in float32."""
        operands = self._operands(k, v)
        if self.t == 0 and "sinks" in self.ops:
            operands["sinks"] = self.ops["sinks"]
        out, lse = primitives.fwd(operands, **self._options())
        return out.astype(jnp.float32), lse - self._bias()

    def bwd(self, k, v, dout, lse, delta) -> tuple[Array, Array, Array]:
        rows = {"dout": dout, "lse": lse + self._bias(), "delta": delta}
        return primitives.bwd(self._operands(k, v) | rows, **self._options())

    def _operands(self, k, v) -> dict[str, Array]:
        size, index = self.options.size, self.ops["index"]
        operands = {"q": self.ops["q"], "k": k, "v": v} | _offsets(self.ops, size, index, self.t, causal=self._causal)
        if "softmax_scale" in self.ops:
            operands["softmax_scale"] = self.ops["softmax_scale"]
        if "alibi_slopes" in self.ops:
            operands["alibi_slopes"] = self.ops["alibi_slopes"] * np.float32(size)
        return operands

    def _options(self) -> dict[str, Any]:
        options = {name: getattr(self.options, name) for name in ("window_left", "window_right", "softcap", "deterministic")}
        if self.options.window_left != shapes.UNBOUNDED:
            options["window_left"] = (self.options.window_left - self.t) // self.options.size
        return options

    @property
    def _causal(self) -> bool:
        return self.options.window_right == 0

    def _bias(self):
        """What ALiBi takes off every logit for the t tokens: a number, (num_heads, 1) or (num_heads, rows)."""
        if "alibi_slopes" not in self.ops:
            return 0.0
        slopes = self.ops["alibi_slopes"]
        if slopes.ndim == 2:
            cu_seqlens = _rows_before(self.ops["cu_seqlens"], self.options.size, self.ops["index"])
            owners = segment_ids(cu_seqlens, self.ops["q"].shape[0])
            slopes = slopes[jnp.maximum(owners, 0)].T
        else:
            slopes = slopes[:, None]
        return np.float32(self.t) * slopes


def _offsets(ops: dict[str, Array], size: int, index: Array, t: int, *, causal: bool) -> dict[str, Array]:
    """Offsets and lengths of the rows of a device, and of the keys that the device `t` places before it has for them."""
    other = (index - t) % size
    cu_seqlens = ops["cu_seqlens"]
    cu_seqlens_q, cu_seqlens_k = (_rows_before(cu_seqlens, size, device) for device in (index, other))
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    ends = cu_seqlens[:-1] + ops["seqused"] if "seqused" in ops else cu_seqlens[1:]
    ends_q, ends_k = (_rows_before(ends, size, device) for device in (index, other))
    if "seqused" in ops:
        offsets |= {"seqused_q": ends_q - cu_seqlens_q[:-1], "seqused_k": ends_k - cu_seqlens_k[:-1]}
    if causal:  # The last query sees the row of its own number, or the one before on a device of later tokens.
        ends_k = ends_q - (other > index).astype(np.int32)
        offsets["seqused_k"] = jnp.maximum(ends_k - cu_seqlens_k[:-1], 0)
    return offsets


def _rows_before(token, size: int, device):
    """How many of the tokens before `token` are rows of `device`."""
    return -((device - token) // size)


def _steps(options: Options) -> int:
    """Behind those of a window, all steps are empty."""
    left = options.window_left
    return options.size if left == shapes.UNBOUNDED else min(options.size, left + 1)


class _Ring:
    """Keys and values go round, and their gradients go with them."""

    @staticmethod
    def shards(options: Options, index, kv) -> Iterator[Any]:
        del index
        for _ in range(_steps(options) - 1):
            following = _pass_on(options, kv)  # before the attention to kv: the two can overlap
            yield kv
            kv = following
        yield kv

    @staticmethod
    def home(options: Options, index, grads: Iterator[Any]):
        del index
        total = next(grads)
        for _ in range(_steps(options) - 1):
            moving = _pass_on(options, total)  # before the next step, too
            total = tuple(x + y for x, y in zip(moving, next(grads), strict=True))
        return _pass_on(options, total, options.size - _steps(options) + 1)


def _pass_on(options: Options, x, places: int = 1):
    """To the device some places further on."""
    if places % options.size == 0:
        return x
    pairs = [(d, (d + places) % options.size) for d in range(options.size)]
    return jax.lax.ppermute(x, options.axis_name, pairs)


class _AllGather:
    """Every device holds the keys and values of all, and adds to the gradients of all."""

    @staticmethod
    def shards(options: Options, index, kv) -> Iterator[Any]:
        of_all = jax.lax.all_gather(kv, options.axis_name)
        for t in range(_steps(options)):
            other = (index - t) % options.size
            yield tuple(jax.lax.dynamic_index_in_dim(x, other, keepdims=False) for x in of_all)

    @staticmethod
    def home(options: Options, index, grads: Iterator[Any]):
        step_of = (index - np.arange(options.size, dtype=np.int32)) % options.size

        def scatter(steps):
            unused = [jnp.zeros_like(steps[0])] * (options.size - len(steps))
            return jax.lax.psum_scatter(jnp.stack([*steps, *unused])[step_of], options.axis_name)

        return tuple(scatter(steps) for steps in zip(*grads, strict=True))


_METHODS = {"ring": _Ring, "all_gather": _AllGather}
