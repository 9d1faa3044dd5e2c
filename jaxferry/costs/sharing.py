"""Times of several devices that share each batch: what they load, exchange and update.

    host memory --link: a share--> device --gather--> all of the layer
    gradients on each device --add up, scatter--> a share --link--> host memory: the update of the shares

The devices of all processes form one ring, so its slowest connection sets the pace. A layer that every process holds
whole (`is_whole`) is gathered within each machine alone; its gradients are added up there, then over the network.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Self

from jaxferry.costs.layer_records import LayerProfile, backward_variant, forward_variant
from jaxferry.costs.machines import Machine
from jaxferry.costs.profile_records import NO_CONTENTION, Contention, Profile
from jaxferry.errors import InputError

ALL, WITHIN, ACROSS = EXCHANGES = ("all", "within", "across")
"""The devices of an exchange: all of them; those of each process; those of one number in each of the processes."""

_BOTH = (False, True)
_OF_WORK = ("forward_s", "backward_s", "inter_forward_s", "inter_backward_s", "recompute_s")
_OF_VALUES = ("activation_bytes", "recompute_activation_bytes", "save_bytes", "fetch_bytes")
_WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes")


@dataclasses.dataclass(frozen=True)
class Line:
    """A time that grows with the bytes that move, beyond the latency of any move."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """The seconds of a move; none of no bytes."""
        return self.latency_s + num_bytes * self.s_per_byte if num_bytes else 0.0

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Self:
        """The line through two measurements, each of bytes and seconds; larger moves never take less time."""
        more_s = max(large[1] - small[1], 0.0) / (large[0] - small[0])
        return cls(max(small[1] - small[0] * more_s, 0.0), more_s)


NOTHING = Line(0.0, 0.0)
"""Of an exchange among one device, or one process."""


@dataclasses.dataclass(frozen=True)
class Links:
    """How fast devices load, offload and exchange, all at the same time.

    `up` and `down` are between host memory and each device, of the bytes that this device moves. `gather` is by the
    devices that gather (`EXCHANGES`), of all bytes that each has afterwards; `scatter` adds up gradients, of which each
    keeps a share.
    """

    up: Line
    down: Line
    gather: Mapping[str, Line]
    scatter: Mapping[str, Line]

    @classmethod
    def of_machine(cls, machine: Machine, num_devices: int, num_processes: int) -> Self:
        """Those of a machine's figures: of equal speed both ways, and a ring of devices without latency."""
        per_process = num_devices // num_processes
        within = machine.interconnect_bytes_per_s or machine.link_bytes_per_s
        between = machine.network_bytes_per_s or within
        pace = within if num_processes == 1 else min(within, between) if per_process > 1 else between
        link = Line(machine.link_latency_s, 1 / min(machine.link_bytes_per_s, machine.host_bytes_per_s / per_process))
        exchanges = {
            ALL: Line(0.0, (num_devices - 1) / num_devices / pace),
            WITHIN: Line(0.0, (per_process - 1) / per_process / within),
            ACROSS: Line(0.0, (num_processes - 1) / num_processes / between),
        }
        return cls(link, link, exchanges, exchanges)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that share each batch, equally many in each process, on a machine of its own."""

    links: Links
    num_devices: int
    num_processes: int = 1

    def exchanging(
        self, own: LayerProfile, num_bytes: tuple[int, int], temporaries: Mapping[str, int], is_whole: bool = False
    ) -> LayerProfile:
        """The profile of a layer on each device, with its loads, gradients, exchanges and updates.

        A program that reads parameters in host memory copies a share of its process's part over the link and gathers
        the others' within the process. The forward also exchanges what the processes have updated: shares up the link,
        over the network, and all of the layer down to each process. A GO backward sums its gradient over the devices
        and writes a share. The links are taken for as long as by a load or an offload, which exchange as much.

        `own` is its part of the work, with the whole layer's transfers and updates; `num_bytes` are of the whole
        layer's parameters and gradient, `temporaries` of each device's programs. `is_whole`: every process holds the
        layer whole.
        """
        links, per_process = self.links, self.num_devices // self.num_processes
        num_shares, among = (per_process, WITHIN) if is_whole else (self.num_devices, ALL)
        shares = [-(-size // num_shares) for size in num_bytes]
        gather_s = links.gather[WITHIN].seconds(num_bytes[0])
        read_s = links.up.seconds(-(-num_bytes[0] // per_process)) + gather_s
        up_s, exchange_s = self._exchange_s(num_bytes) if num_shares > per_process else (0.0, 0.0)
        written_s = links.down.seconds(shares[1]) + links.scatter[among].seconds(num_shares * shares[1])
        if is_whole:
            written_s += links.scatter[ACROSS].seconds(num_bytes[1]) + links.gather[ACROSS].seconds(num_bytes[1])
        return dataclasses.replace(
            own,
            grad_bytes=shares[1],
            load_s=links.up.seconds(shares[0]) + links.gather[among].seconds(num_shares * shares[0]),
            offload_s=written_s,
            update_s=own.update_s / (1 if is_whole else self.num_processes),
            forward_dha_s=own.forward_s + read_s + exchange_s,
            backward_dha_s=own.backward_s + read_s,
            backward_go_s=own.backward_s + written_s,
            forward_read_s=read_s + up_s,
            backward_read_s=read_s,
            backward_write_s=written_s,
            update_gpu_s=self._update_gpu_s(own, num_bytes),
            update_streamed_s=None,
            state_up_s=None,
            state_down_s=None,
            state_bytes=-(-own.state_bytes // self.num_devices),
            temporary_bytes=_with_copies(temporaries, num_bytes),
        )

    def _update_gpu_s(self, own: LayerProfile, num_bytes: tuple[int, int]) -> float | None:
        """The time of an update of the devices' shares, with adding up the gradient and gathering the new copy.

        Devices of several processes update on the host.
        """
        if own.update_gpu_s is None or self.num_processes > 1:
            return None
        exchange_s = self.links.scatter[ALL].seconds(num_bytes[1]) + self.links.gather[ALL].seconds(num_bytes[0])
        return own.update_gpu_s / self.num_devices + exchange_s

    def contention(self, machine: Machine) -> Contention:
        """That of a process's devices, which all transfer at a time, and its updates.

        What devices exchange among themselves, for a part of each load and each offload, is not in host memory.
        """
        per_process = self.num_devices // self.num_processes
        up, down = (
            per_process / (link.s_per_byte + self.num_devices * exchange[ALL].s_per_byte)
            for link, exchange in ((self.links.up, self.links.gather), (self.links.down, self.links.scatter))
        )
        return Contention.of_bandwidth(up, down, machine.host_bytes_per_s)

    def _exchange_s(self, num_bytes: tuple[int, int]) -> tuple[float, float]:
        """The time until each process has all of a layer in host memory: up to the devices, and in all.

        A frozen layer, without a gradient, is exchanged once.
        """
        if not num_bytes[1]:
            return 0.0, 0.0
        per_process, share = self.num_devices // self.num_processes, -(-num_bytes[0] // self.num_devices)
        # Each device gets the shares of those with its own number, over the network that its process has.
        crossing_s = self.links.gather[ACROSS].seconds(self.num_devices * share)
        up_s = self.links.up.seconds(share) + crossing_s
        return up_s, up_s + self.links.down.seconds(-(-num_bytes[0] // per_process))


def _with_copies(temporaries: Mapping[str, int], num_bytes: tuple[int, int]) -> dict[str, int]:
    """Temporaries of all programs; those that read or write host memory would take whole copies."""
    sizes = dict.fromkeys((forward_variant(True, again) for again in _BOTH), num_bytes[0])
    for flags in itertools.product(_BOTH, repeat=3):
        sizes[backward_variant(*flags)] = flags[0] * num_bytes[0] + flags[1] * num_bytes[1]
    return {key: temporaries.get(key, 0) + sizes.get(key, 0) for key in {**temporaries, **sizes}}


def shared_by(profile: Profile, num_devices: int, num_processes: int = 1) -> Profile:
    """The profile of devices of several processes, each on a machine of its own, from that of one device.

    Each device has its part of the work, of the activations and of the values that move, but takes at least as long as
    it needs to read a layer's parameters. Loads, gradients and exchanges follow from the figures of the machine, as an
    estimate states them. A profile of these devices stays as it is. Raises `InputError` if the profile is of other
    devices, or lacks figures; or if processes have not equally many devices.
    """
    if (profile.num_devices, profile.num_processes) == (num_devices, num_processes):
        return profile
    if profile.num_devices > 1:
        raise InputError(
            f"the profile is of {profile.num_devices} devices and {profile.num_processes} processes already, not of "
            f"{num_devices} and {num_processes}"
        )
    if num_devices % num_processes:
        raise InputError(f"devices must be a multiple of processes, got {num_devices} and {num_processes}")
    machine = Machine.of_facts(profile.machine)
    devices = Devices(Links.of_machine(machine, num_devices, num_processes), num_devices, num_processes)
    layers = [
        devices.exchanging(
            _part_of(layer, machine, num_devices),
            (layer.param_bytes, layer.grad_bytes),
            {key: -(-size // num_devices) for key, size in layer.temporary_bytes.items()},
        )
        for layer in profile.layers
    ]
    facts = dict(profile.machine)
    if isinstance(known := facts.get("host_bytes"), Mapping):  # what each process needs
        facts["host_bytes"] = {name: -(-size // num_processes) for name, size in known.items()}
    return dataclasses.replace(
        profile,
        layers=tuple(layers),
        machine=facts,
        contention=devices.contention(machine) if profile.contention else NO_CONTENTION,
        num_devices=num_devices,
        num_processes=num_processes,
    )


def _part_of(layer: LayerProfile, machine: Machine, num: int) -> LayerProfile:
    """The work of a layer on each of `num` devices."""
    read_s = layer.param_bytes / machine.memory_bytes_per_s
    changes: dict[str, Any] = {}
    for key in _OF_WORK:
        seconds = getattr(layer, key)
        least_s = min(read_s, seconds or 0.0) if key in ("forward_s", "backward_s") else 0.0
        changes[key] = None if seconds is None else max(seconds / num, least_s)
    for key in (*_OF_VALUES, *_WORKSPACES, "sum_bytes"):
        size = getattr(layer, key)
        changes[key] = None if size is None else -(-size // num)
    return dataclasses.replace(layer, **changes)
