"""What the simulator says of a plan: times, memory by kind, and a trace."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxferry.costs import LayerProfile, Profile
from jaxferry.step import machine
from jaxferry.step.effective_plan import updated_on_device
from jaxferry.step.machine import Chain, bytes_over_time, device_bytes
from jaxferry.step.plans import Plan, Predicted
from jaxferry.step.schedule import schedule_step
from jaxferry.step.shared_work import with_shared_work
from jaxferry.step.tasks import Kind, Lane, Run, Schedule, Task, used_lanes

CHAIN_STEPS = 3
"""Steps of the chain that the peak covers: loads of the next step overlap the end of this one."""


@dataclasses.dataclass(frozen=True)
class LaneUse:
    """A lane's busy and idle time until the last task of one step has ended."""

    busy_s: float
    idle_s: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A plan's times and memory, exact under the machine model.

    Attributes:
      forward_s: seconds from the step's start to the end of the last inter_forward.
      step_s: seconds from the step's start to the end of the last update.
      steady_step_s: seconds a step in an endless chain.
      peak_device_bytes: the most device memory held at any instant of a chain of `CHAIN_STEPS` steps.
      link_bytes: bytes over the host link in one step: loads, offloads, and reads and writes of host memory by the GPU.
      streamed_state_bytes: masters and optimizer state that lie in pinned host memory and stream through the GPU.
      lanes: use of each lane in one step.
      critical_path: names of the tasks that determine `step_s`, first to last.
      device_bytes: (seconds, bytes from then on) for each change of device memory in one step.
      run: when each task of the one step starts and ends.
    """

    forward_s: float
    step_s: float
    steady_step_s: float
    peak_device_bytes: int
    link_bytes: int
    streamed_state_bytes: int
    lanes: dict[Lane, LaneUse]
    critical_path: tuple[str, ...]
    device_bytes: tuple[tuple[float, int], ...]
    run: machine.Run

    @property
    def predicted(self) -> Predicted:
        """The part that a plan carries."""
        return Predicted(self.forward_s, self.step_s, self.steady_step_s, self.peak_device_bytes)

    def to_json(self) -> dict[str, Any]:
        """All but the run as JSON values."""
        return {
            **self.predicted.to_json(),
            "link_bytes": self.link_bytes,
            "streamed_state_bytes": self.streamed_state_bytes,
            "lanes": {lane.value: dataclasses.asdict(use) for lane, use in self.lanes.items()},
            "critical_path": list(self.critical_path),
            "device_bytes": [[time, held] for time, held in self.device_bytes],
        }


def simulate(profile: Profile, plan: Plan) -> Simulation:
    """Runs one step of a plan, and chains of such steps.

    Raises:
      InputError: if the plan is for another profile.
    """
    return simulate_schedule(profile, schedule_step(profile, plan))


def simulate_schedule(profile: Profile, step: Schedule) -> Simulation:
    """As `simulate`, for the tasks of one step."""
    step = with_shared_work(step)
    chain = Chain(step)
    steps = [chain.run_step() for _ in range(CHAIN_STEPS)]
    chain.finish()
    first = machine.run(step)
    return Simulation(
        forward_s=machine.forward_s(first),
        step_s=machine.step_s(first),
        steady_step_s=machine.steady_step_s(step),
        peak_device_bytes=max(held for _, held in machine.device_bytes_of_steps(step, steps)),
        link_bytes=sum(link_bytes(profile.layers[task.segment], task) for task in step.tasks),
        streamed_state_bytes=sum(task.start_bytes for task in step.tasks if task.kind is Kind.STATE_UP),
        lanes=_lane_uses(first),
        critical_path=tuple(step.tasks[index].name for index in machine.critical_path(first)),
        device_bytes=tuple(machine.device_bytes(first)),
        run=first,
    )


def predict(profile: Profile, plan: Plan) -> Plan:
    """The plan with the simulator's `predicted`.

    Raises:
      InputError: if the plan is for another profile.
    """
    return dataclasses.replace(plan, predicted=simulate(profile, plan).predicted)


def _lane_uses(of: machine.Run) -> dict[Lane, LaneUse]:
    span_s = max(of.ends_s)
    busy = dict.fromkeys(used_lanes(task.lane for task in of.schedule.tasks), 0.0)
    for task in of.schedule.tasks:
        busy[task.lane] += task.duration_s
    return {lane: LaneUse(busy_s, max(span_s - busy_s, 0.0)) for lane, busy_s in busy.items()}


def link_bytes(layer: LayerProfile, task: Task) -> int:
    """The bytes of a task of a layer over the host link: of its transfer, or of a program's reads and writes there."""
    if task.kind in (Kind.READ, Kind.WRITE, Kind.CONTENTION):
        return 0  # counted with their programs, or nothing
    if task.kind in (Kind.SAVE, Kind.FETCH, Kind.STATE_UP, Kind.STATE_DOWN):
        return task.start_bytes + task.end_bytes
    if task.lane is Lane.H2D:
        return layer.param_bytes
    if task.lane is Lane.D2H:
        return layer.offload_bytes
    if task.lane is not Lane.GPU:
        return 0
    reads = 0
    if "_dha" in task.duration_key:
        is_forward = task.kind is Kind.FORWARD
        reads = (is_forward or layer.backward_reads) + ("_recompute" in task.duration_key)
    return layer.param_bytes * reads + layer.grad_bytes * ("_go" in task.duration_key)


