"""Machines for estimated profiles: figures of GPU, link and host, each with its source, as `machines.json` states them.

Peaks are the vendors' figures for dense 16-bit and 32-bit products; `efficiency` is the share of them that programs
reach. Link figures are measured copies between pinned host memory and the device, one direction at a time.
The H200's link, host memory and products were measured
(benchmarks/results/gpu/h200); those of other machines are published figures.
`jaxferry.machine/1` is the JSON format of a user's own machine:

    {"format": "jaxferry.machine/1", "name": "my box", "flops_per_s": 1e14, "float32_flops_per_s": 2e13,
     "memory_bytes": 24e9, "memory_bytes_per_s": 9e11, "link_bytes_per_s": 2.5e10, "host_bytes_per_s": 6e10,
     "host_memory_bytes": 128e9}

The figures were checked in November 2026 against pages that quote the named sources, since the vendors' own files were
not available. Figures that no page quotes are marked "unconfirmed". The pages:

- V100, PCIe (112, 14 TFLOPS, 900 GB/s): io-tech.fi; A100 (312, 156 TFLOPS) and H100 (989.4, 494.7 TFLOPS):
  glennklockwood.com/garden; A100 80 GB PCIe (1935 GB/s): thundercompute.com; H100 SXM (3350 GB/s): hpctech.co.jp; H200
  (141 GB, 4.8 TB/s, the H100's compute): aiwiki.ai; RTX 4090: waredb.com.
- PCIe 4: the forum thread itself; PCIe 5: smart-guide.co.kr, quoting the blog, which names no GPU.
- Hosts: Intel's S2600CW specification (Xeon E5-2600 v4), tomshardware.fr (EPYC 7003), wwt.com (4th generation Xeon),
  hardwaretimes.com (Ryzen 7000).
- 52 % of the A100's peak: the paper's abstract; 5 to 7 us per copy: emergentmind.com, quoting the paper.

Several devices share each batch; `Devices` has the times of what they load, exchange and update:

    host memory --link: a share--> device --gather--> all of the layer
    gradients on each device --add up, scatter--> a share --link--> host memory: the update of the shares

The devices of all processes form one ring, so its slowest connection sets the pace. A layer that every process holds
whole (`is_whole`) is gathered within each machine alone; its gradients are added up there, then over the network.
"""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from jaxferry.costs.layer_records import OF_BATCH, RECOMPUTATION, LayerProfile, backward_variant, forward_variant
from jaxferry.costs.profile_records import NO_CONTENTION, Contention, Profile
from jaxferry.errors import InputError
from jaxferry.modes import Remat
from jaxferry.records import check_format, check_keys, check_text, load_record, read_json, required

MACHINE_FORMAT = "jaxferry.machine/1"

