"""`jaxferry bench`: trains a model under several policies and compares measured with predicted steps."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import optax
import typer

from jaxferry.cli.common import AsJson, naming, print_json, print_report, read_budget
from jaxferry.cli.compare import Comparison, DryRun, bench_lines, bench_table, compare_policies, dry_run, dry_run_table
from jaxferry.cli.figures import plot_format, plot_timelines
from jaxferry.cli.recording import make_recording
from jaxferry.cli.workload import (
    ComputeDtype,
    FixedGranularity,
    MemoryBudget,
    ModelName,
    OffloadActivations,
    Optimizer,
    Remat,
    ReserveFactor,
    Seed,
    UserModel,
    call_model,
    check_fixed_granularity,
    make_optimizer,
    read_dtype,
    user_code,
)
from jaxferry.costs.progress import progress_bar
from jaxferry.costs.records import Profile
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.planner.registry import make_policy, policies
from jaxferry.records import write_json
from jaxferry.training.train_step import TrainStep, train_step

_DEFAULT_POLICIES = ("zero-offload", "native-overlapped", "memferry", "exact", "auto")


def bench(
    model: ModelName,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"A policy of {', '.join(policies())}; may be given several times.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="The profile to plan with; default: measure one.")
    ] = None,
    optimizer: Optimizer = "adamw",
    dry: Annotated[
        bool, typer.Option("--dry", help="Prepare each policy's step and print its prediction; train nothing.")
    ] = False,
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
    granularity: FixedGranularity = BLOCK,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="P.png", help="Draw the lanes over time: PNG, PDF or SVG.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="BENCH.json", help="Write the results: for `report`, unless --dry."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trains the model on its first batch. With --dry, parameters and batch may be shapes."""
    _check_plot(plot, dry)
    check_fixed_granularity(granularity)
    names = policy or _DEFAULT_POLICIES
    for name in names:
        make_policy(name)  # rejects unknown policies before anything is measured
    options: dict[str, Any] = {
        "memory_budget": read_budget(memory_budget),
        "reserve_factor": reserve_factor,
        "compute_dtype": read_dtype(compute_dtype),
        "remat": remat,
        "offload_activations": offload_activations,
        "granularity": granularity,
        "record_steps": steps,
    }
    given = None if profile is None else _load(profile, remat)
    with user_code(model):
        subject = _Subject(make_optimizer(optimizer), call_model(model), options)
        if not dry:
            subject.user.check_is_whole()
        planned = given or subject.measure()
        with naming(*(() if profile is None else (profile,))):
            if dry:
                result: Comparison | DryRun = subject.dry_run(names, planned)
            else:
                rules = {"num_steps": steps, "num_rounds": rounds, "one_at_a_time": one_at_a_time}
                result = subject.train(names, planned, seed, rules)
    if plot is not None and isinstance(result, Comparison):
        plot_timelines(result, plot)
    _tell(result, {**result.to_json(), "model": model, "optimizer": optimizer}, output, as_json)


def _check_plot(plot: Path | None, dry: bool) -> None:
    """Refuses plots of no measured steps and of unknown formats, before anything is measured."""
    if plot is not None and dry:
        raise InputError("--plot draws measured steps, and --dry measures none: give one of them")
    if plot is not None:
        plot_format(plot)


def _load(profile: Path, remat: str) -> Profile:
    """The given profile; says if it is for another rematerialization."""
    given = Profile.load(profile)
    if (known := given.machine.get("remat", remat)) != remat:
        typer.echo(f"{profile} is for --remat {known}, and this bench has --remat {remat}: plans may differ", err=True)
    return given


def _tell(result: Comparison | DryRun, document: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Writes and prints the results."""
    if output is not None:
        write_json(output, document)
    if as_json:
        print_json(document)
    else:
        print_report(dry_run_table(result) if isinstance(result, DryRun) else bench_table(result), *bench_lines(result))


@dataclasses.dataclass(frozen=True)
class _Subject:
    """What the steps of all policies have in common.

    Attributes:
      optimizer: the optimizer.
      user: the model.
      options: those of `train_step`, without policy and profile.
    """

    optimizer: optax.GradientTransformation
    user: UserModel
    options: Mapping[str, Any]

    def measure(self) -> Profile:
        """Measures the profile to plan with."""
        return self._step(None, "measure").measure(self.user.shapes(), self.user.batch_of(0))

    def dry_run(self, policies: Sequence[str], profile: Profile) -> DryRun:
        """Prepares a step under each policy."""
        make_step = functools.partial(self._step, profile=profile)
        with progress_bar("preparing") as report:
            return dry_run(policies, profile, make_step, self.user.shapes(), self.user.batch_of(0), report=report)

    def train(self, policies: Sequence[str], profile: Profile, seed: int, rules: Mapping[str, Any]) -> Comparison:
        """Trains under each policy; `rules` are those of `compare_policies`."""
        make_step = functools.partial(self._step, profile=profile)
        new_state = functools.partial(self.user.new_state, seed=seed)
        with progress_bar("training") as report:
            batch, record = self.user.batch_of(0), functools.partial(make_recording, model=self.user.name)
            return compare_policies(
                policies, profile, make_step, new_state, batch, record=record, report=report, **rules
            )

    def _step(self, policy: str | None, profile: Profile | str) -> TrainStep:
        return train_step(self.user.loss_fn, self.optimizer, policy=policy, profile=profile, **self.options)
