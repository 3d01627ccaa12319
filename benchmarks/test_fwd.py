"""The forward pass beside its peers, in pytest-benchmark: `python -m pytest benchmarks/test_fwd.py`."""

from __future__ import annotations

from .passes import FWD as PASS


def test_fwd(case, compete):
    compete(PASS, case)
