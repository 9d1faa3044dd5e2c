"""`jaxferry bench`: trains a model under several policies and compares measured with predicted steps."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from jaxferry.cli.common import AsJson, naming, print_result, read_budget
from jaxferry.cli.compare import compare_policies, dry_run
from jaxferry.cli.figures import Plot, plot_timelines
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
    Tiles,
    call_model,
    make_optimizer,
    read_dtype,
    read_offloading,
    read_tiles,
    user_code,
)
from jaxferry.costs import Profile, progress_bar
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.partition import OFF
from jaxferry.planner import make_policy, policies
from jaxferry.records import write_json
from jaxferry.training import TrainStep, train_step

_DEFAULT_POLICIES = ("zero-offload", "native-overlapped", "memferry", "exact", "auto")


def bench(
    model: ModelName,
    policy: Annotated[
        list[str] | None, Option(help=f"A policy of {', '.join(policies())}; may be given several times.")
    ] = None,
    profile: Annotated[
        Path | None, Option(metavar="PROFILE.json", help="The profile to plan with; default: measure one.")
    ] = None,
    optimizer: Optimizer = "adamw",
    dry: Annotated[
        bool, Option("--dry", help="Prepare each policy's step and print its prediction; train nothing.")
    ] = False,
    steps: Annotated[int, Option(min=4, help="Consecutive steps per round.")] = 8,
    rounds: Annotated[int, Option(min=1, help="Timed rounds, after one warm-up round.")] = 3,
    one_at_a_time: Annotated[
        bool, Option("--one-at-a-time", help="Hold one state in host memory; policies do not take turns.")
    ] = False,
    memory_budget: MemoryBudget = None,
    reserve_factor: ReserveFactor = None,
    compute_dtype: ComputeDtype = None,
    remat: Remat = "none",
    tiles: Tiles = OFF,
    offload_activations: OffloadActivations = None,
    granularity: FixedGranularity = BLOCK,
    seed: Seed = 0,
    plot: Plot = None,
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="BENCH.json", help="Write the results: for `report`, unless --dry."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model under several policies; compare measured and predicted steps.

    Each step trains on the model's first batch. With --dry, parameters and batch may be shapes.
    """
    if plot is not None and dry:
        raise InputError("--plot draws measured steps, and --dry measures none: give one of them")
    names = policy or _DEFAULT_POLICIES
    for name in names:
        make_policy(name)  # rejects unknown policies before anything is measured
    options: dict[str, Any] = {
        "memory_budget": read_budget(memory_budget),
        "reserve_factor": reserve_factor,
        "compute_dtype": read_dtype(compute_dtype),
        "remat": remat,
        "tiles": read_tiles(tiles),
        "offload_activations": read_offloading(offload_activations),
        "granularity": granularity,
        "record_steps": steps,
    }
    loaded = None if profile is None else Profile.load(profile)
    if loaded is not None and (known := loaded.machine.get("remat", remat)) != remat:
        typer.echo(f"{profile} is for --remat {known}, and this bench has --remat {remat}: plans may differ", err=True)
    with user_code(model):
        update, user = make_optimizer(optimizer), call_model(model)

        def make_step(policy: str | None, profile: Profile | str) -> TrainStep:
            return train_step(user.loss_fn, update, policy=policy, profile=profile, **options)

        if not dry:
            user.check_is_whole()
        params, batch = user.shapes(), user.batch_of(0)
        planned = loaded or make_step(None, "measure").measure(params, batch)
        compared = names, planned, functools.partial(make_step, profile=planned)
        new_state, record = functools.partial(user.new_state, seed=seed), functools.partial(make_recording, model=model)
        taken: dict[str, Any] = {"num_steps": steps, "num_rounds": rounds, "one_at_a_time": one_at_a_time}
        files = () if profile is None else (profile,)
        with naming(*files), progress_bar("preparing" if dry else "training") as report:
            if dry:
                result = dry_run(*compared, params, batch, report=report)
            else:
                result = compare_policies(*compared, new_state, batch, **taken, record=record, report=report)
    if plot is not None:
        plot_timelines(result, plot)
    document = {**result.to_json(), "model": model, "optimizer": optimizer}
    if output is not None:
        write_json(output, document)
    print_result(as_json, document, result.table(), *result.lines())
