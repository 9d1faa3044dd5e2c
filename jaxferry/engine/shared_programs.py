"""Compiled programs that training steps share.

Steps of one model that differ in plan, policy or budget run mostly equal programs. Programs with equal content are
compiled once, whichever step asks first. A program is freed with the last holder: a step, or what steps of one loss
function share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PROGRAMS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_FUNCTIONS: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()


def shared_function(content: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the jitted function of this content: one that somebody holds, or a new one.

    Args:
      content: everything that the function depends on.
      make: makes it; returns a function of `jax.jit`.
    """
    function = _FUNCTIONS.get(content)
    if function is None:
        function = _FUNCTIONS[content] = make()
    return function


def compile_shared(wanted: Mapping[Any, Hashable | None], lowered: Callable[[Any], Any]) -> dict[Any, Any]:
    """Returns programs by key; compiles those that no step holds, in parallel.

    Args:
      wanted: by key, everything that the program depends on; None for a program that is not shared.
      lowered: returns a key's program before XLA compiles it.
    """
    made = {key: held for key, content in wanted.items() if content and (held := _PROGRAMS.get(content)) is not None}
    missing = {key: lowered(key) for key in wanted if key not in made}
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program.compile(), missing.values())
        made |= zip(missing, compiled, strict=True)
    for key in missing:
        if (content := wanted[key]) is not None:
            _PROGRAMS[content] = made[key]
    return made
