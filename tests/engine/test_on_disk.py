"""Masters and optimizer state in a scratch file. Bits beside all other options: tests/test_bits.py."""

import dataclasses
import gc
import itertools
import math
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.errors import HostMemoryError, InputError, ScratchError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import on_disk, scratch
from jaxferry.step import DISK_SLOTS, Kind, Lane, LayerPlan, Plan
from models import chain
from planned import assert_same_bits, take_steps

DEPTH, WIDTH, STEPS = 8, 192, 3  # so that what a master's compute copy lacks is on disk too
BATCH = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
FP32, HALF = {"compute_dtype": np.float32}, {"compute_dtype": jnp.bfloat16}
ADAMW = jaxferry.adamw(1e-2)
OPTIMIZERS = {
    "own": ADAMW,
    "optax": optax.adam(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
}
PLAN = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB, GradientPlace.DEVICE) for i in range(DEPTH)))


def parameters(depth=DEPTH):
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 12} for i in range(depth)}


def made(folder=None, host_memory=1, optimizer=ADAMW, **options):
    disk = {} if folder is None else {"scratch": folder, "host_memory": host_memory}
    options = {"plan": PLAN} | HALF | options
    return jaxferry.train_step(chain(), optimizer, **disk, **options)


def trained(step, num_steps=STEPS):
    state, losses = take_steps(step, step.init(parameters()), [BATCH] * num_steps)
    state.block_until_ready()
    return state, losses


@pytest.fixture
def expected():
    return trained(made())


def test_as_few_layers_as_needed_are_on_disk_spread_evenly(tmp_path, expected):
    every = sum(made_bytes(made()).values())
    one = WIDTH * WIDTH * (8 + 2) + 2 * -(-WIDTH * WIDTH // 16)  # two moments and a split master
    assert made_bytes(made())["master parameters"] + made_bytes(made())["optimizer state"] == DEPTH * one + 4  # a count
    for num in range(DISK_SLOTS + 1, DEPTH + 1):
        limit = every - (num - DISK_SLOTS) * one
        step = made(tmp_path, limit, gradient_buffers="all")
        state, losses = trained(step)
        groups = sorted(step.compiler.model.disk.groups(state.host.layers))
        assert len(groups) == num
        gaps = [b - a for a, b in itertools.pairwise([-1, *groups, DEPTH])]
        assert max(gaps) <= -(-DEPTH // num)
        assert [unit.layers[0] for unit in state.host.units if unit.is_on_disk] == groups
        assert sum(made_bytes(step).values()) == limit
        assert losses == expected[1]
        assert_same_bits((state.params, state.opt_state), (expected[0].params, expected[0].opt_state))
    assert not trained(made(tmp_path, every))[0].host.units[0].is_on_disk


def made_bytes(step):
    step.declare(parameters())
    return step.compiler.model.host_bytes_of(step.prepare(BATCH))


def test_the_state_is_never_whole_in_memory(tmp_path, monkeypatch):
    """Arrays of the state that are made or read and not written exist for a few layers at a time, from `init` on."""
    most, write = [0], on_disk.OnDisk.move.__func__
    step = made(tmp_path)

    def large():
        """The memory of arrays with a moment's shape, each once: some are views."""
        found = [a for a in jax.live_arrays() if a.dtype == jnp.float32 and a.shape == (WIDTH, WIDTH)]
        return {a.unsafe_buffer_pointer() for a in found if not a.is_deleted()}

    def counted(cls, unit, *args):
        most[0] = max(most[0], len(large() - before))
        write(cls, unit, *args)

    monkeypatch.setattr(on_disk.OnDisk, "move", classmethod(counted))
    before = large()
    state, _ = trained(step)
    assert state.host.units[0].is_on_disk
    # Two moments in each slot, and a master while its compute copy is made.
    assert 2 <= most[0] <= 2 * DISK_SLOTS + 2 < 2 * DEPTH
    file = step.compiler.model.disk.scratch
    kept_bytes = sum(array.nbytes for array in file._spare)
    assert 0 < kept_bytes <= file.slot_bytes == made_bytes(step)["slots for the disk"]
    assert file._lent_bytes == 0 and len(file._spare) == 3 * DISK_SLOTS


def test_layers_of_other_shapes_do_not_keep_their_slots(tmp_path):
    widths = [160, 192, 176, 224, 160, 208, 192, 240, 160]
    generator = np.random.default_rng(0)
    sizes = enumerate(itertools.pairwise(widths))
    params = {f"l{i}": {"w": generator.normal(size=shape).astype(np.float32) / 12} for i, shape in sizes}
    found = []
    for disk in ({}, {"scratch": tmp_path, "host_memory": 1}):
        step = jaxferry.train_step(chain(), ADAMW, **HALF, **disk)
        state, losses = take_steps(step, step.init(params), [BATCH[:, :160]] * STEPS)
        found.append((losses, state.params, state.opt_state))
    file = step.compiler.model.disk.scratch
    counted = step.compiler.model.host_bytes_of(step.prepare(BATCH[:, :160]))["slots for the disk"]
    assert sum(array.nbytes for array in file._spare) <= file.slot_bytes == counted
    largest = sorted(math.prod(leaf["w"].shape) for leaf in params.values())[-DISK_SLOTS:]
    assert counted == pytest.approx(sum(largest) * (8 + 17 / 8), rel=1e-3)
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1:], found[1][1:])


