"""The engine: lowers a plan to a step program, and runs it.

lowering, memory            the step program, its memory     runner      runs steps, rolls back what fails
programs                    compiled for the device          step        one step in progress
executor                    one function an operation        state       what outlives a step
lanes, ready_tasks          threads, and what may start      recorder    when each task ran
gradients, device_updates   where gradients go               evaluator   a forward alone
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
