"""Microbenchmarks for a profile's durations: a program, a load, a store or an update, each with its own arguments.

Arguments are made from shapes (`samples.py`). An optimizer starts from its own initial state. Only one subject's
arguments exist at a time; caches are emptied before each call (`timers.py`).

A task of an accelerator takes what its own queue takes (`timers.py`). A CPU, and the host, take a call's time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.costs import forward_variant
from jaxferry.engine import DeviceUpdateCompiler, Programs, joined, widened_groups
from jaxferry.modes import Remat
from jaxferry.optimizer import HostOptimizer, MasterForm, UpdateGroup, in_order, split_unit, vectors_arriving
from jaxferry.partition import Derivative, Layer, Partition, RowGradient
from jaxferry.step import Arrival, ProgramKey, ProgramKind, Source, Target
from jaxferry.training.samples import ProgramArguments, sample, sample_gradient, sample_vectors
from jaxferry.training.timers import MOST_REPETITIONS, Copy, Effort, cold_caches, device_timer, median_s, timed_call
from jaxferry.transport import DeviceLayer, HostGradient, Placement, TaskMark, make_transport, shares_of


@dataclasses.dataclass(frozen=True)
class Subject:
    """Something to measure, in seconds.

    `content` identifies it among everything measured on the same machine, `label` names it in progress reports, and
    `key` is the program that must be compiled first.
    """

    label: str
    content: str
    time: Callable[[Effort], float]
    key: ProgramKey | None = None


def program_subject(programs: Programs, key: ProgramKey, placement: Placement, label: str) -> Subject:
    """Measures one device program."""

    def time(effort: Effort) -> float:
        return _program_s(programs[key], ProgramArguments(programs, key, placement), placement, effort)

    return Subject(label, f"program\n{programs.lowered(key).as_text()}", time, key)


def _program_s(run: Callable[..., Any], prepare: Callable[[], Any], placement: Placement, effort: Effort) -> float:
    """The seconds of a program on the device."""
    if placement.is_cpu:
        return median_s(timed_call(run, prepare, empty_caches=cold_caches(placement.device)), effort)
    return median_s(device_timer(placement).program(run, prepare), effort.at_most(MOST_REPETITIONS))


def _copy_s(copy: Copy, placement: Placement, effort: Effort) -> float:
    """The seconds of a copy on its link; on a CPU until it has arrived."""
    if not placement.is_cpu:
        return median_s(device_timer(placement).copy(copy), effort.at_most(MOST_REPETITIONS))
    begun: list[Any] = []

    def run(source: Any) -> Any:
        begun.append(copy.begin(source, None))
        return copy.arrive(begun[0])

    timed = timed_call(run, lambda: (copy.prepare(),), empty_caches=cold_caches(placement.host_compute))

    def once() -> float:
        seconds = timed()
        copy.end(begun.pop())
        return seconds

    return median_s(once, effort)


def load_subject(kind: str, placement: Placement, layer: Layer) -> Subject:
    """Measures the load of a layer's parameters; `kind` is the transport."""

    def time(effort: Effort) -> float:
        transport = make_transport(kind, placement, [layer])
        vectors, load = sample_vectors(layer, placement.pinned), functools.partial(transport.load, 0)
        return _copy_s(Copy(lambda: vectors, load, DeviceLayer.parameters, transport.drop), placement, effort)

    return Subject(f"load {layer.name}", f"load by {kind}\n{layer.layout}", time)


@dataclasses.dataclass(frozen=True)
class GradientStore:
    """The store of a layer's gradient in host memory, by a kind of transport.

    Attributes:
      gradients: shapes of the backward's: arrays, or rows of lookups.
      is_sum: whether it is added to the stored gradient of a later segment.
      widens: whether that is a sum of more bits.
    """

    kind: str
    placement: Placement
    layer: Layer
    gradients: Sequence[Any]
    is_sum: bool
    widens: bool = False

    def offload(self) -> Subject:
        """Measures the store; on a CPU until the host can read it."""

        def time(effort: Effort) -> float:
            return _copy_s(self._copy(), self.placement, effort)

        return Subject(f"offload {self.layer.name}", self._content("offload"), time)

    def on_host(self) -> Subject:
        """Measures what an accelerator's host does with it before the update reads it: it may add rows."""

        def time(effort: Effort) -> float:
            return median_s(device_timer(self.placement).arrival(self._copy()), effort)

        return Subject(f"sum {self.layer.name} on the host", self._content("sum on the host"), time)

    def _content(self, what: str) -> str:
        kind = f"{what} by {self.kind}, sum {self.is_sum}{' in more bits' * self.widens}"
        return f"{kind}\n{self.layer.layout}\n{', '.join(map(_words, self.gradients))}"

    def _copy(self) -> Copy:
        transport = make_transport(self.kind, self.placement, [self.layer])
        stored = self.layer.trained.wide if self.widens else self.layer.trained
        known = [HostGradient(sample_vectors(stored, self.placement.update_output), True)] if self.is_sum else []

        def prepare() -> Any:
            return [sample_gradient(gradient, self.placement.device) for gradient in self.gradients]

        def begin(arrays: Any, mark: TaskMark | None) -> HostGradient:
            return transport.store(0, arrays, known.pop() if known else None, mark, False, self.widens)

        def end(stored: HostGradient) -> None:
            if self.is_sum:
                known.append(stored)
            else:
                transport.recycle(0, stored)

        return Copy(prepare, begin, functools.partial(transport.gather, 0), end)


