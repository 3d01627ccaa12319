import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case
from conftest import DTYPES, PLATFORM
from jax.sharding import PartitionSpec as P

from jax_varlen import export_checks, varlen_attention

DTYPE = jnp.dtype(DTYPES[0])
CHECKS = export_checks()
EVERYTHING = next(case for case in CASES if case.name == "everything")


def inputs(dtype=DTYPE, case=EVERYTHING):
    (q, k, v, *offsets), options = case.inputs(dtype)
    arrays = {"q": q, "k": k, "v": v} | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))
    arrays |= {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    return {name: jnp.asarray(x) for name, x in arrays.items()}, options


def export(platform, dtype, case=EVERYTHING):
    arrays, options = inputs(dtype, case)
    attend = jax.jit(lambda arrays: varlen_attention(**arrays, **options, return_lse=True))
    return jax.export.export(attend, platforms=(platform,), disabled_checks=CHECKS)(arrays)


def test_one_trace_for_five_offsets():
    (q, k, v, _), _ = Case("", "", (30, 30, 40), head_dim=32).inputs(DTYPE)
    traces = 0

    @jax.jit
    def attend(cu_seqlens):
        nonlocal traces
        traces += 1
        return varlen_attention(q, k, v, cu_seqlens, causal=True, return_lse=True)

    for offsets in ([0, 30, 60, 100], [0, 0, 0, 100], [0, 1, 2, 3], [50, 60, 60, 61], [0, 99, 100, 100]):
        cu = np.array(offsets, np.int32)
        owned = np.arange(100)[:, None, None] < cu[-1], np.arange(100)[:, None, None] >= cu[0]
        oracle.check(attend(cu), *(np.where(owned[0] & owned[1], x, np.nan).astype(DTYPE) for x in (q, k, v)), cu, causal=True)
    assert traces == 1
    assert attend._cache_size() == 1


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: COMPILED.append(duration) if event.endswith("backend_compile_duration") else None
)


def test_eager_calls_compile_once():
    arrays, options = inputs()
    jax.block_until_ready(varlen_attention(**arrays, **options))
    other = [jnp.asarray(x) for x in ([3, 3, 3, 100, 200], [3, 4, 5, 6, 209])]
    arrays |= {
        "cu_seqlens_q": other[0],
        "cu_seqlens_k": other[1],
        "seqused_q": jnp.array([0, 0, 9, 1]),
        "seqused_k": jnp.array([1, 0, 0, 9]),
    }
    COMPILED.clear()
    jax.block_until_ready(varlen_attention(**arrays, **options))
    assert not COMPILED


def test_a_traced_scale_is_no_new_trace():
    arrays, options = inputs()
    del options["softmax_scale"]
    attend = jax.jit(lambda scale: varlen_attention(**arrays, **options, softmax_scale=scale))
    outs = [np.asarray(attend(jnp.float32(scale))) for scale in (0.3, 0.0, -1.0)]
    np.testing.assert_array_equal(outs[0], varlen_attention(**arrays, **options, softmax_scale=0.3))
    assert (outs[0] != outs[2]).any()
    assert attend._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lowers_for_cuda_without_a_gpu(dtype):
    module = export("cuda", jnp.dtype(dtype)).mlir_module()
    assert len(re.findall(r"custom_call @jax_varlen_fwd_v1", module)) == 1
    assert "stablehlo.while" not in module


def test_large_head_dims_lower_to_the_tiles_in_jax_for_cuda():
    module = export("cuda", jnp.dtype("bfloat16"), Case("", "", (5, 6), head_dim=512)).mlir_module()
    assert "jax_varlen_fwd_v1" not in module
    assert "stablehlo.while" in module


def test_float32_has_no_cuda_kernel():
    with pytest.raises(NotImplementedError, match=r"take bfloat16 and float16, got float32. Cast q, k and v: q.astype\("):
        export("cuda", jnp.dtype("float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cpu(dtype):
    assert len(re.findall(r"custom_call @jax_varlen_fwd_v1", export("cpu", jnp.dtype(dtype)).mlir_module())) == 1


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_lower_to_the_tiles_in_jax(platform):
    module = export(platform, jnp.dtype("float32")).mlir_module()
    assert "jax_varlen_fwd_v1" not in module
    assert "stablehlo.while" in module


def test_an_exported_call_gives_the_same_bits():
    platform = "cuda" if PLATFORM == "gpu" else PLATFORM
    arrays, options = inputs()
    exported = export(platform, DTYPE)
    for x, y in zip(exported.call(arrays), varlen_attention(**arrays, **options, return_lse=True), strict=True):
        np.testing.assert_array_equal(x, y)


def _sharded_by_heads(arrays, options):
    """The call inside `shard_map` over a mesh axis that splits the heads, as tensor parallel models do."""
    by_head = {name: P(None, "heads", None) for name in "qkv"} | {"alibi_slopes": P(None, "heads"), "sinks": P("heads")}
    specs = ({name: by_head.get(name, P()) for name in arrays},)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = lambda arrays: varlen_attention(**arrays, **options, return_lse=True)
    return jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(P(None, "heads", None), P("heads", None))))


def test_manual_axes():
    arrays, options = inputs()
    expected = varlen_attention(**arrays, **options, return_lse=True)
    for x, y in zip(_sharded_by_heads(arrays, options)(arrays), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_manual_axes_on_a_platform_without_a_kernel():
    arrays, options = inputs()
    exported = jax.export.export(_sharded_by_heads(arrays, options), platforms=("tpu",))(arrays)
    assert "stablehlo.while" in exported.mlir_module()


def test_runs_in_a_scan_over_layers():
    arrays, options = inputs()
    q = jnp.nan_to_num(arrays.pop("q"))[..., :80]
    arrays["v"] = jnp.nan_to_num(arrays["k"])
    layer = lambda x, _: (varlen_attention(x, **arrays, **options), None)
    scanned = jax.jit(lambda x: jax.lax.scan(layer, x, length=3)[0])(q)
    looped = functools.reduce(lambda x, _: layer(x, None)[0], range(3), q)
    np.testing.assert_array_equal(scanned, looped)
