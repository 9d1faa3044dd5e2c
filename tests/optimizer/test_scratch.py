"""The scratch file: arrays of any place and size, its room, and its errors."""

import gc
import os

import numpy as np
import pytest

from jaxferry.errors import HostMemoryError, InputError, ScratchError
from jaxferry.optimizer import OnDiskArray, Scratch, scratch

BLOCK = 2**14


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_BLOCK_BYTES", BLOCK)
    return Scratch(tmp_path)


def array_on(file, values):
    made = OnDiskArray(file.region(values.nbytes), values.shape, values.dtype)
    made.write(values)
    return made


@pytest.mark.parametrize("size", [1, 1000, BLOCK // 4, BLOCK // 4 + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16"])
def test_arrays_keep_their_bits_beside_each_other(file, size, dtype):
    generator = np.random.default_rng(size)
    several = [generator.integers(0, 100, (size, 3)).astype(dtype) + number for number in range(3)]
    there = [array_on(file, values) for values in several]
    for values, stored in zip(several, there, strict=True):
        assert np.asarray(stored).tobytes() == values.tobytes()
        for start, stop in ((0, size), (size // 3, size // 2 + 1), (size - 1, size)):
            np.testing.assert_array_equal(stored[start:stop], values[start:stop])
            np.testing.assert_array_equal(stored[start:stop, 1:], values[start:stop, 1:])
        into = np.empty_like(values)
        stored.read(into)
        np.testing.assert_array_equal(into, values)


def test_room_is_free_once_nobody_holds_its_array(file):
    values = np.arange(BLOCK, dtype=np.float32)
    known = array_on(file, values)
    number = os.fstat(file._file).st_ino
    size = os.fstat(file._file).st_size
    for shift in range(5):
        other = array_on(file, values + shift)
        np.testing.assert_array_equal(other, values + shift)
        del other
        gc.collect()
    assert os.fstat(file._file).st_size == 2 * size
    assert os.fstat(file._file).st_ino == number
    np.testing.assert_array_equal(known, values)


def test_the_file_has_no_name(file, tmp_path):
    array_on(file, np.ones(BLOCK, np.float32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_file_that_nobody_holds_is_closed_and_warns_of_nothing(tmp_path):
    def descriptors():
        targets = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [target for target in targets if target.startswith(str(tmp_path))]

    made = Scratch(tmp_path)
    known = array_on(made, np.ones(BLOCK, np.float32))
    assert len(descriptors()) == 1
    del made
    gc.collect()
    assert len(descriptors()) == 1 and np.asarray(known).all()
    del known
    gc.collect()
    assert not descriptors()


def test_a_full_disk_is_told_before_anything_is_written_and_keeps_no_room(file, monkeypatch):
    kept = array_on(file, np.ones(BLOCK, np.float32))
    before = os.fstat(file._file).st_size

    def full(descriptor, start, size):
        """Takes what there is, as file systems do."""
        os.ftruncate(descriptor, start + size // 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match=r"scratch=.* has no room for a file of 128\.0 KiB: .*No space left"):
        array_on(file, np.ones(BLOCK, np.float32))
    assert os.fstat(file._file).st_size == before > 0
    assert np.asarray(kept).all()


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_takes_no_file_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"scratch must be a folder to write to, got '.*{folder}'"):
        Scratch(tmp_path / folder)


def test_a_file_that_ends_too_early_is_an_error(file):
    stored = array_on(file, np.arange(5 * BLOCK, dtype=np.float32))
    os.truncate(file._file, BLOCK)
    with pytest.raises(ScratchError, match="ends too early"):
        np.asarray(stored)


@pytest.mark.parametrize("at", [0, BLOCK + 1, 5 * BLOCK - 1])
def test_a_flipped_bit_is_an_error_when_its_block_is_read(file, at):
    values = np.arange(5 * BLOCK, dtype=np.uint8)
    stored = array_on(file, values)
    [byte] = os.pread(os.open(f"/proc/self/fd/{file._file}", os.O_RDONLY), 1, at)
    os.pwrite(os.open(f"/proc/self/fd/{file._file}", os.O_WRONLY), bytes([byte ^ 16]), at)
    with pytest.raises(ScratchError, match="is damaged: a block is not what was written"):
        np.asarray(stored)
    row = at // BLOCK * BLOCK
    with pytest.raises(ScratchError, match="is damaged"):
        stored[row : row + 1]
    other = (row + 2 * BLOCK) % (5 * BLOCK)
    np.testing.assert_array_equal(stored[other : other + 3], values[other : other + 3])
    stored.write(values)
    np.testing.assert_array_equal(stored, values)


def test_reads_and_writes_are_measured(file):
    read_s, write_s = file.seconds_a_byte()
    assert 0 < read_s < 1e-6
    assert 0 < write_s < 1e-6
