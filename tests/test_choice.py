"""Which plan a training step gets from a policy."""

import jax
import jax.numpy as jnp
import pytest

from jaxferry.choice import choose_plan
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import partition
from jaxferry.planning import make_plan
from jaxferry.profiling.estimate import estimate_profile
from jaxferry.profiling.machines import MACHINES
from jaxferry.profiling.segment_costs import partition_costs


def loss_fn(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"])
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def parts():
    params = {f"layer{index}": {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)} for index in range(4)}
    return partition(loss_fn, params, (jax.ShapeDtypeStruct((8, 64), jnp.float32),))


@pytest.mark.parametrize("policy", ["auto", "exact", "memferry"])
def test_a_budget_that_a_policy_cannot_meet_gets_its_leanest_plan(parts, policy):
    """The engine counts for itself afterwards; a plan for a device without limits would be far from fitting."""
    profile = estimate_profile(partition_costs(parts, "none"), MACHINES["h200-pcie5"])
    with pytest.raises(BudgetError) as caught:
        make_plan(profile, policy, memory_budget_bytes=1)
    plan, _ = choose_plan(
        parts,
        plan=None,
        policy=policy,
        profile=profile,
        device_kind="cpu",
        reserve_factor=None,
        memory_budget_bytes=1,
        remat="none",
    )
    assert plan.predicted is not None
    assert plan.predicted.peak_device_bytes == caught.value.smallest_bytes
    assert Mode.RESIDENT not in plan.modes
