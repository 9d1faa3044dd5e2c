"""The native operations. The libraries of `xla_ffi` are found, checked and registered with XLA on first use."""

from jaxferry.native.library import LibraryStatus, NativeLibrary, is_available, library, status
from jaxferry.native.operations import dha_gather, dha_matmul, dha_matmul_gradient, dha_read, gradient_store
from jaxferry.native.shapes import GatherShape, ProductShape

__all__ = [
    "GatherShape",
    "LibraryStatus",
    "NativeLibrary",
    "ProductShape",
    "dha_gather",
    "dha_matmul",
    "dha_matmul_gradient",
    "dha_read",
    "gradient_store",
    "is_available",
    "library",
    "status",
]
