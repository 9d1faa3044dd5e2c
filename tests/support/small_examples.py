"""The examples with small models: parameters, batches, command lines, and layers in NumPy."""

import dataclasses
import types

import jax
import numpy as np
import optax
from scipy.special import erf

import model as gpt2
import train as gpt2_train
from examples.bert import data as bert_data
from examples.bert import model as bert
from examples.bert import train as bert_train
from examples.common import digits
from examples.llama import model as llama
from examples.llama import train as llama_train
from examples.resnet import model as resnet
from examples.resnet import train as resnet_train
from examples.roberta import data as roberta_data
from examples.roberta import model as roberta
from examples.roberta import train as roberta_train
from examples.transformer_xl import data as xl_data
from examples.transformer_xl import model as xl
from examples.transformer_xl import train as xl_train
from examples.vit import model as vit
from examples.vit import train as vit_train

LLAMA = llama.Config(2, 4, 2, 16, 24, max_length=32, vocab_size=37)
SCALING = llama.RopeScaling(factor=8.0, low=1.0, high=4.0, length=16)
LLAMAS = {
    "llama": LLAMA,
    "llama, scaled and tied": dataclasses.replace(LLAMA, is_tied=True, rope_base=500.0, rope_scaling=SCALING),
    "llama, adapted": dataclasses.replace(LLAMA, lora_rank=3, lora_alpha=6.0),
    # As Qwen2 is.
    "llama, biased": dataclasses.replace(LLAMA, is_tied=True, has_bias=True, epsilon=1e-6, lora_rank=3),
}
RESNET = resnet.Config((1, 1), width=8, is_small=True, image_size=8, num_colours=1, num_classes=10)
SMALL = {
    "gpt2": gpt2.Config(num_layers=2, num_heads=2, channels=16, max_length=12, vocab_size=37),
    **LLAMAS,
    "resnet": RESNET,
    "resnet, bottlenecks": dataclasses.replace(RESNET, is_bottleneck=True),
    "bert": bert.Config(num_layers=2, num_heads=2, channels=16, max_length=16, vocab_size=64),
    "roberta": roberta.configure(2, 2, 16, max_length=16, vocab_size=300),
    "vit": dataclasses.replace(vit.SIZES["tiny"], num_layers=2, num_heads=2, channels=16),
    "transformer_xl": xl.Config(num_layers=2, num_heads=2, channels=16, vocab_size=37),
}
"""By example, before the comma, the model that tests train."""
DROPOUT = {f"{name}, dropout": dataclasses.replace(SMALL[name], dropout=0.1) for name in ("bert", "transformer_xl")}
MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama, "resnet": resnet, "roberta": roberta, "vit": vit}
MODELS |= {"transformer_xl": xl}
B, T, M = 3, 6, 8
"""Rows, tokens and memory of Transformer-XL."""


def of(name):
    """The example of a small model."""
    return name.partition(",")[0]


def with_noise(init_fn):
    """Parameters without zeros and ones, so that omitting one is noticed."""
    leaves, tree = jax.tree.flatten(jax.jit(init_fn)(jax.random.key(0)))
    rng = np.random.default_rng(2)
    return jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32) for leaf in leaves])


def params_of(name):
    """Parameters of a small model."""
    init_fn = MODELS[of(name)].make_init({**SMALL, **DROPOUT}[name])
    return jax.jit(init_fn)(jax.random.key(0)) if of(name) == "resnet" else with_noise(init_fn)


def random_tokens(size, num=2000):
    """Tokens of a vocabulary, none of them special."""
    return np.random.default_rng(1).integers(len(bert_data.SPECIAL_TOKENS), size, size=num).astype(np.uint16)


def vocabulary(size):
    """The part of a tokenizer that batches use."""
    return types.SimpleNamespace(get_vocab_size=lambda: size)


def of_words(step):
    return {"tokens": np.random.default_rng((0, step)).integers(LLAMA.vocab_size, size=(3, 13), dtype=np.int32)}


def batches_of(name, text):
    """A function from step to batch; `text` is a file for tokenizers that are trained."""
    if of(name) == "roberta":
        corpus = roberta_data.load(text, SMALL[name].vocab_size)
        return roberta_data.FullSentences(corpus.train, 4, 16, 0, corpus.tokenizer)
    plain = {
        "gpt2": lambda: of_words,
        "llama": lambda: of_words,
        "resnet": lambda: digits.Batches(digits.load()[0], 16, seed=0),
        "vit": lambda: digits.Batches(digits.load()[0], 5, seed=0),
        "bert": lambda: bert_data.Pairs(random_tokens(64), 3, 16, 0, vocabulary(64)),
        "transformer_xl": lambda: xl_data.Streams(random_tokens(37, 500), B, T, 0),
    }[of(name)]()
    if name not in DROPOUT:
        return plain
    return lambda step: {**plain(step), "key": jax.random.fold_in(jax.random.key(0), step)}


def carried_of(name):
    """What a model's loss function returns for the next batch, as it is at first."""
    if of(name) == "resnet":
        return {"batch_stats": resnet.make_batch_stats(SMALL[name])}
    return {"memory": xl.empty_memory(SMALL[of(name)], B, M, np.float32)} if of(name) == "transformer_xl" else {}


def optimizer_of(name):
    """The example's optimizer."""
    return {
        "gpt2": lambda: optax.adamw(1e-3),
        "llama": lambda: llama_train.make_optimizer(1e-3, SMALL[name].lora_rank),
        "resnet": lambda: resnet_train.make_optimizer(0.05),
        "vit": lambda: vit_train.make_optimizer(1e-3),
        "bert": lambda: bert_train.BERT.make_optimizer(1e-3),
        "roberta": lambda: roberta_train.ROBERTA.make_optimizer(1e-3),
        "transformer_xl": lambda: xl_train.make_optimizer(1e-2),
    }[of(name)]()


TRAINS = {"gpt2": gpt2_train, "bert": bert_train, "llama": llama_train, "resnet": resnet_train, "vit": vit_train}
TRAINS |= {"roberta": roberta_train, "transformer_xl": xl_train}
IMAGES = ("resnet", "vit")


def tiny(monkeypatch, name):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    words = {} if name in IMAGES else {"vocab_size": 300} | ({"max_length": 16} if name == "gpt2" else {})
    monkeypatch.setitem(MODELS[name].SIZES, "tiny", dataclasses.replace(SMALL[name], **words))


def run(name, text, *args):
    """Runs the command line of an example; returns its status."""
    given = ["--batch", "32"] if name in IMAGES else ["--data", text, "--batch", "2", "--seq", "16"]
    given += [] if name in IMAGES else ["--sample-tokens", "0"]
    given += ["--memory", "12"] if name == "transformer_xl" else []
    return TRAINS[name].main([*map(str, given), *map(str, args)])


# Layers of a model in float64, for NumPy's own forms of the models.


def exact(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def norm(x, p, epsilon):
    variance = ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def gelu_by_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(q, k, v, num_heads, seen_by=lambda t: slice(None)):
    """Attention position by position: position t sees the keys that `seen_by(t)` chooses."""
    y, width = np.zeros_like(q), q.shape[-1] // num_heads
    for t in range(len(q)):
        for part in (slice(head * width, (head + 1) * width) for head in range(num_heads)):
            weights = np.exp(k[seen_by(t), part] @ q[t, part] / np.sqrt(width))
            y[t, part] = weights / weights.sum() @ v[seen_by(t), part]
    return y
