"""Maps the names of Llama's published weights on Hugging Face to this model's parameters, to read and to write them.

PyTorch's linear layers store the transpose of a Flax kernel. Checkpoints contain no adapters; these are initialised.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
from flax import nnx

from examples.llama import model
from jaxferry.checkpoint import pretrained

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


def save(config, params, folder, tokenizer):
    """Writes a model as Hugging Face has it: `model.safetensors`, `config.json` and `tokenizer.json`.

    The products of adapters are added to the kernels: the files need no adapters.

    Raises:
      InputError: if the folder holds weights already.
    """
    pretrained.save_safetensors(folder, merged(config, params), source_of)
    facts = {
        "model_type": "qwen2" if config.has_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if config.has_bias else "LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_size": config.channels,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.is_tied,
    }
    if config.rope_scaling is not None:
        facts["rope_scaling"] = rope_scaling(config.rope_scaling)
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclasses.dataclass(frozen=True, eq=False)
class MergedKernel:
    """A kernel with the scaled product of its adapters, of which each read computes the elements that it asks for."""

    kernel: Any
    lora_a: Any
    lora_b: Any
    scale: float

    @property
    def shape(self):
        return tuple(self.kernel.shape)

    @property
    def dtype(self):
        return np.result_type(self.kernel.dtype, self.lora_a.dtype, np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self[:], dtype)

    def __getitem__(self, index):
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        more = np.asarray(self.lora_a)[rows] @ np.asarray(self.lora_b)[:, columns] * np.float32(self.scale)
        return np.asarray(self.kernel[index]) + more


def merged(config, params):
    """Returns the parameters with the products of their adapters added to the kernels; these are computed when read."""
    if not config.lora_rank:
        return params
    found, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in found}
    scale = config.lora_alpha / config.lora_rank

    def whole(name):
        thin = [leaves.get(name.replace("kernel", part)) for part in ("lora_a", "lora_b")]
        if "kernel" not in name or thin[0] is None:
            return leaves[name]
        return MergedKernel(leaves[name], *thin, scale)

    return jax.tree.unflatten(tree, [whole(name) for name in leaves])


def rope_scaling(scaling):
    """Returns scaled rotations as Hugging Face describes them."""
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.length,
    }


def source_of(path):
    """Returns the tensor for a parameter's path, such as ("layers", "0", "attn", "q", "kernel"); None for adapters."""
    *modules, leaf = path
    if leaf.startswith("lora"):
        return None
    if modules == ["head"]:
        return pretrained.Source("lm_head.weight", is_transposed=True)
    names = [MODULES.get(module, module) for module in modules]
    kind = "bias" if leaf == "bias" else "weight"
    return pretrained.Source(".".join(["model", *names, kind]), is_transposed=leaf == "kernel")
