"""Groups whose masters and optimizer state come to the device for the update only, in subgroups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import jaxferry.training.measured_profile
import models
from jaxferry.engine import without_times
from jaxferry.modes import Mode, Subgroups, UpdatePlace
from jaxferry.partition import partition
from jaxferry.step import Kind, LayerPlan, Plan
from jaxferry.step import streaming as planned_streaming
from jaxferry.training import step as compiled_step
from planned import take_steps
from updated import ALL, PARAMS, assert_close, batch, loss_fn, make, plan_with, streaming, train

STREAM = (Kind.UPDATE, Kind.STATE_UP, Kind.STATE_DOWN)
COPIES = pytest.mark.parametrize("mode", [Mode.GFGB, Mode.RESIDENT])
"""The new compute copy goes to host memory, or stays on the device."""


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("options", "transport"), [({"compute_dtype": jnp.bfloat16}, "ferry"), ({"clip_norm": 0.5}, "device_put")]
)
def test_losses_and_states_have_the_same_bits_whether_the_copy_stays_or_not(options, transport):
    found = []
    for mode in (Mode.GFGB, Mode.RESIDENT):
        step = make(["layer_0"], mode=mode, streamed=["embed", "layer_1", "layer_2"], transport=transport, **options)
        state, losses = train(step, step.init(PARAMS), 6)
        kinds = {task.kind for task in step.prepare(batch(0)).schedule.tasks}
        assert Kind.REFRESH not in kinds and (Kind.LOAD in kinds) == (mode is Mode.GFGB)
        found.append((losses, state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])


@pytest.mark.usefixtures("in_parts")
def test_parameters_larger_than_a_subgroup_are_cut_so_that_the_device_holds_no_more_than_planned():
    step = make([], streamed=ALL)
    state, _ = train(step, step.init(PARAMS), 1)
    sizes = {unit.layers[0]: [each.streamed.num_bytes for each in unit.subgroups] for unit in state.host.units}
    profile = step.prepare(batch(0)).profile
    for group, own in sizes.items():
        whole, planned = state.host.layers[group].trained, profile.layers[profile.groups[group][0]]
        assert len(own) == planned_streaming.num_subgroups(planned) >= 3
        assert sum(own) == 12 * whole.num_parameters
        # 16 elements, with two moments each.
        assert max(own) - min(own) <= 2 * 16 * 12
        assert max(own) < 12 * max(leaf.size for leaf in whole.leaves)


def test_small_subgroups_are_more_and_need_less_memory(monkeypatch):
    monkeypatch.setattr(planned_streaming, "SUBGROUP_BYTES", 3200)
    large = plan_with([], streamed=ALL)
    peaks, counts, trained = [], [], []
    for size in Subgroups:
        plan = dataclasses.replace(large, subgroups=size)
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), plan=plan)
        state, losses = train(step, step.init(PARAMS))
        peaks.append(step.prepare(batch(0)).peak.total)
        counts.append(streaming(state))
        trained.append((losses, state.params))
    assert set(counts[1]) == set(ALL) and sum(counts[1].values()) > 2 * sum(counts[0].values())
    assert peaks[1] < peaks[0]
    np.testing.assert_allclose(trained[1][0], trained[0][0], rtol=1e-6)
    assert_close(trained[1][1], trained[0][1])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("transport", "mode"), [("ferry", Mode.GFGB), ("device_put", Mode.RESIDENT)])
def test_a_scalar_among_parameters_that_are_cut_is_where_the_next_step_reads_it(transport, mode):
    params = {
        "a": {"b": np.zeros(17, np.float32), "g": np.float32(1.1), "w": np.ones((13, 17), np.float32)},
        "m": {"w": np.ones((17, 3), np.float32), "none": np.zeros((0, 3), np.float32)},
    }

    def loss(params, x):
        a = params["a"]
        return jnp.mean((jnp.tanh(x @ a["w"] * a["g"] + a["b"]) @ params["m"]["w"]) ** 2) + params["m"]["none"].sum()

    x, found = jnp.linspace(0, 0.1, 52).reshape(4, 13), []
    names = [segment.name for segment in partition(loss, params, (x,)).segments]
    for place in (UpdatePlace.HOST, UpdatePlace.GPU):
        plan = Plan("test", 1.0, tuple(LayerPlan(name, mode, update=place) for name in names))
        step = jaxferry.train_step(loss, optax.adamw(1e-2), plan=plan, transport=transport)
        state = step.init(params)
        found.append([])
        for _ in range(4):
            state, metrics = step(state, x)
            found[-1].append(float(metrics["loss"]))
    assert min(streaming(state).values()) >= 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.usefixtures("in_parts")
def test_state_that_does_not_move_is_cut_with_its_parameter():
    """Integers stay on the device."""

    def update(gradients, seen, params=None):
        seen = jax.tree.map(lambda g, n: n + (g > 0), gradients, seen)
        return jax.tree.map(lambda g, n: -0.1 * g / (1 + n), gradients, seen), seen

    counting = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int32), params), update
    )
    results = []
    for step in (make([], counting), make([], counting, mode=Mode.RESIDENT, streamed=ALL)):
        state, losses = train(step, step.init(PARAMS), 3)
        state.opt_state = jax.tree.map(lambda n: 2 * n, state.opt_state)
        state, more = train(step, state, 2, first=3)
        results.append((losses + more, state.opt_state))
    assert min(streaming(state).values()) >= 2
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, results[1][1], results[0][1])


@pytest.mark.usefixtures("in_parts")
def test_batches_whose_plans_differ_take_turns_with_a_state(monkeypatch):
    """Where a copy stays, that in host memory is old."""
    kinds = [{"mode": Mode.RESIDENT}, {"mode": Mode.GFGB}, {"mode": Mode.DHA}]
    plans = [plan_with([], streamed=ALL, **kind) for kind in kinds] + [plan_with([], Mode.RESIDENT), plan_with(ALL)]
    sizes = [3, 4, 3, 5, 3, 6, 3, 7, 3]
    batches = [jnp.resize(batch(number), (size, 5)) for number, size in enumerate(sizes)]
    optimizer, others = optax.sgd(1e-2, momentum=0.9), iter(batches[1:])
    task = models.Task(loss_fn, PARAMS, batches[0], lambda *_: next(others))
    expected, losses = models.plain_loop(task, optimizer, len(batches))
    left = iter(plans)
    monkeypatch.setattr(compiled_step, "choose_plan", lambda *args: next(left))
    step = jaxferry.train_step(loss_fn, optimizer)
    state, found = take_steps(step, step.init(PARAMS), batches)
    assert next(left, None) is None
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_close(state.params, expected)


@COPIES
def test_a_budget_below_moves_updates_to_the_host(mode):
    step, host = make([], mode=mode, streamed=ALL), make([], mode=mode)
    for each in (step, host):
        each.init(PARAMS)
    peak, least = (each.prepare(batch(0)).peak.total for each in (step, host))
    for budget, fewest, most in ((peak, 4, 4), (peak - 1, 1, 3), (least, 0, 0)):
        tight = make([], mode=mode, streamed=ALL, memory_budget=budget)
        state, _ = train(tight, tight.init(PARAMS), 1)
        assert fewest <= len(streaming(state)) <= most
        assert tight.prepare(batch(0)).peak.total <= budget


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_given_plan_keeps_the_times_that_its_profile_has_or_states_them_by_those_of_transfers(is_stated):
    """Also where the device has no memory of its own, so that no policy would update there."""
    stated = {"state_up_s": 0.5, "state_down_s": 1.0} if is_stated else {"state_up_s": None, "state_down_s": None}
    sizes = without_times(partition(loss_fn, PARAMS, (batch(0),)))
    times = {"load_s": 1.0, "offload_s": 2.0, "update_gpu_s": 0.125, "update_streamed_s": 0.25, **stated}
    layers = [dataclasses.replace(layer, **times) for layer in sizes.layers]
    step = make([], streamed=["layer_1"], profile=dataclasses.replace(sizes, layers=tuple(layers)))
    step.init(PARAMS)
    prepared = step.prepare(batch(0))
    streams = {task.kind: task.duration_s for task in prepared.schedule.tasks if task.name.endswith("layer_1")}
    [layer] = [layer for layer in prepared.profile.layers if layer.name == "layer_1"]
    a_byte = len(layers) / sum(layer.param_bytes for layer in prepared.profile.layers)
    sizes = layer.state_bytes, 2 * (layer.state_bytes + layer.param_bytes)
    expected = stated.values() if is_stated else [a_byte * size for size in sizes]
    assert [streams[kind] for kind in STREAM] == pytest.approx([0.25, *expected])
