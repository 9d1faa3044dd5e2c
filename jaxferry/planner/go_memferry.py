"""GO-MemFerry (section IV-D): MemFerry with gradients in host memory unless the reserve factor lets them stay."""

from jaxferry.planner.memferry import MemFerry


class GOMemFerry(MemFerry):
    """`memferry` with every gradient offloaded by default, as in the paper's evaluation."""

    name = "go-memferry"
    summary = "memferry with default reserve factor 0"
    default_reserve_factor = 0.0
