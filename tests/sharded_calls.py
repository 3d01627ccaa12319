"""Calls on arrays of several devices against the same on one; run by test_sharding in a process with eight CPU devices."""

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pools import as_float8, paged
from test_docs import test_blocks_run as run_page
from test_primitives import CHECKS

from jax_varlen import append_kv, dot_product_attention, partitioning, primitives, varlen_attention

COLLECTIVE = re.compile(r" = .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[\w-]*\(")
PACKED = {name: P(None, "x", None) for name in "qkv"} | {"sinks": P("x"), "alibi_slopes": P(None, "x")}
PAGED = PACKED | {name: P(None, None, "x", None) for name in "kv"} | {"k_scale": P("x"), "v_scale": P("x")}
FLOATS = ("q", "k", "v", "sinks")
gc.freeze()  # What imports have made need not be looked through again by `run`.


def mesh(*sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes))


@functools.cache
def inputs(num_heads=8, num_kv_heads=4, pools=None):
    """(arrays, options) of a call. `pools` is the dtype of paged ones."""
    options = {"causal": True}
    case = Case(
        "", "", (30, 0, 34), (50, 7, 7), num_heads, num_kv_heads, 16, 24, options=options, alibi="batch", sinks="random"
    )
    args, options = case.inputs(np.float32)
    if pools is not None:
        args, options = paged(args, options, 8)
    if pools == "float8":
        args, options = as_float8(args, options)
    arrays = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), args, strict=False))
    arrays |= {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    return arrays, options


def put(arrays, mesh, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}


def along(axes, specs):
    """The specs with other mesh axes in place of "x"."""
    return {name: P(*(axes if part == "x" else part for part in spec)) for name, spec in specs.items()}


def attend(options):
    return lambda arrays: varlen_attention(**arrays, **options, return_lse=True)


def gradient(options):
    return lambda arrays: jax.grad(lambda floats: scalar(varlen_attention(**(arrays | floats), **options, return_lse=True)))(
        {name: arrays[name] for name in FLOATS}
    )


def along_itself(options):
    """The tangents of out and lse when every float moves along itself."""

    def run(arrays):
        floats = {name: arrays[name] for name in FLOATS}
        return jax.jvp(lambda x: attend(options)(arrays | x), (floats,), (jax.tree.map(jnp.nan_to_num, floats),))[1]

    return run


def reverse_twice(options):
    def run(arrays):
        floats = {name: jnp.nan_to_num(arrays[name]) for name in FLOATS}
        return jax.grad(lambda x: sum(jnp.sin(g).sum() for g in gradient(options)(arrays | x).values()))(floats)

    return run


def scalar(results):
    out, lse = results
    return (out * jnp.cos(out)).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def check(actual, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)


def run(call, *args):
    """The results of the jitted call and the collectives in its program."""
    lowered = jax.jit(call).lower(*args)
    gc.collect()  # What the compiler calls back must be alive still.
    compiled = lowered.compile()
    return compiled(*args), COLLECTIVE.findall(compiled.as_text())


def split(results):
    """Which axis of each result the devices have parts of."""
    spec = lambda x: tuple(axis for axis, n in enumerate(x.sharding.shard_shape(x.shape)) if n != x.shape[axis])
    return jax.tree.map(spec, results)


EACH = pytest.mark.parametrize("derive", [attend, gradient])
SPLIT = {attend: (1, 0), gradient: {"q": 1, "k": 1, "v": 1, "sinks": 0}}


@EACH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("replicated", [(), ("sinks", "alibi_slopes")])
def test_heads_stay_where_they_are(derive, kind, replicated):
    arrays, options = inputs()
    specs = {name: spec for name, spec in PACKED.items() if name not in replicated}
    actual, collectives = run(derive(options), put(arrays, mesh(4, kind=kind), specs))
    check(actual, derive(options)(arrays))
    if kind == AxisType.Auto or not (replicated and derive is gradient):
        assert collectives == []
        assert split(actual) == jax.tree.map(lambda axis: (axis,), SPLIT[derive])
    else:  # A gradient has the type of its argument: that of the replicated sinks is gathered.
        assert collectives == ["all-gather"]


@EACH
@pytest.mark.parametrize("axes", ["y", ("x", "y"), ("y", "x")])
def test_heads_over_some_axes_of_a_mesh(derive, axes):
    arrays, options = inputs(8, 8)
    actual, collectives = run(derive(options), put(arrays, mesh(2, 4), along(axes, PACKED)))
    check(actual, derive(options)(arrays))
    assert collectives == []


@pytest.mark.parametrize("pools", ["float32", "float8"])
@pytest.mark.parametrize("replicated", [(), ("sinks", "alibi_slopes", "k_scale", "v_scale")])
def test_pools_stay_where_they_are(pools, replicated):
    arrays, options = inputs(pools=pools)
    specs = {name: spec for name, spec in PAGED.items() if name not in replicated}
    actual, collectives = run(attend(options), put(arrays, mesh(4), specs))
    check(actual, attend(options)(arrays))
    assert collectives == []
    assert split(actual) == ((1,), (0,))


@EACH
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, devices",
    [
        pytest.param(8, 1, 8, id="one_kv_head"),
        pytest.param(8, 2, 8, id="four_devices_share_a_kv_head"),
        pytest.param(12, 3, 6, id="two_devices_share_a_kv_head_of_three"),
    ],
)
def test_fewer_kv_heads_than_devices(derive, num_heads, num_kv_heads, devices):
    """k and v are on all devices; the gradients of their heads are summed over those that share them."""
    arrays, options = inputs(num_heads, num_kv_heads)
    queries = {name: PACKED[name] for name in ("q", "sinks")}
    actual, collectives = run(derive(options), put(arrays, mesh(devices), queries))
    check(actual, derive(options)(arrays))
    assert set(collectives) <= ({"all-reduce", "all-gather"} if derive is gradient else set())
    assert collectives.count("all-gather") == (2 if derive is gradient and num_kv_heads == 2 else 0)  # of dk and dv


