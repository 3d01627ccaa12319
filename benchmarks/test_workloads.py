"""The counts that every figure is divided by."""

from __future__ import annotations

import json

import numpy as np
import pytest

from . import paged_inputs, paged_workloads, workloads
from .paged_workloads import PagedWorkload
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
    for file in (workloads, paged_workloads):
        names = [w.name for w in (*file.recorded(), *file.OWN, *file.CPU)]
        assert len(set(names)) == len(names)


def test_paged_pairs_are_the_ones_of_the_mask():
    workload = PagedWorkload("some", (1, 3, 7), (40, 5, 7), 4, 2, 8, 16)
    masks = [np.tri(length, dtype=int)[-n:] for n, length in zip(workload.queries, workload.lengths, strict=True)]
    assert workload.pairs == sum(mask.sum() for mask in masks)


def test_paged_bytes_count_each_array_once():
    workload = PagedWorkload("some", (1, 3), (40, 5), 4, 2, 8, 16)
    q = out = 4 * 4 * 8 * 2
    k = v = 45 * 2 * 8
    assert workload.bytes(2) == q + out + 2 * (k + v)
    assert workload.bytes(2, 1) == q + out + k + v


def test_recorded_paged_rates_are_those_of_the_file():
    rows = json.loads(workloads.FILE.read_text())["paged"]
    for w, row in zip(paged_workloads.recorded(), rows, strict=True):
        seconds = w.flops / (w.recorded_tflops("paged")["fa3"] * 1e12)
        found = {"fa3_TBps": w.bytes(2) / seconds / 1e12} if w.is_decode else {"fa3_tflops": w.flops / seconds / 1e12}
        assert found == pytest.approx({key: row[key] for key in found})
        assert row.keys() >= found.keys()


def test_a_table_names_every_block_of_the_pool_once():
    workload = PagedWorkload("some", (1, 1, 1), (40, 0, 16), 4, 2, 8, 16)
    inputs = paged_inputs.make(workload, "float32")
    used = np.concatenate([row[:n] for row, n in zip(inputs.block_table, workload.blocks, strict=True)])
    assert sorted(used) == list(range(inputs.caches[0][0].shape[0]))
