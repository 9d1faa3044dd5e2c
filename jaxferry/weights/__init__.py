"""Weight offloading on one GPU: Beaumont, Eyraud-Dubois, Shilova and Zhao, "Weight Offloading Strategies", 2022.

instance -> policies (which weights leave, and when; their transfers)
         -> bounds (a lower bound by MILP)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
