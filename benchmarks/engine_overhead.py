"""Measures JaxFerry's overhead on the CPU, where offloading gains nothing, against one plain jitted Optax step.

GPT-2 124m, batch 4, sequence 128, AdamW, all layers GFGB. JaxFerry copies every parameter and gradient between two
memory kinds, which on a CPU are the same memory; plain JAX copies nothing. Expected: at most 1.05 of the plain step.
A second training step of the same loss function, with another plan, finds the first one's trace and programs; the rest
is its updates and its plan: at most 0.1 of it.

    python benchmarks/engine_overhead.py [--size 124m] [--repetitions 9]
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
import model


class Plain:
    """One jitted step with donated parameters and state."""

    def __init__(self, loss_fn, optimizer, params, batch):
        def step(params, state, batch):
            loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.batch = batch
        self.params = jax.tree.map(jnp.array, params)
        self.state = optimizer.init(self.params)
        start_s = time.perf_counter()
        self.step = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, batch).compile()
        self.compile_s = time.perf_counter() - start_s

    def __call__(self):
        self.params, self.state, self.loss = self.step(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state, self.loss))


class Ferry:
    """The same step in JaxFerry."""

    def __init__(self, loss_fn, optimizer, params, batch, policy=None):
        self.batch = batch
        self.step = jaxferry.train_step(loss_fn, optimizer, policy=policy)
        self.state = self.step.init(params)
        start_s = time.perf_counter()
        self.prepared = self.step.prepare(batch)
        self.step.compile_updates(self.state, batch)
        self.compile_s = time.perf_counter() - start_s

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        self.loss = metrics["loss"]
        self.state.block_until_ready()


def run(size, batch_size, sequence, repetitions):
    config = model.SIZES[size]
    loss_fn, optimizer = model.make_loss(config), optax.adamw(1e-4)
    params = jax.jit(model.make_init(config))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch_size, sequence + 1), 0, config.vocab_size)
    sides = {side.__name__: side(loss_fn, optimizer, params, {"tokens": tokens}) for side in (Plain, Ferry)}
    plain, ferry = sides["Plain"], sides["Ferry"]
    seconds = measure.interleaved(sides, repetitions)
    partition = ferry.prepared.partition
    other = Ferry(loss_fn, optimizer, params, ferry.batch, policy="l2l")
    return {
        "benchmark": "engine_overhead",
        "machine": measure.machine(),
        "model": {"name": f"GPT-2 {size}", "batch": batch_size, "sequence": sequence, "dtype": "float32"},
        "repetitions": repetitions,
        "expected": {"step_ratio": 1.05, "num_programs": 8, "compile_ratio": 1.0, "other_plan_ratio": 0.1},
        "step_ratio": measure.median_ratio(seconds["Ferry"], seconds["Plain"]),
        "plain_step_s": statistics.median(seconds["Plain"]),
        "jaxferry_step_s": statistics.median(seconds["Ferry"]),
        "step_s": seconds,
        "num_segments": len(partition.segments),
        "num_programs": partition.num_programs,
        "num_executables": ferry.prepared.num_executables,
        "plain_compile_s": plain.compile_s,
        "jaxferry_compile_s": ferry.compile_s,
        "compile_ratio": ferry.compile_s / plain.compile_s,
        "other_plan_compile_s": other.compile_s,
        "other_plan_ratio": other.compile_s / ferry.compile_s,
        "loss": {"plain": float(plain.loss), "jaxferry": float(ferry.loss)},
        "loss_relative_difference": abs(float(plain.loss) - float(ferry.loss)) / float(plain.loss),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", default="124m", choices=model.SIZES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    result = run(arguments.size, arguments.batch, arguments.seq, arguments.repetitions)
    table = Table(
        "", "plain jit", "JaxFerry", "ratio", title=f"{result['model']['name']} on {result['machine']['cpu']}"
    )
    for what in ("step", "compile"):
        plain_s, ferry_s = result[f"plain_{what}_s"], result[f"jaxferry_{what}_s"]
        table.add_row(f"{what} [s]", f"{plain_s:.3f}", f"{ferry_s:.3f}", f"{result[f'{what}_ratio']:.3f}")
    Console().print(table)
    print("{num_segments} segments, {num_programs} programs, {num_executables} executables".format(**result))
    print("compiling for another plan, over the first: {other_plan_ratio:.3f}".format(**result))
    print("relative difference of the losses: {loss_relative_difference:.1e}".format(**result))
    measure.write("engine_overhead", result)


if __name__ == "__main__":
    main()
