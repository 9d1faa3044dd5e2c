"""The CUDA library's own code, kernels and stream order, on an emulated device."""

import ctypes
import re
import time

import jax
import numpy as np
import optax
import pytest

import jaxferry
from benchmarks.gpu import link_rates, overlap
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import self_tests as self_test
from jaxferry.native import targets
from jaxferry.step import LayerPlan, Plan
from jaxferry.transport import Placement
from models import chain
from native import emulated_cuda
from native.native_operations import check_product, numbers
from native.operations_suite import CopySuite, FerrySuite, MarkSuite, PanelSuite
from planned import assert_same_bits, taken
from recorded import check_times


@pytest.fixture(scope="session")
def library(emulated_library):
    return emulated_library


def seeds(count, quick):
    """Seeds, of which only the first ones are quick."""
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(count)]


def fill_later(library, array, value):
    array.block_until_ready()
    address = ctypes.c_void_p(array.unsafe_buffer_pointer())
    library.emulation_fill_later(address, ctypes.c_size_t(array.nbytes), value)


@pytest.fixture(scope="session")
def operations(library):
    return emulated_cuda.register(library)


@pytest.fixture(scope="module")
def bench(operations):
    return link_rates.Bench(operations, mib=1, k=2048)


class TestCopies(CopySuite):
    pass


class TestProducts(PanelSuite):
    @pytest.mark.parametrize("seed", seeds(20, quick=5))
    def test_no_order_that_the_events_allow_mixes_panels(self, operations, library, seed):
        library.emulation_seed(seed)
        k, n = 16, 200
        x, vector = numbers(1, (20, k), "bfloat16"), numbers(2, k * n)
        found = operations.matmul(
            operations.device(x), operations.host(vector), (k, n), transpose=bool(seed % 2), scratch_bytes=3000
        )
        w = vector.astype(x.dtype).reshape((n, k)).T if seed % 2 else vector.astype(x.dtype).reshape((k, n))
        check_product(found, x, w, "bfloat16", 2.0**-18)
        dy, before = numbers(3, (20, n), "bfloat16"), np.zeros(k * n, np.float32)
        gradient = operations.matmul_gradient(
            operations.host(before), operations.device(x), operations.device(dy), transpose=True, scratch_bytes=1500
        )
        check_product(np.asarray(gradient).reshape(n, k), dy.T, x, "float32", 2.0**-18)

    @pytest.mark.parametrize("seed", seeds(10, quick=3))
    def test_panels_arrive_after_what_used_the_scratch_before(self, operations, library, seed):
        library.emulation_seed(seed)
        x, vector = numbers(1, (20, 16)), numbers(2, 16 * 200)
        operands = operations.device(x), operations.host(vector)
        scratch = operations.scratch(4096)
        fill_later(library, scratch, 7)
        found = operations.matmul(*operands, (16, 200), transpose=True, scratch=scratch)
        check_product(found, x, vector.reshape(200, 16).T, "float32", 2.0**-18)


class TestFailures:
    """If any CUDA call fails, the operation reports it in one line, leaves nothing queued, and works again."""

    def check(self, library, run, message):
        num_failed = 0
        while True:
            library.emulation_fail(ctypes.c_long(num_failed))
            try:
                result = jax.block_until_ready(run())
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                break
            finally:
                library.emulation_fail(ctypes.c_long(-1))
            assert re.search(message, text), text
            assert library.emulation_num_queued() == 0
            num_failed += 1
        assert num_failed > 3
        return result

    @pytest.mark.parametrize("transpose", [False, True])
    def test_of_a_product(self, operations, library, transpose):
        x, vector = numbers(1, (20, 16), "bfloat16"), numbers(2, 16 * 100)
        operands = operations.device(x), operations.host(vector), (16, 100)
        found = self.check(
            library,
            lambda: operations.matmul(*operands, transpose=transpose, scratch_bytes=4096),
            r"dha_matmul: .* failed: invalid value \(x bfloat16\[20,16\], w float32\[1600\], scratch uint8\[4096\]",
        )
        w = vector.astype(x.dtype).reshape((100, 16)).T if transpose else vector.astype(x.dtype).reshape((16, 100))
        check_product(found, x, w, "bfloat16", 2.0**-18)

    def test_of_a_gradient(self, operations, library):
        x, dy = numbers(1, (20, 16), "bfloat16"), numbers(2, (20, 40), "bfloat16")
        operands = operations.device(x), operations.device(dy)
        found = self.check(
            library,
            lambda: operations.matmul_gradient(
                operations.host(np.zeros(640, np.float32)), *operands, scratch_bytes=2048
            ),
            r"dha_matmul_gradient: .* failed: invalid value \(destination float32\[640\], x bfloat16\[20,16\]",
        )
        check_product(np.asarray(found).reshape(16, 40), x.T, dy, "float32", 2.0**-18)


