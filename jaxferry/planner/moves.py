"""Moves from one plan to others, ranked before any of them is simulated.

A move gives some layers another column: a class, all of its layers that have one column, or 1, 2, 4, ... of these, the
first or the last ones, every second one, or evenly spread. Other moves change neighbours of several classes.
Moves are ranked by **rows**: linear bounds on the steady step, each a sum over layers of seconds by column. The first
rows are the work of the lanes, with what they lose to each other. Further rows are the critical cycles of plans that
have been simulated: a plan's step takes at least as long as any cycle of its tasks, and the same cycle limits its
neighbours. So each simulation makes the ranking better. A row that says more than a plan takes is no cycle of that
plan, and does not count for moves from it.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxferry.costs import SHARING, LayerProfile, Profile
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.planner.columns import Column, Columns
from jaxferry.planner.judge import Counts, Judge
from jaxferry.step import (
    Demand,
    Kind,
    Lane,
    Plan,
    StepSchedules,
    fetch_seconds_a_byte,
    program_bytes,
    save_seconds_a_byte,
    with_shared_work,
)

_MOST_ROWS = 96
_MOST_PLACES = 24
_PAIRED = 32
_DOUBLINGS = 6
_ABOUT = 1.001
_GAIN = 1e-6
_SINGLE = 1.1
_LATER = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """All moves from a plan.

    Attributes:
      parts: sets of layers, of which each move changes one.
      part: the number of a move's set, (moves,).
      column: the number of its new column, (moves,).
      is_of_class: whether its layers are of one class, (moves,).
      seconds: what it adds to each row, (rows, moves).
      num_bytes: what it adds to the memory at each place, (places, moves).
    """

    parts: list[list[int]]
    part: np.ndarray
    column: np.ndarray
    is_of_class: np.ndarray
    seconds: np.ndarray
    num_bytes: np.ndarray

    def layers(self, move: int) -> list[int]:
        """The layers that a move changes."""
        return self.parts[self.part[move]]

    def kind(self, move: int) -> tuple[int, int, int]:
        """The column of a move, the number of its layers, and their class: moves that are alike have the same."""
        part = self.parts[self.part[move]]
        return int(self.column[move]), len(part), part[0]

    def taken(self, columns: Columns, codes: np.ndarray, move: int) -> np.ndarray | None:
        """The plan after a move; None if some layer may not have the column."""
        return columns.with_column(codes, self.layers(move), self.column[move])


class Estimates:
    """Estimates of steady steps and of memory by column.

    Args:
      judge: lowers the uniform plans from which costs are summed.

    Attributes:
      rows: (rows, layers, columns) seconds.
      bytes: (places, layers, columns) bytes on the device while the programs run that needed the most in some plan.
    """

    def __init__(self, judge: Judge):
        self.columns = judge.columns
        profile = judge.profile
        shape = (len(profile.layers), len(self.columns.all))
        self._costs: dict[tuple[Kind, Lane], np.ndarray] = {}
        needs: list[Demand] = []
        alike = [members for members in self.columns.classes if len(profile.groups[profile.group_of[members[0]]]) == 1]
        # One of each class tells what all of them take, so programs without such a layer are left out.
        are_crossing = any(layer.save_bytes or layer.fetch_bytes for layer in profile.layers)
        others = set() if are_crossing else {layer for members in alike for layer in members[1:]} - {shape[0] - 1}
        kept = [layer for members in profile.programs if not others.issuperset(members) for layer in members]
        few = profile.of_layers(kept, (fetch_seconds_a_byte, save_seconds_a_byte))
        for number, column in enumerate(self.columns.all):
            codes = self.columns.uniform(column)
            needs.append(judge.needs(codes))
            layers = self.columns.layers(codes)
            step = StepSchedules(few, Plan(judge.policy, 1.0, tuple(layers[layer] for layer in kept))).within(None)
            for task in with_shared_work(step).tasks:
                layer = kept[task.segment]
                if codes[layer] == number and task.kind is not Kind.CONTENTION:
                    self._costs.setdefault((task.kind, task.lane), np.zeros(shape))[layer, number] += task.duration_s
        for known, members in itertools.product(self._costs.values(), alike):
            known[members] = known[members[0]]
        self._shares = np.zeros((len(SHARING), len(SHARING)))
        if profile.contention:
            self._shares = np.stack([profile.contention.lost_s(one) for one in np.eye(len(SHARING))], axis=1)
        self.rows = np.stack([self._of_lane(lane) for lane in Lane])
        self._order: list[bytes] = []
        self.places: dict[tuple[bool, int], None] = {}
        self._bytes = _Bytes(profile, self.columns.all)
        spread = np.unique(np.linspace(0, shape[0] - 1, _MOST_PLACES).astype(int)).tolist()
        every = [*itertools.product((False, True), spread), *map(_most_needed, needs)]
        self.places.update(dict.fromkeys(every))
        self.bytes = np.stack([self._bytes.at(*place) for place in self.places])

    def copied(self) -> Estimates:
        """The same estimates, to which rows of one budget's plans may be added."""
        found = copy.copy(self)
        found._order, found.places = self._order.copy(), self.places.copy()
        return found

    def _own(self, lane: Lane) -> np.ndarray:
        found = [cost for (_, own), cost in self._costs.items() if own is lane]
        return np.sum(found, axis=0) if found else np.zeros_like(next(iter(self._costs.values())))

    def _lost(self, lane: Lane) -> np.ndarray:
        """What a lane loses to the others, by layer and column."""
        shares = self._shares[SHARING.index(lane.value)]
        return sum(share * self._own(Lane(other)) for share, other in zip(shares, SHARING, strict=True))

    def _of_lane(self, lane: Lane) -> np.ndarray:
        return self._own(lane) + (self._lost(lane) if lane.value in SHARING else 0.0)

    def add(self, critical: Counts) -> None:
        """Adds the row of a critical cycle as the latest one; the oldest one goes if there are too many."""
        row = np.zeros(self.rows.shape[1:])
        for (kind, lane), count in critical.items():
            if kind is Kind.CONTENTION:
                row += self._lost(lane) * count.sum()
            elif (kind, lane) in self._costs:
                row += self._costs[kind, lane] * count[:, None]
        content = np.round(row, 9).tobytes()
        if content in self._order or len(self._order) + len(Lane) == _MOST_ROWS:
            oldest = self._order.index(content) if content in self._order else 0
            del self._order[oldest]
            self.rows = np.delete(self.rows, len(Lane) + oldest, axis=0)
        self._order.append(content)
        self.rows = np.concatenate([self.rows, row[None]])

    def add_place(self, needs: Demand) -> None:
        """Adds the program that needs the most memory in a plan, from its needs."""
        place = _most_needed(needs)
        if place not in self.places:
            self.places[place] = None
            self.bytes = np.concatenate([self.bytes, self._bytes.at(*place)[None]])

    def seconds(self, codes: np.ndarray) -> np.ndarray:
        """What a plan adds up to in each row, (rows,)."""
        return self.rows[:, np.arange(len(codes)), codes].sum(axis=1)

    def bytes_of(self, needs: Demand) -> np.ndarray:
        """What a plan needs at each place, (places,), not estimated."""
        back = np.maximum(needs.backward, needs.backward_after)
        return np.array([(back if is_back else needs.forward)[place] for is_back, place in self.places])

    def moves(self, codes: np.ndarray) -> Moves:
        """All moves from a plan."""
        layers, columns = np.arange(len(codes)), self.columns
        both = np.concatenate([self.rows, self.bytes]).swapaxes(0, 1)
        more = np.ascontiguousarray(both - both[layers, :, codes][:, :, None])
        parts, added, allowed, known = list[list[int]](), list[np.ndarray](), list[np.ndarray](), set[tuple[int, ...]]()
        of_classes, of_several = [*columns.together(codes)], [*columns.neighbours(codes)]
        num_of_class = 0
        for number, together in enumerate([*of_classes, *of_several]):
            may: np.ndarray = np.all(columns.movable[together], axis=0)
            if (codes[together] == codes[together[0]]).all():
                may[codes[together[0]]] = False
            for part in columns.parts(together, codes):
                if tuple(part) not in known:
                    known.add(tuple(part))
                    parts.append(part)
                    added.append(more[part].sum(axis=0) if len(part) > 1 else more[part[0]])
                    allowed.append(may)
                    num_of_class += number < len(of_classes)
        changed, column = np.nonzero(np.array(allowed))
        found = np.stack(added)[changed, :, column].T
        return Moves(parts, changed, column, changed < num_of_class, found[: len(self.rows)], found[len(self.rows) :])


