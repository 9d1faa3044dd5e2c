"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Told what comes next, how many parts are done, and of how many."""


@contextlib.contextmanager
def progress_bar(what: str, console: Console | None = None) -> Iterator[Report]:
    """Shows how far a work of many parts has come; nothing where standard error is no terminal.

    Args:
      what: the work, in a word or two.
      console: where to show it in place of standard error.
    """
    console = console or Console(stderr=True)
    words = TextColumn("{task.description}"), TextColumn("{task.fields[part]}", style="dim")
    columns = words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, part="")

        def report(part: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, part=part)

        yield report
