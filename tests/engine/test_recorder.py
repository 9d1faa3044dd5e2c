"""Recorded task times when one thread issues all tasks, against the simulator and the emulated link."""

import math
import time

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jaxferry
from accelerator import emulate
from jaxferry.engine import on_the_device
from jaxferry.step import Kind, Lane, Run, Schedule, Task, machine, repeat, schedule_step
from jaxferry.transport import Marks, make_placement
from models import chain
from native_calls import load, wait
from planned import taken
from profiles import deterministic, lowered, planned
from recorded import check_times
from steps import link

WIDTH = 256


@deterministic
@given(planned(), st.integers(1, 2), st.booleans(), st.randoms(use_true_random=False))
def test_from_ends_alone_follows_what_the_simulator_says(case, num_steps, knows_programs, draw):
    """Issue times carry no information: tasks are issued early, and updates wait for gradients in their thread."""
    profile, plan = case
    chain = repeat(lowered(profile, plan) if knows_programs else schedule_step(profile, plan), num_steps)
    truth = machine.run(chain)
    chain = truth.schedule
    issued, known = [], {}
    host = sorted((s, e) for t, s, e in zip(chain.tasks, truth.starts_s, truth.ends_s, strict=True) if t.lane == "host")
    for index, (task, start, end) in enumerate(zip(chain.tasks, truth.starts_s, truth.ends_s, strict=True)):
        # Its thread starts an update once the previous one is done.
        free = max((e for s, e in host if (s, e) < (start, end)), default=0.0) if task.lane is Lane.HOST else 0.0
        issued.append(draw.choice([free, start]))
        if task.lane is not Lane.HOST and start < end:
            known[index] = (draw.choice([math.nan, start]), end)
    ends = [end if task.lane is Lane.HOST else 0.0 for task, end in zip(chain.tasks, truth.ends_s, strict=True)]
    starts, ends = on_the_device(chain, issued, ends, known)
    assert starts == list(truth.starts_s)
    assert ends == list(truth.ends_s)


def test_the_disk_keeps_its_order_where_the_end_of_an_offload_is_seen_late():
    """The threads have done their work already, but report the offload's end only after the next read has begun."""

    def task(kind, lane, after=()):
        return Task(kind.value, 0, kind, lane, f"{kind.value}_s", 1.0, after)

    offload, update = task(Kind.OFFLOAD, Lane.D2H), task(Kind.UPDATE, Lane.HOST, (0,))
    write, read = task(Kind.STATE_WRITE, Lane.DISK, (1,)), task(Kind.STATE_READ, Lane.DISK)
    step = Schedule((offload, update, write, read), 0)
    starts, ends = on_the_device(step, [0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 3.0, 4.0], {0: (0.0, 3.5)})
    assert starts == [0.0, 3.5, 3.5, 3.5]
    assert ends == [3.5, 3.5, 3.5, 4.0]
    check_times(Run(step, tuple(starts), tuple(ends)))


class Watched:
    """Marks without the native library, on a clock that tests control."""

    def __init__(self):
        self.now_s = 0.0
        self.marks = Marks(make_placement(), 2, None, lambda: self.now_s)


def test_without_events_a_task_has_ended_when_its_result_was_seen():
    watched = Watched()
    step, array = watched.marks.begin(), jnp.ones(3)
    watched.now_s = 5.0
    step.after(0, {"result": array})
    step.of(1).watch([array])
    assert [end for _, end in step.times().values()] == [5.0, 5.0]
    assert all(math.isnan(start) for start, _ in step.times().values())


def test_what_was_deleted_before_anybody_looked_is_not_known():
    step, array = Watched().marks.begin(), jnp.ones(3)
    array.delete()
    step.watch(0, [array])
    assert math.isnan(step.times()[0][1])


@pytest.mark.cpu_device
@pytest.mark.usefixtures("engine_settings")
def test_whoever_waits_for_an_array_survives_its_end():
    vector = jnp.ones(1 << 16)
    with link(load=vector.nbytes / 0.3) as native:
        marks, begin_s = Marks(make_placement(), 2, None), time.perf_counter()
        [array] = load([vector], [jax.block_until_ready(jnp.zeros_like(vector))])
        [array], _ = wait([array])
        step = marks.begin()
        step.watch(0, [array])
        time.sleep(0.1)
        array.delete()
        assert step.times()[0][1] - begin_s >= 0.29
        native.synchronize()


def perceptron(num_layers=4):
    params = {f"l{i}": {"w": np.full((WIDTH, WIDTH), 0.01, np.float32)} for i in range(num_layers)}
    return chain(), params, np.ones((4, WIDTH), np.float32)


@pytest.fixture
def issued(monkeypatch):
    """One thread issues for the device, as on an accelerator."""
    emulate(monkeypatch)


@pytest.mark.usefixtures("issued")
def test_copies_are_recorded_as_long_as_the_link_takes():
    loss_fn, params, batch = perceptron()
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), transport="ferry", compute_dtype=jnp.float32, record_steps=2)
    state, seconds = step.init(params), {Kind.LOAD: 0.01, Kind.OFFLOAD: 0.02}
    with link(*(4 * WIDTH**2 / each_s for each_s in seconds.values())):
        state = taken(step, state, batch, 3)
        state.block_until_ready()
    run = step.recorded()
    check_times(run)
    tasks = list(zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True))
    for kind, each_s in seconds.items():
        spans = [(start, end) for task, start, end in tasks if task.kind is kind]
        assert len(spans) == 8
        assert all(end - start == pytest.approx(each_s, rel=1e-3) for start, end in spans)


loss_fn = chain()


@pytest.fixture
def trained():
    """A step, its state after one step, and the batch."""
    params = {f"layer_{i}": np.eye(64, dtype=np.float32) for i in range(2)}
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    batch = np.ones((4, 64), np.float32)
    state, _ = step(step.init(params), batch)
    state.block_until_ready()
    return step, state, batch


def names_of(folder):
    """The names of all events that a trace holds."""
    [file] = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return {event.name for plane in data.planes for line in plane.lines for event in line.events}


def test_a_trace_holds_every_task_by_kind_and_layer(trained, tmp_path):
    step, state, batch = trained
    with jax.profiler.trace(str(tmp_path)):
        step(state, batch)
        state.block_until_ready()
    program = step.prepare(batch).program
    tasks = {found.task.name for found in program.instructions if found.index not in program.trivial}
    assert {"load layer_0", "forward layer_0", "backward layer_0", "update layer_0"} <= tasks
    assert tasks <= names_of(tmp_path)
