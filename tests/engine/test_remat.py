"""Steps whose segments recompute: memory, bits, and the effect of a memory budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.costs import Profile
from jaxferry.engine import derivatives_of
from jaxferry.modes import Mode, Remat
from jaxferry.step import LayerPlan, Plan
from planned import assert_same_bits, plan_of, prepared, train
from watched import watched_steps

POLICY = jax.checkpoint_policies.dots_saveable
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)


@pytest.fixture(scope="module")
def gpt():
    """A model whose activations are large relative to its layers."""
    return dataclasses.replace(models.mlp(), batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 128))


def smallest_of(task, **options):
    with pytest.raises(jaxferry.BudgetError) as caught:
        prepared(task, ADAMW, memory_budget=1, **options)
    return caught.value.smallest_bytes


def test_a_plan_that_recomputes_has_the_bits_of_the_same_remat_and_about_the_losses_of_none(gpt):
    task, levels = gpt, {"h_0": "products", "h_2": "full"}
    plan = plan_of(task, [Mode.RELOAD, Mode.GFGB])
    layers = [dataclasses.replace(x, remat=levels.get(x.name, "none")) for x in plan.layers]
    by_plan = jaxferry.train_step(task.loss_fn, ADAMW, plan=dataclasses.replace(plan, layers=tuple(layers)))
    by_name = jaxferry.train_step(task.loss_fn, ADAMW, remat=levels)
    (state, losses), (other, others) = train(by_plan, task, 4), train(by_name, task, 4)
    assert losses == others
    assert_same_bits(state.params, other.params)
    np.testing.assert_allclose(losses, train(jaxferry.train_step(task.loss_fn, ADAMW), task, 4)[1], rtol=1e-6)
    chosen = by_plan.prepare(task.batch)
    names = [segment.name for segment in chosen.partition.segments]
    assert {name: kept for name, kept in zip(names, chosen.remat, strict=True) if kept != "none"} == levels
    assert by_plan.prepare(task.batch).peak.counted < by_name.prepare(task.batch).peak.counted


def test_full_recomputation_keeps_what_crosses_segments_alone(gpt):
    made = prepared(gpt, ADAMW, remat="full")
    derivatives = made.program.derivatives
    assert all(derivatives[segment.program].saved == () for segment in made.partition.segments)


@pytest.mark.slow
def test_auto_recomputes_only_what_a_budget_asks_for_and_none_stays_none(gpt, monkeypatch):
    without, with_it = smallest_of(gpt), smallest_of(gpt, remat="auto")
    assert with_it < 0.8 * without
    with pytest.raises(jaxferry.BudgetError, match="remat='auto' needs less"):
        prepared(gpt, ADAMW, memory_budget=without - 1)
    with pytest.raises(jaxferry.BudgetError, match=r"with \d segments? that recomputes? ") as caught:
        prepared(gpt, ADAMW, memory_budget=with_it - 1, remat="auto")
    assert caught.value.smallest_bytes == with_it
    assert set(prepared(gpt, ADAMW, memory_budget=without, remat="auto").remat) == {"none"}
    counts = []
    for budget in np.linspace(with_it, without - 1, 2).astype(int).tolist():
        watch, _, made, _ = watched_steps(gpt, monkeypatch, memory_budget=budget, remat="auto")
        assert watch.most <= made.peak.total <= budget
        counts.append(made.remat.count("full"))
    assert f"with {counts[0]} segments" in str(caught.value)
    assert counts[0] >= counts[1] > 0


def test_segments_that_are_not_left_to_the_plan_stay_as_they_are(gpt):
    choices = {"h_0": "auto", "h_1": "auto", "h_2": POLICY}
    made = prepared(gpt, ADAMW, memory_budget=smallest_of(gpt, remat=choices), remat=choices)
    chosen = {segment.name: kept for segment, kept in zip(made.partition.segments, made.remat, strict=True)}
    assert (chosen["h_0"], chosen["h_1"], chosen["h_2"], chosen["h_3"]) == ("full", "full", POLICY, "none")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_policy_auto_chooses_recomputation_by_the_profile_and_the_same_plan_is_run_again(gpt, tmp_path, profile):
    """By the planner's count of bytes, which has no temporaries; so with a smaller budget than the engine's."""
    options = {"policy": "auto", "profile": profile}
    budget = smallest_of(gpt, remat="auto", **options)
    made = prepared(gpt, ADAMW, memory_budget=int(1.02 * budget), remat="auto", **options)
    assert any(made.plan.recomputes) and made.remat.count("full") >= sum(made.plan.recomputes)
    assert not any(prepared(gpt, ADAMW, memory_budget=2**30, remat="none", **options).plan.recomputes)
    made.plan.save(tmp_path / "plan.json")
    again = prepared(gpt, ADAMW, plan=Plan.load(tmp_path / "plan.json"))
    assert again.plan == made.plan and again.remat.count("full") == sum(made.plan.recomputes)


@pytest.mark.slow
def test_a_measured_profile_says_what_recomputation_costs_where_the_plan_may_choose(gpt):
    def profile_of(remat):
        step = jaxferry.train_step(gpt.loss_fn, SGD, remat=remat)
        return step.measure(gpt.params, gpt.batch)

    left, fixed = profile_of("auto"), profile_of("none")
    assert {layer.name for layer in left.layers if layer.can_recompute} == {"h_0", "h_1", "h_2", "h_3", "ln_f"}
    assert not any(layer.can_recompute for layer in fixed.layers)
    for layer in left.layers:
        if layer.can_recompute:
            assert layer.recompute_activation_bytes < layer.activation_bytes
    # The extra time of these tiny programs is within a shared machine's noise.
    assert all(layer.recompute_s is not None for layer in left.layers if layer.can_recompute)
    assert Profile.from_json(left.to_json()) == left


def activated(first):
    """Layers whose plain backward reads no parameters where it needs no cotangent, as that of the first one."""
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": generator.normal(size=(8, 8), scale=0.5).astype(np.float32)} for i in range(4)}

    def loss_fn(params, x):
        for i in range(4):
            x = (jax.nn.gelu if i == 0 or not first else jnp.tanh)(x @ params[f"l{i}"]["w"])
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, generator.normal(size=(16, 8)).astype(np.float32)


@pytest.mark.parametrize("mode", [Mode.RELOAD, Mode.DFGB])
def test_a_backward_that_runs_its_forward_again_reads_parameters(mode):
    loss_fn, params, batch = activated(first=False)
    losses = []
    for first in (LayerPlan("l0", Mode.GFGB), LayerPlan("l0", mode, remat=Remat.FULL)):
        plan = Plan("any", 1.0, (first, *(LayerPlan(f"l{i}", Mode.GFGB) for i in (1, 2, 3))))
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), plan=plan)
        state = step.init(params)
        parts = step.prepare(batch).partition
        assert not derivatives_of(parts, "none")[parts.segments[0].program].weights_read
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("memferry", False),
        *(
            pytest.param(policy, first, marks=pytest.mark.slow)
            for policy in ("native-overlapped", "auto", "memferry")
            for first in (True, False)
            if (policy, first) != ("memferry", False)
        ),
    ],
)
def test_every_budget_from_the_smallest_trains(policy, first):
    loss_fn, params, batch = activated(first)
    options = {"profile": jaxferry.train_step(loss_fn, optax.sgd(0.1), remat="auto").measure(params, batch)}
    options |= {"remat": "auto", "policy": policy}
    tiny = jaxferry.train_step(loss_fn, optax.sgd(0.1), memory_budget=1, **options)
    tiny.init(params)
    with pytest.raises(jaxferry.BudgetError) as error:
        tiny.prepare(batch)
    for budget in (error.value.smallest_bytes, int(error.value.smallest_bytes * 1.1)):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), memory_budget=budget, **options)
        _, metrics = step(step.init(params), batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss_fn(params, batch)), rel=1e-5)
        assert step.prepare(batch).peak.total <= budget


@pytest.mark.parametrize("remat", ["auto", {"l1": "auto"}])
def test_values_that_leave_the_device_need_a_fixed_remat(remat):
    loss_fn, params, batch = activated(first=False)
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), remat=remat, offload_activations=True)
    step.init(params)
    with pytest.raises(jaxferry.InputError, match=r"offload_activations=True needs a remat= that no plan changes"):
        step.prepare(batch)