@pytest.mark.parametrize(("deferred", "order"), [(0, [7, 6, 5, 4, 3, 2, 1, 0]), (4, [7, 4, 2, 0, 1, 3, 5, 6])])
def test_reads_and_writes_are_tasks_of_their_own_lane(tmp_path, expected, deferred, order):
    step = made(tmp_path, record_steps=2, plan=dataclasses.replace(PLAN, deferred_updates=deferred))
    state, losses = trained(step)
    assert losses == expected[1]
    assert_same_bits((state.params, state.opt_state), (expected[0].params, expected[0].opt_state))
    tasks = step.prepare(BATCH).schedule.tasks
    on_lane = [task for task in tasks if task.lane is Lane.DISK]
    updates = {task.segment: index for index, task in enumerate(tasks) if task.kind is Kind.UPDATE}
    assert list(updates) == order
    assert [task.segment for task in on_lane if task.kind is Kind.STATE_READ] == order
    assert [task.segment for task in on_lane if task.kind is Kind.STATE_WRITE] == order
    held = most = 0
    for task in on_lane:
        held += 1 if task.kind is Kind.STATE_READ else -1
        most = max(most, held)
        if task.kind is Kind.STATE_WRITE:
            assert task.after == (updates[task.segment],)
    assert most == DISK_SLOTS and held == 0
    run = step.recorded()
    for task, start_s, end_s in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        assert end_s > start_s or task.lane is not Lane.DISK


def kept_cases():
    """Three optimizers in half precision, and one of them in fp32 and on two devices; all others are slow."""
    for name, optimizer in OPTIMIZERS.items():
        for kind, dtype, num_devices in (("half", HALF, 1), ("fp32", FP32, 1), ("mesh", HALF, 2)):
            is_quick = name in {"half": ("own", "optax", "injected"), "fp32": ("optax",), "mesh": ("own",)}[kind]
            marks = [pytest.mark.cpu_device] * (kind == "mesh") + [pytest.mark.slow] * (not is_quick)
            yield pytest.param(optimizer, dtype, num_devices, id=f"{kind}-{name}", marks=marks)


