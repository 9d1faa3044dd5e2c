"""Fine-tunes openpi's pi0 with parameters in host memory: python examples/pi0/train.py pi0_libero --help

Needs openpi (https://github.com/Physical-Intelligence/openpi), whose configuration, model, weights, data and learning
rates it takes. Weights and activations are bfloat16 on the device; parameters and AdamW's moments stay float32, on the
host.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer
from flax import nnx, traverse_util

sys.path.append(str(Path(__file__).resolve().parents[2]))

import jaxferry
from examples.common import command_line
from examples.common.training import Run, console, count_parameters
from jaxferry.errors import InputError

app = command_line.make_app()


@app.command(help="Fine-tunes openpi's pi0, with parameters and optimizer state in host memory.")
def train(
    config: Annotated[str, typer.Argument(help="The name of openpi's configuration, such as pi0_libero.")],
    steps: Annotated[
        int | None, typer.Option(min=0, help="Train up to this step; default: the configuration's.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per batch; default: the configuration's.")] = None,
    policy: command_line.Policy = "auto",
    memory_budget: command_line.MemoryBudget = None,
    metrics: command_line.Metrics = None,
    save: command_line.Save = None,
    save_every: command_line.SaveEvery = 0,
    keep_last: command_line.KeepLast = None,
    resume: command_line.Resume = None,
    export: Annotated[
        Path | None, typer.Option(help="Write bfloat16 weights to this folder in openpi's format.")
    ] = None,
) -> int:
    found = find(config, batch)
    from openpi.training import data_loader

    run = start(
        found.model.create,
        make_optimizer(found.optimizer, found.lr_schedule),
        iter(data_loader.create_data_loader(found, shuffle=True)),
        found.batch_size,
        found.seed,
        clip_norm=found.optimizer.clip_gradient_norm,
        trainable=trained_by(found),
        load=loader_of(found),
        resume=resume,
        policy=policy,
        memory_budget=memory_budget,
    )
    console.print(f"{config} with {count_parameters(make_init(found.model.create)):,} parameters")
    status = run.finish(found.num_train_steps if steps is None else steps, metrics, save, save_every, keep_last)
    if status == 0 and export:
        save_params(export, run.state)
    return status


def start(create, optimizer, batches, batch_size, seed=0, load=None, resume=None, **options):
    """Starts a training run.

    Args:
      create: makes an NNX model with openpi's `compute_loss` from a key.
      optimizer: any Optax transformation.
      batches: yields (observation, actions).
      batch_size: their rows.
      seed: of new parameters, noise and times.
      load: returns the dictionary of pretrained parameters for that of the model's; None makes new ones.
      resume: a saved state to continue, instead of `load`.
      **options: those of `jaxferry.train_step`.
    """
    step = jaxferry.train_step(make_loss(create), optimizer, **options)
    init_fn, key = make_init(create), jax.random.key(seed)

    def batch_of(number):
        observation, actions = next(batches)
        return {"observation": observation, "actions": actions, "key": jax.random.fold_in(key, number)}

    run = Training(step, batch_of, batch_of, batch_size, "rows")
    run.start(init_fn, seed, resume, None if load is None or resume else loaded(init_fn, load))
    return run


class Training(Run):
    """A run without validation: openpi keeps no data for it."""

    def validate(self):
        pass


def make_loss(create):
    """Returns the loss function of a model's parameters and a batch: the mean of `compute_loss`."""
    graph, _, others = nnx.split(nnx.eval_shape(create, jax.random.key(0)), nnx.Param, ...)
    assert not jax.tree.leaves(others), "a model with other state than parameters"

    def loss_fn(params, batch):
        model = nnx.merge(graph, params, others)
        model.train()
        return jnp.mean(model.compute_loss(batch["key"], batch["observation"], batch["actions"], train=True))

    return loss_fn


def make_init(create):
    """Returns the function that initialises parameters from a key."""
    return lambda key: nnx.state(create(key), nnx.Param)


def make_optimizer(optimizer, schedule):
    """Makes openpi's AdamW without its clipping: `clip_norm=` clips exactly, and updates stay separate by layer."""
    names = ("b1", "b2", "eps", "weight_decay")
    if not all(hasattr(optimizer, name) for name in names):
        raise InputError(f"the configuration's optimizer must be AdamW, got {type(optimizer).__name__}")
    return jaxferry.adamw(schedule.create(), **{name: getattr(optimizer, name) for name in names})


def trained_by(config):
    """Returns whether a configuration trains the parameter of a path, such as "PaliGemma/img/head/bias"."""
    is_frozen = nnx.filterlib.to_predicate(config.freeze_filter)
    return lambda path: not is_frozen(tuple(path.split("/")), None)


def loader_of(config):
    """Returns what loads a configuration's weights.

    It reads checkpoints itself: openpi's reader fails with the Orbax that JaxFerry needs.
    """
    if (path := getattr(config.weight_loader, "params_path", None)) is None:
        return config.weight_loader.load
    from openpi.shared import download

    return lambda shapes: read_params(download.maybe_download(path))


def read_params(folder):
    """Returns the parameters of a checkpoint of openpi's, as dictionaries of NumPy arrays."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        params = traverse_util.flatten_dict(checkpointer.restore(folder, restore_args=kinds)["params"])
    # States of NNX are saved with one more level.
    own = {path[:-1] if path[-1] == "value" else path: array for path, array in params.items()}
    return traverse_util.unflatten_dict(own)


def loaded(init_fn, load):
    """The pretrained parameters; each is dropped once it is read, so that host memory holds none twice.

    None if there are none.
    """
    state = jax.eval_shape(init_fn, jax.random.key(0))
    shapes = state.to_pure_dict()
    arrays = load(shapes)
    missing = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)]
    if all(missing):
        return None
    if any(missing) or jax.tree.map(np.shape, arrays) != jax.tree.map(np.shape, shapes):
        raise InputError("the configuration's weights are not those of all parameters: load a whole model, as pi0_base")
    state.replace_by_pure_dict(jax.tree.map(Dropped, arrays))
    return state


class Dropped:
    """An array that can be read once."""

    def __init__(self, array):
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __array__(self, dtype=None, copy=None):
        array, self._array = self._array, None
        return np.asarray(array, dtype)


def save_params(folder, state):
    """Writes the parameters where openpi's policies read them: `folder`/params."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), state.lazy_params)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / "params", {"params": params.to_pure_dict()})


def workload(batch_size=32):
    """pi0's full fine-tune for the commands of JaxFerry: `jaxferry fit examples/pi0/train.py:workload`."""
    model = find("pi0_libero").model
    observation, actions = model.inputs_spec(batch_size=batch_size)
    batch = {"observation": observation, "actions": actions, "key": jax.random.key(0)}
    return make_loss(model.create), make_init(model.create), batch


def find(name, batch=None):
    """Returns openpi's configuration of this name."""
    try:
        from openpi.training import config
    except ImportError as error:
        raise InputError(f"openpi is not installed, see docs/how-to/pi0.md: {error}") from error
    found = config.get_config(name)
    return found if batch is None else dataclasses.replace(found, batch_size=batch)


def main(args=None):
    """Runs the command line; returns its exit status: 0, 2 for bad input, or 130 for an interrupt."""
    return command_line.run(app, args)


if __name__ == "__main__":
    sys.exit(main())
