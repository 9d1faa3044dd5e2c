"""Lists the tasks of one step by the rules of `jaxferry.step.schedule`."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxferry.costs import Profile, backward_variant
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step.copies import Copies, Copy
from jaxferry.step.effective_plan import EffectivePlan, load_order
from jaxferry.step.gradient_room import CROSSING_SLOTS, NO_WAIT, Crossings
from jaxferry.step.plans import UpdateOrder
from jaxferry.step.streaming import Forwards, LateUpdates, StateStreams
from jaxferry.step.tasks import Kind, Lane, Schedule, StepTasks


def _seconds_a_byte(transfers: Iterable[tuple[float, int]]) -> float:
    """The mean over all transfers, given as (seconds, bytes). A small layer's own rate would be mostly latency."""
    seconds, sizes = (sum(each) for each in zip(*transfers, strict=True))
    return float(seconds) / sizes if sizes else 0.0


def save_seconds_a_byte(profile: Profile) -> float:
    """Seconds per byte from the device to host memory."""
    return _seconds_a_byte((layer.offload_s, layer.offload_bytes) for layer in profile.layers)


def fetch_seconds_a_byte(profile: Profile) -> float:
    """Seconds per byte from host memory to the device."""
    return _seconds_a_byte((layer.load_s, layer.param_bytes) for layer in profile.layers)


DISK_SLOTS = 3
"""Groups whose masters and optimizer state may be in host memory at one time, of those in a scratch file."""


class StatesOnDisk:
    """Reads and writes of masters and optimizer state in a scratch file, for updates in backward order.

    The first reads begin with the step. Each further one waits for the write that leaves its slot.
    """

    def __init__(self, effective: EffectivePlan, tasks: StepTasks) -> None:
        profile, elsewhere = effective.profile, effective.on_device | effective.through_gpu
        found = ((group, members[0]) for group, members in enumerate(profile.groups) if group not in elsewhere)
        on_disk = [each for each in found if profile.layers[each[1]].state_read_s is not None]
        self._layers, self._list, self._first = profile.layers, tasks, dict(on_disk)
        in_time = sorted(self._first.keys() - set(effective.deferred), key=lambda group: -self._first[group])
        self._left = [*in_time, *(group for group in effective.deferred if group in self._first)]
        self._reads: dict[int, int] = {}

    def begin(self) -> None:
        """Emits the reads that wait for no slot of this step."""
        for _ in range(DISK_SLOTS):
            self._read_next(())

    def read(self, group: int) -> tuple[int, ...]:
        """The read that a group's update waits for."""
        return (self._reads[group],) if group in self._first else ()

    def write(self, group: int, update: int) -> None:
        """Emits what follows a group's update."""
        if group in self._first:
            layer = self._first[group]
            duration = ("state_write_s", self._layers[layer].state_write_s or 0.0)
            self._read_next((self._list.emit(Kind.STATE_WRITE, Lane.DISK, layer, duration, (update,)),))

    def _read_next(self, after: tuple[int, ...]) -> None:
        if self._left:
            group = self._left.pop(0)
            layer = self._first[group]
            duration = ("state_read_s", self._layers[layer].state_read_s or 0.0)
            self._reads[group] = self._list.emit(Kind.STATE_READ, Lane.DISK, layer, duration, after)


