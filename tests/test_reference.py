import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case

from jax_varlen import reference

SMALL = [case for case in CASES if sum(case.lens_q) + case.tail <= 400]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases(case):
    args, options = case.inputs(jnp.float32)
    oracle.check(reference.varlen_attention(*args, **options, return_lse=True), *args, **options)
