"""Training steps under plans that tests choose."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax

import jaxferry
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan
from models import Task


def plan_of(task: Task, modes: Iterable[Mode], places: Iterable[GradientPlace] = (GradientPlace.DEVICE,)) -> Plan:
    """A plan that gives the segments these modes and gradient places in turn."""
    layers = map(LayerPlan, segment_names(task), itertools.cycle(modes), itertools.cycle(places))
    return Plan("test", 1.0, tuple(layers))


@functools.lru_cache(maxsize=16)
def segment_names(task: Task) -> tuple[str, ...]:
    """The segments of the task's model."""
    return tuple(segment.name for segment in partition(task.loss_fn, task.params, (task.batch,)).segments)


@functools.lru_cache(maxsize=32)
def step_of(task: Task, optimizer: optax.GradientTransformation, **options: Any) -> jaxferry.TrainStep:
    """Caches steps by arguments. Most of a test's time is tracing, and a step serves many states."""
    return jaxferry.train_step(task.loss_fn, optimizer, **options)


@functools.lru_cache(maxsize=64)
def trained(
    task: Task, optimizer: optax.GradientTransformation, num_steps: int, **options: Any
) -> tuple[Any, list[float]]:
    """Reference parameters and losses after this many steps; the training step is shared."""
    state, losses = train(step_of(task, optimizer, **options), task, num_steps)
    return state.params, losses


def train(
    step: jaxferry.TrainStep, task: Task, num_steps: int, **kwargs: Any
) -> tuple[jaxferry.TrainState, list[float]]:
    """Trains from the task's parameters; returns state and losses."""
    return take_steps(step, step.init(task.params), [task.batch] * num_steps, **kwargs)


def take_steps(
    step: jaxferry.TrainStep, state: jaxferry.TrainState, batches: Iterable[Any], **kwargs: Any
) -> tuple[jaxferry.TrainState, list[float]]:
    """Takes a step for each batch; returns state and losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch, **kwargs)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_near(tree: Any, other: Any, **tolerance: Any) -> None:
    """Every leaf of both trees is equal within a tolerance."""
    for leaf, same in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(leaf, same, **tolerance)


def assert_same_bits(tree: Any, other: Any) -> None:
    """Every leaf of both trees has the same bits."""
    for (path, leaf), same in zip(jax.tree_util.tree_flatten_with_path(tree)[0], jax.tree.leaves(other), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(same).tobytes(), jax.tree_util.keystr(path)


def taken(step, state, batch, num_steps):
    """The state after further steps on one batch."""
    for _ in range(num_steps):
        state, _ = step(state, batch)
    return state


def state_after(step, params, batch, num_steps):
    """The state after steps on one batch, once its updates have ended."""
    state = taken(step, step.init(params), batch, num_steps)
    state.block_until_ready()
    return state


def prepared(task, optimizer, **options):
    """A step of a task as it is prepared, without a state."""
    step = jaxferry.train_step(task.loss_fn, optimizer, **options)
    step.declare(task.params)
    return step.prepare(task.batch)
