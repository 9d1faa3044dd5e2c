"""Trains GPT-2 on text, its parameters in host memory: python examples/gpt2/train.py --help"""

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import data as text_data
import jaxferry
import model
import sample
from jaxferry.errors import InputError, JaxFerryError

# GPT-3's (Brown et al. 2020, table 2.1), but for the tiny model.
LEARNING_RATES = {"tiny": 1e-3, "124m": 6e-4, "medium": 3e-4, "xl": 2e-4, "2.7b": 1.6e-4, "6.7b": 1.2e-4}
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
WARMUP_STEPS = 20
NUM_VALIDATION_BATCHES = 4
PROMPT_TOKENS = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.command(help="Trains GPT-2 on text, its parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: Annotated[int, typer.Option(min=0, help="Train up to this step; a resumed run counts on.")] = 800,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 128,
    policy: Annotated[str | None, typer.Option(help="Says where each layer lives; by default JaxFerry's own.")] = None,
    memory_budget: Annotated[str | None, typer.Option(help='Device memory for training, such as "8GiB".')] = None,
    reserve_factor: Annotated[float, typer.Option(help="Share of gradient bytes that may stay on the device.")] = 1.0,
    compute_dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(COMPUTE_DTYPES)}; by default bfloat16, on a CPU float32.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A text file or folder; by default Python's own library.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Names the first parameters and the order of the data.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Learning rate after the warm-up; by default the size's.")] = None,
    metrics: Annotated[Path | None, typer.Option(help="Write one JSON object a step to this file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the state here at the end.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue from a saved state.")] = None,
    sample_tokens: Annotated[int, typer.Option(min=0, help="Length of the text written at the end.")] = 96,
) -> int:
    config = read_size(size, seq)
    corpus = text_data.load(data, config.vocab_size)
    train_batches = text_data.Batches(corpus.train, batch, seq, seed)
    valid_batches = text_data.Batches(corpus.validation, batch, seq, seed)
    step = jaxferry.train_step(
        model.make_loss(config),
        optax.adamw(optax.linear_schedule(0.0, LEARNING_RATES[size] if lr is None else lr, WARMUP_STEPS)),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=read_dtype(compute_dtype),
    )
    init_fn, key = model.make_init(config), jax.random.key(seed)
    state = step.restore(resume, jax.eval_shape(init_fn, key)) if resume else step.init_from(init_fn, key)
    num_parameters = model.count_parameters(config)
    console.print(f"GPT-2 {size} with {num_parameters:,} parameters, {len(corpus.train):,} tokens of text to train on")

    run = Run(step, state, batch * seq, train_batches, valid_batches)
    run.validate()
    interrupted = run.train(steps, metrics, append=resume is not None)
    if save:
        step.save(run.state, save)
    if interrupted:
        fate = f"saved, go on with --resume {save}" if save else "nothing was saved (no --save)"
        console.print(f"interrupted after step {run.state.step}: {fate}", soft_wrap=True)
        return 130
    run.validate()
    if sample_tokens:
        print_sample(config, run.state.params, corpus, sample_tokens)
    return 0


@dataclasses.dataclass
class Run:
    """A training under way: `state` is always one that can be saved."""

    step: jaxferry.TrainStep
    state: jaxferry.TrainState
    tokens_per_batch: int
    train_batches: text_data.Batches
    valid_batches: text_data.Batches

    def train(self, steps, metrics_file, append):
        """Trains up to a step and shows its progress; true if Ctrl-C ended it earlier."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(metrics_file, "a" if append else "w")) if metrics_file else None
            progress = stack.enter_context(make_progress())
            task = progress.add_task("compiling", total=steps, completed=self.state.step)
            try:
                while self.state.step < steps:
                    record = self.train_one()
                    if out:
                        print(json.dumps(record), file=out, flush=True)
                    told = "loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {step_s:.3f} s/step".format(**record)
                    progress.update(task, completed=self.state.step, description=told)
                    if not console.is_terminal and self.state.step % max(1, steps // 10) == 0:
                        console.print(f"{self.state.step}/{steps}  {told}")
            except KeyboardInterrupt:
                return True
        return False

    def train_one(self):
        """One step; returns what --metrics writes of it."""
        start_s = time.perf_counter()
        index = self.state.step
        self.state, metrics = self.step(self.state, self.train_batches(index))
        loss = float(metrics["loss"])
        step_s = time.perf_counter() - start_s
        return {
            "step": index,
            "loss": loss,
            "tokens_per_s": self.tokens_per_batch / step_s,
            "step_s": step_s,
            "device_param_bytes_peak": int(metrics["device_param_bytes_peak"]),
        }

    def validate(self):
        """Prints the mean loss over the same few batches of the validation text."""
        losses = [float(self.step.evaluate(self.state, self.valid_batches(i))) for i in range(NUM_VALIDATION_BATCHES)]
        console.print(f"validation loss after {self.state.step} steps: {sum(losses) / len(losses):.4f}")


def read_size(size, seq):
    if size not in model.SIZES:
        raise InputError(f"--size must be one of {', '.join(model.SIZES)}, got {size}")
    config = model.SIZES[size]
    if seq > config.max_length:
        raise InputError(f"--seq must be at most the {config.max_length} positions of size {size}, got {seq}")
    return config


def read_dtype(name):
    if name is None:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in COMPUTE_DTYPES:
        raise InputError(f"--compute-dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {name}")
    return name


def make_progress():
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def print_sample(config, params, corpus, num_tokens):
    """Lets the model continue the first words of the validation text."""
    prompt = corpus.validation[:PROMPT_TOKENS].tolist()
    tokens = sample.generate(config, params, prompt, num_tokens)
    text = Text(corpus.tokenizer.decode(prompt), style="dim")
    console.rule("a sample")
    console.print(text.append(corpus.tokenizer.decode(tokens), style="not dim"))


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, 130 for an interrupt."""
    try:
        return app(args, standalone_mode=False)
    except typer.TyperException as error:
        message, status = error.format_message(), error.exit_code
    except (JaxFerryError, OSError) as error:
        message, status = str(error), 2
    except (KeyboardInterrupt, typer.Abort):
        message, status = "interrupted", 130
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
