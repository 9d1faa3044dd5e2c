"""Runs one contender of rivals.py and prints its result as one line of JSON. Usage: torch_contenders.py CONTENDER

Needs PyTorch and NumPy, and DeepSpeed for its contenders, but not JAX. Weights, tokens, learning rate, weight decay and
dtypes are those of contenders.py: bfloat16 computes, AdamW keeps float32 masters and moments in host memory.

The contenders are described in torch_systems.py.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu import inputs, settings, timing, torch_gpt2, torch_systems
from benchmarks.machine import facts


def make_model(size):
    """Returns the model on the host, with the weights that contenders.py starts from."""
    with torch.device("meta"):  # PyTorch's own initial values are not wanted
        model = torch_gpt2.GPT2(*settings.SHAPES[size])
    model, drawn = model.to_empty(device="cpu"), inputs.draw()
    torch_gpt2.set_parameters(model, lambda path, shape: inputs.leaf(drawn, path.rsplit("/", 1)[-1], shape))
    return model


def make(arguments):
    *_, vocab_size = settings.SHAPES[arguments.size]
    tokens = torch.from_numpy(inputs.tokens(arguments.batch, arguments.seq, vocab_size)).long().to(arguments.device)
    model = make_model(arguments.size)
    if arguments.compile:
        for block in model.h:
            block.compile()
    return torch_systems.make(arguments.contender, model, tokens, arguments.device)


@contextlib.contextmanager
def alone(device):
    """A group of this process alone, which both libraries ask for; no port is opened."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": device}
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def device_memory(device):
    """The most device memory in use by arrays, and the most that PyTorch held, since the last reset."""
    if device == "cpu":
        return {"peak_device_bytes": None}
    return {
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "reserved_device_bytes": torch.cuda.max_memory_reserved(),
    }


def run(arguments):
    """Runs the contender and returns its result as JSON values."""
    end_s, start_s, device = time.monotonic() + arguments.limit / 2, time.perf_counter(), arguments.device
    contender = make(arguments)
    setup_s, setup_memory = time.perf_counter() - start_s, device_memory(device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()  # what only the setup needs is not held against it
    losses, first_step_s = timing.warm_up(contender)
    more, seconds, mean_s = timing.timed_steps(contender, arguments.steps, end_s)
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {
        **timing.summary(seconds, mean_s, arguments.batch * arguments.seq),
        **device_memory(device),
        "setup_s": setup_s,
        "first_step_s": first_step_s,
        "setup_peak_device_bytes": setup_memory["peak_device_bytes"],
        "is_compiled": arguments.compile,
        "losses": losses + more,
        "machine": facts(name, torch=torch.__version__, cuda=torch.version.cuda, **contender.versions)
        | {"host_threads": torch.get_num_threads()},
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=settings.RIVALS)
    parser.add_argument("--size", required=True, choices=settings.SHAPES)
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, required=True, help="rows")
    parser.add_argument("--seq", type=int, required=True, help="tokens per row")
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--limit", type=float, required=True, help="seconds for this contender")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no GPU: install one built for this machine's CUDA driver")
    with alone(arguments.device):
        result = run(arguments)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
