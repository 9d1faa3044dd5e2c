"""What each layer costs: the profile, measured elsewhere or estimated here, and machines.

records, layer_records   a profile as JSON             machines        machines as JSON
segment_costs, tables    FLOPs, bytes, temporaries     estimate        times of a machine from these
contention, sharing      lanes beside each other       cache, timers   what measurements use
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
