"""Small models that tests train: what users write, in linen and in NNX."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model to train; compared by identity, so that it can be a cache key.

    Attributes:
      loss_fn: `loss_fn(params, batch)`.
      params: initial parameters.
      batch: one batch.
      advance: `advance(batch, aux)` is the batch of the next step; `aux` is what the loss function returned beside the
        loss. None repeats the batch.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    advance: Callable[[Any, Any], Any] | None = None


class Block(nn.Module):
    """A pre-norm transformer block."""

    num_heads: int
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        B, T, C = x.shape
        h = nn.LayerNorm(name="ln_1", dtype=self.dtype)(x)
        qkv = nn.Dense(3 * C, name="attn_qkv", dtype=self.dtype)(h)
        q, k, v = (a.reshape(B, T, self.num_heads, -1).swapaxes(1, 2) for a in jnp.split(qkv, 3, axis=-1))
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, jnp.finfo(scores.dtype).min)
        weights = nn.Dropout(self.dropout)(nn.softmax(scores), deterministic=not train)
        h = (weights @ v).swapaxes(1, 2).reshape(B, T, C)
        x = x + nn.Dropout(self.dropout)(nn.Dense(C, name="attn_proj", dtype=self.dtype)(h), deterministic=not train)
        h = nn.LayerNorm(name="ln_2", dtype=self.dtype)(x)
        h = nn.Dense(C, name="mlp_proj", dtype=self.dtype)(nn.gelu(nn.Dense(4 * C, name="mlp_fc", dtype=self.dtype)(h)))
        return x + nn.Dropout(self.dropout)(h, deterministic=not train)


class Mlp(nn.Module):
    """A residual MLP in place of a transformer block: a fifth of its time to trace and compile.

    It has as many hidden units for each channel as that has heads.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        h = x * self.param("scale", nn.initializers.ones, x.shape[-1:])
        h = jnp.tanh(nn.Dense(self.num_heads * x.shape[-1], name="mlp_fc", dtype=self.dtype)(h))
        h = nn.Dense(x.shape[-1], name="mlp_proj", dtype=self.dtype)(h)
        return x + nn.Dropout(self.dropout)(h, deterministic=not train)


class GPT(nn.Module):
    """A GPT-2 with a tied head."""

    vocab: int = 128
    width: int = 32
    depth: int = 4
    num_heads: int = 4
    dropout: float = 0.0
    dtype: Any = None
    block: Any = Block

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        wte = nn.Embed(self.vocab, self.width, name="wte", dtype=self.dtype)
        wpe = nn.Embed(64, self.width, name="wpe", dtype=self.dtype)
        x = nn.Dropout(self.dropout)(wte(tokens) + wpe(jnp.arange(tokens.shape[1])), deterministic=not train)
        for i in range(self.depth):
            x = self.block(self.num_heads, self.dropout, self.dtype, name=f"h_{i}")(x, train)
        return wte.attend(nn.LayerNorm(name="ln_f", dtype=self.dtype)(x))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


@functools.cache  # steps of one loss function share its partition
def gpt(**config: Any) -> Task:
    """The linen GPT-2 on random tokens; a keyword `rng` of the loss function switches dropout on."""
    model = GPT(**config)

    def loss_fn(params: Any, batch: Any, rng: Any = None) -> jax.Array:
        rngs = None if rng is None else {"dropout": rng}
        logits: Any = model.apply({"params": params}, batch[:, :-1], rng is not None, rngs=rngs)
        return next_token_loss(logits, batch)

    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, model.vocab)
    shapes: Any = jax.eval_shape(model.init, jax.random.key(0), batch[:, :-1])
    return Task(loss_fn, drawn(shapes["params"]), batch)


def mlp(**config: Any) -> Task:
    """The same with MLPs in place of transformer blocks, for tests to which the block makes no difference."""
    return gpt(block=Mlp, **config)


class NnxBlock(nnx.Module):
    """A residual MLP block."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.fc = nnx.Linear(width, 4 * width, rngs=rngs)
        self.proj = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.proj(nnx.relu(self.fc(self.norm(x))))


class NnxNet(nnx.Module):
    """An embedding, residual blocks in a list, and a head."""

    def __init__(self, vocab: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def nnx_net(vocab: int = 64, width: int = 16, depth: int = 3) -> Task:
    """The NNX model, split into graph definition and parameters."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxNet(vocab, width, depth, nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return Task(loss_fn, drawn(shapes), jax.random.randint(jax.random.key(1), (2, 9), 0, vocab))


