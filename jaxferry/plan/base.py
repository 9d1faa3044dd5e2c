"""What every policy answers, in the same words; `plan/registry.py` lists them all."""

import abc
import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from jaxferry.errors import BudgetError
from jaxferry.holdings import MODES
from jaxferry.modes import GradientPlace, Remat
from jaxferry.plan.evaluate import PlanEvaluator
from jaxferry.plan.gradients import gradients_to_host
from jaxferry.plan.order import with_update_order
from jaxferry.plan.records import LayerPlan, Loads, Plan, Updates
from jaxferry.profiling.records import Profile
from jaxferry.records import check_bytes, check_choice, check_share
from jaxferry.units import format_bytes


class Objective(enum.StrEnum):
    """What a search makes least."""

    FORWARD = "forward"
    STEP = "step"
    STEADY = "steady"


def read_objective(name: str) -> Objective:
    """The objective of that name.

    Raises:
      InputError: if there is none; the message lists those that there are.
    """
    return Objective(check_choice(name, "objective", tuple(Objective)))


@dataclasses.dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Attributes:
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device, the same for every policy;
        None for the policy's default: 1, so that no gradient is GO, but 0 for `go-memferry`. `exact` decides between
        the two, and `auto` freely. A plan says which factor it keeps to.
      memory_budget_bytes: device memory that the plan must fit into, or None for no limit.
      objective: what a search makes least; policies that do not search ignore it.
      progress: called with a few words whenever a long search enters its next part.

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
        """Tells `progress`, where there is one."""
        if self.progress is not None:
            self.progress(what)


class Policy(abc.ABC):
    """Decides for each layer of a profile in which mode it runs and where its gradient goes.

    The contract, which one test suite holds every policy to:

    - the plan is one for the profile: the same layers in the same order;
    - gradients on the device take at most the reserve factor's share of all gradient bytes; with 1 none is GO;
    - DFGB keeps MemFerry's window: its loads end before the first gradient leaves, and the last layer is never DFGB;
    - the plan's peak device memory is within the budget, or `BudgetError` names the smallest one;
    - `update_order` makes the steady step the shorter one, and `memory_bytes` is at most the budget;
    - the same question has the same answer: no clock and no random number takes part.
    """

    name: ClassVar[str]
    """The name in the command line and in plans."""

    summary: ClassVar[str]
    """What it does, in a few words."""

    default_reserve_factor: ClassVar[float] = 1.0
    """What a request without a reserve factor means."""

    @abc.abstractmethod
    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """Makes a plan; `predicted` is left to the simulator.

        Args:
          profile: times in seconds and sizes in bytes of each layer.
          request: what is asked for; None asks for the defaults.

        Raises:
          BudgetError: if no plan of this policy fits into `request.memory_budget_bytes`.
        """

    def reserve_factor(self, request: Request) -> float:
        """The request's reserve factor, or this policy's default."""
        return self.default_reserve_factor if request.reserve_factor is None else request.reserve_factor


class ModePolicy(Policy):
    """A policy that decides the modes once, without a search over memory; the reserve factor decides the gradients."""

    loads: ClassVar[Loads] = Loads.LAYERWISE
    updates: ClassVar[Updates] = Updates.OVERLAPPED

    @abc.abstractmethod
    def modes(self, profile: Profile, to_host: np.ndarray) -> np.ndarray:
        """The mode codes of all layers, (layers,), given which gradients are written to the host, (layers,)."""

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The modes that this policy decides, with the gradients that the reserve factor lets stay."""
        request = request or Request()
        reserve_factor = self.reserve_factor(request)
        to_host = gradients_to_host(profile, reserve_factor)
        modes = self.modes(profile, to_host)
        plan = make_plan(self.name, reserve_factor, profile, modes, to_host, self.loads, self.updates)
        if request.memory_budget_bytes is not None:
            peak_bytes = int(PlanEvaluator(profile).plan(plan).peak_bytes[0])
            check_budget(self.name, request.memory_budget_bytes, peak_bytes)
        return with_update_order(profile, dataclasses.replace(plan, memory_bytes=request.memory_budget_bytes))


def make_plan(
    policy: str,
    reserve_factor: float,
    profile: Profile,
    modes: np.ndarray,
    to_host: np.ndarray,
    loads: Loads = Loads.LAYERWISE,
    updates: Updates = Updates.OVERLAPPED,
    recomputes: np.ndarray | None = None,
) -> Plan:
    """A plan from mode codes, gradient flags and flags of recomputation, (layers,) each."""
    places, remats = (GradientPlace.DEVICE, GradientPlace.HOST), (Remat.NONE, Remat.FULL)
    again = np.zeros(len(modes), dtype=bool) if recomputes is None else recomputes
    layers = tuple(
        LayerPlan(layer.name, MODES[int(mode)], places[int(host)], remats[int(recompute)])
        for layer, mode, host, recompute in zip(profile.layers, modes, to_host, again, strict=True)
    )
    return Plan(policy, reserve_factor, layers, loads, updates)


def check_budget(policy: str, budget_bytes: int, smallest_bytes: int, num_recomputing: int = 0) -> None:
    """Raises BudgetError if the smallest peak of a policy's plans, in which so many layers recompute, is too large."""
    if smallest_bytes > budget_bytes:
        raise BudgetError(
            f"memory budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest feasible "
            f"for policy {policy} is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
            + (f", with {num_recomputing} layers that recompute their activations" if num_recomputing else ""),
            smallest_bytes,
        )
