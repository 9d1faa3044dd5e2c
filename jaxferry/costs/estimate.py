"""Estimates profiles without the hardware: a roofline model of operations and bytes.

A program takes the longest of three times: its operations at the reached share of the GPU's peak, its bytes at the
bandwidth of device memory, and its kernels at the minimum duration of one. Where the machine states what products reach
alone, the first two follow each other. A transfer takes its latency plus its bytes at the link's bandwidth. With direct
host access, each product waits for the first panel of its weight, and then takes the longer of the copies and its own
operations; other operations wait for all that they read. Gradients that are written to host memory are the reverse: the
last panel of each is written after its product has ended.
An update takes its bytes at the bandwidth of host memory, and gets of that only what transfers leave.
The profile is marked as estimated; measured profiles replace it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from jaxferry.costs.counts import HostRead
from jaxferry.costs.layer_records import RECOMPUTATION, LayerProfile
from jaxferry.costs.machines import Devices, Links, Machine
from jaxferry.costs.profile_records import Contention, Profile
from jaxferry.errors import InputError
from jaxferry.modes import Remat
from jaxferry.native import SCRATCH_BYTES

UPDATE_BYTES_PER_PARAMETER = 30
"""Host memory traffic of a one-pass AdamW step: it reads a 16-bit gradient, writes a 16-bit parameter, and reads and
writes the master parameter and two moments: 2 + 2 + 3 * 8 bytes, rounded up."""

MASTER_BYTES, STATE_BYTES_PER_PARAMETER = 4, 12
"""Those of a master parameter, and of AdamW's with two moments."""


@dataclasses.dataclass(frozen=True)
class UpdateBytes:
    """The bytes of an optimizer's step, for each parameter.

    Attributes:
      on_host: what it reads and writes in host memory, gradient and compute copy included.
      on_device: likewise in device memory, where masters are whole.
      state: masters and optimizer state where masters are whole.
    """

    on_host: float = UPDATE_BYTES_PER_PARAMETER
    on_device: float = UPDATE_BYTES_PER_PARAMETER
    state: float = STATE_BYTES_PER_PARAMETER

    @classmethod
    def of_sizes(cls, copy: float, masters: float, state: float, is_joined: bool = False) -> Self:
        """Those of one pass over all arrays, rounded up as AdamW's are.

        Args:
          copy: bytes of the compute copy, which a gradient has too, for each parameter.
          masters: of what masters take on the host; if that is not the whole, the copy is read as well.
          state: of the optimizer's state.
          is_joined: whether masters on the host are made whole before the pass, and split after it.
        """
        rounding = UPDATE_BYTES_PER_PARAMETER / (2 * 2 + 2 * STATE_BYTES_PER_PARAMETER)
        split = copy if masters < MASTER_BYTES else 0.0
        joining = 4 * MASTER_BYTES if is_joined else 0
        on_host, on_device = 2 * (copy + masters + state) + split + joining, 2 * (copy + MASTER_BYTES + state)
        return cls(rounding * on_host, rounding * on_device, MASTER_BYTES + state)


ADAMW = UpdateBytes()
"""With fp32 masters and moments, and 16 bits on the device."""

LEAST_PANEL_BYTES = 2 * 2**20
MOST_PANELS = 16
"""A weight that its product reads in host memory is cut into so many panels, unless they would be smaller than the
least, or larger than half of the scratch (`xla_ffi/cuda/panels.h`)."""

