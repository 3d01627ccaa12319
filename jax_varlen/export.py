"""What `jax.export` needs to know of this package."""

from __future__ import annotations

import jax
import jax.export

from . import paged, primitives

_TARGETS = (
    primitives.FWD_TARGET,
    primitives.BWD_TARGET,
    primitives.CHECK_TARGET,
    paged.APPEND_TARGET,
    paged.CHECK_TARGET,
)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` of `jax.export.export` for functions that call this package.

    JAX exports no call of a target that it does not know, unless it is told that the target will stay what it is. The names of
    these carry a version, which changes when what they take changes. Whoever runs an exported function imports `jax_varlen`.

    !!! example

        ```python
        exported = jax.export.export(jax.jit(step), disabled_checks=jax_varlen.export_checks())(*args)
        step = jax.export.deserialize(exported.serialize()).call
        ```
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
