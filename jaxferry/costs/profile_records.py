"""Profiles: what each layer costs, and how the lanes share host memory; as records and JSON.

Contention for host memory: what the work of one lane takes of another lane's time.

Transfers and updates on the host all read and write host memory ("Breaking the Memory Wall", observation 5). Where it
is not fast enough for all of them at once, each is slower beside the others than alone. The model counts that as time
that a lane loses: a share of each second that another lane works. So a lane that is always busy, beside one that works
for some of that time, takes as much longer as was measured with both of them busy all the time.

The times are those of MemFerry, section IV-B; `jaxferry.profile/1` is the JSON of a profile:

    {"format": "jaxferry.profile/1",
     "machine": {"gpu": "H200"},
     "layers": [{"name": "wte", "param_bytes": 1000, "grad_bytes": 1000, "load_s": 0.1, ...}]}

Optional keys of a layer, such as `backward_reads`, state facts of its programs beyond their times. Their defaults
describe the plain machine model. A file has these keys only where they differ from the defaults.

A layer has the keys of this version and no others, so a misspelt key is an error. Everything else goes into `machine`,
which is free-form. A version whose new keys change the meaning of a layer without them has another number in its
`format`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from jaxferry.costs.layer_records import LINK_SHARES, NO_RECOMPUTATION, SECONDS, LayerProfile
from jaxferry.errors import InputError
from jaxferry.records import (
    check_count,
    check_format,
    check_keys,
    check_list,
    check_share,
    check_spelling,
    check_unique,
    load_record,
    required,
    write_json,
)

UP, DOWN, HOST = SHARING = ("H2D", "D2H", "host")
"""The lanes whose work is in host memory."""


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a JSON object, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True)
class Contention:
    """The shares of all pairs of lanes.

    For a lane that loses time, and each other lane, `shares` has the seconds that it loses for each second of the
    other's work, in [0, 1]; lanes that are not named lose and take nothing. Raises `InputError` if a lane is not known
    or paired with itself, or a share is not acceptable.
    """

    shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        found: dict[str, dict[str, float]] = {}
        check_keys(_object(self.shares, "contention"), SHARING, "contention")
        for lane, others in self.shares.items():
            where = f"contention of {lane}"
            check_keys(_object(others, where), [other for other in SHARING if other != lane], where)
            own = {other: check_share(share, f"{where}: {other}") for other, share in others.items()}
            if kept := {other: share for other, share in own.items() if share}:
                found[lane] = kept
        object.__setattr__(self, "shares", found)

    def __bool__(self) -> bool:
        """Whether any lane loses time."""
        return bool(self.shares)

    def __hash__(self) -> int:
        return hash(self.matrix.tobytes())

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """The shares, (losing lanes, other lanes), in the order of `SHARING`."""
        return np.array([[self.shares.get(lane, {}).get(other, 0.0) for other in SHARING] for lane in SHARING])

    def lost_s(self, work_s: np.ndarray) -> np.ndarray:
        """The seconds that each lane loses to the others' work, both (lanes, ...) in the order of `SHARING`."""
        return np.tensordot(self.matrix, work_s, 1)

    @classmethod
    def between(cls, speeds: Mapping[tuple[str, str], float]) -> Self:
        """That of lanes that work all the time, in pairs; `speeds` are those beside the other lane over those alone."""
        shares: dict[str, dict[str, float]] = {}
        for (lane, other), own in speeds.items():
            # In each second, `beside` seconds of the other's work, and `own` of this lane's.
            beside = speeds[other, lane]
            shares.setdefault(lane, {})[other] = min(max(1 - own, 0.0) / beside, 1.0) if beside > 0 else 1.0
        return cls(shares)

    @classmethod
    def of_matrix(cls, matrix: np.ndarray) -> Self:
        """That with these shares, see `matrix`."""
        rows = {lane: zip(SHARING, map(float, row), strict=True) for lane, row in zip(SHARING, matrix, strict=True)}
        return cls({lane: {other: share for other, share in row if other != lane} for lane, row in rows.items()})

    @classmethod
    def of_bandwidth(cls, up_bytes_per_s: float, down_bytes_per_s: float, host_bytes_per_s: float) -> Self:
        """That of transfers in both directions, and updates that take all the bandwidth of host memory.

        Transfers go first: updates get what they leave.
        """
        shares = {UP: up_bytes_per_s / host_bytes_per_s, DOWN: down_bytes_per_s / host_bytes_per_s}
        return cls({HOST: {lane: min(share, 1.0) for lane, share in shares.items()}})

    def to_json(self) -> dict[str, dict[str, float]]:
        """The shares as JSON."""
        return {lane: dict(others) for lane, others in self.shares.items()}


NO_CONTENTION = Contention()


_Made = TypeVar("_Made")

PROFILE_FORMAT = "jaxferry.profile/1"

