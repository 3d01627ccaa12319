"""Programs that outlive the process that traced them: `jax.export`, ahead-of-time compilation, the compilation cache."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DTYPES, PLATFORM

import jax_varlen
from jax_varlen import append_kv, export_checks, varlen_attention

DTYPE = jnp.dtype(DTYPES[0])
OWN = "cuda" if PLATFORM == "gpu" else PLATFORM
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_BLOCKS = 4, 2, 16, 8, 3


def forward(q, k, v, cu_seqlens_q, cu_seqlens_k):
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, return_lse=True)


def gradient(q, k, v, cu_seqlens_q, cu_seqlens_k):
    loss = lambda q, k, v: (forward(q, k, v, cu_seqlens_q, cu_seqlens_k)[0].astype(jnp.float32) ** 2).sum()
    return jax.grad(loss, (0, 1, 2))(q, k, v)


def mapped(q, k, v, cu_seqlens_q, cu_seqlens_k):
    return jax.vmap(lambda q: forward(q, k, v, cu_seqlens_q, cu_seqlens_k))(jnp.stack([q, -q]))


def paged(q, k, v, cu_seqlens_q, cu_seqlens_k):
    k, v, table = _pools(k, v, cu_seqlens_k)
    return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table=table, causal=True, return_lse=True)


def append(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """New tokens behind none."""
    pool = jnp.zeros((3 * MAX_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), k.dtype)
    lengths = jnp.zeros_like(cu_seqlens_k[1:])
    return append_kv(pool, pool, k, v, cu_seqlens_k, lengths, _pools(k, v, cu_seqlens_k)[2])


def _pools(k, v, cu_seqlens):
    """Pools of blocks for three sequences, made of the first tokens, and a table."""
    pool = lambda x: jnp.broadcast_to(x[:1, None], (3 * MAX_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM))
    rows = jnp.arange(cu_seqlens.shape[0] - 1, dtype=jnp.int32)[:, None]
    return pool(k), pool(v), rows % 3 * MAX_BLOCKS + jnp.arange(MAX_BLOCKS, dtype=jnp.int32)[None]


FUNCTIONS = {f.__name__: f for f in (forward, gradient, mapped, paged, append)}


def inputs(total_q, total_k, batch):
    rng = np.random.default_rng(0)
    normal = lambda total, heads: jnp.asarray(rng.normal(size=(total, heads, HEAD_DIM)), DTYPE)
    cu = lambda total: jnp.minimum(jnp.arange(batch + 1, dtype=jnp.int32) * (total // batch), total)
    return normal(total_q, HEADS), normal(total_k, KV_HEADS), normal(total_k, KV_HEADS), cu(total_q), cu(total_k)


def symbolic(dtype=DTYPE):
    q, k, b = jax.export.symbolic_shape("total_q, total_k, batch")
    kv = jax.ShapeDtypeStruct((k, KV_HEADS, HEAD_DIM), dtype)
    offsets = jax.ShapeDtypeStruct((b + 1,), jnp.int32)
    return jax.ShapeDtypeStruct((q, HEADS, HEAD_DIM), dtype), kv, kv, offsets, offsets


def export(f, args, *platforms):
    return jax.export.export(jax.jit(f), platforms=platforms or (OWN,), disabled_checks=export_checks())(*args)


def equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_round_trip(f):
    args = inputs(40, 50, 3)
    exported = jax.export.deserialize(export(f, args).serialize())
    equal(exported.call(*args), jax.jit(f)(*args))


def test_round_trip_with_the_gradient():
    args = inputs(40, 50, 3)
    exported = jax.export.deserialize(export(lambda *args: forward(*args)[0], args).serialize(vjp_order=1))
    loss = lambda f: lambda *qkv: (f(*qkv, *args[3:]).astype(jnp.float32) ** 2).sum()
    actual = jax.jit(jax.grad(loss(exported.call), (0, 1, 2)))(*args[:3])
    equal(actual, jax.jit(jax.grad(loss(lambda *args: forward(*args)[0]), (0, 1, 2)))(*args[:3]))


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_one_program_for_all_sizes(f):
    """The numbers of tokens and of sequences are symbols."""
    call = jax.export.deserialize(export(f, symbolic()).serialize()).call
    for sizes in ((40, 50, 3), (1, 7, 1), (130, 20, 5)):
        args = inputs(*sizes)
        equal(call(*args), jax.jit(f)(*args))


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_for_cuda_without_a_gpu(f):
    """Beside the CPU, in one program, with sizes that are symbols."""
    exported = export(f, symbolic(jnp.dtype("bfloat16")), "cpu", "cuda")
    assert exported.platforms == ("cpu", "cuda")
    assert "stablehlo.while" not in exported.mlir_module()
    if OWN in exported.platforms:
        args = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 3 else x, inputs(40, 50, 3))
        equal(exported.call(*args), jax.jit(f)(*args))


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_shapes_are_known_without_running(f):
    expected = export(f, symbolic()).out_avals
    actual = jax.tree.leaves(jax.eval_shape(f, *inputs(40, 50, 3)))
    assert [(x.dtype, len(x.shape)) for x in actual] == [(x.dtype, len(x.shape)) for x in expected]


def test_a_wrong_call_is_refused_with_symbols_too():
    q, k, v, *offsets = symbolic()
    with pytest.raises(ValueError, match=r"k and v must agree in all but the last dimension .* got k \(total_k, 2, 16\)"):
        export(forward, (q, k, q, *offsets))
    with pytest.raises(ValueError, match=r"cu_seqlens_k may be left out only .* and k \(total_k, 2, 16\)"):
        export(varlen_attention, (q, k, v, offsets[0]))


def test_owners_and_positions_of_a_total_that_is_a_symbol():
    f = lambda x, cu: (jax_varlen.segment_ids(cu, x.shape[0]), jax_varlen.positions(cu, x.shape[0]))
    (total,), cu = jax.export.symbolic_shape("total"), jnp.array([0, 2, 5], jnp.int32)
    exported = export(f, (jax.ShapeDtypeStruct((total,), jnp.float32), cu))
    for size in (5, 9):
        equal(exported.call(jnp.zeros(size), cu), f(jnp.zeros(size), cu))


def test_plain_jax_takes_no_symbols():
    with pytest.raises(NotImplementedError, match=r"Symbolic shapes take a kernel: .* Got q \(total_q, 4, 16\)"):
        export(forward, symbolic(), "tpu")


def test_export_without_the_checks_is_refused():
    with pytest.raises(ValueError, match="jax_varlen_fwd_v1"):
        jax.export.export(jax.jit(forward), platforms=("cpu",))(*inputs(40, 50, 3))


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_compiled_ahead_of_time(f):
    args = inputs(40, 50, 3)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    equal(jax.jit(f).lower(*structs).compile()(*args), jax.jit(f)(*args))


@pytest.mark.parametrize("f", (forward, gradient, paged, append), ids=lambda f: f.__name__)
def test_disable_jit(f):
    args = inputs(40, 50, 3)
    with jax.disable_jit():
        actual = f(*args)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2e-2, atol=2e-2)


CACHED = """
import jax
import jax.numpy as jnp
import numpy as np
import jax_varlen

found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rsplit("/", 1)[-1]))
q = jnp.cos(jnp.arange(8 * 2 * 16, dtype=jnp.float32)).reshape(8, 2, 16).astype(jnp.bfloat16)
loss = lambda q, cu: jax_varlen.varlen_attention(q, q, q, cu, causal=True).astype(jnp.float32).sum()
found.clear()
gradient = jax.jit(jax.grad(loss)).lower(q, jnp.array([0, 3, 8], jnp.int32)).compile()(q, jnp.array([0, 3, 8], jnp.int32))
print("cache_hits" in found, np.asarray(gradient, np.float32).tobytes().hex())
"""


def test_a_second_process_finds_the_program_in_the_cache(tmp_path):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-P", "-c", CACHED]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert all(run.returncode == 0 for run in runs), runs[-1].stderr
    (first, gradient), (second, again) = (run.stdout.split() for run in runs)
    assert (first, second) == ("False", "True")
    assert gradient == again
