"""Machines for estimated profiles: figures of GPU, link and host, each with its source.

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
from collections.abc import Mapping
from typing import Any, Self

from jaxferry.errors import InputError
from jaxferry.records import check_format, check_keys, check_text, load_record, required

MACHINE_FORMAT = "jaxferry.machine/1"

_EFFICIENCY = 0.5
_LAUNCH_S = 2.9e-6
_LINK_LATENCY_S = 6e-6
_ISSUE_S = 0.2e-3

_COMMON_SOURCES = {
    "efficiency": "Narayanan et al., arXiv:2104.04473: 52 % of the A100's peak when training a GPT model; down to 44 % "
    "for smaller ones (44 %: unconfirmed)",
    "launch_s": "Gray, Getting Started with CUDA Graphs, NVIDIA blog, 2019: a short kernel takes 2.9 us on a V100 "
    "(unconfirmed)",
    "link_latency_s": "Wu et al., arXiv:2602.21548, section 5.2: 5 to 7 us for each cudaMemcpyAsync",
    "issue_s": "benchmarks/issue.py on a core of an AMD EPYC, with a CPU in place of the GPU",
}

_REQUIRED = (
    "flops_per_s",
    "float32_flops_per_s",
    "memory_bytes",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "host_bytes_per_s",
)
_OPTIONAL = (
    "efficiency",
    "product_efficiency",
    "kernel_link_bytes_per_s",
    "launch_s",
    "link_latency_s",
    "issue_s",
    "host_memory_bytes",
    "interconnect_bytes_per_s",
    "network_bytes_per_s",
)
_MAY_BE_UNKNOWN = (
    "product_efficiency",
    "kernel_link_bytes_per_s",
    "host_memory_bytes",
    "interconnect_bytes_per_s",
    "network_bytes_per_s",
)
_MAY_BE_ZERO = ("launch_s", "link_latency_s", "issue_s")

JAX_SHARE, JAX_SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The share of device memory that a JAX process takes unless `XLA_PYTHON_CLIENT_MEM_FRACTION` states another one (JAX's
documentation, GPU memory allocation). The rest is for the CUDA context and libraries' own workspaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The figures that an estimate needs.

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

    Raises:
      InputError: if a figure is not positive and finite; the message names it.
    """

    name: str
    flops_per_s: float
    float32_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    efficiency: float = _EFFICIENCY
    product_efficiency: float | None = None
    kernel_link_bytes_per_s: float | None = None
    launch_s: float = _LAUNCH_S
    link_latency_s: float = _LINK_LATENCY_S
    issue_s: float = _ISSUE_S
    host_memory_bytes: float | None = None
    interconnect_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text(self.name, "name", "machine")
        where = f'machine "{self.name}"'
        for key in _REQUIRED + _OPTIONAL:
            value = getattr(self, key)
            if key in _MAY_BE_UNKNOWN and value is None:
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
        """Reads `jaxferry.machine/1`.

        Raises:
          InputError: if a key is missing or unknown, or a figure is invalid.
        """
        fields = check_format(document, MACHINE_FORMAT)
        name = check_text(required(fields, "name", "machine"), "name", "machine")
        where = f'machine "{name}"'
        check_keys(fields, ("format", "name", *_REQUIRED, *_OPTIONAL, "sources"), where)
        values = {key: required(fields, key, where) for key in _REQUIRED}
        values |= {key: fields[key] for key in (*_OPTIONAL, "sources") if key in fields}
        return cls(name=name, **values)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The machine that a profile's facts describe.

        Raises:
          InputError: if they lack a figure, as where the profile was measured.
        """
        if missing := [key for key in _REQUIRED if key not in facts]:
            raise InputError(
                f"the profile's machine lacks {', '.join(missing)}: estimate a profile (jaxferry profile --machine)"
            )
        known = {key: facts[key] for key in (*_REQUIRED, *_OPTIONAL) if facts.get(key) is not None}
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


def _host(channels: int, megatransfers: int, source: str) -> tuple[float, str]:
    """Returns 80 % of the host memory's peak (8 bytes per transfer and channel), and its source."""
    return 0.8 * channels * megatransfers * 8e6, f"80 % of {channels} channels at {megatransfers} MT/s: {source}"


_PCIE3 = (12000 * 2**20, "12 GB/s: Beaumont et al., hal-03580767, Table 1; its L2L column says 12000 MiB/s")
_PCIE4 = (24.8e9, "nvbandwidth host_to_device_memcpy_ce on an A100 SXM4: forums.developer.nvidia.com, thread 352186")
_PCIE5 = (55.6e9, "nvbandwidth host_to_device_memcpy_ce: NVIDIA technical blog on nvbandwidth")
_NVLINK4 = (450e9, "half of 900 GB/s in both directions: NVIDIA H100 data sheet, SXM5 (unconfirmed)")
_E5 = _host(4, 2400, "Intel Xeon E5-2686 v4, one socket (its family; this model: unconfirmed)")
_MILAN = _host(8, 3200, "AMD EPYC 7003 data sheet, one socket")
_SAPPHIRE = _host(8, 4800, "Intel Xeon Platinum 8480, one socket (its generation; this model: unconfirmed)")
_DESKTOP = _host(2, 5200, "AMD Ryzen 9 7950X (its family; this model: unconfirmed)")


