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
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxferry.engine.device_updates import DeviceUpdates
from jaxferry.engine.norms import GradientNorms, Norms
from jaxferry.engine.pending import Accumulated, LateFailure
from jaxferry.optimizer import UpdateGroup
from jaxferry.partition import wide_dtype
from jaxferry.step import Instruction, ProgramKey, ProgramUse, StepProgram, Target, variant_of
from jaxferry.transport import CopyInFlight, Ferry, HostGradient, Transport, Vectors, added

_add_onto = jax.jit(lambda known, more: list(map(added, known, more)), donate_argnums=0)
_widened = jax.jit(lambda gradients: [gradient.astype(wide_dtype(gradient.dtype)) for gradient in gradients])


class OffloadsInFlight:
    """The offloads whose gradients the device still holds, in the order of issue."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._copies: collections.deque[tuple[int, CopyInFlight]] = collections.deque()

    def add(self, index: int, copy: CopyInFlight) -> None:
        """Adds the offload with this index."""
        self._copies.append((index, copy))

    def hold_for(self, offload: int) -> None:
        """Makes the device wait for an offload and those before it, and frees their gradients; raises `LateFailure`."""
        place = next((place for place, (index, _) in enumerate(self._copies) if index == offload), -1)
        self._hold_first(place + 1)

    def hold_all(self) -> None:
        """Likewise for all offloads: the next step's programs may need their memory."""
        self._hold_first(len(self._copies))

    def _hold_first(self, num: int) -> None:
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
      in_flight: offloads that the device has not waited for.
      norms: their norms.
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
            if use.is_trained:
                self._receive(call, use, key.writes[use.place], own, norm, commit)

    def _receive(
        self,
        call: Instruction,
        use: ProgramUse,
        target: Target,
        gradients: Any,
        norm: jax.Array | None,
        commit: Callable[[], bool],
    ) -> None:
        group = use.group
        self.norms.note(group, norm)
        if call.stores:
            assert isinstance(self._transport, Ferry), "no other transport joins stores to programs"
            stored = self.on_host[group] = self._transport.queued(*gradients)
            self._note_offload(self._program.queued[call.segment], group, stored)
            return
        if use.is_updated_on_device:
            self.kept.setdefault(group, []).append(gradients)
            self._note_kept(group, commit)
            return
        if use.writes_host:
            stored, known = self._transport.written(gradients), self.on_host.get(group)
            if target is not Target.HOST_SUM and (known is not None or group in self._program.widened):
                stored = self._transport.add_on_host(group, known, stored)
            self.on_host[group] = stored
            return
        if group in self.sums and self._may_add(group, commit):
            gradients = _add_onto(self.sums.pop(group), gradients)
            self._are_sums.add(group)
        self._pending[use.number] = gradients

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
            self.sums[group] = self._sum_of(group, self._pending.pop(call.task.segment))
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

    def _sum_of(self, group: int, gradients: Any) -> list[jax.Array]:
        """The sum on the device that ends with these gradients, or begins with them."""
        if group in self._are_sums or group not in self._program.widened:
            return list(gradients)
        begun: list[jax.Array] = _widened(gradients)
        return begun

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
        return [self.gather(group) if group in self.on_host else () for group in unit.layers]

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
                self._transport.recycle(group, used)

    def _may_add(self, group: int, commit: Callable[[], bool]) -> bool:
        """Asks permission to add to a gradient of earlier micro-batches, if there is one."""
        if group not in self._earlier:
            return True
        self.has_added |= commit()
        return self.has_added
