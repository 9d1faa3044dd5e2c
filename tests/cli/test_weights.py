"""`jaxferry weights`: its table, its JSON, and the plan for a profile."""

import json

import pytest

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import Mode
from jaxferry.step import Plan
from jaxferry.weights import POLICIES, Event, Instance, Schedule
from profiles import INSTANCE
from weight_schedules import validate


@pytest.fixture
def instance(tmp_path):
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(INSTANCE))
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_duration_overhead_and_a_valid_schedule_are_printed(jaxferry, instance, policy):
    document = json.loads(jaxferry("weights", instance, "--policy", policy, "--json").out)
    assert (document["policy"], document["compute_s"]) == (policy, 40)
    assert document["duration_s"] >= 40 - 1e-9
    assert document["overhead"] == pytest.approx(document["duration_s"] / 40 - 1)
    assert all(set(choice) == {"layer", "absent"} for choice in document["choices"])
    if policy != "bound":
        schedule = Schedule(document["duration_s"], tuple(Event(**event) for event in document["schedule"]))
        validate(Instance.from_json(INSTANCE), schedule)
    shown = jaxferry("weights", instance, "--policy", policy).out
    assert all(text in shown for text in (policy, "40.00 s", "overhead", "at least 14 B for any schedule"))


def test_a_long_schedule_is_left_to_json(jaxferry, instance):
    count = 40
    lists = {"weights": [5] * count, "forward_s": [4] * count, "backward_s": [6] * count}
    instance.write_text(json.dumps(INSTANCE | lists | {"activations": [0] * (count + 1), "memory_bytes": 60}))
    assert "printed by --json" in jaxferry("weights", instance).out


def test_a_budget_replaces_the_memory(jaxferry, instance):
    assert json.loads(jaxferry("weights", instance, "--memory-budget", "1KiB", "--json").out)["choices"] == []


def test_a_profile_and_a_budget_give_a_plan_for_the_engine(jaxferry, tmp_path):
    times = ("forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s")
    costs = dict.fromkeys((*times, "load_s", "offload_s", "update_s"), 1.0)
    layers = [LayerProfile(name=f"block{k}", param_bytes=10, grad_bytes=10, **costs) for k in range(4)]
    Profile({}, tuple(layers)).save(tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    assert jaxferry("weights", tmp_path / "profile.json", "--memory-budget", "35", "-o", path).status == 0
    plan = Plan.load(path)
    assert set(plan.modes) == {Mode.GFGB, Mode.RELOAD}
    assert plan.predicted is not None


def test_without_computation_there_is_no_overhead_to_speak_of(jaxferry, instance):
    instance.write_text(json.dumps(INSTANCE | {"forward_s": [0] * 4, "backward_s": [0] * 4}))
    assert json.loads(jaxferry("weights", instance, "--json").out)["overhead"] is None
    assert "overhead" in jaxferry("weights", instance).out
