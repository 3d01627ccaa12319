"""The (B, T, N, H) call: against jax.nn for all that it can do, and against a dense mask for segment ids."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import DTYPES

import jax_varlen as jv

DTYPE = jnp.dtype(DTYPES[0])
IDS = np.array(
    [
        [1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 7, 7, 8, 8, 0, 0, 0],  # 8 segments and a padded tail
        [0, 0, 9, 9, 0, 7, 7, 7, 7, 7, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2],  # padding in front and between, ids in any order
        [4] * 20,
        [0] * 20,
        [3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 5],  # 3 comes back: another sequence
    ],
    np.int32,
)
KV_IDS = np.array(
    [
        [1, 2, 2, 2, 4, 4, 5, 6, 6, 6, 6, 7],  # 3 and 8 have no keys
        [0, 9, 9, 9, 9, 1, 1, 7, 7, 7, 0, 2],  # 1 has no queries
        [4] * 11 + [0],
        [5] * 12,
        [5, 5, 1, 1, 1, 0, 0, 8, 8, 8, 8, 8],
    ],
    np.int32,
)
CROSS_IDS = np.where(np.arange(20) < 7, IDS, np.where(IDS == 3, 0, IDS))
CROSS_IDS[4] = np.repeat([2, 5, 0, 1], 5)


def rows(batch, size, *heads, head_dim=16, dtype=DTYPE):
    """Arrays (batch, size, n, head_dim), one for each n."""
    rng = np.random.default_rng(size)
    return [jnp.asarray(rng.normal(size=(batch, size, n, head_dim)), dtype) for n in heads]


def near(actual, f, *args, factor=3):
    """Equals f in float32; allowed is `factor` times the error that f has in the dtype of its arguments."""
    f = jax.jit(f)
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):  # jax.nn itself is not strict
        expected = f(*(x.astype(jnp.float32) for x in args))
        rounded = f(*args)
    for x, y, z in zip(*map(jax.tree.leaves, (actual, expected, rounded)), strict=True):
        assert x.shape == y.shape and x.dtype == z.dtype
        x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
        floor = 8 * oracle.eps(args[0].dtype) * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=factor * np.abs(z - y).max() + floor)


def both(options, *args):
    """Asserts that out and the gradients of a call are those of jax.nn.dot_product_attention."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=args[0].shape), args[0].dtype)
    results = []
    for attend in (jv.dot_product_attention, jax.nn.dot_product_attention):
        loss = lambda *args, attend=attend: (attend(*args, **options) * weights.astype(args[0].dtype)).sum()
        results.append(lambda *args, attend=attend, loss=loss: (attend(*args, **options), jax.grad(loss, (0, 1, 2))(*args)))
    near(jax.jit(results[0])(*args), results[1], *args)


