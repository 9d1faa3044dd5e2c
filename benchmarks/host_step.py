"""The fused AdamW step on host memory, against what memory allows and against other ways to do the same.

    python benchmarks/host_step.py [--sizes 1e4 1e6 1e8] [--threads 1 2] [--repetitions 7] [--memory-share 0.5]
                                   [--name host_step]

One step takes a bf16 gradient, a loss scale and a clip factor, updates fp32 master and both moments, and writes a bf16
compute copy. In turn, in one process, on the same number of CPUs and threads:

- fused: `jaxferry.adamw`'s native operation in a jitted, donated program, as the engine calls it;
- (a) memory: a plain loop that reads and writes the same bytes (read_write.cc), on the very same arrays;
- (b) optax: `optax.adamw`, casts and scale in one jitted, donated program;
- (c) deepspeed: what ZeRO-Offload does on the host, scale, `DeepSpeedCPUAdam.step` and cast, three passes; where
  deepspeed and CPU torch can be imported (optional).

Expected, for 1e7 parameters and more: at least 0.9 of (a), at least 1.5 times (b) and (c). Fewer differ for these
reasons: a call of a jitted program takes some 15 microseconds, longer than the arithmetic of 1e4 parameters, while (a)
is called once for all passes; with a thread for each CPU the one that calls takes its share of a CPU too; and while all
arrays lie in a cache, a root and a quotient for each parameter take longer than its bytes do. (b) has the same calls,
and (c) two thirds more bytes at any size. Where one thread takes all that memory gives (host_step_epyc.json), the
arithmetic of (b) and (c) hides behind their bytes with two, and the fused step is 1.46 to 1.5 times as fast.

One-CPU runs bind all threads of the process to one CPU. Other load on the machine shows most with all threads, in which
a step ends when the last of them does.
"""

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else DeepSpeed's threads wait at full speed, on others' time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
import measure
from jaxferry.engine.host.fused import fused_update
from jaxferry.native import library
from jaxferry.partition.layout import make_layer

try:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    torch = None

SETTINGS = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SIZES = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
BYTES = {"fused": 16, "memory": 0, "optax": 16, "deepspeed": 18}  # a parameter; (a) borrows those of the fused step
EXPECTED = {"memory": 0.9, "optax": 1.5, "deepspeed": 1.5}
PASS_PARAMETERS = 2e7  # a measurement takes as many steps as go through so many parameters


class Fused:
    """The native operation, called as the engine calls it."""

    def __init__(self, size):
        optimizer = jaxferry.adamw(**SETTINGS)
        layer = make_layer("layer", [0], ["w"], [jax.ShapeDtypeStruct((size,), jnp.bfloat16)], [np.dtype(np.float32)])

        def step(gradient, clip, scale, params, state, copy):
            params, state, copies = fused_update(
                optimizer.rule, [layer], params, state, [[copy]], [[gradient]], clip, scale
            )
            return params, state, copies[0][0]

        self.numbers = jnp.float32(1), jnp.float32(1)
        self.gradient = jnp.full(size, 1e-3, jnp.bfloat16)
        params = jnp.ones(size)
        self.arrays = params, optimizer.init(params), jnp.ones(size, jnp.bfloat16)
        self.step = jax.jit(step, donate_argnums=(3, 4, 5)).lower(self.gradient, *self.numbers, *self.arrays).compile()

    def __call__(self, num_steps):
        for _ in range(num_steps):
            self.arrays = self.step(self.gradient, *self.numbers, *self.arrays)
        jax.block_until_ready(self.arrays)

    def pointers(self):
        """Those of master, moments, gradient and copy."""
        params, state, copy = jax.block_until_ready(self.arrays)
        arrays = (params, state[0].mu, state[0].nu, self.gradient, copy)
        return [array.unsafe_buffer_pointer() for array in arrays]


class Memory:
    """The plain loop over the arrays of the fused step."""

    def __init__(self, function, fused, size, num_threads):
        self.function, self.fused, self.size, self.num_threads = function, fused, size, num_threads

    def __call__(self, num_steps):
        pointers = (ctypes.c_void_p * 5)(*self.fused.pointers())
        self.function(pointers, ctypes.c_int64(self.size), ctypes.c_int64(self.num_threads), ctypes.c_int64(num_steps))


class Optax:
    """The same step by XLA."""

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
    """Scale, Adam and cast, as ZeRO-Offload does them one after another."""

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
    """Gives everything this many threads, and all threads of the process no more CPUs than that."""
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
    """Seconds a step of each that fits into memory."""
    fused = Fused(size)
    sides = {"fused": fused, "memory": Memory(read_write, fused, size, num_threads)}
    free_bytes = limit_bytes - size * BYTES["fused"]
    for name, make in {"optax": Optax, "deepspeed": DeepSpeed}.items():
        free_bytes -= size * BYTES[name]
        if free_bytes >= 0 and not (make is DeepSpeed and torch is None):
            sides[name] = make(size)
    num_steps = max(1, round(PASS_PARAMETERS / size))
    # Each finds in the caches what a step of its own left there, not what the one before it did.
    calls = {}
    for name, side in sides.items():
        calls |= {f"{name} before": lambda side=side: side(1), name: lambda side=side: side(num_steps)}
    seconds = measure.interleaved(calls, repetitions)
    return {name: [s / num_steps for s in seconds[name]] for name in sides}


def run(sizes, thread_counts, repetitions, memory_share):
    machine = measure.machine()  # and XLA's threads start, one for each CPU, before any CPU is taken away
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
        "step": "AdamW, bf16 gradient and compute copy, 30 bytes a parameter",
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
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="parameters, as memory allows")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, os.cpu_count()}))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the memory that is free, at most so much")
    parser.add_argument("--name", default="host_step", help="of the file under results/")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes]
    result = run(sizes, arguments.threads, arguments.repetitions, arguments.memory_share)
    title = f"Speed of the fused step on {result['machine']['cpu']}, {result['simd']}"
    table = Table("parameters", "threads", "G parameters/s", "/ memory", "/ optax", "/ deepspeed", title=title)
    for row in result["rows"]:
        ratios = [f"{row[key]:.2f}" if (key := f"over_{name}") in row else "-" for name in EXPECTED]
        speed = row["num_parameters"] / row["step_s"]["fused"] / 1e9
        table.add_row(f"{row['num_parameters']:.1e}", str(row["num_threads"]), f"{speed:.2f}", *ratios)
    Console().print(table)
    measure.write(arguments.name, result)


if __name__ == "__main__":
    main()
