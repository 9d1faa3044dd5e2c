"""Several processes that train together (`support/processes.py`), each with virtual CPU devices of its own."""

import re

import jax
import numpy as np
import optax
import pytest

import jaxferry
import processes
from processes import BATCH, NUM_STEPS, OPTIONS
from test_mesh import batches, loss_fn, params


def alone(**options):
    """The same training on one device."""
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), **options)
    state, losses, metrics = step.init(params()), [], {}
    for batch, key in batches(NUM_STEPS, BATCH):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
    return step, state, losses, metrics


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """What two processes of as many devices have found, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    return processes.start("trains", 2, request.param, folder), folder


def test_losses_and_parameters_are_those_of_one_device(trained):
    step, state, losses, metrics = alone(clip_norm=0.5)
    batch, key = batches(1, BATCH)[0]
    for found in trained[0]:
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(found["norm"], metrics["grad_norm"], rtol=1e-5)
        np.testing.assert_allclose(found["evaluated"], step.evaluate(state, batch, key)[0], rtol=1e-5)
        for own, expected in zip(found["params"], jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)
        assert found["shapes"][0] == BATCH


def test_all_processes_have_the_same_bits(trained):
    first, second = trained[0]
    assert all(first[name] == second[name] for name in ("losses", "norm", "evaluated", "params", "held"))


def test_a_checkpoint_is_written_once_and_goes_on_anywhere(trained):
    found, folder = trained
    assert all(each["restored"] and each["later"] == 2 * NUM_STEPS for each in found)
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), clip_norm=0.5)
    state = step.restore(folder / "later", params())
    assert state.step == 2 * NUM_STEPS


def test_what_fails_in_one_process_is_an_error_in_all(trained):
    for found in trained[0]:
        assert re.match("CheckpointError: .*cannot write to /proc/nowhere/state", found["errors"]["unwritable"])


@pytest.mark.parametrize(
    ("what", "message"), [("shapes", "the shapes of their batches"), ("code", "their programs"), ("plan", "their pro")]
)
def test_processes_that_differ_say_so_and_do_not_hang(trained, what, message):
    for found in trained[0]:
        assert found["errors"][what].startswith(f"InputError: the processes differ in {message}")
        assert ": 1 from process 0" in found["errors"][what]


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 2), (4, 1)])
def test_options_give_the_losses_of_one_device(num_processes, num_devices, tmp_path):
    expected = {name: alone(**_without_profile(options))[2] for name, options in OPTIONS.items()}
    for found in processes.start("options", num_processes, num_devices, tmp_path):
        assert found.keys() == OPTIONS.keys()
        for name, losses in found.items():
            np.testing.assert_allclose(losses, expected[name], rtol=1e-5, err_msg=name)


def _without_profile(options):
    return {name: value for name, value in options.items() if name not in ("policy", "profile", "memory_budget")}


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other_and_training_goes_on_from_the_checkpoint(tmp_path):
    survivor, killed = processes.start("dies", 2, 1, tmp_path, timeout_s=processes.SURVIVORS_END_IN_S)
    assert isinstance(killed, str)
    assert isinstance(survivor, str) or survivor["seconds"] < processes.SURVIVORS_END_IN_S
    for found in processes.start("goes_on", 2, 1, tmp_path):
        assert found["step"] == NUM_STEPS
        assert np.all(np.isfinite(found["losses"]))
