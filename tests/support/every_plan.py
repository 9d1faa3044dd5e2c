"""Every plan of a profile of few layers, one by one, by the simulator: what searches are compared with."""

import dataclasses
import itertools

from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.step import LayerPlan, Plan, UpdateOrder, needed_bytes, simulate


def every_choice(layer, modes, gradients, places, activations=("device",)):
    """All choices for a layer, as plans have them."""
    waits = activations if layer.offloadable_bytes else ("device",)
    for mode, gradient, remat, place, wait in itertools.product(modes, gradients, layer.levels, places, waits):
        is_on_host = place is UpdatePlace.HOST
        if is_on_host or (gradient is GradientPlace.DEVICE and (place is UpdatePlace.GPU or mode is Mode.RESIDENT)):
            yield LayerPlan(layer.name, mode, gradient, remat, place, wait)


def every_plan(
    profile,
    modes=tuple(Mode),
    gradients=tuple(GradientPlace),
    places=(UpdatePlace.HOST,),
    memory_bytes=None,
    activations=("device",),
):
    """Yields all plans, each with its steady step in seconds and the memory in bytes that it needs; in both orders.

    Gradients may fill `memory_bytes`.

    Without DFGB, unless in modes of the paper alone: `oracle` knows the window of those.
    """
    for layers in itertools.product(
        *(every_choice(layer, modes, gradients, places, activations) for layer in profile.layers)
    ):
        plan = Plan("any", 1.0, layers, memory_bytes=memory_bytes)
        try:
            plan.check_profile(profile)
        except ValueError:
            continue  # layers of one group are updated in different places
        for order in UpdateOrder:
            yield judged(profile, dataclasses.replace(plan, update_order=order))


def judged(profile, plan):
    """A plan with its steady step in seconds, and the memory in bytes that it needs."""
    return plan, simulate(profile, plan).steady_step_s, needed_bytes(profile, plan)


def least_within(profile, budget, **choices):
    """The least steady step in seconds of all plans that need no more memory; infinite if there is none."""
    modes = choices.pop("modes", tuple(mode for mode in Mode if mode is not Mode.DFGB))
    found = every_plan(profile, modes=modes, **choices)
    return min((step_s for _, step_s, needed in found if needed <= budget), default=float("inf"))
