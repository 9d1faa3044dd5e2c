"""Host memory is checked before it is allocated."""

import json
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import accelerator
import jaxferry
from jaxferry import checkpoint
from jaxferry.checkpoint import leaves
from jaxferry.optimizer import host_memory
from jaxferry.transport import Allocator, Placement
from models import chain
from python_runs import run_python
from watched import live_pinned_bytes, settled

pytestmark = pytest.mark.cpu_device  # XLA pins more than is asked for; tests of that emulate a device


GIB = 2**30


PARAMS = {"a": jax.ShapeDtypeStruct((1000, 1000), np.float32), "b": jax.ShapeDtypeStruct((1000, 500), np.float32)}


def loss_fn(params, x):
    return jnp.mean(x @ params["a"] @ params["b"])


class Unread:
    """A leaf whose values nobody may read."""

    shape, dtype = (1000, 1000), np.dtype(np.float32)

    def __array__(self, *args, **kwargs):
        raise AssertionError("read before host memory was checked")


@pytest.mark.parametrize("way", ["init", "init_from"])
def test_too_little_is_an_error_with_the_number_before_anything_is_allocated(way, monkeypatch):
    """AdamW in bfloat16: 4 + 8 + 2 + 2 bytes a parameter, and a step counter."""
    monkeypatch.setenv(host_memory.VARIABLE, "15MiB")
    params = {"a": Unread()}
    step = jaxferry.train_step(lambda p, x: jnp.mean(x @ p["a"]), optax.adamw(1e-3), compute_dtype=jnp.bfloat16)
    with pytest.raises(
        jaxferry.HostMemoryError,
        match=r"needs 15\.3 MiB .*master parameters 3\.81 MiB, optimizer state 7\.63 MiB, compute copy 1\.91 MiB, "
        r"gradients 1\.91 MiB.*only 15\.0 MiB .*JAXFERRY_HOST_MEMORY",
    ):
        if way == "init":
            step.init(params)
        else:
            step.init_from(lambda rng: {"a": jax.random.normal(rng, (1000, 1000))}, jax.random.key(0))


def test_a_model_for_which_xla_pins_too_little_is_refused_on_a_gpu_with_the_variable_that_helps(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    params = {"a": np.zeros((1000, 1000), np.float32)}

    def init():
        return jaxferry.train_step(lambda p, x: jnp.mean(x @ p["a"]), optax.sgd(1e-3)).init(params)

    init()  # a CPU has no such pool
    accelerator.emulate(monkeypatch)
    with pytest.raises(
        jaxferry.HostMemoryError,
        match=r"7\.63 MiB of host memory must be pinned, and XLA pins up to 0 B \(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB\): "
        "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 or more before the process starts",
    ):
        init()
    monkeypatch.setenv(host_memory.VARIABLE, "off")
    init()


def test_a_state_needs_room_for_all_that_the_pool_of_pinned_memory_takes(monkeypatch):
    monkeypatch.setattr(host_memory, "pinned_pool_bytes", lambda num_bytes: num_bytes + 2 * GIB)
    monkeypatch.setenv(host_memory.VARIABLE, "1GiB")
    params = {"a": np.zeros((1000, 1000), np.float32)}

    def init():
        return jaxferry.train_step(lambda p, x: jnp.mean(x @ p["a"]), optax.sgd(1e-3)).init(params)

    init()  # a CPU has no such pool
    accelerator.emulate(monkeypatch)
    monkeypatch.setattr(Placement, "allocator", Allocator.PREALLOCATED)
    with pytest.raises(
        jaxferry.HostMemoryError,
        match=r"unused pinned memory 2\.00 GiB.*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 keeps XLA from pinning 2\.00 GiB",
    ):
        init()


def test_sums_of_16_bit_gradients_in_fp32_count_too(monkeypatch):
    monkeypatch.setenv(host_memory.VARIABLE, "17MiB")
    step = jaxferry.train_step(
        lambda p, x: jnp.mean(x @ p["a"]), optax.adamw(1e-3), compute_dtype=jnp.bfloat16, accumulate=2
    )
    with pytest.raises(jaxferry.HostMemoryError, match=r"needs 19\.1 MiB .*sums of gradients 3\.81 MiB"):
        step.init({"a": Unread()})


def test_sums_that_exist_before_the_first_step_count_once(monkeypatch):
    """On an accelerator a thread makes them while the step is compiled."""

    def step_within(most):
        step = jaxferry.train_step(chain("abab"), jaxferry.sgd(1.0), compute_dtype=jnp.bfloat16)
        state, before = step.init(dict.fromkeys("ab", np.zeros((500, 500), np.float32))), live_pinned_bytes()
        left = most + before
        monkeypatch.setattr(host_memory, "limits", lambda: [host_memory.Limit(left - live_pinned_bytes(), "the test")])
        state, _ = step(state, np.zeros((1, 500), np.float32))
        return settled(live_pinned_bytes) - before

    accelerator.emulate(monkeypatch)
    monkeypatch.delenv(host_memory.VARIABLE, raising=False)
    needed = step_within(GIB)
    step_within(needed)
    with pytest.raises(jaxferry.HostMemoryError, match=r"a step needs .*sums of gradients .*the test"):
        step_within(needed // 4)


def test_frozen_parameters_need_only_the_compute_copy(monkeypatch):
    monkeypatch.setenv(host_memory.VARIABLE, "1KiB")
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), trainable={"a": False, "b": True})
    with pytest.raises(jaxferry.HostMemoryError, match=r"needs 9\.54 MiB .*master parameters 1\.91 MiB, compute"):
        step.init(PARAMS)


