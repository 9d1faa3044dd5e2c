"""What a save does with what is at its path already, and when something goes wrong."""

import errno
import os
import pathlib
import shutil
import signal
import threading
import time

import orbax.checkpoint as ocp
import pytest

import jaxferry
from checkpoints import content, plain
from jaxferry import checkpoint
from jaxferry.checkpoint import renames, replacement
from jaxferry.checkpoint.scratch import scratch_beside

WAYS = pytest.mark.parametrize("way", ["exchange", "two_renames"], indirect=True)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    checkpoint.save(content(0), folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(saved_once, tmp_path):
    return shutil.copytree(saved_once, tmp_path / "saved")


@pytest.fixture
def way(request, monkeypatch):
    if request.param == "two_renames":
        monkeypatch.setattr(renames, "exchange", lambda first, second: False)
    return request.param


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


def make_foreign(folder):
    (folder / "about").mkdir(parents=True)
    (folder / "arrays").mkdir()
    (folder / "arrays" / "precious.npy").write_text("mine")


def make_foreign_json(folder):
    make_foreign(folder)
    (folder / "about" / "metadata").write_text('{"format": "another/1"}')


def make_foreign_orbax(folder):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(about=ocp.args.JsonSave({"step": 1}), arrays=ocp.args.JsonSave({}))
        checkpointer.save(folder, items)


def make_empty(folder):
    folder.mkdir()


def make_file(folder):
    folder.write_text("mine")


@pytest.mark.parametrize("make", [make_foreign, make_foreign_json, make_foreign_orbax, make_empty, make_file])
def test_what_is_not_a_checkpoint_is_neither_replaced_nor_read(tmp_path, make):
    make(tmp_path / "theirs")
    before = tree(tmp_path)
    with pytest.raises(jaxferry.CheckpointError, match="theirs exists and is not a JaxFerry checkpoint"):
        checkpoint.save(content(), tmp_path / "theirs")
    with pytest.raises(jaxferry.CheckpointError, match="theirs exists and is not a JaxFerry checkpoint"):
        checkpoint.check_target(tmp_path / "theirs")
    with pytest.raises(jaxferry.CheckpointError, match=r"theirs (is not a JaxFerry checkpoint|cannot be read)"):
        checkpoint.load(tmp_path / "theirs")
    assert tree(tmp_path) == before


@WAYS
def test_files_of_the_user_in_a_checkpoint_stay(saved, way, monkeypatch):
    (saved / "NOTES.txt").write_text("mine")
    (saved / "plots" / "deep").mkdir(parents=True)
    (saved / "plots" / "deep" / "loss.svg").write_text("svg")
    (saved / "link").symlink_to("NOTES.txt")
    theirs = {name: data for name, data in tree(saved).items() if not name.startswith(("about", "arrays"))}
    checkpoint.save(content(1), saved)
    assert theirs.items() <= tree(saved).items()
    assert plain(checkpoint.load(saved)) == plain(content(1))
    # As on a file system without hard links.
    monkeypatch.setattr(os, "link", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    checkpoint.save(content(2), saved)
    assert theirs.items() <= tree(saved).items()
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@WAYS
def test_a_symbolic_link_is_followed(saved, tmp_path, way):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to("../saved")
    checkpoint.save(content(1), tmp_path / "elsewhere" / "link")
    assert (tmp_path / "elsewhere" / "link").is_symlink()
    assert plain(checkpoint.load(saved)) == plain(content(1))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent in (tmp_path, tmp_path / "elsewhere")) == [
        "elsewhere",
        "link",
        "saved",
    ]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_takes_its_place(saved, monkeypatch):
    synced, switched, fsync, exchange = [], [], os.fsync, renames.exchange

    def noted_fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_exchange(first, second):
        switched.append(([str(path) for path in first.parent.rglob("*")], list(synced)))
        return exchange(first, second)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(renames, "exchange", noted_exchange)
    checkpoint.save(content(1), saved)
    ((paths, before),) = switched
    written = {path.replace("/fresh", "/writing") for path in paths if not path.endswith("/lock")}
    assert len(written) > 10 and written <= set(before)
    assert str(saved.parent) in synced[len(before) :]


@WAYS
def test_an_interrupt_during_the_replacement_leaves_the_new_checkpoint(saved, way, monkeypatch):
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
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


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


@WAYS
@pytest.mark.parametrize("stage", [*STAGES, "switch"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_beside(saved, way, monkeypatch, stage):
    switch = "exchange" if way == "exchange" else "rename_new"
    owner, name, failing = STAGES.get(stage, (renames, switch, no_space))
    original, calls = getattr(owner, name), []

    def once(*args, **kwargs):
        calls.append(args)
        return failing(*args, **kwargs) if len(calls) == 1 else original(*args, **kwargs)

    monkeypatch.setattr(owner, name, once)
    with pytest.raises(jaxferry.CheckpointError, match=f"cannot write to {saved}: No space left on device"):
        checkpoint.save(content(1), saved)
    assert plain(checkpoint.load(saved)) == plain(content(0))
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def beside_a_file(folder):
    (folder / "file").write_text("")
    return folder / "file" / "saved"


def through_a_broken_link(folder):
    (folder / "link").symlink_to("nowhere")
    return folder / "link" / "saved"


def broken_link(folder):
    (folder / "link").symlink_to("nowhere")
    return folder / "link"


def link_to_itself(folder):
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda folder: "gs://bucket/saved", "gs://bucket/saved is remote storage"),
        (lambda folder: pathlib.Path("gs://bucket/saved"), "is remote storage"),
        (lambda folder: "file:///saved", "is remote storage"),
        (broken_link, "is a symbolic link to nowhere, which does not exist"),
        (through_a_broken_link, "is a symbolic link to nowhere, which does not exist"),
        (link_to_itself, "loop"),
        (beside_a_file, "file/saved"),
        (lambda folder: folder / ("x" * 300), "xxx"),
        (lambda folder: folder / ("x" * 250), "xxx"),
        (lambda folder: f"{folder}/a\0b", "cannot be used as a path"),
        (lambda folder: "/proc/no/such", "/proc/no/such"),
        (lambda folder: "", "exists and is not"),
        (lambda folder: None, "the path of a checkpoint must be a string or a path, got None"),
    ],
    ids=[
        "gs",
        "gs_path",
        "file_url",
        "link",
        "through_link",
        "loop",
        "file",
        "long",
        "too_long",
        "nul",
        "proc",
        "empty",
        "none",
    ],
)
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


