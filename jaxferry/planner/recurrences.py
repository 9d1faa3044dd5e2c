"""The machine model as recurrences over many plans at once.

This module implements the rules of `jaxferry/step/schedule.py` a second time; tests compare the two bit by bit. Both
use `jaxferry.step.gradient_room` for the offloads that a backward waits for. Arrays are (layers, plans), or (plans,)
within a loop over layers.

    forward   X = max(X, waits) + load_s          X: the link's end    C: the GPU's end
              C = max(C, X or host copy) + forward_s
    backward  C = max(C + inter_backward_s, load, room) + backward_s
              D = max(D, C) + offload_s           D: the end of the link back
              H = max(H, gradients) + update_s    H: the host's end

Where programs share a link (`jaxferry.step.machine`), X grows by each read before its program, and D
becomes max(D, S) + backward_write_s with a backward that starts at S and writes its gradient. Where lanes contend for
host memory, X, D and H grow after each step by what they lost in it.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from jaxferry.costs import flags_of
from jaxferry.planner.batch import Batch, LayerFlags, plus
from jaxferry.step import CROSSING_SLOTS


def update_ends(
    due: Sequence[np.ndarray], seconds: Sequence[np.ndarray], host: np.ndarray, by_need: bool
) -> list[np.ndarray]:
    """When each update ends, (plans,) each.

    Args:
      due: when each update could start, (plans,) each; the first ones are needed first, the last ones come first.
      seconds: of each update, (plans,) each; 0 with `due` -inf for no update.
      host: when the host is free, (plans,).
      by_need: whether the host picks the update that is needed first, of those that could start.
    """
    if by_need:
        return list(_by_need(np.stack(due), np.stack(seconds), host))
    ends = []
    for due_s, update_s in zip(reversed(due), reversed(seconds), strict=True):
        host = np.maximum(host, due_s) + update_s
        ends.append(host)
    return ends[::-1]


def _by_need(due: np.ndarray, seconds: np.ndarray, host: np.ndarray) -> np.ndarray:
    """The ends of the updates, (groups, plans): the lowest group of those that could start is next."""
    if len(due) > _MOST_TOGETHER or 0 < due.shape[1] <= _FEW_PLANS:
        each = zip(due.T, seconds.T, host, strict=True)
        return np.array([_by_need_of_plan(*plan) for plan in each]).T
    ends, columns = np.zeros(due.shape), np.arange(due.shape[1])
    for _ in range(len(due)):
        now = np.maximum(host, due.min(axis=0))
        chosen = (due <= now).argmax(axis=0)
        host = ends[chosen, columns] = now + seconds[chosen, columns]
        due[chosen, columns] = np.inf
    return ends


def _by_need_of_plan(due: np.ndarray, seconds: np.ndarray, host: float) -> list[float]:
    """Likewise for one plan and many groups."""
    order, ends = np.argsort(due, kind="stable").tolist(), [0.0] * len(due)
    due_s, seconds_s = due.tolist(), seconds.tolist()
    could_start: list[int] = []
    number, now = 0, float(host)
    for _ in order:
        if not could_start:
            now = max(now, due_s[order[number]])
        while number < len(order) and due_s[order[number]] <= now:
            heapq.heappush(could_start, order[number])
            number += 1
        chosen = heapq.heappop(could_start)
        ends[chosen] = now = now + seconds_s[chosen]
    return ends


_MOST_TOGETHER = 512
_FEW_PLANS = 8


def shared_lanes_s(batch: Batch) -> np.ndarray:
    """The work in a step of the lanes that use host memory, with what they lose to each other, (lanes, plans).

    Lanes are in the order of `contention.SHARING`; each reuse of a copy counts as none.
    """
    work_s = np.stack([*_links_s(batch), _host_s(batch)])
    return work_s + batch.profile.contention.lost_s(work_s)


def lost_s(batch: Batch) -> np.ndarray:
    """What these lanes lose to each other, (lanes, plans)."""
    crossings_s = np.array([[sum(batch.fetch_s)], [sum(batch.save_s)], [0.0]])
    return batch.profile.contention.lost_s(np.stack([*_links_s(batch), _host_s(batch)]) + crossings_s)


def _links_s(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The work of the links up and down; values that leave and return do not count."""
    held, load_s = batch.held, batch.column("load_s")
    first = [members[0] for members in batch.profile.groups]
    up = (load_s * held.loads_forward).sum(axis=0) + (load_s * (held.loads_between | held.loads_backward)).sum(axis=0)
    trained = flags_of(batch.profile, "has_gradient")[first]
    up = up + (load_s[first] * (held.group_resident & batch.updates_on_host & trained)).sum(axis=0)
    down = (batch.column("offload_s") * held.offloads).sum(axis=0)
    if batch.shares_links:
        up = up + batch.forward_read_s.sum(axis=0) + batch.backward_read_s.sum(axis=0)
        down = down + batch.write_s.sum(axis=0)
    return up, down


