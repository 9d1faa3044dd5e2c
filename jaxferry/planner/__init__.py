"""Chooses plans: policies, searches, bounds.

registry, base         policies by name            auto, exact            the searches
memferry, baselines    the papers' policies        options, place_bound   what no plan can undercut
preference             which of two plans wins     planning, comparison   one plan, all policies, a sweep
granularity, merging   how fine layers are         problem, search        plans of columns, judged by the simulator
columns, moves         choices, and their costs    budget                 the plan that fits as the engine counts
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
