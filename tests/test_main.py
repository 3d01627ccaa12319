"""python -m jax_varlen: the report, and the exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_varlen
from jax_varlen import __main__ as program

DTYPE = "bfloat16" if jax.default_backend() == "gpu" else "float32"


@pytest.fixture(autouse=True)
def strict():
    """JAX's own attention, which the program runs beside ours, mixes dtypes."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jax_varlen"])
    monkeypatch.setattr(program, "TOTAL", {"cpu": 256, "gpu": 256})


def test_says_what_is_there_and_that_it_is_right(capsys):
    assert program.main() == 0
    printed = capsys.readouterr().out
    assert f"jax_varlen {jax_varlen.__version__} with jax {jax.__version__}" in printed
    assert jax_varlen.info()["path"] in printed
    assert "Right: " in printed
    assert "\npacked, jax_varlen " in printed and "\npadded, jax.nn " in printed


def test_wrong_result_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(jax_varlen, "varlen_attention", lambda q, *_: q)
    assert program.main() == 1
    assert "WRONG: " in capsys.readouterr().out


def test_nan_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(jax_varlen, "varlen_attention", lambda q, *_: q * np.nan)
    assert program.main() == 1
    assert "WRONG: " in capsys.readouterr().out


def test_no_kernel_for_the_device_is_exit_code_1(monkeypatch, capsys):
    def refuse(*_):
        raise NotImplementedError("This build has none.")

    monkeypatch.setattr(jax_varlen, "varlen_attention", refuse)
    assert program.main() == 1
    assert "No kernel for this device. This build has none." in capsys.readouterr().err


def test_batch_is_ragged_and_full():
    batch = program.ragged_batch(512, DTYPE)
    assert batch.lengths.min() >= 1 and batch.lengths.sum() == len(batch.q) == 512
    assert batch.lengths.max() > 4 * np.median(batch.lengths)
    np.testing.assert_array_equal(np.diff(batch.cu_seqlens), batch.lengths)


def test_table_is_aligned_and_counts_real_work():
    batch = program.ragged_batch(256, DTYPE)
    lines = program.table(batch, {"packed": 0.001, "padded": 0.004}).splitlines()
    assert len({len(line) for line in lines}) == 1
    gflops = 4 * program.NUM_HEADS * program.HEAD_DIM * sum(int(n) ** 2 for n in batch.lengths) / 0.001 / 1e9
    assert lines[1].split()[-3:] == ["256,000", f"{gflops:,.1f}", "4.0"]


def test_describe_takes_a_report_with_nothing_in_it():
    assert "not built" in program.describe({})


def test_runs_as_a_program(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(Path(jax_varlen.__file__).parent.parent),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process holds memory of the same GPU
    }
    run = subprocess.run(
        [sys.executable, "-m", "jax_varlen"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Right: " in run.stdout