def loops_s(batch: Batch) -> np.ndarray:
    """The longest loop of a layer's forward, all GPU work from there on, and the updates that follow; (plans,).

    No update of the layers up to this one starts before its backward has ended, and the last of them belongs to one
    of these, whose next forward waits for it.
    """
    programs_s = batch.forward_s + batch.column("inter_forward_s")
    backwards_s = batch.backward_s + batch.column("inter_backward_s")
    programs_s = programs_s + np.where(batch.column("has_backward"), backwards_s, 0.0)
    if not batch.after_all:
        programs_s = programs_s + batch.device_updates_s
    updates_s = np.zeros_like(programs_s)
    for group, members in enumerate(batch.profile.groups):
        updates_s[members[0]] = batch.profile.group_update_s[group] * batch.updates_on_host[group]
    loops_s = np.cumsum(programs_s[::-1], axis=0)[::-1] + np.cumsum(updates_s, axis=0)
    return np.where(updates_s > 0, loops_s, 0.0).max(axis=0)


def _host_s(batch: Batch) -> np.ndarray:
    """The work of the host."""
    return np.array(batch.profile.group_update_s) @ batch.updates_on_host


def gpu_s(batch: Batch) -> np.ndarray:
    """The GPU's work in a step, (plans,)."""
    runs_back = [layer.has_backward for layer in batch.layers]
    parameterless_s = sum(x.inter_forward_s + x.inter_backward_s * x.has_backward for x in batch.layers)
    programs_s = batch.forward_s.sum(axis=0) + batch.backward_s[runs_back].sum(axis=0) + parameterless_s
    return programs_s + batch.device_updates_s.sum(axis=0)


