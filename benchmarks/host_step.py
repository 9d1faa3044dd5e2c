"""Compares the fused AdamW step on host memory with a memory-bandwidth baseline and with other implementations.

    python benchmarks/host_step.py [--sizes 1e4 1e6 1e8] [--threads 1 2] [--repetitions 7] [--memory-share 0.5]
                                   [--name host_step]

One step takes a bf16 gradient, a loss scale and a clip factor, updates fp32 master and both moments, and writes a bf16
compute copy. These run in turn, in one process, on the same number of CPUs and threads:

- fused: `jaxferry.adamw`'s native operation, as the engine calls it;
- split: the same with a master that is split (its copy is the upper half): 26.25 bytes of traffic a parameter, not 28;
- bfloat16: the same with moments in bf16 too: 18.25 bytes;
- int8: the same with moments in codes of 8 bits: 14.3 bytes;
- (a) memory: a memory-bandwidth baseline, a loop that reads and writes the same bytes (read_write.cc) of the same
  arrays;
- (b) optax: `optax.adamw`, casts and scale in one jitted program with donated arguments;
- (c) deepspeed: ZeRO-Offload's three passes on the host: scale, `DeepSpeedCPUAdam.step`, cast; needs deepspeed and CPU
  torch (optional).

Expected for at least 1e7 parameters: at least 0.9 of the speed of (a), at least 1.5 times that of (b) and (c). Where
memory binds, split takes 0.94, bfloat16 0.65 and int8 0.51 of the time, their bytes' share. Smaller
sizes deviate for three reasons. A call from Python takes microseconds, as long as the arithmetic of 1e4 parameters,
while (a) is called once for all passes. With one thread per CPU, the calling thread needs a share of a
CPU too. And while all arrays fit into a cache, a root and a quotient per parameter take longer than its bytes. (b) has
the same calls, and (c) moves two thirds more bytes at any size. Where one thread saturates memory
(host_step_epyc.json), two threads hide the arithmetic of (b) and (c) behind their bytes, and the fused step is 1.46 to
1.5 times as fast.

One-CPU runs bind all threads of the process to one CPU. Other load on the machine matters most with all threads,
because a step ends with its last thread.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # otherwise DeepSpeed's waiting threads spin and slow the others

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
from jaxferry.native import FACTORS, MOMENT_BLOCK, HostStep, StepFactors, StepPart, library, rest_size

try:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    torch = None

SETTINGS = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SIZES = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
BYTES = {
    "fused": 16,
    "split": 14.2,
    "bfloat16": 10.2,
    "int8": 8.2,
    "memory": 0,
    "optax": 16,
    "deepspeed": 18,
}  # per parameter; (a) uses the fused step's arrays
EXPECTED = {"memory": 0.9, "optax": 1.5, "deepspeed": 1.5}
PASS_PARAMETERS = 2e7  # each measurement runs steps until it has updated this many


class Fused:
    """The native operation, called as in the engine; split masters and moments in fewer bits if wanted."""

    def __init__(self, size, moments=np.float32, is_split=False):
        rule, dtypes = jaxferry.adamw(**SETTINGS).rule.step, [np.dtype(jnp.bfloat16)]
        self.gradient, self.copy = np.full(size, 1e-3, *dtypes), np.ones(size, *dtypes)
        self.updated = [np.full(size, 1, np.float32), *(np.zeros(size, moments) for _ in range(2))]
        if moments == np.uint8:
            self.updated += [np.zeros(-(-size // MOMENT_BLOCK), np.float32) for _ in range(2)]
        if is_split:
            rest = np.empty(rest_size(size), np.uint16)
            assert library("cpu").split(self.updated[0], self.copy.view(np.uint16), rest)
            self.updated[0] = rest
        factors = StepFactors(0)
        numbers = {"unscale": 1, "clip": 1, "rate": -SETTINGS["learning_rate"], "decay": SETTINGS["weight_decay"]}
        factors.values[:] = [numbers.get(name, 10) for name in FACTORS]
        master, *moments = ([array] for array in self.updated)
        self.step = HostStep(rule, [StepPart(0, 0, True)], master, moments, dtypes, dtypes, [], factors)
        self.step.gradients[0], self.step.copies[0] = self.gradient.ctypes.data, self.copy.ctypes.data

    def __call__(self, num_steps):
        for _ in range(num_steps):
            self.step.run()

    def pointers(self):
        """Returns the pointers of master, moments, gradient and copy."""
        return [array.ctypes.data for array in (*self.updated, self.gradient, self.copy)]


class Memory:
    """The memory-bandwidth baseline on the fused step's arrays."""

    def __init__(self, function, fused, size, num_threads):
        self.function, self.fused, self.size, self.num_threads = function, fused, size, num_threads

    def __call__(self, num_steps):
        pointers = (ctypes.c_void_p * 5)(*self.fused.pointers())
        self.function(pointers, ctypes.c_int64(self.size), ctypes.c_int64(self.num_threads), ctypes.c_int64(num_steps))


class Optax:
    """The same step in XLA."""

    def __init__(self, size):
        optimizer = optax.adamw(**SETTINGS)

        def step(gradient, factor, params, state, copy):
            updates, state = optimizer.update(gradient.astype(jnp.float32) * factor, state, params)
            params = optax.apply_updates(params, updates)
            return params, state, params.astype(copy.dtype)

        self.gradient, self.factor = jnp.full(size, 1e-3, jnp.bfloat16), jnp.float32(1)
        params = jnp.ones(size)
        self.arrays = params, optimizer.init(params), jnp.ones(size, jnp.bfloat16)
        program = jax.jit(step, donate_argnums=(2, 3, 4), keep_unused=True)
        self.step = program.lower(self.gradient, self.factor, *self.arrays).compile()

    def __call__(self, num_steps):
        for _ in range(num_steps):
            self.arrays = self.step(self.gradient, self.factor, *self.arrays)
        jax.block_until_ready(self.arrays)