@EACH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_kv_heads_over_the_first_of_two_axes(derive, kind):
    """The layout for fewer kv heads than devices that copies nothing."""
    arrays, options = inputs(8, 2)
    specs = along(("x", "y"), PACKED) | {name: PACKED[name] for name in "kv"}
    actual, collectives = run(derive(options), put(arrays, mesh(2, 4, kind=kind), specs))
    check(actual, derive(options)(arrays))
    assert collectives == (["all-reduce"] if derive is gradient else [])


@EACH
@pytest.mark.filterwarnings("ignore:Each device gathers q")
def test_groups_that_devices_would_cut(derive):
    """12 query heads on 6 devices, 2 on each, and 3 of them to a kv head: heads are gathered as far as they must be."""
    arrays, options = inputs(12, 4)
    actual, _ = run(derive(options), put(arrays, mesh(6), {name: PACKED[name] for name in ("q", "sinks")}))
    check(actual, derive(options)(arrays))


@EACH
@pytest.mark.filterwarnings("ignore:Each device gathers k, v")
def test_heads_that_are_split_in_themselves(derive):
    """A projection to 2 kv heads whose columns are on 8 devices: XLA splits the heads over part of the axis, and each head."""
    arrays, options = inputs(8, 2)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(64, 32)), {"q": rng.normal(size=(32, 128)) / 6, "k": rng.normal(size=(32, 32)) / 6}
    x, w = jax.tree.map(np.float32, (x, w))

    def loss(w, x):
        q, k = ((x @ w[name]).reshape(64, heads, 16) for name, heads in (("q", 8), ("k", 2)))
        return scalar(varlen_attention(q, k, k, arrays["cu_seqlens_q"], **options, return_lse=True))

    call = loss if derive is attend else jax.grad(loss)
    actual, _ = run(call, put(w, mesh(8), {name: P(None, "x") for name in w}), x)
    check(actual, call(w, x))


@pytest.mark.parametrize("derive, num_kv_heads", [(along_itself, 4), (reverse_twice, 1)])
def test_other_derivatives(derive, num_kv_heads):
    """Explicit axes need the types of all primitives, and then the rule that splits them as well."""
    arrays, options = inputs(8, num_kv_heads)
    specs = PACKED if num_kv_heads > 1 else {name: PACKED[name] for name in ("q", "sinks")}
    actual, collectives = run(derive(options), put(arrays, mesh(4, kind=AxisType.Explicit), specs))
    check(actual, jax.jit(derive(options))(arrays), 1e-4)
    assert "all-gather" not in collectives


