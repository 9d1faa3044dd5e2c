"""Profiles: JSON there and back, and one clear error for each kind of bad input."""

import dataclasses
import json

import pytest
from hypothesis import given

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import ActivationPlace, Remat
from profiles import deterministic, profiles, transformer


def document(**changes):
    layer = transformer(3).layers[1].to_json() | {"name": "mlp"} | changes
    return {"format": "jaxferry.profile/1", "machine": {"gpu": "any"}, "layers": [layer]}


@deterministic
@given(profiles(recomputing=True))
def test_json_there_and_back_changes_nothing(profile):
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_files_there_and_back_change_nothing(tmp_path):
    transformer(9, tied=True).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == transformer(9, tied=True)


def test_optional_keys_have_defaults():
    plain = document()
    for key in ("inter_forward_s", "inter_backward_s", "activation_bytes"):
        del plain["layers"][0][key]
    (layer,) = Profile.from_json(plain).layers
    assert (layer.inter_forward_s, layer.inter_backward_s, layer.activation_bytes) == (0, 0, 0)
    assert layer.parameters == "mlp"


REQUIRED = (
    *("param_bytes", "grad_bytes", "load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s"),
    *("backward_go_s", "offload_s", "update_s"),
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named_with_its_layer(key):
    broken = document()
    del broken["layers"][0][key]
    with pytest.raises(InputError, match=f'layer "mlp".*"{key}"'):
        Profile.from_json(broken)


@pytest.mark.parametrize("key", ["load_s", "update_s", "inter_forward_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "1", None, [1], 1e13, 10**400])
def test_a_time_that_is_none_is_refused_with_layer_and_key(key, value):
    with pytest.raises(InputError, match=f'layer "mlp": {key} '):
        Profile.from_json(document(**{key: value}))


@pytest.mark.parametrize("key", ["param_bytes", "grad_bytes", "activation_bytes"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, float("nan"), 2**64])
def test_a_size_that_is_none_is_refused_with_layer_and_key(key, value):
    with pytest.raises(InputError, match=f'layer "mlp": {key} '):
        Profile.from_json(document(**{key: value}))


def test_errors_of_the_document_s_shape():
    empty = document() | {"layers": []}
    twice = document()
    twice["layers"] *= 2
    for broken, message in (
        ([], "JSON object"),
        (document() | {"format": "jaxferry.plan/1"}, "format"),
        (empty, "at least one layer"),
        (document() | {"layers": {}}, "at least one layer"),
        (document() | {"layers": [3]}, r"layers\[0\]"),
        (document() | {"machine": 3}, "machine"),
        (twice, '"mlp" occurs twice'),
        (document(name=""), "name"),
        (document(parameters=3), "parameters"),
    ):
        with pytest.raises(InputError, match=message):
            Profile.from_json(broken)


def test_entries_of_one_group_must_agree_on_their_bytes():
    layers = transformer(6, tied=True).layers
    other = LayerProfile.from_json(layers[-1].to_json() | {"param_bytes": 1})
    with pytest.raises(InputError, match=r'layer "table5": param_bytes must be .* "table0".* got 1'):
        Profile({}, (*layers[:-1], other))


def test_groups_list_shared_layers_together():
    profile = transformer(6, tied=True)
    assert profile.groups == ((0, 5), (1,), (2,), (3,), (4,))
    assert profile.group_of == (0, 1, 2, 3, 4, 0)


def test_malformed_json_is_reported_with_file_line_and_column(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"format": "jaxferry.profile/1",\n "layers": [}')
    with pytest.raises(InputError, match=r"bad\.json, line 2, column 13"):
        Profile.load(path)
    with pytest.raises(InputError, match=r"cannot read .*missing\.json"):
        Profile.load(tmp_path / "missing.json")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        Profile.load(path)


def test_errors_of_a_file_s_content_name_the_file(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document(load_s=-1)))
    with pytest.raises(InputError, match=r'p\.json: layer "mlp": load_s'):
        Profile.load(path)


def test_host_gradient_and_host_parameters_cost_the_sum_of_both_detours():
    (layer,) = Profile.from_json(document(backward_s=2, backward_dha_s=3, backward_go_s=5)).layers
    assert layer.backward_for(by_dha=False, grad_on_host=False) == 2
    assert layer.backward_for(by_dha=True, grad_on_host=False) == 3
    assert layer.backward_for(by_dha=False, grad_on_host=True) == 5
    assert layer.backward_for(by_dha=True, grad_on_host=True) == 6


@pytest.mark.parametrize("key", ["inter_forward", "activation_byte", "comment", "mode"])
def test_an_unknown_key_is_named_with_its_layer_and_the_known_ones(key):
    with pytest.raises(InputError, match=f'layer "mlp": unknown key "{key}"; known are name, .*inter_backward_s'):
        Profile.from_json(document(**{key: 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "format": 2}', 'key "format" occurs twice in one object'),
        ('{"layers": [{"name": "a", "load_s": 1, "load_s": 2}]}', 'key "load_s" of "a" occurs twice in one object'),
        ('{"machine": {"\\ud800": 1, "\\ud800": 2}}', r'key "\\ud800" occurs twice'),
    ],
)
def test_a_key_that_comes_twice_is_refused(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"p.json: {message}"):
        Profile.load(path)


@pytest.mark.parametrize("key", ["name", "parameters"])
def test_text_that_cannot_be_written_is_refused(tmp_path, key):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document(**{key: "mlp\ud800"})))
    with pytest.raises(InputError, match=rf"p.json: .*{key} must not contain an unpaired surrogate, got .*ud800"):
        Profile.load(path)
    path.write_text(json.dumps(document(**{key: "mlp\U0001f6a2"})))
    assert getattr(Profile.load(path).layers[0], key) == "mlp\U0001f6a2"


def test_numbers_with_more_digits_than_python_reads_are_malformed(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"format": ' + "9" * 5000 + "}")
    with pytest.raises(InputError, match=r"malformed JSON in .*bad\.json"):
        Profile.load(path)


@pytest.mark.parametrize("prefix", ["", "products_"])
def test_what_recomputation_costs_is_given_whole_or_not_at_all(prefix):
    both = {f"{prefix}recompute_s": 2, f"{prefix or 'recompute_'}activation_bytes": 3}
    (layer,) = Profile.from_json(document(**both)).layers
    remat = Remat.PRODUCTS if prefix else Remat.FULL
    assert layer.levels == (Remat.NONE, remat) and layer.kept_bytes(remat) == 3
    assert layer.can_recompute and layer.to_json().items() >= both.items()
    (without,) = Profile.from_json(document()).layers
    assert not without.can_recompute and not both.keys() & without.to_json().keys()
    for key, other in (tuple(both), tuple(reversed(both))):
        with pytest.raises(InputError, match=f'layer "mlp": {key} needs {other} beside it'):
            Profile.from_json(document(**{key: both[key]}))
    seconds, size = both
    for changes in ({seconds: None}, {seconds: -1}, {size: 1.5}):
        with pytest.raises(InputError, match=r'layer "mlp": (products_)?(recompute|activation)_.* must be'):
            Profile.from_json(document(**(both | changes)))


def test_recomputation_adds_the_forward_once_more_and_by_dha_the_slower_one_unless_products_are_kept():
    times = {"forward_s": 1, "forward_dha_s": 4, "backward_s": 2, "backward_dha_s": 3, "backward_go_s": 5}
    times |= {"products_recompute_s": 0.25, "products_activation_bytes": 1, "backward_read_s": 2, "forward_read_s": 1}
    (layer,) = Profile.from_json(document(**times, recompute_s=1.5, recompute_activation_bytes=0)).layers
    for remat, more_s, more_by_dha_s in ((Remat.NONE, 0, 0), (Remat.PRODUCTS, 0.25, 0), (Remat.FULL, 1.5, 3)):
        assert layer.backward_for(False, False, remat) == 2 + more_s
        assert layer.backward_for(False, True, remat) == 5 + more_s
        assert layer.backward_for(True, False, remat) == 3 + more_s + more_by_dha_s
        assert layer.backward_for(True, True, remat) == 6 + more_s + more_by_dha_s
        assert layer.backward_reads_for(remat) == 2 + (remat is Remat.FULL)


def test_temporaries_are_bytes_by_program():
    given = {"forward": 3, "forward_dha": 0, "backward_dha_go": 7, "backward_recompute": 5, "backward_products": 4}
    text = document(temporary_bytes=given, forward_workspace_bytes=10, backward_workspace_bytes=20)
    (layer,) = Profile.from_json(text).layers
    assert layer.to_json()["temporary_bytes"] == {name: size for name, size in given.items() if size}
    assert [layer.forward_bytes(by_dha) for by_dha in (False, True)] == [13, 10]
    assert layer.backward_bytes(True, True) == 27 and layer.backward_bytes(False, False, Remat.FULL) == 25
    assert layer.backward_bytes(False, False, Remat.PRODUCTS) == 24
    (without,) = Profile.from_json(document(temporary_bytes={})).layers
    assert "temporary_bytes" not in without.to_json()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backwards": 1}, 'layer "mlp": temporary_bytes.*"backwards"'),
        ({"forward": -1}, 'layer "mlp": temporary_bytes of forward must be'),
        ({"forward": 1.5}, 'layer "mlp": temporary_bytes of forward must be'),
        ([1], 'layer "mlp": temporary_bytes must be an object'),
        (None, 'layer "mlp": temporary_bytes must be an object'),
    ],
)
def test_temporaries_that_are_none_are_refused_with_layer_and_program(given, message):
    with pytest.raises(InputError, match=message):
        Profile.from_json(document(temporary_bytes=given))


