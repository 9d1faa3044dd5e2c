"""Optax in host memory, layer by layer, and where masters and optimizer state are.

optimizer     which leaves are updated together   update_programs          their update
replay        the update of some parameters       on_devices               updates on the GPU
arrays        the arrays of a state               pieces                   arrays whole or in parts
optimizers    adamw ..., for the library          fused_update             their update by the library
transformations   what users write, traced        host_memory              how much is left
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
