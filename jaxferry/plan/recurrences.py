"""The machine model as recurrences over many plans at once.

The rules are those of `jaxferry/schedule.py`, written a second time; tests hold the two against each other, equal to
the last bit. Arrays are (layers, plans), or (plans,) within a loop over layers.

    forward   X = max(X, waits) + load_s          X: the link's end    C: the GPU's end
              C = max(C, X or host copy) + forward_s
    backward  C = max(C + inter_backward_s, load) + backward_s
              D = max(D, C) + offload_s           D: the end of the link back
              H = max(H, gradients) + update_s    H: the host's end
"""

import numpy as np

from jaxferry.modes import Mode
from jaxferry.profiling.records import Profile

GFGB, DHA, DFGB, RELOAD, RESIDENT = range(5)
CODES = {Mode.GFGB: GFGB, Mode.DHA: DHA, Mode.DFGB: DFGB, Mode.RELOAD: RELOAD, Mode.RESIDENT: RESIDENT}
MODES = {code: mode for mode, code in CODES.items()}


class Batch:
    """Plans for one profile, and what follows from their modes and gradient places alone."""

    def __init__(
        self,
        profile: Profile,
        modes: np.ndarray,
        to_host: np.ndarray,
        bulk: bool,
        after_all: bool,
        recomputes: np.ndarray | None = None,
    ):
        self.profile, self.layers, self.modes, self.to_host = profile, profile.layers, modes, to_host
        self.recomputes = recomputes
        self.bulk, self.after_all = bulk, after_all
        self.num_layers, self.num_plans = modes.shape
        self.by_dha = (modes == DHA) | (modes == DFGB)
        self.forward_s = np.where(self.by_dha, self.column("forward_dha_s"), self.column("forward_s"))
        self.backward_s = self._backwards()
        self._who_loads()
        self.any_forward_load = self.loads_forward.any(axis=1)
        self.any_between = self.loads_between.any(axis=1)
        self.waits_between_any = self.waits_between.any(axis=1)
        self.any_reload = (modes == RELOAD).any(axis=1)
        self.any_resident = self.on_resident.any(axis=1)

    def column(self, key: str) -> np.ndarray:
        """A field of all layers, (layers, 1)."""
        return np.array([getattr(layer, key) for layer in self.layers])[:, None]

    def _backwards(self) -> np.ndarray:
        def durations(by_dha: bool, to_host: bool) -> np.ndarray:
            def each(recomputes: bool) -> np.ndarray:
                return np.array([layer.backward_for(by_dha, to_host, recomputes) for layer in self.layers])[:, None]

            return each(False) if self.recomputes is None else np.where(self.recomputes, each(True), each(False))

        by_dha = np.where(self.to_host, durations(True, True), durations(True, False))
        loaded = np.where(self.to_host, durations(False, True), durations(False, False))
        return np.where(self.modes == DHA, by_dha, loaded)

    def activation_bytes(self) -> np.ndarray:
        """What each layer keeps from its forward to its backward, (layers, plans)."""
        kept, recomputed = (np.array([x.kept_bytes(again) for x in self.layers])[:, None] for again in (False, True))
        recomputes = np.zeros(self.modes.shape, dtype=bool) if self.recomputes is None else self.recomputes
        return np.where(recomputes, recomputed, kept)

    def _who_loads(self) -> None:
        """Which layers load when, given that a group's copy is loaded once while it is held."""
        modes = self.modes
        self.loads_forward = (modes == GFGB) | (modes == RELOAD)
        self.loads_between = modes == DFGB
        self.loads_backward = modes == RELOAD
        self.waits_between = modes == DFGB
        self.on_resident = modes == RESIDENT
        self.last_holder = np.broadcast_to(np.arange(self.num_layers)[:, None], modes.shape).copy()
        self.group_resident = np.stack(
            [(modes[list(members)] == RESIDENT).any(axis=0) for members in self.profile.groups]
        )
        for group, members in enumerate(self.profile.groups):
            if len(members) > 1:
                self._who_loads_in_group(members, self.group_resident[group])

    def _who_loads_in_group(self, members: tuple[int, ...], resident: np.ndarray) -> None:
        modes = self.modes
        held = resident.copy()
        for member in members:
            self.loads_forward[member] &= ~held
            held |= modes[member] == GFGB
        for member in members:
            self.loads_between[member] &= ~held
            held |= modes[member] == DFGB
        last_holder = np.full(self.num_plans, -1)
        for member in members:
            self.loads_backward[member] &= ~resident & (last_holder < 0)
            holds = (modes[member] == GFGB) | (modes[member] == DFGB)
            last_holder = np.where(holds & (last_holder < 0), member, last_holder)
        loaded_between = self.loads_between[list(members)].any(axis=0)
        for member in members:
            self.last_holder[member] = np.where(last_holder < 0, member, last_holder)
            shares = (modes[member] == RELOAD) & ~self.loads_backward[member]
            self.waits_between[member] = loaded_between & ((modes[member] == DFGB) | shares)
            self.on_resident[member] = resident & (modes[member] != DHA) & (modes[member] != DFGB)


