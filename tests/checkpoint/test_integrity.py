"""Damage to the files of a checkpoint: it is found and named, or harmless."""

import dataclasses
import json
import random
import shutil
import sys
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash

import jaxferry
from checkpoints import content, earlier, plain
from jaxferry import checkpoint

SAVE, ABOUT = "save_0", "about/metadata"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def overwrite(file, position, data):
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(data)


def change_about(folder, change):
    about = json.loads((folder / ABOUT).read_text())
    change(about)
    (folder / ABOUT).write_text(json.dumps(about))


@pytest.mark.parametrize("num_flips", [pytest.param(4, id="few"), pytest.param(250, marks=pytest.mark.slow, id="many")])
def test_a_flipped_bit_is_never_restored_as_other_numbers(saved, num_flips):
    """In each file of more than a line as many flips; a file that only Orbax reads may be damaged without harm."""
    expected, rng, num_found = plain(content()), random.Random(0), 0
    for file in files_of(saved):
        good = file.read_bytes()
        for bit in rng.sample(range(8 * len(good)), min(8 * len(good), num_flips if len(good) > 100 else 3)):
            overwrite(file, bit // 8, bytes([good[bit // 8] ^ 1 << bit % 8]))
            try:
                assert plain(checkpoint.load(saved)) == expected, (file, bit)
            except jaxferry.CheckpointError as error:
                num_found += 1
                assert str(saved) in str(error) and len(str(error).splitlines()) == 1
            overwrite(file, bit // 8, good[bit // 8 : bit // 8 + 1])
    assert num_found > num_flips
    assert plain(checkpoint.load(saved)) == expected


@pytest.mark.parametrize("suffix", ["", " #1?%20é"])
def test_damage_names_the_leaf_and_the_file(saved, suffix):
    saved = saved.rename(saved.with_name(f"saved{suffix}"))
    (file,) = [file for file in files_of(saved) if file.stat().st_size > 3000]
    name = str(file.relative_to(saved / SAVE))
    # This file has the parts of one leaf.
    overwrite(file, 1000, bytes(40))
    with pytest.raises(jaxferry.CheckpointError) as caught:
        checkpoint.load(saved)
    assert "params ['b']['layers']" in str(caught.value) and name in str(caught.value)


def test_numbers_that_decompress_but_differ_name_the_leaf_and_the_file(saved):
    # Another state's arrays beside this state's `about`: every file is sound, and the numbers are others.
    checkpoint.save(content(1), saved.with_name("other"))
    (saved / SAVE / "arrays").rename(saved.with_name("arrays"))
    (saved.with_name("other") / SAVE / "arrays").rename(saved / SAVE / "arrays")
    with pytest.raises(jaxferry.CheckpointError, match=r"params \['a'\]\['v'\] in arrays/d/\w+ is damaged: its digest"):
        checkpoint.load(saved)


def exchange_names(about):
    first, second = about["params"][1:3]
    first["path"], second["path"] = second["path"], first["path"]


def exchange_leaves(about):
    about["params"][1:3] = about["params"][2:0:-1]


def declare_other_dtype(about):
    about["params"][1]["dtype"] = "int32"


@pytest.mark.parametrize("change", [exchange_names, exchange_leaves, declare_other_dtype])
def test_another_declaration_of_the_arrays_is_found(saved, change):
    change_about(saved / SAVE, change)
    with pytest.raises(jaxferry.CheckpointError, match=f"{ABOUT} is damaged"):
        checkpoint.load(saved)


@pytest.mark.parametrize("ends", [[(0, 8)], [(0, 8), (8, 15)], [(0, 8), (7, 16)], [(0, 8), (9, 16)], [(8, 16), (0, 8)]])
def test_pieces_that_do_not_have_each_element_once_are_refused_though_the_digest_is_of_them(tmp_path, ends):
    """A checkpoint of several processes that a faulty program has written."""
    saved = earlier(tmp_path) / "processes"

    def change(about):
        leaf = about["params"][1]
        leaf["pieces"] = [[*each, leaf["pieces"][0][2]] for each in ends]
        del about["digest"]
        text = json.dumps(about, sort_keys=True, separators=(",", ":"))
        about["digest"] = xxhash.xxh3_128(text.encode()).hexdigest()

    change_about(saved, change)
    with pytest.raises(jaxferry.CheckpointError, match=r"params\[1\]\.pieces must be .* each of 16 elements once"):
        checkpoint.load(saved)


def save_as_version_1(saved, path):
    """Writes a checkpoint as JaxFerry did before there were digests."""
    whole = [(part, {name: np.asarray(leaf) for name, leaf in getattr(saved, part).items()}) for part in PARTS]
    about = {
        "format": "jaxferry.checkpoint/1",
        "step": saved.step,
        **{
            part: [{"path": n, "shape": list(leaf.shape), "dtype": str(leaf.dtype)} for n, leaf in leaves.items()]
            for part, leaves in whole
        },
        "dtypes": saved.dtypes,
        "dictionary_paths": saved.dictionary_paths,
        "loss_scale": saved.loss_scale,
        "optimizer_keys": {},
    }
    arrays = {part: {str(i): leaf for i, leaf in enumerate(leaves.values()) if leaf.size} for part, leaves in whole}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
        checkpointer.save(path, items)


PARTS = ("params", "optimizer")


@pytest.fixture(scope="module")
def old_once(tmp_path_factory):
    """A checkpoint of format 1 and what it holds."""
    first, folder = content(), tmp_path_factory.mktemp("once") / "old"
    del first.optimizer["key"], first.params["['b']['layers']"]
    first.dtypes.pop(), first.dictionary_paths.pop(), first.extra.clear()
    save_as_version_1(first, folder)
    return folder, first


@pytest.fixture
def old(old_once, tmp_path):
    folder, first = old_once
    return shutil.copytree(folder, tmp_path / "old"), first


def test_an_older_checkpoint_is_restored_with_a_warning_and_replaced_by_one_with_digests(old):
    path, first = old
    with pytest.warns(UserWarning, match="has format 'jaxferry.checkpoint/1', without digests"):
        loaded = checkpoint.load(path)
    assert plain(loaded) == plain(first)
    checkpoint.save(loaded, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain(checkpoint.load(path)) == plain(first)


NAN, INF = float("nan"), float("inf")
FIELDS: dict[str, list[object]] = {
    "step": [-1, 1.5, True, NAN, 2**70, "3"],
    "params": ["none", {}],
    "dtypes": [["float32"], ["float32", "O", "float32", "bfloat16"]],
    "dictionary_paths": [[["a"], ["a", "w"]], 3],
    "loss_scale": [[INF, 0], [10**400, 0], [0, 0], ["1", 0], [1.0, -1]],
    "optimizer_keys": [{"nothing": "fry"}, []],
    "surplus": [1],
}
OF_LEAF: dict[str, list[object]] = {
    "shape": [[10**9] * 3, [-4, 4], [4.0, 4], [1] * 70, [0, 2**62, 2**62], [2, 8], [3, 4], [5, 4], None],
    "dtype": ["object", "S4", "no such", "(2,", ",", 4],
    "path": ["['a']['none']", "\ud800"],
    "axis": [2, True],
    "other": [0],
}
CHANGES = [("", key, value) for key, values in FIELDS.items() for value in values]
CHANGES += [("leaf", key, value) for key, values in OF_LEAF.items() for value in values]


@pytest.mark.parametrize(("of", "key", "value"), CHANGES, ids=lambda value: ascii(value)[:20])
def test_fields_of_a_checkpoint_without_digests_are_checked_one_by_one(old, of, key, value):
    path, _ = old
    change_about(path, lambda about: (about["params"][1] if of else about).__setitem__(key, value))
    with warnings.catch_warnings(), pytest.raises(jaxferry.CheckpointError, match="cannot be read: ") as caught:
        warnings.simplefilter("ignore")
        checkpoint.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_leaf_within_a_leaf_is_refused(old):
    path, _ = old

    def nest(about):
        about["params"][1]["path"], about["dictionary_paths"][1] = "['a']", ["a"]

    change_about(path, nest)
    with pytest.raises(jaxferry.CheckpointError, match="dictionary_paths must be"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "jaxferry.checkpoint/2", "step": 1, "step": 2}', 'key "step" occurs twice'),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": ["jaxferry.checkpoint/2"]}', "has format"),
        ('{"format": "jaxferry.checkpoint/2"}', 'key "step" is missing'),
        ("[]", "must be a JSON object"),
        ("", "malformed JSON"),
        ("\xff", "malformed JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("9" * 10_000, "malformed JSON"),
    ],
)
def test_a_file_about_a_checkpoint_that_is_not_one_is_refused(saved, text, message):
    (saved / SAVE / ABOUT).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(jaxferry.CheckpointError, match=message):
        checkpoint.load(saved)


def test_a_missing_array_is_named(saved):
    for file in files_of(saved / SAVE / "arrays"):
        if file.parent.name == "d" and file.stat().st_size > 3000:
            file.unlink()
    with pytest.raises(jaxferry.CheckpointError, match=r"params \['b'\]\['layers'\] in arrays/\S*"):
        checkpoint.load(saved)


def test_the_extra_arrays_of_a_state_are_saved_with_it(tmp_path):
    step = jaxferry.train_step(lambda params, x: (params["w"] * x).sum(), jaxferry.sgd(0.1))
    state = step.init({"w": np.ones((3,), np.float32)})
    memory = np.arange(6, dtype=jax.numpy.bfloat16)
    step.save(state, tmp_path / "saved", extra={"memory": memory})
    found = step.restore(tmp_path / "saved").extra
    assert list(found) == ["memory"] and found["memory"].dtype == memory.dtype
    np.testing.assert_array_equal(found["memory"], memory)
    step.save(state, tmp_path / "saved")
    assert step.restore(tmp_path / "saved").extra == {}


def test_extra_arrays_of_the_other_order_of_bytes_keep_their_values(tmp_path):
    kept = checkpoint.check_extra({"memory": np.arange(4, dtype=">f4")})
    checkpoint.save(dataclasses.replace(content(1), extra=kept), tmp_path / "saved")
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "saved").extra["memory"], np.arange(4))


