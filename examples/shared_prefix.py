"""One prompt for many requests: its keys are attended to once by all of them, and merged with what each request adds.

    python examples/shared_prefix.py --prompt 4096 --requests 32

Every request is the shared prompt and a few tokens of its own. Unshared, each request has a copy of the prompt's keys in
front of its own. Shared, the prompt's keys are there once:

1. the queries of all requests are one sequence to the prompt, and see all of it;
2. they are sequences of their own to the requests' keys, causal;
3. `merge_attention` makes one result of the two.

Both give the same attention. The exit code is 1 when they differ by more than the tolerance of the dtype.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_varlen

# Largest difference allowed in an element of the output, over the largest element.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


class Requests(NamedTuple):
    """The tokens of all requests behind each other, and the keys and values of the prompt."""

    q: Array  # (total, num_heads, head_dim)
    k: Array  # (total, num_kv_heads, head_dim)
    v: Array
    cu_seqlens: Array  # (requests + 1,)
    k_prompt: Array  # (prompt, num_kv_heads, head_dim)
    v_prompt: Array


def make_requests(prompt: int, requests: int, longest: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Requests:
    """Requests of 1 to `longest` tokens of their own."""
    keys = jax.random.split(jax.random.key(0), 6)
    lengths = jax.random.randint(keys[0], (requests,), 1, longest + 1)
    cu_seqlens = jax_varlen.cu_seqlens_from_lengths(lengths)
    total = int(cu_seqlens[-1])
    shapes = [(total, heads), (total, kv_heads), (total, kv_heads), (prompt, kv_heads), (prompt, kv_heads)]
    arrays = (jax.random.normal(key, (*shape, head_dim), dtype) for key, shape in zip(keys[1:], shapes, strict=True))
    q, k, v, k_prompt, v_prompt = arrays
    return Requests(q, k, v, cu_seqlens, k_prompt, v_prompt)


@jax.jit
def attend_shared(r: Requests) -> Array:
    all_queries = jnp.array([0, len(r.q)])
    whole_prompt = jnp.array([0, len(r.k_prompt)])
    prompt = jax_varlen.varlen_attention(r.q, r.k_prompt, r.v_prompt, all_queries, whole_prompt, return_lse=True)
    own = jax_varlen.varlen_attention(r.q, r.k, r.v, r.cu_seqlens, causal=True, return_lse=True)
    out, _ = jax_varlen.merge_attention(*prompt, *own)
    return out


@jax.jit
def attend_unshared(q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array) -> Array:
    return jax_varlen.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)


def unshare(r: Requests) -> tuple[Array, Array, Array, Array, Array]:
    """Arguments of `attend_unshared`: the prompt's keys and values once more in front of every request's own."""
    prompt, bounds = len(r.k_prompt), np.asarray(r.cu_seqlens)
    rows = [np.r_[:prompt, prompt + begin : prompt + end] for begin, end in itertools.pairwise(bounds)]
    k, v = (jnp.concatenate(pair)[np.concatenate(rows)] for pair in ((r.k_prompt, r.k), (r.v_prompt, r.v)))
    return r.q, k, v, r.cu_seqlens, r.cu_seqlens + prompt * jnp.arange(len(bounds))


def seconds(f: Callable[..., Array], *args) -> float:
    """The median of up to 5 calls, of fewer when they take long; one call before them compiles."""
    jax.block_until_ready(f(*args))
    times: list[float] = []
    while len(times) < 5 and sum(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompt", type=int, default=2048 if on_cpu else 8192, help="tokens of the prompt (default here: %(default)s)")
    add("--requests", type=int, default=64 if on_cpu else 256, help="how many share it (default here: %(default)s)")
    add("--longest", type=int, default=4, help="most tokens of a request's own (default: %(default)s)")
    add("--heads", type=int, default=8, help="query heads (default: %(default)s)")
    add("--kv-heads", type=int, default=2, help="heads of keys and values (default: %(default)s)")
    add("--head-dim", type=int, default=64, help="(default: %(default)s)")
    add("--dtype", choices=TOLERANCE, default="float32" if on_cpu else "bfloat16", help="(default here: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    r = make_requests(args.prompt, args.requests, args.longest, args.heads, args.kv_heads, args.head_dim, args.dtype)
    unshared = unshare(r)
    out, expected = (np.asarray(x, np.float32) for x in (attend_shared(r), attend_unshared(*unshared)))
    error, allowed = float(np.abs(out - expected).max() / np.abs(expected).max()), TOLERANCE[args.dtype]
    print(f"{args.requests} requests with {len(r.q)} tokens of their own behind a prompt of {args.prompt}, {args.dtype}:")
    print(f"shared and unshared {'agree' if error <= allowed else 'DISAGREE'}. ", end="")
    print(f"Largest difference {error:.1e} of the largest element, allowed {allowed:.0e}.\n")
    tokens = len(r.k_prompt) + len(r.k), len(unshared[1])
    times = seconds(attend_shared, r), seconds(attend_unshared, *unshared)
    for name, count, time_ in zip(("shared", "unshared"), tokens, times, strict=True):
        print(f"  {name:8} keys of {count:9,} tokens {time_ * 1e3:9.2f} ms")
    print(f"Shared is {times[1] / times[0]:.1f} times as fast.")
    return 0 if error <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