@pytest.mark.parametrize(("optimizer", "dtype", "num_devices"), list(kept_cases()))
def test_everything_that_reads_or_replaces_the_state_sees_that_of_memory(tmp_path, optimizer, dtype, num_devices):
    mesh = {} if num_devices == 1 else {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])}
    plain, disk = (made(folder, optimizer=optimizer, **dtype, **mesh) for folder in (None, tmp_path))
    states = [trained(step)[0] for step in (plain, disk)]

    def assert_same():
        for step, state in zip((plain, disk), states, strict=True):
            step(state, BATCH)
        one, other = states
        assert_same_bits((one.params, one.opt_state), (other.params, other.opt_state))
        assert np.asarray(other.lazy_params["l1"]["w"][3:5]).tobytes() == other.params["l1"]["w"][3:5].tobytes()
        assert all(unit.is_on_disk for unit in other.host.units)
        assert plain.evaluate(one, BATCH) == disk.evaluate(other, BATCH)

    assert_same()
    copy = states[1].copy()
    before = states[1].params
    assert_same()
    assert_same_bits(copy.params, before)
    for state in states:
        state.params = jax.tree.map(lambda leaf: leaf * 2, state.params)
        state.opt_state = jax.tree.map(lambda leaf: leaf, state.opt_state)
    assert_same()
    disk.save(states[1], tmp_path / "saved")
    plain.save(states[0], tmp_path / "other")
    states = [plain.restore(tmp_path / "saved"), disk.restore(tmp_path / "other", parameters())]
    assert_same()


def test_a_copy_and_a_save_beside_training_do_not_change(tmp_path):
    step = made(tmp_path)
    state, _ = trained(step)
    expected, copy = (state.params, state.opt_state), state.copy()
    assert all(unit.is_on_disk for unit in copy.host.units)
    assert sum(copy.host.copy_bytes.values()) == 0  # host memory holds nothing of it
    step.save(state, tmp_path / "saved", wait=False)
    for _ in range(STEPS):
        state, _ = step(state, BATCH)
    step.wait_for_saves()
    restored = step.restore(tmp_path / "saved")
    for other in (copy, restored):
        assert_same_bits((other.params, other.opt_state), expected)


def test_a_state_takes_no_more_room_in_the_file_than_its_layers_there_and_so_does_a_restored_one(tmp_path):
    every = sum(made_bytes(made()).values())
    step = made(tmp_path, every - WIDTH * WIDTH * 10, gradient_buffers="all")
    state, _ = trained(step)
    step.save(state, tmp_path / "saved")
    own = step.compiler.model.disk
    needed = sum(own.bytes_by_name(state.host.layers).values())
    # Masters are whole until they are split.
    assert 0 < needed <= os.fstat(own.scratch._file).st_size <= 1.2 * needed
    del state
    gc.collect()
    trained_again = take_steps(step, step.restore(tmp_path / "saved"), [BATCH])[0]
    trained_again.block_until_ready()
    assert os.fstat(own.scratch._file).st_size <= 1.2 * needed


