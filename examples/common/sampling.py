"""Draws tokens from a causal language model's logits and prints samples."""

import jax
import jax.numpy as jnp
from rich.text import Text

from examples.common.training import console


def draw(logits, temperature, key):
    """Draws a token from logits [..., vocab_size]; temperature 0 takes the most likely one."""
    logits = logits.astype(jnp.float32)
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, logits.argmax(-1))


def print_sample(tokenizer, prompt, tokens):
    """Prints a prompt and the model's continuation."""
    text = Text(tokenizer.decode(prompt), style="dim")
    console.rule("a sample")
    console.print(text.append(tokenizer.decode(tokens), style="not dim"))
