"""Makes the recording of a training step's last steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.engine import TrainState
from jaxferry.errors import StateError
from jaxferry.step.schedule import Kind, Task
from jaxferry.step.simulate.memory_kinds import device_bytes_by_kind
from jaxferry.step.simulate.report import link_bytes
from jaxferry.training.prepared import Prepared
from jaxferry.training.train_step import TrainStep

_OF_UPDATES = (Kind.REFRESH, Kind.STATE_UP, Kind.STATE_DOWN)


def make_recording(
    step: TrainStep,
    state: TrainState,
    prepared: Prepared,
    *,
    model: str = "model",
    machine: Mapping[str, Any] | None = None,
) -> Recording:
    """Makes a recording of the last steps: those of `step.recorded()`. Waits for them to end.

    Args:
      step: the training step, made with `record_steps`.
      state: the state after the last step.
      prepared: the step that ran: `step.prepare(batch)`.
      model: the model's name.
      machine: facts about the machine; the default is the device's name and the versions.

    Raises:
      StateError: if no step was recorded.
    """
    state.block_until_ready()
    run = step.recorded()
    if run is None:
        raise StateError("there is nothing to record: train_step needs record_steps=, and at least one step must end")
    profile, accumulate = prepared.profile, step.options.accumulate
    first = state.step - run.schedule.steps
    tasks = []
    for task, start_s, end_s in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        layer, number = profile.layers[task.segment], first + task.step
        batch = number % accumulate
        moved = _moved_bytes(prepared, task, batch, is_last=batch == accumulate - 1)
        tasks.append(RecordedTask(task.name, task.kind, layer.name, task.lane, number, batch, moved, start_s, end_s))
    return Recording(
        model=model,
        machine=machine or {"name": step.device_kind, "jax": jax.__version__},
        accumulate=accumulate,
        memory_budget_bytes=step.options.memory_budget_bytes,
        plan=prepared.plan,
        profile=profile,
        tasks=tuple(tasks),
        device_bytes=device_bytes_by_kind(run, profile, prepared.plan),
        host_bytes=step.compiler.model.host_bytes(
            prepared.partition.layers, prepared.program.read_in_place, prepared.saved_bytes, prepared.program.widened
        ),
    )


def _moved_bytes(prepared: Prepared, task: Task, batch: int, is_last: bool) -> int:
    """The bytes of a task on the host link; of a lookup's gradient only the rows leave.

    Before the last micro-batch, sums stay on the device, and nothing is updated. After the first, copies that stay are
    not loaded again.
    """
    layer, group = prepared.profile.layers[task.segment], prepared.partition.uses[task.segment].group
    if not is_last and (task.kind in _OF_UPDATES or (task.kind is Kind.OFFLOAD and group in prepared.program.summed)):
        return 0
    if group in prepared.program.kept and (task.kind is Kind.RELOAD or (task.kind is Kind.LOAD and batch)):
        return 0
    has_rows = task.kind is Kind.OFFLOAD and layer.gradient_rows
    return layer.device_gradient_bytes if has_rows else link_bytes(layer, task)