LENGTHS = np.array([13, 1, 20], np.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"local_window_size": 3},
        {"local_window_size": (4, 2)},
        {"local_window_size": (0, 1)},
        {"local_window_size": (3, 5), "is_causal": True},
        {"query_seq_lengths": LENGTHS},
        {"key_value_seq_lengths": LENGTHS},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1]},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "is_causal": True},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "local_window_size": (4, 2)},
    ],
    ids=str,
)
def test_equals_jax_nn(options):
    both(options, *rows(3, 20, 4, 2, 2))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_other_keys_and_groups_equal_jax_nn(num_kv_heads):
    (q,), (k, v) = rows(3, 20, 6), rows(3, 33, num_kv_heads, num_kv_heads)
    both({}, q, k, v)
    both({"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS + 3}, q, k, v)


def test_lse_equals_jax_nn():
    q, k, v = rows(3, 20, 4, 2, 2)
    _, lse = jv.dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    assert lse.dtype == jnp.float32
    f = lambda *args: jax.nn.dot_product_attention(*args, is_causal=True, return_residual=True)[1]
    near(lse.astype(DTYPE), f, q, k, v)


def runs(ids):
    """The number of the run that each token belongs to, -1 for padding."""
    starts = np.diff(ids, axis=1, prepend=-1) != 0
    return np.where(ids == 0, -1, starts.cumsum(1))


def dense(q, k, v, seen, scale=None, softcap=None, sinks=None):
    """(out, lse) in float64 for a mask (B, T, S)."""
    outs, lses = [], []
    for q_b, k_b, v_b, seen_b in zip(*(np.asarray(x, np.float64) for x in (q, k, v)), seen, strict=True):
        k_b, v_b = (np.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k_b, v_b))
        logits = np.einsum("qhd,khd->hqk", q_b, k_b) * (q.shape[3] ** -0.5 if scale is None else scale)
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        p, lse = oracle._softmax(np.where(seen_b, logits, -np.inf), sinks)
        outs.append(np.einsum("hqk,khd->qhd", p, v_b))
        lses.append(lse.T)
    return np.stack(outs), np.stack(lses)


def check(actual, q, k, v, seen, nobody, **options):
    out, lse = dense(q, k, v, seen, **options)
    lse[nobody] = -np.inf  # sink or not
    np.testing.assert_allclose(np.asarray(actual[0], np.float64), out, rtol=0, atol=4 * oracle.eps(q.dtype) * np.abs(out).max())
    np.testing.assert_allclose(actual[1], lse, rtol=0, atol=64 * oracle.eps(np.float32))
    assert actual[0].dtype == q.dtype and not np.asarray(actual[0], np.float32)[nobody].any()


SELF = runs(IDS)[:, :, None] == np.where(IDS == 0, -2, runs(IDS))[:, None, :]
OFFSET = np.arange(20)[None, :] - np.arange(20)[:, None]  # of a key from the query


@pytest.mark.parametrize("max_segments", [None, 8])
@pytest.mark.parametrize(
    "options, mask",
    [
        ({}, OFFSET < 99),
        ({"is_causal": True}, OFFSET <= 0),
        ({"local_window_size": (2, 1), "softcap": 2.0}, (OFFSET >= -2) & (OFFSET <= 1)),
        ({"is_causal": True, "scale": -0.2, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)}, OFFSET <= 0),
    ],
    ids=str,
)
def test_segments_equal_a_dense_mask(options, mask, max_segments):
    q, k, v = rows(5, 20, 4, 2, 2)
    attend = lambda ids: jv.dot_product_attention(
        q, k, v, segment_ids=ids, max_segments=max_segments, return_lse=True, **options
    )
    others = {name: x for name, x in options.items() if name in ("scale", "softcap", "sinks")}
    check(jax.jit(attend)(IDS), q, k, v, SELF & mask, IDS == 0, **others)


@pytest.mark.parametrize("max_segments", [None, 9])
def test_segments_of_other_keys(max_segments):
    (q,), (k, v) = rows(5, 20, 4), rows(5, 12, 2, 2)
    attend = lambda q_ids, kv_ids: jv.dot_product_attention(
        q, k, v, segment_ids=q_ids, kv_segment_ids=kv_ids, max_segments=max_segments, return_lse=True
    )
    seen = CROSS_IDS[:, :, None] == np.where(KV_IDS == 0, -2, KV_IDS)[:, None, :]
    check(jax.jit(attend)(CROSS_IDS, KV_IDS), q, k, v, seen, CROSS_IDS == 0)
    if max_segments is None:  # ids that are known, and right
        check(jax.jit(lambda: attend(CROSS_IDS, KV_IDS))(), q, k, v, seen, CROSS_IDS == 0)


