"""The machine model as recurrences over many plans at once.

This module implements the rules of `jaxferry/schedule.py` a second time; tests compare the two bit by bit. Both use
`jaxferry.room` for the offloads that a backward waits for. Arrays are (layers, plans), or (plans,) within a loop over
layers.

    forward   X = max(X, waits) + load_s          X: the link's end    C: the GPU's end
              C = max(C, X or host copy) + forward_s
    backward  C = max(C + inter_backward_s, load, room) + backward_s
              D = max(D, C) + offload_s           D: the end of the link back
              H = max(H, gradients) + update_s    H: the host's end

Where programs share a link (`jaxferry.simulate.shared_links`), X grows by each read before its program, and D becomes
max(D, S) + backward_write_s with a backward that starts at S and writes its gradient.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxferry.holdings import DFGB, DHA, RELOAD, Holdings, OnDevice, effective_codes, flags_of, of_program
from jaxferry.plan.host_lane import update_ends
from jaxferry.plan.rows import LayerFlags, plus, rows, some_of_rows
from jaxferry.profiling.records import LayerProfile, Profile
from jaxferry.room import CROSSING_SLOTS, NO_WAIT, UNLIMITED, Demand, demand, load_order, waits
from jaxferry.schedule import fetch_seconds_a_byte, save_seconds_a_byte


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
        save_s, fetch_s = save_seconds_a_byte(profile), fetch_seconds_a_byte(profile)
        self.save_s = [layer.save_bytes * save_s for layer in self.layers]
        self.fetch_s = [layer.fetch_bytes * fetch_s for layer in self.layers]
        self._room(memory_bytes)

    def _by_layer(self) -> None:
        """What a step needs of each layer, looked up before: flags, and rows of (plans,) times or None for zeros."""
        held = self.held
        updates_s = np.array(self.profile.group_update_s)[:, None] * self._on_host
        self.updates_s = list(updates_s[self.updated_groups])
        self.loads_forward, self.loads_backward = LayerFlags(held.loads_forward), LayerFlags(held.loads_backward)
        self.reads_host, self.reads_resident = LayerFlags(self.by_dha), LayerFlags(held.on_resident)
        self.loads_between, self.waits_between = LayerFlags(held.loads_between), LayerFlags(held.waits_between)
        self.reloads, self.sends_gradient = LayerFlags(self.modes == RELOAD), LayerFlags(held.offloads)
        self.writes_gradient = list(self.grad_on_host)
        self.on_host, self.refreshes = LayerFlags(self._on_host), LayerFlags(held.group_resident & self._on_host)
        self.forwards_s, self.backwards_s = list(self.forward_s), list(self.backward_s)
        loads, again = held.loads_forward & (self.modes == RELOAD), held.loads_backward
        self.slots_forward, self.slots_backward = self._of_programs(loads), self._of_programs(again)
        if self.shares_links:
            self.forward_reads_s, self.backward_reads_s = rows(self.forward_read_s), rows(self.backward_read_s)
            self.writes_s, self.writes = rows(self.write_s), LayerFlags(self.write_s > 0)

    @functools.cached_property
    def _on_host(self) -> np.ndarray:
        """Whether groups are updated on the host, if they are at all; (groups, plans)."""
        return np.ones_like(self.held.group_resident) if self.on_device is None else ~self.on_device.groups

    @property
    def late_updates_s(self) -> np.ndarray | float:
        """GPU time of updates on the device that no backward includes, (plans,)."""
        if self.on_device is None or not self.after_all:
            return 0.0
        seconds = [self.layers[members[0]].update_gpu_s or 0.0 for members in self.profile.groups]
        return np.array(seconds) @ self.on_device.groups

    @property
    def links_s(self) -> np.ndarray:
        """The work of the busier link in a step, (plans,); each reuse of a copy counts as none."""
        held, load_s = self.held, self.column("load_s")
        first = [members[0] for members in self.profile.groups]
        up = (load_s * held.loads_forward).sum(axis=0) + (load_s * (held.loads_between | held.loads_backward)).sum(
            axis=0
        )
        trained = flags_of(self.profile, "has_gradient")[first]
        up = up + (load_s[first] * (held.group_resident & self._on_host & trained)).sum(axis=0)
        down = (self.column("offload_s") * held.offloads).sum(axis=0)
        if self.shares_links:
            up = up + self.forward_read_s.sum(axis=0) + self.backward_read_s.sum(axis=0)
            down = down + self.write_s.sum(axis=0)
        return np.maximum(up, down)

    @property
    def loops_s(self) -> np.ndarray:
        """The longest loop of a layer's forward, all programs from there on, and the updates that follow; (plans,).

        No update of the layers up to this one starts before its backward has ended, and the last of them belongs to one
        of these, whose next forward waits for it.
        """
        programs_s = self.forward_s + self.column("inter_forward_s")
        backwards_s = self.backward_s + self.column("inter_backward_s")
        programs_s = programs_s + np.where(self.column("has_backward"), backwards_s, 0.0)
        updates_s = np.zeros_like(programs_s)
        for group, members in enumerate(self.profile.groups):
            updates_s[members[0]] = self.profile.group_update_s[group] * self._on_host[group]
        loops_s = np.cumsum(programs_s[::-1], axis=0)[::-1] + np.cumsum(updates_s, axis=0)
        return np.where(updates_s > 0, loops_s, 0.0).max(axis=0)

    @property
    def host_s(self) -> np.ndarray:
        """The host's work in a step, (plans,)."""
        return np.array(self.profile.group_update_s) @ self._on_host

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
        """Whether every load waits for an update, no values go to host memory and back, and links are not shared."""
        is_alone = not self.has_crossings and not self.shares_links
        return is_alone and all(self.on_host.all) and len(self.updated_groups) == len(self.profile.groups)

    @functools.cached_property
    def needs(self) -> Demand:
        """The bytes that each program needs on the device."""
        return demand(self.held, self.recomputes, self.bulk, self.after_all)

    @property
    def gpu_s(self) -> np.ndarray:
        """The GPU's work in a step, (plans,)."""
        runs_back = [layer.has_backward for layer in self.layers]
        parameterless_s = sum(x.inter_forward_s + x.inter_backward_s * x.has_backward for x in self.layers)
        return self.forward_s.sum(axis=0) + self.backward_s[runs_back].sum(axis=0) + parameterless_s

    def _room(self, memory_bytes: int) -> None:
        self.room: np.ndarray | None = None
        self.columns = np.arange(self.num_plans)
        self.room_matters = np.zeros(self.num_plans, dtype=bool)
        if memory_bytes >= UNLIMITED and len(self.profile.groups) == self.num_layers:
            self.any_room = [False] * self.num_layers
            return
        self.room = waits(self.held, lambda: self.needs, memory_bytes)
        self.any_room = some_of_rows(self.room != NO_WAIT)
        if any(self.any_room) and memory_bytes < UNLIMITED:
            without = waits(self.held, lambda: self.needs, UNLIMITED)
            self.room_matters = (self.room != without).any(axis=0)

    def column(self, key: str) -> np.ndarray:
        """A field of all layers, (layers, 1)."""
        return np.array([getattr(layer, key) for layer in self.layers])[:, None]

    def _backwards(self) -> np.ndarray:
        def durations(layers: Sequence[LayerProfile], by_dha: bool, grad_on_host: bool) -> np.ndarray:
            def each(recomputes: bool) -> np.ndarray:
                return np.array([layer.backward_for(by_dha, grad_on_host, recomputes) for layer in layers])[:, None]

            return each(False) if self.recomputes is None else np.where(self.recomputes, each(True), each(False))

        by_dha = np.where(self.grad_on_host, durations(self.layers, True, True), durations(self.layers, True, False))
        loaded = np.where(self.grad_on_host, durations(self.layers, False, True), durations(self.layers, False, False))
        if self.on_device is not None:
            there = self.on_device.groups[list(self.profile.group_of)]
            loaded = np.where(there, durations(self.on_device.profile.layers, False, False), loaded)
        return np.where(self.modes == DHA, by_dha, loaded)


