"""`jaxferry train` from outside."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxferry as package
from faults import first_save_fails
from jaxferry.cli.recording import Recording
from jaxferry.cli.train import as_arguments, resumed_options, save_options
from jaxferry.cli.workload import call_model
from jaxferry.errors import InputError, ScratchError
from jaxferry.modes import ActivationPlace, GradientPlace, Mode
from jaxferry.step import LayerPlan, Plan
from jaxferry.training import TrainStep
from plain_optax import plain_losses


def test_it_trains_as_a_loop_of_ones_own_does(jaxferry, user_model):
    result = jaxferry("train", "--model", user_model("functions"), "--steps", 5, "--seed", 3, "--json")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    user = call_model(user_model("functions"))
    params = user.params(jax.random.key(3))
    losses = plain_losses(user.loss_fn, optax.adamw(1e-3), params, user.batch, 5)
    np.testing.assert_allclose(document["losses"], losses, rtol=1e-5)
    assert document["steps"] == len(document["step_s"]) == 5
    assert document["modes"] == {"GFGB": len(params)}


def test_micro_batches_weigh_what_the_loss_function_says(jaxferry, user_model, tmp_path):
    line = ("--model", user_model("weighed"), "--optimizer", "sgd", "--learning-rate", 0.5, "--json")
    result = jaxferry("train", *line, "--steps", 2, "--accumulate", 2, "--weight", "num", "--save", tmp_path / "run")
    assert result.status == 0, result.err
    resumed = jaxferry("train", *line, "--steps", 3, "--resume", tmp_path / "run")
    assert "--accumulate 2 --weight num" in resumed.err
    user = call_model(user_model("weighed"))
    params = user.params(jax.random.key(0))
    of_batch = jax.value_and_grad(lambda params, number: user.loss_fn(params, user.batch(number))[0])
    (first, one), (second, two) = of_batch(params, 0), of_batch(params, 1)
    updated = jax.tree.map(lambda master, a, b: master - 0.5 * (a + 2 * b) / 3, params, one, two)
    losses = [loss for each in (result, resumed) for loss in json.loads(each.out)["losses"]]
    np.testing.assert_allclose(losses, [first, second, of_batch(updated, 2)[0]], rtol=1e-5)


def test_a_resumed_run_goes_on_where_it_ended(jaxferry, user_model, tmp_path):
    model = user_model("functions")
    whole = jaxferry("train", "--model", model, "--steps", 6, "--json")
    first = jaxferry("train", "--model", model, "--steps", 4, "--save", tmp_path / "state", "--json")
    rest = jaxferry("train", "--model", model, "--steps", 6, "--resume", tmp_path / "state", "--json")
    losses = [json.loads(result.out)["losses"] for result in (whole, first, rest)]
    assert losses[0] == losses[1] + losses[2]
    assert jaxferry("train", "--model", model, "--steps", 6, "--resume", tmp_path / "state").status == 0
    done = jaxferry("train", "--model", model, "--steps", 4, "--resume", tmp_path / "state")
    assert "nothing to do" in done.out


def test_a_resumed_run_has_the_options_of_the_saved_one_unless_given(jaxferry, user_model, tmp_path):
    model, first, second = user_model("arrays"), tmp_path / "first", tmp_path / "second"
    limits = ("--policy", "l2l", "--memory-budget", "1MiB", "--optimizer", "sgd", "--learning-rate", 0.5)
    started = jaxferry("train", "--model", model, "--steps", 2, *limits, "--save", first, "--json")
    assert json.loads(started.out)["policy"] == "l2l"
    resumed = jaxferry("train", "--model", model, "--steps", 3, "--resume", first, "--save", second, "--json")
    assert json.loads(resumed.out)["policy"] == "l2l"
    told = "as the saved run: --optimizer sgd --learning-rate 0.5 --policy l2l --memory-budget 1MiB"
    assert told in resumed.err.splitlines()
    again = jaxferry("train", "--model", model, "--steps", 4, "--resume", second, "--policy", "zero-offload", "--json")
    assert json.loads(again.out)["policy"] == "zero-offload"
    assert "as the saved run: --optimizer sgd --learning-rate 0.5 --memory-budget 1MiB" in again.err.splitlines()
    plain = jaxferry("train", "--model", model, "--steps", 4, *limits[4:], "--json")
    losses = [json.loads(result.out)["losses"] for result in (started, resumed, again, plain)]
    assert losses[0] + losses[1] + losses[2] == losses[3]


def test_a_resumed_run_keeps_its_state_on_the_same_disk_unless_told_otherwise(jaxferry, user_model, tmp_path):
    model, saved = user_model("arrays"), tmp_path / "saved"
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    train = ("train", "--model", model, "--optimizer", "adamw-bf16")
    disk = ("--scratch", os.path.relpath(tmp_path / "disk"), "--host-memory", "1KiB")
    with pytest.warns(UserWarning, match="more than host_memory"):
        assert jaxferry(*train, "--steps", 2, "--save", saved, *disk).status == 0
    with pytest.warns(UserWarning, match="more than host_memory"):
        told = jaxferry("train", "--model", model, "--steps", 3, "--resume", saved, "--scratch", tmp_path / "other")
    assert told.status == 0 and "--host-memory 1KiB" in told.err and "--scratch" not in told.err
    (tmp_path / "disk").rmdir()
    gone = jaxferry("train", "--model", model, "--steps", 3, "--resume", saved)
    assert gone.status != 0 and f"scratch must be a folder to write to, got '{tmp_path / 'disk'}'" in gone.err


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "exact", "--profile", "estimate"),
        ("--memory-budget", "1MiB"),
        ("--accumulate", 2, "--clip-norm", 0.1),
        ("--optimizer", "lion", "--learning-rate", 1e-4),
        ("--reserve-factor", 0),
        ("--remat", "full", "--offload-activations"),
    ],
    ids=lambda options: options[0],
)
def test_options_reach_the_step(jaxferry, user_model, options):
    result = jaxferry("train", "--model", user_model("arrays"), "--steps", 4, *options)
    assert result.status == 0, result.err
    assert "4 steps: loss" in result.out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_what_there_is(jaxferry, user_model, tmp_path, monkeypatch, number, status):
    take, save = TrainStep.__call__, TrainStep.save

    def interrupted(self, state, *args, **kwargs):
        if state.step == 2:
            signal.raise_signal(number)
        return take(self, state, *args, **kwargs)

    def saved(self, *args, **options):
        if number == signal.SIGTERM:
            signal.raise_signal(number)  # a scheduler may insist
        save(self, *args, **options)

    before, options = signal.getsignal(number), ("--steps", 9, "--save", tmp_path / "state", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", interrupted)
        patch.setattr(TrainStep, "save", saved)
        result = jaxferry("train", "--model", user_model("functions"), *options)
    assert result.status == status
    assert signal.getsignal(number) == before
    assert f"ended after step 2: saved, continue with --resume {tmp_path / 'state'}" in result.err
    assert json.loads(result.out)["steps"] == 2
    step = package.train_step(call_model(user_model("functions")).loss_fn, optax.adamw(1e-3))
    assert step.restore(tmp_path / "state").step == 2


def test_an_interrupt_before_the_first_step_writes_no_recording(jaxferry, user_model, tmp_path, monkeypatch):
    def interrupted(self, state, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    options = ("--steps", 9, "--trace", tmp_path / "trace.json", "--record", tmp_path / "run.json")
    monkeypatch.setattr(TrainStep, "__call__", interrupted)
    result = jaxferry("train", "--model", user_model("functions"), *options)
    assert (result.status, result.out.strip()) == (130, "no step was run: the state is at step 0")
    assert "ended after step 0: nothing is saved (no --save)" in result.err
    assert not list(tmp_path.glob("*.json"))


def test_a_run_saves_every_few_steps_in_the_background_and_goes_on_from_the_newest(jaxferry, user_model, tmp_path):
    model, folder = user_model("functions"), tmp_path / "runs" / "one"
    whole = jaxferry("train", "--model", model, "--steps", 7, "--json")
    first = jaxferry("train", "--model", model, "--steps", 5, "--save", folder, "--save-every", 2, "--keep-last", 2)
    assert first.status == 0, first.err
    assert [saved.step for saved in package.list_checkpoints(folder)] == [4, 5]
    rest = jaxferry("train", "--model", model, "--steps", 7, "--resume", folder, "--json")
    assert json.loads(rest.out)["losses"] == json.loads(whole.out)["losses"][5:]


def test_one_of_several_saved_states_is_resumed_with_its_run_s_options(jaxferry, user_model, tmp_path):
    model, folder = user_model("functions"), tmp_path / "run"
    own = ("--learning-rate", 0.05, "--save", folder, "--save-every", 2, "--keep-last", 2)
    assert jaxferry("train", "--model", model, "--steps", 4, *own).status == 0
    told = [
        jaxferry("train", "--model", model, "--steps", 4, "--resume", saved).err
        for saved in (folder, folder / "00000004", folder / "00000004" / "save_0")
    ]
    assert all("--learning-rate 0.05" in text for text in told), told


@pytest.mark.parametrize(
    ("error", "told"), [(None, "cannot write to"), (ScratchError("the scratch file failed"), "the scratch file failed")]
)
def test_a_save_that_fails_in_between_is_told_and_training_goes_on(
    error, told, jaxferry, user_model, tmp_path, monkeypatch
):
    calls = first_save_fails(monkeypatch, error)
    model, folder = user_model("functions"), tmp_path / "state"
    result = jaxferry("train", "--model", model, "--steps", 5, "--save", folder, "--save-every", 2, "--json")
    assert result.status == 0 and json.loads(result.out)["steps"] == 5
    assert f"warning: {told}" in result.err and len(calls) == 3
    assert package.train_step(call_model(model).loss_fn, optax.adamw(1e-3)).restore(folder).step == 5


def test_the_last_steps_are_recorded_and_traced(jaxferry, user_model, tmp_path):
    path, trace, model = tmp_path / "run.json", tmp_path / "trace.json", user_model("arrays")
    assert jaxferry("train", "--model", model, "--steps", 3, "--record", path, "--trace", trace).status == 0
    recording = Recording.load(path)
    assert (recording.model, recording.accumulate) == (model, 1)
    assert max(task.step for task in recording.tasks) == 2
    assert {task.layer for task in recording.tasks} == {f"layer_{i}" for i in range(4)}
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"load layer_0", "forward layer_3", "offload layer_0", "update layer_3"} <= names


def test_policy_auto_lets_activations_leave_unless_told_to_keep_them(jaxferry, refused, user_model, tmp_path):
    model, run = ("--model", user_model("long_batch")), tmp_path / "run"
    auto = (*model, "--policy", "auto", "--profile", "estimate", "--memory-budget", "600KB")
    told = "is too small: the smallest possible is 648.0 KiB"
    assert told in refused("train", "--steps", 1, *auto, "--keep-activations")
    assert jaxferry("train", "--steps", 1, *auto, "--save", run).status == 0
    resumed = jaxferry("train", "--steps", 2, "--resume", run, *model, "--json")
    assert len(json.loads(resumed.out)["losses"]) == 1
    assert jaxferry("train", "--steps", 3, "--resume", run, *model, "--keep-activations").status == 2


def test_keeping_activations_contradicts_a_plan_that_lets_them_leave(refused, user_model, tmp_path):
    leaves = {"activations": ActivationPlace.HOST}
    layers = tuple(LayerPlan(f"layer_{i}", Mode.GFGB, GradientPlace.DEVICE, **leaves) for i in range(4))
    Plan("any", 1.0, layers).save(tmp_path / "plan.json")
    given = ("--model", user_model("long_batch"), "--plan", tmp_path / "plan.json", "--steps", 1)
    assert "--keep-activations contradicts --plan" in refused("train", *given, "--keep-activations")


def test_a_plan_given_again_replaces_the_saved_run_s_policy_and_wrong_types_are_named(tmp_path):
    save_options(tmp_path, {"policy": "exact", "accumulate": 2, "offload_activations": True, "profile": "p.json"})
    known = ("policy", "plan", "accumulate", "offload_activations", "profile")
    kept = resumed_options(tmp_path, known, {"plan", "profile"})
    assert kept == {"accumulate": 2, "offload_activations": True}
    assert as_arguments(kept) == "--accumulate 2 --offload-activations"
    assert as_arguments({"offload_activations": False}) == "--keep-activations"
    assert resumed_options(tmp_path, known, ())["profile"] == str(Path("p.json").absolute())
    assert resumed_options(tmp_path / "none", known, ()) == {}
    with pytest.raises(InputError, match=r"train.json: unknown option 'accumulate'; known are policy, plan"):
        resumed_options(tmp_path, known[:2], ())
    for name, value, message in (
        ("devices", "two", "a whole number, got 'two'"),
        ("accumulate", True, "a whole number, got True"),
        ("learning_rate", "x", "a number, got 'x'"),
        ("optimizer", {"a": 1}, "a string, got {'a': 1}"),
        ("offload_activations", 1, "true or false, got 1"),
    ):
        save_options(tmp_path, {name: value})
        with pytest.raises(InputError, match=f"train.json: option {name} must be {message}"):
            resumed_options(tmp_path, (name,), ())
