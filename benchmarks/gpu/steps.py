"""Times whole training steps of GPT-2, and the device memory that they take. Usage: steps.py OUTPUT_DIR [--size medium]

Compute in bfloat16, masters and AdamW's state in float32, one batch of random tokens again and again. Contenders:

- `plain`: one jitted step, everything on the device: what training costs where all of it fits.
- `recipe`: JAX's own offloading, as its notebook "JAX Memories and Host Offloading" has it: one jitted step whose
  parameters and optimizer state live in `pinned_host`, and are brought to the device inside it.
- every policy of JaxFerry, with `jaxferry.adamw`; `auto` in the memory that `l2l` takes by the engine's own count.

The allocator's peak cannot be reset, so each contender has a process of its own, and they run one after another, not
in turn: a device's memory holds no two of the larger ones. A step's time is that between two losses, and the median of
all steps after the first three; updates of the last step, which run on, count in `mean_s` alone. What one process has
compiled and tuned the next one finds, so that equal programs are the same kernels.

What is expected, before anything was run on a GPU:

- `plain` is the fastest, and takes the most memory.
- `exact`, `native-overlapped` and `auto` are faster than `zero-offload`, `native-offload` and `recipe`, which wait for
  all transfers or all updates.
- measured / predicted lies between 0.9 and 1.1; measured / bound, the work of the busiest lane, is at most 1.15 for
  policies that overlap everything.
- JaxFerry's peak is below that of `plain` by the optimizer's state and masters (12 bytes a parameter) at least.
- losses of policies that only move data are bit-identical (no layer DHA or DFGB, no gradient GO). Those of others, and
  of `plain` and `recipe`, which are other programs, are within bfloat16's rounding, and are only told.

Lane utilisation, which the table shows: `recorded`, the share of the last steps in which a lane had a task, as
`step.recorded()` saw it (on a GPU by events on its own queues). `busy` is the profile's work of a lane over the
measured step; where the two differ, tasks take another time in a step than alone: `mean_of_kind_s` has, for each kind
of task, the mean as recorded and as planned.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = "profile"
PLAIN, RECIPE = "plain", "recipe"
POLICIES = (
    "native-overlapped",
    "exact",
    "zero-offload",
    "l2l",
    "auto",
    "memferry",
    "native-offload",
    "go-memferry",
)
# What matters most comes first, in case there is no time for the rest.
CONTENDERS = (PLAIN, PROFILE, "native-overlapped", "exact", "zero-offload", RECIPE, *POLICIES[3:])
BATCHES = {"tiny": (2, 32), "124m": (8, 1024), "medium": (8, 1024), "xl": (4, 1024)}
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}
WARM_UP = 3
MIN_STEPS = 3
TIMED_OUT = 124
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one contender; `result` is what it printed."""

    contender: str
    outcome: str
    seconds: float
    result: dict

    def to_json(self):
        return {"contender": self.contender, "outcome": self.outcome, "seconds": self.seconds, **self.result}


def contender_command(name, arguments, limit_s, budget_bytes):
    command = [sys.executable, __file__, str(arguments.output), "--contender", name, "--size", arguments.size]
    command += ["--device", arguments.device, "--steps", str(arguments.steps), "--limit", str(limit_s)]
    command += ["--batch", str(arguments.batch), "--seq", str(arguments.seq)]
    return command + ([] if budget_bytes is None else ["--memory-budget", str(budget_bytes)])


