"""Between the world of "Weight Offloading Strategies" and the engine: instances from profiles, plans from choices.

The engine updates parameters on the host, so that every layer crosses the link before its forward anyway: choice (b) is
the rule there. What a selection adds is choice (a), the weights that are dropped after their forward and loaded
again for their backward: mode RELOAD. All others stay until their backward: GFGB.
"""

import math
from collections.abc import Iterable

from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.plan.records import LayerPlan, Plan
from jaxferry.profiling.records import Profile
from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Choice


def instance_from_profile(profile: Profile, memory_bytes: int) -> Instance:
    """The layers of a profile as an instance; the bandwidth is that of all its loads together.

    Parameterless compute counts with the layer that it follows or precedes. Layers of one parameter group count as if
    each had weights of its own, so that the memory is never understated.

    Raises:
      InputError: if the profile's loads take no time.
    """
    load_s = math.fsum(layer.load_s for layer in profile.layers)
    param_bytes = sum(layer.param_bytes for layer in profile.layers)
    if not load_s or not param_bytes:
        raise InputError("load_s and param_bytes must be positive in some layer, or the link has no bandwidth")
    return Instance(
        weights=tuple(layer.param_bytes for layer in profile.layers),
        activations=(0, *(layer.activation_bytes for layer in profile.layers)),
        forward_s=tuple(layer.forward_s + layer.inter_forward_s for layer in profile.layers),
        backward_s=tuple(layer.backward_s + layer.inter_backward_s for layer in profile.layers),
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=param_bytes / load_s,
    )


def export_plan(profile: Profile, policy: str, choices: Iterable[Choice]) -> Plan:
    """A plan for the engine: RELOAD where a weight is absent between forward and backward, else GFGB.

    Args:
      profile: the profile whose layers the choices number.
      policy: the name of the policy that made the choices; the plan's is `weights-` and that name.
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
