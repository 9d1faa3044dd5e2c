"""A bar on terminals; elsewhere lines, a few, about work that takes long."""

import io

import pytest
from rich.console import Console

from jaxferry.costs import Lines, progress, progress_bar, shown
from jaxferry.transport import compile_shared


def on(is_terminal):
    written = io.StringIO()
    with progress_bar("measuring", Console(file=written, force_terminal=is_terminal, width=100)) as report:
        report("forward h_0", 3, 34)
    return written.getvalue()


def test_a_terminal_shows_what_is_under_way_and_how_much_is_done():
    assert all(words in on(True) for words in ("measuring", "forward h_0", "3/34"))


def test_a_pipe_gets_nothing_about_short_work(monkeypatch, capsys):
    monkeypatch.delenv("JAXFERRY_PROGRESS")
    assert on(False) == ""
    assert capsys.readouterr().err == ""


def test_lines_come_after_two_seconds_and_then_every_ten():
    now, written = [100.0], io.StringIO()
    lines = Lines(written, lambda: now[0])
    for seconds in range(30):
        now[0] = 100.0 + seconds
        lines.tell(f"second {seconds}")
    assert written.getvalue().split("\n") == ["second 2", "second 12", "second 22", ""]


@pytest.fixture
def always(monkeypatch):
    """Lines come at once."""
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "NEXT_LINES_S", 0.0)
    monkeypatch.delenv("JAXFERRY_PROGRESS")


def test_a_pipe_gets_lines_about_long_work(always, capsys):
    assert on(False) == ""
    assert capsys.readouterr().err == "measuring: forward h_0 (3 of 34 done)\n"


def test_lines_can_be_turned_off_and_do_not_disturb_a_bar(always, capsys, monkeypatch):
    with shown("measuring"):
        Lines().tell("compiling")
    monkeypatch.setenv("JAXFERRY_PROGRESS", "off")
    Lines().tell("compiling")
    assert capsys.readouterr().err == ""


class Program:
    def __init__(self, name):
        self.name = name

    def compile(self):
        return self.name.upper()


def test_compiling_says_how_many_programs_there_are(always, capsys):
    made = compile_shared(dict.fromkeys("abc"), Program)
    assert made == {"a": "A", "b": "B", "c": "C"}
    assert capsys.readouterr().err.startswith("compiling 3 programs (0 done)\n")
