"""Lowering: a plan becomes one list of tasks, the same for simulator and engine.

Four lanes work at once, each in the order of the list:

    H2D    load, load, ...      DFGB loads      second loads of RELOAD         refreshes of RESIDENT
    GPU         forward, inter_forward, ...     inter_backward, backward, ...
    D2H         (save, ...)                        offload, ...
    host                                              update, ...

Rules (the machine model; MemFerry, section IV-B):

- **H2D**: loads for the forward (GFGB, RELOAD) in layer order; then DFGB loads in layer order, each not before its own
  DHA forward has ended; then second loads of RELOAD layers in backward order; then refreshes in update order.
- **GPU**: forward 1..L, then backward L..1. A program that needs a copy on the device waits for its load.
  `inter_forward_s` follows a forward. `inter_backward_s` precedes a backward and waits for no load.
- **D2H**: gradients in backward order, none for GO layers. **Host**: updates in backward order, each once all gradients
  of its parameters are on the host.
- **Room for gradients**: a backward waits only for those offloads without which it would not fit into device memory
  (`jaxferry.room`). A backward that adds to a gradient in host memory waits until that gradient has arrived.
- `loads: "bulk"`: no forward starts before the last load for the forward has ended. Loads follow the order of updates,
  so each layer's load for the next step starts once that layer is updated. `updates: "after-all"`: no update starts
  before all gradients are on the host.
- `update_order: "need"`: of the updates that could start, the host picks the one whose parameters the next forward
  needs first.
- **RELOAD** layers share two slots on the device, so one computes while the next one loads. A load of a RELOAD layer
  starts once the use before the previous one has ended. The uses are the forwards, then the backwards.
- **RESIDENT** layers are on the device before the first step. A load refreshes each of them in place after its update.
- **Updates on the device** (`update: "resident"`): master parameters and optimizer state stay there as well. The update
  follows the group's last backward on the GPU, or waits for all gradients if the others do. Nothing of the group moves.
- **Updates through the GPU** (`update: "gpu"`): once the group's gradient is whole on the device, masters and optimizer
  state go up, are updated there and go back down with the new compute copy, in subgroups (`jaxferry.streaming`). The
  gradient never leaves. Second loads for the next backward go up first. The next step's load (or DHA read) waits for
  the last transfer down. Updates left after the last backward run between the forwards of the next step
  (`jaxferry.late_updates`).
- **Shared links**: where the profile says so, programs that read or write host memory take time of the links
  (`Task.read_s`, `Task.write_s`). Programs go first, and the transfers that follow in the list get what they leave
  (`jaxferry.simulate.shared_links`).
- **Parameter groups**: a group has one update, in the place of its last backward. It is due when the group's last
  gradient is on the host. GFGB and DFGB hold a copy from the load to the backward, RELOAD during the forward and during
  the backward, RESIDENT always. While a group's copy is held, every layer of the group uses it and loads no other. The
  copy is freed when the last backward that reads it has ended.
- **Recomputation** (`remat: "full"`): the backward takes `recompute_s` longer, and by DHA also the extra time of the
  forward by DHA. The layer keeps `recompute_activation_bytes` instead of `activation_bytes`.
- **Programs**: optional keys of the profile's layers state facts beyond times. With `fused_backward`, forward and
  backward of the last layer are one program, and one copy serves both. Without `backward_reads` a backward needs no
  copy, unless it runs its forward again. Gradients with `gradient_rows` stay on the device. Without `has_gradient`
  there is no offload and no update. Without `has_backward` there is no backward either.
- **Several groups in a program** (`shares_program`): the layers of a program follow each other on the GPU. The first of
  them waits for what any of them needs. When the last of them has ended, their copies are free and their gradients may
  leave. RELOAD layers of a program take one slot together.
- **Values in host memory** (`save_bytes` and `fetch_bytes`): a save follows the last forward that reads its values. The
  second program after that forward waits for the save, so at most `CROSSING_SLOTS` programs' values are in flight. A
  fetch starts when the second program before its backward has ended. Saves share D2H with offloads, fetches share H2D
  with loads. They take the average time per byte of all offloads, or all loads, of the profile.
- **Chain of steps**: a forward that reads host memory, and a load for the forward, wait for the previous step's update
  of these parameters. A forward on a RESIDENT copy waits for its refresh. If there is no update, a load waits for the
  last use of the previous step's copy.

Memory is counted over these spans:

- a copy: from the start of its load to the end of its last use;
- activations: from the start of the forward to the end of the backward;
- a workspace and temporaries: while their program runs;
- a gradient on the device: from the start of the backward to the end of its offload;
- a gradient that never leaves: from the start of the backward to the end of its update;
- a subgroup's masters and state: from the start of their transfer up to the end of that down; its new compute copy:
  from the start of the update;
- a gradient on the host: from the start of the task that writes it to the end of its update.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxferry.holdings import (
    Holdings,
    as_updated,
    effective,
    gradient_flags,
    mode_codes,
    of_program,
    streamed,
    updated_on_device,
)
from jaxferry.late_updates import Forwards, LateUpdates
from jaxferry.modes import GradientPlace, Mode
from jaxferry.plan.records import Loads, Plan, UpdateOrder, Updates
from jaxferry.profiling.records import Profile, backward_variant
from jaxferry.room import CROSSING_SLOTS, NO_WAIT, UNLIMITED, Demand, demand, load_order, waits
from jaxferry.step_copies import Copies, Copy
from jaxferry.step_tasks import StepTasks
from jaxferry.streaming import StateStreams, as_kept, kept_gradients, slots_bytes
from jaxferry.tasks import Kind, Lane, Run, Schedule, Task, dispatch_order, leading_loads, repeat

__all__ = [
    "CROSSING_SLOTS",
    "Kind",
    "Lane",
    "Run",
    "Schedule",
    "StepSchedules",
    "Task",
    "dispatch_order",
    "leading_loads",
    "repeat",
    "schedule_chain",
    "schedule_step",
    "step_demand",
]


def schedule_step(profile: Profile, plan: Plan) -> Schedule:
    """The tasks of one step of a plan.

    Args:
      profile: the layers.
      plan: their modes.

    Raises:
      InputError: if the plan is for another profile.
    """
    return StepSchedules(profile, plan).within(plan.memory_bytes)


class StepSchedules:
    """The tasks of one step of a plan, for any `memory_bytes`. What does not depend on these is found once.

    Args:
      profile: the layers.
      plan: their modes; its `memory_bytes` do not count.

    Raises:
      InputError: if the plan is for another profile.
    """

    def __init__(self, profile: Profile, plan: Plan):
        plan.check_profile(profile)
        self.profile, self.plan, self.effective = profile, plan, effective(profile, plan)
        self.held, self.needs = _demand(profile, self.effective)
        self._known: dict[tuple[tuple[int, ...], int], Schedule] = {}

    def within(self, memory_bytes: int | None) -> Schedule:
        """The tasks if the plan has these `memory_bytes`."""
        room = self._room(memory_bytes or 0)
        limit = max(int(self.needs.natural[0]), memory_bytes or 0)
        key = room, limit if any(self.plan.updates_streamed) else 0
        if key not in self._known:
            self._known[key] = _StepBuilder(
                self.profile, self.effective, room, limit - self.needs.forward[:, 0]
            ).build()
        return self._known[key]

    def waits_for_room(self, memory_bytes: int) -> bool:
        """Whether some backward, or streamed update, is not where it would be with unlimited memory."""
        if self._room(memory_bytes) != self._room(UNLIMITED):
            return True
        if not any(self.plan.updates_streamed):
            return False
        return self.within(memory_bytes).tasks != self.within(UNLIMITED).tasks

    def _room(self, memory_bytes: int) -> tuple[int, ...]:
        """For each layer, the layer whose offload its backward waits for, or `NO_WAIT`."""
        return tuple(waits(self.held, self.needs, memory_bytes)[:, 0].tolist())


def schedule_chain(profile: Profile, plan: Plan, steps: int) -> Schedule:
    """The tasks of `steps` consecutive steps, with the waits between them."""
    return repeat(schedule_step(profile, plan), steps)


def step_demand(profile: Profile, plan: Plan) -> tuple[Holdings, Demand]:
    """The layers' copies, and each program's need on the device; arrays of one plan, see `jaxferry.room`."""
    return _demand(profile, effective(profile, plan))


def _demand(profile: Profile, plan: Plan) -> tuple[Holdings, Demand]:
    """Likewise for an effective plan."""
    bulk, after_all, through_gpu = plan.loads is Loads.BULK, plan.updates is Updates.AFTER_ALL, streamed(profile, plan)
    kept = kept_gradients(profile, through_gpu, after_all)
    own_bytes = slots_bytes(profile, through_gpu) + sum(kept.values())
    profile = as_kept(as_updated(profile, updated_on_device(profile, plan), after_all), kept)
    recomputes = np.array(plan.recomputes)[:, None]
    held = Holdings(profile, mode_codes(plan)[:, None], gradient_flags(plan)[:, None], recomputes)
    return held, demand(held, recomputes, bulk, after_all, bool(through_gpu)).beside(own_bytes)


def needed_bytes(profile: Profile, plan: Plan) -> int:
    """The least memory budget within which the plan's step runs, however long its transfers take."""
    return int(step_demand(profile, plan)[1].natural[0])


