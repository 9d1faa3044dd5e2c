"""Runs stages, each a process with a limit, and keeps what they said, whatever happens to them.

A stage prints results as lines `RESULT {...}`. After each stage the output folder holds

- `check.jsonl`: a line for each result, and one that sums the stage up: outcome, seconds, last lines, device memory;
- `check.tar.gz`: this file, the folder's other JSON and all logs, at most `ARCHIVE_BYTES`.

A stage that runs out of time gets SIGABRT, upon which Python prints the stacks of all its threads (`faulthandler`), and
then SIGKILL. If this process gets SIGTERM, SIGINT or SIGHUP, the stages under way count as cut off, and nothing else is
lost.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ARCHIVE_BYTES = 16 << 20
LAST_LINES = 6
GRACE_S = 4.0
"""Time to print stacks after SIGABRT."""
LOOK_S = 5.0
"""Time between looks at the device's memory; more of them would disturb what is timed."""
LEAST_S = 8.0
"""With less time left, no stage is started."""

PASSED, FAILED, TIMED_OUT, CRASHED = "passed", "failed", "timed out", "crashed"
LEFT_OUT, CUT_OFF = "left out", "cut off"

_MARK = "RESULT "
AGAIN = "_again"
"""Ends the name of another try."""


def emit(**result: Any) -> None:
    """Prints a result of the stage that calls it."""
    print(_MARK + json.dumps(result), flush=True)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A process.

    Attributes:
      name: unique; also the name of its log.
      command: the program and its arguments.
      limit_s: its most seconds.
      needs: stages that must have passed.
      env: further environment.
      again: further environment for another try at the end, if it fails and time is left; None for no other try.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    again: Mapping[str, str] | None = None


