"""Bad input of every command: status 2, and nothing but one line on standard error that names what is wrong."""

import json
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

from jaxferry.errors import BudgetError
from jaxferry.planner import make_plan
from profiles import INSTANCE, smallest_peak_bytes, transformer

NAME = "model_on_the_command_line"
MODULE = """
import jax.numpy as jnp
def scalar(): return (lambda p, x: p['w'] * x), {'w': jnp.ones(())}, jnp.ones(())
def number(): return 3
def wrong(): return 1 / 0
def sized(size): return size
value = 3
def text(): return *scalar()[:2], lambda number: "abc"
def integer(): return scalar()[0], lambda key: 3, jnp.ones(())
def vector(): return (lambda p, x: p['w'] * x), {'w': jnp.ones(2)}, jnp.ones(2)
"""
PROFILE = '{"format": "jaxferry.profile/1", "layers": %s}'
BENCH = '{"format": "jaxferry.bench/1", %s}'

LINES = [
    ("lunch", "lunch"),
    ("plan", "PROFILE.json"),
    ("plan p.json --fast", "No such option"),
    ("plan p.json --policy best", "unknown policy 'best'"),
    ("plan p.json --objective speed", "objective must be one of forward, step, steady"),
    ("plan p.json --reserve-factor 1.5", r"reserve_factor must lie in \[0, 1\]"),
    ("plan p.json --reserve-factor nan", r"reserve_factor must lie in \[0, 1\]"),
    ("plan p.json --reserve-factor half", "--reserve-factor"),
    ("plan p.json --memory-budget '8 parsecs'", "memory budget must be"),
    ("plan p.json --memory-budget 999999999999TiB", "memory budget .* 8 PiB .* 999999999999TiB"),
    ("plan p.json --policy auto --memory-budget 1KB", "p.json: memory budget .* smallest feasible"),
    ("plan p.json --policy memferry --memory-budget 1KB", "smallest feasible"),
    ("plan p.json --processes 2", "--processes needs --devices"),
    ("plan p.json --granularity fine", "granularity must be one of block, module, auto"),
    ("tune p.json --granularity fine", "granularity must be one of block, module, auto"),
    ("plan none.json", "cannot read none.json"),
    ("plan p.json --policy memferry -o no/plan.json", "cannot write no/plan.json"),
    ("simulate other.json plan.json", "plan.json and other.json: .*another profile"),
    ("simulate p.json p.json", "p.json: format must be"),
    ("simulate p.json none.json", "cannot read none.json"),
    ("simulate p.json plan.json --trace no/t.json", "cannot write no/t.json"),
    ("simulate p.json plan.json --steps 0", "--steps"),
    ("simulate p.json fast.json", 'layer "table0": mode must be one of'),
    ("tune p.json --policy best", "unknown policy"),
    ("tune p.json --reserve-factor 0:1", "range"),
    ("tune p.json --reserve-factor 0:2:1", "reserve factor must"),
    ("tune p.json --reserve-factor inf", "reserve factor must"),
    ("tune p.json --memory-budget 1:x:1", "budget must be"),
    ("tune p.json --policy memferry --reserve-factor 1 --plot no/p.png", "cannot write no/p.png"),
    ("tune p.json --reserve-factor 1 --plot p.foo", r"\.png, \.pdf, \.svg, got 'p\.foo'"),
    ("tune p.json --reserve-factor 1 --plot p", r"\.png, \.pdf, \.svg, got 'p'"),
    ("weights i.json --policy best", "policy must be one of greedy, .*, got 'best'"),
    ("weights i.json --memory-budget much", "memory budget must be a number of bytes or a size"),
    ("weights i.json --memory-budget 13", "memory_bytes 13 is too small for any schedule: the smallest feasible is 14"),
    ("weights i.json -o plan.json", "-o needs a profile"),
    ("weights i.json --no-such-option", "No such option"),
    ("weights p.json", "give --memory-budget"),
    ("profile", "--model"),
    (f"profile --model {NAME}:shapes --optimizer sgdw", "--optimizer must be one of adamw, .* got 'sgdw'"),
    (f"profile --model {NAME}:shapes --transport ship", "transport must be one of ferry, .* got 'ship'"),
    (f"profile --model {NAME}:shapes --estimate", "needs --machine: one of v100-pcie3"),
    (f"profile --model {NAME}:shapes --machine z80", "machine must be one of .* got 'z80'"),
    (f"profile --model {NAME}:shapes --processes 2", "--processes needs --machine"),
    (f"profile --model {NAME}:shapes --machine h100-pcie5 --devices 3 --processes 2", "multiple of --processes"),
    (f"profile --model {NAME}:shapes --machine h100-pcie5 --devices 3", "first axis .* a multiple of 3 devices"),
    (f"profile --model {NAME}:shapes --machine h100-pcie5 --remat some", "--remat must be .* got 'some'"),
    (f"fit {NAME}:shapes --machine h100-pcie5 --remat some", "--remat must be .* got 'some'"),
    (f"profile --model {NAME} --machine h100-pcie5", '"module:function", "file.py:function"'),
    ("profile --model no_module:f --machine h100-pcie5", "no module named 'no_module'"),
    (f"profile --model {NAME}:f --machine h100-pcie5", "has no function 'f'"),
    ("profile --model mine.py:value --machine h100-pcie5", "has no function 'value'"),
    ("profile --model mine.py:number", r"must return \(loss_fn, params, batch\), got int"),
    ("profile --model mine.py:sized --machine h100-pcie5", r"TypeError: sized.. missing 1 required positional"),
    *(
        (f"profile --model {NAME}:shapes --machine h100-pcie5 --compute-dtype {name}", f"floating .* got '{name}'")
        for name in ("float99", "int32", "bool", "complex64")
    ),
    ("fit gpt2:tiny", "--machine"),
    ("fit gpt2:tiny --machine a100-pcie4 --tiles many", "tiles must be .* got 'many'"),
    ("fit gpt2:tiny --machine a100-pcie4 --tiles wte=2,h/0=0", r"tiles\['h/0'\] must be .* got 0"),
    ("fit gpt2:tiny --machine z80", "machine must be one of"),
    ("fit gpt2:big --machine a100-pcie4", "WORKLOAD gpt2:big: sizes of gpt2 are tiny"),
    ("fit gpt2:tiny --machine a100-pcie4 --memory-budget none", "fit answers for a size of memory"),
    ("fit gpt2:tiny --machine a100-pcie4 --host-memory much", "--host-memory must be a number of bytes or a size"),
    ("fit gpt2:tiny --machine a100-pcie4 --batch 0", "--batch"),
    ("fit gpt2:tiny --machine a100-pcie4 --granularity auto", "--granularity must be block or module, got 'auto'"),
    ("fit vit:tiny --machine a100-pcie4 --seq 4", "--seq needs a workload whose function has a parameter `length`"),
    ("fit gpt2:tiny --machine a100-pcie4 --batch 1 --memory-budget 1KiB -o plan.json", "there is no plan to write"),
    ("train --model mine.py:text", "--model mine.py:text: argument 1 after the state must be an array"),
    ("train --model mine.py:integer", "--model mine.py:integer: parameter 'params' has dtype int32"),
    ("train --model mine.py:vector", "--model mine.py:vector: loss_fn must return a real floating-point scalar"),
    ("profile --model mine.py:vector --machine h100-pcie5", "--model mine.py:vector: loss_fn must return"),
    ("fit mine.py:scalar --machine a100-pcie4", "without an axis of samples"),
    ("fit mine.py:number --machine a100-pcie4", r"WORKLOAD mine.py:number must return \(loss_fn, .*, got int"),
    ("fit mine.py:wrong --machine a100-pcie4", "mine.py, line 5: ZeroDivisionError"),
    (f"train --model {NAME}:shapes", "returns shapes for the parameters: return arrays, or a function that makes"),
    (f"train --model {NAME}:shaped_batch", "returns shapes for the batch: return arrays, or a function that makes"),
    (f"train --model {NAME}:broken", "ValueError: no such thing"),
    (f"train --model {NAME}:arrays --optimizer best", "--optimizer must be one of adamw, adam"),
    (f"train --model {NAME}:arrays --policy best", "unknown policy 'best'"),
    (f"train --model {NAME}:arrays --plan none.json", "cannot read none.json"),
    (f"train --model {NAME}:arrays --resume nowhere", "nowhere is not a JaxFerry checkpoint"),
    (f"train --model {NAME}:arrays --save-every 2", "--save-every needs --save"),
    (f"train --model {NAME}:arrays --keep-last 2", "--keep-last needs --save"),
    (f"train --model {NAME}:arrays --join-timeout 2", "--join-timeout needs --distributed"),
    (f"train --model {NAME}:arrays --save gs://bucket/run", "is remote storage"),
    (f"train --model {NAME}:arrays --save mine.py/x", "cannot write"),
    (f"train --model {NAME}:arrays --trace mine.py/x", "cannot write mine.py/x: mine.py is not a folder"),
    (f"train --model {NAME}:arrays --record .", "cannot write .: it is a folder"),
    ("doctor --scratch missing", "scratch must be a folder to write to, got "),
    (f"train --model {NAME}:arrays --memory-budget 1KiB", "memory"),
    (f"train --model {NAME}:arrays --learning-rate=-1", "--learning-rate must be a number above 0, got -1"),
    (f"train --model {NAME}:arrays --learning-rate nan", "--learning-rate must be a number above 0, got nan"),
    (f"train --model {NAME}:arrays --compute-dtype int8", "--compute-dtype must be a floating dtype"),
    (f"train --model {NAME}:arrays --compute-dtype float8_e4m3fn", "--compute-dtype must have at least 16 bits"),
    (f"profile --model {NAME}:arrays --compute-dtype float64", "--compute-dtype 'float64' needs 64-bit numbers"),
    (f"train --model {NAME}:arrays --steps 0 --trace t.json", "--trace needs at least one step"),
    ("train --model gpt2:7b", "--model gpt2:7b: sizes of gpt2 are tiny, 124m, medium, xl, 2.7b, 6.7b, got '7b'"),
    ("train --model none.py:make", "--model none.py:make: there is no file 'none.py'"),
    ("train --model setup.py:", '"file.py:function"'),
    (f"bench --model {NAME}:arrays --policy best", "unknown policy 'best'"),
    (f"bench --model {NAME}:arrays --profile none.json", "cannot read none.json"),
    (f"bench --model {NAME}:arrays --dry --plot p.png", "--plot draws measured steps, and --dry measures none"),
    (f"bench --model {NAME}:arrays --plot lanes.txt", "a plot's name must end in .png, .pdf, .svg"),
    (f"bench --model {NAME}:arrays --steps 2", "--steps"),
    (f"bench --model {NAME}:arrays --optimizer best", "--optimizer must be one of"),
    (f"bench --model {NAME}:arrays --granularity auto", "--granularity must be block or module, got 'auto'"),
    (f"bench --model {NAME}:arrays --policy exact --profile p.json", "p.json: .*is for another model"),
    ("report none.json", "cannot read none.json"),
    ("report p.json", 'p.json: format must be "jaxferry.bench/1" or "jaxferry.recording/1", got "?.jaxferry.profile/1'),
    ("doctor --link-size 0", "--link-size must be positive, got 0"),
    ("doctor --link-size far", "--link-size must be"),
    ("doctor --link-size 1KiB --scratch none", "scratch must be a folder to write to, got '.*none': .*No such file"),
    (f"train --model {NAME}:arrays --scratch none", "scratch must be a folder to write to, got '.*none'"),
    (f"train --model {NAME}:arrays --host-memory 1GiB", "host_memory='1GiB' needs scratch="),
    (f"train --model {NAME}:arrays --gradient-buffers 0", "gradient_buffers must be a whole number, 1 or more"),
    (f"train --model {NAME}:arrays --gradient-buffers 4 --clip-norm 1", "gradient_buffers=4 needs updates that"),
    (
        f"fit {NAME}:arrays --machine a100-pcie4 --gradient-buffers few",
        "^jaxferry: gradient_buffers must be a whole number",
    ),
    (f"fit {NAME}:arrays --machine a100-pcie4 --scratch 0", "--scratch must be positive, got 0"),
    ("build-native --platform rocm", "--platform must be one of cpu, cuda, all, got 'rocm'"),
]

