"""The cost of one layer on a machine, in seconds and bytes: an element of `layers` in a profile."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Self

from jaxferry.errors import InputError
from jaxferry.modes import ActivationPlace, Remat
from jaxferry.records import (
    check_bytes,
    check_count,
    check_flag,
    check_keys,
    check_seconds,
    check_text,
    name_of_element,
    required,
)

SECONDS = (
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
LINK_SHARES = ("forward_read_s", "backward_read_s", "backward_write_s")
_OF_STATE = ("update_gpu_s", "update_streamed_s", "state_up_s", "state_down_s", "state_read_s", "state_write_s")
RECOMPUTATION = {
    Remat.PRODUCTS: ("products_recompute_s", "products_activation_bytes"),
    Remat.FULL: ("recompute_s", "recompute_activation_bytes"),
}
"""The keys of what a backward that recomputes costs: seconds, and the bytes that are then kept."""
OF_BATCH = (
    *("activation_bytes", "save_bytes", "fetch_bytes", "forward_workspace_bytes", "backward_workspace_bytes"),
    *(key for _, key in RECOMPUTATION.values()),
)
"""The keys of bytes that grow with the batch."""
NO_RECOMPUTATION = dict.fromkeys(itertools.chain(*RECOMPUTATION.values()))
_OF_GRADIENT = {
    **dict.fromkeys(("grad_bytes", "row_gradient_bytes", "sum_bytes", "state_bytes"), 0),
    **dict.fromkeys(("offload_s", "update_s", "backward_write_s"), 0.0),
    **dict.fromkeys(_OF_STATE),
}
_OF_BACKWARD: dict[str, Any] = {
    **dict.fromkeys(("activation_bytes", "fetch_bytes", "backward_workspace_bytes"), 0),
    **dict.fromkeys(("backward_s", "backward_dha_s", "backward_go_s", "inter_backward_s", "backward_read_s"), 0.0),
    **NO_RECOMPUTATION,
    "offloadable_bytes": {},
}
_SUFFIXES = {Remat.NONE: "", Remat.PRODUCTS: "_products", Remat.FULL: "_recompute"}


def forward_variant(by_dha: bool, remat: Remat = Remat.NONE) -> str:
    """The name of a layer's forward, such as `"forward_dha"`."""
    return f"forward{'_dha' * by_dha}{_SUFFIXES[remat]}"


def backward_variant(by_dha: bool, grad_on_host: bool, remat: Remat = Remat.NONE) -> str:
    """The name of a layer's backward, such as `"backward_dha_go_recompute"`."""
    return f"backward{'_dha' * by_dha}{'_go' * grad_on_host}{_SUFFIXES[remat]}"


_BOTH = (False, True)
_FORWARDS = tuple(forward_variant(*each) for each in itertools.product(_BOTH, Remat))
_BACKWARDS = tuple(backward_variant(*each) for each in itertools.product(_BOTH, _BOTH, Remat))


_BY_NAME = {
    "temporary_bytes": ("program", (*_FORWARDS, *_BACKWARDS)),
    "offloadable_bytes": ("what is kept", tuple(map(str, Remat))),
}
_REQUIRED = ("name", "param_bytes", "grad_bytes", *(key for key in SECONDS if not key.startswith("inter_")))
_ALWAYS = (*_REQUIRED, "activation_bytes", "inter_forward_s", "inter_backward_s")
"""Keys that are always written."""


