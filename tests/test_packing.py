import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_varlen as jv

# Eager calls compile each operation for each shape; the random tests run compiled functions.
segment_ids, positions, pack, unpack = (
    jax.jit(f, static_argnums=f.__code__.co_argcount - 1) for f in (jv.segment_ids, jv.positions, jv.pack, jv.unpack)
)
LENGTHS = st.lists(st.integers(0, 6), max_size=7)


def equal(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    assert np.asarray(actual).dtype == np.int32


@pytest.mark.parametrize("lengths, offsets", [([3, 0, 2], [0, 3, 3, 5]), ([], [0]), ([0], [0, 0])])
def test_cu_seqlens_from_lengths(lengths, offsets):
    equal(jv.cu_seqlens_from_lengths(lengths), offsets)
    equal(jax.jit(jv.cu_seqlens_from_lengths)(jnp.array(lengths, jnp.int32)), offsets)
    equal(jv.cu_seqlens_from_lengths(np.array(lengths, np.uint8)), offsets)


@pytest.mark.parametrize(
    "ids, offsets, seqused",
    [
        ([1, 1, 0, 2, 2, 2, 0], [0, 2, 3, 6, 7, 7, 7], [2, 0, 3, 0, 0, 0]),
        ([0, 0, 5, 5, 5, 5, 5], [0, 2, 7, 7, 7, 7, 7], [0, 5, 0, 0, 0, 0]),
        ([3, 1, 3, 1, 3, 1, 1], [0, 1, 2, 3, 4, 5, 7], [1, 1, 1, 1, 1, 2]),  # an id that comes back is a new sequence
        ([0, 0, 0, 0, 0, 0, 0], [0, 7, 7, 7, 7, 7, 7], [0, 0, 0, 0, 0, 0]),
        ([], [0] * 7, [0] * 6),
    ],
)
def test_cu_seqlens_from_segment_ids(ids, offsets, seqused):
    for f in (jv.cu_seqlens_from_segment_ids, jax.jit(jv.cu_seqlens_from_segment_ids, static_argnums=1)):
        actual = f(jnp.array(ids, jnp.int32), 6)
        equal(actual[0], offsets)
        equal(actual[1], seqused)


def test_padding_id():
    offsets, seqused = jv.cu_seqlens_from_segment_ids([7, 0, -1, -1], 3, padding_id=-1)
    equal(offsets, [0, 1, 2, 4])
    equal(seqused, [1, 1, 0])


def test_more_runs_than_sequences_never_merge():
    ids = [1, 1, 2, 3, 3]
    with pytest.raises(ValueError, match=r"hold 3 runs .* max_sequences is 2. Raise max_sequences to at least 3"):
        jv.cu_seqlens_from_segment_ids(ids, 2)
    offsets, seqused = jax.jit(jv.cu_seqlens_from_segment_ids, static_argnums=1)(jnp.array(ids), 2)
    equal(offsets, [0, 2, 3])
    equal(seqused, [2, 1])
    equal(jv.segment_ids(offsets, 5), [0, 0, 1, -1, -1])
    offsets, seqused = jv.cu_seqlens_from_segment_ids([1, 1, 2, 0, 0], 2)  # surplus padding is nobody's anyway
    equal(offsets, [0, 2, 3])
    equal(seqused, [2, 1])
    equal(jv.cu_seqlens_from_segment_ids([0, 0], 0)[0], [0])


def test_segment_ids_and_positions():
    equal(jv.segment_ids([1, 3, 3, 5], 7), [-1, 0, 0, 2, 2, -1, -1])
    equal(jv.positions([1, 3, 3, 5], 7), [0, 0, 1, 0, 1, 0, 0])
    equal(jv.segment_ids([0], 2), [-1, -1])
    equal(jv.positions([0, 2], 0), [])
    equal(jax.jit(jv.positions, static_argnums=1)(jnp.array([0, 2, 5]), 6), [0, 1, 0, 1, 2, 0])


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.integers(0, 4))
def test_segment_ids_and_positions_are_those_of_a_loop(lengths, tail):
    total = sum(lengths) + tail
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(n) for n in lengths] or [np.arange(0)])
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    equal(segment_ids(cu_seqlens, total), [*owner, *[-1] * tail])
    equal(positions(cu_seqlens, total), [*place, *[0] * tail])


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.integers(0, 4), st.integers(0, 3), st.sampled_from(["float32", "int8"]))
def test_pack_and_unpack_are_inverse(lengths, tail, more, dtype):
    seqlen, total = max(lengths, default=0) + more, sum(lengths) + tail
    padded = np.random.default_rng(0).integers(-99, 99, (len(lengths), seqlen, 2)).astype(dtype)
    inside = np.arange(seqlen)[None, :] < np.array(lengths, np.int32).reshape(-1, 1)
    packed = pack(padded, np.array(lengths, np.int32), total)
    assert packed.dtype == dtype
    np.testing.assert_array_equal(packed, np.concatenate([padded[inside], np.zeros((tail, 2))]))
    unpacked = unpack(packed, np.cumsum([0, *lengths]).astype(np.int32), seqlen)
    assert unpacked.dtype == dtype
    np.testing.assert_array_equal(unpacked, np.where(inside[..., None], padded, 0))


