"""Sums up what check.sh ran. Usage: summary.py OUTPUT_DIR; its standard input has lines STAGE<TAB>STATUS<TAB>SECONDS.

Writes summary.json and prints a table. Exit status 0 if every stage passed.
"""

import json
import pathlib
import sys

# What the shell's `timeout` ends with.
TIMED_OUT = (124, 137)


def read_stages(lines):
    """Each stage's name, outcome and seconds, in the order in which they ran."""
    stages = []
    for line in lines:
        name, status, seconds = line.rstrip("\n").split("\t")
        outcome = "passed" if status == "0" else "timed out" if int(status) in TIMED_OUT else f"failed ({status})"
        stages.append({"stage": name, "outcome": outcome, "seconds": float(seconds)})
    return stages


def collect(folder, stages):
    """The JSON files that stages left, by their names; one that was cut short says so."""
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
    passed = bool(stages) and all(stage["outcome"] == "passed" for stage in stages)
    summary = {"passed": passed, "stages": stages, "results": collect(folder, [each["stage"] for each in stages])}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for stage in stages:
        print(f"{stage['stage']:12} {stage['outcome']:14} {stage['seconds']:6.0f} s")
    print("all passed" if passed else "NOT all passed", f"- results in {folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
