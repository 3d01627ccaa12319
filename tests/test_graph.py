"""XLA captures both passes into CUDA graphs (its command buffers), and a graph that is there serves other lengths."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest


def count(kind, program):
    """How many thunks of a kind stand in command buffers, below which they are indented, and how many elsewhere."""
    counts, captured = {True: 0, False: 0}, False
    for indent, thunk in re.findall(r"^( *)\d+: (\w+)", program, re.MULTILINE):
        captured = captured if indent else thunk == "kCommandBuffer"
        counts[captured] += thunk == kind
    return counts[True], counts[False]


def test_count():
    program = "000: kCopy x\n001: kCommandBuffer\n  000: kKernel y\n  001: kCustomCall z\n002: kCustomCall w\n"
    assert count("kCustomCall", program) == (1, 1)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_a_graph_replays_with_other_lengths(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_gpu_graph_min_graph_size=1 --xla_gpu_autotune_level=0 --xla_dump_to={tmp_path}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-P", str(Path(__file__).with_name("replayed_graph.py"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    programs = list(tmp_path.glob("*jit_step*thunk_sequence_after_thunk_passes*"))
    assert [count("kCustomCall", program.read_text()) for program in programs] == [(2, 0), (2, 0)]
