"""Measures what digests cost a checkpoint: saves and restores with and without them.

    python benchmarks/checkpoint.py [--megabytes 512] [--repetitions 7] [--folder FOLDER] [--name checkpoint]

The state is that of Adam after some steps: fp32 parameters and two moments, random numbers in 32 MiB leaves. Saves and
restores run in turn, in one process. "Without" replaces the digest by a constant, and changes nothing else. CPU seconds
are those of all threads. Differences of whole saves are noisy on a busy machine, so the seconds within the digests
themselves are measured too, and their share of the operation. A folder in memory (/dev/shm) is the hard case: no time
is spent on waiting for a disk, which a digest does not add to.

Expected: digests take at most 5 % of the CPU time of a save.
"""

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxferry import checkpoint
from jaxferry.checkpoint.about import Digest

LEAF_BYTES = 32 * 2**20
EXPECTED = 0.05


@dataclasses.dataclass
class Seconds:
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    digests_cpu: list[float] = dataclasses.field(default_factory=list)

    def time(self, function, clock):
        clock.cpu_s = 0.0
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        function()
        self.wall.append(time.perf_counter() - wall_s)
        self.cpu.append(time.process_time() - cpu_s)
        self.digests_cpu.append(clock.cpu_s)

    def digests_share(self):
        return statistics.median(digests / cpu for digests, cpu in zip(self.digests_cpu, self.cpu, strict=True))


class Clock:
    """The digest's methods, with the CPU time of their calls."""

    def __init__(self):
        self.cpu_s, self.add, self.text = 0.0, Digest.add, Digest.text

    def timed(self, method):
        def call(digest, *arguments):
            start_s = time.thread_time()
            found = method(digest, *arguments)
            self.cpu_s += time.thread_time() - start_s
            return found

        return call

    def patched(self, has_digests):
        """Times digests, or replaces them by a constant."""
        add = self.timed(self.add) if has_digests else lambda digest, array: None
        text = self.timed(self.text) if has_digests else lambda digest: "0" * 32
        return mock.patch.multiple(Digest, add=add, text=text)


def make_state(num_bytes):
    rng = np.random.default_rng(0)
    count = max(1, num_bytes // (3 * LEAF_BYTES))
    names = [f"['{i:04d}']" for i in range(count)]
    leaves = [rng.standard_normal(LEAF_BYTES // 4, dtype=np.float32) for _ in range(3 * count)]
    return checkpoint.Checkpoint(
        step=1,
        params=dict(zip(names, leaves[:count])),
        dtypes=["float32"] * count,
        dictionary_paths=[[f"{i:04d}"] for i in range(count)],
        optimizer=dict(zip([f"[0].{m}{name}" for m in ("mu", "nu") for name in names], leaves[count:])),
    )


def run(state, folder, repetitions):
    """Returns the seconds of each operation, and the bytes on the disk, by name."""
    seconds = {f"{what} {how}": Seconds() for what in ("save", "restore") for how in ("with", "without")}
    clock = Clock()
    for repetition in range(repetitions + 1):
        for how in ("with", "without"):
            path = folder / how
            with clock.patched(how == "with"):
                for what, function in (
                    ("save", lambda path=path: checkpoint.save(state, path)),
                    ("restore", lambda path=path: checkpoint.load(path)),
                ):
                    (seconds[f"{what} {how}"] if repetition else Seconds()).time(function, clock)
    num_bytes = {how: count_bytes(folder / how) for how in ("with", "without")}
    return seconds, num_bytes


def count_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--name", default="checkpoint")
    args = parser.parse_args()
    state = make_state(args.megabytes * 2**20)
    state_bytes = sum(leaf.nbytes for part in (state.params, state.optimizer) for leaf in part.values())
    folder = Path(tempfile.mkdtemp(prefix="jaxferry-checkpoint-", dir=args.folder))
    try:
        seconds, num_bytes = run(state, folder, args.repetitions)
    finally:
        shutil.rmtree(folder)
    rows = []
    table = Table("operation", "wall s", "CPU s", "GB/s", title=f"{state_bytes / 2**20:.0f} MiB of state")
    for name, one in seconds.items():
        wall_s, cpu_s = statistics.median(one.wall), statistics.median(one.cpu)
        rows.append({"operation": name, "wall_s": one.wall, "cpu_s": one.cpu, "digests_cpu_s": one.digests_cpu})
        table.add_row(name, f"{wall_s:.3f}", f"{cpu_s:.3f}", f"{state_bytes / wall_s / 1e9:.2f}")
    ratios = {}
    for what in ("save", "restore"):
        ours, plain = seconds[f"{what} with"], seconds[f"{what} without"]
        ratios[what] = {
            "wall": measure.median_ratio(ours.wall, plain.wall),
            "cpu": measure.median_ratio(ours.cpu, plain.cpu),
            "digests_share_of_cpu": ours.digests_share(),
        }
    console = Console()
    console.print(table)
    for what, ratio in ratios.items():
        console.print(
            f"{what} with digests / without: {ratio['cpu']:.3f} in CPU time, {ratio['wall']:.3f} in wall time"
        )
    console.print(f"expected: at most {EXPECTED} for the CPU time of a save")
    console.print(f"bytes on the disk: {num_bytes['with']:,} with digests, {num_bytes['without']:,} without")
    result = {
        "machine": measure.machine(),
        "state_bytes": state_bytes,
        "disk_bytes": num_bytes,
        "ratios": ratios,
        "expected_share_of_save_cpu": EXPECTED,
        "operations": rows,
    }
    measure.write(args.name, result)


if __name__ == "__main__":
    main()
