"""examples/bert: its model against NumPy and the published sizes, its batches, its command line from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import small_examples
from examples.bert import data, fill, masking, model, train
from small_examples import attend, dense, exact, gelu, norm, vocabulary

pytestmark = pytest.mark.slow

SMALL = small_examples.SMALL["bert"]

SPECIAL = len(data.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def params():
    return small_examples.params_of("bert")


@pytest.fixture(scope="module")
def batch():
    """A batch whose second row is shorter than the others."""
    batch = small_examples.batches_of("bert", None)(0)
    batch["tokens"][1, 12:] = data.PAD
    batch["positions"][1] = [3, 5]
    batch["weights"][1] = [1, 0]
    return batch


loss_fn = jax.jit(model.make_loss(SMALL))


def numpy_heads(config, params, tokens, types):
    """BERT for one row, token by token: each attends to all that are no padding."""
    p = exact(params)
    places = config.first_position + np.arange(len(tokens))
    x = p["tokens"]["embedding"][tokens] + p["positions"]["embedding"][places] + p["types"]["embedding"][types]
    x = norm(x, p["ln"], config.epsilon)
    seen = np.flatnonzero(tokens != config.pad)
    for layer in (p[f"block_{i}"] for i in range(config.num_layers)):
        y = attend(*(dense(x, layer[name]) for name in ("query", "key", "value")), config.num_heads, lambda t: seen)
        x = norm(x + dense(y, layer["proj"]), layer["ln_1"], config.epsilon)
        x = norm(x + dense(gelu(dense(x, layer["up"])), layer["down"]), layer["ln_2"], config.epsilon)
    transformed = norm(gelu(dense(x, p["transform"])), p["transform_ln"], config.epsilon)
    logits = transformed @ p["tokens"]["embedding"].T + p["bias"]
    return logits, dense(np.tanh(dense(x[0], p["pooler"])), p["next"]) if config.predicts_next else None


def test_losses_are_those_of_a_numpy_bert(params, batch):
    losses, hits, next_losses, next_hits = [], [], [], []
    for b in range(3):
        logits, follows = numpy_heads(SMALL, params, batch["tokens"][b], batch["types"][b])
        for position, label, weight in zip(*(batch[name][b] for name in ("positions", "labels", "weights"))):
            if weight:
                losses.append(-log_softmax(logits[position])[label])
                hits.append(logits[position].argmax() == label)
        next_losses.append(-log_softmax(follows)[batch["follows"][b]])
        next_hits.append(follows.argmax() == batch["follows"][b])
    assert len(losses) == 5
    loss, told = loss_fn(params, batch)
    np.testing.assert_allclose(loss, np.mean(losses) + np.mean(next_losses), rtol=1e-5)
    np.testing.assert_allclose(told["masked_loss"], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(told["next_loss"], np.mean(next_losses), rtol=1e-5)
    np.testing.assert_allclose(told["masked_accuracy"], np.mean(hits), rtol=1e-6)
    np.testing.assert_allclose(told["next_accuracy"], np.mean(next_hits), rtol=1e-6)


def test_weights_decay_but_not_biases_and_norms(params):
    step = train.BERT.make_optimizer(1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = step.init(params)
    for _ in range(2):
        updates, state = step.update(zeros, state, params)
    decayed = {jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(updates) if jnp.any(leaf != 0)}
    matrices = {jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(params) if leaf.ndim > 1}
    assert decayed == matrices


def test_the_masked_share_is_hidden_replaced_or_kept():
    tokens = np.random.default_rng(0).integers(0, 50, size=(200, 100), dtype=np.int32)
    masked = masking.mask_tokens(np.random.default_rng(1), tokens, 5, 4, 50)
    B, P = masked["positions"].shape
    assert masking.count_masked(100) == P == 15
    chosen = masked["weights"] == 1
    np.testing.assert_array_equal(chosen.sum(1), np.rint(0.15 * (tokens >= 5).sum(1)))
    assert all(len(set(row)) == P for row in masked["positions"].tolist())
    was = np.take_along_axis(tokens, masked["positions"], 1)
    np.testing.assert_array_equal(masked["labels"], was)
    assert (was[chosen] >= 5).all()
    shown = np.take_along_axis(masked["tokens"], masked["positions"], 1)
    assert abs((shown == 4)[chosen].mean() - 0.8) < 0.03
    # One in 45 replacements is by chance the token itself.
    assert abs((shown == was)[chosen].mean() - 0.1 - 0.1 / 45) < 0.03
    assert (shown[chosen] >= 4).all()
    untouched = np.ones(tokens.shape, bool)
    rows = np.broadcast_to(np.arange(B)[:, None], chosen.shape)
    untouched[rows[chosen], masked["positions"][chosen]] = False
    np.testing.assert_array_equal(masked["tokens"][untouched], tokens[untouched])


def test_a_row_is_two_spans_that_follow_each_other_or_not():
    batches = data.Pairs(np.arange(SPECIAL, 5000, dtype=np.uint16), 64, 32, 0, vocabulary(5000))
    batch = batches(3)
    tokens = batch["tokens"].copy()
    np.put_along_axis(tokens, batch["positions"], batch["labels"], 1)
    num_following = 0
    for row, types, follows in zip(tokens, batch["types"], batch["follows"]):
        middle, last = np.flatnonzero(row == data.SEP)
        first, second = row[1:middle], row[middle + 1 : last]
        assert row[0] == data.CLS
        assert last == 31
        assert len(first) >= 7
        assert len(second) >= 7
        assert (np.diff(first) == 1).all()
        assert (np.diff(second) == 1).all()
        assert (second[0] == first[-1] + 1) == follows
        np.testing.assert_array_equal(types, np.arange(32) > middle)
        num_following += follows
    assert 16 < num_following < 48


def test_what_is_filled_in_is_the_likeliest_token(params, batch):
    filled, likely = fill.fill_in(SMALL, params, batch)
    for b in range(3):
        logits, _ = numpy_heads(SMALL, params, batch["tokens"][b], batch["types"][b])
        expected = logits[batch["positions"][b]]
        np.testing.assert_array_equal(filled[b], expected.argmax(-1))
        np.testing.assert_allclose(likely[b], np.exp(log_softmax(expected, axis=-1)).max(-1), rtol=1e-4)


def test_the_tokenizer_knows_the_words_and_the_special_tokens(cache, text):
    corpus = data.load(text, 300)
    assert [corpus.tokenizer.token_to_id(token) for token in data.SPECIAL_TOKENS] == list(range(SPECIAL))
    assert corpus.train.max() < 300
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("Fähre\nreturn").ids) == "fahre return"
