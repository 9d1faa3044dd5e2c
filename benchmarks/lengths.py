"""Measures what many lengths of batches cost: each is traced and compiled once, similar ones are measured once.

A small Llama trains for two epochs on batches of 32 lengths, each epoch in a random order of its own. All rows take
the same steps in turns, each in a process of its own, so other work on the machine affects them alike:

    plain           one jitted Optax step
    default         jaxferry.train_step, which keeps the programs of 64 lengths
    16 kept         with cached_shapes=16: programs are freed and compiled again
    auto            with policy="auto", which measures what layers cost; no measurement is known before
    padded          as default, with batches padded to multiples of 32
    plain again     in a new process, with the programs that `plain` left in JAX_COMPILATION_CACHE_DIR
    default again   likewise, with those of `default`

    python benchmarks/lengths.py [--lengths 32] [--only ROW ...]

Expected: `default` takes at most what `plain` takes, since equal layers share programs. `auto` measures besides, once
for each doubling of the length. `16 kept` compiles again in each epoch. Found: `default` 0.81 and `auto` 1.10 times the
seconds of `plain`, and half of its memory (0.69 and 1.00 in another run on the busy machine); `default again` takes
half of `plain again`.
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import resource
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import measure
import numpy as np
import optax

import jaxferry
from examples.llama import model

EPOCHS, BATCH, MULTIPLE = 2, 2, 32
FIRST = {
    "plain": {},
    "default": {},
    "16 kept": {"cached_shapes": 16},
    "auto": {"policy": "auto"},
    "padded": {},
}
AGAIN = {"plain again": {}, "default again": {}}


def lengths_of(num):
    """The lengths of all batches."""
    known = [16 + 4 * n for n in range(num)]
    return [length for epoch in range(EPOCHS) for length in random.Random(epoch).sample(known, num)]


def work(connection, name, options, cache):
    """Takes a step for each length that is sent, and returns its wall and CPU seconds."""
    os.environ["JAXFERRY_CACHE_DIR"] = "off"
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    step = make_step(name.startswith("plain"), options)
    while (length := connection.recv()) is not None:
        if name == "padded":
            length = -(-length // MULTIPLE) * MULTIPLE
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        step(length)
        connection.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def make_step(is_plain, options):
    """Returns a function that trains on a batch of a length."""
    config = dataclasses.replace(model.SIZES["tiny"], num_layers=8)
    loss_fn, params = model.make_loss(config), model.make_init(config)(jax.random.key(0))
    optimizer, rng = optax.adamw(1e-3), np.random.default_rng(0)
    if is_plain:

        @jax.jit
        def update(state, batch):
            loss, gradients = jax.value_and_grad(loss_fn)(state[0], batch)
            updates, moments = optimizer.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), moments), {"loss": loss}

        state = params, optimizer.init(params)
    else:
        update = jaxferry.train_step(loss_fn, optimizer, **options)
        state = update.init(params)

    def step(length):
        nonlocal state
        tokens = rng.integers(0, config.vocab_size, (BATCH, length + 1), np.int32)
        state, metrics = update(state, {"tokens": tokens})
        float(metrics["loss"])

    return step


def take_turns(rows, lengths, folder):
    """Runs the rows in turns. Returns for each the seconds of its steps and its peak of host memory, bytes."""
    context, workers = multiprocessing.get_context("spawn"), {}
    for name, options in rows.items():
        here, there = context.Pipe()
        # Runs that come again have the cache that the first ones wrote.
        cache = f"{folder}/{name.split()[0]}" if name in ("plain", "default", *AGAIN) else None
        context.Process(target=work, args=(there, name, options, cache), daemon=True).start()
        workers[name] = here
    seconds = {name: [] for name in rows}
    for number, length in enumerate(lengths):
        for name, worker in workers.items():
            worker.send(length)
            seconds[name].append(worker.recv())
        print(number, length, {name: round(own[-1][0], 2) for name, own in seconds.items()}, flush=True)
    for worker in workers.values():
        worker.send(None)
    return {
        name: {
            "wall_s": sum(wall_s for wall_s, _ in seconds[name]),
            "cpu_s": sum(cpu_s for _, cpu_s in seconds[name]),
            "steps_s": [wall_s for wall_s, _ in seconds[name]],
            "peak_host_bytes": worker.recv(),
        }
        for name, worker in workers.items()
    }


def main():
    """Runs the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=[*FIRST, *AGAIN], default=[*FIRST, *AGAIN])
    arguments = parser.parse_args()
    lengths, found = lengths_of(arguments.lengths), {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in (FIRST, AGAIN):
            found |= take_turns({name: rows[name] for name in rows if name in arguments.only}, lengths, folder)
    for row in found.values():
        plain = found.get("plain", row)
        row["over_plain"], row["cpu_over_plain"] = row["wall_s"] / plain["wall_s"], row["cpu_s"] / plain["cpu_s"]
    about = {"benchmark": "lengths", "machine": measure.machine(), "lengths": lengths, "batch": BATCH}
    for name, row in found.items():
        figures = [row["wall_s"], row["over_plain"], row["cpu_over_plain"], row["peak_host_bytes"] / 2**30]
        print(f"{name:15} {{:7.1f}} s  {{:5.2f}}  {{:5.2f}}  {{:5.2f}} GiB".format(*figures))
    if len(found) == len(FIRST) + len(AGAIN) and arguments.lengths == parser.get_default("lengths"):
        measure.write("lengths", about | {"rows": found})


if __name__ == "__main__":
    main()
