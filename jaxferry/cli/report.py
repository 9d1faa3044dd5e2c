"""`jaxferry report`: shows the results of `jaxferry bench` or of a recorded run, and makes their page.

The page is one HTML file that needs nothing else: `page.html.jinja` filled with figures as SVG. It says why the plan
treats each layer as it does: what each choice costs by the profile, and what the best other choice would, tried alone
with the rest of the plan as it is under the machine model.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from jaxferry.cli import figures
from jaxferry.cli.common import AsJson, naming, print_result
from jaxferry.cli.compare import BENCH_FORMAT, Comparison
from jaxferry.cli.recording import RECORDING_FORMAT, STAGES, Recording
from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, Remat, UpdatePlace
from jaxferry.records import read_json, write_text
from jaxferry.step import LayerPlan, Loads, Plan, StepSchedules, UpdateOrder
from jaxferry.units import format_bytes, format_seconds

_FIGURES = ("stages", "steps", "speeds", "sizes", "memory")
_MOST_LAYERS = 64
"""Longer plans are explained by costs alone: other choices of all layers are about six plans a layer.

So are plans that stream updates.
"""

_REMATS = {
    Remat.NONE: "no recomputation",
    Remat.PRODUCTS: "all but its large products recomputed",
    Remat.FULL: "recomputation",
}
_SAME = 5e-3  # step times that differ by less count as the same


def report(
    results: Annotated[
        Path, Argument(metavar="FILE.json", help="A file of `jaxferry bench -o` or `jaxferry train --record`.")
    ],
    plot: figures.Plot = None,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="REPORT.html", help="Write all as one page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the results of a bench or of a recorded run, or make one page of them.

    Prints what limits a recorded run, or the table of a bench.
    """
    document = read_json(results)
    format = document.get("format") if isinstance(document, Mapping) else None
    if format not in (BENCH_FORMAT, RECORDING_FORMAT):
        raise InputError(f'{results}: format must be "{BENCH_FORMAT}" or "{RECORDING_FORMAT}", got {format!r}')
    if format == RECORDING_FORMAT and plot is not None:
        raise InputError("--plot draws a bench; for a recording give -o REPORT.html")
    with naming(results):
        kind: type[Recording] | type[Comparison] = Recording if format == RECORDING_FORMAT else Comparison
        found = kind.from_json(document)
    if plot is not None and isinstance(found, Comparison):
        figures.plot_timelines(found, plot)
    if output is not None:
        page = report_page(found) if isinstance(found, Recording) else bench_page(found)
        write_text(output, page)
    parts = [found.sentence] if isinstance(found, Recording) else [found.table(), *found.lines()]
    print_result(as_json, found.to_json(), *parts)


def report_page(recording: Recording) -> str:
    """Returns the page of a recording, as HTML."""
    return _render(runs=[_page_run(recording)])


def bench_page(compared: Comparison) -> str:
    """Returns the page of a bench, as HTML: the policies side by side, then each one's recording."""
    runs = [_page_run(row.recording, row.policy) for row in compared.rows if row.recording is not None]
    return _render(runs=runs, bench=compared.cells(), lines=compared.lines())


def _render(**values: Any) -> str:
    jinja2 = importlib.import_module("jinja2")  # only pages need it
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    values = {"bench": None, "stages": STAGES, "links": figures.LINKS} | values
    return environment.get_template("page.html.jinja").render(values) + "\n"


def _page_run(recording: Recording, policy: str = "") -> dict[str, Any]:
    """Returns what the template states of a recording beside its own fields: words, and figures as SVG."""
    drawn = {name: getattr(figures, f"{name}_figure")(recording) for name in _FIGURES}
    machine = {name: value for name, value in recording.machine.items() if isinstance(value, str | int)}
    return {
        "policy": policy,
        "recording": recording,
        "machine": _facts(machine),
        "details": _facts(recording.plan.details),
        "reasons": layer_reasons(recording.profile, recording.plan, recording.memory_budget_bytes),
        **{f"{name}_figure": figure and figures.to_svg(figure) for name, figure in drawn.items()},
    }