def test_extra_keys_of_random_numbers_are_the_same_keys(tmp_path):
    step = jaxferry.train_step(lambda params, x: (params["w"] * x).sum(), jaxferry.sgd(0.1))
    state = step.init({"w": np.ones((3,), np.float32)})
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2)}
    for wait in (True, False):
        step.save(state, tmp_path / "saved", wait=wait, extra={**keys, "count": np.int32(3)})
        step.wait_for_saves()
        found = step.restore(tmp_path / "saved").extra
        assert found["count"] == 3
        for name, key in keys.items():
            assert found[name].dtype == key.dtype and jax.numpy.all(found[name] == key)


@pytest.mark.parametrize("extra", [[1], {"a": "text"}, {1: np.ones(2)}, {"a": object()}, {"a": {"b": np.ones(2)}}])
def test_extra_that_are_no_arrays_of_numbers_are_refused(tmp_path, extra):
    step = jaxferry.train_step(lambda params, x: (params["w"] * x).sum(), jaxferry.sgd(0.1))
    with pytest.raises(jaxferry.InputError, match="extra"):
        step.save(step.init({"w": np.ones((3,), np.float32)}), tmp_path / "saved", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_for_digests_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(jaxferry.CheckpointError, match="pip install xxhash"):
        checkpoint.load(saved)
