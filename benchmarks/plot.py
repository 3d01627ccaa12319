"""Bar charts of result files: `python -m benchmarks.plot benchmarks/results/fwd_h200.json` writes fwd_h200.png beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# A contender has its colour in every picture, whichever others are there.
COLOURS = {
    "ours": "#2a6fdb",
    "deterministic": "#8fb4ee",
    "float8": "#2fa3a0",
    "packed": "#d9b23c",
    "fa3": "#e08a1e",
    "fa2": "#4f9d69",
    "cudnn": "#9a6fb0",
    "padded": "#a3a9b1",
    "torch_cpu": "#d1605e",
}
LABELS = {
    "ours": "jax_varlen",
    "deterministic": "jax_varlen, deterministic",
    "float8": "jax_varlen, float8 pools",
    "packed": "jax_varlen, no cache",
    "fa3": "FlashAttention-3 (JAX)",
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN (JAX)",
    "padded": "jax.nn, padded",
    "torch_cpu": "PyTorch, one by one",
}
BAR = 0.16  # inches
GAP = 1  # bars between two workloads
COLUMN = 12  # workloads; more go into two columns
INK, MUTED, FAINT = "#24292f", "#6a737d", "#d8dce1"
Group = tuple[str, list[dict[str, Any]]]


def draw(result: dict[str, Any]) -> Figure:
    """One group of horizontal bars for each workload, the rate of each contender that ran, in one or two columns.

    Decode steps have a column of their own, of the bytes that they read.
    """
    groups = list(_groups(result["rows"]).items())
    decode = [group for group in groups if _is_decode(group)]
    others = [group for group in groups if not _is_decode(group)]
    half = len(others) if decode or len(others) <= COLUMN else -(-len(others) // 2)
    columns = [column for column in (decode, others[:half], others[half:]) if column]
    height = max(sum(len(rows) + GAP for _, rows in column) for column in columns) * BAR + 1.7
    figure, axes = plt.subplots(
        1, len(columns), figsize=(8 * len(columns), height), sharex=not decode, squeeze=False, layout="constrained"
    )
    for column, column_axes in zip(columns, axes[0], strict=True):
        key, scale, label = _rate(result["platform"], column[0])
        _bars(column_axes, column, key, scale)
        _finish(column_axes, label)
    _legend(axes[0][0], groups)
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=12, color=INK)
    figure.supxlabel(_caption(result), x=0.01, ha="left", fontsize=7.5, color=MUTED)
    return figure


def _is_decode(group: Group) -> bool:
    return group[1][0].get("is_decode", False)


def _rate(platform: str, group: Group) -> tuple[str, float, str]:
    """The key of a row that is drawn, what it is multiplied by, and the label of its axis."""
    if _is_decode(group):
        return ("gbps", 1, "GB/s of the cache") if platform == "cpu" else ("gbps", 1e-3, "TB/s of the cache")
    return ("tflops", 1e3, "GFLOP/s of visible pairs") if platform == "cpu" else ("tflops", 1, "TFLOP/s of visible pairs")


def _bars(axes: Axes, groups: list[Group], key: str, scale: float) -> None:
    top, ticks = 0.0, []
    for _, rows in groups:
        for y, row in enumerate(rows, int(top)):
            rate = row[key] * scale
            axes.barh(y, rate, height=0.86, color=COLOURS[row["who"]])
            axes.annotate(_number(rate), (rate, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK)
        ticks.append(top + (len(rows) - 1) / 2)
        top += len(rows) + GAP
    axes.set_yticks(ticks, [name for name, _ in groups], color=INK, fontsize=9)
    axes.set_ylim(top - GAP, -1)


def _legend(axes: Axes, groups: list[Group]) -> None:
    seen = {row["who"] for _, rows in groups for row in rows}
    names = [who for who in COLOURS if who in seen]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[who]) for who in names]
    labels = [LABELS[who] for who in names]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.4}
    axes.legend(handles, labels, ncols=3, frameon=False, fontsize=9, labelcolor=INK, **place)


def _groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows that were timed, by workload; the dtype is named where there are several."""
    several = len({row["dtype"] for row in rows}) > 1
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "tflops" in row:
            groups.setdefault(row["workload"] + (f"\n{row['dtype']}" if several else ""), []).append(row)
    return groups


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 5 else f"{rate:.2f}"


def _finish(axes: Axes, label: str) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=MUTED, labelsize=8)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{label} (more is better)", color=INK, fontsize=9)


def _title(result: dict[str, Any]) -> str:
    dtypes = sorted({row["dtype"] for row in result["rows"]})
    return f"Attention, {result.get('pass', 'forward')}, {' and '.join(dtypes)}, {result.get('gpu') or result['cpu']}"


def _caption(result: dict[str, Any]) -> str:
    """Where the figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    device = f"driver {result['driver']}" if result.get("driver") else f"{result.get('threads')} threads"
    return f"{result['date']}, {device}, {versions}\n{result['command']}, commit {result.get('commit') or 'not recorded'}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of benchmarks.fwd, .bwd and .paged")
    for path in parser.parse_args(arguments).results:
        figure = draw(json.loads(path.read_text()))
        figure.savefig(path.with_suffix(".png"), dpi=140, facecolor="white", bbox_inches="tight")
        plt.close(figure)
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
