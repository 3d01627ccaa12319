"""`jax.vmap` of the call against a Python loop over its examples: one call of the kernel, with the same bits."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import DTYPES, PLATFORM
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from pools import hostile_table
from test_primitives import CHECKS, DTYPE
from test_transforms import close

from jax_varlen import primitives, varlen_attention

SIZE, BATCH, TOTAL_Q, TOTAL_K, HEADS, KV_HEADS, BLOCK_SIZE = 3, 4, 60, 70, 4, 2, 8


def offsets(rng, total):
    """Gaps before the first sequence and tails behind the last, and empty sequences, as it happens."""
    cu = np.sort(rng.integers(0, total + 1, BATCH + 1)).astype(np.int32)
    return np.maximum.accumulate(np.where(rng.random(BATCH + 1) < 0.2, np.roll(cu, 1), cu))


def stacked(rng, paged=False, names=(), dtype=DTYPE) -> dict[str, Any]:
    """SIZE examples of every array argument: q, k, v, the offsets, and those of `names`."""
    normal = lambda *shape: rng.normal(size=(SIZE, *shape)).astype(dtype)
    arrays = {"q": normal(TOTAL_Q, HEADS, 24), "cu_seqlens_q": np.stack([offsets(rng, TOTAL_Q) for _ in range(SIZE)])}
    used = lambda cu: rng.integers(0, np.diff(cu) + 1).astype(np.int32)
    if paged:
        lengths = rng.integers(0, 40, (SIZE, BATCH)).astype(np.int32)
        blocks = -(-lengths // BLOCK_SIZE)
        width = int(blocks.max()) + 1
        tables = [hostile_table(rng, row, 3 + int(blocks.sum(1).max() - row.sum())) for row in blocks]
        tables = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=2**31 - 1) for table in tables]
        num_blocks = int(blocks.sum(1).max()) + 3
        arrays["k"], arrays["v"] = (normal(num_blocks, BLOCK_SIZE, KV_HEADS, dim) for dim in (24, 16))
        arrays |= {"block_table": np.stack(tables), "seqused_k": lengths}
    else:
        arrays["cu_seqlens_k"] = np.stack([offsets(rng, TOTAL_K) for _ in range(SIZE)])
        arrays["k"], arrays["v"] = normal(TOTAL_K, KV_HEADS, 24), normal(TOTAL_K, KV_HEADS, 16)
        arrays["seqused_k"] = used(arrays["cu_seqlens_k"])
    arrays["seqused_q"] = used(arrays["cu_seqlens_q"])
    arrays["alibi_slopes"] = rng.uniform(0, 0.5, (SIZE, BATCH, HEADS)).astype(np.float32)
    arrays["sinks"] = rng.normal(size=(SIZE, HEADS)).astype(np.float32)
    arrays["softmax_scale"] = rng.uniform(0.1, 0.5, SIZE).astype(np.float32)
    always = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", *(("seqused_k",) if paged else ())}
    return {name: x for name, x in arrays.items() if name in always or name in names}


def share(arrays, shared):
    """The arrays and their axes, where those of `shared` are one for all examples and their values stay right for each."""
    arrays = dict(arrays)
    for name, cu in (("seqused_q", "cu_seqlens_q"), ("seqused_k", "cu_seqlens_k")):
        if name in arrays and cu in arrays:
            rows = np.diff(arrays[cu])
            rows = rows[:1] if cu in shared else rows
            rows = rows.min(0, keepdims=True) if name in shared else rows
            arrays[name] = np.minimum(arrays[name], rows)
    if "block_table" in shared and "block_table" in arrays:  # its first blocks hold keys of every example
        lengths, table = arrays["seqused_k"], arrays["block_table"][:1]
        held = np.minimum.accumulate((table >= 0) & (table < arrays["k"].shape[1]), -1).sum(-1) * BLOCK_SIZE
        arrays["seqused_k"] = np.minimum(lengths, held).astype(np.int32)
    elif "seqused_k" in shared and "block_table" in arrays:
        arrays["seqused_k"] = arrays["seqused_k"].min(0, keepdims=True)
    axes = {name: None if name in shared else 0 for name in arrays}
    return {name: jnp.asarray(x[0] if name in shared else x) for name, x in arrays.items()}, axes


def attend(arrays, options=None):
    return varlen_attention(**arrays, **(options or {}), return_lse=True, deterministic=True)


def loop(f, arrays, axes):
    examples = [{name: x if axes[name] is None else x[b] for name, x in arrays.items()} for b in range(SIZE)]
    return jax.tree.map(lambda *x: jnp.stack(x), *(f(example) for example in examples))


def same(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x, y)


def check(arrays, axes, options=None):
    f = lambda arrays: attend(arrays, options)
    actual = jax.jit(jax.vmap(f, in_axes=(axes,)))(arrays)
    same(actual, loop(f, arrays, axes))
    return actual


def calls(f, *args):
    """How often the forward and the backward kernel are called by the program of `f`, and whether it has a loop."""
    text = str(jax.jit(f).lower(*args).compile().as_text())
    count = lambda target: len(re.findall(rf'custom_call_target="{target}"', text))
    return count(primitives.FWD_TARGET), count(primitives.BWD_TARGET), "while(" in text


OPTIONAL = ("seqused_q", "seqused_k", "alibi_slopes", "sinks", "softmax_scale")
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", *OPTIONAL)
MASKS = ({}, {"causal": True}, {"window_size": (9, 3), "softcap": 3.0})


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    st.integers(0, 99),
    st.booleans(),
    st.sets(st.sampled_from(OPTIONAL)),
    st.sets(st.sampled_from(NAMES)),
    st.sampled_from(MASKS),
)
def test_any_operands_and_options(seed, paged, names, shared, options):
    arrays = stacked(np.random.default_rng(seed), paged, names)
    arrays, axes = share(arrays, shared & set(arrays) if set(arrays) - shared else set(arrays) - {"q"})
    check(arrays, axes, options)


@pytest.mark.parametrize("slopes", [(HEADS,), (SIZE, HEADS)], ids=["shared", "stacked"])
def test_slopes_of_heads(slopes, rng):
    arrays, axes = share(stacked(rng), set())
    arrays["alibi_slopes"] = jnp.asarray(rng.uniform(0, 0.5, slopes), jnp.float32)
    check(arrays, axes | {"alibi_slopes": 0 if len(slopes) == 2 else None})


def test_offsets_of_keys_left_out(rng):
    arrays = stacked(rng, names=("seqused_q", "seqused_k"))
    arrays["k"], arrays["v"] = arrays["k"][:, :TOTAL_Q], arrays["v"][:, :TOTAL_Q]
    del arrays["cu_seqlens_k"]
    arrays["seqused_k"] = np.minimum(arrays["seqused_k"], np.diff(arrays["cu_seqlens_q"]))
    check(*share(arrays, set()))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shared", [(), ("k", "v"), ("v",)], ids=lambda x: " ".join(x) or "none")
def test_offsets_of_paged_keys(both, shared, rng):
    """Their differences are the lengths, whatever the first one is."""
    arrays = stacked(rng, paged=True)
    lengths = arrays["seqused_k"] if both else arrays.pop("seqused_k")
    owned = lengths + (rng.integers(0, 9, lengths.shape) if both else 0)
    arrays["cu_seqlens_k"] = np.cumsum(np.pad(owned, ((0, 0), (1, 0)), constant_values=1000), 1).astype(np.int32)
    check(*share(arrays, set(shared)))


@pytest.mark.parametrize("batched", [False, True])
def test_float8_pools_and_their_scales(batched, rng):
    arrays = stacked(rng, paged=True)
    arrays |= {name: arrays[name].astype(jnp.float8_e4m3fn) for name in "kv"}
    arrays |= {name: rng.uniform(0.5, 2, (SIZE, KV_HEADS)).astype(np.float32) for name in ("k_scale", "v_scale")}
    arrays, axes = share(arrays, set() if batched else {"k_scale", "v_scale"})
    check(arrays, axes)
    assert calls(jax.vmap(attend, in_axes=(axes,)), arrays)[0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nobody_stay_nobodys(dtype, rng):
    """NaN before the first sequence, behind the last and beyond seqused of every example."""
    arrays = stacked(rng, names=("seqused_q", "seqused_k"), dtype=jnp.dtype(dtype))
    for b in range(SIZE):
        for side, rows in (("q", "q"), ("k", "kv")):
            owned = np.zeros(arrays[rows[0]].shape[1], bool)
            for first, n in zip(arrays[f"cu_seqlens_{side}"][b], arrays[f"seqused_{side}"][b], strict=False):
                owned[first : first + n] = True
            for name in rows:
                arrays[name][b, ~owned] = np.nan
    arrays, axes = share(arrays, set())
    out, lse = check(arrays, axes)
    for b in range(SIZE):
        q, k, v, cu_q, cu_k, used_q, used_k = (
            np.asarray(arrays[name][b]) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        )
        oracle.check((out[b], lse[b]), q, k, v, cu_q, cu_k, seqused_q=used_q, seqused_k=used_k)


def test_one_call_of_each_kernel(rng):
    arrays, axes = share(stacked(rng, names=("seqused_q", "alibi_slopes", "sinks")), {"sinks", "cu_seqlens_k"})
    assert calls(jax.vmap(attend, in_axes=(axes,)), arrays) == (1, 0, False)
    assert calls(jax.vmap(gradients, in_axes=(axes,)), arrays) == (1, 1, False)


@pytest.mark.parametrize("paged", [False, True])
def test_lowers_for_cuda_without_a_gpu(paged, rng):
    arrays, axes = share(stacked(rng, paged, ("seqused_q",), jnp.dtype("bfloat16")), set())
    f = jax.jit(jax.vmap(attend, in_axes=(axes,)))
    module = jax.export.export(f, platforms=("cuda",), disabled_checks=CHECKS)(arrays).mlir_module()
    assert module.count("custom_call @jax_varlen_fwd_v1") == 1
    assert "stablehlo.while" not in module


@pytest.mark.parametrize("name", ["sinks", "softmax_scale"])
def test_what_a_call_has_once_is_mapped_in_a_loop(name, rng):
    arrays, axes = share(stacked(rng, names=(name,)), set())
    assert calls(jax.vmap(attend, in_axes=(axes,)), arrays)[::2] == (1, True)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_axes(axis, rng):
    arrays, axes = share(stacked(rng), {"cu_seqlens_k"})
    expected = jax.vmap(attend, in_axes=(axes,))(arrays)
    moved = arrays | {name: jnp.moveaxis(arrays[name], 0, axis) for name in "qkv"}
    moved["cu_seqlens_q"] = arrays["cu_seqlens_q"].T
    axes |= {"q": axis, "k": axis, "v": axis, "cu_seqlens_q": 1}
    out, lse = jax.vmap(attend, in_axes=(axes,), out_axes=(axis, 1))(moved)
    same((jnp.moveaxis(out, axis, 0), jnp.moveaxis(lse, 1, 0)), expected)


@pytest.mark.parametrize("names", [(), ("sinks",)], ids=["one call", "loop"])
@pytest.mark.parametrize("paged", [False, True])
def test_nested(paged, names, rng):
    """The outer map shares all but q of each inner example."""
    arrays, axes = share(stacked(rng, paged, names), set())
    several = arrays | {"q": jnp.stack([arrays["q"], arrays["q"][::-1]])}
    outer = {name: 0 if name == "q" else None for name in arrays}
    inner = jax.vmap(attend, in_axes=(axes,))
    expected = [loop(attend, arrays | {"q": q}, axes) for q in several["q"]]
    same(jax.vmap(inner, in_axes=(outer,))(several), jax.tree.map(lambda *x: jnp.stack(x), *expected))


def loss(arrays):
    out, lse = attend(arrays)
    return (out.astype(jnp.float32) ** 2).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def gradients(arrays):
    """By name, of what has one."""
    moving = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "sinks")}
    return jax.grad(lambda moving: loss(arrays | moving))(moving)


SHARED = ((), ("k", "v"), ("q",), ("cu_seqlens_q", "cu_seqlens_k"), ("sinks",), ("softmax_scale", "sinks"))


@pytest.mark.parametrize("shared", SHARED, ids=lambda x: " ".join(x) or "none")
def test_gradients_of_each_example(shared, rng):
    arrays, axes = share(stacked(rng, names=OPTIONAL), set(shared))
    close(jax.jit(jax.vmap(gradients, in_axes=(axes,)))(arrays), loop(jax.jit(gradients), arrays, axes), ulps=8)


@pytest.mark.parametrize(
    "shared", [("q", "dout"), ("k", "v"), ("lse", "cu_seqlens_k"), ("delta", "alibi_slopes")], ids=" ".join
)
def test_the_backward_kernel_gives_the_same_bits(shared, rng):
    arrays = stacked(rng, names=("seqused_q", "seqused_k", "alibi_slopes"))
    arrays["dout"] = rng.normal(size=(SIZE, TOTAL_Q, HEADS, 16)).astype(DTYPE)
    arrays |= {name: rng.normal(size=(SIZE, HEADS, TOTAL_Q)).astype(np.float32) for name in ("lse", "delta")}
    arrays, axes = share(arrays, set(shared))
    f = lambda ops: primitives.bwd(ops, window_left=20, window_right=0, softcap=2.0, deterministic=True)
    same(jax.jit(jax.vmap(f, in_axes=(axes,)))(arrays), loop(f, arrays, axes))


@pytest.mark.parametrize("shared", SHARED, ids=lambda x: " ".join(x) or "none")
def test_gradients_of_the_sum(shared, rng):
    """What is shared gets the sum over the examples."""
    arrays, axes = share(stacked(rng, names=OPTIONAL), set(shared))
    moving = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
    actual = jax.grad(lambda moving: jax.vmap(loss, in_axes=(axes,))(arrays | moving).sum())(moving)
    expected = loop(gradients, arrays, axes)
    for name, x in expected.items():
        close(actual[name], x if axes[name] == 0 else x.astype(jnp.float32).sum(0).astype(x.dtype), ulps=8)


def test_the_gradient_of_lse_alone(rng):
    arrays, axes = share(stacked(rng), {"v"})
    loss = lambda q, arrays: (lse := attend(arrays | {"q": q})[1]).sum(where=lse > -jnp.inf)
    gradient = lambda arrays: jax.grad(loss)(arrays["q"], arrays)
    close(jax.vmap(gradient, in_axes=(axes,))(arrays), loop(gradient, arrays, axes))


@pytest.mark.parametrize("size, batch", [(0, BATCH), (1, BATCH), (SIZE, 0)])
def test_no_or_one_example_and_no_sequence(size, batch, rng):
    arrays, axes = share(stacked(rng), set())
    arrays = {name: x[:size] for name, x in arrays.items()}
    arrays |= {name: arrays[name][:, : batch + 1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    out, lse = jax.vmap(attend, in_axes=(axes,))(arrays)
    assert out.shape == (size, TOTAL_Q, HEADS, 16) and lse.shape == (size, HEADS, TOTAL_Q)
    if size == 1:
        same((out[0], lse[0]), attend({name: x[0] for name, x in arrays.items()}))
    if batch == 0:
        assert not out.any() and (lse == -jnp.inf).all()


def test_manual_axes(rng):
    """Inside `shard_map`, and around it."""
    arrays, axes = share(stacked(rng, names=("seqused_q",)), {"cu_seqlens_k"})
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: P() if axes[name] is None else P("data") for name in arrays}
    inside = jax.shard_map(jax.vmap(attend, in_axes=(axes,)), mesh=mesh, in_specs=(specs,), out_specs=P("data"))
    expected = loop(attend, arrays, axes)
    same(jax.jit(inside)(arrays), expected)
    specs = {name: P(None, "data", None) if name in "qkv" else P() for name in arrays}
    around = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=(P(None, "data", None), P("data", None)))
    same(jax.jit(jax.vmap(around, in_axes=(axes,)))(arrays), expected)


def test_a_wrong_call_reads_the_same():
    """In the shapes of one example."""
    q, k, cu = jnp.zeros((2, 10, 4, 8), DTYPE), jnp.zeros((2, 12, 2, 8), DTYPE), jnp.array([0, 10])
    with pytest.raises(ValueError, match=r"hold the same tokens .* got q \(10, 4, 8\) and k \(12, 2, 8\)"):
        jax.vmap(lambda q, k: varlen_attention(q, k, k, cu))(q, k)
    with pytest.raises(ValueError, match=r"q must have rank 3 .* got rank 4 \(2, 10, 4, 8\)"):
        jax.vmap(lambda q: varlen_attention(q, k[0], k[0], cu))(q[None])


def test_more_rows_than_int32_counts():
    struct = lambda *shape, dtype=DTYPE: jax.ShapeDtypeStruct(shape, dtype)
    attend = lambda q, k: varlen_attention(q, k, k, jnp.array([0, 10]), jnp.array([0, 10]))
    with pytest.raises(ValueError, match=r"over 3 examples of q \(1000000000, 1, 8\) makes one array of 3000000000 rows"):
        jax.eval_shape(jax.vmap(attend), struct(3, 10**9, 1, 8), struct(3, 10, 1, 8))
    table = jnp.zeros((1, 1), jnp.int32)
    paged = lambda q, k: varlen_attention(q, k, k, jnp.array([0, 10]), seqused_k=jnp.array([1]), block_table=table)
    with pytest.raises(ValueError, match=r"over 3 examples of k \(1000000000, 1, 1, 8\) .* 3000000000 blocks, .* batch_size="):
        jax.eval_shape(jax.vmap(paged), struct(3, 10, 1, 8), struct(3, 10**9, 1, 1, 8))


WRONG = {
    "past the end": ({"cu_seqlens_q": [[0, 5], [3, 12], [6, 10]]}, "cu_seqlens_q must not decrease"),
    "negative": ({"cu_seqlens_q": [[0, 5], [-1, 8], [6, 10]]}, "cu_seqlens_q must not decrease"),
    "past the end of the last": ({"cu_seqlens_q": [[0, 5], [3, 9], [6, 11]]}, "cu_seqlens_q must not decrease"),
    "falling": ({"cu_seqlens_q": [[0, 5], [9, 3], [6, 10]]}, "cu_seqlens_q must not decrease"),
    "a block of a neighbour": ({"block_table": [[[0]], [[4]], [[0]]]}, r"block_table must hold ids of the 12 blocks"),
    "a length beyond the offsets": (
        {"cu_seqlens_k": [[0, 1], [3, 5], [6, 7]], "seqused_k": [[1], [3], [1]]},
        "seqused_k must not be negative",
    ),
}


@pytest.mark.skipif(PLATFORM != "cpu", reason="other devices clamp wrong values")
@pytest.mark.parametrize("wrong, text", WRONG.values(), ids=WRONG)
def test_wrong_values_of_one_example_are_found(wrong, text):
    """An offset among the rows of the next example, or a block in its pool, too."""
    q, k = jnp.ones((3, 10, 1, 8)), jnp.ones((3, 4, 8, 1, 8))
    arrays = {"cu_seqlens_q": [[0, 5], [3, 9], [6, 10]], "block_table": [[[0]], [[1]], [[3]]], "seqused_k": [[1], [2], [3]]}
    arrays = {name: jnp.array(x, jnp.int32) for name, x in (arrays | wrong).items()}
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(jax.vmap(lambda arrays, q, k: attend(arrays | {"q": q, "k": k, "v": k}))(arrays, q, k))


@pytest.fixture
def rng():
    return np.random.default_rng(0)
