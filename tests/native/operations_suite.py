"""What every implementation of the operations must do, against NumPy. Subclasses give a fixture `operations`."""

import itertools
import math
import time

import jax
import numpy as np
import pytest

from native.native_operations import DTYPES, check_product, check_same, numbers
from pairwise import pairwise

ALL = pytest.mark.parametrize("dtype", list(DTYPES))


class CopySuite:
    @ALL
    @pytest.mark.parametrize(("rows", "columns", "offset"), [(7, 64, 8), (5, 33, 3), (4, 1, 1), (1, 700, 0)])
    def test_a_gather_returns_the_rows_of_its_indices_and_nan_outside(self, operations, dtype, rows, columns, offset):
        vector = numbers(0, offset + rows * columns + 2, dtype)
        indices = np.array([[0, rows - 1, -1], [rows, rows // 2, 0]], np.int32)
        found = operations.gather(operations.host(vector), operations.device(indices), offset, rows, columns)
        table = vector[offset : offset + rows * columns].reshape(rows, columns)
        inside = (indices >= 0) & (indices < rows)
        expected = np.where(inside[..., None], table[np.clip(indices, 0, rows - 1)], np.array(np.nan, vector.dtype))
        check_same(found, expected)

    @ALL
    def test_a_gather_returns_repeated_rows_wherever_they_are_asked_for(self, operations, dtype):
        table, generator = numbers(1, (7, 1100), dtype), np.random.default_rng(3)
        indices = generator.integers(-1, 7, (3, 200)).astype(np.int32)
        found = operations.gather(operations.host(table.reshape(-1)), operations.device(indices), 0, 7, 1100)
        expected = np.where((indices >= 0)[..., None], table[indices], np.array(np.nan, table.dtype))
        check_same(found, expected)

    def test_a_gather_of_no_rows_is_empty(self, operations):
        indices = operations.device(np.zeros((0,), np.int32))
        found = operations.gather(operations.host(numbers(0, 12)), indices, 0, 3, 4)
        assert found.shape == (0, 4)

    @ALL
    def test_a_read_returns_each_range_whatever_its_size(self, operations, dtype):
        vector = numbers(1, 70_001, dtype)
        shapes, offsets = [(3,), (5, 7), (), (0,), (40_000,), (64,)], [1, 10, 69_999, 5, 30_000, 64]
        found = operations.read(operations.host(vector), shapes, offsets)
        for array, shape, offset in zip(found, shapes, offsets):
            check_same(array, vector[offset : offset + int(np.prod(shape))].reshape(shape))

    def test_many_small_reads_all_arrive(self, operations):
        vector = numbers(2, 3000)
        offsets = list(range(0, 3000, 10))
        found = operations.read(operations.host(vector), [(7,)] * len(offsets), offsets)
        for array, offset in zip(found, offsets):
            check_same(array, vector[offset : offset + 7])

    @pytest.mark.parametrize(
        ("dtype", "added", "place"),
        pairwise(DTYPES, itertools.product(DTYPES, (False, True)), [(0, 64), (3, 9001), (1, 5), (7, 0)]),
    )
    def test_a_store_writes_or_adds_its_range_alone_and_in_place(self, operations, dtype, added, place):
        (kind, accumulate), (offset, size) = added, place
        before, gradient = numbers(3, offset + size + 17, dtype), numbers(4, size, kind)
        destination = operations.host(before)
        address = destination.unsafe_buffer_pointer()
        found = operations.store(destination, operations.device(gradient), offset, accumulate)
        expected = before.copy()
        place = slice(offset, offset + size)
        sums = before[place].astype(np.float32) + gradient.astype(np.float32)
        expected[place] = (sums if accumulate else gradient.astype(np.float32)).astype(before.dtype)
        check_same(found, expected)
        assert found.unsafe_buffer_pointer() == address or not operations.is_in_place
        assert found.sharding.memory_kind == "pinned_host"

    @pytest.mark.parametrize(
        ("dtype", "kind", "place"), pairwise(DTYPES, DTYPES, [(9, 64, 8), (6, 33, 3), (5, 2056, 16)])
    )
    def test_rows_are_added_where_their_indices_say(self, operations, dtype, kind, place):
        rows, columns, offset = place
        before = numbers(20, offset + rows * columns + 5, dtype)
        indices, added = np.array([rows - 1, -1, 0, rows, 2], np.int32), numbers(21, (5, columns), kind)
        destination = operations.host(before)
        address = destination.unsafe_buffer_pointer()
        found = operations.add_rows(destination, operations.device(indices), operations.device(added), offset, rows)
        table = before[offset : offset + rows * columns].reshape(rows, columns).copy()
        for index, row in zip(indices, added):
            if 0 <= index < rows:
                table[index] = (table[index].astype(np.float32) + row.astype(np.float32)).astype(before.dtype)
        expected = before.copy()
        expected[offset : offset + rows * columns] = table.reshape(-1)
        check_same(found, expected)
        assert found.unsafe_buffer_pointer() == address or not operations.is_in_place


class ProductSuite:
    @pytest.mark.parametrize(
        ("dtype", "kind", "transpose", "sizes"),
        pairwise(DTYPES, DTYPES, (False, True), [(3, 64, 96, 8), (1, 300, 70, 0), (13, 37, 41, 5)]),
    )
    def test_a_product_is_that_of_the_weight_as_x_has_it(self, operations, dtype, kind, transpose, sizes):
        m, k, n, offset = sizes
        vector, x = numbers(5, offset + k * n + 3, kind), numbers(6, (m, k), dtype)
        w = vector[offset : offset + k * n].reshape((n, k) if transpose else (k, n)).astype(DTYPES[dtype])
        options = {"offset": offset, "transpose": transpose}
        # Two halves of a few columns each: several panels, the last one short.
        scratch_bytes = 2 * 24 * (k * 8 + 512)
        found = operations.matmul(
            operations.device(x), operations.host(vector), (k, n), scratch_bytes=scratch_bytes, **options
        )
        assert found.dtype == x.dtype
        check_product(found, x, w.T if transpose else w, dtype, operations.product_epsilon[dtype])

    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize(
        ("m", "k", "n", "dtype", "kind"),
        [
            # Narrow panels of rows that start anywhere, and wide ones that a copy engine reads.
            (3, 37, 1001, "bfloat16", "bfloat16"),
            (2, 5, 6003, "float32", "float32"),
        ],
    )
    def test_padded_rows_of_odd_products_change_nothing(self, operations, transpose, m, k, n, dtype, kind):
        vector, x = numbers(5, 3 + k * n, kind), numbers(6, (m, k), dtype)
        w = vector[3:].reshape((n, k) if transpose else (k, n)).astype(DTYPES[dtype])
        padded, width = np.pad(x, [(0, 0), (0, -k % 8)]), n + -n % 8
        # What the scratch held before, NaN, must not reach a sum.
        scratch = operations.device(np.full(2 * 700 * (k + 7) * 8, 255, np.uint8))
        found = operations.matmul(
            operations.device(padded),
            operations.host(vector),
            (k, n),
            offset=3,
            transpose=transpose,
            scratch=scratch,
            width=width,
        )
        assert found.shape == (m, width)
        check_product(np.asarray(found)[:, :n], x, w.T if transpose else w, dtype, operations.product_epsilon[dtype])

    @pytest.mark.parametrize(
        ("transpose", "kind", "accumulate"), pairwise((False, True), ("bfloat16", "float32"), (False, True))
    )
    def test_padded_rows_of_odd_gradients_change_nothing(self, operations, transpose, kind, accumulate):
        (m, k, n), generator = (6, 37, 101), np.random.default_rng(11)
        x, dy = (generator.integers(-9, 9, (m, size)).astype(DTYPES["bfloat16"]) for size in (k, n))
        before = generator.integers(-9, 9, 3 + k * n + 7).astype(DTYPES[kind])
        found = operations.matmul_gradient(
            operations.host(before),
            *(operations.device(np.pad(a, [(0, 0), (0, -a.shape[1] % 8)])) for a in (x, dy)),
            (k, n),
            offset=3,
            transpose=transpose,
            accumulate=accumulate,
            scratch_bytes=2 * 16 * 110 * 8,
        )
        product = x.astype(np.float32).T @ dy.astype(np.float32)
        product = (product.T if transpose else product).reshape(-1)
        expected, place = before.copy(), slice(3, 3 + k * n)
        expected[place] = (product + (before[place].astype(np.float32) if accumulate else 0)).astype(before.dtype)
        check_same(found, expected)

    @pytest.mark.parametrize("leading", [(2, 3, 4), ()])
    def test_leading_dimensions_stay_and_float32_results_keep_what_bfloat16_loses(self, operations, leading):
        x, w = numbers(7, (*leading, 48), "bfloat16"), numbers(8, (48, 40), "bfloat16")
        vector = operations.host(w.reshape(-1))
        found = operations.matmul(operations.device(x), vector, (48, 40), result="float32")
        assert found.shape == (*leading, 40)
        assert found.dtype == np.float32
        check_product(found, x, w, "float32", operations.product_epsilon["bfloat16"])

    @pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
    def test_an_empty_product_is_empty_or_zero(self, operations, m, k, n):
        x, vector = operations.device(np.ones((m, k), np.float32)), operations.host(np.ones(k * n + 1, np.float32))
        found = operations.matmul(x, vector, (k, n))
        np.testing.assert_array_equal(found, np.zeros((m, n), np.float32))

    @pytest.mark.parametrize("transpose", [False, True])
    def test_the_number_of_panels_changes_nothing(self, operations, transpose):
        k, n = 40, 300
        x, vector = operations.device(numbers(9, (20, k))), operations.host(numbers(10, k * n))
        one, many = (
            operations.matmul(x, vector, (k, n), transpose=transpose, scratch_bytes=size)
            for size in (1 << 20, 2 * 16 * k * 4)
        )
        # cuBLASLt may choose another algorithm for panels of another size.
        epsilon = operations.product_epsilon["float32"]
        np.testing.assert_allclose(one, many, atol=epsilon * k, rtol=epsilon)

    @pytest.mark.parametrize(
        ("dtype", "added", "transpose", "sizes"),
        pairwise(
            DTYPES,
            itertools.product(DTYPES, (False, True), (None, "bfloat16")),
            (False, True),
            [(40, 48, 40, 0), (40, 33, 65, 3), (1, 5, 9, 1)],
        ),
    )
    def test_a_gradient_of_a_product_lands_in_its_range(self, operations, dtype, added, transpose, sizes):
        (kind, accumulate, round_to), (m, k, n, offset) = added, sizes
        # Whole numbers: their sums are the same in any order, so that rounding can be checked to the bit.
        generator = np.random.default_rng(11)
        x, dy = (generator.integers(-9, 9, (m, size)).astype(DTYPES[dtype]) for size in (k, n))
        before = generator.integers(-9, 9, offset + k * n + 7).astype(DTYPES[kind])
        destination = operations.host(before)
        address = destination.unsafe_buffer_pointer()
        found = operations.matmul_gradient(
            destination,
            operations.device(x),
            operations.device(dy),
            offset=offset,
            transpose=transpose,
            accumulate=accumulate,
            round_to=round_to,
            scratch_bytes=2 * 16 * max(k, n) * 4,
        )
        product = (x.astype(np.float32).T @ dy.astype(np.float32)).astype(DTYPES[round_to or "float32"])
        product = (product.T if transpose else product).astype(np.float32).reshape(-1)
        expected = before.copy()
        place = slice(offset, offset + k * n)
        expected[place] = (product + (before[place].astype(np.float32) if accumulate else 0)).astype(before.dtype)
        check_same(found, expected)
        assert found.unsafe_buffer_pointer() == address or not operations.is_in_place

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_the_gradient_of_no_rows_is_zero(self, operations, accumulate):
        before = numbers(12, 20)
        x, dy = (operations.device(np.zeros((0, size), np.float32)) for size in (4, 3))
        found = operations.matmul_gradient(operations.host(before), x, dy, offset=2, accumulate=accumulate)
        expected = before.copy()
        expected[2:14] = before[2:14] if accumulate else 0
        check_same(found, expected)


class PanelSuite(ProductSuite):
    """Products that cross the link in panels, for which a scratch must have room."""

    @pytest.mark.parametrize(
        ("kind", "accumulate", "item_bytes"), [("bfloat16", False, 2), ("bfloat16", True, 4), ("float32", False, 4)]
    )
    def test_a_gradient_that_nothing_is_added_to_leaves_in_its_own_dtype(
        self, operations, kind, accumulate, item_bytes
    ):
        x, dy = (operations.device(np.ones((2, size), DTYPES["bfloat16"])) for size in (3, 1024))
        destination = operations.host(np.zeros(3 * 1024, DTYPES[kind]))
        message = f"scratch must hold two rows of the gradient, at least {2 * 1024 * item_bytes} bytes"
        with pytest.raises(Exception, match=f"dha_matmul_gradient: {message}"):
            jax.block_until_ready(
                operations.matmul_gradient(destination, x, dy, accumulate=accumulate, scratch_bytes=1000)
            )

    def test_a_scratch_for_no_panel_is_an_error_that_says_how_much_is_needed(self, operations):
        x, vector = operations.device(np.ones((4, 1000), np.float32)), operations.host(np.ones(3000, np.float32))
        with pytest.raises(Exception, match=r"dha_matmul: scratch must hold two columns of w, at least 8192 bytes"):
            jax.block_until_ready(operations.matmul(x, vector, (1000, 3), scratch_bytes=7000))


class FerrySuite:
    def test_a_load_arrives_by_the_time_that_a_wait_is_over(self, operations):
        first, second = numbers(13, 5000), numbers(14, 900)
        vectors = [operations.host(first), operations.host(second)]
        arrays = [operations.device(np.zeros(shape, np.float32)) for shape in ((40, 100), (300,), (7,))]
        addresses = [array.unsafe_buffer_pointer() for array in arrays]
        loaded = operations.load(vectors, arrays, vectors=[0, 1, 0], offsets=[1000, 600, 3])
        found = operations.wait(*loaded)
        check_same(found[0], first[1000:].reshape(40, 100))
        check_same(found[1], second[600:])
        check_same(found[2], first[3:10])
        assert [array.unsafe_buffer_pointer() for array in found] == addresses

    def test_loads_into_vacant_arrays_follow_each_other(self, operations):
        values = [numbers(20 + i, 500) for i in range(6)]
        vectors = [operations.host(value) for value in values]
        arrays = [operations.device(np.zeros(shape, np.float32)) for shape in ((10, 20), (300,))]
        addresses = [array.unsafe_buffer_pointer() for array in arrays]
        for value, vector in zip(values, vectors):
            vacant = operations.vacate(*arrays)
            arrays = operations.wait(
                *operations.load([vector], vacant, vectors=[0, 0], offsets=[0, 200], is_vacant=True)
            )
            check_same(arrays[0], value[:200].reshape(10, 20))
            check_same(arrays[1], value[200:])
            assert [array.unsafe_buffer_pointer() for array in arrays] == addresses

    @pytest.mark.parametrize("accumulate", [False, True])
    @ALL
    def test_a_store_is_there_by_the_time_that_a_wait_is_over(self, operations, dtype, accumulate):
        before, values = numbers(15, 500, dtype), [numbers(16, (30, 5), dtype), numbers(17, 77, dtype)]
        arrays = [operations.device(value) for value in values]
        (found,) = operations.wait(operations.ferry_store(arrays, operations.host(before), [301, 11], accumulate))
        expected = before.copy()
        for value, offset in zip(values, (301, 11)):
            place = slice(offset, offset + value.size)
            old = before[place].astype(np.float32) if accumulate else np.float32(0)
            expected[place] = (value.astype(np.float32).reshape(-1) + old).astype(before.dtype)
        check_same(found, expected)

    def test_random_loads_and_stores_are_as_if_done_in_order(self, operations):
        generator = np.random.default_rng(18)
        twins = [generator.standard_normal(200).astype(np.float32) for _ in range(4)]
        hosts, sources = [operations.host(twin) for twin in twins], []
        for step in range(40):
            source, target = generator.choice(4, 2, replace=False)
            offset, size = int(generator.integers(0, 100)), int(generator.integers(1, 100))
            array = operations.device(np.zeros(size, np.float32))
            # What was stored must be there before it is loaded: the queues do not wait for each other.
            (array,) = operations.load([hosts[source]], [array], vectors=[0], offsets=[offset])
            (array,) = operations.wait(array)
            sources.append(array)  # must outlive the copy, which the wait below only asks for
            place = int(generator.integers(0, 200 - size))
            hosts[target] = operations.ferry_store([array], hosts[target], [place], accumulate=bool(step % 2))
            (hosts[target],) = operations.wait(hosts[target])
            moved = twins[source][offset : offset + size]
            old = twins[target][place : place + size] if step % 2 else 0
            twins[target][place : place + size] = moved + old
        for host, twin in zip(hosts, twins):
            check_same(host, twin)


class MarkSuite:
    """Subclasses also give `marks`: the library's functions, a `NativeLibrary`."""

    @pytest.fixture
    def tokens(self, operations, marks):
        """Makes tokens whose lists are open; they keep three marks."""
        made = []

        def make(num_kept=3):
            made.append(operations.token())
            marks.open_marks(made[-1].unsafe_buffer_pointer(), num_kept)
            return made[-1]

        # Otherwise unmarked copies of other tests would belong to the first mark here.
        jax.block_until_ready([operations.mark(operations.token(), queue=queue) for queue in (1, 2)])
        yield make
        for token in made:
            marks.close_marks(token.unsafe_buffer_pointer())

    def read(self, marks, *named):
        marks.synchronize()
        addresses = [token.unsafe_buffer_pointer() for token, _ in named]
        return marks.read_marks(addresses, [number for _, number in named])

    def test_programs_end_on_the_hosts_clock_and_start_when_the_one_before_has_ended(self, operations, marks, tokens):
        token, other = tokens(), tokens()
        jax.block_until_ready(operations.mark(other))
        for number in range(3):
            time.sleep(0.01)
            before_s = time.perf_counter()
            jax.block_until_ready(operations.mark(token, operations.device(np.zeros(3, np.float32))))
            after_s = time.perf_counter()
            previous = (other, 0) if number == 0 else (token, number - 1)
            [(_, previous_s), (start_s, end_s)] = self.read(marks, previous, (token, number))
            assert before_s - 1e-3 <= end_s <= after_s + 1e-3
            assert start_s == pytest.approx(previous_s, abs=1e-4)

    def test_copies_start_and_end_in_the_order_of_their_queue(self, operations, marks, tokens):
        load_tokens, store_tokens, size = [tokens() for _ in range(4)], [tokens() for _ in range(4)], 1 << 16
        vectors = [operations.host(numbers(seed, size)) for seed in range(4)]
        arrays = [operations.device(np.zeros(size, np.float32)) for _ in range(4)]
        out = [operations.host(np.zeros(size, np.float32)) for _ in range(4)]
        begin_s = time.perf_counter()
        for i in range(4):
            [arrays[i]] = operations.load([vectors[i]], [arrays[i]], vectors=[0], offsets=[0])
            jax.block_until_ready(operations.mark(load_tokens[i], arrays[i], queue=1))
        for i in range(4):
            [arrays[i]] = operations.wait(arrays[i])
            out[i] = operations.ferry_store([arrays[i]], out[i], [0])
            jax.block_until_ready(operations.mark(store_tokens[i], out[i], queue=2))
        for found, vector in zip(out, vectors):
            [found] = operations.wait(found)
            check_same(found, vector)
        loads, stores = (self.read(marks, *((t, 0) for t in of)) for of in (load_tokens, store_tokens))
        end_s = time.perf_counter()  # now: a copy that has arrived may be marked a little later
        for spans in (loads, stores):
            edges = [edge for span in spans for edge in span]
            assert all(a <= b + 1e-6 for a, b in itertools.pairwise(edges))
            assert begin_s - 1e-3 <= edges[0] and edges[-1] <= end_s + 1e-3
        assert all(load[1] <= store[0] + 1e-6 for load, store in zip(loads, stores))

    def test_a_program_starts_when_the_copy_that_it_waits_for_has_ended(self, operations, marks, tokens):
        load, program = tokens(), tokens()
        vector, array = operations.host(numbers(0, 1 << 16)), operations.device(np.zeros(1 << 16, np.float32))
        jax.block_until_ready(operations.mark(program))
        [array] = operations.load([vector], [array], vectors=[0], offsets=[0])
        jax.block_until_ready(operations.mark(load, array, queue=1))
        [array] = operations.wait(array)
        jax.block_until_ready(operations.mark(program, array))
        [(_, loaded_s), (_, before_s), (start_s, end_s)] = self.read(marks, (load, 0), (program, 0), (program, 1))
        assert loaded_s <= start_s + 1e-6 <= end_s + 2e-6
        assert before_s <= start_s

    def test_several_copies_have_one_mark_from_the_first_start_on(self, operations, marks, tokens):
        token, array = tokens(), operations.device(np.zeros(64, np.float32))
        out = [operations.host(np.zeros(64, np.float32)) for _ in range(2)]
        before_s = time.perf_counter()
        out = [operations.ferry_store([array], vector, [0]) for vector in out]
        jax.block_until_ready(out)
        time.sleep(0.01)
        jax.block_until_ready(operations.mark(token, *out, queue=2))
        operations.wait(*out)
        [(start_s, end_s)] = self.read(marks, (token, 0))
        assert before_s - 1e-3 <= start_s <= end_s

    def test_marks_that_are_not_there_are_no_numbers(self, operations, marks, tokens):
        token, closed = tokens(2), operations.token()
        marks.open_marks(closed.unsafe_buffer_pointer(), 5)
        for _ in range(4):
            jax.block_until_ready([operations.mark(token), operations.mark(closed)])
        marks.close_marks(closed.unsafe_buffer_pointer())
        jax.block_until_ready(operations.mark(closed))
        asked = [(token, 0), (token, 1), (token, 4), (token, -1), (closed, 0), (operations.token(), 0)]
        assert all(math.isnan(time_s) for span in self.read(marks, *asked) for time_s in span)
        [third, fourth] = self.read(marks, (token, 2), (token, 3))
        assert third[1] <= fourth[1]

    def test_a_mark_of_a_queue_that_is_none_is_an_error(self, operations):
        with pytest.raises(Exception, match=r"mark: queue must be 0 .the program., 1 .loads. or 2 .stores., got 3"):
            jax.block_until_ready(operations.mark(operations.token(), queue=3))
