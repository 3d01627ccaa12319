import builtins
import re
from pathlib import Path

import matplotlib
import numpy as np
import oracle
import pytest

from jax_varlen import show, show_mask

matplotlib.use("agg")
SEMANTICS = (Path(__file__).parent.parent / "docs" / "semantics.md").read_text()


@pytest.fixture(autouse=True)
def close_figures():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_picture_is_the_mask_of_each_sequence():
    cu_q, cu_k = np.array([1, 4, 4, 12]), np.array([0, 5, 9, 12])
    len_q, len_k = np.array([3, 0, 6]), np.array([5, 4, 2])
    picture = show._picture(cu_q, cu_k, len_q, len_k, 3, 1)
    expected = np.full((12, 12), -1)
    for b in range(3):
        visible = oracle.visible(len_q[b], len_k[b], False, (3, 1))
        expected[cu_q[b] : cu_q[b] + len_q[b], cu_k[b] : cu_k[b] + len_k[b]][visible] = b
    np.testing.assert_array_equal(picture, expected)


@pytest.mark.parametrize(
    "offsets, options",
    [
        (([0, 4, 5, 11],), {}),
        (([0, 2, 7], [0, 5, 7]), {"causal": True}),
        (([1, 3, 3], [0, 5, 7]), {"window_size": (2, None), "seqused_q": [1, 0], "seqused_k": [5, 0]}),
        (([0],), {}),
        (([0, 300],), {"window_size": (20, 3)}),
    ],
)
def test_draws(offsets, options, tmp_path):
    figure = show_mask(*offsets, **options)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys", "queries")
    figure.savefig(tmp_path / "mask.png")


def test_draws_into_given_axes():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2)
    assert show_mask([0, 3], ax=axes[1]) is figure
    assert axes[1].images and not axes[0].images


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match=r"cu_seqlens_q must rise from 0 or more, got \[0, 3, 2\]"):
        show_mask([0, 3, 2])
    with pytest.raises(ValueError, match=r"must have one shape, got \(2,\) and \(3,\)"):
        show_mask([0, 3], [0, 1, 2])
    with pytest.raises(ValueError, match=r"seqused_k must hold one length of 0 to \[3\] per sequence, got \[4\]"):
        show_mask([0, 3], seqused_k=[4])
    with pytest.raises(TypeError, match="cu_seqlens_q must hold integers, got float64"):
        show_mask([0.0, 3.0])
    with pytest.raises(ValueError, match="window_size must hold bounds of 0 or more"):
        show_mask([0, 3], window_size=(-2, 0))

    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"pip install \"jax-varlen\[plot\]\""):
        show_mask([0, 3])


HEADING = r"len_q (\d+), len_k (\d+), (?:(causal)|window \((\d+), (\d+)\))"


def test_drawings_of_semantics_are_right():
    drawings = 0
    for text in re.findall(r"```text\n(.*?)```", SEMANTICS, re.DOTALL):
        heading, *rows = text.splitlines()
        columns = [match.start() for match in re.finditer("len_q", heading)]
        for start, end in zip(columns, [*columns[1:], None], strict=True):
            len_q, len_k, causal, left, right = re.fullmatch(HEADING, heading[start:end].strip()).groups()  # type: ignore
            window = (None, None) if causal else (int(left), int(right))
            expected = oracle.visible(int(len_q), int(len_k), bool(causal), window)
            drawn = [[int(x) for x in row[start:end].split()] for row in rows if row[start:end].strip()]
            np.testing.assert_array_equal(drawn, expected, heading[start:end])
            drawings += 1
    assert drawings == 6


def test_pictures_of_semantics_are_there():
    images = re.findall(r"\((images/.*?\.png)\)", SEMANTICS)
    assert images
    for image in images:
        assert (Path(__file__).parent.parent / "docs" / image).is_file()
