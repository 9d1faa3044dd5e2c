"""examples/transformer_xl: its model against NumPy, its memory, its streams, its command line from end to end."""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import small_examples
from benchmarks.papers.paper_models import transformer_xl
from examples.common.training import count_parameters
from examples.transformer_xl import data, model, sample
from jaxferry.errors import InputError
from metrics_files import read_losses
from small_examples import B, M, T, dense, exact, norm, run

pytestmark = pytest.mark.slow

SMALL = small_examples.SMALL["transformer_xl"]


@pytest.fixture
def small(monkeypatch):
    small_examples.tiny(monkeypatch, "transformer_xl")


@pytest.fixture(scope="module")
def params():
    return small_examples.params_of("transformer_xl")


def make_streams(batch_size=B, length=T, num_tokens=500, seed=0):
    tokens = np.random.default_rng(1).integers(SMALL.vocab_size, size=num_tokens).astype(np.uint16)
    return data.Streams(tokens, batch_size, length, seed)


def make_memory(length):
    rng = np.random.default_rng(3)
    return [rng.normal(size=(B, length, SMALL.channels)).astype(np.float32) for _ in range(SMALL.num_layers)]


loss_fn = jax.jit(model.make_loss(SMALL))


@jax.jit
def apply(params, tokens, memory):
    return model.TransformerXL(SMALL).apply({"params": params}, tokens, memory)


