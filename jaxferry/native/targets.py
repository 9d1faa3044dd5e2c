"""The native library's custom calls as JAX functions; `xla_ffi/README.md` documents their arguments and results."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class GatherShape:
    """A table within a host array: `[rows, columns]`, row-major, starting at element `offset`."""

    rows: int
    columns: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """A weight within a host array: `[k, n]`, or `[n, k]` if `transpose`, row-major, starting at element `offset`."""

    k: int
    n: int
    transpose: bool = False
    offset: int = 0

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The stored matrix's shape."""
        return (self.n, self.k) if self.transpose else (self.k, self.n)


class Vacancy(enum.Enum):
    """Whether nothing uses the memory that a load fills."""

    UNKNOWN = 0  # any work issued so far may use it
    NOTED = 1  # no work issued since `ferry_vacate` uses it
    SEEN = 2  # no work uses it: its last use is known to have ended


TARGETS = (
    "jaxferry_scratch",
    "jaxferry_dha_gather",
    "jaxferry_dha_matmul",
    "jaxferry_dha_read",
    "jaxferry_gradient_store",
    "jaxferry_dha_matmul_gradient",
    "jaxferry_row_store",
    "jaxferry_ferry_load",
    "jaxferry_ferry_store",
    "jaxferry_ferry_wait",
    "jaxferry_ferry_vacate",
    "jaxferry_mark",
)

CPU_FUNCTIONS = ("jaxferry_host_update",)  # what the CPU library must have besides, for host memory of any device
QUEUES = ("program", "load", "store")
"""The queue that a mark follows: the program's own stream, or one of the ferry's queues."""

SCRATCH_BYTES = 8 * 2**20
"""Device memory for staging a product's panels: two panels of 4 MiB, large enough that a transfer takes longer than its
launch. Products with long rows or columns take up to a quarter of the weight's size, for panels of `LEAST_SLICES`."""

LEAST_SLICES = 128  # rows or columns of a panel unless the scratch is limited: a narrower product takes a GPU as long
ALIGNED_NUMBERS = 8  # a GPU's products are several times slower if rows do not start at multiples of so many numbers
PRODUCTS: dict[tuple[bool, tuple[int, ...]], None] = {}
"""The traced products of GPUs: whether each is a gradient, and its sizes (`NativeLibrary.plan_product`)."""

DTYPE_NUMBERS = {np.dtype(np.float32): 0, np.dtype(jnp.bfloat16): 1, np.dtype(np.float16): 2}
"""The numbers of dtypes in attributes."""


def _struct(like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype)


def _call(name: str, results: Any, *arrays: jax.Array, into: int | None = None, **numbers: Any) -> Any:
    """Calls a target with numbers for attributes; from number `into` on, arrays are the memory of the results.

    Calls without such memory, which read the host's, may be mapped, one after the other.
    """
    attributes = {key: np.asarray(value, np.int64)[()] for key, value in numbers.items()}
    if into is None:
        return jax.ffi.ffi_call(f"jaxferry_{name}", results, vmap_method="sequential")(*arrays, **attributes)
    num = len(results) if isinstance(results, list) else 1
    aliases = {into + number: number for number in range(num)}
    return jax.ffi.ffi_call(f"jaxferry_{name}", results, input_output_aliases=aliases)(*arrays, **attributes)


