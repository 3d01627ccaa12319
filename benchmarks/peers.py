"""Ours and its peers in JAX: each takes the inputs of a workload and gives an attention, and what it is to be called with.

`forward` and `backward` make a call of it that is ready to be timed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_varlen

from .inputs import Inputs
from .paged_inputs import PagedInputs
from .ready import CannotRun, Ready


@dataclasses.dataclass(frozen=True)
class Problem:
    attention: Callable
    """Takes q, k, v and `others`, gives out."""
    qkv: tuple[jax.Array, jax.Array, jax.Array]
    others: tuple = ()
    from_packed: Callable = lambda x: x
    """A packed array in the layout of q."""
    to_packed: Callable = lambda x: x
    """Its inverse."""


def forward(inputs: Inputs, problem: Problem) -> Ready:
    call = functools.partial(jax.jit(problem.attention), *problem.qkv, *problem.others)
    return ready(inputs, call, problem.to_packed)


def backward(inputs: Inputs, problem: Problem) -> Ready:
    """The pullback alone, on residuals that a forward pass has left.

    This is what a training step runs after its forward pass. The difference of two timings would have the noise of both, and
    one program of both passes can be arranged by XLA in ways in which neither runs. A peer that keeps the probabilities is
    not charged for them.
    """

    def keep(q, k, v, others):
        return jax.vjp(lambda *qkv: problem.attention(*qkv, *others), q, k, v)[1]

    pullback = jax.jit(keep)(*problem.qkv, problem.others)
    call = functools.partial(jax.jit(lambda pullback, dout: pullback(dout)), pullback, problem.from_packed(inputs.dout))
    return ready(inputs, call, lambda gradients: tuple(map(problem.to_packed, gradients)))


def ready(inputs: Inputs | PagedInputs, call: Callable, packed: Callable) -> Ready:
    """On CPU each call is waited for, as calls in flight would share the cores."""
    if inputs.platform == "cpu":
        return Ready(lambda: jax.block_until_ready(call()), lambda result: result, packed)
    return Ready(call, jax.block_until_ready, packed)


def ours(inputs: Inputs, **options) -> Problem:
    """jax_varlen.varlen_attention."""
    w = inputs.workload
    attention = functools.partial(jax_varlen.varlen_attention, causal=w.causal, window_size=w.window_size, **options)
    return Problem(attention, (inputs.q, inputs.k, inputs.v), (inputs.cu_seqlens,))


def deterministic(inputs: Inputs) -> Problem:
    """Ours with bitwise repeatable gradients, beside the default."""
    return ours(inputs, deterministic=True)


def fa3(inputs: Inputs) -> Problem:
    """FlashAttention-3 through the JAX bindings of dew-flash-attn-cu13, installed or on PYTHONPATH."""
    need(inputs, "gpu", ("bfloat16", "float16"))
    _load_cudart()
    w, module = inputs.workload, _module("dew_flash_attn", "dew-flash-attn-cu13")
    window = (-1 if w.window_left is None else w.window_left, 0 if w.causal and w.window_left is not None else -1)

    def attention(q, k, v, cu_seqlens):
        return module.flash_mha_varlen(q, k, v, cu_seqlens, w.max_length, is_causal=w.causal, window_size=window)

    return Problem(attention, (inputs.q, inputs.k, inputs.v), (inputs.cu_seqlens,))


def cudnn(inputs: Inputs) -> Problem:
    """cuDNN's packed attention as JAX calls it; JAX's public function does not offer the packed layout."""
    need(inputs, "gpu", ("bfloat16", "float16"))
    _need_causal_window(inputs)
    from jax._src.cudnn import fused_attention_stablehlo as lib

    w = inputs.workload
    options: dict[str, Any] = {
        "scale": inputs.softmax_scale,
        "mask_type": lib.MaskType.CAUSAL if w.causal else lib.MaskType.NO_MASK,
        "sliding_window_length": None if w.window_left is None else w.window_left + 1,
    }

    def attention(q, k, v, packing):
        out: Any = lib.dot_product_attention(q[None], k[None], v[None], **packing, **options)
        return out[0]

    lengths, offsets = jnp.asarray([w.lengths], jnp.int32), inputs.cu_seqlens[None]
    packing = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    # JAX takes one sequence for a batch that is not packed, which needs no lengths.
    return Problem(attention, (inputs.q, inputs.k, inputs.v), (packing if len(w.lengths) > 1 else {},))


def padded(inputs: Inputs) -> Problem:
    """jax.nn.dot_product_attention on the padded batch, with cuDNN on a GPU; the padding itself is not timed."""
    w = inputs.workload
    batch, longest = len(w.lengths), w.max_length
    places = np.concatenate([np.arange(n) + b * longest for b, n in enumerate(w.lengths)])

    def pad(x):
        flat = jnp.zeros((batch * longest, *x.shape[1:]), x.dtype).at[places].set(x)
        return flat.reshape(batch, longest, *x.shape[1:])

    def attention(q, k, v, lengths):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=w.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=None if w.window_left is None else (w.window_left, 0 if w.causal else longest),
            implementation="cudnn" if inputs.platform == "gpu" else None,
        )

    def packed(out):
        return out.reshape(batch * longest, *out.shape[2:])[places]

    q, k, v = (pad(x) for x in (inputs.q, inputs.k, inputs.v))
    return Problem(attention, (q, k, v), (jnp.asarray(w.lengths, jnp.int32),), pad, packed)


def need(inputs: Inputs | PagedInputs, platform: str, dtypes: tuple[str, ...]) -> None:
    if inputs.platform != platform:
        raise CannotRun(f"needs a {platform}")
    if inputs.dtype not in dtypes:
        raise CannotRun(f"takes {' and '.join(dtypes)}")


def _need_causal_window(inputs: Inputs) -> None:
    if inputs.workload.window_left is not None and not inputs.workload.causal:
        raise CannotRun("has no window without a causal mask")


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotRun(f"{package} is not installed ({error})") from error
    except OSError as error:
        raise CannotRun(f"{package} does not load: {error}") from error


@functools.cache
def _load_cudart() -> None:
    """Loads the CUDA runtime of the nvidia packages, which a library outside site-packages does not find by itself."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    for library in (path for root in roots for path in Path(root).glob("cu*/lib/libcudart.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