def _facts(values: Mapping[str, object]) -> str:
    """Returns facts in words; the suffix of a name is its unit."""

    def told(name: str, value: object) -> str:
        for suffix, shown in (("_s", format_seconds), ("_bytes", format_bytes)):
            if name.endswith(suffix) and isinstance(value, int | float):
                return f"{name.removesuffix(suffix).replace('_', ' ')} {shown(value)}"
        return str(value) if name == "name" else f"{name.replace('_', ' ')} {value}"

    return ", ".join(told(name, value) for name, value in values.items())


class _Outcome(NamedTuple):
    """Seconds a step in the steady state, and the least budget in bytes, of a plan with another choice."""

    step_s: float
    needed_bytes: int
    choice: str = ""


def layer_reasons(profile: Profile, plan: Plan, budget_bytes: int | None = None) -> list[str]:
    """Returns a sentence for each layer of a plan for a profile; without `budget_bytes`, memory has no limit."""
    if not profile.has_times:
        return [f"{plan.policy} decides without times" for _ in plan.layers]
    costs = [_costs(layer, chosen) for layer, chosen in zip(profile.layers, plan.layers, strict=True)]
    if len(plan.layers) > _MOST_LAYERS or any(plan.updates_streamed):
        return costs
    choices = [list(_others(profile, plan, number)) for number in range(len(plan.layers))]
    plans = [_with(profile, plan, number, other) for number, own in enumerate(choices) for _, other in own]
    by_need = plan.update_order is UpdateOrder.NEED
    schedules = [StepSchedules(profile, each) for each in (plan, *plans)]
    own, *outcomes = (_Outcome(s.steady(plan.memory_bytes).seconds(by_need), s.needs.natural) for s in schedules)
    reasons = []
    for cost, layer_choices in zip(costs, choices, strict=True):
        tried = [outcomes.pop(0)._replace(choice=name) for name, _ in layer_choices]
        fits = [each for each in tried if budget_bytes is None or each.needed_bytes <= budget_bytes]
        parts = [cost, _compared(min(fits), own)] if fits else [cost]
        beyond = min((each for each in tried if each not in fits), default=None)
        if beyond is not None and beyond.step_s < (1 - _SAME) * own.step_s:
            parts.append(f"{_compared(beyond, own)}, but needs {format_bytes(beyond.needed_bytes)}")
        reasons.append("; ".join(parts))
    return reasons


