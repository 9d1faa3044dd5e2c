"""Maps the names of Llama's published weights on Hugging Face to this model's parameters.

PyTorch's linear layers store the transpose of a Flax kernel. Checkpoints contain no adapters; these are initialised.
"""

import jax
from flax import nnx

from examples.llama import model
from jaxferry import pretrained

MODULES = {
    "embed": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
ROTATIONS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def load(config, path, seed=0):
    """Returns the tree of a model's parameters: tensors that are read on demand, and newly initialised adapters.

    Raises:
      InputError: if there is no checkpoint, or its tensors do not fit the model.
    """
    init_fn, key = model.make_init(config), jax.random.key(seed)
    params = jax.eval_shape(init_fn, key)
    if config.lora_rank:
        # Under jit, parameters that are not returned are not computed.
        adapters = jax.jit(lambda key: nnx.split_state(init_fn(key), nnx.LoRAParam, ...)[0])(key)
        params = nnx.merge_state(params, adapters)
    ignored = [ROTATIONS, r"lm_head\.weight"] if config.is_tied else [ROTATIONS]
    return pretrained.arrange(pretrained.open_safetensors(path), params, source_of, ignored)


def source_of(path):
    """Returns the tensor for a parameter's path, such as ("layers", "0", "attn", "q", "kernel"); None for adapters."""
    *modules, leaf = path
    if leaf.startswith("lora"):
        return None
    if modules == ["head"]:
        return pretrained.Source("lm_head.weight", is_transposed=True)
    names = [MODULES.get(module, module) for module in modules]
    return pretrained.Source(".".join(["model", *names, "weight"]), is_transposed=leaf == "kernel")
