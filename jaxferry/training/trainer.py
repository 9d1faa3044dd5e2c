"""The public entry: `train_step` turns a loss function and an Optax optimizer into an offloaded training step.

step = train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxferry import checkpoint
from jaxferry.costs import Profile
from jaxferry.engine import LossScale, Owner, StepResult, TrainState
from jaxferry.errors import InputError, JaxFerryError, NonFiniteError, StateError
from jaxferry.modes import BLOCK
from jaxferry.optimizer import masters_layer_by_layer, path_names
from jaxferry.partition import Partition, Trainable, result_shapes, stored_struct
from jaxferry.processes import PROGRESS, check_same_values, global_shape, messages_of
from jaxferry.settings import own_settings
from jaxferry.step import Plan, Run
from jaxferry.training.compiler import Compiler, Shared
from jaxferry.training.cuts import split_flags
from jaxferry.training.model import Model, abstract
from jaxferry.training.options import CACHED_SHAPES, Options, read_options
from jaxferry.training.step import Prepared
from jaxferry.transport import Placement, choose_transport, make_placement

__all__ = ["Prepared", "TrainStep", "train_step"]


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    trainable: Trainable | None = None,
    memory_budget: int | str | None = None,
    reserve_factor: float | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    loss_scale: float | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    policy: str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    remat: Any = "none",
    offload_activations: bool = False,
    skip_nonfinite: bool = False,
    check_gradients: bool | None = None,
    device: jax.Device | None = None,
    mesh: jax.sharding.Mesh | None = None,
    transport: str | None = None,
    record_steps: int = 0,
    cached_shapes: int = CACHED_SHAPES,
    merge_small: bool = True,
    granularity: str = BLOCK,
) -> TrainStep:
    """Makes a training step whose parameters and optimizer state live in host memory.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar, or `(scalar, aux)`; the further arguments
        are those that the step is called with, usually one batch.
      optimizer: any Optax transformation. It runs layer by layer if that gives the same result, otherwise as one update
        after the last gradient, with a warning. Parameters whose update is always zero, and for which it keeps no state
        (`optax.set_to_zero` under `optax.multi_transform`, say), are frozen: see `trainable`.
      trainable: which parameters are trained: a function of a parameter's path (`lambda path: "lora" in path`), or a
        tree of booleans, each of which may stand for a subtree; None for all. The others are frozen: they have no
        gradient, no optimizer state and no update, are hidden from `optimizer`, and keep their dtype. They are loaded
        or read in host memory like any other. `optax.multi_transform` with `optax.set_to_zero` has the same effect.
      memory_budget: device memory, such as `"8GiB"` or a number of bytes. None takes what the device's allocator has
        (no limit on a CPU), `"none"` sets no limit.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device until a transfer takes them;
        None for the policy's default, usually 1.
      clip_norm: global norm to which gradients are clipped, exactly; None clips nothing. The norm covers the gradients
        of trained parameters.
      accumulate: number of steps (micro-batches) whose mean gradient one update applies, as in `optax.MultiSteps`. Sums
        are in fp32 at least. They stay on the device if the plan lets gradients stay and they fit into the budget;
        otherwise they are added up in host memory.
      compute_dtype: dtype of the parameters on the device, such as `jnp.float16`. By default `bfloat16` on accelerators
        for models in float32, otherwise the parameters' own.
      loss_scale: factor that multiplies the loss before its backward and divides the gradients in the update. If
        gradients overflow, `"dynamic"` (the default for `float16`) halves it and skips that update.
      plan: a plan, or the path of its JSON file, instead of a policy.
      policy: name of the policy that chooses the plan, such as `"exact"`, `"memferry"` or `"auto"`. None makes every
        layer GFGB; layers switch to RELOAD until the step fits into the memory budget.
      profile: the profile that the policy plans with, or the path of its JSON file. None measures one on the device for
        policies that need times, and keeps the measurements in the user's cache folder (`JAXFERRY_CACHE_DIR` names
        another, or "off"). `"measure"` measures for any policy; `"estimate"` runs nothing and uses a roofline model.
        With `mesh`, one device runs its share of the batch, and all devices time what they exchange; a loss function
        that names the mesh cannot be measured so.
      remat: what segments keep on the device between forward and backward. `"none"`: everything that their derivatives
        need. `"full"`: only their inputs; the backward runs the forward again. A policy, such as
        `jax.checkpoint_policies.dots_saveable`: what it names. `"auto"`: policy `"auto"` chooses between none and full;
        if the step does not fit into the memory budget even with every layer RELOAD, segments recompute as well. Or one
        of these for each segment: a mapping from names of segments or layers (`"none"` for the others), or a function
        of the segment's name. Segments that recompute in `plan` always do.
      offload_activations: whether values that cross segments, and that a backward reads, wait for it in pinned host
        memory. Not with `remat="auto"`. These are segments' inputs and outputs, not the residuals within a segment;
        with `remat="full"` there are no such residuals. A value leaves the device after the last forward that reads it
        and returns while the program before its first backward runs. Values whose backward is fewer than four programs
        later stay, as do those below 1 KiB. The device then holds the values of a few segments, however deep the model
        is, and each value crosses the link twice. Results are bit-identical.
      skip_nonfinite: skip updates whose loss or gradients are not finite; the state stays unchanged. By default a
        non-finite loss raises `NonFiniteError` (the state stays unchanged as well).
      check_gradients: whether a non-finite gradient raises `NonFiniteError` before its update, as a loss does. True:
        always; updates then wait for all gradients. None: where they wait for the gradients' norm anyway, which is with
        `clip_norm` and `accumulate`; elsewhere the update is applied, with a warning. False: never, for optimizers that
        handle such gradients (`optax.zero_nans`).
      device: the device to train on; by default JAX's first.
      mesh: the devices that share each batch, such as `jax.make_mesh((8,), ("data",))`, in place of `device`: all of
        this process, with automatic or explicit axes. The batch's first axis is split over them; the loss and its
        gradients are those of the whole batch, as in a `jax.jit` with a sharded batch. Each device loads a share of
        every layer over its own link and gathers the others' from the devices; a share of each gradient leaves over
        each link. Updates are on the host, or on the devices where the optimizer state of their groups stays.
      transport: `"ferry"`: the native library moves layers and gradients on its own queues and computes in host memory
        (the default if it is built and no parameter is trained in float64). `"device_put"`: plain JAX does both by
        copies; results are the same except for the order in which products in host memory are summed.
      record_steps: number of last steps whose task times `TrainStep.recorded` returns; 0 records nothing and costs
        nothing.
      cached_shapes: number of batch structures (shapes, dtypes, flags) whose plans and programs are kept. A further one
        frees those of the structure that was used longest ago, and warns once: a batch of a freed structure is planned
        and compiled again. Evaluations count apart.
      merge_small: whether neighbouring layers become one where a step would take longer to issue than to run, by a
        roofline model of a known GPU. No merged layer holds more than an eighth of the parameters, and layers stay
        apart if the memory budget asks for it. Layers of a given plan or profile are merged as named there: `a+b`.
      granularity: how fine layers are, the units that plans load, read in host memory and update. `"block"`: all
        parameters between two cuts, such as a transformer block. `"module"`: the matrices of each module, and all norms
        and biases of a block together, so that a plan can read these in place while it loads the matrices, and no copy
        is larger than a module's. `"auto"`: modules where the policy's plan is then faster by a roofline model, with
        the time that more copies take to issue, or where blocks do not fit; with a given plan or profile, whichever it
        names. Programs are the same, so results are equal up to the rounding of gradients' sums. For one granularity,
        plans that load their matrices and update on the host give the same bits. Products with matrices in host memory
        (DHA, the forward of DFGB), large gradients of GO and updates on the device are summed in another order, so
        results then agree within the dtype's rounding. Small modules are not merged.

    Raises:
      InputError: if an argument is invalid.
    """
    if not callable(loss_fn):
        raise InputError(f"loss_fn must be a function of (params, batch), got {loss_fn!r}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(f"optimizer must be an Optax GradientTransformation, got {optimizer!r}")
    options = read_options(
        memory_budget=memory_budget,
        reserve_factor=reserve_factor,
        clip_norm=clip_norm,
        compute_dtype=compute_dtype,
        plan=plan,
        policy=policy,
        profile=profile,
        remat=remat,
        offload_activations=offload_activations,
        skip_nonfinite=skip_nonfinite,
        check_gradients=check_gradients,
        record_steps=record_steps,
        accumulate=accumulate,
        loss_scale=loss_scale,
        trainable=trainable,
        cached_shapes=cached_shapes,
        merge_small=merge_small,
        granularity=granularity,
    )
    return TrainStep(loss_fn, optimizer, options, make_placement(device, mesh), transport)


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
        options = options.on(self._placement.memory_facts().get("memory_limit_bytes"))
        self._loss_fn, self._optax, self._options = loss_fn, optimizer, options
        with own_settings():
            choose_transport(transport, self._placement)
            self._shared = Shared(self._placement, options)
        self._compiler: Compiler | None = None
        self._newest: weakref.ref[TrainState] | None = None
        self._saves = checkpoint.BackgroundSaves()

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
            return self._made(
                compiler.model.new_state(compiler.model.masters(leaves), compiler.layers, owner=self.owner)
            )

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
            compiler = self._adopt(result_shapes(init_fn, rng))
            compiler.model.check_host_memory()
            if self._placement.num_processes > 1:
                check_same_values("their PRNG keys", jax.tree.leaves(rng))
            masters = masters_layer_by_layer(init_fn, rng, compiler.model.layers, self._placement)
            return self._made(compiler.model.new_state(masters, compiler.layers, owner=self.owner))

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
          state: from `init`, `init_from`, `restore` or the last step. It is updated in place and returned, so another
            name for it changes as well; `state.copy()` keeps a state.
          *args: the loss function's arguments after the parameters, usually one batch.
          **kwargs: keyword arguments of the loss function, such as a PRNG key for dropout. Booleans, strings and None
            are static: each combination is compiled once.

        Returns:
          The state, and metrics: `loss`; `grad_norm` (of the mean gradient of all trained parameters, before clipping;
          with `accumulate` only for the last micro-batch before an update); `skipped` (whether the update was skipped,
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
        with self.owner.using("TrainStep.__call__"), PROGRESS.call():
            prepared = self._arranged(state, args, kwargs)
            state.fill()
            number = state.step
            result = prepared.runner.step(state, _leaves(args, kwargs))
            return state, self._metrics(number, prepared.partition, result)

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Partitions, plans and compiles for arguments of this structure; results are cached.

        The first call of the step does this by itself; an earlier call only chooses the time. On an accelerator,
        a thread meanwhile makes what the first step of the newest state needs in pinned memory.

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
            return self._adopt(params).measure(*self._of_all(args, kwargs))

    def compile_updates(self, state: TrainState, *args: Any, **kwargs: Any) -> None:
        """Compiles the step and the host updates ahead of the first step.

        Args:
          state: the training state; it is rearranged into the layers of the partition.
          *args: the step's arguments; arrays or shape structs.
          **kwargs: likewise.
        """
        with self.owner.using("TrainStep.compile_updates"):
            self._arranged(state, args, kwargs)

    def _of_all(self, args: Any, kwargs: Any) -> Any:
        """The arguments with the shapes that they have in all processes together."""
        num = self._placement.num_processes
        return (args, kwargs) if num == 1 else jax.tree.map(lambda leaf: global_shape(leaf, num), (args, kwargs))

    def _prepared(self, state: TrainState | None, args: Any, kwargs: Any) -> Prepared:
        """The prepared step; see `Compiler.prepare`."""
        is_known = state is not None and state.optimizer is self.compiler.model.optimizer and state.damage is None
        of_all: tuple[Any, Any] = self._of_all(args, kwargs)
        return self.compiler.prepare(*of_all, state if is_known else None)

    def _made(self, state: TrainState) -> TrainState:
        """Notes a new state, which `prepare` is likely to be for."""
        self._newest = weakref.ref(state)
        return state

    def _arranged(self, state: TrainState, args: Any, kwargs: Any) -> Prepared:
        self._check(state)
        prepared = self._prepared(state, args, kwargs)
        state.arrange(prepared.partition.layers)
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
        return self.apply(state, self._loss_fn, *args, **kwargs)

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
        with self.owner.using("TrainStep.apply"), PROGRESS.call():
            self._check(state)
            compiler = self.compiler
            evaluator = compiler.evaluator(function, *self._of_all(args, kwargs))
            self._shared.prefetch.clear()
            state.settle()
            state.arrange(evaluator.partition.layers)
            state.fill()
            graphs = [prepared.partition.graph for prepared in compiler.prepared]
            held_bytes = sum(graph.held_bytes(*graph.constants) for graph in graphs)
            return evaluator.run(state, _leaves(args, kwargs), held_bytes)

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
        return tuple(
            dataclasses.replace(run, starts_s=tuple(own[0]), ends_s=tuple(own[1])) for own in place.merged(times)
        )

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
            written, the copy takes as much host memory as the master parameters and the optimizer state. Where there is
            no room for it, a warning says so, and the call waits as with True. At most one save is in progress: the
            next one waits for it. `wait_for_saves`, the next save, and the end of the process wait for it too. The
            first two raise its error; at the end of the process it is printed.
          keep_last: None writes the checkpoint to `path` itself. A number writes it into `path`, under the number of
            the step, and keeps the checkpoints that were saved last, this many. `restore(path)` reads the newest one,
            `jaxferry.list_checkpoints(path)` lists them.
          keep_best: with `keep_last`, the number of checkpoints with the lowest metric that are kept as well.
          metric: a number that is saved with the state, the lower the better, such as a validation loss.
          extra: arrays of the user's own, by name, that are saved with the state; `restore` returns them as
            `state.extra`.

        Raises:
          CheckpointError: if `path` is remote, exists and is not a checkpoint, or cannot be written; or if the last
            save with `wait=False` failed, in which case this one has not begun.
          HostMemoryError: if layers are updated on the device and host memory cannot hold a copy of their state.
          InputError: if another argument is invalid.

        Warns:
          UserWarning: if `wait=False` waits, since host memory cannot hold a copy of the state.
        """
        with self.owner.using("TrainStep.save"):
            self._check(state)
            self.wait_for_saves()
            if keep_last is None and keep_best:
                raise InputError(
                    f"keep_best needs keep_last, the number of checkpoints to keep anyway, got {keep_best}"
                )
            keep = None if keep_last is None else checkpoint.Keep(keep_last, keep_best)
            # The working folder may be another one while a thread writes.
            target = checkpoint.local_path(path)
            own = checkpoint.check_extra({} if extra is None else extra)
            metric = checkpoint.check_metric(metric)
            messages = messages_of("save", self._placement.process, self._placement.num_processes)
            if not wait and messages is None:
                checkpoint.check_target(target, state.updated_step, keep)
            copied = None if wait else self._copied(state, own, metric)
            saved = self._content(*state.stored(), state, own, metric) if copied is None else copied

            def write() -> None:
                checkpoint.save(saved, target, keep, messages)
                state.checkpoint = os.fspath(path)

            if copied is None or not self._saves.start(write):
                write()

    def _content(
        self, masters: Any, optimizer: Any, state: TrainState, extra: Mapping[str, Any], metric: float | None
    ) -> checkpoint.Checkpoint:
        """The content of a checkpoint of these arrays of a state."""
        params, scale = self.compiler.model.params, state.loss_scale
        return checkpoint.Checkpoint(
            step=state.updated_step,
            params=dict(zip(path_names(params), masters, strict=True)),
            dtypes=[str(leaf.dtype) for leaf in jax.tree.leaves(params)],
            dictionary_paths=checkpoint.dictionary_paths(params),
            optimizer=optimizer,
            loss_scale=[scale.value, scale.num_finite] if scale.is_dynamic else None,
            extra=extra,
            metric=metric,
        )

    def _copied(
        self, state: TrainState, extra: Mapping[str, Any], metric: float | None
    ) -> checkpoint.Checkpoint | None:
        """A copy of a state for a save in the background; None, with a warning, if host memory cannot hold it."""
        try:
            masters, optimizer = state.stored(copied=True)
            own = {name: np.array(array) for name, array in extra.items()}
        except MemoryError as error:
            what = str(error) or "host memory is full"
            warnings.warn(f"save(wait=False) waits until the state is written: {what}", stacklevel=3)
            return None
        return self._content(masters, optimizer, state, own, metric)

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
            try:
                state = checkpoint.load(path, lambda saved: self._restored(saved, params, known))
            except JaxFerryError:
                # A state in training keeps its model.
                self._compiler = known
                raise
            state.checkpoint = os.fspath(path)
            return state

    def _restored(self, saved: checkpoint.Checkpoint, params: Any, known: Compiler | None) -> TrainState:
        """Reads a checkpoint into a new state."""
        if params is None:
            params = saved.dictionary() if known is None else known.model.params
        model = self._adopt(params).model
        expected = dict(zip(path_names(model.params), jax.tree.leaves(model.params), strict=True))
        checkpoint.check_coded(saved.params, saved.dtypes, expected, model.optimizer.avals)
        stored = {name: stored_struct(leaf) for name, leaf in expected.items()}
        checkpoint.check_matches("model", saved.params, stored)
        checkpoint.check_transformations(saved.optimizer, model.optimizer.state_shapes(), expected)
        checkpoint.check_matches("optimizer", saved.optimizer, model.optimizer.state_shapes(), check_dtypes=True)
        model.check_host_memory()
        masters = model.masters([saved.params[name] for name in expected])
        optimizer = model.optimizer_state(saved.optimizer)
        state = self._made(model.new_state(masters, self.compiler.layers, optimizer, saved.step, owner=self.owner))
        if saved.loss_scale is not None and state.loss_scale.is_dynamic:
            value, num_finite = saved.loss_scale
            state.loss_scale = LossScale(float(value), num_finite=int(num_finite))
        state.extra = {name: leaf.read() for name, leaf in saved.extra.items()}
        return state

    def _adopt(self, params: Any) -> Compiler:
        """Returns the compiler for a model's tree: the current one if the tree is the same, else a new one."""
        self._shared.owner.check()
        if self._compiler is None or self._compiler.model.params != abstract(params):
            model = Model(params, self._optax, self._options, self._placement, self._wanted_transport)
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

    def _metrics(self, number: int, parts: Partition, result: StepResult) -> dict[str, Any]:
        is_lost = not result.is_finite and not self._options.skip_nonfinite
        scale = self._options.loss_scale
        if is_lost and scale is not None and scale.is_dynamic and result.loss_scale > 1:
            is_lost = False  # the next step has a smaller scale
        if is_lost:
            raise self._nonfinite(number, parts, result)
        if result.is_applied and result.nonfinite_gradient is not None and self._options.check_gradients is None:
            warnings.warn(
                f"step {number} has applied gradients that are not finite (layer {result.nonfinite_gradient!r}): "
                "check_gradients=True raises an error before the update, skip_nonfinite=True skips it",
                stacklevel=3,
            )
        metrics: dict[str, Any] = {
            "loss": result.loss,
            "device_param_bytes_peak": result.device_param_bytes_peak,
        }
        if scale is not None:
            metrics["loss_scale"] = result.loss_scale
        if self._options.skip_nonfinite or (scale is not None and scale.is_dynamic):
            metrics["skipped"] = not result.is_finite
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        if parts.aux_tree is not None:
            metrics["aux"] = jax.tree.unflatten(parts.aux_tree, result.aux)
        return metrics

    def _nonfinite(self, number: int, parts: Partition, result: StepResult) -> NonFiniteError:
        """The error for a step whose loss or gradients are not finite."""
        loss, finite = np.asarray(result.loss), [bool(flag) for flag in result.finite]
        layer = parts.segments[finite.index(False)].name if False in finite else result.nonfinite_gradient
        what = f"the loss of step {number} is {loss}; the first layer with a non-finite output is {layer!r}"
        if np.isfinite(loss) and result.nonfinite_gradient is not None:
            layer = result.nonfinite_gradient
            what = f"the loss of step {number} is {loss}, but the gradient of layer {layer!r} is not finite"
        left = "before the step" if self._options.accumulate == 1 else "after the last update"
        told = f"{what}; the state is that {left} (skip_nonfinite=True skips such steps)"
        return NonFiniteError(told, number, layer)


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves((args, split_flags(kwargs)[0]))
