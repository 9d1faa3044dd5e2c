"""The lower bounds by hand, each where one of its facts alone decides, and below any plan of groups of any shape."""

import itertools

import numpy as np
import pytest

from jaxferry.costs import LayerProfile, Profile
from jaxferry.planner import (
    PlanEvaluator,
    any_plan_lower_bound_s,
    gradient_tails,
    optimal_forward,
    steady_lower_bound_s,
    step_lower_bound_s,
)
from jaxferry.step import UNLIMITED, simulate
from profiles import drawn

NOTHING = dict.fromkeys(
    ("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s", "offload_s", "update_s"),
    0.0,
)
SLOW = {"load_s": 10.0, "forward_s": 1.0, "forward_dha_s": 4.0, "backward_s": 1.0, "backward_dha_s": 4.0}
SLOW |= {"offload_s": 10.0, "backward_go_s": 4.0}
"""By the link 10 seconds each way, by the GPU 3 seconds more in the forward, in the backward, and for the gradient."""
LOADED = {"forward_s": 1.0, "forward_dha_s": 90.0, "backward_s": 1.0, "backward_dha_s": 90.0, "backward_go_s": 90.0}
LOADED |= {"offload_s": 1.0}


def profile_of(*layers):
    sizes = {"param_bytes": 1, "grad_bytes": 1}
    return Profile({}, tuple(LayerProfile(**{"name": f"l{i}", **sizes, **NOTHING, **x}) for i, x in enumerate(layers)))


@pytest.mark.parametrize(
    ("layers", "bound_s"),
    [
        # The last update of a step belongs to either layer: 1 + 1 for the upper one, both updates.
        pytest.param([{**LOADED, "update_s": 5.0}] * 2, 12, id="all updates up to a layer"),
        # By DHA 11 on the GPU; a load for the backward takes 10 of the link and saves 3: t = 11 - 3 t / 10. With any
        # load before the forward or any transfer of the gradient, the layer's own loop takes longer.
        pytest.param([{}, SLOW], 110 / 13, id="the link's work"),
        # Likewise t = 12 - 3 t / 10.
        pytest.param([{**SLOW, "update_s": 1.0}], 120 / 13, id="the first layer's own loop"),
        pytest.param(
            [{"forward_s": 50.0, "forward_dha_s": 50.0, "has_gradient": False, "has_backward": False}, {**LOADED}],
            52,
            id="layers below the trained ones",
        ),
        # If the GPU writes a share x of the gradient, programs and update take 2 + 3 x + 1, the link down 10 - 10 x.
        pytest.param(
            [{**SLOW, "update_s": 1.0, "parameters": "t"}, {"load_s": 1.0, "parameters": "t"}],
            60 / 13,
            id="the gradient of a group of two layers",
        ),
        pytest.param(
            [{"load_s": 9.0, "forward_s": 1.0, "forward_dha_s": 4.0, "has_gradient": False, "has_backward": False}, {}],
            1,
            id="untrained layers may stay",
        ),
    ],
)
def test_the_bound_on_any_plan_by_hand(layers, bound_s):
    assert any_plan_lower_bound_s(profile_of(*layers)) == pytest.approx(bound_s, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "bound_s"),
    [
        # Forwards to 2, backward to 3, then the gradient's 10, the other gradient's 1, the other update's 1.
        pytest.param(
            [{**LOADED, "update_s": 1.0}, {**LOADED, "offload_s": 10.0, "update_s": 1.0}], 15, id="the gradient's tail"
        ),
        # Forwards to 2, backwards of 2, and of the 2 seconds that DHA costs the part 7 / 10 that the link cannot load.
        pytest.param(
            [
                {"load_s": 10.0, "forward_s": 1.0, "forward_dha_s": 1.0, "backward_s": 1.0, "backward_dha_s": 3.0},
                {"forward_s": 1.0, "forward_dha_s": 1.0, "backward_s": 1.0, "backward_dha_s": 1.0},
            ],
            5.4,
            id="loads that end in the window",
        ),
    ],
)
def test_the_bound_on_a_step_by_hand(layers, bound_s):
    profile = profile_of(*layers)
    forward_s = optimal_forward(profile).bound_s
    assert step_lower_bound_s(profile, np.zeros(len(layers), bool), forward_s) == pytest.approx(bound_s, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "bound_s"),
    [
        pytest.param([{**LOADED, "offload_s": 10.0}] * 3, 30, id="gradients on the link"),
        pytest.param([{**LOADED, "update_s": 5.0}] * 2, 13, id="all updates up to a layer"),
        pytest.param([{**LOADED, "load_s": 5.0, "update_s": 1.0}], 9, id="the first load's loop"),
    ],
)
def test_the_bound_on_a_period_by_hand(layers, bound_s):
    profile = profile_of(*layers)
    forward_s = optimal_forward(profile).bound_s
    assert steady_lower_bound_s(profile, np.zeros(len(layers), bool), forward_s) == pytest.approx(bound_s, rel=1e-9)


def test_all_lower_updates_follow_a_gradient_that_the_gpu_wrote():
    profile = profile_of({"update_s": 5.0}, {"update_s": 2.0, "offload_s": 9.0})
    assert gradient_tails(profile, np.array([True, True])).tolist() == [5, 7]
    assert gradient_tails(profile, np.array([True, False])).tolist() == [5, 11]


def test_no_plan_of_groups_of_any_shape_is_below_the_bounds():
    for profile, plan in itertools.chain(drawn(120, seed=8), drawn(60, seed=10, together=True)):
        assert simulate(profile, plan).steady_step_s >= any_plan_lower_bound_s(profile) * (1 - 1e-12)


def test_no_plan_of_the_paper_s_modes_is_below_the_bounds_for_its_gradients():
    for profile, plan in itertools.chain(drawn(50, seed=9), drawn(50, seed=11, together=True)):
        size = len(profile.layers)
        modes = np.indices((3,) * size).reshape(size, -1).T
        grad_on_host = np.array([place == "host" for place in plan.gradients])
        forward_s = optimal_forward(profile).bound_s
        step_s, period_s = (f(profile, grad_on_host, forward_s) for f in (step_lower_bound_s, steady_lower_bound_s))
        for by_need in (False, True):
            found = PlanEvaluator(profile)(modes, grad_on_host, by_need=by_need, memory_bytes=UNLIMITED, memory=False)
            assert found.forward_s.min() >= forward_s * (1 - 1e-12)
            assert found.step_s[found.in_window].min(initial=np.inf) >= step_s * (1 - 1e-12)
            assert found.steady_step_s[found.in_window].min(initial=np.inf) >= period_s * (1 - 1e-12)
