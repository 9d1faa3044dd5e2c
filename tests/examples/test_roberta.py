"""examples/roberta: its differences from BERT: sizes, sentences, command line."""

import math

import jax
import numpy as np
import pytest

from examples.common.training import count_parameters
from examples.roberta import data, model, train
from jaxferry.errors import InputError
from jaxferry.partition import partition
from metrics_files import read_losses
from plain_optax import assert_same_losses

pytestmark = pytest.mark.slow

SMALL = model.configure(2, 2, 16, max_length=16, vocab_size=300)


@pytest.fixture
def corpus(cache, text):
    return data.load(text, SMALL.vocab_size)


@pytest.fixture
def batches(corpus):
    return data.FullSentences(corpus.train, 4, 16, 0, corpus.tokenizer)


# The published checkpoints, 125 M and 355 M, with the head for masked tokens and without BERT's pooler.
@pytest.mark.parametrize(("size", "expected"), [("base", 124_697_433), ("large", 355_412_057)])
def test_sizes_are_the_published_ones(size, expected):
    assert count_parameters(model.make_init(model.SIZES[size])) == expected


def test_losses_agree_with_a_plain_optax_loop(batches):
    params = jax.jit(model.make_init(SMALL))(jax.random.key(0))
    assert_same_losses(model.make_loss(SMALL), train.ROBERTA.make_optimizer(1e-3), params, batches)


def test_all_blocks_share_one_program(batches):
    params = jax.eval_shape(model.make_init(SMALL), jax.random.key(0))
    segments = partition(model.make_loss(SMALL), params, (batches(0),), {}).segments
    names = [segment.name for segment in segments]
    heads = ["transform", "transform_ln", "tokens#2", "bias"]
    assert names == ["tokens", "positions", "types", "ln", "block_0", "block_1", *heads]
    assert segments[4].program == segments[5].program


def test_padding_changes_nothing(batches):
    """Neither the amount of padding nor the tokens at masked positions change the loss."""
    params = jax.jit(model.make_init(SMALL))(jax.random.key(0))
    loss_fn = jax.jit(model.make_loss(SMALL))
    batch = batches(0)
    batch["tokens"][:, 10:] = data.PAD
    batch["positions"] %= 10
    short = batch | {name: batch[name][:, :10] for name in ("tokens", "types")}
    np.testing.assert_allclose(loss_fn(params, batch)[0], loss_fn(params, short)[0], rtol=1e-6)
    batch["tokens"][:, 10:] = data.START
    assert abs(loss_fn(params, batch)[0] - loss_fn(params, short)[0]) > 1e-5


def test_the_first_position_is_the_third_row_of_the_table(batches):
    params = jax.jit(model.make_init(SMALL))(jax.random.key(0))
    batch = batches(0)
    gradients = jax.grad(lambda params: model.make_loss(SMALL)(params, batch)[0])(params)
    used = np.flatnonzero(np.abs(gradients["positions"]["embedding"]).max(1))
    np.testing.assert_array_equal(used, np.arange(2, 18))


def test_a_row_is_whole_lines(corpus):
    rows = data.FullSentences(corpus.train, 50, 60, 0, corpus.tokenizer).draw(np.random.default_rng(0))
    lines = corpus.tokenizer.decode(corpus.train.tolist()).split("\n")
    for row in rows:
        end = np.flatnonzero(row == data.END)[-1]
        assert row[0] == data.START
        assert (row[end + 1 :] == data.PAD).all()
        told = corpus.tokenizer.decode(row[1:end].tolist()).split("\n")
        # A line break may come in one token with the next line's blanks.
        assert {line.strip() for line in told} <= {line.strip() for line in lines} | {""}
    assert len({int((row != data.PAD).sum()) for row in rows}) > 3


def test_a_row_may_cross_from_one_text_to_the_next(cache, tmp_path):
    for name in "ab":
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"{name}\n" * 100)
    corpus = data.load(tmp_path / "texts", 300)
    rows = data.FullSentences(corpus.train, 200, 20, 0, corpus.tokenizer).draw(np.random.default_rng(0))
    crossing = [row for row in rows.tolist() if data.END in row[1 : row.index(data.PAD) - 1 if data.PAD in row else -1]]
    assert crossing
    told = corpus.tokenizer.decode(crossing[0])
    assert told.index("a") < told.index("b")


def test_a_sentence_that_has_no_room_is_cut(corpus):
    tokens = np.full(100, 40, np.uint16)
    rows = data.FullSentences(tokens, 3, 10, 0, corpus.tokenizer).draw(np.random.default_rng(0))
    np.testing.assert_array_equal(rows, [[data.START, *[40] * 8, data.END]] * 3)


def test_the_same_sentences_are_masked_anew_each_step(corpus):
    whole = np.concatenate([corpus.train[:13], [data.END]]).astype(np.uint16)
    batches = data.FullSentences(whole, 1, 13, 0, corpus.tokenizer)
    masked = [batches(step)["positions"].tolist() for step in range(8)]
    assert len({str(positions) for positions in masked}) > 1
    assert masked == [batches(step)["positions"].tolist() for step in range(8)]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(model.SIZES, "tiny", SMALL)


def run(text, *args):
    small = ["--batch", "2", "--seq", "16", "--sample-tokens", "0"]
    return train.main(["--data", str(text), *small, *map(str, args)])


def test_training_learns_and_a_resumed_run_goes_on_bit_by_bit(small, cache, text, tmp_path, capsys):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(text, "--steps", 80, "--lr", "0.01", "--metrics", whole, "--sample-tokens", 2) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "validation loss" in line]
    before, after = (float(line.split(": ")[1].split(",")[0]) for line in lines)
    assert abs(before - math.log(300)) < 0.3
    assert after < before - 1
    assert "masked tokens filled in" in printed
    saved = tmp_path / "saved"
    assert run(text, "--steps", 3, "--lr", "0.01", "--metrics", parts, "--save", saved) == 0
    assert run(text, "--steps", 6, "--lr", "0.01", "--metrics", parts, "--resume", saved) == 0
    assert read_losses(whole)[:6] == read_losses(parts)


def test_bad_input_is_one_line_and_status_2(small, cache, text, capsys):
    for args, message in [
        (["--size", "huge"], "--size must be one of tiny, base, large, got huge"),
        (["--seq", "17"], "--seq must be at most the 16 positions of size tiny, got 17"),
        (["--seq", "2"], "--seq must be at least 3"),
        (["--resume", "no/such/state"], "no/such/state"),
    ]:
        assert run(text, "--steps", "1", *args) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_text_shorter_than_a_row_is_refused(corpus):
    with pytest.raises(InputError, match="--seq must be below the 8 tokens"):
        data.FullSentences(np.arange(8, dtype=np.uint16), 1, 8, 0, corpus.tokenizer)
