"""Chooses plans: policies, searches, bounds.

registry, base   policies by name                     auto, exact   the searches
memferry, l2l ...  the papers' policies, baselines      *_bound       bounds that are proven
preference       which of two plans is better         planning      one plan, a comparison, a sweep
"""
