"""The rule by which every search chooses among plans: a choice must be worth more than the model's error.

Plans count as equal if their predicted times differ by less than `EQUAL_WITHIN`. Of equal plans the search takes the
one that relies least on the machine model:

1. plain training, which transfers nothing;
2. the fewest DHA and DFGB layers and GO gradients, whose programs share the links with transfers;
3. the fewest RELOAD layers, whose second load must be hidden;
4. the fewest layers that recompute;
5. the least memory, then the least time.

So GFGB and RESIDENT come before RELOAD, and RELOAD before DHA, DFGB and GO. Each search first finds the fastest plan.
The rule then chooses among the plans that the search knows (`planner/search.py`) and among replacements
(`planner/replacements.py`). The chosen plan always counts as equal to the fastest one.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.costs.tables import flags_of
from jaxferry.step.holdings import DFGB, DHA, RELOAD, RESIDENT, effective_codes, gradient_flags, mode_codes
from jaxferry.step.records import Plan

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


def longest_equal_s(fastest_s: float) -> float:
    """Returns the longest time, in seconds, that counts as equal to the fastest plan's."""
    return max(fastest_s, float(np.nextafter(fastest_s * (1 + EQUAL_WITHIN), 0.0)))


def scores(
    profile: Profile,
    modes: np.ndarray,
    grad_on_host: np.ndarray,
    recomputes: np.ndarray,
    on_device: np.ndarray,
) -> np.ndarray:
    """Returns how much each plan relies on the machine model, (plans,) integers: of equal plans, the least is taken.

    Args:
      profile: the layers.
      modes: mode codes, (plans, layers).
      grad_on_host: flags of the gradients that programs write to the host, likewise.
      recomputes: flags of the layers that recompute, likewise.
      on_device: flags of the layers whose groups are updated on the device, where they stay, likewise.
    """
    trained = flags_of(profile, "has_gradient").T
    moves = ~((modes == RESIDENT) & (on_device | ~trained)).all(axis=1)
    modes, grad_on_host = (x.T for x in effective_codes(profile, modes.T, grad_on_host.T, recomputes.T))
    in_host_memory = np.isin(modes, (DHA, DFGB)).sum(axis=1) + grad_on_host.sum(axis=1)
    found = moves.astype(np.int64)
    for count in (in_host_memory, (modes == RELOAD).sum(axis=1), recomputes.sum(axis=1)):
        found = found * (2 * modes.shape[1] + 1) + count
    return found


def score_of(profile: Profile, plan: Plan) -> int:
    """Returns the score of one plan, see `scores`."""
    columns = (mode_codes(plan), gradient_flags(plan), np.array(plan.recomputes), np.array(plan.updates_on_device))
    return int(scores(profile, *(each[None] for each in columns))[0])


def preferred(found: Iterable[T], score: Callable[[T], int]) -> T:
    """Returns the plan to take among candidates; of those that the rule cannot tell apart, the first one.

    Args:
      found: the candidates, at least one.
      score: the score of a candidate, see `scores`.
    """
    known = list(found)
    longest_s = longest_equal_s(min(each.objective_s for each in known))
    equal = [each for each in known if each.objective_s <= longest_s]
    return min(equal, key=lambda each: (score(each), each.needed_bytes, each.objective_s))
