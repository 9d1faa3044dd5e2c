"""The simulator's report on a plan."""

import dataclasses
from typing import Any

from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.step.records import Plan, Predicted
from jaxferry.step.schedule import Kind, Lane, Schedule, Task, schedule_step
from jaxferry.step.simulate import machine
from jaxferry.step.simulate.chain import Chain
from jaxferry.step.simulate.shared_work import with_shared_work

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
    busy = dict.fromkeys(Lane, 0.0)
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
