"""The self-test of the native library: one load, store, product, gradient and mark, compared with plain JAX.

    training asks for the library of a GPU --first time in the process--> run_self_test --> CHECKS
      passed: it uses the library             failed: a warning names the check; plain copies (device_put)

On a CPU it runs on request: `jaxferry doctor`.

    check      native programs, as in a training step           plain JAX
    load       ferry_load, ferry_wait                           device_put of the vector
    store      ferry_store, and the host's wait for it          device_put of the arrays
    product    dha_matmul                                       device_put of the weight, sums on the device
    gradient   dha_matmul_gradient, gradient_store              sums on the device, device_put of the results
    mark       a mark of a load and one of a program            the host's clock, until results are ready

Copies move random bits. Factors are -1, 0 or 1 and sums short, so that every sum is exact in bfloat16, in any order. No
comparison of values needs a tolerance.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import targets
from jaxferry.native.loading import NativeLibrary, is_available, library, status
from jaxferry.native.targets import ProductShape
from jaxferry.settings import with_own_settings

NUM_ROWS = 32
"""Rows of a product's x: more than a direct read of the weight takes, so its panels are staged, as in training."""

_K = 256
_NUM_GUARDS = 8  # elements on either side of what is written, which must stay as they are
_NUM_ADDED = 24
_CLOCK_ERROR_S = 0.01


@dataclasses.dataclass
class Check:
    """One check: `step` runs native programs on `state`, the arrays that they write, and returns what they make of it.

    `num_bytes` cross the link in one run, 0 if that says nothing. `compare` compares the first run's results with plain
    JAX; returns None, or how they differ.
    """

    num_bytes: int
    step: Callable[[Any], Any]
    compare: Callable[[Any], str | None]
    state: Any = None

    def run(self) -> Any:
        """Runs the native programs until their results are ready, and returns these."""
        self.state = jax.block_until_ready(self.step(self.state))
        return self.state