def test_only_the_keys_are_sharded():
    """Queries are cheap to gather, keys are not: the call is split as the pools are."""
    arrays, options = inputs(pools="float32")
    actual, collectives = run(attend(options), put(arrays, mesh(4), {name: PAGED[name] for name in "kv"}))
    check(actual, attend(options)(arrays))
    assert len(collectives) == 2  # out and lse


@EACH
@pytest.mark.parametrize("spec", [P("x", None, None), P(None, None, "x")])
def test_other_axes_are_gathered_with_a_warning(derive, spec):
    arrays, options = inputs()
    sharded = put(arrays, mesh(4), {"q": spec, "k": PACKED["k"]})
    with pytest.warns(UserWarning, match=r"Each device gathers q for a call of jax_varlen.*jax\.shard_map"):
        actual, collectives = run(derive(options), sharded)
    check(actual, derive(options)(arrays))
    assert "all-gather" in collectives


def test_explicit_axes_of_tokens_are_an_error():
    arrays, options = inputs()
    explicit = mesh(4, kind=AxisType.Explicit)
    message = (
        r"q \(64, 8, 16\) must be sharded over its heads or not.*got P\('x', None, None\)\. Write q = jax\.sharding\.reshard"
    )
    for derive in (attend, gradient):
        with pytest.raises(ValueError, match=message):
            jax.jit(derive(options))(put(arrays, explicit, {"q": P("x", None, None)}))
    with pytest.raises(
        ValueError, match=r"the heads of k must be sharded as those of q, over None, or not at all, got 'x'\. Write"
    ):
        jax.jit(attend(options))(put(arrays, explicit, {"k": PACKED["k"]}))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_within_a_mesh_and_without_jit(kind):
    arrays, options = inputs()
    devices = mesh(4, kind=kind)
    with jax.set_mesh(devices):
        actual = attend(options)(put(arrays, devices, PACKED))
        assert split(actual) == ((1,), (0,))
        check(jax.device_get(actual), attend(options)(arrays))


def test_one_device_has_the_same_program():
    arrays, options = inputs()
    assert "CustomSPMDPartitioning" not in jax.jit(gradient(options)).lower(arrays).as_text()


def test_a_program_tells_what_it_calls():
    """All that is compiled in stands in the program, addresses aside: a persistent cache may take it for its key."""
    arrays, _ = inputs()
    sharded = put(arrays, mesh(4), PACKED)
    program = lambda options: re.sub(r'backend_config = "\d+"', "", jax.jit(attend(options)).lower(sharded).as_text())
    assert program({"causal": True}) == program({"causal": True})
    assert len({program(options) for options in ({}, {"causal": True}, {"softcap": 1.0}, {"deterministic": True})}) == 4


def test_export_of_a_call_on_sharded_arrays():
    arrays, options = inputs()
    sharded = put(arrays, mesh(4), PACKED)
    check(jax.export.export(jax.jit(attend(options)), disabled_checks=CHECKS)(sharded).call(sharded), attend(options)(arrays))


def test_scan_over_checkpointed_layers():
    arrays, options = inputs(8, 4)
    arrays = {name: np.nan_to_num(x) if name in FLOATS else x for name, x in arrays.items()} | {"v": arrays["k"]}

    def loss(floats, others):
        layer = jax.checkpoint(lambda q, _: (varlen_attention(**(others | floats | {"q": q}), **options), None))
        return jax.lax.scan(layer, floats["q"], length=2)[0].sum()

    args = [{name: x for name, x in arrays.items() if (name in FLOATS) == floats} for floats in (True, False)]
    actual, collectives = run(jax.grad(loss), *(put(x, mesh(4), PACKED) for x in args))
    check(actual, jax.grad(loss)(*args))
    assert collectives == []


@EACH
def test_vmap(derive):
    arrays, options = inputs()
    axes = {name: None if name in ("sinks", "alibi_slopes") else 0 for name in arrays}
    stacked = {name: x if axes[name] is None else np.stack([x, x]) for name, x in arrays.items()}
    specs = {name: spec if axes[name] is None else P(None, *spec) for name, spec in PACKED.items()}
    actual, collectives = run(jax.vmap(derive(options), (axes,)), put(stacked, mesh(4), specs))
    check(actual, jax.tree.map(lambda x: np.stack([x, x]), derive(options)(arrays)))
    assert collectives == []


