"""examples/gpt2: its model against NumPy, its text against Python's own, its command line from end to end."""

import dataclasses
import functools
import json
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import data
import jaxferry
import model
import sample
import small_examples
import weights
from jaxferry.errors import InputError
from metrics_files import read_metrics
from planned import assert_same_bits
from slowly import slow_cases
from small_examples import attend, dense, exact, gelu_by_tanh, norm, run

SMALL = small_examples.SMALL["gpt2"]


@pytest.fixture
def small(monkeypatch):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    small_examples.tiny(monkeypatch, "gpt2")


@pytest.fixture(scope="module")
def params():
    return jax.jit(model.make_init(SMALL))(jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(SMALL.vocab_size, size=(3, 12), dtype=np.int32)


@jax.jit
def logits_fn(params, tokens):
    return model.GPT2(SMALL).apply({"params": params}, tokens)


loss_fn = jax.jit(model.make_loss(SMALL))


def numpy_logits(config, params, tokens):
    """GPT-2 for one row, position by position: a position's keys and values are only those up to itself."""
    p = exact(params)
    x = p["wte"]["embedding"][tokens] + p["wpe"]["embedding"][: len(tokens)]
    for layer in (p[f"h_{i}"] for i in range(config.num_layers)):
        q, k, v = np.split(dense(norm(x, layer["ln_1"], config.epsilon), layer["qkv"]), 3, axis=-1)
        y = attend(q, k, v, config.num_heads, lambda t: slice(t + 1))
        x = x + dense(y, layer["proj"])
        up = dense(norm(x, layer["ln_2"], config.epsilon), layer["up"])
        x = x + dense(gelu_by_tanh(up), layer["down"])
    return norm(x, p["ln_f"], config.epsilon) @ p["wte"]["embedding"].T


def test_logits_are_those_of_a_numpy_gpt2(params, tokens):
    expected = np.stack([numpy_logits(SMALL, params, row) for row in tokens])
    np.testing.assert_allclose(logits_fn(params, tokens), expected, atol=1e-5)


def test_loss_is_the_mean_surprise_of_the_next_token(params, tokens):
    logits = np.stack([numpy_logits(SMALL, params, row[:-1]) for row in tokens])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, tokens[:, 1:, None], axis=-1)).mean()
    np.testing.assert_allclose(loss_fn(params, {"tokens": tokens}), expected, rtol=1e-5)


def test_an_untrained_model_knows_nothing(params, tokens):
    loss = loss_fn(params, {"tokens": tokens})
    assert abs(loss - math.log(SMALL.vocab_size)) < 0.1


def test_activations_have_the_dtype_of_the_parameters_and_the_loss_is_float32(params, tokens):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert logits_fn(half, tokens).dtype == jnp.bfloat16
    loss = loss_fn(half, {"tokens": tokens})
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, loss_fn(params, {"tokens": tokens}), rtol=1e-2)


def test_dropout_follows_its_key_and_needs_one(params, tokens):
    loss = jax.jit(model.make_loss(dataclasses.replace(SMALL, dropout=0.5)))
    plain = loss_fn(params, {"tokens": tokens})
    first, again, second = (loss(params, {"tokens": tokens, "key": jax.random.key(i)}) for i in (1, 1, 2))
    assert first == again
    assert len({float(first), float(second), float(plain)}) == 3
    np.testing.assert_allclose(loss(params, {"tokens": tokens}), plain, rtol=1e-6)


def test_dropout_keeps_the_mean():
    x = jnp.ones((200, 200))
    y, key = model.dropout(x, 0.25, jax.random.key(0))
    assert abs(y.mean() - 1) < 0.02
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    assert not (model.dropout(x, 0.25, key)[0] == y).all()


@pytest.fixture(scope="module")
def generate(params):
    step = jaxferry.train_step(model.make_loss(SMALL), optax.sgd(0.1), memory_budget="64KiB")
    return functools.partial(sample.generate, step, step.init(params), SMALL)


def test_greedy_sampling_takes_the_likeliest_token_each_time(params, generate):
    prompt, expected = [1, 2, 3], [1, 2, 3]
    while len(expected) < 8:
        expected.append(int(numpy_logits(SMALL, params, np.array(expected))[-1].argmax()))
    assert generate(prompt, num_tokens=5, temperature=0) == expected[3:]


