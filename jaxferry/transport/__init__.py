"""Moves layers and gradients between host and device.

placement     where arrays live             base          what a transport does
pinned        views of pinned memory        ferry         by the native library's queues
allocator     XLA's, as a model             device_put    by plain JAX, and which of both
copies        of layers and gradients     marks          when a task started and ended
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
