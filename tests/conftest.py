"""The suite runs on the default device: CPU and GPU take the same tests, in the dtypes that their kernels take."""

import os

# Many small programs run once each: a search for their fastest form takes longer than they do.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import pytest

PLATFORM = jax.default_backend()
DTYPES = ("bfloat16", "float16") if PLATFORM == "gpu" else ("float32", "bfloat16", "float16")


@pytest.fixture(params=DTYPES)
def dtype(request):
    return jnp.dtype(request.param)


@pytest.fixture
def any_dtype():
    """For tests in which the dtype plays no part: one that every platform takes."""
    return jnp.dtype(DTYPES[0])


@pytest.fixture(autouse=True)
def strict():
    """Shapes and dtypes never meet by accident."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
