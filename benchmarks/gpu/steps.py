"""Measures time and device memory of whole training steps of GPT-2 or of a Llama.

    python benchmarks/gpu/steps.py OUTPUT_DIR [--size medium] [--only plain auto]

Computes in bfloat16, keeps masters and AdamW's state in float32, and repeats one batch of random tokens. Blocks of a
Llama are recomputed, by plain JAX as well. Contenders, in the order in which they are named:

- `plain`: one jitted step with everything on the device: the cost of training a model that fits.
- `recipe`: JAX's own offloading, from its notebook "JAX Memories and Host Offloading": one jitted step whose
  parameters and optimizer state live in `pinned_host` and are copied to the device inside the step.
- every policy of JaxFerry, with `jaxferry.adamw`. `auto` gets the peak that the engine counts for `l2l` as its budget,
  or what `settings.BUDGETS` says.
- `auto-all-memory`: `auto` with all of the device's memory, so that updates run on the device as far as that is faster.
- `streamed`: `native-overlapped` with all updates streamed through the GPU, which a slow host would make the fastest.

Each contender runs in a process of its own, because the allocator's peak cannot be reset. The processes run one after
another, because two of the larger ones do not fit on one device. `step_s` is the median time between two losses,
without the first three steps. Only `mean_s` includes the updates that run on after the last step. The processes share
a compilation cache, so equal programs use the same kernels.

Expectations, written before the first run on a GPU:

- `plain` is the fastest and takes the most memory.
- `exact`, `native-overlapped` and `auto` are faster than `zero-offload`, `native-offload` and `recipe`, which wait for
  all transfers or all updates.
- measured / predicted lies between 0.9 and 1.1. measured / bound, where the bound is the work of the busiest lane, is
  at most 1.15 for policies that overlap everything.
- `auto-all-memory` takes at most 1.03 times the time of `plain` where the model fits.
- The peak of the other policies is below that of `plain` by at least the optimizer state and masters (12 bytes per
  parameter).
- Losses of policies that only move data (no layer DHA or DFGB, no gradient GO, no update on the device) are
  bit-identical but for cuDNN's attention, which adds gradients in no fixed order; whether they are is reported. All
  contenders, `plain` and `recipe` too, agree within bfloat16's rounding, or the script ends with an error.

The table shows lane utilisation. `recorded` is the share of the last steps in which a lane had a task, according to
`step.recorded()` (on a GPU: events on its own queues). `busy` is the lane's work in the profile divided by the measured
step. The two differ where a task takes longer or shorter in a step than alone; `mean_of_kind_s` has the recorded and
the planned mean for each kind of task.
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

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu.settings import ALL_MEMORY, BATCHES, BUDGETS, CONTENDERS, PLAIN, RECIPE, model_name
from benchmarks.gpu.stages import GRACE_S

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A separate program, because JAX reads the environment set here when it is imported.
CONTENDER = ROOT / "benchmarks" / "gpu" / "contenders.py"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}
TIMED_OUT = 124
MOST_TOLD = 8000
ROUNDING = 2.0**-8
"""bfloat16's."""
# PR_SET_PDEATHSIG: the device must be free when the parent has ended, however it ends.
_PRCTL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
ENDS_WITH_PARENT = (sys.executable, "-S", "-c", _PRCTL)
"""Before a command, makes its process end with SIGKILL when this one ends."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one contender; `result` is what it printed."""

    contender: str
    outcome: str
    seconds: float
    result: dict

    def to_json(self):
        return {"contender": self.contender, "outcome": self.outcome, "seconds": self.seconds, **self.result}


def contender_command(name, arguments, limit_s, budget_bytes):
    command = [sys.executable, str(CONTENDER), str(arguments.output), name, "--size", arguments.size]
    command += ["--steps", str(arguments.steps), "--limit", str(limit_s)]
    command += ["--batch", str(arguments.batch), "--seq", str(arguments.seq)]
    command += [] if arguments.attention is None else ["--attention", arguments.attention]
    return command + ([] if budget_bytes is None else ["--memory-budget", str(budget_bytes)])


