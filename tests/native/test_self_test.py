"""The self-test: which faults it finds, when it runs, and what training does after a failure."""

import dataclasses
import itertools
import math
import re
import threading
import types
import warnings

import jax
import numpy as np
import optax
import pytest

import jaxferry
from accelerator import emulate
from broken_library import FAULTS, break_operations
from jaxferry.errors import InputError, NativeError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import operations, run_self_test, targets
from jaxferry.native import self_tests as self_test
from jaxferry.step import LayerPlan, Plan
from models import chain
from slowly import slow_but
from steps import transport_of

NAMES = ["load", "store", "product", "gradient", "mark"]
BYTES = r"\d+ of \d+ bytes differ"

# The checks that each broken operation fails. The mark's is of a load.
FAILED = {
    "ferry_load": {"load", "mark"},
    "ferry_store": {"store"},
    "dha_matmul": {"product"},
    "dha_matmul_gradient": {"gradient"},
    "gradient_store": {"gradient"},
    "mark": {"mark"},
}


@pytest.fixture(params=[0, 1], ids=["first", "second"])
def device(request):
    return jax.devices("cpu")[request.param]


@pytest.fixture
def first_use(monkeypatch, cpu):
    """The next use of the CPU's library is the process's first one, and is tested as that of a GPU's."""
    monkeypatch.setattr(self_test, "_PLATFORMS", ("cpu",))
    monkeypatch.setattr(self_test, "_failures", {})
    monkeypatch.setattr(self_test, "_warned", set())


def test_pinned_memory_outlives_the_copies_of_the_self_test(monkeypatch):
    accelerator = emulate(monkeypatch)
    for _ in range(5):
        assert all(result.passed for result in run_self_test(accelerator.device))
    accelerator.check()


@pytest.fixture
def runs(monkeypatch):
    """The devices on which the self-test has run."""
    found, run = [], self_test.run_self_test

    def counted(device, **arguments):
        found.append(device)
        return run(device, **arguments)

    monkeypatch.setattr(self_test, "run_self_test", counted)
    return found


@pytest.fixture
def unhurried(monkeypatch, cpu):
    """Each program of the self-test starts when no copy is queued: XLA frees what is donated to one that fails."""
    jitted = self_test.jitted

    def compiled(*args, **options):
        program = jitted(*args, **options)

        def run(*arguments):
            results = jax.block_until_ready(program(*arguments))
            cpu.synchronize()
            return results

        return run

    monkeypatch.setattr(self_test, "jitted", compiled)


def failures(results):
    return {result.name: result.message for result in results if not result.passed}


