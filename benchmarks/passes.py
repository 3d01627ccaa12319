"""What is timed: what a call of each is, who takes part, what is right, and how much work it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import inputs, paged_inputs, paged_peers, paged_workloads, peers, torch_peers, truth, workloads
from .inputs import Inputs
from .paged_workloads import PagedWorkload
from .ready import Ready
from .workloads import Workload

OURS = "ours"
Contender = Callable[[Any], Ready]
AnyWorkload = Workload | PagedWorkload


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    name: str
    title: str
    contenders: dict[str, Contender]
    """Ours and the peers, by name."""
    defaults: dict[str, tuple[str, ...]]
    """The peers that run on a platform if none are named."""
    truth: Callable[[Any], Any]
    tolerance: float
    """In units of `truth.TOLERANCE`."""
    flops: Callable[[Any], float]
    bytes: Callable[[Any, int], int]
    cases: Callable[[str], Sequence[tuple[AnyWorkload, str]]] = workloads.for_platform
    """The (workload, dtype) pairs of a platform."""
    inputs: Callable[[Any, str], Any] = inputs.make
    target: float = 0.05
    """Seconds of calls in a turn."""
    by_bytes: bool = False
    """Whether bytes rather than products bound it: their rate comes first."""

    def peers(self, listed: str | None, platform: str) -> tuple[str, ...]:
        """The peers of a comma-separated list, or those that can run on this platform."""
        if listed is None:
            return self.defaults[platform]
        names = tuple(name for name in listed.split(",") if name)
        known = [name for name in self.contenders if name != OURS]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise SystemExit(f"--peers must name some of {', '.join(known)}, got {', '.join(unknown)}.")
        return names


def _contenders(in_jax: Callable, names: tuple[str, ...], **others: Contender) -> dict[str, Contender]:
    """`in_jax` makes a contender of each named problem of `peers`."""

    def prepare(problem: Callable[[Inputs], peers.Problem], inputs: Inputs) -> Ready:
        return in_jax(inputs, problem(inputs))

    return {name: functools.partial(prepare, getattr(peers, name)) for name in names} | others


FWD = Pass(
    name="fwd",
    title="forward",
    contenders=_contenders(
        peers.forward, (OURS, "fa3", "cudnn", "padded"), fa2=torch_peers.fa2, torch_cpu=torch_peers.torch_cpu
    ),
    defaults={"gpu": ("fa3", "fa2", "cudnn", "padded"), "cpu": ("padded", "torch_cpu")},
    truth=truth.Outputs,
    tolerance=1,
    flops=lambda w: w.flops,
    bytes=lambda w, itemsize: w.bytes(itemsize),
)
BWD = Pass(
    name="bwd",
    title="backward",
    contenders=_contenders(
        peers.backward,
        (OURS, "deterministic", "fa3", "cudnn", "padded"),
        fa2=torch_peers.fa2_backward,
        torch_cpu=torch_peers.torch_cpu_backward,
    ),
    defaults={"gpu": ("deterministic", "fa3", "fa2", "cudnn", "padded"), "cpu": ("padded", "torch_cpu")},
    truth=truth.Gradients,
    tolerance=2,  # P, dS and out are rounded, and the result is a difference of sums of them
    flops=lambda w: 2.5 * w.flops,
    bytes=lambda w, itemsize: w.backward_bytes(itemsize),
)
PAGED = Pass(
    name="paged",
    title="paged cache",
    contenders={name: getattr(paged_peers, name) for name in (OURS, "float8", "packed", "cudnn")},
    defaults={"gpu": ("float8", "packed", "cudnn"), "cpu": ("packed",)},
    truth=truth.PagedOutputs,
    tolerance=1,
    flops=lambda w: w.flops,
    bytes=lambda w, itemsize: w.bytes(itemsize),
    cases=paged_workloads.for_platform,
    inputs=paged_inputs.make,
    target=0.02,
    by_bytes=True,
)
