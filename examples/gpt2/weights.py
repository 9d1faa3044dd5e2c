"""Maps the names of GPT-2's published weights on Hugging Face to this model's parameters, to read and to write them.

Its linear layers (`Conv1D`) store weights in the layout of Flax kernels, with query, key and value in one, as here.
"""

import json

import jax

import model
from jaxferry.checkpoint import pretrained

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


def save(config, params, folder, tokenizer):
    """Writes a model as Hugging Face has it: `model.safetensors`, `config.json` and `tokenizer.json`.

    Raises:
      InputError: if the folder holds weights already.
    """
    pretrained.save_safetensors(folder, params, source_of)
    facts = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.channels,
        "n_positions": config.max_length,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.epsilon,
        "activation_function": "gelu_new",
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


def source_of(path):
    """Returns the tensor's name for a parameter's path, such as ("h_0", "qkv", "kernel")."""
    *block, module, leaf = path
    above = [part.replace("_", ".") for part in block]
    return ".".join([*above, MODULES[module], LEAVES[leaf]])
