"""Small checkpoints, without a model, and what they hold compared bit by bit."""

import dataclasses
import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.checkpoint import Checkpoint
from jaxferry.optimizer import Stored
from jaxferry.partition import Part


def content(seed=0, step=None):
    """Leaves of all kinds: in parts, without elements, 16-bit, a PRNG key, a scalar; one is big enough for a file."""
    rng = np.random.default_rng(seed)
    w, v = (rng.standard_normal((4, 4), dtype=np.float32) for _ in range(2))
    return Checkpoint(
        step=seed if step is None else step,
        params={
            "['a']['none']": np.zeros((0, 3), np.float32),
            "['a']['v']": v,
            "['a']['w']": w,
            "['b']['half']": rng.standard_normal((3, 5)).astype(jnp.bfloat16),
            "['b']['layers']": stacked([rng.standard_normal((8, 64), dtype=np.float32) for _ in range(3)], 1),
        },
        dtypes=["float32", "float32", "float32", "bfloat16", "float32"],
        dictionary_paths=[["a", "none"], ["a", "v"], ["a", "w"], ["b", "half"], ["b", "layers"]],
        optimizer={"[0].count": np.int32(seed), "[0].mu": w + 1, "key": jax.random.key(seed)},
        loss_scale=[1024.0, seed],
        extra={"memory": rng.standard_normal((2, 3), dtype=np.float32)},
    )


def stacked(parts, axis):
    """An array that is stored in these parts along an axis."""
    whole = np.stack(parts, axis)
    return Stored({Part(i, len(parts), axis): part for i, part in enumerate(parts)}, whole.shape, whole.dtype)


def earlier(folder):
    """Unpacks checkpoints that were written before saves were numbered: `processes` (two), `series/00000001`."""
    data = pathlib.Path(__file__).parents[1] / "checkpoint" / "written_before_numbered_saves.tar.xz"
    with tarfile.open(data) as opened:
        opened.extractall(folder / "earlier", filter="data")
    return folder / "earlier"


def plain(saved):
    """A checkpoint as dictionaries, lists and bytes, which compare by `==`."""
    fields = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)}
    for part in ("params", "optimizer", "extra"):
        fields[part] = {name: _bits(leaf) for name, leaf in fields[part].items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _bits(leaf):
    if isinstance(leaf, Stored):
        leaf = leaf.array(None)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = np.asarray(leaf)
    return str(leaf.dtype), leaf.shape, leaf.tobytes()
