"""What the next step has loaded before it is called.

A load waits for the update of its layer alone, which often ends while the step before is still running: of layers whose
backward comes early, and of all while the caller sees to the next batch.
"""

from __future__ import annotations

import dataclasses

from jaxferry.engine.lanes import Work
from jaxferry.engine.marks import StepMarks
from jaxferry.engine.transfers import DeviceLayer, Transport


@dataclasses.dataclass(eq=False)
class Ahead:
    """A step that has not been called, but of which some layers are on the device, or on their way there.

    Attributes:
      work: its tasks, of which the first loads are being done.
      copies: what has been loaded, by the task that did.
      marks: notes when they start and end; None if nobody wants to know.
      transport: what loads them.
    """

    work: Work
    copies: dict[int, DeviceLayer]
    marks: StepMarks | None
    transport: Transport

    @property
    def is_good(self) -> bool:
        """Whether the step can go on from here."""
        return not self.work.is_stopped and self.work.failure is None

    def discard(self) -> None:
        """Frees what has been loaded; waits for what is on its way."""
        self.work.stop()
        while self.copies:
            self.transport.drop(self.copies.popitem()[1])


class OneAhead:
    """Sees to it that of all states that a training step trains, only one has layers on the device ahead."""

    def __init__(self) -> None:
        self._known: Ahead | None = None

    def put(self, ahead: Ahead) -> None:
        """Remembers it, until it is taken."""
        self._known = ahead

    def take(self, ahead: Ahead | None) -> None:
        """Forgets it, and frees what any other state has on the device.

        Args:
          ahead: what its step will use or free; None if everything is to be freed.
        """
        known, self._known = self._known, None
        if known is not None and known is not ahead:
            known.discard()
