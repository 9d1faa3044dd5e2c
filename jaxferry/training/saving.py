"""What a checkpoint holds of a training state, and the state that is made of it again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry import checkpoint
from jaxferry.engine import LossScale, Owner, TrainState
from jaxferry.optimizer import path_names
from jaxferry.partition import Layer, stored_struct
from jaxferry.training.model import Model


def content(
    masters: Any, optimizer: Any, state: TrainState, params: Any, extra: Mapping[str, Any], metric: float | None
) -> checkpoint.Checkpoint:
    """Returns the content of a checkpoint of these arrays of a state; `params` is the model's tree of shapes."""
    scale = state.loss_scale
    return checkpoint.Checkpoint(
        step=state.updated_step,
        params=dict(zip(path_names(params), masters, strict=True)),
        dtypes=[str(leaf.dtype) for leaf in jax.tree.leaves(params)],
        dictionary_paths=checkpoint.dictionary_paths(params),
        optimizer=optimizer,
        loss_scale=[scale.value, scale.num_finite] if scale.is_dynamic else None,
        extra=extra,
        metric=metric,
    )


def copied_content(
    state: TrainState, params: Any, extra: Mapping[str, Any], metric: float | None
) -> checkpoint.Checkpoint | None:
    """Copies a state for a save in the background; returns None, with a warning, if host memory cannot hold it."""
    try:
        masters, optimizer = state.stored(copied=True)
        own = {name: np.array(array) for name, array in extra.items()}
    except MemoryError as error:
        what = str(error) or "host memory is full"
        warnings.warn(f"save(wait=False) waits until the state is written: {what}", stacklevel=3)
        return None
    return content(masters, optimizer, state, params, own, metric)


def restored(saved: checkpoint.Checkpoint, model: Model, layers: Sequence[Layer], owner: Owner) -> TrainState:
    """Reads a checkpoint into a new state.

    Raises:
      CheckpointError: if it does not match the model or the optimizer.
      HostMemoryError: if host memory cannot hold the model; nothing is allocated then.
    """
    expected = dict(zip(path_names(model.params), jax.tree.leaves(model.params), strict=True))
    checkpoint.check_coded(saved.params, saved.dtypes, expected, model.optimizer.avals)
    stored = {name: stored_struct(leaf) for name, leaf in expected.items()}
    checkpoint.check_matches("model", saved.params, stored)
    checkpoint.check_transformations(saved.optimizer, model.optimizer.state_shapes(), expected)
    checkpoint.check_matches("optimizer", saved.optimizer, model.optimizer.state_shapes(), check_dtypes=True)
    model.check_host_memory()
    masters = model.masters([saved.params[name] for name in expected])
    optimizer = model.optimizer_state(saved.optimizer)
    state = model.new_state(masters, layers, optimizer, saved.step, owner=owner)
    if saved.loss_scale is not None and state.loss_scale.is_dynamic:
        value, num_finite = saved.loss_scale
        state.loss_scale = LossScale(float(value), num_finite=int(num_finite))
    state.extra = {name: leaf.read() for name, leaf in saved.extra.items()}
    return state
