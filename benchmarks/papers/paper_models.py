"""The models of MemFerry's evaluation, at its granularity: one layer is one module.

All numbers follow from shapes: parameters, products, bytes of activations in single precision. Parameterless compute
(attention scores, activation functions, residuals, the loss) counts as compute between layers, T_FP(A) and T_BP(A).
"""

import dataclasses
from collections.abc import Iterator

from jaxferry.costs import LayerCosts

ITEM = 4


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer and its batch.

    Attributes:
      name: the paper's name.
      vocabulary, hidden, blocks, heads: sizes; the feed-forward width is 4 times `hidden`.
      batch, length: sequences per batch, tokens per sequence.
      family: "bert" (three embeddings, a classifier for a head), "gpt" (two, the head shares the table) or "xl" (one,
        relative positions: one more product per block; the head shares the table).
    """

    name: str
    vocabulary: int
    hidden: int
    blocks: int
    heads: int
    batch: int
    length: int
    family: str

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def num_parameters(self) -> int:
        """The number of parameters, counting each parameter group once."""
        return sum({layer.parameters or layer.name: layer.num_parameters for layer in self.layers()}.values())

    def layers(self) -> tuple[LayerCosts, ...]:
        """The layers in forward order."""
        return tuple(_layers(self))


def _layers(model: Model) -> Iterator[LayerCosts]:
    yield _embedding(model, "embeddings.word", model.vocabulary)
    if model.family != "xl":
        yield _embedding(model, "embeddings.position", max(model.length, 512))
    if model.family == "bert":
        yield _embedding(model, "embeddings.type", 2)
        yield _norm(model, "embeddings.norm")
    for number in range(model.blocks):
        yield from _block(model, f"block{number}")
    if model.family == "bert":
        yield _linear(model, "classifier", model.hidden, 2, rows=model.batch)
        return
    yield _norm(model, "norm")
    yield _head(model)


def _block(model: Model, name: str) -> Iterator[LayerCosts]:
    hidden = model.hidden
    for part in ("query", "key", "value"):
        yield _linear(model, f"{name}.{part}", hidden, hidden)
    if model.family == "xl":
        yield _linear(model, f"{name}.relative", hidden, hidden, rows=model.length)
    # Scores and the weighted sum are two products; softmax and dropout read the scores a few times.
    scores = model.batch * model.heads * model.length**2
    last = f"{name}.attention_output"
    attention = _linear(model, last, hidden, hidden)
    products = 2 * 2 * scores * (hidden // model.heads)
    passes = 6 if model.family == "xl" else 4
    yield dataclasses.replace(
        attention,
        activation_bytes=attention.activation_bytes + 2 * ITEM * scores,
        inter_forward_flops=products,
        inter_forward_bytes=passes * ITEM * scores,
        inter_backward_flops=2 * products,
        inter_backward_bytes=2 * passes * ITEM * scores,
    )
    yield _norm(model, f"{name}.norm1")
    wide = _linear(model, f"{name}.feed_forward1", hidden, 4 * hidden)
    activation = 2 * ITEM * model.tokens * 4 * hidden
    yield dataclasses.replace(wide, inter_forward_bytes=activation, inter_backward_bytes=1.5 * activation)
    yield _linear(model, f"{name}.feed_forward2", 4 * hidden, hidden)
    yield _norm(model, f"{name}.norm2")


def _linear(model: Model, name: str, inputs: int, outputs: int, rows: int | None = None) -> LayerCosts:
    """A product with weights and bias, which keeps its input. DHA reads each byte of the weights once."""
    rows = model.tokens if rows is None else rows
    parameters = inputs * outputs + outputs
    flops, moved = 2 * rows * inputs * outputs, ITEM * (rows * (inputs + outputs) + parameters)
    return dataclasses.replace(product(name, parameters, flops, moved, 3), activation_bytes=ITEM * rows * inputs)


def product(name: str, parameters: int, flops: float, moved: float, backward_kernels: int) -> LayerCosts:
    """A product with weights, whose backward does twice the work. DHA reads each byte of the weights once."""
    return LayerCosts(
        name=name,
        num_parameters=parameters,
        param_bytes=ITEM * parameters,
        grad_bytes=ITEM * parameters,
        forward_flops=flops,
        forward_bytes=moved,
        backward_flops=2 * flops,
        backward_bytes=2 * moved,
        dha_bytes_forward=ITEM * parameters,
        dha_bytes_backward=ITEM * parameters,
        backward_kernels=backward_kernels,
        itemsize=ITEM,
    )


def _norm(model: Model, name: str) -> LayerCosts:
    """A layer norm: two vectors, bound by its activations; includes the residual's addition."""
    elements, parameters = model.tokens * model.hidden, 2 * model.hidden
    return LayerCosts(
        name=name,
        num_parameters=parameters,
        param_bytes=ITEM * parameters,
        grad_bytes=ITEM * parameters,
        activation_bytes=ITEM * elements,
        forward_flops=8 * elements,
        forward_bytes=5 * ITEM * elements,
        backward_flops=16 * elements,
        backward_bytes=6 * ITEM * elements,
        dha_bytes_forward=ITEM * parameters,
        dha_bytes_backward=ITEM * parameters,
        forward_kernels=2,
        backward_kernels=3,
        itemsize=ITEM,
    )


