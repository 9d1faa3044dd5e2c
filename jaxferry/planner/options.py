"""What each choice for a parameter group costs in a step: seconds of each lane, and bytes at some places.

The choices of a group: where it is updated (on the host, through the GPU, through the GPU with a RESIDENT copy, on the
device), how its layers read parameters, what they keep and where, and whether the backward writes the gradient (GO).
Layers read as with GFGB and RESIDENT (held from forward to backward), DFGB, RELOAD or DHA. A layer's **place** is that
of its forward.

All costs are the least that any plan with that choice has, so `jaxferry.planner.place_bound` may bound plans with them:
updates stream in small subgroups.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxferry.costs import DOWN as DOWN_LANE
from jaxferry.costs import HOST as HOST_LANE
from jaxferry.costs import UP as UP_LANE
from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import ActivationPlace, GradientPlace, Mode, Remat, Subgroups, UpdatePlace
from jaxferry.planner.columns import Column, Columns, classes_of, updatable_groups
from jaxferry.step import (
    SLOTS,
    fetch_seconds_a_byte,
    num_subgroups,
    reads_back,
    save_seconds_a_byte,
    slot_bytes,
)

GPU, H2D, D2H, HOST, PROGRAMS, FORWARDS, FIRST, UP, DOWN, OWN, SLOT, COPIES_UP, COPIES_DOWN, LEAVES, RETURNS, BYTES = (
    range(16)
)
"""Columns of `Options.table`. The first four are a step's seconds on the lanes, and bytes at the places come last.

`PROGRAMS`: GPU time of forwards and backwards, without updates; `FORWARDS`: of forwards alone. `FIRST`: loads that end
before the forward. `UP`, `DOWN`: transfers that start after the group's last backward and end before its next forward
could start. `OWN`: seconds from the last backward to the next forward if the group is alone. `SLOT`: if the update
streams through the GPU, the device memory of one subgroup. `COPIES_UP`, `COPIES_DOWN`: what of the links' work is
transfers, and not part of a program. If activations may wait in host memory, `LEAVES`: what of these goes down,
and the backwards that wait for it; `RETURNS`: what goes up, and the forwards that precede it.
"""

TASKS = {UP_LANE: COPIES_UP, DOWN_LANE: COPIES_DOWN, HOST_LANE: HOST}
"""The column of a lane's own tasks."""

NUM_LANES = 4
_HELD, _BETWEEN, _AGAIN, _READ = "held", "DFGB", "RELOAD", "DHA"
_MOST_TOGETHER = 512
"""The most combinations of the choices of layers that share parameters."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of one group.

    Attributes:
      first: its first layer.
      table: (choices, columns); none of them is worse than another one in every column.
      chosen: for each choice, a column of `jaxferry.planner.columns` for each member; none if there are too many.
      num_slots: how many of its subgroups are on the device at once if the group streams.
    """

    first: int
    table: np.ndarray
    num_slots: int
    chosen: list[tuple[Column, ...]]


def group_options(profile: Profile, places: tuple[int, ...], columns: Columns | None = None) -> list[Options]:
    """The choices of all groups.

    Args:
      profile: the layers.
      places: the layers at whose forwards bytes count.
      columns: the choices that count; None for all.
    """
    may_update, known = frozenset(updatable_groups(profile)), dict[bytes, tuple[np.ndarray, list[tuple[Column, ...]]]]()
    found, alike = list[Options](), dict[tuple[object, ...], Options]()
    class_of = {layer: number for number, members in enumerate(profile.once(classes_of)) for layer in members}
    last, early = len(profile.layers) - 1, profile.once(_last_awaited)
    for group, members in enumerate(profile.groups):
        layer = profile.layers[members[0]]
        where = [(place > member) - (place < member) for member in members for place in (*places, early or 0)]
        ends = [profile.program_ends[member][1] == last for member in members]
        may = b"" if columns is None else columns.allowed[list(members)].tobytes()
        kind = (*(class_of[member] for member in members), *where, *ends, may)
        if kind in alike:
            found.append(dataclasses.replace(alike[kind], first=members[0]))
            continue
        table, chosen = _of_group(profile, group, group in may_update, places)
        if columns is not None:
            kept = [row for row, each in enumerate(chosen) if _are_allowed(columns, members, each)]
            table, chosen = table[kept], [chosen[row] for row in kept]
        key = table.tobytes()
        if key not in known:
            rows = _undominated(table)
            known[key] = table[rows], [chosen[row] for row in rows]
        table, chosen = known[key]
        found.append(Options(members[0], table, min(num_subgroups(layer, Subgroups.SMALL), SLOTS), chosen))
        alike[kind] = found[-1]
    return found


