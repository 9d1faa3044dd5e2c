"""Groups that are updated on the device, where their optimizer state stays, or comes for the update in subgroups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import scanned
from accelerator import emulate
from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.partition import partition
from jaxferry.planner import make_plan
from jaxferry.step import Operation, needed_bytes
from jaxferry.transport import Placement
from models import chain
from slowly import slow
from updated import (
    ALL,
    PARAMS,
    WIDTH,
    WORDS,
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
from watched import compiled

RESIDENT, STREAMED = {"groups": ["embed", "layer_1"]}, {"streamed": ["embed", "layer_1"]}
KEPT = {**STREAMED, "mode": Mode.RESIDENT}
"""The new compute copy of what streams goes to host memory, or stays on the device."""
JOINT = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("kind", [RESIDENT, KEPT], ids=["resident", "kept"])
@pytest.mark.parametrize("optimizer", [optax.lion(1e-3), optax.adafactor(1e-2)], ids=["lion", "adafactor"])
@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_any_optimizer_whose_layers_are_updated_alone_runs_there(optimizer, kind):
    expected_step, step = make(optimizer=optimizer), make(optimizer=optimizer, **kind)
    _, expected = train(expected_step, expected_step.init(PARAMS))
    state, losses = train(step, step.init(PARAMS))
    assert on_device(state) | streaming(state).keys() == set(STREAMED["streamed"])
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_a_joint_optimizer_runs_there_with_all_layers_or_none_and_does_not_stream():
    expected_step, step = make(optimizer=JOINT), make(ALL, JOINT)
    _, expected = train(expected_step, expected_step.init(PARAMS))
    state, losses = train(step, step.init(PARAMS))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert on_device(state) == set(ALL)
    for kind, message in (
        ({"groups": ["layer_1"]}, "updates 'layer_1' and 'embed' together"),
        ({"streamed": ALL}, "together, so this update cannot stream through the GPU"),
    ):
        with pytest.raises(InputError, match=message):
            step = make(optimizer=JOINT, **kind)
            train(step, step.init(PARAMS))


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("place", ["groups", "streamed"])
def test_frozen_parameters_and_such_that_no_segment_reads_stay_with_the_host(place):
    params = {**PARAMS, "unread": {"w": np.ones(3, np.float32)}}
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    step = make(optimizer=optimizer, trainable=lambda path: not path.endswith("/b"), **{place: ALL})
    with pytest.warns(UserWarning, match="the loss never reads"):
        state, _ = train(step, step.init(params))
    np.testing.assert_allclose(state.params["unread"]["w"], (1 - 0.005) ** 4, rtol=1e-5)
    for i in range(3):
        np.testing.assert_array_equal(state.params[f"layer_{i}"]["b"], PARAMS[f"layer_{i}"]["b"])
        assert np.any(state.params[f"layer_{i}"]["w"] != PARAMS[f"layer_{i}"]["w"])


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(("kind", "skips"), [(RESIDENT, False), (RESIDENT, True), (STREAMED, False), (KEPT, True)])
def test_a_loss_that_is_not_finite_changes_nothing(kind, skips):
    def broken(params, words):
        return loss_fn(params, jnp.abs(words)) + jnp.where(words[0, 0] < 0, jnp.nan, 0.0)

    step = jaxferry.train_step(broken, jaxferry.adamw(1e-2), plan=plan_with(**kind), skip_nonfinite=skips)
    state, _ = train(step, step.init(PARAMS), 2)
    before = (state.params, state.opt_state)
    bad = batch(0).at[0, 0].set(-1)
    if skips:
        state, _ = step(state, bad)
    else:
        with pytest.raises(jaxferry.NonFiniteError):
            step(state, bad)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    train(step, state, 1)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("kind", [RESIDENT, KEPT], ids=["resident", "kept"])
def test_a_state_may_be_read_copied_changed_and_evaluated_between_steps(kind):
    results, optimizer = [], optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    for each in (make(optimizer=optimizer), make(optimizer=optimizer, **kind)):
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
    assert on_device(state) | streaming(state).keys() == set(STREAMED["streamed"])
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    assert_close(results[1][1], results[0][1])


STREAM = (Operation.LOAD_STATE, Operation.UPDATE_ON_DEVICE, Operation.STORE_STATE)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("operation", "number", "kind"),
    [
        *((Operation.UPDATE_ON_DEVICE, number, {"groups": ALL}) for number in (0, 1)),
        *((operation, 0, {"streamed": ALL}) for operation in STREAM),
        *((operation, 3, {"streamed": ALL, "mode": Mode.RESIDENT}) for operation in STREAM),
    ],
)
def test_a_failure_is_rolled_back_before_the_first_update_and_damages_the_state_after_it(
    operation, number, kind, monkeypatch
):
    step = make(**kind)
    state, _ = train(step, step.init(PARAMS), 2)
    is_rolled_back: bool | None = number == 0 and operation is not Operation.STORE_STATE
    if number and operation is Operation.LOAD_STATE:
        is_rolled_back = None  # loads of other subgroups run ahead of the first update
    match = rf"{'the update of ' if 'groups' in kind else ''}layer '.*' failed: no memory"
    check_failure(step, state, monkeypatch, operation, number, match, is_rolled_back)


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"accumulate": 2}], ids=lambda options: next(iter(options)))
def test_updates_are_compiled_before_the_step(options, caplog):
    step = make(ALL, optax.lion(1e-2), **options)
    state = step.init(PARAMS)
    step.prepare(batch(0))
    with compiled(caplog) as names:
        train(step, state, num_steps=2)
    assert not names.keys() & {"update", "fold", "squared_norm_of"}


@pytest.mark.filterwarnings("ignore:the optimizer looks at whole stacked parameters")
def test_auto_has_the_state_of_layers_that_are_updated_together_in_one_place(monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(Placement, "device_kind", "NVIDIA H200")
    model = scanned.plain()
    parts = partition(model.loss_fn, model.params, (model.batch,), compute_dtype=jnp.float32)
    slow_host = dataclasses.replace(MACHINES["h200-pcie5"], host_bytes_per_s=1e6)
    options = {"policy": "auto", "profile": estimate_profile(partition_costs(parts), slow_host)}
    step = jaxferry.train_step(
        model.loss_fn, optax.adafactor(1e-2), memory_budget="none", compute_dtype=jnp.float32, **options
    )
    state = step.init(model.params)
    plan = step.prepare(model.batch).plan
    assert all(plan.updates_on_device)
    state, _ = step(state, model.batch)
    assert state.host.on_device == frozenset(range(len(state.host.layers)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_needs_the_memory_moves_updates_to_the_host_and_the_next_one_back(accumulate):
    probe = make(ALL, accumulate=accumulate)
    train(probe, probe.init(PARAMS), accumulate)
    wide = jnp.tile(batch(0), (1, 2))
    budget = probe.prepare(wide).peak.total - 1
    step, expected_step = (make(ALL, accumulate=accumulate, memory_budget=budget), make(accumulate=accumulate))
    state, expected, seen = step.init(PARAMS), expected_step.init(PARAMS), []
    for number in range(8):
        words = batch(number) if number % 4 < 2 else jnp.tile(batch(number), (1, 2))
        state, metrics = step(state, words)
        expected, same = expected_step(expected, words)
        seen.append(on_device(state) == set(ALL))
        np.testing.assert_allclose(float(metrics["loss"]), float(same["loss"]), rtol=1e-5)
    assert seen == [True, True, False, False] * 2
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("is_wide", [(True, False), (False, True)], ids=["host first", "device first"])
def test_sums_follow_the_updates_between_micro_batches(is_wide):
    probe = make(ALL, accumulate=2)
    train(probe, probe.init(PARAMS), 2)
    budget = probe.prepare(jnp.tile(batch(0), (1, 2))).peak.total - 1
    step, expected_step = make(ALL, accumulate=2, memory_budget=budget), make(accumulate=2)
    state, expected, places = step.init(PARAMS), expected_step.init(PARAMS), []
    for number in range(4):
        words = jnp.tile(batch(number), (1, 1 + is_wide[number % 2]))
        state, _ = step(state, words)
        expected, _ = expected_step(expected, words)
        places.append(on_device(state) == set(ALL))
    assert places == [not wide for wide in is_wide] * 2
    assert_close(state.params, expected.params)


def test_memory_counts_state_and_gradients_and_a_budget_below_moves_updates_to_the_host(monkeypatch):
    monkeypatch.setattr(Placement, "allocator", None)  # what XLA's takes beyond buffers is more than these
    step, host = make(ALL), make([])
    on, off = (each.prepare(batch(0)) if train(each, each.init(PARAMS), 1) else None for each in (step, host))
    num = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert on.peak.total > off.peak.total + 12 * num - 2 * 4 * num
    tight = make(ALL, memory_budget=on.peak.total - 1)
    state, _ = train(tight, tight.init(PARAMS), 1)
    assert 0 < len(on_device(state)) < len(ALL)  # as few as possible move
    assert tight.prepare(batch(0)).peak.total < on.peak.total
    least = make(ALL, memory_budget=off.peak.total)
    state, _ = train(least, least.init(PARAMS), 1)
    assert not on_device(state)
    roomy = make(ALL, memory_budget=on.peak.total)
    state, _ = train(roomy, roomy.init(PARAMS), 1)
    assert on_device(state) == set(ALL)
    assert roomy.prepare(batch(0)).peak == on.peak and roomy.prepare(batch(0)).peak.total == on.peak.total


@pytest.mark.parametrize("optimizer", [jaxferry.adamw(1e-2), *slow(JOINT)], ids=["by layer", "joint"])
@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_auto_on_a_known_gpu_is_plain_training_if_everything_fits_and_less_of_it_in_less_memory(optimizer, monkeypatch):
    expected_step = make(optimizer=optimizer)
    _, expected = train(expected_step, expected_step.init(PARAMS), 2)
    emulate(monkeypatch)
    monkeypatch.setattr(Placement, "device_kind", "NVIDIA H200")
    slow_host = dataclasses.replace(MACHINES["h200-pcie5"], host_bytes_per_s=1e6)
    costs = partition_costs(partition(loss_fn, PARAMS, (batch(0),)))
    options = {"policy": "auto", "profile": estimate_profile(costs, slow_host), "compute_dtype": jnp.float32}

    def train_within(budget):
        step = jaxferry.train_step(loss_fn, optimizer, memory_budget=budget, **options)
        state, losses = train(step, step.init(PARAMS), 2)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        return on_device(state), step.prepare(batch(0))

    everything, prepared = train_within(None)
    assert everything == set(ALL) and {task.lane.value for task in prepared.schedule.tasks} == {"GPU"}
    some, tight = train_within(int(0.8 * prepared.peak.total))
    assert some < everything and tight.peak.total <= 0.8 * prepared.peak.total
    assert optimizer is not JOINT or not some


def test_a_measured_profile_says_what_the_step_plans_with(monkeypatch):
    emulate(monkeypatch)  # a device of no known kind, for which nothing is estimated
    profile = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2)).measure(PARAMS, batch(0))
    assert all(layer.update_gpu_s > 0 < layer.update_streamed_s for layer in profile.layers)
    sizes = {layer.parameters: layer.state_bytes for layer in profile.layers}
    # AdamW: masters, two moments in fp32, and the count of each update.
    assert sizes["embed"] == 12 * WORDS * WIDTH + 4
    step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2), policy="auto", profile=profile)
    step.init(PARAMS)
    assert step.prepare(batch(0)).plan.predicted == make_plan(profile, "auto").predicted


@pytest.mark.slow
def test_more_memory_is_never_slower_although_updates_need_more_than_the_profile_says(monkeypatch):
    """Programs of updates need temporaries, which are known once they are compiled. The host is slow."""
    emulate(monkeypatch)
    width, draw = 64, np.random.default_rng(0)
    params = {f"layer_{i}": draw.normal(scale=1 / 8, size=(width, width)).astype(np.float32) for i in range(3)}
    loss_fn, x = chain(residual=True), jnp.ones((4, width))
    known = jaxferry.train_step(loss_fn, optax.adamw(1e-2)).measure(params, x)
    seconds = {"update_s": 0.02, "update_gpu_s": 1e-4, "state_up_s": 2e-4, "state_down_s": 2e-4}
    seconds |= dict.fromkeys(("load_s", "offload_s", "forward_read_s", "backward_read_s", "backward_write_s"), 1e-4)
    seconds |= dict.fromkeys(("forward_s", "forward_dha_s"), 2e-3)
    seconds |= dict.fromkeys(("backward_s", "backward_dha_s", "backward_go_s"), 4e-3)
    profile = dataclasses.replace(known, layers=tuple(dataclasses.replace(x, **seconds) for x in known.layers))

    def prepared(**options):
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), profile=profile, **options)
        step.init(params)
        return step.prepare(x)

    most = needed_bytes(profile, make_plan(profile, "auto"))
    before_s, num_over = np.inf, 0
    for share in (0.4, 1.0):
        plan = make_plan(profile, "auto", memory_budget_bytes=int(share * most))
        num_over += prepared(plan=plan, memory_budget="none").peak.total > share * most
        found = prepared(policy="auto", memory_budget=int(share * most))
        assert found.peak.total <= share * most
        assert found.plan.predicted.steady_step_s <= before_s * (1 + 1e-9)
        before_s = found.plan.predicted.steady_step_s
    assert num_over
