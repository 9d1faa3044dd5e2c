"""Kills a process of a training ten times at random moments: what is lost, and how long until the others end.

    python benchmarks/process_kills.py [--seed 0] [--kills 10]

Two processes train a small model over loopback and save a checkpoint after each step, waiting for every other one. A
random one gets SIGKILL at a random moment after both have joined, mostly after their first step: while it prepares,
restores, steps, or saves. The other one must end by itself; then both start again from the last checkpoint. Every
process logs each loss, and each save that it has waited for. Writes what happened to
`benchmarks/results/process_kills.json`.

Expected: no save that was waited for is lost, each start goes on from the newest checkpoint, and the loss of every
step, also of those done again, has the bits of an unbroken training.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
from rich.console import Console
from rich.table import Table

import process_runs

NUM_PROCESSES, MOST_S = 2, 4.0
SHARE_BEFORE_STEPS = 0.3
"""The share of kills within so many seconds of both having joined; the others come as soon after a step of both."""
HALF_OF_A_STEP_S = 0.02


class Member(process_runs.Member):
    """One of the processes."""

    def batch_of(self, number):
        """The batch of a step, and its key."""
        import jax
        import numpy as np

        drawn = np.random.default_rng(number)
        words = {name: drawn.integers(0, self.model.WORDS, (process_runs.BATCH, 3)) for name in ("x", "y")}
        return words, jax.random.key(number)

    def goes_on(self):
        """Trains from the last checkpoint to the step that the file `until` says."""
        import jaxferry

        (self.folder / f"joined-{self.number}").touch()
        step, folder = self.step(clip_norm=0.5), self.folder / "series"
        known = jaxferry.list_checkpoints(folder) if folder.exists() else []
        state = step.restore(folder, self.model.params()) if known else step.init(self.model.params())
        until = int((self.folder / "until").read_text())
        with (self.folder / f"log-{self.number}").open("a") as log:
            print(json.dumps({"first": state.step}), file=log, flush=True)
            while state.step < until:
                batch, key = self.batch_of(state.step)
                state, metrics = step(state, self.own(batch), key)
                print(json.dumps({"step": state.step, "loss": float(metrics["loss"]).hex()}), file=log, flush=True)
                (self.folder / f"stepped-{self.number}").touch()
                time.sleep(HALF_OF_A_STEP_S)
                waits = state.step % 2 == 0
                step.save(state, folder, keep_last=2, wait=waits)
                if waits:
                    print(json.dumps({"saved": state.step}), file=log, flush=True)
        step.wait_for_saves()
        return {"first": known[-1].step if known else 0, "step": state.step}


def logs(folder):
    """What the processes have logged."""
    paths = sorted(folder.glob("log-*"))
    return [[json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] for path in paths]


def last(entries, what):
    """The last number that was logged under this name."""
    return max((entry[what] for own in entries for entry in own if what in entry), default=0)


def killed(folder, drawn):
    """Starts the processes and kills one; returns what happened."""
    import jaxferry

    found, before = {}, [len(own) for own in logs(folder)] or [0] * NUM_PROCESSES
    for path in [*folder.glob("joined-*"), *folder.glob("stepped-*")]:
        path.unlink()

    def kill(running):
        found["since"] = "joined" if drawn.random() < SHARE_BEFORE_STEPS else "stepped"
        found["after_s"] = round(drawn.uniform(0, MOST_S), 2)
        found["process"] = drawn.randrange(NUM_PROCESSES)
        while len(list(folder.glob(f"{found['since']}-*"))) < NUM_PROCESSES:
            time.sleep(0.01)
        time.sleep(found["after_s"])
        running[found["process"]].send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        for process in running:
            process.wait(process_runs.SURVIVORS_END_IN_S)
        found["others_end_after_s"] = round(time.monotonic() - start_s, 1)
        found["statuses"] = [process.returncode for process in running]

    ended = process_runs.start("goes_on", NUM_PROCESSES, 1, folder, meanwhile=kill, script=__file__)
    assert all(isinstance(own, str) for own in ended), "a process has ended as if nothing had happened"
    entries = logs(folder)
    new = [own[start:] for own, start in zip(entries, before, strict=False)]
    series = folder / "series"
    known = jaxferry.list_checkpoints(series) if series.exists() else []
    found |= {
        "first": max((entry["first"] for own in new for entry in own if "first" in entry), default=None),
        "last_step": last(new, "step") or None,
        "last_save_waited_for": last(entries, "saved"),
        "newest_checkpoint": known[-1].step if known else 0,
    }
    return found


def check(kills, entries, unbroken):
    """Returns the number of losses that have the bits of the unbroken training; raises if anything is lost."""
    for kill, following in zip(kills, [*kills[1:], None], strict=True):
        assert kill["newest_checkpoint"] >= kill["last_save_waited_for"], kill
        if following is not None and following["first"] is not None:
            assert following["first"] == kill["newest_checkpoint"], (kill, following)
    expected = {entry["step"]: entry["loss"] for entry in unbroken[0] if "step" in entry}
    losses = [(entry["step"], entry["loss"]) for own in entries for entry in own if "step" in entry]
    assert {step for step, _ in losses} == set(expected)
    assert all(expected[step] == loss for step, loss in losses), "a loss differs"
    return len(losses)


def trained(folder, until):
    """Trains to a step without a kill."""
    (folder / "until").write_text(str(until))
    ended = process_runs.start("goes_on", NUM_PROCESSES, 1, folder, script=__file__)
    failed = [found for found in ended if isinstance(found, str)]
    assert not failed, failed[0]
    return ended[0]


def main():
    import measure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    drawn, kills = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as broken, tempfile.TemporaryDirectory() as whole:
        folder = Path(broken)
        (folder / "until").write_text("100000")
        for _ in range(given.kills):
            kills.append(killed(folder, drawn))
            print(kills[-1], flush=True)
        until = last(logs(folder), "step") + 10
        ended = trained(folder, until)
        assert ended["first"] == kills[-1]["newest_checkpoint"]
        trained(Path(whole), until)
        num_losses = check(kills, logs(folder), logs(Path(whole)))
    table = Table(
        "after",
        "since",
        "process",
        "from step",
        "to step",
        "last save waited for",
        "checkpoint",
        "the other ended after",
    )
    for kill in kills:
        steps = [str(kill[name]) for name in ("first", "last_step", "last_save_waited_for", "newest_checkpoint")]
        table.add_row(
            f"{kill['after_s']} s", kill["since"], str(kill["process"]), *steps, f"{kill['others_end_after_s']} s"
        )
    Console().print(table)
    print(f"{until} steps; {num_losses} losses, all with the bits of an unbroken training; no save lost")
    result = {"seed": given.seed, "steps": until, "losses_with_equal_bits": num_losses, "saves_lost": 0}
    result |= {"heartbeat_timeout_s": process_runs.HEARTBEAT_TIMEOUT_S, "kills": kills}
    measure.write("process_kills", {"machine": measure.machine(), **result})


if __name__ == "__main__":
    process_runs.main(Member) if len(sys.argv) == 7 else main()
