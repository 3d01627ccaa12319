"""The backward pass beside its peers, in pytest-benchmark: `python -m pytest benchmarks/test_bwd.py`."""

from __future__ import annotations

from .passes import BWD as PASS


def test_bwd(case, compete):
    compete(PASS, case)