FILES = [
    ("plan", "{", "bad.json, line 1, column 2"),
    ("plan", "[]", "bad.json: must be a JSON object"),
    ("plan", '{"format": "jaxferry.profile/2"}', "bad.json: format"),
    ("plan", PROFILE % "[]", "bad.json: .*at least one layer"),
    ("plan", PROFILE % '[{"name": "a"}]', 'bad.json: layer "a": key "param_bytes" is missing'),
    ("weights", '{"weights": [5,\n?]}', "bad.json, line 2, column 1"),
    ("weights", json.dumps(INSTANCE | {"weights": []}), "bad.json: weights must name at least one layer"),
    ("weights", json.dumps(INSTANCE | {"forward_s": [4, 4, 4, -4]}), r"bad.json: forward_s\[3\] must be finite"),
    ("weights", json.dumps(INSTANCE | {"backward_s": [4, 4, 4, float("nan")]}), r"backward_s\[3\] must .* got nan"),
    ("report", "{}", "bad.json: format must be"),
    ("report", "[", "malformed JSON in bad.json"),
    ("report", BENCH % '"rows": 1', "bad.json: "),
    ("report", BENCH % '"work_s": {}', 'bad.json: .*key "rows" is missing'),
    ("report", BENCH % '"rows": [], "work_s": {}', "bad.json: .*must have rows"),
    ("report", BENCH % '"rows": [{}], "work_s": {"compute": 1}', "bad.json: .*do not come from a bench"),
]


