"""Chooses plans: policies, searches, bounds.

registry, base   policies by name                     auto, exact   the searches
memferry, l2l ...  the papers' policies, baselines      *_bound       bounds that are proven
preference       which of two plans is better         planning      one plan, a comparison, a sweep
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