def test_scanned_layers_are_on_disk_one_by_one_from_the_first_batch_on(tmp_path):
    def loss_fn(params, batch):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w + x), None), batch, params["w"])[0] ** 2)

    stacked = {"w": np.stack([own["w"] for own in parameters(12).values()])}
    options = {"gradient_buffers": "all", **HALF}
    bare = jaxferry.train_step(loss_fn, ADAMW, **options)
    bare.declare(stacked)
    every = sum(bare.compiler.model.host_bytes_of(bare.prepare(BATCH)).values())
    step = jaxferry.train_step(loss_fn, ADAMW, scratch=tmp_path, host_memory=every * 9 // 10, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = take_steps(step, step.init(stacked), [BATCH])
        state.block_until_ready()
    on_disk = sum(unit.is_on_disk for unit in state.host.units)
    assert 0 < on_disk < len(state.host.units) == 12
    found = step.compiler.model.host_bytes_of(step.prepare(BATCH))
    assert sum(found.values()) <= every * 9 // 10
    with pytest.warns(UserWarning, match="than host_memory=1 B, although all large masters and optimizer state are"):
        tight = jaxferry.train_step(loss_fn, ADAMW, scratch=tmp_path, host_memory=1, **options)
        take_steps(tight, tight.init(stacked), [BATCH])


def test_too_little_memory_even_with_a_disk_is_told_without_advising_one(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFERRY_HOST_MEMORY", "1KiB")
    for folder, has_advice in ((None, True), (tmp_path, False)):
        with pytest.raises(HostMemoryError, match="freeze parameters") as caught:
            made(folder).init(parameters())
        assert ("on a disk (scratch=)" in str(caught.value)) == has_advice


def test_small_arrays_stay_in_memory_and_are_counted_there(tmp_path):
    """Of each layer a matrix is in the file, and one of 4 KB is not, nor are its moments."""

    def loss_fn(params, batch):
        for own in params.values():
            batch = jnp.tanh(batch @ own["w"]) + (batch[:, :32] @ own["small"]).mean()
        return jnp.mean(batch**2)

    small = np.full((32, 32), 0.01, np.float32)
    params = {name: own | {"small": small} for name, own in parameters().items()}
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), scratch=tmp_path, host_memory=1, **FP32)
    with pytest.warns(UserWarning, match="although all large masters and optimizer state are in scratch="):
        state, _ = take_steps(step, step.init(params), [BATCH])
    state.block_until_ready()
    found = step.compiler.model.host_bytes_of(step.prepare(BATCH))
    num_counts = sum(leaf.ndim == 0 for leaf in jax.tree.leaves(state.opt_state))
    assert found["master parameters"] == DEPTH * small.nbytes
    assert found["optimizer state"] == 2 * DEPTH * small.nbytes + 4 * num_counts
    assert all(unit.is_on_disk for unit in state.host.units)
    held = [a for unit in state.host.units for a in (*unit.masters_at_home(), *unit.state_at_home())]
    kept = [a for a in held if not isinstance(a, scratch.OnDiskArray) and a.ndim]
    assert sum(a.nbytes for a in kept) == 3 * DEPTH * small.nbytes


def test_a_batch_that_joins_layers_rearranges_what_is_on_disk(tmp_path):
    def loss_fn(params, batch):
        x, (*others, last) = batch["x"], [params[name]["w"] for name in sorted(params)]
        own = [others[0] + last, *others[1:]] if "joined" in batch else [*others, last]
        for w in own:
            x = jnp.tanh(x @ w + x)
        return jnp.mean(x**2)

    batches, found = [{"x": BATCH}, {"x": BATCH, "joined": BATCH}, {"x": BATCH[:2]}], []
    for disk in ({}, {"scratch": tmp_path, "host_memory": 1}):
        step = jaxferry.train_step(loss_fn, ADAMW, **HALF, **disk)
        state, losses, num_layers = step.init(parameters()), [], []
        for batch in batches:
            state, [loss] = take_steps(step, state, [batch])
            losses.append(loss)
            state.block_until_ready()
            num_layers.append(len(state.host.layers))
        assert num_layers == [DEPTH, DEPTH - 1, DEPTH]
        assert all(unit.is_on_disk == bool(disk) for unit in state.host.units)
        found.append((losses, state.params, state.opt_state))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1:], found[1][1:])