_OF_PROFILE = frozenset(field.name for field in dataclasses.fields(LayerProfile))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The costs of running a layer's forward again in its backward: more work, and the bytes that are then kept."""

    activation_bytes: int
    flops: float
    bytes: float
    kernels: float = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The costs of a layer, counted on a jaxpr or computed by a formula.

    Attributes:
      name: the layer's name, unique in its model.
      parameters: the parameter group; layers with the same group share parameters. "" means the layer's own name.
      num_parameters: number of parameters that the host updates.
      param_bytes, grad_bytes, activation_bytes: as in a profile.
      forward_flops, backward_flops: floating-point operations.
      forward_bytes, backward_bytes: bytes of device memory read and written.
      dha_bytes_forward, dha_bytes_backward: bytes that cross the link if the parameters lie in host memory.
      dha_products_forward, dha_products_backward: the products among what reads them, whose weights cross the link in
        panels. None means a kernel that reads host memory all through its work, as in MemFerry's paper.
      forward_kernels, backward_kernels: number of kernels.
      inter_forward_flops, inter_forward_bytes, inter_backward_flops, inter_backward_bytes: parameterless compute right
        after this layer's forward and right before its backward.
      itemsize: bytes per element in the layer's products: 2 for 16 bits, 4 for 32.
      recomputation: costs of recomputation, by what a plan may let it keep instead of all.
      temporary_bytes: as in a profile.
      is_whole: whether each of several processes holds the layer whole.
      shares_program: as in a profile.
      block: as in a profile.
    """

    name: str
    parameters: str = ""
    num_parameters: int
    param_bytes: int
    grad_bytes: int
    activation_bytes: int = 0
    forward_flops: float
    forward_bytes: float
    backward_flops: float
    backward_bytes: float
    dha_bytes_forward: float
    dha_bytes_backward: float
    dha_products_forward: tuple[HostRead, ...] | None = None
    dha_products_backward: tuple[HostRead, ...] | None = None
    forward_kernels: float = 1
    backward_kernels: float = 1
    inter_forward_flops: float = 0.0
    inter_forward_bytes: float = 0.0
    inter_backward_flops: float = 0.0
    inter_backward_bytes: float = 0.0
    itemsize: int = 2
    recomputation: Mapping[Remat, Recomputation] = dataclasses.field(default_factory=dict)
    temporary_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_whole: bool = False
    shares_program: bool = False
    block: str = ""

    @property
    def of_profile(self) -> dict[str, Any]:
        """The fields that a profile's layer has too."""
        return {key: value for key, value in vars(self).items() if key in _OF_PROFILE}


def estimate_profile(
    layers: Iterable[LayerCosts],
    machine: Machine,
    facts: dict[str, Any] | None = None,
    num_devices: int = 1,
    num_processes: int = 1,
    update: UpdateBytes = ADAMW,
) -> Profile:
    """Estimates the profile of a model on a machine, of which `facts` are further facts.

    Several devices, of all processes together, share a batch: each has its part of the work, of the activations, of
    each load and of each gradient. A load includes gathering the others' shares, an offload adding up their gradients.
    All links of a process together move no more than host memory does. Several processes run on a machine each, and
    update their own shares; see `Devices`. `layers` are the costs of the whole batch, in forward order, but their
    `activation_bytes` those of one device. `update` is the optimizer's step. Raises `InputError` if there is no
    layer, or two share a name.
    """
    about = {"estimated": True, **machine.to_json(), **(facts or {})}
    del about["format"]
    if num_devices == 1:
        link = machine.link_bytes_per_s
        contention = Contention.of_bandwidth(link, link, machine.host_bytes_per_s)
        return Profile(about, tuple(_estimate_layer(layer, machine, update) for layer in layers), contention=contention)
    devices = Devices(Links.of_machine(machine, num_devices, num_processes), num_devices, num_processes)
    shares = []
    for layer in layers:
        own = _estimate_layer(_share_of_work(layer, num_devices), machine, update)
        sizes = layer.param_bytes, layer.grad_bytes
        shares.append(devices.exchanging(own, sizes, layer.temporary_bytes, layer.is_whole))
    contention = devices.contention(machine)
    return Profile(about, tuple(shares), num_devices=num_devices, num_processes=num_processes, contention=contention)


def _share_of_work(layer: LayerCosts, num_devices: int) -> LayerCosts:
    """The costs of a layer's programs on each device: its part of everything but the bytes of the parameters."""

    def shared_bytes(num_bytes: float) -> float:
        own = min(layer.param_bytes, num_bytes)
        return own + (num_bytes - own) / num_devices

    def shared_products(products: tuple[HostRead, ...] | None) -> tuple[HostRead, ...] | None:
        if products is None:
            return None
        return tuple(dataclasses.replace(product, flops=product.flops / num_devices) for product in products)

    inter = ("inter_forward_flops", "inter_forward_bytes", "inter_backward_flops", "inter_backward_bytes")
    return dataclasses.replace(
        layer,
        forward_flops=layer.forward_flops / num_devices,
        backward_flops=layer.backward_flops / num_devices,
        forward_bytes=shared_bytes(layer.forward_bytes),
        backward_bytes=shared_bytes(layer.backward_bytes),
        dha_products_forward=shared_products(layer.dha_products_forward),
        dha_products_backward=shared_products(layer.dha_products_backward),
        **{key: getattr(layer, key) / num_devices for key in inter},
        recomputation={
            remat: dataclasses.replace(again, flops=again.flops / num_devices, bytes=again.bytes / num_devices)
            for remat, again in layer.recomputation.items()
        },
    )


