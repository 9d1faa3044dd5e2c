"""Safetensors files read into host layers: values, names, errors and memory use."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxferry
from jaxferry.checkpoint import pretrained
from jaxferry.optimizer import initialise
from planned import assert_same_bits
from python_runs import run_python

RNG = np.random.default_rng(0)
TENSORS = {
    "table": RNG.normal(size=(50, 6)).astype(np.float32),
    "weight": RNG.normal(size=(9, 6)).astype(np.float32),
    "half": RNG.normal(size=(7,)).astype(np.float16),
    "brain": RNG.normal(size=(5, 4, 3)).astype(jnp.bfloat16),
    "scalar": np.array(1.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def params_like():
    """A model whose kernel is the transpose of the stored weight."""
    shapes = {name: array.shape for name, array in TENSORS.items()} | {"weight": (6, 9)}
    return {"layer": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}}


def source_of(path):
    return pretrained.Source(path[-1], is_transposed=path[-1] == "weight")


def loss_fn(params, scale):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) * scale


def save(tensors, file):
    save_file({name: np.array(array, order="C") for name, array in tensors.items()}, file)
    return file


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
def test_masters_are_the_stored_tensors_in_float32(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(initialise, "BLOCK_BYTES", block_bytes)
    tensors = pretrained.open_safetensors(save(TENSORS, tmp_path / "some.safetensors"))
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(pretrained.arrange(tensors, params_like(), source_of))
    expected = {name: array.astype(np.float32) for name, array in TENSORS.items()}
    assert_same_bits(state.params, {"layer": expected | {"weight": np.ascontiguousarray(TENSORS["weight"].T)}})
    state, metrics = step(state, 2.0)
    np.testing.assert_allclose(
        metrics["loss"], 2 * sum((a.astype(np.float64) ** 2).sum() for a in TENSORS.values()), 1e-5
    )


def test_a_tensor_is_read_by_numpy_too(tmp_path):
    tensors = pretrained.open_safetensors(save(TENSORS, tmp_path / "some.safetensors"))
    for name, array in TENSORS.items():
        assert (tensors[name].shape, tensors[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(tensors[name]), array)
    np.testing.assert_array_equal(np.asarray(tensors["weight"].T, np.float64), TENSORS["weight"].T)
    assert tensors["weight"] == tensors["weight"].T.T
    with pytest.raises(jaxferry.InputError, match="'brain' of shape"):
        _ = tensors["brain"].T


def write_shards(folder, shards):
    placed = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save({name: TENSORS[name] for name in names}, folder / file)
        placed |= dict.fromkeys(names, file)
    (folder / pretrained.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return placed


def test_a_folder_of_shards_is_read_by_its_index(tmp_path):
    write_shards(tmp_path, [["table", "half"], ["weight", "brain", "scalar", "empty"]])
    for path in (tmp_path, tmp_path / pretrained.INDEX_FILE):
        tensors = pretrained.open_safetensors(path)
        assert tensors.keys() == TENSORS.keys()
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(np.asarray(tensors[name]), array)


def test_a_folder_with_one_file_needs_no_index(tmp_path):
    save(TENSORS, tmp_path / "whatever.safetensors")
    assert pretrained.open_safetensors(tmp_path).keys() == TENSORS.keys()


INDEX, SHARD = pretrained.INDEX_FILE, "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (INDEX, lambda _: b"{}", "is not an index of safetensors files"),
        (SHARD, None, f"{SHARD} cannot be read"),
        (SHARD, lambda content: content[:-4], f"{SHARD} cannot be read"),
        (INDEX, None, "holds several .safetensors files and no model.safetensors.index.json"),
        (
            INDEX,
            lambda content: content.replace(b'"weight_map": {', f'"weight_map": {{"more": "{SHARD}", '.encode()),
            "lists tensors that its files do not contain: more",
        ),
    ],
    ids=["no index", "no shard", "cut shard", "only shards", "more promised"],
)
def test_a_damaged_checkpoint_is_refused_and_named(file, damage, message, tmp_path):
    write_shards(tmp_path, [["table", "half"], ["weight", "brain"]])
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if damage is not None:
        (tmp_path / file).write_bytes(damage(content))
    with pytest.raises(jaxferry.InputError, match=message):
        pretrained.open_safetensors(tmp_path)


def test_what_is_missing_left_over_or_of_another_shape_is_named_all_at_once(tmp_path):
    others = {name: array for name, array in TENSORS.items() if name not in ("half", "scalar")}
    others |= {"weight": TENSORS["weight"].T, "brain": np.zeros((5, 4, 3), np.int64), "rest": TENSORS["half"]}
    tensors = pretrained.open_safetensors(save(others, tmp_path / "some.safetensors"))
    with pytest.raises(jaxferry.InputError) as refused:
        pretrained.arrange(tensors, params_like(), source_of)
    assert "missing: half, scalar;" in str(refused.value)
    assert "unexpected: rest;" in str(refused.value)
    assert "weight is [9, 6], layer/weight [6, 9]" in str(refused.value)
    assert "brain is of int64" in str(refused.value)


def test_some_tensors_are_no_parameters_and_some_parameters_have_no_tensor(tmp_path):
    file = save({"layer.0.table": TENSORS["table"], "layer.0.mask": TENSORS["half"]}, tmp_path / "some.safetensors")
    params = {"table": jax.ShapeDtypeStruct((50, 6), jnp.float32), "adapter": np.ones(3, np.float32)}
    arranged = pretrained.arrange(
        pretrained.open_safetensors(file),
        params,
        lambda path: {"table": "layer.0.table"}.get(path[-1]),
        ignored=[r"layer\.\d+\.mask"],
    )
    assert arranged["adapter"] is params["adapter"]
    np.testing.assert_array_equal(np.asarray(arranged["table"]), TENSORS["table"])


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    file = save(TENSORS, tmp_path / "some.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(jaxferry.InputError, match=r"pip install 'jaxferry\[safetensors\]'"):
        pretrained.open_safetensors(file)


def written(folder, **options):
    """Writes TENSORS as the parameters that `source_of` reads them into; returns the tree and the files."""
    params = {"layer": TENSORS | {"weight": np.ascontiguousarray(TENSORS["weight"].T)}}
    return params, pretrained.save_safetensors(folder, params, source_of, **options)


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(10**9, 1), (600, 3), (1, 6)])
def test_written_tensors_are_those_that_were_read(max_file_bytes, num_files, tmp_path):
    params, files = written(tmp_path / "new", max_file_bytes=max_file_bytes)
    assert len(files) == num_files
    stored = {name: array for file in files for name, array in load_file(file).items()}
    assert stored.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert (stored[name].dtype, stored[name].shape) == (array.dtype, array.shape)
        assert stored[name].tobytes() == np.ascontiguousarray(array).tobytes()
    arranged = pretrained.arrange(pretrained.open_safetensors(tmp_path / "new"), params_like(), source_of)
    assert_same_bits(jax.tree.map(np.asarray, arranged), params)
    with safe_open(files[0], framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_written_in_another_dtype(tmp_path):
    _, [file] = written(tmp_path, dtype=jnp.bfloat16)
    stored = load_file(file)
    assert {array.dtype for array in stored.values()} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(stored["weight"], TENSORS["weight"].astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("params", "name_of", "message"),
    [
        ({"a": np.ones(2), "b": np.ones(2)}, lambda path: "same", "b and another parameter have the same tensor, same"),
        ({"a": np.ones(2)}, lambda path: pretrained.Source("a", True), r"a of shape \(2,\) is not a matrix"),
        ({"a": np.ones(2, np.complex64)}, lambda path: "a", "a is of complex64, which cannot be written; give dtype="),
        (
            {"a": jax.random.key(0)},
            lambda path: "a",
            "a holds PRNG keys, which cannot be written: let source_of return",
        ),
        (
            {"a": np.ones(2)},
            lambda path: 3,
            r"source_of must return a Source, a tensor's name or None, got 3 for \('a',",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(params, name_of, message, tmp_path):
    with pytest.raises(jaxferry.InputError, match=message):
        pretrained.save_safetensors(tmp_path / "new", params, name_of)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_not_mixed_with_those_of_another_checkpoint(tmp_path):
    save(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(jaxferry.InputError, match=r"holds model\.safetensors: give an empty folder"):
        written(tmp_path)


def test_parameters_without_a_name_are_left_out(tmp_path):
    [file] = pretrained.save_safetensors(
        tmp_path, {"a": np.ones(2, np.float32), "adapter": np.ones(3)}, lambda path: {"a": "model.a"}.get(path[0])
    )
    assert load_file(file).keys() == {"model.a"}


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_package_reads_what_is_written_piece_by_piece(tmp_path, monkeypatch, is_lazy, dtype):
    monkeypatch.setattr(pretrained, "_PIECE_BYTES", 64)
    rng = np.random.default_rng(0)
    params = {
        "matrix": rng.normal(size=(33, 7)),
        "turned": rng.normal(size=(9, 31)),
        "vector": rng.normal(size=(101,)),
        "cube": rng.normal(size=(3, 5, 2)),
        "scalar": np.float32(3),
        "none": np.zeros((0, 4)),
    }
    params = {name: np.asarray(leaf, np.float32) for name, leaf in params.items()}
    sources = {name: pretrained.Source(name, name == "turned") for name in params}
    given = params
    if is_lazy:
        step = jaxferry.train_step(lambda p, x: sum((leaf**2).sum() for leaf in p.values()) * x, optax.sgd(0.1))
        given = step.init(params).lazy_params
    [file] = pretrained.save_safetensors(tmp_path, given, lambda path: sources[path[0]], dtype=dtype)
    found = load_file(file)
    for name, leaf in params.items():
        expected = leaf.T if name == "turned" else leaf
        np.testing.assert_array_equal(found[name], expected.astype(dtype or np.float32))
        assert found[name].dtype == (dtype or np.float32)
    tensors = pretrained.open_safetensors(file)
    again = pretrained.arrange(tensors, params, lambda path: sources[path[0]])
    assert {name: leaf.shape for name, leaf in again.items()} == {name: leaf.shape for name, leaf in params.items()}


READ = """
import gc, pathlib, re, sys
import jax, jax.numpy as jnp, optax
import jaxferry
from jaxferry.checkpoint import pretrained

