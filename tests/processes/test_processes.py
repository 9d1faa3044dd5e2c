"""Several processes that train together (`support/process_runs.py`), each with virtual CPU devices of its own."""

import dataclasses
import json
import random
import re
import signal
import time

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jaxferry
import process_disks
import process_runs
import process_starts
from jaxferry.costs import Profile
from jaxferry.step import DISK_SLOTS
from process_runs import BATCH, KINDS, NUM_LONG, NUM_STEPS, OPTIONS
from processes.test_mesh import batches, loss_fn, params
from slowly import slow
from watched import SCALARS_BYTES


def alone(num_steps=NUM_STEPS, **options):
    """The same training on one device."""
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), **options)
    state, losses, metrics = step.init(params()), [], {}
    for batch, key in batches(num_steps, BATCH):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
    return step, state, losses, metrics


SEVERAL = [(2, 1), *slow((2, 2), (4, 1))]


@pytest.fixture(scope="module", params=SEVERAL, ids=str)
def trained(request, tmp_path_factory):
    """What so many processes of as many devices have found, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    process_disks.save_alone(folder)
    return process_runs.start("trains", *request.param, folder), folder


def test_losses_and_parameters_are_those_of_one_device(trained):
    step, state, losses, metrics = alone(clip_norm=0.5)
    batch, key = batches(1, BATCH)[0]
    for found in trained[0]:
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(found["norm"], metrics["grad_norm"], rtol=1e-5)
        assert found["given whole"] == [found["evaluated"], True]
        np.testing.assert_allclose(found["evaluated"], step.evaluate(state, batch, key)[0], rtol=1e-5)
        for own, expected in zip(found["params"], jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)
        assert found["shapes"][0] == BATCH


def test_each_device_holds_no_more_than_predicted(trained):
    """Also where programs read parameters and write gradients in host memory."""
    for found in trained[0]:
        for held, predicted in (found["device"], found["read"]["device"]):
            assert 0.5 * predicted < held <= predicted + SCALARS_BYTES


def test_layers_read_in_host_memory_are_whole_in_every_process_as_predicted(trained):
    """DHA, DFGB and GO. A copy is filled up by less than one element of each parameter for each device."""
    losses = alone(clip_norm=0.5)[2]
    for found in trained[0]:
        read = found["read"]
        np.testing.assert_allclose(read["losses"], losses, rtol=1e-5)
        assert read["held"] == read["predicted"]
        assert 0 <= read["held"] - read["whole"] < 4 * len(found["params"]) * len(trained[0]) * 2


@pytest.mark.parametrize("case", process_starts.CASES)
def test_processes_judge_alike_what_only_one_of_them_has(trained, case):
    """An element of a gradient is not finite, in one process's share and from another one's rows."""
    expected = process_starts.nonfinite_results(case, lambda batch: batch)
    assert expected["told"][1] != expected["told"][0], "a process alone must notice it"
    for found in trained[0]:
        found = found["nonfinite"][case]
        assert (found["told"], found["step"]) == (expected["told"], expected["step"])
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 2), (4, 1)])
def test_parameters_may_be_drawn_or_read_from_a_file_and_words_generated(num_processes, num_devices, tmp_path):
    """Each process reads the rows that hold its elements, at most one row more at each end, of each of two matrices."""
    drawn = jax.jit(process_starts.init_params)(jax.random.key(0))
    tensors = {"table/w": drawn["table"]["w"], "head/w": drawn["head"]["w"].T, "head/b": drawn["head"]["b"]}
    tensors = {name: np.array(array, order="C") for name, array in tensors.items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    step = jaxferry.train_step(process_starts.word_loss, optax.adamw(1e-2))
    ended = process_runs.start("starts", num_processes, num_devices, tmp_path)
    states = {
        "drawn": step.init_from(process_starts.init_params, jax.random.key(0)),
        "read": step.init(process_starts.stored(tmp_path)),
    }
    for source, state in states.items():
        expected = process_starts.trained_from(step, state, BATCH, lambda batch: batch)
        for found in ended:
            np.testing.assert_allclose(found[source]["losses"], expected["losses"], rtol=1e-5)
            assert found[source]["words"] == expected["words"]
    num_bytes = sum(array.nbytes for array in tensors.values())
    longest = max(array.shape[1] for array in (tensors["table/w"], drawn["head"]["w"]))
    for found in ended:
        assert found["num_read"] <= num_bytes / num_processes + 2 * 4 * 3 * (longest + num_devices)
    assert num_bytes <= sum(found["num_read"] for found in ended)


def test_processes_measure_together_and_plan_for_the_slowest(trained):
    found = [each["measured"] for each in trained[0]]
    assert all(each["plan"] == found[0]["plan"] and each["is_same"] for each in found)
    profiles = [Profile.from_json(each["profile"]) for each in found]
    assert len({str([dataclasses.replace(layer, state_bytes=0) for layer in each.layers]) for each in profiles}) == 1
    profile, links = profiles[0], profiles[0].machine["links"]
    assert profile.num_processes == len(found)
    assert all(layer.forward_s > 1 > layer.backward_s > 0 for layer in profile.layers)
    for kind in ("gather", "scatter"):
        # On a busy machine a small exchange may take as long as a large one, which leaves no latency, or all of it.
        taken = {name: line["latency_s"] + line["s_per_byte"] for name, line in links[kind].items()}
        assert taken["all"] > 0 < taken["across"]
        assert (taken["within"] > 0) == (profile.num_devices > profile.num_processes)
    step = jaxferry.train_step(process_starts.word_loss, optax.adamw(1e-2))
    state, words = step.init(process_starts.init_params(jax.random.key(0))), process_starts.words_of(BATCH)
    losses = [float(step(state, words)[1]["loss"]) for _ in range(2)]
    np.testing.assert_allclose([each["losses"] for each in found], [losses] * len(found), rtol=1e-5)


def test_all_processes_have_the_same_bits(trained):
    first, *others = trained[0]
    names = ("losses", "norm", "evaluated", "params", "device")
    assert all(first[name] == other[name] for other in others for name in names)


def test_a_checkpoint_is_written_once_and_goes_on_anywhere(trained):
    found, folder = trained
    assert all(each["restored"] and each["later"] == 2 * NUM_STEPS for each in found)
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), clip_norm=0.5)
    state = step.restore(folder / "later", params())
    assert state.step == 2 * NUM_STEPS


def test_what_fails_in_one_process_is_an_error_in_all(trained):
    for found in trained[0]:
        assert re.match("CheckpointError: .*cannot write to /proc/nowhere/state", found["errors"]["unwritable"])


def test_a_save_that_differs_or_fails_in_one_process_is_refused_in_all_and_writes_nothing(trained):
    for number, found in enumerate(trained[0]):
        assert found["refused saves"] == []
        expected = "InputError: extra" if number else "CheckpointError: process 1: extra"
        assert found["errors"]["extra of one"].startswith(expected)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("paths", "the paths of their checkpoints"),
        ("extra", "their extra arrays"),
        ("shapes", "the shapes of their batches"),
        ("code", "their programs"),
        ("plan", "their pro"),
        ("optimizer", "their optimizers"),
        ("scratch", "whether they have scratch="),
        ("profile", "their profiles"),
        ("parameters", "their parameters"),
    ],
)
def test_processes_that_differ_say_so_and_do_not_hang(trained, what, message):
    for found in trained[0]:
        assert found["errors"][what].startswith(f"InputError: the processes differ in {message}")
        assert ": 1 from process 0" in found["errors"][what]


def test_a_process_holds_its_share_of_masters_and_optimizer_state_as_predicted(trained):
    """Shares are rounded up by less than one element of each parameter; each of four layers has a count of its own."""
    step, state, _, _ = alone(1)
    assert process_runs.host_bytes(step, state)["held"] == process_runs.host_bytes(step, state)["whole"] + 3 * 4
    num = len(trained[0])
    for found in trained[0]:
        host = found["host"]
        assert (host["held"], host["copy"]) == (host["predicted"], host["predicted copy"])
        rounding = 3 * 4 * len(found["params"]) * (jax.local_device_count() + num)
        assert abs(host["held"] - 4 * 4 - host["whole"] / num) <= rounding
        assert host["held"] < 0.7 * host["whole"]


@pytest.mark.parametrize("case", process_disks.CASES)
def test_scratch_files_change_no_bit_and_hold_the_same_layers_in_every_process(trained, case):
    found = [each["disks"][case] for each in trained[0]]
    for own in found:
        assert own["losses"][0] == own["losses"][1]
        assert all(plain == disk for plain, disk in own["bits"])
        assert own["bits"] == found[0]["bits"]
        assert own["groups"] == own["copied"] == found[0]["groups"]
        assert own["seconds"] == found[0]["seconds"]
        assert own.get("rearranged") == found[0].get("rearranged")
        np.testing.assert_allclose(own["rates"], np.multiply(len(found), process_disks.SECONDS_A_BYTE), rtol=1e-6)
    assert len(found[0]["groups"]) == DISK_SLOTS + 2 < process_disks.DEPTH
    # Of five layers, one is made of two, and makes the slots larger: all are there.
    assert case != "own" or found[0]["rearranged"] == ["l1+l5", "l0", "l2", "l3", "l4"]
    assert list((trained[1] / "scratch").iterdir()) == []


def test_a_checkpoint_passes_between_scratch_files_of_several_processes_and_one_process(trained, tmp_path):
    found, folder = trained
    plain, disk = process_disks.step_of("own"), process_disks.step_of("own", scratch=tmp_path, host_memory=1)

    def restored(step, name):
        return process_disks.bits(step.restore(folder / name, process_disks.parameters()))

    for own in (each["disks"]["own"] for each in found):
        assert restored(plain, "own") == restored(disk, "own") == own["bits"][0][0]
        assert own["alone"] == restored(plain, "alone")


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 2), (4, 1)])
@pytest.mark.filterwarnings("ignore:the optimizer looks at")
def test_other_models_and_optimizers_are_as_on_one_device(num_processes, num_devices, tmp_path):
    """Scanned layers, whose parameters are cut anew; frozen ones; optimizers whose updates are not element-wise."""
    ended = process_runs.start("kinds", num_processes, num_devices, tmp_path)
    for name in KINDS:
        params, loss, optimizer, options = process_runs.kind(name)
        step = jaxferry.train_step(loss, optimizer, **options)
        state, losses = step.init(params), []
        for batch in process_runs.plain_batches():
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        trees = {"params": jax.tree.leaves(state.params), "state": jax.tree.leaves(state.opt_state)}
        for found in ended:
            for own in (found[name]["losses"], found[name]["read"]):
                np.testing.assert_allclose(own, losses, rtol=1e-5, err_msg=name)
            for tree, leaves in trees.items():
                for own, leaf in zip(found[name][tree], leaves, strict=True):
                    np.testing.assert_allclose(own, leaf, rtol=1e-4, atol=1e-5, err_msg=f"{name} {tree}")
            host = found[name]["host"]
            assert (host["held"], host["copy"]) == (host["predicted"], host["predicted copy"])
        restored = step.restore(tmp_path / name, params)
        assert restored.step == 2
    held = {name: [found[name]["host"]["held"] for found in ended] for name in KINDS}
    whole = {name: ended[0][name]["host"]["whole"] for name in KINDS}
    assert max(held["scanned"]) < 1.6 * whole["scanned"] / num_processes  # each layer has scalars of its own
    assert max(held["whole"]) > 0.9 * whole["whole"] and max(held["joint"]) > 0.9 * whole["joint"]
    assert max(held["mixed"]) < 0.95 * whole["mixed"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 2), (4, 1)])
def test_options_give_the_losses_of_one_device(num_processes, num_devices, tmp_path):
    expected = {name: alone(NUM_LONG, **_without_profile(options))[2] for name, options in OPTIONS.items()}
    for found in process_runs.start("options", num_processes, num_devices, tmp_path):
        assert found.keys() == OPTIONS.keys()
        for name, losses in found.items():
            np.testing.assert_allclose(losses, expected[name], rtol=1e-5, err_msg=name)


def _without_profile(options):
    return {
        name: value for name, value in options.items() if name not in ("plan", "policy", "profile", "memory_budget")
    }


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 2), (4, 1)])
def test_each_process_may_update_in_an_order_of_its_own(num_processes, num_devices, tmp_path):
    """Programs that exchange anything run in one order; what is ready when differs, and so do updates."""
    ended = process_runs.start("shuffles", num_processes, num_devices, tmp_path)
    assert all(found["trained"] == ended[0]["trained"] for found in ended)
    assert len({tuple(found["order"]) for found in ended}) == num_processes
    for name, options in process_runs.SHUFFLED.items():
        losses = alone(NUM_LONG, **_without_profile(options))[2]
        np.testing.assert_allclose(ended[0]["trained"][name]["losses"], losses, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_command_line_traces_all_processes_and_ends_them_together_with_a_checkpoint(tmp_path):
    """SIGTERM to one process ends both after the same step."""
    folder = tmp_path / "saved"
    given = ["train", "--model", "gpt2:tiny", "--distributed", "--optimizer", "sgd", "--json"]
    first = process_runs.command(2, [*given, "--steps", "4", "--trace", str(tmp_path / "trace.json")])
    assert [status for status, _, _ in first] == [0, 0], first
    assert json.loads(first[0][1])["steps"] == 4 and not first[1][1]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2}

    def terminate(running):
        time.sleep(25)
        running[1].send_signal(signal.SIGTERM)

    ended = process_runs.command(2, [*given, "--steps", "100000", "--save", str(folder)], meanwhile=terminate)
    assert [status for status, _, _ in ended] == [143, 143], ended
    again = process_runs.command(2, [*given, "--steps", "0", "--resume", str(folder)])
    assert json.loads(again[0][1])["steps"] > 0


@pytest.mark.slow
def test_a_process_that_waits_too_long_ends_and_names_the_one_that_is_stuck(tmp_path):
    waiting, stuck = process_runs.start("hangs", 2, 1, tmp_path, timeout_s=process_runs.SURVIVORS_END_IN_S)
    begun = NUM_STEPS + 1
    told = f"error: step or evaluation {begun} has waited 3 s for process 1, which has begun {NUM_STEPS}: this process"
    assert told in waiting
    assert isinstance(stuck, str)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_dies_or_stops_ends_the_others_and_training_goes_on_from_a_checkpoint(how, seed, tmp_path):
    """At a random moment, which may be that of a step or of a save; once it is before the first."""
    drawn, seconds = random.Random(seed), []

    def end_one(running):
        while seed and not (tmp_path / "series").exists():
            time.sleep(0.1)
        time.sleep(drawn.uniform(0, 6))
        chosen = drawn.choice(running)
        chosen.send_signal(how)
        start_s = time.monotonic()
        others = [process for process in running if process is not chosen]
        for process in others:
            process.wait(process_runs.SURVIVORS_END_IN_S)
        seconds.append(time.monotonic() - start_s)
        chosen.kill()

    ended = process_runs.start("killed", 2, 1, tmp_path, meanwhile=end_one)
    again = process_runs.start("killed", 2, 1, tmp_path)
    expected = alone(NUM_LONG)[2]
    assert not any(isinstance(found, str) for found in again)
    num_failed = sum(isinstance(found, str) for found in ended)
    print(f"others ended after {seconds[0]:.1f} s, {num_failed} failed; from step {again[0]['first']}")
    for found in again:
        np.testing.assert_allclose(found["losses"], expected[found["first"] :], rtol=1e-5)
