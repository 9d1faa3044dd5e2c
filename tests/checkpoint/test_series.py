"""Several checkpoints of one run in a folder: which are kept, and which is read."""

import dataclasses
import shutil
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from checkpoints import content, plain
from jaxferry import checkpoint
from jaxferry.checkpoint import Keep


def save(folder, step, metric=None, **keep):
    checkpoint.save(dataclasses.replace(content(step), metric=metric), folder, Keep(**keep))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_and_the_best_are_kept_and_the_newest_is_read(tmp_path):
    folder = tmp_path / "runs" / "one"
    metrics = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 4.0, 60: float("nan")}
    for number, metric in metrics.items():
        save(folder, number, checkpoint.check_metric(metric), last=2, best=2)
    assert names(folder) == ["00000020", "00000040", "00000050", "00000060"]
    listed = jaxferry.list_checkpoints(folder)
    assert [(one.step, one.metric) for one in listed] == [(20, 1.0), (40, 2.0), (50, 4.0), (60, None)]
    assert plain(checkpoint.load(folder))["step"] == 60
    assert plain(checkpoint.load(listed[0].path)) == {**plain(content(20)), "metric": 1.0}
    assert jaxferry.list_checkpoints(tmp_path / "nothing") == []


def test_after_a_return_to_an_older_step_the_last_saved_is_the_newest(tmp_path):
    for number in (100, 200, 300, 150):
        save(tmp_path, number, last=3)
    assert names(tmp_path) == ["00000150", "00000200", "00000300"]
    assert checkpoint.load(tmp_path).step == 150
    save(tmp_path, 160, last=2)
    assert names(tmp_path) == ["00000150", "00000160"]


def test_what_is_not_a_checkpoint_of_the_run_is_left_alone(tmp_path):
    for number in (1, 2):
        save(tmp_path, number, last=5)
    (tmp_path / "00000001" / "NOTES.txt").write_text("mine")
    (tmp_path / "00000099" / "about").mkdir(parents=True)
    (tmp_path / "00000099" / "about" / "metadata").write_text("{}")
    (tmp_path / "12345678").write_text("a file")
    checkpoint.save(content(7), tmp_path / "best")
    with pytest.warns(UserWarning, match='00000099 is left out: .*key "format" is missing'):
        for number in (3, 4):
            save(tmp_path, number, last=1)
    assert names(tmp_path) == ["00000001", "00000004", "00000099", "12345678", "best"]
    with pytest.warns(UserWarning, match="00000099 is left out"):
        assert checkpoint.load(tmp_path).step == 4
    with pytest.raises(jaxferry.CheckpointError, match="00000099 exists and is not a JaxFerry checkpoint"):
        save(tmp_path, 99, last=1)


def test_what_a_killed_save_has_left_of_another_step_is_removed(tmp_path):
    for number in (1, 2):
        save(tmp_path, number, last=5)
    shutil.copytree(tmp_path / "00000001", tmp_path / ".00000004.jaxferry-save-abcdefgh" / "new")
    assert checkpoint.load(tmp_path).step == 2
    with pytest.warns(UserWarning, match="removed what interrupted saves of .*00000004 left: .00000004.jaxferry-save"):
        save(tmp_path, 5, last=2)
    assert names(tmp_path) == ["00000002", "00000005"]


def test_a_checkpoint_and_a_folder_of_several_are_not_mixed_up(tmp_path):
    checkpoint.save(content(1), tmp_path / "one")
    with pytest.raises(jaxferry.CheckpointError, match="is one checkpoint, not a folder for several"):
        save(tmp_path / "one", 2, last=1)
    save(tmp_path / "several", 2, last=1)
    with pytest.raises(jaxferry.CheckpointError, match="several exists and is not a JaxFerry checkpoint"):
        checkpoint.save(content(1), tmp_path / "several")
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxferry.CheckpointError, match="is a file, not a folder for several"):
        checkpoint.check_target(tmp_path / "file", keep=Keep(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be a whole number of at least 1, got 0"),
        ({"keep_last": True}, "keep_last must be"),
        ({"keep_last": 1, "keep_best": -1}, "keep_best must be a whole number of at least 0, got -1"),
        ({"keep_best": 1}, "keep_best needs keep_last"),
        ({"metric": "low"}, "metric must be a number"),
    ],
)
def test_options_that_are_invalid_are_told_and_nothing_is_written(tmp_path, options, message):
    step = jaxferry.train_step(lambda params, x: (params["w"] * x).sum(), optax.sgd(0.1))
    with pytest.raises(jaxferry.InputError, match=message):
        step.save(step.init({"w": np.ones(3, np.float32)}), tmp_path / "saved", **options)
    assert names(tmp_path) == []


def test_a_run_saves_in_the_background_and_goes_on_from_the_newest_or_the_best(tmp_path):
    step = jaxferry.train_step(lambda params, x: ((params["w"] * x) ** 2).sum(), optax.adam(0.1))
    state, params = step.init({"w": np.ones(3, np.float32)}), {}
    for number in range(1, 6):
        state, _ = step(state, jnp.ones(3))
        params[number] = state.params["w"]
        step.save(state, tmp_path / "run", wait=False, keep_last=2, keep_best=1, metric=abs(number - 2))
    step.wait_for_saves()
    assert names(tmp_path / "run") == ["00000002", "00000004", "00000005"]
    assert state.checkpoint == str(tmp_path / "run")
    np.testing.assert_array_equal(step.restore(tmp_path / "run").params["w"], params[5])
    best = min(jaxferry.list_checkpoints(tmp_path / "run"), key=lambda one: one.metric)
    np.testing.assert_array_equal(step.restore(best.path).params["w"], params[2])


def test_a_clock_that_is_set_back_makes_no_save_older_than_those_before(tmp_path, monkeypatch):
    for number in (1, 2):
        save(tmp_path, number, last=2)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 60)
    for number in (3, 4):
        save(tmp_path, number, last=2)
    assert names(tmp_path) == ["00000003", "00000004"]
    assert plain(checkpoint.load(tmp_path))["step"] == 4
    save(tmp_path, 2, last=2)  # of a run that has returned to an older step
    assert plain(checkpoint.load(tmp_path))["step"] == 2


def test_a_checkpoint_that_is_not_named_by_its_step_is_a_users_own(tmp_path):
    checkpoint.save(content(7), tmp_path / "20261124")
    for number in (1, 2):
        save(tmp_path, number, last=1)
    assert names(tmp_path) == ["00000002", "20261124"]
    assert [one.step for one in jaxferry.list_checkpoints(tmp_path)] == [2]
