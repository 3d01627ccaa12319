"""One workload: ours and the peers are prepared, checked against the truth and each other, and timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .paged_workloads import PagedWorkload
from .passes import OURS, AnyWorkload, Pass
from .ready import CannotRun, Ready, dispatch_seconds, enough_calls, seconds
from .truth import TOLERANCE, facts

OF_OURS = ("deterministic", "float8", "packed")  # no witnesses for our result
ROUNDED = {"float8": 0.1}  # how far from ours the rounding of its inputs alone may take a contender


class Match:
    """Contenders that may be timed are in `ready`; why another one is not, is in `reasons`."""

    def __init__(self, the_pass: Pass, workload: AnyWorkload, dtype: str, names: Sequence[str], *, target: float | None = None):
        self.the_pass, self.workload, self.dtype, self.names = the_pass, workload, dtype, (OURS, *names)
        self.ready: dict[str, Ready] = {}
        self.reasons: dict[str, str] = {}
        self.wrong: list[str] = []
        self.facts: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.names}
        self.single_seconds: dict[str, list[float]] = {name: [] for name in self.names}
        self._ours: Any = None
        self._chain_of_ours: Any = None
        self._agreed: dict[str, bool] = {}
        inputs = the_pass.inputs(workload, dtype)
        self._truth = the_pass.truth(inputs)
        for name in self.names:
            self._admit(name, the_pass.contenders[name], inputs, the_pass.target if target is None else target)
        self._ours = self._chain_of_ours = None  # The device needs the memory.
        if self._agreed and not any(self._agreed.values()):
            self._exclude_ours()

    def _admit(self, name: str, prepare: Callable, inputs: Any, target: float) -> None:
        """Prepares a contender. Whatever goes wrong in another library is its reason, and the others go on."""
        start = time.perf_counter()
        try:
            ready = prepare(inputs)
            checked = ready.single or ready
            out = checked.call()
            checked.wait(out)
            self.facts[name]["warmup_s"] = round(time.perf_counter() - start, 3)
            self._check(name, checked.packed(out), ready.truth or self._truth)
            if ready.single is not None:
                self._check_chain(name, ready.packed(ready.call()))
                self.facts[name]["single_calls"] = enough_calls(ready.single, target)
            if inputs.platform == "gpu":
                self.facts[name]["dispatch_us"] = round(dispatch_seconds(ready) * 1e6, 1)
            self.facts[name]["calls"] = enough_calls(ready, target)
        except Exception as error:
            self.reasons[name] = _sentence(error)
        else:
            self.ready[name] = ready

    def _check(self, name: str, packed: Any, truth: Any) -> None:
        """Refuses a result that is wrong where the truth is known, not finite anywhere, or not the same as ours."""
        tolerance = self.the_pass.tolerance * TOLERANCE[self.dtype]
        found = truth.compare(packed, packed if self._ours is None else self._ours)
        self.facts[name]["relative_error"] = found.error
        if not found.error < tolerance:
            self._refuse(name, f"wrong result: relative error {found.error:.2g} in a sample")
        if not found.finite:
            self._refuse(name, "wrong result: not finite")
        if name == OURS:
            self._ours = packed
        elif self._ours is not None:
            self.facts[name]["difference_from_ours"] = found.difference
            agreed = found.difference < self._agreement(name)
            if name not in OF_OURS:
                self._agreed[name] = agreed
            if not agreed:
                self._refuse(name, f"differs from ours: relative error {found.difference:.2g}")

    def _check_chain(self, name: str, packed: Any) -> None:
        """Refuses calls behind each other whose last result is not finite or not the same as that of ours."""
        finite, apart = facts(packed, packed if self._chain_of_ours is None else self._chain_of_ours)
        if name == OURS:
            self._chain_of_ours = packed
        if not finite:
            self._refuse(name, "wrong result of calls behind each other: not finite")
        if not apart < self._agreement(name):
            self._refuse(name, f"differs from ours in calls behind each other: relative error {apart:.2g}")

    def _agreement(self, name: str) -> float:
        return max(2 * self.the_pass.tolerance * TOLERANCE[self.dtype], ROUNDED.get(name, 0))

    def _refuse(self, name: str, reason: str) -> None:
        self.wrong.append(name)
        raise CannotRun(reason)

    def _exclude_ours(self) -> None:
        """Peers that each pass the sample and all differ from ours: rather ours is wrong elsewhere."""
        del self.ready[OURS]
        self.wrong.append(OURS)
        self.reasons[OURS] = f"differs from {', '.join(self._agreed)}"

    def turn(self, names: Sequence[str]) -> None:
        """One repeat of each contender, behind each other."""
        for name in names:
            if name in self.ready:
                ready = self.ready[name]
                self.seconds[name].append(seconds(ready, self.facts[name]["calls"]))
                if ready.single is not None:
                    self.single_seconds[name].append(seconds(ready.single, self.facts[name]["single_calls"]))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each contender, ours first."""
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> dict[str, Any]:
        row = {"workload": self.workload.name, "dtype": self.dtype, "who": name, **self.facts[name]}
        if not self.seconds[name]:
            return row | {"reason": self.reasons.get(name, "not timed")}
        median = statistics.median(self.seconds[name])
        ours = statistics.median(self.seconds[OURS]) if self.seconds[OURS] else None
        recorded = self.workload.recorded_tflops(self.the_pass.name)
        moved = self.ready[name].bytes or self.the_pass.bytes(self.workload, jnp.dtype(self.dtype).itemsize)
        if self.single_seconds[name]:
            row["us_single"] = statistics.median(self.single_seconds[name]) * 1e6
        if isinstance(self.workload, PagedWorkload):
            row["tokens_per_s"] = self.workload.total_q / median
            row["is_decode"] = self.workload.is_decode
        if name == OURS and recorded:
            row["recorded_times"] = {peer: self._tflops_of_random(name) / rate for peer, rate in recorded.items()}
        return row | {
            "us": median * 1e6,
            "repeats_us": [s * 1e6 for s in self.seconds[name]],
            "tflops": self._tflops(self.seconds[name]),
            "gbps": moved / median / 1e9,
            "ours_times": median / ours if ours else None,
            "recorded_tflops": recorded.get(name),
        }

    def _tflops(self, repeats: list[float]) -> float:
        return self.the_pass.flops(self.workload) / statistics.median(repeats) / 1e12

    def _tflops_of_random(self, name: str) -> float:
        """Of random normal q, as rates were recorded. Calls behind each other have another: the same to a decode step alone."""
        single = self.single_seconds[name]
        counts = isinstance(self.workload, PagedWorkload) and not self.workload.is_decode
        return self._tflops(single if counts and single else self.seconds[name])


def _sentence(error: Exception) -> str:
    """The first line of an error, without the paths that some libraries print."""
    text = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"
