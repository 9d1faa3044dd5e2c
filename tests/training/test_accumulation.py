"""Gradients of several micro-batches for one update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.errors import StateError
from jaxferry.modes import GradientPlace, Mode
from models import chain
from planned import assert_near, assert_same_bits, plan_of, take_steps
from slowly import slow
from steps import with_sums_in_host_memory

N = 3


def batches_of(task):
    """Seven batches of the task's shape."""

    def other(leaf, seed):
        return np.random.default_rng(seed).permutation(np.asarray(leaf).ravel()).reshape(leaf.shape)

    return [jax.tree.map(lambda leaf, seed=seed: other(leaf, seed), task.batch) for seed in range(7)]


@pytest.fixture(scope="module")
def batches(gpt):
    return batches_of(gpt)


def train(step, params, batches):
    state, losses = take_steps(step, step.init(params), batches)
    return state, losses


def test_gradients_stay_on_the_device_within_the_budget_and_else_are_added_up_in_host_memory(gpt, batches):
    free = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), accumulate=N)
    expected, _ = train(free, gpt.params, batches)
    assert free.prepare(gpt.batch).program.summed
    assert expected.accumulated.on_device
    once = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    once.init(gpt.params)
    budget = once.prepare(gpt.batch).peak.total
    tight = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), accumulate=N, memory_budget=budget)
    state, _ = train(tight, gpt.params, batches)
    assert tight.prepare(gpt.batch).peak.total <= budget < free.prepare(gpt.batch).peak.total
    assert not tight.prepare(gpt.batch).program.summed
    assert_same_bits(state.params, expected.params)
    assert set(tight.prepare(gpt.batch).modes) == {Mode.GFGB}


def test_only_the_last_micro_batch_updates_and_tells_the_norm_of_the_mean(gpt, batches):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), accumulate=N)
    state = step.init(gpt.params)
    gradient, gradients = jax.jit(jax.grad(gpt.loss_fn)), []
    for batch in batches[:N]:
        assert_same_bits(state.params, gpt.params)
        gradients.append(gradient(gpt.params, batch))
        state, metrics = step(state, batch)
        assert ("grad_norm" in metrics) == (len(gradients) == N)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / N, *gradients)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(mean)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    jax.tree.map(
        lambda new, old, g: np.testing.assert_allclose(new, old - 0.1 * g, rtol=1e-4, atol=1e-6),
        state.params,
        gpt.params,
        mean,
    )


def test_a_checkpoint_is_that_of_the_last_update(gpt, batches, tmp_path):
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-2), accumulate=N)
    state, _ = train(step, gpt.params, batches[:5])
    step.save(state, tmp_path / "saved")
    resumed = step.restore(tmp_path / "saved")
    assert resumed.step == 3
    for batch in batches[3:]:
        resumed, _ = step(resumed, batch)
    for batch in batches[5:]:
        state, _ = step(state, batch)
    assert_same_bits(resumed.params, state.params)
    assert (state.step, state.updated_step) == (resumed.step, resumed.updated_step) == (7, 6)


def bad_loss(params, x):
    return jnp.mean((x @ params["a"]["w"]) ** 2)


@pytest.mark.parametrize("place", [0, *slow(*range(1, N))])
def test_a_loss_that_is_not_finite_drops_what_was_accumulated(place):
    params, x = {"a": {"w": np.eye(4, dtype=np.float32)}}, np.ones((2, 4), np.float32)
    batches = [x * (np.nan if i == place else 1.0) for i in range(N)]
    step = jaxferry.train_step(bad_loss, optax.sgd(0.1), accumulate=N)
    state = step.init(params)
    with pytest.raises(jaxferry.NonFiniteError, match="the state is that after the last update"):
        for batch in batches:
            state, _ = step(state, batch)
    assert state.step == 0 and not state.accumulated.num_batches
    assert_same_bits(state.params, params)
    skipping = jaxferry.train_step(bad_loss, optax.sgd(0.1), accumulate=N, skip_nonfinite=True)
    state, skipped = skipping.init(params), []
    for batch in (*batches, x, x, x):
        state, metrics = skipping(state, batch)
        skipped.append(metrics["skipped"])
    assert skipped == [i >= place for i in range(N)] + [False] * N
    once = jaxferry.train_step(bad_loss, optax.sgd(0.1))
    expected, _ = once(once.init(params), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, expected.params)