def environment(device, folder):
    """Returns a child's environment; all children share compiled programs, tuning results and measurements."""
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
    """Says in one line why a contender failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    scarce = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "out of memory" in line.lower()]
    if scarce:
        return f"out of memory: {scarce[-1][:300]}"
    if status == -signal.SIGKILL:
        return "killed, most likely for host memory"
    return f"failed ({status}): {lines[-1][:300] if lines else 'it said nothing'}"


def run_contender(name, command, env, limit_s):
    """Runs a process for at most `limit_s` seconds; its last line of output is its result."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        [*ENDS_WITH_PARENT, *command],
        env=env | {"PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        tell(name, stacks_of(process))
        return Row(name, f"timed out after {limit_s:.0f} s", time.monotonic() - start_s, {})
    except BaseException:
        # When this process ends, the device must be free.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = time.monotonic() - start_s
    if process.returncode != 0:
        tell(name, errors)
        return Row(name, reason_of(process.returncode, errors), seconds, {})
    return Row(name, "measured", seconds, json.loads(output.splitlines()[-1]))


def stacks_of(process):
    """Ends a process that hangs; returns what it has said, with the stacks of its threads."""
    os.killpg(process.pid, signal.SIGABRT)
    try:
        _, errors = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    return errors


def tell(name, errors):
    """Prints the end of what a contender has said, for the log of this stage."""
    print(f"{name} said at its end:\n{errors[-MOST_TOLD:]}", file=sys.stderr, flush=True)


def same_losses(rows):
    """Whether all policies that only move data have equal losses over their common steps; None for fewer than two."""
    movers = [row.result["losses"] for row in rows if row.result.get("only_moves_data")]
    if len(movers) < 2:
        return None
    count = min(map(len, movers))
    return all(losses[:count] == movers[0][:count] for losses in movers)


def near_losses(rows):
    """Whether losses of all contenders, plain JAX's too, agree within bfloat16's rounding over their common steps."""
    known = [row.result["losses"] for row in rows if row.result.get("losses")]
    pairs = [pair for losses in known for pair in zip(losses, known[0], strict=False)]
    return all(abs(one - other) <= ROUNDING * abs(other) for one, other in pairs)


def status_of(rows):
    """Returns 0 if every contender that ran was measured, else 1 or 124; `plain` and `recipe` may fail to fit."""
    if all(row.contender in (PLAIN, RECIPE) for row in rows):
        return int(any(row.outcome != "measured" for row in rows))
    ran = [row for row in rows if row.outcome != "left out" and row.contender not in (PLAIN, RECIPE)]
    if not any(row.result.get("step_s") for row in ran):
        return TIMED_OUT if all("timed out" in row.outcome for row in ran) else 1
    return int(any(row.outcome != "measured" for row in ran) or not near_losses(rows))


def document(arguments, rows):
    machines = [row.result["machine"] for row in rows if "machine" in row.result]
    return {
        "benchmark": "steps",
        "machine": machines[0] if machines else None,
        "model": {
            "name": model_name(arguments.size),
            "batch": arguments.batch,
            "sequence": arguments.seq,
            "attention": arguments.attention or "the device's own",
        },
        "compute_dtype": "bfloat16",
        "order": "one after another, each in a process of its own",
        "expected": {
            "measured_over_predicted": [0.9, 1.1],
            "measured_over_bound": 1.15,
            "all_memory_over_plain": 1.03,
            "losses_bit_identical": "but for cuDNN's attention",
        },
        "losses_bit_identical": same_losses(rows),
        "rows": [row.to_json() for row in rows],
    }


def surprises(found):
    """Returns one line for each result outside the expectations."""
    rows, expected = [row for row in found.get("rows", ()) if "measured_over_predicted" in row], found.get("expected")
    if not rows:
        return []
    least, most = expected["measured_over_predicted"]
    ratios = {row["contender"]: row["measured_over_predicted"] for row in rows}
    lines = [
        f"  {name}: measured / predicted is {ratio:.2f}, expected {least} to {most}"
        for name, ratio in ratios.items()
        if not least <= ratio <= most
    ]
    best = min(row["measured_over_bound"] for row in rows)
    if best > expected["measured_over_bound"]:
        lines.append(f"  best measured / bound is {best:.2f}, expected at most {expected['measured_over_bound']}")
    step_s = {row["contender"]: row["step_s"] for row in found["rows"] if row.get("step_s")}
    if {ALL_MEMORY, PLAIN} <= step_s.keys():
        ratio, most = step_s[ALL_MEMORY] / step_s[PLAIN], expected["all_memory_over_plain"]
        lines += [f"  {ALL_MEMORY} / {PLAIN} is {ratio:.2f}, expected at most {most}"] if ratio > most else []
    return lines


def _cell(value, pattern, scale=1.0):
    return "-" if value is None else pattern.format(value * scale)


def table(rows):
    """Returns lines of text, one per contender."""
    heads = (
        "step [ms]",
        "/ plain",
        "peak [GiB]",
        "TFLOP/s",
        "GPU",
        "H2D",
        "D2H",
        "host",
        "/ predicted",
        "/ bound",
        "last loss",
    )
    lines = [f"{'':18}" + "".join(f"{head:>12}" for head in heads)]
    plain_s = next((row.result.get("step_s") for row in rows if row.contender == PLAIN), None)
    for row in rows:
        found = row.result
        if row.outcome != "measured" or "step_s" not in found:
            lines.append(f"{row.contender:18}  {row.outcome} ({row.seconds:.0f} s)")
            continue
        busy = found.get("recorded") or found.get("busy") or {}
        cells = [
            _cell(found["step_s"], "{:.1f}", 1e3),
            _cell(plain_s and found["step_s"] / plain_s, "{:.3f}"),
            _cell(found["peak_device_bytes"], "{:.2f}", 2.0**-30),
            _cell(found.get("model_flops_per_s"), "{:.1f}", 1e-12),
            *(_cell(busy.get(lane), "{:.2f}") for lane in ("GPU", "H2D", "D2H", "host")),
            _cell(found.get("measured_over_predicted"), "{:.3f}"),
            _cell(found.get("measured_over_bound"), "{:.3f}"),
            _cell(found["losses"][-1], "{:.4f}"),
        ]
        lines.append(f"{row.contender:18}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def run_all(arguments, names, path):
    """Runs the contenders within the limit and writes the results after each."""
    rows, budget_bytes = [], BUDGETS.get(arguments.size)
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
                    row = dataclasses.replace(row, outcome="left out")  # it had less than its own limit
            if name == "l2l" and arguments.size not in BUDGETS:
                budget_bytes = row.result.get("counted_bytes")
            rows.append(row)
            path.write_text(json.dumps(document(arguments, rows), indent=2) + "\n")
            print(f"{row.contender}: {row.outcome} ({row.seconds:.0f} s)", flush=True)
    return rows


def make_parser(description, devices, results):
    """The options that say what is timed; `parse_shape` fills in the shapes that are not given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help=f"folder for {results}")
    parser.add_argument("--size", default="medium", choices=BATCHES)
    parser.add_argument("--device", default="gpu", choices=devices)
    parser.add_argument("--batch", type=int, help="rows; default: those of the size")
    parser.add_argument("--seq", type=int, help="tokens per row; default 1024")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    return parser


def parse_shape(parser):
    arguments = parser.parse_args()
    rows, length = BATCHES[arguments.size]
    arguments.batch, arguments.seq = arguments.batch or rows, arguments.seq or length
    return arguments


def parse():
    parser = make_parser(__doc__, PLATFORMS, "steps_SIZE.json")
    parser.add_argument("--attention", choices=("xla", "cudnn"), help="default: the device's own")
    parser.add_argument("--limit", type=float, default=420, help="seconds for all contenders")
    parser.add_argument("--each", type=float, default=90, help="seconds for each contender")
    parser.add_argument("--least", type=float, default=5, help="start no contender with fewer seconds left")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders to run")
    return parse_shape(parser)


def end_with_sigterm():
    """Lets SIGTERM also end the running contender."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main():
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    end_with_sigterm()
    rows = run_all(arguments, list(dict.fromkeys(arguments.only)), arguments.output / f"steps_{arguments.size}.json")
    print(f"{model_name(arguments.size)}, batch {arguments.batch}, sequence {arguments.seq}, bfloat16")
    print("\n".join(table(rows)))
    said = {None: "not compared", True: "bit-identical", False: "DIFFERENT"}[same_losses(rows)]
    print(f"losses of the policies that only move data: {said}")
    for line in surprises(document(arguments, rows)):
        print("not as expected:", line.strip())
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
