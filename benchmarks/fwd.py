"""Times the forward pass beside its peers: `python -m benchmarks.fwd --out benchmarks/results/fwd_h200.json`."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from . import peers, report, workloads
from .match import OURS, TARGET_SECONDS, Match
from .workloads import Workload

REPEATS = 5


def cases(substring: str = "", dtypes: Sequence[str] = ()) -> list[tuple[Workload, str]]:
    """The (workload, dtype) pairs of this device, those alone whose name holds one of the comma-separated parts."""
    chosen = workloads.for_platform(jax.default_backend())
    parts = substring.split(",")
    return [(w, dtype) for w, dtype in chosen if any(part in w.name for part in parts) and (not dtypes or dtype in dtypes)]


def peer_names(listed: str | None) -> tuple[str, ...]:
    """The peers of a comma-separated list, or those that can run on this device."""
    if listed is None:
        return peers.DEFAULT_PEERS[jax.default_backend()]
    names = tuple(name for name in listed.split(",") if name)
    unknown = [name for name in names if name not in peers.PEERS]
    if unknown:
        raise SystemExit(f"--peers must name some of {', '.join(peers.PEERS)}, got {', '.join(unknown)}.")
    return names


def run_match(match: Match, repeats: int) -> None:
    for _ in range(repeats):
        match.turn(match.names)


def summary(rows: list[report.Row]) -> list[str]:
    """The last lines of a run."""
    recorded = {w.name: w.recorded_tflops for w in workloads.recorded()}
    lines = [report.mean_line("geometric mean, ours is", report.geometric_means(rows))]
    if jax.default_backend() == "gpu":
        lines.append(report.mean_line("against the rates in workloads.json, ours is", report.recorded_means(rows, recorded)))
    return lines


def command_line(arguments: Sequence[str]) -> str:
    """The command as a reader would type it: no directory of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "-m", "benchmarks.fwd", *words])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    about = report.environment(command_line(arguments), options.commit) | {"repeats": options.repeats}
    names = peer_names(options.peers)
    rows: list[report.Row] = []
    failed = []
    start = time.monotonic()
    print(report.HEADER, flush=True)
    for workload, dtype in cases(options.workloads, options.dtypes):
        if options.seconds and time.monotonic() - start > options.seconds:
            print(f"stopped before {workload.name}: {options.seconds:.0f} seconds are over", flush=True)
            failed.append(workload.name)
            break
        match = Match(workload, dtype, names, target=options.target)
        run_match(match, options.repeats)
        rows += match.rows()
        failed += [workload.name] if match.wrong or OURS not in match.ready else []
        print(*map(report.line, match.rows()), sep="\n", flush=True)
        if options.out:
            report.write(options.out, about | {"wall_s": round(time.monotonic() - start)}, rows)
        del match
        release()
    print(*summary(rows), f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)
    return 1 if failed else 0


def release() -> None:
    """Gives back the arrays of a workload before the next one needs the memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fwd", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write, in benchmarks/results/ for one to publish")
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(peers.PEERS)} (default: all that this device can run)")
    parser.add_argument("--workloads", default="", help="comma-separated parts of names (default: all)")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=(), help="comma-separated (default: all)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each contender; the median counts")
    parser.add_argument("--target", type=float, default=TARGET_SECONDS, help="seconds of calls in a turn")
    parser.add_argument("--seconds", type=float, help="start no further workload after this time (default: no limit)")
    parser.add_argument("--commit", help="commit of the code, where it runs outside its repository")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
