"""Why a layer is treated as it is: the figures stated are those of the plans with another choice."""

import dataclasses
import re

import pytest

from jaxferry.cli.reasons import layer_reasons
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.planner.planning import make_plan
from jaxferry.step.records import LayerPlan, Plan
from jaxferry.units import format_seconds
from profiles import transformer


def test_each_layer_names_the_other_choice_that_comes_closest():
    profile = transformer(8)
    plan = make_plan(profile, "auto")
    own_s = PlanEvaluator(profile).plan(plan).steady_step_s[0]
    for number, reason in enumerate(layer_reasons(profile, plan)):
        chosen, found = plan.layers[number], []
        others = [chosen.with_mode(mode) for mode in Mode if mode is not chosen.mode]
        place = GradientPlace.HOST if chosen.gradient is GradientPlace.DEVICE else GradientPlace.DEVICE
        for other in [*others, dataclasses.replace(chosen, gradient=place)]:
            layers = (*plan.layers[:number], other, *plan.layers[number + 1 :])
            found.append(PlanEvaluator(profile).plan(dataclasses.replace(plan, layers=layers)).steady_step_s[0])
        change_s = min(found) - own_s
        if abs(change_s) > 0.01 * own_s:
            assert f"a step takes {format_seconds(abs(change_s))} {'longer' if change_s > 0 else 'less'}" in reason
        else:
            assert "takes as long" in reason


def test_a_faster_choice_beyond_the_budget_is_told_with_what_it_needs():
    profile = transformer(8)
    plan = Plan("l2l", 1.0, tuple(LayerPlan(layer.name, Mode.RELOAD) for layer in profile.layers))
    budget = int(PlanEvaluator(profile).plan(plan).needed_bytes[0])
    reasons = layer_reasons(profile, plan, budget)
    assert any(re.search(r"with \w+ a step takes .* less, but needs .* [MG]iB", reason) for reason in reasons)
    assert not any("but needs" in reason for reason in layer_reasons(profile, plan))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.GFGB, "one load of 40.00 ms; reading host memory in place would add 30.00 ms"),
        (Mode.DHA, "adds 30.00 ms of compute and saves a load of 40.00 ms"),
        (Mode.DFGB, r"in place \(\+10.00 ms\)"),
        (Mode.RELOAD, "two loads of 40.00 ms"),
        (Mode.RESIDENT, "no forward waits for a load of 40.00 ms"),
    ],
)
def test_a_mode_is_told_with_its_costs(mode, words):
    profile = transformer(6)
    times = {"load_s": 0.04, "forward_s": 0.1, "forward_dha_s": 0.11, "backward_s": 0.2, "backward_dha_s": 0.22}
    layers = list(profile.layers)
    layers[2] = dataclasses.replace(layers[2], **times)
    plans = [LayerPlan(layer.name, Mode.GFGB) for layer in layers]
    plans[2] = LayerPlan(layers[2].name, mode)
    reasons = layer_reasons(dataclasses.replace(profile, layers=tuple(layers)), Plan("auto", 1.0, tuple(plans)))
    assert re.search(words, reasons[2])
