"""Measured profiles: all durations on this device, once for each distinct program, layout and update.

    partition --> subjects (microbenchmarks.py) --cache, or a timer--> seconds --> LayerProfile of each segment

Cached subjects are neither measured nor compiled again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxferry.costs import LayerCosts, LayerProfile, Profile, Report, partition_costs, recomputing
from jaxferry.engine import DeviceUpdateCompiler, Programs, widened_groups, with_program_facts
from jaxferry.modes import Remat
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import Partition, RowGradient
from jaxferry.step import (
    ProgramKey,
    ProgramKind,
    arrivals_of,
    fetch_seconds_a_byte,
    num_subgroups_of,
    save_seconds_a_byte,
)
from jaxferry.training.contention import measure_contention
from jaxferry.training.microbenchmarks import (
    GradientStore,
    HostUpdate,
    Subject,
    adds_there,
    device_update_subject,
    gradient_shapes,
    keys_of,
    load_subject,
    program_subject,
    program_variants,
    streamed_update_subject,
)
from jaxferry.training.profile_cache import MeasurementCache, cache_directory, surroundings
from jaxferry.training.timers import Effort, cold_caches, device_timer
from jaxferry.transport import Placement, make_transport

BUDGET_S = 20.0
"""Time for measurements, without compilation; three repetitions of everything may exceed it."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a step that is measured, on one device or on all devices of a mesh.

    Attributes:
      partition: the segments.
      recomputing: the same segments, with rematerialized variants where a plan may recompute, by what these keep.
      programs: the programs of both; compiled as far as they are measured.
      optimizer: the host optimizer; its update of each layer is measured.
      placement: where arrays live.
    """

    partition: Partition
    recomputing: Mapping[Remat, Partition]
    programs: Programs
    optimizer: HostOptimizer
    placement: Placement

    @property
    def variants(self) -> list[dict[str, ProgramKey]]:
        """For each segment, all programs that a step of any plan may run, by the names of their temporaries."""
        return program_variants(self.partition, self.recomputing, self.programs.derivatives)


def measure_profile(
    work: Work,
    transport: str,
    *,
    remat: str = "none",
    offload_activations: bool | str = False,
    cache: MeasurementCache | None = None,
    progress: Report | None = None,
    budget_s: float | None = None,
) -> Profile:
    """Measures the profile of a partition on this device (MemFerry, section IV-B).

    Args:
      work: what is measured.
      transport: the transport to measure, one of `TRANSPORTS`.
      remat: what is kept between forward and backward; recorded in `machine`.
      offload_activations: whether values wait in host memory for their backward, or `"auto"`: plans choose.
      cache: earlier measurements; None for the user's own cache (`MeasurementCache`).
      progress: called with the next subject.
      budget_s: seconds to spend; three repetitions of everything may exceed it. None for `BUDGET_S`.
    """
    partition, placement, cache = work.partition, work.placement, cache or default_cache(work.placement)
    report = progress or (lambda part, done, total: None)
    layers = MeasuredLayers(work, transport).profiles(cache, report, budget_s)
    profile = Profile(facts_of(placement, transport, remat), layers)
    if not placement.is_cpu:
        profile = with_link_work(profile, partition_costs(partition))
        contention = measure_contention(work.optimizer, placement, partition.layers, cache)
        profile = dataclasses.replace(profile, contention=contention)
    staging_bytes = make_transport(transport, placement, partition.layers).staging_bytes
    return with_program_facts(profile, partition, work.programs.derivatives, offload_activations, staging_bytes)


def facts_of(placement: Placement, transport: str, remat: str) -> dict[str, Any]:
    """The facts of a measured profile's machine."""
    about = surroundings(placement.platform, placement.device_kind)
    return {"measured": True, "name": placement.device_kind, **about, "transport": transport, "remat": remat}


def with_link_work(profile: Profile, costs: Sequence[LayerCosts]) -> Profile:
    """The profile with what programs that read or write host memory take of the links.

    A DHA program reads the bytes that it touches by `costs`, a GO backward writes the gradient. Each takes the time of
    a load, or an offload, of as many bytes, at the mean speed of those that were measured.
    """
    load_s_a_byte, offload_s_a_byte = fetch_seconds_a_byte(profile), save_seconds_a_byte(profile)
    return profile.with_layers(
        {
            "forward_read_s": min(counted.dha_bytes_forward * load_s_a_byte, layer.forward_dha_s),
            "backward_read_s": min(counted.dha_bytes_backward * load_s_a_byte, layer.backward_dha_s),
            "backward_write_s": layer.grad_bytes * offload_s_a_byte,
        }
        for layer, counted in zip(profile.layers, costs, strict=True)
    )


