"""Plans: JSON there and back, and one clear error for each kind of bad input."""

import json

import pytest
from hypothesis import given

from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import LayerPlan, Loads, Plan, Predicted, Updates
from profiles import deterministic, planned, recomputing, transformer, with_modes


def document(**changes):
    plan = Plan("exact", 0.5, (LayerPlan("a", Mode.DHA), LayerPlan("b", Mode.GFGB, GradientPlace.HOST)))
    return plan.to_json() | changes


@deterministic
@given(planned(recomputing=True))
def test_json_there_and_back_changes_nothing(case):
    _, plan = case
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_files_prediction_and_details_there_and_back_change_nothing(tmp_path):
    plan = Plan("exact", 0.29, (LayerPlan("a", Mode.DHA),), predicted=Predicted(1.0, 2.0, 1.5, 7), details={"gap": 0.1})
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan
    assert json.loads((tmp_path / "p.json").read_text())["gap"] == 0.1


def test_optional_keys_have_defaults():
    minimal = document()
    del minimal["loads"], minimal["updates"]
    plan = Plan.from_json(minimal)
    assert (plan.loads, plan.updates, plan.predicted) == (Loads.LAYERWISE, Updates.OVERLAPPED, None)


@pytest.mark.parametrize("key", ["policy", "reserve_factor", "layers", "format"])
def test_a_missing_key_is_named(key):
    broken = document()
    del broken[key]
    with pytest.raises(InputError, match=key):
        Plan.from_json(broken)


@pytest.mark.parametrize("key", ["name", "mode", "gradient"])
def test_a_missing_key_of_a_layer_is_named_with_its_layer(key):
    broken = document()
    del broken["layers"][0][key]
    with pytest.raises(InputError, match=f'(layers.0.|layer "a"): key "{key}"'):
        Plan.from_json(broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reserve_factor": 1.5}, r"reserve_factor must lie in \[0, 1\], got 1.5"),
        ({"reserve_factor": float("nan")}, "reserve_factor"),
        ({"reserve_factor": True}, "reserve_factor"),
        ({"policy": 3}, "policy"),
        ({"loads": "slow"}, "loads must be one of layerwise, bulk, got 'slow'"),
        ({"updates": None}, "updates must be one of overlapped, after-all"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"name": "a", "mode": "GPU", "gradient": "device"}]}, 'layer "a": mode must be one of GFGB, DHA'),
        ({"layers": [{"name": "a", "mode": "DHA", "gradient": 3}]}, 'layer "a": gradient must be one of device, host'),
        (
            {"layers": [{"name": "a", "mode": "DHA", "gradient": "host", "remat": "dots"}]},
            'layer "a": remat must be one of none, products, full, got .dots.',
        ),
        ({"layers": [{"name": "a", "mode": "DHA", "gradient": "host"}] * 2}, '"a" occurs twice'),
        ({"predicted": {"forward_s": 1}}, 'predicted: key "step_s"'),
        ({"predicted": {"forward_s": -1, "step_s": 1, "steady_step_s": 1, "peak_device_bytes": 1}}, "forward_s"),
        ({"predicted": 3}, "predicted"),
    ],
)
def test_values_that_are_none_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(document(**changes))


def test_reload_needs_slots_that_bulk_loads_never_free():
    with pytest.raises(InputError, match='layer "a": mode RELOAD needs loads "layerwise"'):
        Plan("l2l", 1.0, (LayerPlan("a", Mode.RELOAD),), loads=Loads.BULK)


def test_details_hold_json_and_no_key_of_the_plan():
    for details in ({"loads": 1}, {"x": float("nan")}, {"x": object()}):
        with pytest.raises(InputError, match="details"):
            Plan("exact", 1.0, (LayerPlan("a", Mode.DHA),), details=details)


def test_a_plan_names_the_first_layer_in_which_a_profile_differs():
    profile = transformer(6)
    plan = with_modes(transformer(6, seed=1), [Mode.DHA] * 6)
    plan.check_profile(profile)
    renamed = Plan("x", 1.0, (*plan.layers[:3], LayerPlan("other", Mode.DHA), *plan.layers[4:]))
    with pytest.raises(InputError, match='another profile: layer 3 is "other" in the plan and "norm3"'):
        renamed.check_profile(profile)


def test_a_reserve_factor_beyond_any_float_is_refused():
    with pytest.raises(InputError, match=r"reserve_factor must lie in \[0, 1\]"):
        Plan("test", 10**400, (LayerPlan("a", "GFGB"),))


def test_recomputation_is_an_optional_key_of_a_layer():
    plan = Plan("auto", 1.0, (LayerPlan("a", Mode.DHA, remat="full"), LayerPlan("b", Mode.DHA)))
    assert plan.recomputes == (True, False)
    first, second = plan.to_json()["layers"]
    assert first["remat"] == "full" and "remat" not in second
    explicit = plan.to_json()
    explicit["layers"][1]["remat"] = "none"
    assert Plan.from_json(explicit) == plan


def test_a_plan_recomputes_only_layers_of_which_the_profile_says_what_that_costs():
    layers = [LayerPlan(layer.name, Mode.GFGB, remat="full") for layer in transformer(4).layers[:-1]]
    plan = Plan("x", 1.0, (*layers, LayerPlan(transformer(4).layers[-1].name, Mode.GFGB)))
    plan.check_profile(recomputing(transformer(4)))
    with pytest.raises(InputError, match='layer "table0": remat "full" needs the keys recompute_s'):
        plan.check_profile(transformer(4))


def test_where_activations_wait_is_an_optional_key_of_a_layer():
    plan = Plan("auto", 1.0, (LayerPlan("a", Mode.GFGB, activations="host"), LayerPlan("b", Mode.GFGB)))
    assert plan.offloads_activations
    first, second = plan.to_json()["layers"]
    assert first["activations"] == "host" and "activations" not in second
    assert Plan.from_json(plan.to_json()) == plan
    explicit = plan.to_json()
    explicit["layers"] = [{**layer, "activations": "device"} for layer in explicit["layers"]]
    assert not Plan.from_json(explicit).offloads_activations
    with pytest.raises(InputError, match=r'layer "a": activations must be one of device, host, got .disk.'):
        LayerPlan("a", Mode.GFGB, activations="disk")