def test_sampling_follows_its_seed_and_ends_with_the_positions(generate):
    first, again, second = (generate([1, 2], 99, 1.0, seed) for seed in (0, 0, 1))
    assert first == again != second
    assert len(first) == SMALL.max_length - 2


def test_tokens_spell_the_text(cache, text):
    corpus = data.load(text, 300)
    whole = np.concatenate([corpus.train, corpus.validation])
    assert corpus.tokenizer.decode(whole.tolist()) == text.read_text()
    assert whole.max() < 300
    assert len(whole) < len(text.read_bytes())
    assert len(corpus.validation) == int(len(whole) * data.VALIDATION_SHARE)


def test_a_text_is_tokenized_once(cache, text, monkeypatch):
    first = data.load(text, 300)
    with monkeypatch.context() as patch:
        patch.delattr(data, "train_tokenizer")
        again = data.load(text, 300)
        with pytest.raises(NameError):
            data.load(text, 301)
    np.testing.assert_array_equal(again.train, first.train)
    text.write_text(text.read_text() + "more")
    data.load(text, 300)
    assert len(list((cache / "jaxferry" / "gpt2").iterdir())) == 3


def test_a_folder_is_its_text_files_in_order(tmp_path):
    files = {"b.txt": b"two", "a/z.md": b"one", ".git/config": b"hidden", "c.png": b"\x89PNG\xff", "d.txt": b""}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert data.read_texts(tmp_path) == ["one", "two"]


def test_the_library_is_there_without_its_tests():
    texts = data.read_library()
    assert any("class JSONEncoder" in text for text in texts)
    assert not any(text.startswith('"""Unit tests for collections.py."""') for text in texts)


def test_a_batch_is_rows_of_consecutive_tokens():
    rows = data.Batches(np.arange(1000, dtype=np.uint16), 4, 16, 0)(7)["tokens"]
    assert (rows.shape, rows.dtype) == ((4, 17), np.int32)
    assert (np.diff(rows) == 1).all()


def test_every_row_of_the_text_can_be_drawn():
    batches = data.Batches(np.arange(10, dtype=np.uint16), 200, 7, seed=0)
    assert set(batches(0)["tokens"][:, 0]) == {0, 1, 2}


def published(params):
    """The parameters as Hugging Face's checkpoints have them, with masks and the tied head."""
    p = jax.tree.map(np.asarray, params)

    def of(name, node, weight):
        return {f"{name}.weight": node[weight], f"{name}.bias": node["bias"]}

    tensors = {"wte.weight": p["wte"]["embedding"], "wpe.weight": p["wpe"]["embedding"]}
    tensors |= of("ln_f", p["ln_f"], "scale") | {"lm_head.weight": p["wte"]["embedding"]}
    for i in range(SMALL.num_layers):
        block = p[f"h_{i}"]
        tensors |= of(f"h.{i}.ln_1", block["ln_1"], "scale") | of(f"h.{i}.ln_2", block["ln_2"], "scale")
        tensors |= of(f"h.{i}.attn.c_attn", block["qkv"], "kernel") | of(f"h.{i}.attn.c_proj", block["proj"], "kernel")
        tensors |= of(f"h.{i}.mlp.c_fc", block["up"], "kernel") | of(f"h.{i}.mlp.c_proj", block["down"], "kernel")
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), np.float32))
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_published_weights_become_the_model_that_they_are(prefix, params, tmp_path):
    tensors = {name if name == "lm_head.weight" else prefix + name: t for name, t in published(params).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    step = jaxferry.train_step(model.make_loss(SMALL), optax.sgd(0.1))
    assert_same_bits(step.init(weights.load(SMALL, tmp_path)).params, params)


def test_weights_that_are_written_are_the_published_ones(params, cache, text, tmp_path):
    tensors = published(params)
    (tmp_path / "published").mkdir()
    save_file(tensors, tmp_path / "published" / "model.safetensors")
    step = jaxferry.train_step(model.make_loss(SMALL), optax.sgd(0.1))
    state = step.init(weights.load(SMALL, tmp_path / "published"))
    tokenizer = data.train_tokenizer([text.read_text()], SMALL.vocab_size)
    weights.save(SMALL, state.params, tmp_path / "new", tokenizer)
    written = load_file(tmp_path / "new" / "model.safetensors")
    kept = {name for name in tensors if name != "lm_head.weight" and not name.endswith(".attn.bias")}
    assert written.keys() == kept
    for name in kept:
        assert (written[name].dtype, written[name].tobytes()) == (tensors[name].dtype, tensors[name].tobytes())
    assert_same_bits(step.init(weights.load(SMALL, tmp_path / "new")).params, params)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["model_type"], config["n_layer"], config["n_embd"]) == ("gpt2", SMALL.num_layers, SMALL.channels)
    assert (config["layer_norm_epsilon"], config["n_positions"]) == (SMALL.epsilon, SMALL.max_length)
    assert Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json")).to_str() == tokenizer.to_str()


