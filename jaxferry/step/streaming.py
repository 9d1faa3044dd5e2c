"""Updates that stream through the GPU, in this step and in the next one.

Masters and optimizer state go up, are updated there, and go back down:

    H2D   state_up 0   state_up 1   state_up 2 ...
    GPU   backward     update 0     backward    update 1   update 2 ...
    D2H                             state_down 0           state_down 1 ...

A group's flat vectors are split evenly into **subgroups** of at most `SUBGROUP_BYTES` of masters and optimizer state,
so that a layer larger than the room streams too. At most `SLOTS` subgroups of all groups are on the device at once: the
next one goes up once the oldest is down again. 256 MiB take 5 to 10 ms of a PCIe 5 or 4 link, far longer than its
latency; four of them keep a link busy during a backward of 20 to 40 ms and take 1.2 GiB with their compute copies.
(Deep Optimizer States, as the second opportunity of Breaking the Memory Wall, interleaves subgroups likewise.) A plan
for less memory may have subgroups of an eighth of these bytes: `Subgroups.SMALL`.

A RESIDENT group's compute copy stays on the device: updates write the new one in its place, and only masters and state
go down. The group's next forward waits for its last update there. So a step may begin while subgroups of the previous
one still go down; each of its first transfers up waits for a slot.

The programs of the GPU run in the order of the list. So an update is listed before the first backward at whose start
its state would have arrived in a step alone. Those left after the last backward run between the forwards of the next
step (`jaxferry.step.streaming`), the group that these need first in front.

A step leaves some of them to the next one, between its loads and forwards:

    H2D   ... state_up 1 | load 1   state_up 5   load 2   state_up 6   load 3 ...
    GPU   ... backward 1 |  update 1   forward 1   update 5   forward 2   update 6   forward 3 ...
                         next step

A group's update need only be done before the group's next load or read, or the forward on its RESIDENT copy. So the
stream goes on while the next step's forwards run, the group that they need first in front. The places follow from the
tasks of the forwards, run once more after the step as if nothing but the stream and the host's updates, in the order of
need, delayed them:

- A transfer up precedes a load that still arrives before its forward could start, or that waits for its update anyway.
- An update precedes a forward if its state has arrived by the time at which that forward could start.
- A group's updates precede its own load or read, or that forward.
- A gradient stays until its update. Updates precede a forward that would not fit into device memory beside the
  gradients which are left.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import Subgroups
from jaxferry.step.tasks import Kind, Lane, StepTasks, Task

SUBGROUP_BYTES = 256 << 20
"""The most bytes of masters and optimizer state of a subgroup."""

SMALLER = 8
"""So many times smaller are those of `Subgroups.SMALL`."""

SLOTS = 4
"""The number of subgroups on the device at once."""


def num_subgroups(layer: LayerProfile, size: Subgroups = Subgroups.LARGE) -> int:
    """The number of subgroups of a layer's parameter group."""
    return num_subgroups_of(layer.state_bytes, size)


