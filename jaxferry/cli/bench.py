"""`jaxferry bench`: trains a model under several policies and compares measured with predicted steps."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import optax
import typer

from jaxferry.cli.common import AsJson, naming, print_json, print_report, read_budget
from jaxferry.cli.model import ModelName, call_model, make_optimizer, read_dtype, user_code
from jaxferry.cli.step_options import (
    ComputeDtype,
    MemoryBudget,
    OffloadActivations,
    Optimizer,
    Remat,
    ReserveFactor,
    Seed,
)
from jaxferry.compare import Comparison, compare_policies
from jaxferry.engine import TrainState
from jaxferry.plan.registry import make_policy, policies
from jaxferry.profiling.progress import progress_bar
from jaxferry.profiling.records import Profile
from jaxferry.records import write_json
from jaxferry.report.plots import plot_format
from jaxferry.report.tables import bench_lines, bench_table
from jaxferry.report.timelines import plot_timelines
from jaxferry.train_step import TrainStep, train_step

_DEFAULT_POLICIES = ("zero-offload", "native-overlapped", "memferry", "exact", "auto")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("bench", help="Train a model under several policies; compare measured and predicted steps.")(bench)


def bench(
    model: ModelName,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"A policy of {', '.join(policies())}; may be given several times.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="The profile to plan with; default: measure one.")
    ] = None,
    optimizer: Optimizer = "adamw",
    steps: Annotated[int, typer.Option(min=4, help="Consecutive steps per round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after one warm-up round.")] = 3,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Hold one state in host memory; policies do not take turns.")
    ] = False,
    memory_budget: MemoryBudget = None,
    reserve_factor: ReserveFactor = None,
    compute_dtype: ComputeDtype = None,
    remat: Remat = "none",
    offload_activations: OffloadActivations = False,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="P.png", help="Draw the lanes over time: PNG, PDF or SVG.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="BENCH.json", help="Write the results for `report`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains the model on its first batch."""
    if plot is not None:
        plot_format(plot)
    options: dict[str, Any] = {
        "memory_budget": read_budget(memory_budget),
        "reserve_factor": reserve_factor,
        "compute_dtype": read_dtype(compute_dtype),
        "remat": remat,
        "offload_activations": offload_activations,
        "record_steps": steps,
    }
    rules = {"num_steps": steps, "num_rounds": rounds, "one_at_a_time": one_at_a_time}
    compared = _compared(model, policy or _DEFAULT_POLICIES, profile, make_optimizer(optimizer), seed, options, rules)
    document: dict[str, Any] = {**compared.to_json(), "model": model, "optimizer": optimizer}
    if output is not None:
        write_json(output, document)
    if plot is not None:
        plot_timelines(compared, plot)
    if as_json:
        print_json(document)
    else:
        print_report(bench_table(compared), *bench_lines(compared))


def _compared(
    model: str,
    policies: Sequence[str],
    profile: Path | None,
    optimizer: optax.GradientTransformation,
    seed: int,
    options: Mapping[str, Any],
    rules: Mapping[str, Any],
) -> Comparison:
    """Trains the model under each policy; `options` are those of `train_step`, `rules` those of `compare_policies`."""
    for name in policies:
        make_policy(name)  # rejects unknown policies before anything is measured
    known = None if profile is None else Profile.load(profile)
    with user_code(model):
        user = call_model(model)
        user.check_is_whole()
    batch = user.batch_of(0)

    def make_step(policy: str | None, planned: Profile | str = "measure") -> TrainStep:
        return train_step(user.loss_fn, optimizer, policy=policy, profile=planned, **options)

    def new_state(step: TrainStep) -> TrainState:
        return user.new_state(step, seed)

    with user_code(model):
        measured = make_step(None).measure(user.shapes(), batch) if known is None else known
        planned = functools.partial(make_step, planned=measured)
        with progress_bar("training") as report, naming(*(() if profile is None else (profile,))):
            return compare_policies(policies, measured, planned, new_state, batch, report=report, **rules)
