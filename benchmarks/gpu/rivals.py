"""Times training steps of other systems that offload to host memory. Usage: rivals.py OUTPUT_DIR [--python PATH]

Contenders, models and inputs are those of torch_contenders.py: the GPT-2, the weights, the tokens and the optimizer of
steps.py, in PyTorch. Each contender runs in a process of its own, by a Python that may be another one than JAX's. A
missing package leaves its contenders out.

Writes OUTPUT_DIR/rivals_SIZE.json in the form of steps_SIZE.json. Where the latter is there too, of the same shapes and
machine, `ratios` has each rival's step time relative to each contender's of ours (above 1: the rival is slower), and
`losses_differ_by` how far its loss at the last common step is from ours, relative, at most.

`peak_device_bytes` of a rival is that of its steps, without its setup: `setup_peak_device_bytes`.
"""

import json
import os
import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu import steps
from benchmarks.gpu.rival_stages import TORCH_DEVICES, reasons
from benchmarks.gpu.settings import RIVALS
from benchmarks.gpu.stages import emit

CONTENDER = pathlib.Path(__file__).resolve().parent / "torch_contenders.py"
MOST_OFF = 2.0**-8
"""The relative difference of a last loss that bfloat16 explains; a larger one tells that a rival trains otherwise."""
LEAST_S = 10.0
"""With less time left, no contender is started."""


def command_of(rival, arguments, limit_s):
    command = [arguments.python, str(CONTENDER), rival, "--size", arguments.size]
    command += ["--device", TORCH_DEVICES[arguments.device], "--batch", str(arguments.batch)]
    command += ["--seq", str(arguments.seq), "--steps", str(arguments.steps), "--limit", str(limit_s)]
    return command + (["--compile"] if arguments.compile else [])


def environment(python):
    """A child's environment; what PYTHONPATH adds to this Python is not for another one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or python == sys.executable}


def run_all(arguments, write):
    """Runs the rivals, one after another, within the limit; `write(rows)` is called after each."""
    rows, env, why = [], environment(arguments.python), reasons(arguments.python)
    end_s = time.monotonic() + arguments.limit
    names = [name for name in RIVALS if name in arguments.only]
    for position, name in enumerate(names):
        left_s = end_s - time.monotonic()
        # What an earlier one has not used is for those that follow.
        limit_s = left_s / (len(names) - position)
        if why[name]:
            row = steps.Row(name, f"left out: {why[name]}", 0.0, {})
        elif limit_s < LEAST_S:
            row = steps.Row(name, "left out: no time", 0.0, {})
        else:
            row = steps.run_contender(name, command_of(name, arguments, limit_s), env, limit_s)
        rows.append(row)
        write(rows)
        print(f"{row.contender}: {row.outcome} ({row.seconds:.0f} s)", flush=True)
    return rows


def of_ours(path, model, machine):
    """Returns our measured rows by contender; none if they are of other shapes or of another machine."""
    if machine is None or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    known = found["machine"] or {}
    if found["model"] != model or any(known.get(key) != machine[key] for key in ("cpu", "device")):
        return {}
    return {row["contender"]: row for row in found["rows"] if row.get("step_s")}


def differ_by(losses, others):
    """The relative difference of two lists of losses at their last common step."""
    last = min(len(losses), len(others)) - 1
    return abs(losses[last] / others[last] - 1)


def document(arguments, rows):
    machines = [row.result["machine"] for row in rows if "machine" in row.result]
    model = {"name": f"GPT-2 {arguments.size}", "batch": arguments.batch, "sequence": arguments.seq}
    machine = machines[-1] if machines else None
    ours = of_ours(arguments.output / f"steps_{arguments.size}.json", model, machine)
    measured = {row.contender: row.result for row in rows if "step_s" in row.result}
    return {
        "benchmark": "rivals",
        "machine": machine,
        "model": model,
        "compute_dtype": "bfloat16",
        "order": "one after another, each in a process of its own",
        "ratios": {
            rival: {name: found["step_s"] / row["step_s"] for name, row in ours.items()}
            for rival, found in measured.items()
        },
        "losses_differ_by": {
            rival: max((differ_by(found["losses"], row["losses"]) for row in ours.values()), default=None)
            for rival, found in measured.items()
        },
        "rows": [row.to_json() for row in rows],
    }


def ratio_lines(found):
    """Returns one line for each rival that stands beside measured steps of ours, and what is not as expected."""
    lines = []
    for rival, ratios in found["ratios"].items():
        said = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in ratios.items())
        lines.append(f"{rival}: its step takes {said}" if said else f"{rival}: no steps of ours to compare with")
    off = {rival: off for rival, off in found["losses_differ_by"].items() if off is not None and off > MOST_OFF}
    return lines + [f"not as expected: losses of {rival} differ by {off:.2%}" for rival, off in off.items()]


def status_of(rows):
    """Returns 0 unless a rival failed; one that does not fit into memory, or had no time, is a result."""
    if any(row.outcome.startswith(("failed", "killed")) for row in rows):
        return 1
    ran = [row for row in rows if not row.outcome.startswith("left out")]
    return steps.TIMED_OUT if ran and all(row.outcome.startswith("timed out") for row in ran) else 0


def parse():
    parser = steps.make_parser(__doc__, TORCH_DEVICES, "rivals_SIZE.json")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch and DeepSpeed")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all contenders")
    parser.add_argument("--only", nargs="+", choices=RIVALS, default=list(RIVALS), help="contenders to run")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    return steps.parse_shape(parser)


def main():
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"rivals_{arguments.size}.json"
    steps.end_with_sigterm()
    rows = run_all(arguments, lambda rows: path.write_text(json.dumps(document(arguments, rows), indent=2) + "\n"))
    found = document(arguments, rows)
    print(f"GPT-2 {arguments.size}, batch {arguments.batch}, sequence {arguments.seq}, bfloat16")
    print("\n".join([*steps.table(rows), *ratio_lines(found)]))
    emit(size=arguments.size, ratios=found["ratios"], losses_differ_by=found["losses_differ_by"])
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
