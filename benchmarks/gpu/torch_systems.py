"""The systems that rivals.py compares with, each as a contender: called for a step, `finish()` ends its work.

- `torch-fsdp2`: `fully_shard` around each block and the whole model with `CPUOffloadPolicy`, as torchtitan does
  (`apply_fsdp` in torchtitan/models/llama3/infra/parallelize.py), and PyTorch's fused AdamW on the host.
- `deepspeed-zero2`: ZeRO-Offload with the settings of DeepSpeed's tutorial (docs/_tutorials/zero-offload.md).
- `deepspeed-zero3`: also `offload_param`, with the settings of docs/_tutorials/zero.md, "Offloading to CPU and NVMe".

Both of DeepSpeed's have pinned memory, `overlap_comm`, and buckets of 1e7 elements from the latter tutorial: stage 2
sends gradients once a bucket is full, and one of the default size, 5e8, holds all those of the smaller models.
DeepSpeed rounds the first masters to bfloat16. FSDP2 sends parameters and gradients over the link in float32.
"""

import torch

from benchmarks.gpu import settings

BUCKET = 10_000_000
STAGES = {settings.DEEPSPEED_2: 2, settings.DEEPSPEED_3: 3}


class Fsdp2:
    """PyTorch's `fully_shard` on one device."""

    def __init__(self, model, tokens, device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = {
            "mesh": init_device_mesh(device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            # Memory can be pinned for an accelerator only.
            "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu"),
        }
        for block in model.h:
            fully_shard(block, **options)
        self.model, self.tokens = fully_shard(model, **options), tokens
        rate, decay = settings.LEARNING_RATE, settings.WEIGHT_DECAY
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)
        self.versions = {}

    def __call__(self):
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def finish(self):
        synchronize()


class DeepSpeed:
    """DeepSpeed's engine with ZeRO stage 2 or 3."""

    def __init__(self, model, tokens, stage):
        import deepspeed

        self.engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(stage, len(tokens)))
        self.tokens, self.versions = tokens, {"deepspeed": deepspeed.__version__}

    def __call__(self):
        loss = self.engine(self.tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def finish(self):
        synchronize()


def deepspeed_config(stage, rows):
    """Returns DeepSpeed's configuration."""
    on_host = {"device": "cpu", "pin_memory": True}
    zero = {
        "stage": stage,
        "offload_optimizer": on_host,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if stage == 3:
        zero |= {
            "offload_param": on_host,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "sub_group_size": 1_000_000_000,
        }
    adamw = {"lr": settings.LEARNING_RATE, "weight_decay": settings.WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,  # the default is 1
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make(contender, model, tokens, device):
    """Returns the contender of a name in `settings.RIVALS`."""
    if contender == settings.FSDP2:
        return Fsdp2(model, tokens, device)
    return DeepSpeed(model, tokens, STAGES[contender])