@pytest.mark.parametrize("is_read", [True, False])
def test_an_error_of_the_disk_rolls_back_or_damages_and_names_the_layer(tmp_path, monkeypatch, is_read):
    step, move, left = made(tmp_path), scratch.Scratch.move, [0]

    def failing(self, region, start, memory, reads):
        if reads == is_read:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(5, "Input/output error")
        return move(self, region, start, memory, reads)

    saved, _ = trained(step)
    step.save(saved, tmp_path / "saved")
    fates = set()
    for at in (1, DEPTH, 2 * DEPTH):  # of three arrays a layer
        state, _ = take_steps(step, step.restore(tmp_path / "saved"), [BATCH])
        state.block_until_ready()
        before = state.params
        monkeypatch.setattr(scratch.Scratch, "move", failing)
        left[0] = at
        told = r"state_(read|write) of layer 'l.' failed: .*Input/output"
        with pytest.raises(jaxferry.JaxFerryError, match=told) as error:
            state, _ = step(state, BATCH)
            state.block_until_ready()
        monkeypatch.setattr(scratch.Scratch, "move", move)
        is_rolled_back = "the state is that before the step" in str(error.value)
        fates.add(is_rolled_back)
        if is_rolled_back:
            assert_same_bits(state.params, before)
            step(state, BATCH)
        else:
            assert "the state lies between two steps: restore" in str(error.value)
            with pytest.raises(jaxferry.StateError):
                _ = state.params
    assert fates == ({True, False} if is_read else {False})


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_cannot_read_the_file_says_so_once_and_the_state_stays(tmp_path, monkeypatch, capfd, wait):
    step = made(tmp_path)
    state, _ = trained(step)
    expected = state.params
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        capfd.readouterr()
        with pytest.raises(ScratchError, match=r"^the scratch file in .* failed: Input/output error$"):
            step.save(state, tmp_path / "saved", wait=wait)
        assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "saved").exists()
    assert_same_bits(state.params, expected)
    step.save(state, tmp_path / "saved", wait=wait)
    step.wait_for_saves()
    assert_same_bits(step.restore(tmp_path / "saved").params, expected)


@pytest.mark.parametrize("what", ["params", "opt_state"])
def test_an_assignment_that_fails_halfway_damages_the_state(tmp_path, monkeypatch, what):
    step, move, left = made(tmp_path), scratch.Scratch.move, [2 * DEPTH]

    def failing(self, region, start, memory, reads):
        left[0] -= not reads
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return move(self, region, start, memory, reads)

    state, _ = trained(step)
    new = jax.tree.map(lambda leaf: leaf + leaf, getattr(state, what))
    monkeypatch.setattr(scratch.Scratch, "move", failing)
    with pytest.raises(OSError, match="No space left"):
        setattr(state, what, new)
    monkeypatch.setattr(scratch.Scratch, "move", move)
    for use in (lambda: state.params, lambda: step(state, BATCH), lambda: step.save(state, tmp_path / "saved")):
        with pytest.raises(jaxferry.StateError, match=r"an assignment .* failed halfway: .*restore a checkpoint"):
            use()
    other = made(tmp_path).init(parameters())
    other.params = parameters()


def test_parameters_that_no_segment_reads_are_updated_on_disk_too(tmp_path):
    def loss_fn(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["l0"]["w"]) ** 2)

    found = []
    for disk in ({}, {"scratch": tmp_path, "host_memory": 1}):
        step = jaxferry.train_step(loss_fn, ADAMW, **disk)
        with pytest.warns(UserWarning, match="the loss never reads"):
            state, _ = take_steps(step, step.init(parameters(2)), [BATCH] * STEPS)
        found.append((state.params, state.opt_state))
        assert all(unit.is_on_disk == bool(disk) for unit in state.host.units)
    assert_same_bits(*found)
    assert np.any(np.asarray(found[1][0]["l1"]["w"]) != parameters(2)["l1"]["w"])  # weight decay


def test_what_cannot_be_on_disk_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"host_memory='1GiB' needs scratch="):
        jaxferry.train_step(chain(), ADAMW, host_memory="1GiB")
    for value in ("", 1, True, b"folder"):
        with pytest.raises(InputError, match=r"scratch must be the path of a folder, got "):
            made(value)
    with pytest.raises(InputError, match=r"host_memory must be positive, got '0'"):
        made(tmp_path, "0")
    with pytest.raises(InputError, match="scratch must be a folder to write to"):
        made(tmp_path / "missing")
    with pytest.raises(InputError, match="scratch needs an optimizer that updates each layer alone"):
        joint = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        with pytest.warns(UserWarning, match="all parameters at once"):
            made(tmp_path, optimizer=joint).init(parameters())