class Bench:
    """Where a check's arrays and programs live."""

    def __init__(self, device: jax.Device, library: NativeLibrary, num_bytes: int) -> None:
        self.library, self.num_bytes = library, num_bytes
        self.device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        self.pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self.num_columns = max(num_bytes // (2 * _K), 1)
        # A quarter of the operand, so that there are several panels; no more than in training.
        self.scratch_bytes = min(num_bytes // 4, targets.SCRATCH_BYTES)
        # No seed: memory that an earlier run has left must not look like a right result.
        self._random = np.random.default_rng()

    def on_device(self, values: np.ndarray) -> jax.Array:
        """Returns values in device memory that may be donated: a CPU's array could share NumPy's memory otherwise."""
        pinned = jax.device_put(values, self.pinned)  # must outlive the copy
        return jax.block_until_ready(jax.device_put(pinned, self.device, may_alias=False))

    def on_host(self, values: np.ndarray) -> jax.Array:
        """Returns values in pinned host memory that may be donated."""
        return jax.block_until_ready(jax.device_put(jax.device_put(values, self.device), self.pinned, may_alias=False))

    def bits(self, num_elements: int) -> np.ndarray:
        """Returns fp32 elements of random bits."""
        return self._random.integers(0, 2**32, num_elements, np.uint32).view(np.float32)

    def factors(self, *shape: int) -> np.ndarray:
        """Returns random elements of -1, 0 and 1, in bfloat16."""
        return self._random.integers(-1, 2, shape, np.int8).astype(jnp.bfloat16)


def make_load(bench: Bench) -> Check:
    """Makes the check of a load: one vector in two pieces into existing buffers."""
    values = bench.bits(max(bench.num_bytes // 4, 2))
    vector, ends = bench.on_host(values), (0, len(values) // 4, len(values))
    load, wait = load_programs(bench, ends)

    def compare(found: Any) -> str | None:
        return difference(found, np.split(jax.device_get(jax.device_put(vector, bench.device)), ends[1:2]))

    arrays = [bench.on_device(np.zeros(end - start, np.float32)) for start, end in itertools.pairwise(ends)]
    return Check(vector.nbytes, lambda into: wait(load((vector,), into), (vector,)), compare, arrays)


def load_programs(bench: Bench, ends: Sequence[int]) -> tuple[Any, Any]:
    """Makes the programs of a load, those of `engine.transport.ferry`: one queues the copies, the other waits."""
    offsets = list(ends[:-1])

    def load(vectors: Sequence[jax.Array], into: Sequence[jax.Array]) -> list[jax.Array]:
        return targets.ferry_load(vectors, into, [0] * len(offsets), offsets)

    def wait(arrays: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[jax.Array]:
        return targets.ferry_wait(arrays)

    return (
        jitted(load, donate_argnums=1, out_shardings=bench.device),
        jitted(wait, donate_argnums=0, out_shardings=bench.device, keep_unused=True),
    )


def make_store(bench: Bench) -> Check:
    """Makes the check of a store: two arrays into one vector, whose other elements stay."""
    size = max(bench.num_bytes // 8, 1)
    known = bench.bits(2 * size + 2 * _NUM_GUARDS)
    sources, offsets = [bench.on_device(bench.bits(size)) for _ in range(2)], [_NUM_GUARDS, _NUM_GUARDS + size]

    def store(sources: Sequence[jax.Array], into: jax.Array) -> Any:
        return targets.ferry_store(sources, into, offsets, False)

    stores = jitted(store, donate_argnums=1, out_shardings=bench.pinned)

    def step(into: jax.Array) -> jax.Array:
        vector = jax.block_until_ready(stores(sources, into))
        bench.library.wait_for([vector.unsafe_buffer_pointer()], [vector.nbytes])
        return vector

    def compare(found: Any) -> str | None:
        expected = known.copy()
        expected[_NUM_GUARDS:-_NUM_GUARDS] = np.concatenate(jax.device_get(jax.device_put(sources, bench.pinned)))
        return difference(found, expected)

    return Check(8 * size, step, compare, bench.on_host(known))


def make_product(bench: Bench) -> Check:
    """Makes the check of a product: device rows times a weight within a vector in host memory."""
    n, rows = bench.num_columns, bench.factors(NUM_ROWS, _K)
    x, turned, w = bench.on_device(rows), bench.on_device(rows.T), bench.on_host(bench.factors(_NUM_GUARDS + _K * n))
    shape = ProductShape(_K, n, offset=_NUM_GUARDS)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return targets.dha_matmul(x, w, shape, x.dtype, bench.scratch_bytes)

    def plain(turned: jax.Array, w: jax.Array) -> jax.Array:
        return _sums(turned, w[_NUM_GUARDS:].reshape(_K, n)).astype(turned.dtype)

    products = jitted(product, out_shardings=bench.device)

    def compare(found: Any) -> str | None:
        return difference(found, jitted(plain, out_shardings=bench.device)(turned, jax.device_put(w, bench.device)))

    return Check(2 * _K * n, lambda _: products(x, w), compare)


def make_gradient(bench: Bench) -> Check:
    """Makes the check of a gradient: a product written to a vector in host memory, and an array added to it."""
    n = bench.num_columns
    arrays = [bench.on_device(bench.factors(*shape)) for shape in ((NUM_ROWS, _K), (NUM_ROWS, n), (_NUM_ADDED,))]
    end, shape = _NUM_GUARDS + _K * n, ProductShape(_K, n, offset=_NUM_GUARDS)
    known = bench.factors(end + _NUM_ADDED + _NUM_GUARDS)

    def gradient(into: jax.Array, x: jax.Array, dy: jax.Array, added: jax.Array) -> jax.Array:
        stored = targets.dha_matmul_gradient(into, x, dy, shape, False, x.dtype, bench.scratch_bytes)
        return targets.gradient_store(stored, added, end, True)

    def plain(into: jax.Array, x: jax.Array, dy: jax.Array, added: jax.Array) -> jax.Array:
        product = _sums(x, dy).astype(x.dtype).ravel()
        before, after = into[:_NUM_GUARDS], into[end + _NUM_ADDED :]
        return jnp.concatenate([before, product, into[end : end + _NUM_ADDED] + added, after])

    gradients = jitted(gradient, donate_argnums=0, out_shardings=bench.pinned)

    def compare(found: Any) -> str | None:
        expected = jitted(plain, out_shardings=bench.device)(bench.on_device(known), *arrays)
        return difference(found, jax.device_put(expected, bench.pinned))

    return Check(2 * _K * n, lambda into: gradients(into, *arrays), compare, bench.on_host(known))


def make_mark(bench: Bench) -> Check:
    """Makes the check of marks: the times of a load and of the program that waits for it."""
    vector, into = bench.on_host(bench.bits(1024)), bench.on_device(np.zeros(1024, np.float32))
    load, wait = load_programs(bench, (0, len(vector)))
    # Programs of their own: XLA frees the buffers of one that fails, and a load would still write to them.
    mark_load = jitted(lambda token, result: targets.mark(token, [result], "load"), out_shardings=bench.device)
    mark_wait = jitted(lambda token, result: targets.mark(token, [result], "program"), out_shardings=bench.device)
    tokens = [bench.on_device(np.zeros(1, np.uint8)) for _ in range(2)]
    addresses = [token.unsafe_buffer_pointer() for token in tokens]

    def move(array: jax.Array) -> jax.Array:
        [array] = load((vector,), [array])
        marked = mark_load(tokens[0], array)
        [array] = wait([array], (vector,))
        jax.block_until_ready((array, marked, mark_wait(tokens[1], array)))
        bench.library.synchronize()
        return array

    def step(array: jax.Array) -> tuple[float, float, list[tuple[float, float]]]:
        for address in addresses:
            bench.library.open_marks(address, 1)
        try:
            array = move(array)  # a mark of loads begins at the previous one
            before_s = time.perf_counter()
            move(array)
            after_s = time.perf_counter()
            return before_s, after_s, bench.library.read_marks(addresses, [1, 1])
        finally:
            for address in addresses:
                bench.library.close_marks(address)

    return Check(0, step, lambda times: time_difference(*times), into)


def difference(found: Any, expected: Any) -> str | None:
    """Compares trees of arrays bit by bit; returns None, or how many bytes differ."""
    arrays = (jax.tree.leaves(jax.device_get(tree)) for tree in (found, expected))
    pairs = [(a.ravel().view(np.uint8), b.ravel().view(np.uint8)) for a, b in zip(*arrays, strict=True)]
    num_different = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    return f"{num_different} of {sum(b.size for _, b in pairs)} bytes differ" if num_different else None


def time_difference(before_s: float, after_s: float, spans: Sequence[tuple[float, float]]) -> str | None:
    """Compares the marks of a load and of a program with the host's clock; returns None, or how they differ.

    A program's start may be unknown (NaN): the recorder then takes the end of the task before it.
    """
    (load_s, loaded_s), (start_s, end_s) = spans
    begin_s = load_s if np.isnan(start_s) else start_s
    times_s = [time_s - before_s for time_s in (load_s, loaded_s, begin_s, end_s)]
    first_s, last_s = -_CLOCK_ERROR_S, after_s - before_s + _CLOCK_ERROR_S
    ordered = times_s[0] <= times_s[1] and times_s[2] <= times_s[3]
    if ordered and all(first_s <= time_s <= last_s for time_s in times_s):
        return None
    load, program = ("{:.6f} to {:.6f} s".format(*span) for span in (times_s[:2], times_s[2:]))
    return f"the load's mark is {load} and the program's {program}, but both ran within 0 to {after_s - before_s:.6f} s"


def jitted(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles a check's program."""
    return jax.jit(function, **options)


def _sums(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a.T @ b` in fp32 without a library's product, which XLA would first tune for seconds."""
    return jnp.sum(a.astype(jnp.float32)[:, :, None] * b.astype(jnp.float32)[:, None, :], axis=0)


CHECKS: dict[str, Callable[[Bench], Check]] = {
    "load": make_load,
    "store": make_store,
    "product": make_product,
    "gradient": make_gradient,
    "mark": make_mark,
}


NUM_BYTES = 2**18  # the size of the checks' operands in the self-test of a training step
LIMIT_S = 120.0
"""A self-test that takes longer hangs. Most of its time is compilation, well under a second on an idle machine."""

_PLATFORMS = ("CUDA",)  # those that are tested on first use
_NUM_REPETITIONS = 3
_MOST_CHARACTERS = 300
_lock = threading.Lock()
_failures: dict[jax.Device, str | None] = {}
_warned: set[jax.Device] = set()


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of a check of `CHECKS`, with the rate at which bytes crossed the link, if measured.

    `message` is None if the check passed; else one line: how the library differs from plain JAX, or why it failed.
    """

    name: str
    message: str | None = None
    bytes_per_s: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the library did the same as plain JAX."""
        return self.message is None


def is_usable(device: jax.Device) -> bool:
    """Returns whether training can use the library on a device; warns why not, once per process.

    `InputError` if unknown.

    On a GPU, the first call runs the self-test.
    """
    if not is_available(device.platform):
        return False
    reason = unusable_reason(device)
    with _lock:
        is_news = reason is not None and device not in _warned
        _warned.add(device)
    if is_news:
        warnings.warn(f"{reason}; training goes on with plain copies (device_put)", stacklevel=2)
    return reason is None


def unusable_reason(device: jax.Device) -> str | None:
    """Returns why training cannot use the native library on a device, in one line; None if it can. See `is_usable`."""
    found = status(device.platform)
    if not found.is_available:
        return found.message
    if found.platform not in _PLATFORMS:
        return None
    with _lock:
        if device not in _failures:
            _failures[device] = _failure(device, run_self_test(device))
        return _failures[device]


def run_self_test(
    device: jax.Device, *, num_bytes: int = NUM_BYTES, measures: bool = False, limit_s: float = LIMIT_S
) -> tuple[CheckResult, ...]:
    """Compares the native library with plain JAX on a device; returns the results in the order of `CHECKS`.

    The checks run in a thread of their own: the caller may be tracing a function or have changed JAX's settings. The
    larger operand of each check has `num_bytes`. After `limit_s` the running check has failed and the later ones are
    left out: a device that hangs stays so, and the rest of the process may wait for it forever.

    Raises:
      InputError: for an unknown platform.
      NativeError: if the platform has no library that can be used.
    """
    native = library(device.platform)
    bench, results = Bench(device, native, num_bytes), list[CheckResult]()

    def run() -> None:
        for name in CHECKS:
            results.append(_run_check(name, bench, measures))

    thread = threading.Thread(target=with_own_settings(run), name="jaxferry self-test", daemon=True)
    thread.start()
    thread.join(limit_s)
    found = tuple(results)
    if thread.is_alive() and len(found) < len(CHECKS):
        # A queue that never empties would keep the process from ending.
        atexit.unregister(native.finish)
        return (*found, CheckResult(list(CHECKS)[len(found)], f"no result within {limit_s:g} s"))
    return found


def shortest_s(run: Callable[[], object]) -> float:
    """Returns the shortest of a few times, in seconds; `run` must return only when its work has ended."""
    times_s = []
    for _ in range(_NUM_REPETITIONS):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _run_check(name: str, bench: Bench, measures: bool) -> CheckResult:
    try:
        check = CHECKS[name](bench)
        try:
            message = check.compare(check.run())
            is_measured = measures and message is None and check.num_bytes > 0
            rate = check.num_bytes / shortest_s(check.run) if is_measured else None
        finally:
            # Copies in flight may still use the check's arrays.
            bench.library.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever a broken library causes is a failed check
        lines = str(error).strip().splitlines() or [""]
        return CheckResult(name, f"{type(error).__name__}: {lines[0]}"[:_MOST_CHARACTERS])
    return CheckResult(name, message, rate)


def _failure(device: jax.Device, results: tuple[CheckResult, ...]) -> str | None:
    failed = [f"{result.name}: {result.message}" for result in results if not result.passed]
    if not failed:
        return None
    return (
        f"the native library failed its self-test on {device} ({device.device_kind}): {'; '.join(failed)}; "
        "see `jaxferry doctor`, rebuild it with `jaxferry build-native`"
    )