JAX_SHARE, JAX_SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The share of device memory that a JAX process takes unless `XLA_PYTHON_CLIENT_MEM_FRACTION` states another one (JAX's
documentation, GPU memory allocation). The rest is for the CUDA context and libraries' own workspaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The figures that an estimate needs.

    Raises `InputError` if a figure is not positive and finite; the message names it.

    Attributes:
      name: name of GPU and link.
      flops_per_s: peak of dense 16-bit products.
      float32_flops_per_s: peak of dense 32-bit products with JAX's defaults: TF32 if the GPU has it.
      memory_bytes: size of device memory.
      memory_bytes_per_s: peak bandwidth of device memory.
      link_bytes_per_s: bandwidth between pinned host memory and the device, in each direction.
      host_bytes_per_s: sustained bandwidth of host memory.
      efficiency: the share of the peak that whole programs reach.
      product_efficiency: the share of the 16-bit peak that large products alone reach without a pause. A program of 16
        bits then takes the time of its products at that rate and then that of its memory traffic. None where it was not
        measured: `efficiency` then includes the traffic.
      kernel_link_bytes_per_s: bandwidth at which kernels read or write host memory themselves; None for that of the
        link.
      launch_s: the minimum duration of a kernel.
      link_latency_s: fixed time per transfer.
      issue_s: time of the host's thread to issue the programs and transfers of a segment for one step.
      host_memory_bytes: size of host memory; None if it is not known.
      interconnect_bytes_per_s: bandwidth from each device to the others, in each direction; None for that of the link.
      network_bytes_per_s: bandwidth to other machines of this kind, in each direction; None for that between devices.
      sources: source of each figure, by field.
    """

    name: str
    flops_per_s: float
    float32_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    efficiency: float = 0.5
    product_efficiency: float | None = None
    kernel_link_bytes_per_s: float | None = None
    launch_s: float = 2.9e-6
    link_latency_s: float = 6e-6
    issue_s: float = 0.2e-3
    host_memory_bytes: float | None = None
    interconnect_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text(self.name, "name", "machine")
        where = f'machine "{self.name}"'
        for key, field in _FIELDS.items():
            value = getattr(self, key)
            if field.default is None and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{where}: {key} must be a number, got {value!r}")
            if not 0 <= value <= 1e30 or (value < 1e-30 and key not in _MAY_BE_ZERO):
                raise InputError(f"{where}: {key} must be positive and finite, got {str(value)[:40]}")
        for key in ("efficiency", "product_efficiency"):
            if (value := getattr(self, key)) is not None and value > 1:
                raise InputError(f"{where}: {key} must lie in (0, 1], got {value}")
        sources = self.sources
        if not isinstance(sources, Mapping) or not all(isinstance(text, str) for text in sources.values()):
            raise InputError(f"{where}: sources must be a JSON object of strings, got {sources!r}")

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.machine/1`; raises `InputError` if a key is missing or unknown, or a figure is invalid."""
        fields = check_format(document, MACHINE_FORMAT)
        name = check_text(required(fields, "name", "machine"), "name", "machine")
        where = f'machine "{name}"'
        check_keys(fields, ("format", "name", *_FIELDS, "sources"), where)
        values = {key: required(fields, key, where) for key in _REQUIRED}
        return cls(
            name=name, **values, **{key: fields[key] for key in fields if key not in ("format", "name", *values)}
        )

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The machine that a profile's facts describe.

        Raises `InputError` if they lack a figure, as where the profile was measured.
        """
        if missing := [key for key in _REQUIRED if key not in facts]:
            raise InputError(
                f"the profile's machine lacks {', '.join(missing)}: estimate a profile (jaxferry profile --machine)"
            )
        known = {key: facts[key] for key in _FIELDS if facts.get(key) is not None}
        return cls(name=str(facts.get("name", "machine")), **known)

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of a transfer between host memory and a device."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s if num_bytes else 0.0

    def direct_s(self, num_bytes: float) -> float:
        """Seconds in which a kernel reads or writes host memory."""
        return num_bytes / (self.kernel_link_bytes_per_s or self.link_bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Returns the machine as `jaxferry.machine/1`."""
        fields = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return {"format": MACHINE_FORMAT, **fields, "sources": dict(self.sources)}


_FIELDS = {field.name: field for field in dataclasses.fields(Machine) if field.name not in ("name", "sources")}
_REQUIRED = tuple(name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING)
_MAY_BE_ZERO = ("launch_s", "link_latency_s", "issue_s")

_DOCUMENTS = read_json(pathlib.Path(__file__).with_name("machines.json"))
MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in map(Machine.from_json, _DOCUMENTS)}
"""The built-in machines, by name."""


def default_budget_bytes(machine: Mapping[str, Any]) -> int | None:
    """Returns the device memory that training may take on the machine of a profile; None if its size is not known.

    The profile's facts have `memory_limit_bytes`, the limit of the measured device's allocator, or `memory_bytes`, of
    which JAX takes `JAX_SHARE`.
    """
    for key, share in (("memory_limit_bytes", 1.0), ("memory_bytes", JAX_SHARE)):
        size = machine.get(key)
        if isinstance(size, int | float) and not isinstance(size, bool) and size > 0:
            return int(share * size)
    return None


def find_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Returns the built-in machine of that name, or the machine that a JSON file describes.

    Raises `InputError` if there is neither; the message lists the known names.
    """
    name = os.fspath(name_or_path)
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if not os.path.exists(name):
        raise InputError(f"machine must be one of {', '.join(MACHINES)} or a JSON file, got {name!r}")
    return load_record(name, Machine.from_json)


ALL, WITHIN, ACROSS = EXCHANGES = ("all", "within", "across")
"""The devices of an exchange: all of them; those of each process; those of one number in each of the processes."""

_BOTH = (False, True)
_TIMES_AGAIN = tuple(key for key, _ in RECOMPUTATION.values())
_OF_WORK = ("forward_s", "backward_s", "inter_forward_s", "inter_backward_s", *_TIMES_AGAIN)


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
    sizes = dict.fromkeys((forward_variant(True, remat) for remat in Remat), num_bytes[0])
    for by_dha, is_go, remat in itertools.product(_BOTH, _BOTH, Remat):
        sizes[backward_variant(by_dha, is_go, remat)] = by_dha * num_bytes[0] + is_go * num_bytes[1]
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
    for key in (*OF_BATCH, "sum_bytes"):
        size = getattr(layer, key)
        changes[key] = None if size is None else -(-size // num)
    changes["offloadable_bytes"] = {kept: -(-size // num) for kept, size in layer.offloadable_bytes.items()}
    return dataclasses.replace(layer, **changes)
