"""One step: its plan, its tasks and instructions, and the time and memory that it takes.

records        a plan as JSON                     holdings, room, copy_spans   its device memory
schedule       rules of the machine model         step_*, tasks, streaming     the tasks of a plan
instruction    what the engine runs for a task    simulate                     when each task runs
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
