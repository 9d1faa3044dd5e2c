"""CPUs that the process may use: affinity, control groups, NUMA nodes."""

import os
import subprocess
import sys

import pytest

from control_groups import real_group, write
from jaxferry.errors import InputError
from jaxferry.native import cpus, status

SCRIPT = """
from jaxferry.native import cpus
from jaxferry.native import library
from jaxferry.training.profile_cache import surroundings
about = surroundings("cpu", "cpu")
print(library("cpu").host_threads, cpus.num_cpus(), about["num_threads"], about["native"]["cpu"]["host_threads"])
"""


@pytest.fixture
def many(monkeypatch):
    """A machine of 64 CPUs, all of which the process may use."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.delenv(cpus.VARIABLE, raising=False)


BOTH, ONE = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "3:cpu,cpuacct:/a/b\n"}


def second(**texts):
    """Files of version 2, each group's by its name: the mount, `a` or `ab`."""
    folders = {"mount": "", "a": "a/", "ab": "a/b/"}
    return BOTH | {f"sys/fs/cgroup/{folders[name]}cpu.max": f"{text}\n" for name, text in texts.items()}


def first(quota, folder="cpu/a/b"):
    """Files of version 1 for a period of 100 ms."""
    names = {"quota": quota, "period": 100_000}
    return ONE | {f"sys/fs/cgroup/{folder}/cpu.cfs_{name}_us": f"{value}\n" for name, value in names.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 64, id="machine"),
        pytest.param(second(ab="max 100000"), 64, id="no quota"),
        pytest.param(second(ab="800000 100000"), 8, id="quota"),
        pytest.param(second(ab="150000 100000"), 2, id="fraction"),
        pytest.param(second(ab="1000 100000"), 1, id="little"),
        pytest.param(second(ab="8000 1000", a="3000 1000"), 3, id="nested"),
        pytest.param(second(mount="200000 100000"), 2, id="container"),
        pytest.param(first(500_000), 5, id="version 1"),
        pytest.param(first(500_000, "cpu,cpuacct/a/b"), 5, id="version 1 mounted by both names"),
        pytest.param(first(-1), 64, id="version 1 without"),
        pytest.param(first(-1) | first(700_000, "cpu/a"), 7, id="version 1 nested"),
        pytest.param(first(500_000, "memory/a/b"), 64, id="version 1 of another controller"),
        pytest.param(BOTH | {"sys/fs/cgroup/unified/a/cpu.max": "4000 1000\n"}, 4, id="both versions"),
    ],
)
def test_the_smallest_quota_of_all_groups_counts(files, expected, many, tmp_path):
    write(tmp_path, files)
    assert cpus.num_cpus(tmp_path) == expected
    assert cpus.num_host_threads(tmp_path)[0] == expected


def test_affinity_counts_beside_a_quota(many, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    assert cpus.num_cpus(tmp_path) == 3
    write(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "800000 100000\n"})
    assert [limit.num_cpus for limit in cpus.limits(tmp_path)] == [3, 8, 64]
    assert "affinity" in cpus.num_host_threads(tmp_path)[1]


@pytest.mark.parametrize("text", ["", "much 100000", "200000", "200000 0", "200000 none"])
def test_a_quota_in_another_form_says_nothing(text, many, tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": f"{text}\n"})
    assert cpus.num_cpus(tmp_path) == 64


def test_the_variable_sets_threads_but_not_cpus(many, monkeypatch, tmp_path):
    monkeypatch.setenv(cpus.VARIABLE, "7")
    assert cpus.num_host_threads(tmp_path) == (7, cpus.VARIABLE)
    assert cpus.num_cpus(tmp_path) == 64
    monkeypatch.setenv(cpus.VARIABLE, "all")
    with pytest.raises(InputError, match=r"JAXFERRY_HOST_THREADS must be a whole number of threads, .* got 'all'"):
        cpus.num_host_threads(tmp_path)


def test_numa_nodes_tell_the_cpus_and_the_memory_that_may_be_used(monkeypatch, tmp_path):
    nodes = "sys/devices/system/node"
    write(
        tmp_path,
        {
            f"{nodes}/node0/cpulist": "0-3,8-11\n",
            f"{nodes}/node1/cpulist": "4-7,12-15\n",
            f"{nodes}/node10/cpulist": "\n",
            "proc/self/status": "Name:\tpython\nMems_allowed_list:\t0,10\n",
        },
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 8}, raising=False)
    expected = [cpus.NumaNode(0, 3, True), cpus.NumaNode(1, 1, False), cpus.NumaNode(10, 0, True)]
    assert cpus.numa_nodes(tmp_path) == expected


def run(code, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != cpus.VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def on(allowed):
    return f"import os; os.sched_setaffinity(0, {set(allowed)})"


needs_two = pytest.mark.skipif(cpus.num_cpus() < 2, reason="one CPU")


@needs_two
def test_a_process_that_may_run_on_one_cpu_has_one_host_thread():
    assert run(on([min(os.sched_getaffinity(0))]) + SCRIPT) == ["1"] * 4


@needs_two
def test_a_process_with_the_time_of_one_cpu_has_one_host_thread():
    version_1 = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    with real_group("cpu", version_1, {"cpu.max": "100000 100000"}) as enter:
        assert run(enter + SCRIPT) == ["1"] * 4


CPP_DEFAULT = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.jaxferry_set_host_threads.restype = ctypes.c_int64
print(library.jaxferry_set_host_threads(ctypes.c_int64(0)))
"""


@needs_two
@pytest.mark.parametrize("num", [1, 2])
def test_the_library_heeds_the_affinity_without_python(num):
    found = status("cpu")
    if found.path is None:
        pytest.skip("no native library")
    allowed = sorted(os.sched_getaffinity(0))[:num]
    assert run(on(allowed) + CPP_DEFAULT, str(found.path)) == [str(num)]
