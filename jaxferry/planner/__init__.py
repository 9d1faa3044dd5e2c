"""Chooses plans: policies, searches, bounds.

planning, base          policies by name, their plans    auto, exact            the searches
memferry, baselines     the papers' policies             problem, search        plans judged by the simulator
columns, moves          choices, and their costs         options, place_bound   what no plan can undercut
preference              which of two plans wins          comparison             all policies, a sweep
granularity, merging    how fine layers are              budget                 the plan that fits as the engine counts
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