class Chain:
    """The end of each lane, and each group's last update and refresh; (plans,) arrays."""

    def __init__(self, batch: Batch):
        self.batch = batch
        zeros = np.zeros(batch.num_plans)
        self.link = self.gpu = self.back = self.host = zeros
        self.updated = [zeros for _ in batch.profile.groups]
        self.refreshed = [zeros for _ in batch.profile.groups]
        self.reusable = {layer: zeros for layer, profile in enumerate(batch.layers) if not profile.has_gradient}
        self.lost_s = lost_s(batch) if batch.profile.contention else None
        self.has_run = False

    def some(self, plans: np.ndarray) -> Self:
        """The same chain of some of the plans, given by index."""
        found = type(self)(self.batch.some(plans))
        for name in ("link", "gpu", "back", "host"):
            setattr(found, name, getattr(self, name)[plans])
        found.updated, found.refreshed = [x[plans] for x in self.updated], [x[plans] for x in self.refreshed]
        found.reusable = {layer: end[plans] for layer, end in self.reusable.items()}
        found.has_run = self.has_run
        return found

    def begin_step(self) -> None:
        """Lets the lanes lose what they lost to each other in the step before."""
        if self.has_run and self.lost_s is not None:
            self.link, self.back, self.host = np.stack([self.link, self.back, self.host]) + self.lost_s
        self.has_run = True

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
        chain.begin_step()
        self.chain, self.batch, self.held = chain, chain.batch, chain.batch.held
        size, never = self.batch.num_layers, np.full(self.batch.num_plans, -np.inf)
        self.forward_ends, self.backward_ends, self.arrivals = [never] * size, [never] * size, [never] * size
        self.arrival_table: np.ndarray | None = None
        if any(self.batch.any_room):  # the last row is that of `NO_WAIT`
            self.arrival_table = np.full((size + 1, self.batch.num_plans), -np.inf)
        self.between_end = np.zeros(self.batch.num_plans)
        self.last_arrival, self.updated_on_gpu = never, never
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
            if batch.shares_links and batch.forward_reads_s[layer] is not None:
                chain.link = plus(chain.link, batch.forward_reads_s[layer])
            end = start + batch.forwards_s[layer]
            inter_s = batch.layers[layer].inter_forward_s
            start = end + inter_s if inter_s else end
        chain.gpu, self.last_program = start, end
        for layer in members:
            self.forward_ends[layer] = end
        if batch.slots_forward.any[members[0]]:
            self._use_slot(members[0], batch.slots_forward, end)
        self.saves_of_programs.append(self._save(members[0], end))

    def _when_readable(self, layer: int, start: np.ndarray) -> np.ndarray:
        """The start of a forward once its parameters can be read; loads them."""
        batch, chain = self.batch, self.chain
        group = batch.profile.group_of[layer]
        if batch.loads_forward.any[layer] and not batch.bulk:
            start = batch.loads_forward.latest(layer, start, self._load_for_forward(layer))
        if batch.reads_host.any[layer]:
            start = batch.reads_host.latest(layer, start, chain.updated[group])
        if batch.reads_resident.any[layer]:
            start = batch.reads_resident.latest(layer, start, chain.refreshed[group])
        return start

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
        if batch.slots_backward.any[members[0]]:
            self._use_slot(members[0], batch.slots_backward, end)
        if batch.layers[members[0]].fused_backward:
            self.slot_use = batch.slots_forward.latest(members[0], self.slot_use, end)
        for layer in members:
            self._gradient(layer, end)
        if not batch.after_all:
            self._update_on_gpu(members)

    def _update_on_gpu(self, layers: Iterable[int]) -> None:
        """Runs the updates on the device of the groups whose last backwards are these."""
        batch, chain, ends = self.batch, self.chain, self.updated_on_gpu
        for layer in layers:
            if (seconds := batch.on_gpu_s[layer]) is not None:
                chain.gpu = self.last_program = chain.gpu + seconds
                ends = np.where(batch.on_host.flags[batch.profile.group_of[layer]], ends, chain.gpu)
        self.updated_on_gpu = ends

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
        arrival, group = end, batch.profile.group_of[layer]
        if batch.sends_gradient.any[layer]:
            arrival = sent = np.maximum(chain.back, end) + profile.offload_s
            chain.back = batch.sends_gradient.latest(layer, chain.back, sent)
            arrival = batch.sends_gradient.pick(layer, sent, end)
        self.last_arrival = np.maximum(self.last_arrival, arrival)
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
        if batch.after_all and batch.on_device is not None:
            waits = batch.on_device.groups.any(axis=0)
            chain.gpu = np.where(waits, np.maximum(chain.gpu, self.last_arrival), chain.gpu)
            self._update_on_gpu(reversed(range(batch.num_layers)))
        ends = update_ends(self._due(), batch.updates_s, chain.host, batch.by_need)
        chain.host = np.max(ends, axis=0) if batch.by_need else ends[0]
        for group, end in zip(batch.updated_groups, ends, strict=True):
            chain.updated[group] = batch.on_host.latest(group, chain.updated[group], end)

    def _due(self) -> list[np.ndarray]:
        """When the last gradient of each updated group is on the host."""
        batch, arrivals = self.batch, self.arrivals
        if batch.after_all:
            return [np.where(batch.on_host.flags[g], self.last_arrival, -np.inf) for g in batch.updated_groups]
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
