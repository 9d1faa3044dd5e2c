"""What each choice for a parameter group costs in a step: seconds of each lane, and bytes at some places.

The choices of a group: where it is updated (on the host, through the GPU, through the GPU with a RESIDENT copy, on the
device), how its layers read parameters, whether they recompute, and whether the backward writes the gradient (GO).
Layers read as with GFGB and RESIDENT (held from forward to backward), DFGB, RELOAD or DHA. A layer's **place** is that
of its forward.

All costs are the least that any plan with that choice has, so `jaxferry.planner.place_bound` may bound plans with them:
updates stream in small subgroups.
"""

import dataclasses
import itertools

import numpy as np

from jaxferry.costs.contention import DOWN as DOWN_LANE
from jaxferry.costs.contention import HOST as HOST_LANE
from jaxferry.costs.contention import UP as UP_LANE
from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.modes import Subgroups
from jaxferry.planner.update_groups import updatable_groups
from jaxferry.step.streaming import SLOTS, num_subgroups, slot_bytes

GPU, H2D, D2H, HOST, PROGRAMS, UP, DOWN, OWN, SLOT, COPIES_UP, COPIES_DOWN, BYTES = range(12)
"""Columns of `Options.table`. The first four are a step's seconds on the lanes, and bytes at the places come last.

`PROGRAMS`: GPU time of forwards and backwards, without updates. `UP`, `DOWN`: transfers that start after the group's
last backward and end before its next forward could start. `OWN`: seconds from the last backward to the next forward if
the group is alone. `SLOT`: if the update streams through the GPU, the device memory of one subgroup. `COPIES_UP`,
`COPIES_DOWN`: what of the links' work is transfers, and not part of a program.
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
      num_slots: how many of its subgroups are on the device at once if the group streams.
    """

    first: int
    table: np.ndarray
    num_slots: int


def options(profile: Profile, places: tuple[int, ...]) -> list[Options]:
    """The choices of all groups.

    Args:
      profile: the layers.
      places: the layers at whose forwards bytes count.
    """
    may_update, known = frozenset(updatable_groups(profile)), dict[bytes, np.ndarray]()
    found = []
    for group, members in enumerate(profile.groups):
        layer = profile.layers[members[0]]
        table = _of_group(profile, group, group in may_update, places)
        key = table.tobytes()
        if key not in known:
            known[key] = _undominated(table)
        found.append(Options(members[0], known[key], min(num_subgroups(layer, Subgroups.SMALL), SLOTS)))
    return found


def recompute_choices(layer: LayerProfile) -> tuple[bool, ...]:
    """Whether a layer may recompute."""
    return (False, True) if layer.can_recompute else (False,)


def _undominated(table: np.ndarray) -> np.ndarray:
    table = np.unique(table, axis=0)
    as_good = (table[:, None] <= table[None]).all(axis=2) & ~np.eye(len(table), dtype=bool)
    return table[~as_good.any(axis=0)]


