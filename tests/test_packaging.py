"""The workflows and the package's description agree, and name what there is."""

import importlib.resources
import os
import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"]


def supported_pythons():
    prefix = "Programming Language :: Python :: 3."
    return ["3." + line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"] if line.startswith(prefix)]


def commands(workflow):
    """The commands of a workflow's steps."""
    steps = [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


def test_every_supported_python_is_tested_and_the_first_with_the_lowest_jax():
    rows = jobs("ci.yml")["test"]["strategy"]["matrix"]["include"]
    first, *others = supported_pythons()
    assert PROJECT["project"]["requires-python"] == f">={first}"
    assert rows == [{"python": first, "jax": "lowest"}, *({"python": python, "jax": "newest"} for python in others)]


def test_the_workflow_finds_the_lowest_jax_that_the_package_accepts():
    [pattern] = re.findall(r"grep -oP '([^']+)' pyproject.toml", commands(ROOT / ".github" / "workflows" / "ci.yml"))
    found = re.findall(pattern.replace(r"\K", "(") + ")", (ROOT / "pyproject.toml").read_text())
    [jax] = [line for line in PROJECT["project"]["dependencies"] if line.startswith("jax>=")]
    assert found == [jax.removeprefix("jax>=")]


def test_wheels_are_tried_on_every_supported_python():
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp{python.replace('.', '')}-manylinux_*" for python in supported_pythons()]
    script = ROOT / re.fullmatch(r"python \{project\}/(\S+) cpu cuda", settings["test-command"])[1]
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_only_targets_and_files_that_exist(workflow):
    run = commands(workflow)
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for words in re.findall(r"^make (.*)$", re.sub(r"\$\{\{.*?\}\}", "", run), re.MULTILINE):
        assert [word for word in words.split() if "=" not in word and word not in targets] == []
    for file in re.findall(r"(?<![\w./-])(?:tools|benchmarks)/[\w./-]+", run):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_but_for_the_jobs_that_publish(workflow):
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in document["jobs"].items() if "permissions" in job}
    assert set(more) <= {"publish"}
    assert all(job["timeout-minutes"] <= 90 for job in document["jobs"].values())


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert importlib.resources.files("jaxferry").joinpath("py.typed").is_file()
