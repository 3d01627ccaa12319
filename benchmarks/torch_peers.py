"""The peers that are PyTorch's. It is imported only when one of them is asked for."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .inputs import Inputs, num_threads
from .ready import CannotRun, Ready, seconds


def fa2(inputs: Inputs) -> Ready:
    """PyTorch's own FlashAttention-2 on packed sequences, with k and v repeated where query heads share them."""
    torch = _torch_on_gpu(inputs)
    call, qkv = _fa2_forward(torch, inputs)
    return Ready(_without_gradient(torch, lambda: call(*qkv)[0]), lambda _: torch.cuda.synchronize(), _to_jax)


def fa2_backward(inputs: Inputs) -> Ready:
    """Its backward pass on what the forward pass has left. The sum over the heads that share k and v is not timed."""
    torch = _torch_on_gpu(inputs)
    call, qkv = _fa2_forward(torch, inputs)
    out, lse, rng_state, unused, _ = call(*qkv)
    dout = _to_torch(torch, inputs.dout).cuda()
    lengths, options = _fa2_batch(torch, inputs)
    causal = inputs.workload.causal

    def backward():
        residuals = (*qkv, out, lse, *lengths, 0.0, causal, rng_state, unused)
        return torch.ops.aten._flash_attention_backward(dout, *residuals, **options)

    def packed(gradients):
        dq, dk, dv = (_to_jax(x) for x in gradients)
        return dq, *(x.reshape(len(x), -1, inputs.group_size, x.shape[2]).sum(2) for x in (dk, dv))

    return Ready(_without_gradient(torch, backward), lambda _: torch.cuda.synchronize(), packed)


def _fa2_forward(torch: Any, inputs: Inputs) -> tuple[Callable, list[Any]]:
    """A call that gives out, lse and what else the backward pass needs, and its q, k and v."""
    q, k, v = (_to_torch(torch, x).cuda() for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(inputs.group_size, dim=1) for x in (k, v))
    lengths, options = _fa2_batch(torch, inputs)

    def call(q, k, v):
        return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, inputs.workload.causal, False, **options)

    return call, [q, k, v]


def _fa2_batch(torch: Any, inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    w = inputs.workload
    cu_seqlens = torch.tensor(w.cu_seqlens, dtype=torch.int32, device="cuda")
    window = {} if w.window_left is None else {"window_size_left": w.window_left, "window_size_right": 0 if w.causal else -1}
    return (cu_seqlens, cu_seqlens, w.max_length, w.max_length), {"scale": inputs.softmax_scale, **window}


def torch_cpu(inputs: Inputs) -> Ready:
    """PyTorch's scaled_dot_product_attention on CPU, sequence by sequence, on as many threads as the others."""
    torch = _torch_on_cpu(inputs)

    def variant(contiguous: bool, repeat: bool) -> Ready:
        call, qkv = _torch_cpu_forward(torch, inputs, contiguous, repeat)
        return Ready(_without_gradient(torch, lambda: call(*qkv)), lambda out: out, lambda out: _concatenate(torch, out))

    return _fastest_variant(inputs, variant)


def torch_cpu_backward(inputs: Inputs) -> Ready:
    """Its backward pass by PyTorch's autograd, on a graph that is kept.

    Where k and v were repeated, the sum over the heads that share them is not timed.
    """
    torch = _torch_on_cpu(inputs)

    def variant(contiguous: bool, repeat: bool) -> Ready:
        call, qkv = _torch_cpu_forward(torch, inputs, contiguous, repeat)
        operands = [x.requires_grad_() for xs in qkv for x in xs]
        outs = call(*qkv)
        douts = _sequences(torch, inputs.dout, inputs.workload.lengths, contiguous)

        def packed(gradients):
            count = len(outs)
            dq, dk, dv = (_concatenate(torch, gradients[i * count : (i + 1) * count]) for i in range(3))
            if not repeat:
                return dq, dk, dv
            return dq, *(x.reshape(len(x), -1, inputs.group_size, x.shape[2]).sum(2) for x in (dk, dv))

        return Ready(lambda: torch.autograd.grad(outs, operands, douts, retain_graph=True), lambda out: out, packed)

    return _fastest_variant(inputs, variant)


def _torch_cpu_forward(torch: Any, inputs: Inputs, contiguous: bool, repeat: bool) -> tuple[Callable, list[list[Any]]]:
    """A call that gives out of each sequence, and q, k and v of each."""
    w = inputs.workload
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (_sequences(torch, x, w.lengths, contiguous) for x in (inputs.q, inputs.k, inputs.v))
    if repeat:
        k, v = ([x.repeat_interleave(inputs.group_size, dim=1) for x in xs] for xs in (k, v))
    shared = {"enable_gqa": True} if inputs.group_size > 1 and not repeat else {}

    def call(q, k, v):
        return [attend(*x, is_causal=w.causal, **shared) for x in zip(q, k, v, strict=True)]

    return call, [q, k, v]


def _fastest_variant(inputs: Inputs, variant: Callable[[bool, bool], Ready]) -> Ready:
    choices = itertools.product((False, True), (False, True) if inputs.group_size > 1 else (False,))
    return _fastest([variant(*choice) for choice in choices])


def _fastest(variants: list[Ready]) -> Ready:
    """The layout of the same operands that this peer is fastest with."""
    for variant in variants:
        seconds(variant, 1)
    return min(variants, key=lambda variant: min(seconds(variant, 1) for _ in range(3)))


def _torch_on_gpu(inputs: Inputs) -> Any:
    torch = _torch()
    if inputs.platform != "gpu" or not torch.cuda.is_available():
        raise CannotRun("needs a GPU and a PyTorch that sees it")
    return torch


def _torch_on_cpu(inputs: Inputs) -> Any:
    torch = _torch()
    if inputs.platform != "cpu":
        raise CannotRun("needs the CPU as JAX's default device")
    if inputs.workload.window_left is not None:
        raise CannotRun("has no window")
    torch.set_num_threads(num_threads())
    return torch


def _torch() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise CannotRun(f"torch is not installed or does not load ({error})") from error


def _without_gradient(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def inference():
        with torch.inference_mode():
            return call()

    return inference


def _to_torch(torch: Any, x: jax.Array) -> Any:
    """A tensor on the host. NumPy has no bfloat16, so two-byte numbers travel as their bits."""
    array = np.array(x)
    if array.dtype.itemsize != 2:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(getattr(torch, array.dtype.name))


def _to_jax(out: Any) -> jax.Array:
    return jnp.asarray(out.float().cpu().numpy())


def _sequences(torch: Any, x: jax.Array, lengths: tuple[int, ...], contiguous: bool) -> list[Any]:
    """One (1, num_heads, length, head_dim) tensor for each sequence: a view of the packed one, or a copy of its own."""
    views = [part.transpose(0, 1)[None] for part in torch.split(_to_torch(torch, x), lengths)]
    return [view.contiguous() for view in views] if contiguous else views


def _concatenate(torch: Any, outs: list[Any]) -> jax.Array:
    return _to_jax(torch.cat([out[0].transpose(0, 1) for out in outs]))