def test_gradients_of_segments():
    q, k, v = rows(5, 20, 4, 2, 2)
    loss = lambda attend, **options: lambda *args: (attend(*args, **options) ** 2).sum()
    mask = jnp.asarray(SELF | (IDS == 0)[:, :, None])[:, None]  # a row that sees nothing has no softmax
    real = jnp.asarray(IDS != 0)[:, :, None, None]
    expected = lambda *args: jnp.where(real, jax.nn.dot_product_attention(*args, mask=mask, is_causal=True), 0)
    actual = jax.jit(jax.grad(loss(jv.dot_product_attention, segment_ids=IDS, is_causal=True), (0, 1, 2)))(q, k, v)
    near(actual, jax.grad(loss(expected), (0, 1, 2)), q, k, v)


def test_padding_may_hold_nan():
    q, k, v = (x.at[IDS == 0].set(jnp.nan) for x in rows(5, 20, 4, 2, 2))
    loss = lambda *args: jv.dot_product_attention(*args, segment_ids=IDS).astype(jnp.float32).sum()
    assert np.isfinite(loss(q, k, v))
    for x in jax.grad(loss, (0, 1, 2))(q, k, v):
        assert np.isfinite(np.asarray(x, np.float32)).all() and not np.asarray(x, np.float32)[IDS == 0].any()


def test_one_trace_for_all_ids():
    q, k, v = rows(5, 20, 4, 2, 2)
    traces = []

    @jax.jit
    def attend(ids):
        traces.append(ids)
        return jv.dot_product_attention(q, k, v, segment_ids=ids)

    for ids in (IDS, IDS[::-1], np.ones_like(IDS)):
        attend(ids)
    assert len(traces) == 1


@pytest.mark.parametrize("ids", [None, IDS], ids=["rows", "segments"])
def test_nothing_is_copied(ids):
    args = rows(5, 20, 4, 2, 2)
    attend = jax.jit(lambda q, k, v: jv.dot_product_attention(q, k, v, segment_ids=ids, is_causal=True))
    text = attend.lower(*args).compile().as_text()
    (call,) = re.findall(r"custom-call\(([^)]*)\).*jax_varlen_fwd", text)
    for name in re.findall(r"%[\w.\-]+", call)[:3]:
        definition = re.search(re.escape(name) + r" = .*", text)
        assert definition and re.search(r" bitcast\(.*%\w", definition[0]), definition
    # Nothing as large as k but the arguments and the call itself.
    large = [line for line in text.splitlines() if re.search(r" = \w+\[(5,20|100),\d,16\]", line)]
    for line in large:
        assert re.search(r" (parameter|bitcast|get-tuple-element|custom-call)\(", line), line


def test_traced_values_that_break_a_rule_see_nothing():
    (q,), (k, v) = rows(1, 4, 2), rows(1, 4, 2, 2)
    attend = jax.jit(jv.dot_product_attention, static_argnames=("is_causal", "max_segments"))
    seen = lambda **options: (np.asarray(attend(q, k, v, **options), np.float32) != 0).any((2, 3))[0].tolist()
    ids = np.array([[1, 1, 2, 3]])
    assert seen(segment_ids=ids, max_segments=2) == [True, True, True, False]
    assert seen(segment_ids=ids, kv_segment_ids=np.array([[2, 1, 1, 3]])) == [False, False, True, True]
    assert seen(segment_ids=np.array([[1, 1, 2, 1]]), kv_segment_ids=np.array([[1, 2, 2, 2]])) == [False, False, False, True]
    lengths = {"query_seq_lengths": np.array([4]), "key_value_seq_lengths": np.array([3])}
    assert seen(is_causal=True, **lengths) == [True, True, True, False]


def test_empty_arrays():
    for batch, size_q, size_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        (q,), (k, v) = rows(batch, size_q, 4), rows(batch, size_k, 2, 2)
        ids = {"segment_ids": np.ones((batch, size_q), int), "kv_segment_ids": np.ones((batch, size_k), int)}
        for options in ({}, ids):
            attend = jax.jit(lambda q, k, v, options=options: jv.dot_product_attention(q, k, v, return_lse=True, **options))
            out, lse = attend(q, k, v)
            assert out.shape == q.shape and not out.any()
            assert lse.shape == q.shape[:3] and (lse == -jnp.inf).all()