def _words(gradient: Any) -> str:
    """Describes a gradient's shape; equal for equal stores."""
    if not isinstance(gradient, RowGradient):
        return f"{gradient.dtype}{list(gradient.shape)}"
    return f"{_words(gradient.indices)} of {_words(gradient.rows)} in {gradient.dtype}{list(gradient.shape)}"


def gradient_shapes(partition: Partition, derivative: Derivative) -> list[list[Any]]:
    """Returns shapes of the gradients that a segment's programs return, by group."""
    segment, arguments = derivative.segment, derivative.backward_arguments(partition.graph)
    layers = [partition.layers[group].trained for group in segment.groups]

    def by_group(*given: Any) -> list[list[Any]]:
        parts = segment.trained_by_group(derivative.backward(*given)[0])
        return [joined(layer, part) for layer, part in zip(layers, parts, strict=True)]

    made: list[list[Any]] = jax.eval_shape(by_group, *arguments)
    return made


_SCALE = np.float32(1)


class HostUpdate:
    """A unit's host update on new state, until the compute copy is where the device reads it.

    `text` identifies the program; `num_bytes` counts the master parameters.
    """

    def __init__(
        self,
        optimizer: HostOptimizer,
        placement: Placement,
        unit: UpdateGroup,
        layers: Sequence[Layer],
        arrivals: Sequence[Arrival],
    ) -> None:
        self._optimizer, self._placement, self._unit, self._arrivals = optimizer, placement, unit, arrivals
        self._layers, self._parts = layers, [layers[i].trained for i in unit.layers]
        self.text = optimizer.updates.text(unit, layers, arrivals)
        self.num_bytes = sum(master.size * master.dtype.itemsize for master in unit.masters)
        self._scalar = jax.device_put(np.float32(1), placement.host_compute)
        self._extra = [np.zeros(aval.shape, aval.dtype) for aval in optimizer.extra]

    def arguments(self) -> list[Any]:
        """The unit with new masters and state, compute copies and gradients."""
        masters = [sample(aval, self._placement.host) for aval in self._unit.masters]
        state = self._optimizer.updates.init_state(self._unit, masters)
        own = dataclasses.replace(self._unit, masters=masters, state=state, programs={})
        self._optimizer.updates.compile([own], self._layers, self._arrivals)
        there = list(map(self._placement.ownership.shared, self._parts))
        pairs = zip(there, self._parts, strict=True)
        vectors = [sample_vectors(shared, self._placement.pinned_of(part)) for shared, part in pairs]
        form = self._optimizer.updates.form_of(own, self._layers)
        if form is not MasterForm.WHOLE:
            # As training has them: masters that are the compute copy, and what it lacks.
            shares = [[shares_of(vector, self._placement) for vector in of_layer] for of_layer in vectors]
            placed = in_order(self._parts, self._placement.ownership)
            for master, (number, leaf, pieces) in zip(masters, placed, strict=True):
                flat = np.asarray(master).reshape(-1)
                for piece in pieces:
                    piece.of(shares[number][leaf.vector])[:] = flat[piece.first : piece.stop]
            split_unit(own, self._parts, vectors, form, self._placement)
        [update] = own.programs.values()
        gradients = []
        for i, part, shared in zip(self._unit.layers, self._parts, there, strict=True):
            are_shares = update.reads_shares and self._arrivals[i] is Arrival.OWN
            layer = shared if are_shares else self._placement.ownership.of(part)
            where = self._placement.pinned_of(part) if are_shares else self._placement.update_output
            gradients.append(tuple(sample(vector, where) for vector in vectors_arriving(layer, self._arrivals[i])))
        return [own, vectors, jax.block_until_ready(gradients)]

    def __call__(self, held: list[Any]) -> None:
        """Updates in place; the results, which are ready, take the places of the arguments."""
        own, vectors, gradients = held
        [update] = own.programs.values()
        held[1] = update(own, vectors, gradients, self._scalar, _SCALE, self._extra)

    def begin_step(self, held: list[Any]) -> list[Any]:
        """Computes what all updates of a step share; returns the argument."""
        [update] = held[0].programs.values()
        update.begin_step(held[0], self._scalar, _SCALE)
        return held

    def subject(self) -> Subject:
        """Measures the update."""

        def time(effort: Effort) -> float:
            held = self.arguments()
            cold = cold_caches(self._placement.host_compute)
            return median_s(timed_call(self, lambda: (self.begin_step(held),), empty_caches=cold), effort)

        return Subject(f"update {self._layers[self._unit.layers[0]].name}", f"update\n{self.text}", time)


