"""Trains GPT-2 on text with its parameters in host memory: python examples/gpt2/train.py --help"""

import sys
from pathlib import Path
from typing import Annotated

import optax
import typer

sys.path.append(str(Path(__file__).resolve().parents[2]))

import data as text_data
import jaxferry
import model
import sample
import weights as published
from examples.common import command_line
from examples.common.sampling import print_sample
from examples.common.training import Run, console
from jaxferry.processes import is_first

# GPT-3's (Brown et al. 2020, table 2.1), except for the tiny model.
LEARNING_RATES = {"tiny": 1e-3, "124m": 6e-4, "medium": 3e-4, "xl": 2e-4, "2.7b": 1.6e-4, "6.7b": 1.2e-4}
WARMUP_STEPS = 20
PROMPT_TOKENS = 16

app = command_line.make_app()


@app.command(help="Trains GPT-2 on text, with parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: command_line.Steps = 800,
    batch: command_line.Batch = 8,
    seq: command_line.Seq = 128,
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
    config = command_line.read_size(model.SIZES, size, seq)
    corpus = text_data.load(data, config.vocab_size, weights)
    train_batches = text_data.Batches(corpus.train, batch, seq, seed)
    valid_batches = text_data.Batches(corpus.validation, batch, seq, seed)
    step = jaxferry.train_step(
        model.make_loss(config),
        optax.adamw(optax.linear_schedule(0.0, LEARNING_RATES[size] if lr is None else lr, WARMUP_STEPS)),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=command_line.read_dtype(compute_dtype),
        mesh=mesh,
    )
    run = Run(step, train_batches, valid_batches, batch * seq)
    params = None if weights is None else published.load(config, weights)
    run.start(model.make_init(config), seed, resume, params)
    num_parameters = model.count_parameters(config)
    console.print(f"GPT-2 {size} with {num_parameters:,} parameters, {len(corpus.train):,} training tokens")
    status = run.finish(steps, metrics, save, save_every, keep_last)
    if status == 0 and export and is_first():
        published.save(config, run.state.lazy_params, export, corpus.tokenizer)
    if status == 0 and sample_tokens:
        prompt = corpus.validation[:PROMPT_TOKENS].tolist()
        print_sample(corpus.tokenizer, prompt, sample.generate(step, run.state, config, prompt, sample_tokens))
    return status


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
