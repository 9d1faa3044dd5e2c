"""`jaxferry profile` from outside: measured, and with --estimate."""

import json
import pathlib
import re
import sys

import jax
import pytest
import typer
from typer.testing import CliRunner

from jaxferry.cli import main, profile
from jaxferry.costs.records import Profile
from jaxferry.errors import InputError

MODEL = """
import jax
import jax.numpy as jnp

def build():
    shapes = {"embed": {"table": (50, 8)}, "head": {"kernel": (8, 50), "bias": (50,)}}
    is_shape = lambda value: isinstance(value, tuple)
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)

    def loss_fn(params, ids):
        hidden = jnp.tanh(params["embed"]["table"][ids])
        return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"]) ** 2)

    return loss_fn, params, jax.ShapeDtypeStruct((4, 6), jnp.int32)

def broken():
    return 7

number = 3
"""


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "model_of_a_user.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model_of_a_user", raising=False)
    return "model_of_a_user:build"


def run(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(profile.profile)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_profile_is_marked_as_an_estimate_and_round_trips(model: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "profile.json"
    printed = run("--estimate", "--machine", "a100-pcie4", "--model", model, "-o", path, "--json")
    written = Profile.load(path)
    assert Profile.from_json(json.loads(printed)) == written
    assert written.machine["estimated"] is True
    assert written.machine["model"] == model
    num_parameters = 50 * 8 + 8 * 50 + 50
    assert written.machine["host_bytes"] == {
        "master parameters": 4 * num_parameters,
        "optimizer state": 8 * num_parameters + 4,
        "compute copy": 4 * num_parameters,
        "gradients": 4 * num_parameters,
    }
    assert [layer.param_bytes for layer in written.layers] == [50 * 8 * 4, (8 * 50 + 50) * 4]


def test_the_compute_dtype_halves_the_bytes(model: str) -> None:
    printed = run("--estimate", "--machine", "h200-pcie5", "--model", model, "--compute-dtype", "bfloat16", "--json")
    assert [layer["param_bytes"] for layer in json.loads(printed)["layers"]] == [50 * 8 * 2, (8 * 50 + 50) * 2]


def test_the_table_says_that_nothing_was_measured(model: str) -> None:
    printed = run("--estimate", "--machine", "v100-pcie3", "--model", model)
    assert "not measured" in printed
    assert "embed" in printed
    assert "head" in printed


def test_a_machine_alone_is_estimated(model: str) -> None:
    whole = run("--estimate", "--machine", "v100-pcie3", "--model", model, "--json")
    assert run("--machine", "v100-pcie3", "--model", model, "--json") == whole


def test_a_machine_of_ones_own(model: str, tmp_path: pathlib.Path) -> None:
    figures = {
        "format": "jaxferry.machine/1",
        "name": "my box",
        "flops_per_s": 1e12,
        "float32_flops_per_s": 1e12,
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 1e11,
        "link_bytes_per_s": 1e3,
        "host_bytes_per_s": 1e10,
    }
    path = tmp_path / "box.json"
    path.write_text(json.dumps(figures))
    made = Profile.from_json(json.loads(run("--estimate", "--machine", path, "--model", model, "--json")))
    assert made.machine["name"] == "my box"
    assert made.layers[0].load_s == pytest.approx(1.6, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "model_of_a_user:build", "--optimizer", "sgdw"),
            "--optimizer must be one of adamw, .* got 'sgdw'",
        ),
        (("--model", "model_of_a_user:build", "--transport", "ship"), "transport must be one of ferry, .* got 'ship'"),
        (("--model", "model_of_a_user:broken"), "must return .* got int"),
        (("--model", "model_of_a_user:build", "--estimate"), "needs --machine: one of v100-pcie3"),
        (("--estimate", "--machine", "z80", "--model", "model_of_a_user:build"), "machine must be one of .* got 'z80'"),
        (("--estimate", "--machine", "h100-pcie5", "--model", "model_of_a_user"), '"module:function"'),
        (("--estimate", "--machine", "h100-pcie5", "--model", "no_such_module:f"), "no module named 'no_such_module'"),
        (("--estimate", "--machine", "h100-pcie5", "--model", "model_of_a_user:f"), "has no function 'f'"),
        (("--estimate", "--machine", "h100-pcie5", "--model", "model_of_a_user:number"), "has no function 'number'"),
        (("--estimate", "--machine", "h100-pcie5", "--model", "model_of_a_user:broken"), "must return .* got int"),
    ],
)
def test_bad_input_is_one_line(model: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(:\n", "line 1: SyntaxError: "),
        ("\n\nimport no_such_package\n", "line 3: ModuleNotFoundError: No module named 'no_such_package'"),
        ("value = 1\nvalue / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def build():\n    return open('none.txt')\n", "line 2: FileNotFoundError: .*none.txt"),
        ("def helper():\n    raise KeyError\n\ndef build():\n    return helper()\n", "line 2: KeyError$"),
        ("import sys\nsys.exit('not now')\n", "line 2: SystemExit: not now"),
        (MODEL.replace('params["head"]["bias"]', 'params["foot"]'), "line 12: KeyError: 'foot'"),
        (MODEL.replace("hidden @", "hidden.T @"), "line 12: TypeError: "),
    ],
)
def test_errors_of_the_user_s_own_code_are_one_line_with_its_place(
    model: str, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    pathlib.Path("model_of_a_user.py").write_text(source)
    with pytest.raises(SystemExit) as caught:
        main(["profile", "--estimate", "--machine", "h100-pcie5", "--model", model])
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert re.search(rf"--model {model}: \S*model_of_a_user.py, {message}", printed.err.strip())


def test_a_function_that_wants_arguments_is_said_to(model: str) -> None:
    pathlib.Path("model_of_a_user.py").write_text("def build(size):\n    return size\n")
    with pytest.raises(InputError, match=r"build: TypeError: build.. missing 1 required positional argument"):
        run("--estimate", "--machine", "h100-pcie5", "--model", model)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--remat", "some"), *(("--compute-dtype", name) for name in ("float99", "int32", "bool", "complex64"))],
)
def test_unknown_words_are_refused(model: str, option: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{option} must be .* got '{value}'"):
        run("--estimate", "--machine", "h100-pcie5", "--model", model, option, value)


def test_bad_input_ends_with_status_2_and_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--model", model, "--optimizer", "none"],
        ["--estimate", "--machine", "z80", "--model", model],
        [],
    ):
        with pytest.raises(SystemExit) as caught:
            main(["profile", *arguments])
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1


