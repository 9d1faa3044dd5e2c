"""The native operations: the libraries of `xla_ffi`, found, checked and registered with XLA when first asked for."""

from jaxferry.native.library import LibraryStatus, NativeLibrary, is_available, library, status

__all__ = ["LibraryStatus", "NativeLibrary", "is_available", "library", "status"]
