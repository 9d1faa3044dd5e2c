"""Where a run's metrics go: a file of JSON lines, or a folder with TensorBoard's events beside `metrics.jsonl`.

TensorBoard's files are written by tensorboardX, which needs neither TensorFlow nor PyTorch.
"""

import contextlib
import json

from tensorboardX import SummaryWriter

FILE = "metrics.jsonl"


@contextlib.contextmanager
def open_metrics(path, append):
    """Opens the place for metrics and yields a function that writes one step's record, a dictionary of numbers.

    Args:
      path: a file; or a folder, which has no suffix or exists; None writes nothing.
      append: whether records of an earlier run stay.
    """
    with contextlib.ExitStack() as stack:
        writers = []
        if path is not None:
            is_folder = path.is_dir() or not path.suffix
            if is_folder:
                path.mkdir(exist_ok=True)
                writers.append(stack.enter_context(tensorboard(path)))
            file = path / FILE if is_folder else path
            writers.append(json_lines(stack.enter_context(open(file, "a" if append else "w"))))
        yield lambda record: [write(record) for write in writers]


def json_lines(file):
    """Returns a function that writes one JSON object a line."""
    return lambda record: print(json.dumps(record), file=file, flush=True)


@contextlib.contextmanager
def tensorboard(folder):
    """Yields a function that writes each number of a record as a scalar of its step."""
    writer = SummaryWriter(str(folder))

    def write(record):
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])

    try:
        yield write
    finally:
        writer.close()
