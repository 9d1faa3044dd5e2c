"""How leaves are cut in files: in small chunks, in older checkpoints as they are; and the memory that it takes."""

import dataclasses
import json
import math
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
import pytest

from checkpoints import content, plain, stacked
from jaxferry import checkpoint
from jaxferry.checkpoint import arrays, leaves
from jaxferry.optimizer import Stored
from jaxferry.partition import Span
from python_runs import run_python

MIB = 2**20
SHAPES = [(), (1,), (17,), (4, 6), (3, 5, 7), (2, 1, 9), (7, 1), (1, 7), (5, 4, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_bytes", [4, 12, 40, 100, 10**6])
def test_chunks_are_small_and_follow_each_other_in_c_order(shape, num_bytes, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", num_bytes)
    elements = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    chunk = arrays.chunk_shape(shape, 4)
    found = [elements[index] for index in arrays.indices(shape, chunk)]
    np.testing.assert_array_equal(np.concatenate([each.reshape(-1) for each in found]), elements.reshape(-1))
    assert all(each.nbytes <= num_bytes for each in found)
    assert all(each.shape == chunk for each in found[:1])
    # No fewer would do along the axis that is cut, and what the last chunk lacks is less than one element a chunk.
    assert math.prod(chunk) * len(found) < elements.size * 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_elements", [1, 6, 50])
def test_pieces_of_any_chunks_are_whole_chunks_in_c_order(shape, num_elements):
    """As in older checkpoints, whose chunks were cut along any axis."""
    elements, rng = np.arange(math.prod(shape)).reshape(shape), np.random.default_rng(0)
    for _ in range(20):
        chunk = tuple(int(rng.integers(1, length + 1)) for length in shape)
        pieces = list(arrays.indices(shape, chunk, num_elements))
        found = np.concatenate([elements[piece].reshape(-1) for piece in pieces])
        np.testing.assert_array_equal(found, elements.reshape(-1))
        for piece in pieces:
            for cut, own, length in zip(piece, chunk, shape, strict=True):
                assert cut.start % own == 0
                assert cut.stop % own == 0 or cut.stop == length


def large(seed):
    """Leaves that small chunks cut along any axis, also where they are in parts."""
    rng = np.random.default_rng(seed)
    params = {f"['{i}']": rng.standard_normal(shape, dtype=np.float32) for i, shape in enumerate(SHAPES)}
    for axis in range(3):
        parts = [rng.standard_normal((3, 5), dtype=np.float32) for _ in range(4)]
        params[f"['stacked along {axis}']"] = stacked(parts, axis)
    params["['a number for each layer']"] = stacked([np.array(i / 8, np.float32) for i in range(4)], 0)
    paths = [[name[2:-2]] for name in params]
    return dataclasses.replace(content(), params=params, dtypes=["float32"] * len(params), dictionary_paths=paths)


@pytest.mark.parametrize("num_bytes", [12, 100])
def test_leaves_of_many_chunks_are_read_bit_by_bit_also_by_orbax_alone(num_bytes, monkeypatch, tmp_path):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", num_bytes)
    monkeypatch.setattr(leaves, "PIECE_BYTES", 2 * num_bytes)
    monkeypatch.setattr(arrays, "_FILE_BYTES", 2 * num_bytes)
    saved = large(num_bytes)
    checkpoint.save(saved, tmp_path / "saved")
    assert plain(checkpoint.load(tmp_path / "saved")) == plain(saved)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(tmp_path / "saved/save_0/arrays")
    for i, leaf in enumerate(saved.params.values()):
        for k, part in enumerate(leaf.arrays if isinstance(leaf, Stored) else (leaf,)):
            name = f"{i}.{k}" if isinstance(leaf, Stored) else str(i)
            np.testing.assert_array_equal(read["params"][name], part)


@pytest.mark.parametrize("placed", [2, 1 << 18])
def test_some_elements_of_a_leaf_are_read_also_where_it_was_stacked_along_any_axis(placed, monkeypatch, tmp_path):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 12)
    monkeypatch.setattr(leaves, "PIECE_BYTES", 24)
    monkeypatch.setattr(leaves, "_PLACED", placed)
    saved = large(0)
    checkpoint.save(saved, tmp_path / "saved")
    wholes = {name: leaf.array(None) if isinstance(leaf, Stored) else leaf for name, leaf in saved.params.items()}

    def check(stored):
        for name, leaf in stored.params.items():
            whole = np.asarray(wholes[name]).reshape(-1)
            for start, stop in ((0, whole.size), (whole.size // 3, whole.size // 2), (whole.size - 1, whole.size)):
                made = np.full(stop - start, np.nan, np.float32)
                leaf.read_into(made, Span(start, stop))
                np.testing.assert_array_equal(made, whole[start:stop], name)

    checkpoint.load(tmp_path / "saved", check)


@pytest.mark.parametrize("num_bytes", [12, 100])
def test_checkpoints_with_orbax_own_chunks_are_still_read(num_bytes, monkeypatch, tmp_path):
    """Until chunks were cut here, Orbax cut leaves that were larger than a file along their longest axes."""
    saved = large(num_bytes)
    handlers = ocp.type_handlers
    plain_ones = handlers.create_type_handler_registry((np.ndarray, handlers.NumpyHandler()))
    with (
        mock.patch.object(arrays, "_FILE_BYTES", num_bytes),
        mock.patch.object(arrays, "_by_chunks", lambda failures: plain_ones),
    ):
        checkpoint.save(saved, tmp_path / "saved")
    assert tuple(stored(tmp_path, "params.4").chunk_layout.read_chunk.shape) != arrays.chunk_shape((3, 5, 7), 4)
    monkeypatch.setattr(leaves, "PIECE_BYTES", 4)
    assert plain(checkpoint.load(tmp_path / "saved")) == plain(saved)


def stored(folder, name):
    return leaves.open_one(folder / "saved/save_0/arrays", name)


PEAKS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxferry

def memory(name):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

class Drawn:
    dtype = np.dtype(np.float32)

    def __init__(self, shape):
        self.shape = tuple(shape)

    def read_into(self, made, span=None):
        rng, flat = np.random.default_rng(0), made.reshape(-1)
        for first in range(0, flat.size, 2**20):
            flat[first : first + 2**20] = rng.standard_normal(flat[first : first + 2**20].size, np.float32)

def loss(params, x):
    return jnp.mean(params["l"] * x)

def peaks(path, leaf):
    step = jaxferry.train_step(loss, optax.sgd(1e-4))
    state = step.init({"l": leaf})
    for way in ("save", "restore"):
        open("/proc/self/clear_refs", "w").write("5")  # the peak is that from now on
        before = memory("VmRSS")
        kept = step.save(state, path) if way == "save" else step.restore(path)
        yield memory("VmHWM") - before - (0 if kept is None else sum(master.nbytes for master in kept.masters()))
        del state
        state = kept

path, *shapes = sys.argv[1:]
list(peaks(path + "-small", np.ones((8, 8), np.float32)))  # what JAX and TensorStore take themselves
print([list(peaks(path + str(i), Drawn(json.loads(shape)))) for i, shape in enumerate(shapes)])
"""


@pytest.mark.slow
def test_saving_and_restoring_a_large_leaf_takes_no_more_than_a_piece(tmp_path):
    """128 MiB of numbers that do not get smaller when encoded; a piece is at most 64 MiB."""
    shapes = [(2, 4096, 4096), (32 * MIB,)]
    peaks = json.loads(run_python("-c", PEAKS, tmp_path / "saved", *map(list, shapes)))
    assert len(peaks) == len(shapes) and all(0 < max(each) <= 96 * MIB for each in peaks), peaks
