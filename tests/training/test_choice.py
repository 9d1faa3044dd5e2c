"""The plans that training steps receive from policies."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxferry
from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.engine import RematVariants, derivatives_of, with_program_facts
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import partition
from jaxferry.planner import make_plan
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


def test_the_smallest_budget_that_an_error_about_tiles_names_is_the_same_for_all_budgets_and_enough():
    """Tiles of one row each are among those that are tried, though six is no power of two."""
    widths = {"in": (8, 512), "out": (512, 8)}
    params = {name: {"w": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in widths.items()}
    batch = jax.ShapeDtypeStruct((6, 64, 8), jnp.float32)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["in"]["w"]) @ params["out"]["w"]) ** 2)

    def prepare(budget, tiles="auto"):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), memory_budget=budget, tiles=tiles)
        step.declare(params)
        return step.prepare(batch)

    def smallest(budget, tiles="auto"):
        with pytest.raises(BudgetError) as caught:
            prepare(budget, tiles)
        return caught.value.smallest_bytes

    least = smallest(1)
    assert least <= smallest(1, 6) < smallest(1, 4) and prepare(least).peak.total <= least
    assert smallest(least // 2) == least


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
