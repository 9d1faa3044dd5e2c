"""What each layer costs: the profile, measured elsewhere or estimated here, and machines.

profile_records, layer_records   a profile as JSON     machines    machines as JSON, several devices
counts, segment_costs            FLOPs, bytes          estimate    times of a machine from these
progress                         a bar on standard error
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
