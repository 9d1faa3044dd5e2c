"""The engine: lowers a plan to a step program, and runs it.

instruction, lower    the step program              memory, budget    its memory, what fits
programs              run on the device             HostOptimizer     runs on the host
TrainState            outlives a step               StepContext       one step in progress
executor              one function an operation     StepRunner        runs steps, rolls back what fails
Lanes                 the threads                   Recorder, Marks   start and end of each task
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
