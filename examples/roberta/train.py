"""Trains RoBERTa on text with its parameters in host memory: python examples/roberta/train.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.bert import masked_training
from examples.common import command_line
from examples.roberta import data, model

ROBERTA = masked_training.Example(
    name="RoBERTa",
    sizes=model.SIZES,
    # The published ones (Liu et al. 2019, appendix A), for batches of 8,000 rows, except for the tiny model.
    learning_rates={"tiny": 1e-3, "base": 6e-4, "large": 4e-4},
    adam={"b2": 0.98, "eps": 1e-6},
    load=data.load,
    make_batches=data.FullSentences,
    mask=data.MASK,
)

app = masked_training.make_app(ROBERTA)


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