def _of_group(profile: Profile, group: int, may_update: bool, places: tuple[int, ...]) -> np.ndarray:
    members, layer = profile.groups[group], profile.layers[profile.groups[group][0]]
    update_s, gpu_s = profile.group_update_s[group], layer.streamed_update_s

    def programs(place: str) -> np.ndarray:
        each = [_of_layer(profile, member, place, len(members) == 1, places) for member in members]
        if np.prod([len(choices) for choices in each]) > _MOST_TOGETHER:
            each = [choices.min(axis=0, keepdims=True) for choices in each]
        return np.array([sum(chosen) for chosen in itertools.product(*each)])

    def more(num_bytes: float = 0.0, **seconds: float) -> np.ndarray:
        row = np.array([0.0] * BYTES + [num_bytes] * len(places))
        for name, value in seconds.items():
            row[_COLUMNS[name]] = value
        return row

    found = [programs("host" if layer.has_gradient else "none") + more(host=update_s, own=update_s)]
    if may_update:
        up_s, down_s, state_s = layer.state_up_s, layer.state_down_s, layer.state_down_for(copy_stays=True)
        if up_s is not None and down_s is not None and state_s is not None:
            number, held = num_subgroups(layer, Subgroups.SMALL), layer.param_bytes
            slots = [float(slot_bytes(layer, copy_stays, Subgroups.SMALL)) for copy_stays in (False, True)]
            copies = {"copies_up": up_s, "copies_down": down_s}
            transfers = {"h2d": up_s, "d2h": down_s, "up": up_s, "down": down_s, **copies}
            own_s = up_s + (gpu_s + down_s) / number
            found.append(programs("gpu") + more(gpu=gpu_s, own=own_s, slot=slots[0], **transfers))
            # The next forward waits for no transfer down.
            copies = {"copies_up": up_s, "copies_down": state_s}
            transfers, own_s = {"h2d": up_s, "d2h": state_s, "up": up_s, **copies}, up_s + gpu_s / number
            found.append(programs("device") + more(held, gpu=gpu_s, own=own_s, slot=slots[1], **transfers))
        kept_bytes = layer.state_bytes + layer.param_bytes
        found.append(programs("device") + more(kept_bytes, gpu=layer.update_gpu_s or 0.0))
    return np.concatenate(found)


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
    loadings = (_HELD,) if update == "device" else (_HELD, _BETWEEN, _AGAIN, _READ)
    by_backward = (True,) if update == "host" and not layer.gradient_rows else ()
    for loading, again, is_go in itertools.product(loadings, recompute_choices(layer), (False, *by_backward)):
        row = np.zeros(BYTES + len(places))
        forward_s, backward_s = _programs_s(layer, loading, again, is_go)
        row[GPU] = row[PROGRAMS] = forward_s + backward_s
        if update == "host":
            row[COPIES_DOWN] = 0.0 if is_go else layer.offload_s
            row[D2H] = min(layer.backward_write_s, backward_s) if is_go else layer.offload_s
        if update != "device":
            row[COPIES_UP] = _loads_s(layer, loading, again, alone)
            row[H2D] = row[COPIES_UP] + _reads_s(layer, loading, again, backward_s)
        if alone and update == "host" and not is_go:
            row[DOWN] = row[OWN] = layer.offload_s
        if alone and update in ("host", "gpu") and loading in (_HELD, _AGAIN):
            row[UP] = layer.load_s
            row[OWN] += layer.load_s
        holds = alone and update != "device" and layer.has_backward
        for number, place in enumerate(places):
            kept = layer.kept_bytes(again) if index <= place else 0
            row[BYTES + number] = kept + layer.param_bytes * (holds and _is_held(profile, index, loading, place))
        found.append(row)
    return np.array(found)


def _is_held(profile: Profile, index: int, loading: str, place: int) -> bool:
    """Whether a copy is certainly there during the forward at `place`."""
    if loading == _BETWEEN:  # earlier loads may have to wait until the last forward
        return place == len(profile.layers) - 1 and profile.program_ends[index][1] < place
    return (loading == _HELD and index <= place) or (loading == _AGAIN and index == place)


def _programs_s(layer: LayerProfile, loading: str, again: bool, is_go: bool) -> tuple[float, float]:
    """The time of a layer's forward and backward."""
    forward_s = layer.forward_dha_s if loading in (_READ, _BETWEEN) else layer.forward_s
    forward_s += layer.inter_forward_s
    if not layer.has_backward:
        return forward_s, 0.0
    return forward_s, layer.inter_backward_s + layer.backward_for(loading == _READ, is_go, again)


def _reads_s(layer: LayerProfile, loading: str, again: bool, backward_s: float) -> float:
    """What programs take of the link up. A plan without loads is no slower than its programs, so no more than these."""
    if loading not in (_READ, _BETWEEN):
        return 0.0
    back_s = layer.backward_reads_for(again) if loading == _READ and layer.has_backward else 0.0
    return layer.forward_read_s + min(back_s, backward_s)


def _loads_s(layer: LayerProfile, loading: str, again: bool, alone: bool) -> float:
    """What loads take of the link up."""
    if loading == _READ or not alone:
        return 0.0
    if loading == _AGAIN:
        twice = layer.has_backward and (layer.backward_reads or again) and not layer.fused_backward
        return layer.load_s * (1 + twice)
    return layer.load_s * layer.has_gradient
