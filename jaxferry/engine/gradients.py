"""The gradients of one step, from the program that computes them to the update.

program --> pending (device) --offload--> in flight --> on_host --gather--> update
|--> sums (device), over micro-batches                ^
`--GO: the program writes host memory itself ---------'

A gradient whose update runs on the device stays in `kept`; over micro-batches its sum stays in `sums`. Sums over
micro-batches and of several uses are in fp32 at least, wherever they are: see `Layer.wide`. `lower.widened_groups` has
the one exception, tied tables.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.device_updates import DeviceUpdates
from jaxferry.engine.pending import Accumulated, LateFailure
from jaxferry.engine.program_functions import squared_norm
from jaxferry.optimizer import UpdateGroup
from jaxferry.partition import Layer, wide_dtype
from jaxferry.settings import ThreadPool
from jaxferry.step import Instruction, ProgramKey, StepProgram, Target, variant_of
from jaxferry.transport import CopyInFlight, Ferry, HostGradient, Placement, Transport, Vectors, added

SquaredNorm = Future[jax.Array] | jax.Array  # a scalar in host memory that a thread computes, or one on the device
_norm_of_vectors = jax.jit(lambda vectors: squared_norm(jax.device_put(vectors, jax.memory.Space.Device)))
_together = jax.jit(jnp.stack)
_add_onto = jax.jit(lambda known, more: list(map(added, known, more)), donate_argnums=0)
_widened = jax.jit(lambda gradients: [gradient.astype(wide_dtype(gradient.dtype)) for gradient in gradients])


class Norms:
    """Computes squared norms of gradients.

    With `on_host`, every norm is computed from the vectors in host memory. This gives every plan the same bits, as
    needed if the norm changes the update. Else a program's own norm is used if it covers the whole gradient.
    """

    def __init__(self, placement: Placement, on_host: bool) -> None:
        self._placement, self._on_host = placement, on_host
        self._thread = ThreadPool(1, "jaxferry norms")
        self.none = jax.device_put(np.float32(0), placement.host_compute)
        """The argument of an update that needs no norm."""

    def compile(self, num_uses: Collection[int]) -> None:
        """Compiles what collects the norms that programs return, so that the first step need not."""
        placement, num = self._placement, sum(uses == 1 for uses in num_uses)
        if num > 1 and not (self._on_host or placement.is_cpu or placement.num_devices > 1):
            # The step collects them under this thread's settings, which are not those of a trace.
            self._thread.submit(_compile_together, num, placement.device).result()

    def of(self, gather: Callable[[], Vectors], known: jax.Array | None) -> SquaredNorm:
        """Returns the squared norm of a whole gradient: `known` by its program, or of what `gather` returns."""
        if known is None or self._on_host:
            # The next step may write into the gradient's memory once the norm is known.
            return self._thread.submit(lambda: jax.block_until_ready(_norm_of_vectors(gather())))
        return known

    def values(self, squared: Mapping[int, SquaredNorm], layers: Sequence[Layer]) -> dict[int, Any]:
        """Returns the squared norms of whole gradients by group.

        Several processes add up theirs, so each must call this.
        """
        found = {group: norm.result() if isinstance(norm, Future) else norm for group, norm in squared.items()}
        placement = self._placement
        there = [group for group, norm in squared.items() if not isinstance(norm, Future)]
        if len(there) > 1 and placement.num_devices == 1 and not placement.is_cpu:
            # One copy in place of one for each.
            found |= zip(there, np.asarray(_together([found[group] for group in there])), strict=True)
        own = [g for g, norm in squared.items() if isinstance(norm, Future) and not layers[g].is_whole]
        if own and placement.num_processes > 1:
            table = np.zeros((placement.num_processes, len(own)), np.float32)
            table[placement.process] = [found[group] for group in own]
            found |= zip(own, placement.merged(table).sum(axis=0), strict=True)
        return found

    def total(self, squared: Sequence[Any], scale: np.floating) -> jax.Array:
        """Returns the global norm of the mean gradient, an fp32 scalar in host memory."""
        with np.errstate(all="ignore"):  # as XLA computes it: what is not finite stays so
            norm = np.sqrt(sum(jax.device_get(list(squared)), start=np.float32(0))) / np.float32(scale)
        return jax.device_put(np.float32(norm), self._placement.host_compute)


class GradientNorms:
    """The squared norms of one step's gradients, by parameter group."""

    def __init__(self, norms: Norms, layers: Sequence[Layer]) -> None:
        self._norms, self._layers = norms, layers
        self._of_programs: dict[int, jax.Array | None] = {}
        self._taken: dict[int, SquaredNorm] = {}
        self._known: dict[int, Any] = {}

    def note(self, group: int, norm: jax.Array | None) -> None:
        """Notes the norm of what a program has computed; None if it has none."""
        self._of_programs[group] = norm

    def of_program(self, group: int) -> jax.Array | None:
        """What was noted last."""
        return self._of_programs[group]

    def begin(self, group: int, gather: Callable[[], Vectors], is_whole: bool) -> None:
        """Starts computing the norm of a group's gradient; with `is_whole`, the program's own norm covers it."""
        self._taken[group] = self._norms.of(gather, self._of_programs[group] if is_whole else None)

    def take(self, group: int, norm: SquaredNorm) -> None:
        """Takes a norm that is computed elsewhere."""
        self._taken[group] = norm

    def wait_for(self, group: int) -> None:
        """Waits until the norm of a group's gradient is known, if a thread computes it."""
        if isinstance(norm := self._taken.get(group), Future):
            concurrent.futures.wait([norm])

    def squared(self) -> list[Any]:
        """The squared norm of each group's whole gradient, in the order of the groups; waits for them."""
        if not self._known:
            taken = {group: self._taken[group] for group in sorted(self._taken)}
            self._known = self._norms.values(taken, self._layers)
        return list(self._known.values())

    def first_nonfinite(self) -> int | None:
        """The first group whose gradient has a squared norm that is not finite, once they are known."""
        return next((group for group, norm in self._known.items() if not np.isfinite(np.asarray(norm))), None)

    def release(self) -> None:
        """Drops the norms once the step's results are known."""
        self._of_programs, self._taken, self._known = {}, {}, {}