@pytest.mark.parametrize("lengths", [(8, 30, 8), *slow((30, 8, 8), (8, 8, 30))])
def test_micro_batches_may_differ_in_shape_so_that_a_lookup_is_dense_in_some(lengths):
    generator = np.random.default_rng(0)
    params = {
        "table": generator.normal(size=(20, 8)).astype(np.float32),
        "out": {"w": generator.normal(size=(8, 8)).astype(np.float32)},
    }

    def loss_fn(params, tokens):
        return jnp.mean((jnp.tanh(params["table"][tokens] @ params["out"]["w"]) - 0.3) ** 2)

    batches = [generator.integers(0, 20, length).astype(np.int32) for length in lengths]
    step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2), accumulate=N)
    state, _ = train(step, params, batches)
    gradients = [jax.grad(loss_fn)(params, batch) for batch in batches]
    mean = jax.tree.map(lambda *each: sum(each) / N, *gradients)
    updates, _ = optax.adamw(1e-2).update(mean, optax.adamw(1e-2).init(params), params)
    expected = optax.apply_updates(params, updates)
    assert_near(state.params, expected, atol=1e-5)


@pytest.mark.parametrize("order", ["dhd", *slow("nhd", "hdd", "dnd", "ddh", "dhh", "hdh", "ddn")])
def test_micro_batches_may_differ_in_shape_and_so_in_where_their_plans_add_up_gradients(gpt, monkeypatch, order):
    """Plans that sum on the device, by programs in host memory, or in host memory for lack of room."""
    rows = {"d": [0, 1], "h": [1], "n": [1, 0, 1]}
    whole = {name: jax.tree.map(lambda leaf, of=of: np.asarray(leaf)[of], gpt.batch) for name, of in rows.items()}
    places = {"d": GradientPlace.DEVICE, "h": GradientPlace.HOST, "n": GradientPlace.DEVICE}

    def run(places):
        step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-2), accumulate=N, clip_norm=1.0)
        state = step.init(gpt.params)
        for shape in 2 * order:
            plan = plan_of(gpt, [Mode.GFGB], [places[shape]])
            with monkeypatch.context() as patch:
                patch.setattr("jaxferry.training.step.choose_plan", lambda *_, chosen=plan: chosen)
                prepared = step.prepare(whole[shape])
            assert prepared.plan.layers == plan.layers
            if shape == "n":
                with_sums_in_host_memory(prepared)
            state, _ = step(state, whole[shape])
            assert state.accumulated.on_device.keys() <= prepared.runner.runnable.program.summed
        return state.params

    assert_same_bits(run(places), run(dict.fromkeys(places, GradientPlace.HOST)))


def test_the_prediction_has_the_last_micro_batch_offload_sums_in_fp32():
    """Only offloads take time, a second each: sums of bfloat16 gradients are twice as wide."""
    params, batch = {name: np.eye(4, dtype=np.float32) for name in "abc"}, jnp.ones((2, 4))

    # gradients of several uses are summed in host memory
    loss_fn = chain(("a", "b", "c", "b"))

    def prepared(**options):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), compute_dtype=jnp.bfloat16, **options)
        step.init(params)
        return step.prepare(batch)

    sizes = prepared().profile
    profile = dataclasses.replace(
        sizes, layers=tuple(dataclasses.replace(each, offload_s=1.0) for each in sizes.layers)
    )
    one, many = prepared(profile=profile), prepared(profile=profile, accumulate=N)
    assert one.plan.predicted.steady_step_s == pytest.approx(4)
    assert many.plan.predicted.steady_step_s == pytest.approx(6)
    assert [layer.sum_bytes for layer in many.profile.layers] == [4 * 16, 0, 4 * 16, 0]
    again, back = prepared(profile=many.profile, accumulate=N), prepared(profile=many.profile)
    assert (again.profile, back.profile) == (many.profile, one.profile)
    tight = prepared(profile=profile, accumulate=N, memory_budget=one.peak.total)
    assert not tight.program.summed
    assert tight.plan.predicted.steady_step_s == pytest.approx(4)


TOKENS = (4, 64, 32, 60)


def token_loss(params, batch):
    """The mean loss of the valid tokens, and their number."""
    x = jnp.tanh(batch["x"].astype(params["a"].dtype) @ params["a"])
    losses = optax.softmax_cross_entropy_with_integer_labels((x @ params["b"]).astype(jnp.float32), batch["y"])
    num = batch["mask"].sum()
    return (losses * batch["mask"]).sum() / jnp.maximum(num, 1), {"num_tokens": num, "largest": losses.max()}


