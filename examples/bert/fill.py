"""Fills in masked tokens by a model, on the CPU."""

import functools

import jax
import jax.numpy as jnp
from rich.table import Table
from rich.text import Text

from examples.bert.model import Bert

CONTEXT_TOKENS = 6


def fill_in(config, params, batch):
    """Returns the most likely tokens at a batch's `positions` and their probabilities: two arrays [B, P].

    The parameters are read on the CPU, where the masters are.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        return predict(config, jax.device_put(params, cpu), {name: jnp.asarray(batch[name]) for name in INPUTS})


INPUTS = ("tokens", "types", "positions")


@functools.partial(jax.jit, static_argnums=0)
def predict(config, params, batch):
    logits, _ = Bert(config).apply({"params": params}, *(batch[name] for name in INPUTS))
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    return probabilities.argmax(-1), probabilities.max(-1)


def make_table(config, params, batch, tokenizer, mask, num_tokens):
    """Returns a table of the first few hidden tokens of a batch's first row: context, prediction, truth."""
    filled, likely = fill_in(config, params, {name: batch[name][:1] for name in INPUTS})
    tokens, positions = batch["tokens"][0], batch["positions"][0]
    hidden = [i for i in positions.argsort() if batch["weights"][0, i] and tokens[positions[i]] == mask]
    table = Table("text", "filled in", "probability", "truth", box=None)
    for i in hidden[:num_tokens]:
        at = positions[i]
        before, after = tokens[max(0, at - CONTEXT_TOKENS) : at], tokens[at + 1 : at + 1 + CONTEXT_TOKENS]
        around = " ____ ".join(tokenizer.decode(part.tolist()) for part in (before, after))
        guess, truth = (repr(tokenizer.decode([int(token)])) for token in (filled[0, i], batch["labels"][0, i]))
        # As Text, so that brackets are not markup.
        table.add_row(*map(Text, (repr(around)[1:-1], guess, f"{likely[0, i]:.2f}", truth)))
    return table
