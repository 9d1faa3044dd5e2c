"""The public entry: `train_step` turns a loss function and an Optax optimizer into an offloaded training step.

step = train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.compile import Compiler, Prepared, Shared
from jaxferry.engine import (
    LossScale,
    StepResult,
    TrainState,
    checkpoint,
    choose_transport,
    make_placement,
    masters_layer_by_layer,
)
from jaxferry.engine.host.subtree import path_names
from jaxferry.errors import InputError, JaxFerryError, NonFiniteError, StateError
from jaxferry.model import Model, abstract
from jaxferry.options import Options, read_options
from jaxferry.partition import Partition, Trainable
from jaxferry.plan.records import Plan
from jaxferry.profiling.records import Profile
from jaxferry.schedule import Run
from jaxferry.structure import split_flags

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
        self._placement, self._wanted_transport = make_placement(device), transport
        choose_transport(transport, self._placement)
        self._shared = Shared(self._placement, options)
        self._compiler: Compiler | None = None

    def init(self, params: Any) -> TrainState:
        """Copies parameters into host memory and makes the optimizer's state there, layer by layer.

        Args:
          params: the model's tree of parameters: NumPy or JAX arrays of a real floating-point dtype. They are copied.
            Leaves may also be read only now, one after the other: anything with `shape` and `dtype` that `np.asarray`
            reads, and piece by piece the tensors of `jaxferry.pretrained`.

        Raises:
          InputError: if a parameter is not real floating point.
        """
        compiler = self._adopt(params)
        return compiler.model.new_state(compiler.model.masters(jax.tree.leaves(params)), compiler.layers)

    def init_from(self, init_fn: Callable[[Any], Any], rng: Any) -> TrainState:
        """Initialises a model that exists nowhere whole: `init_fn(rng)` is run layer by layer on the CPU.

        Args:
          init_fn: returns the tree of parameters, for instance `lambda rng: model.init(rng, tokens)["params"]`.
          rng: its argument: a PRNG key or a tree of arrays.
        """
        compiler = self._adopt(jax.eval_shape(init_fn, rng))
        masters = masters_layer_by_layer(init_fn, rng, compiler.model.layers, self._placement)
        return compiler.model.new_state(masters, compiler.layers)

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
        result = prepared.runner.step(state, _leaves(args, kwargs))
        return state, self._metrics(number, prepared.partition, result)

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Partitions, plans and compiles for arguments of this structure, or finds what was made before.

        The first call of the step does it by itself; calling it earlier only chooses the time.

        Args:
          *args: as the step is called with; arrays or shape structs.
          **kwargs: likewise.
        """
        return self.compiler.prepare(args, kwargs)

    def measure(self, params: Any, *args: Any, **kwargs: Any) -> Profile:
        """Measures what each layer costs on the device, as a policy plans with it; to be saved, or looked at.

        What is in the cache (`JAXFERRY_CACHE_DIR`) is not measured again.

        Args:
          params: the model's tree of parameters; shapes are enough.
          *args: as the step is called with; arrays or shape structs.
          **kwargs: likewise.
        """
        return self._adopt(params).measure(args, kwargs)

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
        prepared.runner.compile_updates(state)
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
        compiler = self.compiler
        evaluator = compiler.evaluator(function, args, kwargs)
        self._shared.prefetch.take(None)
        state.settle()
        state.arrange(evaluator.partition.layers)
        state.fill()
        graphs = [prepared.partition.graph for prepared in compiler.prepared]
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
        return None if self._shared.recorder is None else self._shared.recorder.run()

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
        params = self.compiler.model.params
        saved = checkpoint.Checkpoint(
            step=state.updated_step,
            params=dict(zip(path_names(params), state.masters(), strict=True)),
            dtypes=[str(leaf.dtype) for leaf in jax.tree.leaves(params)],
            dictionary_paths=checkpoint.dictionary_paths(params),
            optimizer=state.stored_optimizer_state(),
            loss_scale=[state.loss_scale.value, state.loss_scale.num_finite] if state.loss_scale.is_dynamic else None,
        )
        checkpoint.save(saved, os.fspath(path))
        state.checkpoint = os.fspath(path)

    def restore(self, path: str | os.PathLike[str], params: Any = None) -> TrainState:
        """Reads a checkpoint; training goes on from it bit-identically.

        Args:
          path: the folder.
          params: a tree of the model's structure (shapes are enough), against which the checkpoint is checked. It may
            be left out if this step has been initialised before, or if the tree consists of dictionaries.

        Raises:
          CheckpointError: if there is no checkpoint, or it does not match model or optimizer.
        """
        saved, known = checkpoint.load(os.fspath(path)), self._compiler
        if params is None:
            params = saved.dictionary() if known is None else known.model.params
        try:
            state = self._restored(saved, params)
        except JaxFerryError:
            # A state that is being trained goes on with the model that it has.
            self._compiler = known
            raise
        state.checkpoint = os.fspath(path)
        return state

    def _restored(self, saved: checkpoint.Checkpoint, params: Any) -> TrainState:
        compiler = self._adopt(params)
        model = compiler.model
        names = path_names(model.params)
        expected = dict(zip(names, jax.tree.leaves(model.params), strict=True))
        checkpoint.check_matches("model", saved.params, expected)
        checkpoint.check_matches("optimizer", saved.optimizer, model.optimizer.state_shapes(), check_dtypes=True)
        where = self._placement.host
        optimizer = {name: jax.device_put(leaf, where, may_alias=False) for name, leaf in saved.optimizer.items()}
        masters = model.masters([saved.params[name] for name in names])
        state = model.new_state(masters, compiler.layers, optimizer, saved.step)
        if saved.loss_scale is not None and state.loss_scale.is_dynamic:
            value, num_finite = saved.loss_scale
            state.loss_scale = LossScale(float(value), num_finite=int(num_finite))
        return state

    def _adopt(self, params: Any) -> Compiler:
        """The compiler for a model's tree; a new one if the tree differs from the one before."""
        if self._compiler is None or self._compiler.model.params != abstract(params):
            model = Model(params, self._optax, self._options, self._placement, self._wanted_transport)
            self._compiler = Compiler(model, self._loss_fn, self._options, self._shared)
        return self._compiler

    @property
    def compiler(self) -> Compiler:
        """What prepares steps and evaluations of the model.

        Raises:
          StateError: if there is no model yet.
        """
        if self._compiler is None:
            raise StateError("this step has no model yet: call init, init_from or restore first")
        return self._compiler

    def _check(self, state: TrainState) -> None:
        if not isinstance(state, TrainState):
            raise StateError(f"state must come from this step's init, init_from or restore, got {type(state).__name__}")
        if state.optimizer is not self.compiler.model.optimizer:
            raise StateError("this state belongs to another model or training step: restore it from a checkpoint")
        state.check()

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


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves((args, split_flags(kwargs)[0]))
