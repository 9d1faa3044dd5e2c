"""What all steps of a training step share, whatever the model and the batch."""

from __future__ import annotations

import warnings

from jaxferry.engine import Owner, Placement, PrefetchSlot, Recorder, Resources, Transport, make_lanes
from jaxferry.partition import Partition
from jaxferry.settings import ThreadPool
from jaxferry.training.model import Model
from jaxferry.training.options import Options


class Shared:
    """What all steps of a training step share, independent of the model.

    Attributes:
      placement: where arrays live.
      prefetch: holds the prefetched copies.
      recorder: records when tasks start and end; None records nothing.
      owner: the process and the thread that may use them.
      memory: the thread that makes what a first step needs in host memory, while the step is compiled.
    """

    def __init__(self, placement: Placement, options: Options) -> None:
        self.placement, self.prefetch, self.owner = placement, PrefetchSlot(), Owner()
        self.recorder = Recorder(options.record_steps) if options.record_steps else None
        self._lanes = make_lanes(placement.is_cpu)
        self.memory = ThreadPool(1, "jaxferry memory")
        self._has_warned = False

    def resources(self, transport: Transport, model: Model) -> Resources:
        """The resources of the steps of one structure."""
        return Resources(self.placement, transport, self._lanes, model.optimizer, self.prefetch, self.recorder)

    def warn_once(self, parts: Partition) -> None:
        """Warns of a partition's peculiarities, once."""
        remarks = list(parts.notes)
        remarks += [f"{merge.message}; that is most of the model" for merge in parts.coarse_merges]
        if parts.unread_leaves:
            unread = ", ".join(map(repr, parts.unread_leaves))
            remarks.append(f"the loss never reads {unread}: trained with a zero gradient")
        for remark in () if self._has_warned else remarks:
            warnings.warn(remark, stacklevel=6)
        self._has_warned = self._has_warned or bool(remarks)
