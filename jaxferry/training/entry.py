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
import optax

from jaxferry.costs import Profile
from jaxferry.errors import InputError, internal_errors
from jaxferry.modes import BLOCK
from jaxferry.partition import AUTO, Trainable
from jaxferry.step import Plan
from jaxferry.training.options import CACHED_SHAPES, read_options
from jaxferry.training.trainer import TrainStep
from jaxferry.transport import make_placement

__all__ = ["TrainStep", "train_step"]


@internal_errors()
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    trainable: Trainable | None = None,
    memory_budget: int | str | None = None,
    reserve_factor: float | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    weight: str | None = None,
    extra_args: Mapping[str, Any] | None = None,
    compute_dtype: Any = None,
    loss_scale: float | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    policy: str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    remat: Any = "none",
    tiles: Any = "off",
    offload_activations: bool | str = False,
    gradient_buffers: int | str = AUTO,
    scratch: str | os.PathLike[str] | None = None,
    host_memory: int | str | None = None,
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
      weight: name of the entry of the loss function's `aux` that weighs its micro-batch, a scalar such as the number of
        valid tokens. With `accumulate`, the update then applies the gradient of the weighted mean of the losses,
        `sum(weight * loss) / sum(weight)`; clipping and `grad_norm` are of that gradient. The weight itself
        has no gradient. None weighs all alike.
      extra_args: the optimizer's own extra arguments beside the loss, by name, with a value for steps that pass none:
        numbers, arrays or trees of them. A step takes others of these shapes by `extra_args=`. An optimizer that reads
        the loss (`value=`, as `optax.contrib.reduce_on_plateau` does) is given that of the step, with `accumulate` the
        mean of the micro-batches, in fp32 at least, unless `"value"` is named here. Several processes pass equal ones.
      compute_dtype: dtype of the parameters on the device, such as `jnp.float16`. By default `bfloat16` on accelerators
        for models in float32, otherwise the parameters' own.
      loss_scale: factor that multiplies the loss before its backward and divides the gradients in the update. If
        gradients overflow, `"dynamic"` (the default for `float16`) halves it and skips that update.
      plan: a plan, or the path of its JSON file, instead of a policy.
      policy: name of the policy that chooses the plan, such as `"exact"`, `"memferry"` or `"auto"`. None makes every
        layer GFGB; layers switch to RELOAD until the step fits into the memory budget. Batches with half to twice the
        operations of an earlier one take its plan, if it fits, so that no layer moves from batch to batch.
      profile: the profile that the policy plans with, or the path of its JSON file. None measures one on the device for
        policies that need times, and keeps the measurements in the user's cache folder (`JAXFERRY_CACHE_DIR` names
        another, or "off"). `"measure"` measures for any policy; `"estimate"` runs nothing and uses a roofline model.
        Batches with half to twice the operations of a measured one take its times in proportion.
        With `mesh`, one device runs its share of the batch, and all devices time what they exchange; a loss function
        that names the mesh cannot be measured so.
      remat: what segments keep on the device between forward and backward. `"none"`: everything that their derivatives
        need. `"full"`: only their inputs; the backward runs the forward again. `"products"`: also the results of large
        products and of kernels; the backward computes the rest again. A policy, such as
        `jax.checkpoint_policies.dots_saveable`: what it names. `"auto"`: policy `"auto"` chooses among these three; if
        the step does not fit into the memory budget even with every layer RELOAD, segments recompute as well. Or one
        of these for each segment: a mapping from names of segments or layers (`"none"` for the others), or a function
        of the segment's name. Segments that recompute in `plan` always do.
      tiles: in how many tiles along the rows of the batch the programs of segments run. Of logits, attention scores and
        hidden values, only those of a tile then exist at a time, and each segment's weights are loaded once for all.
        `"off"`: one tile, the whole batch, or as a given plan says. `"auto"`: the fewest tiles with which a step is the
        fastest within the memory budget, by estimates for each shape of batches; more if programs turn out to need more
        memory; one tile if there is room for that. A number: for all segments that can be tiled;
        `jaxferry.partition.print_table(step.prepare(batch).partition)` shows the others, with the operation in the way.
        Or a mapping from names of segments or layers to numbers (1 for the others). A tile has one row or more, of each
        device's share with `mesh`; with more tiles than rows they lie along the tokens, and keys and values of
        attention are stored for all of them. Sums over rows are in fp32 at least. Losses and gradients are those of one
        tile up to rounding; dropout draws the same masks. A program in tiles copies the layer that it reads in host
        memory (DHA, DFGB) to the device first, and writes its gradient to the host (GO) once that is whole.
      offload_activations: whether what a backward reads waits for it in pinned host memory: values that cross
        segments, and the residuals within a segment that `remat` keeps. Not with `remat="auto"`. An array leaves the
        device after the last forward that reads it and returns while the program before its first backward runs.
        Arrays whose backward is fewer than four programs later stay, as do those below 1 KiB. The device then holds
        what a few segments keep, however deep the model is, and each array crosses the link twice. Results are
        bit-identical. `"auto"`: policy `"auto"` chooses for each segment, also with `remat="auto"`, and a plan says so.
      gradient_buffers: the most programs of a step (of a block, as a rule) whose gradients are in host memory at one
        time. `"all"`: all of them, each with memory of its own. A number of 1 or more: a backward waits until the
        update has ended that many programs before it, so the host holds fewer bytes; `JAXFERRY_HOST_MEMORY` and errors
        count these. The step takes longer where updates take longer than the backward, and the first step then updates
        as it goes: if it fails, the state is damaged. Not with what lets updates wait for all gradients: `clip_norm`,
        `accumulate`, `skip_nonfinite`, `check_gradients`. `"auto"`: all if host memory holds them, else as many of 32,
        16, 8, 4 or 2 as it holds. Results are bit-identical.
      scratch: a folder on a fast disk, for the masters and the optimizer state that host memory does not hold. They are
        read before each update and written back afterwards, while other layers compute. As few layers as needed have
        their state there. The file has no name and goes with the process. Results are bit-identical. Of several
        processes, each has a file of its own, and all have the same layers there. Not with an optimizer that updates
        all parameters at once.
      host_memory: with `scratch`, what training may take of the process's host memory, such as `"48GiB"`; None for what
        the process may still take.
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
    arguments = dict(locals())
    if not callable(loss_fn):
        raise InputError(f"loss_fn must be a function of (params, batch), got {loss_fn!r}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(f"optimizer must be an Optax GradientTransformation, got a {type(optimizer).__name__}")
    return TrainStep(loss_fn, optimizer, read_options(arguments), make_placement(device, mesh), transport)