class Chain:
    """The end of each lane, and each group's last update and refresh; (plans,) arrays."""

    def __init__(self, batch: Batch):
        self.batch = batch
        zeros = np.zeros(batch.num_plans)
        self.link = self.gpu = self.back = self.host = zeros
        self.updated = [zeros for _ in batch.profile.groups]
        self.refreshed = [zeros for _ in batch.profile.groups]
        self.reusable = {layer: zeros for layer, profile in enumerate(batch.layers) if not profile.has_gradient}

    def boundary(self) -> np.ndarray:
        """All times that the next step waits for, the host's first; it also replaces times that never change."""
        batch, held = self.batch, self.batch.held
        fetches = any(layer.fetch_bytes for layer in batch.layers)
        saves = any(layer.save_bytes for layer in batch.layers)
        loads = held.loads_forward | held.loads_between | held.loads_backward | held.on_resident
        link = np.where(loads.any(axis=0) | fetches, self.link, self.host)
        writes = batch.shares_links and (batch.write_s > 0).any(axis=0)
        back = np.where(held.offloads.any(axis=0) | saves | writes, self.back, self.host)
        updated = [batch.on_host.pick(group, self.updated[group], self.host) for group in batch.updated_groups]
        refreshing = [group for group in batch.updated_groups if batch.refreshes.any[group]]
        refreshed = [batch.refreshes.pick(group, self.refreshed[group], self.host) for group in refreshing]
        reusable = [np.where(held.loads_forward[layer], end, self.host) for layer, end in self.reusable.items()]
        return np.stack([self.host, self.gpu, link, back, *updated, *refreshed, *reusable])


