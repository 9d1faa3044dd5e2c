"""Shared by the benchmarks: facts about the machine, interleaved timing, and JSON output."""

import json
import os
import platform
import statistics
import threading
import time
from pathlib import Path

import jax

RESULTS = Path(__file__).parent / "results"


def machine():
    """Returns the facts about the machine that results depend on."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "device": str(jax.devices()[0].device_kind),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def thread_cpu_s(prefix):
    """CPU seconds so far of this process's threads whose names begin so."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


def interleaved(functions, repetitions, warm_up=2):
    """Runs the functions in turn and returns each one's seconds by name; other load then affects all alike."""
    seconds = {name: [] for name in functions}
    for repetition in range(warm_up + repetitions):
        for name, function in functions.items():
            start_s = time.perf_counter()
            function()
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def median_ratio(numerators, denominators):
    """Returns the median ratio of measurements that are adjacent in time."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def write(name, result):
    """Writes `results/name.json`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
