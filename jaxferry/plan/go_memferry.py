"""GO-MemFerry (section IV-D): MemFerry whose gradients go to host memory unless the reserve factor lets them stay."""

from jaxferry.plan.memferry import MemFerry


class GOMemFerry(MemFerry):
    """`memferry` with every gradient offloaded by default, as in the paper's evaluation."""

    name = "go-memferry"
    summary = "memferry with reserve factor 0 for a default"
    default_reserve_factor = 0.0
