"""What steps.py and contenders.py share: the contenders' names and the sizes and lengths of their runs."""

PROFILE = "profile"
PLAIN, RECIPE = "plain", "recipe"
POLICIES = (
    "native-overlapped",
    "exact",
    "zero-offload",
    "l2l",
    "auto",
    "memferry",
    "native-offload",
    "go-memferry",
    "twin-flow",
)
ALL_MEMORY, STREAMED = "auto-all-memory", "streamed"
# The most important come first, in case time runs out; what is not ours is known to work.
CONTENDERS = (PROFILE, *POLICIES, ALL_MEMORY, STREAMED, PLAIN, RECIPE)
# Batch rows and sequence length for each size.
BATCHES = {
    "tiny": (2, 32),
    "124m": (8, 1024),
    "medium": (32, 1024),
    "xl": (4, 1024),
    "llama-tiny": (2, 32),
    "llama-3b": (32, 1024),
}
BUDGETS = {"llama-3b": 24 << 30}
"""Device memory that `auto` may use, in bytes; that of `l2l` for other models."""
WARM_UP = 3
MIN_STEPS = 3
LEARNING_RATE = 1e-4
# Layers, heads, channels, positions and tokens of `examples/gpt2` for each size, for Pythons without JAX.
SHAPES = {
    "tiny": (4, 4, 128, 256, 1024),
    "124m": (12, 12, 768, 1024, 50257),
    "medium": (24, 16, 1024, 1024, 50257),
    "xl": (48, 25, 1600, 1024, 50257),
}
WEIGHT_DECAY = 1e-4
"""The default of `optax.adamw`; that of PyTorch is another."""

DEEPSPEED_2, DEEPSPEED_3, FSDP2 = "deepspeed-zero2", "deepspeed-zero3", "torch-fsdp2"
RIVALS = {FSDP2: ("torch",), DEEPSPEED_2: ("torch", "deepspeed"), DEEPSPEED_3: ("torch", "deepspeed")}
"""The other systems that offload to host memory, with the packages that each one needs."""


def model_name(size):
    """Returns the name of the model of a size."""
    return "Llama " + size.removeprefix("llama-") if size.startswith("llama-") else f"GPT-2 {size}"
