"""examples/llama: its model against NumPy, adapters, weights."""

import dataclasses
import itertools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxferry
import small_examples
from examples.common import text as common_text
from examples.llama import model, sample, train, weights
from jaxferry.checkpoint import pretrained
from jaxferry.engine import derivatives_of
from jaxferry.errors import InputError
from jaxferry.partition import partition
from metrics_files import read_losses
from plain_optax import offloaded_losses
from planned import assert_same_bits
from small_examples import of_words, params_of, run, with_noise

pytestmark = pytest.mark.slow

SMALL, SCALED, ADAPTED, BIASED = small_examples.LLAMAS.values()
EACH = pytest.mark.parametrize("name", small_examples.LLAMAS)


@pytest.fixture
def small(monkeypatch):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    small_examples.tiny(monkeypatch, "llama")


@pytest.fixture(scope="module")
def params():
    return params_of("llama")


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(SMALL.vocab_size, size=(3, 12), dtype=np.int32)


def published(config, params):
    """The parameters as Hugging Face's checkpoints have them: its names, weights as PyTorch's `Linear` keeps them."""
    p = nnx.to_pure_dict(params)

    def linear(node):
        kernel = node["kernel"]
        if config.lora_rank and "lora_a" in node:
            kernel = kernel + node["lora_a"] @ node["lora_b"] * (config.lora_alpha / config.lora_rank)
        return np.asarray(kernel).T.copy()

    tensors = {"model.embed_tokens.weight": p["embed"]["embedding"], "model.norm.weight": p["norm"]["scale"]}
    if not config.is_tied:
        tensors["lm_head.weight"] = linear(p["head"])
    for i, layer in p["layers"].items():
        above = f"model.layers.{i}."
        tensors[above + "input_layernorm.weight"] = layer["attn_norm"]["scale"]
        tensors[above + "post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        tensors |= {f"{above}self_attn.{name}_proj.weight": linear(layer["attn"][name]) for name in "qkvo"}
        if config.has_bias:
            tensors |= {f"{above}self_attn.{name}_proj.bias": layer["attn"][name]["bias"] for name in "qkv"}
        tensors |= {f"{above}mlp.{name}_proj.weight": linear(layer["mlp"][name]) for name in ("gate", "up", "down")}
    return {name: np.asarray(array) for name, array in tensors.items()}


def numpy_logits(config, tensors, tokens):
    """Llama for one row, position by position, on the tensors of a checkpoint."""
    w = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    width, group = config.channels // config.num_heads, config.num_heads // config.num_kv_heads

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * w[name]

    def frequency(i):
        turns_per_position = config.rope_base ** (-2 * i / width)
        if config.rope_scaling is None:
            return turns_per_position
        s = config.rope_scaling
        wavelength = 2 * np.pi / turns_per_position
        if wavelength < s.length / s.high:
            return turns_per_position
        if wavelength > s.length / s.low:
            return turns_per_position / s.factor
        smooth = (s.length / wavelength - s.low) / (s.high - s.low)
        return (1 - smooth) * turns_per_position / s.factor + smooth * turns_per_position

    def turned(x, t):
        y = x.copy()
        for i in range(width // 2):
            pair = x[i] + 1j * x[i + width // 2]
            pair *= np.exp(1j * t * frequency(i))
            y[i], y[i + width // 2] = pair.real, pair.imag
        return y

    x = w["model.embed_tokens.weight"][tokens]
    for layer in (f"model.layers.{i}." for i in range(config.num_layers)):
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            y @ w[f"{layer}self_attn.{name}_proj.weight"].T + w.get(f"{layer}self_attn.{name}_proj.bias", 0.0)
            for name in "qkv"
        )
        mixed = np.zeros_like(q)
        for head, t in itertools.product(range(config.num_heads), range(len(tokens))):
            own, shared = (slice(h * width, (h + 1) * width) for h in (head, head // group))
            keys = np.stack([turned(k[s, shared], s) for s in range(t + 1)])
            scores = np.exp(keys @ turned(q[t, own], t) / np.sqrt(width))
            mixed[t, own] = scores / scores.sum() @ v[: t + 1, shared]
        x = x + mixed @ w[layer + "self_attn.o_proj.weight"].T
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def logits_of(config, params, tokens):
    return nnx.merge(model.make_graph(config), params)(tokens)


@EACH
def test_logits_are_those_of_a_numpy_llama(name, tokens):
    config, params = small_examples.LLAMAS[name], params_of(name)
    tensors = published(config, params)
    expected = np.stack([numpy_logits(config, tensors, row) for row in tokens])
    np.testing.assert_allclose(logits_of(config, params, tokens), expected, atol=2e-5)


@EACH
def test_activations_have_the_parameters_dtype_and_the_table_a_gradient_of_rows(name, tokens):
    config, whole = small_examples.LLAMAS[name], params_of(name)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole)
    assert jax.eval_shape(lambda p: logits_of(config, p, tokens), params).dtype == jnp.bfloat16
    batch = {"tokens": tokens}
    parts = partition(model.make_loss(config), whole, (batch,), compute_dtype=jnp.bfloat16)
    crossing = {v for segment in parts.segments for v in (*segment.inputs, *segment.outputs)} - {parts.loss}
    assert {parts.graph.avals[value].dtype for value in crossing} == {jnp.dtype(jnp.bfloat16)}
    assert derivatives_of(parts, "none")[parts.segments[0].program].has_rows


def test_fresh_adapters_change_nothing_and_only_they_are_trained(tokens):
    fresh = jax.jit(model.make_init(ADAPTED))(jax.random.key(0))
    base = nnx.split_state(fresh, nnx.LoRAParam, ...)[1]
    np.testing.assert_array_equal(logits_of(ADAPTED, fresh, tokens), logits_of(SMALL, base, tokens))
    step = jaxferry.train_step(model.make_loss(ADAPTED), train.make_optimizer(1e-2, ADAPTED.lora_rank))
    state = step.init(fresh)
    for i in range(30):
        state, _ = step(state, of_words(i))
    adapters, kept = nnx.split_state(state.params, nnx.LoRAParam, ...)
    assert_same_bits(kept, base)
    before = nnx.split_state(fresh, nnx.LoRAParam, ...)[0]
    for (path, leaf), old in zip(jax.tree.leaves_with_path(adapters), jax.tree.leaves(before), strict=True):
        assert not np.array_equal(leaf, old), jax.tree_util.keystr(path)
    assert train.count_trained(model.make_init(ADAPTED), 3) == sum(leaf.size for leaf in jax.tree.leaves(before))


def test_greedy_sampling_with_a_cache_takes_the_likeliest_token_each_time(params):
    step = jaxferry.train_step(model.make_loss(SMALL), optax.sgd(0.1), memory_budget="64KiB")
    state, tensors = step.init(params), published(SMALL, params)
    expected = [1, 2, 3]
    while len(expected) < 9:
        expected.append(int(numpy_logits(SMALL, tensors, np.array(expected))[-1].argmax()))
    assert sample.generate(step, state, SMALL, [1, 2, 3], 6, temperature=0) == expected[3:]
    first, again, second = (sample.generate(step, state, SMALL, [1, 2], 99, 1.0, seed) for seed in (0, 0, 1))
    assert first == again != second
    assert len(first) == SMALL.max_length - 2


def save_shards(tensors, folder):
    """Writes a checkpoint in two files with an index, as large models are published."""
    names, placed = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: np.ascontiguousarray(tensors[name]) for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / pretrained.INDEX_FILE).write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize(
    "config", [SMALL, SCALED, dataclasses.replace(BIASED, lora_rank=0)], ids=["plain", "scaled and tied", "biased"]
)
def test_published_weights_become_the_model_that_they_are(config, tokens, tmp_path):
    params = with_noise(model.make_init(config))
    tensors = published(config, params) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_shards(tensors, tmp_path)
    step = jaxferry.train_step(model.make_loss(config), optax.sgd(0.1))
    state = step.init(weights.load(config, tmp_path))
    assert_same_bits(state.params, params)
    logits = step.apply(state, lambda params, tokens: logits_of(config, params, tokens), tokens)
    np.testing.assert_allclose(logits[0], numpy_logits(config, tensors, tokens[0]), atol=2e-5)


def test_published_weights_are_given_fresh_adapters(params, tokens, tmp_path):
    save_shards(published(SMALL, params), tmp_path)
    loaded = weights.load(ADAPTED, tmp_path, seed=4)
    step = jaxferry.train_step(model.make_loss(ADAPTED), train.make_optimizer(1e-2, ADAPTED.lora_rank))
    state = step.init(loaded)
    logits = step.apply(state, lambda params, tokens: logits_of(ADAPTED, params, tokens), tokens)
    np.testing.assert_allclose(logits, logits_of(SMALL, params, tokens), atol=1e-5)
    adapters, base = nnx.split_state(state.params, nnx.LoRAParam, ...)
    assert_same_bits(base, params)
    fresh = nnx.split_state(jax.jit(model.make_init(ADAPTED))(jax.random.key(4)), nnx.LoRAParam, ...)[0]
    assert_same_bits(adapters, fresh)


@pytest.mark.parametrize("config", [SCALED, ADAPTED, BIASED], ids=["scaled and tied", "adapted", "biased"])
def test_written_weights_are_the_model_with_its_adapters(config, tokens, text, tmp_path):
    params = with_noise(model.make_init(config))
    weights.save(config, params, tmp_path / "new", common_text.train_byte_bpe([text.read_text()], 300))
    plain = dataclasses.replace(config, lora_rank=0)
    written = jax.tree.map(np.asarray, weights.load(plain, tmp_path / "new"))
    expected, found = logits_of(config, params, tokens), logits_of(plain, written, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if config is SCALED:
        assert_same_bits(written, params)


def test_writing_merges_one_kernel_at_a_time(tmp_path):
    config = model.Config(8, 4, 4, 128, 512, max_length=32, vocab_size=37, lora_rank=2)
    like = jax.eval_shape(model.make_init(config), jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), like)
    tokenizer = common_text.train_byte_bpe(["some words"], 300)
    tracemalloc.start()
    try:
        weights.save(config, params, tmp_path / "new", tokenizer)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    # The transposed copy that is written, the sum and its two terms.
    assert peak_bytes < 8 * largest < (tmp_path / "new" / "model.safetensors").stat().st_size / 2


def test_weights_of_another_model_are_refused_by_name(params, tmp_path):
    tensors = published(SMALL, params)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = np.ones(8, np.float32)
    save_shards(tensors, tmp_path)
    with pytest.raises(InputError) as refused:
        weights.load(SMALL, tmp_path)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in str(refused.value)
    assert "unexpected: model.layers.2.mlp.up_proj.weight;" in str(refused.value)
    assert "model.norm.weight is [8], norm/scale [16]" in str(refused.value)


def test_a_resumed_run_of_adapters_goes_on_bit_by_bit(small, cache, text, tmp_path):
    whole, parts, adapters = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", ["--lora-rank", "2"]
    assert run("llama", text, "--steps", 6, "--metrics", whole, *adapters) == 0
    assert run("llama", text, "--steps", 3, "--metrics", parts, "--save", tmp_path / "saved", *adapters) == 0
    assert run("llama", text, "--steps", 6, "--metrics", parts, "--resume", tmp_path / "saved", *adapters) == 0
    assert read_losses(whole) == read_losses(parts)


@pytest.fixture
def checkpoint(small, text, tmp_path):
    """Published weights with their tokenizer."""
    folder = tmp_path / "weights"
    folder.mkdir()
    config = model.SIZES["tiny"]
    save_shards(published(config, with_noise(model.make_init(config))), folder)
    tokenizer = common_text.train_byte_bpe([text.read_text()], config.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_training_goes_on_from_published_weights(checkpoint, cache, text, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    options = ["--steps", "3", "--lora-rank", "2", "--metrics", metrics]
    assert run("llama", text, "--weights", checkpoint, *options) == 0
    config = dataclasses.replace(model.SIZES["tiny"], lora_rank=2)
    corpus = common_text.load_pretrained(text, config.vocab_size, checkpoint)
    batches = train.Batches(corpus.train, 2, 16, 0)
    loaded = jax.tree.map(np.asarray, weights.load(config, checkpoint))
    optimizer = train.make_optimizer(train.LEARNING_RATES["tiny"], 2)
    expected = offloaded_losses(model.make_loss(config), optimizer, loaded, batches, 3)
    assert [loss for _, loss in read_losses(metrics)] == expected


def test_weights_and_a_saved_state_are_not_both_taken(checkpoint, cache, text, capsys):
    assert run("llama", text, "--weights", checkpoint, "--resume", "somewhere") == 2
    assert "--resume and --weights both set" in capsys.readouterr().err
