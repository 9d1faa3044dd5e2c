"""Makes the recording of a training step's last steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxferry.engine import StepProgram
from jaxferry.engine.facts import with_program_facts, without_times
from jaxferry.profiling.records import LayerProfile
from jaxferry.recording import RecordedTask, Recording
from jaxferry.schedule import Kind, Run, Task
from jaxferry.simulate.machine import device_bytes
from jaxferry.simulate.report import link_bytes


def make_recording(
    run: Run,
    program: StepProgram,
    *,
    num_steps: int,
    accumulate: int = 1,
    model: str = "model",
    machine: Mapping[str, Any] | None = None,
) -> Recording:
    """Makes a recording of the last steps.

    Args:
      run: their times, from `TrainStep.recorded`.
      program: the step program that ran: `TrainStep.prepare(batch).program`.
      num_steps: number of steps taken, which is `state.step`; the last of them is the last one of `run`.
      accumulate: as in `train_step`.
      model: the model's name.
      machine: facts about the machine.
    """
    parts = program.partition
    layers = with_program_facts(without_times(parts), parts, program.derivatives).layers
    first = num_steps - run.schedule.steps
    tasks = []
    for task, start_s, end_s in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        layer, step = layers[task.segment], first + task.step
        moved = _moved_bytes(layer, task)
        tasks.append(
            RecordedTask(task.name, task.kind, layer.name, task.lane, step, step % accumulate, moved, start_s, end_s)
        )
    return Recording(model, machine or {}, accumulate, program.plan, tuple(tasks), tuple(device_bytes(run)))


def _moved_bytes(layer: LayerProfile, task: Task) -> int:
    """The bytes of a task on the host link; of a lookup's gradient only the rows leave."""
    return layer.device_gradient_bytes if task.kind is Kind.OFFLOAD else link_bytes(layer, task)
