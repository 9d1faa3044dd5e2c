"""Measures the CPU time of the thread that issues work for an accelerator, and of the host's thread, without one.

A chain of tiny layers on the CPU, forced onto the path of accelerators: one thread issues loads, programs and offloads
and waits for none of them, another runs the updates. The programs do almost no work, so the time is what Python, JAX's
dispatch and the engine take. The unit is one call of a cached `jax.jit` function of four arrays, before and after each
group of steps.

The layers are so small that a step takes longer to issue than to run, so an H200 would merge neighbours. Both are
measured: each layer a segment of its own, and merged as on an H200.

Other work on the machine, or on the cores that a virtual machine shares, raises these figures by half or doubles them
for many seconds. So cases take turns over several rounds, and the lower quartile and the least are stated beside the
median.

    python benchmarks/issue.py [--layers 17 33 65] [--transports ferry device_put] [--steps 15] [--rounds 3]

Goal: at most 0.15 ms for each layer and step on the issuing thread, and linear in the number of segments.

Expected: the goal, since nothing is looked up for a task that is known before. Found, on a machine with other work: the
goal for `ferry` but for the median of 65 segments; not for `device_put`. Other work raises these figures by half, so
the least is stated beside the median. In turn with the code before, on a busier machine, `ferry` took 0.18 to 0.22 ms
where that took 0.21 to 0.35, and the host's thread 0.15 to 0.20 where it took 0.17 to 0.29. The three launches take
half of what is left or more: on a CPU a launch runs the program as well.
"""

import argparse
import itertools
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxferry
import measure
from jaxferry.engine import Placement

WIDTH = 8
GOAL_S = 0.15e-3
GROUPS = 8
WARM_UP_STEPS = 5
THREADS = {"issuing": "jaxferry H2D", "host": "jaxferry host"}


def make_model(num_layers):
    """Parameters and loss of a chain of layers with one matrix and two vectors each."""
    keys = jax.random.split(jax.random.key(0), num_layers)
    layers = [
        {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH, "bias": jnp.zeros(WIDTH), "scale": jnp.ones(WIDTH)}
        for key in keys
    ]

    def loss_fn(params, batch):
        x = batch
        for index in range(num_layers):
            layer = params[f"layer_{index}"]
            x = x + layer["scale"] * jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(x**2)

    return {f"layer_{index}": layer for index, layer in enumerate(layers)}, loss_fn


def now_s():
    """CPU seconds so far of the engine's threads and of this one."""
    return {name: measure.thread_cpu_s(prefix) for name, prefix in THREADS.items()} | {"caller": time.thread_time()}


@jax.jit
def _two_sums(a, b, c, d):
    return a + b, c + d


def jit_call_s(repetitions=500):
    """CPU seconds of one call of a cached `jax.jit` function of four arrays."""
    arrays = [jnp.ones((WIDTH, WIDTH)) for _ in range(4)]
    jax.block_until_ready(_two_sums(*arrays))
    start_s = time.thread_time()
    for _ in range(repetitions):
        made = _two_sums(*arrays)
    end_s = time.thread_time()
    jax.block_until_ready(made)
    return (end_s - start_s) / repetitions


class Case:
    """A chain of layers in training.

    Args:
      num_layers: its length.
      transport: moves its layers.
      merges: whether small neighbours are merged.
    """

    def __init__(self, num_layers, transport, merges):
        self.about = {"transport": transport, "merges": merges, "num_layers": num_layers}
        params, loss_fn = make_model(num_layers)
        self._batch = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH)), jnp.float32)
        self._step = jaxferry.train_step(
            loss_fn, jaxferry.adamw(1e-3), policy="native-overlapped", transport=transport, merge_small=merges
        )
        self._state, self._loss = self._step.init(params), None
        # On a CPU, programs that wait for several gradients are compiled as their numbers first occur.
        self._train(20)
        self.num_segments = len(self._step.prepare(self._batch).partition.segments)
        self._groups = []

    def _train(self, steps):
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        self._state.block_until_ready()
        self._loss = float(metrics["loss"])

    def measure(self, steps):
        """Adds groups of steps, after some that bring the case back into the caches."""
        self._train(WARM_UP_STEPS)
        for _ in range(GROUPS):
            self._measure_group(steps)

    def _measure_group(self, steps):
        """Adds a group of steps: CPU seconds of each thread for one step, and of a jitted call before and after."""
        call_s, before = jit_call_s(), now_s()
        self._train(steps)
        after = now_s()
        step_s = {name: (after[name] - before[name]) / steps for name in after}
        self._groups.append({**step_s, "jit_call": (call_s + jit_call_s()) / 2})

    def point(self):
        """What was found, as JSON: medians, lower quartiles, the least, and ratios group by group."""
        found = {name: [group[name] for group in self._groups] for name in self._groups[0]}
        made = {**self.about, "num_segments": self.num_segments, "samples_s": found, "loss": self._loss}
        made["jit_call_s"] = statistics.median(found["jit_call"])
        for name in THREADS:
            calls = [seconds / call_s for seconds, call_s in zip(found[name], found["jit_call"], strict=True)]
            made[f"{name}_s_a_segment"] = statistics.median(found[name]) / self.num_segments
            made[f"quartile_{name}_s_a_segment"] = statistics.quantiles(found[name])[0] / self.num_segments
            made[f"least_{name}_s_a_segment"] = min(found[name]) / self.num_segments
            made[f"{name}_s_a_layer"] = statistics.median(found[name]) / self.about["num_layers"]
            made[f"{name}_calls_a_segment"] = statistics.median(calls) / self.num_segments
        made["caller_s_a_step"] = statistics.median(found["caller"])
        return made


def run(sizes, transports, steps, rounds):
    """The points of all cases, which take turns."""
    Placement.is_cpu = property(lambda placement: False)
    Placement.device_kind = "NVIDIA H200"
    cases = [Case(size, *kind) for *kind, size in itertools.product(transports, (False, True), sizes)]
    for _ in range(rounds):
        for case in cases:
            case.measure(steps)
    points = [case.point() for case in cases]
    return {
        "benchmark": "issue",
        "machine": measure.machine(),
        "expected": {"issuing_s_a_segment": GOAL_S},
        "jit_call_s": statistics.median(point["jit_call_s"] for point in points),
        "points": points,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[17, 33, 65])
    parser.add_argument("--transports", nargs="+", default=["ferry", "device_put"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result = run(arguments.layers, arguments.transports, arguments.steps, arguments.rounds)
    table = Table(
        "transport", "layers", "segments", "issuing, ms a layer", "a segment", "quartile", "least", "in jit calls",
        "host, ms a layer", "a segment", "quartile", "least", "in jit calls",
        title=f"one cached jit call: {1e6 * result['jit_call_s']:.1f} us",
    )  # fmt: skip
    for point in result["points"]:
        cells = [
            cell
            for name in THREADS
            for cell in (
                f"{1e3 * point[f'{name}_s_a_layer']:.3f}",
                f"{1e3 * point[f'{name}_s_a_segment']:.3f}",
                f"{1e3 * point[f'quartile_{name}_s_a_segment']:.3f}",
                f"{1e3 * point[f'least_{name}_s_a_segment']:.3f}",
                f"{point[f'{name}_calls_a_segment']:.1f}",
            )
        ]
        table.add_row(point["transport"], str(point["num_layers"]), str(point["num_segments"]), *cells)
    Console().print(table)
    measure.write("issue", result)


if __name__ == "__main__":
    main()
