"""Measurements of a profile as short as they can be: tests look at what is measured, not at how long it takes."""

from jaxferry.training import measured_profile, timers


def measure_briefly():
    """Repeats each measurement three times alone, with warm caches."""
    measured_profile.BUDGET_S = 0.0
    timers.MOST_BYTES = 2**22  # a server's caches take a tenth of a second to empty
    timers.MOST_RETRIES = 0
