"""Many plans at once: what follows from modes and gradient places, as arrays."""

import functools
from typing import Self

import numpy as np

from jaxferry.costs import LayerProfile, Profile, column, flags_of, per_choice
from jaxferry.step import (
    DFGB,
    DHA,
    NO_WAIT,
    RELOAD,
    UNLIMITED,
    Demand,
    Holdings,
    OnDevice,
    demand,
    effective_codes,
    fetch_seconds_a_byte,
    load_order,
    of_program,
    save_seconds_a_byte,
    waits,
)


class LayerFlags:
    """Flags of layers or groups, (layers, plans): a row of all or of none costs a step nothing.

    Attributes:
      any, all: of each layer, whether its flags are set in some plan, and in all.
    """

    def __init__(self, flags: np.ndarray):
        self.flags = flags
        self.any: list[bool] = some_of_rows(flags)
        self.all: list[bool] = [not some for some in some_of_rows(~flags)]

    @functools.cached_property
    def _delays(self) -> list[np.ndarray]:
        """What to add to a time that counts only where flags are set."""
        return list(np.where(self.flags, 0.0, -np.inf))

    def pick(self, layer: int, chosen: np.ndarray, other: np.ndarray) -> np.ndarray:
        """`chosen` where the layer's flags are set, else `other`; (plans,)."""
        return chosen if self.all[layer] else np.where(self.flags[layer], chosen, other)

    def latest(self, layer: int, time: np.ndarray, other: np.ndarray) -> np.ndarray:
        """`time`, or the later of both where the layer's flags are set; (plans,)."""
        if not self.any[layer]:
            return time
        return np.maximum(time, other if self.all[layer] else other + self._delays[layer])


def some_of_rows(flags: np.ndarray) -> list[bool]:
    """Of each row, whether a flag is set."""
    return [bool(some) for some in np.atleast_1d(flags.any(axis=1))]


def rows(seconds: np.ndarray) -> list[np.ndarray | None]:
    """The rows of a (layers, plans) array, None for zeros."""
    return [row if some else None for row, some in zip(seconds, some_of_rows(seconds != 0), strict=True)]


def plus(end: np.ndarray, seconds: np.ndarray | None) -> np.ndarray:
    """The sum; None stands for zeros."""
    return end if seconds is None else end + seconds