def padded(nums):
    """Batches of 64 tokens, of which so many are valid."""
    generator = np.random.default_rng(0)
    return [
        {
            "x": generator.normal(size=(64, 16)).astype(np.float32),
            "y": generator.integers(0, 8, 64).astype(np.int32),
            "mask": (np.arange(64) < num).astype(np.float32),
        }
        for num in nums
    ]


WIDE = {
    "a": 0.3 * np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32),
    "b": np.eye(16, 8, dtype=np.float32),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1},
        {"loss_scale": 64.0, "skip_nonfinite": True},
        {"mesh": 2},
        {"plan": GradientPlace.HOST},
        {"compute_dtype": jnp.float16},
    ],
    ids=str,
)
def test_the_gradient_of_weighed_micro_batches_is_that_of_one_large_batch(options):
    batches = padded(TOKENS)
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    (loss, _), gradient = jax.value_and_grad(token_loss, has_aux=True)(WIDE, whole)
    norm = optax.tree.norm(gradient)
    if "clip_norm" in options:
        gradient, _ = optax.clip_by_global_norm(0.1).update(gradient, optax.EmptyState())
    if "mesh" in options:
        options = {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])}
    if "plan" in options:
        options = {"plan": plan_of(models.Task(token_loss, WIDE, batches[0]), [Mode.GFGB], [options["plan"]])}
    step = jaxferry.train_step(token_loss, optax.sgd(1.0), accumulate=len(TOKENS), weight="num_tokens", **options)
    state, tolerance = step.init(WIDE), {"rtol": 5e-3 if "compute_dtype" in options else 1e-5}
    first = step.evaluate(state, batches[0])
    metrics = {"skipped": True}
    while metrics.get("skipped"):  # a dynamic loss scale begins too large
        for number, batch in enumerate(batches):
            state, metrics = step(state, batch)
            assert ("mean_loss" in metrics) <= (number + 1 == len(batches))
            np.testing.assert_allclose(metrics["loss"], token_loss(WIDE, batch)[0], **tolerance)
            assert metrics["aux"]["num_tokens"] == TOKENS[number]
    np.testing.assert_allclose(metrics["mean_loss"], loss, **tolerance)
    np.testing.assert_allclose(metrics["grad_norm"], norm, **tolerance)
    for before, after, own in zip(*map(jax.tree.leaves, (WIDE, state.params, gradient)), strict=True):
        np.testing.assert_allclose(before - after, own, rtol=tolerance["rtol"], atol=1e-2 * tolerance["rtol"] ** 0.5)
    assert_near(first, token_loss(WIDE, batches[0]), **tolerance)


def test_a_micro_batch_of_weight_zero_adds_nothing():
    found = []
    for nums in ((8, 0, 24), (8, 24)):
        batches = [batch for batch, num in zip(padded((8, 0, 24)), (8, 0, 24), strict=True) if num in nums]
        step = jaxferry.train_step(token_loss, optax.sgd(1.0), accumulate=len(nums), weight="num_tokens")
        found.append(train(step, WIDE, batches)[0].params)
    assert_same_bits(*found)


def test_a_weight_that_depends_on_parameters_has_no_gradient():
    def loss_fn(params, batch):
        loss = jnp.sum(params["a"]["w"] * batch["x"])
        return loss, {"n": jnp.sum(params["a"]["w"] ** 2) * batch["n"]}

    params = {"a": {"w": np.full(2, 3, np.float32)}}
    batches = [{"x": np.array(x, np.float32), "n": np.float32(n)} for x, n in (((1, 2), 1), ((5, 6), 3))]
    step = jaxferry.train_step(loss_fn, optax.sgd(1.0), accumulate=2, weight="n")
    np.testing.assert_allclose(train(step, params, batches)[0].params["a"]["w"], [3 - 4, 3 - 5], rtol=1e-6)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_negative_weight_is_told_and_changes_nothing(skip_nonfinite):
    options = {"accumulate": 2, "weight": "n", "skip_nonfinite": skip_nonfinite}
    step = jaxferry.train_step(lambda p, n: (jnp.sum(p["a"]), {"n": n}), optax.sgd(1.0), **options)
    state = step.init({"a": np.ones(3, np.float32)})
    for weights in ([-1], [3, -1]):
        *others, negative = map(np.float32, weights)
        for weight in others:
            state, _ = step(state, weight)
        with pytest.raises(jaxferry.InputError, match=rf"weight must be 0 or more .* one in step {len(others)};"):
            step(state, negative)
    assert state.params["a"].tolist() == [1.0, 1.0, 1.0] and state.step == 0
    for _ in range(2):
        state, _ = step(state, np.float32(2))
    assert state.params["a"].tolist() == [0.0, 0.0, 0.0] and state.step == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_name_of_a_weight_is_checked_whether_it_is_read_or_not(accumulate):
    def take_step(weight):
        options = {"accumulate": accumulate, "weight": weight}
        step = jaxferry.train_step(lambda p, n: (jnp.sum(p["a"]), {"n": n}), optax.sgd(1.0), **options)
        return step(step.init({"a": np.ones(3, np.float32)}), np.float32(5))

    with pytest.raises(jaxferry.InputError, match=r"weight must name a real scalar in the aux .* 'm': no such entry"):
        take_step("m")
    _, metrics = take_step("n")
    assert metrics["loss"] == 3.0 and metrics["aux"] == {"n": 5.0}


