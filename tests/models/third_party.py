"""Models that others wrote, from packages on PyPI (the extra `models`), untouched: small, with random weights."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import Task, next_token_loss, quickly, stateful_nnx_task
from models.random_streams import next_key

_VOCAB = 64
_FIELDS: dict[str, Any] = {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
_FIELDS |= {"intermediate_size": 64, "max_position_embeddings": 16}
_OF_PART = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _tokens(length: int = 9, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (2, length), 2, _VOCAB)


def _transformers(kind: str, config: str, shape: tuple[int, ...], **fields: Any) -> tuple[Any, Any]:
    """A Flax model of `transformers`, made as its own class makes it, and its parameters."""
    transformers = importlib.import_module("transformers")
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields), _do_init=False)
    return model, quickly(lambda key: model.init_weights(key, shape))(jax.random.PRNGKey(0))


def bert() -> Task:
    """BERT with a masked language model's head and its dropout."""
    model, params = _transformers("FlaxBertForMaskedLM", "BertConfig", (1, 8), **_FIELDS)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        masked = jnp.where(batch["is_masked"], 1, batch["tokens"])
        logits = model(masked, params=params, train=True, dropout_rng=batch["key"]).logits
        return jnp.where(batch["is_masked"], _each(logits, batch["tokens"]), 0).sum() / batch["is_masked"].sum()

    is_masked = jnp.arange(18).reshape(2, 9) % 4 == 0
    return Task(loss_fn, params, {"tokens": _tokens(), "is_masked": is_masked, "key": jax.random.PRNGKey(1)}, next_key)


def _each(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def albert() -> Task:
    """ALBERT: one group of layers, used three times."""
    model, params = _transformers("FlaxAlbertForMaskedLM", "AlbertConfig", (1, 8), **_FIELDS, embedding_size=8)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return _entropy(model(batch.at[:, ::3].set(1), params=params).logits, batch)

    return Task(loss_fn, params, _tokens())


def gpt2() -> Task:
    """GPT-2 with a tied head."""
    model, params = _transformers(
        "FlaxGPT2LMHeadModel", "GPT2Config", (1, 8), vocab_size=_VOCAB, n_positions=16, n_embd=32, n_layer=3, n_head=2
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(model(batch[:, :-1], params=params).logits, batch)

    return Task(loss_fn, params, _tokens())


def llama() -> Task:
    """Llama: RMSNorm, rotary positions, grouped queries, gated MLPs."""
    model, params = _transformers(
        "FlaxLlamaForCausalLM", "LlamaConfig", (1, 8), **_FIELDS | {"num_attention_heads": 4, "num_key_value_heads": 2}
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(model(batch[:, :-1], params=params).logits, batch)

    return Task(loss_fn, params, _tokens())


def bart() -> Task:
    """BART: an encoder and a decoder with cross attention, one table for both and the head."""
    model, params = _transformers(
        "FlaxBartForConditionalGeneration",
        "BartConfig",
        (1, 8),
        vocab_size=_VOCAB,
        d_model=32,
        **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in _OF_PART.items()},
        max_position_embeddings=16,
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        target = batch["target"]
        logits = model(batch["source"], decoder_input_ids=target[:, :-1], params=params).logits
        return next_token_loss(logits, target)

    return Task(loss_fn, params, {"source": _tokens(7), "target": _tokens(6, seed=2)})


def vit() -> Task:
    """A vision transformer."""
    model, params = _transformers(
        "FlaxViTForImageClassification",
        "ViTConfig",
        (1, 8, 8, 3),
        image_size=8,
        patch_size=4,
        num_labels=5,
        **{name: number for name, number in _FIELDS.items() if name not in ("vocab_size", "max_position_embeddings")},
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return _entropy(model(batch["images"], params=params).logits, batch["labels"])

    images = jax.random.normal(jax.random.key(1), (4, 3, 8, 8))
    return Task(loss_fn, params, {"images": images, "labels": jnp.arange(4)})


def resnet() -> Task:
    """A ResNet whose batch statistics come back as aux."""
    model, variables = _transformers(
        "FlaxResNetForImageClassification",
        "ResNetConfig",
        (1, 16, 16, 3),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        num_labels=5,
    )

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch["state"]}
        outputs, changed = model(batch["images"], params=variables, train=True)
        return _entropy(outputs.logits, batch["labels"]), changed["batch_stats"]

    images = jax.random.normal(jax.random.key(1), (4, 3, 16, 16))
    batch = {"images": images, "labels": jnp.arange(4), "state": variables["batch_stats"]}
    return Task(loss_fn, variables["params"], batch, lambda batch, aux: {**batch, "state": aux})


def attnax_decoder() -> Task:
    """A decoder of attnax: rotary positions, grouped queries, dropout, attention in blocks with an online softmax."""
    attnax = importlib.import_module("attnax")
    config = attnax.TransformerConfig(
        vocab_size=_VOCAB,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        num_layers=3,
        d_ff=64,
        max_len=16,
        pos_emb_type="rope",
        norm_type="rms",
        ff_activation="swiglu",
        attention_type=attnax.AttentionType.MEMORY_EFFICIENT,
        attention_block_size=4,
    )

    def loss_of(model: Any, batch: Any) -> jax.Array:
        hidden = model(batch["tokens"][:, :-1], deterministic=False)
        return next_token_loss(hidden @ jnp.eye(hidden.shape[-1], _VOCAB), batch["tokens"])

    return stateful_nnx_task(lambda: attnax.TransformerDecoder(nnx.Rngs(0), config), loss_of, {"tokens": _tokens()})


def attnax_vit() -> Task:
    """A vision transformer of attnax with a class token."""
    attnax = importlib.import_module("attnax")
    config = attnax.VisionTransformerConfig(
        image_size=8, patch_size=4, num_classes=5, d_model=32, num_heads=2, num_layers=3, d_ff=64
    )

    def loss_of(model: Any, batch: Any) -> jax.Array:
        return _entropy(model(batch["images"], deterministic=True), batch["labels"])

    batch = {"images": jax.random.normal(jax.random.key(1), (4, 8, 8, 3)), "labels": jnp.arange(4)}
    return stateful_nnx_task(lambda: attnax.VisionTransformer(nnx.Rngs(0), config), loss_of, batch)


def mamba() -> Task:
    """Mamba 2: a state-space model with a tied head."""
    mamba2 = importlib.import_module("mamba2_jax")
    config = mamba2.Mamba2Config(
        vocab_size=_VOCAB, hidden_size=32, state_size=8, head_dim=16, chunk_size=4, num_hidden_layers=3
    )

    def loss_of(model: Any, batch: Any) -> jax.Array:
        return model(batch["tokens"], labels=batch["tokens"])["loss"]

    return stateful_nnx_task(lambda: mamba2.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), loss_of, {"tokens": _tokens()})


def graph_attention() -> Task:
    """Graph attention: nodes are gathered along edges and scattered back, with batch statistics and dropout."""
    gnn = importlib.import_module("jraphx.nn.models")

    def make() -> Any:
        return gnn.GAT(8, 16, 4, 3, heads=2, norm="batch_norm", dropout_rate=0.1, rngs=nnx.Rngs(0))

    def loss_of(model: Any, batch: Any) -> jax.Array:
        return _entropy(model(batch["nodes"], batch["edges"]), batch["labels"])

    batch = {
        "nodes": jax.random.normal(jax.random.key(1), (12, 8)),
        "edges": jax.random.randint(jax.random.key(2), (2, 40), 0, 12),
        "labels": jnp.arange(12) % 3,
    }
    return stateful_nnx_task(make, loss_of, batch)
