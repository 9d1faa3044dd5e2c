"""Plans: the mode and the gradient place of each layer.

`jaxferry.plan/1` is the JSON of a plan:

    {"format": "jaxferry.plan/1", "policy": "exact", "reserve_factor": 1.0,
     "loads": "layerwise", "updates": "overlapped",
     "layers": [{"name": "wte", "mode": "DHA", "gradient": "device"}, ...],
     "predicted": {"forward_s": 0.1, "step_s": 0.5, "steady_step_s": 0.45, "peak_device_bytes": 1000}}

A layer may have the key `remat`: `"full"` if its backward runs its forward again, `"products"` if it keeps the results
of large products and computes the rest again; the default is `"none"`. It may have the key `activations`: `"host"` if
what it keeps waits for its backward in host memory; the default is `"device"`. It may have
the key `update`: `"resident"` if its parameters are updated on the device, where their optimizer state stays; `"gpu"`
if masters and state come to the device for the update only, while the compute copy of a RESIDENT layer stays there; the
default is `"host"`. A plan may have the key `update_order`: `"need"` if the host picks the update that the next forward
needs first; the default is `"backward"`. It may have the key `memory_bytes`, the device memory that gradients may fill,
the key `subgroups`: `"small"` if updates stream in small pieces; the default is `"large"`; the key
`gradient_buffers`, the most programs whose gradients may be in host memory; the default is all; and the key
`deferred_updates`, how many groups the host updates after all backwards; the default is 0.
All further top-level keys, such as `lower_bound_s` and `gap` of `exact`, are the plan's `details`.
"""

import dataclasses
import enum
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from jaxferry.costs import RECOMPUTATION, Profile
from jaxferry.errors import InputError
from jaxferry.modes import ActivationPlace, GradientPlace, Mode, Remat, Subgroups, UpdatePlace
from jaxferry.records import (
    check_bytes,
    check_choice,
    check_count,
    check_format,
    check_keys,
    check_list,
    check_seconds,
    check_share,
    check_spelling,
    check_text,
    check_unique,
    load_record,
    name_of_element,
    required,
    write_json,
)

PLAN_FORMAT = "jaxferry.plan/1"


class Loads(enum.StrEnum):
    """When forwards may start."""

    LAYERWISE = "layerwise"
    """A forward waits only for its own layer's load."""
    BULK = "bulk"
    """No forward starts before all loads for the forward have arrived (ZeRO-Offload as in DeepSpeed)."""


class Updates(enum.StrEnum):
    """When updates may start."""

    OVERLAPPED = "overlapped"
    """An update waits only for its own gradients."""
    AFTER_ALL = "after-all"
    """No update starts before all gradients are on the host."""


