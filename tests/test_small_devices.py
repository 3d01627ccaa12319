"""The kernels of devices with little shared memory, on a device that has more: JAX_VARLEN_CUDA_SMEM holds it back."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parent
KIB_99 = str(99 * 1024)  # of compute capability 8.6, 8.9 and 12.x


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_kernels_of_small_devices_are_right():
    environment = os.environ | {
        "JAX_VARLEN_CUDA_SMEM": KIB_99,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-k", "cases or head_dim or deterministic"]
    files = [str(TESTS / name) for name in ("test_fwd.py", "test_bwd.py")]
    command = [sys.executable, "-P", "-m", "pytest", *options, *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:]
