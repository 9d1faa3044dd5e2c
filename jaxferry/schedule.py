"""A plan becomes one list of tasks: what runs on which lane, for how long, after what, and what memory it moves.

Simulator and engine consume the same list. Four lanes work at once, each in the order of the list:

    H2D    load, load, ...      DFGB loads      second loads of RELOAD         refreshes of RESIDENT
    GPU         forward, inter_forward, ...     inter_backward, backward, ...
    D2H         (save, ...)                        offload, ...
    host                                              update, ...

Rules (the machine model; MemFerry, section IV-B):

- **H2D**: loads for the forward (GFGB, RELOAD) in layer order; then DFGB loads in layer order, each not before its own
  DHA forward has ended; then second loads of RELOAD layers in backward order; then refreshes in update order.
- **GPU**: forward 1..L, then backward L..1. What needs a copy on the device waits for its load.
  `inter_forward_s` follows a forward, `inter_backward_s` precedes a backward and waits for no load.
- **D2H**: gradients in backward order, none for GO layers. **Host**: updates in backward order, each once all gradients
  of its parameters are on the host.
- `loads: "bulk"`: no forward before the last load of the forward. `updates: "after-all"`: no update before all
  gradients are on the host.
- **RELOAD** layers share two slots on the device, so that one computes while the next one loads: a load of a RELOAD
  layer starts not before the use before the previous one has ended; the uses are the forwards, then the backwards.
- **RESIDENT** layers are on the device before the first step. After its update each is refreshed in place by a load.
- **Parameter groups**: one update, in the place of the group's last backward, due when the last of its gradients is on
  the host. One copy on the device while one is held: GFGB and DFGB hold it from the load to the backward, RELOAD in
  the forward and in the backward, RESIDENT always. A layer that finds its group's copy held
  loads nothing and uses that one; the copy goes when its last holder's backward has ended.
- **Recomputation** (`remat: "full"`): the backward takes `recompute_s` more, by DHA also what the forward is slower by,
  and keeps `recompute_activation_bytes` in place of `activation_bytes`.
- **Programs** (`ProgramFacts`, only where they are known): what the engine's programs add to this model. The last
  layer's forward and backward are one program, for which one copy serves. A copy that a backward does not read is not
  loaded for it. A backward waits until all but the last `GRADIENT_SLOTS` gradients before it have left the device. One
  that adds to a gradient in host memory waits until that has arrived. Of the updates that could start, the host takes
  the one whose parameters the next forward needs first, not the first in the list (unless that is slower: `choice.py`).
  A layer without trained parameters has no offload and no update; where nothing trained lies before it either, it has
  no backward.
- **Values in host memory** (`ProgramFacts.saves` and `fetches`): a save follows the forward that reads its values last.
  The second program after that waits for it, so that at most `CROSSING_SLOTS` programs' values are on their way. A
  fetch starts when the second program before its backward has ended. Their lanes have them in this order with offloads
  and loads, and they take as long a byte as all loads, or all offloads, of the profile do on average.
- **Chain of steps**: a forward that reads host memory, and a load for the forward, start not before the previous step's
  update of these parameters; a forward on a RESIDENT copy not before its refresh.

Memory: a copy counts from the start of its load to the end of its last use, activations from the start of the forward
to the end of the backward, a gradient on the device from the start of the backward to the end of its offload, and one
on the host from the start of what writes it to the end of its update.
"""

import dataclasses
import enum
from collections.abc import Iterable

from jaxferry.modes import GradientPlace, Mode
from jaxferry.plan.records import Loads, Plan, Updates
from jaxferry.profiling.records import Profile


class Lane(enum.StrEnum):
    """What a task occupies."""

    GPU = "GPU"
    H2D = "H2D"
    D2H = "D2H"
    HOST = "host"


