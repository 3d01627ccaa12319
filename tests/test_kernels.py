"""What happens when the package is imported, and what it says of itself."""

import os
import subprocess
import sys

import jax
import jaxlib.version
import pytest

from jax_varlen import info, kernels


def test_importing_starts_no_backend():
    code = "import jax_varlen; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120, env=environment)


def test_jaxlib_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(jaxlib.version, "__version__", "0.9.2")
    with pytest.raises(
        ImportError, match=r"needs jaxlib 0\.10\.0 or later, found 0\.9\.2\. Install it: pip install 'jax>=0\.10\.0'"
    ):
        kernels._require_jaxlib()


def test_source_folder_says_how_to_start(monkeypatch):
    monkeypatch.setattr(kernels, "_load", lambda name: None)
    with pytest.raises(ImportError, match=r"compiled modules are not.*python -P -m jax_varlen"):
        kernels._load_cpu()


def test_headers_are_the_oldest_supported_ones():
    """A handler runs under a jaxlib no older than its headers: those of 0.10.0 are FFI 0.3."""
    assert info()["cpu"]["ffi_api_version"] == (0, 3)


def test_info_names_the_device_and_the_path():
    facts = info()
    assert facts["platform"] == jax.default_backend() and facts["jax"] == jax.__version__
    assert {"cpu": "C++ kernel", "gpu": "CUDA kernel"}.get(facts["platform"], "pure JAX") in facts["path"]
