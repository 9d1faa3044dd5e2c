"""A training run: progress, validation, metrics, Ctrl-C, saving and going on, for any model.

start (init or resume) -> validate -> train -> save -> validate

The loss function returns a scalar, or a scalar and a dictionary. Of the dictionary's entries those named in `carried`
go into the next batch (recurrence memory, batch statistics); all others are scalars to be told (an accuracy, a second
loss): they are written with the metrics, and their means with the validation loss.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jaxferry
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.errors import InputError

NUM_VALIDATION_BATCHES = 4
CARRIED_FILE = "carried.npz"

console = Console(highlight=False)


@dataclasses.dataclass
class Run:
    """A training under way: `state` is always one that can be saved.

    Attributes:
      step: JaxFerry's.
      train_batches: the batch of a step by its number.
      valid_batches: likewise; the first few are validated with.
      items_per_batch: what a step's speed is counted in; `unit` is their name.
      carried: trees of arrays that go into the first batch; what the loss function's dictionary has by the same names
        goes into the next one. Validation begins with these too.
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
        self.first_carried, self.is_resumed = self.carried, False

    def start(self, init_fn, seed, resume=None, params=None):
        """Makes fresh parameters, layer by layer, takes those that are given, or reads a saved state."""
        key = jax.random.key(seed)
        self.is_resumed = resume is not None
        if self.is_resumed and params is not None:
            raise InputError("--resume and --weights both name the parameters to begin with: give one of them")
        if not self.is_resumed:
            self.state = self.step.init_from(init_fn, key) if params is None else self.step.init(params)
            return
        self.state = self.step.restore(resume, jax.eval_shape(init_fn, key))
        if self.carried:
            self.carried = load_carried(resume, self.state.step, self.carried)

    def finish(self, steps, metrics_file=None, save=None):
        """Validates, trains up to a step, saves, validates; returns the exit status: 130 after Ctrl-C, else 0."""
        self.validate()
        interrupted = self.train(steps, metrics_file, append=self.is_resumed)
        if save:
            self.save(save)
        if interrupted:
            fate = f"saved, go on with --resume {save}" if save else "nothing was saved (no --save)"
            console.print(f"interrupted after step {self.state.step}: {fate}", soft_wrap=True)
            return 130
        self.validate()
        return 0

    def train(self, steps, metrics_file, append):
        """Trains up to a step and shows its progress; true if Ctrl-C ended it earlier."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(metrics_file, "a" if append else "w")) if metrics_file else None
            progress = stack.enter_context(make_progress())
            task = progress.add_task("compiling", total=steps, completed=self.state.step)
            try:
                is_compiled = False
                while self.state.step < steps:
                    record = self.train_one(out, is_compiled)
                    is_compiled = True
                    speed = f"{record[f'{self.unit}_per_s']:,.0f} {self.unit}/s  {record['step_s']:.3f} s/step"
                    told = f"loss {record['loss']:.4f}  {speed}"
                    progress.update(task, completed=self.state.step, description=told)
                    if not console.is_terminal and self.state.step % max(1, steps // 10) == 0:
                        console.print(f"{self.state.step}/{steps}  {told}")
            except KeyboardInterrupt:
                return True
        return False

    def train_one(self, out, is_compiled):
        """One step; returns what --metrics writes of it, to the file if there is one."""
        start_s = time.perf_counter()
        index = self.state.step
        batch = {**self.train_batches(index), **self.carried}
        # An interrupt must not part a step from its record, nor what is carried from its state; compiling takes long.
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
            if out:
                print(json.dumps(record), file=out, flush=True)
        return record

    def split(self, aux):
        """What goes into the next batch, and what is told."""
        carried = {name: aux[name] for name in self.first_carried}
        return carried, {name: value for name, value in aux.items() if name not in carried}

    def validate(self):
        """Prints the mean loss over the same few batches of the validation data."""
        carried, records = self.first_carried, []
        for i in range(NUM_VALIDATION_BATCHES):
            result = self.step.evaluate(self.state, {**self.valid_batches(i), **carried})
            loss, aux = result if isinstance(result, tuple) else (result, {})
            carried, told = self.split(aux)
            records.append({"loss": float(loss)} | {name: float(value) for name, value in told.items()})
        means = {name: sum(record[name] for record in records) / len(records) for name in records[0]}
        others = "".join(f", {name} {mean:.4f}" for name, mean in means.items() if name != "loss")
        console.print(f"validation loss after {self.state.step} steps: {means['loss']:.4f}{others}", soft_wrap=True)

    def save(self, path):
        self.step.save(self.state, path)
        if self.carried:
            save_carried(path, self.state.step, self.carried)


def save_carried(path, step, carried):
    """Writes arrays into the folder of a checkpoint; the step's number tells whether they belong to it."""
    leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(carried))}
    np.savez(Path(path) / CARRIED_FILE, step=step, **leaves)


def load_carried(path, step, like):
    """Reads what `save_carried` wrote for a step, as a tree like `like`.

    Raises:
      InputError: if there is nothing, or it belongs to another step or other shapes.
    """
    file = Path(path) / CARRIED_FILE
    if not file.exists():
        raise InputError(f"{path} holds no {CARRIED_FILE}: it was not saved completely, or by another example")
    with np.load(file) as arrays:
        saved = [arrays[f"leaf_{i}"] for i in range(len(arrays) - 1)]
        saved_step = int(arrays["step"])
    wanted, tree = jax.tree.flatten(like)
    if saved_step != step:
        raise InputError(f"{file} belongs to step {saved_step}, the state beside it to step {step}: save it again")
    dtypes = [jax.dtypes.result_type(leaf) for leaf in wanted]
    # NumPy reads what is not its own, as bfloat16, as bytes.
    saved = [leaf.view(dtype) if leaf.dtype.kind == "V" else leaf for leaf, dtype in zip(saved, dtypes)]
    kinds = [[(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves] for leaves in (saved, wanted)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{file} was saved with another --batch, --size or --compute-dtype: resume with the same ones")
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
    """How many numbers training changes; nothing is computed or stored for it."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init_fn, jax.random.key(0))))
