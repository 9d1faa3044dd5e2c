"""The CUDA library builds with nvcc, says what it is, and XLA compiles programs that call it, all without a GPU."""

import ctypes
import json
import re

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from jaxferry.native import TARGETS
from native import cuda_build
from native.compile_for_gpu import DEVICE, HOST, compile_for_gpu, host_compute, instructions
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
    assert library.jaxferry_abi() == 6


@pytest.mark.slow
def test_it_compiles_for_all_architectures_that_nvcc_knows(tmp_path):
    library = ctypes.CDLL(str(cuda_build.build(tmp_path)))
    library.jaxferry_build_info.restype = ctypes.c_char_p
    assert {80, 90, 120} <= set(json.loads(library.jaxferry_build_info())["architectures"])


def test_synchronizing_without_a_gpu_returns(library):
    library.jaxferry_ferry_synchronize()


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


def scratch(num_bytes):
    return call("scratch", jax.ShapeDtypeStruct((num_bytes,), jnp.uint8))()


def custom_calls(executable):
    return [found for found in instructions(executable) if (found.target or "").startswith("jaxferry_")]


def check_host_operands(executable):
    """Checks that no host buffer is copied, and that nothing runs on the host's processor."""
    found = {instruction.name: instruction for instruction in instructions(executable)}
    on_host = [instruction for instruction in found.values() if instruction.is_on_host]
    assert on_host
    kinds = {instruction.opcode for instruction in on_host}
    assert kinds <= {"parameter", "custom-call", "tuple", "get-tuple-element", "bitcast"}, kinds
    for instruction in found.values():
        reads_host = any(found[operand].is_on_host for operand in instruction.operands if operand in found)
        if reads_host:
            assert instruction.opcode in {"custom-call", "tuple", "get-tuple-element", "bitcast"}, instruction.text
    assert not host_compute(executable)