def default_cache(placement: Placement) -> MeasurementCache:
    """Returns the user's cache of measurements on this device."""
    return MeasurementCache(cache_directory(), surroundings(placement.platform, placement.device_kind))


def _seconds(
    subjects: Mapping[Any, Subject], programs: Programs, cache: MeasurementCache, report: Report, end_s: float
) -> dict[Any, float]:
    """Returns the seconds of each subject; each missing one in turn receives its share of the remaining time.

    Subjects with equal content are measured once.
    """
    by_content = {subject.content: subject for subject in subjects.values()}
    seconds = {content: known for content in by_content if (known := cache.get(content)) is not None}
    missing = {content: subject for content, subject in by_content.items() if content not in seconds}
    if missing:
        report("compiling", 0, len(missing))
        begin_s = time.monotonic()
        programs.require(subject.key for subject in missing.values() if subject.key is not None)
        end_s += time.monotonic() - begin_s
    try:
        for number, (content, subject) in enumerate(missing.items()):
            report(subject.label, number, len(missing))
            share_s = (end_s - time.monotonic()) / (len(missing) - number)
            seconds[content] = subject.time(Effort(budget_s=max(share_s, 0.0)))
            cache.put(content, seconds[content])
    finally:
        device_timer.cache_clear()
        cold_caches.cache_clear()
    return {key: seconds[subject.content] for key, subject in subjects.items()}


def temporary_bytes_of(
    keys: Sequence[ProgramKey], programs: Programs, cache: MeasurementCache, report: Report
) -> dict[ProgramKey, int]:
    """Returns the bytes that each compiled program needs besides its arguments and results; compiles unknown ones."""
    contents = {key: f"temporaries\n{programs.lowered(key).as_text()}" for key in keys}
    key_of = {content: key for key, content in contents.items()}
    found = {content: int(known) for content in key_of if (known := cache.get(content)) is not None}
    missing = {content: key for content, key in key_of.items() if content not in found}
    if missing:
        report("compiling", 0, len(missing))
    compiled = programs.temporary_bytes_of(missing.values())
    for content, key in missing.items():
        found[content] = compiled[key]
        cache.put(content, found[content])
    return {key: found[content] for key, content in contents.items()}