def _estimate_layer(layer: LayerCosts, machine: Machine, update: UpdateBytes) -> LayerProfile:
    if layer.itemsize <= 0:
        raise InputError(f'layer "{layer.name}": itemsize must be positive, got {layer.itemsize}')
    state_bytes = math.ceil(update.state * layer.num_parameters)
    forward_s = _roofline_s(machine, layer, layer.forward_flops, layer.forward_bytes, layer.forward_kernels)
    backward_s = _roofline_s(machine, layer, layer.backward_flops, layer.backward_bytes, layer.backward_kernels)
    read, read_again = layer.dha_products_forward, layer.dha_products_backward
    # The gradient of a weight is a product of as many operations as the forward's.
    return LayerProfile(
        **layer.of_profile,
        load_s=machine.transfer_s(layer.param_bytes),
        forward_s=forward_s,
        forward_dha_s=forward_s + _detour_s(machine, layer, layer.dha_bytes_forward, read, forward_s),
        backward_s=backward_s,
        backward_dha_s=backward_s + _detour_s(machine, layer, layer.dha_bytes_backward, read_again, backward_s),
        backward_go_s=backward_s + _detour_s(machine, layer, layer.grad_bytes, read, backward_s),
        forward_read_s=machine.direct_s(layer.dha_bytes_forward),
        backward_read_s=machine.direct_s(layer.dha_bytes_backward),
        backward_write_s=machine.direct_s(layer.grad_bytes),
        offload_s=machine.transfer_s(layer.grad_bytes),
        inter_forward_s=_inter_s(machine, layer, layer.inter_forward_flops, layer.inter_forward_bytes),
        inter_backward_s=_inter_s(machine, layer, layer.inter_backward_flops, layer.inter_backward_bytes),
        update_s=update.on_host * layer.num_parameters / machine.host_bytes_per_s,
        update_gpu_s=update_on_device_s(layer.num_parameters, machine, update),
        state_up_s=machine.transfer_s(state_bytes),
        state_down_s=machine.transfer_s(state_bytes + layer.param_bytes),
        state_bytes=state_bytes,
        **recomputing(
            layer.recomputation,
            {remat: _recompute_s(machine, layer, more, backward_s) for remat, more in layer.recomputation.items()},
        ),
    )


def recomputing(costs: Mapping[Remat, Recomputation], seconds: Mapping[Remat, float]) -> dict[str, Any]:
    """Returns the fields of a layer's profile for what recomputation costs, by what is kept: with the added seconds."""
    pairs = {RECOMPUTATION[remat]: (own, costs[remat].activation_bytes) for remat, own in seconds.items()}
    return {key: value for keys, values in pairs.items() for key, value in zip(keys, values, strict=True)}


def scaling(known: Sequence[LayerCosts], costs: Sequence[LayerCosts]) -> float:
    """Returns the operations of some layers over those of the same layers for another batch; 0 for other layers."""
    if [layer.name for layer in known] != [layer.name for layer in costs]:
        return 0.0
    before, now = (sum(_work(layer, way) for layer in layers for way in _WAYS) for layers in (known, costs))
    return now / before if before else 0.0


