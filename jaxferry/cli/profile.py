"""`jaxferry profile`: measures or estimates the costs of a model's layers on a machine."""

import dataclasses
import pathlib
from typing import Annotated, Any

import rich.markup
import rich.table
import typer

from jaxferry.cli.common import AsJson, make_table, print_result
from jaxferry.cli.traced import trace
from jaxferry.cli.workload import (
    OPTIMIZERS,
    ComputeDtype,
    ModelName,
    call_model,
    check_fixed_granularity,
    make_optimizer,
    read_dtype,
    user_code,
)
from jaxferry.costs import MACHINES, Profile, find_machine
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.partition import AUTO, REMAT
from jaxferry.processes import mesh_of
from jaxferry.training import Model, Numerics, train_step
from jaxferry.transport import TRANSPORTS, make_placement


def profile(
    model: ModelName,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate by a roofline model; --machine alone does so too.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Estimate this machine and run nothing: one of {', '.join(MACHINES)}, or a JSON file.",
        ),
    ] = None,
    compute_dtype: ComputeDtype = None,
    remat: Annotated[
        str,
        typer.Option(help=f"What is recomputed in the backward: {' or '.join(REMAT)}; {AUTO} leaves it to plans."),
    ] = AUTO,
    optimizer: Annotated[
        str, typer.Option(help=f"The measured optimizer: {', '.join(OPTIMIZERS)}. Estimates assume adamw.")
    ] = "adamw",
    transport: Annotated[
        str | None, typer.Option(help=f"The transport: {' or '.join(TRANSPORTS)}; default: that of a training step.")
    ] = None,
    granularity: Annotated[
        str,
        typer.Option(
            help="Layers of the profile: block, or module for the matrices of each module and the vectors of each "
            "block; `plan --granularity` plans a profile of modules for either."
        ),
    ] = BLOCK,
    devices: Annotated[
        int, typer.Option("--devices", min=1, help="Devices that share a batch; measured ones are of this machine.")
    ] = 1,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes that these devices belong to, a machine for each.")
    ] = 1,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", metavar="PROFILE.json", help="Where to write the profile.")
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
    check_fixed_granularity(granularity)
    if remat not in (*REMAT, AUTO):
        raise InputError(f"--remat must be one of {', '.join((*REMAT, AUTO))}, got {remat!r}")
    if machine is not None:
        made = estimate_model(model, machine, compute_dtype, remat, devices, processes, granularity)
    else:
        made = measure_model(model, optimizer, compute_dtype, remat, transport, granularity, devices)
    if output is not None:
        made.save(output)
    estimated = f"Estimated for {made.machine['name']}, not measured."
    note = estimated if made.machine.get("estimated") else f"Measured on {made.machine['name']}."
    print_result(as_json, made.to_json(), f"{note} Sizes in MiB, times in ms.", "", _table(made))


def estimate_model(
    model: str,
    machine: str,
    compute_dtype: str | None = None,
    remat: str = AUTO,
    devices: int = 1,
    processes: int = 1,
    granularity: str = BLOCK,
) -> Profile:
    """Estimates the profile of the model `module:function` on a built-in machine or one described in a file.

    Raises:
      InputError: if the function or the machine is unknown, or the function returns something else.
    """
    figures, dtype = find_machine(machine), read_dtype(compute_dtype)
    sharing: dict[str, Any] = {"remat": remat, "devices": devices, "processes": processes}
    with user_code(model):
        known = call_model(model)
        params, batch = known.shapes(), known.batch_of(0)
        made = trace(0, known.loss_fn, params, batch, figures, dtype, granularity, **sharing)
    sizes = Model(params, OPTIMIZERS["adamw"](1e-3), Numerics(compute_dtype=dtype), make_placement(), None)
    in_all = sizes.host_bytes(made.variants.base.layers, widened=made.widened)
    host_bytes = {name: -(-size // processes) for name, size in in_all.items()}
    facts = {"model": model, "remat": remat, "host_bytes": host_bytes}
    return dataclasses.replace(made.profile, machine={**made.profile.machine, **facts})


def measure_model(
    model: str,
    optimizer: str = "adamw",
    compute_dtype: str | None = None,
    remat: str = AUTO,
    transport: str | None = None,
    granularity: str = BLOCK,
    devices: int = 1,
) -> Profile:
    """Measures the profile of the model `module:function` on JAX's first device, or on a mesh of its first devices.

    Raises:
      InputError: if the function, optimizer or transport is unknown, or the function returns something else.
    """
    update = make_optimizer(optimizer)  # times do not depend on the learning rate
    options: dict[str, Any] = {
        "compute_dtype": read_dtype(compute_dtype),
        "remat": remat,
        "transport": transport,
        "granularity": granularity,
        "mesh": mesh_of(devices),
    }
    with user_code(model):
        known = call_model(model)
    step = train_step(known.loss_fn, update, **options)
    with user_code(model):
        made = step.measure(known.shapes(), known.batch_of(0))
    return dataclasses.replace(made, machine={**made.machine, "model": model, "optimizer": optimizer})


def _table(made: Profile) -> rich.table.Table:
    heads = ("weights", "kept", "load", "fwd", "fwd DHA", "bwd", "bwd DHA", "bwd GO", "update")
    table = make_table("layer", *heads, is_plain=True)
    for layer in made.layers:
        sizes = [layer.param_bytes / 2**20, layer.activation_bytes / 2**20]
        times_s = [layer.load_s, layer.forward_s, layer.forward_dha_s, layer.backward_s, layer.backward_dha_s]
        times_s += [layer.backward_go_s, layer.update_s]
        name = rich.markup.escape(layer.name)
        table.add_row(name, *(f"{number:.3g}" for number in (*sizes, *(1e3 * time for time in times_s))))
    return table