@pytest.mark.parametrize("value", ["1GiB", "off"])
def test_the_variable_replaces_what_the_system_says(value, monkeypatch):
    monkeypatch.setattr(host_memory, "limits", lambda: [host_memory.Limit(0, "nothing")])
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), PARAMS)
    monkeypatch.delenv(host_memory.VARIABLE, raising=False)
    with pytest.raises(jaxferry.HostMemoryError, match="nothing"):
        step.init(params)
    monkeypatch.setenv(host_memory.VARIABLE, value)
    assert step.init(params).step == 0


SCRIPT = """
import resource
import jax, jax.numpy as jnp, numpy as np, optax, jaxferry

jnp.ones(3).block_until_ready()
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (most, most))
step = jaxferry.train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.adamw(1e-3))
try:
    step.init_from(lambda rng: {"w": jnp.zeros((8192, 8192))}, jax.random.key(0))
except jaxferry.HostMemoryError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_limit_on_the_address_space_is_an_error_too():
    printed = run_python("-c", SCRIPT, JAX_PLATFORMS="cpu")
    assert "ulimit -v" in printed and "training needs 1.25 GiB" in printed


def trained():
    """A step and a state of 4 bytes a parameter for masters, 8 for Adam and 8 for training: 1.5 M parameters."""
    step = jaxferry.train_step(loss_fn, optax.adam(1e-3))
    state = step.init(GIVEN)
    return step, step(state, np.ones((2, 1000), np.float32))[0]


GIVEN = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), PARAMS)

COPIES = {
    "a copy of the state": (12, lambda state: state.copy()),
    "a copy of the parameters": (4, lambda state: state.params),
    "a copy of the optimizer's state": (8, lambda state: state.opt_state),
    "an assignment to the state": (4, lambda state: setattr(state, "params", GIVEN)),
}


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_of_a_state_is_checked_beside_training_before_memory_is_taken(what, monkeypatch):
    _, state = trained()
    num_bytes, make = COPIES[what]
    needed = 1_500_000 * (20 + num_bytes)
    monkeypatch.setenv(host_memory.VARIABLE, str(needed))
    taken = []
    for name in ("masters", "optimizer_state", "copies", "replace_masters"):
        monkeypatch.setattr(type(state.host), name, lambda *args: taken.append(args))
    pattern = (
        rf"{what} needs .* but only .* are available \(JAXFERRY_HOST_MEMORY=\d+, of which training takes 28\.6 MiB"
    )
    with pytest.raises(jaxferry.HostMemoryError, match=pattern):
        make(state)
    assert taken == []
    monkeypatch.undo()
    monkeypatch.setenv(host_memory.VARIABLE, str(needed + 100))  # and the step counter
    if what != "an assignment to the state":
        make(state)


@pytest.mark.parametrize("has_room", [False, True])
def test_a_save_in_the_background_without_room_for_its_copy_warns_and_waits(has_room, monkeypatch, tmp_path):
    step, state = trained()
    monkeypatch.setenv(host_memory.VARIABLE, str(1_500_000 * 32 + 100 * has_room))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step.save(state, tmp_path / "saved", wait=False)
    assert [str(each.message).split(":")[0] for each in told] == [
        "save(wait=False) waits until the state is written"
    ] * (not has_room)
    if not has_room:
        assert told[0].filename == __file__
        assert (tmp_path / "saved").exists()
    step.wait_for_saves()
    before = state.stored()
    for found, expected in zip(
        jax.tree.leaves(step.restore(tmp_path / "saved").stored()), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_save_in_the_background_that_runs_out_of_memory_or_threads_waits_too(monkeypatch, tmp_path):
    step, state = trained()

    def no_memory(*args):
        raise MemoryError("Unable to allocate 5.7 MiB")

    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match=r"waits until .* Unable to allocate"):
        patched.setattr(type(state.host), "copies", no_memory)
        step.save(state, tmp_path / "memory", wait=False)
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match=r"waits until .* can't start new thread"):
        patched.setattr(threading.Thread, "start", no_thread)
        patched.setattr(checkpoint, "save", lambda *args: saved.append(args))
        saved = []
        step.save(state, tmp_path / "threads", wait=False)
        assert len(saved) == 1
    assert step.restore(tmp_path / "memory").step == 1


def test_a_restore_checks_before_it_reads(monkeypatch, tmp_path):
    step, state = trained()
    step.save(state, tmp_path / "saved")
    monkeypatch.setenv(host_memory.VARIABLE, "1MiB")
    monkeypatch.setattr(leaves, "open_one", lambda *args: pytest.fail("read before host memory was checked"))
    with pytest.raises(jaxferry.HostMemoryError, match=r"training needs 28\.6 MiB"):
        step.restore(tmp_path / "saved")


WITH_PEAKS = Path(__file__).parents[1] / "support" / "memory_peaks.py"
MIB = 2**20
PARAMETERS = 5 * 16 * MIB
KEPT = {
    "init": (3 * PARAMETERS, 16 * MIB),
    "a copy": (3 * PARAMETERS, 64 * MIB),
    "init from lazy parameters": (PARAMETERS, 64 * MIB),
    "an export": (0, 64 * MIB),
    "a restore": (3 * PARAMETERS, 64 * MIB),
    # A layer of eight parameters: not all of them are computed before the first is copied.
    "init_from": (8 * 16 * MIB, 112 * MIB),
    # Four bits an element are copied as the bytes that hold them: NumPy's form of a leaf takes 64 MiB more.
    "four bits": (4 * 32 * MIB, (2 * 32 + 16) * MIB),
}
"""What each way keeps, and what it may take beside that: a piece is at most 64 MiB."""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """The most memory beside what was there before, by the way in which a state is made."""
    return json.loads(run_python(WITH_PEAKS, tmp_path_factory.mktemp("peaks") / "saved"))


@pytest.mark.parametrize("way", KEPT)
def test_the_peak_is_what_is_kept_and_a_bounded_piece(way, peaks):
    kept, piece = KEPT[way]
    assert 0.9 * kept <= peaks[way] <= kept + piece


def offloading(**options):
    """Twelve layers of 4 KiB; what crosses between them is as large as a batch: 128 bytes a row."""
    options = {"offload_activations": True, "remat": "full", "merge_small": False} | options
    step = jaxferry.train_step(chain(residual=True), optax.sgd(0.1), **options)
    return step, {f"w{i:02d}": np.full((32, 32), 0.01, np.float32) for i in range(12)}


def batch(rows):
    return np.ones((rows, 32), np.float32)


@pytest.mark.slow
@pytest.mark.cpu_device
def test_plans_let_no_more_activations_leave_than_host_memory_has_room_for(monkeypatch, tmp_path):
    training, rows = 12 * 32 * 32 * 4 * 3, 4096
    options = {"offload_activations": "auto", "policy": "auto", "profile": "estimate", "remat": "auto"}
    # On the device, all segments' inputs take more than that.
    options["memory_budget"] = 12 * 128 * rows
    monkeypatch.setenv(host_memory.VARIABLE, str(training + 2**30))
    step, params = offloading(**options)
    state, _ = step(step.init(params), batch(rows))
    saved = step.prepare(batch(rows)).saved_bytes
    assert state.step == 1 and saved > 0
    monkeypatch.setenv(host_memory.VARIABLE, str(training + 128 * rows - 1))
    step, params = offloading(**options)
    with pytest.raises(jaxferry.BudgetError):
        step(step.init(params), batch(rows))
    monkeypatch.setenv(host_memory.VARIABLE, str(training + 2**30))
    step, params = offloading(scratch=tmp_path, host_memory=training + 128 * rows - 1, **options)
    with pytest.raises(jaxferry.BudgetError):
        step(step.init(params), batch(rows))


def test_saved_activations_are_checked_before_the_first_step_and_for_longer_batches(monkeypatch):
    step, params = offloading()
    state = step.init(params)
    training = 12 * 32 * 32 * 4 * 3  # masters, compute copy, gradients
    saved = {rows: step.prepare(batch(rows)).saved_bytes for rows in (512, 1024)}
    step, params = offloading()
    state = step.init(params)
    monkeypatch.setenv(host_memory.VARIABLE, str(training + saved[512] - 1))
    with pytest.raises(jaxferry.HostMemoryError, match=r"a step needs .*saved activations .*JAXFERRY_HOST_MEMORY="):
        step(state, batch(512))
    assert state.step == 0
    monkeypatch.setenv(host_memory.VARIABLE, str(training + saved[512]))
    state, _ = step(state, batch(512))
    with pytest.raises(jaxferry.HostMemoryError, match="smaller or shorter batches"):
        step(state, batch(1024))
    state, _ = step(state, batch(512))
    assert state.step == 2 and state.damage is None
    monkeypatch.setenv(host_memory.VARIABLE, str(training + saved[1024]))
    assert step(state, batch(1024))[0].step == 3
