"""Messages between processes, without the processes: both ends share a dictionary."""

import types

import pytest

import jaxferry
from jaxferry.processes import all_processes


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (jaxferry.CheckpointError("cannot write"), "cannot write"),
        (jaxferry.ScratchError("the scratch file failed"), "the scratch file failed"),
        (ValueError("other"), r"ValueError\('other'\)"),
    ],
)
def test_the_others_are_told_the_error_of_a_process_under_all_names_that_they_wait_for(monkeypatch, error, told):
    known = {}
    client = types.SimpleNamespace(
        key_value_set=known.__setitem__, blocking_key_value_get=lambda key, timeout_ms: known[key]
    )
    monkeypatch.setattr(all_processes, "coordination_client", lambda: client)
    one, other = (all_processes.Messages("save", process, 2) for process in range(2))
    with pytest.raises(type(error)), other.reporting("end", "began", "size"):
        other.send("began", "3")
        raise error
    assert one.receive("began", 1) == "3"
    for name in ("end", "size"):
        with pytest.raises(jaxferry.CheckpointError, match=f"^process 1: (?:{told})$"):
            one.receive(name, 1)
