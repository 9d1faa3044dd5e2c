"""What XLA says of a program compiled for a GPU: bytes of each result, temporaries, aliases, host compute."""

import dataclasses
import functools
import math
import re
import time

import jax

from native.compile_for_gpu import compile_lowered, host_compute, text

_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?P<layout>\{[^}]*\})?")
_NAMES = {"pred": "bool", "bf16": "bfloat16", "f": "float", "s": "int", "u": "uint"}


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result of a compiled program.

    Attributes:
      num_bytes: its size.
      is_on_host: whether it lies in pinned host memory.
    """

    num_bytes: int
    is_on_host: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program compiled for an H200.

    Attributes:
      executable: XLA's.
      seconds: how long XLA took.
      tree: the tree of its results.
    """

    executable: object
    seconds: float
    tree: object

    @functools.cached_property
    def stats(self):
        return self.executable.get_compiled_memory_stats()

    def memory_analysis(self):
        """As of `jax.stages.Compiled`, so that the engine can count with it."""
        return self.stats

    @functools.cached_property
    def _layouts(self):
        layout = text(self.executable).splitlines()[0].split("entry_computation_layout={", 1)[1]
        arguments, rest = layout.split(")->", 1) if layout[1] != ")" else ("", layout.split(")->", 1)[1])
        depth = 0
        for end, character in enumerate(rest):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth < 0:
                break
        return _arrays(arguments), _arrays(rest[:end])

    @property
    def arguments(self):
        """The arrays that the compiled program takes: those that it reads."""
        return self._layouts[0]

    @property
    def results(self):
        """The tree of its results."""
        return jax.tree.unflatten(self.tree, self._layouts[1])

    @property
    def argument_bytes(self):
        """Bytes of the arguments on the device."""
        return device_bytes(self.arguments)

    @property
    def result_bytes(self):
        """Bytes of the results on the device."""
        return device_bytes(self.results)

    @property
    def needed_bytes(self):
        """Device memory in use while it runs, without what it does not touch: XLA's own sum."""
        stats = self.stats
        made = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
        return stats.argument_size_in_bytes + made

    @property
    def simulated_temporary_bytes(self):
        """The temporaries that XLA's simulation of its heap needs, without gaps between them."""
        stats = self.stats
        others = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        on_host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        return stats.peak_memory_in_bytes - others - on_host

    def facts(self):
        """Its figures, for a table."""
        stats = self.stats
        return {
            "compile_s": round(self.seconds, 2),
            "argument_bytes": stats.argument_size_in_bytes,
            "result_bytes": stats.output_size_in_bytes,
            "alias_bytes": stats.alias_size_in_bytes,
            "temporary_bytes": stats.temp_size_in_bytes,
            "simulated_temporary_bytes": self.simulated_temporary_bytes,
            "host_argument_bytes": stats.host_argument_size_in_bytes,
            "host_result_bytes": stats.host_output_size_in_bytes,
            "host_alias_bytes": stats.host_alias_size_in_bytes,
            "host_temporary_bytes": stats.host_temp_size_in_bytes,
        }


class GpuLowered:
    """A program lowered for CUDA, with the interface of `jax.stages.Lowered` that the engine uses."""

    def __init__(self, lowered):
        self._lowered = lowered

    def compile(self):
        begin_s = time.perf_counter()
        executable = compile_lowered(self._lowered)
        return CompiledProgram(executable, time.perf_counter() - begin_s, self._lowered.out_tree)


def check_host_memory(program, name):
    """Asserts that a program leaves host memory to its operations: it computes and copies nothing there.

    Raises:
      AssertionError: with the program's name.
    """
    stats = program.stats
    assert not host_compute(program.executable), (name, host_compute(program.executable))
    assert stats.host_temp_size_in_bytes == 0, (name, stats.host_temp_size_in_bytes)
    pinned = sum(array.num_bytes for array in jax.tree.leaves(program.results) if array.is_on_host)
    assert stats.host_alias_size_in_bytes == stats.host_output_size_in_bytes == pinned, (name, pinned, stats)


def device_bytes(tree):
    """Bytes of the arrays of a tree that are on the device."""
    return sum(array.num_bytes for array in jax.tree.leaves(tree) if not array.is_on_host)


def _arrays(layouts):
    return [
        Array(_size(found["dtype"], found["shape"]), "S(5)" in (found["layout"] or ""))
        for found in _SHAPE.finditer(re.sub(r"/\*.*?\*/", "", layouts))
    ]


def _size(dtype, shape):
    letters = dtype if dtype in _NAMES else dtype.rstrip("0123456789")
    name = _NAMES[letters] + dtype[len(letters) :]
    return math.prod(int(length) for length in shape.split(",") if length) * jax.numpy.dtype(name).itemsize
