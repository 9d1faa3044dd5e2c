"""Trains a Llama or its adapters on text with parameters in host memory: python examples/llama/train.py --help"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import jax
import optax
import typer

sys.path.append(str(Path(__file__).resolve().parents[2]))

import jaxferry
from examples.common import command_line, text
from examples.common.batches import Batches
from examples.common.sampling import print_sample
from examples.common.training import Run, console, count_parameters
from examples.llama import model, sample
from examples.llama import weights as published
from jaxferry.processes import is_first

# The published ones of pretraining, except for the tiny model.
LEARNING_RATES = dict.fromkeys(model.SIZES, 3e-4) | {"tiny": 1e-3}
WARMUP_STEPS = 20
PROMPT_TOKENS = 16

app = command_line.make_app()


@app.command(help="Trains a Llama or its adapters on text, with parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: command_line.Steps = 800,
    batch: command_line.Batch = 8,
    seq: command_line.Seq = 128,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train only adapters of this rank; 0 trains all parameters.")
    ] = 0,
    policy: command_line.Policy = None,
    memory_budget: command_line.MemoryBudget = None,
    reserve_factor: command_line.ReserveFactor = 1.0,
    compute_dtype: command_line.ComputeDtype = None,
    devices: command_line.Devices = 1,
    distributed: command_line.Distributed = False,
    data: command_line.Data = None,
    seed: command_line.Seed = 0,
    lr: command_line.LearningRate = None,
    metrics: command_line.Metrics = None,
    save: command_line.Save = None,
    save_every: command_line.SaveEvery = 0,
    keep_last: command_line.KeepLast = None,
    resume: command_line.Resume = None,
    weights: command_line.Weights = None,
    export: command_line.Export = None,
    sample_tokens: command_line.SampleTokens = 96,
) -> int:
    mesh = command_line.make_mesh(devices, distributed)
    config = dataclasses.replace(command_line.read_size(model.SIZES, size, seq), lora_rank=lora_rank)
    corpus = load_text(data, config.vocab_size, weights)
    dtype = command_line.read_dtype(compute_dtype)
    step = jaxferry.train_step(
        model.make_loss(config),
        make_optimizer(LEARNING_RATES[size] if lr is None else lr, lora_rank),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=dtype,
        mesh=mesh,
    )
    train_batches = Batches(corpus.train, batch, seq, seed)
    valid_batches = Batches(corpus.validation, batch, seq, seed)
    run = Run(step, train_batches, valid_batches, batch * seq)
    init_fn = model.make_init(config)
    run.start(init_fn, seed, resume, None if weights is None else published.load(config, weights, seed))
    console.print(
        f"Llama {size} with {count_parameters(init_fn):,} parameters, {count_trained(init_fn, lora_rank):,} of them "
        f"trained, {len(corpus.train):,} training tokens"
    )
    status = run.finish(steps, metrics, save, save_every, keep_last)
    if status == 0 and export and is_first():
        published.save(config, run.state.lazy_params, export, corpus.tokenizer)
    if status == 0 and sample_tokens:
        prompt = corpus.validation[:PROMPT_TOKENS].tolist()
        tokens = sample.generate(step, run.state, config, prompt, sample_tokens, cache_dtype=dtype)
        print_sample(corpus.tokenizer, prompt, tokens)
    return status


def load_text(path, vocab_size, weights):
    if weights is not None:
        return text.load_pretrained(path, vocab_size, weights)
    return text.load(path, vocab_size, text.train_byte_bpe, "llama")


def make_optimizer(learning_rate, lora_rank):
    """Makes AdamW with a constant learning rate after a warm-up; with a rank, it trains only the adapters."""
    adamw = optax.adamw(optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS), b2=0.95, weight_decay=0.1)
    if not lora_rank:
        return adamw
    return optax.multi_transform({"adapter": adamw, "base": optax.set_to_zero()}, label)


def label(params):
    """Labels each parameter as adapter or not, as a tree of strings."""

    def word(path, leaf):
        return "adapter" if "lora" in jax.tree_util.keystr(path) else "base"

    return jax.tree_util.tree_map_with_path(word, params)


def count_trained(init_fn, lora_rank):
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    words = jax.tree.leaves(label(shapes))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    return sum(size for size, word in zip(sizes, words, strict=True) if word == "adapter" or not lora_rank)


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
