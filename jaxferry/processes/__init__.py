"""Several devices and several hosts.

distributed     starts and joins processes, makes meshes
all_processes   messages, checks that all agree, detects one that hangs
global_arrays   arrays over all devices
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