def _seconds_a_byte(transfers: Iterable[tuple[float, int]]) -> float:
    """The mean over all transfers, given as (seconds, bytes). A small layer's own rate would be mostly latency."""
    seconds, sizes = zip(*transfers, strict=True)
    return float(sum(seconds)) / sum(sizes) if sum(sizes) else 0.0


def save_seconds_a_byte(profile: Profile) -> float:
    """Seconds per byte from the device to host memory."""
    return _seconds_a_byte((layer.offload_s, layer.offload_bytes) for layer in profile.layers)


def fetch_seconds_a_byte(profile: Profile) -> float:
    """Seconds per byte from host memory to the device."""
    return _seconds_a_byte((layer.load_s, layer.param_bytes) for layer in profile.layers)


class _StepBuilder:
    """Emits the tasks of one step in dispatch order, from an effective plan.

    Args:
      profile: the layers.
      plan: the plan.
      room: for each layer, the layer whose offload its backward waits for, or `NO_WAIT`.
      left_bytes: by layer, what its forward leaves of device memory.
    """

    def __init__(self, profile: Profile, plan: Plan, room: Sequence[int], left_bytes: np.ndarray):
        self.profile, self.plan = profile, plan
        self.layers, self.modes, self.gradients = profile.layers, plan.modes, plan.gradients
        self.recomputes = [bool(again) for again in of_program(profile, np.array(plan.recomputes))]
        self.on_device, self.through_gpu = updated_on_device(profile, plan), streamed(profile, plan)
        self.room, self.left_bytes = room, left_bytes
        self.save_s_a_byte = profile.once(save_seconds_a_byte)
        self.fetch_s_a_byte = profile.once(fetch_seconds_a_byte)
        self.list = StepTasks(profile)
        self.copies = Copies(profile, plan, self.recomputes, self.list)
        self.saves_of_programs: list[tuple[int, ...]] = []
        self.fetched: dict[int, int] = {}
        self.last_program = -1
        self.forwards: dict[int, int] = {}
        self.streams = StateStreams(profile, self.list, self.fetch_s_a_byte, self.save_s_a_byte)
        self.arrivals: dict[int, int] = {}
        self.offloads: dict[int, int] = {}
        self.host_gradients: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self.refreshes: dict[int, int] = {}
        self.waits_for_update: list[tuple[int, int]] = []
        self.waits_for_refresh: list[tuple[int, int]] = []

    def build(self) -> Schedule:
        order = range(len(self.layers))
        if self.plan.loads is Loads.BULK:
            self.bulk_forwards()
        else:
            for members in self.profile.programs:
                self.forward(members, {layer: self.copies.for_forward(layer) for layer in members}, ())
        for layer in order:
            self.copies.between(layer, self.forwards[layer])
        num_forward_tasks = len(self.list.tasks)
        for members in reversed(self.profile.programs):
            self.backward(members[::-1])
        if self.plan.updates is Updates.AFTER_ALL:
            everything = self.last_arrivals()
            for layer in reversed(order):
                self.update_on_device(layer, everything)
                self.stream(layer, everything)
                self.update(layer, everything)
        for group in self.updates:
            self.refresh(group)
        self.list_late_updates(num_forward_tasks)
        self.updates |= self.streams.ends
        self.copies.free()
        self.wait_for_previous()
        groups = self.profile.groups
        resident_bytes = sum(self.layers[groups[group][0]].param_bytes for group in self.copies.resident)
        resident_bytes += sum(self.layers[groups[group][0]].state_bytes for group in self.on_device)
        by_need = self.plan.update_order is UpdateOrder.NEED
        return Schedule(tuple(self.list.tasks), resident_bytes, updates_by_need=by_need)

    def bulk_forwards(self) -> None:
        """Emits all loads in the order of updates, then the forwards, which wait for the last load."""
        own = {int(layer): self.copies.for_forward(int(layer)) for layer in load_order(self.profile, bulk=True)}
        barrier = tuple(range(len(self.list.tasks)))[-1:]
        for members in self.profile.programs:
            self.forward(members, {layer: own[layer] for layer in members}, barrier)

    def forward(self, members: Sequence[int], found: Mapping[int, Copy | None], barrier: tuple[int, ...]) -> None:
        """Emits the forward of a program's layers."""
        copies = {layer: copy for layer, copy in found.items() if copy is not None}
        loads = (copy.load for copy in copies.values())
        after, tasks = tuple(sorted({*self.saves_to_wait_for(), *barrier, *loads})), dict[int, int]()
        for layer in members:
            tasks[layer] = self.last_program = self.forward_of(layer, after)
            after = ()
        for layer in members:
            self.forwards[layer] = self.last_program
            if layer not in copies:
                by_dha = self.modes[layer] in (Mode.DHA, Mode.DFGB)
                waiting = self.waits_for_update if by_dha else self.waits_for_refresh
                waiting.append((tasks[members[0]], self.profile.group_of[layer]))
        self.copies.note_uses(copies, tasks, self.last_program)
        self.saves_of_programs.append(self.save(members[0], self.last_program))

    def forward_of(self, layer: int, after: tuple[int, ...]) -> int:
        """Emits the forward of one layer, and the parameterless compute that follows it."""
        profile, again = self.layers[layer], self.recomputes[layer]
        by_dha = self.modes[layer] in (Mode.DHA, Mode.DFGB)
        key = "forward_dha_s" if by_dha else "forward_s"
        task = self.list.emit(Kind.FORWARD, Lane.GPU, layer, (key, getattr(profile, key)), after)
        workspace_bytes = profile.forward_bytes(by_dha, again)
        self.list.add_bytes(task, start_bytes=profile.kept_bytes(again), workspace_bytes=workspace_bytes)
        if by_dha and profile.forward_read_s:
            self.list.set(task, read_s=profile.forward_read_s)
        if profile.inter_forward_s > 0:
            duration = ("inter_forward_s", profile.inter_forward_s)
            self.list.emit(Kind.INTER_FORWARD, Lane.GPU, layer, duration, (task,))
        return task

    def saves_to_wait_for(self) -> tuple[int, ...]:
        """The saves that the next program waits for before it may add values on the device."""
        return self.saves_of_programs[-CROSSING_SLOTS] if len(self.saves_of_programs) >= CROSSING_SLOTS else ()

    def save(self, layer: int, forward: int) -> tuple[int, ...]:
        """Emits the save of the values that this layer's forward is the last to read, if any."""
        num_bytes = self.layers[layer].save_bytes
        if num_bytes == 0:
            return ()
        duration = ("offload_s", num_bytes * self.save_s_a_byte)
        task = self.list.emit(Kind.SAVE, Lane.D2H, layer, duration, (forward,))
        self.list.add_bytes(task, end_bytes=num_bytes)
        return (task,)

    def fetch_for_next(self, layer: int) -> None:
        """Emits the fetch for the backward after this first layer of a program; it precedes the program in the list."""
        following = self.next_backward(layer)
        num_bytes = 0 if following is None else self.layers[following].fetch_bytes
        if following is None or num_bytes == 0:
            return
        duration = ("load_s", num_bytes * self.fetch_s_a_byte)
        self.fetched[following] = self.list.emit(Kind.FETCH, Lane.H2D, following, duration, (self.last_program,))
        self.list.add_bytes(self.fetched[following], start_bytes=num_bytes)

    def next_backward(self, layer: int) -> int | None:
        """The first layer of the program whose backward follows that of this first layer of a program."""
        below = (self.profile.program_ends[other][0] for other in reversed(range(layer)))
        return next((other for other in below if self.layers[other].has_backward), None)

    def backward(self, members: Sequence[int]) -> None:
        """Emits the backward of a program's layers, last one first."""
        if not self.layers[members[0]].has_backward:
            return
        self.streams.update_arrived()
        found = {layer: self.copies.for_backward(layer, self.forwards[layer]) for layer in members}
        copies = {layer: copy for layer, copy in found.items() if copy is not None}
        self.fetch_for_next(members[-1])
        after = self.backward_waits(members[-1], copies.values(), self.wait_for_room(members[0]))
        tasks: dict[int, int] = {}
        for layer in members:
            tasks[layer] = self.last_program = self.backward_of(layer, after)
            after = ()
        self.copies.note_uses(copies, tasks, self.last_program)
        following = self.next_backward(members[-1])
        if self.through_gpu and following is not None:  # its loads precede a transfer up that waits for this backward
            first, last = self.profile.program_ends[following]
            self.copies.find_ahead(reversed(range(first, last + 1)), self.forwards)
        for layer in members:
            self.gradient(layer, tasks[layer], self.last_program)

    def backward_of(self, layer: int, after: tuple[int, ...]) -> int:
        """Emits the backward of one layer, and the parameterless compute before it."""
        profile, again = self.layers[layer], self.recomputes[layer]
        if profile.inter_backward_s > 0:
            self.list.emit(Kind.INTER_BACKWARD, Lane.GPU, layer, ("inter_backward_s", profile.inter_backward_s))
        by_dha, grad_on_host = self.modes[layer] is Mode.DHA, self.gradients[layer] is GradientPlace.HOST
        variant = backward_variant(by_dha, grad_on_host, again)
        duration = (f"{variant}_s", profile.backward_for(by_dha, grad_on_host, again))
        task = self.list.emit(Kind.BACKWARD, Lane.GPU, layer, duration, after)
        workspace_bytes = profile.backward_bytes(by_dha, grad_on_host, again)
        self.list.add_bytes(task, end_bytes=profile.kept_bytes(again), workspace_bytes=workspace_bytes)
        if self.profile.shares_links:
            read_s, write_s = by_dha * profile.backward_reads_for(again), grad_on_host * profile.backward_write_s
            self.list.set(task, read_s=read_s, write_s=write_s)
        return task

    def wait_for_room(self, layer: int) -> tuple[int, ...]:
        """The offload that a backward waits for. Also lists the updates through the GPU that free its room."""
        last = self.room[layer]
        if last == NO_WAIT:
            return ()
        self.streams.finish(last)
        offloaded = [other for other in self.offloads if other >= last]
        return tuple(self.offloads[other] for other in offloaded[-1:])

    def backward_waits(self, layer: int, copies: Iterable[Copy], room: tuple[int, ...]) -> tuple[int, ...]:
        after = {*room, *(copy.load for copy in copies)}
        if layer in self.fetched:
            after.add(self.fetched[layer])
        if not self.layers[layer].fused_backward:
            after.update(self.saves_to_wait_for())
            self.saves_of_programs.append(())
        return tuple(sorted(after))

    def gradient(self, layer: int, backward: int, end: int) -> None:
        """Emits what follows for a layer's gradient once its program has ended."""
        profile, group = self.layers[layer], self.profile.group_of[layer]
        if group in self.on_device | self.through_gpu:
            self.list.add_bytes(backward, start_bytes=profile.device_gradient_bytes)
            self.arrivals[layer] = end
            if self.plan.updates is Updates.OVERLAPPED:
                self.update_on_device(layer, ())
                self.stream(layer, (end,))
        elif profile.has_gradient:
            grad_on_host = self.gradients[layer] is GradientPlace.HOST
            self.arrivals[layer] = end if grad_on_host else self.offload(layer, backward, end)
            if grad_on_host:
                self.list.add_bytes(backward, host_start_bytes=profile.grad_bytes)
                self.host_gradients[layer] = backward
            if self.plan.updates is Updates.OVERLAPPED:
                members = self.profile.groups[group]
                self.update(layer, tuple(self.arrivals[other] for other in members if other in self.arrivals))

    def last_arrivals(self) -> tuple[int, ...]:
        """The last offload, and the last backward whose gradient no offload takes; all others arrive earlier."""
        last = {self.list.tasks[task].kind: task for task in self.arrivals.values()}
        return tuple(sorted(last.values()))

    def offload(self, layer: int, backward: int, end: int) -> int:
        profile = self.layers[layer]
        self.list.add_bytes(backward, start_bytes=profile.device_gradient_bytes)
        task = self.list.emit(Kind.OFFLOAD, Lane.D2H, layer, ("offload_s", profile.offload_s), (end,))
        self.offloads[layer] = self.host_gradients[layer] = task
        self.list.add_bytes(task, end_bytes=profile.device_gradient_bytes, host_start_bytes=profile.offload_bytes)
        return task

    def update(self, layer: int, after: tuple[int, ...]) -> None:
        """Emits the group's update at its first layer, the last one in backward order."""
        group = self.profile.group_of[layer]
        members = self.profile.groups[group]
        elsewhere = group in self.on_device | self.through_gpu
        if elsewhere or layer != members[0] or not self.layers[layer].has_gradient:
            return
        duration = ("update_s", self.profile.group_update_s[group])
        task = self.list.emit(Kind.UPDATE, Lane.HOST, layer, duration, tuple(sorted(after)))
        arrived = [self.host_gradients[other] for other in members if other in self.arrivals]
        self.list.add_bytes(task, host_end_bytes=sum(self.list.tasks[each].host_start_bytes for each in arrived))
        self.updates[group] = task

    def update_on_device(self, layer: int, after: tuple[int, ...]) -> None:
        """Likewise for a group that is updated on the device, where its gradient stays."""
        group = self.profile.group_of[layer]
        members = self.profile.groups[group]
        if group not in self.on_device or layer != members[0]:
            return
        duration = ("update_gpu_s", self.layers[layer].update_gpu_s or 0.0)
        task = self.list.emit(Kind.UPDATE, Lane.GPU, layer, duration, after)
        self.list.add_bytes(task, end_bytes=sum(self.layers[other].device_gradient_bytes for other in members))
        self.updates[group] = self.refreshes[group] = self.last_program = task

    def stream(self, layer: int, after: tuple[int, ...]) -> None:
        """Likewise for a group whose update streams through the GPU."""
        group = self.profile.group_of[layer]
        if group in self.through_gpu and layer == self.profile.groups[group][0]:
            self.streams.add(group, after)

    def list_late_updates(self, num_forward_tasks: int) -> None:
        """Lists the updates through the GPU that run between the forwards of the next step."""
        if self.streams.left_groups:
            kept = kept_gradients(self.profile, self.through_gpu, self.plan.updates is Updates.AFTER_ALL)
            sizes = dict.fromkeys(self.through_gpu, 0)
            for layer, profile in enumerate(self.layers):
                if self.profile.group_of[layer] in sizes and layer not in kept:
                    sizes[self.profile.group_of[layer]] += profile.device_gradient_bytes
            reads: dict[int, list[int]] = {}
            for task, group in (*self.copies.first_loads, *self.waits_for_update):
                reads.setdefault(task, []).append(group)
            left_bytes = self.left_bytes - self.leaving_bytes()
            forwards = Forwards(num_forward_tasks, reads, self.updates, left_bytes.tolist())
            LateUpdates(self.profile, self.list, self.streams, sizes).list(forwards)
        for late, place in self.streams.late.items():
            self.list.set(late, before=len(self.list.tasks) + place)

    def leaving_bytes(self) -> np.ndarray:
        """By layer, the gradients whose transfers may still be under way in its next forward, (layers,)."""
        found, arrived = np.zeros(len(self.layers), dtype=np.int64), len(self.layers)
        for layer in range(len(self.layers)):
            members = self.profile.groups[self.profile.group_of[layer]]
            # Its forward waits for the update, and that for these offloads and all before them on the link.
            arrived = min([arrived, *(other for other in members if other in self.offloads)])
            found[layer] = sum(self.layers[x].device_gradient_bytes for x in self.offloads if x < arrived)
        return found

    def refresh(self, group: int) -> None:
        if group in self.copies.resident and group not in self.on_device:
            layer = self.profile.groups[group][0]
            duration = ("load_s", self.layers[layer].load_s)
            self.refreshes[group] = self.list.emit(Kind.REFRESH, Lane.H2D, layer, duration, (self.updates[group],))

    def wait_for_previous(self) -> None:
        """Adds the waits for the previous step: of loads and forwards by DHA, and of forwards on RESIDENT copies."""
        last_uses = {copy.load: copy.last_use for copy in self.copies.all}
        reads = (*self.copies.first_loads, *self.waits_for_update)
        for waiting, ends in ((reads, self.updates), (self.waits_for_refresh, self.refreshes)):
            for task, group in waiting:
                end = ends.get(group, last_uses.get(task))
                if end is not None:
                    known = self.list.tasks[task].after_previous
                    self.list.set(task, after_previous=tuple(sorted({*known, end})))
