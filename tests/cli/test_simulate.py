"""`jaxferry simulate`."""

import json

import pytest

from jaxferry.costs.records import Profile
from jaxferry.step.records import Plan
from jaxferry.step.simulate.report import simulate
from jaxferry.units import format_bytes
from profiles import transformer


@pytest.fixture
def plan(jaxferry, profile, tmp_path):
    path = tmp_path / "plan.json"
    jaxferry("plan", profile, "-o", path)
    return path


def test_json_says_times_memory_and_lanes(jaxferry, profile, plan):
    result = jaxferry("simulate", profile, plan, "--json")
    assert (result.status, result.err) == (0, "")
    document = json.loads(result.out)
    expected = simulate(Profile.load(profile), Plan.load(plan))
    assert document == json.loads(json.dumps(expected.to_json()))
    assert set(document["lanes"]) == {"GPU", "H2D", "D2H", "host"}
    assert {"forward_s", "step_s", "steady_step_s", "peak_device_bytes"} < document.keys()
    written = json.loads(plan.read_text())["predicted"]
    assert all(document[key] == value for key, value in written.items())


def test_a_trace_of_some_steps_is_written(jaxferry, profile, plan, tmp_path):
    for steps in (1, 3):
        assert jaxferry("simulate", profile, plan, "--trace", tmp_path / "t.json", "--steps", steps).status == 0
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == set(range(steps))


def test_the_report_names_lanes_and_the_critical_path(jaxferry, profile, plan):
    out = jaxferry("simulate", profile, plan).out
    assert all(text in out for text in ("GPU", "H2D", "D2H", "host", "critical path:", "update "))


def test_the_report_tells_the_memory_of_a_chain_from_that_of_one_step(jaxferry, profile, plan):
    document = json.loads(jaxferry("simulate", profile, plan, "--json").out)
    one_step = max(held for _, held in document["device_bytes"])
    assert one_step <= document["peak_device_bytes"]
    out = jaxferry("simulate", profile, plan).out
    assert f"{format_bytes(document['peak_device_bytes'])} over a chain of 3 steps" in out
    assert f"{format_bytes(one_step)} in a single step" in out


@pytest.mark.parametrize("granularity", ["block", "module"])
def test_a_plan_for_blocks_is_simulated_with_its_profile_of_modules(jaxferry, tmp_path, granularity):
    profile, plan = tmp_path / "modules.json", tmp_path / "plan.json"
    made = jaxferry(
        "profile", "--model", "gpt2:tiny", "--machine", "h100-pcie5", "--granularity", "module", "-o", profile
    )
    assert made.status == 0
    assert jaxferry("plan", profile, "--granularity", granularity, "-o", plan).status == 0
    result = jaxferry("simulate", profile, plan, "--json")
    assert (result.status, result.err) == (0, "")
    written = json.loads(plan.read_text())["predicted"]
    assert {key: json.loads(result.out)[key] for key in written} == written


def test_bad_input_is_one_line_and_status_2(refused, profile, plan, tmp_path):
    other = tmp_path / "other.json"
    transformer(15).save(other)
    err = refused("simulate", other, plan)
    assert "another profile" in err and f"{plan} and {other}: " in err
    assert "format" in refused("simulate", profile, profile)
    assert "cannot read" in refused("simulate", profile, tmp_path / "none.json")
    assert "cannot write" in refused("simulate", profile, plan, "--trace", tmp_path / "no" / "t.json")
    assert "--steps" in refused("simulate", profile, plan, "--steps", "0")
    broken = json.loads(plan.read_text())
    broken["layers"][3]["mode"] = "FAST"
    plan.write_text(json.dumps(broken))
    assert f'layer "{broken["layers"][3]["name"]}": mode must be one of' in refused("simulate", profile, plan)


@pytest.mark.parametrize(("update", "mode"), [("gpu", "GFGB"), ("resident", "RESIDENT")])
@pytest.mark.parametrize("missing", ["update_gpu_s", "state_bytes"])
def test_updates_on_the_device_are_not_free_where_the_profile_does_not_state_their_cost(
    jaxferry, refused, profile, plan, update, mode, missing
):
    stated = {"update_gpu_s": 0.001, "state_bytes": 4096}
    for path, changed in ((profile, stated), (plan, {"update": update, "mode": mode, "gradient": "device"})):
        document = json.loads(path.read_text())
        document["layers"][1] |= changed
        path.write_text(json.dumps(document))
    assert jaxferry("simulate", profile, plan).status == 0
    document = json.loads(profile.read_text())
    del document["layers"][1][missing]
    profile.write_text(json.dumps(document))
    assert f"the profile does not state its {missing!r}" in refused("simulate", profile, plan)
