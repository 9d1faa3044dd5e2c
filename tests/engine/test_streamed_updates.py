"""Groups whose masters and optimizer state come to the device for the update only, in subgroups."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import jaxferry.training.measured_profile
import models
from accelerator import emulate
from jaxferry.engine import without_times
from jaxferry.errors import InputError
from jaxferry.modes import Mode, Subgroups, UpdatePlace
from jaxferry.partition import partition
from jaxferry.step import Kind, Lane, LayerPlan, Operation, Plan
from jaxferry.step import streaming as planned_streaming
from jaxferry.training import MeasurementCache
from jaxferry.training import step as compiled_step
from jaxferry.transport import pinned
from recorded import check_times
from updated import (
    OPTIONS,
    PARAMS,
    PLACES,
    assert_close,
    batch,
    check_failure,
    loss_fn,
    make,
    on_device,
    plan_with,
    streaming,
    train,
)
from watched import Watch

ALL = PLACES["all"]


@pytest.fixture
def in_parts(monkeypatch):
    """Subgroups of about one parameter, of which few are on the device at once."""
    monkeypatch.setattr(planned_streaming, "SUBGROUP_BYTES", 400)


COPIES = pytest.mark.parametrize("mode", [Mode.GFGB, Mode.RESIDENT])
"""The new compute copy goes to host memory, or stays on the device."""


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("name", "transport"), [("bfloat16", "ferry"), ("clipped", "device_put")])
def test_losses_and_states_have_the_same_bits_whether_the_copy_stays_or_not(name, transport):
    found = []
    for mode in (Mode.GFGB, Mode.RESIDENT):
        step = make(
            ["layer_0"], mode=mode, streamed=["embed", "layer_1", "layer_2"], transport=transport, **OPTIONS[name]
        )
        state, losses = train(step, step.init(PARAMS), 6)
        kinds = {task.kind for task in step.prepare(batch(0)).schedule.tasks}
        assert Kind.REFRESH not in kinds and (Kind.LOAD in kinds) == (mode is Mode.GFGB)
        found.append((losses, state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("transport", "reach", "mode", "options"),
    [
        ("ferry", True, Mode.RESIDENT, {"accumulate": 2}),
        ("device_put", False, Mode.GFGB, {"clip_norm": 0.5}),  # the CPU cannot reach pinned memory
        pytest.param("device_put", True, Mode.RESIDENT, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_issuing_thread_never_waits(transport, reach, options, mode, monkeypatch):
    expected_step = make([], **options)
    _, expected = train(expected_step, expected_step.init(PARAMS))
    accelerator = emulate(monkeypatch)
    if not reach:
        monkeypatch.setattr(pinned, "_reaches", lambda placement: False)
        pinned.can_view.cache_clear()
    try:
        kind = {"transport": transport, "mode": mode, "compute_dtype": jnp.float32}
        step = make(["layer_0"], streamed=["embed", "layer_2"], **kind, **options)
        state, losses = train(step, step.init(PARAMS))
        state.block_until_ready()
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert streaming(state).keys() == {"embed", "layer_2"} and on_device(state) == {"layer_0"}
    finally:
        pinned.can_view.cache_clear()
    # Only where the CPU cannot reach pinned memory, pieces pass through NumPy, which waits for them.
    assert not [stack for stack in accelerator.waits if reach or "_put_into" not in stack]
    accelerator.check()


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(jaxferry.adamw(1e-2), marks=pytest.mark.slow), optax.adamw(1e-2)],
    ids=["fused", "optax"],
)
def test_twenty_steps_differ_by_rounding_alone(optimizer):
    expected_step, step = make([], optimizer), make([], optimizer, streamed=ALL)
    expected, expected_losses = train(expected_step, expected_step.init(PARAMS), 20)
    state, losses = train(step, step.init(PARAMS), 20)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for leaf, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6 * np.max(np.abs(other)))


@pytest.mark.usefixtures("in_parts")
def test_one_plan_has_the_same_bits_run_after_run():
    step = make(["layer_0"], mode=Mode.RESIDENT, streamed=["embed", "layer_1"])
    (one, losses), (other, same) = (train(step, step.init(PARAMS)) for _ in range(2))
    assert losses == same
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    jax.tree.map(np.testing.assert_array_equal, one.opt_state, other.opt_state)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        (optax.lion(1e-3), Mode.RESIDENT),
        (optax.adafactor(1e-2), Mode.GFGB),
    ],
    ids=["lion", "adafactor"],
)
@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_any_optimizer_whose_layers_are_updated_alone_streams(optimizer, mode):
    expected_step, step = make([], optimizer), make([], optimizer, mode=mode, streamed=["layer_0", "layer_2"])
    _, expected = train(expected_step, expected_step.init(PARAMS))
    state, losses = train(step, step.init(PARAMS))
    assert streaming(state).keys() == {"layer_0", "layer_2"}
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_a_joint_optimizer_cannot_stream():
    step = make([], optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), streamed=ALL)
    with pytest.raises(InputError, match="together, so this update cannot stream through the GPU"):
        train(step, step.init(PARAMS))


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
def test_frozen_parameters_and_such_that_no_segment_reads_stay_with_the_host():
    params = {**PARAMS, "unread": {"w": np.ones(3, np.float32)}}
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    step = make([], optimizer, streamed=ALL, trainable=lambda path: not path.endswith("/b"))
    with pytest.warns(UserWarning, match="the loss never reads"):
        state, _ = train(step, step.init(params))
    np.testing.assert_allclose(state.params["unread"]["w"], (1 - 0.005) ** 4, rtol=1e-5)
    for i in range(3):
        np.testing.assert_array_equal(state.params[f"layer_{i}"]["b"], PARAMS[f"layer_{i}"]["b"])
        assert np.any(state.params[f"layer_{i}"]["w"] != PARAMS[f"layer_{i}"]["w"])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("options", "mode"), [({}, Mode.GFGB), ({"skip_nonfinite": True}, Mode.RESIDENT)], ids=["raised", "skipped"]
)
def test_a_loss_that_is_not_finite_changes_nothing(options, mode):
    def broken(params, words):
        return loss_fn(params, jnp.abs(words)) + jnp.where(words[0, 0] < 0, jnp.nan, 0.0)

    plan = plan_with([], mode, streamed=["embed", "layer_1"])
    step = jaxferry.train_step(broken, jaxferry.adamw(1e-2), plan=plan, **options)
    state, _ = train(step, step.init(PARAMS), 2)
    before, moments = state.params, state.opt_state
    bad = batch(0).at[0, 0].set(-1)
    if options:
        state, _ = step(state, bad)
    else:
        with pytest.raises(jaxferry.NonFiniteError):
            step(state, bad)
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, moments)
    train(step, state, 1)


@pytest.mark.usefixtures("in_parts")
def test_checkpoints_move_between_places(tmp_path):
    cases = [({"streamed": ALL}, {"groups": []}), ({"groups": ALL}, {"streamed": ["layer_2"]}), ({}, {"streamed": ALL})]
    stays = {"streamed": ALL, "mode": Mode.RESIDENT}
    cases += [(stays, {}), ({"mode": Mode.RESIDENT}, stays), (stays, {"streamed": ALL}), ({"groups": ALL}, stays)]
    steps = {str(each): make(**{"groups": [], **each}) for each in itertools.chain.from_iterable(cases)}
    for here, there in cases:
        step, other = steps[str(here)], steps[str(there)]
        state, _ = train(step, step.init(PARAMS), 2)
        step.save(state, tmp_path / "saved")
        _, expected = train(step, state, 2, first=2)
        restored = other.restore(tmp_path / "saved", PARAMS)
        _, losses = train(other, restored, 2, first=2)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.usefixtures("in_parts")
def test_batches_whose_plans_differ_take_turns_with_a_state(monkeypatch):
    """Where a copy stays, that in host memory is old."""
    kinds = [{"mode": Mode.RESIDENT}, {"mode": Mode.GFGB}, {"mode": Mode.DHA}]
    plans = [plan_with([], streamed=ALL, **kind) for kind in kinds] + [plan_with([], Mode.RESIDENT), plan_with(ALL)]
    sizes = [3, 4, 3, 5, 3, 6, 3, 7, 3]
    batches = [jnp.resize(batch(number), (size, 5)) for number, size in enumerate(sizes)]
    optimizer, losses, expected = optax.sgd(1e-2, momentum=0.9), [], PARAMS
    gradient, moments = models.quickly(jax.value_and_grad(loss_fn)), optimizer.init(PARAMS)
    for words in batches:
        loss, gradients = gradient(expected, words)
        updates, moments = optimizer.update(gradients, moments)
        expected = optax.apply_updates(expected, updates)
        losses.append(float(loss))
    left = iter(plans)
    monkeypatch.setattr(compiled_step, "choose_plan", lambda *args: next(left))
    step = jaxferry.train_step(loss_fn, optimizer)
    state, found = step.init(PARAMS), []
    for words in batches:
        state, metrics = step(state, words)
        found.append(float(metrics["loss"]))
    assert next(left, None) is None
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_close(state.params, expected)


@pytest.mark.usefixtures("in_parts")
def test_a_state_may_be_read_copied_changed_and_evaluated_between_steps():
    results, optimizer = [], optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    for each in (make([], optimizer), make([], optimizer, mode=Mode.RESIDENT, streamed=["embed", "layer_1"])):
        state, _ = train(each, each.init(PARAMS), 2)
        copy = state.copy()
        found = [float(each.evaluate(state, batch(7)))]
        found += train(each, copy, 1, first=2)[1]
        state.params = jax.tree.map(lambda x: x * 0.5, state.params)
        found += train(each, state, 2, first=2)[1]
        state.set_hyperparams(learning_rate=0.1)
        found += train(each, state, 1, first=4)[1]
        state.opt_state = jax.tree.map(np.zeros_like, state.opt_state)
        found += train(each, state, 1, first=5)[1]
        results.append((found, state.params))
    assert streaming(state).keys() == {"embed", "layer_1"}
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    assert_close(results[1][1], results[0][1])


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


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": Mode.RESIDENT},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({"mode": Mode.DHA}, {"clip_norm": 0.5}, {"accumulate": 2})),
        pytest.param({"mode": Mode.RESIDENT, "clip_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param({"mode": Mode.RESIDENT, "accumulate": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_live_bytes_stay_under_the_predicted_peak(options, monkeypatch):
    emulate(monkeypatch)
    step = make([], streamed=ALL, compute_dtype=jnp.float32, **options)
    state, most = step.init(PARAMS), []
    watch = Watch(step, batch(0), monkeypatch)
    for number in range(4):
        state.block_until_ready()
        watch.start(state)
        state, _ = step(state, batch(number))
        most.append(watch.most)
    assert 0 < max(most) <= step.prepare(batch(0)).peak.total


@pytest.mark.parametrize("mode", [Mode.DHA, Mode.RESIDENT])
def test_the_first_step_needs_no_more_memory_than_the_next(mode, monkeypatch):
    """It would keep all gradients on the device if its updates waited for them."""
    monkeypatch.setattr(planned_streaming, "SUBGROUP_BYTES", 4000)
    emulate(monkeypatch)
    params = {f"layer_{i:02}": {"w": np.eye(32, dtype=np.float32)} for i in range(12)}

    def loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    x = jnp.ones((2, 32))
    names = [segment.name for segment in partition(loss, params, (x,)).segments]
    plan = Plan("test", 1.0, tuple(LayerPlan(name, mode, update=UpdatePlace.GPU) for name in names))
    step = jaxferry.train_step(loss, jaxferry.adamw(1e-2), plan=plan, compute_dtype=jnp.float32)
    state = step.init(params)
    watch = Watch(step, x, monkeypatch)
    watch.start(state)
    step(state, x)
    assert 0 < watch.most <= step.prepare(x).peak.total


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("operation", [Operation.LOAD_STATE, Operation.UPDATE_ON_DEVICE, Operation.STORE_STATE])
@pytest.mark.parametrize(("number", "mode"), [(0, Mode.GFGB), (3, Mode.RESIDENT)])
def test_a_failure_is_rolled_back_before_the_first_update_and_damages_the_state_after_it(
    operation, number, mode, monkeypatch
):
    step = make([], mode=mode, streamed=ALL)
    state, _ = train(step, step.init(PARAMS), 2)
    is_rolled_back: bool | None = number == 0 and operation is not Operation.STORE_STATE
    if number and operation is Operation.LOAD_STATE:
        is_rolled_back = None  # loads of other subgroups run ahead of the first update
    match = r"layer '.*' failed: no memory"
    check_failure(step, state, monkeypatch, operation, number, match, is_rolled_back)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("options", [{}, pytest.param({"clip_norm": 0.5}, marks=pytest.mark.slow)], ids=str)
def test_recorded_steps_hold_the_moves(options, monkeypatch):
    emulate(monkeypatch)
    options = {**options, "mode": Mode.RESIDENT, "compute_dtype": jnp.float32}
    step = make([], streamed=["embed", "layer_1"], record_steps=3, **options)
    state, _ = train(step, step.init(PARAMS), 5)
    state.block_until_ready()
    run = step.recorded()
    check_times(run)
    count = 3 * sum(streaming(state).values())
    lanes = {Kind.STATE_UP: Lane.H2D, Kind.UPDATE: Lane.GPU, Kind.STATE_DOWN: Lane.D2H}
    for kind, lane in lanes.items():
        assert sum(task.kind is kind and task.lane is lane for task in run.schedule.tasks) == count


@pytest.mark.parametrize("count", [1, 3])
def test_the_program_of_a_subgroup_is_measured_for_all_of_them(count, monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(jaxferry.training.measured_profile, "num_subgroups_of", lambda num_bytes: count)
    seconds = {}

    class Known(MeasurementCache):
        def get(self, content):
            return seconds.setdefault(content, 1.0 + len(seconds) / 64)

    options = {"policy": "auto", "profile": "measure", "compute_dtype": jnp.float32}
    monkeypatch.setattr(jaxferry.training.measured_profile, "default_cache", lambda placement: Known(None, {}))
    profile = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2), **options).measure(PARAMS, batch(0))
    streamed = {content: own for content, own in seconds.items() if content.startswith("streamed update")}
    resident = {own for content, own in seconds.items() if content.startswith("device update")}
    assert {layer.update_streamed_s for layer in profile.layers} == {count * own for own in streamed.values()}
    assert {layer.update_gpu_s for layer in profile.layers} == resident
    assert len(streamed) == len(resident) < len(profile.layers)


def test_a_given_plan_keeps_the_times_that_its_profile_has_for_updates_on_the_device():
    """Also where the device has no memory of its own, so that no policy would update there."""
    times = {"update_streamed_s": 0.25, "state_up_s": 0.5, "state_down_s": 1.0}
    sizes = without_times(partition(loss_fn, PARAMS, (batch(0),)))
    layers = [dataclasses.replace(layer, forward_s=1.0, update_gpu_s=0.125, **times) for layer in sizes.layers]
    profile = dataclasses.replace(sizes, layers=tuple(layers))
    step = make([], streamed=["layer_1"], profile=profile)
    step.init(PARAMS)
    tasks = step.prepare(batch(0)).schedule.tasks
    streams = {task.kind: task.duration_s for task in tasks if task.name.endswith("layer_1")}
    assert [streams[kind] for kind in (Kind.UPDATE, Kind.STATE_UP, Kind.STATE_DOWN)] == [*times.values()]
