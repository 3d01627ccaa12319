"""The compiled modules: loads them, registers their FFI targets, and says what they can do. Nothing here starts a backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.core
import jaxlib.version
import numpy as np

MIN_JAXLIB = (0, 10, 0)
CUDA_MAX_HEAD_DIM = 256
_CUDA_MIN_TILE = 32
_CUDA_WORDS_PER_TILE = 8
_CUDA_WORDS_PER_DECODE_TILE = 12
_CUDA_DECODE_ROWS = 64
_CUDA_MAX_SHARES = 384


def _load(name: str) -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    if importlib.util.find_spec(f"{__package__}.{name}") is None:
        return None
    return importlib.import_module(f".{name}", __package__)


def _load_cpu() -> ModuleType:
    """Every build has the CPU module; without it this is the source folder and not an installed package."""
    module = _load("_cpu")
    if module is None:
        raise ImportError(
            f"jax_varlen was imported from {Path(__file__).parent}, where its compiled modules are not. Install it (pip "
            "install .) and start Python elsewhere or with -P, which keeps the current folder out of the way: "
            "python -P -m jax_varlen."
        )
    return module


def _register(module: ModuleType | None, platform: str) -> None:
    if module is None:
        return
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)


def _require_jaxlib() -> None:
    """A handler runs only under a jaxlib at least as new as its headers; XLA itself would fail later, and in other words."""
    version = tuple(int(part) for part in re.findall(r"\d+", jaxlib.version.__version__)[:3])
    if version < MIN_JAXLIB:
        wanted = ".".join(map(str, MIN_JAXLIB))
        raise ImportError(
            f"jax_varlen needs jaxlib {wanted} or later, found {jaxlib.version.__version__}. Install it: "
            f"pip install 'jax>={wanted}'."
        )


_require_jaxlib()
_cpu = _load_cpu()
_cuda = _load("_cuda")
_register(_cpu, "cpu")
_register(_cuda, "CUDA")


def check_cuda(dtype) -> None:
    """Raises NotImplementedError where the CUDA kernels cannot take a call."""
    if dtype == np.float32:
        raise NotImplementedError(
            "The CUDA kernels take bfloat16 and float16, got float32. Cast q, k and v: q.astype(jnp.bfloat16). "
            "jax_varlen.reference.varlen_attention computes float32 on a GPU, for small inputs."
        )
    check_cuda_is_built()


def check_cuda_is_built() -> None:
    """Raises NotImplementedError where there is a GPU and no kernel for it."""
    if _cuda is None and _has_gpu():
        raise NotImplementedError(
            "This build of jax_varlen has no CUDA kernels. Install it again with nvcc on the PATH and JAX_VARLEN_CUDA=ON."
        )


def check_is_asked_for() -> bool:
    """Whether JAX_VARLEN_CHECK is 1: on a GPU too, wrong values in offsets and block tables are errors."""
    value = os.environ.get("JAX_VARLEN_CHECK", "0")
    if value not in ("0", "1"):
        raise ValueError(f"The environment variable JAX_VARLEN_CHECK must be 0 or 1, got {value!r}.")
    return value == "1"


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def cuda_workspace(total: int, batch_and_1: int) -> jax.ShapeDtypeStruct:
    """Room for the work list of the CUDA kernels: a count, and every tile of q (or k) that there may be.

    No sequence has more than one tile that is not full; rows of nobody may stand before the first and after the last sequence.
    """
    tiles = total // _CUDA_MIN_TILE + batch_and_1 + 1
    return jax.ShapeDtypeStruct((_CUDA_WORDS_PER_TILE * (1 + tiles),), np.int32)


def cuda_paged_workspace(q_shape: tuple[int, ...], v_shape: tuple[int, ...], batch_and_1: int) -> jax.ShapeDtypeStruct:
    """The same for a forward call with a block table: the work list of the decode kernel and its partial results come behind.

    `v_shape` is that of the pool, `(num_blocks, block_size, num_kv_heads, head_dim_v)`.
    """
    (total_q, num_heads, _), (*_, num_kv_heads, head_dim_v) = q_shape, v_shape
    group_size = num_heads // num_kv_heads
    tiles = total_q * group_size // _CUDA_DECODE_ROWS + 2 * batch_and_1
    rows = jax.core.min_dim(_CUDA_DECODE_ROWS, total_q * group_size)
    words = _CUDA_WORDS_PER_DECODE_TILE * (1 + tiles) + 2 * _CUDA_MAX_SHARES * (1 + rows * (head_dim_v + 1))
    (list_words,) = cuda_workspace(total_q, batch_and_1).shape
    return jax.ShapeDtypeStruct((list_words + words,), np.int32)


def cuda_turns(q_shape: tuple[int, ...], batch_and_1: int) -> tuple[int, int, int]:
    """Shape of the counters of whose turn it is to add to a tile of dq: for every head, tile and half of a CTA's warps."""
    return q_shape[1], q_shape[0] // _CUDA_MIN_TILE + batch_and_1, 2


def info() -> dict[str, Any]:
    """Which kernels this build holds, and which one a call on the default device takes.

    **Returns:** a dict with `version`, `jax`, `jaxlib` (versions), `platform` and `device` (of the default device), `cpu` and
    `cuda` (`built`, `ffi_api_version` and what else the module tells of itself) and `path`, the kernel in words.
    """
    from . import __version__

    device = jax.devices()[0]
    return {
        "version": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "cpu": _describe(_cpu, "isa"),
        "cuda": _describe(_cuda, "architectures"),
        "path": _path(device.platform),
    }


def _describe(module: ModuleType | None, fact: str) -> dict[str, Any]:
    if module is None:
        return {"built": False}
    return {"built": True, "ffi_api_version": module.ffi_api_version(), fact: getattr(module, fact)()}


def _path(platform: str) -> str:
    if platform == "cpu":
        return f"C++ kernel, {_cpu.isa()}"
    if platform == "gpu" and _cuda is not None:
        return "CUDA kernel, portable family (fwd_sm80)"
    return "pure JAX, in tiles"
