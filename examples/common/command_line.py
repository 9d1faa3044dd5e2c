"""Options, argument checks and exit status shared by all examples' command lines."""

from pathlib import Path
from typing import Annotated

import jax
import typer

from jaxferry import cli
from jaxferry.errors import InputError
from jaxferry.processes import distributed as distributed_jax
from jaxferry.processes import mesh_of

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")

# A command picks its options: `def train(steps: command_line.Steps = 800, ...)`.
Steps = Annotated[int, typer.Option(min=0, help="Train up to this step, counting steps before a resume.")]
Batch = Annotated[int, typer.Option(min=1, help="Rows per batch.")]
Seq = Annotated[int, typer.Option(min=1, help="Tokens per row.")]
Policy = Annotated[str | None, typer.Option(help="Decides where each layer lives; default: JaxFerry's choice.")]
MemoryBudget = Annotated[str | None, typer.Option(help='Device memory for training, such as "8GiB".')]
ReserveFactor = Annotated[float, typer.Option(help="Share of gradient bytes that may stay on the device.")]
ComputeDtype = Annotated[
    str | None, typer.Option(help=f"{', '.join(COMPUTE_DTYPES)}; default: bfloat16, or float32 on a CPU.")
]
Devices = Annotated[
    int, typer.Option(min=1, help="Devices that share each batch; without an accelerator, virtual CPU devices.")
]
Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="One of several processes, on all their devices; see docs/how-to/devices.md."),
]
Data = Annotated[Path | None, typer.Option(help="A text file or folder; default: Python's standard library.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the initial parameters and the order of the data.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate after the warm-up; default: that of the size.")]
Metrics = Annotated[
    Path | None,
    typer.Option(
        help="Write one JSON object per step to this file; or, without a suffix, a folder for TensorBoard too."
    ),
]
Save = Annotated[Path | None, typer.Option(help="Save the state here at the end.")]
SaveEvery = Annotated[
    int, typer.Option(min=0, help="Also save it after every so many steps, in the background; 0 for not.")
]
KeepLast = Annotated[int | None, typer.Option(min=1, help="Keep so many saved states, in folders named by step.")]
Resume = Annotated[Path | None, typer.Option(help="Continue from a saved state; of several, from the newest.")]
Weights = Annotated[
    Path | None,
    typer.Option(help="A folder with pretrained weights in .safetensors, and tokenizer.json."),
]
Export = Annotated[Path | None, typer.Option(help="Write the trained weights to this folder in Hugging Face's format.")]
SampleTokens = Annotated[int, typer.Option(min=0, help="Length of the text generated at the end.")]
FillTokens = Annotated[int, typer.Option(min=0, help="Number of masked tokens filled in at the end.")]


def make_mesh(devices, distributed):
    """Returns the mesh of so many devices of this process, or of all processes; None for one device."""
    return distributed_jax.start(devices) if distributed else mesh_of(devices)


def make_app():
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def read_choice(option, choices, value):
    """Returns the member of the dictionary `choices` that an option names."""
    if value not in choices:
        raise InputError(f"{option} must be one of {', '.join(choices)}, got {value}")
    return choices[value]


def read_size(sizes, size, seq):
    """Returns the configuration of a size; checks that its positions suffice for rows of `seq` tokens."""
    config = read_choice("--size", sizes, size)
    if seq > config.max_length:
        raise InputError(f"--seq must be at most the {config.max_length} positions of size {size}, got {seq}")
    return config


def read_dtype(name):
    if name is None:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return read_choice("--compute-dtype", dict.fromkeys(COMPUTE_DTYPES, name), name)


def run(app, args=None):
    """Runs a command line and returns its exit status, by the rules of `jaxferry`'s own."""
    return cli.run(lambda arguments: app(arguments, standalone_mode=False), args, "error")