def num_subgroups_of(state_bytes: int, size: Subgroups = Subgroups.LARGE) -> int:
    """The number of subgroups for masters and optimizer state of so many bytes."""
    most_bytes = SUBGROUP_BYTES // SMALLER if size is Subgroups.SMALL else SUBGROUP_BYTES
    return max(1, -(-state_bytes // most_bytes))


def part_bytes(num_bytes: int, subgroup: int, num_subgroups: int) -> int:
    """A subgroup's share of bytes that are split evenly."""
    return num_bytes * (subgroup + 1) // num_subgroups - num_bytes * subgroup // num_subgroups


def slot_bytes(layer: LayerProfile, copy_stays: bool, size: Subgroups = Subgroups.LARGE) -> int:
    """Device memory of a subgroup of a layer's group, with its new compute copy unless that replaces one there."""
    number = num_subgroups(layer, size)
    return -(-layer.state_bytes // number) + (0 if copy_stays else -(-layer.param_bytes // number))


def slots_bytes(
    profile: Profile, groups: Collection[int], staying: Collection[int] = (), size: Subgroups = Subgroups.LARGE
) -> int:
    """Device memory of as many subgroups of these groups as are there at once: the largest ones.

    Args:
      profile: the layers.
      groups: the groups.
      staying: those whose compute copy stays on the device.
      size: that of the subgroups.
    """
    sizes: list[int] = []
    for group in groups:
        layer = profile.layers[profile.groups[group][0]]
        sizes += [slot_bytes(layer, group in staying, size)] * min(num_subgroups(layer, size), SLOTS)
    return sum(sorted(sizes)[-SLOTS:])


def kept_gradients(profile: Profile, groups: Collection[int], after_all: bool) -> dict[int, int]:
    """Bytes of gradients on the device that cannot go before the group's last backward, by layer.

    If updates wait for all gradients, all gradients of these groups stay.
    """
    kept = (layer for group in groups for layer in profile.groups[group][0 if after_all else 1 :])
    return {layer: profile.layers[layer].device_gradient_bytes for layer in kept}


@dataclasses.dataclass(slots=True)
class _Subgroup:
    """Subgroup `index` of `count` of a group; `after`: the tasks that its upload waits for; `up`: that upload."""

    group: int
    index: int
    count: int
    after: tuple[int, ...]
    up: int = -1

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.count


class StateStreams:
    """Lists the tasks of updates that stream, in the order in which their groups are added.

    Args:
      profile: the layers.
      tasks: the list.
      load_s_a_byte, offload_s_a_byte: speeds of the links, for layers that state no times of their own.
      staying: the groups whose compute copy stays on the device.
      size: that of the subgroups.

    Attributes:
      ends: for each group whose last update is listed, what its next read waits for: the transfer that brings it down,
        or the update itself if its compute copy stays.
      late: tasks that run in the next step, each with the index of the task there before which it runs.
    """

    def __init__(
        self,
        profile: Profile,
        tasks: StepTasks,
        load_s_a_byte: float,
        offload_s_a_byte: float,
        staying: Collection[int] = (),
        size: Subgroups = Subgroups.LARGE,
    ):
        self.profile, self.tasks, self._has_times = profile, tasks, profile.has_times
        self.load_s_a_byte, self.offload_s_a_byte, self.staying = load_s_a_byte, offload_s_a_byte, staying
        self._size = size
        self.ends: dict[int, int] = {}
        self._waiting: collections.deque[_Subgroup] = collections.deque()
        self._up: collections.deque[_Subgroup] = collections.deque()
        self._left: dict[int, None] = {}
        self._downs: list[int] = []
        self._ups: list[int] = []
        self.late: dict[int, int] = {}
        self._place: int | None = None

    def add(self, group: int, after: tuple[int, ...]) -> None:
        """Adds a group whose upload may start after these tasks."""
        count = num_subgroups(self._layer(group), self._size)
        self._waiting.extend([_Subgroup(group, index, count, after) for index in range(count)])
        self._left[group] = None
        self.fill_slots()

    def update_arrived(self, until_s: float = 0.0) -> None:
        """Lists the updates whose state has arrived by the time at which the GPU is free, or by a later one.

        Where no times are known, the state that went up last is taken to be on its way.
        """
        if not self._has_times:
            while len(self._up) > 1:
                self._update()
            return
        while self._up and self.tasks.ends_s[self._up[0].up] <= max(self.tasks.free_s[Lane.GPU], until_s):
            self._update()

    def finish(self, down_to: int = 0) -> None:
        """Lists all updates of groups whose last backward is that of layer `down_to` or of a later layer."""
        for group in [each for each in self._left if self.profile.groups[each][0] >= down_to]:
            self.finish_group(group)

    def begin_late(self) -> None:
        """All backwards are listed: what is left runs in the next step, first what its forwards need first."""
        self._waiting = collections.deque(
            sorted(self._waiting, key=lambda each: (self.profile.groups[each.group], each.index))
        )
        self._left = {each.group: None for each in (*self._up, *self._waiting) if each.is_last}
        self._place = 0

    def run_before(self, place: int) -> None:
        """What is listed from now on runs before this task of the next step."""
        self._place = place

    def finish_group(self, group: int) -> None:
        """Lists all updates up to the last one of a group."""
        while group in self._left:
            self._update()

    @property
    def left_groups(self) -> Collection[int]:
        """The groups whose last update is not listed yet, in the order of their updates."""
        return self._left.keys()

    @property
    def next_up_s(self) -> float:
        """The time of the next transfer up."""
        return self._up_s(self._waiting[0]) if self._waiting else 0.0

    def fill_slots(self, may_start: Callable[[], bool] = lambda: True) -> None:
        """Lists transfers up while there are slots and one more may start."""
        while self._waiting and len(self._ups) < len(self._downs) + SLOTS and may_start():
            each, number = self._waiting.popleft(), len(self._ups)
            slot = self._downs[number - SLOTS : number - SLOTS + 1] if number >= SLOTS else []
            layer = self._layer(each.group)
            waits = tuple(sorted({*each.after, *slot}))
            task = self._emit(Kind.STATE_UP, Lane.H2D, each, ("state_up_s", self._up_s(each) * each.count), waits)
            self.tasks[task].start_bytes += part_bytes(layer.state_bytes, each.index, each.count)
            each.up = task
            self._up.append(each)
            self._ups.append(task)

    def waits_for_previous(self) -> list[tuple[int, int]]:
        """Transfers up, each with the transfer down of the previous step that frees its slot.

        All others follow that one on the link, so masters and state are in host memory too. If no compute copy stays,
        forwards have waited for all of these transfers.
        """
        return list(zip(self._ups[:SLOTS], self._downs[-SLOTS:], strict=True)) if self.staying else []

    def _up_s(self, each: _Subgroup) -> float:
        layer = self._layer(each.group)
        seconds = layer.state_bytes * self.load_s_a_byte if layer.state_up_s is None else layer.state_up_s
        return seconds / each.count

    def _update(self) -> None:
        if not self._up:
            self.fill_slots()
        each = self._up.popleft()
        layer = self._layer(each.group)
        stays = each.group in self.staying
        copy_bytes = 0 if stays else part_bytes(layer.param_bytes, each.index, each.count)
        update = self._emit(Kind.UPDATE, Lane.GPU, each, ("update_streamed_s", layer.streamed_update_s), (each.up,))
        self.tasks[update].start_bytes += copy_bytes
        if each.is_last:
            members = self.profile.groups[each.group]
            gradients = sum(self.profile.layers[member].device_gradient_bytes for member in members)
            self.tasks[update].end_bytes += gradients
        seconds = layer.state_down_for(stays)
        if seconds is None:
            seconds = (layer.state_bytes + layer.param_bytes * (not stays)) * self.offload_s_a_byte
        down = self._emit(Kind.STATE_DOWN, Lane.D2H, each, ("state_down_s", seconds), (update,))
        state_bytes = part_bytes(layer.state_bytes, each.index, each.count)
        self.tasks[down].end_bytes += state_bytes + copy_bytes
        self._downs.append(down)
        if each.is_last:
            del self._left[each.group]
            self.ends[each.group] = update if stays else down
        if self._place is None:
            self.fill_slots()

    def _emit(
        self, kind: Kind, lane: Lane, each: _Subgroup, duration: tuple[str, float], after: tuple[int, ...]
    ) -> int:
        """Appends a subgroup's task; `duration` is that of the whole group."""
        key, seconds = duration
        layer = self.profile.groups[each.group][0]
        task = self.tasks.emit(kind, lane, layer, (key, seconds / each.count), after)
        if each.count > 1:
            name = f"{self.tasks[task].name} {each.index + 1}/{each.count}"
            self.tasks[task].name = name
            self.tasks[task].subgroup = each.index
            self.tasks[task].num_subgroups = each.count
        if self._place is not None:
            self.late[task] = self._place
        return task

    def _layer(self, group: int) -> LayerProfile:
        return self.profile.layers[self.profile.groups[group][0]]


@dataclasses.dataclass(frozen=True)
class Forwards:
    """The tasks of a step up to its last forward, as the next step has them.

    Attributes:
      num_tasks: how many these are; they lead the list.
      reads: the tasks that wait for the previous step's updates of groups, with these groups.
      updates: by group, its update on the host or on the device.
      left_bytes: by layer, what its forward leaves of device memory for gradients of the previous step.
    """

    num_tasks: int
    reads: Mapping[int, Sequence[int]]
    updates: Mapping[int, int]
    left_bytes: Sequence[int]


class LateUpdates:
    """Lists what a step leaves to the next one.

    Args:
      profile: the layers.
      tasks: all other tasks of the step.
      streams: what is left.
      gradient_bytes: by group, the gradients that stay on the device until the group's update.
    """

    def __init__(
        self, profile: Profile, tasks: StepTasks, streams: StateStreams, gradient_bytes: Mapping[int, int]
    ) -> None:
        self.profile, self.tasks, self.streams, self.gradient_bytes = profile, tasks, streams, gradient_bytes
        self.ends_s: dict[int, float] = {}
        self.ready_s: dict[int, float] = {}

    def list(self, forwards: Forwards) -> None:
        """Lists all tasks that are left, with their places."""
        self.streams.begin_late()
        on_host = _ends_by_need_s(self.tasks)
        for index, groups in forwards.reads.items():
            updates = {forwards.updates.get(group) for group in groups}
            self.ready_s[index] = max((on_host[each] for each in updates if each in on_host), default=0.0)
        following = self.tasks.tasks[: forwards.num_tasks]
        users = {task.copy: index for index, task in reversed([*enumerate(following)]) if task.copy is not None}
        for index, task in enumerate(following):
            if not self.streams.left_groups:
                return
            self.streams.run_before(index)
            for group in forwards.reads.get(index, ()):
                self.streams.finish_group(group)
                if group in self.streams.ends:
                    self.ready_s[index] = max(self.ready_s[index], self.tasks.ends_s[self.streams.ends[group]])
            num_listed = -1
            while num_listed < len(self.tasks.tasks):  # an update frees a slot, in time for another one or not
                num_listed = len(self.tasks.tasks)
                if task.lane is Lane.GPU:
                    self._before_program(index, task, forwards.left_bytes)
                self._go_up(following, index, users)
            self._run(index, task)
        self.streams.run_before(forwards.num_tasks)
        self.streams.finish()

    def _before_program(self, index: int, task: Task, left_bytes: Sequence[int]) -> None:
        """Lists the updates that run before a program of the next step."""
        if task.kind is Kind.FORWARD:
            left = [*self.streams.left_groups]
            sizes = [self.gradient_bytes.get(group, 0) for group in left]
            while left and sum(sizes) > left_bytes[task.segment]:
                self.streams.finish_group(left.pop(0))
                sizes.pop(0)
        self.streams.update_arrived(self._could_start_s(index, task))

    def _go_up(self, following: Sequence[Task], index: int, users: Mapping[int, int]) -> None:
        """Lists transfers up as long as the next load arrives in time."""
        load = next((i for i in range(index, len(following)) if following[i].lane is Lane.H2D), None)
        if load is None or load not in users:
            self.streams.fill_slots()
            return
        programs_s = sum(task.duration_s for task in following[index : users[load]] if task.lane is Lane.GPU)
        free_s, load_s, ready_s = self.tasks.free_s, following[load].duration_s, self.ready_s.get(load, 0.0)
        latest_s = max(free_s[Lane.GPU] + programs_s - load_s, ready_s)
        self.streams.fill_slots(lambda: free_s[Lane.H2D] + self.streams.next_up_s <= latest_s)
        if not programs_s:  # the GPU waits for this load
            self.streams.update_arrived(max(free_s[Lane.H2D], ready_s) + load_s)

    def _could_start_s(self, index: int, task: Task) -> float:
        waits_s = (self.ends_s[other] for other in task.after)
        return max([self.tasks.free_s[task.lane], self.ready_s.get(index, 0.0), *waits_s])

    def _run(self, index: int, task: Task) -> None:
        self.ends_s[index] = self.tasks.free_s[task.lane] = self._could_start_s(index, task) + task.duration_s


def _ends_by_need_s(tasks: StepTasks) -> dict[int, float]:
    """When the host's updates of a step alone end if those that are needed first go first."""
    on_host = [index for index, task in enumerate(tasks.tasks) if task.lane is Lane.HOST]
    due_s = {index: max((tasks.ends_s[other] for other in tasks.tasks[index].after), default=0.0) for index in on_host}
    by_time, could_start = sorted(on_host, key=due_s.__getitem__, reverse=True), list[tuple[tuple[int, int], int]]()
    ends_s, now_s = dict[int, float](), 0.0
    while by_time or could_start:
        if not could_start:
            now_s = max(now_s, due_s[by_time[-1]])
        while by_time and due_s[by_time[-1]] <= now_s:
            heapq.heappush(could_start, (tasks.tasks[by_time[-1]].need, by_time.pop()))
        index = heapq.heappop(could_start)[1]
        ends_s[index] = now_s = now_s + tasks.tasks[index].duration_s
    return ends_s
