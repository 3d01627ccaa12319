"""Context parallelism: how tokens are shared out, what each step sees, what is sent, and what is refused.

Results over several devices are checked by context_parallel_devices.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax.sharding import AbstractMesh, PartitionSpec

import jax_varlen as jv
from jax_varlen import context_parallel

P = PartitionSpec


@pytest.mark.parametrize("devices", [2, 4])
def test_devices(devices):
    """Several devices need a process of their own, on CPU. Its programs run once: fast code would take longer to make."""
    file = Path(__file__).with_name("context_parallel_devices.py")
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(file), str(devices)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def random_offsets(rng, total):
    """Some sequences of 0 to 12 tokens, of which some count, with tokens of nobody around them."""
    cu_seqlens = np.cumsum(rng.integers(0, 5) + np.append(0, rng.integers(0, 13, size=6) * (rng.random(6) < 0.8)))
    cu_seqlens = cu_seqlens.clip(max=total).astype(np.int32)
    return cu_seqlens, rng.integers(0, np.diff(cu_seqlens) + 1).astype(np.int32)


def visible_tokens(cu_seqlens, used, total, causal, window_size=(None, None)):
    """(total, total): whether token i sees token j."""
    seen = np.zeros((total, total), bool)
    for first, n in zip(cu_seqlens[:-1], used, strict=True):
        seen[first : first + n, first : first + n] = oracle.visible(n, n, causal, window_size)
    return seen


def visible_rows(offsets, rows, causal, window_size):
    """(rows, rows): whether a kernel that is given the offsets lets row r of a device see row s of another."""
    seen = np.zeros((rows, rows), bool)
    (starts_q, len_q), (starts_k, len_k) = (_lengths(offsets, side) for side in "qk")
    for b in range(len(len_q)):
        part = np.s_[starts_q[b] : starts_q[b] + len_q[b], starts_k[b] : starts_k[b] + len_k[b]]
        seen[part] = oracle.visible(len_q[b], len_k[b], causal, window_size)
    return seen


def _lengths(offsets, side):
    """Where sequences start, and how many of their rows count."""
    cu_seqlens = np.asarray(offsets[f"cu_seqlens_{side}"])
    used = np.asarray(offsets.get(f"seqused_{side}", np.diff(cu_seqlens)))
    assert (used >= 0).all() and (used <= np.diff(cu_seqlens)).all()
    return cu_seqlens[:-1], used


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("causal, left", [(False, None), (True, None), (True, 7), (True, 1)])
@pytest.mark.parametrize("with_seqused", [False, True])
def test_every_step_sees_its_part_of_the_mask(size, causal, left, with_seqused):
    rng, rows = np.random.default_rng(size), 12
    for _ in range(5):
        total = size * rows
        cu_seqlens, used = random_offsets(rng, total)
        used = used if with_seqused else np.diff(cu_seqlens)
        expected = visible_tokens(cu_seqlens, used, total, causal, (left, None))
        ops = {"cu_seqlens": cu_seqlens} | ({"seqused": used} if with_seqused else {})
        for index in range(size):
            for t in range(size):
                part = expected[index::size, (index - t) % size :: size]
                if left is not None and t > left:
                    assert not part.any()
                    continue
                offsets = context_parallel._offsets(ops, size, np.int32(index), t, causal=causal)
                window = (None if left is None else (left - t) // size, None)
                np.testing.assert_array_equal(visible_rows(offsets, rows, causal, window), part)


def test_causal_work_is_balanced():
    """The pairs that the busiest of eight devices computes are hardly more than those of the idlest."""
    cu_seqlens = np.array([0, 700, 731, 4000, 4096])
    seen = visible_tokens(cu_seqlens, np.diff(cu_seqlens), 4096, True)
    work = seen.reshape(512, 8, 4096).sum((0, 2))
    assert work.max() < 1.01 * work.min()


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_stripe(n, axis):
    x = np.arange(12)[:, None] * np.ones((1, 12), int)
    x = x if axis == 0 else x.T
    striped = jv.stripe(x, n, axis=axis)
    for d, share in enumerate(np.split(np.asarray(striped), n, axis)):
        np.testing.assert_array_equal(share, np.take(x, np.arange(d, 12, n), axis))
    np.testing.assert_array_equal(jv.unstripe(striped, n, axis=axis), x)


def test_one_device_is_the_plain_call(any_dtype):
    """On the default device, whatever it is. No state is merged, so that the bits are the same."""
    case = Case("", "", (30, 0, 9), num_kv_heads=1, gap=2, tail=3, sinks="random", alibi="heads", options={"causal": True})
    (q, k, v, cu_seqlens), options = case.inputs(any_dtype)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def attend(q, k, v):
        return jv.context_parallel_attention(q, k, v, cu_seqlens, axis_name="x", return_lse=True, **options)

    f = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P(None, "x")))
    plain = lambda *args: jv.varlen_attention(*args, cu_seqlens, return_lse=True, **options)
    for actual, expected in zip(jax.jit(f)(q, k, v), jax.jit(plain)(q, k, v), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


Q = jax.ShapeDtypeStruct((64, 4, 16), jnp.float32)
K = jax.ShapeDtypeStruct((64, 2, 16), jnp.float32)
CU_SEQLENS = np.array([0, 30, 61])


def attend(q, k, v, axis_name="x", cu_seqlens=CU_SEQLENS, **options):
    """Over four devices that need not be there: traced alone."""
    call = lambda q, k, v: jv.context_parallel_attention(q, k, v, cu_seqlens, axis_name=axis_name, **options)
    mesh = AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(q, k, v)


def events(f):
    """The kernels and what is sent, in the order of the program."""
    text = str(jax.make_jaxpr(f)(Q, K, K))
    return re.findall(r"\b(?:jax_varlen_(fwd|bwd)\[|(ppermute|all_gather|psum_scatter|reduce_scatter)\[)", text)


def names(f):
    return ["".join(pair) for pair in events(f)]


def gradient(f, **options):
    return jax.grad(lambda *args: f(*args, **options).sum(), (0, 1, 2))


def test_keys_are_sent_before_the_device_attends_to_those_it_has():
    send = ["ppermute", "ppermute"]  # k and v
    assert names(attend) == [*send, "fwd", *send, "fwd", *send, "fwd", "fwd"]
    assert names(gradient(attend))[10:] == [
        *(*send, "bwd"),
        *(*send, *send, "bwd"),  # and the gradients of keys, from the step before
        *(*send, *send, "bwd"),
        *(*send, "bwd"),
        *send,  # home
    ]


def test_gathered_keys_are_sent_once():
    found = names(lambda *args: attend(*args, method="all_gather"))
    assert found == ["all_gather"] * 2 + ["fwd"] * 4


def test_a_window_shortens_the_ring():
    found = names(lambda *args: attend(*args, window_size=(1, 0)))
    assert found.count("fwd") == 2 and found.count("ppermute") == 2


def test_checkpoint_keeps_what_the_policy_says():
    policy = jax.checkpoint_policies.save_only_these_names("jax_varlen_out", "jax_varlen_lse")
    kept = names(gradient(jax.checkpoint(attend, policy=policy)))
    again = names(gradient(jax.checkpoint(attend)))
    assert (kept.count("fwd"), again.count("fwd")) == (4, 8)
    assert kept.count("bwd") == again.count("bwd") == 4


WRONG = {
    "axis": (dict(axis_name="y"), ValueError, "axis_name must be a mesh axis.* got 'y'. Call it inside jax.shard_map"),
    "no axis": (dict(axis_name=None), ValueError, "axis_name must be a mesh axis"),
    "method": (dict(method="tree"), ValueError, "method must be one of 'ring', 'all_gather', got 'tree'"),
    "window": (dict(window_size=(4, 4)), NotImplementedError, r"\(left, 0\), got \(4, 4\).*varlen_attention inside"),
    "open window": (dict(window_size=(4, None)), NotImplementedError, r"got \(4, -1\)"),
    "alibi": (dict(alibi_slopes=np.ones(4, np.float32)), NotImplementedError, "alibi_slopes with causal=True alone"),
    "rank": (dict(cu_seqlens=np.zeros((2, 2), int)), ValueError, r"cu_seqlens must have shape \(batch \+ 1,\)"),
    "dtype": (dict(cu_seqlens=np.zeros(3)), TypeError, "cu_seqlens must hold integers"),
    "end": (dict(cu_seqlens=[0, 65]), ValueError, r"cu_seqlens\[1\] is 65 of 64 tokens"),
    "falls": (dict(cu_seqlens=[0, 5, 4]), ValueError, r"cu_seqlens\[2\] is 4 after cu_seqlens\[1\] = 5"),
    "seqused": (dict(seqused=np.array([3, 32])), ValueError, r"seqused\[1\] is 32, and sequence 1 has 31 tokens"),
    "lengths": (dict(seqused=np.array([3])), ValueError, r"seqused must have shape \(batch,\) = \(2,\)"),
    "sinks": (dict(sinks=np.ones(3)), ValueError, r"sinks must have shape \(num_heads,\) = \(4,\)"),
    "slopes": (dict(causal=True, alibi_slopes=np.ones(3, np.float32)), ValueError, "alibi_slopes must have shape"),
    "traced scale": (dict(softmax_scale=float("inf")), ValueError, "softmax_scale must be finite"),
}


@pytest.mark.parametrize("options, error, text", WRONG.values(), ids=WRONG)
def test_wrong_calls(options, error, text):
    for f in (attend, lambda *args, **options: gradient(attend, **options)(*args)):
        with pytest.raises(error, match=text):
            jax.eval_shape(lambda *args: f(*args, **options), Q, K, K)  # noqa: B023


def test_wrong_tokens():
    half = jax.ShapeDtypeStruct((32, 2, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"q, k and v must hold the same tokens, an equal share on each device, got q \(16, 4"):
        jax.eval_shape(attend, Q, half, half)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads"):
        jax.eval_shape(attend, K, Q, Q)


def test_outside_of_shard_map():
    q = jnp.zeros((4, 1, 8))
    with pytest.raises(ValueError, match="axis_name must be a mesh axis, or a tuple of them"):
        jv.context_parallel_attention(q, q, q, [0, 4], axis_name="x")


@pytest.mark.parametrize("name", ["alibi_slopes", "softmax_scale"])
def test_a_gradient_that_does_not_exist_is_refused(name):
    value = jnp.ones(4) if name == "alibi_slopes" else jnp.float32(0.1)
    loss = lambda x: attend(*(jnp.zeros(s.shape) for s in (Q, K, K)), causal=True, **{name: x}).sum()
    with pytest.raises(NotImplementedError, match=f"{name} has no gradient"):
        jax.eval_shape(jax.grad(loss), value)


def test_unequal_shares():
    with pytest.raises(ValueError, match=r"a multiple of num_devices = 4 tokens at axis 1, got 10 in \(2, 10\). Append 2 that"):
        jv.stripe(jnp.zeros((2, 10)), 4, axis=1)
    with pytest.raises(ValueError, match="a multiple of num_devices = 3"):
        jv.unstripe(jnp.zeros(10), 3)
    with pytest.raises(ValueError, match="num_devices must be a Python int of 1 or more"):
        jv.stripe(jnp.zeros(10), 0)
    with pytest.raises(ValueError, match=r"axis must be one of the 1 axes of x, got 1 for \(10,\)"):
        jv.stripe(jnp.zeros(10), 2, axis=1)
    with pytest.raises(TypeError, match="x must be an array"):
        jv.stripe([1, 2], 2)
