"""Writes docs/models.md: trains each model for ten steps by JaxFerry and by a plain jitted Optax loop.

    python benchmarks/model_table.py               # train all models, write JSON and page
    python benchmarks/model_table.py --missing     # train only models that the JSON lacks
    python benchmarks/model_table.py --page        # write the page from the JSON, train nothing

The models come from tests/models/registry.py; third-party ones need `pip install "jaxferry[models]"`. Expected: losses
within 1e-5 of each other.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "tests"))
import measure
from rich.progress import track

from jaxferry.units import format_bytes
from models.compare import LEARNING_RATE, NUM_STEPS, compare
from models.registry import MODELS, Model

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
COLUMNS = (
    "model",
    "source",
    "style",
    "segments",
    "programs",
    "parameters",
    "largest relative difference of a loss",
    "parameters on the device at peak",
    "of the whole model",
)
HEAD = f"""# Models

`benchmarks/model_table.py` writes this page from `benchmarks/results/models.json`; do not edit it by hand.

Each model is trained twice for {NUM_STEPS} steps of AdamW ({LEARNING_RATE:g}) with the same, unchanged loss function.
JaxFerry trains it under the policy `l2l`, which loads each layer for its forward and again for its backward. The
reference is a plain loop: `jax.value_and_grad` and `optimizer.update` in one `jax.jit`, with float32 masters for 16-bit
parameters, as in JaxFerry. *Segments* counts the pieces that the loss function is cut into, *programs* the distinct
ones. The last two columns are the peak bytes of parameters on the device and the bytes of all parameters. In models
this small, two blocks or one table are a large share of the total. A layer that is used several times in a row (ALBERT)
is loaded for each use, so two copies of it can be on the device at once.
"""


def row_of(model: Model) -> dict[str, object]:
    """Trains one model and returns its row of the table."""
    found = compare(model.make())
    return {
        "name": model.name,
        "source": model.source,
        "style": model.style,
        "segments": len(found.partition.segments),
        "programs": found.partition.num_programs,
        "parameters": sum(layer.num_parameters for layer in found.partition.layers),
        "max_relative_difference": found.max_relative_difference,
        "device_param_bytes_peak": found.device_param_bytes_peak,
        "param_bytes": found.param_bytes,
        "merges": [merge.message for merge in found.partition.merges],
    }


def key_of(model: Model) -> tuple[str, str, str]:
    """Returns the key that identifies a model's row."""
    return model.name, model.origin, model.style


def page(result: dict) -> str:
    """Returns the page for a result."""
    lines = [HEAD, "| " + " | ".join(COLUMNS) + " |", "| --- | --- | --- |" + " ---: |" * 6]
    for row in result["models"]:
        cells = (
            row["name"],
            row["source"],
            row["style"],
            row["segments"],
            row["programs"],
            f"{row['parameters']:,}",
            f"{row['max_relative_difference']:.0e}" if row["max_relative_difference"] else "0",
            format_bytes(row["device_param_bytes_peak"]),
            format_bytes(row["param_bytes"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    merges = [(row, merge) for row in result["models"] for merge in row["merges"]]
    if merges:
        lines += ["", "Reasons for merged layers, from the partition:", ""]
        lines += [f"- {row['name']} ({row['style']}): {merge}" for row, merge in merges]
    machine = result["machine"]
    lines += ["", f"JAX {machine['jax']}, Python {machine['python']}, {machine['device']}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Trains the requested models and writes JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="train only models that the JSON lacks")
    parser.add_argument("--page", action="store_true", help="write the page from the JSON; train nothing")
    arguments = parser.parse_args()
    path = measure.RESULTS / "models.json"
    rows = {}
    if (arguments.missing or arguments.page) and path.exists():
        known = json.loads(path.read_text())["models"]
        rows = {(row["name"], row["source"].split()[0], row["style"]): row for row in known}
    for model in track([] if arguments.page else MODELS, description="models"):
        if key_of(model) not in rows:
            rows[key_of(model)] = row_of(model)
            done = [rows[key] for key in map(key_of, MODELS) if key in rows]
            # Written after each model, so that --missing can resume an interrupted run.
            measure.write("models", {"machine": measure.machine(), "models": done})
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(json.loads(path.read_text())))
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
