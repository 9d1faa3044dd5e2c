"""Trains Transformer-XL on text with its parameters in host memory: python examples/transformer_xl/train.py --help"""

import sys
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import optax
import typer
from rich.text import Text

sys.path.append(str(Path(__file__).resolve().parents[2]))

import jaxferry
from examples.common import command_line
from examples.common.training import Run, console, count_parameters
from examples.transformer_xl import data as text_data
from examples.transformer_xl import model, sample

# Those of GPT-3 models of the same size (Brown et al. 2020, table 2.1), except for the tiny model.
LEARNING_RATES = {
    "tiny": 1e-3,
    "0.7b": 2.5e-4,
    "1b": 2e-4,
    "1.7b": 2e-4,
    "2.4b": 1.6e-4,
    "3.6b": 1.6e-4,
    "4.3b": 1.2e-4,
    "5.5b": 1.2e-4,
    "6.7b": 1.2e-4,
}
WARMUP_STEPS = 100
PROMPT_TOKENS = 16

app = command_line.make_app()


@app.command(help="Trains Transformer-XL on text, with parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: command_line.Steps = 800,
    batch: command_line.Batch = 8,
    seq: command_line.Seq = 128,
    memory: Annotated[int | None, typer.Option(min=1, help="Tokens of the memory; default: --seq.")] = None,
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
    sample_tokens: command_line.SampleTokens = 96,
) -> int:
    mesh = command_line.make_mesh(devices, distributed)
    config = command_line.read_choice("--size", model.SIZES, size)
    corpus = text_data.load(data, config.vocab_size)
    dtype, memory = command_line.read_dtype(compute_dtype), memory or seq
    step = jaxferry.train_step(
        model.make_loss(config),
        make_optimizer(LEARNING_RATES[size] if lr is None else lr),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=dtype,
        mesh=mesh,
    )
    run = Run(
        step,
        text_data.Streams(corpus.train, batch, seq, seed),
        text_data.Streams(corpus.validation, batch, seq, seed),
        batch * seq,
        carried={"memory": model.empty_memory(config, batch, memory, jnp.dtype(dtype))},
    )
    init_fn = model.make_init(config)
    run.start(init_fn, seed, resume)
    headline = f"Transformer-XL {size} with {count_parameters(init_fn):,} parameters"
    console.print(f"{headline}, {len(corpus.train):,} training tokens")
    status = run.finish(steps, metrics, save, save_every, keep_last)
    if status == 0 and sample_tokens:
        print_sample(config, run.state.params, corpus, sample_tokens, memory)
    return status


def make_optimizer(learning_rate):
    """Makes Adam as published, with a constant learning rate after a warm-up."""
    return optax.adam(optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS))


def print_sample(config, params, corpus, num_tokens, memory):
    """Prints the model's continuation of the first words of the validation text."""
    prompt = corpus.validation[:PROMPT_TOKENS].tolist()
    tokens = sample.generate(config, params, prompt, num_tokens, memory)
    text = Text(corpus.tokenizer.decode(prompt), style="dim")
    console.rule("a sample")
    console.print(text.append(corpus.tokenizer.decode(tokens), style="not dim"))


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
