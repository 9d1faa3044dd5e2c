"""Measured links and their contention: how fast loads, offloads and updates are beside each other.

Links of several devices: what they load, offload and exchange, all at the same time.

    vectors in host memory --up--> shares --gather--> all of them on each device
    a partial sum on each device --scatter--> shares --down--> host memory

Each time is taken for a small and a large move. Every process makes the same moves in the same order, and takes the
slowest one's times, so that all of them plan alike.

Contention of one device:

    update, update, update, ...      |
    load, load, load, ...            |  each alone, then in pairs, each in a thread of its own
    offload, offload, offload, ...   |

Updates take turns on more memory than the host's caches hold, as in a step. The calls that a lane completes beside
another one, over those that it completes alone in the same time, are its speed there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxferry.costs import (
    ACROSS,
    ALL,
    DOWN,
    EXCHANGES,
    HOST,
    NO_CONTENTION,
    NOTHING,
    UP,
    WITHIN,
    Contention,
    Line,
    Links,
)
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import Layer
from jaxferry.processes import empty, largest
from jaxferry.settings import with_own_settings
from jaxferry.step import Arrival
from jaxferry.training.microbenchmarks import HostUpdate
from jaxferry.training.profile_cache import MeasurementCache
from jaxferry.training.timers import Effort, host_cache_bytes, median_s, timed_call
from jaxferry.transport import DATA, PROCESS, Placement

SMALL_BYTES, LARGE_BYTES = 2**16, 2**26
"""The bytes of the small and of the large move, of all devices together."""
LARGE_ON_CPU_BYTES = 2**22
"""The same for CPU devices, whose links are all host memory."""
_REPETITIONS = 5
_ROW_LENGTH = 4
"""Moves in a row whose time is compared with that of twice as many."""


@functools.lru_cache(maxsize=8)
def measure_links(placement: Placement) -> Links:
    """Measures how fast the devices of a mesh load, offload and exchange; each process must call this."""
    large = LARGE_ON_CPU_BYTES if placement.platform == "cpu" else LARGE_BYTES
    num = placement.num_devices
    moves: dict[tuple[str, str], tuple[Any, str]]
    moves = {(way, ""): (transfer, kind) for way, kind in (("up", "pinned_host"), ("down", "device"))}
    # Exchanges that do not differ on this mesh are measured once.
    within = [] if num == placement.num_processes else [WITHIN]
    for among in [ALL] if placement.num_processes == 1 else [ALL, *within, ACROSS]:
        moves |= {("gather", among): (gather, among), ("scatter", among): (scatter, among)}
    sizes = [-(-size // (4 * num)) * 4 * num for size in (SMALL_BYTES, large)]
    length = 1 if placement.platform == "cpu" else _ROW_LENGTH
    made = (make(placement, which, size // 4) for make, which in moves.values() for size in sizes)
    seconds = largest([_move_s(call, length) for call in made])
    lines: dict[tuple[str, str], Line] = {}
    for number, (kind, among) in enumerate(moves):
        small, most = (size // num if kind in ("up", "down") else size for size in sizes)
        lines[kind, among] = Line.through((small, seconds[2 * number]), (most, seconds[2 * number + 1]))
    if placement.num_processes == 1:
        lines |= {(kind, WITHIN): lines[kind, ALL] for kind in ("gather", "scatter")}
    exchanges = [{among: lines.get((kind, among), NOTHING) for among in EXCHANGES} for kind in ("gather", "scatter")]
    return Links(lines["up", ""], lines["down", ""], *exchanges)


def gather(placement: Placement, among: str, size: int) -> Callable[[], Any]:
    """Makes a call that gathers `size` elements that devices share (`costs.EXCHANGES`)."""
    split = {ALL: placement.device.mesh.axis_names, WITHIN: (DATA,), ACROSS: (DATA, PROCESS)}[among]
    gathered = _where(placement, DATA) if among == ACROSS else placement.device
    return _exchange(lambda array: array, size, _where(placement, split), gathered)


def scatter(placement: Placement, among: str, size: int) -> Callable[[], Any]:
    """Makes a call that adds up an array of `size` elements of each device.

    Each device keeps a share, as programs leave gradients.
    """
    axes, shape = placement.device.mesh.axis_names, placement.device.mesh.shape
    num, terms, shares = {
        ALL: (placement.num_devices, (axes,), (axes,)),
        WITHIN: (shape[DATA], (DATA,), (DATA,)),
        ACROSS: (placement.num_processes, (PROCESS, DATA), ((DATA, PROCESS),)),
    }[among]
    return _exchange(lambda rows: rows.sum(0), (num, size), _where(placement, *terms), _where(placement, *shares))


def _exchange(function: Callable[[Any], Any], shape: Any, where: NamedSharding, leaves: Any) -> Callable[[], Any]:
    """Makes a call of a program of numbers that are not zero, made on the devices."""
    given: jax.Array = jax.jit(lambda: jnp.full(shape, 0.1, jnp.float32), out_shardings=where)()
    program = jax.jit(function, out_shardings=leaves).lower(given).compile()
    return lambda: program(given)


def _where(placement: Placement, *split: Any) -> NamedSharding:
    return NamedSharding(placement.device.mesh, PartitionSpec(*split), memory_kind="device")


def transfer(placement: Placement, kind: str, size: int) -> Callable[[], Any]:
    """Makes a call that issues a move of shares of `size` elements from a kind of memory to the other."""
    shares = empty(size, jnp.float32, placement.pinned.with_memory_kind(kind))
    where = placement.pinned.with_memory_kind({"pinned_host": "device", "device": "pinned_host"}[kind])
    return lambda: placement.moved([shares], where)


def _move_s(call: Callable[[], Any], length: int) -> float:
    """The median seconds of a move that a call issues, as often in every process.

    Twice `length` moves in a row take longer than these by the moves' own time, without the time that a call takes and
    the wait for its result. With 1, both count: devices of a CPU take turns.
    """
    one, two = (timed_call(lambda num=num: [call() for _ in range(num)], tuple) for num in (length, 2 * length))
    effort = Effort(_REPETITIONS, _REPETITIONS)
    return median_s(one, effort) if length == 1 else median_s(lambda: max(two() - one(), 0.0) / length, effort)


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

    The update of a layer of about `TRANSFER_BYTES` is taken for all; there is no contention where every layer has less
    than `LEAST_BYTES`. `devices` share a batch and all transfer at the same time; None for that of `placement`.
    """
    arrivals = [Arrival.OWN] * len(layers)
    updates = [HostUpdate(optimizer, placement, unit, layers, arrivals) for unit in optimizer.units_of(layers)]
    updates = [update for update in updates if update.num_bytes >= LEAST_BYTES]
    if not updates:
        return NO_CONTENTION
    update = min(updates, key=lambda update: abs(math.log(update.num_bytes / TRANSFER_BYTES)))
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
    """The speed of each lane beside each other one for `least_s` or more, relative to its speed alone.

    `work` has a call for each lane, which works and returns once that is done.
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


def transfers(placement: Placement) -> dict[str, InQueue]:
    """Loads and offloads of `TRANSFER_BYTES` by all devices, by lane."""
    return {
        lane: InQueue(transfer(placement, kind, TRANSFER_BYTES // 4))
        for lane, kind in ((UP, "pinned_host"), (DOWN, "device"))
    }


class InQueue:
    """A call that issues a transfer and waits for an earlier one: a link is never idle, however busy the host is."""

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
