"""What a save does with what is at its path already, and when something goes wrong."""

import errno
import os
import pathlib
import shutil
import signal
import threading
import time
import warnings

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxferry
from checkpoints import content, earlier, plain
from jaxferry import checkpoint
from jaxferry.checkpoint import saves


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tree(folder):
    """Names and content of everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


FOREIGN = {
    "arrays": {"about/": None, "arrays/precious.npy": "mine"},
    "json": {"about/metadata": '{"format": "another/1"}', "arrays/precious.npy": "mine"},
    "save": {"save_0/precious.npy": "mine"},
    "empty": {"": None},
    "file": {"": "mine"},
    "orbax": None,
}


def make_foreign(folder, kind="arrays"):
    if kind == "orbax":
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(about=ocp.args.JsonSave({"step": 1}), arrays=ocp.args.JsonSave({}))
            checkpointer.save(folder, items)
        return
    for name, text in FOREIGN[kind].items():
        (folder / name if text is None else (folder / name).parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            (folder / name).write_text(text)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_a_checkpoint_is_neither_replaced_nor_read(tmp_path, kind):
    make_foreign(tmp_path / "theirs", kind)
    before = tree(tmp_path)
    with pytest.raises(jaxferry.CheckpointError, match="theirs exists and is not a JaxFerry checkpoint"):
        checkpoint.save(content(), tmp_path / "theirs")
    with pytest.raises(jaxferry.CheckpointError, match="theirs exists and is not a JaxFerry checkpoint"):
        checkpoint.check_target(tmp_path / "theirs")
    with pytest.raises(jaxferry.CheckpointError, match=r"theirs (is not a JaxFerry checkpoint|cannot be read)"):
        checkpoint.load(tmp_path / "theirs")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("is_earlier", [False, True], ids=["numbered", "earlier"])
def test_files_of_the_user_in_a_checkpoint_stay_and_own_ones_are_replaced(saved, tmp_path, is_earlier):
    if is_earlier:
        saved = earlier(tmp_path) / "processes"
    (saved / "NOTES.txt").write_text("mine")
    (saved / "plots" / "deep").mkdir(parents=True)
    (saved / "plots" / "deep" / "loss.svg").write_text("svg")
    (saved / "link").symlink_to("NOTES.txt")
    # Named like the arrays of other processes.
    (saved / "arrays-2026").mkdir()
    (saved / "arrays-2026" / "precious.npy").write_text("mine")
    (saved / "arrays-7").write_text("mine")
    theirs = {
        name: data
        for name, data in tree(saved).items()
        if name.startswith(("NOTES", "plots", "link", "arrays-2", "arrays-7"))
    }
    for number in (1, 2):
        checkpoint.save(content(number), saved)
        assert theirs.items() <= tree(saved).items()
        assert plain(checkpoint.load(saved)) == plain(content(number))
        assert len(names(saved)) == 6


def test_checkpoints_of_earlier_versions_are_read_and_replaced(tmp_path):
    """Of one process and of two, alone and among several, written before saves were numbered."""
    folder = earlier(tmp_path)
    assert plain(checkpoint.load(folder / "processes")) == plain(content(0))
    first = {**plain(content(1)), "metric": 0.25}
    assert plain(checkpoint.load(folder / "series")) == plain(checkpoint.load(folder / "series/00000001")) == first
    checkpoint.save(content(2), folder / "series", checkpoint.Keep(2))
    assert [one.step for one in jaxferry.list_checkpoints(folder / "series")] == [1, 2]
    checkpoint.save(content(3), folder / "series", checkpoint.Keep(2))
    assert names(folder / "series") == ["00000002", "00000003"]
    for number in (1, 2):
        checkpoint.save(content(number), folder / "processes")
    assert plain(checkpoint.load(folder / "processes")) == plain(content(2))
    assert names(folder / "processes") == ["save_1"] and names(folder) == ["processes", "series"]


def test_of_saves_that_a_killed_one_has_left_the_newest_counts_and_the_next_removes_the_others(saved, tmp_path):
    for number in (9, 10):
        checkpoint.save(content(number), tmp_path / "other")
        shutil.copytree(tmp_path / "other" / f"save_{number - 9}", saved / f"save_{number}")
    assert plain(checkpoint.load(saved)) == plain(content(10))
    checkpoint.save(content(3), saved)
    assert plain(checkpoint.load(saved)) == plain(content(3)) and names(saved) == ["save_11"]


def test_orbax_own_manager_reads_saves(saved):
    checkpoint.save(content(1), saved)
    options = ocp.CheckpointManagerOptions(step_prefix="save", read_only=True)
    handlers = {"about": ocp.JsonCheckpointHandler(), "arrays": ocp.StandardCheckpointHandler()}
    with ocp.CheckpointManager(saved, options=options, item_handlers=handlers) as manager:
        assert manager.all_steps() == [1]
        items = ocp.args.Composite(about=ocp.args.JsonRestore(), arrays=ocp.args.StandardRestore())
        read = manager.restore(1, args=items)
    assert read["about"]["step"] == 1
    np.testing.assert_array_equal(read["arrays"]["params"]["1"], content(1).params["['a']['v']"])


def test_a_symbolic_link_is_followed(saved, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to("../saved")
    checkpoint.save(content(1), tmp_path / "elsewhere" / "link")
    assert (tmp_path / "elsewhere" / "link").is_symlink()
    assert plain(checkpoint.load(saved)) == plain(content(1))
    assert names(tmp_path) == ["elsewhere", "saved"] and names(tmp_path / "elsewhere") == ["link"]


@pytest.mark.parametrize("is_first", [False, True], ids=["next", "first"])
def test_all_of_a_save_is_on_the_disk_before_it_is_published(saved, tmp_path, monkeypatch, is_first):
    synced, published, fsync, rename = [], [], os.fsync, pathlib.Path.rename

    def noted_fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_rename(self, target):
        if self.name in ("save_0", "new") and target.parent in (path, path.parent):
            published.append(([str(file) for file in self.rglob("*")], list(synced)))
        return rename(self, target)

    path = tmp_path / "other" if is_first else saved
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(pathlib.Path, "rename", noted_rename)
    checkpoint.save(content(1), path)
    ((written, before),) = published
    assert len(written) > 10 and set(written) <= {name.rstrip("/") for name in before}
    assert {str(path), str(path.parent)} <= set(synced[len(before) :])


def test_an_interrupt_during_the_replacement_leaves_the_new_checkpoint(saved, monkeypatch):
    rename = pathlib.Path.rename

    def interrupted(self, target):
        result = rename(self, target)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(pathlib.Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(content(1), saved)
    monkeypatch.undo()
    assert plain(checkpoint.load(saved)) == plain(content(1))
    assert names(saved.parent) == ["saved"]


def full(self, folder, *args, **kwargs):
    folder.with_name(f"{folder.name}.orbax-checkpoint-tmp").mkdir()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STAGES = {
    "arrays": (ocp.Checkpointer, "save", full),
    "fsync": (os, "fsync", no_space),
    "about": (pathlib.Path, "write_text", no_space),
    "folder": (pathlib.Path, "mkdir", no_space),
    "rename": (pathlib.Path, "rename", no_space),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_beside(saved, monkeypatch, stage):
    owner, name, failing = STAGES[stage]
    original, calls = getattr(owner, name), []

    def once(*args, **kwargs):
        calls.append(args)
        return failing(*args, **kwargs) if len(calls) == 1 else original(*args, **kwargs)

    monkeypatch.setattr(owner, name, once)
    with pytest.raises(jaxferry.CheckpointError, match=f"cannot write to {saved}: No space left on device"):
        checkpoint.save(content(1), saved)
    assert plain(checkpoint.load(saved)) == plain(content(0))
    assert names(saved.parent) == ["saved"] and names(saved) == ["save_0"]


def linked(name, target, path):
    """Makes a symbolic link; returns a function that returns a path to save to."""

    def make(folder):
        (folder / name).symlink_to(target)
        return folder / path

    return make


def beside_a_file(folder):
    (folder / "file").write_text("")
    return folder / "file" / "saved"


UNWRITABLE = {
    "gs": (lambda folder: "gs://bucket/saved", "gs://bucket/saved is remote storage"),
    "gs_path": (lambda folder: pathlib.Path("gs://bucket/saved"), "is remote storage"),
    "file_url": (lambda folder: "file:///saved", "is remote storage"),
    "link": (linked("link", "nowhere", "link"), "is a symbolic link to nowhere, which does not exist"),
    "through_link": (linked("link", "nowhere", "link/saved"), "is a symbolic link to nowhere, which does not exist"),
    "loop": (linked("loop", "loop", "loop"), "loop"),
    "file": (beside_a_file, "file/saved"),
    "long": (lambda folder: folder / ("x" * 300), "xxx"),
    "too_long": (lambda folder: folder / ("x" * 250), "xxx"),
    "nul": (lambda folder: f"{folder}/a\0b", "cannot be used as a path"),
    "proc": (lambda folder: "/proc/no/such", "/proc/no/such"),
    "empty": (lambda folder: "", "exists and is not"),
    "none": (lambda folder: None, "the path of a checkpoint must be a string or a path, got None"),
}


@pytest.mark.parametrize(("place", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_path_that_cannot_be_written_is_told_and_nothing_is_left(tmp_path, monkeypatch, place, message):
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path)
    before = tree(tmp_path)
    for write in (lambda: checkpoint.save(content(), path), lambda: checkpoint.check_target(path)):
        with pytest.raises(jaxferry.CheckpointError) as caught:
            write()
        assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1
    with pytest.raises(jaxferry.CheckpointError):
        checkpoint.load(path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("is_first", [False, True], ids=["next", "first"])
def test_what_another_process_publishes_in_between_is_replaced(saved, tmp_path, monkeypatch, is_first):
    """The same number, or the first save of the path."""
    path, rename, calls = tmp_path / "new" if is_first else saved, pathlib.Path.rename, []

    def late(self, target):
        if not calls:
            calls.append(None)
            checkpoint.save(content(5), path)
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", late)
    checkpoint.save(content(1), path)
    assert plain(checkpoint.load(path)) == plain(content(1)) and len(names(path)) == 1
    assert "saved" in names(tmp_path) and not [name for name in names(tmp_path) if name.startswith(".")]


def test_what_a_user_puts_at_the_path_meanwhile_stays(tmp_path, monkeypatch):
    rename = pathlib.Path.rename

    def late(self, target):
        if not target.exists():
            make_foreign(target)
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", late)
    with pytest.raises(jaxferry.CheckpointError, match="saved exists and is not a JaxFerry checkpoint"):
        checkpoint.save(content(1), tmp_path / "saved")
    assert (tmp_path / "saved" / "arrays" / "precious.npy").read_text() == "mine"
    assert names(tmp_path) == ["saved"] and names(tmp_path / "saved") == ["about", "arrays"]


def test_the_folder_of_a_save_in_progress_is_not_removed_by_another(saved, monkeypatch):
    save, seen = ocp.Checkpointer.save, []

    def another(self, *args, **kwargs):
        if not seen:
            seen.append(None)
            checkpoint.save(content(5), saved)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", another)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint.save(content(1), saved)
    assert seen and plain(checkpoint.load(saved)) == plain(content(1))
    assert names(saved.parent) == ["saved"]


def test_a_checkpoint_that_another_process_replaces_while_it_is_looked_at_is_still_one(saved, monkeypatch):
    read_format, calls = saves.read_format, []

    def late(folder):
        calls.append(folder)
        if len(calls) == 1:
            (saved / "save_0").rename(saved / "save_1")
        return read_format(folder)

    monkeypatch.setattr(saves, "read_format", late)
    checkpoint.save(content(1), saved)
    assert plain(checkpoint.load(saved)) == plain(content(1))


def test_a_failed_save_removes_what_threads_write_after_its_error(tmp_path):
    """TensorStore's threads create the folder again that they write to."""

    def write_late(folder):
        time.sleep(0.3)
        (folder / "d").mkdir(parents=True)

    with pytest.raises(OSError, match="no space"), saves.new_save(tmp_path / "saved") as folder:
        late = threading.Thread(target=write_late, args=[folder])
        late.start()
        raise OSError("no space")
    late.join()
    assert not list(tmp_path.iterdir())
