"""The rule by which every search chooses among plans: a choice must be worth more than the model's error.

Plans count as equal if their predicted times differ by less than `EQUAL_WITHIN`. Of equal plans the search takes the
one that relies least on the machine model:

1. plain training, which transfers nothing;
2. the fewest DHA and DFGB layers and GO gradients, whose programs share the links with transfers;
3. the fewest RELOAD layers, whose second load must be hidden;
4. the fewest layers whose activations leave, which must find the links free;
5. the fewest layers that recompute, be it all or a part;
6. the least memory, then the least time.

So GFGB and RESIDENT come before RELOAD, and RELOAD before DHA, DFGB and GO. Each search first finds the fastest plan.
The rule then chooses among the plans that the search knows, and among those that moves lead to from there
(`planner/search.py`). The chosen plan always counts as equal to the fastest one.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from jaxferry.costs import Profile
from jaxferry.modes import ActivationPlace, GradientPlace, Mode, UpdatePlace
from jaxferry.step import Plan, effective

EQUAL_WITHIN = 0.02
"""Plans whose predicted times differ by less than this share count as equal: the machine model is no more exact."""


class Candidate(Protocol):
    """A plan that a search found: its time in seconds and the least budget in bytes within which it runs."""

    @property
    def objective_s(self) -> float:
        """The predicted time in seconds."""

    @property
    def needed_bytes(self) -> int:
        """The least budget in bytes."""


T = TypeVar("T", bound=Candidate)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A plan, its time in seconds, and the least budget in bytes within which it runs."""

    plan: Plan
    objective_s: float
    needed_bytes: int


def longest_equal_s(fastest_s: float) -> float:
    """Returns the longest time, in seconds, that counts as equal to the fastest plan's."""
    return max(fastest_s, float(np.nextafter(fastest_s * (1 + EQUAL_WITHIN), 0.0)))


def score_of(profile: Profile, plan: Plan) -> int:
    """Returns how much a plan relies on the machine model: of equal plans, the one with the least is taken."""
    is_plain = all(
        layer.mode is Mode.RESIDENT and (layer.update is UpdatePlace.RESIDENT or not costs.has_gradient)
        for layer, costs in zip(plan.layers, profile.layers, strict=True)
    )
    layers, found = effective(profile, plan).layers, int(not is_plain)
    in_host_memory = sum(layer.mode in (Mode.DHA, Mode.DFGB) for layer in layers)
    in_host_memory += sum(layer.gradient is GradientPlace.HOST for layer in layers)
    leave = sum(layer.activations is ActivationPlace.HOST for layer in layers)
    for count in (in_host_memory, sum(layer.mode is Mode.RELOAD for layer in layers), leave, sum(plan.recomputes)):
        found = found * (2 * len(layers) + 1) + count
    return found


def preferred(found: Iterable[T], score: Callable[[T], int]) -> T:
    """Returns the plan to take among candidates; of those that the rule cannot tell apart, the first one.

    Args:
      found: the candidates, at least one.
      score: the score of a candidate, see `score_of`.
    """
    known = list(found)
    longest_s = longest_equal_s(min(each.objective_s for each in known))
    equal = [each for each in known if each.objective_s <= longest_s]
    return min(equal, key=lambda each: (score(each), each.needed_bytes, each.objective_s))
