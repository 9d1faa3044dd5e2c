"""Misspelt keys of JSON files are named, with the key that is meant. Sizes as text."""

import copy

import pytest

from jaxferry.costs import MACHINES, Machine, Profile
from jaxferry.errors import InputError
from jaxferry.step import Plan
from jaxferry.units import format_apart, format_bytes, parse_bytes
from jaxferry.weights import Instance
from profiles import transformer

PREDICTED = {"forward_s": 1, "step_s": 2, "steady_step_s": 2, "peak_device_bytes": 3}
DOCUMENTS = {
    Profile: {**transformer(2).to_json(), "updates_after_all": True, "updates_together": True, "gradient_buffers": 1},
    Plan: {
        "format": "jaxferry.plan/1",
        "policy": "exact",
        "reserve_factor": 1,
        "updates": "after-all",
        "layers": [{"name": "a", "mode": "DHA", "gradient": "host", "remat": "full"}],
        "predicted": PREDICTED,
    },
    Machine: MACHINES["a100-pcie4"].to_json(),
    Instance: {
        **{key: [1] for key in ("weights", "forward_s", "backward_s")},
        "activations": [1, 1],
        "memory_bytes": 9,
        "bandwidth_bytes_per_s": 1,
    },
}


@pytest.mark.parametrize(
    ("kind", "place", "key", "misspelt"),
    [
        (Profile, (), "machine", "machin"),
        (Profile, (), "updates_after_all", "update_after_all"),
        (Profile, (), "updates_together", "updates_togeter"),
        (Profile, ("layers", 1), "load_s", "laod_s"),
        (Plan, (), "format", "fromat"),
        (Plan, (), "reserve_factor", "reserve_facter"),
        (Plan, (), "updates", "update"),
        (Plan, ("layers", 0), "mode", "mod"),
        (Plan, ("layers", 0), "remat", "remt"),
        (Plan, ("predicted",), "steady_step_s", "stedy_step_s"),
        (Machine, (), "launch_s", "lanch_s"),
        (Machine, (), "link_bytes_per_s", "link_byte_per_s"),
        (Instance, (), "backward_s", "backwards_s"),
    ],
)
def test_a_misspelt_key_is_named(kind, place, key, misspelt):
    document = copy.deepcopy(DOCUMENTS[kind])
    kind.from_json(document)
    fields = document
    for part in place:
        fields = fields[part]
    fields[misspelt] = fields.pop(key)
    with pytest.raises(InputError, match=f'unknown key "{misspelt}".*did you mean "{key}"'):
        kind.from_json(document)


def test_other_keys_of_a_plan_are_its_details():
    plan = Plan.from_json({**DOCUMENTS[Plan], "lower_bound_s": 1, "remarks": "mine"})
    assert plan.details == {"lower_bound_s": 1, "remarks": "mine"}


@pytest.mark.parametrize("num_bytes", [7, 2**10, 10**6, 1288490189, 5 * 2**40 // 3])
@pytest.mark.parametrize("less", [1, 1000, 2**20])
def test_sizes_that_a_reader_compares_differ_unless_they_are_equal(num_bytes, less):
    other = max(num_bytes - less, 0)
    shown = format_apart(num_bytes, other)
    assert len(set(shown)) == 2
    assert parse_bytes(shown[0]) >= parse_bytes(shown[1])
    assert format_apart(num_bytes, num_bytes) == [format_bytes(num_bytes)] * 2


def test_sizes_that_differ_already_have_few_digits():
    assert format_apart(2**30, 2**29) == ["1.00 GiB", "512.0 MiB"]
    assert format_apart(2**30 + 2**20, 2**30) == ["1.001 GiB", "1.000 GiB"]