def test_weights_of_another_size_are_refused_by_name(params, tmp_path):
    save_file(published(params), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"missing: h\.2\.attn\.c_attn\.bias, .*: wpe\.weight is \[12, 16\]"):
        weights.load(dataclasses.replace(SMALL, num_layers=3, max_length=16), tmp_path)


def test_training_learns_and_says_so(cache, text, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    assert run("gpt2", text, "--steps", 24, "--metrics", metrics, "--sample-tokens", 4) == 0
    records = read_metrics(metrics)
    assert [record["step"] for record in records] == list(range(24))
    for record in records:
        assert record.keys() == {"step", "loss", "tokens_per_s", "step_s", "device_param_bytes_peak"}
        np.testing.assert_allclose(record["tokens_per_s"] * record["step_s"], 2 * 16)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    printed = capsys.readouterr().out
    assert "957,184 parameters" in printed
    before, after = (float(line.split(": ")[1]) for line in printed.splitlines() if "validation loss" in line)
    assert after < before - 1
    assert "a sample" in printed


@pytest.mark.slow
def test_another_size_cannot_be_resumed_from(small, cache, text, tmp_path, monkeypatch, capsys):
    assert run("gpt2", text, "--steps", 0, "--save", tmp_path / "saved") == 0
    monkeypatch.setitem(model.SIZES, "tiny", dataclasses.replace(model.SIZES["tiny"], num_layers=3))
    assert run("gpt2", text, "--steps", 1, "--resume", tmp_path / "saved") == 2
    assert "h_2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [["--reserve-factor", "0.5"], ["--compute-dtype", "bfloat16"], ["--memory-budget", "1MiB"]]
)
def test_options_reach_the_training(args, small, cache, text, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert run("gpt2", text, "--steps", 2, "--metrics", metrics, *args) == 0
    peak = read_metrics(metrics)[-1]["device_param_bytes_peak"]
    whole = model.count_parameters(model.SIZES["tiny"]) * 4
    assert 0 < peak <= (whole / 2 if "bfloat16" in args else whole)


@pytest.mark.parametrize(
    ("saving", "number", "status"), [(True, signal.SIGTERM, 143), *slow_cases((False, signal.SIGINT, 130))]
)
def test_an_interrupted_run_is_saved_where_that_was_asked_for(
    saving, number, status, small, cache, text, tmp_path, monkeypatch, capsys
):
    draw = data.Batches.__call__

    def interrupt(self, step):
        if step == 5:
            signal.raise_signal(number)
        return draw(self, step)

    saved = tmp_path / "saved"
    save = ["--save", saved] if saving else []
    with monkeypatch.context() as patch:
        patch.setattr(data.Batches, "__call__", interrupt)
        assert run("gpt2", text, "--steps", 50, *save) == status
    assert saved.exists() == saving
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("interrupted after step 5: " + ("saved" if saving else "nothing was saved"))
    if saving:
        metrics = tmp_path / "metrics.jsonl"
        assert run("gpt2", text, "--steps", 6, "--resume", saved, "--metrics", metrics) == 0
        assert [record["step"] for record in read_metrics(metrics)] == [5]
