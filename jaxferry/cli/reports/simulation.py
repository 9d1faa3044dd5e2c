"""A simulation as a table and lines; apart from other tables, so that `simulate` starts without the planners."""

from rich.table import Table

from jaxferry.step.simulate.report import CHAIN_STEPS, Simulation
from jaxferry.units import format_bytes, format_seconds


def simulation_table(simulation: Simulation) -> Table:
    """Returns the use of the lanes in one step."""
    table = Table("lane", title="lanes, one step")
    for column in ("busy", "idle", "used"):
        table.add_column(column, justify="right")
    for lane, use in simulation.lanes.items():
        total_s = use.busy_s + use.idle_s
        share = use.busy_s / total_s if total_s > 0 else 0.0
        table.add_row(lane.value, format_seconds(use.busy_s), format_seconds(use.idle_s), f"{share:.0%}")
    return table


def simulation_lines(simulation: Simulation) -> list[str]:
    """Returns times, memory and the critical path."""
    shown = list(simulation.critical_path)
    if len(shown) > 12:
        shown = [*shown[:6], f"... {len(shown) - 12} more ...", *shown[-6:]]
    one_step = max(held for _, held in simulation.device_bytes)
    return [
        f"forward {format_seconds(simulation.forward_s)}, step {format_seconds(simulation.step_s)}, "
        f"steady step {format_seconds(simulation.steady_step_s)}",
        f"peak device memory {format_bytes(simulation.peak_device_bytes)} over a chain of {CHAIN_STEPS} steps, where "
        f"loads start during the previous step; {format_bytes(one_step)} in a single step",
        f"host link {format_bytes(simulation.link_bytes)} per step",
        *_streaming_lines(simulation),
        f"critical path: {' > '.join(shown)}",
    ]


def _streaming_lines(simulation: Simulation) -> list[str]:
    num_bytes = simulation.streamed_state_bytes
    where = "of masters and optimizer state in pinned host memory, streamed through the GPU"
    return [f"{format_bytes(num_bytes)} {where}"] if num_bytes else []