class TestFerry(FerrySuite):
    @pytest.mark.parametrize("seed", seeds(10, quick=3))
    def test_copies_start_after_what_the_program_did_before(self, operations, library, seed):
        library.emulation_seed(seed)
        array, vector = operations.device(np.zeros(100, np.float32)), operations.host(np.zeros(100, np.float32))
        fill_later(library, array, 1)
        (found,) = operations.wait(operations.ferry_store([array], vector, [0]))
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), 1)

    @pytest.mark.parametrize("seed", seeds(10, quick=3))
    def test_a_thread_that_has_waited_finds_what_was_stored(self, operations, library, seed):
        library.emulation_seed(seed)
        array, before = operations.device(numbers(5, 1000)), operations.host(np.zeros(1000, np.float32))
        vector = jax.block_until_ready(operations.ferry_store([array], before, [0]))
        native = emulated_cuda.functions(library)
        native.wait_for([vector.unsafe_buffer_pointer()], [vector.nbytes])
        np.testing.assert_array_equal(vector, numbers(5, 1000))

    @pytest.fixture
    def lagging(self, library):
        """A program's stream that lags behind, as on a GPU, until the function that this gives is called."""
        library.emulation_lag(1)
        yield lambda: library.emulation_lag(0)
        library.emulation_lag(0)

    @staticmethod
    def load_between(operations, library, seed, lagging, is_vacant):
        """What is loaded behind the array's last use, while later work of the device writes the vector."""
        library.emulation_lag(1)
        library.emulation_seed(seed)
        array, vector = operations.device(np.zeros(100, np.float32)), operations.host(np.zeros(100, np.float32))
        fill_later(library, array, 1)
        vacant = operations.vacate(array)
        fill_later(library, vector, 2)
        loaded = operations.load([vector], vacant, vectors=[0], offsets=[0], is_vacant=is_vacant)
        lagging()
        (found,) = operations.wait(*loaded)
        (byte,) = set(np.asarray(found).view(np.uint8).reshape(-1).tolist())
        return byte

    @pytest.mark.parametrize(
        ("is_vacant", "num_seeds", "expected"),
        [
            (True, 40, {0, 2}),  # never what the array's last use has written
            (False, 20, {2}),
            (2, 40, None),  # the caller has seen the last use end: what the load does not wait for may write after it
        ],
    )
    def test_a_load_waits_for_all_earlier_work_or_the_last_use_of_its_array_or_nothing(
        self, operations, library, lagging, is_vacant, num_seeds, expected
    ):
        found = {self.load_between(operations, library, seed, lagging, is_vacant) for seed in range(num_seeds)}
        assert found == expected or (expected is None and 1 in found)

    def test_an_array_is_vacant_for_one_load(self, operations, library, lagging):
        for seed in range(20):
            library.emulation_lag(0)
            library.emulation_seed(seed)
            array, vector = operations.device(np.zeros(100, np.float32)), operations.host(np.zeros(100, np.float32))
            [array] = operations.load([vector], operations.vacate(array), vectors=[0], offsets=[0], is_vacant=True)
            array.block_until_ready()
            library.emulation_lag(1)
            fill_later(library, array, 1)
            loaded = operations.load([vector], [array], vectors=[0], offsets=[0], is_vacant=True)
            lagging()
            np.testing.assert_array_equal(operations.wait(*loaded)[0], 0)

    def test_events_of_vacant_arrays_come_back(self, operations, library):
        arrays = [operations.device(np.zeros(100, np.float32)) for _ in range(3)]
        vector, counts = operations.host(numbers(1, 100)), []
        for _ in range(30):
            vacant = operations.vacate(*arrays)
            arrays = operations.load([vector], vacant, vectors=[0] * 3, offsets=[0] * 3, is_vacant=True)
            arrays = jax.block_until_ready(operations.wait(*arrays))
            counts.append(library.emulation_num_events())
        assert counts[10] == counts[-1]
        for array in arrays:
            np.testing.assert_array_equal(array, vector)