Q, K = rows(2, 6, 4, 2)
S4 = K[:, :4]
ONES = np.ones((2, 6), int)
ERRORS = [
    ((Q[0], K, K), {}, ValueError, r"query must have rank 4 \(B, T, N, H\), got rank 3 \(6, 4, 16\)"),
    ((Q, K, S4), {}, ValueError, r"must agree in B, S and K, got .* value \(2, 4, 2, 16\)"),
    ((Q, K[:1], K[:1]), {}, ValueError, "must agree in B, S and K"),
    (([1.0], K, K), {}, TypeError, "query must be an array, got list"),
    ((Q[:, :, :3], K, K), {}, ValueError, "num_heads"),
    ((Q, S4, S4), {"is_causal": True}, ValueError, "for self-attention, where T equals S .* call jax_varlen.varlen_attention"),
    ((Q, S4, S4), {"local_window_size": 2}, ValueError, "is_causal and local_window_size are for self-attention"),
    ((Q, K, K), {"is_causal": True, "segment_ids": ONES, "kv_segment_ids": ONES}, ValueError, "got kv_segment_ids"),
    ((Q, K, K), {"is_causal": 1}, TypeError, "is_causal must be a Python bool"),
    ((Q, K, K), {"return_lse": 1}, TypeError, "return_lse must be a Python bool"),
    ((Q, K, K), {"local_window_size": -1}, ValueError, "local_window_size must not be negative, got"),
    ((Q, K, K), {"local_window_size": (1, 2, 3)}, ValueError, r"a pair \(left, right\), got \(1, 2, 3\)"),
    ((Q, K, K), {"local_window_size": (1.5, 2)}, TypeError, "local_window_size must hold integers or None"),
    ((Q, K, K), {"max_segments": 3}, ValueError, "max_segments has no meaning without segment_ids"),
    ((Q, K, K), {"kv_segment_ids": ONES}, ValueError, "kv_segment_ids has no meaning without segment_ids"),
    ((Q, K, K), {"segment_ids": ONES, "query_seq_lengths": [6, 6]}, ValueError, "cannot be given beside segment_ids"),
    ((Q, K, K), {"segment_ids": ONES[:, 1:]}, ValueError, r"segment_ids must have shape \(2, 6\), .* got \(2, 5\)"),
    ((Q, K, K), {"segment_ids": ONES[0]}, ValueError, r"segment_ids must have shape \(B, T\), got rank 1"),
    ((Q, K, K), {"segment_ids": ONES * 1.0}, TypeError, "segment_ids must hold integers, got float64"),
    ((Q, K, K), {"segment_ids": [[1, 2, 1, 2, 0, 0]] * 2, "max_segments": 3}, ValueError, "4 runs .* Raise max_segments to at"),
    ((Q, K, K), {"segment_ids": ONES, "max_segments": 0}, ValueError, "max_segments must be at least 1"),
    ((Q, S4, S4), {"segment_ids": ONES}, ValueError, "kv_segment_ids must be given where S differs from T"),
    (
        (Q, S4, S4),
        {"segment_ids": ONES.astype(np.int8), "kv_segment_ids": ONES[:, :4]},
        TypeError,
        "must have one dtype, got int8 and int64",
    ),
    (
        (Q, S4, S4),
        {"segment_ids": [[1, 2, 1, 1, 1, 1]] * 2, "kv_segment_ids": ONES[:, :4]},
        ValueError,
        r"runs \[1, 2, 1\] in row 0",
    ),
    ((Q, S4, S4), {"segment_ids": [[1, 1, 2, 2, 2, 2]] * 2, "kv_segment_ids": [[2, 2, 1, 1]] * 2}, ValueError, "in one order"),
    ((Q, K, K), {"query_seq_lengths": [6]}, ValueError, r"query_seq_lengths must have shape \(B,\) = \(2,\), got \(1,\)"),
    ((Q, K, K), {"key_value_seq_lengths": [6, 7]}, ValueError, r"between 0 and 6, .*key_value_seq_lengths\[1\] is 7"),
    ((Q, K, K), {"key_value_seq_lengths": [6, 5], "is_causal": True}, ValueError, "got key_value_seq_lengths alone"),
    (
        (Q, K, K),
        {"query_seq_lengths": [6, 5], "key_value_seq_lengths": [6, 4], "local_window_size": 1},
        ValueError,
        "must be equal, got 5 and 4 in row 1",
    ),
]


