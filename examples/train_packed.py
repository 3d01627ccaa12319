"""A byte-level GPT trained on packed documents, beside the same training on padded ones.

    python examples/train_packed.py --steps 100

The documents are docstrings of Python's standard library and topics of its reference, from one byte to a whole context.
Packed, they stand behind each other in one array, and `cu_seqlens` says where each begins. Padded, each has a row as long as
the context, and attention is plain jax.numpy. Only attention looks at other tokens: the rest is one code for both layouts.

Every step is taken in both layouts from the same weights, and both go on from those of the packed one: left alone, two models
would part, since what rounding makes of them grows exponentially with the steps. The exit code is 1 when the losses or the
gradients of a step differ by more than the tolerance of the dtype that attention runs in.
"""

import argparse
import ast
import itertools
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_varlen

VOCABULARY, HEAD_DIM, EPSILON, ROPE_BASE = 256, 64, 1e-6, 10000.0
BETAS, WEIGHT_DECAY, WARMUP_STEPS = (0.9, 0.95), 0.1, 10

# Largest relative difference of the losses and of the gradients of a step, by the dtype of q, k and v in both layouts; the rest
# is float32 (its products are TF32 on a GPU, by XLA's default). The layouts round P, out, dP, dS, dq, dk and dv at different
# times: an error that is uniform over a unit in the last place deviates by eps / sqrt(12), and 7 in each of 2 layouts add as
# squares to about eps, of what passes through attention. Those of float32 sums grow with the root of their terms, up to 16384
# tokens. The CUDA kernels take bfloat16, the CPU kernel both.
TOLERANCE = {"float32": 2**-23 * 16384**0.5, "bfloat16": 2**-7}

Params = dict[str, Any]
Layout = tuple[np.ndarray, np.ndarray]  # tokens, and the lengths of the documents (documents,)
Attend = Callable[[Array, Array, Array], Array]
Loss = Callable[..., Array]


def init(key: Array, layers: int, width: int) -> Params:
    """The weights; those of all layers are stacked, for `jax.lax.scan`."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, scale: float = 0.02) -> Array:
        return scale * jax.random.normal(next(keys), shape)

    into_stream = 0.02 / (2 * layers) ** 0.5
    return {
        "embedding": normal(VOCABULARY, width, scale=1.0),
        "norm": jnp.ones(width),
        "head": normal(width, VOCABULARY),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "qkv": normal(layers, width, 3, width // HEAD_DIM, HEAD_DIM),
            "out": normal(layers, width // HEAD_DIM, HEAD_DIM, width, scale=into_stream),
            "mlp_norm": jnp.ones((layers, width)),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width, scale=into_stream),
        },
    }


def rms_norm(x: Array, gain: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * gain


def rotate(x: Array, places: Array) -> Array:
    """Rotary positions of x (..., heads, head_dim); places (...,) count from the start of each document."""
    half = x.shape[-1] // 2
    angles = places[..., None, None] * ROPE_BASE ** (-jnp.arange(half) / half)
    (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gpt(params: Params, tokens: Array, places: Array, attend: Attend) -> Array:
    """Tokens (...,) and their places in their own documents to logits (..., VOCABULARY)."""

    def layer(x: Array, w: Params) -> tuple[Array, None]:
        q, k, v = jnp.einsum("...w,wnhd->n...hd", rms_norm(x, w["attention_norm"]), w["qkv"])
        x = x + jnp.einsum("...hd,hdw->...w", attend(rotate(q, places), rotate(k, places), v), w["out"])
        return x + jax.nn.gelu(rms_norm(x, w["mlp_norm"]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return rms_norm(x, params["norm"]) @ params["head"]


def mean_loss(logits: Array, targets: Array, counts: Array) -> Array:
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.where(counts, losses, 0).sum() / counts.sum()


def packed_loss(params: Params, tokens: Array, lengths: Array, *, dtype: str) -> Array:
    """Of tokens (total,): documents of these lengths, then tokens of nobody."""
    cu_seqlens = jax_varlen.cu_seqlens_from_lengths(lengths)
    owners = jax_varlen.segment_ids(cu_seqlens, len(tokens))
    places = jax_varlen.positions(cu_seqlens, len(tokens))
    attend = partial(jax_varlen.varlen_attention, cu_seqlens_q=cu_seqlens, causal=True)
    logits = gpt(params, tokens, places, cast(attend, dtype))
    # Behind a document's last token begins another document, which it must not learn. Tokens of nobody have the owner -1.
    has_next = (owners >= 0) & (owners == jnp.append(owners[1:], -1))
    return mean_loss(logits, jnp.roll(tokens, -1), has_next)


def padded_loss(params: Params, tokens: Array, lengths: Array, *, dtype: str) -> Array:
    """The same of tokens (documents, context): the first lengths[i] of row i, then padding."""
    places = jnp.arange(tokens.shape[1])
    logits = gpt(params, tokens, places, cast(padded_attention, dtype))
    return mean_loss(logits, jnp.roll(tokens, -1, axis=1), places + 1 < lengths[:, None])


def padded_attention(q: Array, k: Array, v: Array) -> Array:
    """Of (documents, context, heads, head_dim). The causal mask hides the padding too, which stands behind each document."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(jnp.tri(q.shape[1], dtype=bool), s, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v)


