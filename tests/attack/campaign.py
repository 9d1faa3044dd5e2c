"""Attacks the library for some time, each attack in turn with its own seed, and reports what held.

    python tests/attack/campaign.py [--seconds 600] [--first 0] [--only flip kill] [--output campaign.json]

An attack that got through is printed with the seed that repeats it: `--only NAME --first SEED --tries 1`. A crash, or a
round of half an hour, ends the campaign with the stacks of all threads; the output then has the rounds before it.
"""

import argparse
import collections
import faulthandler
import json
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1]), str(HERE.parents[1] / "support")]

from attack.attacks import ATTACKS, Shared  # noqa: E402 - found by the lines above
from benchmarks.machine import facts  # noqa: E402

MAX_ROUND_S = 1800


def run(names, seconds, first=0, tries=None, report=None, after_round=None):
    """Runs a campaign.

    Args:
      names: the attacks.
      seconds: how long.
      first: the seed of the first round.
      tries: the most rounds; None for as many as there is time for.
      report: called with a line for each attack that got through.
      after_round: called after each round with the results so far.

    Returns:
      By name, the numbers tried and held, and a list of (seed, error).
    """
    results = {name: {"tried": 0, "held": 0, "lost": []} for name in names}
    end_s, seed = time.monotonic() + seconds, first
    with Shared() as shared:
        while time.monotonic() < end_s and (tries is None or seed < first + tries):
            for name in names:
                result = results[name]
                result["tried"] += 1
                try:
                    ATTACKS[name](random.Random(f"{name} {seed}"), shared)
                    result["held"] += 1
                except Exception as error:  # noqa: BLE001 - whatever it is, it got through
                    result["lost"].append((seed, f"{type(error).__name__}: {error}"[:300]))
                    if report is not None:
                        report(f"{name} got through with seed {seed}:\n{traceback.format_exc()}")
                if time.monotonic() >= end_s:
                    break
            seed += 1
            if after_round is not None:
                after_round(results)
    return results


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
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    about = {"commit": commit(), "machine": facts("cpu"), "first": arguments.first}
    start_s = time.monotonic()

    def write(results):
        faulthandler.dump_traceback_later(MAX_ROUND_S, exit=True)
        if arguments.output is not None:
            document = about | {"seconds": round(time.monotonic() - start_s), "attacks": results}
            arguments.output.write_text(json.dumps(document, indent=2) + "\n")

    faulthandler.enable()
    write({})
    results = run(arguments.only, arguments.seconds, arguments.first, arguments.tries, print, write)
    print(f"{'attack':<12}{'tried':>8}{'held':>8}{'lost':>8}")
    for name, result in results.items():
        print(f"{name:<12}{result['tried']:>8}{result['held']:>8}{len(result['lost']):>8}")
    kinds = collections.Counter(error for result in results.values() for _, error in result["lost"])
    for error, count in kinds.most_common():
        print(f"{count} times: {error}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
