"""The native operations. The libraries of `xla_ffi` are found, checked and registered with XLA on first use."""

from jaxferry.native import host_sums
from jaxferry.native.library import LibraryStatus, NativeLibrary, is_available, library, status
from jaxferry.native.operations import dha_gather, dha_matmul, dha_matmul_gradient, dha_read, gradient_store
from jaxferry.native.rounding import as_stored
from jaxferry.native.self_test import CheckResult, is_usable, run_self_test
from jaxferry.native.shapes import GatherShape, ProductShape

__all__ = [
    "CheckResult",
    "GatherShape",
    "LibraryStatus",
    "NativeLibrary",
    "ProductShape",
    "as_stored",
    "dha_gather",
    "dha_matmul",
    "dha_matmul_gradient",
    "dha_read",
    "gradient_store",
    "host_sums",
    "is_available",
    "is_usable",
    "library",
    "run_self_test",
    "status",
]