def _most_needed(needs: Demand) -> tuple[bool, int]:
    """The program that needs the most memory: whether it is a backward, and the layer."""
    back = np.maximum(needs.backward, needs.backward_after)
    is_back = bool(back.max() >= needs.forward.max())
    return is_back, int(np.argmax(back if is_back else needs.forward))


class _Bytes:
    """What layers hold on the device while a program of another one runs, by layer and column; estimates."""

    def __init__(self, profile: Profile, every: Sequence[Column]) -> None:
        def of(held: Callable[[LayerProfile, Column], int]) -> np.ndarray:
            return np.array([[held(layer, column) for column in every] for layer in profile.layers])

        def copies(layer: LayerProfile, column: Column, *modes: Mode) -> int:
            return layer.param_bytes * (column.mode in modes)

        own = [[program_bytes(x, c.mode, c.gradient, c.remat) for c in every] for x in profile.layers]
        forward, backward, self._kept = np.moveaxis(np.array(own), 2, 0)
        gradients = of(lambda layer, column: layer.device_gradient_bytes * (column.gradient is GradientPlace.DEVICE))
        self._programs = forward, backward + gradients
        self._kept = self._kept - of(lambda layer, column: layer.leaving_bytes(column.remat, column.activations))
        self._state = of(lambda layer, column: layer.state_bytes * (column.update is UpdatePlace.RESIDENT))
        # After its backward a copy is free, and that for the next step mostly waits for updates of layers before it.
        self._resident = of(lambda layer, column: copies(layer, column, Mode.RESIDENT))
        self._loaded = of(lambda layer, column: copies(layer, column, Mode.RESIDENT, Mode.GFGB))
        self._awaited = of(lambda layer, column: copies(layer, column, Mode.RESIDENT, Mode.GFGB, Mode.DFGB))

    def at(self, is_back: bool, place: int) -> np.ndarray:
        """Bytes while the forward or backward of the layer at this place runs, (layers, columns)."""
        is_before = (np.arange(len(self._kept)) <= place)[:, None]
        copies = np.where(is_before, self._awaited, self._resident) if is_back else self._loaded
        found: np.ndarray = self._kept * is_before + copies + self._state
        found[place] += self._programs[is_back][place]
        return found