def _checked(value: Any, key: str, where: str) -> Any:
    """Returns a field's value if it is acceptable."""
    if key in _BY_NAME:
        what, known = _BY_NAME[key]
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: {key} must be an object of bytes by {what}, got {value!r}")
        check_keys(value, known, f"{where}: {key}")
        return {name: check_bytes(size, f"{key} of {name}", where) for name, size in value.items()}
    if (key == "block" and value == "") or (key in _OF_STATE and value is None):
        return value
    if key in ("name", "parameters", "block"):
        return check_text(value, key, where)
    if key == "tiles":
        return check_count(value, key, where)
    check = check_bytes if key.endswith("_bytes") else check_seconds if key.endswith("_s") else check_flag
    return check(value, key, where)


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
      block: the parameter group of blocks that this one is a part of, for layers of modules; "" if it is no such part.
      recompute_s: extra time of a backward that runs the forward again; None if no plan may choose that.
      recompute_activation_bytes: bytes then kept on the device from forward to backward. Give both keys or neither.
      products_recompute_s: extra time of a backward that computes everything again but large products; None if no plan
        may choose that.
      products_activation_bytes: bytes then kept on the device from forward to backward. Give both keys or neither.
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
      save_bytes: bytes of values and residuals that leave for host memory after this forward, the last one that reads
        or makes them.
      fetch_bytes: bytes of values and residuals that return from host memory for this backward.
      offloadable_bytes: by what is kept (`"none"`, `"products"`, `"full"`), bytes of it that a plan may let leave for
        host memory after this forward, and return for this backward.
      forward_workspace_bytes: device memory in use while the forward runs, besides parameters, kept activations and the
        program's temporaries.
      backward_workspace_bytes: likewise for the backward, without its gradient.
      forward_read_s: time of the link up that a forward by DHA takes for its reads; at most `forward_dha_s`. Loads get
        what is left of the link (`jaxferry.step.shared_work`).
      backward_read_s: likewise for the backward; without what a backward by DHA reads that runs its forward again.
      backward_write_s: time of the link down that a GO backward takes for its gradient.
      update_gpu_s: the optimizer step on the device, with master parameters and optimizer state there; None if no
        policy may choose that.
      update_streamed_s: likewise by the programs of an update that streams, which split and join what moves;
        `update_gpu_s` if None, see `streamed_update_s`.
      state_up_s: master parameters and optimizer state host to device, for an update that streams them through the GPU;
        None if no policy may choose that. A plan file may; the time is then that of a load of as many bytes.
      state_down_s: likewise back, with the new compute copy; as an offload of as many bytes if None. If the compute
        copy stays on the device, see `state_down_for`.
      state_bytes: bytes of master parameters and optimizer state.
      state_read_s: their way from a scratch file to host memory, for an update on the host; None if host memory holds
        them.
      state_write_s: likewise back.
      temporary_bytes: device memory that each compiled program needs besides its arguments and results, by variant
        (`forward_variant`, `backward_variant`); a missing variant needs 0. If forward and backward are one program,
        its temporaries count as the backward's.
      tiles: the number of tiles that its programs run in, one after the other.
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
    block: str = ""
    recompute_s: float | None = None
    recompute_activation_bytes: int | None = None
    products_recompute_s: float | None = None
    products_activation_bytes: int | None = None
    backward_reads: bool = True
    gradient_rows: bool = False
    has_backward: bool = True
    has_gradient: bool = True
    fused_backward: bool = False
    shares_program: bool = False
    save_bytes: int = 0
    fetch_bytes: int = 0
    offloadable_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    row_gradient_bytes: int = 0
    sum_bytes: int = 0
    forward_read_s: float = 0.0
    backward_read_s: float = 0.0
    backward_write_s: float = 0.0
    update_gpu_s: float | None = None
    update_streamed_s: float | None = None
    state_up_s: float | None = None
    state_down_s: float | None = None
    state_bytes: int = 0
    state_read_s: float | None = None
    state_write_s: float | None = None
    temporary_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tiles: int = 1

    def __post_init__(self) -> None:
        """Leaves out what does not run."""
        made: dict[str, Any] = {"parameters": self.parameters or self.name}
        made |= {**({} if self.has_gradient else _OF_GRADIENT), **({} if self.has_backward else _OF_BACKWARD)}
        if not self.has_gradient and self.has_backward:
            made["backward_go_s"] = self.backward_s
        variants = (*_FORWARDS, *_BACKWARDS) if self.has_backward else _FORWARDS
        made["temporary_bytes"] = {key: size for key, size in self.temporary_bytes.items() if size and key in variants}
        leaving = made.get("offloadable_bytes", self.offloadable_bytes)
        made["offloadable_bytes"] = {str(key): size for key, size in leaving.items() if size}
        for key, value in made.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_json(cls, document: Any, index: int = 0) -> Self:
        """Reads one element of `layers`; `index` is its position, for errors about its name.

        Raises `InputError` if a key is missing or unknown, or a value not acceptable; the message names layer and key.
        """
        _, where = name_of_element(document, index)
        keys = [field.name for field in dataclasses.fields(cls)]
        check_keys(document, keys, where)
        given = [key for key in keys if key in document or key in _REQUIRED]
        values = {key: _checked(required(document, key, where), key, where) for key in given}
        for pair in RECOMPUTATION.values():
            for key, other in (pair, pair[::-1]):
                if key in values and other not in values:
                    raise InputError(f"{where}: {key} needs {other} beside it")
        layer = cls(**values)
        if layer.forward_read_s > layer.forward_dha_s:
            most, found = layer.forward_dha_s, layer.forward_read_s
            raise InputError(f"{where}: forward_read_s must be at most forward_dha_s, {most}, got {found}")
        if layer.has_gradient and not layer.has_backward:
            raise InputError(f"{where}: has_gradient needs has_backward; set both to false")
        if layer.fused_backward and not layer.has_backward:
            raise InputError(f"{where}: fused_backward needs has_backward")
        return layer

    def to_json(self) -> dict[str, Any]:
        """The layer as an element of `layers`; optional keys only where they differ from the default."""
        document = dataclasses.asdict(self)
        if self.parameters == self.name:
            del document["parameters"]
        absent = {field.name: field.default for field in dataclasses.fields(self) if field.name not in _ALWAYS}
        absent |= {"temporary_bytes": {}, "offloadable_bytes": {}}
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
        """Whether a plan may let the backward compute anything again."""
        return len(self.levels) > 1

    @functools.cached_property
    def levels(self) -> tuple[Remat, ...]:
        """What a plan may let it keep."""
        return (Remat.NONE, *(level for level, (key, _) in RECOMPUTATION.items() if getattr(self, key) is not None))

    def recompute_for(self, remat: Remat) -> float:
        """Seconds that the backward takes longer."""
        return 0.0 if remat is Remat.NONE else getattr(self, RECOMPUTATION[remat][0]) or 0.0

    def kept_bytes(self, remat: Remat) -> int:
        """Bytes kept on the device from the forward to the backward."""
        again: int | None = None if remat is Remat.NONE else getattr(self, RECOMPUTATION[remat][1])
        return self.activation_bytes if again is None else again

    def leaving_bytes(self, remat: Remat, place: ActivationPlace) -> int:
        """Bytes of these that leave after the forward, and return for the backward, by a plan's choice."""
        return self.offloadable_bytes.get(remat, 0) if place is ActivationPlace.HOST else 0

    @property
    def streamed_update_s(self) -> float:
        """Seconds of the optimizer step on the device where masters and state come for the update only."""
        return (self.update_gpu_s or 0.0) if self.update_streamed_s is None else self.update_streamed_s

    def state_down_for(self, copy_stays: bool) -> float | None:
        """Seconds of the transfer down after an update through the GPU; None if the profile does not state them.

        `state_down_s` covers the compute copy. A transfer without it takes its share of that time by bytes.
        """
        if self.state_down_s is None or not copy_stays or not self.param_bytes:
            return self.state_down_s
        return self.state_down_s * self.state_bytes / (self.state_bytes + self.param_bytes)

    def forward_bytes(self, by_dha: bool, remat: Remat = Remat.NONE) -> int:
        """Device memory in use while the forward runs, besides parameters and kept activations."""
        return self.forward_workspace_bytes + self.temporary_bytes.get(forward_variant(by_dha, remat), 0)

    def backward_bytes(self, by_dha: bool, grad_on_host: bool, remat: Remat = Remat.NONE) -> int:
        """Likewise for the backward, without its gradient."""
        variant = backward_variant(by_dha, grad_on_host, remat)
        return self.backward_workspace_bytes + self.temporary_bytes.get(variant, 0)

    def backward_for(self, by_dha: bool, grad_on_host: bool, remat: Remat = Remat.NONE) -> float:
        """Seconds of the backward: parameters read by DHA or not, gradient written to the host or not.

        The costs of both detours add up, so a gradient that stays gains T_GBP - T_CBP in every mode, as in MemFerry,
        section IV-D. The result is never below 0. Recomputation adds `recompute_for`, and by DHA running the whole
        forward again also its extra time by DHA: large products are what reads most of the parameters.
        """
        more_s = self.recompute_for(remat)
        if by_dha and remat is Remat.FULL:
            more_s += max(self.forward_dha_s - self.forward_s, 0.0)
        if not by_dha:
            return (self.backward_go_s if grad_on_host else self.backward_s) + more_s
        if not grad_on_host:
            return self.backward_dha_s + more_s
        return max(self.backward_dha_s + (self.backward_go_s - self.backward_s), 0.0) + more_s

    def backward_reads_for(self, remat: Remat) -> float:
        """Seconds of the link up that a backward by DHA takes, which reads twice if it runs its forward again."""
        return self.backward_read_s + (self.forward_read_s if remat is Remat.FULL else 0.0)
