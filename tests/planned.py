"""Training steps under plans that tests choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax

import jaxferry
from jaxferry.modes import Mode
from jaxferry.plan.records import LayerPlan, Plan
from models import Task

UNIFORM = (Mode.GFGB, Mode.RELOAD, Mode.RESIDENT)


def plan_of(task: Task, modes: Iterable[Mode], **kwargs: Any) -> Plan:
    """A plan that gives the segments these modes in turn."""
    step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1))
    step.init(task.params)
    segments = step.prepare(task.batch, **kwargs).partition.segments
    layers = [LayerPlan(segment.name, mode) for segment, mode in zip(segments, itertools.cycle(modes), strict=False)]
    return Plan("test", 1.0, tuple(layers))


def train(
    step: jaxferry.TrainStep, task: Task, num_steps: int, **kwargs: Any
) -> tuple[jaxferry.TrainState, list[float]]:
    """Trains from the task's parameters; returns state and losses."""
    state, losses = step.init(task.params), []
    for _ in range(num_steps):
        state, metrics = step(state, task.batch, **kwargs)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same_bits(tree: Any, other: Any) -> None:
    """Every leaf of both trees has the same bits."""
    for (path, leaf), same in zip(jax.tree_util.tree_flatten_with_path(tree)[0], jax.tree.leaves(other), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(same).tobytes(), jax.tree_util.keystr(path)
