"""examples/bert: its model against NumPy and the published sizes, its batches, its command line from end to end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from scipy.special import erf, log_softmax

from examples.bert import data, fill, masking, model, train
from examples.common.training import count_parameters
from jaxferry.errors import InputError
from jaxferry.partition import partition
from metrics_files import read_losses, read_metrics
from plain_optax import assert_same_losses

pytestmark = pytest.mark.slow

SMALL = model.Config(num_layers=2, num_heads=2, channels=16, max_length=16, vocab_size=64)
SPECIAL = len(data.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def params():
    """Parameters without zeros, so that omitting one is noticed."""
    fresh = jax.jit(model.make_init(SMALL))(jax.random.key(0))
    leaves, tree = jax.tree.flatten(fresh)
    rng = np.random.default_rng(2)
    return jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32) for leaf in leaves])


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The part of a tokenizer that batches use."""

    size: int

    def get_vocab_size(self):
        return self.size


def make_batches():
    tokens = np.random.default_rng(1).integers(SPECIAL, SMALL.vocab_size, size=2000).astype(np.uint16)
    return data.Pairs(tokens, 3, 16, 0, Vocabulary(SMALL.vocab_size))


@pytest.fixture(scope="module")
def batch():
    """A batch whose second row is shorter than the others."""
    batch = make_batches()(0)
    batch["tokens"][1, 12:] = data.PAD
    batch["positions"][1] = [3, 5]
    batch["weights"][1] = [1, 0]
    return batch


loss_fn = jax.jit(model.make_loss(SMALL))


