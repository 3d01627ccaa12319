"""The paged cache beside its peers, in pytest-benchmark: `python -m pytest benchmarks/test_paged.py`."""

from __future__ import annotations

from .passes import PAGED as PASS


def test_paged(case, compete):
    compete(PASS, case)
