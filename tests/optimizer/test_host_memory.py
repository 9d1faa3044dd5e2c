"""Host memory is checked before it is allocated."""

import json
import os
import re
import subprocess
import sys
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
from control_groups import real_group, write
from jaxferry import checkpoint
from jaxferry.checkpoint import leaves
from jaxferry.cli.plan import host_memory_lines
from jaxferry.cli.recording import make_recording
from jaxferry.optimizer import host_memory
from jaxferry.step import Kind
from jaxferry.transport import Allocator, Placement
from jaxferry.units import format_bytes, parse_bytes
from watched import live_arrays, settled

pytestmark = pytest.mark.cpu_device  # XLA pins more than is asked for; tests of that emulate a device

GIB = 2**30
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n"


def group(folder, most, taken, version=2, **counts):
    """Files of a control group; counts are of inactive files unless named."""
    limit, usage = [("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")][version - 1]
    prefix = "total_" if version == 1 else ""
    stat = [f"{prefix}{name} {count}\n" for name, count in counts.items()]
    # Those of the group alone, without the groups below, and memory that only swap could take.
    others = f"anon {GIB}\nfile {GIB}\nshmem {GIB}\ninactive_anon {GIB}\n" + (
        f"inactive_file {GIB}\n" if prefix else ""
    )
    return {
        f"{folder}/{limit}": f"{most}\n",
        f"{folder}/{usage}": f"{taken}\n",
        f"{folder}/memory.swap.max": f"{64 * GIB}\n",
        f"{folder}/memory.memsw.limit_in_bytes": f"{64 * GIB}\n",
        f"{folder}/memory.stat": others + "".join(stat),
    }


@pytest.mark.parametrize("less", [1, 1000, 2**20])
def test_an_error_never_says_that_there_is_as_much_as_needed(less, monkeypatch):
    needed = 17 * GIB + 12345
    monkeypatch.setenv(host_memory.VARIABLE, str(needed - less))
    with pytest.raises(jaxferry.HostMemoryError) as refused:
        host_memory.check({"master parameters": needed})
    found = re.search(r"needs (.*) of host memory .* only (.*) are available", str(refused.value))
    assert found[1] != found[2]
    assert parse_bytes(found[1]) > parse_bytes(found[2])


