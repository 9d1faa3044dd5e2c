"""Times of several devices that share each batch: what they load, exchange and update.

    host memory --link: a share--> device --gather--> all of the layer
    gradients on each device --add up, scatter--> a share --link--> host memory: the update of the shares

The devices of all processes form one ring, so its slowest connection sets the pace. A layer that every process holds
whole (`is_whole`) is gathered within each machine alone; its gradients are added up there, then over the network.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxferry.errors import InputError
from jaxferry.profiling.machines import Machine
from jaxferry.profiling.records import LayerProfile, Profile, backward_variant, forward_variant

_BOTH = (False, True)
_OF_WORK = ("forward_s", "backward_s", "inter_forward_s", "inter_backward_s", "recompute_s")
_OF_VALUES = ("activation_bytes", "recompute_activation_bytes", "save_bytes", "fetch_bytes")
_WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes")


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that share each batch, equally many in each process, on a machine of its own.

    Attributes:
      machine: its figures; those of the GPU and its link are of each device.
      num_devices: the number of devices of all processes.
      num_processes: the number of processes.
    """

    machine: Machine
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

        Args:
          own: its part of the work; times of transfers and updates are those of the whole layer.
          num_bytes: of the whole layer's parameters and gradient.
          temporaries: of each device's programs.
          is_whole: whether every process holds the layer whole.
        """
        per_process = self.num_devices // self.num_processes
        num_shares = per_process if is_whole else self.num_devices
        link = dataclasses.replace(
            self.machine,
            link_bytes_per_s=min(self.machine.link_bytes_per_s, self.machine.host_bytes_per_s / per_process),
        )
        shares = [-(-size // num_shares) for size in num_bytes]
        pace = self._bytes_per_s(crosses=not is_whole)
        exchanged_s = [(num_shares - 1) * share / pace for share in shares]
        again = (self.num_processes - 1) / self.num_processes * num_bytes[1] / self._bytes_per_s(crosses=True)
        read_s, gather_s = link.transfer_s(-(-num_bytes[0] // per_process)), self._gather_s(num_bytes[0])
        up_s, exchange_s = self._exchange_s(link, num_bytes) if num_shares > per_process else (0.0, 0.0)
        summed_s, write_s = exchanged_s[1] + 2 * again * is_whole, link.transfer_s(shares[1])
        return dataclasses.replace(
            own,
            grad_bytes=shares[1],
            load_s=link.transfer_s(shares[0]) + exchanged_s[0],
            offload_s=write_s + summed_s,
            update_s=own.update_s / (1 if is_whole else self.num_processes),
            forward_dha_s=own.forward_s + read_s + gather_s + exchange_s,
            backward_dha_s=own.backward_s + read_s + gather_s,
            backward_go_s=own.backward_s + write_s + summed_s,
            forward_read_s=read_s + gather_s + up_s,
            backward_read_s=read_s + gather_s,
            backward_write_s=write_s + summed_s,
            update_gpu_s=None,
            state_up_s=None,
            state_down_s=None,
            temporary_bytes=_with_copies(temporaries, num_bytes),
        )

    def _gather_s(self, num_bytes: int) -> float:
        """The time to gather, within each process, a layer of which each of its devices has loaded a part."""
        per_process = self.num_devices // self.num_processes
        return (per_process - 1) * -(-num_bytes // per_process) / self._bytes_per_s(crosses=False)

    def _exchange_s(self, link: Machine, num_bytes: tuple[int, int]) -> tuple[float, float]:
        """The time until each process has all of a layer in host memory: up to the devices, and in all.

        A frozen layer, without a gradient, is exchanged once.
        """
        if not num_bytes[1]:
            return 0.0, 0.0
        per_process, share = self.num_devices // self.num_processes, -(-num_bytes[0] // self.num_devices)
        within = self.machine.interconnect_bytes_per_s or self.machine.link_bytes_per_s
        # Each device gets the shares of those with its own number, over the network that its process has.
        crossing_s = per_process * (self.num_processes - 1) * share / (self.machine.network_bytes_per_s or within)
        up_s, down_s = link.transfer_s(share) + crossing_s, link.transfer_s(-(-num_bytes[0] // per_process))
        return up_s, up_s + down_s

    def _bytes_per_s(self, crosses: bool) -> float:
        """The slowest connection between devices, of all machines if `crosses`."""
        within = self.machine.interconnect_bytes_per_s or self.machine.link_bytes_per_s
        if self.num_processes == 1 or not crosses:
            return within
        between = self.machine.network_bytes_per_s or within
        return min(within, between) if self.num_devices > self.num_processes else between


def _with_copies(temporaries: Mapping[str, int], num_bytes: tuple[int, int]) -> dict[str, int]:
    """Temporaries of all programs; those that read or write host memory would take whole copies."""
    sizes = dict.fromkeys((forward_variant(True, again) for again in _BOTH), num_bytes[0])
    for flags in itertools.product(_BOTH, repeat=3):
        sizes[backward_variant(*flags)] = flags[0] * num_bytes[0] + flags[1] * num_bytes[1]
    return {key: temporaries.get(key, 0) + sizes.get(key, 0) for key in {**temporaries, **sizes}}


def shared_by(profile: Profile, num_devices: int, num_processes: int = 1) -> Profile:
    """The profile of several devices, from that of one.

    Each device has its part of the work, of the activations and of the values that move, but takes at least as long as
    it needs to read a layer's parameters. Loads, gradients and exchanges follow from the figures of the machine.

    Args:
      profile: of one device, whose `machine` has the figures of an estimate; or of these devices already.
      num_devices: the number of devices of all processes.
      num_processes: the number of processes, each on a machine of its own.

    Raises:
      InputError: if the profile is of other devices, or lacks figures; or if processes have not equally many devices.
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
    devices = Devices(Machine.of_facts(profile.machine), num_devices, num_processes)
    layers = [
        devices.exchanging(
            _part_of(layer, devices),
            (layer.param_bytes, layer.grad_bytes),
            {key: -(-size // num_devices) for key, size in layer.temporary_bytes.items()},
        )
        for layer in profile.layers
    ]
    return dataclasses.replace(
        profile,
        layers=tuple(layers),
        machine=_facts_of_a_process(profile.machine, num_processes),
        num_devices=num_devices,
        num_processes=num_processes,
    )


def _part_of(layer: LayerProfile, devices: Devices) -> LayerProfile:
    """The work of a layer on each device."""
    read_s, num = layer.param_bytes / devices.machine.memory_bytes_per_s, devices.num_devices
    changes: dict[str, Any] = {}
    for key in _OF_WORK:
        seconds = getattr(layer, key)
        least_s = min(read_s, seconds or 0.0) if key in ("forward_s", "backward_s") else 0.0
        changes[key] = None if seconds is None else max(seconds / num, least_s)
    for key in (*_OF_VALUES, *_WORKSPACES, "sum_bytes"):
        size = getattr(layer, key)
        changes[key] = None if size is None else -(-size // num)
    return dataclasses.replace(layer, **changes)


def _facts_of_a_process(machine: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    """The machine's facts, with the host memory that each process needs."""
    known = machine.get("host_bytes")
    if not isinstance(known, Mapping):
        return dict(machine)
    return {**machine, "host_bytes": {name: -(-size // num_processes) for name, size in known.items()}}
