"""Times the backward pass beside its peers: `python -m benchmarks.bwd --out benchmarks/results/bwd_h200.json`."""

from . import run
from .passes import BWD

if __name__ == "__main__":
    raise SystemExit(run.main(BWD))
