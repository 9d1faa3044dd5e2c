"""Attacks the library for some time, each attack for an equal share of it and with its own seeds; reports what held.

    python tests/attack/campaign.py [--seconds 600] [--first 0] [--only flip kill] [--sanitize] [--output campaign.json]

`--sanitize` spends a fifth of the time under sanitizers: attacks that train, with a native library built for the thread
sanitizer, then for the address and undefined behaviour sanitizers (tools/sanitized).

An attack that got through is printed with the seed that repeats it: `--only NAME --first SEED --tries 1`. A crash, or a
try of half an hour, ends the campaign with the stacks of all threads; the output then has the tries before it.
"""

import argparse
import collections
import faulthandler
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1]), str(HERE.parents[1] / "support")]

if os.environ.get("JAXFERRY_SANITIZER") == "thread":
    importlib.import_module("sanitized")  # tells the sanitizer what orders the work of XLA

from attack.attacks import ATTACKS, Shared  # noqa: E402 - found by the lines above
from benchmarks.machine import facts  # noqa: E402

MAX_TRY_S = 1800
SANITIZERS = ("thread", "address,undefined")
# They train; and a process under the thread sanitizer cannot fork.
SANITIZED = ("model", "policy", "interrupt")


def run(names, seconds, first=0, tries=None, report=None, after_try=None):
    """Runs a campaign.

    Args:
      names: the attacks.
      seconds: how long.
      first: the seed of each attack's first try; later tries count up from it.
      tries: the most tries of each attack; None for as many as there is time for.
      report: called with a line for each attack that got through.
      after_try: called after each try with the results so far.

    Returns:
      By name, the numbers tried and held, and a list of (seed, error).
    """
    results = {name: {"tried": 0, "held": 0, "lost": []} for name in names}
    used_s, end_s = dict.fromkeys(names, 0.0), time.monotonic() + seconds
    with Shared() as shared:
        while time.monotonic() < end_s:
            left = [name for name in names if tries is None or results[name]["tried"] < tries]
            if not left:
                break
            name, start_s = min(left, key=used_s.__getitem__), time.monotonic()
            _try(name, first + results[name]["tried"], results[name], shared, report)
            used_s[name] += time.monotonic() - start_s
            if after_try is not None:
                after_try(results)
    return results


def _try(name, seed, result, shared, report):
    result["tried"] += 1
    try:
        with shared.one_try():
            ATTACKS[name](random.Random(f"{name} {seed}"), shared)
        result["held"] += 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it got through
        result["lost"].append((seed, f"{type(error).__name__}: {error}"[:300]))
        if report is not None:
            report(f"{name} got through with seed {seed}:\n{traceback.format_exc()}")


def run_sanitized(sanitizer, seconds, first):
    """Runs the attacks that train with the native library built for a sanitizer; returns their document.

    A report of the sanitizer ends the process: it counts as one attack lost.
    """
    with tempfile.TemporaryDirectory(prefix="jaxferry-attack-") as folder:
        output = Path(folder) / "campaign.json"
        command = [str(ROOT / "tools" / "sanitized"), sanitizer, str(HERE), "--seconds", str(seconds)]
        command += ["--first", str(first), "--output", str(output), "--only", *SANITIZED]
        status = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, check=False).returncode
        if not output.exists():
            raise SystemExit(f"error: nothing ran under the sanitizers {sanitizer}: status {status}")
        document = json.loads(output.read_text())
    if status not in (0, 1):
        document["attacks"]["report"] = {"tried": 1, "held": 0, "lost": [(first, f"ended with status {status}")]}
    return {key: document[key] for key in ("seconds", "attacks")}


def print_results(results, title):
    print(f"{title:<20}{'tried':>8}{'held':>8}{'lost':>8}")
    for name, result in results.items():
        print(f"{name:<20}{result['tried']:>8}{result['held']:>8}{len(result['lost']):>8}")
    kinds = collections.Counter(error for result in results.values() for _, error in result["lost"])
    for error, count in kinds.most_common():
        print(f"{count} times: {error}")
    return 1 if kinds else 0


def commit():
    """The commit of the repository, with `-dirty` if files have changed since; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    found = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    return found.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--tries", type=int)
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--sanitize", action="store_true", help="also run under sanitizers, a fifth of the time")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    document = {"commit": commit(), "machine": facts("cpu"), "first": arguments.first, "seconds": 0}
    start_s = time.monotonic()

    def write(**results):
        faulthandler.dump_traceback_later(MAX_TRY_S, exit=True)
        document.update(results, seconds=round(time.monotonic() - start_s))
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(document, indent=2) + "\n")

    faulthandler.enable()
    write(attacks={})
    seconds = arguments.seconds * (0.8 if arguments.sanitize else 1)
    results = run(
        arguments.only, seconds, arguments.first, arguments.tries, print, lambda results: write(attacks=results)
    )
    status = print_results(results, "attack")
    faulthandler.cancel_dump_traceback_later()
    for sanitizer in SANITIZERS if arguments.sanitize else ():
        sanitized = run_sanitized(sanitizer, arguments.seconds / 10, arguments.first)
        document.setdefault("sanitized", {})[sanitizer] = sanitized
        write()
        status |= print_results(sanitized["attacks"], f"under {sanitizer}")
    return status


if __name__ == "__main__":
    sys.exit(main())
