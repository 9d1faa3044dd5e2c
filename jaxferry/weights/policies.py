"""The weight policies by name, for the command line and the tests."""

import importlib
from collections.abc import Callable, Mapping

from jaxferry.errors import InputError
from jaxferry.weights.best import greedy_best
from jaxferry.weights.greedy import greedy
from jaxferry.weights.instance import Instance
from jaxferry.weights.l2l import l2l
from jaxferry.weights.records import Outcome


def _bound(instance: Instance) -> Outcome:
    """See `jaxferry.weights.bound`, whose solver is imported only here: SciPy takes long to import."""
    outcome: Outcome = importlib.import_module("jaxferry.weights.bound").bound(instance)
    return outcome


POLICIES: Mapping[str, Callable[[Instance], Outcome]] = {
    "greedy": greedy,
    "greedy-no-discount": lambda instance: greedy(instance, discount=False),
    "greedy-best": greedy_best,
    "l2l": l2l,
    "bound": _bound,
}


def solve(instance: Instance, policy: str) -> Outcome:
    """Runs the policy of that name.

    Raises:
      InputError: if the name is unknown; the message lists the known ones.
      BudgetError: if no schedule exists in the instance's memory.
    """
    check_policy(policy)
    return POLICIES[policy](instance)


def check_policy(policy: str) -> None:
    """Raises InputError if the policy is unknown; the message lists the known ones."""
    if policy not in POLICIES:
        raise InputError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
