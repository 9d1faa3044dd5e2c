"""`jaxferry profile`: measures or estimates the costs of a model's layers on a machine; a model traced for that."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import rich.table
from typer import Option

from jaxferry.cli.common import AsJson, make_table, print_result
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
    RECOMPUTATION,
    LayerCosts,
    Machine,
    Profile,
    backward_variant,
    estimate_profile,
    find_machine,
    forward_variant,
    partition_costs,
)
from jaxferry.engine import (
    RematVariants,
    footprints,
    loads_ahead,
    lower,
    peak_bytes,
    unsplit_by_step,
    widened_groups,
    with_program_facts,
)
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK, ActivationPlace, GradientPlace, Remat
from jaxferry.partition import AUTO, OFF, REMAT, check_tiles, partition, refused_by_jax
from jaxferry.planner import coded_plan, levels_of_tiles, merges_of_small, numbers_to_try, tiles_of
from jaxferry.processes import mesh_of
from jaxferry.settings import for_planned_gpu
from jaxferry.step import (
    DHA,
    RELOAD,
    Plan,
    ProgramKey,
    ProgramKind,
    Source,
    StepProgram,
    needed_bytes,
    saved_bytes,
    updated_on_device,
)
from jaxferry.training import Model, Numerics, train_step
from jaxferry.transport import TRANSPORTS, make_placement


def _offloading(profile: Profile, plan: Plan) -> Plan:
    """The plan with all activations that may leave in host memory; these layers' gradients are on the device."""
    waits: dict[str, Any] = {"gradient": GradientPlace.DEVICE, "activations": ActivationPlace.HOST}
    pairs = zip(plan.layers, profile.layers, strict=True)
    layers = (dataclasses.replace(own, **waits) if layer.offloadable_bytes else own for own, layer in pairs)
    return dataclasses.replace(plan, layers=tuple(layers))