@pytest.mark.parametrize("check", [None, False])
def test_weights_that_sum_to_zero_are_told_and_the_state_is_that_of_the_last_update(check):
    options = {"accumulate": 2, "weight": "num_tokens"}
    batches, nothing = padded((8, 8)), padded((0, 0))
    step = jaxferry.train_step(token_loss, optax.adam(1e-2), check_gradients=check, **options)
    state, _ = train(step, WIDE, batches)
    params = state.params
    with pytest.raises(jaxferry.NonFiniteError, match="the weights of the micro-batches up to step 3 sum to 0"):
        for batch in nothing:
            state, _ = step(state, batch)
    assert state.step == 2
    assert_same_bits(state.params, params)
    skipping = jaxferry.train_step(token_loss, optax.adam(1e-2), skip_nonfinite=True, **options)
    state, _ = train(skipping, WIDE, [*batches, *nothing])
    assert state.step == 4
    assert_same_bits(state.params, params)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, x: jnp.sum(p["a"] * x), "got 'n': no such entry"),
        (lambda p, x: (jnp.sum(p["a"] * x), {"m": 1}), "got 'n': no such entry"),
        (lambda p, x: (jnp.sum(p["a"] * x), {"n": x}), r"got 'n': float32\[3\]"),
        (lambda p, x: (jnp.sum(p["a"] * x), {"n": "4"}), "got 'n': str"),
        (lambda p, x: (jnp.sum(p["a"] * x), {"n": 1j * x[0]}), r"got 'n': complex64\[\]"),
        (lambda p, x: (jnp.sum(p["a"] * x), {"n": jax.random.key(0)}), r"got 'n': key<fry>\[\]"),
    ],
)
def test_a_weight_that_the_loss_function_does_not_return_is_refused(loss_fn, message):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), accumulate=2, weight="n")
    state = step.init({"a": np.ones(3, np.float32)})
    with pytest.raises(jaxferry.InputError, match=message):
        step(state, np.ones(3, np.float32))


def test_without_accumulation_a_weight_changes_no_bit():
    params = [
        train(jaxferry.train_step(token_loss, optax.adam(1e-2), **options), WIDE, padded(TOKENS))[0].params
        for options in ({}, {"weight": "num_tokens"})
    ]
    assert_same_bits(*params)


def test_the_last_micro_batch_must_read_what_earlier_ones_have_read():
    weights = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    params, x = {"a": weights, "b": weights}, np.ones((4, 8), np.float32)

    def loss_fn(params, batch):
        h = batch["x"] @ params["a"]
        return jnp.mean((h @ params["b"] if "all" in batch else h) ** 2)

    both, alone = {"x": x, "all": np.float32(0)}, {"x": x}
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), accumulate=2)
    state, _ = step(step.init(params), both)
    with pytest.raises(StateError, match=r"does not read layer .b., of which earlier ones have a gradient"):
        step(state, alone)
    state, _ = step(state, both)  # the refusal has changed nothing
    other = jaxferry.train_step(loss_fn, optax.adamw(1e-2), accumulate=2)
    expected = other.init(params)
    for _ in range(2):
        expected, _ = other(expected, both)
    assert_same_bits(state.params, expected.params)
    state, _ = step(state, alone)
    state, metrics = step(state, both)  # in this order it is the mean
    assert state.step == 4 and np.isfinite(metrics["loss"])
