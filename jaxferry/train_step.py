"""The public entry: `train_step` turns a loss function and an Optax optimizer into an offloaded training step.

step = train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.choice import choose_plan, needs_times
from jaxferry.engine import (
    UNSCALED,
    Evaluator,
    Event,
    Executor,
    HostOptimizer,
    LossScale,
    OneAhead,
    Peak,
    Programs,
    Recorder,
    StepResult,
    TrainState,
    Transport,
    Use,
    Variants,
    checkpoint,
    choose_transport,
    fit_plan,
    kept_layers,
    loads_ahead,
    lower_plan,
    make_lanes,
    make_placement,
    make_script,
    make_transport,
    masters_from_arrays,
    masters_layer_by_layer,
    num_kept_backwards,
    onto_sums,
    peak_bytes,
    resident_layers,
    shadow_model,
)
from jaxferry.engine.subtree import path_names
from jaxferry.errors import InputError, JaxFerryError, NonFiniteError, StateError
from jaxferry.measure.profile import measure_profile
from jaxferry.modes import Mode, Remat
from jaxferry.options import MEASURE, Options, read_options
from jaxferry.partition import (
    AUTO,
    ForwardPartition,
    Layer,
    Partition,
    Trainable,
    frozen_leaves,
    layers_by_path,
    partition,
    partition_forward,
)
from jaxferry.plan.records import Plan, Updates
from jaxferry.profiling.progress import progress_bar
from jaxferry.profiling.records import Profile
from jaxferry.schedule import Run, Schedule


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
    device: jax.Device | None = None,
    transport: str | None = None,
    record_steps: int = 8,
) -> TrainStep:
    """Makes a training step whose parameters and optimizer state live in host memory.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar, or `(scalar, aux)`; the arguments beside the
        parameters are those that the step is called with, most often one batch.
      optimizer: any Optax transformation. It is run layer by layer if that gives the same result, else as one update
        after the last gradient, with a warning. Parameters whose update it makes zero whatever happens, and for which
        it keeps nothing (`optax.set_to_zero` under `optax.multi_transform`, say), are frozen: see `trainable`.
      trainable: which parameters are trained: a function of a parameter's path (`lambda path: "lora" in path`), or a
        tree of booleans, of which each may stand for a whole subtree; None for all. The others are frozen: they have no
        gradient, no optimizer state and no update, are not shown to `optimizer`, and keep the dtype in which they are
        given. They are loaded, or read in host memory, like any other. The same as `optax.multi_transform` with
        `optax.set_to_zero` for them.
      memory_budget: device memory, such as `"8GiB"` or a number of bytes; None for no limit.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device until a transfer takes them;
        None for the policy's default, most often 1.
      clip_norm: global norm that gradients are clipped to, exactly; None clips nothing. It is that of the gradients
        that exist: those of trained parameters.
      accumulate: number of steps (micro-batches) whose mean gradient one update takes, as `optax.MultiSteps` does. Sums
        are in the gradients' dtype; they stay on the device where the plan lets gradients stay there and they fit into
        the budget, else they are added up in host memory.
      compute_dtype: dtype in which the device sees the parameters, such as `jnp.float16`. By default `bfloat16` on
        accelerators for models in float32, else the parameters' own.
      loss_scale: what the loss is multiplied by before its backward, and gradients are divided by in the update:
        `"dynamic"` (the default for `float16`) halves it where gradients overflow, and leaves out that update.
      plan: a plan, or the path of its JSON file, in place of a policy.
      policy: name of the policy that chooses the plan, such as `"exact"`, `"memferry"` or `"auto"`; None loads each
        layer once and keeps it until its backward, as long as the memory budget lets it.
      profile: what the policy plans with, or the path of its JSON file. None measures one on the device for policies
        that plan with times, and keeps what was measured in the user's cache folder (`JAXFERRY_CACHE_DIR` names
        another, or "off"). `"measure"` does so for any policy; `"estimate"` runs nothing, and takes the roofline.
      remat: what segments keep on the device between forward and backward. `"none"`: what their derivatives ask for.
        `"full"`: their inputs alone; the backward computes the forward again. A policy, such as
        `jax.checkpoint_policies.dots_saveable`: what it says. `"auto"`: policy `"auto"` chooses between none and full,
        and where not even loading all layers twice fits into the memory budget, segments recompute as well. Or one of
        these for each segment: a mapping of names of segments or layers (`"none"` for the others), or a function of
        the segment's name. Segments of which `plan` says so recompute in any case.
      offload_activations: whether values that cross segments and that a backward reads wait for it in pinned host
        memory: segments' inputs and outputs, not the residuals that a segment keeps within itself, of which
        `remat="full"` leaves none. They leave the device after the last forward that reads them, and come back while
        the program before the first backward that does is running; those whose backward is less than four programs
        later stay, and so do those below 1 KiB. The device then holds the values of a few segments, however deep the
        model is, and each goes over the link twice; no bit changes. Policies plan as if they stayed; the engine's own
        count for `memory_budget`, by which larger batches fit, knows that they do not.
      skip_nonfinite: leave the state as it was and go on where the loss or a gradient is not finite. Otherwise a
        non-finite loss raises `NonFiniteError` (and leaves the state as it was likewise).
      device: the device to train on; by default JAX's first.
      transport: `"ferry"`: the native library moves layers and gradients on queues of its own, and computes in host
        memory (the default where it is built, and no parameter is trained in float64). `"device_put"`: plain JAX does
        both by copies, with the same results but for the order in which products in host memory are summed.
      record_steps: of how many of the last steps `TrainStep.recorded` tells the times of all tasks; 0 keeps nothing.

    Raises:
      InputError: if an argument is not acceptable.
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
        record_steps=record_steps,
        accumulate=accumulate,
        loss_scale=loss_scale,
        trainable=trainable,
    )
    return TrainStep(loss_fn, optimizer, options, device, transport)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What was made for batches of one structure: see `TrainStep.prepare`.

    Attributes:
      partition: the segments.
      plan: what the policy chose.
      modes: the mode of each segment: the plan's, but for what the memory budget turned into RELOAD.
      peak: the most device memory that a step needs.
      num_executables: number of programs compiled for the device.
      schedule: the tasks of a step, as they are run; how long each is expected to take is known if there was a profile.
    """

    partition: Partition
    plan: Plan
    modes: tuple[Mode, ...]
    peak: Peak
    num_executables: int
    schedule: Schedule
    _executor: Executor = dataclasses.field(repr=False)

    @property
    def remat(self) -> tuple[Any, ...]:
        """What each segment keeps between forward and backward: `"none"`, `"full"`, or a policy."""
        return tuple("none" if segment.remat == AUTO else segment.remat for segment in self.partition.segments)


class TrainStep:
    """A training step; made by `train_step`, called as `state, metrics = step(state, batch)`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        options: Options,
        device: jax.Device | None,
        transport: str | None = None,
    ) -> None:
        self._loss_fn, self._optax, self._options = loss_fn, optimizer, options
        self._placement = make_placement(device)
        self._wanted_transport, self._transport = transport, choose_transport(transport, self._placement)
        self._lanes, self._one_ahead = make_lanes(self._placement), OneAhead()
        self._recorder = Recorder(options.record_steps) if options.record_steps else None
        self._params: Any = None
        self._master_dtypes: dict[int, np.dtype] = {}
        self._optimizer: HostOptimizer | None = None
        self._layers: tuple[Layer, ...] | None = None
        self._prepared: dict[Any, Prepared] = {}
        self._evaluators: dict[Any, Evaluator] = {}
        self._transports: dict[tuple[Layer, ...], Transport] = {}
        self._has_warned = False

    def init(self, params: Any) -> TrainState:
        """Copies parameters into host memory and makes the optimizer's state there, layer by layer.

        Args:
          params: the model's tree of parameters: NumPy or JAX arrays of a real floating-point dtype. They are copied.
            Leaves may also be read only now, one after the other: anything with `shape` and `dtype` that `np.asarray`
            reads, and piece by piece the tensors of `jaxferry.pretrained`.

        Raises:
          InputError: if a parameter is not real floating point.
        """
        layers = self._adopt(params)
        return self._new_state(layers, self._masters(jax.tree.leaves(params)))

    def init_from(self, init_fn: Callable[[Any], Any], rng: Any) -> TrainState:
        """Initialises a model that exists nowhere whole: `init_fn(rng)` is run layer by layer on the CPU.

        Args:
          init_fn: returns the tree of parameters, for instance `lambda rng: model.init(rng, tokens)["params"]`.
          rng: its argument: a PRNG key or a tree of arrays.
        """
        layers = self._adopt(jax.eval_shape(init_fn, rng))
        return self._new_state(layers, masters_layer_by_layer(init_fn, rng, layers, self._placement))

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step.

        Args:
          state: from `init`, `init_from`, `restore` or the last step; it is updated in place.
          *args: what the loss function takes beside the parameters, most often one batch.
          **kwargs: keyword arguments of the loss function, such as a PRNG key for dropout. Booleans, strings and None
            are handed through as they are; each combination is compiled once.

        Returns:
          The state, and metrics: `loss`; `grad_norm` (of the mean gradient of all trained parameters, before clipping;
          with `accumulate` only for the last micro-batch before an update); `skipped` (whether `skip_nonfinite` left
          the state as it was); `aux` (what the loss function returned beside the loss, if anything);
          `device_param_bytes_peak` (bytes).

        Raises:
          NonFiniteError: if the loss is not finite, unless `skip_nonfinite`; the state is that before the step, with
            `accumulate` that after the last update.
          BudgetError: if no plan fits into `memory_budget`.
          StateError: if the state is not one of this step's, or damaged.
        """
        prepared = self._arranged(state, args, kwargs)
        state.fill()
        number = state.step
        result = prepared._executor.step(state, _leaves(args, kwargs))
        return state, self._metrics(number, prepared.partition, result)

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Partitions, plans and compiles for arguments of this structure, or finds what was made before.

        The first call of the step does it by itself; calling it earlier only chooses the time.

        Args:
          *args: as the step is called with; arrays or shape structs.
          **kwargs: likewise.
        """
        key = _structure(args, kwargs)
        if key not in self._prepared:
            self._one_ahead.take(None)  # what is measured is not to be disturbed
            self._prepared[key] = self._prepare(args, kwargs)
        return self._prepared[key]

    def measure(self, params: Any, *args: Any, **kwargs: Any) -> Profile:
        """Measures what each layer costs on the device, as a policy plans with it; to be saved, or looked at.

        What is in the cache (`JAXFERRY_CACHE_DIR`) is not measured again.

        Args:
          params: the model's tree of parameters; shapes are enough.
          *args: as the step is called with; arrays or shape structs.
          **kwargs: likewise.
        """
        self._adopt(params)
        self._one_ahead.take(None)
        parts = self._partition(args, kwargs)
        variants = Variants(parts, self._options.remat)
        self._host_optimizer().check_parts(parts.layers)
        is_native = self._transport == "ferry"
        return self._measured(variants, Programs(variants.base, variants.derivatives, self._placement, is_native))

    def compile_updates(self, state: TrainState, *args: Any, **kwargs: Any) -> None:
        """Compiles the host updates too, so that the first step takes no longer than the next.

        Args:
          state: the training state; it is arranged in the layers of the partition.
          *args: as the step is called with; arrays or shape structs.
          **kwargs: likewise.
        """
        self._arranged(state, args, kwargs)

    def _arranged(self, state: TrainState, args: Any, kwargs: Any) -> Prepared:
        self._check(state)
        prepared = self.prepare(*args, **kwargs)
        state.arrange(prepared.partition.layers)
        prepared._executor.compile_updates(state)
        return prepared

    def evaluate(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """What the loss function returns for the current parameters, layer by layer, without derivatives.

        The memory budget holds for it as well.

        Args:
          state: the training state.
          *args: as for the step.
          **kwargs: likewise.

        Raises:
          BudgetError: if it does not fit into `memory_budget`.
        """
        return self.apply(state, self._loss_fn, *args, **kwargs)

    def apply(self, state: TrainState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What any function of the parameters returns for the current ones, layer by layer, without derivatives.

        The function is cut into segments as the loss function is, and run under the same memory budget; for instance
        the logits of a last position, with the keys and values of earlier ones as an argument and a result.

        Args:
          state: the training state.
          function: `function(params, *args, **kwargs)` returns a tree of arrays; it sees the parameters in the compute
            dtype. It is compiled once for each structure of its arguments, as by `jax.jit`: give the same object again.
          *args: arrays, or trees of them.
          **kwargs: likewise; booleans, strings and None are handed through as they are.

        Returns:
          What the function returns, with arrays on the device.

        Raises:
          BudgetError: if it does not fit into `memory_budget`.
          PartitionError: if the function reads no parameter.
        """
        self._check(state)
        evaluator = self._evaluator(function, args, kwargs)
        self._one_ahead.take(None)
        state.settle()
        state.arrange(evaluator.partition.layers)
        state.fill()
        graphs = [prepared.partition.graph for prepared in self._prepared.values()]
        held_bytes = sum(graph.num_bytes(constant) for graph in graphs for constant in graph.constants)
        return evaluator.run(state, _leaves(args, kwargs), held_bytes)

    def recorded(self) -> Run | None:
        """When each task of the last steps started and ended, in seconds from the start of the first of them.

        `jaxferry.simulate.trace.chrome_trace` makes of it a document for Perfetto, as it does of what was predicted.
        None if no step has ended, or `record_steps` is 0. Steps whose updates are under way are left out.

        Where the device is an accelerator, its tasks' times are the device's own. With `transport="ferry"` they are
        those of events on its queues, put on the host's clock to some 10 microseconds; none starts before it was
        issued. With `transport="device_put"`, and for rows of lookups always, threads wait for results: ends are some
        tens of microseconds late, starts are those of the machine model (what a task waited for has ended, and the task
        before in its lane), and a copy that was freed before a thread could wait for it counts as no time. This call
        waits for what the device has left to do of these steps.
        """
        return None if self._recorder is None else self._recorder.run()

    def save(self, state: TrainState, path: str | os.PathLike[str]) -> None:
        """Saves parameters, optimizer state and step number as an Orbax checkpoint; waits for updates in flight.

        With `accumulate` that is the state after the last update: micro-batches since then are not in it, nor counted.

        Args:
          state: the training state.
          path: a folder; a checkpoint that is there already is replaced.

        Raises:
          CheckpointError: if something else is at `path`.
        """
        self._check(state)
        state.settle()
        saved = checkpoint.Checkpoint(
            step=state.updated_step,
            params=dict(zip(path_names(self._params), state.masters(), strict=True)),
            dtypes=[str(leaf.dtype) for leaf in jax.tree.leaves(self._params)],
            dictionary_paths=checkpoint.dictionary_paths(self._params),
            optimizer=state.stored_optimizer_state(),
            loss_scale=[state.loss_scale.value, state.loss_scale.num_finite] if state.loss_scale.is_dynamic else None,
        )
        checkpoint.save(saved, os.fspath(path))

    def restore(self, path: str | os.PathLike[str], params: Any = None) -> TrainState:
        """Reads a checkpoint; training goes on from it bit-identically.

        Args:
          path: the folder.
          params: a tree of the model's structure (shapes are enough), against which the checkpoint is checked. It may
            be left out if this step has been initialised before, or if the tree consists of dictionaries.

        Raises:
          CheckpointError: if there is no checkpoint, or it does not match model or optimizer.
        """
        saved = checkpoint.load(os.fspath(path))
        known = params if params is not None else self._params
        before = dict(vars(self))
        try:
            return self._restored(saved, saved.dictionary() if known is None else known)
        except JaxFerryError:
            # A state that is being trained goes on with the model that it has.
            vars(self).update(before)
            raise

    def _restored(self, saved: checkpoint.Checkpoint, params: Any) -> TrainState:
        layers = self._adopt(params)
        names = path_names(self._params)
        expected = dict(zip(names, jax.tree.leaves(self._params), strict=True))
        checkpoint.check_matches("model", saved.params, expected)
        checkpoint.check_matches("optimizer", saved.optimizer, self._host_optimizer().state_shapes(), check_dtypes=True)
        where = self._placement.host
        optimizer = {name: jax.device_put(leaf, where, may_alias=False) for name, leaf in saved.optimizer.items()}
        state = self._new_state(layers, self._masters([saved.params[name] for name in names]), optimizer, saved.step)
        if saved.loss_scale is not None and state.loss_scale.is_dynamic:
            value, num_finite = saved.loss_scale
            state.loss_scale = LossScale(float(value), num_finite=int(num_finite))
        return state

    def _adopt(self, params: Any) -> tuple[Layer, ...]:
        """Remembers the model's tree; returns the layers that its paths suggest."""
        compute_dtype, hidden = self._compute_dtype(params), frozen_leaves(self._options.trainable, params)
        layers = layers_by_path(params, compute_dtype, hidden)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        if self._optimizer is None or self._params != abstract:
            self._params, self._prepared, self._layers = abstract, {}, None
            self._evaluators, self._transports = {}, {}
            dtypes = _master_dtypes(layers)
            leaves, tree = jax.tree.flatten(abstract)
            masters = [jax.ShapeDtypeStruct(leaf.shape, dtypes[i]) for i, leaf in enumerate(leaves)]
            clip_norm = self._options.clip_norm
            self._optimizer = HostOptimizer(self._optax, tree, masters, self._placement, clip_norm, hidden)
            self._optimizer.check_parts(layers_by_path(params, compute_dtype, self._optimizer.frozen))
        layers = layers_by_path(params, compute_dtype, self._optimizer.frozen)
        self._master_dtypes = _master_dtypes(layers)
        self._transport = choose_transport(self._wanted_transport, self._placement, layers)
        return layers

    def _compute_dtype(self, params: Any) -> Any:
        is_single = all(getattr(leaf, "dtype", None) == np.float32 for leaf in jax.tree.leaves(params))
        by_default = jnp.bfloat16 if self._placement.platform != "cpu" and is_single else None
        return by_default if self._options.compute_dtype is None else self._options.compute_dtype

    def _host_optimizer(self) -> HostOptimizer:
        if self._optimizer is None:
            raise StateError("this step has no model yet: call init, init_from or restore first")
        return self._optimizer

    def _masters(self, leaves: Sequence[Any]) -> list[jax.Array]:
        dtypes = [self._master_dtypes[leaf] for leaf in range(len(leaves))]
        return masters_from_arrays(leaves, dtypes, self._placement)

    def _new_state(
        self,
        layers: Sequence[Layer],
        masters: list[jax.Array],
        optimizer: dict[str, jax.Array] | None = None,
        step: int = 0,
    ) -> TrainState:
        tree = jax.tree.structure(self._params)
        scale = self._options.loss_scale or UNSCALED
        known = self._layers or layers  # what batches have shown before
        return TrainState(tree, self._host_optimizer(), self._placement, known, masters, optimizer, step, scale)

    def _check(self, state: TrainState) -> None:
        if not isinstance(state, TrainState):
            raise StateError(f"state must come from this step's init, init_from or restore, got {type(state).__name__}")
        if state.optimizer is not self._host_optimizer():
            raise StateError("this state belongs to another model or training step: restore it from a checkpoint")
        state.check()

    def _partition(self, args: Any, kwargs: Mapping[str, Any]) -> Partition:
        """The partition for these arguments; the first decides on the layers, the others keep them where they can."""
        arrays, flags = _split(kwargs)
        loss_fn, dtype = functools.partial(self._loss_fn, **flags), self._compute_dtype(self._params)
        known, frozen = self._layers, self._host_optimizer().frozen
        parts = partition(loss_fn, self._params, args, arrays, compute_dtype=dtype, layers=known, frozen=frozen)
        if self._layers is None:
            # What was evaluated before in layers of its own takes over these, so that the state need not change them.
            self._layers, self._evaluators = parts.layers, {}
        return parts

    def _evaluator(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Evaluator:
        key = (function, _structure(args, kwargs))
        if key not in self._evaluators:
            parts = self._forward_partition(function, args, kwargs)
            transport, is_native = self._transport_of(parts.layers), self._transport == "ferry"
            budget = self._options.memory_budget_bytes
            self._evaluators[key] = Evaluator(parts, self._placement, transport, is_native, budget)
        return self._evaluators[key]

    def _forward_partition(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> ForwardPartition:
        if function is self._loss_fn:
            return self._partition(args, kwargs)
        arrays, flags = _split(kwargs)
        function, dtype = functools.partial(function, **flags), self._compute_dtype(self._params)
        frozen = self._host_optimizer().frozen
        return partition_forward(
            function, self._params, args, arrays, compute_dtype=dtype, layers=self._layers, frozen=frozen
        )

    def _transport_of(self, layers: tuple[Layer, ...]) -> Transport:
        """What moves these layers: one for all programs, so that none keeps memory from another."""
        if layers not in self._transports:
            self._transports[layers] = make_transport(self._transport, self._placement, layers)
        return self._transports[layers]

    def _prepare(self, args: Any, kwargs: Any) -> Prepared:
        options = self._options
        parts = self._partition(args, kwargs)
        self._warn_of_remarks(parts)
        variants = Variants(parts, options.remat)
        parts, derivatives = variants.base, variants.derivatives
        self._host_optimizer().check_parts(parts.layers)
        is_native, is_scaled = self._transport == "ferry", options.loss_scale is not None
        programs = Programs(parts, derivatives, self._placement, is_native, is_scaled)
        plan, profile = self._plan(variants, programs)
        is_adapted = options.loss_scale is not None and options.loss_scale.is_dynamic
        # A failure takes sums of earlier micro-batches with it; the state stays whole if nothing was updated before.
        needs_all = options.clip_norm is not None or options.skip_nonfinite or is_adapted or options.accumulate > 1
        if needs_all or not self._host_optimizer().is_by_layer(parts.layers):
            plan = dataclasses.replace(plan, updates=Updates.AFTER_ALL)
        gradients = [layer.gradient for layer in plan.layers]
        transport = self._transport_of(parts.layers)

        def lowered(modes: Sequence[Mode], recomputes: Sequence[bool]) -> Schedule:
            chosen = zip(plan.layers, modes, recomputes, strict=True)
            layers = [
                dataclasses.replace(layer, mode=mode, remat=Remat.FULL if again else Remat.NONE)
                for layer, mode, again in chosen
            ]
            made = dataclasses.replace(plan, layers=tuple(layers))
            return lower_plan(variants.of(recomputes), derivatives, made, profile, options.offload_activations)

        budget = options.memory_budget_bytes
        kept = kept_layers(parts, derivatives, gradients) if options.accumulate > 1 else []

        def uses_of(modes: Sequence[Mode], recomputes: Sequence[bool]) -> list[Use]:
            uses = shadow_model(variants.of(recomputes), derivatives, modes, gradients)
            return [*uses, *onto_sums(uses)] if options.accumulate > 1 else uses

        def scripted(modes: Sequence[Mode], recomputes: Sequence[bool]) -> list[Event]:
            return make_script(variants.of(recomputes), derivatives, modes, gradients, options.offload_activations)

        def peak_with(
            made: Partition,
            schedule: Schedule,
            script: Sequence[Event],
            modes: Sequence[Mode],
            ahead: Sequence[int] = (),
        ) -> Peak:
            other_bytes = transport.staging_bytes + sum(made.layers[layer].trained.num_bytes for layer in kept)
            needs = (programs.temporary_bytes, other_bytes, num_kept_backwards(self._placement), ahead)
            return peak_bytes(made, derivatives, schedule, script, modes, *needs)

        def peak_of(modes: Sequence[Mode], recomputes: Sequence[bool]) -> Peak:
            # What programs need beside their arguments is known once they are compiled.
            programs.require(uses_of(modes, recomputes))
            schedule, script = lowered(modes, recomputes), scripted(modes, recomputes)
            return peak_with(variants.of(recomputes), schedule, script, modes)

        # Sums that stay save transfers that are hidden anyway, so they go before any layer is loaded twice.
        while kept and budget is not None and peak_of(plan.modes, plan.recomputes).total > budget:
            kept.pop()
        modes, recomputes = fit_plan(
            parts, plan.modes, plan.recomputes, variants.largest_first, options.memory_budget_bytes, peak_of
        )
        parts, uses = variants.of(recomputes), uses_of(modes, recomputes)
        programs.require(uses)
        programs.keep(uses)
        schedule, script = lowered(modes, recomputes), scripted(modes, recomputes)
        peak_ahead = functools.partial(peak_with, parts, schedule, script, modes)
        ahead = loads_ahead(schedule, peak_ahead, budget)
        executor = Executor(
            parts,
            programs,
            schedule,
            script,
            resident_layers(parts, modes),
            self._host_optimizer(),
            self._placement,
            transport,
            self._lanes,
            clips=options.clip_norm is not None,
            skip_nonfinite=options.skip_nonfinite,
            checks_gradients=is_adapted,
            recorder=self._recorder,
            accumulate=options.accumulate,
            kept=kept,
            loads_ahead=ahead,
            one_ahead=self._one_ahead,
        )
        return Prepared(parts, plan, tuple(modes), peak_ahead(ahead), programs.num_executables, schedule, executor)

    def _plan(self, variants: Variants, programs: Programs) -> tuple[Plan, Profile | None]:
        options = self._options
        profile = options.profile
        if profile == MEASURE or (profile is None and needs_times(options.policy)):
            profile = self._measured(variants, programs)
        return choose_plan(
            variants.base,
            plan=options.plan,
            policy=options.policy,
            profile=profile if isinstance(profile, Profile) else None,
            device_kind=self._placement.device_kind,
            reserve_factor=options.reserve_factor,
            memory_budget_bytes=options.memory_budget_bytes,
        )

    def _measured(self, variants: Variants, programs: Programs) -> Profile:
        remat = self._options.remat
        with progress_bar("measuring") as progress:
            return measure_profile(
                variants.base,
                programs,
                self._host_optimizer(),
                self._placement,
                self._transport,
                recomputing=variants.of(variants.may_recompute),
                remat=remat if isinstance(remat, str) else "per segment",
                progress=progress,
            )

    def _warn_of_remarks(self, parts: Partition) -> None:
        remarks = list(parts.notes)
        remarks += [f"{merge.message}; that is most of the model" for merge in parts.coarse_merges]
        if parts.unread_leaves:
            unread = ", ".join(map(repr, parts.unread_leaves))
            remarks.append(f"the loss never reads {unread}: trained with a zero gradient")
        for remark in () if self._has_warned else remarks:
            warnings.warn(remark, stacklevel=5)
        self._has_warned = self._has_warned or bool(remarks)

    def _metrics(self, number: int, parts: Partition, result: StepResult) -> dict[str, Any]:
        loss = np.asarray(result.loss)
        is_lost = not result.is_finite and not self._options.skip_nonfinite
        scale = self._options.loss_scale
        if is_lost and scale is not None and scale.is_dynamic and result.loss_scale > 1:
            is_lost = False  # the next one is smaller
        if is_lost:
            finite = [bool(flag) for flag in result.finite]
            layer = parts.segments[finite.index(False)].name if False in finite else None
            left = "before the step" if self._options.accumulate == 1 else "after the last update"
            raise NonFiniteError(
                f"the loss of step {number} is {loss}{', a gradient is not finite' if np.isfinite(loss) else ''}; the "
                f"first layer with a non-finite output is {layer!r}; the state is that {left} "
                "(skip_nonfinite=True skips such steps)",
                number,
                layer,
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


def _master_dtypes(layers: Sequence[Layer]) -> dict[int, np.dtype]:
    return {leaf.index: leaf.master_dtype for layer in layers for leaf in layer.leaves}


def _split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that are traced, and those that Python code decides by: booleans, strings and None."""
    flags = {name: value for name, value in kwargs.items() if value is None or isinstance(value, bool | str)}
    return {name: value for name, value in kwargs.items() if name not in flags}, flags


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves((args, _split(kwargs)[0]))


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf takes the dtype of what it is combined with, as Python's numbers do."""
    return isinstance(leaf, int | float | complex) or bool(getattr(leaf, "weak_type", False))


def _structure(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a partition depends on: the tree, the shapes and dtypes (weak or not) of its leaves, and the flags.

    Raises:
      InputError: if a leaf is traced.
    """
    arrays, flags = _split(kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "a step moves layers between host and device by itself and compiles what it computes: it cannot be called "
            "under jax.jit, jax.grad or another transformation; give it arrays"
        )
    kinds = tuple((np.shape(leaf), jax.dtypes.result_type(leaf), _is_weak(leaf)) for leaf in leaves)
    return structure, kinds, tuple(sorted(flags.items(), key=repr))