class MeasuredLayers:
    """The subjects of a partition, and the profile's layers made from their seconds.

    Without a `transport`, the work is that of one device of several: its programs and the updates of whole layers.
    Loads, offloads and temporaries are 0 then, and programs that read or write host memory take no longer than others:
    these follow from what all devices do together (`profiles.measure_shares`).

    Attributes:
      subjects: by key, the content of transfers; segments and layers that share a program or update share the key.
      keys: for each segment, its programs by the names of their times. Those that read or write host memory do so for
        all groups of the segment.
      compiled: all programs that a step of any plan may run.
    """

    def __init__(self, work: Work, transport: str | None) -> None:
        self._work, self._partition, self._transport = work, work.partition, transport
        self.subjects: dict[Any, Subject] = {}
        self.keys: list[dict[str, Any]] = []
        self._loads: dict[int, str] = {}
        self._offloads: dict[int, str] = {}
        self._sums: dict[int, list[str]] = {}
        self._widened = widened_groups(work.partition, work.programs.derivatives)
        self._recomputations: dict[tuple[int, Remat], ProgramKey] = {}
        self._variants = [] if transport is None else work.variants
        last = len(work.partition.segments) - 1
        for number, segment in enumerate(work.partition.segments):
            derivative = work.programs.derivatives[segment.program]
            is_sum = adds_there(work.partition, number, self._widened)
            keys = keys_of(segment.program, derivative, number == last, is_sum)
            if transport is None:  # programs that touch no host memory in place of those that do
                keys = {name: keys[f"{name.split('_')[0]}_s"] for name in keys}
            self.keys.append(keys)
            measured = dict(self.keys[-1])
            for remat, parts in work.recomputing.items():
                if (again := parts.segments[number].program) != segment.program:
                    key = measured[f"recompute {remat}"] = ProgramKey(ProgramKind.BACKWARD, again)
                    self._recomputations[number, remat] = key
            for name, key in measured.items():
                label = f"{name.removesuffix('_s').replace('_', ' ')} {segment.name}"
                self._measure(key, program_subject, work.programs, key, work.placement, label)
            if transport is not None:
                self._add_transfers(transport, number, gradient_shapes(work.partition, derivative), is_sum)
        self._updates: dict[int, tuple[Any, float]] = {}
        self._updates_on_device: dict[int, Any] = {}
        self._streamed: dict[int, Any] = {}
        self._add_updates()
        self.compiled = list(dict.fromkeys(key for variants in self._variants for key in variants.values()))

    def _measure(self, key: Any, make: Callable[..., Subject], *arguments: Any) -> Any:
        """Adds a subject unless its key is known; returns the key."""
        if key not in self.subjects:
            self.subjects[key] = make(*arguments)
        return key

    def profiles(
        self, cache: MeasurementCache, report: Report, budget_s: float | None = None
    ) -> tuple[LayerProfile, ...]:
        """Measures what is not in the cache; returns the profiles of all uses. Args as for `measure_profile`."""
        self._temporaries = temporary_bytes_of(self.compiled, self._work.programs, cache, report)
        end_s = time.monotonic() + (BUDGET_S if budget_s is None else budget_s)
        self._seconds = _seconds(self.subjects, self._work.programs, cache, report, end_s)
        counted = partition_costs(self._partition)
        return tuple(
            layer
            for number, uses in enumerate(self._partition.uses_of)
            for layer in self._layers(number, [counted[use] for use in uses])
        )

    def _add_transfers(self, transport: str, number: int, gradients: Sequence[Any], is_sum: Sequence[bool]) -> None:
        def add(subject: Subject) -> str:
            self.subjects.setdefault(subject.content, subject)
            return subject.content

        placement = self._work.placement
        for index in self._partition.uses_of[number]:
            use = self._partition.uses[index]
            layer, own, widens = self._partition.layers[use.group], gradients[use.place], use.group in self._widened
            store = GradientStore(transport, placement, layer, own, is_sum[use.place] or widens, widens)
            self._loads[index] = add(load_subject(transport, placement, layer))
            if not use.is_trained:
                continue
            self._offloads[index] = add(store.offload())
            has_rows = any(isinstance(gradient, RowGradient) for gradient in own)
            if not placement.is_cpu and (has_rows or store.is_sum):
                self._sums.setdefault(use.group, []).append(add(store.on_host()))

    def _add_updates(self) -> None:
        """Adds the updates on the host, and those of single groups on the device.

        Groups with a joint update share its time in proportion to their bytes, since a profile has one time each.
        """
        layers, optimizer, placement = self._partition.layers, self._work.optimizer, self._work.placement
        used = {use.group for use in self._partition.uses}
        arrivals = arrivals_of(self._partition, self._widened)
        on_device = None
        if placement.updates and self._transport is not None:
            transport = make_transport(self._transport, placement, layers)
            on_device = DeviceUpdateCompiler(optimizer, layers, placement, transport, accumulates=False)
        for unit in optimizer.units_of(layers):
            if used.isdisjoint(unit.layers):
                continue
            key = ("update", optimizer.updates.key(unit, layers, arrivals))
            self._measure(key, lambda *of: HostUpdate(*of).subject(), optimizer, placement, unit, layers, arrivals)
            all_bytes = sum(layers[group].trained.num_bytes for group in used.intersection(unit.layers))
            for group in unit.layers:
                share = layers[group].trained.num_bytes / all_bytes if len(unit.layers) > 1 and all_bytes else 1.0
                self._updates[group] = (key, share)
            if on_device is not None and len(unit.layers) == 1:
                [group], layer, count = unit.layers, layers[unit.layers[0]], num_subgroups_of(unit.num_bytes)
                content = optimizer.updates.plain_content(unit), layer.trained.layout
                whole, arguments = ("update on the device", *content), (on_device, placement, unit, layer)
                self._updates_on_device[group] = self._measure(whole, device_update_subject, optimizer, *arguments)
                streamed = ("streamed update", count, *content)
                self._streamed[group] = self._measure(streamed, streamed_update_subject, *arguments, count)

    def _layers(self, number: int, costs: Sequence[LayerCosts]) -> list[LayerProfile]:
        """Makes the profiles of a segment's uses from the seconds of its subjects and the temporaries of its programs.

        Times are split among the uses as their operations are counted, the extra time of programs that read or write
        host memory by the bytes that each reads or writes there.
        """
        times: dict[str, Any] = dict.fromkeys(("backward_s", "backward_dha_s", "backward_go_s"), 0.0)
        times |= {name: self._seconds[key] for name, key in self.keys[number].items()}
        if number == len(self._partition.segments) - 1:
            times = _halves(times)
        costs_again = costs[0].recomputation
        compiled = {remat: key for (of, remat), key in self._recomputations.items() if of == number}
        more_s = {each: max(self._seconds[compiled[each]] - times["backward_s"], 0.0) for each in compiled}
        again = recomputing(costs_again, {remat: own for remat, own in more_s.items() if remat in costs_again})
        if self._variants:
            again["temporary_bytes"] = {name: self._temporaries[key] for name, key in self._variants[number].items()}
        uses, split = self._partition.uses_of[number], _split(times, costs)
        return [
            self._layer(use, own, own_times | (again if use == uses[0] else {}))
            for use, own, own_times in zip(uses, costs, split, strict=True)
        ]

    def _layer(self, number: int, costs: LayerCosts, times: Mapping[str, Any]) -> LayerProfile:
        use, seconds = self._partition.uses[number], self._seconds
        is_last = use.segment == len(self._partition.segments) - 1
        update_s, streamed = 0.0, self._streamed.get(use.group) if use.is_trained else None
        if use.is_trained:
            update, share = self._updates[use.group]
            # An accelerator's host adds what is stored as the update begins.
            update_s = seconds[update] * share + sum(seconds[key] for key in self._sums.get(use.group, ()))
        # The last segment has one program, so what it would keep is among that program's temporaries.
        kept = {"activation_bytes": 0} if is_last else {}
        return LayerProfile(
            load_s=seconds.get(self._loads.get(number), 0.0),
            offload_s=seconds.get(self._offloads.get(number), 0.0),
            update_s=update_s,
            update_gpu_s=seconds.get(self._updates_on_device.get(use.group)) if use.is_trained else None,
            update_streamed_s=None if streamed is None else streamed[1] * seconds[streamed],
            **{**costs.of_profile, **kept, **times},
        )