def test_an_estimate_can_be_planned_and_simulated(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["profile", "--estimate", "--machine", "h200-pcie5", "--model", model, "-o", "p.json"],
        ["plan", "p.json", "--policy", "memferry", "-o", "plan.json"],
        ["simulate", "p.json", "plan.json", "--json"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
    assert json.loads(printed)["steady_step_s"] > 0


def test_a_measured_profile_says_what_it_was_measured_on_and_round_trips(model: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "profile.json"
    printed = run("--model", model, "-o", path, "--json")
    written = Profile.load(path)
    assert Profile.from_json(json.loads(printed)) == written
    assert written.machine["measured"] is True
    assert written.machine["device"] == jax.devices()[0].device_kind
    assert (written.machine["model"], written.machine["optimizer"]) == (model, "adamw")
    assert [layer.param_bytes for layer in written.layers] == [50 * 8 * 4, (8 * 50 + 50) * 4]
    assert all(layer.load_s > 0 and layer.update_s > 0 and layer.forward_s > 0 for layer in written.layers)


def test_what_was_measured_before_is_printed_again_without_measuring(
    model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path / "cache"))
    measured = [run("--model", model, "--json") for _ in range(2)]
    assert measured[0] == measured[1]
    assert list((tmp_path / "cache").rglob("*.json"))
    assert run("--model", model, "--optimizer", "sgd", "--json") != measured[0]
    assert "Measured on" in run("--model", model)


def test_off_keeps_nothing(model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("--model", model, "--json")
    assert not (tmp_path / "cache").exists()


def test_errors_of_the_user_s_own_code_are_one_line_when_measuring_too(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pathlib.Path("model_of_a_user.py").write_text(MODEL.replace('params["head"]["bias"]', 'params["foot"]'))
    with pytest.raises(SystemExit) as caught:
        main(["profile", "--model", model])
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert re.search(rf"--model {model}: \S*model_of_a_user.py, line 12: KeyError: 'foot'", printed.err)


def test_a_measured_profile_can_be_planned_and_simulated(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["profile", "--model", model, "-o", "p.json"],
        ["plan", "p.json", "--policy", "exact", "-o", "plan.json"],
        ["simulate", "p.json", "plan.json", "--json"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        captured = capsys.readouterr()
        assert captured.err == ""
    assert json.loads(captured.out)["steady_step_s"] > 0
