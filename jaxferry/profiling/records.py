"""Profiles: the cost of each layer of a model on a machine, in seconds and bytes.

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

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

from jaxferry.errors import InputError
from jaxferry.records import (
    check_bytes,
    check_flag,
    check_format,
    check_keys,
    check_list,
    check_seconds,
    check_spelling,
    check_text,
    check_unique,
    load_record,
    name_of_element,
    required,
    write_json,
)

_Made = TypeVar("_Made")
_Arguments = TypeVarTuple("_Arguments")

PROFILE_FORMAT = "jaxferry.profile/1"

_PROGRAM_BYTES = (
    "save_bytes",
    "fetch_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "row_gradient_bytes",
    "sum_bytes",
)
_BYTES = ("param_bytes", "grad_bytes", "activation_bytes", *_PROGRAM_BYTES)
_SECONDS = (
    "load_s",
    "forward_s",
    "forward_dha_s",
    "backward_s",
    "backward_dha_s",
    "backward_go_s",
    "offload_s",
    "update_s",
    "inter_forward_s",
    "inter_backward_s",
)
_FLAGS = {
    "backward_reads": True,
    "gradient_rows": False,
    "has_backward": True,
    "has_gradient": True,
    "fused_backward": False,
    "shares_program": False,
}
_LINK_SHARES = ("forward_read_s", "backward_read_s", "backward_write_s")
_FACTS = {**_FLAGS, **dict.fromkeys(_PROGRAM_BYTES, 0), **dict.fromkeys(_LINK_SHARES, 0.0)}
_PROFILE_FLAGS = ("updates_after_all", "updates_together")
_PROFILE_COUNTS = ("num_devices", "num_processes")
_UPDATES_ON_DEVICE = ("update_gpu_s", "state_up_s", "state_down_s")
_ON_DEVICE = (*_UPDATES_ON_DEVICE, "state_bytes")
_OPTIONAL = ("activation_bytes", "inter_forward_s", "inter_backward_s", "temporary_bytes", *_ON_DEVICE, *_FACTS)
_RECOMPUTATION = ("recompute_s", "recompute_activation_bytes")
_OF_GRADIENT = {
    **dict.fromkeys(("grad_bytes", "row_gradient_bytes", "sum_bytes", "state_bytes"), 0),
    **dict.fromkeys(("offload_s", "update_s", "backward_write_s"), 0.0),
    **dict.fromkeys(_UPDATES_ON_DEVICE),
}
_OF_BACKWARD = {
    **dict.fromkeys(("activation_bytes", "fetch_bytes", "backward_workspace_bytes"), 0),
    **dict.fromkeys(("backward_s", "backward_dha_s", "backward_go_s", "inter_backward_s", "backward_read_s"), 0.0),
    **dict.fromkeys(_RECOMPUTATION),
}


def forward_variant(by_dha: bool, recomputes: bool = False) -> str:
    """The name of a layer's forward, such as `"forward_dha"`."""
    return f"forward{'_dha' * by_dha}{'_recompute' * recomputes}"


def backward_variant(by_dha: bool, grad_on_host: bool, recomputes: bool = False) -> str:
    """The name of a layer's backward, such as `"backward_dha_go_recompute"`."""
    return f"backward{'_dha' * by_dha}{'_go' * grad_on_host}{'_recompute' * recomputes}"


