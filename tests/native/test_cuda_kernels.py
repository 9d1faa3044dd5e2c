"""The CUDA library's kernels, and how it cuts a matrix into panels, on an emulated device."""

import ctypes
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from benchmarks.gpu import link_rates


@pytest.fixture(scope="session")
def library(emulated_library):
    return emulated_library


RESULTS = pathlib.Path(link_rates.__file__).parents[1] / "results" / "gpu" / "h200"


def cut_into_panels(library, *sizes):
    found = (ctypes.c_int64 * 5)()
    library.emulation_cut_into_panels(*map(ctypes.c_int64, sizes), found)
    return list(found)


@hypothesis.given(
    total=st.integers(1, 1 << 40),
    slice_bytes=st.integers(2, 1 << 20),
    cast_bytes=st.sampled_from([0, 2, 64, 8192, 1 << 21]),
    scratch=st.integers(0, 1 << 32),
    width=st.integers(0, 1 << 20),
)
def test_panels_fit_into_the_scratch_and_cover_every_slice(library, total, slice_bytes, cast_bytes, scratch, width):
    sizes = (total, slice_bytes, cast_bytes, scratch, width, 132)
    num_slices, half_bytes, cast_offset, least_scratch, padded = cut_into_panels(library, *sizes)
    assert 0 <= num_slices <= total
    assert 2 * half_bytes <= scratch
    # A panel's rows may be padded to a multiple of eight, unless the scratch has no room for that.
    assert num_slices <= padded <= -(-num_slices // 8) * 8
    assert padded * slice_bytes <= cast_offset
    assert padded * slice_bytes <= half_bytes
    if num_slices and 8 * (slice_bytes + cast_bytes) * (num_slices // 8 + 1) + 255 <= half_bytes:
        assert padded % 8 == 0
    if cast_bytes and num_slices:
        assert cast_offset % 256 == 0
        assert cast_offset + padded * cast_bytes <= half_bytes
    # The least scratch that the error asks for is enough, and less than two slices is not.
    if scratch >= least_scratch:
        assert num_slices >= 1
    if scratch < 2 * (slice_bytes + cast_bytes):
        assert num_slices == 0
    if 128 <= num_slices < total:
        assert num_slices % 128 == 0


@hypothesis.given(rows=st.integers(1, 1 << 20), width=st.integers(1, 1 << 17), num_multiprocessors=st.integers(1, 200))
@hypothesis.example(rows=50_257, width=1024, num_multiprocessors=132)
def test_no_panel_of_a_gradient_leaves_room_for_more_tiles(library, rows, width, num_multiprocessors):
    """Tiles of 256 by 128; a panel has up to twice the rows that it would have otherwise."""

    def idle(num_rows):
        tiles = -(-num_rows // 256) * -(-width // 128)
        return -tiles % num_multiprocessors

    (before, *_), (found, *_) = (
        cut_into_panels(library, rows, 2 * width, 0, 1 << 40, given, num_multiprocessors) for given in (0, width)
    )
    assert before <= found <= min(rows, 2 * before)
    if found < min(rows, 2 * before):
        assert idle(found) < -(-width // 128)
    if (rows, width) == (50_257, 1024):
        assert (before, found) == (3328, 4096)


def test_panels_are_read_by_what_an_h200_reads_them_faster_with(library):
    measured = json.loads((RESULTS / "link_and_memory.json").read_text())["panels_of_a_matrix"]
    for panel in measured:
        is_faster = panel["engine_gb_per_s"] > panel["kernel_of_8_blocks_gb_per_s"]
        sizes = (ctypes.c_int64(panel["row_bytes"]), ctypes.c_int64(panel["pitch_bytes"]))
        assert library.emulation_is_for_copy_engine(*sizes) == is_faster, panel


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    num_rows=st.integers(1, 40),
    row_size=st.integers(1, 700),
    skipped=st.integers(0, 9),
    more=st.tuples(st.integers(0, 300), st.integers(0, 9)),
    is_aligned=st.booleans(),
)
def test_rows_are_read_whatever_their_alignment(library, num_rows, row_size, skipped, more, is_aligned):
    if is_aligned:
        row_size, skipped, more = 8 * -(-row_size // 8), 0, tuple(8 * (size // 8) for size in more)
    source_pitch, pitch = row_size + more[0], row_size + more[1]
    source = np.random.default_rng(0).integers(0, 1 << 16, skipped + num_rows * source_pitch).astype(np.uint16)
    matrix = np.lib.stride_tricks.as_strided(source[skipped:], (num_rows, row_size), (2 * source_pitch, 2))
    # Aligned memory, and a last row that ends with its numbers: nothing behind it may be read or written.
    found = np.zeros((num_rows, pitch), np.uint16)
    sizes = (num_rows, 2 * row_size, 2 * source_pitch, 2 * pitch)
    pointers = (ctypes.c_void_p(source.ctypes.data + 2 * skipped), ctypes.c_void_p(found.ctypes.data))
    library.emulation_read_rows(*pointers, *map(ctypes.c_int64, sizes))
    np.testing.assert_array_equal(found[:, :row_size], matrix)
    assert not found[:, row_size:].any()


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    rows=st.integers(1, 60),
    columns=st.sampled_from([1, 31, 40, 128, 129, 1000]),
    num_indices=st.integers(1, 300),
    seed=st.integers(0, 3),
)
@hypothesis.example(rows=5, columns=40, num_indices=1, seed=0)
@hypothesis.example(rows=900, columns=130, num_indices=1100, seed=1)
def test_a_lookup_reads_each_distinct_row_of_the_table_once(library, rows, columns, num_indices, seed):
    """More stretches of rows than the 32 warps look up in one step, as many, and fewer."""
    table = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns) + 1
    indices = np.random.default_rng(seed).integers(-1, rows + 1, num_indices).astype(np.int32)
    inside, names = (indices >= 0) & (indices < rows), [*indices]
    is_first = np.array([names.index(index) == i for i, index in enumerate(indices)]) & inside
    first = np.full(rows, 0x7F7F7F7F, np.int32)
    first[indices[is_first]] = np.flatnonzero(is_first)
    result = np.full((num_indices, columns), 99_999_999, np.uint32)
    sizes = [ctypes.c_int64(size) for size in (num_indices, rows, columns)]

    def run(table, is_repeated):
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (indices, result, first)]
        library.emulation_gather(ctypes.c_void_p(table), *arrays, *sizes, is_repeated)

    expected = np.where(inside[:, None], table[np.clip(indices, 0, rows - 1)], 0)
    run(table.ctypes.data, 0)
    np.testing.assert_array_equal(result[is_first | ~inside], expected[is_first | ~inside])
    assert (result[inside & ~is_first] == 99_999_999).all()
    result[is_first] += 7
    run(None, 1)  # without the table, and from the rows that were read: nothing of it is read again
    np.testing.assert_array_equal(result, expected + 7 * inside[:, None].astype(np.uint32))
