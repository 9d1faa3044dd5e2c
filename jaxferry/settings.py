"""JAX's settings around the engine's own programs, and the user's around the user's own functions.

    the caller's thread   own_settings: a step, an evaluation, a save ...
                            users_settings: the trace of the loss function
    the engine's threads  ThreadPool: for their whole life

The engine's programs rely on what a setting of JAX can take away: `jax_debug_nans` drops donation, a transfer guard
forbids copies, strict promotion refuses sums of two dtypes. A global setting reaches every thread, a context manager
only the thread that enters it. Settings of numerics, such as `jax_default_matmul_precision`, stay in force everywhere:
the engine's own programs state the dtypes and precisions that they need.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.sharding import Mesh

from jaxferry.errors import InputError

Made = TypeVar("Made")

_WANTED: dict[str, Any] = {
    "debug_nans": False,
    "debug_infs": False,
    "disable_jit": False,
    "no_tracing": False,
    "check_tracer_leaks": False,
    "debug_key_reuse": False,
    "legacy_prng_key": "allow",
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "thread_guard": False,
}
"""The engine's value of each setting that it does not leave to the user; each is a context manager of `jax`."""

_OWN = {name: value for name, value in _WANTED.items() if hasattr(jax, name)}

_NOT_OF_USERS = (os.path.dirname(__file__) + os.sep, contextlib.__file__)
"""Files whose functions lie between the user's call and a warning."""

