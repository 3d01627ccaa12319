"""Options of the benchmarks, and their tables at the end of a run."""

from __future__ import annotations

import collections

import jax
import pytest

from . import report, run
from .passes import Pass

ROWS = pytest.StashKey[dict[Pass, list[report.Row]]]()


def pytest_addoption(parser):
    group = parser.getgroup("jax_varlen benchmarks")
    group.addoption("--peers", default=None, help="comma-separated peers (default: all that this device can run)")
    group.addoption("--workloads", default="", help="comma-separated parts of workload names (default: all)")


def pytest_configure(config):
    config.stash[ROWS] = collections.defaultdict(list)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = run.cases(metafunc.module.PASS, metafunc.config.getoption("--workloads", ""))
        metafunc.parametrize("case", cases, ids=[f"{workload.name}-{dtype}" for workload, dtype in cases])


@pytest.fixture
def compete(request, benchmark):
    """Times a case of a pass; a round of the benchmark is one turn of ours, and the turns of the peers are its set-up."""

    def compete(the_pass, case):
        names = the_pass.peers(request.config.getoption("--peers", None), jax.default_backend())
        workload, dtype = case
        match = run.Match(the_pass, workload, dtype, names)
        assert run.OURS in match.ready, match.reasons[run.OURS]
        benchmark.pedantic(match.turn, args=((run.OURS,),), setup=lambda: match.turn(names), rounds=run.REPEATS)
        rows = match.rows()
        request.config.stash[ROWS][the_pass] += rows
        benchmark.extra_info["rows"] = rows
        assert not match.wrong, [match.reasons[name] for name in match.wrong]

    yield compete
    run.release()


def pytest_terminal_summary(terminalreporter, config):
    for the_pass, rows in config.stash.get(ROWS, {}).items():
        terminalreporter.section(f"{the_pass.title}, ours beside its peers")
        lines = [report.line(the_pass, row) for row in rows]
        for line in (report.header(the_pass), *lines, *run.summary(rows)):
            terminalreporter.write_line(line)