def _are_allowed(columns: Columns, members: Sequence[int], chosen: Sequence[Column]) -> bool:
    """Whether the members of a group may have these columns, or others with the same costs."""
    pairs = [(columns.nearest(member, column), column) for member, column in zip(members, chosen, strict=True)]
    return all(own is not None and columns.all[own].activations is column.activations for own, column in pairs)


def _undominated(table: np.ndarray) -> np.ndarray:
    """The rows that are not worse than another one in every column, by index."""
    table, rows = np.unique(table, axis=0, return_index=True)
    as_good = (table[:, None] <= table[None]).all(axis=2) & ~np.eye(len(table), dtype=bool)
    found: np.ndarray = rows[~as_good.any(axis=0)]
    return found


def _of_group(
    profile: Profile, group: int, may_update: bool, places: tuple[int, ...]
) -> tuple[np.ndarray, list[tuple[Column, ...]]]:
    members, layer = profile.groups[group], profile.layers[profile.groups[group][0]]
    update_s, gpu_s = profile.group_update_s[group], layer.streamed_update_s

    table, chosen = list[np.ndarray](), list[tuple[Column, ...]]()

    def add(runs: str, update: UpdatePlace, costs: np.ndarray) -> None:
        each = [_of_layer(profile, member, runs, len(members) == 1, places) for member in members]
        own = [_columns_of(profile.layers[member], runs, update) for member in members]
        if np.prod([len(choices) for choices in each]) > _MOST_TOGETHER:
            each, own = [choices.min(axis=0, keepdims=True) for choices in each], [choices[:1] for choices in own]
        table.append(np.array([sum(rows) for rows in itertools.product(*each)]) + costs)
        chosen.extend(itertools.product(*own))

    def more(num_bytes: float = 0.0, **seconds: float) -> np.ndarray:
        row = np.array([0.0] * BYTES + [num_bytes] * len(places))
        for name, value in seconds.items():
            row[_COLUMNS[name]] = value
        return row

    add("host" if layer.has_gradient else "none", UpdatePlace.HOST, more(host=update_s, own=update_s))
    if may_update:
        up_s, down_s, state_s = layer.state_up_s, layer.state_down_s, layer.state_down_for(copy_stays=True)
        if up_s is not None and down_s is not None and state_s is not None:
            number, held = num_subgroups(layer, Subgroups.SMALL), layer.param_bytes
            slots = [float(slot_bytes(layer, copy_stays, Subgroups.SMALL)) for copy_stays in (False, True)]
            copies = {"copies_up": up_s, "copies_down": down_s}
            transfers = {"h2d": up_s, "d2h": down_s, "up": up_s, "down": down_s, **copies}
            own_s = up_s + (gpu_s + down_s) / number
            add("gpu", UpdatePlace.GPU, more(gpu=gpu_s, own=own_s, slot=slots[0], **transfers))
            # The next forward waits for no transfer down.
            copies = {"copies_up": up_s, "copies_down": state_s}
            transfers, own_s = {"h2d": up_s, "d2h": state_s, "up": up_s, **copies}, up_s + gpu_s / number
            add("device", UpdatePlace.GPU, more(held, gpu=gpu_s, own=own_s, slot=slots[1], **transfers))
        kept_bytes = layer.state_bytes + layer.param_bytes
        add("device", UpdatePlace.RESIDENT, more(kept_bytes, gpu=layer.update_gpu_s or 0.0))
    return np.concatenate(table), chosen


_COLUMNS = {
    "gpu": GPU, "h2d": H2D, "d2h": D2H, "host": HOST, "up": UP, "down": DOWN, "own": OWN, "slot": SLOT,
    "copies_up": COPIES_UP, "copies_down": COPIES_DOWN,
}  # fmt: skip


