"""Times a paged cache beside its peers: `python -m benchmarks.paged --out benchmarks/results/paged_h200.json`."""

from . import run
from .passes import PAGED

if __name__ == "__main__":
    raise SystemExit(run.main(PAGED))
