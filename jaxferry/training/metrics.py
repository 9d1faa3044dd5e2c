"""What a training step tells of itself: its metrics, or an error if its loss is not finite."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np

from jaxferry.engine import StepResult
from jaxferry.errors import InputError, NonFiniteError
from jaxferry.partition import Partition
from jaxferry.training.options import Numerics


def metrics_of(number: int, parts: Partition, result: StepResult, numerics: Numerics) -> dict[str, Any]:
    """Returns the metrics of a step, see `TrainStep.__call__`."""
    aux: Any = None if parts.aux_tree is None else jax.tree.unflatten(parts.aux_tree, result.aux)
    if numerics.is_weighted:
        _, (loss, aux) = aux
        result = dataclasses.replace(result, loss=loss)
        if result.weight == -np.inf:
            raise InputError(
                f"weight must be 0 or more in every micro-batch, got a negative one in step {number}; "
                "the state is that after the last update"
            )
    is_lost = not result.is_finite and not numerics.skip_nonfinite
    scale = numerics.loss_scale
    if is_lost and scale is not None and scale.is_dynamic and result.loss_scale > 1:
        is_lost = False  # the next step has a smaller scale
    if is_lost:
        raise _nonfinite(number, parts, result, numerics)
    if result.is_applied and result.nonfinite_gradient is not None and numerics.check_gradients is None:
        warnings.warn(
            f"step {number} has applied gradients that are not finite (layer {result.nonfinite_gradient!r}): "
            "check_gradients=True raises an error before the update, skip_nonfinite=True skips it",
            stacklevel=3,
        )
    metrics: dict[str, Any] = {
        "loss": result.loss,
        "device_param_bytes_peak": result.device_param_bytes_peak,
    }
    if scale is not None:
        metrics["loss_scale"] = result.loss_scale
    if numerics.skip_nonfinite or (scale is not None and scale.is_dynamic):
        metrics["skipped"] = not result.is_finite
    if result.grad_norm is not None:
        metrics["grad_norm"] = result.grad_norm
    if result.mean_loss is not None:
        metrics["mean_loss"] = result.mean_loss
    if parts.aux_tree is not None:
        metrics["aux"] = aux
    return metrics


def _nonfinite(number: int, parts: Partition, result: StepResult, numerics: Numerics) -> NonFiniteError:
    """The error for a step whose loss or gradients are not finite."""
    loss, finite = np.asarray(result.loss), [bool(flag) for flag in result.finite]
    layer = parts.segments[finite.index(False)].name if False in finite else result.nonfinite_gradient
    what = f"the loss of step {number} is {loss}; the first layer with a non-finite output is {layer!r}"
    if np.isfinite(loss) and result.nonfinite_gradient is not None:
        layer = result.nonfinite_gradient
        what = f"the loss of step {number} is {loss}, but the gradient of layer {layer!r} is not finite"
    if numerics.is_weighted and np.isfinite(loss) and not 0 < result.weight < np.inf:
        layer, what = "", f"the weights of the micro-batches up to step {number} sum to {result.weight:g}"
    left = "before the step" if numerics.accumulate == 1 else "after the last update"
    told = f"{what}; the state is that {left} (skip_nonfinite=True skips such steps)"
    return NonFiniteError(told, number, layer)