def _scratch(slice_bytes: int, num_slices: int, limit_bytes: int | None) -> jax.Array:
    """Allocates two panels of slices, as large as the limit allows, but for no more than `num_slices` slices each."""

    def panels_bytes(num_slices: int) -> int:
        return 2 * (slice_bytes * num_slices + 512)

    least, most = panels_bytes(1), panels_bytes(num_slices)
    if limit_bytes is None:
        limit_bytes = max(SCRATCH_BYTES, min(panels_bytes(LEAST_SLICES), most // 8))
    result = jax.ShapeDtypeStruct((max(least, min(limit_bytes, most)),), np.uint8)
    return empty(result)


def empty(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Allocates an array without writing its content."""
    made: jax.Array = jax.ffi.ffi_call("jaxferry_scratch", like)()
    return made


def dha_gather(table: jax.Array, indices: jax.Array, shape: GatherShape) -> jax.Array:
    """Returns rows of a host table, `[.., columns]`."""
    result = jax.ShapeDtypeStruct((*indices.shape, shape.columns), table.dtype)
    first_positions = jax.ShapeDtypeStruct((4 * shape.rows,), np.uint8)
    places = indices.astype(np.int32)
    gathered: jax.Array = _call(
        "dha_gather", result, table, places, empty(first_positions), **dataclasses.asdict(shape)
    )
    return gathered


_PADS: contextvars.ContextVar[bool | None] = contextvars.ContextVar("pads", default=None)


@contextlib.contextmanager
def for_products_of(platform: str) -> Iterator[None]:
    """Traces the body's products for a platform; elsewhere they are for JAX's default one."""
    token = _PADS.set(platform != "cpu")
    try:
        yield
    finally:
        _PADS.reset(token)


def is_padding() -> bool:
    """Whether rows of products are padded: on a GPU; a CPU gains nothing by it."""
    pads = _PADS.get()
    return jax.default_backend() != "cpu" if pads is None else pads


def _aligned(size: int) -> int:
    """Returns the length of a row of `size` numbers in a product."""
    return -(-size // ALIGNED_NUMBERS) * ALIGNED_NUMBERS if is_padding() else size


def _pad(x: jax.Array) -> jax.Array:
    """Returns x with zeros after each row, so that the next one is aligned; XLA fuses them into what makes x."""
    missing = _aligned(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _note_product(
    is_gradient: bool, dtypes: Sequence[Any], scratch: jax.Array, shape: ProductShape, rows: Sequence[Any], *flags: int
) -> None:
    """Adds a GPU's product to `PRODUCTS`; `rows` are matrices on the device, whose rows may be padded."""
    if is_padding():
        numbers = [DTYPE_NUMBERS[np.dtype(array.dtype)] for array in dtypes]
        lengths = (array.shape[-1] for array in rows)
        m = math.prod(rows[0].shape[:-1])
        PRODUCTS[is_gradient, (*numbers, scratch.size, m, shape.k, shape.n, *lengths, *flags)] = None


def dha_matmul(x: jax.Array, w: jax.Array, shape: ProductShape, out_dtype: Any, scratch_bytes: int | None) -> jax.Array:
    """Returns the product of x with a host weight, `[.., n]`."""
    x = _pad(x)
    result = jax.ShapeDtypeStruct((*x.shape[:-1], _aligned(shape.n)), out_dtype)
    # A weight of another dtype is staged in its own dtype, then cast.
    item_bytes = w.dtype.itemsize + (x.dtype.itemsize if w.dtype != x.dtype else 0)
    scratch = _scratch(x.shape[-1] * item_bytes, _aligned(shape.n), scratch_bytes)
    _note_product(False, (x, w, result), scratch, shape, (x, result), int(shape.transpose))
    made: jax.Array = _call("dha_matmul", result, x, w, scratch, **dataclasses.asdict(shape))
    return made[..., : shape.n]


def dha_read(vector: jax.Array, offsets: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Returns device copies of pieces of a host array."""
    results = [jax.ShapeDtypeStruct(tuple(shape), vector.dtype) for shape in shapes]
    return list(_call("dha_read", results, vector, offsets=offsets))


def gradient_store(destination: jax.Array, gradient: jax.Array, offset: int, accumulate: bool) -> jax.Array:
    """Writes the gradient into the destination and returns it."""
    arrays = (destination, gradient)
    stored: jax.Array = _call(
        "gradient_store", _struct(destination), *arrays, into=0, offset=offset, accumulate=accumulate
    )
    return stored


def dha_matmul_gradient(
    destination: jax.Array,
    x: jax.Array,
    dy: jax.Array,
    shape: ProductShape,
    accumulate: bool,
    round_to: Any,
    scratch_bytes: int | None,
) -> jax.Array:
    """Writes the product into the destination and returns it."""
    x, dy = _pad(x), _pad(dy)
    left, right = (dy, x) if shape.transpose else (x, dy)
    row, row_padded = shape.k if shape.transpose else shape.n, right.shape[-1]
    # Sums that are added, or rounded to a third dtype, stay in float32; padding is removed before rows cross the link.
    stays_short = x.dtype in ((round_to, destination.dtype) if not accumulate and round_to is None else (round_to,))
    item_bytes = x.dtype.itemsize if stays_short else 4
    row_bytes = item_bytes * (row_padded + (row if row_padded > row else 0))
    scratch = _scratch(row_bytes, left.shape[-1], scratch_bytes)
    rounded = 0 if round_to is None else DTYPE_NUMBERS[np.dtype(round_to)]
    _note_product(True, (x, destination), scratch, shape, (x, dy), int(shape.transpose), int(accumulate), rounded)
    numbers = dataclasses.asdict(shape) | {"accumulate": accumulate, "round_to": rounded}
    arrays = (destination, x, dy, scratch)
    stored: jax.Array = _call("dha_matmul_gradient", _struct(destination), *arrays, into=0, **numbers)
    return stored


def row_store(destination: jax.Array, indices: jax.Array, rows: jax.Array, shape: GatherShape) -> jax.Array:
    """Adds rows to the destination at the indices and returns it; rows at indices out of range are ignored."""
    arrays = (destination, indices.astype(np.int32), rows)
    stored: jax.Array = _call("row_store", _struct(destination), *arrays, into=0, **dataclasses.asdict(shape))
    return stored


def ferry_load(
    vectors: Sequence[jax.Array],
    into: Sequence[jax.Array],
    numbers: Sequence[int],
    offsets: Sequence[int],
    vacancy: Vacancy = Vacancy.UNKNOWN,
) -> list[jax.Array]:
    """Queues copies from the host vectors to the arrays `into`, and returns these with the copies in flight.

    The copies wait for all work of the device so far; into vacant arrays for `ferry_vacate` of these alone, or for
    nothing. Then the vectors must be ready.
    """
    results, places = list(map(_struct, into)), {"vectors": numbers, "offsets": offsets, "vacant": vacancy.value}
    return list(_call("ferry_load", results, *vectors, *into, into=len(vectors), **places))


def ferry_store(
    arrays: Sequence[jax.Array], destination: jax.Array, offsets: Sequence[int], accumulate: bool
) -> jax.Array:
    """Queues copies of the arrays to the host vector, and returns it with the copies in flight."""
    numbers = {"offsets": offsets, "accumulate": accumulate}
    stored: jax.Array = _call("ferry_store", _struct(destination), *arrays, destination, into=len(arrays), **numbers)
    return stored


def ferry_wait(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Waits until every copy to or from the arrays has finished, and returns the arrays."""
    return list(_call("ferry_wait", list(map(_struct, arrays)), *arrays, into=0))


def ferry_vacate(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Notes that no later work uses the arrays until they are loaded again, and returns them."""
    return list(_call("ferry_vacate", list(map(_struct, arrays)), *arrays, into=0))


def mark(token: jax.Array, after: Sequence[jax.Array], queue: str) -> jax.Array:
    """Records, for the token, start and end of the last work queued on `queue` to compute `after`; returns a dummy."""
    call = jax.ffi.ffi_call("jaxferry_mark", jax.ShapeDtypeStruct((1,), np.uint8))
    marked: jax.Array = call(token, *after, queue=np.int64(QUEUES.index(queue)))
    return marked