def _machine(
    name: str,
    gpu: str,
    peaks: tuple[float, float, float, float],
    link: tuple[float, str],
    host: tuple[float, str],
    interconnect: tuple[float, str] | None = None,
) -> Machine:
    flops, float32_flops, memory_bytes, memory_bytes_per_s = peaks
    of_gpu = dict.fromkeys(("flops_per_s", "float32_flops_per_s", "memory_bytes", "memory_bytes_per_s"), gpu)
    return Machine(
        name=name,
        flops_per_s=flops,
        float32_flops_per_s=float32_flops,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=link[0],
        host_bytes_per_s=host[0],
        interconnect_bytes_per_s=None if interconnect is None else interconnect[0],
        sources=_COMMON_SOURCES
        | of_gpu
        | {"link_bytes_per_s": link[1], "host_bytes_per_s": host[1]}
        | ({} if interconnect is None else {"interconnect_bytes_per_s": interconnect[1]}),
    )


_V100 = ("NVIDIA V100 data sheet, PCIe, 32 GB", (112e12, 14e12, 32e9, 900e9))
_A100 = ("NVIDIA A100 data sheet, PCIe, 80 GB", (312e12, 156e12, 80e9, 1935e9))
_H100 = ("NVIDIA H100 data sheet, SXM5, without sparsity", (989.4e12, 494.7e12, 80e9, 3350e9))
_H200 = ("NVIDIA H200 data sheet, SXM5, without sparsity", (989.4e12, 494.7e12, 141e9, 4800e9))
_RTX4090 = ("NVIDIA Ada GPU architecture white paper, appendix A", (165.2e12, 82.6e12, 24e9, 1008e9))
_ON_AN_H200 = "measured on an H200 of 16 cores (Emerald Rapids), November 2026: benchmarks/results/gpu/h200/"


def _measured(machine: Machine, figures: Mapping[str, tuple[float, str]]) -> Machine:
    """The machine with measured figures, each with its source."""
    values: dict[str, Any] = {key: value for key, (value, _) in figures.items()}
    sources = {key: source for key, (_, source) in figures.items()}
    return dataclasses.replace(machine, **values, sources={**machine.sources, **sources})


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _machine("v100-pcie3", *_V100, _PCIE3, _E5),
        _machine("a100-pcie3", *_A100, _PCIE3, _MILAN),
        _machine("a100-pcie4", *_A100, _PCIE4, _MILAN),
        _machine("h100-pcie5", *_H100, _PCIE5, _SAPPHIRE, _NVLINK4),
        _measured(
            _machine("h200-pcie5", *_H200, _PCIE5, _SAPPHIRE, _NVLINK4),
            {
                "link_bytes_per_s": (
                    55.2e9,
                    f"55.4 GB/s up, 55.2 down by copy engine; {_ON_AN_H200}link_and_memory.json",
                ),
                "kernel_link_bytes_per_s": (51.2e9, f"read 51.2, written 52.4; {_ON_AN_H200}link_and_memory.json"),
                "link_latency_s": (4.2e-6, f"4 KiB up 4.2 us, down 3.1; {_ON_AN_H200}link_and_memory.json"),
                "host_bytes_per_s": (150e9, f"AdamW of 100 M parameters in 18 ms; {_ON_AN_H200}llama_3g.json"),
                "product_efficiency": (
                    0.7,
                    "large bf16 products at 807 TFLOP/s after a pause, at 694 once they have run for 0.1 s; "
                    f"{_ON_AN_H200}sustained_products.json",
                ),
            },
        ),
        _machine("rtx4090-pcie4", *_RTX4090, _PCIE4, _DESKTOP),
    )
}
"""The built-in machines, by name."""


def default_budget_bytes(machine: Mapping[str, Any]) -> int | None:
    """Returns the device memory that training may take on the machine of a profile; None if its size is not known.

    Args:
      machine: the profile's facts. `memory_limit_bytes` is the limit of the measured device's allocator; an estimated
        machine has `memory_bytes`, of which JAX takes `JAX_SHARE`.
    """
    for key, share in (("memory_limit_bytes", 1.0), ("memory_bytes", JAX_SHARE)):
        size = machine.get(key)
        if isinstance(size, int | float) and not isinstance(size, bool) and size > 0:
            return int(share * size)
    return None


def find_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Returns the built-in machine of that name, or the machine that a JSON file describes.

    Raises:
      InputError: if there is neither; the message lists the known names.
    """
    name = os.fspath(name_or_path)
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if not os.path.exists(name):
        raise InputError(f"machine must be one of {', '.join(MACHINES)} or a JSON file, got {name!r}")
    return load_record(name, Machine.from_json)
