"""The CPU kernel of every instruction set that this processor has, chosen by JAX_VARLEN_CPU_ISA in a process of its own."""

import os
import subprocess
import sys

import pytest

NAMES = ("generic", "avx2", "avx512", "avx512_bf16", "amx")

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import jax.numpy as jnp, oracle, test_bwd, test_paged, test_paged_float8
from cases import CASES, Case
from pools import as_float8, paged
from jax_varlen import info, varlen_attention
assert info()["path"].endswith({name!r}), info()["path"]
for case in CASES:
    if case.name not in {cases!r}:
        continue
    for dtype in ("float32", "bfloat16", "float16"):
        args, options = case.inputs(jnp.dtype(dtype))
        factor = 3.0 if "softcap" in options else 2.0
        oracle.check(varlen_attention(*map(jnp.asarray, args), **options, return_lse=True), *args, **options, factor=factor)
    args, options = case.inputs(jnp.dtype("float32"))
    test_bwd.check(args, options)
for dims in ((64, 64), (72, 40)):
    mixed = Case("", "", (1, 40, 4, 1), (333, 40, 77, 5000), 8, 2, *dims, sinks="random", options={{"causal": True}})
    for dtype in ("float32", "bfloat16", "float16"):
        call = paged(*mixed.inputs(jnp.dtype(dtype)), 7)
        for args, options in (call, as_float8(*call)):
            oracle.check_paged(varlen_attention(*map(jnp.asarray, args), **options, return_lse=True), *args, **options)
for rows in (1, 20):
    test_paged.test_the_keys_of_few_rows_are_divided(rows)
for rows in (1, 40):
    test_paged_float8.test_every_float8_is_exact(rows, jnp.dtype("bfloat16"))
    test_paged_float8.test_every_float8_is_exact(rows, jnp.dtype("float32"))
"""
CHOSEN = ("everything", "gap_and_tail", "alibi_negative", "softcap_saturated", "skewed")


@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set(name):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_VARLEN_CPU_ISA": name}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    program = PROGRAM.format(tests=os.path.dirname(__file__), name=name, cases=CHOSEN)
    result = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    if name != "generic" and "JAX_VARLEN_CPU_ISA must be one of" in result.stderr:
        pytest.skip(f"this processor has no {name}")
    assert result.returncode == 0, result.stderr[-3000:]


def test_unknown_name_is_an_error():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_VARLEN_CPU_ISA": "neon"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    code = "import jax_varlen; jax_varlen.info()"
    result = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "JAX_VARLEN_CPU_ISA must be one of generic" in result.stderr