class Chain:
    """Where the lanes of a batch stand, and when each group was last updated and refreshed; (plans,) arrays."""

    def __init__(self, batch: Batch):
        self.batch = batch
        zeros = np.zeros(batch.num_plans)
        self.link = self.gpu = self.back = self.host = zeros
        self.updated = [zeros for _ in batch.profile.groups]
        self.refreshed = [zeros for _ in batch.profile.groups]

    def boundary(self) -> np.ndarray:
        """All times that the next step waits for, the host's first."""
        return np.stack([self.host, self.gpu, self.link, self.back, *self.updated, *self.refreshed])


class Step:
    """One step of a chain: runs on construction, and remembers when memory is taken and given back."""

    def __init__(self, chain: Chain):
        self.chain, self.batch = chain, chain.batch
        shape = self.batch.modes.shape
        self.load_start, self.second_start = np.zeros(shape), np.zeros(shape)
        self.forward_start, self.forward_ends = np.zeros(shape), np.zeros(shape)
        self.backward_start, self.backward_ends = np.zeros(shape), np.zeros(shape)
        self.arrivals = np.zeros(shape)
        self.between_end = np.zeros(self.batch.num_plans)
        never = np.full(self.batch.num_plans, -np.inf)
        self.slot_use = self.slot_use_before = never
        self._forward()
        self.forward_end = chain.gpu
        last = self.batch.layers[-1]
        self.window = chain.gpu + last.inter_backward_s + self.batch.backward_s[-1]
        self._between()
        self._backward()
        self._update()
        self._refresh()

    def _load(self, layer: int, loads: np.ndarray, wait: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Loads a layer where `loads` says so, and notes in `starts` when; returns the link's end."""
        chain = self.chain
        start = np.maximum(chain.link, wait)
        starts[layer] = np.where(loads, start, starts[layer])
        chain.link = np.where(loads, start + self.batch.layers[layer].load_s, chain.link)
        return chain.link

    def _use_slot(self, uses: np.ndarray, end: np.ndarray) -> None:
        self.slot_use_before = np.where(uses, self.slot_use, self.slot_use_before)
        self.slot_use = np.where(uses, end, self.slot_use)

    def _load_for_forward(self, layer: int) -> np.ndarray:
        batch, wait = self.batch, self.chain.updated[self.batch.profile.group_of[layer]]
        if batch.any_reload[layer]:
            slot_free = np.where(batch.modes[layer] == RELOAD, self.slot_use_before, -np.inf)
            wait = np.maximum(wait, slot_free)
        return self._load(layer, batch.loads_forward[layer], wait, self.load_start)

    def _forward(self) -> None:
        batch, chain = self.batch, self.chain
        if batch.bulk:
            arrivals = [self._load_for_forward(layer) for layer in range(batch.num_layers)]
            if batch.any_forward_load.any():
                chain.gpu = np.where(batch.loads_forward.any(axis=0), np.maximum(chain.gpu, arrivals[-1]), chain.gpu)
        for layer, profile in enumerate(batch.layers):
            group, start = batch.profile.group_of[layer], chain.gpu
            if batch.any_forward_load[layer]:
                arrival = arrivals[layer] if batch.bulk else self._load_for_forward(layer)
                start = np.where(batch.loads_forward[layer], np.maximum(start, arrival), start)
            start = np.where(batch.by_dha[layer], np.maximum(start, chain.updated[group]), start)
            if batch.any_resident[layer]:
                start = np.where(batch.on_resident[layer], np.maximum(start, chain.refreshed[group]), start)
            end = start + batch.forward_s[layer]
            self.forward_start[layer], self.forward_ends[layer] = start, end
            if batch.any_reload[layer]:
                self._use_slot((batch.modes[layer] == RELOAD) & batch.loads_forward[layer], end)
            chain.gpu = end + profile.inter_forward_s

    def _between(self) -> None:
        batch = self.batch
        self.between_arrival = [np.full(batch.num_plans, -np.inf) for _ in batch.profile.groups]
        for layer in np.flatnonzero(batch.any_between):
            loads = batch.loads_between[layer]
            end = self._load(int(layer), loads, self.forward_ends[layer], self.second_start)
            group = batch.profile.group_of[layer]
            self.between_arrival[group] = np.where(loads, end, self.between_arrival[group])
            self.between_end = np.where(loads, end, self.between_end)

    def _backward(self) -> None:
        batch, chain = self.batch, self.chain
        for layer in reversed(range(batch.num_layers)):
            profile = batch.layers[layer]
            start = chain.gpu + profile.inter_backward_s
            if batch.any_reload[layer]:
                loads = batch.loads_backward[layer]
                wait = np.maximum(self.forward_ends[layer], self.slot_use_before)
                arrival = self._load(layer, loads, wait, self.second_start)
                start = np.where(loads, np.maximum(start, arrival), start)
            if batch.waits_between_any[layer]:
                arrival = self.between_arrival[batch.profile.group_of[layer]]
                start = np.where(batch.waits_between[layer], np.maximum(start, arrival), start)
            end = start + batch.backward_s[layer]
            self.backward_start[layer], self.backward_ends[layer] = start, end
            if batch.any_reload[layer]:
                self._use_slot(batch.loads_backward[layer], end)
            chain.gpu = end
            to_host = batch.to_host[layer]
            chain.back = np.where(to_host, chain.back, np.maximum(chain.back, end) + profile.offload_s)
            self.arrivals[layer] = np.where(to_host, end, chain.back)

    def _update(self) -> None:
        batch, chain = self.batch, self.chain
        groups = batch.profile.groups
        all_arrived = self.arrivals.max(axis=0)
        for group in sorted(range(len(groups)), key=lambda group: -groups[group][0]):
            members = groups[group]
            due = self.arrivals[members[0]]
            if batch.after_all:
                due = all_arrived
            elif len(members) > 1:
                due = self.arrivals[list(members)].max(axis=0)
            chain.host = np.maximum(chain.host, due) + batch.profile.group_update_s[group]
            chain.updated[group] = chain.host

    def _refresh(self) -> None:
        batch, chain = self.batch, self.chain
        groups = batch.profile.groups
        for group in sorted(range(len(groups)), key=lambda group: -groups[group][0]):
            resident = batch.group_resident[group]
            if resident.any():
                end = np.maximum(chain.link, chain.updated[group]) + batch.layers[groups[group][0]].load_s
                chain.link = np.where(resident, end, chain.link)
                chain.refreshed[group] = np.where(resident, end, chain.refreshed[group])

    def frees(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(times, bytes given back), (layers, plans) each."""
        batch = self.batch
        params, gradients = batch.column("param_bytes"), batch.column("grad_bytes")
        held_end = np.take_along_axis(self.backward_ends, batch.last_holder, axis=0)
        first_end = np.where(batch.modes == RELOAD, self.forward_ends, held_end)
        second_end = np.where(batch.modes == RELOAD, self.backward_ends, held_end)
        return [
            (first_end, params * batch.loads_forward),
            (second_end, params * (batch.loads_between | batch.loads_backward)),
            (self.backward_ends, batch.activation_bytes()),
            (self.arrivals, gradients * ~batch.to_host),
        ]

    def allocations(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(times, bytes taken), (layers, plans) each."""
        batch = self.batch
        params, gradients = batch.column("param_bytes"), batch.column("grad_bytes")
        return [
            (self.load_start, params * batch.loads_forward),
            (self.second_start, params * (batch.loads_between | batch.loads_backward)),
            (self.forward_start, batch.activation_bytes()),
            (self.backward_start, gradients * ~batch.to_host),
        ]