_PROFILE_FLAGS = ("updates_after_all", "updates_together")
_PROFILE_COUNTS: Mapping[str, int | None] = {"num_devices": 1, "num_processes": 1, "gradient_buffers": None}
"""Optional counts, with their defaults."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """The layers of a model in forward order, measured or estimated for a machine.

    Raises `InputError` if a field is not acceptable.

    Attributes:
      machine: free-form facts about the machine, JSON values by name.
      layers: at least one layer; names are unique; entries of one parameter group agree on `param_bytes` and
        `has_gradient`; only those of the last program may have `fused_backward`, and they have a backward; some layer
        has a gradient. `save_bytes` and `fetch_bytes` have the same sum; what returns for a layer's backward left after
        its own forward or a later one. Layers of one program have different parameters and agree on `has_backward` and
        `fused_backward`; only the first of them has kept activations and values that leave and return, and may
        recompute, which it does for all.
      updates_after_all: whether updates wait for all gradients under any plan, as with clipping, accumulation or an
        optimizer that looks at all parameters at once.
      updates_together: whether one update covers several parameter groups, or all, so that none streams and a policy
        has all groups updated in the same place.
      gradient_buffers: the most programs whose gradients host memory holds under any plan whose updates do not wait for
        all gradients; None for all. See `Plan.gradient_buffers`.
      num_devices: the number of devices that share a batch, each with the sizes and times of the layers.
      num_processes: the number of processes that they belong to, equally many devices each.
      contention: what the work of the links and of the host takes of each other's time.
    """

    machine: Mapping[str, Any]
    layers: tuple[LayerProfile, ...]
    updates_after_all: bool = False
    updates_together: bool = False
    gradient_buffers: int | None = None
    num_devices: int = 1
    num_processes: int = 1
    contention: Contention = NO_CONTENTION

    def __post_init__(self) -> None:
        for name in _PROFILE_FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name, default in _PROFILE_COUNTS.items():
            if getattr(self, name) is not default:
                check_count(getattr(self, name), name, "profile")
        if self.num_devices % self.num_processes:
            raise InputError(
                f"num_devices, {self.num_devices}, must be a multiple of num_processes, {self.num_processes}"
            )
        if not isinstance(self.machine, Mapping):
            raise InputError(f"machine must be a JSON object, got {self.machine!r}")
        object.__setattr__(self, "machine", dict(self.machine))
        object.__setattr__(self, "layers", tuple(self.layers))
        try:
            json.dumps(self.machine, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"machine must hold JSON values only: {error}") from error
        check_list(list(self.layers), "layers")
        check_unique([layer.name for layer in self.layers])
        first: dict[str, LayerProfile] = {}
        for index, layer in enumerate(self.layers):
            other = first.setdefault(layer.parameters, layer)
            for key in ("param_bytes", "has_gradient"):
                if getattr(other, key) != getattr(layer, key):
                    raise InputError(
                        f'layer "{layer.name}": {key} must be {getattr(other, key)} as in layer "{other.name}" '
                        f'of the same parameters "{layer.parameters}", got {getattr(layer, key)}'
                    )
            if layer.fused_backward and index not in self.programs[-1]:
                raise InputError(f'layer "{layer.name}": only the last layer can have fused_backward')
        if not self.layers[-1].has_backward:
            raise InputError(f'layer "{self.layers[-1].name}": the last layer must have a backward (has_backward)')
        self._check_programs()
        self._check_crossings()

    def offloading_at_most(self, num_bytes: int) -> Self:
        """The profile for plans that let so many bytes of each process wait in host memory: of the first layers."""
        left = num_bytes * self.num_processes // self.num_devices
        changes = list[dict[str, Any]]()
        for layer in self.layers:
            most = max(layer.offloadable_bytes.values(), default=0)
            changes.append({"offloadable_bytes": {}} if most > left else {})
            left -= most if most <= left else 0
        return self.with_layers(changes) if any(changes) else self

    def _check_programs(self) -> None:
        if self.layers[0].shares_program:
            raise InputError(f'layer "{self.layers[0].name}": no layer before it has a program to share')
        for members in self.programs:
            first, *others = (self.layers[member] for member in members)
            for layer in others:
                for key in ("has_backward", "fused_backward"):
                    if getattr(layer, key) != getattr(first, key):
                        raise InputError(
                            f'layer "{layer.name}": {key} must be {getattr(first, key)} as in layer "{first.name}" of '
                            f"the same program, got {getattr(layer, key)}"
                        )
                moved = layer.save_bytes or layer.fetch_bytes or layer.offloadable_bytes
                if layer.can_recompute or layer.activation_bytes or moved:
                    raise InputError(
                        f'layer "{layer.name}": recomputation, activation_bytes, save_bytes, fetch_bytes and '
                        f'offloadable_bytes belong to the first layer of its program, "{first.name}"'
                    )
            if len({layer.parameters for layer in (first, *others)}) <= len(others):
                raise InputError(f'layer "{first.name}": the layers of a program must have different parameters')

    def _check_crossings(self) -> None:
        """Checks that all values that leave for host memory return, none before it has left."""
        left = returned = 0
        for layer in reversed(self.layers):
            left, returned = left + layer.save_bytes, returned + layer.fetch_bytes
            if returned > left:
                raise InputError(
                    f'layer "{layer.name}": from this layer on, fetch_bytes add up to {returned} and save_bytes to '
                    f"{left}; a value cannot return before it has left"
                )
        if returned != left:
            raise InputError(
                f"layers: save_bytes add up to {left} and fetch_bytes to {returned}; all values must return"
            )

    @functools.cached_property
    def programs(self) -> tuple[tuple[int, ...], ...]:
        """For each pair of a forward and a backward program, the ascending indices of its layers, in order."""
        firsts = [index for index, layer in enumerate(self.layers) if not layer.shares_program or index == 0]
        ends = [*firsts[1:], len(self.layers)]
        return tuple(tuple(range(first, end)) for first, end in zip(firsts, ends, strict=True))

    @functools.cached_property
    def program_ends(self) -> tuple[tuple[int, int], ...]:
        """For each layer, the first and the last layer of its program."""
        return tuple((members[0], members[-1]) for members in self.programs for _ in members)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter group, the ascending indices of its layers; groups in order of their first layer."""
        members: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.parameters, []).append(index)
        return tuple(tuple(indices) for indices in members.values())

    @functools.cached_property
    def group_of(self) -> tuple[int, ...]:
        """For each layer, the index of its group in `groups`."""
        names = dict.fromkeys(layer.parameters for layer in self.layers)
        number_of = {name: number for number, name in enumerate(names)}
        return tuple(number_of[layer.parameters] for layer in self.layers)

    @functools.cached_property
    def group_update_s(self) -> tuple[float, ...]:
        """For each group, the seconds of its one update: the maximum over its entries."""
        return tuple(max(self.layers[index].update_s for index in members) for members in self.groups)

    @functools.cached_property
    def shares_links(self) -> bool:
        """Whether programs by DHA or GO take time of the links."""
        return any(getattr(layer, key) > 0 for layer in self.layers for key in LINK_SHARES)

    @functools.cached_property
    def has_times(self) -> bool:
        """Whether any time is above 0; a profile of sizes only has none."""
        return any(getattr(layer, key) > 0 for layer in self.layers for key in SECONDS)

    def once(self, of: Callable[[Profile], _Made]) -> _Made:
        """`of(self)`, made at the first call; nobody may change it."""
        if of not in self._made:
            self._made[of] = of(self)
        return self._made[of]

    @functools.cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def of_layers(self, kept: Sequence[int], same: Iterable[Callable[[Profile], Any]]) -> Self:
        """The profile of some whole programs, by their layers; what these functions make `once` is as of all layers."""
        found = dataclasses.replace(self, layers=tuple(self.layers[layer] for layer in kept))
        found._made.update((of, self.once(of)) for of in same)
        return found

    def with_layers(self, changes: Iterable[Mapping[str, Any]]) -> Self:
        """The profile with changed fields of each layer."""
        pairs = zip(self.layers, changes, strict=True)
        return dataclasses.replace(self, layers=tuple(dataclasses.replace(layer, **own) for layer, own in pairs))

    def only_recomputing(self, allowed: Sequence[bool]) -> Self:
        """The profile for plans that may recompute only these layers, (layers,) flags."""
        return self.with_layers({} if can else NO_RECOMPUTATION for can in allowed)

    def without_streaming(self) -> Self:
        """The profile for policies that may not stream updates through the GPU."""
        none = dict.fromkeys(("update_streamed_s", "state_up_s", "state_down_s"))
        return self.with_layers(none for _ in self.layers)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.profile/1`.

        Raises `InputError` if a key is missing or a value not acceptable; the message names layer and key.
        """
        fields = check_format(document, PROFILE_FORMAT)
        optional = (*_PROFILE_FLAGS, *_PROFILE_COUNTS)
        check_spelling(fields, ("format", "machine", "layers", "contention", *optional), "profile")
        machine = fields.get("machine", {})
        layers = check_list(required(fields, "layers", "profile"), "layers")
        records = tuple(LayerProfile.from_json(layer, index) for index, layer in enumerate(layers))
        if not any(layer.has_gradient for layer in records):
            raise InputError("layers: at least one must have a gradient (has_gradient)")
        contention = Contention(fields.get("contention", {}))
        known = {name: fields[name] for name in optional if name in fields}
        return cls(machine, records, **known, contention=contention)

    def to_json(self) -> dict[str, Any]:
        """The profile as `jaxferry.profile/1`."""
        counts = {name: getattr(self, name) for name in _PROFILE_COUNTS}
        return {
            "format": PROFILE_FORMAT,
            "machine": dict(self.machine),
            "layers": [layer.to_json() for layer in self.layers],
            **{name: True for name in _PROFILE_FLAGS if getattr(self, name)},
            **{name: num for name, num in counts.items() if num != _PROFILE_COUNTS[name]},
            **({"contention": self.contention.to_json()} if self.contention else {}),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile from a file; errors name the file."""
        return load_record(path, cls.from_json)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file."""
        write_json(path, self.to_json())