def test_nan_in_padding_reaches_neither_result_nor_gradient():
    lengths = np.array([2, 0, 3], np.int32)
    padded = np.ones((3, 4), np.float32)
    padded[np.arange(4)[None, :] >= lengths[:, None]] = np.nan
    loss = lambda x: (jv.pack(x, lengths, 7) ** 2).sum()
    np.testing.assert_array_equal(jv.pack(padded, lengths, 7), [1] * 5 + [0] * 2)
    np.testing.assert_array_equal(jax.grad(loss)(padded), np.where(np.isnan(padded), 0, 2))

    packed = np.array([np.nan, 1, 1, 1, np.nan, np.nan], np.float32)
    cu_seqlens = np.array([1, 3, 3, 4], np.int32)
    loss = lambda x: (jv.unpack(x, cu_seqlens, 3) ** 2).sum()
    np.testing.assert_array_equal(jv.unpack(packed, cu_seqlens, 3), [[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(jax.grad(loss)(packed), np.where(np.isnan(packed), 0, 2))


def test_traced_lengths_that_do_not_fit_lose_rows_and_never_move_others():
    padded = jnp.arange(1, 7).reshape(2, 3)
    np.testing.assert_array_equal(pack(padded, jnp.array([2, 3]), 4), [1, 2, 4, 5])
    np.testing.assert_array_equal(pack(padded, jnp.array([5, 2]), 7), [1, 2, 3, 0, 0, 4, 5])
    np.testing.assert_array_equal(unpack(jnp.arange(1, 6), jnp.array([0, 4, 7]), 2), [[1, 2], [5, 0]])


ERRORS = [
    (lambda: jv.cu_seqlens_from_lengths([[1]]), ValueError, r"lengths must have shape \(batch,\), got rank 2 \(1, 1\)"),
    (lambda: jv.cu_seqlens_from_lengths([1.5]), TypeError, r"lengths must hold integers, got float64 \(1,\). Cast"),
    (lambda: jv.cu_seqlens_from_lengths([2, -3]), ValueError, r"not be negative, got lengths\[1\] = -3"),
    (lambda: jv.cu_seqlens_from_lengths([2**30, 2**30]), ValueError, "less than 2.31, got 2147483648"),
    (lambda: jv.cu_seqlens_from_segment_ids([[1]], 2), ValueError, r"segment_ids must have shape \(total,\)"),
    (lambda: jv.cu_seqlens_from_segment_ids([True], 2), TypeError, "segment_ids must hold integers, got bool"),
    (lambda: jv.cu_seqlens_from_segment_ids([1], -1), ValueError, "max_sequences must be at least 0, got -1"),
    (lambda: jv.cu_seqlens_from_segment_ids([1], 1.0), TypeError, "max_sequences must be a Python int"),  # type: ignore
    (lambda: jax.jit(jv.segment_ids)(np.arange(2), 3), TypeError, "total must be a Python int, as it is a shape"),
    (lambda: jv.segment_ids([], 3), ValueError, "cu_seqlens must have shape .* at least one entry"),
    (lambda: jv.positions(np.zeros(2, np.float32), 3), TypeError, "cu_seqlens must hold integers, got float32"),
    (lambda: jv.pack(np.zeros(3), [1], 3), ValueError, r"padded must have shape .* got rank 1 \(3,\)"),
    (lambda: jv.pack(np.zeros((2, 3)), [1], 3), ValueError, r"lengths must have shape \(batch,\) = \(2,\)"),
    (lambda: jv.pack(np.zeros((1, 3)), [4], 9), ValueError, r"at most seqlen = 3 of padded, got lengths\[0\] = 4"),
    (lambda: jv.pack(np.zeros((2, 3)), [3, 2], 4), ValueError, "total must be at least the sum of lengths, 5, got 4"),
    (lambda: jv.unpack(np.zeros(()), [0], 3), ValueError, "packed must have shape"),
    (lambda: jv.unpack(np.zeros(5), [0, 2, 5], 2), ValueError, "got 2; sequence 1 has 3"),
    (lambda: jv.unpack(np.zeros(5), [0, 2, 6], 4), ValueError, r"at most total = 5, .* got \[0, 2, 6\]"),
    (lambda: jv.unpack(np.zeros(5), [0, 3, 2], 4), ValueError, "must rise"),
]


@pytest.mark.parametrize("call, error, text", ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
