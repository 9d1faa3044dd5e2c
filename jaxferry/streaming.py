"""Updates that stream through the GPU: masters and optimizer state go up, are updated there, and go back down.

    H2D   state_up 0   state_up 1   state_up 2 ...
    GPU   backward     update 0     backward    update 1   update 2 ...
    D2H                             state_down 0           state_down 1 ...

A group's flat vectors are split evenly into **subgroups** of at most `SUBGROUP_BYTES` of masters and optimizer state,
so that a layer larger than the room streams too. At most `SLOTS` subgroups of all groups are on the device at once: the
next one goes up once the oldest is down again. 256 MiB take 5 to 10 ms of a PCIe 5 or 4 link, far longer than its
latency; four of them keep a link busy during a backward of 20 to 40 ms and take 1.2 GiB with their compute copies.
(Deep Optimizer States, as the second opportunity of Breaking the Memory Wall, interleaves subgroups likewise.)

The programs of the GPU run in the order of the list. So an update is listed before the first backward at whose start
its state would have arrived in a step alone; after the last backward come all others. The next step's forwards thus
wait for all updates of this one; a later place, between these forwards, is not planned.
"""

import collections
import dataclasses
from collections.abc import Collection

from jaxferry.profiling.records import LayerProfile, Profile
from jaxferry.step_tasks import StepTasks
from jaxferry.tasks import Kind, Lane

SUBGROUP_BYTES = 256 << 20
"""The most bytes of masters and optimizer state of a subgroup."""

SLOTS = 4
"""The number of subgroups on the device at once."""


def num_subgroups(layer: LayerProfile) -> int:
    """The number of subgroups of a layer's parameter group."""
    return max(1, -(-layer.state_bytes // SUBGROUP_BYTES))


def part_bytes(num_bytes: int, subgroup: int, num_subgroups: int) -> int:
    """A subgroup's share of bytes that are split evenly."""
    return num_bytes * (subgroup + 1) // num_subgroups - num_bytes * subgroup // num_subgroups


def slots_bytes(profile: Profile, groups: Collection[int]) -> int:
    """Device memory of as many subgroups of these groups as are there at once: the largest ones."""
    sizes: list[int] = []
    for group in groups:
        layer = profile.layers[profile.groups[group][0]]
        number = num_subgroups(layer)
        each = sum(-(-num_bytes // number) for num_bytes in (layer.state_bytes, layer.param_bytes))
        sizes += [each] * min(number, SLOTS)
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

    Attributes:
      ends: for each group whose last update is listed, the transfer that brings it down.
    """

    def __init__(self, profile: Profile, tasks: StepTasks, load_s_a_byte: float, offload_s_a_byte: float):
        self.profile, self.tasks = profile, tasks
        self.load_s_a_byte, self.offload_s_a_byte = load_s_a_byte, offload_s_a_byte
        self.ends: dict[int, int] = {}
        self._waiting: collections.deque[_Subgroup] = collections.deque()
        self._up: collections.deque[_Subgroup] = collections.deque()
        self._downs: list[int] = []
        self._num_ups = 0

    def add(self, group: int, after: tuple[int, ...]) -> None:
        """Adds a group whose upload may start after these tasks."""
        count = num_subgroups(self._layer(group))
        self._waiting.extend(_Subgroup(group, index, count, after) for index in range(count))
        self._fill_slots()

    def update_arrived(self) -> None:
        """Lists the updates whose state has arrived by the time at which the GPU is free."""
        while self._up and self.tasks.ends_s[self._up[0].up] <= self.tasks.free_s[Lane.GPU]:
            self._update()

    def finish(self, down_to: int = 0) -> None:
        """Lists all updates of groups whose last backward is that of layer `down_to` or of a later layer."""
        first = [self.profile.groups[each.group][0] for each in (*self._up, *self._waiting)]
        for _ in range(max((number for number, layer in enumerate(first, 1) if layer >= down_to), default=0)):
            self._update()

    def _fill_slots(self) -> None:
        while self._waiting and self._num_ups < len(self._downs) + SLOTS:
            each = self._waiting.popleft()
            slot = self._downs[self._num_ups - SLOTS : self._num_ups - SLOTS + 1] if self._num_ups >= SLOTS else []
            layer = self._layer(each.group)
            seconds = layer.state_up_s
            seconds = layer.state_bytes * self.load_s_a_byte if seconds is None else seconds
            task = self._emit(
                Kind.STATE_UP, Lane.H2D, each, ("state_up_s", seconds), tuple(sorted({*each.after, *slot}))
            )
            self.tasks.add_bytes(task, start_bytes=part_bytes(layer.state_bytes, each.index, each.count))
            self._up.append(dataclasses.replace(each, up=task))
            self._num_ups += 1

    def _update(self) -> None:
        each = self._up.popleft()
        layer = self._layer(each.group)
        copy_bytes = part_bytes(layer.param_bytes, each.index, each.count)
        update = self._emit(Kind.UPDATE, Lane.GPU, each, ("update_gpu_s", layer.update_gpu_s or 0.0), (each.up,))
        self.tasks.add_bytes(update, start_bytes=copy_bytes)
        if each.is_last:
            members = self.profile.groups[each.group]
            gradients = sum(self.profile.layers[member].device_gradient_bytes for member in members)
            self.tasks.add_bytes(update, end_bytes=gradients)
        seconds = layer.state_down_s
        seconds = (layer.state_bytes + layer.param_bytes) * self.offload_s_a_byte if seconds is None else seconds
        down = self._emit(Kind.STATE_DOWN, Lane.D2H, each, ("state_down_s", seconds), (update,))
        state_bytes = part_bytes(layer.state_bytes, each.index, each.count)
        self.tasks.add_bytes(down, end_bytes=state_bytes + copy_bytes)
        self._downs.append(down)
        if each.is_last:
            self.ends[each.group] = down
        self._fill_slots()

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
        return task

    def _layer(self, group: int) -> LayerProfile:
        return self.profile.layers[self.profile.groups[group][0]]
