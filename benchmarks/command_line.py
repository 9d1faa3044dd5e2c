"""Measures the processor time of commands that need no device, from their start to their end.

    python benchmarks/command_line.py [--runs 5] [--fits 3]

Prints a table and writes `benchmarks/results/command_line.json`: medians of user and system time, and multiples of that
of `python -c pass`, which runs before each of them, with the machine's load over five minutes. A first run of each
command compiles byte code and warms the file cache. The profile has six layers, so that planning commands do little but
start; `fit` answers for GPT-2 6.7B.
"""

import argparse
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts
from benchmarks.planner_gap import transformer
from jaxferry.cli.recording import Recording
from jaxferry.planner import make_plan
from jaxferry.records import write_json

RESULTS = Path(__file__).parent / "results" / "command_line.json"
PASS = (sys.executable, "-c", "pass")
PLANNING = (
    "--help",
    "plan profile.json",
    "plan profile.json --policy auto",
    "plan profile.json --compare",
    "simulate profile.json plan.json",
    "tune profile.json --policy memferry",
    "weights profile.json --memory-budget 1.25GiB",
    "report run.json -o page.html",
)
FITS = ("fit gpt2:6.7b --machine h100-pcie5 --host-memory 128GiB",)


def processor_s(command, folder, byte_code):
    """Runs a command; user and system time."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        check=True,
        cwd=folder,
        env={**environment, "PYTHONPYCACHEPREFIX": byte_code},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measured(arguments, runs, folder, byte_code):
    """The medians of one command."""
    command = (sys.executable, "-m", "jaxferry", *arguments.split())
    processor_s(command, folder, byte_code)
    pairs = [[processor_s(each, folder, byte_code) for each in (PASS, command)] for _ in range(runs)]
    return {
        "command": f"jaxferry {arguments}",
        "runs": runs,
        "processor_s": round(statistics.median(own_s for _, own_s in pairs), 3),
        "least_processor_s": round(min(own_s for _, own_s in pairs), 3),
        "python_s": round(statistics.median(pass_s for pass_s, _ in pairs), 4),
        "times_python": round(statistics.median(own_s / pass_s for pass_s, own_s in pairs), 1),
    }


def write_inputs(folder):
    """Writes a profile, a plan, and a recording of some steps as the machine model predicts them."""
    profile = transformer(6, seed=0)
    plan = make_plan(profile, "exact")
    about = {"model": "a model", "machine": {"name": "a machine"}, "accumulate": 1, "memory_budget_bytes": None}
    recording = Recording(**about, plan=plan, profile=profile, tasks=(), device_bytes={}, host_bytes={})
    profile.save(folder / "profile.json")
    plan.save(folder / "plan.json")
    dataclasses.replace(recording, tasks=recording.predicted).save(folder / "run.json")


def main():
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each planning command")
    parser.add_argument("--fits", type=int, default=3, help="runs of fit")
    arguments = parser.parse_args()
    cases = [*((each, arguments.runs) for each in PLANNING), *((each, arguments.fits) for each in FITS)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as byte_code:
        write_inputs(Path(folder))
        tracked = track(cases, description="commands", console=Console(stderr=True))
        rows = [measured(*case, folder, byte_code) for case in tracked]
    load = round(os.getloadavg()[1], 1)
    write_json(RESULTS, {"machine": {**facts("none"), "load_average": load}, "commands": rows})
    table = Table("command", title="processor time, medians")
    for head in ("seconds", "least", "times python -c pass"):
        table.add_column(head, justify="right")
    for row in rows:
        seconds = [f"{row[key]:.2f}" for key in ("processor_s", "least_processor_s")]
        table.add_row(row["command"], *seconds, f"{row['times_python']:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