class Batch:
    """Plans for one profile, and all that follows from their modes and gradient places alone.

    Args:
      profile: the layers.
      modes: codes, (layers, plans).
      grad_on_host: whether gradients are written to the host, (layers, plans).
      bulk: whether `loads` is "bulk".
      after_all: whether `updates` is "after-all".
      recomputes: whether backwards run their forwards again, (layers, plans); None for none.
      by_need: whether `update_order` is "need".
      memory_bytes: device memory that gradients may fill; `room.UNLIMITED` for no waits.
      on_device: the groups that are updated on the device; None for none.
    """

    def __init__(
        self,
        profile: Profile,
        modes: np.ndarray,
        grad_on_host: np.ndarray,
        bulk: bool,
        after_all: bool,
        recomputes: np.ndarray | None = None,
        by_need: bool = False,
        memory_bytes: int = 0,
        on_device: OnDevice | None = None,
    ):
        self.profile, self.layers = profile, profile.layers
        self.modes, self.grad_on_host = effective_codes(profile, modes, grad_on_host, recomputes)
        self.recomputes, self.by_need = None if recomputes is None else of_program(profile, recomputes), by_need
        self.bulk, self.after_all, self.on_device = bulk, after_all, on_device
        self.num_layers, self.num_plans = modes.shape
        self.by_dha = (self.modes == DHA) | (self.modes == DFGB)
        self.forward_s = np.where(self.by_dha, self.column("forward_dha_s"), self.column("forward_s"))
        self.backward_s = self._backwards()
        self._link_work()
        self.updated_groups = [g for g, members in enumerate(profile.groups) if self.layers[members[0]].has_gradient]
        self.held = Holdings(profile, self.modes, self.grad_on_host, recomputes, on_device)
        self.load_order = [int(layer) for layer in load_order(profile, bulk)]
        self._by_layer()
        self.has_crossings = any(layer.save_bytes or layer.fetch_bytes for layer in self.layers)
        save_s, fetch_s = profile.once(save_seconds_a_byte), profile.once(fetch_seconds_a_byte)
        self.save_s = [layer.save_bytes * save_s for layer in self.layers]
        self.fetch_s = [layer.fetch_bytes * fetch_s for layer in self.layers]
        self.memory_bytes = memory_bytes
        self._room(memory_bytes)

    def some(self, plans: np.ndarray) -> Self:
        """Some of the plans, given by index."""
        there, again = self.on_device, self.recomputes
        return type(self)(
            self.profile,
            self.modes[:, plans],
            self.grad_on_host[:, plans],
            self.bulk,
            self.after_all,
            None if again is None else again[:, plans],
            self.by_need,
            self.memory_bytes,
            None if there is None else OnDevice(there.groups[:, plans], there.profile, there.gradients[:, plans]),
        )

    def _by_layer(self) -> None:
        """What a step needs of each layer, looked up before: flags, and rows of (plans,) times or None for zeros."""
        held = self.held
        updates_s = np.array(self.profile.group_update_s)[:, None] * self.updates_on_host
        self.updates_s = list(updates_s[self.updated_groups])
        self.loads_forward, self.loads_backward = LayerFlags(held.loads_forward), LayerFlags(held.loads_backward)
        self.reads_host, self.reads_resident = LayerFlags(self.by_dha), LayerFlags(held.on_resident)
        self.loads_between, self.waits_between = LayerFlags(held.loads_between), LayerFlags(held.waits_between)
        self.reloads, self.sends_gradient = LayerFlags(self.modes == RELOAD), LayerFlags(held.offloads)
        self.on_host, self.refreshes = (
            LayerFlags(self.updates_on_host),
            LayerFlags(held.group_resident & self.updates_on_host),
        )
        self.forwards_s, self.backwards_s = list(self.forward_s), list(self.backward_s)
        on_device = ~self.updates_on_host
        self.on_gpu_s: list[np.ndarray | None] = [None] * self.num_layers
        for group, members in enumerate(self.profile.groups):
            if on_device[group].any():
                self.on_gpu_s[members[0]] = self.device_updates_s[members[0]]
        loads, again = held.loads_forward & (self.modes == RELOAD), held.loads_backward
        self.slots_forward, self.slots_backward = self._of_programs(loads), self._of_programs(again)
        if self.shares_links:
            self.forward_reads_s, self.backward_reads_s = rows(self.forward_read_s), rows(self.backward_read_s)
            self.writes_s, self.writes = rows(self.write_s), LayerFlags(self.write_s > 0)

    @functools.cached_property
    def updates_on_host(self) -> np.ndarray:
        """Whether groups are updated on the host, if they are at all; (groups, plans)."""
        return np.ones_like(self.held.group_resident) if self.on_device is None else ~self.on_device.groups

    def _of_programs(self, flags: np.ndarray) -> LayerFlags:
        """Whether any layer of a program has the flag; the same row for each of its layers."""
        first = [ends[0] for ends in self.profile.program_ends]
        return LayerFlags(
            np.logical_or.reduceat(flags, np.unique(first), axis=0)[np.unique(first, return_inverse=True)[1]]
        )

    def _link_work(self) -> None:
        """The time of the links that programs take: reads of forwards and backwards, and writes; (layers, plans)."""
        self.shares_links = self.profile.shares_links
        if not self.shares_links:
            return
        again = False if self.recomputes is None else self.recomputes
        forward_read, backward_read = self.column("forward_read_s"), self.column("backward_read_s")
        self.forward_read_s = np.where(self.by_dha, forward_read, 0.0)
        twice = np.where(again, backward_read + forward_read, backward_read)
        self.backward_read_s = np.where((self.modes == DHA) & flags_of(self.profile, "has_backward"), twice, 0.0)
        self.write_s = np.where(self.grad_on_host, self.column("backward_write_s"), 0.0)

    @property
    def is_plain(self) -> bool:
        """Whether every load waits for an update, no values go to host memory and back, and no lanes are shared."""
        is_alone = not self.has_crossings and not self.shares_links and not self.profile.contention
        return is_alone and all(self.on_host.all) and len(self.updated_groups) == len(self.profile.groups)

    @functools.cached_property
    def needs(self) -> Demand:
        """The bytes that each program needs on the device."""
        return demand(self.held, self.recomputes, self.bulk, self.after_all)

    def _room(self, memory_bytes: int) -> None:
        self.room: np.ndarray | None = None
        self.columns = np.arange(self.num_plans)
        self.room_matters = np.zeros(self.num_plans, dtype=bool)
        if memory_bytes >= UNLIMITED and len(self.profile.groups) == self.num_layers:
            self.any_room = [False] * self.num_layers
            return
        self.room = waits(self.held, self.needs if memory_bytes < UNLIMITED else None, memory_bytes)
        self.any_room = some_of_rows(self.room != NO_WAIT)
        if any(self.any_room) and memory_bytes < UNLIMITED:
            without = waits(self.held, None, UNLIMITED)
            self.room_matters = (self.room != without).any(axis=0)

    def column(self, key: str) -> np.ndarray:
        """A field of all layers, (layers, 1)."""
        return column(self.profile, key)

    def _backwards(self) -> np.ndarray:
        again = np.zeros(self.modes.shape, dtype=bool) if self.recomputes is None else self.recomputes
        return per_choice(self.profile, LayerProfile.backward_for, self.modes == DHA, self.grad_on_host, again)

    @functools.cached_property
    def device_updates_s(self) -> np.ndarray:
        """The time of each group's update on the device, at its first layer, whose backward is its last; 0 without."""
        found = np.zeros(self.modes.shape)
        if self.on_device is not None:
            first = [members[0] for members in self.profile.groups]
            seconds = np.array([self.layers[layer].update_gpu_s or 0.0 for layer in first])
            found[first] = seconds[:, None] * self.on_device.groups
        return found
