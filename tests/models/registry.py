"""All models that are trained beside plain Optax, for the tests and for `docs/models.md`. A new one is a line here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path

from models import (
    Task,
    adapted,
    convolutional,
    encoder_decoder,
    experts,
    gpt,
    heads,
    kernels,
    mixed_dtypes,
    mutable,
    nnx_net,
    random_streams,
    recurrent,
    rematerialised,
    shared,
    stacked,
    third_party,
)

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is compared with plain Optax.

    Attributes:
      name: its name in the table.
      style: `linen` or `NNX`.
      make: makes the task.
      package: the distribution that its code is from; None for ours.
    """

    name: str
    style: str
    make: Callable[[], Task]
    package: str | None = None

    @property
    def origin(self) -> str:
        """The package, or the file in this repository."""
        return self.package or str(Path(inspect.getfile(inspect.unwrap(self.make))).resolve().relative_to(ROOT))

    @property
    def source(self) -> str:
        """The origin, with the version of a package."""
        return self.origin + (f" {importlib.metadata.version(self.package)}" if self.package else "")


OURS = (
    Model("GPT-2, tied head", "linen", gpt),
    Model("residual MLPs", "NNX", nnx_net),
    Model("GPT-2, blocks under nn.remat", "linen", rematerialised.linen_remat),
    Model("residual MLPs under nnx.remat", "NNX", rematerialised.nnx_remat),
    Model("GPT-2, whole loss under jax.checkpoint", "linen", rematerialised.whole_model_checkpoint),
    Model("GPT-2 with dropout", "linen", random_streams.gpt_dropout),
    Model("three RNG streams", "linen", random_streams.linen_streams),
    Model("dropout from the model's own Rngs", "NNX", random_streams.nnx_dropout),
    Model("ResNet with BatchNorm", "linen", convolutional.linen_resnet),
    Model("ResNet with BatchNorm", "NNX", convolutional.nnx_resnet),
    Model("U-Net", "linen", convolutional.linen_unet),
    Model("codebook, spectral norms, memory", "linen", mutable.linen_collections),
    Model("encoder-decoder", "linen", encoder_decoder.linen_translator),
    Model("cross attention to one input", "NNX", encoder_decoder.nnx_perceiver),
    Model("ALBERT: one block four times", "linen", shared.linen_albert),
    Model("universal transformer", "linen", shared.linen_universal_transformer),
    Model("tied blocks", "NNX", shared.nnx_tied),
    Model("mixture of experts, dense", "linen", experts.linen_dense_experts),
    Model("mixture of experts, top 2", "linen", experts.linen_routed_experts),
    Model("experts by jax.lax.switch", "NNX", experts.nnx_switch),
    Model("five heads, three losses", "linen", heads.linen_multi_task),
    Model("custom_vjp norms", "linen", kernels.linen_custom_vjp),
    Model("Pallas products", "NNX", kernels.nnx_pallas),
    Model("LSTM and GRU", "linen", recurrent.linen_lstm),
    Model("LSTM", "NNX", recurrent.nnx_lstm),
    Model("blocks under nn.scan", "linen", stacked.linen_scan),
    Model("blocks under nnx.scan", "NNX", stacked.nnx_scan),
    Model("LoRA, base by stop_gradient", "linen", adapted.linen_lora),
    Model("LoRA, base as an argument", "NNX", adapted.nnx_lora),
    Model("float32, bfloat16 and float16 parameters", "linen", mixed_dtypes.linen_mixed_dtypes),
)

THIRD_PARTY = (
    Model("BERT", "linen", third_party.bert, "transformers"),
    Model("ALBERT", "linen", third_party.albert, "transformers"),
    Model("GPT-2", "linen", third_party.gpt2, "transformers"),
    Model("Llama", "linen", third_party.llama, "transformers"),
    Model("BART", "linen", third_party.bart, "transformers"),
    Model("ViT", "linen", third_party.vit, "transformers"),
    Model("ResNet", "linen", third_party.resnet, "transformers"),
    Model("decoder", "NNX", third_party.attnax_decoder, "attnax"),
    Model("ViT", "NNX", third_party.attnax_vit, "attnax"),
    Model("Mamba 2", "NNX", third_party.mamba, "mamba2-jax"),
    Model("GAT", "NNX", third_party.graph_attention, "jraphx"),
)

MODELS = (*OURS, *THIRD_PARTY)