def device_update_subject(
    optimizer: HostOptimizer, updates: DeviceUpdateCompiler, placement: Placement, unit: UpdateGroup, layer: Layer
) -> Subject:
    """Measures the update of a unit of one layer whose masters and state are on the device."""
    lowered, arguments = updates.alone(unit, _joined_shapes(layer))

    def time(effort: Effort) -> float:
        masters, _, copies, *others = jax.tree.map(lambda aval: sample(aval, placement.device), arguments)
        state = optimizer.updates.init_state(unit, [sample(aval, placement.host) for aval in unit.masters])
        current: list[Any] = [masters, jax.device_put(state, placement.device), copies]
        program = lowered.compile()

        def update(*held: Any) -> Any:
            current[:] = program(*held, *others)
            return current

        return _program_s(update, lambda: tuple(current), placement, effort)

    return Subject(f"update of {layer.name} on the device", f"device update\n{lowered.as_text()}", time)


def streamed_update_subject(
    updates: DeviceUpdateCompiler, placement: Placement, unit: UpdateGroup, layer: Layer, count: int
) -> Subject:
    """Measures the update of one of `count` subgroups of a unit of one layer that streams through the device."""
    lowered, arguments = updates.alone_streamed(unit, _joined_shapes(layer), count)

    def time(effort: Effort) -> float:
        donated, others = arguments[:3], jax.tree.map(lambda aval: sample(aval, placement.device), arguments[3:])
        program = lowered.compile()

        def prepare() -> Any:
            return jax.tree.map(lambda aval: sample(aval, placement.device), donated)

        return _program_s(lambda *held: program(*held, *others), prepare, placement, effort)

    label = f"streamed update of {layer.name}"
    return Subject(label, f"streamed update\n{lowered.as_text()}", time)


def _joined_shapes(layer: Layer) -> Any:
    """The shapes of a layer's gradients as programs return them, in the parameters' compute dtype."""
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layer.trained.leaves]
    return jax.eval_shape(layer.trained.join_small, shapes)


def keys_of(program: int, derivative: Derivative, is_last: bool, is_sum: Sequence[bool]) -> dict[str, ProgramKey]:
    """Returns the programs that determine a segment's times, by the times' names in a profile.

    A segment without a backward has only its forwards. `is_last`: forward and backward are one program. `is_sum`: for
    each group, whether a program that writes its gradient to the host adds it there (`adds_there`).
    """
    kind, num = ProgramKind.LOSS if is_last else ProgramKind.BACKWARD, len(is_sum)
    loaded, stays, read = (Source.DEVICE,) * num, (Target.DEVICE,) * num, (Source.HOST,) * num
    # A lookup's backward reads no weight, and programs do not write its few rows to the host.
    reads_back = tuple(Source.HOST if is_last or reads else Source.DEVICE for reads in derivative.reads_groups)
    trained = derivative.segment.trained_by_group(derivative.segment.trained)
    written = tuple(
        Target.DEVICE if derivative.has_rows or not own else Target.HOST_SUM if is_added else Target.HOST
        for own, is_added in zip(trained, is_sum, strict=True)
    )
    forwards = {
        "forward_s": ProgramKey(ProgramKind.FORWARD, program, loaded, stays),
        "forward_dha_s": ProgramKey(ProgramKind.FORWARD, program, read, stays),
    }
    if not derivative.segment.runs_back:
        return forwards
    return forwards | {
        "backward_s": ProgramKey(kind, program, loaded, stays),
        "backward_dha_s": ProgramKey(kind, program, reads_back, stays),
        "backward_go_s": ProgramKey(kind, program, loaded, written),
    }


def adds_there(partition: Partition, number: int, widened: Collection[int]) -> list[bool]:
    """For each group of a segment, whether the host has a later segment's gradient, for programs to add to."""
    later = {group for segment in partition.segments[number + 1 :] for group in segment.groups}.difference(widened)
    return [group in later for group in partition.segments[number].groups]


def program_variants(
    partition: Partition, recomputing: Mapping[Remat, Partition], derivatives: Mapping[int, Derivative]
) -> list[dict[str, ProgramKey]]:
    """For each segment, all programs that a step of any plan may run, by the names of their temporaries in a profile.

    `recomputing` are the same segments, with rematerialized variants where a plan may recompute.
    """
    found, last, widened = [], len(partition.segments) - 1, widened_groups(partition, derivatives)
    for number, segment in enumerate(partition.segments):
        found.append(dict[str, ProgramKey]())
        levels = {parts.segments[number].program: remat for remat, parts in recomputing.items()}
        for program, remat in (levels | {segment.program: Remat.NONE}).items():
            is_last, suffix = number == last and remat is Remat.NONE, forward_variant(False, remat)[len("forward") :]
            keys = keys_of(program, derivatives[program], is_last, adds_there(partition, number, widened))
            if "backward_s" in keys:
                writes = keys["backward_go_s"].writes
                keys["backward_dha_go_s"] = dataclasses.replace(keys["backward_dha_s"], writes=writes)
            named = {f"{name.removesuffix('_s')}{suffix}": key for name, key in keys.items()}
            # The last forward and backward are one program.
            found[-1] = {n: k for n, k in named.items() if not is_last or k.kind is ProgramKind.LOSS} | found[-1]
    return found
