"""A short campaign in every run of the tests; `make attack SECONDS=600` runs longer ones."""

import pytest

from attack import campaign
from attack.attacks import ATTACKS


@pytest.mark.parametrize("tries", [pytest.param(1, id="short"), pytest.param(60, id="long", marks=pytest.mark.slow)])
def test_nothing_gets_through(tries):
    results = campaign.run(list(ATTACKS), seconds=500, tries=tries)
    assert {name: result["lost"] for name, result in results.items()} == {name: [] for name in ATTACKS}
    assert all(result["tried"] > 0 for result in results.values())


def test_what_gets_through_is_counted_and_named(monkeypatch):
    def broken(rng, shared):
        assert rng.random() < 0.5, "too large"

    monkeypatch.setitem(ATTACKS, "fork", broken)
    lines = []
    result = campaign.run(["fork"], seconds=500, tries=40, report=lines.append)["fork"]
    assert result["held"] + len(result["lost"]) == result["tried"] == 40 and 0 < result["held"] < 40
    assert len(lines) == len(result["lost"]) and "too large" in lines[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", campaign.SANITIZERS)
def test_nothing_gets_through_under_sanitizers(sanitizer):
    results = campaign.run_sanitized(sanitizer, seconds=60, first=0)["attacks"]
    assert {name: result["lost"] for name, result in results.items()} == {name: [] for name in campaign.SANITIZED}
    assert all(result["tried"] > 0 for result in results.values())


@pytest.mark.parametrize(("status", "lost"), [(0, 0), (66, 1)])
def test_a_report_of_a_sanitizer_counts_as_lost(monkeypatch, tmp_path, status, lost):
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    tool = tmp_path / "tools" / "sanitized"
    tool.parent.mkdir()
    tool.write_text(f"""#!/bin/sh
while [ "$1" != --output ]; do shift; done
echo '{{"seconds": 1, "attacks": {{"model": {{"tried": 2, "held": 2, "lost": []}}}}}}' > "$2"
exit {status}
""")
    tool.chmod(0o755)
    results = campaign.run_sanitized("thread", seconds=1, first=0)["attacks"]
    assert sum(len(result["lost"]) for result in results.values()) == lost
