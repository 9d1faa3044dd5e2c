"""The greedy policy run with several lowered memories, the best schedule kept.

The selection of Algorithm 1 makes room for the operations alone, not for transfers on their way. Selecting for a
smaller memory, by 0 to 3 times the largest weight, leaves room for those as well; all schedules keep to the true
memory. Selections that ignore the discount are tried too: on slow links it can pay to spread the transfers over more
layers. Our own addition: never worse than `greedy`, not optimal.
"""

from jaxferry.weights.greedy import select
from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Outcome
from jaxferry.weights.scheduling import schedule_transfers

_LOWERED_BY = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""In largest weights."""


def greedy_best(instance: Instance) -> Outcome:
    """The shortest of the schedules found when the selection sees less memory; ties go to fewer choices.

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
