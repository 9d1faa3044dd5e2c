"""Time that XLA takes to compile the programs of a step for an H200, without having one, in tiles and not.

    python benchmarks/tile_compilation.py [--tiles 8] [--repeats 3]

Llama 8B at 8 x 2048 and GPT-2 medium at 32 x 1024 tokens, in bfloat16, every segment recomputing. All distinct programs
of forward and backward are compiled from shapes, one after the other, in tiles and whole in turns; the processor time
of tracing and compiling is the least of the repeats, since the machine may do other work. XLA tunes no products without
a GPU, which takes as many programs in tiles as without. Expected: at most 1.3 times as long in tiles. A tile's program
is one loop around the operations of the whole one, whose sums it makes in fp32.
Writes `benchmarks/results/tile_compilation.json`, where the rows of other versions of JAX stay.
"""

import argparse
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
from rich.console import Console
from rich.table import Table

from examples.gpt2 import model as gpt2
from examples.llama import model as llama
from jaxferry.engine import RematVariants, lower_traced, trace_program
from jaxferry.partition import partition
from jaxferry.settings import own_settings
from jaxferry.step import ProgramKey, ProgramKind, Target
from jaxferry.transport import make_placement
from native.compile_for_gpu import compile_lowered

MODELS = {"llama 3-8b": (llama, "3-8b", 8, 2048), "gpt2 medium": (gpt2, "medium", 32, 1024)}


def seconds_of(parts, tiles):
    """Processor time and largest temporaries of a step's programs, by name."""
    variants, found = RematVariants(parts, "full", tiles), {}
    segments = variants.base.segments
    for segment in segments:
        last = segment is segments[-1]
        for kind in (ProgramKind.LOSS,) if last else (ProgramKind.FORWARD, ProgramKind.BACKWARD):
            key = ProgramKey(kind, segment.program, writes=(Target.DEVICE,) * (kind is not ProgramKind.FORWARD))
            if key in found:
                continue
            start_s = time.process_time()
            with own_settings():
                traced = trace_program(variants.base, variants.derivatives, make_placement(), key, native=False)
                compiled = compile_lowered(lower_traced(traced, "cuda"))
            stats = compiled.get_compiled_memory_stats()
            found[key] = time.process_time() - start_s, stats.temp_size_in_bytes
    return sum(own for own, _ in found.values()), max(own for _, own in found.values()), len(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options, rows, path = parser.parse_args(), [], measure.RESULTS / "tile_compilation.json"
    if path.exists():
        rows = [row for row in json.loads(path.read_text())["rows"] if row["jax"] != jax.__version__]
    table = Table(
        "model", "programs", "whole", f"{options.tiles} tiles", "ratio", title="Processor time to compile (s)"
    )
    for name, (module, size, batch, length) in MODELS.items():
        config = module.SIZES[size]
        params = jax.eval_shape(module.make_init(config), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        parts = partition(module.make_loss(config), params, ({"tokens": tokens},), compute_dtype=jnp.bfloat16)
        found = {tiles: [] for tiles in (1, options.tiles)}
        for _ in range(options.repeats):
            for tiles, own in found.items():
                own.append(seconds_of(parts, tiles))
        (whole_s, whole_bytes, num), (tiled_s, tiled_bytes, _) = (min(own) for own in found.values())
        rows.append(
            {
                "jax": jax.__version__,
                "model": name,
                "batch": batch,
                "length": length,
                "programs": num,
                "tiles": options.tiles,
                "whole_s": whole_s,
                "tiled_s": tiled_s,
                "ratio": tiled_s / whole_s,
                "whole_temporary_bytes": whole_bytes,
                "tiled_temporary_bytes": tiled_bytes,
            }
        )
        table.add_row(name, str(num), f"{whole_s:.2f}", f"{tiled_s:.2f}", f"{tiled_s / whole_s:.2f}")
    Console().print(table)
    measure.write("tile_compilation", {"machine": measure.machine(), "rows": rows})


if __name__ == "__main__":
    main()
