"""Plants faults in a copy of the package, one at a time, and shows which of them the tests notice.

`python tests/mutations.py` runs all of `mutations.toml`; `--room`, `--name` and `--list` choose. Each choice of tests
runs without a fault first, and must pass. The status is 1 if a fault survives, or fits its file no longer.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/mutations.toml"
CAUGHT, SURVIVED, STALE, UNFIT = "caught", "survived", "fits its file no longer", "tests fail without it"
_OPTIONS = ("-q", "-x", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no")
_NO_TESTS = (4, 5)
"""The statuses of pytest for wrong arguments and for no tests."""

_WITHOUT_EDITABLE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__ + repr(each)]
"""
"""Makes the copy come before an editable installation of the checkout, in all processes that tests start."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
      room: the folder in `jaxferry/`.
      name: what is broken.
      file: the file within the room.
      tests: pytest's arguments that choose the tests which should notice, within `tests/`.
      old: the source that is replaced; it occurs once in the file.
      new: its replacement.
    """

    room: str
    name: str
    file: str
    tests: str
    old: str
    new: str

    @property
    def path(self) -> pathlib.Path:
        """The file, relative to the root."""
        return pathlib.Path("jaxferry", self.room, self.file)

    @property
    def arguments(self) -> list[str]:
        """Pytest's arguments, with paths relative to the root."""
        return [
            f"tests/{each}" if each.partition("::")[0].endswith(".py") else each for each in shlex.split(self.tests)
        ]

    def mutated(self, source: str) -> str | None:
        """Returns the file's content with the fault; None if the old source does not occur exactly once."""
        return source.replace(self.old, self.new) if source.count(self.old) == 1 else None


def read_mutations() -> list[Mutation]:
    """Returns the list."""
    rooms = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutation(room, name, *given) for room, named in rooms.items() for name, given in named.items()]


class Copy:
    """A copy of the checkout in which faults are planted; the checkout stays as it is.

    Args:
      root: an empty folder.
      limit_s: the seconds that a run of tests may take.
    """

    def __init__(self, root: pathlib.Path, limit_s: float) -> None:
        self._root, self._limit_s = root / "checkout", limit_s
        left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
        shutil.copytree(ROOT, self._root, ignore=left_out, symlinks=True)
        (self._root / "sitecustomize.py").write_text(_WITHOUT_EDITABLE, encoding="utf-8")
        (root / "cache").mkdir()
        path = os.pathsep.join(filter(None, [str(self._root), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, "PYTHONPATH": path, "JAXFERRY_TESTS_CACHE": str(root / "cache")}
        self._passes: dict[str, bool] = {}

    def try_out(self, mutation: Mutation) -> tuple[str, float]:
        """Returns what the tests make of a fault, and the seconds that they take with it."""
        file = self._root / mutation.path
        source = file.read_text(encoding="utf-8")
        made = mutation.mutated(source)
        if made is None:
            return STALE, 0.0
        if mutation.tests not in self._passes:
            self._passes[mutation.tests] = self._run(mutation.arguments)[0] == 0
        if not self._passes[mutation.tests]:
            return UNFIT, 0.0
        _write(file, made)
        try:
            status, seconds = self._run(mutation.arguments)
        finally:
            _write(file, source)
        return (SURVIVED if status in (0, *_NO_TESTS) else CAUGHT), seconds

    def _run(self, arguments: Sequence[str]) -> tuple[int | None, float]:
        """Returns the status of pytest, None if it takes too long, and its seconds."""
        begin_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *arguments]
        given: dict[str, Any] = {"cwd": self._root, "env": self._environment, "start_new_session": True}
        nothing = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=nothing, stderr=nothing, **given) as process:
            try:
                status: int | None = process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return status, time.monotonic() - begin_s


def _write(file: pathlib.Path, source: str) -> None:
    """Writes a module; Python would take a compiled one of the same size and second for it."""
    file.write_text(source, encoding="utf-8")
    pathlib.Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the mutations that the command line chooses; returns the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the mutations and their tests, and run nothing")
    parser.add_argument("--room", action="append", help="those of a room; may be given several times")
    parser.add_argument("--name", action="append", help="those whose names contain this; may be given several times")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="S", help="seconds of one run of tests [%(default)g]"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the outcomes, beside earlier ones there"
    )
    options = parser.parse_args(given)
    chosen = [
        each
        for each in read_mutations()
        if (not options.room or each.room in options.room)
        and (not options.name or any(name in each.name for name in options.name))
    ]
    if options.list:
        for each in chosen:
            print(f"{each.room:10}  {each.name:78}  {each.tests}")
        return 0
    outcomes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="jaxferry-mutations-") as folder:
        copy = Copy(pathlib.Path(folder), options.limit)
        for each in chosen:
            outcome, seconds = copy.try_out(each)
            outcomes.append(outcome)
            print(f"{each.room:10}  {outcome:24}  {seconds:6.1f} s  {each.name}", flush=True)
            if options.json is not None:
                _note(options.json, each, outcome, seconds)
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)))
    return int(any(outcome != CAUGHT for outcome in outcomes))


def _note(file: pathlib.Path, mutation: Mutation, outcome: str, seconds: float) -> None:
    """Adds an outcome to a file; those of mutations that are no longer listed go."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known.setdefault(mutation.room, {})[mutation.name] = {"outcome": outcome, "seconds": round(seconds, 1)}
    document: dict[str, dict[str, Any]] = {}
    for each in read_mutations():
        if (found := known.get(each.room, {}).get(each.name)) is not None:
            document.setdefault(each.room, {})[each.name] = found
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
