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
    torch = _torch()
    if inputs.platform != "gpu" or not torch.cuda.is_available():
        raise CannotRun("needs a GPU and a PyTorch that sees it")
    w = inputs.workload
    q, k, v = (_to_torch(torch, x).cuda() for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(inputs.group_size, dim=1) for x in (k, v))
    cu_seqlens = torch.tensor(w.cu_seqlens, dtype=torch.int32, device="cuda")
    window = {} if w.window_left is None else {"window_size_left": w.window_left, "window_size_right": 0 if w.causal else -1}

    def call():
        lengths = cu_seqlens, cu_seqlens, w.max_length, w.max_length
        options = {"scale": inputs.softmax_scale, **window}
        return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, w.causal, False, **options)[0]

    def wait(_):
        torch.cuda.synchronize()

    return Ready(_without_gradient(torch, call), wait, _to_jax)


def torch_cpu(inputs: Inputs) -> Ready:
    """PyTorch's scaled_dot_product_attention on CPU, sequence by sequence, on as many threads as the others."""
    torch = _torch()
    w = inputs.workload
    if inputs.platform != "cpu":
        raise CannotRun("needs the CPU as JAX's default device")
    if w.window_left is not None:
        raise CannotRun("has no window")
    torch.set_num_threads(num_threads())
    attend = torch.nn.functional.scaled_dot_product_attention

    def variant(contiguous: bool, repeat: bool) -> Ready:
        q, k, v = (_sequences(torch, x, w.lengths, contiguous) for x in (inputs.q, inputs.k, inputs.v))
        if repeat:
            k, v = ([x.repeat_interleave(inputs.group_size, dim=1) for x in xs] for xs in (k, v))
        shared = {"enable_gqa": True} if inputs.group_size > 1 and not repeat else {}

        def call():
            return [attend(*x, is_causal=w.causal, **shared) for x in zip(q, k, v, strict=True)]

        return Ready(_without_gradient(torch, call), lambda out: out, lambda out: _concatenate(torch, out))

    choices = itertools.product((False, True), (False, True) if inputs.group_size > 1 else (False,))
    return _fastest([variant(*choice) for choice in choices])


def _fastest(variants: list[Ready]) -> Ready:
    """The layout of the same operands that this peer is fastest with."""
    for variant in variants:
        seconds(variant, 1)
    return min(variants, key=lambda variant: min(seconds(variant, 1) for _ in range(3)))


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
