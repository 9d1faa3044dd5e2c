"""Training steps that nobody holds any more leave nothing behind: no arrays, programs or other objects."""

import ctypes
import gc
import operator
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dropped_steps
import jaxferry
import jaxferry.optimizer
from models import chain
from planned import taken
from python_runs import run_python
from watched import live_arrays

PARAMS = {name: {"w": np.full((4, 4), 0.1, np.float32)} for name in "ab"}
MAX_OBJECTS = 250
"""Objects that caches of Python and JAX may gain in all. A training step has thousands, its traces some hundred."""


loss_fn = chain()


def train(optimizer, **options):
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, jnp.ones((2, 4)))
    step.evaluate(state, jnp.ones((2, 4)))
    return step, state


def left(known, most_objects=None):
    """Numbers of arrays beyond the known ones, of programs, and of Python's objects, once threads are done.

    Threads that compile hold what they compiled until they run again, which may take long on a busy machine.
    """
    end_s = time.monotonic() + 60
    while True:
        gc.collect()
        arrays, objects = sum(id(array) not in known for array in live_arrays()), len(gc.get_objects())
        is_done = arrays == 0 and (most_objects is None or objects < most_objects)
        if is_done or time.monotonic() > end_s:
            return arrays, len(jax.devices()[0].client.live_executables()), objects
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("num_steps", "optimizer", "options"),
    [
        pytest.param(2, optax.adam(1e-2), {"accumulate": 2, "clip_norm": 1.0}, id="few"),
        pytest.param(60, jaxferry.adamw(1e-2), {"record_steps": 2}, marks=pytest.mark.slow, id="many"),
    ],
)
def test_dropped_steps_leave_nothing(num_steps, optimizer, options):
    others = live_arrays()
    known = {id(array) for array in others}
    held = train(optimizer, **options)
    held_counts = len(live_arrays()) - len(others), *left({id(array) for array in live_arrays()})[1:]
    del held
    before = left(known)
    assert all(count > less for count, less in zip(held_counts, before, strict=True)), "the counts count a step"
    for _ in range(num_steps):
        train(optimizer, **options)
    arrays, programs, objects = left(known, before[2] + MAX_OBJECTS)
    assert arrays == 0 and programs <= before[1]
    assert objects - before[2] < MAX_OBJECTS


UPDATES = {"fused_update.FusedUpdate": jaxferry.adamw, "update_programs.CompiledUpdate": optax.adamw}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["once", "sums"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_state_dropped_while_its_updates_run_is_free_without_the_cyclic_collector(monkeypatch, update, options):
    """Its arrays are most of a model's memory, and Python's collector runs when it likes."""
    step = jaxferry.train_step(loss_fn, UPDATES[update](1e-2), **options)
    state, may_update = step.init(PARAMS), threading.Event()
    state = taken(step, state, jnp.ones((2, 4)), 3)
    state.block_until_ready()
    run = operator.attrgetter(update)(jaxferry.optimizer).__call__
    monkeypatch.setattr(f"jaxferry.optimizer.{update}.__call__", lambda *args: (may_update.wait(60), run(*args))[1])
    gc.collect()
    gc.disable()
    try:
        state, _ = step(state, jnp.ones((2, 4)))
        assert not state.pending.work.is_over()
        known = [weakref.ref(state), weakref.ref(state.host), *map(weakref.ref, state.host.units)]
        del state
        assert known[0]() is None and known[1]() is not None
        may_update.set()
        end_s = time.monotonic() + 60
        while any(each() is not None for each in known) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not any(each() is not None for each in known)
    finally:
        gc.enable()
    other, metrics = step(step.init(PARAMS), jnp.ones((2, 4)))
    assert np.isfinite(metrics["loss"]) and other.step == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("loss_functions", ["shared", "fresh"])
def test_sixty_dropped_steps_leave_less_than_a_mebibyte_allocated(loss_functions):
    """Native memory too; what has been freed may stay in the process's heap, so its resident memory says little."""
    given = (dropped_steps.__file__, loss_functions, 60)
    assert int(run_python(*given, MALLOC_ARENA_MAX="1", JAX_PLATFORMS="cpu")) < 2**20
