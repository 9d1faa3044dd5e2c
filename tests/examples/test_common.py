"""examples/common: code that the examples' own tests do not reach."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

import jaxferry
from examples.common import command_line, text
from examples.common.batches import shuffled
from examples.common.training import Run, read_carried
from faults import first_save_fails
from jaxferry.errors import InputError


def loss_fn(params, batch):
    """Pulls a vector towards the batch's; passes on the number and sum of batches so far."""
    error = jnp.square(params["w"] - batch["x"]).mean()
    past = {"count": batch["past"]["count"] + 1, "sum": batch["past"]["sum"] + batch["x"]}
    return error, {"past": past, "largest": jnp.abs(params["w"]).max()}


@pytest.mark.parametrize("asks", [["--traceback"], []])
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("--size must be one"), 2, "error: --size must be one"),
        (FileNotFoundError(2, "no file", "a.txt"), 2, "error: FileNotFoundError: [Errno 2] no file: 'a.txt'"),
        (OSError("no luck"), 1, "error: OSError: no luck"),
        (jaxferry.TaskError("a load\nfailed", "h_0"), 1, "error: a load failed"),
        (jaxferry.InternalError("of JaxFerry"), 1, "error: of JaxFerry"),
    ],
)
def test_an_example_ends_as_the_command_line_does(error, status, line, asks, capsys, monkeypatch):
    app = command_line.make_app()

    @app.command()
    def train():
        raise error

    monkeypatch.setenv("JAXFERRY_TRACEBACK", "0")
    assert command_line.run(app, asks) == status
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith(line) and ("Traceback (most recent call last)" in told) == bool(asks)


FIRST = {"past": {"count": np.int32(0), "sum": np.zeros(4, np.float32)}}


def make_run():
    def batches(step):
        return {"x": np.full(4, step, np.float32)}

    return Run(jaxferry.train_step(loss_fn, optax.sgd(0.1)), batches, batches, 4, "numbers", FIRST)


def started(resume=None):
    run = make_run()
    run.start(lambda key: {"w": jax.random.normal(key, 4)}, 0, resume)
    return run


def test_what_is_carried_reaches_the_next_batch_and_the_rest_is_told(tmp_path, capsys):
    run = started()
    assert run.finish(5, tmp_path / "metrics.jsonl") == 0
    past = run.carried["past"]
    assert past["count"] == 5
    np.testing.assert_array_equal(past["sum"], np.full(4, 0 + 1 + 2 + 3 + 4))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = {"step", "loss", "largest", "numbers_per_s", "step_s", "device_param_bytes_peak"}
    assert all(record.keys() == kept for record in records)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("validation loss after 5 steps: ")
    assert last.endswith(f", largest {float(jnp.abs(run.state.params['w']).max()):.4f}")


def test_a_folder_of_metrics_holds_the_same_numbers_for_tensorboard(tmp_path):
    started().finish(3, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [events] = (tmp_path / "run").glob("events.out.tfevents.*")
    shown = read_scalars(events)
    assert shown.keys() == records[0].keys() - {"step"}
    for name, values in shown.items():
        assert [step for step, _ in values] == [0, 1, 2]
        np.testing.assert_allclose([value for _, value in values], [record[name] for record in records], 1e-6)


def read_scalars(file):
    """The scalars of an event file by name, each a list of step and value."""
    content, shown = file.read_bytes(), {}
    while content:  # length, its checksum, an event, its checksum
        [length] = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            shown.setdefault(value.tag, []).append((event.step, value.simple_value))
        content = content[16 + length :]
    return shown


def test_what_is_carried_is_saved_with_the_state(tmp_path):
    run = started()
    run.finish(3, save=tmp_path / "saved")
    again = started(tmp_path / "saved")
    assert again.state.step == 3
    assert again.carried["past"]["count"] == 3
    np.testing.assert_array_equal(again.carried["past"]["sum"], run.carried["past"]["sum"])
    run.finish(5)
    again.finish(5)
    np.testing.assert_array_equal(again.state.params["w"], run.state.params["w"])


def test_what_is_carried_must_fit_the_batch(tmp_path):
    run = started()
    run.save(tmp_path / "saved")
    with pytest.raises(InputError, match="another --batch"):
        read_carried("saved", run.step.restore(tmp_path / "saved"), {"past": {"count": 0, "sum": np.zeros(5)}})
    run.step.save(run.state, tmp_path / "saved")
    with pytest.raises(InputError, match="saved holds no arrays that this example carries"):
        started(tmp_path / "saved")


def test_a_run_saves_every_few_steps_and_keeps_the_last_with_what_is_carried(tmp_path):
    run = started()
    assert run.finish(7, save=tmp_path / "saved", save_every=2, keep_last=3) == 0
    steps = [saved.step for saved in jaxferry.list_checkpoints(tmp_path / "saved")]
    assert steps == [4, 6, 7]
    again = started(tmp_path / "saved" / "00000004")
    assert again.state.step == again.carried["past"]["count"] == 4
    again.finish(7)
    np.testing.assert_array_equal(again.state.params["w"], run.state.params["w"])
    with pytest.raises(InputError, match="--save-every and --keep-last need --save"):
        run.finish(8, save_every=2)


def test_a_run_goes_on_if_a_save_in_between_fails(tmp_path, monkeypatch, capsys):
    run, calls = started(), first_save_fails(monkeypatch)
    assert run.finish(5, save=tmp_path / "saved", save_every=2) == 0
    assert "warning: cannot write to" in capsys.readouterr().out and len(calls) == 3
    assert started(tmp_path / "saved").state.step == 5


def test_an_epoch_draws_every_number_once_and_the_next_in_another_order():
    batches = shuffled(12, 4, seed=3)
    first, second = (np.concatenate([batches[epoch * 3 + i] for i in range(3)]).tolist() for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_a_separator_follows_each_text():
    tokenizer = text.train_byte_bpe(["one", "two"], 300, ["<end>"])
    tokens = text.encode(tokenizer, ["one", "", "two" * text.PIECE_CHARS], "<end>").tolist()
    first = tokens.index(0)
    assert [i for i, token in enumerate(tokens) if token == 0] == [first, first + 1, len(tokens) - 1]
    assert tokenizer.decode(tokens[:first]) == "one"
    assert tokenizer.decode(tokens) == "one" + "two" * text.PIECE_CHARS
