"""How much a search tries, and which parameter groups a plan may update on the GPU.

How much a search does for a model of this size, so that time and memory grow with the layers and not their square.

Up to `FULL_LAYERS` layers a search tries all that it knows; `exact` up to `FULL_EXACT_LAYERS`. Beyond, it tries fewer
plans: as many as keep the number of planned layers the same, and `auto` explores the plans of `exact` with fewer
choices of gradients. Beyond `FEW_LAYERS`, the neighbours that `auto` tries have equal layers changed together
(`planner/neighbours.py`). Beyond `MOST_SEARCHED`, nothing is improved by local search, plans with updates after all
gradients are left out, and room for gradients within the budget counts only in the plan found. `exact` leaves out a
reserve factor that could save at most 0.01 %. All bounds stay proven, so a plan still states how far from the optimum
it may be.
"""

from jaxferry.costs import Profile

FEW_LAYERS = 64
FULL_LAYERS = 96
FULL_EXACT_LAYERS = 256
MOST_SEARCHED = 512


def fewer(count: int, num_layers: int, least: int = 1) -> int:
    """`count` up to `FULL_LAYERS` layers; beyond, inversely proportional to the layers, but not below `least`."""
    return _fewer(count, num_layers, least, FULL_LAYERS)


def fewer_of_exact(count: int, num_layers: int, least: int = 1) -> int:
    """As `fewer`, up to `FULL_EXACT_LAYERS` layers."""
    return _fewer(count, num_layers, least, FULL_EXACT_LAYERS)


def _fewer(count: int, num_layers: int, least: int, full: int) -> int:
    return count if num_layers <= full else max(least, count * full // num_layers)


def is_searched(num_layers: int) -> bool:
    """Whether a model of this size is small enough for searches of many plans."""
    return num_layers <= MOST_SEARCHED


def updatable_groups(profile: Profile) -> list[int]:
    """The groups that a plan may update on the device: those whose layers state `update_gpu_s`."""
    layers = ((group, profile.layers[members[0]]) for group, members in enumerate(profile.groups))
    return [group for group, layer in layers if layer.has_gradient and layer.update_gpu_s is not None]


def streamable_groups(profile: Profile) -> list[int]:
    """The groups that a policy may stream: those whose layers state all times of that."""
    layers = {group: profile.layers[profile.groups[group][0]] for group in updatable_groups(profile)}
    return [group for group, x in layers.items() if x.state_up_s is not None and x.state_down_s is not None]
