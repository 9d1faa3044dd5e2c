"""The public entry: `train_step` turns a loss function and an Optax optimizer into an offloaded training step.

    step = train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
    state = step.init(params)
    state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.engine import (
    Evaluator,
    Executor,
    HostOptimizer,
    StepResult,
    TrainState,
    compile_programs,
    derivatives_of,
    make_placement,
    make_script,
    resident_layers,
)
from jaxferry.errors import InputError, NonFiniteError, StateError
from jaxferry.modes import Mode
from jaxferry.partition import REMAT, Partition, partition
from jaxferry.units import parse_bytes


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    memory_budget: int | str | None = None,
    reserve_factor: float = 1.0,
    clip_norm: float | None = None,
    compute_dtype: Any = None,
    plan: Any = None,
    policy: str | None = None,
    remat: str = "none",
    skip_nonfinite: bool = False,
    device: jax.Device | None = None,
) -> TrainStep:
    return TrainStep(**locals())
