"""Draws the pictures of semantics.md: python docs/draw_masks.py"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

from jax_varlen import show_mask

MASKS = {
    "packed": {"cu_seqlens_q": [0, 4, 5, 11]},
    "causal": {"cu_seqlens_q": [0, 4, 5, 11], "causal": True},
    "causal_unequal": {"cu_seqlens_q": [0, 2, 7], "cu_seqlens_k": [0, 5, 7], "causal": True},
    "window": {"cu_seqlens_q": [0, 8, 12], "window_size": (2, 0)},
    "window_both_sides": {"cu_seqlens_q": [0, 8, 10], "cu_seqlens_k": [0, 6, 11], "window_size": (2, 1)},
    "seqused": {"cu_seqlens_q": [0, 5, 10], "seqused_q": [3, 5], "seqused_k": [5, 2]},
}

for name, arguments in MASKS.items():
    figure = show_mask(**arguments)
    figure.savefig(Path(__file__).parent / "images" / f"mask_{name}.png", dpi=60, metadata={"Software": None})
