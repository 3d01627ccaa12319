"""The counts that every figure is divided by."""

from __future__ import annotations

import json

import numpy as np
import pytest

from . import workloads
from .workloads import Workload


def _mask(workload: Workload, length: int) -> np.ndarray:
    query, key = np.mgrid[:length, :length]
    mask = np.ones((length, length), bool)
    if workload.causal:
        mask &= key <= query
    if workload.window_left is not None:
        mask &= key >= query - workload.window_left
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [None, 0, 3, 100])
def test_pairs_are_the_ones_of_the_mask(causal, window_left):
    workload = Workload("some", (1, 7, 7, 40, 0), 4, 2, 8, causal, window_left)
    assert workload.pairs == sum(int(_mask(workload, n).sum()) for n in workload.lengths)


def test_flops_are_four_for_each_pair_head_and_column():
    workload = Workload("some", (3, 5), 4, 2, 8)
    assert workload.flops == 4 * 4 * 8 * (9 + 25)


def test_bytes_count_each_array_once():
    workload = Workload("some", (3, 5), 4, 2, 8)
    q = out = 8 * 4 * 8 * 2
    k = v = 8 * 2 * 8 * 2
    lse = 8 * 4 * 4
    assert workload.bytes(2) == q + k + v + out + lse
    assert workload.backward_bytes(2) == 2 * (q + k + v) + 2 * out + lse


def test_recorded_workloads_are_those_of_the_file():
    rows = json.loads(workloads.FILE.read_text())["packed"]
    assert [w.name for w in workloads.recorded()] == [row["name"] for row in rows]
    for name in ("fwd", "bwd"):
        assert all("fa2" in w.recorded_tflops(name) for w in workloads.recorded())


def test_names_are_unique():
    names = [w.name for w in (*workloads.recorded(), *workloads.OWN, *workloads.CPU)]
    assert len(set(names)) == len(names)