@pytest.mark.parametrize("args, options, error, text", ERRORS, ids=[text for *_, text in ERRORS])
def test_errors(args, options, error, text):
    with pytest.raises(error, match=text):
        jv.dot_product_attention(*args, **options)


def linen_call(attention_fn, query, key, value, module=None, **changes):
    """The call of `flax.linen.MultiHeadDotProductAttention` (flax 0.12): what a function does not name is left out."""
    kwargs = {
        "mask": None,
        "dropout_rng": None,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "deterministic": True,
        "dtype": None,
        "precision": None,
        "force_fp32_for_softmax": False,
        "qk_attn_weights_einsum": None,
        "attn_weights_value_einsum": None,
    }
    kwargs = {k: v for k, v in (kwargs | changes).items() if k in inspect.signature(attention_fn).parameters}
    return attention_fn(query, key, value, **kwargs, **({} if module is None else {"module": module}))


def nnx_call(attention_fn, query, key, value, **changes):
    """The call of `flax.nnx.MultiHeadAttention` (flax 0.12)."""
    kwargs = {
        "mask": None,
        "dropout_rng": None,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "deterministic": True,
        "dtype": None,
        "precision": None,
        "module": None,
        "is_causal": False,
    }
    return attention_fn(query, key, value, **(kwargs | changes))


@pytest.mark.parametrize("call", [linen_call, nnx_call])
def test_attention_fn(call):
    q, k, v = rows(5, 20, 4, 2, 2)
    causal = jv.dot_product_attention(q, k, v, segment_ids=IDS, is_causal=True)
    attend = jv.attention_fn(segment_ids=IDS, is_causal=True)
    np.testing.assert_array_equal(call(attend, q, k, v), causal)
    np.testing.assert_array_equal(call(attend, q, k, v, dtype=DTYPE, precision="highest", dropout_rate=0.1), causal)
    if call is nnx_call:
        np.testing.assert_array_equal(call(jv.attention_fn(segment_ids=IDS), q, k, v, is_causal=True), causal)


@pytest.mark.parametrize("call", [linen_call, nnx_call])
@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"mask": jnp.ones((2, 1, 6, 6), bool)}, NotImplementedError, "mask cannot be given .*is_causal"),
        ({"dropout_rate": 0.1, "deterministic": False}, NotImplementedError, "dropout_rate cannot be given .* never dropped"),
        ({"module": object()}, NotImplementedError, "module cannot be given .* sow_weights=False"),
        ({"dtype": jnp.float64}, TypeError, "dtype must be that of query"),
    ],
)
def test_attention_fn_leaves_nothing_out(call, changes, error, text):
    with pytest.raises(error, match=text):
        call(jv.attention_fn(), Q, K, K, **changes)


def test_attention_fn_errors():
    with pytest.raises(NotImplementedError, match="bias cannot be given"):
        jv.attention_fn()(Q, K, K, jnp.zeros((2, 4, 6, 6)))
    with pytest.raises(NotImplementedError, match=r"qk_attn_weights_einsum cannot be given .* products itself"):
        linen_call(jv.attention_fn(), Q, K, K, qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(TypeError, match="return_lse cannot be given here"):
        jv.attention_fn(return_lse=True)