class Check:
    """A run of stages.

    Args:
      out: the output folder.
      seconds: the time for all stages.
      env: the environment of all stages.
      only: names of stages, or beginnings of names; others are not run, but for what these need. Empty for all.
      resume: whether stages that have passed in this folder before are not run again.
    """

    def __init__(
        self,
        out: pathlib.Path,
        seconds: float,
        env: Mapping[str, str],
        only: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        self.out, self._env, self._only = out, dict(env), tuple(only)
        self._needed: set[str] = set()
        self._end_s = time.monotonic() + seconds
        self._logs = out / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._journal = out / "check.jsonl"
        if not resume and self._journal.exists():
            # Another check of this folder may have taken a machine's time: it stays, beside its logs' last version.
            self._journal.rename(out / f"check-{self._journal.stat().st_mtime_ns}.jsonl")
        self.outcomes: dict[str, str] = _outcomes_in(self._journal)
        self._known = {name for name, outcome in self.outcomes.items() if outcome == PASSED}
        self._failed: list[Stage] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a signal's handler may come while this thread has it
        self._is_cut_off = False

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._end_s - time.monotonic()

    @property
    def has_passed(self) -> bool:
        """Whether every stage that had time has passed."""
        return PASSED in self.outcomes.values() and set(self.outcomes.values()) <= {PASSED, LEFT_OUT}

    def run(self, *stages: Stage, workers: int = 1) -> None:
        """Runs stages, up to `workers` of them at a time."""
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self._run, stages))

    def run_failed_again(self) -> None:
        """Runs the stages that failed and state how to try again."""
        for stage in self._failed:
            if stage.again is not None:
                name = f"{stage.name}{AGAIN}"
                self.run(dataclasses.replace(stage, name=name, env={**stage.env, **stage.again}, again=None, needs=()))

    def wants(self, name: str) -> bool:
        """Whether a stage of this name is to be run: it is among those chosen, and has not passed before."""
        is_chosen = not self._only or name.startswith(self._only) or name in self._needed
        return name not in self._known and is_chosen

    def prepare(self, stages: Sequence[Stage], later: Iterable[str], workers: int = 1) -> tuple[str, ...]:
        """Runs stages that later ones need, if any of these is to be run; returns the names of the former.

        Args:
          stages: the stages.
          later: names of those that need them, or their beginnings.
          workers: as for `run`.
        """
        names = tuple(stage.name for stage in stages)
        if any(name.startswith(chosen) or chosen.startswith(name) for name in later for chosen in self._only):
            self._needed.update(names)
        self.run(*stages, workers=workers)
        return names

    def leave_out(self, name: str, why: str) -> None:
        """Reports that a stage which is wanted is not run, and why; this is no failure."""
        if self.wants(name):
            self._conclude(Stage(name, (), 0.0), {"outcome": LEFT_OUT, "seconds": 0.0, "last": [why]}, [])

    def cut_off(self) -> None:
        """Ends the stages under way."""
        self._is_cut_off = True
        with self._lock:
            for process in self._running:
                _signal(process, signal.SIGKILL)

    def _run(self, stage: Stage) -> None:
        if not self.wants(stage.name):
            return
        missing = [name for name in stage.needs if self.outcomes.get(name, PASSED) != PASSED]
        limit_s = min(stage.limit_s, self.left_s)
        if missing or limit_s < LEAST_S or self._is_cut_off:
            why = f"needs {', '.join(missing)}" if missing else "no time"
            self.leave_out(stage.name, why)
            return
        start_s = time.monotonic()
        log = self._logs / f"{stage.name}.log"
        with open(log, "wb") as file:
            environment = {**os.environ, **self._env, "PYTHONFAULTHANDLER": "1", **stage.env}
            try:
                process = subprocess.Popen(
                    list(stage.command), stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            except OSError as error:
                self._conclude(stage, {"outcome": FAILED, "seconds": 0.0, "last": [str(error)]}, [])
                return
            outcome, device_bytes = self._wait(process, limit_s)
        results, last = _read(log)
        summary = {
            "outcome": outcome,
            "status": process.returncode,
            "seconds": round(time.monotonic() - start_s, 1),
            "device_bytes": device_bytes,
            "last": [] if outcome == PASSED else last,
        }
        self._conclude(stage, summary, results)

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, int | None]:
        """How the process ends, and the most device memory in use meanwhile."""
        end_s, look_s, most = time.monotonic() + limit_s, time.monotonic(), None
        with self._lock:
            self._running.add(process)
        try:
            while process.poll() is None and time.monotonic() < end_s:
                if time.monotonic() >= look_s:
                    most = max((used for used in (most, device_bytes_in_use()) if used is not None), default=None)
                    look_s = time.monotonic() + LOOK_S
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, max(0.0, end_s - time.monotonic())))
            if process.poll() is None:
                _signal(process, signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                outcome = TIMED_OUT
            elif self._is_cut_off:
                outcome = CUT_OFF
            elif process.returncode == 0:
                outcome = PASSED
            else:
                outcome = CRASHED if process.returncode < 0 else FAILED
            _signal(process, signal.SIGKILL)  # what it has started must not hold the device
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                process.wait(GRACE_S)
            return outcome, most
        finally:
            with self._lock:
                self._running.discard(process)

    def _conclude(self, stage: Stage, summary: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> None:
        with self._lock:
            self.outcomes[stage.name] = summary["outcome"]
            if summary["outcome"] in (FAILED, CRASHED, TIMED_OUT):
                self._failed.append(stage)
            with open(self._journal, "a") as file:
                for result in results:
                    file.write(json.dumps({"stage": stage.name, "result": result}) + "\n")
                file.write(json.dumps({"stage": stage.name, **summary}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            write_archive(self.out)
            last = f": {summary['last'][-1][:160]}" if summary["last"] else ""
            with contextlib.suppress(OSError):  # nobody reads any more
                print(f"{stage.name:28} {summary['outcome']:10} {summary['seconds']:6.1f} s{last}", flush=True)


def device_bytes_in_use() -> int | None:
    """Memory in use on the first GPU; None if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return int(told.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def write_archive(out: pathlib.Path, most_bytes: int = ARCHIVE_BYTES) -> None:
    """Writes `check.tar.gz` anew; logs that are too long lose their middle, JSON stays whole."""
    paths = sorted([*out.glob("*.json*"), *out.glob("steps*/*.json"), *(out / "logs").glob("*.log")])
    kept_bytes = most_bytes
    while True:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w:gz") as archive:
            for path in paths:
                data = _shortened(path, kept_bytes) if path.suffix == ".log" else path.read_bytes()
                entry = tarfile.TarInfo(str(path.relative_to(out)))
                entry.size, entry.mtime = len(data), path.stat().st_mtime
                archive.addfile(entry, io.BytesIO(data))
        if made.tell() <= most_bytes or kept_bytes < 1024:
            break
        kept_bytes //= 2
    whole = out / "check.tar.gz.new"
    whole.write_bytes(made.getvalue())
    os.replace(whole, out / "check.tar.gz")


def _shortened(path: pathlib.Path, most_bytes: int) -> bytes:
    """A file, or its beginning and its end: it may be far larger than memory."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= most_bytes:
            return file.read(size)
        begin = file.read(most_bytes // 4)
        file.seek(size - 3 * (most_bytes // 4))
        return begin + b"\n[...]\n" + file.read(3 * (most_bytes // 4))


def _read(log: pathlib.Path) -> tuple[list[Any], list[str]]:
    """The results in a log, and its last other lines."""
    text = _shortened(log, ARCHIVE_BYTES).decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    results = []
    for line in lines:
        if line.startswith(_MARK):
            with contextlib.suppress(ValueError):  # cut off while it was written
                results.append(json.loads(line[len(_MARK) :]))
    return results, [line[:500] for line in lines if not line.startswith(_MARK)][-LAST_LINES:]


def _outcomes_in(journal: pathlib.Path) -> dict[str, str]:
    found = {}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "outcome" in row:
                found[row["stage"]] = row["outcome"]
    # Tries of stages that had failed say nothing once those have passed.
    passed = {f"{name}{AGAIN}" for name, outcome in found.items() if outcome == PASSED}
    return {name: outcome for name, outcome in found.items() if name not in passed}


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def main_with(check: Check, run: Any, summary: Callable[[], Sequence[str]] = list) -> int:
    """Runs `run(check)`; a signal that ends a process ends its stages. Returns the exit status.

    That is 0 if everything that had time has passed. The lines of `summary()` are printed last.
    """

    def end(number: int, _: Any) -> None:
        check.cut_off()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    run(check)
    with contextlib.suppress(OSError):
        passed = "all that had time passed" if check.has_passed else "NOT all passed"
        print("\n".join([f"{passed} - results in {check.out}", *summary()]), flush=True)
    return 0 if check.has_passed else 1