OWN = {"proc/self/cgroup": "0::/a/b\n"}
FIRST = {"proc/self/cgroup": "4:memory,cpu:/a/b\n"}
V2, ABOVE, V1 = "sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup/memory/a/b"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a/b", "max", GIB)}, 8 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a/b", 4 * GIB, 3 * GIB, inactive_file=GIB)}, 2 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a", 4 * GIB, GIB)}, 3 * GIB),
        ({"proc/self/cgroup": "0::/of/the/host\n", **group("sys/fs/cgroup", 2 * GIB, GIB)}, GIB),
        ({"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", GIB, 2 * GIB)}, 0),
        ({"proc/self/cgroup": "4:memory,cpu:/a\n", **group("sys/fs/cgroup/memory/a", 6 * GIB, GIB, 1)}, 5 * GIB),
        ({"proc/self/cgroup": "4:memory:/a\n", **group("sys/fs/cgroup/memory/a", 2**63 - 4096, GIB, 1)}, 8 * GIB),
    ],
    ids=["machine", "no limit", "limit", "parent", "container", "exceeded", "version 1", "version 1 without"],
)  # fmt: skip
def test_the_smallest_limit_of_machine_and_control_groups_counts(files, expected, tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert host_memory.limits(tmp_path)[0].num_bytes == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({**OWN, **group(V2, 8 * GIB, 7 * GIB, active_file=6 * GIB)}, 7 * GIB, id="active"),
        pytest.param(
            {**OWN, **group(V2, 8 * GIB, 7 * GIB, active_file=GIB, inactive_file=2 * GIB, slab_reclaimable=GIB)},
            5 * GIB,
            id="all kinds",
        ),
        pytest.param(
            {**OWN, **group(V2, 8 * GIB, 7 * GIB, slab_unreclaimable=GIB, unevictable=GIB)}, GIB, id="not reclaimable"
        ),
        pytest.param({**OWN, **group(V2, 8 * GIB, GIB, active_file=2 * GIB)}, 8 * GIB, id="more than taken"),
        pytest.param(
            {**FIRST, **group(V1, 8 * GIB, 7 * GIB, 1, active_file=3 * GIB, inactive_file=2 * GIB)},
            6 * GIB,
            id="version 1",
        ),
        pytest.param({**OWN, **group(V2, "max", GIB), f"{V2}/memory.high": f"{3 * GIB}\n"}, 2 * GIB, id="high"),
        pytest.param({**OWN, **group(V2, 4 * GIB, GIB), f"{V2}/memory.high": f"{6 * GIB}\n"}, 3 * GIB, id="high above"),
        pytest.param(
            {**OWN, **group(V2, 4 * GIB, 3 * GIB, active_file=GIB), f"{V2}/memory.high": "max\n"},
            2 * GIB,
            id="high without",
        ),
        pytest.param(
            {**OWN, **group(V2, 6 * GIB, 0), **group(ABOVE, 5 * GIB, 4 * GIB, active_file=GIB)}, 2 * GIB, id="nested"
        ),
        pytest.param(
            {**OWN, **group(V2, 6 * GIB, 0), **group(ABOVE, "max", GIB), f"{ABOVE}/memory.high": f"{2 * GIB}\n"},
            GIB,
            id="nested high",
        ),
        pytest.param(
            {**FIRST, **group(V1, 6 * GIB, 0, 1), **group("sys/fs/cgroup/memory", 3 * GIB, GIB, 1)},
            2 * GIB,
            id="version 1 nested",
        ),
    ],
)
def test_memory_that_the_kernel_gives_back_first_counts_as_free(files, expected, tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert host_memory.limits(tmp_path)[0].num_bytes == expected


READ_TWICE = """
import sys
from jaxferry.optimizer import host_memory
def left():
    return min(limit.num_bytes for limit in host_memory.limits() if "control group" in limit.source)
before = left()
for _ in range(3):
    with open(sys.argv[1], "rb", buffering=0) as file:
        while file.read(2**20):
            pass
print(before, left())
"""


def test_reading_a_file_twice_leaves_the_memory_of_a_real_control_group_free(tmp_path):
    file = tmp_path / "weights"
    with file.open("wb") as stream:
        for _ in range(64):
            stream.write(os.urandom(2**20))
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    most = str(512 * 2**20)
    with real_group("memory", {"memory.limit_in_bytes": most}, {"memory.max": most}) as enter:
        command = [sys.executable, "-c", enter + READ_TWICE, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(int, done.stdout.split())
    assert after > before - 32 * 2**20


@pytest.mark.parametrize(
    "files",
    [
        {"proc/meminfo": "MemAvailable:\n"},
        {"proc/meminfo": "MemAvailable: lots kB\n"},
        {"proc/self/cgroup": "\n0::/a\n\n", **group("sys/fs/cgroup/a", 4 * GIB, "")},
        {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", "much", 1)},
    ],
)
def test_files_in_another_form_say_nothing(files, tmp_path):
    write(tmp_path, files)
    assert host_memory.limits(tmp_path) == []


def test_odd_lines_and_names_of_control_groups_are_skipped(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, **group("sys/fs/cgroup/a", 4 * GIB, GIB, inactive_file=GIB)})
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_bytes(b"\n0::/a/\xff\nodd\n")
    with (tmp_path / "sys/fs/cgroup/a/memory.stat").open("a") as file:
        file.write("\nodd\n")
    assert host_memory.limits(tmp_path)[0].num_bytes == 4 * GIB


def test_a_system_without_such_files_has_no_limits(tmp_path, monkeypatch):
    assert host_memory.limits(tmp_path) == []
    monkeypatch.delenv(host_memory.VARIABLE, raising=False)
    monkeypatch.setattr(host_memory, "limits", list)
    host_memory.check({"masters": 2**60})


def test_this_machine_has_room_for_a_byte():
    assert host_memory.limits()[0].num_bytes > 0
    host_memory.check({"masters": 1})


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


def test_what_is_pinned_is_the_compute_copy_gradients_saved_activations_and_what_streams(monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    needed = {"master parameters": 99 * GIB, "compute copy": 30 * GIB, "gradients": 30 * GIB}
    assert host_memory.pinned_bytes(needed) == 60 * GIB
    total = host_memory.pinned_bytes(needed | {"saved activations": 4 * GIB}, streamed_bytes=GIB)
    assert not host_memory.pinned_problem(total - GIB)
    problem = host_memory.pinned_problem(total)
    assert "XLA pins up to 64.0 GiB (default): set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=65 or more" in problem


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x) (gcc 11)\n", True),
        ("Linux version 6.8.0-41-generic (buildd@x)\n", False),
        (None, False),
    ],
)
def test_the_limit_of_pinned_memory_says_that_windows_has_another_under_wsl2(version, says, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "96")
    write(tmp_path, {} if version is None else {"proc/version": version})
    limit = host_memory.pinned_limit(tmp_path)
    assert limit.num_bytes == 96 * GIB
    assert ("under WSL2" in limit.source) == says and "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in limit.source


def test_the_pool_of_pinned_memory_doubles_up_to_its_limit(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "40")
    assert host_memory.pinned_pool_bytes(3 * 2**21) == 3 * 2**21
    assert host_memory.pinned_pool_bytes(3 * 2**21 + 1) == 7 * 2**21
    assert host_memory.pinned_pool_bytes(33 * GIB) == 40 * GIB
    advice = host_memory.pinned_advice(32 * GIB + 1)
    assert advice == "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=33 keeps XLA from pinning 8.00 GiB more"
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "33")
    assert not host_memory.pinned_advice(32 * GIB + 1)


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


