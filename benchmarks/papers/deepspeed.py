"""Device memory of DeepSpeed's ZeRO-Offload, counted from its source: `runtime/zero/stage_1_and_2.py`, February 2025.

Besides activations, the GPU holds all parameters all the time; a contiguous buffer of `reduce_bucket_size` elements, in
which gradients wait for their transfer; and a gradient of the largest parameter, for accumulation. Not counted: the
second bucket that `overlap_comm` needs, and the fp32 masters of a group, which are there during the update. MemFerry
compares with DeepSpeed without saying which bucket it uses; 5e8 elements are the default.
"""

from jaxferry.costs import Profile

REDUCE_BUCKET_SIZE = 500_000_000


def buffer_bytes(profile: Profile, itemsize: int, reduce_bucket_size: int = REDUCE_BUCKET_SIZE) -> int:
    """Bytes of the whole step on the device, with parameters and gradients of `itemsize` bytes an element."""
    first = [profile.layers[members[0]] for members in profile.groups]
    parameters = sum(layer.param_bytes for layer in first)
    largest = max(layer.grad_bytes for layer in first)
    activations = sum(layer.activation_bytes for layer in profile.layers)
    return parameters + itemsize * reduce_bucket_size + largest + activations
