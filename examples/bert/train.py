"""Trains BERT on text with its parameters in host memory: python examples/bert/train.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.bert import data, masked_training, model
from examples.common import command_line

BERT = masked_training.Example(
    name="BERT",
    sizes=model.SIZES,
    # The published one (Devlin et al. 2019, appendix A.2), except for the tiny model.
    learning_rates={"tiny": 1e-3, "base": 1e-4, "large": 1e-4},
    adam={"b2": 0.999, "eps": 1e-6},
    load=data.load,
    make_batches=data.Pairs,
    mask=data.MASK,
)

app = masked_training.make_app(BERT)


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
