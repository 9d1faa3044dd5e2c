"""`jaxferry bench`: trains a model under several policies and compares measured with predicted steps."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxferry.cli.common import AsJson, naming, print_json, print_report, read_budget
from jaxferry.cli.model import OPTIMIZERS, ModelName, UserModel, call_model, make_optimizer, read_dtype, user_code
from jaxferry.compare import Comparison, compare_policies
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
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "adamw",
    steps: Annotated[int, typer.Option(min=4, help="Consecutive steps per round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after one warm-up round.")] = 3,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Hold one state in host memory; policies do not take turns.")
    ] = False,
    memory_budget: Annotated[str | None, typer.Option(help='Device memory, such as "8GiB".')] = None,
    reserve_factor: Annotated[
        float | None, typer.Option(help="Share of gradient bytes that may stay on the device.")
    ] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="Dtype of the parameters on the device.")] = None,
    remat: Annotated[str, typer.Option(help="What is recomputed in the backward.")] = "none",
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Offload values that cross segments to host memory.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initial parameters, if a function makes them.")] = 0,
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
    names = policy or _DEFAULT_POLICIES
    for name in names:
        make_policy(name)  # rejects unknown policies before anything is measured
    update = make_optimizer(optimizer)
    known = None if profile is None else Profile.load(profile)
    with user_code(model):
        user = call_model(model)
        user.check_is_whole()
    batch = user.batch_of(0)

    def make_step(policy: str | None, planned: Profile | str = "measure") -> TrainStep:
        return train_step(user.loss_fn, update, policy=policy, profile=planned, **options)

    with user_code(model):
        measured = make_step(None).measure(user.shapes(), batch) if known is None else known
        with progress_bar("training") as report, naming(*(() if profile is None else (profile,))):
            compared = compare_policies(
                names,
                measured,
                lambda name: make_step(name, measured),
                lambda step: user.new_state(step, seed),
                batch,
                num_steps=steps,
                num_rounds=rounds,
                one_at_a_time=one_at_a_time,
                report=report,
            )
    _report_results(compared, user, optimizer, plot, output, as_json)


def _report_results(
    compared: Comparison, user: UserModel, optimizer: str, plot: Path | None, output: Path | None, as_json: bool
) -> None:
    document: dict[str, Any] = {**compared.to_json(), "model": user.name, "optimizer": optimizer}
    if output is not None:
        write_json(output, document)
    if plot is not None:
        plot_timelines(compared, plot)
    if as_json:
        print_json(document)
    else:
        print_report(bench_table(compared), *bench_lines(compared))
