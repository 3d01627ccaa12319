"""One workload: ours and the peers are prepared, checked against the truth and each other, and timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from . import inputs as inputs_of
from .passes import OURS, Pass
from .ready import CannotRun, Ready, dispatch_seconds, enough_calls, seconds
from .truth import TOLERANCE
from .workloads import Workload

TARGET_SECONDS = 0.05
OF_OURS = ("deterministic",)  # no witnesses for our result


class Match:
    """Contenders that may be timed are in `ready`; why another one is not, is in `reasons`."""

    def __init__(self, the_pass: Pass, workload: Workload, dtype: str, names: Sequence[str], *, target: float = TARGET_SECONDS):
        self.the_pass, self.workload, self.dtype, self.names = the_pass, workload, dtype, (OURS, *names)
        self.ready: dict[str, Ready] = {}
        self.reasons: dict[str, str] = {}
        self.wrong: list[str] = []
        self.facts: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.names}
        self._ours: Any = None
        self._agreed: dict[str, bool] = {}
        inputs = inputs_of.make(workload, dtype)
        self._truth = the_pass.truth(inputs)
        for name in self.names:
            self._admit(name, the_pass.contenders[name], inputs, target)
        self._ours = None  # The device needs the memory.
        if self._agreed and not any(self._agreed.values()):
            self._exclude_ours()

    def _admit(self, name: str, prepare: Callable, inputs: inputs_of.Inputs, target: float) -> None:
        """Prepares a contender. Whatever goes wrong in another library is its reason, and the others go on."""
        start = time.perf_counter()
        try:
            ready = prepare(inputs)
            out = ready.call()
            ready.wait(out)
            self.facts[name]["warmup_s"] = round(time.perf_counter() - start, 3)
            self._check(name, ready.packed(out))
            if inputs.platform == "gpu":
                self.facts[name]["dispatch_us"] = round(dispatch_seconds(ready) * 1e6, 1)
            self.facts[name]["calls"] = enough_calls(ready, target)
        except Exception as error:
            self.reasons[name] = _sentence(error)
        else:
            self.ready[name] = ready

    def _check(self, name: str, packed: Any) -> None:
        """Refuses a result that is wrong where the truth is known, not finite anywhere, or not the same as ours."""
        tolerance = self.the_pass.tolerance * TOLERANCE[self.dtype]
        found = self._truth.compare(packed, packed if self._ours is None else self._ours)
        self.facts[name]["relative_error"] = found.error
        if not found.error < tolerance:
            self._refuse(name, f"wrong result: relative error {found.error:.2g} in a sample")
        if not found.finite:
            self._refuse(name, "wrong result: not finite")
        if name == OURS:
            self._ours = packed
        elif self._ours is not None:
            self.facts[name]["difference_from_ours"] = found.difference
            agreed = found.difference < 2 * tolerance
            if name not in OF_OURS:
                self._agreed[name] = agreed
            if not agreed:
                self._refuse(name, f"differs from ours: relative error {found.difference:.2g}")

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
                self.seconds[name].append(seconds(self.ready[name], self.facts[name]["calls"]))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each contender, ours first."""
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> dict[str, Any]:
        row = {"workload": self.workload.name, "dtype": self.dtype, "who": name, **self.facts[name]}
        if not self.seconds[name]:
            return row | {"reason": self.reasons.get(name, "not timed")}
        median = statistics.median(self.seconds[name])
        ours = self.seconds[OURS]
        return row | {
            "us": median * 1e6,
            "repeats_us": [s * 1e6 for s in self.seconds[name]],
            "tflops": self.the_pass.flops(self.workload) / median / 1e12,
            "gbps": self.the_pass.bytes(self.workload, jnp.dtype(self.dtype).itemsize) / median / 1e9,
            "ours_times": median / statistics.median(ours) if ours else None,
            "recorded_tflops": self.workload.recorded_tflops(self.the_pass.name).get(name),
        }


def _sentence(error: Exception) -> str:
    """The first line of an error, without the paths that some libraries print."""
    text = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"
