"""JAX's profiler shows the tasks of a step by name, and a step without it makes no annotation."""

import jax
import numpy as np
import optax
import pytest

import jaxferry
from models import chain

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