class Step:
    """One step of a chain: runs on construction."""

    def __init__(self, chain: Chain):
        self.chain, self.batch, self.held = chain, chain.batch, chain.batch.held
        size, never = self.batch.num_layers, np.full(self.batch.num_plans, -np.inf)
        self.forward_ends, self.backward_ends, self.arrivals = [never] * size, [never] * size, [never] * size
        self.arrival_table: np.ndarray | None = None
        if any(self.batch.any_room):  # the last row is that of `NO_WAIT`
            self.arrival_table = np.full((size + 1, self.batch.num_plans), -np.inf)
        self.between_end = np.zeros(self.batch.num_plans)
        self.slot_use = self.slot_use_before = never
        self.saves_of_programs: list[np.ndarray | None] = []
        self.fetched: dict[int, np.ndarray] = {}
        self._forward()
        self.forward_end = chain.gpu
        last = list(self.batch.profile.programs[-1])
        parameterless_s = sum(self.batch.layers[layer].inter_backward_s for layer in last)
        self.window = chain.gpu + parameterless_s + self.batch.backward_s[last].sum(axis=0)
        self._between()
        self._backward()
        self._update()
        self._refresh()
        self._free_copies()

    def _load(self, layer: int, loads: LayerFlags, wait: np.ndarray) -> np.ndarray:
        """Loads a layer where `loads` is set; returns the link's end."""
        chain = self.chain
        end = np.maximum(chain.link, wait) + self.batch.layers[layer].load_s
        chain.link = loads.latest(layer, chain.link, end)
        return chain.link

    def _use_slot(self, layer: int, uses: LayerFlags, end: np.ndarray) -> None:
        self.slot_use_before = uses.latest(layer, self.slot_use_before, self.slot_use)
        self.slot_use = uses.latest(layer, self.slot_use, end)

    def _load_for_forward(self, layer: int) -> np.ndarray:
        batch, chain = self.batch, self.chain
        wait = chain.reusable.get(layer, chain.updated[batch.profile.group_of[layer]])
        wait = batch.reloads.latest(layer, wait, self.slot_use_before)
        return self._load(layer, batch.loads_forward, wait)

    def _bulk_loads(self) -> None:
        """Runs all loads before the first forward."""
        batch, chain = self.batch, self.chain
        for layer in batch.load_order:
            if batch.loads_forward.any[layer]:
                self._load_for_forward(layer)
        chain.gpu = np.where(self.held.loads_forward.any(axis=0), np.maximum(chain.gpu, chain.link), chain.gpu)

    def _forward(self) -> None:
        batch = self.batch
        if batch.bulk:
            self._bulk_loads()
        for members in batch.profile.programs:
            self._forward_of(members)

    def _forward_of(self, members: tuple[int, ...]) -> None:
        """Runs the forward of a program's layers."""
        batch, chain = self.batch, self.chain
        start = chain.gpu
        for layer in members:
            start = self._when_readable(layer, start)
        start = self._after_saves(start)
        for layer in members:
            if batch.shares_links:
                chain.link = plus(chain.link, batch.forward_reads_s[layer])
            end = start + batch.forwards_s[layer]
            inter_s = batch.layers[layer].inter_forward_s
            start = end + inter_s if inter_s else end
        chain.gpu, self.last_program = start, end
        for layer in members:
            self.forward_ends[layer] = end
        self._use_slot(members[0], batch.slots_forward, end)
        self.saves_of_programs.append(self._save(members[0], end))

    def _when_readable(self, layer: int, start: np.ndarray) -> np.ndarray:
        """The start of a forward once its parameters can be read; loads them."""
        batch, chain = self.batch, self.chain
        group = batch.profile.group_of[layer]
        if batch.loads_forward.any[layer] and not batch.bulk:
            start = batch.loads_forward.latest(layer, start, self._load_for_forward(layer))
        start = batch.reads_host.latest(layer, start, chain.updated[group])
        return batch.reads_resident.latest(layer, start, chain.refreshed[group])

    def _after_saves(self, start: np.ndarray) -> np.ndarray:
        """The start of a program once it has waited for the save of the second program before it."""
        if len(self.saves_of_programs) < CROSSING_SLOTS:
            return start
        saved = self.saves_of_programs[-CROSSING_SLOTS]
        return start if saved is None else np.maximum(start, saved)

    def _save(self, layer: int, end: np.ndarray) -> np.ndarray | None:
        if self.batch.layers[layer].save_bytes == 0:
            return None
        chain = self.chain
        chain.back = np.maximum(chain.back, end) + self.batch.save_s[layer]
        return chain.back

    def _fetch_for_next(self, layer: int) -> None:
        layers, ends = self.batch.layers, self.batch.profile.program_ends
        following = next((ends[other][0] for other in reversed(range(layer)) if layers[other].has_backward), None)
        if following is None or layers[following].fetch_bytes == 0:
            return
        chain = self.chain
        start = np.maximum(chain.link, self.last_program)
        chain.link = self.fetched[following] = start + self.batch.fetch_s[following]

    def _between(self) -> None:
        batch = self.batch
        self.between_arrival: dict[int, np.ndarray] = {}
        for layer in (layer for layer, loads in enumerate(batch.loads_between.any) if loads):
            end = self._load(layer, batch.loads_between, self.forward_ends[layer])
            group = batch.profile.group_of[layer]
            before = self.between_arrival.get(group, np.full(batch.num_plans, -np.inf))
            self.between_arrival[group] = batch.loads_between.latest(layer, before, end)
            self.between_end = batch.loads_between.latest(layer, self.between_end, end)

    def _backward(self) -> None:
        for members in reversed(self.batch.profile.programs):
            if self.batch.layers[members[0]].has_backward:
                self._backward_of(members[::-1])

    def _backward_of(self, members: tuple[int, ...]) -> None:
        """Runs the backward of a program's layers, last one first."""
        batch, chain = self.batch, self.chain
        inter_s = batch.layers[members[0]].inter_backward_s
        start = chain.gpu + inter_s if inter_s else chain.gpu
        for layer in members:
            start = self._when_readable_again(layer, start)
        end = start = self._when_there_is_room(members, start)
        for layer in members:
            if layer != members[0]:
                start = end + batch.layers[layer].inter_backward_s
            end = start + batch.backwards_s[layer]
            if batch.shares_links:
                self._link_work_of_backward(layer, start)
        self.last_program = chain.gpu = end
        for layer in members:
            self.backward_ends[layer] = end
        self._use_slot(members[0], batch.slots_backward, end)
        if batch.layers[members[0]].fused_backward:
            self.slot_use = batch.slots_forward.latest(members[0], self.slot_use, end)
        for layer in members:
            self._gradient(layer, end)

    def _when_readable_again(self, layer: int, start: np.ndarray) -> np.ndarray:
        """The start of a backward once its parameters can be read; loads them."""
        batch = self.batch
        if batch.loads_backward.any[layer]:
            wait = np.maximum(self.forward_ends[layer], self.slot_use_before)
            arrival = self._load(layer, batch.loads_backward, wait)
            start = batch.loads_backward.latest(layer, start, arrival)
        if batch.waits_between.any[layer]:
            start = batch.waits_between.latest(layer, start, self.between_arrival[batch.profile.group_of[layer]])
        return start

    def _when_there_is_room(self, members: tuple[int, ...], start: np.ndarray) -> np.ndarray:
        """The start of a program's backward once there is room for its gradients and values."""
        batch, first = self.batch, members[0]
        if batch.room is not None and self.arrival_table is not None and batch.any_room[first]:
            start = np.maximum(start, self.arrival_table[batch.room[first], batch.columns])
        if batch.has_crossings:
            self._fetch_for_next(members[-1])
            if not batch.layers[first].fused_backward:
                start = self._after_saves(start)
                self.saves_of_programs.append(None)
            if members[-1] in self.fetched:
                start = np.maximum(start, self.fetched[members[-1]])
        return start

    def _gradient(self, layer: int, end: np.ndarray) -> None:
        """Lets a layer's gradient leave once its program has ended."""
        batch, chain, profile = self.batch, self.chain, self.batch.layers[layer]
        if not profile.has_gradient:
            return
        arrival = end
        if batch.sends_gradient.any[layer]:
            arrival = sent = np.maximum(chain.back, end) + profile.offload_s
            chain.back = batch.sends_gradient.latest(layer, chain.back, sent)
            if not batch.sends_gradient.all[layer]:
                arrival = np.where(batch.writes_gradient[layer], end, sent)
        group = batch.profile.group_of[layer]
        if not batch.on_host.all[group]:
            arrival = np.where(batch.on_host.flags[group], arrival, -np.inf)
        self.arrivals[layer] = arrival
        if self.arrival_table is not None:
            self.arrival_table[layer] = arrival

    def _link_work_of_backward(self, layer: int, start: np.ndarray) -> None:
        """Gives the links what a backward that starts then takes of them."""
        batch, chain = self.batch, self.chain
        chain.link = plus(chain.link, batch.backward_reads_s[layer])
        write_s = batch.writes_s[layer]
        if write_s is not None:
            chain.back = batch.writes.latest(layer, chain.back, np.maximum(chain.back, start) + write_s)

    def _update(self) -> None:
        batch, chain = self.batch, self.chain
        if not batch.updated_groups:
            return
        ends = update_ends(self._due(), batch.updates_s, chain.host, batch.by_need)
        chain.host = np.max(ends, axis=0) if batch.by_need else ends[0]
        for group, end in zip(batch.updated_groups, ends, strict=True):
            chain.updated[group] = batch.on_host.latest(group, chain.updated[group], end)

    def _due(self) -> list[np.ndarray]:
        """When the last gradient of each updated group is on the host."""
        batch, arrivals = self.batch, self.arrivals
        if batch.after_all:
            return [np.max(arrivals, axis=0)] * len(batch.updated_groups)
        members = [batch.profile.groups[group] for group in batch.updated_groups]
        return [
            arrivals[each[0]] if len(each) == 1 else np.max([arrivals[layer] for layer in each], axis=0)
            for each in members
        ]

    def _refresh(self) -> None:
        batch, chain = self.batch, self.chain
        for group in reversed(batch.updated_groups):
            if batch.refreshes.any[group]:
                layer = batch.layers[batch.profile.groups[group][0]]
                end = np.maximum(chain.link, chain.updated[group]) + layer.load_s
                chain.link = batch.refreshes.latest(group, chain.link, end)
                chain.refreshed[group] = batch.refreshes.latest(group, chain.refreshed[group], end)

    def _free_copies(self) -> None:
        """Records when a copy that no update outdates may be loaded again."""
        if not self.chain.reusable:
            return
        held = self.held
        by_backward = np.take_along_axis(np.stack(self.backward_ends), held.first_end, axis=0)
        by_forward = np.take_along_axis(np.stack(self.forward_ends), held.first_end, axis=0)
        ends = np.where(held.first_ends_by_backward, by_backward, by_forward)
        self.chain.reusable = {layer: ends[layer] for layer in self.chain.reusable}
