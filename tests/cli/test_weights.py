"""`jaxferry weights` from outside: output, JSON, exit status."""

import json
import pathlib
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jaxferry.cli import main, weights
from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import Mode
from jaxferry.step.records import Plan
from jaxferry.weights.instance import Instance
from jaxferry.weights.policies import POLICIES
from jaxferry.weights.records import Event, Schedule
from jaxferry.weights.validate import validate

DOCUMENT = {
    "weights": [5, 5, 5, 5],
    "activations": [0, 1, 1, 1, 1],
    "forward_s": [4, 4, 4, 4],
    "backward_s": [6, 6, 6, 6],
    "memory_bytes": 19,
    "bandwidth_bytes_per_s": 2,
}


@pytest.fixture
def instance_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


@pytest.fixture
def profile_file(tmp_path: pathlib.Path) -> pathlib.Path:
    times: dict[str, Any] = dict.fromkeys(
        ("forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s"), 1.0
    )
    layers = [
        LayerProfile(name=f"block{k}", param_bytes=10, grad_bytes=10, load_s=1, offload_s=1, update_s=1, **times)
        for k in range(4)
    ]
    path = tmp_path / "profile.json"
    Profile({}, tuple(layers)).save(path)
    return path


def run(*arguments: object) -> str:
    """Runs the command within an application; errors propagate."""
    app = typer.Typer()
    app.command()(weights.weights)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("policy", POLICIES)
def test_json_is_one_document_with_duration_and_compute(instance_file: pathlib.Path, policy: str) -> None:
    document = json.loads(run(instance_file, "--policy", policy, "--json"))
    assert document["policy"] == policy
    assert document["compute_s"] == 40
    assert document["duration_s"] >= 40 - 1e-9
    assert document["overhead"] == pytest.approx(document["duration_s"] / 40 - 1)
    assert all(set(choice) == {"layer", "absent"} for choice in document["choices"])


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"bound"}))
def test_the_printed_schedule_is_valid(instance_file: pathlib.Path, policy: str) -> None:
    document = json.loads(run(instance_file, "--policy", policy, "--json"))
    schedule = Schedule(document["duration_s"], tuple(Event(**event) for event in document["schedule"]))
    validate(Instance.from_json(DOCUMENT), schedule)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_table_names_the_figures(instance_file: pathlib.Path, policy: str) -> None:
    printed = run(instance_file, "--policy", policy)
    assert policy in printed
    assert "40.00 s" in printed
    assert "overhead" in printed


def test_a_long_schedule_is_left_to_json(tmp_path: pathlib.Path) -> None:
    count = 40
    path = tmp_path / "long.json"
    lists = {"weights": [5] * count, "forward_s": [4] * count, "backward_s": [6] * count}
    path.write_text(json.dumps(DOCUMENT | lists | {"activations": [0] * (count + 1), "memory_bytes": 60}))
    assert "printed by --json" in run(path)


def test_a_budget_replaces_the_memory(instance_file: pathlib.Path) -> None:
    roomy = json.loads(run(instance_file, "--memory-budget", "1KiB", "--json"))
    assert roomy["choices"] == []
    with pytest.raises(BudgetError, match="smallest feasible is 14"):
        run(instance_file, "--memory-budget", "13")


def test_a_profile_and_a_budget_give_a_plan_for_the_engine(profile_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    plan_file = tmp_path / "plan.json"
    run(profile_file, "--memory-budget", "35", "-o", plan_file)
    plan = Plan.load(plan_file)
    assert set(plan.modes) == {Mode.GFGB, Mode.RELOAD}
    assert plan.predicted is not None


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ("--policy", "best"), "policy must be one of greedy, .*, got 'best'"),
        ({"forward_s": [4, 4, 4, -4]}, (), r"instance\.json: forward_s\[3\] must be finite and not negative, got -4"),
        ({"backward_s": [4, 4, 4, float("nan")]}, (), r"backward_s\[3\] must be finite and not negative, got nan"),
        ({"weights": []}, (), "weights must name at least one layer"),
        ({"memory_bytes": 13}, (), "memory_bytes 13 is too small for any schedule: the smallest feasible is 14"),
        ({}, ("--memory-budget", "much"), "memory budget must be a number of bytes or a size"),
        ({}, ("-o", "plan.json"), "-o needs a profile"),
    ],
)
def test_bad_input_is_one_line(
    instance_file: pathlib.Path, change: dict, arguments: tuple[str, ...], message: str
) -> None:
    instance_file.write_text(json.dumps(DOCUMENT | change))
    with pytest.raises(InputError, match=message) as caught:
        run(instance_file, *arguments)
    assert "\n" not in str(caught.value)


def test_a_profile_without_a_budget_is_refused(profile_file: pathlib.Path) -> None:
    with pytest.raises(InputError, match="give --memory-budget"):
        run(profile_file)


def test_malformed_json_names_line_and_column(instance_file: pathlib.Path) -> None:
    instance_file.write_text('{"weights": [5,\n?]}')
    with pytest.raises(InputError, match=r"instance\.json, line 2, column 1"):
        run(instance_file)


def test_bad_input_ends_with_status_2_and_one_line(
    instance_file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--policy", "best"], ["--memory-budget", "1"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as caught:
            main(["weights", str(instance_file), *arguments])
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1


def test_without_computation_there_is_no_overhead_to_speak_of(instance_file: pathlib.Path) -> None:
    instance_file.write_text(json.dumps(DOCUMENT | {"forward_s": [0] * 4, "backward_s": [0] * 4}))
    assert json.loads(run(instance_file, "--json"))["overhead"] is None
    assert "overhead" in run(instance_file)
