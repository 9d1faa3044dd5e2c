"""Which of two plans is better, and plans as searches hold them: arrays in place of records.

The rule by which every search chooses among plans: a choice must be worth more than the model's error.

Plans count as equal if their predicted times differ by less than `EQUAL_WITHIN`. Of equal plans the search takes the
one that relies least on the machine model:

1. plain training, which transfers nothing;
2. the fewest DHA and DFGB layers and GO gradients, whose programs share the links with transfers;
3. the fewest RELOAD layers, whose second load must be hidden;
4. the fewest layers that recompute;
5. the least memory, then the least time.

So GFGB and RESIDENT come before RELOAD, and RELOAD before DHA, DFGB and GO. Each search first finds the fastest plan.
The rule then chooses among the plans that the search knows (`planner/search.py`) and among replacements
(`planner/neighbours.py`). The chosen plan always counts as equal to the fastest one.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

import numpy as np

from jaxferry.costs import Profile, flags_of
from jaxferry.modes import Subgroups, UpdatePlace
from jaxferry.planner.base import coded_plan, with_update_order
from jaxferry.planner.effort import is_searched
from jaxferry.step import (
    DFGB,
    DHA,
    RELOAD,
    RESIDENT,
    Loads,
    Plan,
    UpdateOrder,
    Updates,
    effective_codes,
    gradient_flags,
    mode_codes,
)

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


_RECOMPUTES = 2
_ON_DEVICE = 4


def coded(
    modes: np.ndarray,
    grad_on_host: np.ndarray,
    recomputes: np.ndarray | bool = False,
    on_device: np.ndarray | bool = False,
) -> np.ndarray:
    """The plans with these mode codes and flags, (plans, layers) or (layers,) each."""
    modes = np.atleast_2d(np.asarray(modes, dtype=np.int8))
    codes = np.asarray(grad_on_host, dtype=np.int8) + _RECOMPUTES * np.asarray(recomputes, dtype=np.int8)
    codes = codes + _ON_DEVICE * np.asarray(on_device, dtype=np.int8)
    return np.stack([modes, np.broadcast_to(codes, modes.shape)], axis=1)


def different_rows(plans: np.ndarray, known: Collection[bytes] = ()) -> np.ndarray:
    """The first of each group of equal plans that are not known, by index; `np.unique` compares far slower.

    In lexicographic order.
    """
    first: dict[bytes, int] = {}
    for row, key in enumerate(row_bytes(plans)):
        if key not in known:
            first.setdefault(key, row)
    return np.array([first[key] for key in sorted(first)], dtype=np.int64)


def row_bytes(plans: np.ndarray) -> list[bytes]:
    """The bytes of each plan."""
    size = plans[0].nbytes if len(plans) else 1
    joined = plans.tobytes()
    return [joined[first : first + size] for first in range(0, len(joined), size)]


def columns(plans: np.ndarray) -> tuple[np.ndarray, ...]:
    """Modes and flags of gradients, of recomputation and of updates on the device, (plans, layers) each."""
    return plans[:, 0], *flags(plans[:, 1])


def flags(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flags of gradients, of recomputation and of updates on the device."""
    return codes % _RECOMPUTES == 1, codes % _ON_DEVICE >= _RECOMPUTES, codes >= _ON_DEVICE


@dataclasses.dataclass(frozen=True)
class Best:
    """A plan that a search found.

    Attributes:
      modes, grad_on_host, recomputes: mode codes, gradient flags and recomputation flags, (layers,).
      loads, updates, update_order, memory_bytes: as in `Plan`.
      on_device: whether each layer is updated on the device, where it stays, (layers,); None for none.
      through_gpu: whether each layer's update streams through the GPU, (layers,); None for none.
      subgroups: the size of what streams at once.
      objective_s: the objective in seconds.
      needed_bytes: the least budget within which it runs.
    """

    modes: np.ndarray
    grad_on_host: np.ndarray
    recomputes: np.ndarray
    loads: Loads
    updates: Updates
    objective_s: float
    needed_bytes: int
    update_order: UpdateOrder = UpdateOrder.BACKWARD
    memory_bytes: int | None = None
    on_device: np.ndarray | None = None
    through_gpu: np.ndarray | None = None
    subgroups: Subgroups = Subgroups.LARGE

    @classmethod
    def of(cls, plan: Plan, objective_s: float, needed_bytes: int) -> "Best":
        """Returns a plan's arrays, with its objective in seconds and the least budget in bytes."""
        on_device, through_gpu = np.array(plan.updates_on_device), np.array(plan.updates_streamed)
        return cls(
            mode_codes(plan),
            gradient_flags(plan),
            np.array(plan.recomputes),
            plan.loads,
            plan.updates,
            objective_s,
            needed_bytes,
            plan.update_order,
            plan.memory_bytes,
            on_device if on_device.any() else None,
            through_gpu if through_gpu.any() else None,
            plan.subgroups,
        )

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Modes and flags of gradients, recomputation and updates on the device, (layers,) each."""
        there = np.zeros(len(self.modes), dtype=bool) if self.on_device is None else self.on_device
        return self.modes, self.grad_on_host, self.recomputes, there


def plan_of(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan picked from a pool; of a long model, or without times, with the order of updates that is faster."""
    plan = picked_plan(policy, reserve_factor, profile, best)
    is_ordered = is_searched(len(profile.layers)) and best.objective_s > 0
    return plan if is_ordered else with_update_order(profile, plan)


def picked_plan(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan with the order of updates that it was picked with."""
    kind = (best.loads, best.updates)
    plan = coded_plan(policy, reserve_factor, profile, best.modes, best.grad_on_host, *kind, recomputes=best.recomputes)
    plan = dataclasses.replace(
        plan, update_order=best.update_order, memory_bytes=best.memory_bytes, subgroups=best.subgroups
    )
    for place, flags in ((UpdatePlace.RESIDENT, best.on_device), (UpdatePlace.GPU, best.through_gpu)):
        if flags is not None:
            layers = (
                dataclasses.replace(layer, update=place) if there else layer
                for layer, there in zip(plan.layers, flags, strict=True)
            )
            plan = dataclasses.replace(plan, layers=tuple(layers))
    return plan
