"""examples/shared_prefix.py: the shared call is the unshared one, and that of the definition."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest

DTYPE = "float32" if jax.default_backend() == "cpu" else "bfloat16"
SMALL = ["--prompt", "100", "--requests", "5", "--heads", "4"]


@pytest.fixture(autouse=True)
def strict():
    """In place of the strict rules of the other tests: the example is written as users write."""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("shared_prefix", Path(__file__).parents[1] / "examples" / "shared_prefix.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_are_the_definition(example):
    requests = example.make_requests(70, 6, 9, 4, 2, 16, DTYPE)
    assert np.diff(requests.cu_seqlens).min() >= 1
    unshared = example.unshare(requests)
    assert len(unshared[1]) == 6 * 70 + len(requests.k)
    expected, _ = oracle.attention(*(np.asarray(x) for x in unshared), causal=True)
    for out in (example.attend_shared(requests), example.attend_unshared(*unshared)):
        error = np.abs(np.asarray(out, np.float64) - expected).max()
        assert error <= example.TOLERANCE[DTYPE] * np.abs(expected).max()


def test_program_agrees(example, capsys):
    assert example.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "shared and unshared agree." in printed
    assert "5 requests" in printed and "times as fast" in printed


def test_program_fails_when_the_two_disagree(example, capsys, monkeypatch):
    own_alone = lambda prompt_out, prompt_lse, out, lse: (out, lse)
    monkeypatch.setattr(example.jax_varlen, "merge_attention", own_alone)
    example.attend_shared.clear_cache()
    assert example.main(SMALL) == 1
    assert "DISAGREE" in capsys.readouterr().out
    example.attend_shared.clear_cache()
