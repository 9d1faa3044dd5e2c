"""The native library in Python: custom calls on host memory, host steps, and what they do without the library.

loading, paths, build   finds, loads, builds a library      targets       its custom calls
operations, twins       DHA reads and host stores           host_steps    fused optimizer steps
self_tests              the library's results               host_sums     gradients added in host memory
cpus                    how many threads                    donation      programs that take buffers over
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
