"""Elements of arrays that are stored in parts, or of which processes hold some each."""

import math
import threading
import types

import jax
import numpy as np
import pytest

from jaxferry.optimizer import LazyParameter, Pieces, Stored, pieces, stored_whole
from jaxferry.optimizer import optimizer as lazy_parameter
from jaxferry.partition import Part, Span
from jaxferry.transport import make_placement

INDICES = [..., slice(None), slice(2, 5), slice(0, 0), (slice(None), slice(1, 3)), (slice(1, 6), slice(0, 2)), (3, 1)]


class Processes:
    """Two processes, each a thread, that join arrays as `Placement.merged` does; remembers the arrays' bytes."""

    def __init__(self):
        self.num_bytes, self._arrays, self._barrier = [], [None, None], threading.Barrier(2, timeout=60)

    def placement(self, number):
        def merged(array):
            self._arrays[number] = array
            self._barrier.wait()
            joined = self._arrays[0] + self._arrays[1]
            self._barrier.wait()
            self.num_bytes.append(array.nbytes)
            return joined

        return types.SimpleNamespace(merged=merged)


def elements_of_two(array, index):
    """What each of two processes gets, and the bytes of each array that they have joined."""
    together, found = Processes(), [None, None]
    cuts = (0, array.size // 3, array.size)

    def run(number):
        span = Span(cuts[number], cuts[number + 1])
        parts = {span: array.reshape(-1)[span.start : span.stop]}
        found[number] = Stored(parts, array.shape, array.dtype).elements(together.placement(number), index)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, together.num_bytes


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("num_bytes", [4, 40, 10**6])
def test_two_processes_get_the_elements_of_the_whole_array(index, num_bytes, monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_BYTES", num_bytes)
    array = np.arange(42, dtype=np.float32).reshape(7, 3, 2)
    for found in elements_of_two(array, index)[0]:
        np.testing.assert_array_equal(found, array[index])


@pytest.mark.parametrize("index", [slice(2, 5), (slice(None), slice(1, 2)), slice(None)], ids=str)
def test_two_processes_gather_a_few_rows_at_a_time(index, monkeypatch):
    """Until now each piece of an export gathered the whole array."""
    array = np.arange(42, dtype=np.float32).reshape(7, 6)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2 * array[0].nbytes)
    num_bytes = elements_of_two(array, index)[1]
    assert max(num_bytes) <= 2 * array[0].nbytes
    assert sum(num_bytes) == 2 * (array[index].nbytes if isinstance(index, slice) else array.nbytes)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_of_parts_are_those_of_the_whole_array(index, axis):
    array = np.arange(math.prod((7, 3, 2)), dtype=np.float32).reshape(7, 3, 2)
    length = array.shape[axis]
    parts = {Part(number, length, axis): array.take(number, axis) for number in range(length)}
    np.testing.assert_array_equal(Stored(parts, array.shape, array.dtype).elements(None, index), array[index])


@pytest.mark.parametrize("shape", [(7, 3, 2), (11,), ()])
def test_a_lazy_parameter_is_read_a_few_rows_at_a_time_also_some_elements_of_it(shape, monkeypatch):
    monkeypatch.setattr(lazy_parameter, "_PIECE_BYTES", 50)
    whole, reads = np.random.default_rng(0).standard_normal(shape, np.float32), []

    def read(leaf, index, as_bytes):
        reads.append(whole[index].size)
        return whole[index]

    leaf = LazyParameter(read, 0, whole, whole)
    for start, stop in ((0, whole.size), (whole.size // 3, whole.size // 2 + 1)):
        made = np.full(stop - start, np.nan, np.float32)
        leaf.read_into(made, Span(start, stop))
        np.testing.assert_array_equal(made, whole.reshape(-1)[start:stop])
    made = np.full(shape, np.nan, np.float32)
    leaf.read_into(made)
    np.testing.assert_array_equal(made, whole)
    assert max(reads) * 4 <= 50


def test_pieces_are_cut_and_joined_along_their_axis_and_given_away_once():
    place, whole = make_placement(), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    parts = [Part(i, 3, 1) for i in range(3)]
    pieces = Pieces({"a": stored_whole(jax.device_put(whole, place.host))}, place)
    cut = {part: pieces.take(("a", part)) for part in parts}
    for part, array in cut.items():
        np.testing.assert_array_equal(array, whole[:, part.number])
    again = pieces.take(("a", parts[0]))
    assert again is not cut[parts[0]] and again.unsafe_buffer_pointer() != cut[parts[0]].unsafe_buffer_pointer()
    stored = {"a": Stored(cut, whole.shape, whole.dtype)}
    np.testing.assert_array_equal(Pieces(stored, place).take(("a", None)), whole)
    other = Pieces(stored, place).take(("a", Part(1, 2, 0)))
    np.testing.assert_array_equal(other, whole[1])
