"""`jaxferry train`: trains a user's model.

The options of a run are kept beside its saved state as `train.json` (`jaxferry.train/1`); a resumed run has them too.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.experimental import multihost_utils
from rich.console import Console
from typer import Option

from jaxferry.checkpoint import Keep, check_target
from jaxferry.cli.common import AsJson, plan_counts, plan_table, print_result, read_budget
from jaxferry.cli.recording import make_recording
from jaxferry.cli.workload import (
    ComputeDtype,
    Devices,
    GradientBuffers,
    MemoryBudget,
    ModelName,
    OffloadActivations,
    Optimizer,
    Remat,
    ReserveFactor,
    Seed,
    Tiles,
    UserModel,
    call_model,
    make_optimizer,
    read_dtype,
    read_number_or_word,
    read_offloading,
    read_tiles,
    user_code,
)
from jaxferry.engine import TrainState
from jaxferry.errors import CheckpointError, InputError, ScratchError
from jaxferry.modes import BLOCK
from jaxferry.partition import AUTO, OFF
from jaxferry.planner import policies
from jaxferry.processes import JOIN_TIMEOUT_S, is_first, mesh_of, own_rows, start
from jaxferry.records import check_format, load_record, write_json
from jaxferry.step import Plan, chrome_trace
from jaxferry.training import ESTIMATE, MEASURE, Prepared, TrainStep, train_step
from jaxferry.transport import Terminated, raising_terminated
from jaxferry.units import format_bytes, format_seconds

FORMAT = "jaxferry.train/1"
_FILE = "train.json"
_INTERRUPTED, _TERMINATED = 130, Terminated.status
_LINES = 10
_RECORDED_STEPS = 8

_KEPT = (
    *("optimizer", "learning_rate", "policy", "plan", "profile", "memory_budget", "reserve_factor", "clip_norm"),
    *("accumulate", "weight", "compute_dtype", "remat", "tiles", "offload_activations", "granularity", "devices"),
    *("gradient_buffers", "scratch", "host_memory"),
)
"""Options that a resumed run has from the saved one, unless they are given again."""

_EXCLUDING = {"policy": "plan", "plan": "policy"}
"""Options that exclude each other: a given one replaces the other one of the saved run."""

_TYPES: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(("learning_rate", "reserve_factor", "clip_norm"), ("a number", (int, float))),
    **dict.fromkeys(("accumulate", "devices"), ("a whole number", int)),
    "offload_activations": ("true or false", bool),
}
"""What the value of an option is, if it is not a string."""


def train(
    context: typer.Context,
    model: ModelName,
    steps: Annotated[int, Option(min=0, help="Train up to this step, counting steps before a resume.")] = 10,
    optimizer: Optimizer = "adamw",
    learning_rate: Annotated[float, Option(help="The learning rate.")] = 1e-3,
    policy: Annotated[str | None, Option(help=f"The planning policy: {', '.join(policies())}.")] = None,
    plan: Annotated[Path | None, Option(metavar="PLAN.json", help="A plan instead of a policy.")] = None,
    profile: Annotated[
        str | None, Option(metavar="PROFILE.json|measure|estimate", help="The profile to plan with.")
    ] = None,
    memory_budget: MemoryBudget = None,
    reserve_factor: ReserveFactor = None,
    clip_norm: Annotated[float | None, Option(help="Clip gradients to this global norm.")] = None,
    accumulate: Annotated[int, Option(help="Micro-batches per update; their gradients are averaged.")] = 1,
    weight: Annotated[
        str | None, Option(metavar="NAME", help="Entry of the loss function's aux that weighs its micro-batch.")
    ] = None,
    compute_dtype: ComputeDtype = None,
    remat: Remat = "none",
    tiles: Tiles = OFF,
    offload_activations: OffloadActivations = None,
    gradient_buffers: GradientBuffers = AUTO,
    granularity: Annotated[
        str, Option(help="Layers that the plan moves: block, module (finer), or auto for the faster.")
    ] = BLOCK,
    scratch: Annotated[
        Path | None, Option(metavar="DIR", help="Keep the optimizer state that host memory does not hold on this disk.")
    ] = None,
    host_memory: Annotated[
        str | None, Option(metavar="SIZE", help="With --scratch, what training may take of host memory.")
    ] = None,
    devices: Devices = 1,
    distributed: Annotated[
        bool, Option("--distributed", help="One of several processes, which share all their devices.")
    ] = False,
    join_timeout: Annotated[
        int | None,
        Option(min=1, help="With --distributed, seconds to wait for each other at the start. [default: 300]"),
    ] = None,
    seed: Seed = 0,
    save: Annotated[Path | None, Option(metavar="DIR", help="Save the state here at the end.")] = None,
    save_every: Annotated[int, Option(min=0, help="Save every N steps in the background (0: never).")] = 0,
    keep_last: Annotated[
        int | None, Option(min=1, help="Number of saved states to keep, in folders of DIR named by step.")
    ] = None,
    resume: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Continue from a saved state, the newest of several, with its run's options unless given again.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, Option(metavar="TRACE.json", help="Write the last steps as a Chrome trace, for Perfetto.")
    ] = None,
    record: Annotated[
        Path | None,
        Option(metavar="RUN.json", help="Write when each task of the last steps ran, with its layer and bytes."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a model with its parameters and optimizer state in host memory.

    The model's batch is a function of the step's number, or the same for every step.
    """
    console = Console(stderr=True, highlight=False)
    values = {name: context.params[name] for name in _KEPT}
    sources = {name: context.get_parameter_source(name) for name in _KEPT}
    chosen = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    if resume is not None:
        resumed = resumed_options(resume, _KEPT, chosen)
        values |= resumed
        if resumed:
            console.print(f"as the saved run: {as_arguments(resumed)}", soft_wrap=True, markup=False)
        chosen |= resumed.keys()
    if join_timeout is not None and not distributed:
        raise InputError("--join-timeout needs --distributed")
    mesh = _started(values["devices"], join_timeout or JOIN_TIMEOUT_S) if distributed else mesh_of(values["devices"])
    console.quiet = not is_first()
    saves = _Saves(save, save_every, keep_last, {name: values[name] for name in _KEPT if name in chosen})
    for path in (trace, record):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {path}: {path.parent} is not a folder")
        if path is not None and path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder")
    with user_code(model):
        user = call_model(model)
        user.check_is_whole()
    num_recorded = 0 if trace is None and record is None else _RECORDED_STEPS
    step = _step_of(user, values, record_steps=num_recorded, mesh=mesh)
    with user_code(model):
        state = user.new_state(step, seed) if resume is None else step.restore(resume, user.shapes())
        run = _Run(user, step, state, console, saves)
    # JAX tells all processes of a job to end after the same step.
    with contextlib.nullcontext() if distributed else raising_terminated():
        with user_code(model):
            status = run.train(steps)
        run.save_at_end()
        if status:
            fate = "nothing is saved (no --save)" if save is None else f"saved, continue with --resume {save}"
            console.print(f"ended after step {run.state.step}: {fate}", soft_wrap=True, markup=False)
        if run.losses or not status:
            run.write(trace, record)
        if is_first():
            run.report(as_json, has_ended=bool(status))
    return status