def _embedding(model: Model, name: str, rows: int) -> LayerCosts:
    """A lookup: DHA touches only the rows used; its backward reads no parameters but writes a dense gradient."""
    parameters, elements = rows * model.hidden, model.tokens * model.hidden
    return LayerCosts(
        name=name,
        num_parameters=parameters,
        param_bytes=ITEM * parameters,
        grad_bytes=ITEM * parameters,
        activation_bytes=ITEM * model.tokens,
        forward_flops=0,
        forward_bytes=2 * ITEM * elements,
        backward_flops=elements,
        backward_bytes=ITEM * (parameters + 2 * elements),
        dha_bytes_forward=ITEM * min(elements, parameters),
        dha_bytes_backward=0,
        backward_kernels=2,
        itemsize=ITEM,
    )


def _head(model: Model) -> LayerCosts:
    """The output product with the word embedding's table, then the loss over the vocabulary."""
    product = _linear(model, "head", model.hidden, model.vocabulary)
    table = model.vocabulary * model.hidden
    logits = ITEM * model.tokens * model.vocabulary
    return dataclasses.replace(
        product,
        parameters="embeddings.word",
        num_parameters=table,
        param_bytes=ITEM * table,
        grad_bytes=ITEM * table,
        activation_bytes=product.activation_bytes + logits,
        inter_forward_bytes=3 * logits,
        inter_backward_bytes=2 * logits,
    )


def known_models() -> tuple[Model, ...]:
    """Returns the four models of Figures 9 and 12; batch sizes and lengths are our assumptions."""
    return (
        Model("BERT-base", 30522, 768, 12, 12, 8, 128, "bert"),
        Model("RoBERTa", 50265, 768, 12, 12, 8, 128, "bert"),
        Model("BERT-large", 30522, 1024, 24, 16, 16, 384, "bert"),
        Model("GPT-2-medium", 50257, 1024, 24, 16, 8, 1024, "gpt"),
    )


def transformer_xl(billions: float, batch: int, length: int) -> Model:
    """Returns a Transformer-XL of about that many parameters; vocabulary and width span the paper's ranges."""
    share = (billions - 0.7) / (6.7 - 0.7)
    hidden = 256 * round((2048 + share * (4096 - 2048)) / 256)
    vocabulary = 32 * round((32768 + share * (130528 - 32768)) / 32)
    blocks = max(1, round((billions * 1e9 - vocabulary * hidden) / (13 * hidden**2)))
    return Model(f"{billions:g}B", vocabulary, hidden, blocks, hidden // 128, batch, length, "xl")
