"""Checks long training for leaks of host memory, live arrays and threads over thousands of steps, on the CPU.

Trains a tiny GPT-2, whose steps take milliseconds, under `native-overlapped` with the fused AdamW. After a warm-up of
200 steps, every 100 steps, it waits for updates in flight and records the process's resident memory, the number and
bytes of JAX's live arrays, and the number of threads. Memory is flat if

- live arrays, their bytes and Python's threads are equal in all samples,
- the process ends with at most two more threads (XLA's pools start theirs on first use), and
- the median resident memory of the last quarter exceeds that of the first quarter after the warm-up by at most the
  tolerance. It varies without a leak, because allocators keep freed memory; a leak of one small array per step (1 KiB)
  shows as 2 MiB in 2,000 steps, and as live arrays.

    python benchmarks/soak.py [--steps 2000] [--tolerance-mib 4]
"""

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import measure

import jaxferry
import model

CONFIG = model.Config(num_layers=2, num_heads=2, channels=64, max_length=32, vocab_size=256)
BATCH, LENGTH = 2, 16
WARM_UP, EVERY = 200, 100
THREAD_TOLERANCE = 2


def status_of_process():
    """Returns the kernel's counts of resident bytes and threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"])


def sample(step):
    gc.collect()
    arrays = jax.live_arrays()
    resident_bytes, num_threads = status_of_process()
    return {
        "step": step,
        "resident_bytes": resident_bytes,
        "live_arrays": len(arrays),
        "live_bytes": sum(array.nbytes for array in arrays),
        "threads": num_threads,
        "python_threads": threading.active_count(),
    }


def judge(samples, tolerance_bytes):
    """Returns each quantity's growth, and whether it is flat."""
    quarter = max(1, len(samples) // 4)
    first, last = (
        statistics.median(each["resident_bytes"] for each in part) for part in (samples[:quarter], samples[-quarter:])
    )
    found = {"resident_bytes": {"growth": last - first, "is_flat": last - first <= tolerance_bytes}}
    more = samples[-1]["threads"] - samples[0]["threads"]
    found["threads"] = {"growth": more, "is_flat": more <= THREAD_TOLERANCE}
    for name in ("live_arrays", "live_bytes", "python_threads"):
        values = [each[name] for each in samples]
        found[name] = {"growth": values[-1] - values[0], "is_flat": len(set(values)) == 1}
    return found


def run(num_steps):
    """Trains; returns the samples after the warm-up, and the seconds per step."""
    step = jaxferry.train_step(model.make_loss(CONFIG), jaxferry.adamw(1e-3), policy="native-overlapped", clip_norm=1.0)
    state = step.init(jax.jit(model.make_init(CONFIG))(jax.random.key(0)))
    batch = {"tokens": jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, CONFIG.vocab_size)}
    samples, losses, begin_s = [], [], time.perf_counter()
    for number in range(1, num_steps + 1):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if number >= WARM_UP and number % EVERY == 0:
            state.block_until_ready()
            samples.append(sample(number))
            print("step {step}: {resident_bytes} bytes, {live_arrays} arrays, {threads} threads".format(**samples[-1]))
    return samples, losses, (time.perf_counter() - begin_s) / num_steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tolerance-mib", type=float, default=4.0)
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + EVERY:
        parser.error(f"--steps must be at least {WARM_UP + EVERY}, got {arguments.steps}")
    samples, losses, step_s = run(arguments.steps)
    tolerance_bytes = int(arguments.tolerance_mib * 2**20)
    growth = judge(samples, tolerance_bytes)
    is_flat = all(found["is_flat"] for found in growth.values())
    for name, found in growth.items():
        print(f"{name:16} grew by {found['growth']:12} {'flat' if found['is_flat'] else 'NOT FLAT'}")
    measure.write(
        "soak",
        {
            "benchmark": "soak",
            "machine": measure.machine(),
            "model": {"name": f"GPT-2 {CONFIG}", "batch": BATCH, "sequence": LENGTH, "dtype": "float32"},
            "steps": arguments.steps,
            "warm_up": WARM_UP,
            "tolerance_bytes": tolerance_bytes,
            "tolerance_threads": THREAD_TOLERANCE,
            "mean_step_s": step_s,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "is_flat": is_flat,
            "growth": growth,
            "samples": samples,
        },
    )
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