_BOTH = (False, True)
_FORWARDS = tuple(forward_variant(*flags) for flags in itertools.product(_BOTH, repeat=2))
_BACKWARDS = tuple(backward_variant(*flags) for flags in itertools.product(_BOTH, repeat=3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """The sizes and times of one layer; all times in seconds.

    Attributes:
      name: the layer's name, unique in its profile.
      param_bytes: bytes of its parameters on the device.
      grad_bytes: bytes of its gradient on the device.
      activation_bytes: bytes kept on the device from its forward to its backward.
      load_s: T_trans, parameters host to device.
      forward_s: T_FP, forward with parameters on the device.
      forward_dha_s: T_FP^H, forward that reads its parameters in host memory.
      backward_s: T_BP = T_CBP, backward with parameters and gradient on the device.
      backward_dha_s: T_BP^H, backward that reads its parameters in host memory.
      backward_go_s: T_GBP, backward that writes its gradient to host memory, parameters on the device.
      offload_s: gradient, or its sum of `sum_bytes`, device to host.
      update_s: the optimizer step on the host.
      inter_forward_s: T_FP(A), parameterless compute right after this layer's forward.
      inter_backward_s: T_BP(A), parameterless compute right before this layer's backward.
      parameters: the parameter group; entries with the same group share one host vector. Default: `name`.
      recompute_s: extra time of a backward that runs the forward again; None if no plan may choose that.
      recompute_activation_bytes: bytes then kept on the device from forward to backward. Give both keys or neither.
      backward_reads: whether the backward reads the parameters. A lookup's backward does not. One that runs its forward
        again does in any case.
      gradient_rows: whether the gradient leaves as rows of lookups. Such a gradient is never GO.
      row_gradient_bytes: bytes of these rows on the device; 0 counts `grad_bytes`, those of the whole table.
      sum_bytes: bytes of the gradient's sum over micro-batches if that leaves the device instead and is wider; else 0.
      has_backward: whether there is a backward. Without one, all times and byte counts of the backward, of
        recomputation, of the gradient and of kept activations are 0, and given values are ignored.
      has_gradient: whether the backward computes a gradient of the parameters. Without one, `grad_bytes`, `offload_s`
        and `update_s` are 0, `backward_go_s` is `backward_s`, and given values are ignored. It needs `has_backward`.
      fused_backward: whether forward and backward are one program; possible only for the last program of a profile.
      shares_program: whether its forward and its backward are part of the programs of the layer before it. So the
        layers of a program have parameters of their own, but run together.
      save_bytes: bytes of values that leave for host memory after this forward, the last one that reads them.
      fetch_bytes: bytes of values that return from host memory for this backward.
      forward_workspace_bytes: device memory in use while the forward runs, besides parameters, kept activations and the
        program's temporaries.
      backward_workspace_bytes: likewise for the backward, without its gradient.
      forward_read_s: time of the link up that a forward by DHA takes for its reads; at most `forward_dha_s`. Loads get
        what is left of the link (`jaxferry.simulate.shared_links`).
      backward_read_s: likewise for the backward; without what a backward by DHA reads that runs its forward again.
      backward_write_s: time of the link down that a GO backward takes for its gradient.
      update_gpu_s: the optimizer step on the device, with master parameters and optimizer state there; None if no
        policy may choose that.
      state_up_s: master parameters and optimizer state host to device, for an update that streams them through the GPU;
        None if no policy may choose that. A plan file may; the time is then that of a load of as many bytes.
      state_down_s: likewise back, with the new compute copy; as an offload of as many bytes if None.
      state_bytes: bytes of master parameters and optimizer state.
      temporary_bytes: device memory that each compiled program needs besides its arguments and results, by variant
        (`forward_variant`, `backward_variant`); a missing variant needs 0. If forward and backward are one program,
        its temporaries count as the backward's.

    Raises:
      InputError: if a field is not acceptable; the message names layer and field.
    """

    name: str
    param_bytes: int
    grad_bytes: int
    load_s: float
    forward_s: float
    forward_dha_s: float
    backward_s: float
    backward_dha_s: float
    backward_go_s: float
    offload_s: float
    update_s: float
    activation_bytes: int = 0
    inter_forward_s: float = 0.0
    inter_backward_s: float = 0.0
    parameters: str = ""
    recompute_s: float | None = None
    recompute_activation_bytes: int | None = None
    backward_reads: bool = True
    gradient_rows: bool = False
    has_backward: bool = True
    has_gradient: bool = True
    fused_backward: bool = False
    shares_program: bool = False
    save_bytes: int = 0
    fetch_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    row_gradient_bytes: int = 0
    sum_bytes: int = 0
    forward_read_s: float = 0.0
    backward_read_s: float = 0.0
    backward_write_s: float = 0.0
    update_gpu_s: float | None = None
    state_up_s: float | None = None
    state_down_s: float | None = None
    state_bytes: int = 0
    temporary_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f'layer "{check_text(self.name, "name", "layer")}"'
        for key in _FLAGS:
            object.__setattr__(self, key, check_flag(getattr(self, key), key, where))
        for key in _BYTES:
            object.__setattr__(self, key, check_bytes(getattr(self, key), key, where))
        for key in (*_SECONDS, *_LINK_SHARES):
            object.__setattr__(self, key, check_seconds(getattr(self, key), key, where))
        if self.forward_read_s > self.forward_dha_s:
            most, given = self.forward_dha_s, self.forward_read_s
            raise InputError(f"{where}: forward_read_s must be at most forward_dha_s, {most}, got {given}")
        object.__setattr__(self, "state_bytes", check_bytes(self.state_bytes, "state_bytes", where))
        for key in _UPDATES_ON_DEVICE:
            if getattr(self, key) is not None:
                object.__setattr__(self, key, check_seconds(getattr(self, key), key, where))
        if self.parameters == "":
            object.__setattr__(self, "parameters", self.name)
        check_text(self.parameters, "parameters", where)
        self._check_recomputation(where)
        self._check_temporaries(where)
        self._leave_out_what_does_not_run(where)

    def _leave_out_what_does_not_run(self, where: str) -> None:
        if self.has_gradient and not self.has_backward:
            raise InputError(f"{where}: has_gradient needs has_backward; set both to false")
        if self.fused_backward and not self.has_backward:
            raise InputError(f"{where}: fused_backward needs has_backward")
        nothing = {**({} if self.has_gradient else _OF_GRADIENT), **({} if self.has_backward else _OF_BACKWARD)}
        if not self.has_gradient and self.has_backward:
            nothing["backward_go_s"] = self.backward_s
        for key, value in nothing.items():
            object.__setattr__(self, key, value)

    def _check_recomputation(self, where: str) -> None:
        given = [key for key in _RECOMPUTATION if getattr(self, key) is not None]
        if len(given) == 1:
            [missing] = set(_RECOMPUTATION) - set(given)
            raise InputError(f"{where}: {given[0]} needs {missing} beside it")
        if given:
            seconds = check_seconds(self.recompute_s, "recompute_s", where)
            kept_bytes = check_bytes(self.recompute_activation_bytes, "recompute_activation_bytes", where)
            object.__setattr__(self, "recompute_s", seconds)
            object.__setattr__(self, "recompute_activation_bytes", kept_bytes)

    def _check_temporaries(self, where: str) -> None:
        given = self.temporary_bytes
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: temporary_bytes must be an object of bytes by program, got {given!r}")
        check_keys(given, (*_FORWARDS, *_BACKWARDS), f"{where}: temporary_bytes")
        allowed = (*_FORWARDS, *_BACKWARDS) if self.has_backward else _FORWARDS
        checked = {key: check_bytes(value, f"temporary_bytes of {key}", where) for key, value in given.items()}
        kept = {key: value for key, value in checked.items() if value and key in allowed}
        object.__setattr__(self, "temporary_bytes", kept)

    @classmethod
    def from_json(cls, document: Any, index: int = 0) -> Self:
        """Reads one element of `layers`; `index` is its position, for errors about its name."""
        name, where = name_of_element(document, index)
        check_keys(document, tuple(field.name for field in dataclasses.fields(cls)), where)
        values = {key: required(document, key, where) for key in (*_BYTES, *_SECONDS) if key not in _OPTIONAL}
        values |= {key: document[key] for key in _OPTIONAL if key in document}
        if "recompute_s" in document:
            values["recompute_s"] = check_seconds(document["recompute_s"], "recompute_s", where)
        if "recompute_activation_bytes" in document:
            kept_bytes = document["recompute_activation_bytes"]
            values["recompute_activation_bytes"] = check_bytes(kept_bytes, "recompute_activation_bytes", where)
        if "parameters" in document:
            values["parameters"] = check_text(document["parameters"], "parameters", where)
        return cls(name=name, **values)

    def to_json(self) -> dict[str, Any]:
        """The layer as an element of `layers`; optional keys only where they differ from the default."""
        document = dataclasses.asdict(self)
        if self.parameters == self.name:
            del document["parameters"]
        absent: dict[str, Any] = {**_FACTS, **dict.fromkeys(_RECOMPUTATION), "temporary_bytes": {}}
        absent |= {**dict.fromkeys(_UPDATES_ON_DEVICE), "state_bytes": 0}
        return {key: value for key, value in document.items() if key not in absent or value != absent[key]}

    @property
    def device_gradient_bytes(self) -> int:
        """Bytes of the gradient on the device."""
        return self.row_gradient_bytes if self.gradient_rows and self.row_gradient_bytes else self.grad_bytes

    @property
    def offload_bytes(self) -> int:
        """Bytes that leave the device in `offload_s`."""
        return self.sum_bytes or self.grad_bytes

    @property
    def can_recompute(self) -> bool:
        """Whether a plan may let the backward run the forward again."""
        return self.recompute_s is not None

    def kept_bytes(self, recomputes: bool) -> int:
        """Bytes kept on the device from the forward to the backward, with or without recomputation."""
        again = self.recompute_activation_bytes if recomputes else None
        return self.activation_bytes if again is None else again

    def forward_bytes(self, by_dha: bool, recomputes: bool = False) -> int:
        """Device memory in use while the forward runs, besides parameters and kept activations."""
        return self.forward_workspace_bytes + self.temporary_bytes.get(forward_variant(by_dha, recomputes), 0)

    def backward_bytes(self, by_dha: bool, grad_on_host: bool, recomputes: bool = False) -> int:
        """Likewise for the backward, without its gradient."""
        variant = backward_variant(by_dha, grad_on_host, recomputes)
        return self.backward_workspace_bytes + self.temporary_bytes.get(variant, 0)

    def without_recomputation(self) -> Self:
        """The layer without the option to recompute it."""
        return dataclasses.replace(self, recompute_s=None, recompute_activation_bytes=None)

    def backward_for(self, by_dha: bool, grad_on_host: bool, recomputes: bool = False) -> float:
        """Seconds of the backward: parameters read by DHA or not, gradient written to the host or not.

        The costs of both detours add up, so a gradient that stays gains T_GBP - T_CBP in every mode, as in MemFerry,
        section IV-D. The result is never below 0. Running the forward again adds `recompute_s`, and by DHA also the
        extra time of the forward by DHA.
        """
        more_s = 0.0
        if recomputes:
            more_s = (self.recompute_s or 0.0) + (max(self.forward_dha_s - self.forward_s, 0.0) if by_dha else 0.0)
        if not by_dha:
            return (self.backward_go_s if grad_on_host else self.backward_s) + more_s
        if not grad_on_host:
            return self.backward_dha_s + more_s
        return max(self.backward_dha_s + (self.backward_go_s - self.backward_s), 0.0) + more_s

    def backward_reads_for(self, recomputes: bool) -> float:
        """Seconds of the link up that a backward by DHA takes, which reads twice if it runs its forward again."""
        return self.backward_read_s + (self.forward_read_s if recomputes else 0.0)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The layers of a model in forward order, measured or estimated for a machine.

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
      updates_together: whether one update covers all parameter groups, so that none streams and a plan has them all
        updated in the same place.
      num_devices: the number of devices that share a batch, each with the sizes and times of the layers.
      num_processes: the number of processes that they belong to, equally many devices each.

    Raises:
      InputError: if a field is not acceptable.
    """

    machine: Mapping[str, Any]
    layers: tuple[LayerProfile, ...]
    updates_after_all: bool = False
    updates_together: bool = False
    num_devices: int = 1
    num_processes: int = 1

    def __post_init__(self) -> None:
        for name in _PROFILE_FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in _PROFILE_COUNTS:
            num = getattr(self, name)
            if isinstance(num, bool) or not isinstance(num, int) or num < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {num!r}")
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
                if layer.can_recompute or layer.activation_bytes or layer.save_bytes or layer.fetch_bytes:
                    raise InputError(
                        f'layer "{layer.name}": recomputation, activation_bytes, save_bytes and fetch_bytes belong to '
                        f'the first layer of its program, "{first.name}"'
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
        return any(getattr(layer, key) > 0 for layer in self.layers for key in _LINK_SHARES)

    @functools.cached_property
    def has_times(self) -> bool:
        """Whether any time is above 0; a profile of sizes only has none."""
        return any(getattr(layer, key) > 0 for layer in self.layers for key in _SECONDS)

    def once(self, of: Callable[["Profile", Unpack[_Arguments]], _Made], *arguments: *_Arguments) -> _Made:
        """`of(self, *arguments)`, made at the first call; nobody may change it."""
        key = of, arguments
        if key not in self._made:
            self._made[key] = of(self, *arguments)
        return self._made[key]

    @functools.cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def only_recomputing(self, allowed: Sequence[bool]) -> Self:
        """The profile for plans that may recompute only these layers, (layers,) flags."""
        layers = zip(self.layers, allowed, strict=True)
        return dataclasses.replace(
            self, layers=tuple(layer if can else layer.without_recomputation() for layer, can in layers)
        )

    def without_streaming(self) -> Self:
        """The profile for policies that may not stream updates through the GPU."""
        layers = (dataclasses.replace(layer, state_up_s=None, state_down_s=None) for layer in self.layers)
        return dataclasses.replace(self, layers=tuple(layers))

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.profile/1`.

        Raises:
          InputError: if a key is missing or a value not acceptable; the message names layer and key.
        """
        fields = check_format(document, PROFILE_FORMAT)
        optional = (*_PROFILE_FLAGS, *_PROFILE_COUNTS)
        check_spelling(fields, ("format", "machine", "layers", *optional), "profile")
        machine = fields.get("machine", {})
        layers = check_list(required(fields, "layers", "profile"), "layers")
        records = tuple(LayerProfile.from_json(layer, index) for index, layer in enumerate(layers))
        if not any(layer.has_gradient for layer in records):
            raise InputError("layers: at least one must have a gradient (has_gradient)")
        return cls(machine, records, **{name: fields[name] for name in optional if name in fields})

    def to_json(self) -> dict[str, Any]:
        """The profile as `jaxferry.profile/1`."""
        return {
            "format": PROFILE_FORMAT,
            "machine": dict(self.machine),
            "layers": [layer.to_json() for layer in self.layers],
            **{name: True for name in _PROFILE_FLAGS if getattr(self, name)},
            **{name: getattr(self, name) for name in _PROFILE_COUNTS if getattr(self, name) > 1},
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile from a file; errors name the file."""
        return load_record(path, cls.from_json)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file."""
        write_json(path, self.to_json())