def _costs(layer: LayerProfile, chosen: LayerPlan) -> str:
    """Returns what the layer's mode, gradient, recomputation and update cost, and what they save."""
    backward_s = max(layer.backward_dha_s - layer.backward_s, 0.0) * layer.backward_reads
    forward_s = max(layer.forward_dha_s - layer.forward_s, 0.0)
    load, in_place = format_seconds(layer.load_s), format_seconds(forward_s + backward_s)
    parts = [
        {
            Mode.GFGB: f"one load of {load}; reading host memory in place would add {in_place} of compute",
            Mode.DHA: f"reading host memory in place adds {in_place} of compute and saves a load of {load}",
            Mode.DFGB: f"the forward reads host memory in place (+{format_seconds(forward_s)}), so the load of {load} "
            "may come later",
            Mode.RELOAD: f"two loads of {load}; between forward and backward its {format_bytes(layer.param_bytes)} are "
            "free",
            Mode.RESIDENT: f"its {format_bytes(layer.param_bytes)} stay, so no forward waits for a load of {load}",
        }[chosen.mode]
    ]
    if chosen.gradient is GradientPlace.HOST and layer.has_gradient:
        added = format_seconds(max(layer.backward_go_s - layer.backward_s, 0.0))
        parts.append(
            f"the backward writes the gradient to host memory (+{added}), which saves an offload of "
            f"{format_seconds(layer.offload_s)} and {format_bytes(layer.device_gradient_bytes)}"
        )
    if chosen.remat is not Remat.NONE:
        freed = format_bytes(layer.activation_bytes - layer.kept_bytes(chosen.remat))
        what = "recomputing" if chosen.remat is Remat.FULL else "recomputing all but large products"
        parts.append(f"{what} takes {format_seconds(layer.recompute_for(chosen.remat))} and frees {freed}")
    if leaving := layer.leaving_bytes(chosen.remat, chosen.activations):
        parts.append(f"{format_bytes(leaving)} of what it keeps wait in host memory for the backward")
    if chosen.update is UpdatePlace.RESIDENT:
        parts.append(
            f"updated on the device in {format_seconds(layer.update_gpu_s or 0.0)}, on the host in "
            f"{format_seconds(layer.update_s)}; its gradient does not leave"
        )
    if chosen.update is UpdatePlace.GPU:
        on_device, on_host = format_seconds(layer.streamed_update_s), format_seconds(layer.update_s)
        parts.append(
            f"updated on the device in {on_device}, while {format_bytes(layer.state_bytes)} of masters and state pass "
            f"each way, on the host in {on_host}; its gradient does not leave"
            + (", nor does its compute copy" if chosen.mode is Mode.RESIDENT else "")
        )
    return "; ".join(parts)


def _compared(other: _Outcome, own: _Outcome) -> str:
    change_s = other.step_s - own.step_s
    if abs(change_s) < _SAME * own.step_s:
        freed = own.needed_bytes - other.needed_bytes
        less = f", and {format_bytes(abs(freed))} {'less' if freed > 0 else 'more'} device memory" if freed else ""
        return f"with {other.choice} a step takes as long{less}"
    return f"with {other.choice} a step takes {format_seconds(abs(change_s))} {'longer' if change_s > 0 else 'less'}"


def _others(profile: Profile, plan: Plan, number: int) -> Iterator[tuple[str, LayerPlan]]:
    """Yields the other choices for a layer, each with its name."""
    chosen, layer = plan.layers[number], profile.layers[number]
    for mode in Mode:
        may_reload = plan.loads is not Loads.BULK or mode is not Mode.RELOAD
        is_last = number == len(plan.layers) - 1
        is_possible = may_reload and (mode is not Mode.DFGB or (layer.backward_reads and not is_last))
        if mode is not chosen.mode and is_possible:
            yield mode.value, chosen.with_mode(mode)
    is_alone = len(profile.groups[profile.group_of[number]]) == 1 and not profile.updates_together
    if layer.update_gpu_s is not None and layer.has_gradient and is_alone and chosen.update is UpdatePlace.HOST:
        moved = dataclasses.replace(chosen, mode=Mode.RESIDENT, gradient=GradientPlace.DEVICE)
        yield "its update on the device", dataclasses.replace(moved, update=UpdatePlace.RESIDENT)
    if layer.has_gradient and not layer.gradient_rows and chosen.update is UpdatePlace.HOST:
        place = GradientPlace.HOST if chosen.gradient is GradientPlace.DEVICE else GradientPlace.DEVICE
        yield f"its gradient written on the {place.value}", dataclasses.replace(chosen, gradient=place)
    for remat in layer.levels:
        if remat is not chosen.remat:
            yield _REMATS[remat], dataclasses.replace(chosen, remat=remat)


def _with(profile: Profile, plan: Plan, number: int, other: LayerPlan) -> Plan:
    """Returns the plan with another choice for a layer; layers that share its parameters keep one update place."""
    members = profile.groups[profile.group_of[number]]
    layers = list(plan.layers)
    for member in members:
        layers[member] = dataclasses.replace(layers[member], update=other.update)
    layers[number] = other
    return dataclasses.replace(plan, layers=tuple(layers))