def _of_layer(profile: Profile, index: int, update: str, alone: bool, places: tuple[int, ...]) -> np.ndarray:
    """The choices of a layer's programs and transfers, (choices, columns).

    Layers that share parameters may share one copy, so only one `alone` needs a load and memory for it. Without a
    gradient its copy can stay for ever.
    """
    layer, found = profile.layers[index], []
    up_s_a_byte, down_s_a_byte = profile.once(fetch_seconds_a_byte), profile.once(save_seconds_a_byte)
    for loading, remat, is_go, waits in _choices(layer, update):
        row = np.zeros(BYTES + len(places))
        forward_s, backward_s = _programs_s(layer, loading, remat, is_go)
        row[GPU] = row[PROGRAMS] = forward_s + backward_s
        row[FORWARDS] = forward_s
        row[FIRST] = layer.load_s if alone and update != "device" and loading in (_HELD, _AGAIN) else 0.0
        if update == "host":
            row[COPIES_DOWN] = 0.0 if is_go else layer.offload_s
            row[D2H] = min(layer.backward_write_s, backward_s) if is_go else layer.offload_s
        if update != "device":
            row[COPIES_UP] = _loads_s(layer, loading, remat, alone)
            row[H2D] = row[COPIES_UP] + _reads_s(layer, loading, remat, backward_s)
        if alone and update == "host" and not is_go:
            row[DOWN] = row[OWN] = layer.offload_s
        if alone and update in ("host", "gpu") and loading in (_HELD, _AGAIN):
            row[UP] = layer.load_s
            row[OWN] += layer.load_s
        leaving = layer.leaving_bytes(remat, waits)
        if leaving:
            row[[D2H, COPIES_DOWN, LEAVES]] += leaving * down_s_a_byte
            row[[H2D, COPIES_UP, RETURNS]] += leaving * up_s_a_byte
        if (early := profile.once(_last_awaited)) is not None:
            row[LEAVES] += backward_s if index <= early else 0.0
            row[RETURNS] += forward_s
        holds = alone and update != "device" and layer.has_backward
        for number, place in enumerate(places):
            kept = layer.kept_bytes(remat) - leaving if index <= place else 0
            row[BYTES + number] = kept + layer.param_bytes * (holds and _is_held(profile, index, loading, place))
        found.append(row)
    return np.array(found)


def _last_awaited(profile: Profile) -> int | None:
    """The last layer whose backward waits for all activations that leave; None if none may, -1 for no layer."""
    may_leave = any(layer.offloadable_bytes for layer in profile.layers)
    return profile.programs[max(len(profile.programs) - 2, 0)][0] - 1 if may_leave else None


def _choices(layer: LayerProfile, update: str) -> Iterator[tuple[str, Remat, bool, ActivationPlace]]:
    """How a layer reads its parameters, what it keeps, whether its backward writes the gradient, where it is kept."""
    loadings = (_HELD,) if update == "device" else (_HELD, _BETWEEN, _AGAIN, _READ)
    by_backward = (True,) if update == "host" and not layer.gradient_rows else ()
    places = tuple(ActivationPlace) if layer.offloadable_bytes else (ActivationPlace.DEVICE,)
    return itertools.product(loadings, layer.levels, (False, *by_backward), places)


_MODES = {_HELD: Mode.GFGB, _BETWEEN: Mode.DFGB, _AGAIN: Mode.RELOAD, _READ: Mode.DHA}


def _columns_of(layer: LayerProfile, runs: str, update: UpdatePlace) -> list[Column]:
    """The columns of a layer's choices, in their order."""
    return [
        Column(
            Mode.RESIDENT if runs == "device" else _MODES[loading],
            GradientPlace.HOST if is_go else GradientPlace.DEVICE,
            remat,
            update,
            waits,
        )
        for loading, remat, is_go, waits in _choices(layer, runs)
    ]


def _is_held(profile: Profile, index: int, loading: str, place: int) -> bool:
    """Whether a copy is certainly there during the forward at `place`."""
    if loading == _BETWEEN:  # earlier loads may have to wait until the last forward
        return place == len(profile.layers) - 1 and profile.program_ends[index][1] < place
    return (loading == _HELD and index <= place) or (loading == _AGAIN and index == place)


def _programs_s(layer: LayerProfile, loading: str, remat: Remat, is_go: bool) -> tuple[float, float]:
    """The time of a layer's forward and backward."""
    forward_s = layer.forward_dha_s if loading in (_READ, _BETWEEN) else layer.forward_s
    forward_s += layer.inter_forward_s
    if not layer.has_backward:
        return forward_s, 0.0
    return forward_s, layer.inter_backward_s + layer.backward_for(loading == _READ, is_go, remat)


def _reads_s(layer: LayerProfile, loading: str, remat: Remat, backward_s: float) -> float:
    """What programs take of the link up. A plan without loads is no slower than its programs, so no more than these."""
    if loading not in (_READ, _BETWEEN):
        return 0.0
    back_s = layer.backward_reads_for(remat) if loading == _READ and layer.has_backward else 0.0
    return layer.forward_read_s + min(back_s, backward_s)


def _loads_s(layer: LayerProfile, loading: str, remat: Remat, alone: bool) -> float:
    """What loads take of the link up."""
    if loading == _READ or not alone:
        return 0.0
    if loading == _AGAIN:
        return layer.load_s * (1 + (reads_back(layer, remat) and not layer.fused_backward))
    return layer.load_s * layer.has_gradient
