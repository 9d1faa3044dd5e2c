"""How the training of a model is laid out in host memory, and on a disk if there is one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxferry.cli.profile import Traced
from jaxferry.costs import Profile
from jaxferry.partition import Layer
from jaxferry.step import Plan, streamed_groups
from jaxferry.training import (
    ALL,
    MASTERS,
    STATE,
    Bytes,
    few_buffers,
    fewest_on_disk,
    left_in_memory,
    with_state_on_disk,
)

HostBytes = Callable[[Traced, Collection[int], int | None], dict[str, int]]
"""Bytes of host memory by what they are for, without saved activations: of a model whose updates of these groups stream
through the GPU, with so many gradient buffers."""


class HostLayout:
    """Chooses gradient buffers, and which masters and state are on a disk, so that host memory holds the rest.

    Updates stream through the GPU if host memory could hold all masters whole.

    Args:
      own: the model.
      host_bytes: what training takes.
      most_bytes: host memory that training may take; None if it is not known.
      gradient_buffers: as of `train_step`.
      disk_bytes_per_s: the speed of the disk; None without one.

    Attributes:
      num_buffers: the most programs whose gradients host memory holds; None for all.
      on_disk: by group, the bytes of masters and of optimizer state on the disk.
      needed: bytes of host memory by what they are for, if no update streams.
    """

    def __init__(
        self,
        own: Traced,
        host_bytes: HostBytes,
        most_bytes: int | None,
        gradient_buffers: int | str,
        disk_bytes_per_s: int | None,
    ) -> None:
        self._host_bytes, self._disk_bytes_per_s = host_bytes, disk_bytes_per_s

        def fits(found: Mapping[str, int]) -> bool:
            return most_bytes is None or sum(found.values()) <= most_bytes

        num = None if gradient_buffers == ALL else gradient_buffers
        self.num_buffers = few_buffers(lambda num: fits(host_bytes(own, (), num))) if isinstance(num, str) else num
        in_memory = host_bytes(own, (), self.num_buffers)
        self.on_disk: dict[int, Bytes] = {}
        if disk_bytes_per_s is not None:
            sizes = _state_bytes(own.variants.base.layers, in_memory)
            chosen = fewest_on_disk(sizes, lambda on_disk: fits(left_in_memory(in_memory, on_disk)))
            self.on_disk = {group: sizes[group] for group in chosen}
        self.needed = self._left(in_memory)
        self._streams = fits(host_bytes(own, range(len(own.profile.groups)), self.num_buffers))

    def planned(self, traced: Traced) -> Traced:
        """The model with what plans must know of the layout."""
        if not self._streams:
            traced = traced.changed(Profile.without_streaming)
        if self.num_buffers is not None:
            traced = traced.changed(lambda own: dataclasses.replace(own, gradient_buffers=self.num_buffers))
        return traced.changed(functools.partial(self._with_disk, traced)) if self.on_disk else traced

    def of_plan(self, traced: Traced, plan: Plan) -> dict[str, int]:
        """The bytes of host memory by what they are for, with a plan's updates."""
        streamed = streamed_groups(traced.profile, plan) - self.on_disk.keys()
        return self._left(self._host_bytes(traced, streamed, self.num_buffers))

    def _left(self, needed: dict[str, int]) -> dict[str, int]:
        return left_in_memory(needed, list(self.on_disk.values()))

    def _with_disk(self, traced: Traced, profile: Profile) -> Profile:
        """The profile of a step that reads and writes the state of some groups on the disk."""
        parts, seconds = traced.variants.base, 1 / (self._disk_bytes_per_s or 1)
        sizes = {parts.layers[group].name: sum(own) for group, own in self.on_disk.items()}
        return with_state_on_disk(profile, parts, sizes, (seconds, seconds), may_update=False)


def _state_bytes(layers: Sequence[Layer], found: Mapping[str, int]) -> dict[int, Bytes]:
    """The bytes of masters and optimizer state of each trained group, in proportion to its parameters."""
    numbers = {group: layer.trained.num_parameters for group, layer in enumerate(layers) if layer.trained.leaves}
    total = max(sum(numbers.values()), 1)
    return {group: (found[MASTERS] * num // total, found[STATE] * num // total) for group, num in numbers.items()}