class Kind(enum.StrEnum):
    """What a task does."""

    LOAD = "load"
    RELOAD = "reload"
    """The second load of a RELOAD layer."""
    REFRESH = "refresh"
    """The load of a RESIDENT copy after its update."""
    FORWARD = "forward"
    INTER_FORWARD = "inter_forward"
    INTER_BACKWARD = "inter_backward"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    UPDATE = "update"
    SAVE = "save"
    """Values that cross segments leave for host memory."""
    FETCH = "fetch"
    """They come back for a backward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one lane.

    Attributes:
      name: kind and layer, for people.
      layer: index of the layer; for updates and refreshes, of the first layer of the group.
      kind: what it does.
      lane: what it occupies; tasks of a lane run in the order of the list.
      duration_key: the profile's key of its duration; `backward_dha_go_s` stands for a backward that reads its
        parameters and writes its gradient in host memory; `_recompute_s` ends that of one that runs its forward again.
        Of a save and of a fetch it is the key of what is as fast, byte by byte.
      duration_s: seconds.
      after: indices of tasks in the same list that must have ended; all of them lower than its own.
      after_previous: indices of tasks of the previous step that must have ended; no tasks where there is no such step.
      start_bytes: device memory allocated as it starts.
      end_bytes: device memory freed as it ends.
      host_start_bytes: host memory for a gradient taken as it starts.
      host_end_bytes: host memory for gradients given back as it ends.
      copy: of a forward or backward, the load whose copy of the parameters it reads; None if it reads host memory, a
        RESIDENT copy, or nothing.
      step: the step in a chain, counted from 0.
    """

    name: str
    layer: int
    kind: Kind
    lane: Lane
    duration_key: str
    duration_s: float
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    start_bytes: int = 0
    end_bytes: int = 0
    host_start_bytes: int = 0
    host_end_bytes: int = 0
    copy: int | None = None
    step: int = 0

    @property
    def need(self) -> tuple[int, int]:
        """Of an update: the less, the sooner a forward needs the parameters."""
        return self.step, self.layer


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of one step, or of a chain of steps.

    Attributes:
      tasks: in an order in which they can be dispatched: every task follows what it waits for.
      resident_bytes: device memory held all the time, by RESIDENT copies.
      steps: the number of steps in `tasks`.
      updates_by_need: whether the host takes the update whose parameters are needed first, not the first in the list.
    """

    tasks: tuple[Task, ...]
    resident_bytes: int
    steps: int = 1
    updates_by_need: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """When each task of a schedule started and ended, predicted or measured, in seconds from the first step's start.

    Attributes:
      schedule: what ran.
      starts_s: start of each task.
      ends_s: end of each task.
    """

    schedule: Schedule
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


GRADIENT_SLOTS = 2
"""How many gradients may wait on the device for their transfer while the next one is computed."""


CROSSING_SLOTS = 2
"""How many programs may have values on the device that leave for host memory, or come back for their backward."""


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """What is known of a model's programs beyond their times.

    Attributes:
      reads_back: for each layer, whether its backward reads the parameters (that of a lookup does not).
      sends_rows: for each layer, whether its gradient leaves as the rows of lookups, which no program writes to host
        memory itself.
      runs_back: for each layer, whether it has a backward; none stands for all.
      has_gradient: for each layer, whether that gives a gradient of its parameters; likewise.
      saves: for each layer, how many bytes leave for host memory once its forward has ended; none if nothing does.
      fetches: for each layer, how many of them come back for its backward; likewise. Of values that layer `l` saves,
        `2 * CROSSING_SLOTS` programs later at the earliest.
    """

    reads_back: tuple[bool, ...]
    sends_rows: tuple[bool, ...]
    runs_back: tuple[bool, ...] = ()
    has_gradient: tuple[bool, ...] = ()
    saves: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()


def schedule_step(profile: Profile, plan: Plan, programs: ProgramFacts | None = None) -> Schedule:
    """The tasks of one step of a plan.

    Args:
      profile: the layers.
      plan: their modes.
      programs: what the engine's programs add to the machine model; None for the model alone.

    Raises:
      InputError: if the plan is for another profile.
    """
    plan.check_profile(profile)
    return _StepBuilder(profile, plan, programs).build()


def schedule_chain(profile: Profile, plan: Plan, steps: int) -> Schedule:
    """The tasks of `steps` steps, one after the other, with the waits between them."""
    return repeat(schedule_step(profile, plan), steps)


def repeat(step: Schedule, steps: int) -> Schedule:
    """Chains copies of the tasks of one step; a step's `after_previous` become plain waits."""
    size = len(step.tasks)
    tasks = list(step.tasks)
    for number in range(1, steps):
        offset = number * size
        tasks += [
            dataclasses.replace(
                task,
                after=tuple(index + offset for index in task.after)
                + tuple(index + offset - size for index in task.after_previous),
                copy=None if task.copy is None else task.copy + offset,
                step=number,
            )
            for task in step.tasks
        ]
    return dataclasses.replace(step, tasks=tuple(tasks), steps=steps)


def leading_loads(step: Schedule) -> tuple[int, ...]:
    """The first tasks of the link up, as far as they wait for nothing else of their own step.

    They may be done before anything is known of the step but that it will come.
    """
    leading: list[int] = []
    for index, task in enumerate(step.tasks):
        if task.lane is Lane.H2D:
            if task.kind not in (Kind.LOAD, Kind.RELOAD) or not set(task.after) <= set(leading):
                break
            leading.append(index)
    return tuple(leading)


