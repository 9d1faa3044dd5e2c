"""The CUDA library builds with nvcc, says what it is, and XLA compiles programs that call it, all without a GPU."""

import ctypes
import json
import re

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from jaxferry.native import ABI, TARGETS
from native import cuda_build
from native.compile_for_gpu import DEVICE, HOST, compile_for_gpu, instructions
from native.cuda_library import cuda_library
from slowly import slow


@pytest.fixture(scope="module")
def path():
    return cuda_library()[0]


@pytest.fixture(scope="module")
def library():
    return cuda_library()[1]


@pytest.fixture(scope="module")
def registered():
    cuda_library()


def test_the_library_says_what_it_is_and_what_made_it(library):
    library.jaxferry_build_info.restype = ctypes.c_char_p
    info = json.loads(library.jaxferry_build_info())
    assert info["platform"] == "CUDA"
    assert info["jaxlib"] == jaxlib.version.__version__
    assert (info["ffi_major"], info["ffi_minor"]) >= (0, 1)
    assert re.fullmatch(r"1[2-9]\.\d+\.\d+", info["nvcc"])
    assert 90 in info["architectures"]
    assert library.jaxferry_abi() == ABI


def test_only_the_contract_is_exported(path):
    listed = cuda_build.run("nm", "-D", "--defined-only", path)
    functions = {"jaxferry_build_info", "jaxferry_abi", "jaxferry_ferry_synchronize", "jaxferry_ferry_wait_for"}
    functions |= {"jaxferry_marks_open", "jaxferry_marks_close", "jaxferry_marks_read", "jaxferry_plan_product"}
    assert {line.split()[-1] for line in listed.splitlines()} == functions | set(TARGETS)


def test_the_library_needs_no_library_of_cudas(path):
    needed = cuda_build.run("ldd", path)
    assert "cuda" not in needed.replace(str(path), "")
    assert "cublas" not in needed


def test_a_missing_nvcc_is_one_clear_error(tmp_path):
    with pytest.raises(AssertionError, match="does not run as a CUDA compiler"):
        cuda_build.configure(tmp_path, "-DJAXFERRY_NVCC=/bin/false")


def struct(shape, where, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def call(name, results, aliases=None, **attributes):
    numbers = {
        key: np.asarray(value, np.int64) if isinstance(value, list) else np.int64(value)
        for key, value in attributes.items()
    }
    operation = jax.ffi.ffi_call(f"jaxferry_{name}", results, input_output_aliases=aliases or {})
    return lambda *operands: operation(*operands, **numbers)


MARKED = jax.ShapeDtypeStruct((1,), jnp.uint8)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("where", [*slow(DEVICE), HOST])
def test_a_mark_of_a_program_is_one_call_that_copies_nothing(where):
    def mark(token, result):
        return call("mark", MARKED, queue=0)(token, result)

    executable = compile_for_gpu(mark, struct((1,), DEVICE, jnp.uint8), struct((5000,), where), out_shardings=DEVICE)
    assert {found.opcode for found in instructions(executable)} == {"parameter", "custom-call"}
    assert executable.get_compiled_memory_stats().temp_size_in_bytes == 0
