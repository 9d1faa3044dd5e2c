"""A model that keeps to JAX's strict settings, and flags that a user may set for a whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from models import chain

FLAGS = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_key_reuse": True,
    "jax_legacy_prng_key": "error",
    "jax_transfer_guard": "disallow",
    "jax_log_compiles": True,
    "jax_allow_f16_reductions": False,
    "jax_use_direct_linearize": False,
}


def make_params(width: int = 8) -> Any:
    """Parameters of three layers."""
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.standard_normal((width, width), np.float32) / 4} for i in range(3)}


loss_fn = chain(residual=True)


@contextlib.contextmanager
def set_flag(name: str, value: Any) -> Iterator[None]:
    """Sets a flag of JAX for the whole process, threads included."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