class TestChecks:
    def test_a_library_that_does_what_plain_jax_does_passes(self, cpu, device):
        results = run_self_test(device)
        assert [result.name for result in results] == NAMES
        assert failures(results) == {}
        assert all(result.bytes_per_s is None for result in results)

    @pytest.mark.parametrize("operation", list(FAILED))
    def test_an_operation_that_does_nothing_fails_its_check_alone(self, cpu, monkeypatch, operation):
        break_operations(monkeypatch, "silent", operation)
        results = run_self_test(jax.devices()[0], measures=True)
        found = failures(results)
        assert found.keys() == FAILED[operation]
        assert all(re.fullmatch(BYTES, found[name]) for name in found.keys() - {"mark"})
        assert all(result.bytes_per_s is None for result in results if not result.passed)
        if "mark" in found:
            assert found["mark"].startswith("the load's mark is ")

    @pytest.mark.parametrize("operation", slow_but(("ferry_load", "scratch"), [*FAILED, "ferry_wait", "scratch"]))
    def test_an_error_of_an_operation_fails_its_checks_with_its_text(self, unhurried, monkeypatch, operation):
        break_operations(monkeypatch, "failing", operation)
        found = failures(run_self_test(jax.devices()[0]))
        more = {"ferry_wait": {"load", "mark"}, "scratch": {"product", "gradient"}}
        assert found.keys() == (FAILED | more)[operation]
        assert all(text.startswith("JaxRuntimeError: ") and "it is broken" in text for text in found.values())
        assert all("\n" not in text for text in found.values())

    @pytest.mark.parametrize(
        ("operation", "check", "argument", "change"),
        [
            ("ferry_load", "load", 3, lambda offsets: [0] * len(offsets)),
            ("ferry_store", "store", 2, lambda offsets: [offset + 1 for offset in offsets]),
            ("ferry_store", "store", 3, lambda accumulate: not accumulate),
            ("dha_matmul", "product", 2, lambda shape: dataclasses.replace(shape, offset=shape.offset - 1)),
            ("dha_matmul_gradient", "gradient", 3, lambda shape: dataclasses.replace(shape, offset=shape.offset + 1)),
            ("dha_matmul_gradient", "gradient", 4, lambda accumulate: not accumulate),
            ("gradient_store", "gradient", 2, lambda offset: offset + 1),
            ("gradient_store", "gradient", 3, lambda accumulate: not accumulate),
        ],
    )
    def test_a_wrong_place_or_sum_is_found(self, cpu, monkeypatch, operation, check, argument, change):
        function = getattr(targets, operation)

        def wrong(*args):
            return function(*args[:argument], change(args[argument]), *args[argument + 1 :])

        monkeypatch.setattr(targets, operation, wrong)
        found = failures(run_self_test(jax.devices()[0]))
        assert found.keys() == {check}
        assert re.fullmatch(BYTES, found[check])

    @pytest.mark.parametrize(
        ("operation", "check", "wrong", "most_bytes"),
        [
            # What the first copy writes, the others write again, but for the elements before them.
            (
                "ferry_store",
                "store",
                lambda store: lambda arrays, to, offsets, adds: store([arrays[0], *arrays], to, [0, *offsets], adds),
                4 * self_test._NUM_GUARDS,
            ),
            (
                "gradient_store",
                "gradient",
                lambda store: (
                    lambda to, own, offset, adds: store(
                        store(to, own[: self_test._NUM_GUARDS] + 2, 0, adds), own, offset, adds
                    )
                ),
                2 * self_test._NUM_GUARDS,
            ),
            *(
                ("dha_matmul", "product", lambda product, n=n: lambda *args: product(*args).at[n, -1].add(1), 2)
                for n in (0, 1)
            ),
        ],
    )
    def test_few_wrong_elements_are_found(self, cpu, monkeypatch, operation, check, wrong, most_bytes):
        monkeypatch.setattr(targets, operation, wrong(getattr(targets, operation)))
        found = failures(run_self_test(jax.devices()[0]))
        assert found.keys() == {check}
        assert re.fullmatch(BYTES, found[check]) and int(found[check].split()[0]) <= most_bytes

    @pytest.mark.parametrize("direction", ["load", "store"])
    def test_a_copy_that_nothing_has_waited_for_is_found(self, cpu, monkeypatch, direction):
        def synchronize():
            cpu.set_bandwidth(direction, 0)
            type(cpu).synchronize(cpu)

        monkeypatch.setattr(cpu, "synchronize", synchronize)
        if direction == "load":
            break_operations(monkeypatch, "silent", "ferry_wait")
        else:
            monkeypatch.setattr(cpu, "wait_for", lambda addresses, sizes: None)
            monkeypatch.setattr(self_test, "CHECKS", {"store": self_test.CHECKS["store"]})
        cpu.set_bandwidth(direction, 1.0)  # until the check has ended, no copy does
        assert re.fullmatch(BYTES, failures(run_self_test(jax.devices()[0]))[direction])

    def test_a_check_that_hangs_is_named_and_ends_the_self_test(self, cpu, monkeypatch):
        finishing = []
        monkeypatch.setattr(self_test.atexit, "unregister", finishing.append)
        cpu.set_bandwidth("store", 1.0)
        try:
            # The store alone would take days.
            results = run_self_test(jax.devices()[0], limit_s=2.0)
        finally:
            cpu.set_bandwidth("store", 0)
            for thread in threading.enumerate():
                if thread.name == "jaxferry self-test":
                    thread.join()
        assert failures(results) in ({"store": "no result within 2 s"}, {"load": "no result within 2 s"})
        assert [result.name for result in results] == NAMES[: len(results)]
        assert finishing == [cpu.finish]

    def test_without_a_library_there_is_nothing_to_test(self):
        if not library_exists("cuda"):
            with pytest.raises(NativeError, match="libjaxferry_cuda"):
                run_self_test(types.SimpleNamespace(platform="gpu"))
        with pytest.raises(InputError, match="got 'tpu'"):
            run_self_test(types.SimpleNamespace(platform="tpu"))


def library_exists(platform):
    return self_test.status(platform).is_available


def test_differences_are_counted_in_bytes():
    known = np.arange(1024, dtype=np.float32)
    found = known.copy()
    found.view(np.uint8)[[0, 5, 4095]] ^= 1
    assert self_test.difference([found], [known]) == "3 of 4096 bytes differ"
    assert self_test.difference([found, known], [known, known]) == "3 of 8192 bytes differ"
    assert self_test.difference([known.copy()], [known]) is None
    minus, nan = np.array([-0.0], np.float32), np.array([math.nan], np.float32)
    assert self_test.difference([minus], [np.zeros(1, np.float32)]) == "1 of 4 bytes differ"
    assert self_test.difference([nan], [nan.copy()]) is None