class TestMarks(MarkSuite):
    @pytest.fixture
    def marks(self, library):
        return emulated_cuda.functions(library)

    @pytest.mark.parametrize("seed", seeds(10, quick=3))
    def test_no_order_that_the_events_allow_mixes_times(self, operations, library, marks, tokens, seed):
        library.emulation_seed(seed)
        self.test_copies_start_and_end_in_the_order_of_their_queue(operations, marks, tokens)
        self.test_a_program_starts_when_the_copy_that_it_waits_for_has_ended(operations, marks, tokens)

    def test_steps_of_the_engine_are_timed_by_events(self, library, operations, marks, monkeypatch):
        """The engine as it is on a GPU, with this library: the bits are the same, and the times fit the tasks."""
        # Of a width that no other test has: steps share programs, and other tests' call the CPU's library.
        width = 13
        params = {n: {"w": np.full((width, width), value, np.float32)} for n, value in zip("abc", (0.1, 0.2, 0.3))}
        loss_fn, batch = chain(), np.ones((4, width), np.float32)

        def train(num_steps, record_steps):
            step = jaxferry.train_step(
                loss_fn, optax.adam(1e-2), plan=plan, transport="ferry", record_steps=record_steps
            )
            state = step.init(params)
            for _ in range(num_steps):
                state, metrics = step(state, batch)
            state.block_until_ready()
            return step, state, float(metrics["loss"])

        modes = (Mode.RESIDENT, Mode.RELOAD, Mode.GFGB)
        plan = Plan("any", 1.0, tuple(LayerPlan(n, m, GradientPlace.DEVICE) for n, m in zip("abc", modes, strict=True)))
        expected = train(12, 3)[1:]
        ffi_call = jax.ffi.ffi_call
        names = {f"jaxferry_{name}" for name in ("ferry_load", "ferry_store", "ferry_wait", "ferry_vacate", "mark")}

        def emulated(name, *args, **kwargs):
            return ffi_call(name.replace("jaxferry_", "emulated_") if name in names else name, *args, **kwargs)

        monkeypatch.setattr(jax.ffi, "ffi_call", emulated)
        monkeypatch.setattr("jaxferry.transport.ferry.library", lambda platform: marks)
        monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
        library.emulation_seed(5)
        began_s = time.perf_counter()
        step, state, loss = train(12, 3)
        run = step.recorded()
        took_s = time.perf_counter() - began_s
        assert loss == expected[1]
        assert_same_bits(state.params, expected[0].params)
        assert run.schedule.steps == 3
        check_times(run)
        assert max(run.ends_s) <= took_s
        for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
            # Forward and backward of the last layer are one program.
            assert start < end or task.name == "backward c", task
        counts = []
        for _ in range(3):
            state = taken(step, state, batch, 5)
            state.block_until_ready()
            counts.append(library.emulation_num_events())
        assert counts[0] == counts[-1]


class TestSelfTest:
    """The self-test as it is on a GPU, with this library."""

    @pytest.fixture(autouse=True)
    def emulated(self, library, operations, monkeypatch):
        ffi_call = jax.ffi.ffi_call

        def call(name, *args, **kwargs):
            return ffi_call(name.replace("jaxferry_", "emulated_"), *args, **kwargs)

        monkeypatch.setattr(jax.ffi, "ffi_call", call)
        monkeypatch.setattr(self_test, "library", lambda platform: emulated_cuda.functions(library))

    @pytest.mark.parametrize("seed", range(3))
    def test_it_passes_in_any_order_that_the_events_allow(self, library, seed):
        library.emulation_seed(seed)
        results = self_test.run_self_test(jax.devices()[0], num_bytes=2**16)
        assert [(result.name, result.message) for result in results] == [(name, None) for name in self_test.CHECKS]

    def test_a_product_in_panels_that_are_wrong_is_found(self, monkeypatch):
        function = targets.dha_matmul_gradient

        def wrong(destination, x, dy, *args):
            return function(destination, x.at[3, 3].add(1), dy, *args)

        monkeypatch.setattr(targets, "dha_matmul_gradient", wrong)
        results = self_test.run_self_test(jax.devices()[0], num_bytes=2**16)
        assert [result.name for result in results if not result.passed] == ["gradient"]