def drawn(shapes: Any) -> Any:
    """Parameters of these shapes, drawn by NumPy: compiling the initialiser of a model takes seconds."""
    generator = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").rpartition("/")[2]
        if name in ("scale", "bias"):
            return jnp.full(leaf.shape, float(name == "scale"), leaf.dtype)
        spread = leaf.shape[-1 if name == "embedding" else 0] ** -0.5
        return jnp.asarray(generator.normal(scale=spread, size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles one program without optimisation: for initialisers, which run once and are slow to optimise."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def initialise(model: nn.Module) -> Callable[..., Any]:
    """`model.init` as one program."""
    return quickly(model.init)


def split_nnx(model: Any, *filters: Any) -> Any:
    """`nnx.split`: the graph, then the state that each filter takes."""
    return nnx.split(model, *filters)


def initialise_nnx(make: Callable[[], nnx.Module]) -> Any:
    """The module that `make` returns, made by one program."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(make)), quickly(lambda: nnx.state(make()))())


class BlockNet(nn.Module):
    """A language model of residual blocks between a table and a head, with a norm before the head if there is one."""

    block: Any
    depth: int = 3
    table: Any = nn.Embed
    norm: Any = None
    head: Any = nn.Dense
    vocab: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(self.vocab, self.width, name="embed")(tokens)
        for i in range(self.depth):
            x = self.block(name=f"block_{i}")(x)
        return self.head(self.vocab, name="head")(x if self.norm is None else self.norm(name="norm")(x))


def random_tokens(vocab: int = 64, length: int = 9) -> jax.Array:
    """Two rows of tokens."""
    return jax.random.randint(jax.random.key(1), (2, length), 0, vocab)


def language_model(model: nn.Module, vocab: int = 64, length: int = 9) -> Task:
    """A linen model that predicts the next token."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return next_token_loss(logits, batch)

    batch = random_tokens(vocab, length)
    return Task(loss_fn, initialise(model)(jax.random.key(0), batch[:, :-1])["params"], batch)


def nnx_task(make: Callable[[], nnx.Module], batch: Any, loss_of: Callable[[Any, Any], Any] | None = None) -> Task:
    """An NNX model that is all parameters; by default it predicts the next token."""
    graph, params = split_nnx(initialise_nnx(make), nnx.Param)
    own_loss = loss_of or (lambda model, batch: next_token_loss(model(batch[:, :-1]), batch))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return own_loss(nnx.merge(graph, params), batch)

    return Task(loss_fn, params, batch)


def token_loss(model: Any, batch: Any) -> jax.Array:
    """The loss of a model that predicts the next of the batch's tokens."""
    return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"])


def first_columns(model: Any, x: jax.Array) -> jax.Array:
    """The squared error of a model that is to find the first four columns of its input."""
    return ((model(x) - x[:, :4]) ** 2).mean()


def stateful_nnx_task(make: Callable[[], nnx.Module], loss_of: Callable[[Any, Any], Any], batch: Any) -> Task:
    """An NNX model; all its state besides parameters is passed in and returned as aux."""
    graph, params, rest = split_nnx(initialise_nnx(make), nnx.Param, ...)

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, batch["state"], copy=True)
        loss = loss_of(model, batch)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    return Task(loss_fn, params, {**batch, "state": rest}, lambda batch, aux: {**batch, "state": aux})


@functools.cache
def adapters(depth: int = 4, width: int = 16, rank: int = 2, vocab: int = 32) -> Task:
    """A residual net with low-rank adapters beside its kernels, a norm and a tied head, of plain functions."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (0.3 * generator.normal(size=shape)).astype(np.float32)

    def block() -> Any:
        lora = {"a": normal(width, rank), "b": normal(rank, width)}
        return {"kernel": {"w": normal(width, width)}, "lora": lora, "bias": {"b": normal(width)}}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["table"]["w"][batch[:, :-1]]
        for i in range(depth):
            block = params[f"block_{i}"]
            y = x @ block["kernel"]["w"] + (x @ block["lora"]["a"]) @ block["lora"]["b"]
            x = x + jnp.tanh(y + block["bias"]["b"])
        return next_token_loss((x * params["norm"]["scale"]) @ params["table"]["w"].T, batch)

    params: Any = {"table": {"w": normal(vocab, width)}, "norm": {"scale": 1 + normal(width)}}
    params |= {f"block_{i}": block() for i in range(depth)}
    return Task(loss_fn, params, generator.integers(0, vocab, (3, 6)))


def chain(names: Sequence[str] | None = None, residual: bool = False) -> Callable[..., Any]:
    """The loss function of a perceptron whose layers have these names in turn; by default each parameter's, once.

    A layer is a matrix, alone or as `w` or `kernel`, beside which there may be a bias `b`. If there is a table, the
    batch is looked up in it.
    """

    def loss_fn(params: Any, x: Any) -> jax.Array:
        x = params["table"]["w"][x] if "table" in params else x
        for name in names or sorted(params.keys() - {"table"}):
            layer = params[name] if isinstance(params[name], dict) else {"w": params[name]}
            y = x @ (layer["kernel"] if "kernel" in layer else layer["w"])
            y = jnp.tanh(y + layer["b"] if "b" in layer else y)
            x = x + y if residual else y
        return jnp.mean(x**2)

    return loss_fn


def plain_steps(
    task: Task, optimizer: optax.GradientTransformation, masters: Any = None, **kwargs: Any
) -> Iterator[tuple[Any, Any, float]]:
    """The reference: a jitted Optax step, given the loss; yields parameters, optimizer state and loss of each step.

    Parameters that are given as `masters` are trained, and cast to the dtypes of the task's for the loss function.
    """
    update = optax.with_extra_args_support(optimizer).update

    def loss_and_aux(params: Any, batch: Any) -> Any:
        is_cast = masters is not None
        own = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, task.params) if is_cast else params
        result = task.loss_fn(own, batch, **kwargs)
        return result if isinstance(result, tuple) else (result, None)

    @quickly
    def step(params: Any, state: Any, batch: Any) -> Any:
        (loss, aux), gradients = jax.value_and_grad(loss_and_aux, has_aux=True)(params, batch)
        updates, state = update(gradients, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss, aux

    params, batch = task.params if masters is None else masters, task.batch
    state = quickly(optimizer.init)(params)
    while True:
        params, state, loss, aux = step(params, state, batch)
        yield params, state, float(loss)
        batch = task.advance(batch, aux) if task.advance else batch


def plain_loop(task: Task, optimizer: optax.GradientTransformation, num_steps: int, **kwargs: Any) -> tuple[Any, list]:
    """Final parameters and losses of some of these steps."""
    found = list(itertools.islice(plain_steps(task, optimizer, **kwargs), num_steps))
    return found[-1][0], [loss for *_, loss in found]