def test_dot_product_attention():
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 20, 4, 8)).astype(np.float32)
    call = functools.partial(dot_product_attention, is_causal=True)
    sharded = [jax.device_put(x, NamedSharding(mesh(4), P(None, None, "x"))) for x in (query, key, value)]
    actual, collectives = run(call, *sharded)
    check(actual, call(query, key, value))
    assert collectives == []


def new_tokens(pools):
    """The arguments of `append_kv`, by name."""
    arrays, _ = inputs(pools=pools)
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(3, 4, dim)).astype(np.float32) for dim in (16, 24))
    arguments = {"k_cache": arrays["k"], "v_cache": arrays["v"], "k": k, "v": v, "cu_seqlens": np.arange(4, dtype=np.int32)}
    arguments |= {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}
    table = arrays["block_table"].copy()
    table[1:, 0], table[:, -1] = (table[0, 0] + 1) % len(arrays["k"]), (table[0, 0] + 2) % len(arrays["k"])
    return arguments | {"seqused_k": np.array([50, 3, 5], np.int32), "block_table": table}


POOLS = {name: P(None, None, "x", None) for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("pools", ["float32", "float8"])
def test_append(pools, kind):
    arguments = new_tokens(pools)
    expected = append_kv(**arguments)
    sharded = put(arguments, mesh(4, kind=kind), PACKED | POOLS)
    compiled = jax.jit(lambda arguments: append_kv(**arguments)).lower(sharded).compile()
    assert COLLECTIVE.findall(compiled.as_text()) == []
    check(compiled(sharded), expected)
    assert split(compiled(sharded)) == ((2,), (2,))


def test_append_is_in_place():
    arguments = new_tokens("float32")
    pools = {name: arguments.pop(name) for name in POOLS}
    append = jax.jit(lambda pools, others: append_kv(**pools, **others), donate_argnums=0)
    args = put(pools, mesh(4), POOLS), put(arguments, mesh(4), PACKED)
    compiled = append.lower(*args).compile()
    assert " copy(" not in compiled.as_text()
    check(compiled(*args), append_kv(**pools, **arguments))


def test_the_page_on_several_devices():
    run_page("parallel.md")


# Inside `jax.shard_map` a call is that of one device.
VMA = pytest.mark.parametrize("check_vma", [True, False])


@VMA
@pytest.mark.parametrize("pools", ["float32", "float8"])
def test_shard_map_of_serving(pools, check_vma):
    """Append and attend, with everything split by kv heads."""
    arrays, options = inputs(pools=pools)
    arguments = new_tokens(pools)
    others = {name: arrays[name] for name in ("q", "sinks", "alibi_slopes", "cu_seqlens_q")}

    def step(arguments, others):
        k, v = append_kv(**arguments)
        scales = {name: arguments[name] for name in ("k_scale", "v_scale") if name in arguments}
        where = {"block_table": arguments["block_table"], "seqused_k": arguments["seqused_k"] + 1}
        return varlen_attention(k=k, v=v, **others, **scales, **where, **options, return_lse=True)

    specs = {**PACKED, **POOLS, "k_scale": P("x"), "v_scale": P("x")}
    specs = tuple({name: specs.get(name, P()) for name in x} for x in (arguments, others))
    mapped = jax.shard_map(
        step, mesh=mesh(4), in_specs=specs, out_specs=(P(None, "x", None), P("x", None)), check_vma=check_vma
    )
    actual, collectives = run(mapped, arguments, others)
    check(actual, step(arguments, others))
    assert collectives == []


def batches(num_kv_heads):
    """Two packed batches behind each other in a first axis, and sinks and weights that both share."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    cu_seqlens = np.array([[0, 10, 40], [0, 25, 30]], np.int32)
    return normal(2, 40, 8), normal(8, 4, 16), normal(8, num_kv_heads, 16), normal(4), cu_seqlens


def loss_of_a_batch(x, wq, wk, sinks, cu_seqlens):
    q, k = (jnp.einsum("td,dhe->the", x[0], w) for w in (wq, wk))
    return scalar(varlen_attention(q, k, k, cu_seqlens[0], causal=True, sinks=sinks, return_lse=True))


def loss_of_both(x, wq, wk, sinks, cu_seqlens):
    return sum(loss_of_a_batch(x[i : i + 1], wq, wk, sinks, cu_seqlens[i : i + 1]) for i in range(2))


@functools.cache
def of_both(num_kv_heads):
    """The loss and its gradients in all but the offsets, on one device."""
    return jax.jit(jax.value_and_grad(loss_of_both, (0, 1, 2, 3)))(*batches(num_kv_heads))


def by_data_and_heads(num_kv_heads):
    kv = P(None, "y", None) if num_kv_heads > 1 else P()
    return P("x", None, None), P(None, "y", None), kv, P("y"), P("x", None)


@VMA
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_shard_map_of_training(num_kv_heads, check_vma):
    """Each device has one batch and half of the query heads; the one kv head is on all devices."""
    args = batches(num_kv_heads)
    total = lambda *args: jax.lax.psum(loss_of_a_batch(*args), ("x", "y"))
    specs = by_data_and_heads(num_kv_heads)
    mapped = jax.shard_map(total, mesh=mesh(2, 2), in_specs=specs, out_specs=P(), check_vma=check_vma)
    check(jax.jit(jax.value_and_grad(mapped, (0, 1, 2, 3)))(*args), of_both(num_kv_heads))


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_gradient_inside_shard_map(num_kv_heads):
    """The gradients of what is on several devices are summed over them."""
    args = batches(num_kv_heads)
    specs = by_data_and_heads(num_kv_heads)
    derive = jax.grad(loss_of_a_batch, (0, 1, 2, 3))
    mapped = jax.shard_map(derive, mesh=mesh(2, 2), in_specs=specs, out_specs=specs[:4])
    check(jax.jit(mapped)(*args), of_both(num_kv_heads)[1])


def test_gradient_inside_shard_map_unchecked():
    """With check_vma=False JAX leaves the sums to the caller."""
    args = batches(2)
    specs = by_data_and_heads(2)
    derive = lambda *args: jax.tree.map(lambda x: jax.lax.psum(x, "x"), jax.grad(loss_of_a_batch, (1, 2, 3))(*args))
    mapped = jax.shard_map(derive, mesh=mesh(2, 2), in_specs=specs, out_specs=specs[1:4], check_vma=False)
    check(jax.jit(mapped)(*args), of_both(2)[1][1:])


def test_gradient_of_shard_map_without_jit():
    arrays, options = inputs(8, 1)
    others = {name: x for name, x in arrays.items() if name not in "qk"}
    call = lambda q, k, others: varlen_attention(q=q, k=k, **others, **options).sum()
    specs = {name: PACKED[name] if name in ("sinks", "alibi_slopes") else P() for name in others}
    total = lambda *args: jax.lax.psum(call(*args), "x")
    mapped = jax.shard_map(total, mesh=mesh(2), in_specs=(PACKED["q"], P(), specs), out_specs=P())
    args = arrays["q"], arrays["k"], others
    check(jax.grad(mapped, (0, 1))(*args), jax.jit(jax.grad(call, (0, 1)))(*args))


def test_second_derivatives_of_shard_map():
    """By the transpose of every primitive, which sums what devices share."""

    def second(loss):
        sines = lambda *args: sum(jnp.sin(x).sum() for x in jax.grad(loss, (0, 1, 2, 3))(*args))
        return jax.jit(jax.grad(sines, (0, 1, 2, 3)))

    args = batches(1)
    total = lambda *args: jax.lax.psum(loss_of_a_batch(*args), ("x", "y"))
    mapped = jax.shard_map(total, mesh=mesh(2, 2), in_specs=by_data_and_heads(1), out_specs=P())
    check(second(mapped)(*args), second(loss_of_both)(*args), 1e-4)


def test_shard_map_of_one_axis():
    """What shard_map leaves to XLA is right, though gathered."""
    arrays, options = inputs()
    mapped = jax.shard_map(attend(options), mesh=mesh(2, 4), in_specs=P(), out_specs=P(), axis_names={"x"}, check_vma=False)
    check(jax.jit(mapped)(put(arrays, mesh(2, 4), along("y", PACKED))), attend(options)(arrays))


def test_every_operand_with_heads_is_known():
    """Of a new operand the rule must know whether it has heads."""
    names = {*primitives.OPERANDS, *primitives.BWD_OPERANDS, *primitives.FWD_RESULTS}
    names |= {*primitives.TANGENT_OPERANDS, *primitives.TANGENT2_OPERANDS, *primitives.HESSIAN_OPERANDS}
    no_heads = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "softmax_scale"}
    assert names - partitioning._HEADS.keys() == no_heads
