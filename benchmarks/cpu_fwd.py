"""The CPU forward kernel beside PyTorch, sequence by sequence, and beside padded JAX, interleaved in one process.

python benchmarks/cpu_fwd.py [--cpu-time] [workload ...]

--cpu-time counts processor seconds of one PyTorch thread instead of the wall clock of two: a machine that does other
work too then still gives honest ratios. Padded JAX is timed alone and once, because it takes so long.
"""

import argparse
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_varlen import _cpu

TARGET = "jax_varlen_fwd_benchmark"
ROUNDS = 7


def skewed(batch, total):
    weights = np.random.default_rng(0).lognormal(0, 1, batch)
    lengths = np.maximum(1, (weights / weights.sum() * total).astype(int))
    lengths[lengths.argmax()] += total - lengths.sum()
    return lengths


# name: lengths, query heads, kv heads, head_dim, causal
WORKLOADS = {
    "a": (skewed(32, 4096), 12, 12, 64, False),
    "b": (skewed(8, 4096), 16, 4, 128, True),
    "c": (np.array([2048]), 8, 8, 64, True),
    "encoder": (np.random.default_rng(1).integers(16, 65, 64), 12, 12, 32, False),
    "d80": (skewed(8, 4096), 8, 8, 80, False),
    "d256": (skewed(8, 4096), 8, 2, 256, True),
}


def kernel(q, k, v, cu_seqlens, causal):
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((q.shape[1], q.shape[0]), jnp.float32)
    absent_int, absent_float = np.zeros(0, np.int32), np.zeros(0, np.float32)
    scale = np.float32(q.shape[-1] ** -0.5)
    operands = q, k, v, cu_seqlens, cu_seqlens, absent_int, absent_int, scale, absent_float, absent_float
    attributes = dict(window_left=np.int64(-1), window_right=np.int64(0 if causal else -1), softcap=np.float32(0))
    return jax.ffi.ffi_call(TARGET, out)(*operands, **attributes)[0]


def run_torch(q, k, v, cu_seqlens, causal):
    for begin, end in itertools.pairwise(cu_seqlens):
        q_b, k_b, v_b = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        torch.nn.functional.scaled_dot_product_attention(
            q_b, k_b, v_b, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def padded(x, cu_seqlens):
    rows = max(np.diff(cu_seqlens))
    sequences = np.split(np.asarray(x), cu_seqlens[1:-1])
    return jnp.stack([np.pad(s, ((0, rows - len(s)), (0, 0), (0, 0))) for s in sequences])


def seconds(clock, call, repeat=1):
    start = clock()
    for _ in range(repeat):
        call()
    return (clock() - start) / repeat


def measure(name, dtype, clock):
    lengths, heads, kv_heads, dim, causal = WORKLOADS[name]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((cu_seqlens[-1], h, dim), np.float32) for h in (heads, kv_heads, kv_heads)]
    ours = [jnp.asarray(x).astype(dtype) for x in arrays]
    theirs = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]

    attend = jax.jit(lambda q, k, v: kernel(q, k, v, cu_seqlens, causal))
    attend_padded = jax.jit(
        lambda q, k, v, n: jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, query_seq_lengths=n, key_value_seq_lengths=n
        )
    )
    pads = [padded(x, cu_seqlens) for x in ours]
    calls = {
        "ours": lambda: jax.block_until_ready(attend(*ours)),
        "torch": lambda: run_torch(*theirs, cu_seqlens, causal),
        "padded": lambda: jax.block_until_ready(attend_padded(*pads, jnp.asarray(lengths, jnp.int32))),
    }
    for call in calls.values():
        call()
    times = {"ours": [], "torch": [], "padded": [seconds(clock, calls["padded"])]}
    repeat = max(1, int(0.05 / seconds(clock, calls["ours"])))
    for _ in range(ROUNDS):
        for which in ("ours", "torch"):
            times[which].append(seconds(clock, calls[which], repeat))

    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in map(int, lengths))
    median = {which: statistics.median(t) for which, t in times.items()}
    rate = {which: 4 * dim * heads * pairs / t / 1e9 for which, t in median.items()}
    print(
        f"{name:8} {dtype:9} {median['ours'] * 1e6:9.0f} us | GFLOP/s: ours {rate['ours']:6.1f}  "
        f"torch {rate['torch']:6.1f}  padded jax {rate['padded']:6.1f} | times torch "
        f"{rate['ours'] / rate['torch']:5.2f}  times padded {rate['ours'] / rate['padded']:6.1f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu_time else 2)
    jax.config.update("jax_platforms", "cpu")
    jax.ffi.register_ffi_target(TARGET, _cpu.registrations()["jax_varlen_fwd_v1"], platform="cpu")
    print(f"kernel {_cpu.isa()}, torch {torch.__version__}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    with torch.inference_mode():
        for name in arguments.workloads:
            for dtype in ("float32", "bfloat16"):
                measure(name, dtype, time.process_time if arguments.cpu_time else time.perf_counter)


if __name__ == "__main__":
    main()
