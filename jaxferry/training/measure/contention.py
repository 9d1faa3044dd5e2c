"""Measured contention: how fast loads, offloads and updates on the host are beside each other.

    update, update, update, ...      |
    load, load, load, ...            |  each alone, then in pairs, each in a thread of its own
    offload, offload, offload, ...   |

Updates take turns on more memory than the host's caches hold, as in a step. The calls that a lane completes beside
another one, over those that it completes alone in the same time, are its speed there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxferry.costs.cache import MeasurementCache
from jaxferry.costs.contention import DOWN, HOST, NO_CONTENTION, UP, Contention
from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.partition import Layer
from jaxferry.settings import with_own_settings
from jaxferry.step.instruction import Arrival
from jaxferry.training.measure.cold_caches import host_cache_bytes
from jaxferry.training.measure.links import transfer
from jaxferry.training.measure.microbenchmarks import HostUpdate
from jaxferry.transport.placement import Placement

TRANSFER_BYTES = 2**26
"""The bytes of a transfer, and about those of an update."""
LEAST_BYTES = 2**22
"""The least masters of an update; a smaller one takes longer to issue than to work on memory."""
MOST_BYTES = 2**30
"""The most masters that are updated in turn."""
IN_QUEUE = 3
"""Transfers that are under way while another one is issued."""
LEAST_S = 0.05
LEAST_CALLS = 6
"""Lanes work beside each other for so long, and for so many calls of the slower one alone."""


def measure_contention(
    optimizer: HostOptimizer,
    placement: Placement,
    layers: Sequence[Layer],
    cache: MeasurementCache,
    devices: Placement | None = None,
) -> Contention:
    """Measures what the links of all devices and the optimizer's updates take of each other's time.

    There is none where every layer has less than `LEAST_BYTES`.

    Args:
      optimizer: its update of a layer of about `TRANSFER_BYTES` is taken for all.
      placement: where its arrays live.
      layers: of the model.
      cache: earlier measurements.
      devices: several that share a batch, and all transfer at the same time; None for that of `placement`.
    """
    update = _some_update(optimizer, placement, layers)
    if update is None:
        return NO_CONTENTION
    devices = devices or placement
    about = f"{devices.num_devices} devices of {devices.num_processes} processes"
    names = {
        (lane, other): f"speed of {lane} beside {other}, {about}\n{update.text}"
        for lane, other in itertools.permutations((HOST, UP, DOWN), 2)
    }
    speeds = {pair: known for pair, name in names.items() if (known := cache.get(name)) is not None}
    if len(speeds) < len(names):
        links = transfers(devices)
        try:
            speeds = speeds_in_pairs({HOST: in_turn(update), **links})
        finally:
            for link in links.values():
                link.wait()
        for pair, speed in speeds.items():
            cache.put(names[pair], speed)
    return Contention.between(speeds)


def speeds_in_pairs(work: Mapping[str, Callable[[], Any]], least_s: float = LEAST_S) -> dict[tuple[str, str], float]:
    """The speed of each lane beside each other one, relative to its speed alone.

    Args:
      work: for each lane, a call that works and returns once that is done.
      least_s: the least seconds that lanes work beside each other.
    """
    alone = {lane: _calls_per_s([call], least_s)[0] for lane, call in work.items()}
    found = {}
    for pair in itertools.combinations(work, 2):
        window_s = max(least_s, LEAST_CALLS / min(alone[lane] for lane in pair))
        beside = _calls_per_s([work[lane] for lane in pair], window_s)
        for lane, other, speed in zip(pair, pair[::-1], beside, strict=True):
            found[lane, other] = speed / alone[lane]
    return found


def _calls_per_s(calls: Sequence[Callable[[], Any]], window_s: float) -> list[float]:
    """How often each call is done in a second, all of them at the same time; each is called once before."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> float:
        call()
        begin.wait()
        begin_s, ends_s = time.perf_counter(), list[float]()
        while not ends_s or ends_s[-1] < window_s:
            call()
            ends_s.append(time.perf_counter() - begin_s)
        # The last call may have ended alone.
        within = max(1, sum(end <= window_s for end in ends_s))
        return within / ends_s[within - 1]

    if len(calls) == 1:
        return [run(calls[0])]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(with_own_settings(run), calls))


def transfers(placement: Placement, num_bytes: int = TRANSFER_BYTES) -> dict[str, InQueue]:
    """Loads and offloads of so many bytes by all devices, by lane."""
    return {
        lane: InQueue(transfer(placement, kind)(num_bytes // 4))
        for lane, kind in ((UP, "pinned_host"), (DOWN, "device"))
    }


class InQueue:
    """A call that issues a transfer and waits for an earlier one: a link is never idle, however busy the host is.

    Args:
      issue: issues one.
    """

    def __init__(self, issue: Callable[[], Any]) -> None:
        self._issue, self._queue = issue, collections.deque[Any]()

    def __call__(self) -> Any:
        """Issues one more, at first several, and returns the earliest once it has been moved."""
        while len(self._queue) <= IN_QUEUE:
            self._queue.append(self._issue())
        return jax.block_until_ready(self._queue.popleft())

    def wait(self) -> None:
        """Waits for all; before that, their memory must not be freed."""
        jax.block_until_ready(list(self._queue))
        self._queue.clear()


def in_turn(update: HostUpdate) -> Callable[[], Any]:
    """An update of other arrays at each call, so that none finds its own in the caches."""
    num = max(1, min(-(-2 * host_cache_bytes() // update.num_bytes), MOST_BYTES // update.num_bytes))
    held = itertools.cycle([update.arguments() for _ in range(num)])
    return lambda: update(next(held))


def _some_update(optimizer: HostOptimizer, placement: Placement, layers: Sequence[Layer]) -> HostUpdate | None:
    arrivals = [Arrival.OWN] * len(layers)
    updates = [HostUpdate(optimizer, placement, unit, layers, arrivals) for unit in optimizer.units_of(layers)]
    large = [update for update in updates if update.num_bytes >= LEAST_BYTES]
    return min(large, key=lambda update: abs(math.log(update.num_bytes / TRANSFER_BYTES)), default=None)
