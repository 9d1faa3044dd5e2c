"""Instances as JSON, and what is refused."""

import json
import pathlib

import pytest

from jaxferry.errors import InputError
from jaxferry.records import load_record
from jaxferry.weights import Instance

DOCUMENT = {
    "weights": [4, 6],
    "activations": [1, 2, 3],
    "forward_s": [0.5, 1],
    "backward_s": [1, 2],
    "memory_bytes": 100,
    "bandwidth_bytes_per_s": 2.5,
}


def test_json_round_trips() -> None:
    instance = Instance.from_json(DOCUMENT)
    assert instance.to_json() == DOCUMENT
    assert Instance.from_json(json.loads(json.dumps(instance.to_json()))) == instance


def test_equation_1_by_hand() -> None:
    instance = Instance.from_json(DOCUMENT)
    assert [instance.forward_bytes(k) for k in range(2)] == [4 + 1 + 2, 6 + 1 + 2 + 3]
    assert [instance.backward_bytes(k) for k in range(2)] == [8 + 1 + 2, 12 + 1 + 2 + 3]
    assert instance.smallest_memory_bytes == 18
    assert instance.compute_s == 4.5
    assert instance.transfer_s(1) == 2.4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, "weights must name at least one layer"),
        ({"weights": 4}, "weights must be a list"),
        ({"activations": [1, 2]}, "activations must have 3 entries for 2 weights, got 2"),
        ({"forward_s": [1]}, "forward_s must have 2 entries"),
        ({"forward_s": [1, -1]}, r"forward_s\[1\] must be finite and not negative, got -1"),
        ({"backward_s": [float("nan"), 1]}, r"backward_s\[0\] must be finite and not negative, got nan"),
        ({"backward_s": ["1", 1]}, r"backward_s\[0\] must be a number, got '1'"),
        ({"weights": [True, 1]}, r"weights\[0\] must be a number"),
        ({"memory_bytes": float("inf")}, "memory_bytes must be finite"),
        ({"memory_bytes": None}, "memory_bytes must be a number, got None"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s must be positive"),
        ({"bandwidth_bytes_per_s": 1e-300}, "bandwidth_bytes_per_s must be positive"),
        ({"weights": [4, 10**400]}, r"weights\[1\] must be finite"),
        ({"bandwith": 1}, 'unknown key "bandwith"'),
    ],
)
def test_bad_values_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Instance.from_json(DOCUMENT | change)


@pytest.mark.parametrize("key", sorted(DOCUMENT))
def test_missing_keys_are_named(key: str) -> None:
    document = {name: value for name, value in DOCUMENT.items() if name != key}
    with pytest.raises(InputError, match=f'"{key}" is missing'):
        Instance.from_json(document)


def test_files_are_named_with_line_and_column(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(DOCUMENT))
    assert load_record(path, Instance.from_json) == Instance.from_json(DOCUMENT)
    path.write_text('{"weights":\n [1,}')
    with pytest.raises(InputError, match=r"instance\.json, line 2, column 5"):
        load_record(path, Instance.from_json)
    with pytest.raises(InputError, match="cannot read"):
        load_record(tmp_path / "none.json", Instance.from_json)
    path.write_text("[]")
    with pytest.raises(InputError, match=r"instance\.json: an instance must be a JSON object, got list"):
        load_record(path, Instance.from_json)
