"""The GPT-2 of examples/gpt2/model.py in PyTorch: the same layers, names and activations, the head tied to the table.

B: batch, T: positions, C: channels. Parameters and activations have one dtype; sums inside LayerNorm and attention, and
the loss, are float32, as in the Flax model.
"""

import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-5


class Block(nn.Module):
    """One residual block: maps x [B, T, C] to the same."""

    def __init__(self, num_heads, channels):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(channels, EPSILON)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels, EPSILON)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        heads = (z.view(B, T, self.num_heads, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Maps tokens [B, T + 1] to the mean cross entropy of each next token, in nats, float32."""

    def __init__(self, num_layers, num_heads, channels, max_length, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, channels)
        self.wpe = nn.Embedding(max_length, channels)
        self.h = nn.ModuleList(Block(num_heads, channels) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(channels, EPSILON)

    def forward(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


LEAVES = {nn.Embedding: "embedding", nn.LayerNorm: "scale", nn.Linear: "kernel"}
"""How Flax calls the weight of each module."""


def parameters_as_in_flax(model):
    """Yields each parameter's path in the Flax model, `h_0/qkv/kernel`, itself, and whether it is transposed there."""
    for name, module in model.named_modules():
        if type(module) in LEAVES:
            path = name.replace("h.", "h_").replace(".", "/")
            yield f"{path}/{LEAVES[type(module)]}", module.weight, isinstance(module, nn.Linear)
            if getattr(module, "bias", None) is not None:
                yield f"{path}/bias", module.bias, False


@torch.no_grad()
def set_parameters(model, value_of):
    """Sets each parameter to `value_of(path, shape)`, a NumPy array; path and shape are those of the Flax model."""
    for path, parameter, is_transposed in parameters_as_in_flax(model):
        there = parameter.T if is_transposed else parameter
        there.copy_(torch.from_numpy(value_of(path, tuple(there.shape))))
