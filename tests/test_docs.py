"""Every ```python block of these pages runs, and a ```text block behind one is what it prints."""

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_varlen

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("training.md", "models.md", "serving.md", "context_parallel.md", "parallel.md")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
CU_SEQLENS = jnp.array([0, 5, 12])


@pytest.fixture(autouse=True)
def strict():
    """In place of the strict rules of the other tests: the pages are written as users write."""


@pytest.fixture(scope="module")
def qkv():
    return jax.random.normal(jax.random.key(0), (3, 16, 2, 8), jnp.bfloat16)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page):
    text = (DOCS / page).read_text("utf-8")
    namespace, printed, languages = {}, "", []
    for block in BLOCK.finditer(text):
        language, code = block.groups()
        languages.append(language)
        if language == "text":
            assert printed == code
            continue
        line = text.count("\n", 0, block.start(2))  # A traceback then tells the line of the page.
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * line + code, str(DOCS / page), "exec"), namespace)
        printed = output.getvalue()
    assert set(languages) == {"python", "text"} and text.count("```") == 2 * len(languages)


def attention_with(qkv, **options):
    return jnp.sum(jax_varlen.varlen_attention(*qkv, CU_SEQLENS, **options))


@pytest.mark.parametrize("name, value", [("alibi_slopes", jnp.ones(2)), ("softmax_scale", jnp.float32(0.5))])
def test_options_raise_only_when_differentiated(qkv, name, value):
    with pytest.raises(NotImplementedError, match=f"{name} has no gradient"):
        jax.grad(lambda x: attention_with(qkv, **{name: x}))(value)
    assert jax.jit(jax.grad(lambda qkv, x: attention_with(qkv, **{name: x})))(qkv, value).any()


def test_paged_raises(qkv):
    blocks, table = [x.reshape(4, 4, 2, 8) for x in qkv[1:]], jnp.array([[0, 1], [2, 3]])
    lengths = jnp.array([5, 7])
    with pytest.raises(NotImplementedError, match="block_table"):
        jax.grad(lambda q: attention_with((q, *blocks), block_table=table, seqused_k=lengths))(qkv[0])


def test_the_third_derivative_raises(qkv):
    penalty = lambda f: lambda qkv: jnp.sum(jax.grad(f)(qkv).astype(jnp.float32) ** 2)
    second = jax.grad(penalty(attention_with))
    assert jax.eval_shape(second, qkv).shape == qkv.shape
    with pytest.raises(NotImplementedError, match="can be differentiated twice"):
        jax.eval_shape(jax.grad(penalty(penalty(attention_with))), qkv)