@functools.cache
def _compile_together(num: int, where: jax.sharding.Sharding) -> Any:
    return _together.lower([jax.ShapeDtypeStruct((), np.float32, sharding=where)] * num).compile()


class OffloadsInFlight:
    """The offloads whose gradients the device still holds, in the order of issue."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._copies: collections.deque[tuple[int, CopyInFlight]] = collections.deque()

    def add(self, index: int, copy: CopyInFlight) -> None:
        """Adds the offload with this index."""
        self._copies.append((index, copy))

    def hold(self, last: int | None = None) -> None:
        """Makes the device wait for the offloads up to this one, or for all, and frees their gradients.

        Raises `LateFailure`.
        """
        indices = [index for index, _ in self._copies]
        num = len(indices) if last is None else indices.index(last) + 1 if last in indices else 0
        held = [self._copies.popleft() for _ in range(num)]
        try:
            self._transport.hold([copy for _, copy in held])
        except Exception as error:
            raise LateFailure(held[0][0]) from error


class StepGradients:
    """The gradients of one micro-batch, and the sums of those before it.

    Attributes:
      sums: by group, the gradients summed on the device.
      kept: by group that is updated on the device, the gradients of this micro-batch, one for each use.
      on_host: by group, the gradients in host memory or in flight.
      has_added: whether a sum of earlier micro-batches may have changed, which is irreversible.
    """

    def __init__(
        self,
        program: StepProgram,
        transport: Transport,
        norms: Norms,
        accumulated: Accumulated,
        is_last: bool,
        updates: DeviceUpdates,
    ) -> None:
        self._updates = updates
        self.kept: dict[int, list[Any]] = {}
        self._program, self._transport, self._is_last = program, transport, is_last
        self.norms = GradientNorms(norms, program.partition.layers)
        self._earlier = frozenset((*accumulated.on_host, *accumulated.on_device))
        self._pending: dict[int, Any] = {}
        self._are_sums: set[int] = set()
        self.in_flight = OffloadsInFlight(transport)
        self._num_arrived: collections.Counter[int] = collections.Counter()
        self._num_uses = program.partition.num_uses
        self.sums: dict[int, list[jax.Array]] = dict(accumulated.on_device)
        self.on_host: dict[int, HostGradient] = dict(accumulated.on_host)
        self.has_added = False

    def key(self, call: Instruction, commit: Callable[[], bool]) -> ProgramKey | None:
        """Returns the program to run; it adds to host memory if an earlier one has written there.

        None if stopped before.
        """
        key = call.key
        assert key is not None
        if not call.written:
            return key
        widened, added = set[int](), set[int]()
        for use in call.written:
            if not self._may_add(use.group, commit):
                return None
            known = self.on_host.get(use.group)
            if use.group in self._program.widened:
                widened.add(use.place)
            elif known is not None and not self._transport.is_summed_on_host(known):
                added.add(use.place)
        return variant_of(key, widened, added)

    def destinations(self, call: Instruction, key: ProgramKey) -> Sequence[list[list[jax.Array]]]:
        """The vectors of each group that a program writes gradients into, as one argument or none."""
        if call.stores:
            return [[list(self._transport.destinations(call.group, None))]]
        if not call.written:
            return ()
        made = []
        for use in call.written:
            onto = self.on_host[use.group] if key.writes[use.place] is Target.HOST_SUM else None
            made.append(list(self._transport.destinations(use.group, onto)))
        return [made]

    def receive(
        self,
        call: Instruction,
        key: ProgramKey,
        gradients: Sequence[Any],
        norms: Sequence[jax.Array | None],
        commit: Callable[[], bool],
    ) -> None:
        """Stores the gradients that a program has returned; with `call.stores`, vectors and what goes there."""
        for use, own, norm in zip(call.uses, gradients, norms, strict=True):
            if not use.is_trained:
                continue
            group, target = use.group, key.writes[use.place]
            self.norms.note(group, norm)
            if call.stores:
                assert isinstance(self._transport, Ferry), "no other transport joins stores to programs"
                stored = self.on_host[group] = self._transport.queued(*own)
                self._note_offload(self._program.queued[call.segment], group, stored)
            elif use.is_updated_on_device:
                self.kept.setdefault(group, []).append(own)
                self._note_kept(group, commit)
            elif use.writes_host:
                stored, known = self._transport.written(own), self.on_host.get(group)
                if target is not Target.HOST_SUM and (known is not None or group in self._program.widened):
                    stored = self._transport.add_on_host(group, known, stored)
                self.on_host[group] = stored
            else:
                if group in self.sums and self._may_add(group, commit):
                    own = _add_onto(self.sums.pop(group), own)
                    self._are_sums.add(group)
                self._pending[use.number] = own

    def _note_offload(self, index: int, group: int, stored: HostGradient) -> None:
        if stored.latest is not None:
            self.in_flight.add(index, stored.latest)
        self.note_arrival(group)

    def _note_kept(self, group: int, commit: Callable[[], bool]) -> None:
        """Adds the gradient of a group to the sum of earlier micro-batches, or starts its norm, once it is whole."""
        uses = self.kept[group]
        if len(uses) < self._num_uses[group]:
            return
        is_sum = self._earlier or not self._is_last
        if is_sum:
            if not self._may_add(group, commit):
                return
            earlier = [self.sums.pop(group)] if group in self.sums else []
            uses = self.kept[group] = [self._updates.fold(group, earlier, uses)]
        if not self._is_last:
            self.sums[group] = self.kept.pop(group)[0]
            return
        known = None if is_sum or self._num_uses[group] > 1 else self.norms.of_program(group)
        self.norms.take(group, self._updates.squared_norm(group, uses) if known is None else known)

    def take_kept(self, unit: UpdateGroup) -> list[list[Any]]:
        """The gradients for an update on the device: for each of its groups one list for each use."""
        return [self.kept.pop(group, []) for group in unit.layers]

    def offload(self, call: Instruction, mark: Any, commit: Callable[[], bool], waits: bool) -> None:
        """Offloads a gradient, or keeps it in the sums on the device; `commit` permits an irreversible change."""
        group = call.group
        # A sum begun on the host, under another batch's plan, stays there. The bits are the same either way.
        if group in self._program.summed and not self._is_last and group not in self.on_host:
            own = self._pending.pop(call.task.segment)
            begins = group in self._program.widened and group not in self._are_sums
            self.sums[group] = _widened(own) if begins else list(own)
            return
        if not self._may_add(group, commit):
            return
        gradients, known = self._pending.pop(call.task.segment), self.on_host.get(group)
        is_sum, widens = group in self._are_sums, group in self._program.widened
        stored = self.on_host[group] = self._transport.store(group, gradients, known, mark, is_sum, widens)
        if waits:
            jax.block_until_ready(self.gather(group))
            self.note_arrival(group)
        else:
            self._note_offload(call.index, group, stored)

    def forget_inflight(self) -> None:
        """Waits for all offloads in flight and ignores their errors."""
        for group, gradient in self.on_host.items():
            if gradient.copy is not None or gradient.addends:
                # The step is abandoned, and so are its gradients.
                with contextlib.suppress(Exception):
                    self._transport.gather(group, gradient)
        self.in_flight = OffloadsInFlight(self._transport)

    def note_arrival(self, group: int) -> None:
        """Starts computing the norm of a group's gradient once all of it is in host memory or on its way there."""
        num_uses = self._num_uses[group]
        if num_uses > 1:
            self._num_arrived[group] += 1
            if self._num_arrived[group] < num_uses:
                return
        if not self._is_last:
            return
        is_whole = num_uses == 1 and not self._earlier
        # The update may take the gradient away before its norm is computed.
        gather = functools.partial(self._transport.gather, group, self.on_host[group])
        self.norms.begin(group, gather, is_whole)

    def gather(self, group: int) -> Vectors:
        """The vectors of a group's gradient that the optimizer reads."""
        return self._transport.gather(group, self.on_host[group])

    def gathered(self, unit: UpdateGroup) -> list[Vectors]:
        """The gradients of an update, one for each of its groups; empty for a group that no segment reads."""
        own, gather = self.on_host, self._transport.gather
        reads_shares = unit.program(self._program.arrivals).reads_shares
        return [gather(group, own[group], reads_shares) if group in own else () for group in unit.layers]

    def add_up(self, unit: UpdateGroup) -> None:
        """Adds what the host is to add to sums over micro-batches, so that it takes no memory any more."""
        for group in unit.layers:
            if group in self.on_host and self.on_host[group].addends:
                self.gather(group)

    def wait_for(self, unit: UpdateGroup) -> None:
        """Waits until the gradients of an update are in host memory; `gathered` adds what the host adds to them."""
        for group in unit.layers:
            if (gradient := self.on_host.get(group)) is not None:
                gradient.wait()

    def wait_for_all(self) -> None:
        """Waits until every gradient is in host memory."""
        jax.block_until_ready([self.gather(group) for group in self.on_host])

    def recycle(self, unit: UpdateGroup) -> None:
        """Returns the vectors of used gradients to the transport; the next step begins once all norms are known."""
        for group in unit.layers:
            if (used := self.on_host.pop(group, None)) is not None:
                if self._program.plan.gradient_buffers is not None:  # another group's gradient may overwrite it at once
                    self.norms.wait_for(group)
                self._transport.recycle(group, used)

    def _may_add(self, group: int, commit: Callable[[], bool]) -> bool:
        """Asks permission to add to a gradient of earlier micro-batches, if there is one."""
        if group not in self._earlier:
            return True
        self.has_added |= commit()
        return self.has_added
