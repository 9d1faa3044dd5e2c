"""Runs the greedy policy with several smaller memories and keeps the best schedule.

The selection of Algorithm 1 makes room for operations, not for transfers in flight. A selection for a memory that is
smaller by 0 to 3 times the largest weight leaves room for both; all schedules respect the true memory. Selections
without the discount are tried too: on slow links it can pay to spread the transfers over more layers. This is our own
addition; it is never worse than `greedy`, but not optimal.
"""

from jaxferry.weights.greedy import select
from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Outcome
from jaxferry.weights.scheduling import schedule_transfers

_LOWERED_BY = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Reductions of the memory, in units of the largest weight."""


def greedy_best(instance: Instance) -> Outcome:
    """Returns the shortest schedule over all selections; ties go to fewer choices.

    Raises:
      BudgetError: if no schedule exists.
    """
    instance.check_feasible()
    largest = max(instance.weights)
    selections = dict.fromkeys(
        select(instance, instance.memory_bytes - share * largest, discount)
        for discount in (True, False)
        for share in _LOWERED_BY
    )
    outcomes = [
        Outcome.of("greedy-best", instance, choices, schedule_transfers(instance, choices)) for choices in selections
    ]
    return min(outcomes, key=lambda outcome: (outcome.duration_s, len(outcome.choices)))
