"""examples/embed.py: packed embeddings are those of the model, whatever shares the array with them."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

DTYPE = "float32" if jax.default_backend() == "cpu" else "bfloat16"
TEXTS = ("This is an example sentence", "Each sentence is converted", "The quick brown fox jumps over the lazy dog. " * 30)

# The first elements of each unit vector, from the model's own PyTorch implementation (transformers 5.24, float32).
EXPECTED = (
    (0.067657, 0.063496, 0.048713, 0.079305, 0.037448, 0.002653),
    (0.086439, 0.102763, 0.005395, 0.002044, -0.009963, 0.025385),
    (0.061893, -0.061823, 0.076452, -0.012853, -0.041415, 0.005474),
)


@pytest.fixture(autouse=True)
def strict():
    """In place of the strict rules of the other tests: the example adds biases to activations as users do."""


@pytest.fixture(scope="module")
def embed():
    spec = importlib.util.spec_from_file_location("embed", Path(__file__).parents[1] / "examples" / "embed.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(embed):
    tokenizer, weights = embed.load_model()
    return [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)], jax.device_put(weights)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(["A dog barks.", "", "Shares fell sharply on Monday.", *TEXTS]))
    return path


def vectors(embed, params, tokens):
    return np.asarray(embed.embed_packed(params, *embed.pack(tokens), dtype=DTYPE))


def test_vectors_are_the_models(embed, model):
    tokens, params = model
    np.testing.assert_allclose(vectors(embed, params, tokens)[:3, :6], EXPECTED, rtol=0, atol=embed.TOLERANCE[DTYPE])


def test_sequences_that_fill_the_shape_have_no_vector(embed, model):
    tokens, params = model
    assert not vectors(embed, params, tokens)[3:].any()


def test_other_texts_in_the_array_change_nothing(embed, model):
    tokens, params = model
    together = vectors(embed, params, tokens)
    alone = np.concatenate([vectors(embed, params, [text])[:1] for text in tokens])
    np.testing.assert_allclose(together[:3], alone, rtol=0, atol=embed.TOLERANCE[DTYPE])


def test_padded_gives_the_same(embed, model):
    tokens, params = model
    lengths = np.array([len(text) for text in tokens], np.int32)
    rows = np.stack([np.pad(text, (0, int(lengths.max()) - len(text))) for text in tokens])
    padded = embed.embed_padded(params, rows, lengths, dtype=DTYPE)
    np.testing.assert_allclose(vectors(embed, params, tokens)[:3], padded, rtol=0, atol=embed.TOLERANCE[DTYPE])


def test_batches_keep_every_text_in_order(embed):
    texts = [[1] * n for n in (3, 4, 9, 1, 1)]
    groups = list(embed.batches(texts, 8))
    assert [[len(text) for text in group] for group in groups] == [[3, 4], [9], [1, 1]]


def test_program_agrees_and_finds_the_nearest(embed, texts, capsys):
    assert embed.main(["--texts", str(texts), "--query", "the stock market went down", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert "NumPy (float32) agree." in printed
    assert "Shares fell sharply on Monday." in printed
    assert "A dog barks." not in printed
    assert "tokens/s" in printed


def test_program_fails_when_the_two_disagree(embed, texts, capsys, monkeypatch):
    monkeypatch.setitem(embed.TOLERANCE, DTYPE, 0.0)
    assert embed.main(["--texts", str(texts), "--no-speed"]) == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_docstrings_are_of_every_length(embed):
    lengths = [len(text.split()) for text in embed.standard_library_docs().values()]
    assert min(lengths) <= 6 and max(lengths) > 300