class DeepSpeed:
    """ZeRO-Offload's sequence of scale, Adam and cast."""

    def __init__(self, size):
        self.parameter = torch.nn.Parameter(torch.ones(size))
        self.parameter.grad = torch.full((size,), 1e-3)
        self.copy = torch.ones(size, dtype=torch.bfloat16)
        self.optimizer = DeepSpeedCPUAdam(
            [self.parameter],
            lr=SETTINGS["learning_rate"],
            betas=(SETTINGS["b1"], SETTINGS["b2"]),
            eps=SETTINGS["eps"],
            weight_decay=SETTINGS["weight_decay"],
        )

    def __call__(self, num_steps):
        for _ in range(num_steps):
            self.parameter.grad.mul_(1.0)
            self.optimizer.step()
            self.copy.copy_(self.parameter.data)


@contextlib.contextmanager
def threads(count):
    """Sets the number of threads everywhere, and binds the process to as many CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    library("cpu").set_host_threads(count)
    if torch is not None:
        torch.set_num_threads(count)
    bind(cpus[:count])
    try:
        yield
    finally:
        bind(cpus)
        library("cpu").set_host_threads(0)


def bind(cpus):
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def load_read_write(folder):
    target = Path(folder) / "read_write.so"
    source = Path(__file__).parent / "read_write.cc"
    compiler = os.environ.get("CXX", "c++")
    options = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
    function = ctypes.CDLL(str(target)).read_write
    function.restype = ctypes.c_double
    return function


def available_bytes():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def run_size(size, num_threads, repetitions, read_write, limit_bytes):
    """Returns the seconds per step of each implementation that fits into memory."""
    fused = Fused(size)
    sides = {"fused": fused, "memory": Memory(read_write, fused, size, num_threads)}
    free_bytes = limit_bytes - size * BYTES["fused"]
    forms = {"split": functools.partial(Fused, is_split=True)}
    forms["bfloat16"] = functools.partial(Fused, moments=jnp.bfloat16, is_split=True)
    forms["int8"] = functools.partial(Fused, moments=np.uint8, is_split=True)
    for name, make in forms.items():
        free_bytes -= size * BYTES[name]
        if free_bytes >= 0:
            sides[name] = make(size)
    for name, make in {"optax": Optax, "deepspeed": DeepSpeed}.items():
        free_bytes -= size * BYTES[name]
        if free_bytes >= 0 and not (make is DeepSpeed and torch is None):
            sides[name] = make(size)
    num_steps = max(1, round(PASS_PARAMETERS / size))
    # Each measurement starts with caches warmed by its own step, not by the previous implementation.
    calls = {}
    for name, side in sides.items():
        calls |= {f"{name} before": lambda side=side: side(1), name: lambda side=side: side(num_steps)}
    seconds = measure.interleaved(calls, repetitions)
    return {name: [s / num_steps for s in seconds[name]] for name in sides}


def run(sizes, thread_counts, repetitions, memory_share):
    machine = measure.machine()  # also starts XLA's threads, one per CPU, before CPUs are restricted
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        read_write = load_read_write(folder)
        for size in sizes:
            limit_bytes = memory_share * available_bytes()
            fitting = min(size, int(limit_bytes / BYTES["fused"]))
            for count in thread_counts:
                with threads(count):
                    seconds = run_size(fitting, count, repetitions, read_write, limit_bytes)
                rows.append(row_of(fitting, count, seconds))
    return {
        "benchmark": "host_step",
        "machine": machine,
        "simd": library("cpu").set_host_simd("avx512-bf16"),
        "step": "AdamW, bf16 gradient and compute copy, 28 bytes of traffic a parameter",
        "repetitions": repetitions,
        "expected": {f"over_{name}": ratio for name, ratio in EXPECTED.items()},
        "rows": rows,
    }


def row_of(size, count, seconds):
    step_s = {name: statistics.median(measured) for name, measured in seconds.items()}
    ratios = {
        f"over_{name}": measure.median_ratio(measured, seconds["fused"])
        for name, measured in seconds.items()
        if name != "fused"
    }
    return {"num_parameters": size, "num_threads": count, "step_s": step_s, **ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=SIZES, help="parameters; sizes that do not fit are skipped"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, os.cpu_count()}))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--memory-share", type=float, default=0.5, help="maximum share of free memory to use")
    parser.add_argument("--name", default="host_step", help="name of the file under results/")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes]
    result = run(sizes, arguments.threads, arguments.repetitions, arguments.memory_share)
    title = f"Speed of the fused step on {result['machine']['cpu']}, {result['simd']}"
    columns = [f"/ {name}" for name in EXPECTED]
    forms = ("split", "bfloat16", "int8")
    table = Table("parameters", "threads", "G parameters/s", *columns, *(f"time of {x}" for x in forms), title=title)
    for row in result["rows"]:
        ratios = [f"{row[key]:.2f}" if (key := f"over_{name}") in row else "-" for name in (*EXPECTED, *forms)]
        speed = row["num_parameters"] / row["step_s"]["fused"] / 1e9
        table.add_row(f"{row['num_parameters']:.1e}", str(row["num_threads"]), f"{speed:.2f}", *ratios)
    Console().print(table)
    measure.write(arguments.name, result)


if __name__ == "__main__":
    main()
