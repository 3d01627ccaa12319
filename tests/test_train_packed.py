"""examples/train_packed.py: a document teaches the same, whatever shares the array with it."""

import functools
import importlib.util
import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_varlen

DTYPE = "float32" if jax.default_backend() == "cpu" else "bfloat16"
RTOL = {"float32": 1e-4, "bfloat16": 2e-2}[DTYPE]
TINY = ("--steps=12", "--layers=2", "--width=64", "--documents=4", "--tokens=256", "--context=128")


@pytest.fixture(autouse=True)
def strict():
    """In place of the strict rules of the other tests: the example adds arrays of different ranks as users do."""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_packed", Path(__file__).parents[1] / "examples" / "train_packed.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.standard_library_documents = functools.cache(module.standard_library_documents)
    return module


@pytest.fixture(scope="module")
def params(example):
    return example.init(jax.random.key(0), layers=2, width=64)


@pytest.fixture(scope="module")
def value_and_grad(example):
    losses = {"packed": example.packed_loss, "padded": example.padded_loss}
    return {name: jax.jit(jax.value_and_grad(partial(loss, dtype=DTYPE))) for name, loss in losses.items()}


@pytest.fixture
def run(example, tmp_path):
    return lambda *options: example.main([*TINY, f"--plot={tmp_path / 'loss.png'}", *options])


def text(length, seed=0):
    return np.random.default_rng(seed).integers(256, size=length, dtype=np.uint8).tobytes()


BATCHES = {
    "of different lengths": (text(17), text(1), text(40)),
    "fills the array": (text(24), text(40)),
    "one document fills the array": (text(64),),
    "one token beside others": (text(1), text(2), text(1)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_packed_and_padded_losses_and_gradients_agree(example, params, value_and_grad, batch):
    layouts = dict(zip(("packed", "padded"), example.arrays(batch, 3, 64, 64), strict=True))
    packed, padded = (value_and_grad[name](params, *layout) for name, layout in layouts.items())
    np.testing.assert_allclose(packed[0], padded[0], rtol=RTOL)
    for a, b in zip(*map(jax.tree.leaves, (packed[1], padded[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5 * RTOL * jnp.abs(b).max())


def test_loss_is_the_mean_over_tokens_with_a_next_one(example, params, value_and_grad):
    batch = BATCHES["of different lengths"]
    layouts = [example.arrays(documents, 3, 64, 64)[0] for documents in (batch, batch[:1], batch[2:])]
    losses = [value_and_grad["packed"](params, *layout)[0] for layout in layouts]
    np.testing.assert_allclose(losses[0], np.average(losses[1:], weights=[16, 39]), rtol=RTOL)


def test_arrays_hold_every_document(example):
    (packed, lengths), (padded, same) = example.arrays([b"abc", b"", b"de"], 4, 8, 5)
    assert lengths.tolist() == same.tolist() == [3, 0, 2, 0]
    assert bytes(packed.tolist()) == b"abcde\0\0\0"
    assert [bytes(row.tolist()) for row in padded] == [b"abc\0\0", b"\0" * 5, b"de\0\0\0", b"\0" * 5]


def test_batches_keep_the_limits_and_every_document(example):
    documents = [text(length, seed) for seed, length in enumerate((1, 5, 8, 3, 3, 2, 7, 1, 1, 4))]
    groups = list(itertools.islice(example.batches(documents, 3, 8), 40))
    assert all(1 <= len(group) <= 3 and len(b"".join(group)) <= 8 for group in groups)
    assert sorted(itertools.islice(itertools.chain(*groups), len(documents))) == sorted(documents)
    assert groups == list(itertools.islice(example.batches(documents, 3, 8), 40))


def test_documents_are_of_every_length(example):
    lengths = [len(document) for document in example.standard_library_documents(512)]
    assert min(lengths) <= 16 and max(lengths) == 512 and len(lengths) > 1000


def test_program_agrees_and_learns(example, run, capsys, monkeypatch, tmp_path):
    calls = []
    attention = jax_varlen.varlen_attention
    monkeypatch.setattr(jax_varlen, "varlen_attention", lambda *args, **options: calls.append(1) or attention(*args, **options))
    assert run() == 0
    printed = capsys.readouterr().out
    assert "agree. Largest relative difference" in printed and "tokens/s" in printed
    first, last = printed.split("Loss ")[1].split(" nats")[0].split(" to ")
    assert float(last) < float(first) - 0.1
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert len(calls) == 1  # Traced once, for all layers and steps.


def test_step_takes_one_shape(example, params):
    small, large = (example.arrays([b"some text"], 2, total, 16)[0] for total in (32, 48))
    training = example.Training("packed", partial(example.packed_loss, dtype=DTYPE), params, small, 1e-3)
    training.step(small)
    with pytest.raises(TypeError, match="32"):
        training.step(large)


def test_program_fails_when_attention_sees_other_tokens(example, run, capsys, monkeypatch):
    attention = jax_varlen.varlen_attention

    def leak(q, k, v, cu_seqlens_q, causal):
        return attention(q, k, v, jnp.array([0, len(q)]), causal=False)

    monkeypatch.setattr(jax_varlen, "varlen_attention", leak)
    assert run() == 1
    assert "DISAGREE" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--width=65"], ["--tokens=64"], ["--steps=0"]])
def test_program_refuses(run, options, capsys):
    with pytest.raises(SystemExit):
        run(*options)
    assert "must fit" in capsys.readouterr().err