PARAMETERS, ACTIVATIONS, GRADIENTS = "parameters", "activations", "gradients"
TEMPORARIES, STATE = "temporaries", "optimizer state"

_STARTS = {
    Kind.LOAD: PARAMETERS,
    Kind.RELOAD: PARAMETERS,
    Kind.FORWARD: ACTIVATIONS,
    Kind.FETCH: ACTIVATIONS,
    Kind.BACKWARD: GRADIENTS,
    Kind.STATE_UP: STATE,
    Kind.UPDATE: STATE,  # the new compute copy, on its way down with the state
}
"""What a task's `start_bytes` are."""

_ENDS = {
    Kind.BACKWARD: ACTIVATIONS,
    Kind.SAVE: ACTIVATIONS,
    Kind.OFFLOAD: GRADIENTS,
    Kind.UPDATE: GRADIENTS,
    Kind.STATE_DOWN: STATE,
}
"""What a task's `end_bytes` are, besides the copies of parameters that it is the last to use."""


def device_bytes_by_kind(run: Run, profile: Profile, plan: Plan) -> dict[str, tuple[tuple[float, int], ...]]:
    """Device memory over time by kind: (seconds, bytes from then on), one entry for each change.

    The sum over kinds is `simulate.machine.device_bytes`. Kinds that take no memory are left out.

    Args:
      run: the tasks and their times.
      profile: the plan's profile.
      plan: the plan of `run`.
    """
    on_device = updated_on_device(profile, plan)
    state_bytes = sum(profile.layers[profile.groups[group][0]].state_bytes for group in on_device)
    held = {PARAMETERS: run.schedule.resident_bytes - state_bytes, STATE: state_bytes}
    moments, changes = collections.defaultdict[str, list[float]](list), collections.defaultdict[str, list[int]](list)
    for index, kind, at_start, at_end in _amounts(run.schedule):
        moments[kind] += [run.starts_s[index], run.ends_s[index]]
        changes[kind] += [at_start, -at_end]
    kinds = (PARAMETERS, STATE, ACTIVATIONS, GRADIENTS, TEMPORARIES)
    return {
        kind: tuple(bytes_over_time(held.get(kind, 0), np.array(moments[kind]), np.array(changes[kind], np.int64)))
        for kind in kinds
        if held.get(kind) or any(changes[kind])
    }


def _amounts(schedule: Schedule) -> Iterator[tuple[int, str, int, int]]:
    """Index of a task, kind of memory, bytes allocated as it starts, bytes freed as it ends."""
    last_use = {task.copy: index for index, task in enumerate(schedule.tasks) if task.copy is not None}
    freed = collections.Counter[int]()
    for load, index in last_use.items():
        freed[index] += schedule.tasks[load].start_bytes
    for index, task in enumerate(schedule.tasks):
        yield index, PARAMETERS, 0, freed[index]
        yield index, _STARTS.get(task.kind, PARAMETERS), task.start_bytes, 0
        yield index, _ENDS.get(task.kind, PARAMETERS), 0, task.end_bytes - freed[index]
        yield index, TEMPORARIES, task.workspace_bytes, task.workspace_bytes


_MICROSECONDS = 1e6
_PROCESS = 1
_ROWS = {lane: number for number, lane in enumerate(Lane, start=1)}
_STATE = (Kind.STATE_UP, Kind.STATE_DOWN)


def chrome_trace(*runs: Run) -> dict[str, Any]:
    """Runs as a document of the Chrome trace event format: complete events, times in microseconds.

    Each lane is a named thread, in the order of `Lane`; device memory is a counter.

    Args:
      *runs: one, or one of each process that trained together.
    """
    events: list[dict[str, Any]] = []
    for number, of in enumerate(runs, start=_PROCESS):
        name = "jaxferry simulate" if len(runs) == 1 else f"process {number - _PROCESS}"
        lanes = used_lanes(task.lane for task in of.schedule.tasks)
        events += _metadata_of(number, name, lanes) + _events(number, of)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata_of(process: int, name: str, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    events = [_metadata("process_name", process, 0, {"name": name})]
    for lane in lanes:
        row = _ROWS[lane]
        events.append(_metadata("thread_name", process, row, {"name": lane.value}))
        events.append(_metadata("thread_sort_index", process, row, {"sort_index": row}))
    return events


def _events(process: int, of: Run) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {
            "name": task.name,
            "cat": task.kind.value,
            "ph": "X",
            "ts": start * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "pid": process,
            "tid": _ROWS[task.lane],
            "args": {
                "layer": task.segment,
                "step": task.step,
                "duration_key": task.duration_key,
                **({"bytes": task.start_bytes + task.end_bytes} if task.kind in _STATE else {}),
            },
        }
        for task, start, end in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True)
    ]
    for time, held in device_bytes(of):
        counter = {"ph": "C", "name": "device memory", "ts": time * _MICROSECONDS, "pid": process}
        events.append({**counter, "args": {"bytes": held}})
    return events


def _metadata(name: str, process: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": row, "args": args}
