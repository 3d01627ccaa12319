"""A picture of the mask: who sees whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from . import shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TICKS = 24


def show_mask(
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    ax: Any = None,
) -> Figure:
    """Draws which key (column) each row of q (row) sees: filled where it does, one colour per sequence.

    Lines part the sequences; rows and keys that belong to nobody are hatched. Offsets and options mean what they mean in
    `varlen_attention`, and must be values that are known: this draws, it does not trace.

    **Arguments:** `cu_seqlens_q`, `cu_seqlens_k`: integers `(batch + 1,)`; `seqused_q`, `seqused_k`: integers `(batch,)`;
    `causal`, `window_size`: the mask; `ax`: the matplotlib axes to draw into, by default those of a new figure.

    **Returns:** the matplotlib figure (`figure.savefig("mask.png")`).

    **Raises:** `ImportError` without matplotlib; `ValueError` or `TypeError` for what `varlen_attention` refuses too.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('show_mask draws with matplotlib, which is not installed: pip install "jax-varlen[plot]".') from error
    left, right = shapes.window_bounds(window_size, causal)
    cu_q = _offsets("cu_seqlens_q", cu_seqlens_q)
    cu_k = cu_q if cu_seqlens_k is None else _offsets("cu_seqlens_k", cu_seqlens_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one shape, got {cu_q.shape} and {cu_k.shape}.")
    len_q, len_k = _lengths("seqused_q", cu_q, seqused_q), _lengths("seqused_k", cu_k, seqused_k)
    owner = _picture(cu_q, cu_k, len_q, len_k, left, right)

    if ax is None:
        size = np.clip(0.25 * np.array([cu_k[-1], cu_q[-1]]) + 1.2, 2, 12)
        _, ax = plt.subplots(figsize=size, layout="constrained")
    colours = plt.get_cmap("tab10")(np.maximum(owner, 0) % 10)
    colours[owner < 0] = 1
    ax.imshow(colours, extent=(0, max(cu_k[-1], 1), max(cu_q[-1], 1), 0), interpolation="nearest")
    _mark_sequences(ax, cu_q, cu_k, len_q, len_k)
    ax.set_xlabel("keys")
    ax.set_ylabel("queries")
    return ax.get_figure()


def _picture(cu_q, cu_k, len_q, len_k, left: int, right: int) -> np.ndarray:
    """(total_q, total_k): the sequence where a row sees a key, -1 elsewhere."""
    owner = np.full((max(cu_q[-1], 1), max(cu_k[-1], 1)), -1)
    for b, (first_q, first_k, n_q, n_k) in enumerate(zip(cu_q, cu_k, len_q, len_k, strict=False)):
        offset = np.arange(n_k)[None, :] - (np.arange(n_q) + n_k - n_q)[:, None]  # of a key from the row's diagonal
        seen = np.ones((n_q, n_k), bool)
        if left != shapes.UNBOUNDED:
            seen &= offset >= -left
        if right != shapes.UNBOUNDED:
            seen &= offset <= right
        owner[first_q : first_q + n_q, first_k : first_k + n_k][seen] = b
    return owner


def _mark_sequences(ax, cu_q, cu_k, len_q, len_k) -> None:
    """Lines at the offsets, ticks at the rows, hatching over what is nobody's."""
    end_q, end_k = max(cu_q[-1], 1), max(cu_k[-1], 1)
    ax.hlines(cu_q, 0, end_k, color="black", linewidth=1)
    ax.vlines(cu_k, 0, end_q, color="black", linewidth=1)
    hatched = {"facecolor": "none", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}
    for first, last in zip([0, *(cu_q[:-1] + len_q)], cu_q, strict=True):
        if first < last:
            ax.axhspan(first, last, **hatched)
    for first, last in zip([0, *(cu_k[:-1] + len_k)], cu_k, strict=True):
        if first < last:
            ax.axvspan(first, last, **hatched)
    ax.set_xlim(0, end_k)
    ax.set_ylim(end_q, 0)
    for axis, cu_seqlens in ((ax.xaxis, cu_k), (ax.yaxis, cu_q)):
        places = np.concatenate([np.arange(n) for n in np.diff(cu_seqlens)] or [np.arange(0)])
        step = -(-max(places.size, 1) // MAX_TICKS)
        axis.set_ticks(cu_seqlens[0] + np.arange(places.size)[::step] + 0.5, places[::step], fontsize=7)
        axis.set_tick_params(length=0)


def _offsets(name: str, x: ArrayLike) -> np.ndarray:
    cu_seqlens = np.asarray(shapes.as_int32(name, x))
    if cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
        raise ValueError(f"{name} must have shape (batch + 1,) and at least one entry, got {cu_seqlens.shape}.")
    if cu_seqlens[0] < 0 or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(f"{name} must rise from 0 or more, got {cu_seqlens.tolist()}.")
    return cu_seqlens


def _lengths(name: str, cu_seqlens: np.ndarray, seqused: ArrayLike | None) -> np.ndarray:
    lengths = np.diff(cu_seqlens)
    if seqused is None:
        return lengths
    used = np.asarray(shapes.as_int32(name, seqused))
    if used.shape != lengths.shape or (used < 0).any() or (used > lengths).any():
        raise ValueError(f"{name} must hold one length of 0 to {lengths.tolist()} per sequence, got {used.tolist()}.")
    return used
