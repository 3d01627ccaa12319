"""`append_kv` in programs: in place or in a copy, traced once, lowered for every platform, sharded, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_append
import pytest
from conftest import PLATFORM
from jax.sharding import PartitionSpec as P
from oracle_append import E4M3
from test_append import DTYPES, POOLS, append, append_in_place, inputs, same

import jax_varlen as jv
from jax_varlen import export_checks


def on_device(arrays):
    """In memory of JAX's own: memory that NumPy lends can not be donated."""
    return {name: jnp.array(x, copy=True) for name, x in arrays.items()}


@pytest.mark.parametrize("pool_dtype", [None, E4M3], ids=["same", "float8"])
def test_donated_pools_are_written_in_place(pool_dtype):
    arrays = on_device(inputs(pool_dtype=pool_dtype))
    compiled = append_in_place.lower(*arrays.values()).compile()
    text, pool = compiled.as_text(), arrays["k_cache"]
    assert re.search(r"input_output_alias=\{ *\{0\}: \(0, .*?\{1\}: \(1, ", text)
    assert " copy(" not in text and "copy-start" not in text
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes + arrays["v_cache"].nbytes
    assert memory.temp_size_in_bytes < arrays["v_cache"].nbytes
    places = [arrays[name].unsafe_buffer_pointer() for name in POOLS]
    expected = oracle_append.append(**inputs(pool_dtype=pool_dtype))
    results = compiled(*arrays.values())
    assert [x.unsafe_buffer_pointer() for x in results] == places
    assert pool.is_deleted()
    same(results, expected)


def test_pools_that_are_not_donated_stay_as_they_are():
    arrays = on_device(inputs())
    before = [np.array(arrays[name]) for name in POOLS]
    for call in (append, lambda arrays: jv.append_kv(**arrays)):
        same(call(arrays), oracle_append.append(**inputs()))
        same([arrays[name] for name in POOLS], before)


def test_one_array_as_both_pools():
    arrays = inputs(head_dim_v=16)
    arrays["v_cache"] = arrays["k_cache"]
    expected = oracle_append.append(**arrays)
    same(append(arrays), expected)
    arrays = on_device(arrays)
    same(jax.jit(lambda pool, arrays: jv.append_kv(**arrays | dict.fromkeys(POOLS, pool)))(arrays["k_cache"], arrays), expected)


def test_layers_in_a_scan_share_one_pool_in_place():
    """The pool holds the blocks of all layers, each adds its own offset to the table, and nothing is copied."""
    arrays = inputs()
    layers, num_blocks = 3, 19
    tokens = [np.stack([arrays[name] * (i + 1) for i in range(layers)]) for name in "kv"]
    table = np.where(np.abs(arrays["block_table"]) > num_blocks, 0, arrays["block_table"].clip(0))
    pools = [np.concatenate([arrays[name]] * layers) for name in POOLS]
    expected = pools
    for i in range(layers):
        offsets = (arrays["cu_seqlens"], arrays["seqused_k"], table + i * num_blocks)
        expected = oracle_append.append(*expected, tokens[0][i], tokens[1][i], *offsets)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools, k, v, cu_seqlens, seqused_k, block_table):
        def layer(pools, inputs):
            i, k, v = inputs
            return jv.append_kv(*pools, k, v, cu_seqlens, seqused_k, block_table + i * num_blocks), None

        return jax.lax.scan(layer, pools, (jnp.arange(layers), k, v))[0]

    args = jax.tree.map(jnp.asarray, (tuple(pools), *tokens, arrays["cu_seqlens"], arrays["seqused_k"], table))
    compiled = run.lower(*args).compile()
    shape = r"f32\[57,4,2,(16|8)\]\{[^}]*\} copy\("
    assert not re.search(shape, compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < args[0][1].nbytes
    same(compiled(*args), expected)


def test_one_trace_for_any_offsets():
    traces = 0

    @jax.jit
    def call(arrays):
        nonlocal traces
        traces += 1
        return jv.append_kv(**arrays)

    for lens, used in (((3, 0, 6, 1), (2, 5, 7, 0)), ((10, 0, 0, 0), (0, 1, 2, 3)), ((0, 0, 0, 10), (16, 16, 16, 6))):
        arrays = inputs(lens, used)
        same(call(arrays), oracle_append.append(**arrays))
    assert traces == 1
    assert call._cache_size() == 1


CHECKS = export_checks()


def export(platform, **options):
    return jax.export.export(append, platforms=(platform,), disabled_checks=CHECKS)(inputs(**options))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", [None, E4M3], ids=["same", "float8"])
def test_lowers_to_one_call_of_the_kernel(platform, dtype, pool_dtype):
    """Without a GPU too. Both pools are aliased to the results."""
    module = export(platform, dtype=dtype, pool_dtype=pool_dtype).mlir_module()
    assert len(re.findall(r"custom_call @jax_varlen_append_v1", module)) == 1
    assert len(re.findall(r"output_operand_alias<", module)) == 2
    assert "stablehlo.scatter" not in module


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_lower_to_a_scatter(platform):
    module = export(platform).mlir_module()
    assert "jax_varlen_append_v1" not in module
    assert "stablehlo.scatter" in module


def test_an_exported_call_gives_the_same_bits():
    exported = export("cuda" if PLATFORM == "gpu" else PLATFORM)
    same(exported.call(inputs()), append(inputs()))


def sharded_by_heads(arrays):
    by_head = dict.fromkeys(POOLS, P(None, None, "heads")) | dict.fromkeys("kv", P(None, "heads"))
    specs = ({name: by_head.get(name, P()) for name in arrays},)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    out_specs = (P(None, None, "heads"),) * 2
    return jax.jit(jax.shard_map(lambda arrays: jv.append_kv(**arrays), mesh=mesh, in_specs=specs, out_specs=out_specs))


def test_manual_axes():
    arrays = inputs()
    same(sharded_by_heads(arrays)(arrays), append(arrays))
    exported = jax.export.export(sharded_by_heads(arrays), platforms=("tpu",))(arrays)
    assert "stablehlo.scatter" in exported.mlir_module()


def test_vmap_is_refused_with_what_to_do():
    arrays = inputs()
    k = arrays.pop("k")
    with pytest.raises(NotImplementedError, match=r"append_kv has no vmap, and needs none: .* Reshape \(B, total, num_kv"):
        jax.vmap(lambda k: jv.append_kv(k=k, **arrays))(jnp.stack([k, k]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_gradient_is_refused(wrap):
    arrays = inputs()
    k = arrays.pop("k")
    f = wrap(lambda k: jv.append_kv(k=k, **arrays)[0].sum())
    with pytest.raises(NotImplementedError, match=r"append_kv has no gradient: .*jax.lax.stop_gradient\(k\)"):
        jax.grad(f)(k)
    assert not jax.grad(lambda k: f(jax.lax.stop_gradient(k)))(k).any()
