"""Measures the CPU time of the thread that issues work for an accelerator, and of the host's thread, without one.

A chain of tiny layers on the CPU, forced onto the path of accelerators: one thread issues loads, programs and offloads
and waits for none of them, another runs the updates. The programs do almost no work, so the time is what Python, JAX's
dispatch and the engine take. The unit is one call of a cached `jax.jit` function of four arrays, before and after each
group of steps.

The layers are so small that a step takes longer to issue than to run, so an H200 would merge neighbours. Both are
measured: each layer a segment of its own, and merged as on an H200.

Python's threads run one at a time. Where the two are on different cores, what both touch moves between the cores'
caches at each turn, which takes the longer, the further these are apart; a virtual machine's cores may be anywhere. So
the same steps are measured on all cores and with the process kept on one, in turns. Other work on the machine raises
all figures for seconds: the least is stated beside the median.

    python benchmarks/issue.py [--layers 17 33 65] [--transports ferry device_put] [--steps 15] [--rounds 4]

Goal: at most 0.15 ms for each layer and step on the issuing thread, and linear in the number of segments.

Expected: the goal, since nothing is looked up for a task that is known before. Found: the goal for `ferry` on one core
(0.12 to 0.14 ms, linear), not on the two cores of a virtual machine (0.21 to 0.23 ms for the same work), and not for
`device_put`. The three launches take half of it or more: on a CPU a launch runs the program as well.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxferry
from jaxferry.transport import Placement

WIDTH = 8
GOAL_S = 0.15e-3
GROUPS = 4
WARM_UP_STEPS = 5
CORES = {"one": 1, "all": None}
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


@contextlib.contextmanager
def on_cores(num):
    """Keeps all threads of this process on so many cores; None for those that it has."""
    allowed = os.sched_getaffinity(0)
    _set_cores(sorted(allowed)[:num])
    try:
        yield
    finally:
        _set_cores(allowed)


def _set_cores(cores):
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


class Case:
    """A chain of layers in training.

    Args:
      num_layers: its length.
      transport: moves its layers.
      merges: whether small neighbours are merged.
    """

    def __init__(self, num_layers, transport, merges):
        others = set(threading.enumerate())
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
        self._groups = {cores: [] for cores in CORES}
        own = [thread for thread in threading.enumerate() if thread not in others]
        # Those of an earlier case may still be ending.
        self._threads = {name: [t for t in own if t.name.startswith(prefix)] for name, prefix in THREADS.items()}

    def _train(self, steps):
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        self._state.block_until_ready()
        self._loss = float(metrics["loss"])

    def measure(self, steps):
        """Adds groups of steps on one core and on all, each after some that bring the case into the caches."""
        for cores, num_cores in CORES.items():
            with on_cores(num_cores):
                self._train(WARM_UP_STEPS)
                self._groups[cores] += [self._group(steps) for _ in range(GROUPS)]

    def _group(self, steps):
        """CPU seconds of each thread for one of some steps, and of a jitted call before and after."""
        call_s, before = jit_call_s(), self._now_s()
        self._train(steps)
        after = self._now_s()
        step_s = {name: (after[name] - before[name]) / steps for name in after}
        return {**step_s, "jit_call": (call_s + jit_call_s()) / 2}

    def _now_s(self):
        """CPU seconds so far of the engine's threads and of this one."""
        return {name: measure.cpu_s(threads) for name, threads in self._threads.items()} | {
            "caller": time.thread_time()
        }

    def points(self):
        """What was found on one core and on all, as JSON."""
        return [self._point(cores, groups) for cores, groups in self._groups.items()]

    def _point(self, cores, groups):
        """Medians, the least, and ratios group by group."""
        found = {name: [group[name] for group in groups] for name in groups[0]}
        made = {**self.about, "cores": cores, "num_segments": self.num_segments, "samples_s": found, "loss": self._loss}
        made["jit_call_s"] = statistics.median(found["jit_call"])
        for name in THREADS:
            calls = [seconds / call_s for seconds, call_s in zip(found[name], found["jit_call"], strict=True)]
            made[f"{name}_s_a_segment"] = statistics.median(found[name]) / self.num_segments
            made[f"least_{name}_s_a_segment"] = min(found[name]) / self.num_segments
            made[f"{name}_s_a_layer"] = statistics.median(found[name]) / self.about["num_layers"]
            made[f"{name}_calls_a_segment"] = statistics.median(calls) / self.num_segments
        made["caller_s_a_step"] = statistics.median(found["caller"])
        return made


def run(sizes, transports, steps, rounds):
    """The points of all cases, one after the other: what other cases leave in the caches would slow them down."""
    Placement.is_cpu = property(lambda placement: False)
    Placement.device_kind = "NVIDIA H200"
    points = []
    for *kind, size in itertools.product(transports, (False, True), sizes):
        case = Case(size, *kind)
        for _ in range(rounds):
            case.measure(steps)
        points += case.points()
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
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    result = run(arguments.layers, arguments.transports, arguments.steps, arguments.rounds)
    table = Table(
        "transport", "layers", "segments", "cores", "issuing, ms a layer", "a segment", "least", "in jit calls",
        "host, ms a layer", "a segment", "least", "in jit calls",
        title=f"one cached jit call: {1e6 * result['jit_call_s']:.1f} us",
    )  # fmt: skip
    for point in result["points"]:
        cells = [
            cell
            for name in THREADS
            for cell in (
                f"{1e3 * point[f'{name}_s_a_layer']:.3f}",
                f"{1e3 * point[f'{name}_s_a_segment']:.3f}",
                f"{1e3 * point[f'least_{name}_s_a_segment']:.3f}",
                f"{point[f'{name}_calls_a_segment']:.1f}",
            )
        ]
        about = [str(point[name]) for name in ("transport", "num_layers", "num_segments", "cores")]
        table.add_row(*about, *cells)
    Console(width=140).print(table)
    measure.write("issue", result)


if __name__ == "__main__":
    main()
