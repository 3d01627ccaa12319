"""Times the forward pass beside its peers: `python -m benchmarks.fwd --out benchmarks/results/fwd_h200.json`."""

from . import run
from .passes import FWD

if __name__ == "__main__":
    raise SystemExit(run.main(FWD))