@pytest.fixture
def files(tmp_path, user_model):
    """Profiles, a plan, an instance and models in the current directory."""
    profile = transformer(14)
    profile.save("p.json")
    transformer(15).save("other.json")
    plan = make_plan(profile, "memferry").to_json()
    Path("plan.json").write_text(json.dumps(plan))
    plan["layers"][0]["mode"] = "FAST"
    Path("fast.json").write_text(json.dumps(plan))
    Path("i.json").write_text(json.dumps(INSTANCE))
    Path("mine.py").write_text(MODULE)


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_bad_command_line_is_refused(refused, files, line, message):
    before = set(Path().iterdir())
    assert re.search(message, refused(*shlex.split(line)))
    assert {path.suffix for path in set(Path().iterdir()) - before} <= {""}  # no results; Python's cache of a module


@pytest.mark.parametrize(("command", "content", "message"), FILES)
def test_a_bad_file_is_refused_by_its_name(refused, tmp_path, monkeypatch, command, content, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text(content)
    assert re.search(message, refused(command, "bad.json"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def arrays(:\n", "line 1: SyntaxError: "),
        ("\n\nimport no_such_package\n", "line 3: ModuleNotFoundError: No module named 'no_such_package'"),
        ("value = 1\nvalue / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def arrays():\n    return open('none.txt')\n", "line 2: FileNotFoundError: .*none.txt"),
        ("def helper():\n    raise KeyError\n\ndef arrays():\n    return helper()\n", "line 2: KeyError$"),
        ("import sys\nsys.exit('not now')\n", "line 2: SystemExit: not now"),
        ('batch["y"]', "line 18: KeyError: 'z'"),
        ("x @ params", "line 17: AttributeError: 'dict' object has no attribute 'T'"),
    ],
)
@pytest.mark.parametrize("more", ["--machine h100-pcie5", ""])
def test_an_error_of_the_user_s_own_code_is_told_with_its_place(refused, files, source, message, more):
    path = Path(f"{NAME}.py")
    changes = {'batch["y"]': 'batch["z"]', "x @ params": "x @ params.T"}
    path.write_text(path.read_text().replace(source, changes[source]) if source in changes else source)
    error = refused(*shlex.split(f"profile --model {NAME}:arrays {more}"))
    assert re.search(rf"--model {NAME}:arrays: \S*{NAME}.py, {message}", error.strip())


def test_a_loss_that_is_not_finite_ends_training_with_a_line(jaxferry, files):
    result = jaxferry("train", "--model", f"{NAME}:diverging", "--steps", 2)
    assert result.status == 2 and "the loss of step 0 is" in result.err


@pytest.mark.parametrize(
    ("policy", "more"),
    [("auto", ()), ("exact", ("--json",)), ("memferry", ("-o", "new.json")), ("memferry", ("--plot", "p.png"))],
)
def test_budgets_that_nothing_fits_into_name_the_smallest_feasible_one(refused, files, policy, more):
    profile, least = transformer(6), []
    profile.save("p.json")
    budgets = ("--memory-budget", "1KB:3KB:1KB", "--reserve-factor", "0:1:1")
    error = refused("tune", "p.json", *budgets, "--policy", policy, *more)
    for factor in (0.0, 1.0):
        with pytest.raises(BudgetError) as caught:
            make_plan(profile, policy, reserve_factor=factor, memory_budget_bytes=3000)
        least.append(caught.value.smallest_bytes)
    assert int(re.search(r"smallest feasible for policy \S+ is .* \((\d+) bytes\)", error)[1]) == min(least)
    assert "p.json" in error and "3000 bytes" in error
    assert not Path("new.json").exists() and not Path("p.png").exists()


@pytest.mark.parametrize("more", [(), ("--json",), ("-o", "new.json")])
def test_a_comparison_in_which_nothing_fits_names_the_smallest_feasible_budget(refused, files, more):
    profile = transformer(6)
    profile.save("p.json")
    error = refused("plan", "p.json", "--compare", "--memory-budget", "1", *more)
    assert f"({smallest_peak_bytes(profile)} bytes)" in error and not Path("new.json").exists()


@pytest.mark.parametrize(
    ("line", "target"),
    [
        (f"fit {NAME}:arrays --machine h100-pcie5", "jaxferry.cli.fit.TrainedShapes"),
        (f"profile --model {NAME}:arrays --machine h100-pcie5", "jaxferry.cli.traced.estimate_profile"),
        (f"profile --model {NAME}:arrays", "jaxferry.partition.build.check_outputs"),
        (f"train --model {NAME}:arrays --steps 1", "jaxferry.engine.runner.DeviceCopies"),
        (f"train --model {NAME}:arrays --steps 1 --save run", "jaxferry.checkpoint.write_arrays"),
        (f"bench --model {NAME}:arrays --policy l2l --dry", "jaxferry.partition.build.check_outputs"),
        ("plan p.json --policy memferry", "jaxferry.planner.planning.as_run"),
    ],
)
def test_an_internal_error_is_not_called_an_error_of_the_user_s_file(jaxferry, files, monkeypatch, line, target):
    monkeypatch.setattr(target, Mock(side_effect=KeyError("lost")))
    result = jaxferry(*shlex.split(line))
    [told] = [each for each in result.err.splitlines() if each.startswith("jaxferry: ")]
    assert result.status == 1 and "internal error of JaxFerry in " in told and "KeyError: 'lost'" in told
    assert f"{NAME}.py" not in told and "please report it at https://" in told and "Traceback" not in result.err


def test_the_traceback_of_an_internal_error_is_shown_where_asked_for(jaxferry, files, monkeypatch):
    line = "plan p.json --policy memferry"
    monkeypatch.setattr("jaxferry.planner.planning.as_run", Mock(side_effect=KeyError("lost")))
    for more in (["--traceback"], []):
        monkeypatch.setenv("JAXFERRY_TRACEBACK", "0" if more else "1")
        assert "Traceback (most recent call last)" in jaxferry(*shlex.split(line), *more).err
