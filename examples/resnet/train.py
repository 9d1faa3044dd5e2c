"""Trains a residual network on digits with parameters in host memory: python examples/resnet/train.py --help"""

import sys
from pathlib import Path
from typing import Annotated

import optax
import typer

sys.path.append(str(Path(__file__).resolve().parents[2]))

import jaxferry
from examples.common import command_line, digits
from examples.common.training import Run, console, count_parameters
from examples.resnet import model

# The published one (He et al. 2016, section 3.4), except for the tiny model.
LEARNING_RATES = {"tiny": 0.05, "18": 0.1, "50": 0.1}
WARMUP_STEPS = 20

app = command_line.make_app()


@app.command(help="Trains a residual network on digits, with parameters and optimizer state in host memory.")
def train(
    size: Annotated[str, typer.Option(help=f"The model: {', '.join(model.SIZES)}.")] = "tiny",
    steps: command_line.Steps = 300,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    policy: command_line.Policy = None,
    memory_budget: command_line.MemoryBudget = None,
    reserve_factor: command_line.ReserveFactor = 1.0,
    compute_dtype: command_line.ComputeDtype = None,
    devices: command_line.Devices = 1,
    distributed: command_line.Distributed = False,
    seed: command_line.Seed = 0,
    lr: command_line.LearningRate = None,
    metrics: command_line.Metrics = None,
    save: command_line.Save = None,
    save_every: command_line.SaveEvery = 0,
    keep_last: command_line.KeepLast = None,
    resume: command_line.Resume = None,
) -> int:
    mesh = command_line.make_mesh(devices, distributed)
    config = command_line.read_choice("--size", model.SIZES, size)
    seen, unseen = digits.load()
    step = jaxferry.train_step(
        model.make_loss(config),
        make_optimizer(LEARNING_RATES[size] if lr is None else lr),
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        policy=policy,
        compute_dtype=command_line.read_dtype(compute_dtype),
        mesh=mesh,
    )
    train_batches, valid_batches = (
        digits.Batches(images, batch, seed, config.image_size, config.num_colours) for images in (seen, unseen)
    )
    # Running averages are not parameters: each step returns them for the next batch.
    carried = {"batch_stats": model.make_batch_stats(config)}
    run = Run(step, train_batches, valid_batches, batch, "images", carried)
    init_fn = model.make_init(config)
    run.start(init_fn, seed, resume)
    console.print(f"ResNet {size} with {count_parameters(init_fn):,} parameters, {len(seen.labels):,} training images")
    status = run.finish(steps, metrics, save, save_every, keep_last)
    if status == 0:
        predict = model.make_predict(config)
        accuracy = digits.accuracy_of(step, run.state, predict, unseen, config, batch, run.carried["batch_stats"])
        console.print(f"{accuracy:.1%} of {len(unseen.labels)} unseen images recognised, with the running averages")
    return status


def make_optimizer(learning_rate):
    """Makes SGD with momentum, weight decay and a constant learning rate after a warm-up."""
    schedule = optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS)
    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, momentum=0.9))


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
