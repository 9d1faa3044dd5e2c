"""Saves in other processes: killed, limited, at the same time. The path always holds the old or the new checkpoint."""

import shutil
import warnings

import pytest

import jaxferry
import killed_saves
from checkpoints import content, earlier, plain
from jaxferry import checkpoint


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    counter = killed_saves.COMPILER and killed_saves.build_counter(tmp_path_factory.mktemp("counter"))
    with killed_saves.server(counter) as server:
        yield server


NEEDS_COMPILER = pytest.mark.skipif(killed_saves.COMPILER is None, reason="needs a C compiler")


def load_quietly(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(checkpoint.load(path))


class Campaign:
    """Kills one save after the other at one path; each must leave what was there, or what it saved."""

    def __init__(self, saves, folder, **options):
        self.saves, self.path, self.options = saves, folder / "saved", options
        checkpoint.save(content(0), self.path)
        self.current, self.seed = plain(content(0)), 0
        self.outcomes = {"old": 0, "new": 0}

    def save(self, **kill):
        """Starts a save, which is killed; returns its answer, None if it was killed before it had one."""
        self.seed += 1
        (answer,) = self.saves.ask(path=self.path, seeds=[self.seed], **self.options, **kill)
        assert "error" not in (answer or {}), answer["trace"]
        found, new = load_quietly(self.path), plain(content(self.seed))
        assert found in (self.current, new)
        self.outcomes["new" if found == new else "old"] += 1
        self.current = found
        return answer

    def finish(self):
        """Checks that a save that is not killed removes what the others have left, and names it."""
        left = [path.name for path in self.path.parent.iterdir() if path != self.path]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(content(99), self.path)
        assert [path.name for path in self.path.parent.iterdir()] == ["saved"]
        assert all(any(name in str(warning.message) for warning in caught) for name in left)
        assert load_quietly(self.path) == plain(content(99))


@NEEDS_COMPILER
@pytest.mark.parametrize("num_kills", [pytest.param(3, id="few"), pytest.param(999, marks=pytest.mark.slow, id="each")])
def test_a_save_killed_at_a_call_that_touches_a_file_leaves_the_old_or_the_new_checkpoint(saves, tmp_path, num_kills):
    campaign = Campaign(saves, tmp_path)
    num_calls = campaign.save(kill_at_call=10**9)["calls"]
    # The last calls are those after the switch.
    calls = {*range(1, num_calls, max(1, num_calls // num_kills)), num_calls - 1}
    for call in sorted(calls):
        campaign.save(kill_at_call=call)
    print(f"killed at {len(calls)} of {num_calls} calls: {campaign.outcomes}")
    assert min(campaign.outcomes.values()) > 0
    campaign.finish()


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [pytest.param(2, id="few"), pytest.param(60, id="many")])
def test_a_killed_save_over_a_checkpoint_of_an_earlier_version_is_continued_by_the_next(saves, tmp_path, num_kills):
    first = shutil.copytree(earlier(tmp_path) / "processes", tmp_path / "first")
    num_calls = saves.ask(path=first, seeds=[1], kill_at_call=10**9)[0]["calls"]
    outcomes = set()
    for number in range(num_kills):
        path = shutil.copytree(tmp_path / "earlier" / "processes", tmp_path / str(number) / "saved")
        # The last calls move what the earlier version has written.
        saves.ask(path=path, seeds=[1], kill_at_call=num_calls - 1 - 7 * number)
        found = load_quietly(path)
        assert found in (plain(content(0)), plain(content(1)))
        outcomes.add(found["step"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.save(content(2), path)
        assert load_quietly(path) == plain(content(2))
        assert len(list(path.iterdir())) == 1 and [other.name for other in path.parent.iterdir()] == ["saved"]
    assert 1 in outcomes


@NEEDS_COMPILER
def test_a_first_save_killed_leaves_nothing_or_a_whole_checkpoint(saves, tmp_path):
    path = tmp_path / "saved"
    (answer,) = saves.ask(path=tmp_path / "other", seeds=[1], kill_at_call=10**9)
    for call in range(1, answer["calls"], answer["calls"] // 2):
        saves.ask(path=path, seeds=[1], kill_at_call=call)
        try:
            assert load_quietly(path) == plain(content(1))
        except jaxferry.CheckpointError:
            assert not path.exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.save(content(2), path)
        assert load_quietly(path) == plain(content(2))
        shutil.rmtree(path)


@pytest.mark.parametrize("max_file_bytes", [400, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_limit_of_the_size_of_files_is_told_and_leaves_the_old_checkpoint(saves, tmp_path, max_file_bytes):
    saved = tmp_path / "saved"
    checkpoint.save(content(0), saved)
    for path in (saved, tmp_path / "new" / "deep"):
        (answer,) = saves.ask(path=path, seeds=[1], max_file_bytes=max_file_bytes)
        assert answer["error"].startswith(f"CheckpointError: cannot write to {path}: "), answer["trace"]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert load_quietly(saved) == plain(content(0))
