"""What link and device do to each other while both are busy: facts about the machine, for people and for comparisons.

A profile's durations are each measured alone, as the machine model has it. Here the largest layer moves while the
longest forward is computed again and again, and a program reads its layer by Direct Host Access while loads use the
same link.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxferry.engine.placement import Placement
from jaxferry.engine.programs import Programs
from jaxferry.engine.shadow import Use
from jaxferry.engine.subjects import ProgramArguments, Subject, sample, sample_vectors
from jaxferry.engine.transfers import DeviceLayer, HostGradient, Transport
from jaxferry.engine.transports import make_transport
from jaxferry.native import library
from jaxferry.partition import Layer, Partition
from jaxferry.profiling.records import LayerProfile
from jaxferry.profiling.timers import Effort, median_s

_MOST_LOADS = 2


@dataclasses.dataclass(frozen=True)
class Busiest:
    """The segments that facts about the machine are measured on, by index.

    Attributes:
      moving: has the most bytes to move, of those whose gradient is moved, all of it.
      computing: computes the longest forward.
      reading: its forward by Direct Host Access is the shortest beside its load: reading is most of it.
    """

    moving: int
    computing: int
    reading: int

    @classmethod
    def of(cls, partition: Partition, programs: Programs, layers: Sequence[LayerProfile]) -> Busiest:
        """Those of a partition whose layers have been measured."""
        numbers = range(len(layers))
        trained = [n for n in numbers if partition.segments[n].trained]
        whole = [n for n in trained if not programs.derivatives[partition.segments[n].program].has_rows] or trained
        return cls(
            max(whole, key=lambda n: layers[n].param_bytes),
            max(numbers, key=lambda n: layers[n].forward_s),
            min(numbers, key=lambda n: layers[n].forward_dha_s / max(layers[n].load_s, 1e-9)),
        )

    def facts(self, layers: Sequence[LayerProfile], seconds: Mapping[str, float]) -> dict[str, float]:
        """The facts by name; `seconds` are those of `contention_subjects`.

        What runs beside it makes nothing faster: a copy that was under way before the clock started may look so.
        """
        moving, reading = layers[self.moving], layers[self.reading]
        load_s, offload_s = seconds["load_while_computing"], seconds["offload_while_computing"]
        found = {
            "load_bytes_per_s": _speed(moving.param_bytes, moving.load_s),
            "load_bytes_per_s_while_computing": _speed(moving.param_bytes, max(moving.load_s, load_s)),
            "offload_bytes_per_s": _speed(moving.grad_bytes, moving.offload_s),
            "offload_bytes_per_s_while_computing": _speed(moving.grad_bytes, max(moving.offload_s, offload_s)),
        }
        if reading.forward_dha_s > 0:
            found["dha_slowdown_while_loading"] = max(1.0, seconds["dha_while_loading"] / reading.forward_dha_s)
        return found


def contention_subjects(
    busiest: Busiest,
    partition: Partition,
    uses: Sequence[Mapping[str, Use]],
    programs: Programs,
    placement: Placement,
    kind: str,
) -> dict[str, Subject]:
    """What is measured while something else runs, by name.

    Args:
      busiest: the segments to measure it on.
      partition: the segments.
      uses: of each segment, the programs by the names of their times.
      programs: their programs.
      placement: where everything lives.
      kind: of transport.
    """
    layers = [partition.layers[segment.layer] for segment in partition.segments]
    compute, read = uses[busiest.computing]["forward_s"], uses[busiest.reading]["forward_dha_s"]
    moved, loaded = layers[busiest.moving], layers[busiest.reading]

    def moving(make: Callable[[], _Move]) -> Callable[[Effort], float]:
        def time(effort: Effort) -> float:
            arguments = ProgramArguments(programs, compute, placement)(1)[0]
            with _repeated(lambda: programs[compute](*arguments)), contextlib.closing(make()) as move:
                return median_s(move.finish, move.begun, effort)

        return time

    def dha(effort: Effort) -> float:
        make = ProgramArguments(programs, read, placement)
        loads = [_Load(kind, placement, loaded) for _ in range(_MOST_LOADS)]

        def prepare(num_calls: int) -> list[Any]:
            arguments = make(1)
            for load in loads:
                load.begin(is_early=True)
            return arguments

        with contextlib.ExitStack() as stack:
            for load in loads:
                stack.enter_context(contextlib.closing(load))
            return median_s(lambda arguments: programs[read](*arguments), prepare, effort)

    while_computing = f"by {kind} while computing\n{moved.layout}\n{programs.lowered(compute).as_text()}"
    reading = f"dha while loading by {kind}\n{loaded.layout}\n{programs.lowered(read).as_text()}"
    load = moving(lambda: _Load(kind, placement, moved))
    offload = moving(lambda: _Offload(kind, placement, moved))
    return {
        "load_while_computing": Subject("load while computing", f"load {while_computing}", load, compute),
        "offload_while_computing": Subject("offload while computing", f"offload {while_computing}", offload, compute),
        "dha_while_loading": Subject("DHA while loading", reading, dha, read),
    }


class _Move:
    """A copy that is begun outside the timed part where it then goes on by itself, and finished within it.

    The library's copies are put onto their queue by a program: that has to wait for what the device computes, the copy
    has not. So its time counts from when that program has run. Those of plain JAX are timed as a whole.
    """

    def __init__(self, kind: str, placement: Placement, layer: Layer) -> None:
        self._transport: Transport = make_transport(kind, placement, [layer])
        self._placement, self._layer = placement, layer
        self._runs_by_itself = kind == "ferry"

    def begin(self, is_early: bool = False) -> None:
        """Begins it; `is_early` does so for all transports."""
        self.close()
        if self._runs_by_itself or is_early:
            under_way = self._issue()
            if self._runs_by_itself:
                jax.block_until_ready(under_way)

    def begun(self, num_calls: int) -> list[None]:
        """Begins it for a timer, which times one at a time."""
        self.begin()
        return [None]

    def finish(self, begun: None) -> Any:
        """Returns when it has ended."""
        if self._runs_by_itself:
            library(self._placement.platform).synchronize()
            return None
        self._issue()
        return jax.block_until_ready(self._arrive())

    def close(self) -> None:
        """Frees what it holds."""
        raise NotImplementedError

    def _issue(self) -> Any:
        raise NotImplementedError

    def _arrive(self) -> Any:
        raise NotImplementedError


class _Load(_Move):
    def __init__(self, kind: str, placement: Placement, layer: Layer) -> None:
        super().__init__(kind, placement, layer)
        self._vectors = sample_vectors(layer, placement.pinned)
        self._held: DeviceLayer | None = None

    def close(self) -> None:
        if self._held is not None:
            self._transport.drop(self._held)
        self._held = None

    def _issue(self) -> Any:
        self._held = self._transport.load(0, self._vectors)
        return self._held.arrays

    def _arrive(self) -> Any:
        assert self._held is not None
        return self._held.parameters()


class _Offload(_Move):
    _stored: HostGradient | None = None
    _gradients: Sequence[jax.Array] = ()

    def begin(self, is_early: bool = False) -> None:
        self.close()
        self._gradients = jax.block_until_ready(
            [sample(leaf, self._placement.device) for leaf in self._layer.trained.leaves]
        )
        super().begin(is_early)

    def close(self) -> None:
        if self._stored is not None:
            self._transport.gather(0, self._stored)
            self._transport.recycle(0, self._stored)
        self._stored = None

    def _issue(self) -> Any:
        self._stored = self._transport.store(0, self._gradients)
        return self._stored.vectors

    def _arrive(self) -> Any:
        assert self._stored is not None
        return self._transport.gather(0, self._stored)


@contextlib.contextmanager
def _repeated(run: Callable[[], Any]) -> Iterator[None]:
    """Calls a function again and again from another thread."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            jax.block_until_ready(run())

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            is_over.set()
        repeating.result()


def _speed(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds if seconds > 0 else 0.0
