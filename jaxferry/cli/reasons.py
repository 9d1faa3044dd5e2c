"""Why a plan treats each layer as it does: what its choices cost, and what the best other choice would.

Costs are the profile's. Each other choice is tried alone, with the rest of the plan as it is, under the machine model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.costs.tables import flags_of
from jaxferry.modes import GradientPlace, Mode, Remat, UpdatePlace
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.step.holdings import gradient_flags, mode_codes
from jaxferry.step.records import LayerPlan, Loads, Plan, UpdateOrder, Updates
from jaxferry.units import format_bytes, format_seconds

_MOST_LAYERS = 200
"""Longer plans are explained by costs alone: other choices of all layers are about six plans a layer.

So are plans that stream updates, which `PlanEvaluator` does not evaluate.
"""

_SAME = 5e-3
"""Step times that differ by less count as the same."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """Seconds a step in the steady state, and the least budget in bytes, of a plan with another choice."""

    choice: str
    step_s: float
    needed_bytes: int


def layer_reasons(profile: Profile, plan: Plan, budget_bytes: int | None = None) -> list[str]:
    """Returns a sentence for each layer of a plan.

    Args:
      profile: what the plan was made from.
      plan: the plan.
      budget_bytes: the memory budget; None for no limit.
    """
    if not profile.has_times:
        return [f"{plan.policy} decides without times" for _ in plan.layers]
    costs = [_costs(layer, chosen) for layer, chosen in zip(profile.layers, plan.layers, strict=True)]
    if len(plan.layers) > _MOST_LAYERS or any(plan.updates_streamed):
        return costs
    choices = [list(_others(profile, plan, number)) for number in range(len(plan.layers))]
    plans = [_with(profile, plan, number, other) for number, own in enumerate(choices) for _, other in own]
    outcomes = iter(_evaluate(profile, [plan, *plans]))
    own = _Outcome("", *next(outcomes))
    tried = [[_Outcome(name, *next(outcomes)) for name, _ in each] for each in choices]
    return ["; ".join([cost, *_best_others(each, own, budget_bytes)]) for cost, each in zip(costs, tried, strict=True)]


def _costs(layer: LayerProfile, chosen: LayerPlan) -> str:
    """What the layer's mode, gradient, recomputation and update cost, and what they save."""
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
    if chosen.remat is Remat.FULL:
        freed = format_bytes(layer.kept_bytes(False) - layer.kept_bytes(True))
        parts.append(f"recomputing takes {format_seconds(layer.recompute_s or 0.0)} and frees {freed}")
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


def _best_others(tried: Sequence[_Outcome], own: _Outcome, budget_bytes: int | None) -> list[str]:
    """What the fastest other choice for a layer within the budget would take, and a faster one beyond it."""
    fits = [each for each in tried if budget_bytes is None or each.needed_bytes <= budget_bytes]
    parts = [_compared(min(fits, key=_seconds), own)] if fits else []
    beyond = min((each for each in tried if each not in fits), key=_seconds, default=None)
    if beyond is not None and beyond.step_s < (1 - _SAME) * own.step_s:
        parts.append(f"{_compared(beyond, own)}, but needs {format_bytes(beyond.needed_bytes)}")
    return parts


def _seconds(outcome: _Outcome) -> float:
    return outcome.step_s


def _compared(other: _Outcome, own: _Outcome) -> str:
    change_s = other.step_s - own.step_s
    if abs(change_s) < _SAME * own.step_s:
        freed = own.needed_bytes - other.needed_bytes
        less = f", and {format_bytes(abs(freed))} {'less' if freed > 0 else 'more'} device memory" if freed else ""
        return f"with {other.choice} a step takes as long{less}"
    return f"with {other.choice} a step takes {format_seconds(abs(change_s))} {'longer' if change_s > 0 else 'less'}"


def _others(profile: Profile, plan: Plan, number: int) -> Iterator[tuple[str, LayerPlan]]:
    """The other choices for a layer, each with its name."""
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
    if layer.can_recompute:
        remat = Remat.FULL if chosen.remat is Remat.NONE else Remat.NONE
        yield "recomputation" if remat is Remat.FULL else "no recomputation", dataclasses.replace(chosen, remat=remat)


def _with(profile: Profile, plan: Plan, number: int, other: LayerPlan) -> Plan:
    """The plan with another choice for a layer; layers that share its parameters keep the same update place."""
    members = profile.groups[profile.group_of[number]]
    layers = list(plan.layers)
    for member in members:
        layers[member] = dataclasses.replace(layers[member], update=other.update)
    layers[number] = other
    return dataclasses.replace(plan, layers=tuple(layers))


def _evaluate(profile: Profile, plans: Sequence[Plan]) -> list[tuple[float, int]]:
    """Seconds a step in the steady state, and the least budget, of plans that differ in their layers alone."""
    trained = flags_of(profile, "has_gradient")[:, 0]
    outcomes = PlanEvaluator(profile)(
        np.stack([mode_codes(plan) for plan in plans]),
        np.stack([gradient_flags(plan) for plan in plans]),
        np.array([plan.recomputes for plan in plans]),
        np.array([plan.updates_on_device for plan in plans]) & trained,
        bulk=plans[0].loads is Loads.BULK,
        after_all=plans[0].updates is Updates.AFTER_ALL,
        by_need=plans[0].update_order is UpdateOrder.NEED,
        memory_bytes=plans[0].memory_bytes,
    )
    return list(zip(outcomes.steady_step_s.tolist(), outcomes.needed_bytes.tolist(), strict=True))
