"""Measured links of several devices: what they load, offload and exchange, all at the same time.

    vectors in host memory --up--> shares --gather--> all of them on each device
    a partial sum on each device --scatter--> shares --down--> host memory

Each time is taken for a small and a large move. Every process makes the same moves in the same order, and takes the
slowest one's times, so that all of them plan alike.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxferry.costs.sharing import ACROSS, ALL, EXCHANGES, NOTHING, WITHIN, Line, Links
from jaxferry.processes.all_processes import slowest
from jaxferry.processes.global_arrays import empty
from jaxferry.transport.placement import DATA, PROCESS, Placement

SMALL_BYTES, LARGE_BYTES = 2**16, 2**26
"""The bytes of the small and of the large move, of all devices together."""
LARGE_ON_CPU_BYTES = 2**22
"""The same for CPU devices, whose links are all host memory."""
_REPETITIONS = 5
_ROW_LENGTH = 4
"""Moves in a row whose time is compared with that of twice as many."""


@functools.lru_cache(maxsize=8)
def measure_links(placement: Placement) -> Links:
    """Measures how fast the devices of a mesh load, offload and exchange; each process must call this.

    Args:
      placement: where arrays live, on several devices.
    """
    large = LARGE_ON_CPU_BYTES if placement.platform == "cpu" else LARGE_BYTES
    num = placement.num_devices
    moves = {("up", ""): transfer(placement, "pinned_host"), ("down", ""): transfer(placement, "device")}
    for among in _among(placement):
        moves |= {("gather", among): gather(placement, among), ("scatter", among): scatter(placement, among)}
    sizes = [-(-size // (4 * num)) * 4 * num for size in (SMALL_BYTES, large)]
    length = 1 if placement.platform == "cpu" else _ROW_LENGTH
    seconds = slowest([_median_s(make(size // 4), length) for make in moves.values() for size in sizes])
    lines: dict[tuple[str, str], Line] = {}
    for number, (kind, among) in enumerate(moves):
        small, most = (size // num if kind in ("up", "down") else size for size in sizes)
        lines[kind, among] = Line.through((small, seconds[2 * number]), (most, seconds[2 * number + 1]))
    if placement.num_processes == 1:
        lines |= {(kind, WITHIN): lines[kind, ALL] for kind in ("gather", "scatter")}
    exchanges = [{among: lines.get((kind, among), NOTHING) for among in EXCHANGES} for kind in ("gather", "scatter")]
    return Links(lines["up", ""], lines["down", ""], *exchanges)


def _among(placement: Placement) -> list[str]:
    """The exchanges that differ on a mesh."""
    if placement.num_processes == 1:
        return [ALL]
    return [ALL, ACROSS] if placement.num_devices == placement.num_processes else [ALL, WITHIN, ACROSS]


def gather(placement: Placement, among: str) -> Callable[[int], Callable[[], Any]]:
    """Makes, for a number of elements, a call that gathers what devices share (`sharing.EXCHANGES`)."""
    split = {ALL: placement.device.mesh.axis_names, WITHIN: (DATA,), ACROSS: (DATA, PROCESS)}[among]
    gathered = _where(placement, DATA) if among == ACROSS else placement.device

    def make(size: int) -> Callable[[], Any]:
        shares = _filled(size, _where(placement, split))
        program = jax.jit(lambda array: array, out_shardings=gathered).lower(shares).compile()
        return lambda: program(shares)

    return make


def scatter(placement: Placement, among: str) -> Callable[[int], Callable[[], Any]]:
    """Makes, for a number of elements, a call that adds up an array of each device.

    Each device keeps a share, as programs leave gradients.
    """
    axes, shape = placement.device.mesh.axis_names, placement.device.mesh.shape
    num, terms, shares = {
        ALL: (placement.num_devices, (axes,), (axes,)),
        WITHIN: (shape[DATA], (DATA,), (DATA,)),
        ACROSS: (placement.num_processes, (PROCESS, DATA), ((DATA, PROCESS),)),
    }[among]

    def make(size: int) -> Callable[[], Any]:
        rows = _filled((num, size), _where(placement, *terms))
        program = jax.jit(lambda rows: rows.sum(0), out_shardings=_where(placement, *shares)).lower(rows).compile()
        return lambda: program(rows)

    return make


def _where(placement: Placement, *split: Any) -> NamedSharding:
    return NamedSharding(placement.device.mesh, PartitionSpec(*split), memory_kind="device")


def _filled(shape: Any, where: NamedSharding) -> jax.Array:
    """Numbers that are not zero, made on the devices."""
    made: jax.Array = jax.jit(lambda: jnp.full(shape, 0.1, jnp.float32), out_shardings=where)()
    return made


def transfer(placement: Placement, kind: str) -> Callable[[int], Callable[[], Any]]:
    """Makes, for a number of elements, a call that issues a move of shares from a kind of memory to the other."""
    there = {"pinned_host": "device", "device": "pinned_host"}[kind]

    def make(size: int) -> Callable[[], Any]:
        shares = empty(size, jnp.float32, placement.pinned.with_memory_kind(kind))
        where = placement.pinned.with_memory_kind(there)
        return lambda: placement.moved([shares], where)

    return make


def _median_s(call: Callable[[], Any], length: int) -> float:
    """The median seconds of a call, after some; as often in every process.

    Args:
      call: issues a move.
      length: how many are issued in a row. Twice as many take longer by the time of these, without the time that a call
        takes and the wait for its result. With 1, both count: devices of a CPU take turns.
    """
    times_s = []
    for _ in range(_REPETITIONS + 1):
        one_s, two_s = (_row_s(call, num * length) for num in (1, 2)) if length > 1 else (0.0, _row_s(call, 1))
        times_s.append(max(two_s - one_s, 0.0) / length)
    return statistics.median(times_s[1:])


def _row_s(call: Callable[[], Any], num_calls: int) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready([call() for _ in range(num_calls)])
    return time.perf_counter() - start_s