def _smooth(rows_s: np.ndarray, scale_s: float) -> np.ndarray:
    """About the largest of the rows, relative to the scale; a little more, the more rows are nearly as large."""
    powers = np.maximum(rows_s, 0.0) / max(scale_s, 1e-300)
    for _ in range(_DOUBLINGS):
        powers *= powers
    found: np.ndarray = powers.sum(axis=0) ** (0.5**_DOUBLINGS)
    return found


Kinds = tuple[tuple[int, int, int], ...]
"""What moves do: see `Moves.kind`."""


class Ranking:
    """Moves from a plan, alone and in pairs, by what they promise.

    Args:
      estimates: of seconds and bytes.
      limit: bytes that plans may need.
      slots_bytes: memory of the subgroups of updates that stream.
    """

    def __init__(self, estimates: Estimates, limit: int, slots_bytes: int):
        self._estimates, self._columns = estimates, estimates.columns
        self._limit, self._slots_bytes = limit, slots_bytes
        self._streams = np.array([column.update is UpdatePlace.GPU for column in self._columns.all])
        self._reloads = np.array([column.mode is Mode.RELOAD for column in self._columns.all])
        self._param_bytes = [layer.param_bytes for layer in self._columns.profile.layers]

    def of(self, codes: np.ndarray, needs: Demand, objective_s: float) -> Iterator[tuple[Kinds, np.ndarray]]:
        """Plans one move or two away that may fit and be faster by the rows, the fastest first, with what was done.

        Args:
          codes: the plan.
          needs: its memory.
          objective_s: its seconds.
        """
        estimates, moves = self._estimates, self._estimates.moves(codes)
        now_s, now_bytes = estimates.seconds(codes), estimates.bytes_of(needs)
        holds = now_s <= objective_s * (1 + _GAIN)  # a way through the tasks of some plans is none in others
        now_s, more_s = now_s[holds], moves.seconds[holds]
        most_bytes, scale_s = self._limit * _ABOUT, float(now_s.max())
        below_s = _smooth(now_s, scale_s) * (1 - _GAIN)
        seconds = _smooth(now_s[:, None] + more_s, scale_s)
        self._add_slots(moves, codes)
        num_bytes = (now_bytes[:, None] + moves.num_bytes).max(axis=0)
        # Next come those that shorten what holds the plan up, even if another row says that they are slower.
        holding = now_s >= objective_s * (1 - _GAIN)
        held_s = (now_s[holding, None] + more_s[holding]).max(axis=0, initial=0.0) / scale_s
        single = np.flatnonzero((seconds < below_s * _SINGLE) & (num_bytes <= most_bytes))
        ranks = np.where(seconds < below_s, seconds, _LATER + held_s)[single]
        pairable = np.flatnonzero(moves.is_of_class)
        more = (seconds * scale_s - now_s.max())[pairable], (num_bytes - now_bytes.max())[pairable]
        faster, others = (pairable[each] for each in self._to_pair(*more, now_bytes.max()))
        pairs = np.stack([np.repeat(faster, len(others)), np.tile(others, len(faster))])
        both_s = _smooth(now_s[:, None] + more_s[:, pairs[0]] + more_s[:, pairs[1]], scale_s)
        pairs, both_s = pairs[:, both_s < below_s], both_s[both_s < below_s]
        both_bytes = (now_bytes[:, None] + moves.num_bytes[:, pairs[0]] + moves.num_bytes[:, pairs[1]]).max(axis=0)
        both_bytes -= self._slots_bytes * self._begins_streams(moves, codes)[pairs].all(axis=0)
        fits = both_bytes <= most_bytes
        every = np.concatenate([[single, np.full_like(single, -1)], pairs[:, fits]], axis=1)
        every_bytes = np.concatenate([num_bytes[single], both_bytes[fits]])
        order = np.lexsort((every_bytes, np.concatenate([ranks, both_s[fits]])))
        for chosen in every[:, order].T.tolist():
            if chosen[1] < 0:
                chosen = chosen[:1]
            elif not set(moves.layers(chosen[0])).isdisjoint(moves.layers(chosen[1])):
                continue
            made: np.ndarray | None = codes
            for move in chosen:
                made = None if made is None else moves.taken(self._columns, made, move)
            if made is not None:
                yield tuple(moves.kind(move) for move in chosen), made

    def _to_pair(self, more_s: np.ndarray, more_bytes: np.ndarray, now_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Moves that are faster, and others to make their room or to be faster with: the best by byte, and at all."""
        saves, gains = np.flatnonzero(more_bytes < 0), more_s < 0
        room = self._limit * _ABOUT - now_bytes - more_bytes.min(initial=0)
        gaining = np.flatnonzero(gains & (more_bytes <= room))
        by_byte = gaining[np.argsort(more_s[gaining] / np.maximum(more_bytes[gaining], 1), kind="stable")]
        at_all: np.ndarray = gaining[np.argsort(more_s[gaining], kind="stable")]
        faster = np.unique([*by_byte[:_PAIRED], *at_all[: _PAIRED // 2]]).astype(np.intp)
        cheapest = saves[np.argsort(-more_s[saves] / more_bytes[saves], kind="stable")]
        at_all = saves[np.argsort(more_s[saves], kind="stable")]
        return faster, np.unique([*cheapest[:_PAIRED], *at_all[: _PAIRED // 2], *faster]).astype(int)

    def _add_slots(self, moves: Moves, codes: np.ndarray) -> None:
        """Adds the memory of slots that layers share: of updates that stream, and two for the copies of RELOAD."""
        moves.num_bytes[:, self._begins_streams(moves, codes)] += self._slots_bytes
        size, reload = len(codes), self._reloads[codes]
        changed: np.ndarray = np.zeros((size, len(moves.parts)), dtype=int)
        for number, part in enumerate(moves.parts):
            changed[part, number] = 1
        # While a backward runs, the copies of the layers that follow it are free.
        reach = [place if is_back else size - 1 for is_back, place in self._estimates.places]
        now, more = np.cumsum(reload)[reach, None], np.cumsum(changed, axis=0)[reach]
        largest = np.array([max(self._param_bytes[layer] for layer in part) for part in moves.parts])
        added, freed = np.minimum(now + more, 2) - np.minimum(now, 2), np.minimum(now - more, 2) - np.minimum(now, 2)
        was_reload = np.array([reload[part].all() for part in moves.parts])[moves.part]
        is_reload: np.ndarray = self._reloads[moves.column]
        for slots, those in ((added, is_reload & ~was_reload), (freed, was_reload & ~is_reload)):
            moves.num_bytes[:, those] += (slots * largest)[:, moves.part[those]]

    def _begins_streams(self, moves: Moves, codes: np.ndarray) -> np.ndarray:
        """The moves by which the first updates stream, (moves,) flags."""
        found: np.ndarray = self._streams[moves.column] & ~self._streams[codes].any()
        return found
