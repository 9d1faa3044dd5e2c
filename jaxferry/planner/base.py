"""The interface of all policies; `planner/registry.py` lists them."""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.planner.gradients import gradients_to_host
from jaxferry.planner.order import with_update_order
from jaxferry.records import check_bytes, check_choice, check_share
from jaxferry.step.holdings import MODES
from jaxferry.step.records import LayerPlan, Loads, Plan, Updates
from jaxferry.step.schedule import needed_bytes
from jaxferry.units import format_bytes


class Objective(enum.StrEnum):
    """The quantity that a search minimizes."""

    FORWARD = "forward"
    STEP = "step"
    STEADY = "steady"


def read_objective(name: str) -> Objective:
    """The objective with this name.

    Raises:
      InputError: if there is none; the message lists all objectives.
    """
    return Objective(check_choice(name, "objective", tuple(Objective)))


@dataclasses.dataclass(frozen=True)
class Request:
    """The requirements on a plan.

    Attributes:
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device, for any policy. None means
        the policy's default: 1 (no gradient is GO), but 0 for `go-memferry`. `exact` chooses between these two, `auto`
        freely. A plan states the factor that it satisfies.
      memory_budget_bytes: device memory that the plan must fit into, or None for no limit.
      objective: the quantity that a search minimizes; policies that do not search ignore it.
      progress: called with a short description as each part of a long search starts.

    Raises:
      InputError: if a field is not acceptable.
    """

    reserve_factor: float | None = None
    memory_budget_bytes: int | None = None
    objective: Objective = Objective.STEADY
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.reserve_factor is not None:
            object.__setattr__(self, "reserve_factor", check_share(self.reserve_factor, "reserve_factor"))
        if self.memory_budget_bytes is not None:
            check_bytes(self.memory_budget_bytes, "memory_budget_bytes", "request")
        object.__setattr__(self, "objective", read_objective(self.objective))

    def report(self, what: str) -> None:
        """Calls `progress`, if given."""
        if self.progress is not None:
            self.progress(what)


class Policy(abc.ABC):
    """Decides the mode and the gradient place of each layer of a profile.

    One test suite checks this contract for every policy:

    - the plan has the profile's layers in the same order;
    - gradients on the device take at most the reserve factor's share of all gradient bytes; with 1 no gradient is GO;
    - DFGB keeps MemFerry's window: its loads end before the first gradient leaves, and the last layer is never DFGB;
    - the plan fits into the budget however long transfers take, or `BudgetError` names the smallest feasible one;
    - `update_order` is the one with the shorter steady step, and `memory_bytes` is at most the budget;
    - results are deterministic: no policy uses a clock or random numbers.
    """

    name: ClassVar[str]
    """The name in the command line and in plans."""

    summary: ClassVar[str]
    """A short description."""

    default_reserve_factor: ClassVar[float] = 1.0
    """The reserve factor of a request without one."""

    @abc.abstractmethod
    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """Makes a plan; the simulator adds `predicted` later.

        Args:
          profile: times in seconds and sizes in bytes of each layer.
          request: the requirements; None means the defaults.

        Raises:
          BudgetError: if no plan of this policy fits into `request.memory_budget_bytes`.
        """

    def reserve_factor(self, request: Request) -> float:
        """The request's reserve factor, or this policy's default."""
        return self.default_reserve_factor if request.reserve_factor is None else request.reserve_factor


class ModePolicy(Policy):
    """A policy that decides modes without regard to memory; the reserve factor decides the gradients."""

    loads: ClassVar[Loads] = Loads.LAYERWISE
    updates: ClassVar[Updates] = Updates.OVERLAPPED

    @abc.abstractmethod
    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """The mode codes of all layers, (layers,), given the flags of gradients written to the host, (layers,)."""

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """This policy's modes, with the gradients that the reserve factor lets stay."""
        request = request or Request()
        reserve_factor = self.reserve_factor(request)
        grad_on_host = gradients_to_host(profile, reserve_factor)
        modes = self.modes(profile, grad_on_host)
        plan = make_plan(self.name, reserve_factor, profile, modes, grad_on_host, self.loads, self.updates)
        if request.memory_budget_bytes is not None:
            check_budget(self.name, request.memory_budget_bytes, needed_bytes(profile, plan))
        return with_update_order(profile, dataclasses.replace(plan, memory_bytes=request.memory_budget_bytes))


def make_plan(
    policy: str,
    reserve_factor: float,
    profile: Profile,
    modes: np.ndarray,
    grad_on_host: np.ndarray,
    loads: Loads = Loads.LAYERWISE,
    updates: Updates = Updates.OVERLAPPED,
    recomputes: np.ndarray | None = None,
) -> Plan:
    """A plan from mode codes, gradient flags and recomputation flags, (layers,) each."""
    places, remats = (GradientPlace.DEVICE, GradientPlace.HOST), (Remat.NONE, Remat.FULL)
    again = np.zeros(len(modes), dtype=bool) if recomputes is None else recomputes
    layers = tuple(
        _layer_plan(layer.name, MODES[int(mode)], places[int(host)], remats[int(recompute)])
        for layer, mode, host, recompute in zip(profile.layers, modes, grad_on_host, again, strict=True)
    )
    return Plan(policy, reserve_factor, layers, loads, updates)


@functools.lru_cache(maxsize=1 << 14)
def _layer_plan(name: str, mode: Mode, gradient: GradientPlace, remat: Remat) -> LayerPlan:
    """One object for equal ones: a search makes many plans, which differ in few layers."""
    return LayerPlan(name, mode, gradient, remat)


def check_budget(policy: str, budget_bytes: int, smallest_bytes: int, num_recomputing: int = 0) -> None:
    """Raises BudgetError if the smallest feasible budget of a policy's plans exceeds the budget.

    `num_recomputing` is the number of layers that recompute in the plan for that smallest budget.
    """
    if smallest_bytes > budget_bytes:
        raise BudgetError(
            f"memory budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest feasible "
            f"for policy {policy} is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
            + (f", with {num_recomputing} layers that recompute their activations" if num_recomputing else ""),
            smallest_bytes,
        )
