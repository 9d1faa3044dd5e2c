"""Measures whether the ferry's and JAX's transfers hide behind products. Usage: overlap.py LIBRARY OUTPUT.json"""

import json
import pathlib
import sys

import jax

from benchmarks.gpu.link_rates import Bench
from benchmarks.gpu.rates import Overlap, median_seconds
from benchmarks.measure import machine
from native import gpu_library

SIDE = 8192


def _chain(num_steps):
    return jax.jit(lambda x: jax.lax.fori_loop(0, num_steps, lambda _, y: y @ x * (1.0 / SIDE), x))


def _measure(name, bench, start, finish, is_first):
    """Times a transfer, slightly longer products, and both together, with the transfer issued first if `is_first`.

    `start()` issues the transfer; `finish(started)` returns arrays that are ready when it has ended.
    """
    x = bench.make((SIDE, SIDE), "device")
    nothing, one_step = jax.jit(lambda x: x[0] * 2), _chain(1)

    def run(product):
        started = start() if is_first else None
        result = product(x)
        started = started if is_first else start()
        jax.block_until_ready((finish(started), result))

    probe = median_seconds({"load": lambda: run(nothing), "compute": lambda: one_step(x).block_until_ready()})
    product = _chain(max(1, round(1.5 * probe["load"] / probe["compute"])))
    seconds = median_seconds(
        {"load": lambda: run(nothing), "compute": lambda: product(x).block_until_ready(), "both": lambda: run(product)}
    )
    return Overlap(name, seconds["load"], seconds["compute"], seconds["both"])


def of_ferry(bench):
    """Queues a load, issues products, then waits for the load."""
    like = tuple(bench.loaded)
    load = bench.operations.compile("ferry_load", like, aliases={1: 0}, vectors=[0], offsets=[0], vacant=0)
    wait = bench.operations.compile("ferry_wait", like, aliases={0: 0})
    held = [bench.make(like[0].shape, "device")]

    def start():
        return load(bench.weight, held.pop())

    def finish(arrays):
        held.extend(wait(*arrays))
        return held

    return _measure("ferry_load", bench, start, finish, True)


def of_device_put(bench, is_first):
    """Issues JAX's eager copy before or after the products."""
    to_device = bench.operations.memories["device"]
    name = f"eager device_put {'before' if is_first else 'after'} the products"
    return _measure(name, bench, lambda: jax.device_put(bench.weight, to_device), lambda array: array, is_first)


def main():
    library, output = map(pathlib.Path, sys.argv[1:3])
    bench = Bench(gpu_library.register(library))
    overlaps = [of_ferry(bench), of_device_put(bench, True), of_device_put(bench, False)]
    for found in overlaps:
        print(f"{found.name:40} {found.hidden:5.2f} of the shorter one is hidden")
    result = {"machine": machine(), "overlaps": [found.to_json() for found in overlaps]}
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