@pytest.mark.parametrize(
    ("load", "program", "is_right"),
    [
        ((10.1, 10.2), (10.3, 10.4), True),
        ((10.1, 10.2), (math.nan, 10.4), True),
        ((10.1, 10.2), (10.3, math.nan), False),
        ((math.nan, 10.2), (10.3, 10.4), False),
        ((10.1, math.nan), (10.3, 10.4), False),
        ((9.0, 10.2), (10.3, 10.4), False),
        ((10.2, 10.1), (10.3, 10.4), False),
        ((10.1, 10.2), (10.4, 10.3), False),
        ((10.1, 12.0), (10.3, 10.4), False),
        ((10.1, 10.2), (9.0, 10.4), False),
        ((10.1, 10.2), (10.3, 12.0), False),
    ],
)
def test_marks_lie_within_the_time_that_the_host_has_seen(load, program, is_right):
    found = self_test.time_difference(10.0, 11.0, [load, program])
    assert (found is None) == is_right
    assert is_right or found.endswith("but both ran within 0 to 1.000000 s")


MODES = {"a": Mode.DHA, "b": Mode.GFGB, "c": Mode.DHA}
PLAN = Plan("any", 1.0, tuple(LayerPlan(name, mode, GradientPlace.HOST) for name, mode in MODES.items()))
BATCH = np.ones((4, 8), np.float32)


def train(transport=None):
    """Two training steps objects of three steps each; returns the losses and the names of the transports."""
    params = {name: {"w": np.full((8, 8), 0.1 + 0.1 * i, np.float32)} for i, name in enumerate(MODES)}
    losses, transports = [], []
    for _ in range(2):
        step = jaxferry.train_step(chain(), optax.adam(1e-2), plan=PLAN, transport=transport, record_steps=2)
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        state.block_until_ready()
        assert step.recorded() is not None
        transports.append(type(transport_of(step, BATCH)).__name__)
    return losses, transports


class TestFirstUse:
    def test_training_tests_a_library_once_and_uses_it(self, first_use, runs):
        losses, transports = train()
        assert transports == ["Ferry", "Ferry"]
        assert runs == [jax.devices()[0]]
        assert train("ferry") == (losses, ["Ferry", "Ferry"])
        assert len(runs) == 1

    def test_the_library_of_a_cpu_is_tested_on_request_alone_and_plain_copies_test_none(self, cpu, runs, request):
        assert train()[1] == ["Ferry", "Ferry"]
        request.getfixturevalue("first_use")
        assert train("device_put")[1] == ["DevicePut", "DevicePut"]
        assert runs == []

    @pytest.mark.parametrize(
        ("operation", "fault"),
        slow_but([("ferry_store", "silent"), ("dha_matmul", "failing")], itertools.product(FAILED, FAULTS)),
    )
    def test_after_a_failure_training_goes_on_with_plain_copies(self, first_use, runs, monkeypatch, operation, fault):
        expected = train("device_put")[0]
        with monkeypatch.context() as patch:
            break_operations(patch, fault, operation)
            assert self_test.unusable_reason(jax.devices()[0]) is not None
        # From here on any use of the library would be an error.
        break_operations(monkeypatch, "failing")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert train() == (expected, ["DevicePut", "DevicePut"])
        [text] = [str(each.message) for each in caught if "self-test" in str(each.message)]
        found = re.findall(r"(?:[:;] )(\w+): (?=\d+ of|Jax|the load)", text)
        assert found == [name for name in NAMES if name in FAILED[operation]]
        assert "training goes on with plain copies (device_put)" in text
        assert "`jaxferry doctor`" in text and "`jaxferry build-native`" in text and "\n" not in text
        assert len(runs) == 1

    @pytest.mark.parametrize("operation", slow_but(["mark"], FAILED))
    def test_an_explicit_ferry_is_an_error_that_names_the_check(self, first_use, monkeypatch, operation):
        break_operations(monkeypatch, "silent", operation)
        for _ in range(2):
            with warnings.catch_warnings(), pytest.raises(InputError, match="needs the native library") as caught:
                warnings.simplefilter("error")
                jaxferry.train_step(chain(), optax.adam(1e-2), transport="ferry")
            assert all(f"{name}: " in str(caught.value) for name in FAILED[operation])

    @pytest.mark.parametrize("is_broken", [False, True])
    def test_the_first_use_may_be_within_a_traced_function(self, first_use, runs, monkeypatch, is_broken):
        called = []
        monkeypatch.setattr(targets, "dha_read", lambda *args: called.append("dha_read") or plain_read(*args))
        if is_broken:
            break_operations(monkeypatch, "silent", "ferry_store")
        vector = jax.device_put(np.arange(8, dtype=np.float32), sharding("pinned_host"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            [found] = jax.jit(lambda v: operations.dha_read(v, [(4,)], [2]), out_shardings=sharding("device"))(vector)
        np.testing.assert_array_equal(found, [2, 3, 4, 5])
        assert (len(runs), called) == (1, [] if is_broken else ["dha_read"])
        assert sum("self-test" in str(each.message) for each in caught) == is_broken


plain_read = targets.dha_read


def sharding(kind):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
