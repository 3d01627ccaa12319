"""A run of one pass from the command line, as a table and a file."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from . import report
from .match import Match
from .passes import OURS, AnyWorkload, Pass

REPEATS = 5


def cases(the_pass: Pass, substring: str = "", dtypes: Sequence[str] = ()) -> list[tuple[AnyWorkload, str]]:
    """The (workload, dtype) pairs of this device, those alone whose name holds one of the comma-separated parts."""
    chosen = the_pass.cases(jax.default_backend())
    parts = substring.split(",")
    return [(w, dtype) for w, dtype in chosen if any(part in w.name for part in parts) and (not dtypes or dtype in dtypes)]


def run_match(match: Match, repeats: int) -> None:
    for _ in range(repeats):
        match.turn(match.names)


def summary(rows: list[report.Row]) -> list[str]:
    """The last lines of a run."""
    lines = [report.mean_line("geometric mean, ours is", report.geometric_means(rows))]
    if jax.default_backend() == "gpu":
        lines.append(report.mean_line("against the rates in workloads.json, ours is", report.recorded_means(rows)))
    return lines


def command_line(the_pass: Pass, arguments: Sequence[str]) -> str:
    """The command as a reader would type it: no directory of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "-m", f"benchmarks.{the_pass.name}", *words])


def main(the_pass: Pass, arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(the_pass).parse_args(arguments)
    about = {"pass": the_pass.title, **report.environment(command_line(the_pass, arguments), options.commit)}
    about["repeats"] = options.repeats
    names = the_pass.peers(options.peers, jax.default_backend())
    rows: list[report.Row] = []
    failed = []
    start = time.monotonic()
    print(report.header(the_pass), flush=True)
    for workload, dtype in cases(the_pass, options.workloads, options.dtypes):
        if options.seconds and time.monotonic() - start > options.seconds:
            print(f"stopped before {workload.name}: {options.seconds:.0f} seconds are over", flush=True)
            failed.append(workload.name)
            break
        match = Match(the_pass, workload, dtype, names, target=options.target)
        run_match(match, options.repeats)
        rows += match.rows()
        failed += [workload.name] if match.wrong or OURS not in match.ready else []
        print(*(report.line(the_pass, row) for row in match.rows()), sep="\n", flush=True)
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


def _parser(the_pass: Pass) -> argparse.ArgumentParser:
    description = f"Times attention, {the_pass.title}, beside its peers."
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{the_pass.name}", description=description)
    peers = ", ".join(name for name in the_pass.contenders if name != OURS)
    parser.add_argument("--out", type=Path, help="JSON file to write, in benchmarks/results/ for one to publish")
    parser.add_argument("--peers", help=f"comma-separated, of {peers} (default: all that this device can run)")
    parser.add_argument("--workloads", default="", help="comma-separated parts of names (default: all)")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=(), help="comma-separated (default: all)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each contender; the median counts")
    parser.add_argument("--target", type=float, default=the_pass.target, help="seconds of calls in a turn")
    parser.add_argument("--seconds", type=float, help="start no further workload after this time (default: no limit)")
    parser.add_argument("--commit", help="commit of the code, where it runs outside its repository")
    return parser
