"""The forward pass beside its peers, in pytest-benchmark: `python -m pytest benchmarks/test_fwd.py`.

A round of the benchmark is one turn of ours; the turns of the peers are its set-up, so that both alternate.
"""

from __future__ import annotations

import pytest

from . import fwd
from .match import OURS, Match


@pytest.fixture(autouse=True)
def released():
    yield
    fwd.release()


def test_fwd(case, peer_names, benchmark, record_rows):
    workload, dtype = case
    match = Match(workload, dtype, peer_names)
    assert OURS in match.ready, match.reasons[OURS]
    benchmark.pedantic(match.turn, args=((OURS,),), setup=lambda: match.turn(peer_names), rounds=fwd.REPEATS)
    rows = match.rows()
    record_rows(rows)
    benchmark.extra_info["rows"] = rows
    assert not match.wrong, [match.reasons[name] for name in match.wrong]