def bytes_of(what):
    return int(re.search(what + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10

def initialised(path):
    tensors = pretrained.open_safetensors(path)
    like = {name: jax.ShapeDtypeStruct(tensor.shape[::-1], jnp.float32) for name, tensor in tensors.items()}
    step = jaxferry.train_step(lambda params, batch: params["embed"].sum(), optax.sgd(0.1))
    return step.init(pretrained.arrange(tensors, like, lambda path: pretrained.Source(path[0], True)))

initialised(sys.argv[1])  # compiles, and brings in what any run brings in
gc.collect()
before = bytes_of("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here again
state = initialised(sys.argv[1])
print(bytes_of("VmHWM") - before, sum(master.nbytes for master in state.masters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, id="bfloat16"), pytest.param(np.float32, id="float32")])
def test_reading_takes_less_than_a_tenth_more_host_memory_than_the_masters(dtype, tmp_path):
    # The largest is a third of the whole: it fits nowhere twice.
    shapes = {"embed": (1000, 43000), "head": (2000, 12000)} | {f"layer_{i}": (1000, 12000) for i in range(5)}
    file = save({name: np.full(shape, 0.5, dtype) for name, shape in shapes.items()}, tmp_path / "large.safetensors")
    taken, masters = map(int, run_python("-c", READ, file).split())
    assert masters == 4 * sum(rows * columns for rows, columns in shapes.values()) > 500e6
    assert taken < 1.1 * masters
