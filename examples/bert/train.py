"""Trains BERT on text, its parameters in host memory: python examples/bert/train.py --help"""

import sys
from pathlib import Path
from typing import Annotated

import jax
import optax
import typer

sys.path.append(str(Path(__file__).resolve().parents[2]))

import jaxferry
from examples.bert import data as text_data
from examples.bert import fill, model
from examples.common import command_line
from examples.common.training import Run, console, count_parameters

# The published one (Devlin et al. 2019, appendix A.2), but for the tiny model.
LEARNING_RATES = {"tiny": 1e-3, "base": 1e-4, "large": 1e-4}
WARMUP_STEPS = 100

app = command_line.make_app()


@app.command(help="Trains BERT on text, its parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: command_line.Steps = 800,
    batch: command_line.Batch = 8,
    seq: command_line.Seq = 128,
    policy: command_line.Policy = None,
    memory_budget: command_line.MemoryBudget = None,
    reserve_factor: command_line.ReserveFactor = 1.0,
    compute_dtype: command_line.ComputeDtype = None,
    data: command_line.Data = None,
    seed: command_line.Seed = 0,
    lr: command_line.LearningRate = None,
    metrics: command_line.Metrics = None,
    save: command_line.Save = None,
    resume: command_line.Resume = None,
    sample_tokens: command_line.FillTokens = 8,
) -> int:
    config = command_line.read_size(model.SIZES, size, seq)
    corpus = text_data.load(data, config.vocab_size)
    vocab_size = corpus.tokenizer.get_vocab_size()
    train_batches = text_data.Pairs(corpus.train, batch, seq, seed, vocab_size)
    valid_batches = text_data.Pairs(corpus.validation, batch, seq, seed, vocab_size)
    step = jaxferry.train_step(
        model.make_loss(config),
        make_optimizer(LEARNING_RATES[size] if lr is None else lr),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=command_line.read_dtype(compute_dtype),
    )
    run = Run(step, train_batches, valid_batches, batch * seq)
    init_fn = model.make_init(config)
    run.start(init_fn, seed, resume)
    num_parameters = count_parameters(init_fn)
    console.print(f"BERT {size} with {num_parameters:,} parameters, {len(corpus.train):,} tokens of text to train on")
    status = run.finish(steps, metrics, save)
    if status == 0 and sample_tokens:
        console.rule("masked tokens filled in")
        row = valid_batches(0)
        console.print(fill.make_table(config, run.state.params, row, corpus.tokenizer, text_data.MASK, sample_tokens))
    return status


def make_optimizer(learning_rate):
    """Adam as published, with decay for all but biases and LayerNorms, the learning rate constant after a warm-up."""
    schedule = optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS)
    return optax.adamw(schedule, weight_decay=0.01, mask=is_decayed)


def is_decayed(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