def numpy_heads(config, params, tokens, types):
    """BERT for one row, token by token: each attends to all that are no padding."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, p):
        variance = ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True)
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + config.epsilon) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def gelu(x):
        return x * (1 + erf(x / np.sqrt(2))) / 2

    places = config.first_position + np.arange(len(tokens))
    x = p["tokens"]["embedding"][tokens] + p["positions"]["embedding"][places] + p["types"]["embedding"][types]
    x = norm(x, p["ln"])
    seen = np.flatnonzero(tokens != config.pad)
    width = config.channels // config.num_heads
    for layer in (p[f"block_{i}"] for i in range(config.num_layers)):
        q, k, v = (dense(x, layer[name]) for name in ("query", "key", "value"))
        y = np.zeros_like(x)
        for t in range(len(tokens)):
            for part in (slice(head * width, (head + 1) * width) for head in range(config.num_heads)):
                weights = np.exp(k[seen, part] @ q[t, part] / np.sqrt(width))
                y[t, part] = weights / weights.sum() @ v[seen, part]
        x = norm(x + dense(y, layer["proj"]), layer["ln_1"])
        x = norm(x + dense(gelu(dense(x, layer["up"])), layer["down"]), layer["ln_2"])
    logits = norm(gelu(dense(x, p["transform"])), p["transform_ln"]) @ p["tokens"]["embedding"].T + p["bias"]
    follows = dense(np.tanh(dense(x[0], p["pooler"])), p["next"]) if config.predicts_next else None
    return logits, follows


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


def test_an_untrained_model_knows_nothing(batch):
    _, told = loss_fn(jax.jit(model.make_init(SMALL))(jax.random.key(0)), batch)
    assert abs(told["masked_loss"] - math.log(SMALL.vocab_size)) < 0.2
    assert abs(told["next_loss"] - math.log(2)) < 0.1


# The published checkpoints, 110 M and 340 M: encoder with pooler 109,482,240 and 335,141,888; the heads' transform
# C^2 + C and its LayerNorm 2 C, a bias for each token, and the next sentence's 2 C + 2.
@pytest.mark.parametrize(
    ("size", "encoder", "C"), [("base", 109_482_240, 768), ("large", 335_141_888, 1024)], ids=["base", "large"]
)
def test_sizes_are_the_published_ones(size, encoder, C):
    heads = C**2 + C + 2 * C + 30522 + 2 * C + 2
    assert count_parameters(model.make_init(model.SIZES[size])) == encoder + heads


def test_losses_agree_with_a_plain_optax_loop(params):
    assert_same_losses(model.make_loss(SMALL), train.BERT.make_optimizer(1e-3), params, make_batches())


def test_losses_with_dropout_agree_too(params):
    draw = make_batches()

    def batches(step):
        return {**draw(step), "key": jax.random.fold_in(jax.random.key(0), step)}

    config = dataclasses.replace(SMALL, dropout=0.1)
    assert_same_losses(model.make_loss(config), train.BERT.make_optimizer(1e-3), params, batches)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_all_blocks_share_one_program_and_only_the_hidden_state_crosses(rate, params, batch):
    config = dataclasses.replace(SMALL, dropout=rate)
    key = {"key": jax.random.key(0)} if rate else {}
    segments = partition(model.make_loss(config), params, (batch | key,), {}).segments
    names = [segment.name for segment in segments]
    heads = ["pooler", "next", "transform", "transform_ln", "tokens#2", "bias"]
    assert names == ["tokens", "positions", "types", "ln", "block_0", "block_1", *heads]
    assert segments[4].program == segments[5].program
    assert len({segment.program for segment in segments}) == len(segments) - 1
    assert [len(segment.outputs) for segment in segments[:5]] == [1] * 5


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
    batches = data.Pairs(np.arange(SPECIAL, 5000, dtype=np.uint16), 64, 32, 0, Vocabulary(5000))
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


def test_a_batch_depends_on_seed_and_step_alone():
    tokens = np.random.default_rng(1).integers(SPECIAL, 64, size=2000).astype(np.uint16)

    def draw(seed, step):
        return data.Pairs(tokens, 4, 16, seed, Vocabulary(64))(step)

    first, again = draw(0, 7), draw(0, 7)
    assert all((first[name] == again[name]).all() for name in first)
    assert not (draw(0, 8)["labels"] == first["labels"]).all()
    assert not (draw(1, 7)["labels"] == first["labels"]).all()


def test_what_is_filled_in_is_the_likeliest_token(params, batch):
    filled, likely = fill.fill_in(SMALL, params, batch)
    for b in range(3):
        logits, _ = numpy_heads(SMALL, params, batch["tokens"][b], batch["types"][b])
        expected = logits[batch["positions"][b]]
        np.testing.assert_array_equal(filled[b], expected.argmax(-1))
        np.testing.assert_allclose(likely[b], np.exp(log_softmax(expected, axis=-1)).max(-1), rtol=1e-4)


def test_the_table_of_filled_in_tokens_shows_the_text_as_it_is(params, batch):
    class Tokenizer:
        def decode(self, tokens):
            return "".join(f"[/{token}]" for token in tokens)

    hidden = {name: batch[name].copy() for name in batch}
    np.put_along_axis(hidden["tokens"], hidden["positions"], data.MASK, axis=1)
    console = Console(width=400)
    with console.capture() as capture:
        console.print(fill.make_table(SMALL, params, hidden, Tokenizer(), data.MASK, 1))
    at, label = min(zip(hidden["positions"][0].tolist(), hidden["labels"][0].tolist()))
    _, row = capture.get().rstrip().split("\n")
    around = row.split("  ", 1)[0]
    guess, probability, truth = row.split()[-3:]
    before = "".join(f"[/{token}]" for token in hidden["tokens"][0, max(0, at - fill.CONTEXT_TOKENS) : at])
    assert around.strip().startswith(f"{before} ____ ")
    filled, likely = fill.fill_in(SMALL, params, hidden)
    i = hidden["positions"][0].tolist().index(at)
    assert (guess, truth) == (f"'[/{filled[0, i]}]'", f"'[/{label}]'")
    assert probability == f"{likely[0, i]:.2f}"


@pytest.fixture
def small(monkeypatch):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    monkeypatch.setitem(model.SIZES, "tiny", dataclasses.replace(SMALL, vocab_size=300))


def run(text, *args):
    small = ["--batch", "2", "--seq", "16", "--sample-tokens", "0"]
    return train.main(["--data", str(text), *small, *map(str, args)])


def test_the_tokenizer_knows_the_words_and_the_special_tokens(cache, text):
    corpus = data.load(text, 300)
    assert [corpus.tokenizer.token_to_id(token) for token in data.SPECIAL_TOKENS] == list(range(SPECIAL))
    assert corpus.train.max() < 300
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("Fähre\nreturn").ids) == "fahre return"


def test_training_learns_and_fills_in(small, cache, text, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    assert run(text, "--steps", 150, "--lr", "0.01", "--metrics", metrics, "--sample-tokens", 2) == 0
    records = read_metrics(metrics)
    assert [record["step"] for record in records] == list(range(150))
    assert records[0].keys() >= {"loss", "masked_loss", "next_loss", "masked_accuracy", "next_accuracy"}
    printed = capsys.readouterr().out
    before, after = (
        float(line.split("masked_loss ")[1].split(",")[0]) for line in printed.splitlines() if "validation" in line
    )
    assert after < before - 1
    assert "masked tokens filled in" in printed


def test_a_resumed_run_goes_on_bit_by_bit(small, cache, text, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(text, "--steps", 6, "--metrics", whole) == 0
    assert run(text, "--steps", 3, "--metrics", parts, "--save", tmp_path / "saved") == 0
    assert run(text, "--steps", 6, "--metrics", parts, "--resume", tmp_path / "saved") == 0
    assert read_losses(whole) == read_losses(parts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--size", "huge"], "--size must be one of tiny, base, large, got huge"),
        (["--seq", "257"], "--seq must be at most the 256 positions of size tiny, got 257"),
        (["--seq", "7"], "--seq must be at least 8"),
        (["--compute-dtype", "int8"], "--compute-dtype must be one of float32, bfloat16, float16, got int8"),
        (["--memory-budget", "much"], "memory_budget must be a number of bytes"),
        (["--data", "no/such/file"], "no/such/file"),
        (["--resume", "no/such/state"], "no/such/state"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args, message, cache, text, capsys):
    assert run(text, "--steps", "1", *args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_text_shorter_than_a_row_is_refused():
    with pytest.raises(InputError, match="--seq must be below the 8 tokens"):
        data.Pairs(np.arange(8, dtype=np.uint16), 1, 8, 0, Vocabulary(100))
