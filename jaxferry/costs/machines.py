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
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from jaxferry.errors import InputError
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
