"""Compares a measured profile of GPT-2 with the estimate of its machine, by layer. Usage: estimate.py PROFILE.json

The profile is one that `steps.py` measures (`profile_SIZE.json`); nothing runs on a device. Prints a table, and with
`-o` writes JSON: for each kind of layer the seconds that were measured and that are estimated, and their ratio. Layers
with equal times are one row. The sums are those of all layers.

A profile of commit 9f865df or before timed calls, which take 0.5 to 0.8 ms longer than their tasks.
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "gpt2"))

import model
from benchmarks.gpu import inputs, settings
from jaxferry.costs import Profile, estimate_profile, find_machine, partition_costs
from jaxferry.partition import partition

TIMES = (
    "load_s",
    "forward_s",
    "backward_s",
    "offload_s",
    "update_s",
    "forward_dha_s",
    "backward_dha_s",
    "backward_go_s",
)


def estimated(size, batch, seq, machine):
    """The estimated profile of GPT-2 in bfloat16."""
    config = model.SIZES[size]
    shapes = jax.eval_shape(model.make_init(config), jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    parts = partition(model.make_loss(config), shapes, ({"tokens": inputs.tokens(batch, seq, config.vocab_size)},))
    return estimate_profile(partition_costs(parts), machine)


def rows(measured, estimate):
    """One row for each kind of layer, and one for the sums.

    Args:
      measured: the layers of the measured profile.
      estimate: those of the estimate.
    """
    kinds = {}
    for known, guess in zip(measured, estimate, strict=True):
        assert known.name == guess.name, (known.name, guess.name)
        seconds = tuple((getattr(known, name), getattr(guess, name)) for name in TIMES)
        kinds.setdefault((known.param_bytes, seconds), []).append(known.name)
    made = [row(names, size, seconds) for (size, seconds), names in kinds.items()]
    sums = tuple(
        tuple(
            sum(each["seconds"][name][which] * each["layers"] for each in made) for which in ("measured", "estimated")
        )
        for name in TIMES
    )
    return [*made, row(["all"] * len(measured), sum(layer.param_bytes for layer in measured), sums)]


def row(names, param_bytes, seconds):
    return {
        "layer": names[0],
        "layers": len(names),
        "param_bytes": param_bytes,
        "seconds": {
            name: {"measured": known, "estimated": guess, "estimated_over_measured": guess / known if known else None}
            for name, (known, guess) in zip(TIMES, seconds, strict=True)
        },
    }


def table(made):
    """The rows as text: milliseconds measured, and the estimate as a share of them."""
    lines = [f"{'layer':10}{'':>5}" + "".join(f"{name.removesuffix('_s'):>17}" for name in TIMES)]
    for each in made:
        cells = [
            f"{own['measured'] * 1e3:>10.3f}"
            + (f"{own['estimated_over_measured']:>7.2f}" if own["measured"] else f"{'':7}")
            for own in each["seconds"].values()
        ]
        lines.append(f"{each['layer']:10}{each['layers']:>5}" + "".join(cells))
    return "\n".join(lines)


def main():
    """Compares, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=pathlib.Path, metavar="PROFILE.json")
    parser.add_argument("--machine", default="h200-pcie5", help="name or JSON file of the estimated machine")
    parser.add_argument("--size", default="medium", choices=settings.BATCHES)
    parser.add_argument("--batch", type=int, default=32, help="rows")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per row")
    parser.add_argument("-o", "--output", type=pathlib.Path, metavar="JSON")
    arguments = parser.parse_args()
    measured, machine = Profile.load(arguments.profile), find_machine(arguments.machine)
    made = rows(measured.layers, estimated(arguments.size, arguments.batch, arguments.seq, machine).layers)
    print(table(made))
    if arguments.output is not None:
        document = {
            "benchmark": "estimate",
            "model": {"name": f"GPT-2 {arguments.size}", "batch": arguments.batch, "sequence": arguments.seq},
            "profile": arguments.profile.name,
            "measured_on": measured.machine.get("name"),
            "estimated": machine.to_json(),
            "rows": made,
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