class UpdateOrder(enum.StrEnum):
    """Which update the host picks among those that could start."""

    BACKWARD = "backward"
    """The next one in backward order, even if another one could start earlier."""
    NEED = "need"
    """The one whose parameters the next forward needs first."""


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How one layer runs.

    Attributes:
      name: the layer's name in the profile.
      mode: where its forward and backward read the parameters.
      gradient: where its backward writes the gradient.
      remat: what it keeps on the device between forward and backward.
      update: where its parameters are updated. `"resident"` needs mode RESIDENT and a gradient on the device. `"gpu"`
        needs a gradient on the device: the new compute copy goes to host memory with masters and state, or replaces the
        copy on the device in mode RESIDENT.
      activations: where what it keeps waits for its backward.
      tiles: in how many tiles along the rows of the batch its programs run, one after the other.

    Raises:
      InputError: if a field is not acceptable; the message names layer and field.
    """

    name: str
    mode: Mode
    gradient: GradientPlace = GradientPlace.DEVICE
    remat: Remat = Remat.NONE
    update: UpdatePlace = UpdatePlace.HOST
    activations: ActivationPlace = ActivationPlace.DEVICE
    tiles: int = 1

    def __post_init__(self) -> None:
        where = f'layer "{check_text(self.name, "name", "layer")}"'
        object.__setattr__(self, "mode", Mode(check_choice(self.mode, "mode", tuple(Mode), where)))
        gradient = check_choice(self.gradient, "gradient", tuple(GradientPlace), where)
        object.__setattr__(self, "gradient", GradientPlace(gradient))
        object.__setattr__(self, "remat", Remat(check_choice(self.remat, "remat", tuple(Remat), where)))
        update = UpdatePlace(check_choice(self.update, "update", tuple(UpdatePlace), where))
        object.__setattr__(self, "update", update)
        activations = check_choice(self.activations, "activations", tuple(ActivationPlace), where)
        object.__setattr__(self, "activations", ActivationPlace(activations))
        check_count(self.tiles, "tiles", where)
        stays = self.mode is Mode.RESIDENT and self.gradient is GradientPlace.DEVICE
        if update is UpdatePlace.RESIDENT and not stays:
            raise InputError(f'{where}: update "resident" needs mode "RESIDENT" and gradient "device"')
        if update is UpdatePlace.GPU and self.gradient is not GradientPlace.DEVICE:
            raise InputError(f'{where}: update "gpu" needs gradient "device"')

    def with_mode(self, mode: Mode) -> Self:
        """The same layer in another mode; it is updated on the host if its place of update does not allow that mode."""
        is_allowed = mode is Mode.RESIDENT or self.update is not UpdatePlace.RESIDENT
        return dataclasses.replace(self, mode=mode, update=self.update if is_allowed else UpdatePlace.HOST)

    @classmethod
    def from_json(cls, document: Any, index: int = 0) -> Self:
        """Reads one element of `layers`; `index` is its position, for errors about its name."""
        name, where = name_of_element(document, index)
        check_keys(document, tuple(field.name for field in dataclasses.fields(cls)), where)
        modes = required(document, "mode", where), required(document, "gradient", where)
        more = {key: document[key] for key in ("remat", "update", "activations", "tiles") if key in document}
        return cls(name, *modes, **more)

    def to_json(self) -> dict[str, Any]:
        """The layer as an element of `layers`; its other keys only if they are not the defaults."""
        document: dict[str, Any] = {"name": self.name, "mode": self.mode.value, "gradient": self.gradient.value}
        document |= {} if self.remat is Remat.NONE else {"remat": self.remat.value}
        document |= {} if self.update is UpdatePlace.HOST else {"update": self.update.value}
        is_kept = self.activations is ActivationPlace.DEVICE
        document |= {} if is_kept else {"activations": self.activations.value}
        return document | ({} if self.tiles == 1 else {"tiles": self.tiles})


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The simulator's prediction for a plan, exact under the machine model.

    Attributes:
      forward_s: seconds from the step's start to the end of the last `inter_forward_s`.
      step_s: seconds from the step's start to the end of the last update.
      steady_step_s: seconds per step in a long run, where updates run into the next step's forward.
      peak_device_bytes: the most device memory held at any instant.
    """

    forward_s: float
    step_s: float
    steady_step_s: float
    peak_device_bytes: int

    def __post_init__(self) -> None:
        for key in ("forward_s", "step_s", "steady_step_s"):
            object.__setattr__(self, key, check_seconds(getattr(self, key), key, "predicted"))
        peak = check_bytes(self.peak_device_bytes, "peak_device_bytes", "predicted")
        object.__setattr__(self, "peak_device_bytes", peak)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `predicted`."""
        if not isinstance(document, Mapping):
            raise InputError(f"predicted must be a JSON object, got {document!r}")
        names = [field.name for field in dataclasses.fields(cls)]
        check_spelling(document, names, "predicted")
        return cls(**{name: required(document, name, "predicted") for name in names})

    def to_json(self) -> dict[str, Any]:
        """The prediction as `predicted`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The modes and gradient places of all layers of a profile.

    Attributes:
      policy: the name of the policy that made it.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device.
      layers: in forward order.
      loads: when forwards may start.
      updates: when updates may start.
      update_order: which update the host picks among those that could start.
      memory_bytes: device memory that gradients in flight to the host may fill; None for the peak that the step has in
        any case. See `jaxferry.step.gradient_room`.
      subgroups: the size of the pieces in which updates stream through the GPU.
      gradient_buffers: the most programs whose gradients may be in host memory at one time, at least 1: a backward
        waits until the gradients of the program so many places before it have been used. None: all have memory of their
        own. It needs updates that are not after all gradients.
      deferred_updates: how many groups, spread evenly, the host updates after all others, those first that the next
        forward needs first. None are deferred with few gradient buffers, or after all gradients.
      predicted: the simulator's prediction, or None before simulation.
      details: further facts from the policy, JSON values by name: `objective`, `lower_bound_s`, `gap`, `binding`, ...

    Raises:
      InputError: if a field is not acceptable.
    """

    policy: str
    reserve_factor: float
    layers: tuple[LayerPlan, ...]
    loads: Loads = Loads.LAYERWISE
    updates: Updates = Updates.OVERLAPPED
    predicted: Predicted | None = None
    update_order: UpdateOrder = UpdateOrder.BACKWARD
    memory_bytes: int | None = None
    subgroups: Subgroups = Subgroups.LARGE
    gradient_buffers: int | None = None
    deferred_updates: int = 0
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text(self.policy, "policy", "plan")
        object.__setattr__(self, "reserve_factor", check_share(self.reserve_factor, "reserve_factor"))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "loads", Loads(check_choice(self.loads, "loads", tuple(Loads))))
        object.__setattr__(self, "updates", Updates(check_choice(self.updates, "updates", tuple(Updates))))
        order = check_choice(self.update_order, "update_order", tuple(UpdateOrder))
        object.__setattr__(self, "update_order", UpdateOrder(order))
        subgroups = check_choice(self.subgroups, "subgroups", tuple(Subgroups))
        object.__setattr__(self, "subgroups", Subgroups(subgroups))
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", check_bytes(self.memory_bytes, "memory_bytes", "plan"))
        if self.deferred_updates:
            check_count(self.deferred_updates, "deferred_updates", "plan")
        if self.gradient_buffers is not None:
            check_count(self.gradient_buffers, "gradient_buffers", "plan")
            if self.updates is Updates.AFTER_ALL:
                raise InputError(
                    f'plan: gradient_buffers={self.gradient_buffers} needs updates "overlapped", got "after-all", for '
                    "which host memory holds all gradients"
                )
        check_list(list(self.layers), "layers")
        check_unique([layer.name for layer in self.layers])
        self._check_details()
        if self.loads is Loads.BULK:
            for layer in self.layers:
                if layer.mode is Mode.RELOAD:
                    raise InputError(
                        f'layer "{layer.name}": mode RELOAD needs loads "layerwise"; its slots are freed by forwards, '
                        'which "bulk" lets start only after every load'
                    )

    def _check_details(self) -> None:
        object.__setattr__(self, "details", dict(self.details))
        taken = _KEYS & self.details.keys()
        if taken:
            raise InputError(f"details must not use the keys of a plan, got {', '.join(sorted(taken))}")
        try:
            json.dumps(self.details, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"details must hold JSON values only: {error}") from error

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each layer."""
        return tuple(layer.mode for layer in self.layers)

    @property
    def gradients(self) -> tuple[GradientPlace, ...]:
        """The gradient place of each layer."""
        return tuple(layer.gradient for layer in self.layers)

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """Whether the backward of each layer computes anything again."""
        return tuple(layer.remat is not Remat.NONE for layer in self.layers)

    @property
    def remats(self) -> tuple[Remat, ...]:
        """What each layer keeps on the device between forward and backward."""
        return tuple(layer.remat for layer in self.layers)

    @property
    def offloads_activations(self) -> bool:
        """Whether any layer lets what it keeps wait in host memory."""
        return any(layer.activations is ActivationPlace.HOST for layer in self.layers)

    def updated_on_host(self, places: Collection[UpdatePlace] = tuple(UpdatePlace)) -> Self:
        """The plan with all updates on the host, or those of some places; without a prediction if that changes it."""
        layers = tuple(
            dataclasses.replace(layer, update=UpdatePlace.HOST) if layer.update in places else layer
            for layer in self.layers
        )
        return self if layers == self.layers else dataclasses.replace(self, layers=layers, predicted=None)

    def in_tiles(self, numbers: Sequence[int]) -> Self:
        """The plan whose layers run in so many tiles each."""
        if list(numbers) == [layer.tiles for layer in self.layers]:
            return self
        pairs = zip(self.layers, numbers, strict=True)
        return dataclasses.replace(self, layers=tuple(dataclasses.replace(own, tiles=each) for own, each in pairs))

    def without_streams(self) -> Self:
        """The plan with the updates on the host that would stream through the GPU."""
        return self.updated_on_host((UpdatePlace.GPU,))

    @property
    def updates_on_device(self) -> tuple[bool, ...]:
        """Whether the parameters of each layer are updated on the device, where they stay."""
        return tuple(layer.update is UpdatePlace.RESIDENT for layer in self.layers)

    @property
    def updates_streamed(self) -> tuple[bool, ...]:
        """Whether masters and optimizer state of each layer are streamed through the GPU."""
        return tuple(layer.update is UpdatePlace.GPU for layer in self.layers)

    @property
    def copies_stay(self) -> tuple[bool, ...]:
        """Whether that is so and the compute copy of each layer stays on the device."""
        return tuple(layer.update is UpdatePlace.GPU and layer.mode is Mode.RESIDENT for layer in self.layers)

    def check_profile(self, profile: Profile) -> None:
        """Checks that the plan has this profile's layers in the same order, and recomputes only layers that can be.

        Layers of one parameter group must agree on `update`. If that is `"gpu"`, all of them are RESIDENT or none is.

        Raises:
          InputError: if it is not; the message names the first layer that differs.
        """
        if len(self.layers) != len(profile.layers):
            raise InputError(
                f"the plan is for another profile: it has {len(self.layers)} layers, the profile {len(profile.layers)}"
            )
        for index, (mine, theirs) in enumerate(zip(self.layers, profile.layers, strict=True)):
            if mine.name != theirs.name:
                raise InputError(
                    f'the plan is for another profile: layer {index} is "{mine.name}" in the plan '
                    f'and "{theirs.name}" in the profile'
                )
            if mine.remat not in theirs.levels:
                raise InputError(
                    f'layer "{mine.name}": remat "{mine.remat}" needs the keys '
                    f"{' and '.join(RECOMPUTATION[mine.remat])} in the profile"
                )
        for members in profile.groups:
            first, *others = (self.layers[member] for member in members)
            for other in others:
                if other.update is not first.update:
                    raise InputError(
                        f'layer "{other.name}": update must be "{first.update}" as in layer "{first.name}", which '
                        "has the same parameters"
                    )
                if (other.mode is Mode.RESIDENT) != (first.mode is Mode.RESIDENT) and other.update is UpdatePlace.GPU:
                    raise InputError(
                        f'layer "{other.name}": with update "gpu" its mode must be RESIDENT if and only if that of '
                        f'layer "{first.name}" is, which has the same parameters'
                    )

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.plan/1`.

        Raises:
          InputError: if a key is missing or a value is not acceptable; the message names layer and key.
        """
        fields = check_format(document, PLAN_FORMAT)
        check_spelling(fields, sorted(_KEYS), "plan")
        layers = check_list(required(fields, "layers", "plan"), "layers")
        predicted = fields.get("predicted")
        return cls(
            policy=required(fields, "policy", "plan"),
            reserve_factor=required(fields, "reserve_factor", "plan"),
            layers=tuple(LayerPlan.from_json(layer, index) for index, layer in enumerate(layers)),
            loads=fields.get("loads", Loads.LAYERWISE),
            updates=fields.get("updates", Updates.OVERLAPPED),
            predicted=None if predicted is None else Predicted.from_json(predicted),
            update_order=fields.get("update_order", UpdateOrder.BACKWARD),
            memory_bytes=fields.get("memory_bytes"),
            subgroups=fields.get("subgroups", Subgroups.LARGE),
            gradient_buffers=fields.get("gradient_buffers"),
            deferred_updates=fields.get("deferred_updates", 0),
            details={key: value for key, value in fields.items() if key not in _KEYS},
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as `jaxferry.plan/1`; `details` become top-level keys."""
        document: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "policy": self.policy,
            "reserve_factor": self.reserve_factor,
            "loads": self.loads.value,
            "updates": self.updates.value,
            **({} if self.update_order is UpdateOrder.BACKWARD else {"update_order": self.update_order.value}),
            **({} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}),
            **({} if self.subgroups is Subgroups.LARGE else {"subgroups": self.subgroups.value}),
            **({} if self.gradient_buffers is None else {"gradient_buffers": self.gradient_buffers}),
            **({"deferred_updates": self.deferred_updates} if self.deferred_updates else {}),
            **self.details,
            "layers": [layer.to_json() for layer in self.layers],
        }
        if self.predicted is not None:
            document["predicted"] = self.predicted.to_json()
        return document

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan from a file; errors name the file."""
        return load_record(path, cls.from_json)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file."""
        write_json(path, self.to_json())


_KEYS = {"format"} | {field.name for field in dataclasses.fields(Plan)} - {"details"}
