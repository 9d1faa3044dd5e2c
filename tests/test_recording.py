"""What a recording says of each task, against a model whose bytes are known."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.cli.recording import Recording, make_recording
from jaxferry.errors import InputError, StateError
from jaxferry.step import Kind, Lane, Plan, simulate
from models import chain

WIDTH, DEPTH = 16, 3
LAYER_BYTES = 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def recording():
    params = {f"layer_{i}": np.eye(WIDTH, dtype=np.float32) for i in range(DEPTH)}
    step = jaxferry.train_step(chain(), optax.sgd(0.1), accumulate=2, record_steps=4)
    state, batch = step.init(params), jnp.ones((2, WIDTH))
    for _ in range(7):
        state, _ = step(state, batch)
    return make_recording(step, state, step.prepare(batch), model="tiny")


def test_the_first_micro_batch_loads_each_layer_and_the_last_one_offloads_its_sum(recording):
    for number in {task.step for task in recording.tasks}:
        of_step = [task for task in recording.tasks if task.step == number]
        for kind, num_bytes in (
            (Kind.LOAD, LAYER_BYTES * (1 - number % 2)),
            (Kind.OFFLOAD, LAYER_BYTES * (number % 2)),
        ):
            moved = {task.layer: task.num_bytes for task in of_step if task.kind is kind}
            assert moved == {f"layer_{i}": num_bytes for i in range(DEPTH)}
        assert all(task.num_bytes == 0 for task in of_step if task.lane in (Lane.GPU, Lane.HOST))


@pytest.mark.parametrize("is_tight", [False, True])
def test_offloads_have_the_bytes_that_the_transport_is_given(is_tight):
    """Sums in fp32 leave twice the bytes of bfloat16 gradients; within a tight budget, each gradient leaves."""
    params, batch = {f"layer_{i}": np.eye(WIDTH, dtype=np.float32) for i in range(DEPTH)}, jnp.ones((2, WIDTH))
    options = {"compute_dtype": jnp.bfloat16, "accumulate": 3, "record_steps": 6}
    step = jaxferry.train_step(chain(), optax.sgd(0.1), **options)
    state = step.init(params)
    if is_tight:
        options["plan"] = step.prepare(batch).plan  # no copies stay under a given plan
        step = jaxferry.train_step(chain(), optax.sgd(0.1), **options)
        step.declare(params)
        budget = step.prepare(batch).peak.total - 1
        step = jaxferry.train_step(chain(), optax.sgd(0.1), memory_budget=budget, **options)
        state = step.init(params)
    prepared, given = step.prepare(batch), []
    transport = prepared.runner.runnable.resources.transport
    store = transport.store

    def spied(layer, arrays, *more):
        given[-1] += sum(array.nbytes for array in arrays)
        return store(layer, arrays, *more)

    transport.store = spied
    for _ in range(6):
        given.append(0)
        state, _ = step(state, batch)
    made = make_recording(step, state, prepared)
    recorded = [sum(t.num_bytes for t in made.tasks if t.kind is Kind.OFFLOAD and t.step == n) for n in range(6)]
    assert recorded == given
    half, num_summed = LAYER_BYTES // 2, len(prepared.program.summed)
    assert num_summed < DEPTH if is_tight else num_summed == DEPTH
    assert given[:2] == [(DEPTH - num_summed) * half] * 2 and given[2] == (DEPTH + num_summed) * half
    assert simulate(made.profile, made.plan).link_bytes == given[2] + DEPTH * half


def test_a_recording_round_trips_through_a_file(recording, tmp_path):
    recording.save(tmp_path / "run.json")
    assert Recording.load(tmp_path / "run.json") == recording
    assert max(held for _, held in recording.device_bytes["parameters"]) == DEPTH * LAYER_BYTES
    assert recording.host_bytes["master parameters"] == DEPTH * LAYER_BYTES


def test_a_recording_needs_recorded_steps():
    step = jaxferry.train_step(chain(), optax.sgd(0.1))
    state = step.init({f"layer_{i}": np.eye(WIDTH, dtype=np.float32) for i in range(DEPTH)})
    with pytest.raises(StateError, match="record_steps="):
        make_recording(step, state, step.prepare(jnp.ones((2, WIDTH))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "lode"}, "kind must be one of load, reload"),
        ({"lane": "DMA"}, "lane must be one of GPU"),
        ({"bytes": -1}, "bytes must be a whole number of bytes"),
        ({"end_s": -5.0}, "the end not before the start"),
        ({"end_s": 1e308}, "must be seconds"),
        ({"byte": 3}, 'unknown key "byte"'),
    ],
)
def test_a_damaged_recording_names_the_task_and_the_key(recording, tmp_path, change, message):
    document = recording.to_json()
    document["tasks"][2] |= change
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"run.json: tasks\[2\]: ") as error_info:
        Recording.load(tmp_path / "run.json")
    assert message in str(error_info.value)


def test_programs_that_use_host_memory_move_its_bytes(recording):
    plan = recording.plan.to_json()
    for layer in plan["layers"]:
        layer.update(mode="DHA", gradient="host")
    step = jaxferry.train_step(chain(), optax.sgd(0.1), plan=Plan.from_json(plan), record_steps=2)
    state = step.init({f"layer_{i}": np.eye(WIDTH, dtype=np.float32) for i in range(DEPTH)})
    for _ in range(3):
        state, _ = step(state, jnp.ones((2, WIDTH)))
    made = make_recording(step, state, step.prepare(jnp.ones((2, WIDTH))))
    forwards = [task.num_bytes for task in made.tasks if task.kind is Kind.FORWARD and task.layer == "layer_0"]
    assert set(forwards) == {LAYER_BYTES}
    assert sum(task.num_bytes for task in made.tasks if task.lane in (Lane.H2D, Lane.D2H)) == 0
