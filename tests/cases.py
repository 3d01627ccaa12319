"""Named inputs: each is there for a fault that an attention kernel somewhere had. Tests and benchmarks share them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401, so that NumPy knows bfloat16
import numpy as np


@dataclass(frozen=True)
class Case:
    """A packed batch. Rows of nobody (gaps, tails, rows beyond `seqused`) hold NaN."""

    name: str
    reason: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...] | None = None  # None: those of q, and no cu_seqlens_k is given
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    gap: int = 0  # rows before the first sequence
    tail: int = 0  # rows behind the last one
    options: dict[str, Any] = field(default_factory=dict)  # causal, window_size, softcap, softmax_scale, seqused_q, seqused_k
    alibi: str | None = None  # "heads": (num_heads,); "batch": (batch, num_heads); "negative": (num_heads,), down to -2
    sinks: float | str | None = None  # one value for all heads, or "random"
    q: float | Callable | None = None  # instead of random numbers: one value, or a function of (rng, shape)
    k: float | Callable | None = None
    v: float | Callable | None = None
    seed: int = 0

    def __str__(self):
        return self.name

    def inputs(self, dtype) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        """(q, k, v, cu_seqlens_q[, cu_seqlens_k]) and the keyword arguments of `varlen_attention`."""
        rng = np.random.default_rng(self.seed)
        lens_k = self.lens_q if self.lens_k is None else self.lens_k
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        cu_q, cu_k = (self.gap + np.cumsum([0, *lens], dtype=np.int32) for lens in (self.lens_q, lens_k))
        total_q, total_k = int(cu_q[-1]) + self.tail, int(cu_k[-1]) + self.tail
        options = {name: _as_array(x) if name.startswith("seqused") else x for name, x in self.options.items()}
        owned_q, owned_k = _owned(cu_q, options.get("seqused_q"), total_q), _owned(cu_k, options.get("seqused_k"), total_k)
        q = _fill(rng, self.q, (total_q, self.num_heads, self.head_dim), owned_q, dtype)
        k = _fill(rng, self.k, (total_k, self.num_kv_heads, self.head_dim), owned_k, dtype)
        v = _fill(rng, self.v, (total_k, self.num_kv_heads, head_dim_v), owned_k, dtype)
        if self.alibi is not None:
            shape = (len(self.lens_q), self.num_heads) if self.alibi == "batch" else (self.num_heads,)
            bounds = (-2, 0) if self.alibi == "negative" else (0, 0.5)
            options["alibi_slopes"] = rng.uniform(*bounds, shape).astype(np.float32)
        if self.sinks is not None:
            sinks = rng.normal(size=self.num_heads) if self.sinks == "random" else np.full(self.num_heads, self.sinks)
            options["sinks"] = sinks.astype(np.float32)
        offsets = (cu_q,) if self.lens_k is None else (cu_q, cu_k)
        return (q, k, v, *offsets), options


def _as_array(x):
    return np.asarray(x, np.int32)


def _owned(cu_seqlens, seqused, total):
    lengths = np.diff(cu_seqlens) if seqused is None else seqused
    owned = np.zeros(total, bool)
    for first, n in zip(cu_seqlens[:-1], lengths, strict=True):
        owned[first : first + n] = True
    return owned


def _fill(rng, value, shape, owned, dtype):
    value = _times(1) if value is None else value
    x = (value(rng, shape) if callable(value) else np.full(shape, value)).astype(dtype)
    x[~owned] = np.nan
    return x


def _times(factor):
    return lambda rng, shape: factor * rng.normal(size=shape)


def _identity(rng, shape):
    """Row j holds the j-th unit vector, so that out is P itself."""
    return np.broadcast_to(np.eye(shape[0], shape[2])[:, None], shape).copy()


def _one_far_below(rng, shape):
    """Logits of -20000 for the one visible key, of 0 for the others (with q = 100 and the scale 1)."""
    x = np.zeros(shape)
    x[:1] = -200 / shape[2]
    return x


def _lengths(seed, n, low, high):
    return tuple(int(x) for x in np.random.default_rng(seed).integers(low, high, n))


CASES = (
    # Empty and degenerate.
    Case(
        "empty_in_the_middle",
        "an empty sequence between others, more keys than rows",
        (1, 0, 1),
        (3, 0, 5),
        9,
        3,
        options={"causal": True},
    ),
    Case("empty_first", "all empty but the last, odd GQA, head_dim 120", (0, 0, 0, 1), None, 21, 7, 120),
    Case("empty_but_first", "all empty but the first", (9, 0, 0, 0)),
    Case("no_row_for_keys", "keys of a sequence that has no rows are seen by nobody", (150, 0, 150), (100, 100, 100), 2, 2, 32),
    Case("long_behind_empty", "empty sequences in front of a long one", (0, 0, 1023), (0, 1, 2045), 2, 1),
    Case("no_q", "total_q 0", (0,), (8,)),
    Case("no_k", "total_k 0: out 0 and lse -inf", (8,), (0,)),
    Case("no_k_sinks", "total_k 0 with sinks: lse is the sink", (8,), (0,), sinks="random"),
    Case("nothing", "total_q and total_k 0", (0,), (0,)),
    Case("no_sequence", "batch 0, and every row is nobody's", (), (), tail=5),
    Case("no_sequence_no_row", "batch 0 and total_q 0", (), ()),
    Case("keys_for_no_rows", "keys only in the first, rows only in the second", (0, 5), (7, 5)),
    Case("one_token", "one token of size 3", (1,), None, 1, 1, 16, q=_times(3), k=_times(3)),
    Case("rows_without_keys", "a sequence that has rows and no keys", (3, 2), (0, 4)),
    Case("sink_alone", "a sink and no visible key: out 0, lse 0.5", (4,), options={"seqused_k": (0,)}, sinks=0.5),
    Case("sink_large", "a sink far above all logits", (40, 7), sinks=100.0),
    Case("sink_very_negative", "a sink that takes no part", (40, 7), sinks=-1e4),
    # Tokens that belong to nobody.
    Case("tail", "rows behind the last sequence", (3, 4), tail=9, options={"causal": True}),
    Case("gap_and_tail", "rows before the first and behind the last sequence", (70, 3, 65), (5, 130, 64), gap=11, tail=40),
    Case("mostly_tail", "a buffer many times larger than its content", (1, 1, 1, 1, 200), tail=3000, options={"causal": True}),
    Case(
        "seqused", "padding inside the strides", (8, 8, 8), (8, 8, 8), options={"seqused_q": (5, 0, 7), "seqused_k": (4, 6, 0)}
    ),
    Case(
        "seqused_long",
        "lengths that end inside a tile",
        (300, 300),
        (300, 300),
        options={"seqused_q": (257, 1), "seqused_k": (70, 299), "causal": True},
    ),
    Case("seqused_q_alone", "all keys count, not all rows", (64, 64), options={"seqused_q": (63, 17)}),
    Case("tile_and_one", "one token in a tile of its own", (65, 1), options={"causal": True}),
    Case("whole_tiles", "lengths of exactly a tile", (128, 128), options={"causal": True}),
    # Geometry.
    Case("causal_short_q", "2 rows of 5 keys see 4 and 5", (2,), (5,), v=_identity, options={"causal": True}),
    Case("causal_short_k", "5 rows of 2 keys see 0, 0, 0, 1, 2", (5,), (2,), v=_identity, options={"causal": True}),
    Case("window_no_key", "rows 0 to 3 of 8 see nothing of 2 keys", (8,), (2,), options={"window_size": (None, 2)}),
    Case("window_int32_max", "the largest bound is no bound", (8,), (2,), options={"window_size": (2**31 - 1, 2**31 - 1)}),
    Case(
        "window_near_int32_max",
        "a bound that overflows when a length is added",
        (5, 60),
        (70, 9),
        options={"window_size": (2**31 - 2, 2**31 - 2)},
    ),
    Case(
        "window_as_long", "a window as long as the longest sequence is causal", (257, 3, 64), options={"window_size": (257, 0)}
    ),
    Case("window_one_shorter", "the shortest window that is still causal", (257, 3, 64), options={"window_size": (256, 0)}),
    Case("window_bites", "a window one shorter than that", (257, 3, 64), options={"window_size": (255, 0)}),
    Case("window_self", "each token sees itself alone", (65, 3), options={"window_size": (0, 0)}, v=_identity),
    Case(
        "window_last_row",
        "row 9 averages keys 6 to 9",
        (10,),
        None,
        2,
        2,
        16,
        q=0.0,
        v=_identity,
        options={"window_size": (3, 0)},
    ),
    Case("window_both_sides", "two-sided, tiles masked on both ends", (300, 50), (200, 170), options={"window_size": (70, 33)}),
    Case("window_right_alone", "no left bound", (100,), (150,), options={"window_size": (None, 5)}),
    Case("window_and_causal", "causal caps the right bound", (130,), (200,), options={"window_size": (40, 7), "causal": True}),
    Case(
        "window_long_k",
        "few rows, many keys, a left bound that is no multiple of a tile",
        (20,),
        (256,),
        options={"window_size": (33, None)},
    ),
    Case("window_decode", "the last token with a window", (1, 1), (50, 7), options={"window_size": (7, 0)}),
    Case(
        "decode",
        "one row per sequence, keys of all lengths",
        (1,) * 9,
        (1, 2, 3, 64, 65, 127, 128, 129, 500),
        16,
        2,
        options={"causal": True},
    ),
    Case("chunk", "a chunk of rows at the end of longer keys", (5, 17, 64), (100, 17, 333), options={"causal": True}),
    Case(
        "alibi_40_heads",
        "40 heads, lengths that are no multiple of 16",
        (33, 7, 81),
        None,
        40,
        40,
        32,
        alibi="heads",
        options={"causal": True},
    ),
    Case("alibi_negative", "rows behind the end of a tile meet a bias of exp(2 * distance)", (70, 5), alibi="negative"),
    Case("softcap_never_reached", "a cap far above all logits costs no precision", (40, 9), options={"softcap": 1e6}),
    Case(
        "far_below_zero_long",
        "logits of -5e4 in many tiles of keys: no rounding error grows from tile to tile",
        (3,),
        (700,),
        q=-300.0,
        k=300.0,
    ),
    Case("alibi_batch", "slopes per sequence, bidirectional, unequal lengths", (50, 3, 70), (60, 90, 10), alibi="batch"),
    Case(
        "alibi_large_head_dim",
        "no option is dropped for a large head_dim",
        (40, 60),
        None,
        2,
        1,
        256,
        alibi="heads",
        sinks="random",
        options={"softcap": 5.0, "window_size": (20, 9)},
    ),
    Case(
        "everything",
        "all options at once",
        (65, 0, 130, 9),
        (90, 7, 100, 9),
        6,
        2,
        80,
        48,
        gap=3,
        tail=5,
        alibi="batch",
        sinks="random",
        options={
            "softcap": 3.0,
            "window_size": (50, 20),
            "softmax_scale": 0.3,
            "seqused_q": (60, 0, 130, 8),
            "seqused_k": (90, 5, 99, 0),
        },
    ),
    # Numbers.
    Case(
        "far_below_zero",
        "all logits below -5e4: out is the mean of v",
        (2,),
        (2,),
        q=-300.0,
        k=300.0,
        options={"softmax_scale": 0.01},
    ),
    Case(
        "masked_key_far_above",
        "a visible logit of -20000 beside masked keys of 0",
        (4,),
        (4,),
        1,
        1,
        q=100.0,
        k=_one_far_below,
        v=_identity,
        options={"causal": True, "softmax_scale": 1.0},
    ),
    Case("softcap_saturated", "softcap 10 on logits of 1e4", (40, 9), q=_times(40), k=_times(40), options={"softcap": 10.0}),
    Case("softcap_tiny", "softcap far below the logits", (40, 9), options={"softcap": 0.1, "causal": True}),
    Case("over_float16", "q.k beyond 65504", (30,), q=_times(100), k=_times(100), options={"softmax_scale": 1e-4}),
    Case("scale_zero", "a scale of 0 averages v", (33, 7), options={"softmax_scale": 0.0, "causal": True}),
    Case("scale_negative", "a scale below 0 turns the order round", (70, 7), options={"softmax_scale": -0.2, "causal": True}),
    Case("peaked", "one key takes all the weight", (70,), q=_times(10), k=_times(10), options={"causal": True}),
    # Sizes.
    Case("mqa_71_heads", "one kv head for 71", (20, 45), None, 71, 1, 64, options={"causal": True}),
    Case("head_dim_v_larger", "values wider than keys", (70, 9), None, 4, 2, 64, 128, options={"causal": True}),
    Case("head_dim_v_smaller", "values narrower than keys", (70, 9), None, 4, 2, 192, 128, options={"causal": True}),
    Case("skewed", "one long sequence among short ones", (700, 3, 1, 40, 12, 90), options={"causal": True}),
    Case("batch_993", "more sequences than any fixed table", _lengths(1, 993, 0, 5), None, 2, 1, 16, options={"causal": True}),
)

# One case for each mechanism, for paths whose code takes long to compile.
SELECTED = tuple(
    case
    for case in CASES
    if case.name
    in [
        "empty_in_the_middle",
        "no_q",
        "no_k",
        "no_k_sinks",
        "no_sequence",
        "rows_without_keys",
        "sink_alone",
        "gap_and_tail",
        "mostly_tail",
        "seqused",
        "seqused_long",
        "causal_short_k",
        "window_near_int32_max",
        "window_both_sides",
        "window_long_k",
        "alibi_large_head_dim",
        "everything",
        "far_below_zero",
        "masked_key_far_above",
        "softcap_saturated",
        "decode",
        "batch_993",
    ]
)


def cotangents(args, options, seed=7):
    """Random dout and dlse. In rows of nobody they are NaN, as the inputs there are."""
    q, _, v, cu_q, *_ = args
    rng = np.random.default_rng(seed)
    dout, dlse = rng.normal(size=(*q.shape[:2], v.shape[2])).astype(q.dtype), rng.normal(size=q.shape[1::-1]).astype(np.float32)
    owned = _owned(cu_q, options.get("seqused_q"), len(q))
    dout[~owned], dlse[:, ~owned] = np.nan, np.nan
    return dout, dlse


def padded(args, options, *, total=512, batch=9):
    """The same batch in buffers of one size: rows of NaN that are nobody's, and empty sequences at the end."""
    q, k, v, *offsets = args

    def rows(x):
        return np.concatenate([x, np.full((max(total - len(x), 0), *x.shape[1:]), np.nan, x.dtype)])

    def sequences(x, value):
        return np.concatenate([x, np.full((max(batch - len(x), 0), *x.shape[1:]), value, x.dtype)])

    options = dict(options)
    for name in ("seqused_q", "seqused_k"):
        if name in options:
            options[name] = sequences(options[name], 0)
    if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
        options["alibi_slopes"] = sequences(options["alibi_slopes"], 0)
    offsets = [np.concatenate([x, np.full(max(batch + 1 - len(x), 0), x[-1], x.dtype)]) for x in offsets]
    return (rows(q), rows(k), rows(v), *offsets), options