UNPINNED, PINNED, DEVICE, ELSEWHERE = 0, 1, 2, -1


class TestLocations:
    """Operands in other memory than an operation expects are errors, not crashes of the device."""

    @pytest.fixture
    def place(self, library):
        def place(array, where):
            array.block_until_ready()
            library.emulation_place(ctypes.c_void_p(array.unsafe_buffer_pointer()), where)
            return array

        yield place
        library.emulation_forget_places()

    def test_copies_between_pinned_memory_and_the_device_are_queued(self, operations, place):
        vector, array = place(operations.host(numbers(1, 8)), PINNED), place(operations.device(numbers(0, 8)), DEVICE)
        (found,) = operations.wait(*operations.load([vector], [array], vectors=[0], offsets=[0]))
        np.testing.assert_array_equal(found, numbers(1, 8))

    @pytest.mark.parametrize(
        ("of_vector", "of_array", "message"),
        [
            (DEVICE, DEVICE, "the host vector must lie in pinned host memory, but lies in device memory"),
            (UNPINNED, DEVICE, "the host vector must lie in pinned .*, but lies in host memory that is not pinned"),
            (PINNED, PINNED, "the array must lie in device memory, but lies in pinned host memory"),
        ],
    )
    @pytest.mark.parametrize("direction", ["load", "store"])
    def test_a_copy_of_other_memory_is_refused(self, operations, place, direction, of_vector, of_array, message):
        vector = place(operations.host(np.zeros(8, np.float32)), of_vector)
        array = place(operations.device(np.zeros(8, np.float32)), of_array)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"ferry_{direction}: {message}"):
            if direction == "load":
                jax.block_until_ready(operations.load([vector], [array], vectors=[0], offsets=[0]))
            else:
                jax.block_until_ready(operations.ferry_store([array], vector, [0]))

    @pytest.mark.parametrize(
        ("where", "message"),
        [
            (DEVICE, "must lie in pinned host memory, but lies in device memory"),
            (ELSEWHERE, "lies in pinned host memory that the device cannot reach by its host address"),
        ],
    )
    def test_kernels_touch_only_what_they_reach(self, operations, place, where, message):
        x, dy = (operations.device(numbers(seed, (2, 8))) for seed in (1, 2))
        indices, rows = operations.device(np.zeros(1, np.int32)), operations.device(numbers(4, (1, 8)))
        gradient = operations.device(numbers(3, 64))
        calls = {
            "dha_gather": lambda vector: operations.gather(vector, indices, 0, 8, 8),
            "dha_read": lambda vector: operations.read(vector, [(8, 8)], [0]),
            "dha_matmul": lambda vector: operations.matmul(x, vector, (8, 8)),
            "gradient_store": lambda vector: operations.store(vector, gradient),
            "dha_matmul_gradient": lambda vector: operations.matmul_gradient(vector, x, dy),
            "row_store": lambda vector: operations.add_rows(vector, indices, rows, 0, 8),
        }
        for name, call in calls.items():
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}: .*{message}"):
                jax.block_until_ready(call(place(operations.host(numbers(0, 64)), where)))


class TestBenchmarks:
    """The link benchmarks run; their figures mean nothing here."""

    def test_each_operation_is_measured(self, bench):
        rates = [bench.matmul(3, False), bench.matmul(3, True), bench.matmul_gradient(2), bench.gather(10)]
        rates += [bench.gather(2, repeats=8)]
        rates += [bench.matmul_gradient(2, (8, 21), is_padded=True), bench.matmul(3, False, (21, 8), is_padded=True)]
        rates += [bench.device_put(), *(bench.store(*dtypes, True) for dtypes in link_rates.STORES)]
        assert all(rate.seconds > 0 and rate.plain_s > 0 for rate in rates)
        assert rates[0].num_bytes == 1 << 20
        assert rates[4].num_bytes == 2 * 2 * 2048

    def test_overlap_is_measured(self, bench, monkeypatch):
        monkeypatch.setattr(overlap, "SIDE", 128)
        found = [overlap.of_ferry(bench), overlap.of_device_put(bench, True), overlap.of_device_put(bench, False)]
        assert all(each.both_s > 0 for each in found)
