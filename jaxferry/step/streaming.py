"""Updates that stream through the GPU: masters and optimizer state go up, are updated there, and go back down.

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
step (`jaxferry.step.late_updates`), the group that these need first in front.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection

from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.modes import Subgroups
from jaxferry.step.step_tasks import StepTasks
from jaxferry.step.tasks import Kind, Lane

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


def as_kept(profile: Profile, kept: Collection[int]) -> Profile:
    """The profile for a count of the gradients that leave: those of these layers are counted elsewhere."""
    layers = tuple(
        dataclasses.replace(layer, grad_bytes=0, row_gradient_bytes=0) if index in kept else layer
        for index, layer in enumerate(profile.layers)
    )
    return dataclasses.replace(profile, layers=layers) if kept else profile


@dataclasses.dataclass(frozen=True)
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
        self._downs: list[int] = []
        self._ups: list[int] = []
        self.late: dict[int, int] = {}
        self._place: int | None = None

    def add(self, group: int, after: tuple[int, ...]) -> None:
        """Adds a group whose upload may start after these tasks."""
        count = num_subgroups(self._layer(group), self._size)
        self._waiting.extend(_Subgroup(group, index, count, after) for index in range(count))
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
        first = [self.profile.groups[each.group][0] for each in (*self._up, *self._waiting)]
        for _ in range(max((number for number, layer in enumerate(first, 1) if layer >= down_to), default=0)):
            self._update()

    def begin_late(self) -> None:
        """All backwards are listed: what is left runs in the next step, first what its forwards need first."""
        self._waiting = collections.deque(
            sorted(self._waiting, key=lambda each: (self.profile.groups[each.group], each.index))
        )
        self._place = 0

    def run_before(self, place: int) -> None:
        """What is listed from now on runs before this task of the next step."""
        self._place = place

    def finish_group(self, group: int) -> None:
        """Lists all updates up to the last one of a group."""
        left = [each.group for each in (*self._up, *self._waiting)]
        for _ in range(max((number for number, other in enumerate(left, 1) if other == group), default=0)):
            self._update()

    @property
    def left_groups(self) -> list[int]:
        """The groups whose last update is not listed yet, in the order of their updates."""
        return [each.group for each in (*self._up, *self._waiting) if each.is_last]

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
            self.tasks.add_bytes(task, start_bytes=part_bytes(layer.state_bytes, each.index, each.count))
            self._up.append(dataclasses.replace(each, up=task))
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
        self.tasks.add_bytes(update, start_bytes=copy_bytes)
        if each.is_last:
            members = self.profile.groups[each.group]
            gradients = sum(self.profile.layers[member].device_gradient_bytes for member in members)
            self.tasks.add_bytes(update, end_bytes=gradients)
        seconds = layer.state_down_for(stays)
        if seconds is None:
            seconds = (layer.state_bytes + layer.param_bytes * (not stays)) * self.offload_s_a_byte
        down = self._emit(Kind.STATE_DOWN, Lane.D2H, each, ("state_down_s", seconds), (update,))
        state_bytes = part_bytes(layer.state_bytes, each.index, each.count)
        self.tasks.add_bytes(down, end_bytes=state_bytes + copy_bytes)
        self._downs.append(down)
        if each.is_last:
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
            name = f"{self.tasks.tasks[task].name} {each.index + 1}/{each.count}"
            self.tasks.set(task, name=name, subgroup=each.index, num_subgroups=each.count)
        if self._place is not None:
            self.late[task] = self._place
        return task

    def _layer(self, group: int) -> LayerProfile:
        return self.profile.layers[self.profile.groups[group][0]]