def _started(devices: int, join_timeout: int) -> Any:
    """Joins the processes of a job. Libraries print to standard error from here on: gloo prints its peers."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, closefd=False)
    os.dup2(2, 1)
    return start(devices, join_timeout_s=join_timeout)


def _step_of(user: UserModel, values: Mapping[str, Any], **more: Any) -> TrainStep:
    """Makes the training step for values of the options in `_KEPT`, and more arguments of `train_step`."""
    own = {name: value for name, value in values.items() if name not in ("optimizer", "learning_rate", "devices")}
    if values["offload_activations"] is False and (plan := values["plan"]) and Plan.load(plan).offloads_activations:
        raise InputError(
            "--keep-activations contradicts --plan, which lets activations leave: leave out one of the two"
        )
    own["memory_budget"] = read_budget(values["memory_budget"])
    own["offload_activations"] = read_offloading(values["offload_activations"])
    own["gradient_buffers"] = read_number_or_word(values["gradient_buffers"])
    own["compute_dtype"], own["tiles"] = read_dtype(values["compute_dtype"]), read_tiles(values["tiles"])
    optimizer = make_optimizer(values["optimizer"], values["learning_rate"])
    return train_step(user.loss_fn, optimizer, **own, **more)


@dataclasses.dataclass(frozen=True)
class _Saves:
    """Saves nothing without `path`, only at the end without `every`, one checkpoint without `keep_last`."""

    path: Path | None
    every: int
    keep_last: int | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.path is not None:
            check_target(self.path, keep=None if self.keep_last is None else Keep(self.keep_last))
        elif self.every or self.keep_last is not None:
            option = "--save-every" if self.every else "--keep-last"
            raise InputError(f"{option} needs --save, the folder to save to")


class _Run:
    """A training run; its `state` can be saved at any time. `losses` has those of the steps so far."""

    def __init__(self, user: UserModel, step: TrainStep, state: TrainState, console: Console, saves: _Saves) -> None:
        self._user, self._step, self.state, self._console, self._saves = user, step, state, console, saves
        self.losses: list[float] = []
        self._step_s: list[float] = []
        self._peak, self._has_saved = 0, False

    def train(self, steps: int) -> int:
        """Trains up to a step; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM to any process."""
        every = self._saves.every
        try:
            while self.state.step < steps:
                start_s = time.perf_counter()
                self.state, metrics = self._step(self.state, self._batch(self.state.step))
                self.losses.append(float(metrics["loss"]))
                self._step_s.append(time.perf_counter() - start_s)
                self._peak = int(metrics["device_param_bytes_peak"])
                number = self.state.step
                if number % max(1, steps // _LINES) == 0:
                    status = f"loss {self.losses[-1]:.4f}  {format_seconds(self._step_s[-1])} per step"
                    self._console.print(f"{number}/{steps}  {status}")
                if every and number % every == 0 and number < steps:
                    # Options lie beside the saved state: the first save must have ended before they are written.
                    with self._warning():
                        self._save(wait=not self._has_saved)
                if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(number):
                    return _TERMINATED
        except Terminated as terminated:
            return terminated.status
        except KeyboardInterrupt:
            if jax.process_count() > 1:
                raise  # the others go on, so that there is nothing to save together
            return _INTERRUPTED
        return 0

    def _batch(self, step: int) -> Any:
        return own_rows(self._user.batch_of(step))

    def _prepared(self) -> Prepared:
        return self._step.prepare(self._batch(self.state.step - 1))

    def save_at_end(self) -> None:
        if self._saves.path is not None:
            with self._warning():
                self._step.wait_for_saves()
            self._save(wait=True)

    def _save(self, wait: bool) -> None:
        assert self._saves.path is not None
        self._step.save(self.state, self._saves.path, wait=wait, keep_last=self._saves.keep_last)
        if not self._has_saved and is_first():  # later saves keep the file
            save_options(self._saves.path, self._saves.options)
        self._has_saved = True

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Prints a failed save as a warning; training goes on."""
        try:
            yield
        except (CheckpointError, ScratchError) as error:
            self._console.print(f"warning: {error}", soft_wrap=True)

    def write(self, trace: Path | None, record: Path | None) -> None:
        """Writes trace and recording; raises `InputError` if no step was run."""
        self.state.block_until_ready()
        for option, path in (("--trace", trace), ("--record", record)):
            if path is not None and self._step.recorded() is None:
                raise InputError(f"{option} needs at least one step, but none was run: raise --steps")
        if trace is not None:
            runs = self._step.recorded_by_all()
            if is_first():
                write_json(trace, chrome_trace(*runs))
        if record is not None and is_first():
            make_recording(self._step, self.state, self._prepared(), model=self._user.name).save(record)

    def report(self, as_json: bool, has_ended: bool) -> None:
        document = {"model": self._user.name, "steps": self.state.step, "losses": self.losses, "step_s": self._step_s}
        if not self.losses:
            why = "no step was run: the state is" if has_ended else "nothing to do: the state is already"
            print_result(as_json, document, f"{why} at step {self.state.step}")
            return
        plan = self._prepared().plan
        document |= {"device_param_bytes_peak": self._peak, "policy": plan.policy, "modes": plan_counts(plan)}
        first, last, fastest = self.losses[0], self.losses[-1], format_seconds(min(self._step_s))
        count = len(self.losses)
        print_result(
            as_json,
            document,
            plan_table(plan),
            f"{count} step{'s' * (count != 1)}: loss {first:.4f} -> {last:.4f}, fastest step {fastest}",
            f"at most {format_bytes(self._peak)} of parameters on the device at once",
        )


