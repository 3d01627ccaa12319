"""The CPU backward kernel beside the forward kernel and beside the padded JAX attention's backward, interleaved in one process.

python -m benchmarks.cpu_bwd [--cpu-time] [workload ...]

--cpu-time counts processor seconds instead of the wall clock: a machine that does other work too then still gives honest
ratios. The residuals of the padded backward are kept from a forward pass outside the clock, as those of the kernel are.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_varlen import kernels, primitives

from . import workloads
from .workloads import Workload

ROUNDS, PADDED_ROUNDS, SECONDS = 7, 2, 0.1
BACKWARD_FLOPS = 2.5  # five products, of which the forward pass has two


def random_arrays(workload: Workload, dtype: str) -> list[jax.Array]:
    """q, k, v, dout."""
    random = np.random.default_rng(0)
    heads = workload.num_heads, workload.num_kv_heads, workload.num_kv_heads, workload.num_heads
    shapes = [(workload.total, h, workload.head_dim) for h in heads]
    return [jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def packed(workload: Workload, arrays: list[jax.Array]) -> dict[str, Callable]:
    q, k, v, dout = arrays
    window_left = -1 if workload.window_left is None else workload.window_left
    options = dict(window_left=window_left, window_right=0 if workload.causal else -1, softcap=0.0)
    ops = dict(q=q, k=k, v=v, cu_seqlens_q=workload.cu_seqlens)
    fwd = jax.jit(functools.partial(primitives.fwd, **options))
    bwd = jax.jit(functools.partial(primitives.bwd, deterministic=False, **options))
    out, lse = fwd(ops)
    delta = jnp.einsum("qhd,qhd->hq", dout, out, preferred_element_type=jnp.float32)
    return {"fwd": lambda: fwd(ops), "bwd": lambda: bwd(ops | dict(dout=dout, lse=lse, delta=delta))}


def padded(workload: Workload, arrays: list[jax.Array]) -> Callable:
    rows, cuts = workload.max_length, workload.cu_seqlens[1:-1]
    pad = lambda s: np.pad(s, ((0, rows - len(s)), (0, 0), (0, 0)))
    q, k, v, dout = (jnp.stack([pad(s) for s in np.split(np.asarray(x), cuts)]) for x in arrays)
    lengths = jnp.asarray(workload.lengths, jnp.int32)

    def attend(q, k, v):
        options = dict(is_causal=workload.causal, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        return jax.nn.dot_product_attention(q, k, v, **options)

    _, vjp = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(q, k, v)
    pull = jax.jit(lambda vjp, dout: vjp(dout))
    return lambda: pull(vjp, dout)


def seconds(clock: Callable[[], float], call: Callable, repeat: int = 1) -> float:
    start = clock()
    for _ in range(repeat):
        jax.block_until_ready(call())
    return (clock() - start) / repeat


def measure(workload: Workload, dtype: str, clock: Callable[[], float]) -> str:
    arrays = random_arrays(workload, dtype)
    calls = packed(workload, arrays) | {"padded": padded(workload, arrays)}
    first = {name: (jax.block_until_ready(call()), seconds(clock, call))[1] for name, call in calls.items()}
    times = {name: [] for name in calls}
    for i in range(ROUNDS):
        for name in calls if i < PADDED_ROUNDS else ("fwd", "bwd"):
            repeat = max(1, int(SECONDS / max(first[name], 1e-6)))
            times[name].append(seconds(clock, calls[name], repeat))
    fwd, bwd, pads = (statistics.median(times[name]) for name in ("fwd", "bwd", "padded"))
    rate, bwd_rate = workload.flops / fwd / 1e9, BACKWARD_FLOPS * workload.flops / bwd / 1e9
    return (
        f"{workload.name:32} {dtype:9} {bwd * 1e6:9.0f} us | GFLOP/s: backward {bwd_rate:6.1f}  forward {rate:6.1f} | "
        f"times forward {bwd_rate / rate:5.2f}  times padded backward {pads / bwd:6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("workloads", nargs="*")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"{kernels.info()['path']}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    for workload, dtype in workloads.for_platform("cpu"):
        if not arguments.workloads or workload.name in arguments.workloads:
            print(measure(workload, dtype, time.process_time if arguments.cpu_time else time.perf_counter), flush=True)


if __name__ == "__main__":
    main()
