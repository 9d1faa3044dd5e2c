"""What only a CUDA device shows, on one in software; see `software_gpu`."""

import collections
import csv
import json
import re

import pytest

import software_gpu
from slowly import slow, slow_but

pytestmark = [software_gpu.needed, pytest.mark.timeout(900)]


def rows(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_gradients_that_overflow_as_they_are_stored_skip_the_update(transport):
    found = rows(software_gpu.run("half_precision_on_device.py", "float16", transport))
    assert len(found) == 6 and {row["platform"] for row in found} == {"gpu"}
    skipped = [bool(row["skipped"]) for row in found]
    assert skipped[0] and not all(skipped)
    for row in found:
        assert row["finite"] and bool(row["skipped"]) == (row["grad_norm"] == float("inf"))
    trained = [row["loss"] for row in found if not row["skipped"]]
    assert trained == sorted(trained, reverse=True)


KINDS = [(transport, preallocate) for transport in ("ferry", "device_put") for preallocate in ("true", "false")]


def check_budgets(seed, count, transport, preallocate):
    """Runs random plans and compares the allocator's peak with their budgets."""
    given = {"timeout_s": 800, "XLA_PYTHON_CLIENT_PREALLOCATE": preallocate, "SOFTGPU_COPY_GBPS": "2"}
    found = rows(software_gpu.run("budgets_on_device.py", seed, count, transport, **given))
    assert len(found) == count
    for row in found:
        assert row["peak"] <= row["budget"], row
        assert row["refused"] is None or row["refused"] > row["budget"], row
    assert sum(row["refused"] is None for row in found) > count / 2


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "preallocate"), [KINDS[0], KINDS[3]])
def test_the_allocator_reports_no_more_than_the_budget(transport, preallocate):
    check_budgets(0, 3, transport, preallocate)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize(("transport", "preallocate"), KINDS)
def test_the_allocator_reports_no_more_than_the_budget_of_many_plans(transport, preallocate, seed):
    check_budgets(seed, 5, transport, preallocate)


def operations_of(trace):
    """The device's kernels, products and copies in the order of their issue.

    Each has the times of issue, start and end, the stream, "H2D" or "D2H" for a copy over the link, and ranges of
    addresses: those that a copy reads or writes; of a kernel, where its arguments begin.
    """
    found = []
    with open(trace) as file:
        for stream, what, issued, start, end, *rest in list(csv.reader(file))[1:]:
            if what not in ("kernel", "product") and "copy" not in what:
                continue
            detail = ",".join(rest)
            if "copy" in what:
                size = int(re.search(r"(\d+) bytes", detail)[1])
                ranges = [(int(each, 16), size) for each in re.findall(r"(?:to|from) ([0-9a-f]{6,})", detail)]
            else:
                ranges = [(int(each, 16), 1) for each in re.findall(r" ([0-9a-f]{9,})(?= |$)", f" {detail}")]
            link = detail.split(" ")[0] if "copy" in what else None
            if ranges:
                found.append((float(issued), float(start), float(end), stream, link, ranges))
    return sorted(found)


def uses(operation, target):
    begin, size = target
    return any(begin < start + length and start < begin + size for start, length in operation[-1])


def check_order(trace):
    """Checks that no copy to the device starts before its target's last use has ended; returns how early loads start.

    Returns:
      The number of loads, and how many of them started while kernels that had been issued before were yet to end. The
      loads are the copies of the stream that has most.
    """
    operations, started = operations_of(trace), collections.defaultdict(list)
    for number, (_, start, _, stream, link, ranges) in enumerate(operations):
        if link != "H2D":
            continue
        before = [each for each in operations[:number] if each[3] != stream]
        for each in before:
            assert not uses(each, ranges[0]) or each[2] <= start, (each, operations[number])
        started[stream].append(any(each[4] is None and each[2] > start for each in before))
    loads = max(started.values(), key=len)
    return len(loads), sum(loads)


def test_a_load_waits_for_its_buffer_and_not_for_all_compute_before_it(tmp_path):
    """Each kernel takes long, so most of a backward is still to run when the host updates what ran first."""
    trace = tmp_path / "trace"
    given = {"SOFTGPU_TRACE": str(trace), "SOFTGPU_KERNEL_MS": "10", "SOFTGPU_COPY_GBPS": "1"}
    [row] = rows(software_gpu.run("early_loads_on_device.py", 0, 0, **given))
    assert row["platform"] == "gpu"
    num_loads, num_early = check_order(trace)
    assert num_loads > 20 and num_early > 0


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_algorithms_of_products_with_host_memory_are_known_before_the_first_step(dtype):
    [row] = rows(software_gpu.run("algorithms_on_device.py", dtype))
    before, *after = row["algorithms"]
    assert before >= row["products"] > 2 and after == [before, before]


def check_bits(seed, count, trace):
    given = {"SOFTGPU_TRACE": str(trace), "SOFTGPU_KERNEL_MS": "2", "SOFTGPU_COPY_GBPS": "0.02"}
    found = rows(software_gpu.run("early_loads_on_device.py", seed, count, timeout_s=800, **given))
    assert len(found) == count + 1
    assert all(row["same"] for row in found), found
    check_order(trace)


def test_no_load_changes_what_a_program_reads(tmp_path):
    check_bits(1, 4, tmp_path / "trace")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_no_load_changes_what_a_program_of_many_plans_reads(tmp_path, seed):
    check_bits(seed, 12, tmp_path / "trace")


SLOW_THERE = "large or product_before_it or random_loads"

CHOSEN = {
    "operations": (
        ["tests/gpu/test_operations.py", "-k", f"(Copies or Products or Ferry) and not ({SLOW_THERE})"],
        120,
    ),
    "half precision": (["tests/training/test_loss_scale.py"], 8),
    "transports": (
        [
            "tests/engine/test_transfers.py",
            "tests/engine/test_memory.py",
            "-k",
            "is_loaded or dropped_first or of_many",
        ],
        4,
    ),
    "less host memory": (
        [
            "tests/engine/test_gradient_buffers.py",
            "tests/engine/test_on_disk.py",
            "-k",
            "slow_host or norms or few or everything or disk_rolls",
        ],
        8,
    ),
}
"""By what they show: tests to run, and how many of them at least."""


@pytest.mark.parametrize("name", slow_but(("operations", "half precision", "transports"), CHOSEN))
def test_tests_pass_where_cuda_is_the_default_device(name):
    arguments, least = CHOSEN[name]
    assert software_gpu.run_tests(*arguments) >= least
