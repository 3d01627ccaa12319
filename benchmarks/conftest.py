"""Options of the benchmarks, and their table at the end of a run."""

from __future__ import annotations

import pytest

from . import fwd, report

ROWS = pytest.StashKey[list[report.Row]]()


def pytest_addoption(parser):
    group = parser.getgroup("jax_varlen benchmarks")
    group.addoption("--peers", default=None, help="comma-separated peers (default: all that this device can run)")
    group.addoption("--workloads", default="", help="comma-separated parts of workload names (default: all)")


def pytest_configure(config):
    config.stash[ROWS] = []


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = fwd.cases(metafunc.config.getoption("--workloads", ""))
        metafunc.parametrize("case", cases, ids=[f"{workload.name}-{dtype}" for workload, dtype in cases])


@pytest.fixture
def peer_names(request) -> tuple[str, ...]:
    return fwd.peer_names(request.config.getoption("--peers", None))


@pytest.fixture
def record_rows(request):
    """Keeps the rows of a workload for the table."""
    return request.config.stash.setdefault(ROWS, []).extend


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("forward, ours beside its peers")
        for line in (report.HEADER, *map(report.line, rows), *fwd.summary(rows)):
            terminalreporter.write_line(line)
