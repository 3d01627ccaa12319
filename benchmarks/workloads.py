"""What is timed: named batches, and how much work each of them is."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("workloads.json")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A packed batch of self-attention, and the TFLOP/s that peers are known to reach on it."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    window_left: int | None = None
    recorded: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def head_dim_v(self) -> int:
        return self.head_dim

    @property
    def window_size(self) -> tuple[int | None, int | None]:
        return self.window_left, None

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return sum(self._pairs(int(n)) * int(count) for n, count in zip(lengths, counts, strict=True))

    def _pairs(self, length: int) -> int:
        row = np.arange(length)
        first, last = self.visible(row, length)
        return int(np.maximum(last - first + 1, 0).sum())

    def visible(self, row, length: int):
        """The first and the last key that a row sees, both included."""
        first = row * 0 if self.window_left is None else np.maximum(row - self.window_left, 0)
        last = row if self.causal else row * 0 + length - 1
        return first, last

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each pair and column, in both products of the forward pass."""
        return 2 * (self.head_dim + self.head_dim_v) * self.num_heads * self.pairs

    def recorded_tflops(self, the_pass: str) -> dict[str, float]:
        """By peer, what it once reached in "fwd" or "bwd"."""
        return {peer: rates[the_pass] for peer, rates in self.recorded.items()}

    def bytes(self, itemsize: int) -> int:
        """q, k, v, out and lse, each moved once."""
        return self.total * (self._columns * itemsize + self.num_heads * 4)

    def backward_bytes(self, itemsize: int) -> int:
        """q, k, v, out, dout and lse, and dq, dk and dv, each moved once."""
        return self.total * (2 * self._columns * itemsize + self.num_heads * 4)

    @property
    def _columns(self) -> int:
        return (self.num_heads + self.num_kv_heads) * (self.head_dim + self.head_dim_v)


def recorded() -> list[Workload]:
    """The packed rows of workloads.json."""
    return [_from_row(row) for row in json.loads(FILE.read_text())["packed"]]


def _from_row(row: dict) -> Workload:
    fields = {key: value for key, value in row.items() if key not in ("lengths", "peers_tflops")}
    rates = {peer: rates for peer, rates in row["peers_tflops"].items() if isinstance(rates, dict)}
    return Workload(lengths=tuple(row["lengths"]), recorded=rates, **fields)


def spread(count: int, quantile: Callable[[float], float]) -> tuple[int, ...]:
    """`count` lengths of a distribution: its quantiles at the multiples of the golden ratio, which never come in order."""
    golden = (5**0.5 - 1) / 2
    return tuple(int(quantile((i + 0.5) * golden % 1.0)) for i in range(count))


def _uniform(longest: int) -> Callable[[float], float]:
    return lambda u: 1 + u * longest


def _bimodal(u: float) -> float:
    """Seven of eight sequences have 32 to 96 tokens, the eighth has 1536 to 2560."""
    return 32 + 64 * u / 0.875 if u < 0.875 else 1536 + 1024 * (u - 0.875) / 0.125


def _long_tail(u: float) -> float:
    """Log-normal with median 256: one sequence of a hundred is 24 times as long."""
    return 1 + 255 * np.exp(1.4 * statistics.NormalDist().inv_cdf(u))


OWN = (
    Workload("64_uniform2048_gqa8_d128_causal", spread(64, _uniform(2047)), 32, 4, 128, causal=True),
    Workload("64_uniform2048_d80", spread(64, _uniform(2047)), 16, 16, 80),
    Workload("128_bimodal_d96_causal", spread(128, _bimodal), 16, 16, 96, causal=True),
    Workload("4096_tiny64_d64", spread(4096, lambda u: 8 + 57 * u), 12, 12, 64),
    Workload("96_longtail_mqa_d128_causal", spread(96, _long_tail), 16, 1, 128, causal=True),
    Workload("96_longtail_window512_gqa4_d128", spread(96, _long_tail), 16, 4, 128, causal=True, window_left=511),
)

_SKEW_32 = (120, 90, 212, 117, 58, 156, 441, 297, 48, 26, 52, 110, 8, 82, 26, 46)
_SKEW_32 += (57, 74, 165, 330, 91, 490, 50, 154, 283, 116, 46, 38, 63, 133, 34, 83)
CPU = (
    Workload("32seqs_skew_4k_d64", _SKEW_32, 12, 12, 64),
    Workload("8seqs_skew_4k_gqa4_d128_causal", (260, 1700, 46, 540, 170, 900, 380, 100), 16, 4, 128, causal=True),
    Workload("1x2k_d64_causal", (2048,), 8, 8, 64, causal=True),
)


def for_platform(platform: str) -> list[tuple[Workload, str]]:
    """The (workload, dtype) pairs that are timed on "cpu" or "gpu"."""
    if platform == "cpu":
        return [(workload, dtype) for workload in CPU for dtype in ("float32", "bfloat16")]
    return [(workload, "bfloat16") for workload in (*recorded(), *OWN)]