@pytest.mark.usefixtures("registered")
class TestProgramsForAnH200:
    def test_a_forward_reads_its_host_vector_in_place(self):
        def forward(vector, tokens):
            rows = jax.ShapeDtypeStruct((4, 16, 64), jnp.bfloat16)
            x = call("dha_gather", rows, offset=0, rows=100, columns=64)(vector, tokens, scratch(400))
            bias, scale = call("dha_read", (jax.ShapeDtypeStruct((64,), jnp.bfloat16),) * 2, offsets=[6400, 6464])(
                vector
            )
            y = jax.ShapeDtypeStruct((4, 16, 128), jnp.bfloat16)
            attributes = {"offset": 6528, "k": 64, "n": 128, "transpose": 0}
            return call("dha_matmul", y, **attributes)(x * scale + bias, vector, scratch(1 << 16))

        vector, tokens = struct((20_000,), HOST), struct((4, 16), DEVICE, jnp.int32)
        executable = compile_for_gpu(forward, vector, tokens, out_shardings=DEVICE)
        targets = [found.target for found in custom_calls(executable)]
        names = ("dha_gather", "dha_matmul", "dha_read", "scratch", "scratch")
        assert sorted(targets) == [f"jaxferry_{name}" for name in names]
        check_host_operands(executable)
        stats = executable.get_compiled_memory_stats()
        assert stats.host_argument_size_in_bytes == 40_000
        assert stats.host_temp_size_in_bytes == 0

    def test_a_chain_of_stores_writes_one_host_vector_in_place(self):
        def backward(vector, x, dy, dscale, dbias):
            attributes = {"offset": 0, "k": 64, "n": 128, "transpose": 0, "accumulate": 0, "round_to": 1}
            like = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
            vector = call("dha_matmul_gradient", like, {0: 0}, **attributes)(vector, x, dy, scratch(1 << 16))
            for offset, gradient in ((8192, dscale), (8320, dbias)):
                vector = call("gradient_store", like, {0: 0}, offset=offset, accumulate=1)(vector, gradient * 2)
            return vector

        vector = struct((9000,), HOST)
        operands = [struct(shape, DEVICE) for shape in ((256, 64), (256, 128), (128,), (128,))]
        executable = compile_for_gpu(backward, vector, *operands, out_shardings=HOST, donate_argnums=0)
        chain = [found for found in custom_calls(executable) if found.is_on_host]
        assert [found.target for found in chain].count("jaxferry_gradient_store") == 2
        assert all("output_to_operand_aliasing" in found.text for found in chain)
        check_host_operands(executable)
        stats = executable.get_compiled_memory_stats()
        assert stats.host_alias_size_in_bytes == stats.host_output_size_in_bytes == 18_000
        assert stats.host_temp_size_in_bytes == 0

    def test_a_load_fills_the_device_arrays_that_it_is_given(self):
        def load(vector, *arrays):
            types = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
            return call("ferry_load", types, {1: 0, 2: 1}, vectors=[0, 0], offsets=[0, 4096], vacant=0)(vector, *arrays)

        arrays = [struct((64, 64), DEVICE), struct((904,), DEVICE)]
        executable = compile_for_gpu(
            load, struct((5000,), HOST), *arrays, out_shardings=(DEVICE, DEVICE), donate_argnums=(1, 2)
        )
        check_host_operands(executable)
        stats = executable.get_compiled_memory_stats()
        assert stats.alias_size_in_bytes >= 2 * (64 * 64 + 904)
        assert stats.temp_size_in_bytes == 0

    def test_a_store_and_a_wait_keep_the_host_vector_where_it_is(self):
        def store(array, vector):
            like = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
            vector = call("ferry_store", like, {1: 0}, offsets=[100], accumulate=0)(array, vector)
            return call("ferry_wait", (like,), {0: 0})(vector)[0]

        executable = compile_for_gpu(
            store, struct((64,), DEVICE), struct((5000,), HOST), out_shardings=HOST, donate_argnums=1
        )
        check_host_operands(executable)
        assert executable.get_compiled_memory_stats().host_alias_size_in_bytes == 10_000

    def test_a_mark_follows_what_it_marks_and_moves_nothing(self):
        def load(token, vector, *arrays):
            types = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
            loaded = call("ferry_load", types, {1: 0, 2: 1}, vectors=[0, 0], offsets=[0, 4096], vacant=0)(
                vector, *arrays
            )
            return *loaded, call("mark", MARKED, queue=1)(token, *loaded)

        def store(token, array, vector):
            like = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
            vector = call("ferry_store", like, {1: 0}, offsets=[100], accumulate=0)(array, vector)
            return vector, call("mark", MARKED, queue=2)(token, vector)

        token, vector = struct((1,), DEVICE, jnp.uint8), struct((5000,), HOST)
        arrays = [struct((64, 64), DEVICE), struct((904,), DEVICE)]
        loads = compile_for_gpu(load, token, vector, *arrays, out_shardings=(DEVICE,) * 3, donate_argnums=(2, 3))
        stores = compile_for_gpu(store, token, arrays[1], vector, out_shardings=(HOST, DEVICE), donate_argnums=2)
        for executable, name, moved in ((loads, "load", 2 * (64 * 64 + 904)), (stores, "store", 10_000)):
            assert [found.target for found in custom_calls(executable)] == [f"jaxferry_ferry_{name}", "jaxferry_mark"]
            check_host_operands(executable)
            stats = executable.get_compiled_memory_stats()
            # Only a table of the results' addresses may remain.
            assert stats.temp_size_in_bytes < 64 and stats.host_temp_size_in_bytes == 0
            assert stats.alias_size_in_bytes + stats.host_alias_size_in_bytes >= moved

    @pytest.mark.parametrize("where", [*slow(DEVICE), HOST])
    def test_a_mark_of_a_program_is_one_call_that_copies_nothing(self, where):
        def mark(token, result):
            return call("mark", MARKED, queue=0)(token, result)

        executable = compile_for_gpu(
            mark, struct((1,), DEVICE, jnp.uint8), struct((5000,), where), out_shardings=DEVICE
        )
        assert {found.opcode for found in instructions(executable)} == {"parameter", "custom-call"}
        assert executable.get_compiled_memory_stats().temp_size_in_bytes == 0

    def test_a_wait_for_device_arrays_returns_the_same_buffers(self):
        def wait(*arrays):
            types = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
            return call("ferry_wait", types, {0: 0, 1: 1})(*arrays)

        arrays = [struct((64, 64), DEVICE), struct((128,), DEVICE)]
        executable = compile_for_gpu(wait, *arrays, out_shardings=(DEVICE, DEVICE), donate_argnums=(0, 1))
        kinds = {found.opcode for found in instructions(executable)}
        assert not kinds & {"copy", "copy-start", "fusion"}
        assert not host_compute(executable)
