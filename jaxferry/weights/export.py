"""Converts profiles to instances of "Weight Offloading Strategies", and choices to plans for the engine.

The engine updates parameters on the host, so every layer crosses the link before its forward anyway: it always makes
choice (b). A selection adds choice (a): weights that are dropped after their forward and loaded again for their
backward. These layers get mode RELOAD; all others stay until their backward (GFGB).
"""

import math
from collections.abc import Iterable

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan
from jaxferry.weights.instance import Choice, Instance


def instance_from_profile(profile: Profile, memory_bytes: int) -> Instance:
    """Converts a profile to an instance; the bandwidth is the average over all loads.

    Parameterless compute counts with the layer that it follows or precedes. Layers of one parameter group count as if
    each had its own weights, so memory is never underestimated.

    Raises:
      InputError: if the profile's loads take no time.
    """
    load_s = math.fsum(layer.load_s for layer in profile.layers)
    param_bytes = sum(layer.param_bytes for layer in profile.layers)
    if not load_s or not param_bytes:
        raise InputError("load_s and param_bytes must be positive in some layer; otherwise the link has no bandwidth")
    return Instance(
        weights=tuple(layer.param_bytes for layer in profile.layers),
        activations=(0, *(layer.activation_bytes for layer in profile.layers)),
        forward_s=tuple(layer.forward_s + layer.inter_forward_s for layer in profile.layers),
        backward_s=tuple(layer.backward_s + layer.inter_backward_s for layer in profile.layers),
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=param_bytes / load_s,
    )


def export_plan(profile: Profile, policy: str, choices: Iterable[Choice]) -> Plan:
    """Makes a plan for the engine: RELOAD where a weight is absent between forward and backward, else GFGB.

    Args:
      profile: the profile whose layers the choices number.
      policy: the name of the policy that made the choices; the plan's policy is that name after `weights-`.
      choices: as in an `Outcome`.

    Raises:
      InputError: if a choice names a layer that the profile does not have.
    """
    reloaded = {choice.layer for choice in choices if choice.before_backward}
    unknown = [layer for layer in reloaded if not 0 <= layer < len(profile.layers)]
    if unknown:
        raise InputError(f"the choices are for another profile: it has no layer {unknown[0]}")
    layers = tuple(
        LayerPlan(layer.name, Mode.RELOAD if index in reloaded else Mode.GFGB)
        for index, layer in enumerate(profile.layers)
    )
    return Plan(f"weights-{policy}", 1.0, layers)
