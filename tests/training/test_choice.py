"""The plans that training steps receive from policies."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxferry
from jaxferry.costs import MACHINES, LayerProfile, Profile, estimate_profile, partition_costs
from jaxferry.engine import RematVariants, derivatives_of, with_program_facts
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import partition
from jaxferry.planner import make_plan, with_update_order
from jaxferry.step import schedule_step, steady_step_s
from jaxferry.training import Planning, choose_plan
from models import chain
from slowly import slow

loss_fn = chain()


@pytest.fixture(scope="module")
def parts():
    params = {f"layer{index}": {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)} for index in range(4)}
    return partition(loss_fn, params, (jax.ShapeDtypeStruct((8, 64), jnp.float32),))


@pytest.mark.parametrize("policy", ["auto", "exact", "memferry"])
def test_a_budget_that_a_policy_cannot_meet_gets_its_leanest_plan(parts, policy):
    """The engine counts bytes itself afterwards; a plan without a memory limit would be far from fitting."""
    profile = estimate_profile(partition_costs(parts, "none"), MACHINES["h200-pcie5"])
    profile = with_program_facts(profile, parts, derivatives_of(parts, "none"))
    with pytest.raises(BudgetError) as caught:
        make_plan(profile, policy, memory_budget_bytes=1)
    options = Planning(policy=policy, memory_budget_bytes=1)
    plan = choose_plan(RematVariants(parts, "none"), options, profile)
    assert plan.predicted is not None
    assert plan.predicted.peak_device_bytes == caught.value.smallest_bytes
    assert Mode.RESIDENT not in plan.modes


@pytest.mark.parametrize("policy", ["exact", *slow("auto")])
def test_the_smallest_budget_that_an_error_names_is_enough(policy):
    """An estimate has no temporaries, so within that budget the policy would choose a plan that does not fit."""
    width, depth, batch = 64, 4, jax.ShapeDtypeStruct((2048,), jnp.int32)
    shapes = {f"l{i}": {"w": (width, 4 * width), "v": (4 * width, width)} for i in range(depth)}
    shapes = {"table": {"w": (500, width)}, **shapes}
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=_is_shape)

    def loss_fn(params, tokens):
        x = params["table"]["w"][tokens]
        for i in range(depth):
            x = x + jnp.tanh(x @ params[f"l{i}"]["w"]) @ params[f"l{i}"]["v"]
        return jnp.mean(jax.nn.logsumexp(x @ params["table"]["w"].T, -1))

    parts = partition(loss_fn, params, (batch,))
    profile = estimate_profile(partition_costs(parts, "none"), MACHINES["a100-pcie3"])

    def prepare(budget):
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-3), policy=policy, profile=profile, memory_budget=budget)
        step.declare(params)
        return step.prepare(batch)

    with pytest.raises(BudgetError) as caught:
        prepare(1)
    least = caught.value.smallest_bytes
    assert prepare(least).peak.total <= least
    # Without temporaries a policy cannot know its leanest plan; for less, another plan may fit. Far less never does.
    with contextlib.suppress(BudgetError):
        assert prepare(least - 1).peak.total < least
    with pytest.raises(BudgetError) as caught:
        prepare(least * 9 // 10)
    assert caught.value.smallest_bytes <= least


def _is_shape(x):
    return isinstance(x, tuple)


NUM_LAYERS = 16


def busy_profile(compute_s=1.0, load_s=0.9, offload_s=0.7, update_s=0.9):
    """Equal layers whose lanes are nearly equally busy; arguments are totals over all layers."""
    layer = LayerProfile(
        name="layer",
        param_bytes=1000,
        grad_bytes=1000,
        load_s=load_s,
        offload_s=offload_s,
        update_s=update_s,
        forward_s=compute_s / 3,
        forward_dha_s=max(compute_s / 3, load_s),
        backward_s=2 * compute_s / 3,
        backward_dha_s=max(2 * compute_s / 3, load_s),
        backward_go_s=max(2 * compute_s / 3, offload_s),
    )
    known = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    times = {key: value / NUM_LAYERS for key, value in known.items() if key.endswith("_s") and value is not None}
    layers = [dataclasses.replace(layer, name=f"layer{i}", parameters=f"layer{i}", **times) for i in range(NUM_LAYERS)]
    return Profile({}, tuple(layers))


@pytest.mark.parametrize(
    ("policy", "mode", "is_by_need"), [("native-overlapped", Mode.GFGB, True), ("go-memferry", Mode.RESIDENT, False)]
)
def test_the_host_updates_in_the_order_that_makes_steps_shorter(policy, mode, is_by_need):
    profile = busy_profile()
    plan = make_plan(profile, policy)
    layers = (dataclasses.replace(layer, mode=mode) for layer in plan.layers)
    plan = with_update_order(profile, dataclasses.replace(plan, layers=tuple(layers)))
    assert plan.update_order == ("need" if is_by_need else "backward")
    other = dataclasses.replace(plan, update_order="backward" if is_by_need else "need")
    times = [steady_step_s(schedule_step(profile, each)) for each in (plan, other)]
    assert times[0] < 0.95 * times[1]
    assert with_update_order(profile, other).update_order == plan.update_order


@pytest.mark.parametrize("mode", [Mode.GFGB, Mode.RESIDENT])
def test_without_times_copies_that_are_refreshed_decide_on_the_order(mode):
    profile = busy_profile(0, 0, 0, 0)
    plan = make_plan(profile, "native-overlapped")
    plan = dataclasses.replace(plan, layers=tuple(dataclasses.replace(layer, mode=mode) for layer in plan.layers))
    assert with_update_order(profile, plan).update_order == ("need" if mode is Mode.GFGB else "backward")
