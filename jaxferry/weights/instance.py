"""Instances of Weight Offloading Strategies, made of profiles, and the results of a policy, exported as plans.

The engine updates parameters on the host, so every layer crosses the link before its forward anyway: it always makes
choice (b). A selection adds choice (a): weights that are dropped after their forward and loaded again for their
backward. These layers get mode RELOAD; all others stay until their backward (GFGB).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import Mode
from jaxferry.records import check_keys, required
from jaxferry.step import LayerPlan, Plan
from jaxferry.units import format_bytes

_LISTS = ("weights", "activations", "forward_s", "backward_s")
_SCALARS = ("memory_bytes", "bandwidth_bytes_per_s")
_LARGEST = 1e30  # far beyond any machine, and small enough that sums and quotients do not overflow


@dataclasses.dataclass(frozen=True)
class Instance:
    """A chain of L layers, a GPU memory and a link. Layers are numbered from 0: layer k is the paper's k + 1.

    Raises `InputError` if a list has the wrong length or a number is negative, NaN or infinite.

    Attributes:
      weights: |w_i|, bytes of each layer's weights; L entries.
      activations: |a^0| to |a^L|, bytes of the input, then of each layer's output; L + 1 entries.
      forward_s: u_F, seconds; L entries.
      backward_s: u_B, seconds, including the update; L entries.
      memory_bytes: M_GPU.
      bandwidth_bytes_per_s: beta, for each direction of the full-duplex link.
    """

    weights: tuple[float, ...]
    activations: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.weights:
            raise InputError("weights must name at least one layer, got an empty list")
        for name in _LISTS:
            values = getattr(self, name)
            expected = len(self.weights) + (name == "activations")
            if len(values) != expected:
                raise InputError(
                    f"{name} must have {expected} entries for {len(self.weights)} weights, got {len(values)}"
                )
            for index, value in enumerate(values):
                _check_number(f"{name}[{index}]", value)
        for name in _SCALARS:
            _check_number(name, getattr(self, name))
        if self.bandwidth_bytes_per_s < 1 / _LARGEST:
            raise InputError(f"bandwidth_bytes_per_s must be positive, got {self.bandwidth_bytes_per_s}")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.weights)

    @functools.cached_property
    def compute_s(self) -> float:
        """The sum of all operations' times: no schedule is shorter."""
        return math.fsum(self.forward_s) + math.fsum(self.backward_s)

    @functools.cached_property
    def kept_activations(self) -> tuple[float, ...]:
        """Bytes of the activations a^0 to a^i, which are kept after i layers have run forward, for i = 0 to L."""
        return tuple(itertools.accumulate(self.activations))

    def transfer_s(self, layer: int) -> float:
        """Returns the seconds that the weights of `layer` take in one direction of the link."""
        return self.weights[layer] / self.bandwidth_bytes_per_s

    def forward_bytes(self, layer: int) -> float:
        """Returns M_F of equation (1): memory during the forward of `layer`, without other layers' weights."""
        return self.weights[layer] + self.kept_activations[layer + 1]

    def backward_bytes(self, layer: int) -> float:
        """Returns M_B of equation (1): memory during the backward of `layer`, including its gradient."""
        return 2 * self.weights[layer] + self.kept_activations[layer + 1]

    @functools.cached_property
    def smallest_memory_bytes(self) -> float:
        """The smallest memory for which a schedule exists: that of the largest single operation."""
        return max(self.backward_bytes(layer) for layer in range(self.num_layers))

    def fits(self, num_bytes: float) -> bool:
        """Whether `num_bytes` fit into the memory, with a tolerance for rounded sums of fractional sizes."""
        return num_bytes <= self.memory_bytes * (1 + 1e-12)

    def check_feasible(self) -> None:
        """Raises BudgetError, with the smallest feasible memory, if no schedule exists."""
        smallest = self.smallest_memory_bytes
        if not self.fits(smallest):
            raise BudgetError(
                f"memory_bytes {self.memory_bytes:.15g} is too small for any schedule: the smallest feasible is "
                f"{math.ceil(smallest)} ({format_bytes(smallest)})",
                math.ceil(smallest),
            )

    @classmethod
    def from_json(cls, document: Any) -> "Instance":
        """Reads a JSON object with the fields of an instance; raises `InputError` with the first wrong key."""
        if not isinstance(document, Mapping):
            raise InputError(f"an instance must be a JSON object, got {type(document).__name__}")
        check_keys(document, _LISTS + _SCALARS, "instance")
        values = {name: required(document, name, "instance") for name in _LISTS + _SCALARS}
        for name in _LISTS:
            if not isinstance(values[name], list):
                raise InputError(f"{name} must be a list of numbers, got {values[name]!r}")
            values[name] = tuple(values[name])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Returns the instance as a JSON object."""
        document: dict[str, Any] = {name: list(getattr(self, name)) for name in _LISTS}
        return document | {name: getattr(self, name) for name in _SCALARS}


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} must be a number, got {value!r}")
    if not 0 <= value <= _LARGEST:
        raise InputError(f"{name} must be finite and not negative, got {str(value)[:40]}")


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """An offloading choice (k, d) of "Weight Offloading Strategies", section 5, for layer k, counted from 0.

    `before_backward` is the paper's d = 1, choice (a): absent between its forward and its backward; False is d = 0,
    choice (b): absent between its backward and the next forward.
    """

    layer: int
    before_backward: bool

    def to_json(self) -> dict[str, object]:
        """Returns the choice as a JSON object."""
        return {"layer": self.layer, "absent": "forward-to-backward" if self.before_backward else "backward-to-forward"}


@dataclasses.dataclass(frozen=True)
class Event:
    """One interval or instant of a cycle, in seconds from the cycle's start.

    That is the start of the last layer's backward, or of the event that it waits for. `kind` is "forward" or "backward"
    (the GPU), "prefetch" (host to device), "offload" (device to host; the device copy stays until it is deleted), or
    "delete" (an instant).
    """

    kind: str
    layer: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One training cycle, repeated forever: backward from the last to the first layer, then forward.

    `duration_s` is the period; all operations and transfers of the cycle end within it. `events` are ordered by start.
    """

    duration_s: float
    events: tuple[Event, ...]

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> "Schedule":
        """Sorts the events, of which the last one's end is the duration."""
        ordered = sorted(events, key=lambda event: (event.start_s, event.end_s))
        return cls(max((event.end_s for event in events), default=0.0), tuple(ordered))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a policy.

    `duration_s` is the period of the schedule, for `bound` a lower bound on any period; `compute_s` the sum of all
    operations' times. There is no schedule for `bound`, nor for `l2l` if its formula leaves too little time for the
    offloads. `note` is a remark for the reader, or "".
    """

    policy: str
    duration_s: float
    compute_s: float
    choices: tuple[Choice, ...]
    schedule: Schedule | None
    note: str = ""

    @classmethod
    def of(cls, policy: str, instance: Instance, choices: Sequence[Choice], schedule: Schedule) -> "Outcome":
        """Returns the outcome of a schedule, with its duration."""
        return cls(policy, schedule.duration_s, instance.compute_s, tuple(sorted(choices)), schedule)

    @property
    def overhead(self) -> float | None:
        """The time beyond the computation as a share of it: 0.02 is 2 %; None without computation."""
        return self.duration_s / self.compute_s - 1 if self.compute_s else None

    def to_json(self) -> dict[str, object]:
        """Returns the document that `jaxferry weights --json` prints."""
        events = () if self.schedule is None else self.schedule.events
        return {
            "policy": self.policy,
            "duration_s": self.duration_s,
            "compute_s": self.compute_s,
            "overhead": self.overhead,
            "choices": [choice.to_json() for choice in self.choices],
            "schedule": [dataclasses.asdict(event) for event in events],
            "note": self.note,
        }


def instance_from_profile(profile: Profile, memory_bytes: int) -> Instance:
    """Converts a profile to an instance; the bandwidth is the average over all loads.

    Parameterless compute counts with the layer that it follows or precedes. Layers of one parameter group count as if
    each had its own weights, so memory is never underestimated. Raises `InputError` if the profile's loads take no
    time.
    """
    load_s = math.fsum(layer.load_s for layer in profile.layers)
    param_bytes = sum(layer.param_bytes for layer in profile.layers)
    if not load_s or not param_bytes:
        raise InputError("load_s and param_bytes must be positive in some layer; otherwise the link has no bandwidth")
    return Instance(
        weights=tuple(layer.param_bytes for layer in profile.layers),
        activations=(0, *(layer.activation_bytes for layer in profile.layers)),
        forward_s=tuple(layer.forward_s + layer.inter_forward_s for layer in profile.layers),
        backward_s=tuple(layer.backward_s + layer.inter_backward_s for layer in profile.layers),
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=param_bytes / load_s,
    )


def export_plan(profile: Profile, policy: str, choices: Iterable[Choice]) -> Plan:
    """Makes a plan for the engine: RELOAD where a weight is absent between forward and backward, else GFGB.

    Its policy is `weights-` and `policy`. Raises `InputError` if a choice names a layer that the profile does not
    have.
    """
    reloaded = {choice.layer for choice in choices if choice.before_backward}
    unknown = [layer for layer in reloaded if not 0 <= layer < len(profile.layers)]
    if unknown:
        raise InputError(f"the choices are for another profile: it has no layer {unknown[0]}")
    layers = tuple(
        LayerPlan(layer.name, Mode.RELOAD if index in reloaded else Mode.GFGB)
        for index, layer in enumerate(profile.layers)
    )
    return Plan(f"weights-{policy}", 1.0, layers)
