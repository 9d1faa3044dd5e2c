"""Profiles and plans of several devices that share a batch."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import example_costs
import jaxferry
import jaxferry.training.contention
import models
from jaxferry.cli import main
from jaxferry.cli.plan import host_memory_lines
from jaxferry.costs import Profile, estimate_profile, shared_by
from jaxferry.errors import InputError
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.planner import as_run, copies_bytes, make_plan, policies
from jaxferry.step import LayerPlan, Plan, predict

pytestmark = pytest.mark.cpu_device  # one accelerator is no mesh

MACHINE = dataclasses.replace(
    example_costs.MACHINE, memory_bytes_per_s=1e6, interconnect_bytes_per_s=20.0, launch_s=0.0, link_latency_s=0.0
)
COSTS = example_costs.COSTS


@pytest.mark.parametrize(("num", "load_s"), [(1, 8.0), (4, 2.0 + 3.0), (8, 10 / 7.5 + 3.5)])
def test_each_device_has_its_part_of_the_work_and_of_what_moves(num, load_s):
    """A share over the link, then the others' from the devices; eight links share the host's 60 bytes a second."""
    profile = estimate_profile([COSTS], MACHINE, num_devices=num)
    (layer,) = profile.layers
    assert profile.num_devices == num
    assert (layer.forward_s, layer.backward_s) == (2 / num, 4 / num)
    assert layer.load_s == layer.offload_s == pytest.approx(load_s)
    assert (layer.param_bytes, layer.grad_bytes, layer.update_s) == (80, 80 // num, 20.0)
    (alone,) = estimate_profile([COSTS], MACHINE).layers
    exchanges_s = 2 * 80 * (num - 1) / num / 20  # adding up the gradient, and gathering the new copy
    assert layer.update_gpu_s == pytest.approx(alone.update_gpu_s / num + exchanges_s)
    assert layer.state_bytes == alone.state_bytes / num
    assert (layer.state_up_s is None) == (layer.state_down_s is None) == (num > 1)


def test_processes_exchange_shares_over_their_network_and_update_their_own():
    """Two machines of two devices: quarters of layers, and a ring whose slowest connection is the network."""
    machine = dataclasses.replace(MACHINE, network_bytes_per_s=5.0)
    profile = estimate_profile([COSTS], machine, num_devices=4, num_processes=2)
    assert (profile.num_devices, profile.num_processes) == (4, 2)
    (layer,) = profile.layers
    assert (layer.forward_s, layer.grad_bytes, layer.update_s) == (2 / 4, 20, 10.0)
    assert layer.load_s == layer.offload_s == pytest.approx(2.0 + 3 * 20 / 5)
    assert layer.update_gpu_s is None
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("has_gradient", [True, False])
def test_processes_exchange_what_they_have_updated_before_a_program_reads_it_in_host_memory(has_gradient):
    """Halves over the link and from the other device. A share up, two over the network, a half down to each process."""
    machine = dataclasses.replace(MACHINE, network_bytes_per_s=5.0)
    given = COSTS if has_gradient else dataclasses.replace(COSTS, grad_bytes=0)
    (layer,) = estimate_profile([given], machine, num_devices=4, num_processes=2).layers
    read_s, up_s, exchange_s = 4.0 + 40 / 20, (2.0 + 2 * 20 / 5) * has_gradient, (2.0 + 2 * 20 / 5 + 4.0) * has_gradient
    assert layer.forward_dha_s == pytest.approx(2 / 4 + read_s + exchange_s)
    assert layer.backward_dha_s == pytest.approx(4 / 4 + read_s)
    assert (layer.forward_read_s, layer.backward_read_s) == pytest.approx((read_s + up_s, read_s))
    assert layer.backward_go_s - layer.backward_s == pytest.approx(layer.offload_s)
    assert layer.backward_write_s == pytest.approx(layer.offload_s)


def test_a_plan_counts_the_copies_that_each_process_has_of_layers_read_in_place():
    machine = dataclasses.replace(MACHINE, network_bytes_per_s=5.0)
    layers = [dataclasses.replace(COSTS, name=name) for name in "ab"]
    for num_processes in (1, 2):
        profile = estimate_profile(layers, machine, num_devices=4, num_processes=num_processes)
        plan = Plan("any", 1.0, (LayerPlan("a", Mode.DFGB), LayerPlan("b", Mode.GFGB)))
        assert copies_bytes(profile, plan) == (80 if num_processes == 2 else 0)
    lines = host_memory_lines({"host_bytes": {"compute copy": 1024}}, 1024)
    assert lines == ["host memory 2.00 KiB: compute copy 1.00 KiB, copies to read in place 1.00 KiB"]


def test_layers_that_processes_hold_whole_are_gathered_within_them_and_summed_over_the_network():
    machine = dataclasses.replace(MACHINE, network_bytes_per_s=5.0)
    costs = dataclasses.replace(COSTS, is_whole=True)
    (layer,) = estimate_profile([costs], machine, num_devices=4, num_processes=2).layers
    assert (layer.grad_bytes, layer.update_s) == (40, 20.0)
    assert layer.load_s == pytest.approx(4.0 + 2.0)
    assert layer.offload_s == pytest.approx(4.0 + 2.0 + 80 / 5)


@pytest.mark.parametrize(("devices", "processes"), [(4, 1), (8, 2)])
def test_plan_takes_devices_and_processes_for_the_profile_of_one(tmp_path, capsys, devices, processes):
    """As good as estimating the devices themselves, where no program is bound by a layer's bytes."""
    machine = dataclasses.replace(MACHINE, network_bytes_per_s=5.0, memory_bytes_per_s=1e30)
    alone, file = estimate_profile([COSTS], machine), tmp_path / "profile.json"
    alone.save(file)
    costs = dataclasses.replace(COSTS, activation_bytes=-(-COSTS.activation_bytes // devices))
    assert shared_by(alone, devices, processes) == estimate_profile(
        [costs], machine, num_devices=devices, num_processes=processes
    )
    given = ["plan", str(file), "--memory-budget", "none", "--json"]
    assert status_of(*given, "--devices", str(devices), "--processes", str(processes)) == 0
    found = json.loads(capsys.readouterr().out)
    expected = make_plan(shared_by(alone, devices, processes), "exact")
    assert found["predicted"]["step_s"] == expected.predicted.step_s
    assert status_of(*given, "--devices", "3", "--processes", "2") == 2
    assert "devices must be a multiple of processes" in capsys.readouterr().err


def test_processes_must_have_equally_many_devices():
    with pytest.raises(InputError, match="num_devices, 4, must be a multiple of num_processes, 3"):
        estimate_profile([COSTS], MACHINE, num_devices=4, num_processes=3)


def chain(num, num_processes=1):
    layers = [dataclasses.replace(COSTS, name=f"layer {i}", forward_flops=1000 * (1 + i % 3)) for i in range(3)]
    return estimate_profile(layers, MACHINE, num_devices=num, num_processes=num_processes)


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("budget", [None, 345])
def test_every_policy_plans_what_several_devices_do(policy, budget):
    plan = make_plan(chain(4), policy, memory_budget_bytes=budget)
    may_stay = policy in ("auto", "twin-flow")
    assert {layer.update for layer in plan.layers} <= {UpdatePlace.HOST, *([UpdatePlace.RESIDENT] if may_stay else [])}
    assert any(plan.updates_on_device) or not may_stay or budget is not None
    of_processes = make_plan(chain(4, 2), policy, memory_budget_bytes=budget)
    assert {layer.update for layer in of_processes.layers} == {UpdatePlace.HOST}
    again = predict(chain(4), dataclasses.replace(plan, predicted=None))
    assert again.predicted == plan.predicted
    if budget is not None:
        assert plan.predicted.peak_device_bytes <= budget


def test_a_profile_says_of_how_many_devices_it_is():
    document = chain(4).to_json()
    assert document["num_devices"] == 4 and "num_devices" not in chain(1).to_json()
    assert Profile.from_json(json.loads(json.dumps(document))) == chain(4)
    for wrong in (0, -1, 1.5, True, "4", None):
        with pytest.raises(InputError, match="profile: num_devices must be a whole number, 1 or more"):
            Profile.from_json({**document, "num_devices": wrong})


loss_fn = models.chain()
PARAMS = {f"l{i}": {"w": np.full((16, 16), 0.1, np.float32)} for i in range(3)}
BATCH = np.ones((4, 16), np.float32)


def prepared(num, **options):
    mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), mesh=mesh, **options)
    step.declare(PARAMS)
    return step.prepare(BATCH)


