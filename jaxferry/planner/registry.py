"""All policies by name."""

from jaxferry.errors import InputError
from jaxferry.planner.auto import Auto
from jaxferry.planner.base import Policy
from jaxferry.planner.baselines import L2L, NativeOffload, NativeOverlapped, ZeroOffload
from jaxferry.planner.exact import Exact
from jaxferry.planner.memferry import GOMemFerry, MemFerry
from jaxferry.planner.twin_flow import TwinFlow

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        ZeroOffload,
        NativeOffload,
        NativeOverlapped,
        L2L,
        TwinFlow,
        MemFerry,
        GOMemFerry,
        Exact,
        Auto,
    )
}


def policies() -> tuple[str, ...]:
    """The names of all policies, baselines first."""
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """The policy with this name.

    Raises:
      InputError: if there is none; the message lists all policies.
    """
    if name not in _POLICIES:
        raise InputError(f"unknown policy {name!r}; the policies are {', '.join(policies())}")
    return _POLICIES[name]()
