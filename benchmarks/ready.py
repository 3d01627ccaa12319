"""A contender that is ready to be timed, and how long its calls take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any


class CannotRun(Exception):
    """Why a peer does not take part in a workload."""


@dataclasses.dataclass(frozen=True)
class Ready:
    call: Callable[[], Any]
    """Enqueues one call (or makes it, where nothing is asynchronous)."""
    wait: Callable[[Any], Any]
    """Waits for the result of a call, and with it for all earlier ones."""
    packed: Callable[[Any], Any]
    """The result of a call in the layout of packed arrays: out, or dq, dk and dv."""
    count: int = 1
    """How many calls of the attention are behind each other in one. Times are those of one of them."""
    single: Ready | None = None
    """Where there are several, one by itself: its result is the one whose truth is known."""
    truth: Any = None
    """What is right, where the inputs are not those of the others."""
    bytes: int | None = None
    """What has to be moved, likewise."""


def seconds(ready: Ready, calls: int) -> float:
    """Seconds a call, over `calls` of them that are enqueued behind each other and waited for once."""
    out = None
    start = time.perf_counter()
    for _ in range(calls):
        out = ready.call()
    ready.wait(out)
    return (time.perf_counter() - start) / (calls * ready.count)


def dispatch_seconds(ready: Ready, calls: int = 8) -> float:
    """Seconds that the host needs to enqueue a call. Where this is as much as `seconds`, the host was timed, not the device."""
    out = None
    calls = -(-calls // ready.count)
    start = time.perf_counter()
    for _ in range(calls):
        out = ready.call()
    enqueued = time.perf_counter()
    ready.wait(out)
    return (enqueued - start) / (calls * ready.count)


def enough_calls(ready: Ready, target: float) -> int:
    """How many calls take `target` seconds."""
    once = seconds(ready, 1) * ready.count
    call = once if once > target / 4 else seconds(ready, 4) * ready.count
    return max(1, min(round(target / call + 0.5), 2000))