def save_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Writes options that are not at their defaults into a saved state's folder."""
    # The run may be resumed in another folder, so files are named by absolute paths.
    files = [name for name in ("plan", "profile", "scratch") if options.get(name) not in (None, MEASURE, ESTIMATE)]
    named = {**options, **{name: str(Path(options[name]).absolute()) for name in files}}
    fresh = folder / f"{_FILE}.new"
    write_json(fresh, {"format": FORMAT, "options": named})
    os.replace(fresh, folder / _FILE)


def resumed_options(folder: Path, known: Collection[str], chosen: Collection[str]) -> dict[str, Any]:
    """Returns the saved run's options that this command line does not give; raises `InputError` for a damaged file."""
    # One of several saved states, named by its step, and a numbered save of it have their options above them.
    while not (file := folder / _FILE).is_file():
        if not folder.name.removeprefix("save_").isdigit():
            return {}
        folder = folder.parent
    options = load_record(file, lambda document: check_format(document, FORMAT)).get("options")
    if not isinstance(options, dict):
        raise InputError(f"{file}: options must be a JSON object, got {options!r}")
    for name, value in options.items():
        if name not in known:
            raise InputError(f"{file}: unknown option {name!r}; known are {', '.join(known)}")
        what, types = _TYPES.get(name, ("a string", str))
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise InputError(f"{file}: option {name} must be {what}, got {value!r}")
    replaced = {*chosen, *(_EXCLUDING[name] for name in chosen if name in _EXCLUDING)}
    return {name: value for name, value in options.items() if name not in replaced}


def as_arguments(options: Mapping[str, Any]) -> str:
    """Returns the options as the command line would give them."""
    flags = []
    for name, value in options.items():
        option = "--" + ("keep-activations" if value is False else name.replace("_", "-"))
        flags.append(option if isinstance(value, bool) else f"{option} {value}")
    return " ".join(flags)
