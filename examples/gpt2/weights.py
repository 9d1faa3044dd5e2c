"""Maps the names of GPT-2's published weights on Hugging Face to this model's parameters.

Its linear layers (`Conv1D`) store weights in the layout of Flax kernels, with query, key and value in one, as here.
"""

import jax

import model
from jaxferry import pretrained

MODULES = {
    "wte": "wte",
    "wpe": "wpe",
    "ln_1": "ln_1",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "ln_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "ln_f": "ln_f",
}
LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}
# Causal masks, and the head, which is tied to the table.
IGNORED = [r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight"]


def load(config, path):
    """Returns the tree of a model's parameters, with tensors that are read on demand.

    Raises:
      InputError: if there is no checkpoint, or its tensors do not fit the model.
    """
    tensors = {name.removeprefix("transformer."): t for name, t in pretrained.open_safetensors(path).items()}
    shapes = jax.eval_shape(model.make_init(config), jax.random.key(0))
    return pretrained.arrange(tensors, shapes, source_of, IGNORED)


def source_of(path):
    """Returns the tensor's name for a parameter's path, such as ("h_0", "qkv", "kernel")."""
    *block, module, leaf = path
    above = [part.replace("_", ".") for part in block]
    return ".".join([*above, MODULES[module], LEAVES[leaf]])
