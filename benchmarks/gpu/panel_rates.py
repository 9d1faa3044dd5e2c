"""Measures how fast panels of a host matrix reach a GPU, without a product. Usage: panel_rates.py OUTPUT.json [PROGRAM]

A panel is what `dha_matmul` copies for x @ w: some columns of a row-major matrix. For each width, CUDA's events time a
copy engine (cudaMemcpy2DAsync), the kernel of the native library (`ReadRows`), and a plain copy of as many bytes. A
product with so narrow a panel takes longer than its copy, so `dha_matmul` does not show these rates.

Without PROGRAM, nvcc builds panel_rates.cc for the machine's GPU.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.gpu.build import SOURCES, find_tool, gpu_architecture
from benchmarks.gpu.rates import Rate
from benchmarks.measure import machine

PROGRAM = pathlib.Path(__file__).with_suffix(".cc")
DEFAULT_MIB = 512


def build_command(nvcc, program, architecture):
    """Returns the command that builds the program for a compute capability such as "90", or for this GPU if None."""
    target = f"-arch=sm_{architecture}" if architecture else "-arch=native"
    return [nvcc, "-std=c++17", "-O3", target, f"-I{SOURCES}", PROGRAM, SOURCES / "cuda" / "rows.cu", "-o", program]


def rates_of(panel):
    """Returns the rates of both ways to copy a panel; `plain_s` is the time of a contiguous copy."""
    what = f"panel of {panel['row_bytes']} bytes a row, pitch {panel['pitch_bytes']}, by "
    return [
        Rate(what + ("a copy engine" if way == "engine" else "a kernel"), panel["num_bytes"], panel[f"{way}_s"], plain)
        for way, plain in (("engine", panel["plain_s"]), ("kernel", panel["plain_s"]))
    ]


def run(program, mib=DEFAULT_MIB):
    """Yields what the program prints for each width."""
    with subprocess.Popen([str(program), str(mib)], stdout=subprocess.PIPE, text=True) as process:
        yield from map(json.loads, process.stdout)
    if process.returncode:
        sys.exit(f"panel_rates.py: {program} failed with status {process.returncode}")


def main():
    output = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(folder) / "panel_rates"
        if len(sys.argv) <= 2:
            nvcc = find_tool("nvcc")
            if nvcc is None:
                sys.exit("panel_rates.py: found no nvcc; install the CUDA toolkit, or name a built program")
            subprocess.run([str(part) for part in build_command(nvcc, program, gpu_architecture())], check=True)
        rates, facts = [], machine()
        for panel in run(program):
            for rate in rates_of(panel):
                chosen = ("engine" in rate.name) == panel["is_for_copy_engine"]
                rates.append(rate.to_json() | {"is_chosen": chosen})
                mark = "  as products do" if chosen else ""
                print(f"{rate.name:60} {rate.bytes_per_s / 1e9:8.2f} GB/s  {rate.share:5.2f} of a plain copy{mark}")
            output.write_text(json.dumps({"machine": facts, "rates": rates}, indent=2) + "\n")


if __name__ == "__main__":
    main()
