"""`python -m jax_varlen`: what this installation can do, whether it is right, and what packing gains here.

The attention of a batch of sequences of very different lengths is computed packed, compared with
`jax_varlen.reference.varlen_attention`, and timed beside `jax.nn.dot_product_attention` on the same sequences padded to the
longest. The exit code is 1 when the comparison fails or when this build has no kernel for the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_varlen

BATCH, NUM_HEADS, HEAD_DIM = 32, 12, 64
TOTAL = {"cpu": 4096, "gpu": 8192}  # Padded, the logits of the larger batch alone are 1.2 GB.
CHECK_STRIDE = 29  # The reference lets each row look at all keys of the batch. Odd, to meet every place in a tile.
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2}  # Relative to the largest value; of bfloat16 one rounding is 4e-3 at most.

NEXT = """
GFLOP/s count the work on real tokens alone. What to do next:
  README.md           an example to start from, and what is supported where
  docs/semantics.md   what each option means, with the masks drawn
  examples/embed.py   a whole model on packed text"""

Attention = Callable[..., Array]


class Batch(NamedTuple):
    lengths: np.ndarray  # (batch,)
    cu_seqlens: Array  # (batch + 1,)
    q: Array  # (total, num_heads, head_dim), as k and v
    k: Array
    v: Array


def ragged_batch(total: int, dtype: str) -> Batch:
    """Log-normal lengths, as those of documents are: many short ones and a few that are much longer."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(size=BATCH)
    lengths = np.maximum(total * shares / shares.sum(), 1).astype(np.int32)
    lengths[lengths.argmax()] += total - lengths.sum()
    q, k, v = jnp.asarray(rng.standard_normal((3, total, NUM_HEADS, HEAD_DIM), np.float32), dtype)
    return Batch(lengths, jax_varlen.cu_seqlens_from_lengths(lengths), q, k, v)


def relative_error(batch: Batch) -> float:
    """Largest difference from the reference in float32, over the largest value, of every `CHECK_STRIDE`th row in all heads.

    Without a causal mask a row of q does not depend on the others, so the reference is given those rows alone. The largest
    is found by NumPy: XLA's maximum on a CPU passes over NaN.
    """
    out = jax_varlen.varlen_attention(batch.q, batch.k, batch.v, batch.cu_seqlens)
    rows = np.arange(0, len(batch.q), CHECK_STRIDE)
    q, k, v = (x.astype(jnp.float32) for x in (batch.q[rows], batch.k, batch.v))
    cu_seqlens_q = jnp.searchsorted(jnp.asarray(rows), batch.cu_seqlens).astype(jnp.int32)
    expected = jax_varlen.reference.varlen_attention(q, k, v, cu_seqlens_q, batch.cu_seqlens)
    difference = np.asarray(out[rows].astype(jnp.float32) - expected)
    return float(np.abs(difference).max() / np.abs(expected).max())


def measure(batch: Batch) -> dict[str, float]:
    """Seconds of each path: the medians of three turns, in which the paths alternate."""
    longest = int(batch.lengths.max())
    padded = [jax_varlen.unpack(x, batch.cu_seqlens, longest) for x in (batch.q, batch.k, batch.v)]
    calls = {
        "packed": (jax.jit(jax_varlen.varlen_attention), (batch.q, batch.k, batch.v, batch.cu_seqlens)),
        "padded": (jax.jit(padded_attention), (*padded, jnp.asarray(batch.lengths))),
    }
    for function, arguments in calls.values():
        jax.block_until_ready(function(*arguments))
    turns = [{name: seconds(*call) for name, call in calls.items()} for _ in range(3)]
    return {name: statistics.median(turn[name] for turn in turns) for name in calls}


def padded_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def seconds(function: Attention, arguments: tuple[Array, ...]) -> float:
    """The time of a call, from as many in a row as take 0.1 s."""
    calls, elapsed = 1, 0.0
    while True:
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        elapsed = time.perf_counter() - start
        if elapsed > 0.1 or calls >= 64:
            return elapsed / calls
        calls *= 4


def table(batch: Batch, times: dict[str, float]) -> str:
    total = len(batch.q)
    flops = 4 * NUM_HEADS * HEAD_DIM * int((batch.lengths.astype(np.int64) ** 2).sum())
    names = {"packed": "packed, jax_varlen", "padded": "padded, jax.nn"}
    rows = [f"{'path':20}{'time':>12}{'tokens/s':>15}{'GFLOP/s':>11}{'x padded':>11}"]
    for path, time_ in times.items():
        gain = times["padded"] / time_
        rows.append(f"{names[path]:20}{time_ * 1e3:9.3f} ms{total / time_:15,.0f}{flops / time_ / 1e9:11,.1f}{gain:11.1f}")
    return "\n".join(rows)


def describe(info: dict[str, Any]) -> str:
    def built(kernels: dict[str, Any]) -> str:
        facts = [str(kernels[fact]) for fact in ("isa", "architectures") if kernels.get(fact)]
        return " ".join(["built", *(f"({fact})" for fact in facts)]) if kernels.get("built") else "not built"

    return "\n".join(
        [
            f"jax_varlen {info.get('version')} with jax {info.get('jax')}, jaxlib {info.get('jaxlib')}",
            f"  device        {info.get('device')} ({info.get('platform')})",
            f"  CPU kernel    {built(info.get('cpu', {}))}",
            f"  CUDA kernels  {built(info.get('cuda', {}))}",
            f"  a call takes  {info.get('path')}",
        ]
    )


def main() -> int:
    argparse.ArgumentParser("python -m jax_varlen", description=__doc__).parse_args()
    info = jax_varlen.info()
    print(describe(info))
    platform, dtype = ("gpu", "bfloat16") if info.get("platform") == "gpu" else ("cpu", "float32")
    batch = ragged_batch(TOTAL[platform], dtype)
    total, longest = len(batch.q), int(batch.lengths.max())
    print(f"\n{BATCH} sequences of {batch.lengths.min()} to {longest} tokens, {NUM_HEADS} heads of {HEAD_DIM}, {dtype}:")
    print(f"{total} tokens packed, {BATCH * longest} padded to the longest ({1 - total / (BATCH * longest):.0%} padding).")
    try:
        error = relative_error(batch)
    except NotImplementedError as reason:
        print(f"\nNo kernel for this device. {reason}", file=sys.stderr)
        return 1
    right = error <= ALLOWED[dtype]
    print(f"\n{'Right' if right else 'WRONG'}: the largest difference from the reference is {error:.0e} of the largest value,")
    print(f"where {ALLOWED[dtype]:.0e} is allowed.")
    if not right:
        print("Please report this with the lines above.", file=sys.stderr)
        return 1
    print(f"\n{table(batch, measure(batch))}")
    print(NEXT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
