"""The public training step.

entry         train_step, its arguments               options         these, checked
trainer       TrainStep                               saving          a state to a checkpoint and back
compiler      a batch structure -> a step             model           parameters and optimizer
choice        the plan                                profiles        what it is planned with, on one device or several
step          plan -> program -> compiled             measure         measures a profile on the device
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
