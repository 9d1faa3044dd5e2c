"""The three ways to name a workload on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxferry.cli.workload import EXAMPLES, call_model, find_function

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_examples_size_names_a_workload(example):
    user = call_model(f"{example}:tiny")
    loss = jax.eval_shape(user.loss_fn, user.shapes(), jax.eval_shape(lambda: user.batch_of(0)))
    assert jax.tree.leaves(loss)[0].shape == ()


def test_the_named_models_are_as_large_as_their_names_say():
    def millions(name):
        return sum(leaf.size for leaf in jax.tree.leaves(call_model(name).shapes())) // 10**6

    assert (millions("gpt2:124m"), millions("bert:base"), millions("resnet:18")) == (124, 110, 11)


def test_the_size_of_batches_is_a_parameter():
    _, _, batch_of = find_function("gpt2:tiny")(batch_size=3, length=5)
    assert batch_of(0)["tokens"].shape == (3, 6)


def test_a_file_names_a_workload_and_sees_the_modules_beside_it(user_model, tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("SCALE = 3.0\n")
    (folder / "work.py").write_text(
        "import dataclasses\nimport jax.numpy as jnp\nimport beside\n\n"
        "@dataclasses.dataclass\nclass Shape:\n    n: int\n\n"
        "def make():\n    n = Shape(4).n\n    params = {'w': jnp.ones(n)}\n"
        "    return (lambda p, x: beside.SCALE * (p['w'] * x).sum()), params, jnp.ones(n)\n"
    )
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    user = call_model(f"{folder / 'work.py'}:make")
    assert user.loss_fn(user.params, user.batch_of(0)) == 12.0


def test_a_module_in_a_package_names_a_workload(user_model, jaxferry, tmp_path):
    package = tmp_path / "package_of_a_user" / "inner"
    package.mkdir(parents=True)
    (tmp_path / user_model("x").replace(":x", ".py")).rename(package / "models.py")
    result = jaxferry("train", "--model", "package_of_a_user.inner.models:functions", "--steps", 2, "--json")
    assert (result.status, len(json.loads(result.out)["losses"])) == (0, 2)


def test_a_users_own_module_with_an_examples_name_is_found(tmp_path):
    (tmp_path / "vit.py").write_text("def make():\n    return 6.0\n")
    code = "from jaxferry.cli.workload import find_function; print(find_function('vit:make')())"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "6.0\n"


def test_examples_in_the_package_are_found_as_beside_it(tmp_path):
    bundled = tmp_path / "jaxferry" / "bundled"
    bundled.mkdir(parents=True)
    (bundled / "examples").symlink_to(ROOT / "examples")
    code = (
        "import pathlib, jaxferry.cli.workload as c\n"
        f"c._PACKAGE = pathlib.Path({str(bundled.parent)!r})\n"
        "print(c.find_function('gpt2:tiny').func.__code__.co_filename)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(bundled / "examples" / "gpt2" / "workload.py")