@dataclasses.dataclass
class _Copy:
    """A copy of a group's parameters on the device: its load, and its last use so far."""

    load: int
    last_use: int | None = None


def _seconds_a_byte(transfers: Iterable[tuple[float, int]]) -> float:
    """The mean of transfers, each given by its seconds and bytes; what little a layer has says more of latency."""
    seconds, sizes = zip(*transfers, strict=True)
    return float(sum(seconds)) / sum(sizes) if sum(sizes) else 0.0


class _StepBuilder:
    """Emits the tasks of one step in the order of dispatch."""

    def __init__(self, profile: Profile, plan: Plan, programs: ProgramFacts | None = None):
        self.profile, self.plan, self.programs = profile, plan, programs
        self.layers = profile.layers
        self.modes, self.gradients = list(plan.modes), list(plan.gradients)
        self.recomputes = plan.recomputes
        last = len(self.layers) - 1
        if programs is not None:
            # Nothing can be loaded within the program of the last layer, nothing need be for one that reads nothing.
            for layer, mode in enumerate(self.modes):
                if mode is Mode.DFGB and (layer == last or not programs.reads_back[layer]):
                    self.modes[layer] = Mode.DHA
                if programs.sends_rows[layer]:
                    self.gradients[layer] = GradientPlace.DEVICE
        everywhere = (True,) * len(self.layers)
        self.runs_back = (programs and programs.runs_back) or everywhere
        self.has_gradient = (programs and programs.has_gradient) or everywhere
        nothing = (0,) * len(self.layers)
        self.saves, self.fetches = (programs and programs.saves) or nothing, (programs and programs.fetches) or nothing
        self.saves_of_programs: list[tuple[int, ...]] = []
        self.fetched: dict[int, int] = {}
        self.last_program = -1
        self.tasks: list[Task] = []
        self.forwards: list[int] = []
        self.arrivals: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self.refreshes: dict[int, int] = {}
        self.held: dict[int, _Copy] = {}
        self.copies: list[_Copy] = []
        self.reload_uses: list[int] = []
        self.forward_copy: _Copy | None = None
        self.loss_copy: _Copy | None = None
        self.resident = {
            group
            for group, members in enumerate(profile.groups)
            if any(self.modes[layer] is Mode.RESIDENT for layer in members)
        }
        self.waits_for_update: list[tuple[int, int]] = []
        self.waits_for_refresh: list[tuple[int, int]] = []

    def build(self) -> Schedule:
        order = range(len(self.layers))
        if self.plan.loads is Loads.BULK:
            own = [self.load_for_forward(layer) for layer in order]
            barrier = tuple(range(len(self.tasks)))[-1:]
            for layer in order:
                self.forward(layer, own[layer], barrier)
        else:
            for layer in order:
                self.forward(layer, self.load_for_forward(layer), ())
        for layer in order:
            self.load_between(layer)
        for layer in reversed(order):
            self.backward(layer)
        if self.plan.updates is Updates.AFTER_ALL:
            everything = tuple(sorted(set(self.arrivals.values())))
            for layer in reversed(order):
                self.update(layer, everything)
        for group in self.updates:
            self.refresh(group)
        self.free_copies()
        self.wait_for_previous()
        groups = self.profile.groups
        resident_bytes = sum(self.layers[groups[group][0]].param_bytes for group in self.resident)
        return Schedule(tuple(self.tasks), resident_bytes, updates_by_need=self.programs is not None)

    def emit(self, kind: Kind, lane: Lane, layer: int, duration: tuple[str, float], after: tuple[int, ...] = ()) -> int:
        name = f"{kind.value} {self.layers[layer].name}"
        self.tasks.append(Task(name, layer, kind, lane, *duration, after))
        return len(self.tasks) - 1

    def add_bytes(self, task: int, **more: int) -> None:
        old = self.tasks[task]
        self.tasks[task] = dataclasses.replace(old, **{key: getattr(old, key) + more[key] for key in more})

    def load(self, kind: Kind, layer: int, after: tuple[int, ...] = ()) -> _Copy:
        profile = self.layers[layer]
        task = self.emit(kind, Lane.H2D, layer, ("load_s", profile.load_s), after)
        self.add_bytes(task, start_bytes=profile.param_bytes)
        self.copies.append(_Copy(task))
        return self.copies[-1]

    def free_slot(self) -> tuple[int, ...]:
        """What the next load of a RELOAD layer waits for: the use before the previous one."""
        return tuple(self.reload_uses[-2:-1])

    def load_for_forward(self, layer: int) -> _Copy | None:
        mode, group = self.modes[layer], self.profile.group_of[layer]
        if group in self.resident or mode not in (Mode.GFGB, Mode.RELOAD):
            return None
        if group in self.held:
            return self.held[group]
        copy = self.load(Kind.LOAD, layer, self.free_slot() if mode is Mode.RELOAD else ())
        self.waits_for_update.append((copy.load, group))
        if mode is Mode.GFGB:
            self.held[group] = copy
        return copy

    def forward(self, layer: int, copy: _Copy | None, barrier: tuple[int, ...]) -> None:
        profile, mode, group = self.layers[layer], self.modes[layer], self.profile.group_of[layer]
        by_dha = mode in (Mode.DHA, Mode.DFGB)
        key = "forward_dha_s" if by_dha else "forward_s"
        after = tuple(sorted({*self.saves_to_wait_for(), *barrier, *(() if copy is None else (copy.load,))}))
        task = self.emit(Kind.FORWARD, Lane.GPU, layer, (key, getattr(profile, key)), after)
        self.tasks[task] = dataclasses.replace(self.tasks[task], copy=None if copy is None else copy.load)
        self.add_bytes(task, start_bytes=profile.kept_bytes(self.recomputes[layer]))
        self.forwards.append(task)
        self.last_program = task
        if by_dha:
            self.waits_for_update.append((task, group))
        elif copy is None:
            self.waits_for_refresh.append((task, group))
        else:
            copy.last_use = task
            if mode is Mode.RELOAD and group not in self.held:
                self.reload_uses.append(task)
                self.forward_copy = copy
        if profile.inter_forward_s > 0:
            duration = ("inter_forward_s", profile.inter_forward_s)
            self.emit(Kind.INTER_FORWARD, Lane.GPU, layer, duration, (task,))
        self.saves_of_programs.append(self.save(layer, task))

    def saves_to_wait_for(self) -> tuple[int, ...]:
        """What the next program waits for before it may add to the values on the device."""
        return self.saves_of_programs[-CROSSING_SLOTS] if len(self.saves_of_programs) >= CROSSING_SLOTS else ()

    def save(self, layer: int, forward: int) -> tuple[int, ...]:
        """The save of what the layer's forward reads last, if there is one."""
        num_bytes = self.saves[layer]
        if num_bytes == 0:
            return ()
        duration_s = num_bytes * _seconds_a_byte((other.offload_s, other.grad_bytes) for other in self.layers)
        task = self.emit(Kind.SAVE, Lane.D2H, layer, ("offload_s", duration_s), (forward,))
        self.add_bytes(task, end_bytes=num_bytes)
        return (task,)

    def fetch_for_next(self, layer: int) -> None:
        """The fetch for the backward behind that of this layer, which comes before this one's in the list."""
        following = next((other for other in reversed(range(layer)) if self.runs_back[other]), None)
        num_bytes = 0 if following is None else self.fetches[following]
        if following is None or num_bytes == 0:
            return
        duration_s = num_bytes * _seconds_a_byte((other.load_s, other.param_bytes) for other in self.layers)
        self.fetched[following] = self.emit(
            Kind.FETCH, Lane.H2D, following, ("load_s", duration_s), (self.last_program,)
        )
        self.add_bytes(self.fetched[following], start_bytes=num_bytes)

    def load_between(self, layer: int) -> None:
        group = self.profile.group_of[layer]
        if self.modes[layer] is Mode.DFGB and group not in self.resident and group not in self.held:
            self.held[group] = self.load(Kind.LOAD, layer, (self.forwards[layer],))

    def copy_for_backward(self, layer: int) -> _Copy | None:
        mode, group = self.modes[layer], self.profile.group_of[layer]
        if mode is Mode.DHA or group in self.resident:
            return None
        if mode is not Mode.RELOAD or self.still_held(layer, group):
            return self.held[group]
        if self.programs is not None and layer == len(self.layers) - 1:
            self.loss_copy = self.forward_copy
            return self.loss_copy
        if self.programs is not None and not self.programs.reads_back[layer]:
            return None
        return self.load(Kind.RELOAD, layer, tuple(sorted({self.forwards[layer], *self.free_slot()})))

    def still_held(self, layer: int, group: int) -> bool:
        """Whether the group's copy outlives the backward of this layer, for another holder."""
        members = self.profile.groups[group]
        return any(other < layer and self.modes[other] in (Mode.GFGB, Mode.DFGB) for other in members)

    def backward(self, layer: int) -> None:
        profile, mode, group = self.layers[layer], self.modes[layer], self.profile.group_of[layer]
        if not self.runs_back[layer]:
            self.add_bytes(self.forwards[layer], end_bytes=profile.activation_bytes)
            return
        copy = self.copy_for_backward(layer)
        self.fetch_for_next(layer)
        if profile.inter_backward_s > 0:
            self.emit(Kind.INTER_BACKWARD, Lane.GPU, layer, ("inter_backward_s", profile.inter_backward_s))
        has_gradient, again = self.has_gradient[layer], self.recomputes[layer]
        by_dha, to_host = mode is Mode.DHA, has_gradient and self.gradients[layer] is GradientPlace.HOST
        key = f"backward{'_dha' * by_dha}{'_go' * to_host}{'_recompute' * again}_s"
        duration = (key, profile.backward_for(by_dha, to_host, again))
        after = {*self.room_for_gradient(layer), *(() if copy is None else (copy.load,))}
        if layer in self.fetched:
            after.add(self.fetched[layer])
        if layer != len(self.layers) - 1:
            after.update(self.saves_to_wait_for())
            self.saves_of_programs.append(())
        task = self.emit(Kind.BACKWARD, Lane.GPU, layer, duration, tuple(sorted(after)))
        self.last_program = task
        self.tasks[task] = dataclasses.replace(self.tasks[task], copy=None if copy is None else copy.load)
        self.add_bytes(task, end_bytes=profile.kept_bytes(self.recomputes[layer]))
        if copy is not None:
            copy.last_use = task
            if copy is self.loss_copy:
                self.reload_uses[-1] = task
            elif copy is not self.held.get(group):
                self.reload_uses.append(task)
        if not has_gradient:
            return
        self.arrivals[layer] = task if to_host else self.offload(layer, task)
        if to_host:
            self.add_bytes(task, host_start_bytes=profile.grad_bytes)
        if self.plan.updates is Updates.OVERLAPPED:
            members = self.profile.groups[group]
            self.update(layer, tuple(self.arrivals[other] for other in members if other in self.arrivals))

    def room_for_gradient(self, layer: int) -> tuple[int, ...]:
        """What a backward waits for before it may write its gradient."""
        if self.programs is None or not self.has_gradient[layer]:
            return ()
        arrivals = list(self.arrivals.items())
        waits = {task for _, task in arrivals[: len(arrivals) - GRADIENT_SLOTS]}
        if self.gradients[layer] is GradientPlace.HOST:
            members = self.profile.groups[self.profile.group_of[layer]]
            waits |= {task for other, task in arrivals if other in members}
        return tuple(task for task in waits if self.tasks[task].kind is Kind.OFFLOAD)

    def offload(self, layer: int, backward: int) -> int:
        profile = self.layers[layer]
        self.add_bytes(backward, start_bytes=profile.grad_bytes)
        task = self.emit(Kind.OFFLOAD, Lane.D2H, layer, ("offload_s", profile.offload_s), (backward,))
        self.add_bytes(task, end_bytes=profile.grad_bytes, host_start_bytes=profile.grad_bytes)
        return task

    def update(self, layer: int, after: tuple[int, ...]) -> None:
        """The group's update, at its first layer, which is the last one in backward order."""
        group = self.profile.group_of[layer]
        members = self.profile.groups[group]
        if layer != members[0] or not self.has_gradient[layer]:
            return
        duration = ("update_s", self.profile.group_update_s[group])
        task = self.emit(Kind.UPDATE, Lane.HOST, layer, duration, tuple(sorted(after)))
        self.add_bytes(task, host_end_bytes=sum(self.layers[other].grad_bytes for other in members))
        self.updates[group] = task

    def refresh(self, group: int) -> None:
        if group in self.resident:
            layer = self.profile.groups[group][0]
            duration = ("load_s", self.layers[layer].load_s)
            self.refreshes[group] = self.emit(Kind.REFRESH, Lane.H2D, layer, duration, (self.updates[group],))

    def free_copies(self) -> None:
        for copy in self.copies:
            if copy.last_use is not None:
                self.add_bytes(copy.last_use, end_bytes=self.layers[self.tasks[copy.load].layer].param_bytes)

    def wait_for_previous(self) -> None:
        for waits, ends in ((self.waits_for_update, self.updates), (self.waits_for_refresh, self.refreshes)):
            for task, group in waits:
                if group in ends:
                    self.tasks[task] = dataclasses.replace(self.tasks[task], after_previous=(ends[group],))
