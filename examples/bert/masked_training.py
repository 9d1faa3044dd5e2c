"""The command line that trains a masked language model, for BERT and RoBERTa."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import optax
import typer

import jaxferry
from examples.bert import fill, model
from examples.common import command_line
from examples.common.text import Corpus
from examples.common.training import Run, console, count_parameters

WARMUP_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Example:
    """The settings of one masked language model.

    Attributes:
      name: the printed name.
      sizes, learning_rates: configurations and learning rates by --size.
      adam: further arguments of `optax.adamw`.
      load: makes a Corpus from `(path, vocab_size)`.
      make_batches: makes batches from `(tokens, batch_size, length, seed, tokenizer)`.
      mask: the mask token.
    """

    name: str
    sizes: Mapping[str, model.Config]
    learning_rates: Mapping[str, float]
    adam: Mapping[str, float]
    load: Callable[..., Corpus]
    make_batches: Callable[..., Any]
    mask: int

    def make_optimizer(self, learning_rate):
        """Makes Adam with weight decay except on biases and LayerNorms, and a constant rate after a warm-up."""
        schedule = optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS)
        return optax.adamw(schedule, weight_decay=0.01, mask=is_decayed, **self.adam)


def is_decayed(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def make_app(example):
    """Returns the command line of an example."""
    app = command_line.make_app()

    @app.command(help=f"Trains {example.name} on text, with parameters and optimizer state in host memory.")
    def train(
        size: Annotated[str, typer.Option(help=f"The model: {', '.join(example.sizes)}.")] = "tiny",
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
        sample_tokens: command_line.FillTokens = 8,
    ) -> int:
        mesh = command_line.make_mesh(devices, distributed)
        config = command_line.read_size(example.sizes, size, seq)
        corpus = example.load(data, config.vocab_size)
        train_batches = example.make_batches(corpus.train, batch, seq, seed, corpus.tokenizer)
        valid_batches = example.make_batches(corpus.validation, batch, seq, seed, corpus.tokenizer)
        step = jaxferry.train_step(
            model.make_loss(config),
            example.make_optimizer(example.learning_rates[size] if lr is None else lr),
            memory_budget=memory_budget,
            reserve_factor=reserve_factor,
            policy=policy,
            compute_dtype=command_line.read_dtype(compute_dtype),
            mesh=mesh,
        )
        run = Run(step, train_batches, valid_batches, batch * seq)
        init_fn = model.make_init(config)
        run.start(init_fn, seed, resume)
        headline = f"{example.name} {size} with {count_parameters(init_fn):,} parameters"
        console.print(f"{headline}, {len(corpus.train):,} training tokens")
        status = run.finish(steps, metrics, save, save_every, keep_last)
        if status == 0 and sample_tokens:
            console.rule("masked tokens filled in")
            row = valid_batches(0)
            console.print(fill.make_table(config, run.state.params, row, corpus.tokenizer, example.mask, sample_tokens))
        return status

    return app
