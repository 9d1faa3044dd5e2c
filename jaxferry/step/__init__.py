"""One step: its plan, its tasks and instructions, and the time and memory that it takes.

plans           a plan as JSON                        effective_plan            when its copies are there
gradient_room   the device memory that it needs       shared_work               what links and memory share
schedule        rules of the machine model            builder, streaming        the tasks of a plan
tasks           a task, its lane, what it waits for   instructions              what the engine runs for it
machine         runs tasks on four lanes              simulation                what that says of a plan
keys            which programs a step compiles        copies                    of parameters, as tasks read them
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
