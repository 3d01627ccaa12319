"""Rows as lines of text, and the file of a run: what was timed, on what, with which versions."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from .inputs import num_threads
from .passes import OURS, Pass

Row = dict[str, Any]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "numpy", "dew-flash-attn-cu13")
ROOT = Path(__file__).parent.parent


def header(the_pass: Pass) -> str:
    rates = ("TB/s", "TFLOP/s") if the_pass.by_bytes else ("TFLOP/s", "GB/s")
    single = f" | {'us, single':>10}" if the_pass.by_bytes else ""
    return f"{'':{_width(the_pass)}} {'':9} {'us':>10} | {rates[0]:>8} | {rates[1]:>8}{single} | ours is"


def line(the_pass: Pass, row: Row) -> str:
    """us | TFLOP/s | GB/s | how many times as fast ours is; or TB/s | TFLOP/s | us of a single call. G instead of T on CPU."""
    label = f"{row['workload'] + ' ' + row['dtype']:{_width(the_pass)}} {row['who']:9}"
    if "reason" in row:
        return f"{label} not timed: {row['reason']}"
    on_cpu = jax.default_backend() == "cpu"
    rates = f"{row['tflops'] * 1e3:5.0f} GF" if on_cpu else f"{row['tflops']:.1f}", f"{row['gbps']:.1f}"
    if the_pass.by_bytes:
        rates = f"{row['gbps']:.1f} GB" if on_cpu else f"{row['gbps'] / 1e3:.2f}", rates[0]
    single = f" | {row['us_single']:10.1f}" if "us_single" in row else ""
    times = _times(row)
    host = "  (the host was timed)" if row.get("dispatch_us", 0) > 0.8 * row["us"] else ""
    return f"{label} {row['us']:10.1f} | {rates[0]:>8} | {rates[1]:>8}{single} | {times}{host}".rstrip(" |")


def _times(row: Row) -> str:
    if row["who"] == OURS:
        return ", ".join(f"{times:.2f}x recorded {peer}" for peer, times in row.get("recorded_times", {}).items())
    if not row["ours_times"]:
        return ""
    tokens = f", which gives {1 / row['ours_times']:.2f}x the tokens per second" if row["who"] == "float8" else ""
    return f"{row['ours_times']:.2f}x {row['who']}{tokens}"


def _width(the_pass: Pass) -> int:
    return 56 if the_pass.by_bytes else 42


def geometric_means(rows: Iterable[Row]) -> dict[str, tuple[float, int]]:
    """For each peer, how many times as fast ours is over all workloads that both ran, and how many those are."""
    ratios = collections.defaultdict(list)
    for row in rows:
        if row["who"] != OURS and row.get("ours_times"):
            ratios[row["who"]].append(math.log(row["ours_times"]))
    return {who: (math.exp(sum(logs) / len(logs)), len(logs)) for who, logs in ratios.items()}


def recorded_means(rows: Iterable[Row]) -> dict[str, tuple[float, int]]:
    """The same against the rates that workloads.json holds."""
    ratios = collections.defaultdict(list)
    for row in rows:
        for peer, times in row.get("recorded_times", {}).items():
            ratios[peer].append(math.log(times))
    return {who: (math.exp(sum(logs) / len(logs)), len(logs)) for who, logs in ratios.items()}


def mean_line(title: str, means: dict[str, tuple[float, int]]) -> str:
    parts = [f"{mean:.2f}x {who} ({count} rows)" for who, (mean, count) in means.items()]
    return f"{title}: " + (", ".join(parts) or "nothing to compare")


def environment(command: str, commit: str | None = None) -> dict[str, Any]:
    """Everything that a published figure has to carry."""
    return {
        "platform": jax.default_backend(),
        **_device(),
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "commit": commit or _commit(),
    }


def _device() -> dict[str, Any]:
    if jax.default_backend() == "cpu":
        return {"cpu": _cpu_model(), "threads": num_threads()}
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {"gpu": jax.devices()[0].device_kind, "driver": driver.splitlines()[0] if driver else None, "cpu": _cpu_model()}


def _cpu_model() -> str:
    try:
        models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        models = []
    return models[0] if models else platform.processor()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version)
    if cuda:
        found["cuda"] = f"{int(cuda[1]) // 1000}.{int(cuda[1]) % 1000 // 10}"
    return found


def _commit() -> str | None:
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def write(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Writes the file anew; a run that ends early leaves the rows that it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    means = {who: {"ours_times": mean, "rows": count} for who, (mean, count) in geometric_means(rows).items()}
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(about | {"geometric_means": means, "rows": rows}, indent=1) + "\n")
    os.replace(partial, path)