def test_a_step_on_a_mesh_is_planned_with_the_profile_of_its_devices():
    found = prepared(2, policy="auto", profile="estimate")
    assert found.profile.num_devices == 2
    assert found.plan == as_run(found.profile, found.plan)
    layer = found.profile.layers[0]
    assert (layer.grad_bytes, layer.param_bytes) == (16 * 16 * 4 // 2, 16 * 16 * 4)
    with pytest.raises(InputError, match="the profile is of 2 devices, and 1 train"):
        prepared(1, policy="auto", profile=found.profile)


def test_a_measured_profile_has_the_work_of_one_device_and_the_exchanges_of_all(monkeypatch, tmp_path):
    """The programs of one device's share are known from one device with such a batch, so the times are the same."""
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path))
    options = {"policy": "auto", "profile": "measure"}
    alone = jaxferry.train_step(loss_fn, optax.sgd(0.1), transport="device_put").measure(PARAMS, BATCH[:2])
    found = prepared(2, **options).profile
    assert (found.num_devices, found.machine["measured"], "links" in alone.machine) == (2, True, False)
    up, gather = found.machine["links"]["up"], found.machine["links"]["gather"]["all"]
    # On a busy machine a small copy may take as long as a large one, which leaves no latency, or all of it.
    assert sum(up.values()) > 0 < sum(gather.values())
    for one, own in zip(alone.layers, found.layers, strict=True):
        # The last one's forward is at most its shortest variant, as the clock decides; its backward is what is left.
        times = () if one is alone.layers[-1] else ("forward_s", "backward_s")
        for name in (*times, "update_s", "param_bytes", "activation_bytes"):
            assert getattr(own, name) == getattr(one, name)
        assert own.forward_s > 0 < own.update_s
        assert own.grad_bytes == one.grad_bytes / 2
        loaded = up["latency_s"] + own.param_bytes / 2 * up["s_per_byte"]
        assert own.load_s == pytest.approx(loaded + gather["latency_s"] + own.param_bytes * gather["s_per_byte"])
        assert own.forward_dha_s > own.forward_s and own.backward_go_s > own.backward_s
        assert own.temporary_bytes["backward"] > 0
    assert prepared(2, policy="auto", profile=found).profile.layers == found.layers