@pytest.mark.parametrize(
    ("saves", "fetches", "message"),
    [
        ((8, 0, 0), (0, 0, 0), "save_bytes add up to 8 and fetch_bytes to 0"),
        ((8, 0, 0), (4, 0, 0), "save_bytes add up to 8 and fetch_bytes to 4"),
        ((8, 0, 0), (0, 8, 0), r'"layer1": from this layer on, fetch_bytes add up to 8 and save_bytes to 0'),
        ((4, 4, 0), (8, 0, 0), None),
        ((0, 8, 0), (3, 5, 0), None),
    ],
)
def test_values_that_leave_return_and_none_before_it_has_left(saves, fetches, message):
    sizes = zip(transformer(3).layers, saves, fetches, strict=True)
    layers = tuple(
        dataclasses.replace(layer, name=f"layer{index}", parameters="", save_bytes=saved, fetch_bytes=fetched)
        for index, (layer, saved, fetched) in enumerate(sizes)
    )
    if message is None:
        assert Profile.from_json(Profile({}, layers).to_json()).layers == layers
    else:
        with pytest.raises(InputError, match=message):
            Profile({}, layers)


def test_activations_that_may_leave_are_bytes_by_what_is_kept():
    given = {"none": 30, "full": 4, "products": 0}
    (layer,) = Profile.from_json(document(offloadable_bytes=given)).layers
    assert layer.to_json()["offloadable_bytes"] == {"none": 30, "full": 4}
    assert [layer.leaving_bytes(remat, ActivationPlace.HOST) for remat in Remat] == [30, 0, 4]
    assert not any(layer.leaving_bytes(remat, ActivationPlace.DEVICE) for remat in Remat)
    assert "offloadable_bytes" not in Profile.from_json(document()).layers[0].to_json()
    for wrong, message in (
        ({"all": 3}, "unknown key"),
        ({"none": -1}, "offloadable_bytes of none"),
        (3, "an object of"),
    ):
        with pytest.raises(InputError, match=f'layer "mlp": .*{message}'):
            Profile.from_json(document(offloadable_bytes=wrong))
