"""What only a CUDA device shows, on one in software; see `software_gpu`."""

import json

import pytest

import software_gpu

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


@pytest.mark.parametrize(("transport", "preallocate"), KINDS[:1] + KINDS[3:])
def test_the_allocator_reports_no_more_than_the_budget(transport, preallocate):
    check_budgets(0, 3, transport, preallocate)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize(("transport", "preallocate"), KINDS)
def test_the_allocator_reports_no_more_than_the_budget_of_many_plans(transport, preallocate, seed):
    check_budgets(seed, 5, transport, preallocate)