def test_the_first_batch_shows_what_sums_of_several_uses_need(monkeypatch):
    def loss_fn(params, x):
        for name in "abab":
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x)

    monkeypatch.setenv(host_memory.VARIABLE, "35MiB")
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-3), compute_dtype=jnp.bfloat16)
    state = step.init(dict.fromkeys("ab", np.zeros((1000, 1000), np.float32)))
    with pytest.raises(jaxferry.HostMemoryError, match=r"a step needs .*sums of gradients 7\.63 MiB"):
        step(state, np.zeros((1, 1000), np.float32))


def test_sums_that_exist_before_the_first_step_count_once(monkeypatch):
    """On an accelerator a thread makes them while the step is compiled."""

    def loss_fn(params, x):
        for name in "abab":
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x)

    def pinned():
        there = [array for array in live_arrays() if array.sharding.memory_kind == "pinned_host"]
        # Other tests may have left arrays of several devices.
        there = [array for array in there if not array.is_deleted() and len(array.sharding.device_set) == 1]
        return sum({array.unsafe_buffer_pointer(): array.nbytes for array in there}.values())

    def step_within(most):
        step = jaxferry.train_step(loss_fn, jaxferry.sgd(1.0), compute_dtype=jnp.bfloat16)
        state, before = step.init(dict.fromkeys("ab", np.zeros((500, 500), np.float32))), pinned()
        monkeypatch.setattr(host_memory, "limits", lambda: [host_memory.Limit(most + before - pinned(), "the test")])
        state, _ = step(state, np.zeros((1, 500), np.float32))
        return settled(pinned) - before

    accelerator.emulate(monkeypatch)
    monkeypatch.delenv(host_memory.VARIABLE, raising=False)
    needed = step_within(GIB)
    step_within(needed)
    with pytest.raises(jaxferry.HostMemoryError, match=r"a step needs .*sums of gradients .*the test"):
        step_within(needed // 4)


def test_a_restore_checks_too(monkeypatch, tmp_path):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    step.save(step.init(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), PARAMS)), tmp_path / "saved")
    monkeypatch.setenv(host_memory.VARIABLE, "1KiB")
    with pytest.raises(jaxferry.HostMemoryError):
        step.restore(tmp_path / "saved")


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


def test_a_variable_that_is_no_size_is_named(monkeypatch):
    monkeypatch.setenv(host_memory.VARIABLE, "much")
    with pytest.raises(jaxferry.InputError, match="JAXFERRY_HOST_MEMORY must be a number of bytes"):
        host_memory.check({"masters": 1})


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


def test_a_limit_on_the_address_space_is_an_error_too():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ulimit -v" in done.stdout and "training needs 1.25 GiB" in done.stdout


def trained():
    """A step and a state of 4 bytes a parameter for masters, 8 for Adam and 8 for training: 1.5 M parameters."""
    step = jaxferry.train_step(loss_fn, optax.adam(1e-3))
    state = step.init(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), PARAMS))
    return step, step(state, np.ones((2, 1000), np.float32))[0]


COPIES = {
    "a copy of the state": (12, lambda state: state.copy()),
    "a copy of the parameters": (4, lambda state: state.params),
    "a copy of the optimizer's state": (8, lambda state: state.opt_state),
    "an assignment to the state": (4, lambda state: setattr(state, "params", PARAMS)),
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
    path = str(tmp_path_factory.mktemp("peaks") / "saved")
    done = subprocess.run([sys.executable, str(WITH_PEAKS), path], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", KEPT)
def test_the_peak_is_what_is_kept_and_a_bounded_piece(way, peaks):
    kept, piece = KEPT[way]
    assert 0.9 * kept <= peaks[way] <= kept + piece


def deep_loss(params, x):
    for name in sorted(params):
        x = x + jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def offloading(**options):
    """Twelve layers of 4 KiB; what crosses between them is as large as a batch: 128 bytes a row."""
    step = jaxferry.train_step(
        deep_loss, optax.sgd(0.1), offload_activations=True, remat="full", merge_small=False, **options
    )
    return step, {f"w{i:02d}": np.full((32, 32), 0.01, np.float32) for i in range(12)}


def batch(rows):
    return np.ones((rows, 32), np.float32)


def test_saved_activations_are_counted_as_they_are_and_by_each_report():
    step, params = offloading(record_steps=1)
    state = step.init(params)
    prepared = step.prepare(batch(1024))
    assert prepared.saved_bytes == 2 * step.prepare(batch(512)).saved_bytes > 6 * 1024 * 128
    saves = [task for task in prepared.schedule.tasks if task.kind is Kind.SAVE]
    assert prepared.saved_bytes % (1024 * 128) == 0 and len(saves) == prepared.saved_bytes // (1024 * 128)
    state, _ = step(state, batch(1024))
    recording = make_recording(step, state, prepared, model="deep")
    assert recording.host_bytes["saved activations"] == prepared.saved_bytes
    [line] = host_memory_lines(recording.profile.machine | {"host_bytes": {}}, 0, recording.profile.saved_bytes)
    assert line == f"host memory {format_bytes(prepared.saved_bytes)}: saved activations " + format_bytes(
        prepared.saved_bytes
    )


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