def test_another_checkpoint_made_in_between_is_replaced_and_none_is_lost(saved, monkeypatch):
    """As when another process saves between the two renames of this one."""
    monkeypatch.setattr(renames, "exchange", lambda first, second: False)
    rename_new, calls = renames.rename_new, []

    def late(source, target):
        calls.append(source)
        if len(calls) == 1:
            shutil.copytree(saved.parent / "other", target)
            raise FileExistsError(errno.EEXIST, "exists")
        rename_new(source, target)

    checkpoint.save(content(5), saved.parent / "other")
    monkeypatch.setattr(renames, "rename_new", late)
    checkpoint.save(content(1), saved)
    assert plain(checkpoint.load(saved)) == plain(content(1)) and len(calls) == 2
    assert sorted(path.name for path in saved.parent.iterdir()) == ["other", "saved"]


def test_what_another_process_puts_in_between_is_kept_and_both_checkpoints_too(saved, monkeypatch):
    monkeypatch.setattr(renames, "exchange", lambda first, second: False)

    def foreign(source, target):
        make_foreign(target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(renames, "rename_new", foreign)
    with pytest.raises(
        jaxferry.CheckpointError, match=r"what was there is in (\S+)/old, the new one in \S+/fresh"
    ) as at:
        checkpoint.save(content(1), saved)
    assert (saved / "arrays" / "precious.npy").read_text() == "mine"
    shutil.rmtree(saved)
    (left,) = saved.parent.iterdir()
    assert str(left) in str(at.value)
    assert plain(checkpoint.load(left / "old")) == plain(content(0))
    with pytest.warns(UserWarning, match="saved is missing; an interrupted save left .*/fresh, which was read instead"):
        assert plain(checkpoint.load(saved)) == plain(content(1))


def test_something_foreign_that_was_exchanged_by_mistake_goes_back(saved, monkeypatch):
    exchange = renames.exchange

    def late(first, second):
        if not (saved / "arrays" / "precious.npy").exists() and first.name == "fresh":
            shutil.rmtree(saved)
            make_foreign(saved)
        return exchange(first, second)

    monkeypatch.setattr(renames, "exchange", late)
    with pytest.raises(jaxferry.CheckpointError, match="exists and is not a JaxFerry checkpoint"):
        checkpoint.save(content(1), saved)
    assert (saved / "arrays" / "precious.npy").read_text() == "mine"
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_the_folder_of_a_save_in_progress_is_not_removed_by_another(saved, monkeypatch):
    save, seen = ocp.Checkpointer.save, []

    def another(self, *args, **kwargs):
        if not seen:
            seen.append(None)
            checkpoint.save(content(5), saved)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", another)
    checkpoint.save(content(1), saved)
    assert seen and plain(checkpoint.load(saved)) == plain(content(1))
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_checkpoint_that_another_process_replaces_while_it_is_looked_at_is_still_one(saved, tmp_path, monkeypatch):
    read_format, calls = replacement.read_format, []

    def late(folder):
        calls.append(folder)
        if len(calls) == 1:
            saved.rename(tmp_path / "aside")
            shutil.copytree(tmp_path / "aside", saved)
            return None
        return read_format(folder)

    monkeypatch.setattr(replacement, "read_format", late)
    checkpoint.save(content(1), saved)
    assert plain(checkpoint.load(saved)) == plain(content(1))


def test_a_failed_save_removes_what_threads_write_after_its_error(tmp_path):
    """TensorStore's threads make the folder anew that they write to."""

    def write_late(folder):
        time.sleep(0.3)
        (folder / "writing" / "d").mkdir(parents=True)

    with pytest.raises(OSError, match="no space"), scratch_beside(tmp_path / "saved") as scratch:
        late = threading.Thread(target=write_late, args=[scratch.folder])
        late.start()
        raise OSError("no space")
    late.join()
    assert not list(tmp_path.iterdir())


def test_folders_of_a_user_that_are_named_like_those_of_other_processes_stay(tmp_path):
    target = tmp_path / "saved"
    checkpoint.save(content(1), target)
    (target / "arrays-2026").mkdir()
    (target / "arrays-2026" / "precious.npy").write_text("mine")
    (target / "arrays-1").write_text("mine")
    checkpoint.save(content(2), target)
    assert (target / "arrays-2026" / "precious.npy").read_text() == (target / "arrays-1").read_text() == "mine"
    assert plain(checkpoint.load(target)) == plain(content(2))
