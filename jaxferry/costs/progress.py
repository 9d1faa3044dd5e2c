"""The progress of long work on standard error: a bar on terminals, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

VARIABLE = "JAXFERRY_PROGRESS"
"""The environment variable that is `off` for no lines of progress."""

FIRST_LINE_S, NEXT_LINES_S = 2.0, 10.0
"""Seconds from the start of the work to its first line, and from one line to the next."""

Report = Callable[[str, int, int], None]
"""Called with the next part's name, the number of finished parts, and the total."""

_bars: list[str] = []
"""Work whose bar is on the terminal, outermost first."""


class Lines:
    """Prints a line about work that takes long, at most every few seconds; nothing about work that is short.

    Without a `file`, it prints on standard error unless `JAXFERRY_PROGRESS` is `off` or a terminal shows a bar.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._next_s = clock() + FIRST_LINE_S

    def tell(self, line: str) -> None:
        """Prints the line if it is time for one."""
        is_off = self._file is None and (os.environ.get(VARIABLE) == "off" or bool(_bars))
        if is_off or self._clock() < self._next_s:
            return
        print(line, file=self._file or sys.stderr, flush=True)
        self._next_s = self._clock() + NEXT_LINES_S


@contextlib.contextmanager
def progress_bar(what: str, console: Console | None = None) -> Iterator[Report]:
    """Shows the progress of work with many parts, on standard error: a bar on a terminal, elsewhere lines."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        lines = Lines()
        yield lambda part, done, total: lines.tell(f"{what}: {part} ({done} of {total} done)")
        return
    words = TextColumn("{task.description}"), TextColumn("{task.fields[part]}", style="dim")
    columns = words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, part="")

        def report(part: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, part=part)

        with shown(what):
            yield report


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Keeps lines off a terminal while it shows the progress of other work."""
    _bars.append(what)
    try:
        yield
    finally:
        _bars.remove(what)
