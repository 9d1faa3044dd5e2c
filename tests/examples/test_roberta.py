"""examples/roberta: its differences from BERT: sizes, sentences, command line."""

import jax
import numpy as np
import pytest

import small_examples
from examples.roberta import data, model

pytestmark = pytest.mark.slow

SMALL = small_examples.SMALL["roberta"]


@pytest.fixture
def corpus(cache, text):
    return data.load(text, SMALL.vocab_size)


@pytest.fixture
def batches(corpus):
    return data.FullSentences(corpus.train, 4, 16, 0, corpus.tokenizer)


def test_padding_changes_nothing(batches):
    """Neither the amount of padding nor the tokens at masked positions change the loss."""
    params = small_examples.params_of("roberta")
    loss_fn = jax.jit(model.make_loss(SMALL))
    batch = batches(0)
    batch["tokens"][:, 10:] = data.PAD
    batch["positions"] %= 10
    short = batch | {name: batch[name][:, :10] for name in ("tokens", "types")}
    np.testing.assert_allclose(loss_fn(params, batch)[0], loss_fn(params, short)[0], rtol=1e-6)
    batch["tokens"][:, 10:] = data.START
    assert abs(loss_fn(params, batch)[0] - loss_fn(params, short)[0]) > 1e-5


def test_the_first_position_is_the_third_row_of_the_table(batches):
    params = small_examples.params_of("roberta")
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
