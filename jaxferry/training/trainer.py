"""The training step: makes states, takes steps, evaluates, saves and restores."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxferry import checkpoint
from jaxferry.costs import Profile
from jaxferry.engine import Owner, TrainState
from jaxferry.errors import JaxFerryError, StateError
from jaxferry.optimizer import initial_shapes, taken_extra_args
from jaxferry.processes import PROGRESS, agreeing, check_same_values, global_shape, messages_of
from jaxferry.settings import own_settings
from jaxferry.step import Run
from jaxferry.training.compiler import Compiler, Shared
from jaxferry.training.cuts import Call, weighted
from jaxferry.training.disk import DiskOptions
from jaxferry.training.model import Model, abstract
from jaxferry.training.options import Options, metrics_of
from jaxferry.training.saving import BackgroundSaves, content, content_of, keep_of, restored
from jaxferry.training.step import Prepared
from jaxferry.transport import Placement, choose_transport


class TrainStep:
    """A training step; made by `train_step`, called as `state, metrics = step(state, batch)`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        options: Options,
        placement: Placement,
        transport: str | None = None,
    ) -> None:
        self._placement, self._wanted_transport = placement, transport
        planning = options.planning.on(self._placement.memory_facts().get("memory_limit_bytes"))
        options = dataclasses.replace(options, planning=planning)
        self._optax, self._options, weight = optimizer, options, options.numerics.weight
        self._loss_fn = loss_fn if weight is None else weighted(loss_fn, weight, options.numerics.is_weighted)
        with own_settings():
            choose_transport(transport, self._placement)
            self._shared = Shared(self._placement, options.record_steps)
        self._disk = DiskOptions.of(options.scratch, options.host_memory_bytes)
        self._compiler: Compiler | None = None
        self._newest: weakref.ref[TrainState] | None = None
        self._saves = BackgroundSaves()

    def init(self, params: Any) -> TrainState:
        """Copies parameters into host memory and initialises the optimizer's state there, layer by layer.

        Args:
          params: the model's tree of parameters: NumPy or JAX arrays of a real floating-point dtype. They are copied.
            Leaves may also be lazy: anything with `shape` and `dtype` that `np.asarray` reads is read now, by leaf;
            tensors of `jaxferry.pretrained` are read piece by piece.

        Raises:
          InputError: if a trained parameter is not real floating point.
          HostMemoryError: if host memory cannot hold them; nothing is allocated then.
        """
        with self.owner.using("TrainStep.init"):
            compiler = self._adopt(params)
            compiler.model.check_host_memory()
            leaves = jax.tree.leaves(params)
            if self._placement.num_processes > 1:
                check_same_values("their parameters", leaves)
            masters = compiler.model.masters(leaves)
            return self._made(compiler.model.new_state(masters, compiler.layers, owner=self.owner))

    def declare(self, params: Any) -> None:
        """States the model's parameters without making a state, so that `prepare` can be called for a plan alone.

        Args:
          params: the model's tree of parameters; shapes are enough.

        Raises:
          InputError: as for `init`.
        """
        with self.owner.using("TrainStep.declare"):
            self._adopt(params)

    def init_from(self, init_fn: Callable[[Any], Any], rng: Any) -> TrainState:
        """Initialises a model that fits into no single memory: runs `init_fn(rng)` layer by layer on the CPU.

        Args:
          init_fn: returns the tree of parameters, for instance `lambda rng: model.init(rng, tokens)["params"]`.
          rng: its argument: a PRNG key or a tree of arrays.

        Raises:
          HostMemoryError: if host memory cannot hold the model; nothing is allocated then.
        """
        with self.owner.using("TrainStep.init_from"):
            compiler = self._adopt(initial_shapes(init_fn, rng))
            compiler.model.check_host_memory()
            if self._placement.num_processes > 1:
                check_same_values("their PRNG keys", jax.tree.leaves(rng))
            masters = compiler.model.masters_from(init_fn, rng)
            return self._made(compiler.model.new_state(masters, compiler.layers, owner=self.owner))

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
          state: from `init`, `init_from`, `restore` or the last step. It is updated in place and returned, so another
            name for it changes as well; `state.copy()` keeps a state.
          *args: the loss function's arguments after the parameters, usually one batch.
          **kwargs: keyword arguments of the loss function, such as a PRNG key for dropout. Booleans, strings and None
            are static: each combination is compiled once. If `train_step` was given `extra_args`, so is this one
            keyword: `extra_args={"name": value}` are those of this step's update, with `accumulate` the last one's.

        Returns:
          The state, and metrics: `loss`; `grad_norm` (of the mean gradient of all trained parameters, before clipping;
          with `accumulate` only for the last micro-batch before an update); `mean_loss` (by `weight`, of the
          micro-batches of an update, for the last one); `skipped` (whether the update was skipped,
          with `skip_nonfinite` or a dynamic loss scale); `loss_scale` (if the loss is scaled); `aux` (the loss
          function's auxiliary result, if it has one); `device_param_bytes_peak` (bytes).

        Raises:
          NonFiniteError: if the loss is not finite, unless `skip_nonfinite`, or a gradient (see `check_gradients`); the
            state is that before the step, or with `accumulate` that after the last update.
          BudgetError: if no plan fits into `memory_budget`.
          TaskError: if a task of this step or of the previous one failed; the message states the outcome.
          HostMemoryError: if host memory cannot hold what a step for a batch of this structure keeps there.
          StateError: if the state belongs to another step or to the parent of this forked process, or is damaged, or if
            another thread uses this step or one of its states.
        """
        with self.owner.using("TrainStep.__call__", state), PROGRESS.call():
            extra_args = taken_extra_args(kwargs, self._options.numerics.extra_args)
            prepared = self._arranged(state, args, kwargs)
            state.fill()
            number = state.step
            result = prepared.runner.step(state, Call.of(args, kwargs).leaves, extra_args)
            return state, metrics_of(number, prepared.partition, result, self._options.numerics)

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Partitions, plans and compiles for arguments of this structure; results are cached.

        The first call of the step does this by itself; an earlier call only chooses the time. Threads meanwhile compile
        the updates of the newest state, and make what its first step needs in an accelerator's pinned memory.

        Args:
          *args: the step's arguments; arrays or shape structs.
          **kwargs: likewise.

        Raises:
          BudgetError: if no plan fits into `memory_budget`.
          HostMemoryError: if host memory cannot hold what the step keeps there (copies to read, saved activations).
          StateError: if the model is not known yet: call `init`, `init_from`, `restore` or `declare` first.
        """
        with self.owner.using("TrainStep.prepare"):
            state = None if self._newest is None else self._newest()
            return self._prepared(state, args, kwargs)

    def measure(self, params: Any, *args: Any, **kwargs: Any) -> Profile:
        """Measures the profile that policies plan with: what each layer costs on the device.

        Measurements in the cache (`JAXFERRY_CACHE_DIR`) are reused.

        Args:
          params: the model's tree of parameters; shapes are enough.
          *args: the step's arguments; arrays or shape structs.
          **kwargs: likewise.
        """
        with self.owner.using("TrainStep.measure"):
            return self._adopt(params).measure(Call.of(*self._of_all(args, kwargs)))

    def compile_updates(self, state: TrainState, *args: Any, **kwargs: Any) -> None:
        """Compiles the step and the host updates ahead of the first step.

        Args:
          state: the training state; it is rearranged into the layers of the partition.
          *args: the step's arguments; arrays or shape structs.
          **kwargs: likewise.
        """
        with self.owner.using("TrainStep.compile_updates", state):
            self._arranged(state, args, kwargs)

    def _of_all(self, args: Any, kwargs: Any) -> Any:
        """The arguments with the shapes that they have in all processes together."""
        num = self._placement.num_processes
        return (args, kwargs) if num == 1 else jax.tree.map(lambda leaf: global_shape(leaf, num), (args, kwargs))

    def _prepared(self, state: TrainState | None, args: Any, kwargs: Any) -> Prepared:
        """The prepared step; see `Compiler.prepare`."""
        is_known = state is not None and state.optimizer is self.compiler.model.optimizer and state.damage is None
        return self.compiler.prepare(Call.of(*self._of_all(args, kwargs)), state if is_known else None)

    def _made(self, state: TrainState) -> TrainState:
        """Notes a new state, which `prepare` is likely to be for."""
        self._newest = weakref.ref(state)
        return state

    def _arranged(self, state: TrainState, args: Any, kwargs: Any) -> Prepared:
        self._check(state)
        prepared = self._prepared(state, args, kwargs)
        state.arrange(prepared.partition.layers)
        if state.accumulated.num_batches == self.compiler.model.numerics.accumulate - 1:
            state.accumulated.check_last(prepared.partition)
        prepared.runner.compile_updates(state)
        return prepared

    def evaluate(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the loss function for the current parameters, layer by layer, without derivatives.

        The memory budget applies.

        Args:
          state: the training state.
          *args: as for the step.
          **kwargs: likewise.

        Raises:
          BudgetError: if it does not fit into `memory_budget`.
        """
        made = self.apply(state, self._loss_fn, *args, **kwargs)
        return made[1][1] if self._options.numerics.is_weighted else made

    def apply(self, state: TrainState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Evaluates any function of the current parameters, layer by layer, without derivatives.

        The function is partitioned like the loss function and runs under the same memory budget. An example is the
        logits of the last position, with the keys and values of earlier positions as an argument and a result.

        Args:
          state: the training state.
          function: `function(params, *args, **kwargs)` returns a tree of arrays; it sees the parameters in the compute
            dtype. Like `jax.jit`, it is compiled once per object and structure of arguments: pass the same object
            again.
          *args: arrays, or trees of them.
          **kwargs: likewise; booleans, strings and None are static.

        Returns:
          What the function returns, with arrays on the device.

        Raises:
          BudgetError: if it does not fit into `memory_budget`.
          PartitionError: if the function reads no parameter.
        """
        with self.owner.using("TrainStep.apply", state), PROGRESS.call():
            self._check(state)
            compiler = self.compiler
            evaluator = compiler.evaluator(function, *self._of_all(args, kwargs))
            self._shared.prefetch.clear()
            state.settle()
            state.arrange(evaluator.partition.layers)
            state.fill()
            graphs = [prepared.partition.graph for prepared in compiler.prepared]
            held_bytes = sum(graph.held_bytes(*graph.constants) for graph in graphs)
            return evaluator.run(state, Call.of(args, kwargs).leaves, held_bytes)

    @property
    def owner(self) -> Owner:
        """The process, and the thread at a time, that may use the step and its states."""
        return self._shared.owner

    @property
    def options(self) -> Options:
        """The checked arguments of `train_step`."""
        return self._options

    @property
    def device_kind(self) -> str:
        """The device's own name, such as `NVIDIA H200`."""
        return self._placement.device_kind

    def recorded(self) -> Run | None:
        """Returns when each task of the last steps started and ended, in seconds from the start of the first step.

        `jaxferry.step.simulation.chrome_trace` converts it for Perfetto, like a prediction. Returns None if no step
        has ended or `record_steps` is 0. Steps with updates in flight are left out. Waits for the device to finish
        these steps.

        On an accelerator, the times are the device's own. With `transport="ferry"` they come from events on its queues,
        converted to the host's clock to some 10 microseconds; no task starts before it was issued. With
        `transport="device_put"`, and always for rows of lookups, threads wait for results. Ends are then some tens of
        microseconds late. Starts follow the machine model: a task starts when those that it waited for, and the
        previous one of its lane, have ended. A copy that was freed before a thread could wait for it takes no time.
        """
        with self.owner.using("TrainStep.recorded"):
            return None if self._shared.recorder is None else self._shared.recorder.run()

    def recorded_by_all(self) -> tuple[Run, ...]:
        """Likewise of all processes that train together, in their order; each must call this.

        Each one's times are from the start of its own first recorded step. It is empty if nothing is recorded.
        """
        run, place = self.recorded(), self._placement
        nums = np.zeros(place.num_processes, np.int32)
        nums[place.process] = 0 if run is None else len(run.starts_s)
        nums = place.merged(nums)
        if run is None or len(set(nums.tolist())) > 1:
            if nums.any():
                raise StateError("the processes have recorded different steps: wait for the last one's updates first")
            return ()
        times = np.zeros((place.num_processes, 2, len(run.starts_s)))
        times[place.process] = run.starts_s, run.ends_s
        of_all = place.merged(times)
        return tuple(dataclasses.replace(run, starts_s=tuple(own[0]), ends_s=tuple(own[1])) for own in of_all)

    def save(
        self,
        state: TrainState,
        path: str | os.PathLike[str],
        *,
        wait: bool = True,
        keep_last: int | None = None,
        keep_best: int = 0,
        metric: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves parameters, optimizer state and step number as an Orbax checkpoint; waits for updates in flight.

        An existing checkpoint is replaced atomically once the new one is on the disk: however the process ends, the
        path holds the old or the new one, as a numbered save. Other files in its folder are kept. With `accumulate`,
        this is the state after the last update; later micro-batches are neither saved nor counted.

        Args:
          state: the training state.
          path: a local folder; an existing checkpoint is replaced, a symbolic link is followed.
          wait: False returns once the state is copied; a thread writes the copy while training goes on. Until it is
            written, the copy takes as much host memory as fp32 parameters and the optimizer state. Where there is
            no room for it, a warning says so, and the call waits as with True. At most one save is in progress: the
            next one waits for it. `wait_for_saves`, the next save, and the end of the process wait for it too. The
            first two raise its error; at the end of the process it is printed.
          keep_last: None writes the checkpoint to `path` itself. A number writes it into `path`, under the number of
            the step, and keeps the checkpoints that were saved last, this many. `restore(path)` reads the newest one,
            `jaxferry.list_checkpoints(path)` lists them.
          keep_best: with `keep_last`, the number of checkpoints with the lowest metric that are kept as well.
          metric: a number that is saved with the state, the lower the better, such as a validation loss.
          extra: the user's own arrays or PRNG keys, by name, that are saved with the state; `restore` returns them as
            `state.extra`.

        Raises:
          CheckpointError: if `path` is remote, exists and is not a checkpoint, or cannot be written; or if the last
            save with `wait=False` failed, in which case this one has not begun.
          HostMemoryError: if layers are updated on the device and host memory cannot hold a copy of their state.
          ScratchError, InputError: if the scratch file cannot be read; if another argument is invalid, or processes
            differ in `path` or `extra`. What fails in one process fails in all.

        Warns:
          UserWarning: if `wait=False` waits, since host memory cannot hold a copy of the state.
        """
        with self.owner.using("TrainStep.save", state):
            messages = messages_of("save", self._placement.process, self._placement.num_processes)
            with agreeing(messages) as said:
                self._check(state)
                self.wait_for_saves()
                # The working folder may be another one while a thread writes.
                target = checkpoint.local_path(path)
                keep = keep_of(keep_last, keep_best)
                own = checkpoint.check_extra({} if extra is None else extra)
                metric = checkpoint.check_metric(metric)
                if messages is not None:
                    said |= {"the paths of their checkpoints": os.fspath(path), "their extra arrays": content_of(own)}
            if not wait and messages is None:
                checkpoint.check_target(target, state.updated_step, keep)
            saved, is_copied = content(state, self.compiler.model.params, own, metric, copied=not wait)

            def write() -> None:
                checkpoint.save(saved, target, keep, messages)
                state.checkpoint = os.fspath(path)

            if not is_copied or not self._saves.start(write):
                write()

    def wait_for_saves(self) -> None:
        """Waits until the last save with `wait=False` is on the disk.

        Raises:
          CheckpointError: if it failed; what was at its path is unchanged. Later calls do not raise this again.
        """
        self._shared.owner.check()
        self._saves.wait()

    def restore(self, path: str | os.PathLike[str], params: Any = None) -> TrainState:
        """Reads a checkpoint; training continues from it bit-identically. Waits for a save in progress.

        Args:
          path: the folder; of a folder of several checkpoints (`save(..., keep_last=...)`), the newest is read.
          params: a tree of the model's structure (shapes are enough); the checkpoint must match it. It may be omitted
            if this step has been initialised before, or if the tree consists of dictionaries.

        Raises:
          CheckpointError: if there is no checkpoint, it is damaged (the message names the leaf and the file), or does
            not match the model or the optimizer.
          HostMemoryError: if host memory cannot hold the model; nothing is allocated then.

        Warns:
          UserWarning: if the checkpoint is of an older version, without digests.
        """
        with self.owner.using("TrainStep.restore"):
            self._saves.settle()
            known = self._compiler

            def read(saved: checkpoint.Checkpoint) -> TrainState:
                given = params
                if given is None:
                    given = saved.dictionary() if known is None else known.model.params
                compiler = self._adopt(given)
                return self._made(restored(saved, compiler.model, compiler.layers, self.owner))

            try:
                state = checkpoint.load(path, read)
            except JaxFerryError:
                # A state in training keeps its model.
                self._compiler = known
                raise
            state.checkpoint = os.fspath(path)
            return state

    def _adopt(self, params: Any) -> Compiler:
        """Returns the compiler for a model's tree: the current one if the tree is the same, else a new one."""
        self._shared.owner.check()
        if self._compiler is None or self._compiler.model.params != abstract(params):
            numerics, num = self._options.numerics, self._options.planning.gradient_buffers
            model = Model(params, self._optax, numerics, self._placement, self._wanted_transport, num, self._disk)
            self._compiler = Compiler(model, self._loss_fn, self._options, self._shared)
        return self._compiler

    @property
    def compiler(self) -> Compiler:
        """What prepares steps and evaluations of the model.

        Raises:
          StateError: if there is no model yet, or this is a forked child.
        """
        self._shared.owner.check()
        if self._compiler is None:
            raise StateError("this step has no model yet: call init, init_from, restore or declare first")
        return self._compiler

    def _check(self, state: TrainState) -> None:
        if not isinstance(state, TrainState):
            raise StateError(f"state must come from this step's init, init_from or restore, got {type(state).__name__}")
        if state.optimizer is not self.compiler.model.optimizer:
            raise StateError("this state belongs to another model or training step: restore it from a checkpoint")
        state.check()
