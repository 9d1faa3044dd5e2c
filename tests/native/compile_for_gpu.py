"""Compiles programs for an H200 on any machine, to inspect XLA's result.

It takes the plugin packages jax-cuda13-plugin and jax-cuda13-pjrt in jax's version, and none of CUDA's libraries. The
topology's devices list no memory spaces, so that no sharding with a memory kind can be made on them: a program is
lowered for CUDA against the CPU device, and that module is compiled for the topology.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re

import jax
import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# There is no GPU to try algorithms on; without them products are left to cuBLAS, not to Triton, which needs a choice.
NO_TUNING = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}

TARGET = pathlib.Path(__file__).parent / "h200.txtpb"

_CPU = jax.devices("cpu")[0]
DEVICE = SingleDeviceSharding(_CPU, memory_kind="device")
HOST = SingleDeviceSharding(_CPU, memory_kind="pinned_host")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<operands>.*)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name: its name.
      type: its result's type and layout; a part of it that lies in host memory has the suffix `S(5)`.
      opcode: what it does: "custom-call", "copy", "fusion".
      operands: the names of the instructions that it reads.
      text: the line as XLA prints it.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def target(self):
        """The target of a custom call, else None."""
        found = re.search(r'custom_call_target="([^"]+)"', self.text)
        return found[1] if found else None

    @property
    def is_on_host(self):
        return "S(5)" in self.type


@functools.cache
def _topology(num_devices):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError(
            f"compiling for a GPU needs jax's CUDA plugin {jax.__version__}: `make test` puts it beside the "
            "environment, as tools/gpu-packages does"
        )
    shape, target = f"1x1x{num_devices}", TARGET.read_text()
    return topologies.get_topology_desc("", platform="cuda", topology=shape, target_config=target)


def compile_for_gpu(fn, *args, out_shardings, donate_argnums=()):
    """Compiles `fn` for an H200 and returns XLA's executable, which cannot run.

    Args:
      fn: a function of arrays.
      args: ShapeDtypeStructs, or pytrees of them, whose sharding is DEVICE or HOST.
      out_shardings: DEVICE or HOST for each result.
      donate_argnums: as in `jax.jit`.

    Raises:
      ModuleNotFoundError: where jax's CUDA plugin is not installed.
    """
    jitted = jax.jit(fn, out_shardings=out_shardings, donate_argnums=donate_argnums)
    return compile_lowered(jitted.trace(*args).lower(lowering_platforms=("cuda",)))


def compile_lowered(lowered, num_devices=1, flags=None):
    """Compiles a program lowered for CUDA, for an H200, or for several that share its arrays.

    Args:
      lowered: the program.
      num_devices: the number of devices.
      flags: XLA's flags by name; None for `NO_TUNING`.
    """
    topology = _topology(num_devices)
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=num_devices,
        device_assignment=np.arange(num_devices).reshape(1, num_devices),
        env_options_overrides=NO_TUNING if flags is None else flags,
    )
    devices = xla_client.DeviceList(tuple(topology.devices))
    return topology.devices[0].client.compile(lowered.compiler_ir("stablehlo"), devices, options)


def text(executable):
    """The compiled program."""
    return executable.hlo_modules()[0].to_string()


def instructions(executable):
    """The instructions of a program's entry computation, in the order in which they run."""
    lines = text(executable).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("ENTRY "))
    found = []
    for line in lines[start + 1 :]:
        if line.startswith("}"):
            break
        match = _INSTRUCTION.match(line)
        if match:
            inside = match["operands"].split(")", 1)[0]
            operands = tuple(re.findall(r"%([\w.-]+)", inside))
            found.append(Instruction(match["name"], match["type"], match["opcode"], operands, line.strip()))
    return found


def copied_after_stores(executable):
    """What a program's queued copies to the host read that is no result: such memory is free once the program ends."""
    found = instructions(executable)
    results = {name for i in found if i.text.startswith("ROOT") for name in (i.name, *i.operands)}
    stores = [i for i in found if i.target == "jaxferry_ferry_store"]
    return [source for store in stores for source in store.operands[:-1] if source not in results]


def host_compute(executable):
    """Lines of the program that XLA would run on the host's processor."""
    marks = ("_xla_compute_type", "host_compute")
    return [line.strip() for line in text(executable).splitlines() if any(mark in line for mark in marks)]