_BATCH_BYTES = (
    "activation_bytes",
    "row_gradient_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "save_bytes",
    "fetch_bytes",
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model for batches of one size.

    Attributes:
      costs: those of its layers.
      flops: the operations of a step that does none of them twice.
      in_tiles: the model in more and more tiles, where a plan may choose among them.
    """

    batch_size: int
    batch: Any
    variants: RematVariants
    profile: Profile
    offload_activations: bool | str = False
    costs: tuple[LayerCosts, ...] = ()
    flops: float = 0.0
    in_tiles: tuple[Traced, ...] = ()

    @property
    def widened(self) -> dict[int, int]:
        """The groups whose gradients the host sums in more bits, as in `StepProgram`."""
        return widened_groups(self.variants.base, self.variants.derivatives)

    @functools.cached_property
    def loading_bytes(self) -> int:
        """The device memory of the leanest plan that loads all layers: RELOAD, gradients GO, with recomputation."""
        return min(each._own_loading_bytes for each in self._first_and_last)

    @functools.cached_property
    def smallest_bytes(self) -> int:
        """The device memory of the leanest plan, which may read all layers in host memory: DHA."""
        return min(self.loading_bytes, *(each._bytes_of(each._leanest(DHA)) for each in self._first_and_last))

    def changed(self, change: Callable[[Profile], Profile]) -> Traced:
        """The model with a changed profile, in all numbers of tiles."""
        in_tiles = tuple(each.changed(change) for each in self.in_tiles)
        return dataclasses.replace(self, profile=change(self.profile), in_tiles=in_tiles)

    def recomputed_share(self, plan: Plan) -> float:
        """Returns the share of a step's operations that are done a second time."""
        pairs = zip(self.costs, plan.remats, strict=True)
        more = sum(costs.recomputation[remat].flops for costs, remat in pairs if remat in costs.recomputation)
        total = sum(costs.forward_flops + costs.backward_flops for costs in self.costs) + more
        return 1 - self.flops / total if total else 0.0

    def leanest(self, budget_bytes: int) -> Plan:
        """Returns the leanest plan in this number of tiles, which loads all layers if that fits into the budget."""
        return self._leanest(RELOAD if self._own_loading_bytes <= budget_bytes else DHA)

    @property
    def _first_and_last(self) -> tuple[Traced, ...]:
        """The model in one tile, and in the most tiles if their number is open."""
        return (self, *self.in_tiles[-1:])

    @functools.cached_property
    def _own_loading_bytes(self) -> int:
        return self._bytes_of(self._leanest(RELOAD))

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Host memory in which activations wait whatever the plan; a plan that chooses takes what is there."""
        return saved_bytes(self.profile, self._leanest(DHA))

    @functools.cached_property
    def without_samples(self) -> Traced:
        """The model with what takes memory for any batch: parameters and their gradients."""
        none: dict[str, Any] = dict.fromkeys(_BATCH_BYTES, 0) | {"temporary_bytes": {}, "offloadable_bytes": {}}
        sizes = [key for _, key in RECOMPUTATION.values()]
        again = ({key: None if getattr(each, key) is None else 0 for key in sizes} for each in self.profile.layers)
        profile = self.profile.with_layers(none | own for own in again)
        return Traced(0, None, self.variants, profile, self.offload_activations)

    def _leanest(self, mode: int) -> Plan:
        layers = self.profile.layers
        modes, on_host = np.full(len(layers), mode, dtype=np.int8), np.ones(len(layers), dtype=bool)
        kept = ([remat if remat in layer.levels else Remat.NONE for layer in layers] for remat in Remat)
        plans = [coded_plan("auto", 0.0, self.profile, modes, on_host, remats=remats) for remats in kept]
        if mode == RELOAD and any(layer.offloadable_bytes for layer in layers):
            plans += [_offloading(self.profile, plan) for plan in plans]
        return min(plans, key=lambda plan: needed_bytes(self.profile, plan))

    def _bytes_of(self, plan: Plan) -> int:
        """Returns the device memory of a plan's step, including what XLA's allocator takes if there is a batch."""
        counted = needed_bytes(self.profile, plan)
        if self.batch is None:
            return counted
        program = self._lowered(plan)
        return counted + unsplit_by_step(program, self._temporary_bytes(program))

    def _lowered(self, plan: Plan) -> StepProgram:
        parts = self.variants.of(plan.remats)
        return lower(parts, self.variants.derivatives, plan, self.profile, self.offload_activations is True)

    def device_bytes(self, plan: Plan, budget_bytes: int) -> dict[str, int]:
        """Returns device memory by kind, in the program of a plan's step that needs the most."""
        program = self._lowered(plan)
        temporaries = self._temporary_bytes(program)
        ahead = loads_ahead(program, lambda loads: peak_bytes(program, temporaries, ahead=loads), budget_bytes)
        most = max(footprints(program, temporaries, ahead=ahead), key=lambda footprint: footprint.total)
        on_device = updated_on_device(self.profile, plan)
        first = [self.profile.layers[self.profile.groups[group][0]] for group in on_device]
        state = {"optimizer state": sum(layer.state_bytes for layer in first)} if first else {}
        return {
            **state,
            "parameters": most.copies + most.more_ahead,
            "gradients": most.gradients,
            "activations": most.values,
            "temporaries": most.temporaries,
            "allocator": unsplit_by_step(program, temporaries, ahead),
        }

    def _temporary_bytes(self, program: StepProgram) -> dict[ProgramKey, int]:
        found = {}
        for instruction in program.programs:
            key, first = instruction.key, program.partition.uses_of[instruction.segment][0]
            assert key is not None
            remat = program.plan.remats[first]
            by_dha, is_go = Source.HOST in key.reads, key.writes_host
            is_forward = key.kind is ProgramKind.FORWARD
            name = forward_variant(by_dha, remat) if is_forward else backward_variant(by_dha, is_go, remat)
            found[key] = self.profile.layers[first].temporary_bytes.get(name, 0)
        return found


def trace(
    batch_size: int,
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    machine: Machine,
    compute_dtype: Any,
    granularity: str = BLOCK,
    offload_activations: bool | str = False,
    *,
    remat: str = AUTO,
    tiles: Any = 1,
    devices: int = 1,
    processes: int = 1,
) -> Traced:
    """Traces a loss function and estimates its profile; raises InputError if several devices cannot share the batch."""
    remat = Remat.FULL.value if offload_activations is True and remat == AUTO else remat
    merge = functools.partial(merges_of_small, machine=machine) if granularity == BLOCK else None
    settings: dict[str, Any] = {"compute_dtype": compute_dtype, "merge": merge, "granularity": granularity}
    settings |= {"num_devices": devices, "num_processes": processes}
    with refused_by_jax(loss_fn, params, (batch,), {}, compute_dtype):
        parts = for_planned_gpu(lambda: partition(loss_fn, params, (batch,), **settings))
        if devices > 1 and not parts.graph.batch_size:
            raise InputError(f"the first axis of the model's batch must be a multiple of {devices} devices")

        def traced(tiles: Any) -> Traced:
            variants = RematVariants(parts, remat, tiles)
            costs = partition_costs(variants.base, remat, temporaries=True)
            profile = estimate_profile(costs, machine, None, devices, processes)
            profile = with_program_facts(profile, variants.base, variants.derivatives, offload_activations)
            plain = costs if remat in (AUTO, Remat.NONE) else partition_costs(variants.base, Remat.NONE.value)
            flops = sum(each.forward_flops + each.backward_flops for each in plain)
            return Traced(batch_size, batch, variants, profile, offload_activations, costs, flops)

        if tiles != AUTO:
            return traced(tiles)
        profiles = {number: traced(number).profile for number in numbers_to_try(parts)}
        levels = [tiles_of(parts, level.layers) for level in levels_of_tiles(profiles)]
        return dataclasses.replace(traced(1), in_tiles=tuple(map(traced, levels[1:])))


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
    optimizer: Annotated[
        str, Option(help=f"The measured optimizer: {', '.join(OPTIMIZERS)}. Estimates assume adamw.")
    ] = "adamw",
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
        made = _estimated(model, figures, devices, processes, **options, tiles=check_tiles(tiled))
    else:
        made = _measured(model, optimizer, **options, tiles=tiled, mesh=mesh_of(devices), transport=transport)
    if output is not None:
        made.save(output)
    estimated = f"Estimated for {made.machine['name']}, not measured."
    note = estimated if made.machine.get("estimated") else f"Measured on {made.machine['name']}."
    print_result(as_json, made.to_json(), f"{note} Sizes in MiB, times in ms.", "", _table(made))


def _estimated(model: str, machine: Machine, devices: int, processes: int, **options: Any) -> Profile:
    """Estimates the profile of the model `module:function`; `options` are those of `trace`."""
    with user_code(model):
        known = call_model(model)
        params, batch = known.shapes(), known.batch_of(0)
        made = trace(0, known.loss_fn, params, batch, machine, devices=devices, processes=processes, **options)
    numerics = Numerics(compute_dtype=options["compute_dtype"])
    sizes = Model(params, OPTIMIZERS["adamw"](1e-3), numerics, make_placement(), None)
    in_all = sizes.host_bytes(made.variants.base.layers, widened=made.widened)
    host_bytes = {name: -(-size // processes) for name, size in in_all.items()}
    described = {"model": model, "remat": options["remat"], "host_bytes": host_bytes}
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
