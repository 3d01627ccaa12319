"""Wrong values of a paged call. On a GPU they are clamped: nothing outside the arrays is read, and the next call is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from conftest import DTYPES
from pools import paged
from test_fwd import attend
from test_paged import ON_CPU, same

from jax_varlen import varlen_attention

REFUSED = (jax.errors.JaxRuntimeError, ValueError)  # the latter where the call runs in the caller's thread
GOOD = {"block_table": [[3, 1, 9], [0, 9, 9]], "seqused_k": [20, 16], "cu_seqlens_k": None}
WRONG = {
    "id_past_the_pool": (
        {"block_table": [[3, 4, 9], [0, 9, 9]]},
        r"ids of the 4 blocks .*: block_table\[0, 1\] is 4, and sequence 0 has 20 keys in 2 blocks of 16",
    ),
    "id_negative": (
        {"block_table": [[3, 1, 9], [-1, 9, 9]]},
        r"block_table\[1, 0\] is -1, and sequence 1 has 16 keys in 1 block",
    ),
    "id_huge": ({"block_table": [[2**31 - 1, 1, 9], [0, 9, 9]]}, r"block_table\[0, 0\] is 2147483647"),
    "too_long": (
        {"seqused_k": [49, 16]},
        r"block_table \(2, 3\) a sequence has 0 to max_blocks \* block_size = 48 keys: seqused_k\[0\] is 49[.;] .* columns",
    ),
    "longest": ({"seqused_k": [20, 2**31 - 1]}, r"seqused_k\[1\] is 2147483647"),
    "negative_length": ({"seqused_k": [20, -1]}, r"seqused_k\[1\] is -1"),
    "falls": (
        {"seqused_k": None, "cu_seqlens_k": [5, 25, 24]},
        r"cu_seqlens_k must not decrease: cu_seqlens_k\[2\] is 24 after cu_seqlens_k\[1\] = 25",
    ),
    "too_long_by_offsets": (
        {"seqused_k": None, "cu_seqlens_k": [5, 54, 60]},
        r"48 keys: cu_seqlens_k\[1\] - cu_seqlens_k\[0\] is 49",
    ),
    "wide_difference": (
        {"seqused_k": None, "cu_seqlens_k": [-2_000_000_000, 2_000_000_000, 2_000_000_001]},
        r"cu_seqlens_k\[1\] - cu_seqlens_k\[0\] is 4000000000",
    ),
    "more_than_owned": ({"cu_seqlens_k": [0, 19, 40]}, r"seqused_k\[0\] is 20.* 19 "),
}


def paged_call(wrong, array):
    """The call, with its offsets and its table as arrays of the given kind."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(4, 16, 2, 16)), DTYPES[0]) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(5, 4, 16)), DTYPES[0])
    options = {name: array(np.array(x, np.int32)) for name, x in (GOOD | wrong).items() if x is not None}
    return lambda: jax.block_until_ready(varlen_attention(q, k, v, np.array([0, 3, 5]), **options, causal=True))


@pytest.mark.parametrize("wrong, text", WRONG.values(), ids=WRONG)
def test_wrong_numpy_values_are_errors_when_traced(wrong, text):
    paged_call({}, lambda x: x)()
    with pytest.raises(ValueError, match=text):
        paged_call(wrong, lambda x: x)()


@pytest.mark.parametrize("wrong, text", WRONG.values(), ids=WRONG)
def test_wrong_values_on_a_device(wrong, text):
    if ON_CPU:
        with pytest.raises(REFUSED, match=text):
            paged_call(wrong, jnp.asarray)()
    else:
        paged_call(wrong, jnp.asarray)()
        assert jnp.isfinite(paged_call({}, jnp.asarray)().astype(jnp.float32)).all()


@pytest.mark.parametrize("ids", [np.int64, np.uint32, np.int8], ids=lambda x: x.__name__)
def test_tables_of_any_integer_type(ids, any_dtype):
    (q, k, v, cu), options = paged(*Case("", "", (1, 3), (20, 9)).inputs(any_dtype), 4)
    expected = attend((q, k, v, cu), options)
    table = options["block_table"].astype(np.int64)
    used = np.arange(table.shape[1]) < -(-options["seqused_k"] // 4)[:, None]
    unused = {np.int64: 2**40 + 1, np.uint32: 2**32 - 1, np.int8: -128}[ids]
    options["block_table"] = np.where(used, table, unused).astype(ids)
    same(attend((q, k, v, cu), options), expected)
    options["block_table"] = options["block_table"].tolist()
    same(attend((q, k, v, cu), options), expected)


@pytest.mark.parametrize("wide", [2**32 + 1, -(2**32) + 1])
def test_wide_ids_do_not_wrap_into_the_pool(wide):
    with jax.enable_x64(True):
        call = lambda i, j: paged_call({}, lambda x: jnp.asarray(x, jnp.int64).at[i, j].set(wide) if x.ndim == 2 else x)()
        call(0, 2)  # an entry that holds no key
        if ON_CPU:
            with pytest.raises(REFUSED, match=r"block_table\[1, 0\] is -?2147483647"):
                call(1, 0)
        else:
            call(1, 0)
