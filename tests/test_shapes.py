"""Every rule of a call, and the words in which it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DTYPES

from jax_varlen import varlen_attention

DTYPE = jnp.dtype(DTYPES[0])


def arrays(q=(6, 4, 8), k=(6, 2, 8), v=None, dtype=DTYPE):
    return tuple(jnp.zeros(shape, dtype) for shape in (q, k, k if v is None else v))


def call(q=(6, 4, 8), k=(6, 2, 8), v=None, cu=(0, 2, 6), cu_k=None, **options):
    """A call that is right but for what the arguments make wrong."""
    offsets = (jnp.asarray(cu), None if cu_k is None else jnp.asarray(cu_k))
    return (*arrays(q, k, v), *offsets), options


def with_dtypes(*dtypes):
    q, k, v = arrays()
    return (*(x.astype(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)), jnp.array([0, 2, 6])), {}


f32, i32 = jnp.float32, jnp.int32
POOL = (3, 4, 2, 8)
TABLE = np.zeros((2, 2), np.int32)
F8 = jnp.float8_e4m3fn


def paged(k=POOL, dtype=(DTYPE,) * 3, **options):
    """A call with a block table."""
    options = {"block_table": TABLE, "seqused_k": np.zeros(2, np.int32)} | options
    (*arrays, cu, cu_k), options = call(k=k, **options)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 3
    return (*(x.astype(t) for x, t in zip(arrays, dtypes, strict=True)), cu, cu_k), options


ERRORS = {
    # q
    "q_padded": (
        call(q=(2, 8, 4, 64)),
        ValueError,
        r"q must have rank 3 \(total_q, num_heads, head_dim\), got rank 4 \(2, 8, 4, 64\). A padded \(batch, seqlen, heads, "
        r"head_dim\) array is packed with q.reshape\(16, 4, 64\) and cu_seqlens \[0, 8, 16\], or with jax_varlen.pack when "
        r"lengths differ; \(batch, heads, seqlen, head_dim\) must be transposed first.",
    ),
    "q_rank_2": (call(q=(6, 8)), ValueError, r"q must have rank 3 .* got rank 2 \(6, 8\). .* no batch axis"),
    # k and v
    "k_paged_without_table": (
        call(k=POOL),
        ValueError,
        r"k must have rank 3 .* because block_table is not given, got rank 4 \(3, 4, 2, 8\). A paged KV .* needs block_table",
    ),
    "v_rank_2": (
        call(v=(6, 8)),
        ValueError,
        r"v must have rank 3 \(total_k, num_kv_heads, head_dim_v\) .* got rank 2 \(6, 8\)",
    ),
    "k_packed_with_table": (
        call(block_table=TABLE, seqused_k=np.zeros(2, np.int32)),
        ValueError,
        r"k must have rank 4 \(num_blocks, .* because block_table is given, got rank 3 \(6, 2, 8\). .* leave block_table out",
    ),
    "k_v_tokens": (
        call(v=(5, 2, 8)),
        ValueError,
        r"k and v must agree in all but the last .* got k \(6, 2, 8\) and v \(5, 2, 8\)",
    ),
    "k_v_heads": (call(v=(6, 4, 8)), ValueError, r"k and v must agree .* got k \(6, 2, 8\) and v \(6, 4, 8\)"),
    "head_dims": (call(q=(6, 4, 128), k=(6, 2, 64)), ValueError, "same head_dim, got .* head_dim 128 and .* head_dim 64"),
    "heads_8_and_3": (
        call(q=(6, 8, 8), k=(6, 3, 8)),
        ValueError,
        "multiple of num_kv_heads, got 8 query heads in .* and 3 kv heads",
    ),
    "no_heads": (call(q=(6, 0, 8)), ValueError, r"must be at least 1, got q \(6, 0, 8\)"),
    "no_kv_heads": (call(k=(6, 0, 8)), ValueError, r"must be at least 1, .* k \(6, 0, 8\)"),
    "head_dim_0": (call(q=(6, 4, 0), k=(6, 2, 0)), ValueError, "head_dim of q and k must be between 1 and 512, got 0"),
    "head_dim_513": (call(q=(6, 4, 513), k=(6, 2, 513)), ValueError, "head_dim of q and k must be between 1 and 512, got 513"),
    "head_dim_v_513": (call(v=(6, 2, 513)), ValueError, "head_dim of v must be between 1 and 512, got 513"),
    # dtypes
    "mixed_dtypes": (
        with_dtypes(DTYPE, jnp.float32, jnp.float16),
        TypeError,
        "q, k and v must have one dtype, got .* k float32 and v float16",
    ),
    "int_dtype": (with_dtypes(i32, i32, i32), TypeError, "must be float32, bfloat16, float16, got int32. Cast them"),
    "q_list": ((([[[1.0]]], *arrays()[1:], jnp.array([0, 1])), {}), TypeError, "q must be an array, got list"),
    # offsets
    "float_offsets": (call(cu=(0.0, 2.0, 6.0)), TypeError, r"cu_seqlens_q must hold integers, got float32 \(3,\). Cast it"),
    "float_offsets_k": (call(cu_k=(0.0, 2.0, 6.0)), TypeError, "cu_seqlens_k must hold integers, got float32"),
    "bool_offsets": (call(cu=(False, True)), TypeError, "cu_seqlens_q must hold integers, got bool"),
    "offsets_rank_2": (call(cu=((0, 6),)), ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\) .* got \(1, 2\)"),
    "offsets_scalar": (call(cu=0), ValueError, r"cu_seqlens_q must have shape .* got \(\)"),
    "no_offsets": (
        call(cu=np.zeros(0, np.int32)),
        ValueError,
        r"cu_seqlens_q .* at least one entry, got \(0,\). From lengths: jax_varlen.cu_seqlens",
    ),
    "offsets_differ": (call(cu_k=(0, 6)), ValueError, r"cu_seqlens_k must have the same shape .* got \(2,\) and \(3,\)"),
    "no_offsets_k": (
        call(k=(9, 2, 8)),
        ValueError,
        r"cu_seqlens_k may be left out only when .*total_k == total_q\), got q \(6, 4, 8\) and k \(9, 2, 8\). Give cu_",
    ),
    "seqused_q_batch": (
        call(seqused_q=jnp.zeros(3, i32)),
        ValueError,
        r"seqused_q must have shape \(batch,\) = \(2,\), .* got \(3,\)",
    ),
    "seqused_k_rank": (
        call(seqused_k=jnp.zeros((2, 1), i32)),
        ValueError,
        r"seqused_k must have shape \(batch,\) = \(2,\), .* got \(2, 1\)",
    ),
    "seqused_float": (call(seqused_k=jnp.zeros(2)), TypeError, "seqused_k must hold integers, got float32"),
    # paged
    "table_rank": (
        call(k=POOL, block_table=np.zeros(2, np.int32), seqused_k=np.zeros(2, np.int32)),
        ValueError,
        r"block_table must have shape \(batch, max_blocks\) with batch = 2 rows, .* got \(2,\)",
    ),
    "table_batch": (
        call(k=POOL, block_table=np.zeros((3, 2), np.int32), seqused_k=np.zeros(2, np.int32)),
        ValueError,
        r"block_table must have shape \(batch, max_blocks\) with batch = 2 rows, .* got \(3, 2\)",
    ),
    "table_float": (call(k=POOL, block_table=jnp.zeros((2, 2))), TypeError, "block_table must hold integers, got float32"),
    "paged_without_lengths": (
        call(k=POOL, block_table=TABLE),
        ValueError,
        r"seqused_k \(batch,\), or cu_seqlens_k .* Got neither",
    ),
    "block_size_0": (
        paged(k=(3, 0, 2, 8)),
        ValueError,
        r"block_size must be at least 1, got 0 in k \(3, 0, 2, 8\)",
    ),
    "paged_v": (paged(v=(3, 5, 2, 8)), ValueError, r"k and v must agree in all but the last .* v \(3, 5, 2, 8\)"),
    "paged_offsets_k": (
        paged(cu_k=(0, 6)),
        ValueError,
        r"cu_seqlens_k must have the same shape .* got \(2,\) and \(3,\)",
    ),
    "float8_packed": (
        with_dtypes(DTYPE, F8, F8),
        TypeError,
        r"k and v may be float8_e4m3fn only as pools .* with block_table, got k \(6, 2, 8\) without one. Cast them",
    ),
    "float8_q": (paged(dtype=F8), TypeError, "q, k and v must be float32, bfloat16, float16, got float8_e4m3fn"),
    "float8_k_alone": (
        paged(dtype=(DTYPE, F8, DTYPE)),
        TypeError,
        r"q, k and v must have one dtype, .* Pools of blocks may both be float8_e4m3fn",
    ),
    "float8_e5m2": (paged(dtype=(DTYPE, jnp.float8_e5m2, jnp.float8_e5m2)), TypeError, "q, k and v must have one dtype"),
    "k_scale_packed": (
        call(k_scale=2.0),
        ValueError,
        r"k_scale may be given only with block_table and pools of float8_e4m3fn, got .* without block_table. Leave it out: put",
    ),
    "v_scale_not_float8": (
        paged(v_scale=jnp.ones(2, f32)),
        ValueError,
        r"v_scale may be given only with .* of float8_e4m3fn, got k .* \(3, 4, 2, 8\). Leave it out: multiply out by it",
    ),
    "k_scale_shape": (
        paged(dtype=(DTYPE, F8, F8), k_scale=jnp.ones(4, f32)),
        ValueError,
        r"k_scale must be a scalar or have shape \(num_kv_heads,\) = \(2,\), .* got \(4,\)",
    ),
    "v_scale_dtype": (
        paged(dtype=(DTYPE, F8, F8), v_scale=jnp.ones(2, bool)),
        TypeError,
        r"v_scale must hold real numbers, got bool \(2,\)",
    ),
    # options
    "alibi_shape": (
        call(alibi_slopes=jnp.zeros(3, f32)),
        ValueError,
        r"alibi_slopes must have shape \(num_heads,\) = \(4,\) or \(batch, num_heads\) = \(2, 4\), got \(3,\)",
    ),
    "alibi_dtype": (
        call(alibi_slopes=jnp.zeros(4, jnp.bfloat16)),
        TypeError,
        r"alibi_slopes must be float32, got bfloat16 \(4,\). Cast it",
    ),
    "sinks_shape": (call(sinks=jnp.zeros(2, f32)), ValueError, r"sinks must have shape \(num_heads,\) = \(4,\), .* got \(2,\)"),
    "sinks_dtype": (call(sinks=jnp.zeros(4, bool)), TypeError, r"sinks must hold real numbers, got bool \(4,\)"),
    "window_below": (call(window_size=(-1, -3)), ValueError, r"window_size must hold bounds of 0 or more, .* got \(-1, -3\)"),
    "window_int": (
        call(window_size=5),
        ValueError,
        r"window_size must be a pair \(left, right\) .* got 5. A window of W tokens",
    ),
    "window_triple": (call(window_size=(1, 2, 3)), ValueError, r"must be a pair .* got \(1, 2, 3\)"),
    "window_float": (call(window_size=(1.5, 0)), TypeError, r"window_size must hold Python integers or None, got \(1.5, 0\)"),
    "causal_not_bool": (call(causal=1), TypeError, "causal must be a Python bool, got 1"),
    "softcap_below_float32": (call(softcap=1e-50), ValueError, "softcap must be greater than 0 and finite in float32"),
    "softcap_above_float32": (call(softcap=1e39), ValueError, "softcap must be greater than 0 and finite in float32"),
    "deterministic_not_bool": (call(deterministic="no"), TypeError, "deterministic must be a Python bool, got 'no'"),
    "softcap_zero": (
        call(softcap=0.0),
        ValueError,
        "softcap must be greater than 0 and finite in float32, or None for no cap, got 0.0",
    ),
    "softcap_negative": (call(softcap=-1), ValueError, "softcap must be greater than 0 .* got -1.0"),
    "softcap_nan": (call(softcap=float("nan")), ValueError, "softcap must be greater than 0 .* got nan"),
    "scale_inf": (call(softmax_scale=float("inf")), ValueError, "softmax_scale must be finite, got inf"),
    "scale_nan": (call(softmax_scale=np.float32("nan")), ValueError, "softmax_scale must be finite, got nan"),
    "scale_per_head": (
        call(softmax_scale=jnp.ones(4, f32)),
        ValueError,
        r"softmax_scale must be a scalar, got shape \(4,\). A scale per head",
    ),
}


def split(case):
    """(arrays, function of the arrays): what is no array is static."""
    args, options = case
    named = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), args, strict=False)) | options
    traced = {name: x for name, x in named.items() if isinstance(x, (jax.Array, np.ndarray))}
    static = {name: x for name, x in named.items() if name not in traced}
    return traced, lambda traced: varlen_attention(**traced, **static)


MODES = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "eval_shape": jax.eval_shape,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("case, error, text", ERRORS.values(), ids=ERRORS)
def test_errors(case, error, text, mode):
    traced, f = split(case)
    with pytest.raises(error, match=text):
        mode(f, traced)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_call_that_the_others_spoil_is_right(mode):
    traced, f = split(call())
    out = mode(f, traced)
    assert (out.shape, out.dtype) == ((6, 4, 8), DTYPE)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("scale", [{}, {"k_scale": 2.0, "v_scale": jnp.ones(2, jnp.bfloat16)}], ids=["plain", "scaled"])
def test_the_paged_call_that_the_others_spoil_is_right(mode, scale):
    traced, f = split(paged(dtype=(DTYPE, F8, F8) if scale else DTYPE, **scale))
    out = mode(f, traced)
    assert (out.shape, out.dtype) == ((6, 4, 8), DTYPE)


def test_traced_options_that_must_be_static():
    (q, k, v, cu, _), _ = call()
    attend = lambda **options: varlen_attention(q, k, v, cu, **options)
    with pytest.raises(TypeError, match="softcap must be a Python number, got a traced value"):
        jax.jit(lambda x: attend(softcap=x))(1.0)
    with pytest.raises(TypeError, match="causal must be a Python bool, got"):
        jax.jit(lambda x: attend(causal=x))(True)
    with pytest.raises(TypeError, match="window_size must hold Python integers or None, got"):
        jax.jit(lambda x: attend(window_size=(x, 0)))(3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_offsets_of_any_integer_type(dtype):
    q, k, v = (jnp.ones_like(x) for x in arrays())
    out, lse = varlen_attention(q, k, v, np.array([0, 2, 6], dtype), seqused_k=np.array([1, 4], dtype), return_lse=True)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse[:, :2], 8**0.5, rtol=1e-5)


def test_offsets_that_are_lists():
    q, k, v = arrays()
    assert varlen_attention(q, k, v, [0, 2, 6], [0, 2, 6], seqused_q=[1, 2]).shape == (6, 4, 8)
    assert varlen_attention(q[:0], k[:0], v[:0], [0], seqused_q=[]).shape == (0, 4, 8)


VALUES = {
    "falls": (
        {"cu_seqlens_q": [0, 4, 3]},
        r"cu_seqlens_q must not decrease: cu_seqlens_q\[2\] is 3 after cu_seqlens_q\[1\] = 4",
    ),
    "negative": ({"cu_seqlens_q": [-2, 3, 6]}, r"cu_seqlens_q must not be negative: cu_seqlens_q\[0\] is -2"),
    "past_the_end": (
        {"cu_seqlens_q": [0, 3, 7]},
        r"cu_seqlens_q must end within the array: cu_seqlens_q\[2\] is 7 of 6 tokens",
    ),
    "k_falls": ({"cu_seqlens_k": [0, 4, 3]}, r"cu_seqlens_k must not decrease: cu_seqlens_k\[2\] is 3 after"),
    "k_past_the_end": (
        {"cu_seqlens_k": [0, 3, 8]},
        r"cu_seqlens_k must end within the array: cu_seqlens_k\[2\] is 8 of 6 tokens",
    ),
    "seqused_negative": ({"seqused_q": [-1, 2]}, r"seqused_q must be between 0 and .*: seqused_q\[0\] is -1, .* has 2 tokens"),
    "seqused_long": ({"cu_seqlens_k": [0, 2, 6], "seqused_k": [1, 5]}, r"seqused_k\[1\] is 5, and sequence 1 has 4 tokens"),
}


@pytest.mark.parametrize("wrong, text", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_wrong_values_of_numpy_arrays_are_errors_when_traced(wrong, text, mode):
    q, k, v = arrays()
    offsets = {name: np.array(x) for name, x in ({"cu_seqlens_q": [0, 2, 6]} | wrong).items()}
    with pytest.raises(ValueError, match=text):
        mode(lambda q: varlen_attention(q, k, v, **offsets), q)
