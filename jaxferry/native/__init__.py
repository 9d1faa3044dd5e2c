"""The native operations. The libraries of `xla_ffi` are found, checked and registered with XLA on first use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
