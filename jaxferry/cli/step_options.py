"""Options of the commands that make a training step."""

from typing import Annotated

import typer

from jaxferry.cli.model import OPTIMIZERS
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK, MODULE

Optimizer = Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")]
MemoryBudget = Annotated[str | None, typer.Option(metavar="SIZE", help='Device memory, such as "8GiB".')]
ReserveFactor = Annotated[
    float | None, typer.Option(help="Share of all gradient bytes, in [0, 1], that may stay on the device.")
]
ComputeDtype = Annotated[str | None, typer.Option(help="Dtype of the parameters on the device.")]
Remat = Annotated[str, typer.Option(help="What is recomputed in the backward.")]
OffloadActivations = Annotated[
    bool, typer.Option("--offload-activations", help="Offload values that cross segments to host memory.")
]
FixedGranularity = Annotated[
    str, typer.Option("--granularity", help="Layers that plans move: block, or module (finer).")
]
Devices = Annotated[
    int, typer.Option(min=1, help="Devices that share each batch; without an accelerator, virtual CPU devices.")
]
Seed = Annotated[int, typer.Option(help="Seed of the initial parameters, if a function makes them.")]


def check_fixed_granularity(granularity: str) -> None:
    """Raises InputError for a granularity that is not a fixed one."""
    if granularity not in (BLOCK, MODULE):
        raise InputError(f"--granularity must be {BLOCK} or {MODULE}, got {granularity!r}")
