"""Compiled programs that training steps share.

Steps of one model that differ in plan, policy or budget run mostly equal programs. Programs with equal content are
compiled once, whichever step asks first. A program is freed with the last holder: a step, or what steps of one loss
function share. What a first step needs later than the rest is compiled meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxferry.costs import Lines
from jaxferry.native import num_cpus
from jaxferry.settings import ThreadPool, traced_settings

_TOLD_EVERY_S = 1.0

_PROGRAMS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_COMPILING: weakref.WeakValueDictionary[Hashable, Compiling] = weakref.WeakValueDictionary()
_FUNCTIONS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()


def shared_function(content: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the jitted function of this content: one that somebody holds, or a new one."""
    key = (content, traced_settings())
    function = _FUNCTIONS.get(key)
    if function is None:
        function = _FUNCTIONS[key] = make()
    return function


class Compiling:
    """A program that a thread compiles, or that some step holds; it is shared by its `content` unless that is None."""

    def __init__(self, content: Hashable | None, program: Future[Any]) -> None:
        self._content, self._program = content, program

    @property
    def is_done(self) -> bool:
        """Whether it is compiled, or has failed."""
        return self._program.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has failed."""
        return self.is_done and self._program.exception() is not None

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the program, and returns it; raises `TimeoutError`, or what XLA has raised."""
        program = self._program.result(timeout_s)
        if self._content is not None:
            _PROGRAMS[self._content] = program
        return program


def begin_shared(wanted: Mapping[Any, Hashable | None], lowered: Callable[[Any], Any]) -> dict[Any, Compiling]:
    """Lowers programs, and lets threads compile those that no step holds; arguments as for `compile_shared`."""
    # What is traced elsewhere, such as an optimizer's update, depends on JAX's settings too.
    settings, begun, lines = traced_settings(), dict[Any, Compiling](), Lines()
    for key, own in wanted.items():
        content = own and (own, settings)
        if (found := _found(content)) is None:
            lines.tell(f"compiling {len(wanted)} programs ({_num_done(begun)} done)")
            # XLA compiles one program while the next ones are traced and lowered.
            found = Compiling(content, in_background(lowered(key).compile))
            if content is not None:
                _COMPILING[content] = found
        begun[key] = found
    return begun


def finished(begun: Mapping[Any, Compiling]) -> dict[Any, Any]:
    """Waits for programs, and returns them by key."""
    lines = Lines()
    for compiling in begun.values():
        while not compiling.is_done:
            with contextlib.suppress(TimeoutError):
                compiling.result(_TOLD_EVERY_S)
            lines.tell(f"compiling {len(begun)} programs ({_num_done(begun)} done)")
    return {key: compiling.result() for key, compiling in begun.items()}


def compile_shared(wanted: Mapping[Any, Hashable | None], lowered: Callable[[Any], Any]) -> dict[Any, Any]:
    """Returns programs by key; compiles those that no step holds, in parallel.

    `wanted` has everything that a program depends on, None for one that is not shared. `lowered` returns a key's
    program before XLA compiles it.
    """
    return finished(begin_shared(wanted, lowered))


def _found(content: Hashable | None) -> Compiling | None:
    """The program of this content that a step holds, or that a thread compiles for one."""
    if content is None:
        return None
    if (known := _PROGRAMS.get(content)) is not None:
        program: Future[Any] = Future()
        program.set_result(known)
        return Compiling(content, program)
    compiling = _COMPILING.get(content)
    return None if compiling is None or compiling.has_failed else compiling


def in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Lets one of the threads that compile call a function: what it traces there, JAX finds again in any thread."""
    return _threads(os.getpid()).submit(function, *args)


def _num_done(begun: Mapping[Any, Compiling]) -> int:
    return sum(each.is_done for each in begun.values())


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPool:
    """The threads of a process that compile: a forked one has none of its parent's."""
    return ThreadPool(num_cpus(), "jaxferry compile")
