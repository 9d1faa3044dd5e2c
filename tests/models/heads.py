"""Several losses from several heads, some from the middle of the net."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models import Block, Task, initialise


class MultiTask(nn.Module):
    """A trunk with a head after each block (deep supervision), one for spans and one that is contrasted."""

    vocab: int = 64
    width: int = 32
    depth: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> dict[str, Any]:
        x = nn.Embed(self.vocab, self.width, name="embed")(tokens)
        classes = []
        for i in range(self.depth):
            x = Block(4, name=f"block_{i}")(x)
            classes.append(nn.Dense(5, name=f"class_head_{i}")(x.mean(1)))
        spans = nn.Dense(2, name="span_head")(x)
        embedding = nn.Dense(8, name="contrast_head")(x[:, 0])
        return {"classes": classes, "spans": spans, "embedding": embedding}


def linen_multi_task() -> Task:
    """Five heads, three kinds of losses, each of them in aux."""
    model = MultiTask()
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (4, 9), 0, 64),
        "labels": jnp.array([0, 3, 1, 4]),
        "spans": jnp.array([[0, 2], [1, 1], [3, 8], [5, 6]]),
    }

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        outputs: Any = model.apply({"params": params}, batch["tokens"])
        entropy = optax.softmax_cross_entropy_with_integer_labels
        classes = sum(entropy(logits, batch["labels"]).mean() for logits in outputs["classes"])
        spans = entropy(outputs["spans"].swapaxes(1, 2), batch["spans"]).mean()
        normed = outputs["embedding"] / jnp.linalg.norm(outputs["embedding"], axis=-1, keepdims=True)
        contrast = entropy(5 * normed @ normed.T, jnp.array([1, 0, 3, 2])).mean()
        parts = {"classes": classes, "spans": spans, "contrast": contrast}
        return classes + 0.5 * spans + 0.1 * contrast, parts

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch["tokens"])["params"], batch)
