"""Summarises a run of check.sh. Usage: summary.py OUTPUT_DIR; reads lines STAGE<TAB>STATUS<TAB>SECONDS from stdin.

A STATUS may be "left out". Writes summary.json and prints a table. The exit status is 0 if every stage passed;
unexpected measurements are listed but fail nothing.
"""

import json
import pathlib
import sys

# Exit statuses of the shell's `timeout`.
TIMED_OUT = (124, 137)
# The status of a stage that check.sh had no time to start; it is not a failure.
LEFT_OUT = "left out"


def read_stages(lines):
    """Returns each stage's name, outcome and seconds, in order of execution."""
    stages = []
    for line in lines:
        name, status, seconds = line.rstrip("\n").split("\t")
        stages.append({"stage": name, "outcome": _outcome(status), "seconds": float(seconds)})
    return stages


def _outcome(status):
    if status == LEFT_OUT:
        return LEFT_OUT
    if int(status) in TIMED_OUT:
        return "timed out"
    return "passed" if status == "0" else f"failed ({status})"


def steps_lines(found):
    """Returns one line per contender of steps.py: its step time and memory, or why there are none."""
    lines = []
    for row in found.get("rows", ()):
        line = f"  {row['contender']:18} {row['outcome']}"
        if "step_s" in row:
            peak = row["peak_device_bytes"]
            line = f"  {row['contender']:18} {row['step_s'] * 1e3:9.1f} ms" + (
                "" if peak is None else f" {peak / 2**30:8.2f} GiB"
            )
        lines.append(line)
    return lines


def surprises(found):
    """Returns one line for each result of steps.py outside its expectations."""
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
    return lines


def collect(folder, stages):
    """Returns the stages' JSON results by name; an incomplete file becomes an error entry."""
    found = {}
    for name in stages:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        try:
            found[name] = json.loads(path.read_text())
        except ValueError:
            found[name] = {"error": "not complete"}
    return found


def main():
    folder = pathlib.Path(sys.argv[1])
    stages = read_stages(sys.stdin)
    outcomes = {stage["outcome"] for stage in stages}
    passed = "passed" in outcomes and outcomes <= {"passed", LEFT_OUT}
    results = collect(folder, [each["stage"] for each in stages])
    unexpected = {name: lines for name, found in results.items() if (lines := surprises(found))}
    summary = {"passed": passed, "unexpected": unexpected, "stages": stages, "results": results}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for stage in stages:
        print(f"{stage['stage']:12} {stage['outcome']:14} {stage['seconds']:6.0f} s")
        for line in steps_lines(summary["results"].get(stage["stage"], {})):
            print(line)
    for name, lines in unexpected.items():
        print(f"not as expected in {name}:", *lines, sep="\n")
    said = "all passed" if outcomes == {"passed"} else "all that had time passed" if passed else "NOT all passed"
    print(said, f"- results in {folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