def numpy_model(config, params, tokens, memory):
    """Transformer-XL for one row, token by token: logits, and the inputs of each block behind its memory."""
    p = exact(params)
    width = config.channels // config.num_heads
    parts = [slice(head * width, (head + 1) * width) for head in range(config.num_heads)]

    def wave(distance):
        angles = distance / 10000 ** (2 * np.arange(config.channels // 2) / config.channels)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    x, pasts = p["tokens"]["embedding"][tokens] * np.sqrt(config.channels), []
    for layer, before in zip((p[f"block_{i}"] for i in range(config.num_layers)), memory, strict=True):
        past, a = np.concatenate([before, x]), layer["attention"]
        pasts.append(past)
        q, k, v = dense(x, a["query"]), dense(past, a["key"]), dense(past, a["value"])
        y = np.zeros_like(x)
        for t, (i, part) in itertools.product(range(len(tokens)), enumerate(parts)):
            place = len(before) + t
            scores = [
                (q[t, part] + a["u"][i]) @ k[j, part]
                + (q[t, part] + a["v"][i]) @ dense(wave(place - j), a["distance"])[part]
                for j in range(place + 1)
            ]
            weights = np.exp(np.array(scores) / np.sqrt(width))
            y[t, part] = weights / weights.sum() @ v[: place + 1, part]
        x = norm(x + dense(y, a["proj"]), layer["ln_1"], 1e-6)
        x = norm(x + dense(np.maximum(dense(x, layer["up"]), 0), layer["down"]), layer["ln_2"], 1e-6)
    return x @ p["tokens"]["embedding"].T + p["bias"], pasts


@pytest.mark.parametrize("length", [M, 4, 1])
def test_logits_and_memory_are_those_of_a_numpy_transformer_xl(length, params):
    tokens, memory = make_streams()(0)["tokens"][:, :-1], make_memory(length)
    logits, new = apply(params, tokens, memory)
    for row in range(B):
        expected, pasts = numpy_model(SMALL, params, tokens[row], [block[row] for block in memory])
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
        for block, past in zip(new, pasts, strict=True):
            np.testing.assert_allclose(block[row], past[-length:], atol=1e-5)


def test_the_memory_reaches_further_back_than_the_segment(params):
    """A token two segments ago changes the predictions."""
    tokens = np.random.default_rng(4).integers(SMALL.vocab_size, size=(1, 3 * T))
    other = tokens.copy()
    other[0, 1] = (other[0, 1] + 1) % SMALL.vocab_size
    results = []
    for row in (tokens, other):
        memory = model.empty_memory(SMALL, 1, T, np.float32)
        for segment in np.split(row, 3, axis=1):
            logits, memory = apply(params, segment, memory)
        results.append(logits)
    assert np.abs(results[0] - results[1]).max() > 1e-5


def test_no_gradient_goes_into_the_memory_or_comes_out_of_it(params):
    batch = {"tokens": make_streams()(0)["tokens"], "is_start": np.bool_(False)}
    memory = make_memory(M)
    gradients = jax.grad(lambda memory: model.make_loss(SMALL)(params, {**batch, "memory": memory})[0])(memory)
    assert all((leaf == 0).all() for leaf in gradients)

    def sum_of_memory(params):
        _, told = model.make_loss(SMALL)(params, {**batch, "memory": memory})
        return sum(block.sum() for block in told["memory"])

    assert all((leaf == 0).all() for leaf in jax.tree.leaves(jax.grad(sum_of_memory)(params)))


def test_where_streams_start_the_memory_counts_as_empty(params):
    tokens = make_streams()(0)["tokens"]
    full, empty = make_memory(M), model.empty_memory(SMALL, B, M, np.float32)
    losses = [
        float(loss_fn(params, {"tokens": tokens, "is_start": np.bool_(start), "memory": memory})[0])
        for start, memory in [(True, full), (True, empty), (False, empty), (False, full)]
    ]
    assert losses[0] == losses[1] == losses[2] != losses[3]


def paper_model(size):
    return transformer_xl(float(size.removesuffix("b")), 8, 384)


@pytest.mark.parametrize("size", [size for size in model.SIZES if size != "tiny"])
def test_sizes_are_those_of_the_paper(size):
    config, paper = model.SIZES[size], paper_model(size)
    assert config.channels == paper.hidden
    assert (config.num_layers, config.num_heads, config.vocab_size) == (paper.blocks, paper.heads, paper.vocabulary)
    np.testing.assert_allclose(paper.num_parameters, float(size.removesuffix("b")) * 1e9, rtol=0.05)


@pytest.mark.parametrize("size", ["0.7b", "6.7b"])
def test_parameters_are_as_many_as_in_the_paper(size):
    count = count_parameters(model.make_init(model.SIZES[size]))
    np.testing.assert_allclose(count, paper_model(size).num_parameters, rtol=2e-3)


def test_streams_go_on_where_they_ended():
    tokens = np.arange(100, dtype=np.uint16)
    streams = data.Streams(tokens, 3, 5, 0)
    batches = [streams(step) for step in range(streams.num_segments)]
    assert len(batches) == 6
    whole = np.concatenate([batches[0]["tokens"][:, :1], *(batch["tokens"][:, 1:] for batch in batches)], axis=1)
    assert whole.shape == (3, 31)
    assert ((whole[:, 1:] - whole[:, :-1]) % 100 == 1).all()
    assert (np.diff(whole[:, 0]) % 100 == 33).all()
    assert [bool(batch["is_start"]) for batch in batches] == [True] + [False] * 5
    again = streams(streams.num_segments)
    assert again["is_start"]
    np.testing.assert_array_equal(again["tokens"], batches[0]["tokens"])
    assert not (data.Streams(tokens, 3, 5, 1)(0)["tokens"] == batches[0]["tokens"]).any()


def test_a_text_too_short_for_the_streams_is_refused():
    make_streams(num_tokens=B * (T + 1))
    with pytest.raises(InputError, match=r"--batch times --seq must be below the 20 tokens .* got 3 times 6"):
        make_streams(num_tokens=B * (T + 1) - 1)


def test_greedy_sampling_takes_the_likeliest_token_and_looks_back_through_its_memory(params):
    tokens, memory = [1, 2, 3], [np.zeros((4, SMALL.channels))] * SMALL.num_layers
    for i in range(9):
        logits, pasts = numpy_model(SMALL, params, np.array(tokens[i : i + 1]), memory)
        memory = [past[-4:] for past in pasts]
        if i >= 2:
            tokens.append(int(logits[-1].argmax()))
    assert sample.generate(SMALL, params, [1, 2, 3], 7, memory_length=4, temperature=0) == tokens[3:]


def test_sampling_follows_its_seed(params):
    first, again, second = (sample.generate(SMALL, params, [1, 2], 20, M, 1.0, seed) for seed in (0, 0, 1))
    assert first == again != second


def test_an_interrupted_run_keeps_its_memory(small, cache, text, tmp_path, monkeypatch):
    whole, parts, saved = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", tmp_path / "saved"
    assert run("transformer_xl", text, "--steps", 6, "--lr", "0.01", "--metrics", whole) == 0
    draw = data.Streams.__call__

    def interrupt(self, step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return draw(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(data.Streams, "__call__", interrupt)
        assert run("transformer_xl", text, "--steps", 50, "--lr", "0.01", "--metrics", parts, "--save", saved) == 130
    assert run("transformer_xl", text, "--steps", 6, "--lr", "0.01", "--metrics", parts, "--resume", saved) == 0
    assert read_losses(whole) == read_losses(parts)


def test_the_memory_has_the_compute_dtype(small, cache, text, tmp_path):
    half, saved = ["--compute-dtype", "bfloat16"], tmp_path / "saved"
    assert run("transformer_xl", text, "--steps", 2, *half, "--save", saved) == 0
    assert run("transformer_xl", text, "--steps", 3, *half, "--resume", saved) == 0
    memory = model.empty_memory(SMALL, B, M, jnp.bfloat16)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.make_init(SMALL)(jax.random.key(0)))
    _, new = apply(half, make_streams()(0)["tokens"][:, :-1], memory)
    assert all(block.dtype == jnp.bfloat16 for block in new)


def test_a_state_of_another_batch_size_is_refused(small, cache, text, tmp_path, capsys):
    assert run("transformer_xl", text, "--steps", "1", "--save", tmp_path / "saved") == 0
    capsys.readouterr()
    assert run("transformer_xl", text, "--steps", "2", "--resume", tmp_path / "saved", "--batch", "3") == 2
    error = capsys.readouterr().err
    assert "another --batch" in error and error.count("\n") == 1
