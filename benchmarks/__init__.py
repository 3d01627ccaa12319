"""Benchmarks of jax_varlen beside its peers: `python -m benchmarks.fwd`."""

import os

# PyTorch is a peer in the same process: JAX must not take the memory of the device for itself. Read when JAX starts a backend.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