def environment(device, folder):
    """Children share what they compile, tune and measure."""
    return os.environ | {
        "JAX_PLATFORMS": PLATFORMS[device],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAXFERRY_CACHE_DIR": str(folder / "measured"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def reason_of(status, text):
    """Why a contender has failed, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    scarce = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "out of memory" in line.lower()]
    if scarce:
        return f"out of memory: {scarce[-1][:300]}"
    if status == -signal.SIGKILL:
        return "killed, most likely for host memory"
    return f"failed ({status}): {lines[-1][:300] if lines else 'it said nothing'}"


def run_contender(name, command, env, limit_s):
    """Runs a process for at most `limit_s`; its last line of output is its result."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Row(name, f"timed out after {limit_s:.0f} s", time.monotonic() - start_s, {})
    except BaseException:
        # Whoever ends this process wants the device free.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = time.monotonic() - start_s
    if process.returncode != 0:
        return Row(name, reason_of(process.returncode, errors), seconds, {})
    return Row(name, "measured", seconds, json.loads(output.splitlines()[-1]))


def same_losses(rows):
    """Whether the policies that only moved data had the same losses, as far as they got; None for fewer than two."""
    movers = [row.result["losses"] for row in rows if row.result.get("only_moves_data")]
    if len(movers) < 2:
        return None
    count = min(map(len, movers))
    return all(losses[:count] == movers[0][:count] for losses in movers)


def status_of(rows):
    """0 if everything that ran was measured, but for `plain` and `recipe`, which need not fit; else 1 or 124."""
    if all(row.contender in (PLAIN, RECIPE) for row in rows):
        return int(any(row.outcome != "measured" for row in rows))
    ran = [row for row in rows if row.outcome != "left out" and row.contender not in (PLAIN, RECIPE)]
    if not any(row.result.get("step_s") for row in ran):
        return TIMED_OUT if all("timed out" in row.outcome for row in ran) else 1
    return int(any(row.outcome != "measured" for row in ran) or same_losses(rows) is False)


def document(arguments, rows):
    machines = [row.result["machine"] for row in rows if "machine" in row.result]
    return {
        "benchmark": "steps",
        "machine": machines[0] if machines else None,
        "model": {"name": f"GPT-2 {arguments.size}", "batch": arguments.batch, "sequence": arguments.seq},
        "compute_dtype": "bfloat16",
        "order": "one after another, each in a process of its own",
        "expected": {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15, "losses_bit_identical": True},
        "losses_bit_identical": same_losses(rows),
        "rows": [row.to_json() for row in rows],
    }


def _cell(value, pattern, scale=1.0):
    return "-" if value is None else pattern.format(value * scale)


def table(rows):
    """Lines of text, one a contender."""
    heads = ("step [ms]", "tokens/s", "peak [GiB]", "GPU", "H2D", "D2H", "host", "/ predicted", "/ bound", "last loss")
    lines = [f"{'':18}" + "".join(f"{head:>12}" for head in heads)]
    for row in rows:
        found = row.result
        if row.outcome != "measured" or "step_s" not in found:
            lines.append(f"{row.contender:18}  {row.outcome} ({row.seconds:.0f} s)")
            continue
        busy = found.get("recorded") or found.get("busy") or {}
        cells = [
            _cell(found["step_s"], "{:.1f}", 1e3),
            _cell(found["tokens_per_s"], "{:.0f}"),
            _cell(found["peak_device_bytes"], "{:.2f}", 2.0**-30),
            *(_cell(busy.get(lane), "{:.2f}") for lane in ("GPU", "H2D", "D2H", "host")),
            _cell(found.get("measured_over_predicted"), "{:.3f}"),
            _cell(found.get("measured_over_bound"), "{:.3f}"),
            _cell(found["losses"][-1], "{:.4f}"),
        ]
        lines.append(f"{row.contender:18}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def run_all(arguments, names, path):
    """Runs the contenders within the limit; what is done is written after each."""
    rows, budget_bytes = [], None
    end_s = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory(prefix="jaxferry-steps-") as scratch:
        folder = pathlib.Path(scratch)
        env = environment(arguments.device, folder)
        for name in names:
            limit_s = min(arguments.each, end_s - time.monotonic())
            if limit_s < arguments.least:
                row = Row(name, "left out", 0.0, {})
            else:
                command = contender_command(name, arguments, limit_s, budget_bytes if name == "auto" else None)
                row = run_contender(name, command, env, limit_s)
                if row.outcome.startswith("timed out") and limit_s < arguments.each:
                    row = dataclasses.replace(row, outcome="left out")  # it never had its own limit
            if name == "l2l":
                budget_bytes = row.result.get("counted_bytes")
            rows.append(row)
            path.write_text(json.dumps(document(arguments, rows), indent=2) + "\n")
            print(f"{row.contender}: {row.outcome} ({row.seconds:.0f} s)", flush=True)
    return rows


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help="folder for steps_SIZE.json")
    parser.add_argument("--size", default="medium", choices=BATCHES)
    parser.add_argument("--device", default="gpu", choices=PLATFORMS)
    parser.add_argument("--batch", type=int, help="rows; by default 8, 4 of xl")
    parser.add_argument("--seq", type=int, help="tokens of a row; by default 1024")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    parser.add_argument("--limit", type=float, default=420, help="seconds for all contenders")
    parser.add_argument("--each", type=float, default=90, help="seconds for one")
    parser.add_argument("--least", type=float, default=5, help="with fewer seconds left no contender is started")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="these contenders")
    parser.add_argument("--contender", choices=CONTENDERS, help="run one here, and print its line of JSON")
    parser.add_argument("--memory-budget", type=int, help="bytes, of that one")
    arguments = parser.parse_args()
    rows, length = BATCHES[arguments.size]
    arguments.batch, arguments.seq = arguments.batch or rows, arguments.seq or length
    return arguments


def main():
    arguments = parse()
    if arguments.contender:
        # JAX reads what the parent has set as it is imported, so only here, and never in the parent.
        from benchmarks.gpu import contenders

        print(json.dumps(contenders.run(arguments)))
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    # A process that is told to end takes along the contender that it waits for.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = [name for name in CONTENDERS if name in arguments.only]
    rows = run_all(arguments, names, arguments.output / f"steps_{arguments.size}.json")
    print(f"GPT-2 {arguments.size}, batch {arguments.batch}, sequence {arguments.seq}, bfloat16")
    print("\n".join(table(rows)))
    said = {None: "not compared", True: "bit-identical", False: "DIFFERENT"}[same_losses(rows)]
    print(f"losses of the policies that only move data: {said}")
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
