"""Profiles become instances, and choices become plans."""

from typing import Any

import pytest

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.step import Plan, simulate
from jaxferry.weights import Choice, export_plan, greedy, instance_from_profile


def _layer(name: str, **changes: float) -> LayerProfile:
    values: dict[str, Any] = dict.fromkeys(
        ("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s"), 1.0
    )
    values |= {"offload_s": 1.0, "update_s": 1.0, "param_bytes": 10, "grad_bytes": 10, "activation_bytes": 2}
    return LayerProfile(name=name, **(values | changes))


PROFILE = Profile({}, tuple(_layer(f"block{k}") for k in range(4)))


def test_a_profile_as_an_instance() -> None:
    profile = Profile({}, (_layer("a", inter_forward_s=0.5), _layer("b", load_s=3.0, inter_backward_s=0.25)))
    instance = instance_from_profile(profile, 100)
    assert (instance.weights, instance.activations) == ((10, 10), (0, 2, 2))
    assert (instance.forward_s, instance.backward_s) == ((1.5, 1.0), (1.0, 1.25))
    assert instance.bandwidth_bytes_per_s == 5.0


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(InputError, match="no bandwidth"):
        instance_from_profile(Profile({}, (_layer("a", load_s=0.0),)), 100)


def test_choice_a_becomes_reload_and_the_rest_is_loaded_once() -> None:
    plan = export_plan(PROFILE, "greedy", [Choice(1, True), Choice(1, False), Choice(2, False)])
    assert plan.modes == (Mode.GFGB, Mode.RELOAD, Mode.GFGB, Mode.GFGB)
    assert plan.policy == "weights-greedy"
    assert Plan.from_json(plan.to_json()) == plan


def test_an_exported_plan_runs_and_needs_less_memory_than_loading_everything() -> None:
    choices = greedy(instance_from_profile(PROFILE, 38)).choices
    plan = export_plan(PROFILE, "greedy", choices)
    everything = export_plan(PROFILE, "greedy", [])
    assert Mode.RELOAD in plan.modes
    assert simulate(PROFILE, plan).peak_device_bytes <= simulate(PROFILE, everything).peak_device_bytes


def test_choices_for_another_profile_are_refused() -> None:
    with pytest.raises(InputError, match="no layer 7"):
        export_plan(PROFILE, "greedy", [Choice(7, True)])
