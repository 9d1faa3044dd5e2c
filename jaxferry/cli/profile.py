"""`jaxferry profile`: measures or estimates the costs of a model's layers on a machine."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import rich.table
from typer import Option

from jaxferry.cli.common import AsJson, make_table, print_result
from jaxferry.cli.traced import trace
from jaxferry.cli.workload import (
    OPTIMIZERS,
    ComputeDtype,
    ModelName,
    Tiles,
    call_model,
    check_fixed_granularity,
    make_optimizer,
    read_dtype,
    read_remat,
    read_tiles,
    user_code,
)
from jaxferry.costs import (
    MACHINES,
    Machine,
    Profile,
    find_machine,
)
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.partition import AUTO, OFF, REMAT, check_tiles
from jaxferry.processes import mesh_of
from jaxferry.training import TrainedShapes, train_step
from jaxferry.transport import TRANSPORTS


def profile(
    model: ModelName,
    estimate: Annotated[
        bool, Option("--estimate", help="Estimate by a roofline model; --machine alone does so too.")
    ] = False,
    machine: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help=f"Estimate this machine and run nothing: one of {', '.join(MACHINES)}, or a JSON file.",
        ),
    ] = None,
    compute_dtype: ComputeDtype = None,
    remat: Annotated[
        str, Option(help=f"What is recomputed in the backward: {' or '.join(REMAT)}; {AUTO} leaves it to plans.")
    ] = AUTO,
    tiles: Tiles = OFF,
    optimizer: Annotated[str, Option(help=f"The optimizer: {', '.join(OPTIMIZERS)}.")] = "adamw",
    transport: Annotated[
        str | None, Option(help=f"The transport: {' or '.join(TRANSPORTS)}; default: that of a training step.")
    ] = None,
    granularity: Annotated[
        str,
        Option(
            callback=check_fixed_granularity,
            help="Layers of the profile: block, or module for the matrices of each module and the vectors of each "
            "block; `plan --granularity` plans a profile of modules for either.",
        ),
    ] = BLOCK,
    devices: Annotated[
        int, Option("--devices", min=1, help="Devices that share a batch; measured ones are of this machine.")
    ] = 1,
    processes: Annotated[
        int, Option("--processes", min=1, help="Processes that these devices belong to, a machine for each.")
    ] = 1,
    output: Annotated[
        pathlib.Path | None, Option("-o", "--output", metavar="PROFILE.json", help="Where to write the profile.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure or estimate the costs of a model's layers, for plan and simulate.

    Measures on this machine's device unless --machine names one to estimate. Parameters and batch may be shapes.
    Earlier measurements come from the cache (JAXFERRY_CACHE_DIR; "off" disables it).
    """
    if estimate and machine is None:
        raise InputError(f"--estimate needs --machine: one of {', '.join(MACHINES)}, or a JSON file")
    if processes > 1 and machine is None:
        raise InputError("--processes needs --machine: several measure with `jaxferry train --profile measure`")
    if devices % processes:
        raise InputError(f"--devices must be a multiple of --processes, got {devices} and {processes}")
    if tiles == AUTO:
        raise InputError("--tiles must be off, a number, or numbers by segment: a profile has no budget to choose for")
    options: dict[str, Any] = {"remat": read_remat(remat), "granularity": granularity}
    options |= {"compute_dtype": read_dtype(compute_dtype)}
    tiled = read_tiles(tiles)
    if machine is not None:
        figures = find_machine(machine)
        made = _estimated(model, optimizer, figures, devices, processes, **options, tiles=check_tiles(tiled))
    else:
        made = _measured(model, optimizer, **options, tiles=tiled, mesh=mesh_of(devices), transport=transport)
    if output is not None:
        made.save(output)
    estimated = f"Estimated for {made.machine['name']}, not measured."
    note = estimated if made.machine.get("estimated") else f"Measured on {made.machine['name']}."
    print_result(as_json, made.to_json(), f"{note} Sizes in MiB, times in ms.", "", _table(made))


def _estimated(model: str, optimizer: str, machine: Machine, devices: int, processes: int, **options: Any) -> Profile:
    """Estimates the profile of the model `module:function`; `options` are those of `trace`."""
    update = make_optimizer(optimizer)
    options |= {"devices": devices, "processes": processes}
    with user_code(model):
        known = call_model(model)
        params, batch = known.shapes(), known.batch_of(0)
        trained = TrainedShapes(params, update, options["compute_dtype"])
        options["update"] = trained.update_bytes()
        made = trace(0, known.loss_fn, params, batch, machine, **options)
    in_all = trained.host_bytes(made.variants.base.layers, made.widened)
    host_bytes = {name: -(-size // processes) for name, size in in_all.items()}
    described = {"model": model, "optimizer": optimizer, "remat": options["remat"], "host_bytes": host_bytes}
    return dataclasses.replace(made.profile, machine={**made.profile.machine, **described})


def _measured(model: str, optimizer: str, **options: Any) -> Profile:
    """Measures the profile of the model `module:function`; `options` are those of `train_step`."""
    update = make_optimizer(optimizer)  # times do not depend on the learning rate
    with user_code(model):
        known = call_model(model)
    step = train_step(known.loss_fn, update, **options)
    with user_code(model):
        made = step.measure(known.shapes(), known.batch_of(0))
    return dataclasses.replace(made, machine={**made.machine, "model": model, "optimizer": optimizer})


def _table(made: Profile) -> rich.table.Table:
    rows = []
    for layer in made.layers:
        sizes = [layer.param_bytes / 2**20, layer.activation_bytes / 2**20]
        times_s = [layer.load_s, layer.forward_s, layer.forward_dha_s, layer.backward_s, layer.backward_dha_s]
        times_s += [layer.backward_go_s, layer.update_s]
        rows.append([layer.name, *(f"{number:.3g}" for number in (*sizes, *(1e3 * time for time in times_s)))])
    heads = ["layer", "weights", "kept", "load", "fwd", "fwd DHA", "bwd", "bwd DHA", "bwd GO", "update"]
    return make_table(heads, rows, is_plain=True)
