"""What transports hand out: device copies of layers, gradients on their way to the host, a count of loaded bytes."""

from __future__ import annotations

import abc
import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.transport.pinned import Vectors


@dataclasses.dataclass
class DeviceLayer:
    """The device copy of a layer.

    Attributes:
      arrays: the arrays that hold it now.
      arrive: converts `arrays` to the parameters when the first program needs them; None afterwards.
      forget: notes that a program waits for the load in place of `arrive`.
      is_vacant: whether nothing has asked for its parameters since `Transport.vacate`.
      is_dropped: whether it has been freed.
    """

    layer: int
    num_bytes: int
    arrays: Sequence[jax.Array]
    arrive: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None = None
    forget: Callable[[], object] | None = None
    is_vacant: bool = False
    is_dropped: bool = False

    def parameters(self) -> list[jax.Array]:
        """Returns the parameters in the order of the layer's leaves."""
        if self.arrive is not None:
            arrive, self.arrive = self.arrive, None
            self.arrays = arrive(self.arrays)
        self.is_vacant = False
        return list(self.arrays)

    def arrived_in(self, arrays: Sequence[jax.Array]) -> None:
        """Notes that a program with `ProgramKey.arrives` waits for the load, and has returned the parameters."""
        self.arrive, self.arrays = None, arrays
        if self.forget is not None:
            self.forget()


class CopyInFlight(abc.ABC):
    """A copy of a gradient to host memory; unless overridden, one of the runtime, which no device waits for."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits on the host until the copy has ended."""

    def hold(self) -> None:
        """Makes the device wait for the copy before its next program."""
        self.wait()

    def forget(self) -> None:  # noqa: B027 - nothing to do by default
        """Gives up what is kept for the copy; only after `hold`, once a program replaces the vectors."""

    def settle(self) -> None:
        """As `wait`, once a later copy of the transport has ended; another copy may have taken over the vectors."""
        self.wait()


class PutCopy(CopyInFlight):
    """A copy by `jax.device_put`, whose sources stay on the device until it has ended.

    An array that is deleted earlier is freed by a thread of the runtime, at some time after the copy. Programs that
    are issued meanwhile find its memory in use, and take more. An array that is deleted after the copy is freed at
    once.
    """

    def __init__(self, sources: Any, targets: Any) -> None:
        self._sources, self._targets = jax.tree.leaves(sources), targets
        self._lock = threading.Lock()

    def wait(self) -> None:
        """See `CopyInFlight`; then frees the sources."""
        jax.block_until_ready(self._targets)
        self.forget()

    def forget(self) -> None:
        """Frees the sources."""
        with self._lock:
            taken, self._sources, self._targets = self._sources, [], []
        delete_all(taken)


def delete_all(arrays: Sequence[jax.Array]) -> None:
    """Frees the buffers of arrays once all issued programs have read them."""
    for array in arrays:
        array.delete()


Addend = Callable[[Sequence[np.ndarray]], None]
"""Waits for something that is on its way to host memory, and adds it to a gradient's vectors there, in place."""


@dataclasses.dataclass
class HostGradient:
    """A layer's gradient in host memory, or on its way there.

    Attributes:
      vectors: the vectors that hold it, or will.
      is_gathered: whether the optimizer can read them; otherwise they are in memory that the device can write.
      copy: the copy in flight; None if JAX itself knows when `vectors` are ready.
      latest: the copy that was begun last, for `vectors` or for an addend.
      written: the vectors that the device wrote, if the optimizer reads others: views or copies of them.
      is_reusable: whether `written` may be written again by a later step.
      addends: what the host adds once it has arrived, in the order of the stores.
      is_summed_on_host: whether the host has added something, or will: the device then adds nothing more.
      lock: held while the gradient changes its place: several threads may ask for it.
    """

    vectors: Vectors
    is_gathered: bool
    copy: CopyInFlight | None = None
    latest: CopyInFlight | None = None
    written: Vectors = ()
    is_reusable: bool = True
    addends: collections.deque[Addend] = dataclasses.field(default_factory=collections.deque)
    is_summed_on_host: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.latest = self.copy

    def wait(self) -> None:
        """Waits until all that is on its way has arrived; copies end in their order."""
        if (latest := self.latest) is not None:
            latest.wait()
        else:
            jax.block_until_ready(self.vectors)

    def add_later(self, addend: Addend, copy: CopyInFlight | None) -> None:
        """Lets the host add something; whoever reads the gradient next does so."""
        self.addends.append(addend)
        self.latest, self.is_summed_on_host = copy, True


class LoadedBytes:
    """Counts bytes on the device, now and at their peak since `reset_peak`; several threads may add."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Adds bytes; a negative number subtracts."""
        with self._lock:
            self.now = now = self.now + num_bytes
            if now > self.peak:
                self.peak = now

    def reset_peak(self, copies: Iterable[DeviceLayer] | None = None) -> None:
        """Starts a new measurement of the peak.

        `held` are all live copies, if copies of other states or of another transport were counted; None if the count
        is right.
        """
        with self._lock:
            if copies is not None:
                self.now = sum(layer.num_bytes for layer in copies)
            self.peak = self.now