class StepBuilder:
    """Emits the tasks of one step in dispatch order.

    Args:
      effective: the plan.
      room: for each layer, the layer whose offload its backward waits for, or `NO_WAIT`.
      left_bytes: by layer, what its forward leaves of device memory.
    """

    def __init__(self, effective: EffectivePlan, room: Sequence[int], left_bytes: np.ndarray):
        self.effective, self.profile, plan = effective, effective.profile, effective.plan
        profile = self.profile
        self.layers, self.modes, self.gradients = profile.layers, plan.modes, plan.gradients
        self.remats, self.after_all = effective.remats, effective.after_all
        self.on_device, self.through_gpu = effective.on_device, effective.through_gpu
        self.not_on_host = self.on_device | self.through_gpu
        self.room, self.left_bytes = room, left_bytes
        chosen = effective.leaving
        self.crossings = profile.once(Crossings.without_choice) if chosen is None else Crossings.of(profile, chosen)
        self.save_s_a_byte = profile.once(save_seconds_a_byte)
        self.fetch_s_a_byte = profile.once(fetch_seconds_a_byte)
        self.list = StepTasks(profile)
        self.copies = Copies(effective, self.list)
        self.saves_of_programs: list[tuple[int, ...]] = []
        self.saved: dict[int, tuple[int, ...]] = {}
        self.fetched: dict[int, int] = {}
        self.last_program = -1
        self.forwards: dict[int, int] = {}
        speeds = self.fetch_s_a_byte, self.save_s_a_byte
        self.streams = StateStreams(profile, self.list, *speeds, effective.staying, plan.subgroups)
        self.arrivals: dict[int, int] = {}
        self.offloads: dict[int, int] = {}
        self.host_gradients: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self.waits_of_deferred: dict[int, tuple[int, ...]] = {}
        self.refreshes: dict[int, int] = {}
        self.updates_of_programs: list[tuple[int, ...]] = []
        self.disk = StatesOnDisk(effective, self.list)
        self.waits_for_update: list[tuple[int, int]] = []
        self.waits_for_refresh: list[tuple[int, int]] = []

    def build(self) -> Schedule:
        """Emits all tasks."""
        order = range(len(self.layers))
        self.disk.begin()
        if self.effective.bulk:
            self.bulk_forwards()
        else:
            for members in self.profile.programs:
                self.forward(members, {layer: self.copies.for_forward(layer) for layer in members}, ())
        for layer in order:
            self.copies.between(layer, self.forwards[layer])
        num_forward_tasks = len(self.list.tasks)
        for members in reversed(self.profile.programs):
            self.backward(members[::-1])
        if self.after_all:
            everything = self.last_arrivals()
            for layer in reversed(order):
                self.update_on_device(layer, everything)
                self.stream(layer, everything)
                self.update(layer, everything)
        for group in self.effective.deferred:
            self.update_of(group, self.waits_of_deferred[group])
        for group in self.updates:
            self.refresh(group)
        self.list_late_updates(num_forward_tasks)
        self.updates |= self.streams.ends
        self.refreshes |= {group: self.streams.ends[group] for group in self.streams.staying}
        self.copies.free()
        self.wait_for_previous()
        groups = self.profile.groups
        resident_bytes = sum(self.layers[groups[group][0]].param_bytes for group in self.copies.resident)
        resident_bytes += sum(self.layers[groups[group][0]].state_bytes for group in self.on_device)
        by_need = self.effective.plan.update_order is UpdateOrder.NEED
        return Schedule(tuple(self.list.tasks), resident_bytes, 1, by_need, self.profile.contention)

    def bulk_forwards(self) -> None:
        """Emits all loads in the order of updates, then the forwards, which wait for the last load."""
        own = {layer: self.copies.for_forward(layer) for layer in load_order(self.profile, bulk=True)}
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
        if members[0] in self.crossings.saving:
            self.saves_of_programs.append(self.save(members[0], self.last_program))
            if self.crossings.awaits_saves:
                self.saved[members[0]] = self.saves_of_programs[-1]

    def forward_of(self, layer: int, after: tuple[int, ...]) -> int:
        """Emits the forward of one layer, and the parameterless compute that follows it."""
        profile, remat = self.layers[layer], self.remats[layer]
        by_dha = self.modes[layer] in (Mode.DHA, Mode.DFGB)
        key = "forward_dha_s" if by_dha else "forward_s"
        task = self.list.emit(Kind.FORWARD, Lane.GPU, layer, (key, getattr(profile, key)), after)
        workspace_bytes = profile.forward_bytes(by_dha, remat)
        self.list[task].start_bytes += profile.kept_bytes(remat)
        self.list[task].workspace_bytes += workspace_bytes
        if by_dha and profile.forward_read_s:
            self.list[task].read_s = profile.forward_read_s
        if profile.inter_forward_s > 0:
            duration = ("inter_forward_s", profile.inter_forward_s)
            self.list.emit(Kind.INTER_FORWARD, Lane.GPU, layer, duration, (task,))
        return task

    def saves_to_wait_for(self) -> tuple[int, ...]:
        """The saves that the next program waits for before it may add values on the device."""
        return self.saves_of_programs[-CROSSING_SLOTS] if len(self.saves_of_programs) >= CROSSING_SLOTS else ()

    def save(self, layer: int, forward: int) -> tuple[int, ...]:
        """Emits the save of the values that this layer's forward is the last to read, if any."""
        num_bytes = int(self.crossings.saves[layer])
        if num_bytes == 0:
            return ()
        duration = ("offload_s", num_bytes * self.save_s_a_byte)
        task = self.list.emit(Kind.SAVE, Lane.D2H, layer, duration, (forward,))
        self.list[task].end_bytes += num_bytes
        return (task,)

    def returning(self, layer: int) -> int | None:
        """The program whose values may return beside the backward of another one; both by their first layers."""
        found = self.crossings.fetched_at.get(layer)
        return None if found is None or not self.crossings.fetches[found] else found

    def fetch(self, layer: int, before: int) -> None:
        """Emits the fetch of the values of a program with this first layer, which waits for the task `before`."""
        num_bytes = int(self.crossings.fetches[layer])
        own = tuple(sorted({before, *self.saved.get(layer, ())}))
        task = self.list.emit(Kind.FETCH, Lane.H2D, layer, ("load_s", num_bytes * self.fetch_s_a_byte), own)
        self.list[task].start_bytes += num_bytes
        self.fetched[layer] = task

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
        before, returning = self.last_program, self.returning(members[-1])
        if returning is not None and not self.crossings.awaits_saves:  # for the next backward, as its loads are
            self.fetch(returning, before)
            returning = None
        room = (*self.wait_for_room(members[0]), *self.wait_for_buffers())
        after = self.backward_waits(members[-1], copies.values(), room)
        tasks: dict[int, int] = {}
        for layer in members:
            tasks[layer] = self.last_program = self.backward_of(layer, after)
            after = ()
        self.copies.note_uses(copies, tasks, self.last_program)
        following = self.next_backward(members[-1])
        if following is not None and (self.through_gpu or returning is not None):
            # Its loads precede a transfer up that waits for this backward, and what returns for one after it.
            first, last = self.profile.program_ends[following]
            self.copies.find_ahead(reversed(range(first, last + 1)), self.forwards)
        if returning is not None:
            self.fetch(returning, before)
        end = self.last_program
        for layer in members:
            self.gradient(layer, tasks[layer], end)
        if not self.after_all:
            for layer in members:
                self.update_on_device(layer, ())
                self.stream(layer, (end,))
        ended = (self.updates.get(self.profile.group_of[layer]) for layer in members)
        on_host = (task for task in ended if task is not None and self.list[task].lane is Lane.HOST)
        self.updates_of_programs.append(tuple(on_host))

    def backward_of(self, layer: int, after: tuple[int, ...]) -> int:
        """Emits the backward of one layer, and the parameterless compute before it."""
        profile, remat = self.layers[layer], self.remats[layer]
        if profile.inter_backward_s > 0:
            self.list.emit(Kind.INTER_BACKWARD, Lane.GPU, layer, ("inter_backward_s", profile.inter_backward_s))
        by_dha, grad_on_host = self.modes[layer] is Mode.DHA, self.gradients[layer] is GradientPlace.HOST
        variant = backward_variant(by_dha, grad_on_host, remat)
        duration = (f"{variant}_s", profile.backward_for(by_dha, grad_on_host, remat))
        task = self.list.emit(Kind.BACKWARD, Lane.GPU, layer, duration, after)
        workspace_bytes = profile.backward_bytes(by_dha, grad_on_host, remat)
        self.list[task].end_bytes += profile.kept_bytes(remat)
        self.list[task].workspace_bytes += workspace_bytes
        if self.profile.shares_links:
            read_s, write_s = by_dha * profile.backward_reads_for(remat), grad_on_host * profile.backward_write_s
            self.list[task].read_s = read_s
            self.list[task].write_s = write_s
        return task

    def wait_for_room(self, layer: int) -> tuple[int, ...]:
        """The offload that a backward waits for. Also lists the updates through the GPU that free its room."""
        last = self.room[layer]
        if last == NO_WAIT:
            return ()
        self.streams.finish(last)
        return tuple(itertools.islice((self.offloads[x] for x in reversed(self.offloads) if x >= last), 1))

    def wait_for_buffers(self) -> tuple[int, ...]:
        """The updates that have used the gradients whose host memory those of the next program take."""
        num, known = self.effective.plan.gradient_buffers, self.updates_of_programs
        return () if num is None or num > len(known) else known[-num]

    def backward_waits(self, layer: int, copies: Iterable[Copy], room: tuple[int, ...]) -> tuple[int, ...]:
        """What the backward of a program with this first layer waits for."""
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
        if group in self.not_on_host:
            self.list[backward].start_bytes += profile.device_gradient_bytes
            self.arrivals[layer] = end
        elif profile.has_gradient:
            grad_on_host = self.gradients[layer] is GradientPlace.HOST
            self.arrivals[layer] = end if grad_on_host else self.offload(layer, backward, end)
            if grad_on_host:
                self.list[backward].host_start_bytes += profile.grad_bytes
                self.host_gradients[layer] = backward
            if not self.after_all:
                members = self.profile.groups[group]
                self.update(layer, tuple(self.arrivals[other] for other in members if other in self.arrivals))

    def last_arrivals(self) -> tuple[int, ...]:
        """The last offload, and the last backward whose gradient no offload takes; all others arrive earlier."""
        last = {self.list[task].kind: task for task in self.arrivals.values()}
        return tuple(sorted(last.values()))

    def offload(self, layer: int, backward: int, end: int) -> int:
        """Emits the transfer of a layer's gradient once its program has ended."""
        profile = self.layers[layer]
        self.list[backward].start_bytes += profile.device_gradient_bytes
        task = self.list.emit(Kind.OFFLOAD, Lane.D2H, layer, ("offload_s", profile.offload_s), (end,))
        self.offloads[layer] = self.host_gradients[layer] = task
        self.list[task].end_bytes += profile.device_gradient_bytes
        self.list[task].host_start_bytes += profile.offload_bytes
        return task

    def update(self, layer: int, after: tuple[int, ...]) -> None:
        """Emits the group's update at its first layer, the last one in backward order."""
        group = self.profile.group_of[layer]
        members = self.profile.groups[group]
        if group in self.not_on_host or layer != members[0] or not self.layers[layer].has_gradient:
            return
        if group in self.effective.deferred:
            self.waits_of_deferred[group] = after
        else:
            self.update_of(group, after)

    def update_of(self, group: int, after: tuple[int, ...]) -> None:
        """Emits a group's update by the host."""
        members, duration = self.profile.groups[group], ("update_s", self.profile.group_update_s[group])
        layer = members[0]
        task = self.list.emit(Kind.UPDATE, Lane.HOST, layer, duration, tuple(sorted({*after, *self.disk.read(group)})))
        self.disk.write(group, task)
        arrived = [self.host_gradients[other] for other in members if other in self.arrivals]
        self.list[task].host_end_bytes += sum(self.list[each].host_start_bytes for each in arrived)
        self.updates[group] = task

    def update_on_device(self, layer: int, after: tuple[int, ...]) -> None:
        """Likewise for a group that is updated on the device, where its gradient stays."""
        group = self.profile.group_of[layer]
        members = self.profile.groups[group]
        if group not in self.on_device or layer != members[0]:
            return
        duration = ("update_gpu_s", self.layers[layer].update_gpu_s or 0.0)
        task = self.list.emit(Kind.UPDATE, Lane.GPU, layer, duration, after)
        self.list[task].end_bytes += sum(self.layers[other].device_gradient_bytes for other in members)
        self.updates[group] = self.refreshes[group] = self.last_program = task

    def stream(self, layer: int, after: tuple[int, ...]) -> None:
        """Likewise for a group whose update streams through the GPU."""
        group = self.profile.group_of[layer]
        if group in self.through_gpu and layer == self.profile.groups[group][0]:
            self.streams.add(group, after)

    def list_late_updates(self, num_forward_tasks: int) -> None:
        """Lists the updates through the GPU that run between the forwards of the next step."""
        if self.streams.left_groups:
            sizes = dict.fromkeys(self.through_gpu, 0)
            for layer, profile in enumerate(self.layers):
                if self.profile.group_of[layer] in sizes and layer not in self.effective.kept:
                    sizes[self.profile.group_of[layer]] += profile.device_gradient_bytes
            reads: dict[int, list[int]] = {}
            of_copies = (each for each in self.waits_for_refresh if each[1] in self.streams.staying)
            for task, group in (*self.copies.first_loads, *self.waits_for_update, *of_copies):
                reads.setdefault(task, []).append(group)
            left_bytes = self.left_bytes - self.leaving_bytes()
            forwards = Forwards(num_forward_tasks, reads, self.updates, left_bytes.tolist())
            LateUpdates(self.profile, self.list, self.streams, sizes).list(forwards)
        for late, place in self.streams.late.items():
            self.list[late].before = len(self.list.tasks) + place

    def leaving_bytes(self) -> np.ndarray:
        """By layer, the gradients whose transfers may still be under way in its next forward, (layers,)."""
        found, arrived = np.zeros(len(self.layers), dtype=np.int64), len(self.layers)
        sizes = [layer.device_gradient_bytes * (x in self.offloads) for x, layer in enumerate(self.layers)]
        before = [0, *itertools.accumulate(sizes)]
        for layer in range(len(self.layers)):
            members = self.profile.groups[self.profile.group_of[layer]]
            # Its forward waits for the update, and that for these offloads and all before them on the link.
            arrived = min([arrived, *(other for other in members if other in self.offloads)])
            found[layer] = before[arrived]
        return found

    def refresh(self, group: int) -> None:
        """Emits the load of a RESIDENT copy after its update."""
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
                    known = self.list[task].after_previous
                    self.list[task].after_previous = tuple(sorted({*known, end}))
        for up, down in self.streams.waits_for_previous():
            self.list[up].after_previous = (down,)