def _split(times: Mapping[str, float], costs: Sequence[LayerCosts]) -> list[dict[str, float]]:
    """The times of a segment's programs, split among its uses."""
    if len(costs) == 1:
        return [dict(times)]
    shares = {
        "forward": _shares([own.forward_flops or own.forward_bytes for own in costs]),
        "backward": _shares([own.backward_flops or own.backward_bytes for own in costs]),
        "forward_dha": _shares([own.dha_bytes_forward for own in costs]),
        "backward_dha": _shares([own.dha_bytes_backward for own in costs]),
        "backward_go": _shares([own.grad_bytes for own in costs]),
    }
    found = []
    for place in range(len(costs)):
        own = {f"{way}_s": times[f"{way}_s"] * shares[way][place] for way in ("forward", "backward")}
        for variant in ("forward_dha", "backward_dha", "backward_go"):
            plain = f"{variant.split('_')[0]}_s"
            more_s = (times[f"{variant}_s"] - times[plain]) * shares[variant][place]
            own[f"{variant}_s"] = max(own[plain] + more_s, 0.0)
        found.append(own)
    return found


def _shares(sizes: Sequence[float]) -> list[float]:
    total = sum(sizes)
    return [size / total if total else 1 / len(sizes) for size in sizes]


def _halves(times: Mapping[str, float]) -> dict[str, float]:
    """Splits the time of the last segment's program, which is both forward and backward.

    The forward's share is its time as a separate program, but at most the whole; the backward's is the rest.
    """
    forward_s = min(times["forward_s"], times["backward_s"], times["backward_go_s"])
    forward_dha_s = min(times["forward_dha_s"], times["backward_dha_s"])
    return {
        "forward_s": forward_s,
        "forward_dha_s": forward_dha_s,
        "backward_s": times["backward_s"] - forward_s,
        "backward_dha_s": times["backward_dha_s"] - forward_dha_s,
        "backward_go_s": times["backward_go_s"] - forward_s,
    }
