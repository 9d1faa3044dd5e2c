"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Called with the next part's name, the number of finished parts, and the total."""


@contextlib.contextmanager
def progress_bar(what: str, console: Console | None = None) -> Iterator[Report]:
    """Shows the progress of work with many parts; shows nothing if the console is not a terminal.

    Args:
      what: the work, in a word or two.
      console: where to show it; default: standard error.
    """
    console = console or Console(stderr=True)
    words = TextColumn("{task.description}"), TextColumn("{task.fields[part]}", style="dim")
    columns = words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, part="")

        def report(part: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, part=part)

        yield report