def cast(attention: Attend, dtype: str) -> Attend:
    return lambda q, k, v: attention(q.astype(dtype), k.astype(dtype), v.astype(dtype)).astype(q.dtype)


class State(NamedTuple):
    params: Params
    mean: Params
    square: Params
    steps: Array


@partial(jax.jit, static_argnames="loss", donate_argnums=0)
def train_step(state: State, layout: Layout, rate: float, *, loss: Loss) -> tuple[State, Array]:
    """One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""
    value, gradient = jax.value_and_grad(loss)(state.params, *layout)
    (b1, b2), steps = BETAS, state.steps + 1
    step_rate = rate * jnp.minimum(steps / WARMUP_STEPS, 1)
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, state.square, gradient)

    def update(x: Array, m: Array, s: Array) -> Array:
        return x - step_rate * (m / (1 - b1**steps) / (jnp.sqrt(s / (1 - b2**steps)) + 1e-8) + WEIGHT_DECAY * x)

    return State(jax.tree.map(update, state.params, mean, square), mean, square, steps), value


@jax.jit
def relative_difference(a: Params, b: Params) -> Array:
    def norm(x: Params) -> Array:
        return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x)))

    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(b)


class Training:
    """A model that learns in one of the layouts. Its step is compiled once: it takes one shape and refuses any other."""

    def __init__(self, name: str, loss: Loss, params: Params, layout: Layout, rate: float):
        self.name, self.shape, self.rate = name, layout[0].shape, rate
        zeros = partial(jax.tree.map, jnp.zeros_like, params)
        self.state = State(jax.tree.map(jnp.copy, params), zeros(), zeros(), jnp.int32(0))
        self.compiled = train_step.lower(self.state, layout, rate, loss=loss).compile()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, layout: Layout) -> float:
        start = time.perf_counter()
        self.state, loss = jax.block_until_ready(self.compiled(self.state, layout, self.rate))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))
        return self.losses[-1]


def standard_library_documents(context: int) -> list[bytes]:
    """Topics and docstrings. Of one that is longer than a context, every context is a document."""
    texts = list(topics.values())
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts += [ast.get_docstring(x) or "" for x in nodes if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef)]
    encoded = [text.encode() for text in dict.fromkeys(texts)]
    return [text[i : i + context] for text in encoded for i in range(0, len(text), context)]


def batches(documents: Sequence[bytes], most: int, tokens: int) -> Iterator[list[bytes]]:
    """Documents in random order without end: at most `most` at once, and at most `tokens` tokens."""
    order = random.Random(0)
    batch: list[bytes] = []
    while True:
        for document in order.sample(documents, len(documents)):
            if len(batch) == most or sum(map(len, batch)) + len(document) > tokens:
                yield batch
                batch = []
            batch.append(document)


def arrays(batch: Sequence[bytes], most: int, total: int, context: int) -> tuple[Layout, Layout]:
    """Packed tokens (total,) and padded ones (most, context). Both are shapes: empty documents and zeros fill them up."""
    lengths = np.array([*map(len, batch), *[0] * (most - len(batch))], np.int32)
    packed, padded = np.zeros(total, np.int32), np.zeros((most, context), np.int32)
    packed[: lengths.sum()] = np.frombuffer(b"".join(batch), np.uint8)
    padded[np.arange(context) < lengths[:, None]] = packed[: lengths.sum()]
    return (packed, lengths), (padded, lengths)


def draw(trainings: Sequence[Training], differences: np.ndarray, allowed: float, path: Path) -> None:
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(differences) + 1)
    for training, style in zip(trainings, ("-", "--"), strict=True):
        above.plot(steps, training.losses, style, label=training.name)
    above.set(ylabel="loss (nats per byte)", title="A byte-level GPT, trained on packed and on padded documents")
    for of_what, values in zip(("loss", "gradients"), differences.T, strict=True):
        below.semilogy(steps, np.maximum(values, 1e-8), ".", label=of_what)  # A log axis has no zero.
    below.axhline(allowed, color="tab:red", label="allowed")
    below.set(xlabel="step", ylabel="relative difference")
    for axes in (above, below):
        axes.legend()
    figure.savefig(path, dpi=120)


def speed_table(trainings: Sequence[Training], tokens: Sequence[int]) -> str:
    """Medians of the steps. Tokens are those of documents alone; memory is what a step takes beside weights and batch."""
    rows = [f"{'':24}{'a step':>12}{'tokens/s':>12}{'memory':>12}"]
    for t in trainings:
        seconds, rate = statistics.median(t.seconds), statistics.median(np.divide(tokens, t.seconds))
        analysis = t.compiled.memory_analysis()
        memory = f"{analysis.temp_size_in_bytes / 2**20:,.0f} MiB" if analysis else "unknown"
        rows.append(f"{f'{t.name} into {t.shape}':24}{seconds * 1e3:9,.0f} ms{rate:12,.0f}{memory:>12}")
    return "\n".join(rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, default: Any, text: str, **options: Any) -> None:
        parser.add_argument(name, default=default, type=type(default), help=f"{text} (default here: {default})", **options)

    add("--steps", 60 if on_cpu else 100, "of each training")
    add("--layers", 3 if on_cpu else 8, "of each model")
    add("--width", 128 if on_cpu else 512, f"of each model, a multiple of {HEAD_DIM}")
    add("--documents", 8 if on_cpu else 48, "in a batch, at most")
    add("--tokens", 2048 if on_cpu else 16384, "in a batch, at most")
    add("--context", 512 if on_cpu else 1024, "of the longest document, in bytes")
    add("--rate", 1e-3, "of learning")
    add("--dtype", "float32" if on_cpu else "bfloat16", "of q, k and v in attention", choices=TOLERANCE)
    add("--plot", Path("train_packed.png"), "where the loss curves go")
    args = parser.parse_args(arguments)
    if args.context > args.tokens or args.width % HEAD_DIM or args.steps < 1:
        parser.error(f"A context must fit into --tokens, --width be a multiple of {HEAD_DIM}, and --steps at least 1.")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    documents = standard_library_documents(args.context)
    groups = list(itertools.islice(batches(documents, args.documents, args.tokens), args.steps))
    steps = [arrays(group, args.documents, args.tokens, args.context) for group in groups]
    params = init(jax.random.key(0), args.layers, args.width)
    packed = Training("packed", partial(packed_loss, dtype=args.dtype), params, steps[0][0], args.rate)
    padded = Training("padded", partial(padded_loss, dtype=args.dtype), params, steps[0][1], args.rate)
    weights, size = sum(x.size for x in jax.tree.leaves(params)), sum(map(len, documents))
    print(f"{weights / 1e6:.1f} million weights, {len(documents):,} documents, {size / 1e6:.1f} MB.")

    progress, rows = tqdm(steps, "training"), []
    for of_packed, of_padded in progress:
        progress.set_postfix_str(f"loss {packed.step(of_packed):.3f} and {padded.step(of_padded):.3f}")
        of_gradients = float(relative_difference(packed.state.mean, padded.state.mean))  # Means of gradients, that is.
        rows.append((abs(packed.losses[-1] / padded.losses[-1] - 1), of_gradients))
        padded.state = jax.tree.map(jnp.copy, packed.state)

    differences, allowed = np.array(rows), TOLERANCE[args.dtype]
    worst = differences.max(0)
    agree = (worst <= allowed).all()  # Not so where one is NaN.
    draw((packed, padded), differences, allowed, args.plot)
    print(f"Loss {packed.losses[0]:.3f} to {packed.losses[-1]:.3f} nats per byte in {args.steps} steps, see {args.plot}.")
    print(f"Packed ({args.dtype} attention of jax_varlen) and padded ({args.dtype} attention of jax.numpy) steps")
    found = "Largest relative difference {:.1e} of losses, {:.1e} of gradients".format(*worst)
    print(f"{'agree' if agree else 'DISAGREE'}. {found}, allowed {allowed:.0e}.")
    print(f"\n{speed_table((packed, padded), [sum(map(len, group)) for group in groups])}")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
