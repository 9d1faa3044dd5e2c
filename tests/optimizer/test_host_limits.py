"""How much host memory there is: the machine, control groups, XLA's pool of pinned memory."""

import os

import pytest

from control_groups import real_group, write
from jaxferry.optimizer import host_memory
from python_runs import run_python

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


OWN = {"proc/self/cgroup": "0::/a/b\n"}


FIRST = {"proc/self/cgroup": "4:memory,cpu:/a/b\n"}


V2, ABOVE, V1 = "sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup/memory/a/b"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8 * GIB, id="machine"),
        pytest.param({**OWN, **group(V2, "max", GIB)}, 8 * GIB, id="no limit"),
        pytest.param({**OWN, **group(V2, 4 * GIB, 3 * GIB, inactive_file=GIB)}, 2 * GIB, id="limit"),
        pytest.param({**OWN, **group(ABOVE, 4 * GIB, GIB)}, 3 * GIB, id="parent"),
        pytest.param(
            {"proc/self/cgroup": "0::/of/the/host\n", **group("sys/fs/cgroup", 2 * GIB, GIB)}, GIB, id="container"
        ),
        pytest.param({**OWN, **group(V2, GIB, 2 * GIB)}, 0, id="exceeded"),
        pytest.param({**FIRST, **group(V1, 6 * GIB, GIB, 1)}, 5 * GIB, id="version 1 alone"),
        pytest.param({**FIRST, **group(V1, 2**63 - 4096, GIB, 1)}, 8 * GIB, id="version 1 without"),
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
def test_the_smallest_limit_counts_and_what_the_kernel_gives_back_first_is_free(files, expected, tmp_path):
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
        before, after = map(int, run_python("-c", enter + READ_TWICE, file).split())
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
