"""The progress bar appears only on terminals."""

import io

from rich.console import Console

from jaxferry.profiling.progress import progress_bar


def shown(is_terminal):
    written = io.StringIO()
    with progress_bar("measuring", Console(file=written, force_terminal=is_terminal, width=100)) as report:
        report("forward h_0", 3, 34)
    return written.getvalue()


def test_a_terminal_shows_what_is_under_way_and_how_much_is_done():
    assert all(words in shown(True) for words in ("measuring", "forward h_0", "3/34"))


def test_anything_else_gets_nothing():
    assert shown(False) == ""
