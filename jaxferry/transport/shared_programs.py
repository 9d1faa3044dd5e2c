"""Compiled programs that training steps share.

Steps of one model that differ in plan, policy or budget run mostly equal programs. Programs with equal content are
compiled once, whichever step asks first. A program is freed with the last holder: a step, or what steps of one loss
function share.
"""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxferry.costs import Lines
from jaxferry.native import num_cpus
from jaxferry.settings import traced_settings, with_own_settings

_TOLD_EVERY_S = 1.0

_PROGRAMS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_FUNCTIONS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()


def shared_function(content: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the jitted function of this content: one that somebody holds, or a new one."""
    key = (content, traced_settings())
    function = _FUNCTIONS.get(key)
    if function is None:
        function = _FUNCTIONS[key] = make()
    return function


def compile_shared(wanted: Mapping[Any, Hashable | None], lowered: Callable[[Any], Any]) -> dict[Any, Any]:
    """Returns programs by key; compiles those that no step holds, in parallel.

    Args:
      wanted: by key, everything that the program depends on; None for a program that is not shared.
      lowered: returns a key's program before XLA compiles it.
    """
    # What is traced elsewhere, such as an optimizer's update, depends on JAX's settings too.
    settings = traced_settings()
    wanted = {key: content and (content, settings) for key, content in wanted.items()}
    made = {key: held for key, content in wanted.items() if content and (held := _PROGRAMS.get(content)) is not None}
    missing = [key for key in wanted if key not in made]
    what, lines = f"compiling {len(missing)} programs", Lines()
    compiled: list[concurrent.futures.Future[Any]] = []
    # XLA compiles one program while the next ones are traced and lowered.
    with ThreadPoolExecutor(num_cpus()) as pool:
        for key in missing:
            lines.tell(f"{what} ({sum(each.done() for each in compiled)} done)")
            compiled.append(pool.submit(with_own_settings(lowered(key).compile)))
        while concurrent.futures.wait(compiled, timeout=_TOLD_EVERY_S).not_done:
            lines.tell(f"{what} ({sum(each.done() for each in compiled)} done)")
    made |= {key: each.result() for key, each in zip(missing, compiled, strict=True)}
    for key in missing:
        if (content := wanted[key]) is not None:
            _PROGRAMS[content] = made[key]
    return made