@pytest.mark.parametrize("is_scaled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_running_statistics_as_long_as_the_batch_are_whole_on_each_device(monkeypatch, tmp_path, is_scaled):
    """They are told from rows by a parameter of their shape, or since a share of them cannot be traced."""
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path))
    params = PARAMS | ({"scale": {"w": np.ones(16, np.float32)}} if is_scaled else {})

    def with_averages(params, batch, labels, averages):
        x = batch @ params["l0"]["w"] + averages * params.get("scale", {"w": 1.0})["w"]
        own = loss_fn({name: params[name] for name in ("l1", "l2")}, x)
        return own + jnp.mean((x[:, 0] - labels) ** 2), 0.9 * averages + 0.1 * x.mean(0)

    given = (np.ones((16, 16), np.float32), np.ones(16, np.int32), np.ones(16, np.float32))
    found = []
    for mesh, rows in ((jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), 16), (None, 8)):
        step = jaxferry.train_step(with_averages, optax.sgd(0.1), mesh=mesh, transport="device_put")
        found.append(step.measure(params, given[0][:rows], given[1][:rows], given[2]))
    several, alone = found
    # The same programs, from the cache. The last one's forward is at most its shortest variant, as the clock decides.
    assert [layer.forward_s for layer in several.layers[:-1]] == [layer.forward_s for layer in alone.layers[:-1]]


def test_a_loss_that_names_the_mesh_is_not_measured_on_one_device():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])

    def constrained(params, batch):
        batch = jnp.tanh(batch @ params["l0"]["w"])
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, PartitionSpec("data")))
        return loss_fn({name: params[name] for name in ("l1", "l2")}, batch)

    def plan_of(**options):
        step = jaxferry.train_step(constrained, optax.sgd(0.1), mesh=mesh, policy="auto", **options)
        step.declare(PARAMS)
        return step.prepare(BATCH).plan

    with pytest.raises(InputError, match=r"cannot be measured alone, .* or profile=\"estimate\""):
        plan_of(profile="measure")
    with pytest.warns(UserWarning, match="planning with an estimated profile"):
        assert plan_of() == plan_of(profile="estimate")


def status_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def test_the_command_line_estimates_several_devices(tmp_path):
    path = tmp_path / "four.json"
    arguments = ("profile", "--model", "gpt2:tiny", "--machine", "h100-pcie5", "-o", path)
    assert status_of(*arguments, "--devices", 4) == 0
    assert Profile.load(path).num_devices == 4
    assert status_of("plan", path, "--policy", "auto", "--json") == 0


def test_more_devices_than_there_are_is_an_error(capsys):
    assert status_of("train", "--model", "gpt2:tiny", "--steps", 1, "--devices", 4096) == 2
    assert "--devices must be at most" in capsys.readouterr().err


@pytest.mark.slow
def test_the_contention_of_several_devices_is_measured_with_all_of_their_links(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path))
    measured = []

    def speeds(work):
        for call in work.values():
            call()
        measured.append([work["H2D"]().pop(), work["D2H"]().pop()])
        return dict.fromkeys(itertools.permutations(work, 2), 0.8)

    monkeypatch.setattr(jaxferry.training.contention, "speeds_in_pairs", speeds)
    params = {"l0": {"w": np.full((1024, 1024), 0.1, np.float32)}}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), mesh=mesh, policy="auto", profile="measure")
    step.declare(params)
    profile = step.prepare(np.ones((4, 1024), np.float32)).profile
    assert profile.contention.matrix == pytest.approx(0.25 * (1 - np.eye(3)))
    [(up, down)] = measured
    assert up.sharding.memory_kind == "device" and down.sharding.memory_kind == "pinned_host"
    assert len(up.sharding.device_set) == len(down.sharding.device_set) == 2
