"""The derivatives of the primitives: how each is pushed forward (jvp) and pulled back (transpose).

`fwd` pushes a tangent forward by `tangent`, which is linear in it and whose transpose is `bwd`. So `jax.grad` runs the two
kernels, and `jax.jvp` the forward kernel and plain JAX.

Second derivatives follow from one function. With lse and delta as constants, (dq, dk, dv) is the gradient in (q, k, v) of

    F = sum_ij P_ij (dout_i . v_j - delta_i),  P = exp(s - lse),

so that `hessian`, the derivative of `bwd` in (q, k, v), is its own transpose, and `tangent` without out, which is the
derivative of (dq, dk, dv) . (q_dot, k_dot, v_dot) in dout and -delta, is the transpose of `bwd` in dout and delta.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.dtypes import float0
from jax.interpreters import ad

from . import blocked, partitioning, primitives

_NO_GRADIENT = {
    "alibi_slopes": "Slopes are constants of the model: alibi_slopes=jax.lax.stop_gradient(slopes).",
    "softmax_scale": "Put a learnt scale into q: varlen_attention(q * scale, ..., softmax_scale=1.0).",
}


def register() -> None:
    """Gives every primitive its rules."""
    ad.primitive_jvps[primitives.fwd_p] = _fwd_jvp
    ad.primitive_jvps[primitives.bwd_p] = _bwd_jvp
    ad.primitive_jvps[primitives.tangent_p] = _tangent_jvp
    ad.primitive_jvps[primitives.tangent2_p] = _no_jvp
    ad.primitive_jvps[primitives.hessian_p] = _no_jvp
    ad.primitive_transposes[primitives.bwd_p] = _bwd_transpose
    ad.primitive_transposes[primitives.tangent_p] = _tangent_transpose
    ad.primitive_transposes[primitives.tangent2_p] = _tangent2_transpose
    ad.primitive_transposes[primitives.hessian_p] = _hessian_transpose


def _no_jvp(*_, **__):
    raise NotImplementedError(
        "varlen_attention can be differentiated twice. jax_varlen.reference.varlen_attention has higher derivatives, for small "
        "inputs."
    )


def refuse_gradients(names: Iterable[str]) -> None:
    """Raises NotImplementedError where one is asked of an operand that has none."""
    for name in names:
        if name in _NO_GRADIENT:
            raise NotImplementedError(f"{name} has no gradient. {_NO_GRADIENT[name]}")


def _fwd_jvp(primals, tangents, *, names, **options):
    ops, dots = _by_name(names, primals), _perturbed(names, tangents)
    if "block_table" in ops:
        raise NotImplementedError(
            "With block_table varlen_attention has no gradient: a paged KV cache serves the forward pass alone. Give packed k "
            "and v, or stop the gradient: jax.lax.stop_gradient(q), and so on."
        )
    out, lse = primitives.fwd(ops, **options)
    out, lse = checkpoint_name(out, "jax_varlen_out"), checkpoint_name(lse, "jax_varlen_lse")
    return (out, lse), primitives.tangent(ops | {"out": out, "lse": lse} | _suffixed(dots, "_dot"), **options)


def _tangent_transpose(cotangents, *operands, names, **options):
    ops, linear = _known(names, operands)
    dout, dlse = cotangents
    q, v, lse = (ops[name] for name in ("q", "v", "lse"))
    if isinstance(dout, ad.Zero):
        dout = jnp.zeros_like(q, shape=(*q.shape[:2], v.shape[-1]))
    # A row that sees no key has out 0 and gives nothing, whatever its cotangent is: kernels leave such rows out by their place.
    delta = rowsum(ops["out"], dout) if "out" in ops else jnp.zeros_like(lse)
    if not isinstance(dlse, ad.Zero):
        delta = delta - dlse
    results: dict[str, Any] = {}
    if linear != {"sinks_dot"}:
        grads = primitives.bwd(ops | {"dout": dout.astype(q.dtype), "delta": delta}, **options)
        results = dict(zip(("q_dot", "k_dot", "v_dot"), grads, strict=True))
    if "sinks_dot" in linear:
        results["sinks_dot"] = sinks_gradient(ops["sinks"], lse, delta)
    return [results[name] if name in linear else None for name in names]


def rowsum(x, y):
    """(num_heads, total_q) of two (total_q, num_heads, head_dim_v). NaN and Inf in y count for nothing where x is 0.

    They are taken out before the product for its derivative's sake, and once more behind it, so that it is rounded by itself.
    """
    nothing = (x == 0) & ~jnp.isfinite(y)
    product = x.astype(jnp.float32) * jnp.where(nothing, 0, y).astype(jnp.float32)
    return jnp.where(nothing, 0, product).sum(-1).T


def sinks_gradient(sinks, lse, delta):
    """A sink is a logit whose value is zero: its dS is -P delta."""
    gradient = -(blocked.sinks_probability(sinks, lse) * jnp.where(lse == -jnp.inf, 0, delta)).sum(1)
    return partitioning.sharded_as(sinks, gradient)


def _bwd_jvp(primals, tangents, *, names, **options):
    ops, dots = _by_name(names, primals), _perturbed(names, tangents)
    linear = {name: dots.pop(name) for name in ("dout", "delta") if name in dots}
    terms = []
    if dots:
        terms.append(primitives.hessian(ops | _suffixed(dots, "_dot"), **options))
    if linear:
        zeros = {name: jnp.zeros_like(ops[name]) for name in ("dout", "delta")}
        terms.append(primitives.bwd(ops | zeros | linear, **options))
    return primitives.bwd(ops, **options), _sum(terms)


def _bwd_transpose(cotangents, *operands, names, **options):
    ops, linear = _known(names, operands)
    out_dot, lse_dot = primitives.tangent(ops | _qkv_dots(cotangents), **options)
    results = {"dout": out_dot.astype(ops["q"].dtype), "delta": -lse_dot}
    return [results[name] if name in linear else None for name in names]


def _hessian_transpose(cotangents, *operands, names, **options):
    ops, linear = _known(names, operands)
    ops |= _qkv_dots(cotangents)
    results: dict[str, Any] = {}
    if linear != {"lse_dot"}:
        results = dict(zip(("q_dot", "k_dot", "v_dot"), primitives.hessian(ops, **options), strict=True))
    if "lse_dot" in linear:
        out_dot, lse_dot = primitives.tangent(ops, **options)
        results["lse_dot"] = lse_dot * ops["delta"] - rowsum(out_dot, ops["dout"])
    return [results[name] if name in linear else None for name in names]


def _tangent_jvp(primals, tangents, *, names, **options):
    ops, dots = _by_name(names, primals), _perturbed(names, tangents)
    if "out" in ops:
        return jax.jvp(lambda moved: _tangent_in_steps(ops | moved, options), ({name: ops[name] for name in dots},), (dots,))
    out_dot, lse_dot = primitives.tangent(ops, **options)
    terms = []
    if linear := {name: x for name, x in dots.items() if name.endswith("_dot")}:
        terms.append(primitives.tangent(_without(ops, *_QKV_DOTS) | linear, **options))
    if moved := {name: dots[name] for name in ("q", "k", "v") if name in dots}:
        terms.append(primitives.tangent2(ops | _suffixed(moved, "_dot2"), **options))
    if "lse" in dots:  # P falls as lse grows
        terms.append((-dots["lse"].T[..., None] * out_dot, -dots["lse"] * lse_dot))
    return (out_dot, lse_dot), _sum(terms)


def _tangent_in_steps(ops, options):
    """`tangent` with the part of the keys apart from what is plain JAX."""
    results = {name: ops.get(name) for name in ("sinks", "sinks_dot", "out", "lse")}
    out_dot, lse_dot = primitives.tangent(_without(ops, "sinks", "sinks_dot", "out"), **options)
    return blocked.tangent_of_results(out_dot, lse_dot, **results)


def _tangent2_transpose(cotangents, *operands, names, **options):
    ops, linear = _known(names, operands)
    q, v = ops["q"], ops["v"]
    dout, dlse = cotangents
    dout = jnp.zeros_like(q, shape=(*q.shape[:2], v.shape[-1])) if isinstance(dout, ad.Zero) else dout.astype(q.dtype)
    delta = jnp.zeros_like(ops["lse"]) if isinstance(dlse, ad.Zero) else -dlse
    grads = primitives.hessian(ops | {"dout": dout, "delta": delta}, **options)
    results = dict(zip(("q_dot2", "k_dot2", "v_dot2"), grads, strict=True))
    return [results[name] if name in linear else None for name in names]


_QKV_DOTS = ("q_dot", "k_dot", "v_dot")


def _by_name(names, operands) -> dict[str, Any]:
    return dict(zip(names, operands, strict=True))


def _perturbed(names, tangents) -> dict[str, Any]:
    """The tangents that are not zero, or an error for operands that must have none."""
    dots = {name: x for name, x in _by_name(names, tangents).items() if not isinstance(x, ad.Zero) and x.dtype != float0}
    refuse_gradients(dots)
    return dots


def _known(names, operands) -> tuple[dict[str, Any], set[str]]:
    """The operands whose values are known, and the names of those in which the primitive is transposed."""
    ops = _by_name(names, operands)
    linear = {name for name, x in ops.items() if ad.is_undefined_primal(x)}
    return _without(ops, *linear), linear


def _qkv_dots(cotangents) -> dict[str, Any]:
    """Cotangents of (dq, dk, dv) as tangents of (q, k, v)."""
    return {name: x for name, x in zip(_QKV_DOTS, cotangents, strict=True) if not isinstance(x, ad.Zero)}


def _suffixed(ops, suffix: str) -> dict[str, Any]:
    return {name + suffix: x for name, x in ops.items()}


def _without(ops, *names) -> dict[str, Any]:
    return {name: x for name, x in ops.items() if name not in names}


def _sum(terms):
    return [sum(results[1:], results[0]) for results in zip(*terms, strict=True)]
