import re
from pathlib import Path

import jax
import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text() if README.is_file() else ""
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_readme_has_an_example():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as a reader would run it
        exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
