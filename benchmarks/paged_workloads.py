"""Batches over a paged cache: a decode step, a piece of a prompt, or both at once, and how much work each of them is."""

from __future__ import annotations

import dataclasses
import json
import statistics

import numpy as np

from .workloads import FILE, spread

LAYERS = 20
CACHE_BYTES = 512e6  # several times what a GPU keeps in its L2 cache


@dataclasses.dataclass(frozen=True)
class PagedWorkload:
    """Sequence b has `queries[b]` new tokens, the last of its `lengths[b]` in the cache. Causal."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    recorded_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """What peers are known to reach, in TB/s of a decode step and in TFLOP/s of other rows."""

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def total_q(self) -> int:
        return sum(self.queries)

    @property
    def cu_seqlens_q(self) -> np.ndarray:
        return _offsets(self.queries)

    @property
    def cu_seqlens_k(self) -> np.ndarray:
        return _offsets(self.lengths)

    @property
    def blocks(self) -> np.ndarray:
        """Blocks of each sequence."""
        return -(-np.asarray(self.lengths) // self.block_size)

    @property
    def is_decode(self) -> bool:
        """One query of each sequence: the keys are read for little work, and bytes count."""
        return max(self.queries) == 1

    @property
    def calls(self) -> int:
        """Calls behind each other in one program. A long call needs fewer."""
        return 4 if self.total_q > 8192 else LAYERS

    def caches(self, itemsize: int) -> int:
        """Caches that the calls take in turn, so many that none is still in the cache of the device when it is read again."""
        return int(min(self.calls, -(-CACHE_BYTES // self._cache_bytes(itemsize))))

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head: query i of n sees all keys but the last n - 1 - i."""
        return sum(n * length - n * (n - 1) // 2 for n, length in zip(self.queries, self.lengths, strict=True))

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each pair and column, in both products."""
        return 4 * self.head_dim * self.num_heads * self.pairs

    def bytes(self, itemsize: int, cache_itemsize: int | None = None) -> int:
        """The keys and values of the batch, q and out, each moved once."""
        q = self.total_q * self.num_heads * self.head_dim * itemsize
        return self._cache_bytes(cache_itemsize or itemsize) + 2 * q

    def _cache_bytes(self, itemsize: int) -> int:
        return 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim * itemsize

    def recorded_tflops(self, _: str) -> dict[str, float]:
        """By peer, what it once reached in bfloat16."""
        scale = self.flops / self.bytes(2) if self.is_decode else 1
        return {peer: rate * scale for peer, rate in self.recorded_rates.items()}


def _offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def recorded() -> list[PagedWorkload]:
    """The paged rows of workloads.json."""
    return [_from_row(row) for row in json.loads(FILE.read_text())["paged"]]


def _from_row(row: dict) -> PagedWorkload:
    fields = {key: row[key] for key in ("name", "num_heads", "num_kv_heads", "head_dim", "block_size")}
    queries, lengths = ((row[key],) * row["batch"] for key in ("q_per_sequence", "kv_length"))
    rate = row["fa3_TBps"] if row["q_per_sequence"] == 1 else row["fa3_tflops"]
    return PagedWorkload(queries=queries, lengths=lengths, recorded_rates={"fa3": rate}, **fields)


def _log_normal(u: float) -> float:
    """Median 2048: one sequence of a hundred is 6 times as long."""
    return 2048 * np.exp(0.8 * statistics.NormalDist().inv_cdf(u))


OWN = (
    PagedWorkload("B1_L1024_h32_8_block16", (1,), (1024,), 32, 8, 128, 16),
    PagedWorkload("B16_L1024_h32_8_block16", (1,) * 16, (1024,) * 16, 32, 8, 128, 16),
    PagedWorkload("B64_lognormal2048_h32_8_block16", (1,) * 64, spread(64, _log_normal), 32, 8, 128, 16),
    PagedWorkload(
        "mixed_B60_L4096_B2_L8192_q1024_h32_8_block16", (1,) * 60 + (1024,) * 2, (4096,) * 60 + (8192,) * 2, 32, 8, 128, 16
    ),
)
CPU = (
    PagedWorkload("B4_L1024_h8_2_d64_block16", (1,) * 4, (1024,) * 4, 8, 2, 64, 16),
    PagedWorkload("B16_lognormal2048_h16_4_d128_block16", (1,) * 16, spread(16, _log_normal), 16, 4, 128, 16),
    PagedWorkload("mixed_B6_L1024_B2_L1024_q128_h8_2_d64_block16", (1,) * 6 + (128,) * 2, (1024,) * 8, 8, 2, 64, 16),
)


def for_platform(platform: str) -> list[tuple[PagedWorkload, str]]:
    """The (workload, dtype) pairs that are timed on "cpu" or "gpu"."""
    if platform == "cpu":
        return [(workload, dtype) for workload in CPU for dtype in ("float32", "bfloat16")]
    return [(workload, "bfloat16") for workload in (*recorded(), *OWN)]
