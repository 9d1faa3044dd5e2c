"""A recording of training steps: each task with its kind, layer, bytes, micro-batch and times, as a JSON file.

An example of `jaxferry.recording/1`:

    {"format": "jaxferry.recording/1", "model": "gpt2:tiny", "machine": {...}, "accumulate": 1,
     "memory_budget_bytes": null, "plan": {...}, "profile": {...},
     "tasks": [{"name": "load h_0", "kind": "load", "layer": "h_0", "lane": "H2D", "step": 7, "micro_batch": 0,
                "bytes": 793600, "start_s": 0.1, "end_s": 0.2}, ...],
     "device_bytes": {"parameters": [[0.0, 1024], ...], ...}, "host_bytes": {"master parameters": 4096, ...}}
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Self

import jax

from jaxferry.costs.records import Profile
from jaxferry.engine import TrainState
from jaxferry.errors import InputError, StateError
from jaxferry.records import (
    check_bytes,
    check_choice,
    check_format,
    check_keys,
    check_list,
    check_text,
    load_record,
    required,
    write_json,
)
from jaxferry.step.records import Plan
from jaxferry.step.schedule import Kind, Lane, Task
from jaxferry.step.simulate.memory_kinds import device_bytes_by_kind
from jaxferry.step.simulate.report import link_bytes
from jaxferry.training.prepared import Prepared
from jaxferry.training.train_step import TrainStep

FORMAT = "jaxferry.recording/1"

Changes = tuple[tuple[float, int], ...]
"""Seconds, and bytes from then on."""


@dataclasses.dataclass(frozen=True)
class RecordedTask:
    """One task as it ran.

    Attributes:
      name: kind and layer, for display.
      kind, lane: as of `jaxferry.step.schedule.Task`.
      layer: the name of its segment; for updates and refreshes that of the parameter group's first segment.
      step: the number of the training step.
      micro_batch: the step's place among those that share an update, counted from 0.
      num_bytes: bytes that it moves over the host link, by a transfer or by a program that uses host memory.
      start_s, end_s: seconds from the start of the first recorded step.
    """

    name: str
    kind: Kind
    layer: str
    lane: Lane
    step: int
    micro_batch: int
    num_bytes: int
    start_s: float
    end_s: float

    @classmethod
    def from_json(cls, document: Any, index: int) -> Self:
        """Reads one element of `tasks`.

        Raises:
          InputError: if a key is missing or unknown, or a value not acceptable.
        """
        where = f"tasks[{index}]"
        if not isinstance(document, Mapping):
            raise InputError(f"{where} must be a JSON object, got {document!r}")
        check_keys(document, tuple(_KEYS.values()), where)
        values = {field: required(document, key, where) for field, key in _KEYS.items()}
        for field in ("name", "layer"):
            check_text(values[field], field, where)
        for field in ("step", "micro_batch", "num_bytes"):
            check_bytes(values[field], _KEYS[field], where)
        values["kind"] = Kind(check_choice(values["kind"], "kind", tuple(Kind), where))
        values["lane"] = Lane(check_choice(values["lane"], "lane", tuple(Lane), where))
        times = values["start_s"], values["end_s"]
        if not all(isinstance(time, int | float) and math.isfinite(time) for time in times) or times[0] > times[1]:
            raise InputError(f"{where}: start_s and end_s must be seconds, the end not before the start, got {times}")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The task as an element of `tasks`."""
        return {key: getattr(self, field) for field, key in _KEYS.items()}


_KEYS = {field.name: field.name.replace("num_bytes", "bytes") for field in dataclasses.fields(RecordedTask)}


@dataclasses.dataclass(frozen=True)
class Recording:
    """Recorded training steps.

    Attributes:
      model: its name.
      machine: facts about the machine, JSON values by name.
      accumulate: number of micro-batches whose gradients one update applies.
      memory_budget_bytes: device memory that the step may take; None for no limit.
      plan: the plan that ran.
      profile: what it was made from; it has no times if the policy needs none.
      tasks: the tasks, step by step in dispatch order.
      device_bytes: by kind, (seconds, bytes from then on) for each change of device memory, by the count of the
        schedule.
      host_bytes: host memory that training keeps, by what it is for.
    """

    model: str
    machine: Mapping[str, Any]
    accumulate: int
    memory_budget_bytes: int | None
    plan: Plan
    profile: Profile
    tasks: tuple[RecordedTask, ...]
    device_bytes: Mapping[str, Changes]
    host_bytes: Mapping[str, int]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.recording/1`.

        Raises:
          InputError: if a key is missing or unknown, or a value not acceptable.
        """
        fields = check_format(document, FORMAT)
        names = tuple(field.name for field in dataclasses.fields(cls))
        check_keys(fields, ("format", *names), "recording")
        values = {name: required(fields, name, "recording") for name in names}
        check_text(values["model"], "model", "recording")
        if not isinstance(values["machine"], Mapping):
            raise InputError(f"recording: machine must be a JSON object, got {values['machine']!r}")
        if type(values["accumulate"]) is not int or values["accumulate"] < 1:
            given = values["accumulate"]
            raise InputError(f"recording: accumulate must be a number of micro-batches, 1 or more, got {given!r}")
        if values["memory_budget_bytes"] is not None:
            check_bytes(values["memory_budget_bytes"], "memory_budget_bytes", "recording")
        tasks = check_list(values["tasks"], "tasks", "task")
        records = {"plan": Plan.from_json(values["plan"]), "profile": Profile.from_json(values["profile"])}
        memory = {
            "device_bytes": _read_changes(values["device_bytes"]),
            "host_bytes": _read_sizes(values["host_bytes"]),
        }
        read = (RecordedTask.from_json(task, index) for index, task in enumerate(tasks))
        return cls(**values | records | memory | {"tasks": tuple(read)})

    def to_json(self) -> dict[str, Any]:
        """The recording as `jaxferry.recording/1`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        records = {"plan": self.plan.to_json(), "profile": self.profile.to_json()}
        memory = {kind: [list(change) for change in changes] for kind, changes in self.device_bytes.items()}
        tasks = [task.to_json() for task in self.tasks]
        return {"format": FORMAT, **fields, **records, "tasks": tasks, "device_bytes": memory}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a recording from a file; errors name the file."""
        return load_record(path, cls.from_json)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording to a file."""
        write_json(path, self.to_json())


def _read_changes(document: Any) -> dict[str, Changes]:
    try:
        found = {
            kind: tuple((float(time_s), check_bytes(held, kind, "device_bytes")) for time_s, held in changes)
            for kind, changes in document.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"device_bytes must hold pairs of seconds and bytes by kind: {error}") from error
    if not all(changes and all(math.isfinite(time_s) for time_s, _ in changes) for changes in found.values()):
        raise InputError("device_bytes must hold one or more pairs of seconds and bytes by kind")
    return found


def _read_sizes(document: Any) -> dict[str, int]:
    if not isinstance(document, Mapping):
        raise InputError(f"host_bytes must be a JSON object, got {document!r}")
    return {name: check_bytes(size, name, "host_bytes") for name, size in document.items()}


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