_GUARDS = tuple(f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host"))

_OF_USERS_FUNCTIONS = tuple(name for name in _OWN if name not in ("disable_jit", "no_tracing", "thread_guard"))
"""Those that hold again while a function of the user's is traced."""

_PLATFORMS = ("cpu", "gpu", "tpu")
"""Those that JAX takes as a default device by name."""

_PLANNED_CUDNN = 91000
"""The version 9.10, which has all that JAX asks for."""

_OF_TRACES = (
    *(f"jax_{name}" for name in _OF_USERS_FUNCTIONS),
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)
"""The settings on which the trace of a function depends, or what a step does with its results."""


@dataclasses.dataclass(frozen=True)
class _Users:
    """The settings of the user's that the engine has left.

    Attributes:
      values: those that differ from `_OWN`, by name.
      mesh: the mesh of `jax.set_mesh`, or None.
    """

    values: dict[str, Any]
    mesh: Mesh | None


_LEFT: contextvars.ContextVar[_Users | None] = contextvars.ContextVar("left settings", default=None)
_KEPT = threading.local()
_warned: set[str] = set()


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Runs the body under the settings that the engine's programs need, outside any mesh of the user's.

    Raises:
      InputError: if `jax_no_execution` is set, which forbids every program.

    Warns:
      UserWarning: once, if `jax_disable_jit` is set: it has no effect here.
    """
    if _LEFT.get() is not None:
        yield
        return
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    left = _Users(_values_that_differ(), jax.sharding.get_mesh() if has_mesh else None)
    token = _LEFT.set(left)
    try:
        guards = any(getattr(jax.config, name, None) not in (None, "allow") for name in _GUARDS)
        if not left.values and left.mesh is None and not guards:
            yield
            return
        _check(left.values)
        with contextlib.ExitStack() as stack:
            _enter(stack, {name: _OWN[name] for name in left.values})
            if left.mesh is not None:
                # The engine's arrays and programs name their own.
                stack.enter_context(outside_mesh())
            yield
    finally:
        _LEFT.reset(token)


@contextlib.contextmanager
def users_settings() -> Iterator[None]:
    """Runs the body, a trace of a function of the user's, under the settings that `own_settings` has left.

    A mesh is entered again, so that models may name its axes. Explicit axes become a part of the types of a model's
    values: `partition.users_traces` takes them out of the trace.
    """
    left = _LEFT.get()
    if left is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in _OF_USERS_FUNCTIONS:
            if name in left.values:
                stack.enter_context(getattr(jax, name)(left.values[name]))
        if left.mesh is not None:
            stack.enter_context(jax.set_mesh(left.mesh))
        token = _LEFT.set(None)
        try:
            yield
        finally:
            _LEFT.reset(token)


@contextlib.contextmanager
def for_platform(platform: str) -> Iterator[None]:
    """Runs the body, traces of functions of the user's, with a platform's first device as JAX's default.

    Models may choose what they compute by the default device, such as the implementation of attention.
    """
    with jax.default_device(platform) if platform in _PLATFORMS else contextlib.nullcontext():
        yield


def for_planned_gpu(make: Callable[[], Made]) -> Made:
    """Calls a function that traces a function of the user's for a GPU, which this machine may lack, as may cuDNN.

    A user's function that computes anything while it is traced needs the device: it is then traced for this machine's.
    """
    installed = cudnn_attention.check_cudnn_version

    def version() -> int:
        try:
            return int(installed())
        except RuntimeError:
            return _PLANNED_CUDNN

    cudnn_attention.check_cudnn_version = version
    try:
        with for_platform("gpu"):
            return make()
    except RuntimeError:
        return make()
    finally:
        cudnn_attention.check_cudnn_version = installed


def outside_mesh() -> contextlib.AbstractContextManager[Any]:
    """Runs the body outside any mesh of `jax.set_mesh`."""
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def traced_settings() -> tuple[Any, ...]:
    """The user's settings on which the trace of a function depends, to tell traces apart."""
    left = _LEFT.get()
    own = {} if left is None else {f"jax_{name}": value for name, value in left.values.items()}
    return tuple(own[name] if name in own else getattr(jax.config, name, None) for name in _OF_TRACES)


def looks_for_nans() -> bool:
    """Whether the user has asked JAX to raise at the first NaN or infinity."""
    left = _LEFT.get()
    return left is not None and ("debug_nans" in left.values or "debug_infs" in left.values)


def check_may_trace(what: str) -> None:
    """Raises InputError if the user's `jax_no_tracing` forbids tracing a function."""
    left = _LEFT.get()
    if left is not None and "no_tracing" in left.values:
        raise InputError(f"jax_no_tracing is set, but {what} has to be traced: call prepare() before it is set")


class ThreadPool(ThreadPoolExecutor):
    """Threads that run the engine's programs, under the engine's settings for their whole life."""

    def __init__(self, max_workers: int | None = None, name: str = "jaxferry") -> None:
        super().__init__(max_workers, thread_name_prefix=name, initializer=_enter_for_good)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As of `ThreadPoolExecutor`; the function runs with 64-bit numbers if its caller has them."""
        config: Any = jax.config
        wide = config.jax_enable_x64

        def run() -> Any:
            if config.jax_enable_x64 == wide:
                return function(*args, **kwargs)
            with jax.enable_x64(wide):
                return function(*args, **kwargs)

        return super().submit(run)


def with_own_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run under the engine's settings, as the body of a thread."""

    def run(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            _enter(stack, _OWN)
            return function(*args)

    return run


def _enter_for_good() -> None:
    stack = contextlib.ExitStack()
    _enter(stack, _OWN)
    # A context manager that is freed leaves its setting: this one is freed by its own thread, when that ends.
    _KEPT.stack = stack


def _enter(stack: contextlib.ExitStack, values: dict[str, Any]) -> None:
    for name, value in values.items():
        stack.enter_context(getattr(jax, name)(value))
    stack.enter_context(jax.transfer_guard("allow"))


def _values_that_differ() -> dict[str, Any]:
    config, found = jax.config, {}
    for name, own in _OWN.items():
        value = getattr(config, f"jax_{name}", own)
        if value != own:
            found[name] = value
    if getattr(config, "jax_no_execution", False):
        raise InputError("jax_no_execution is set, which forbids every program: unset it around this call")
    return found


def _check(values: dict[str, Any]) -> None:
    if "disable_jit" in values and "disable_jit" not in _warned:
        _warned.add("disable_jit")
        warnings.warn(
            "jax_disable_jit has no effect on JaxFerry, whose steps are compiled programs: to run the loss function "
            "operation by operation, call jax.value_and_grad(loss_fn) itself on small parameters",
            stacklevel=users_stacklevel(),
        )


def users_stacklevel() -> int:
    """Returns the level of the user's call, for a warning of the calling function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_USERS):
        frame, level = frame.f_back, level + 1
    return level
