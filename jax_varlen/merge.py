"""Attention over two sets of keys from the attention over each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import shapes


def merge_attention(out_a, lse_a, out_b, lse_b) -> tuple[jax.Array, jax.Array]:
    r"""The attention of the same queries over the keys of `a` and of `b` together, from what each of them gave.

    $$lse = \log(e^{lse_a} + e^{lse_b}), \qquad out = e^{lse_a - lse}\, out_a + e^{lse_b - lse}\, out_b$$

    The keys must be apart: a key in both counts twice, and so does a sink, which is given to one of the two calls. A state
    whose `lse` is -inf has seen no key and changes no bit of the other, whatever its `out` holds; two such states give
    `(0, -inf)`. Differentiable in all four arguments, with finite gradients for such states too. To merge more than two,
    `functools.reduce` over pairs.

    **Arguments:**

    - `out_a`, `out_b`: `(total_q, num_heads, head_dim_v)`; float32, bfloat16 or float16.
    - `lse_a`, `lse_b`: `(num_heads, total_q)` in float32, as `varlen_attention` returns them with `return_lse=True`.

    **Returns:** `(out, lse)`; computed in float32, `out` in the dtype of `out_a`, `lse` in float32.

    **Raises:** `ValueError` for shapes that do not belong together, `TypeError` for other dtypes.

    !!! example

        ```python
        prompt = jax_varlen.varlen_attention(q, k_prompt, v_prompt, [0, total_q], [0, total_prompt], return_lse=True)
        own = jax_varlen.varlen_attention(q, k, v, cu_seqlens, causal=True, return_lse=True)
        out, lse = jax_varlen.merge_attention(*prompt, *own)
        ```
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    out_a, lse_a, out_b, lse_b = (shapes.as_array(name, x) for name, x in states.items())
    shapes.check_states(out_a, lse_a, out_b, lse_b)
    empty_a, empty_b = lse_a == -jnp.inf, lse_b == -jnp.inf
    either = empty_a | empty_b
    # Where a state is empty both logits are 0 here, so that no infinity enters the derivative of what is not taken.
    a, b = (jnp.where(either, 0, x) for x in (lse_a, lse_b))
    lse = jnp.logaddexp(a, b)
    out = _weighted(a - lse, out_a) + _weighted(b - lse, out_b)
    lse = _select(empty_a, empty_b, lse_a, lse_b, lse, -jnp.inf)
    empty_a, empty_b = (x.T[..., None] for x in (empty_a, empty_b))
    out = _select(empty_a, empty_b, out_a, out_b.astype(out_a.dtype), out.astype(out_a.dtype), 0)
    return out, lse


def _weighted(log_weight, out):
    return jnp.exp(log_weight).T[..., None] * out.astype(jnp.float32)


def _select(empty_a, empty_b, a, b, both, neither):
    return jnp.where(empty_a, jnp.where(empty_b, neither, b), jnp.where(empty_b, a, both))
