"""The table of machines, and machines of a user's own."""

import dataclasses
import json
import pathlib
import statistics

import pytest

from jaxferry.costs import MACHINES, Machine, default_budget_bytes, find_machine
from jaxferry.errors import InputError

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"

DOCUMENT = {
    "format": "jaxferry.machine/1",
    "name": "my box",
    "flops_per_s": 1e12,
    "float32_flops_per_s": 1e12,
    "memory_bytes": 1e9,
    "memory_bytes_per_s": 1e11,
    "link_bytes_per_s": 1e10,
    "host_bytes_per_s": 1e10,
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_figure_has_a_source(machine: Machine) -> None:
    fields = {field.name for field in dataclasses.fields(machine)} - {"name", "sources"}
    figures = {field for field in fields if getattr(machine, field) is not None}
    assert set(machine.sources) == figures
    assert all(machine.sources.values())


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_memory_is_faster_than_the_link_and_16_bits_than_32(machine: Machine) -> None:
    """Every offloading decision depends on these figures; an error of a power of ten would break it."""
    assert 10 * machine.link_bytes_per_s < machine.memory_bytes_per_s
    assert machine.float32_flops_per_s < machine.flops_per_s
    assert machine.link_bytes_per_s < machine.host_bytes_per_s < machine.memory_bytes_per_s


def test_products_of_the_h200_take_what_they_take_without_a_pause() -> None:
    measured = json.loads((RESULTS / "gpu" / "h200" / "sustained_products.json").read_text())
    [rates] = [run["tflops"] for run in measured["runs"]]
    machine = MACHINES["h200-pcie5"]
    assert machine.product_efficiency is not None
    # Each took some 0.04 s.
    sustained = 1e12 * statistics.median(rates[4:])
    assert machine.flops_per_s * machine.product_efficiency == pytest.approx(sustained, rel=0.01)


def test_names_are_found_in_any_case_and_files_by_their_path(tmp_path: pathlib.Path) -> None:
    assert find_machine("H200-PCIe5") is MACHINES["h200-pcie5"]
    path = tmp_path / "box.json"
    path.write_text(json.dumps(DOCUMENT))
    assert find_machine(path).name == "my box"
    assert find_machine(str(path)).launch_s > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "format must be"),
        ({"name": ""}, "name must be a non-empty string, got ''"),
        ({"flops_per_s": 0}, "flops_per_s must be positive and finite, got 0"),
        ({"link_bytes_per_s": -1}, "link_bytes_per_s must be positive and finite, got -1"),
        ({"host_bytes_per_s": float("inf")}, "host_bytes_per_s must be positive"),
        ({"memory_bytes": "24GB"}, "memory_bytes must be a number, got '24GB'"),
        ({"efficiency": 1.5}, r"efficiency must lie in \(0, 1\], got 1.5"),
        ({"efficiency": 0}, "efficiency must be positive"),
        ({"product_efficiency": 1.5}, r"product_efficiency must lie in \(0, 1\], got 1.5"),
        ({"kernel_link_bytes_per_s": 0}, "kernel_link_bytes_per_s must be positive"),
        ({"launch_s": -1e-6}, "launch_s must be"),
        ({"sources": {"launch_s": 3}}, "sources must be"),
        ({"colour": "red"}, 'unknown key "colour"'),
    ],
)
def test_bad_figures_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Machine.from_json(DOCUMENT | change)


def test_missing_figures_are_named() -> None:
    for key in set(DOCUMENT) - {"format"}:
        with pytest.raises(InputError, match=f'"{key}" is missing'):
            Machine.from_json({name: value for name, value in DOCUMENT.items() if name != key})


def test_an_unknown_machine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"v100-pcie3, .*rtx4090-pcie4 or a JSON file, got 'cray'"):
        find_machine("cray")


def test_the_default_budget_is_the_share_of_device_memory_that_jax_takes() -> None:
    facts = dict(find_machine("rtx4090-pcie4").to_json())
    assert default_budget_bytes(facts) == 18 * 10**9
    assert default_budget_bytes({**facts, "memory_limit_bytes": 20 * 10**9}) == 20 * 10**9
    assert [default_budget_bytes({"memory_bytes": size}) for size in (None, "24", True, 0)] == [None] * 4


def test_a_machine_may_state_its_host_memory(tmp_path: pathlib.Path) -> None:
    known = dataclasses.replace(find_machine("a100-pcie4"), host_memory_bytes=256e9)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(known.to_json()))
    assert find_machine(path) == known
    assert "host_memory_bytes" not in find_machine("a100-pcie4").to_json()
    with pytest.raises(InputError, match="host_memory_bytes must be a number, got '64GiB'"):
        dataclasses.replace(known, host_memory_bytes="64GiB")  # type: ignore[arg-type]
