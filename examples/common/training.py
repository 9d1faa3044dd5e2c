"""A training run for any model: progress, validation, metrics, Ctrl-C, saving and resuming.

start (init or resume) -> validate -> train -> save -> validate

The loss function returns a scalar, or a scalar and a dictionary. The dictionary's entries named in `carried` go into
the next batch (recurrence memory, batch statistics). All others are scalars to report (an accuracy, a second loss):
they are written with the metrics, and their means are printed with the validation loss.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jaxferry
from examples.common.metrics import open_metrics
from jaxferry.errors import CheckpointError, InputError
from jaxferry.processes import distributed
from jaxferry.transport import Terminated, deferred_interrupts, raising_terminated

NUM_VALIDATION_BATCHES = 4

console = Console(highlight=False)


@dataclasses.dataclass
class Run:
    """A training run; its `state` can be saved at any time.

    Attributes:
      step: JaxFerry's training step.
      train_batches: returns the batch of a step's number.
      valid_batches: likewise; the first few are used for validation.
      items_per_batch: number of items per batch, for the speed; `unit` is their name.
      carried: trees of arrays for the first batch; the loss function's dictionary replaces them for the next one.
        Validation also starts with these.
      state: set by `start`.
    """

    step: jaxferry.TrainStep
    train_batches: Callable[[int], Mapping[str, Any]]
    valid_batches: Callable[[int], Mapping[str, Any]]
    items_per_batch: int
    unit: str = "tokens"
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    state: Any = None

    def __post_init__(self):
        self.carried = distributed.alike(self.carried)
        self.first_carried, self.is_resumed = self.carried, False
        console.quiet = not distributed.is_first()

    def start(self, init_fn, seed, resume=None, params=None):
        """Initialises parameters layer by layer, uses the given ones, or reads a saved state."""
        key = jax.random.key(seed)
        self.is_resumed = resume is not None
        if self.is_resumed and params is not None:
            raise InputError("--resume and --weights both set the initial parameters: give only one of them")
        if not self.is_resumed:
            self.state = self.step.init_from(init_fn, key) if params is None else self.step.init(params)
            return
        self.state = self.step.restore(resume, jax.eval_shape(init_fn, key))
        if self.carried:
            self.carried = distributed.alike(read_carried(resume, self.state, self.carried))

    def finish(self, steps, metrics_file=None, save=None, save_every=0, keep_last=None):
        """Validates, trains up to a step, saves and validates.

        Args:
          steps: the step to train up to.
          metrics_file: where to write each step's metrics, see `open_metrics`.
          save: the folder to save to, at the end, after Ctrl-C and after SIGTERM.
          save_every: saves after every so many steps as well, while training goes on; 0 does not.
          keep_last: how many saved states to keep, in folders within `save` named by step; None keeps one, in `save`.

        Returns:
          The exit status: 130 after Ctrl-C, 143 after SIGTERM (a cluster takes the machine away), else 0.
        """
        if not save and (save_every or keep_last):
            raise InputError("--save-every and --keep-last need --save, the folder to save to")
        self.validate()
        save_one = functools.partial(self.save, save, keep_last)
        with raising_terminated():
            status = self.train(steps, metrics_file, self.is_resumed, save_every, save_one)
            if save:
                save_one()
        if status:
            fate = f"saved, go on with --resume {save}" if save else "nothing was saved (no --save)"
            console.print(f"interrupted after step {self.state.step}: {fate}", soft_wrap=True)
            return status
        self.validate()
        return 0

    def train(self, steps, metrics_file, append, save_every=0, save_one=None):
        """Trains up to a step and shows the progress; returns the exit status as `finish` does."""
        with contextlib.ExitStack() as stack:
            write = stack.enter_context(open_metrics(metrics_file if distributed.is_first() else None, append))
            progress = stack.enter_context(make_progress())
            task = progress.add_task("compiling", total=steps, completed=self.state.step)
            try:
                is_compiled = False
                while self.state.step < steps:
                    record = self.train_one(write, is_compiled)
                    is_compiled = True
                    speed = f"{record[f'{self.unit}_per_s']:,.0f} {self.unit}/s  {record['step_s']:.3f} s/step"
                    told = f"loss {record['loss']:.4f}  {speed}"
                    progress.update(task, completed=self.state.step, description=told)
                    if not console.is_terminal and self.state.step % max(1, steps // 10) == 0:
                        console.print(f"{self.state.step}/{steps}  {told}")
                    if save_every and self.state.step % save_every == 0 and self.state.step < steps:
                        save_one(wait=False)
            except Terminated as terminated:
                return terminated.status
            except KeyboardInterrupt:
                return 130
        return 0

    def train_one(self, write, is_compiled):
        """Runs one step; writes its record for --metrics and returns it."""
        start_s = time.perf_counter()
        index = self.state.step
        batch = {**distributed.own_rows(self.train_batches(index)), **self.carried}
        # An interrupt must not separate a step from its record, nor carried arrays from their state. It may interrupt
        # the first step, which compiles for long.
        with deferred_interrupts() if is_compiled or self.carried else contextlib.nullcontext():
            self.state, metrics = self.step(self.state, batch)
            self.carried, told = self.split(metrics.get("aux", {}))
            loss = float(metrics["loss"])
            step_s = time.perf_counter() - start_s
            record = {
                "step": index,
                "loss": loss,
                **{name: float(value) for name, value in told.items()},
                f"{self.unit}_per_s": self.items_per_batch / step_s,
                "step_s": step_s,
                "device_param_bytes_peak": int(metrics["device_param_bytes_peak"]),
            }
            write(record)
        return record

    def split(self, aux):
        """Splits the auxiliary outputs into arrays for the next batch and scalars to report."""
        carried = {name: aux[name] for name in self.first_carried}
        return carried, {name: value for name, value in aux.items() if name not in carried}

    def validate(self):
        """Prints the mean loss over a fixed set of validation batches."""
        carried, records = self.first_carried, []
        for i in range(NUM_VALIDATION_BATCHES):
            batch = {**distributed.own_rows(self.valid_batches(i)), **carried}
            result = self.step.evaluate(self.state, batch)
            loss, aux = result if isinstance(result, tuple) else (result, {})
            carried, told = self.split(aux)
            records.append({"loss": float(loss)} | {name: float(value) for name, value in told.items()})
        means = {name: sum(record[name] for record in records) / len(records) for name in records[0]}
        others = "".join(f", {name} {mean:.4f}" for name, mean in means.items() if name != "loss")
        console.print(f"validation loss after {self.state.step} steps: {means['loss']:.4f}{others}", soft_wrap=True)

    def save(self, path, keep_last=None, wait=True):
        """Saves the state with what is carried; if a save before has failed, training goes on."""
        try:
            self.step.wait_for_saves()
        except CheckpointError as error:
            console.print(f"warning: {error}", soft_wrap=True)
        leaves = {f"leaf_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(distributed.whole(self.carried)))}
        self.step.save(self.state, path, wait=wait, keep_last=keep_last, extra=leaves)


def read_carried(path, state, like):
    """Returns the arrays that were saved with a state, as a tree like `like`.

    Raises:
      InputError: if there are none, or of other shapes.
    """
    wanted, tree = jax.tree.flatten(like)
    saved = [state.extra.get(f"leaf_{i}") for i in range(len(wanted))]
    if len(state.extra) != len(wanted) or any(leaf is None for leaf in saved):
        raise InputError(f"{path} holds no arrays that this example carries: it was saved by another one")
    kinds = [[(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves] for leaves in (saved, wanted)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{path} was saved with another --batch, --size or --compute-dtype: resume with the same ones")
    return jax.tree.unflatten(tree, saved)


def make_progress():
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def count_parameters(init_fn):
    """Counts the parameters without computing them."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init_fn, jax.random.key(0))))