def scaled_profile(profile: Profile, known: Sequence[LayerCosts], costs: Sequence[LayerCosts]) -> Profile:
    """Scales a measured profile of layers with `known` costs to another batch, with other `costs`.

    Times and temporaries of programs follow their operations. By how much programs that read or write host memory take
    longer stays: that is the link's time.
    """
    layers = []
    for layer, before, now in zip(profile.layers, known, costs, strict=True):
        forward, backward = (_work(now, way) / work if (work := _work(before, way)) else 1.0 for way in _WAYS)
        more_s, more_back_s = layer.forward_s * (forward - 1), layer.backward_s * (backward - 1)
        levels = [remat for remat in layer.levels if remat in now.recomputation]
        again = recomputing(now.recomputation, {remat: layer.recompute_for(remat) * backward for remat in levels})
        scaled = dataclasses.replace(
            layer,
            activation_bytes=now.activation_bytes if layer.activation_bytes else 0,
            forward_s=layer.forward_s + more_s,
            forward_dha_s=max(layer.forward_dha_s + more_s, layer.forward_read_s),
            backward_s=layer.backward_s + more_back_s,
            backward_dha_s=max(layer.backward_dha_s + more_back_s, layer.backward_read_s),
            backward_go_s=max(layer.backward_go_s + more_back_s, layer.backward_write_s),
            offload_s=layer.offload_s * (backward if layer.gradient_rows else 1),
            temporary_bytes={name: round(size * forward) for name, size in layer.temporary_bytes.items()},
            **again,
        )
        layers.append(scaled)
    facts = {**profile.machine, "scaled_by": scaling(known, costs)}
    return dataclasses.replace(profile, machine=facts, layers=tuple(layers))


_WAYS = ("forward", "backward")


def _work(layer: LayerCosts, way: str) -> float:
    """The operations of a layer's forward or backward; its bytes if it has none, as a lookup."""
    work: float = getattr(layer, f"{way}_flops") or getattr(layer, f"{way}_bytes")
    return work


def update_on_device_s(num_parameters: int, machine: Machine, update: UpdateBytes) -> float:
    """Seconds of an optimizer's step on the device."""
    return max(update.on_device * num_parameters / machine.memory_bytes_per_s, machine.launch_s)


def _recompute_s(machine: Machine, layer: LayerCosts, more: Recomputation, backward_s: float) -> float:
    flops, num_bytes = layer.backward_flops + more.flops, layer.backward_bytes + more.bytes
    return max(_roofline_s(machine, layer, flops, num_bytes, layer.backward_kernels + more.kernels) - backward_s, 0.0)


def _roofline_s(machine: Machine, layer: LayerCosts, flops: float, num_bytes: float, kernels: float) -> float:
    is_short, memory_s = layer.itemsize <= 2, num_bytes / machine.memory_bytes_per_s
    if is_short and machine.product_efficiency is not None:
        products_s = flops / (machine.flops_per_s * machine.product_efficiency)
        return max(products_s + memory_s, kernels * machine.launch_s)
    peak = machine.flops_per_s if is_short else machine.float32_flops_per_s
    return max(flops / (peak * machine.efficiency), memory_s, kernels * machine.launch_s)


def _detour_s(
    machine: Machine, layer: LayerCosts, num_bytes: float, products: tuple[HostRead, ...] | None, program_s: float
) -> float:
    """The time that a program of `program_s` takes longer if it moves bytes over the link itself.

    `products` are those whose weights, or gradients, move in panels; None means all through the program.
    """
    if not num_bytes:
        return 0.0
    least_s = max(machine.direct_s(num_bytes) - program_s, 0.0)
    if products is None:
        return least_s
    in_panels = sum(product.num_bytes * product.times for product in products)
    # Of untrained weights there is no gradient.
    scale = min(num_bytes / in_panels, 1.0) if in_panels else 1.0
    longer_s = machine.direct_s(max(num_bytes - scale * in_panels, 0.0))
    for product in products:
        product_s = _roofline_s(machine, layer, product.flops, 0.0, 0.0)
        moved_bytes = scale * product.num_bytes
        panel_bytes = min(max(moved_bytes / MOST_PANELS, LEAST_PANEL_BYTES), SCRATCH_BYTES / 2)
        num_panels = -(-moved_bytes // panel_bytes)
        moved_s = num_panels * machine.launch_s + machine.direct_s(moved_bytes)
        both_s = max(product_s + moved_s / num_panels, moved_s + product_s / num_panels)
        longer_s += (both_s - product_s) * product.times
    return max(longer_s, least_s)


def _inter_s(machine: Machine, layer: LayerCosts, flops: float, num_bytes: float) -> float:
    return _roofline_s(machine, layer, flops, num_bytes, 1) if flops or num_bytes else 0.0
