import os
import subprocess
import sys
from pathlib import Path


def test_calls_on_eight_devices():
    """Devices are made when JAX starts: sharded_calls runs in a process of its own, on CPU.

    Its programs run once: fast code would take longer to make.
    """
    file = Path(__file__).with_name("sharded_calls.py")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(command, env=environment, cwd=file.parents[1], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
