"""All policies by name."""

from jaxferry.errors import InputError
from jaxferry.plan.auto import Auto
from jaxferry.plan.base import Policy
from jaxferry.plan.exact import Exact
from jaxferry.plan.go_memferry import GOMemFerry
from jaxferry.plan.l2l import L2L
from jaxferry.plan.memferry import MemFerry
from jaxferry.plan.native_offload import NativeOffload
from jaxferry.plan.native_overlapped import NativeOverlapped
from jaxferry.plan.twin_flow import TwinFlow
from jaxferry.plan.zero_offload import ZeroOffload

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
