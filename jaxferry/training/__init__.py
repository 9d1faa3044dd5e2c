"""The public training step.

train_step    TrainStep, its state and metrics   options       its arguments, checked
compiler      partition, plan, lower, compile    model         parameters and optimizer
prepared      a step for one batch structure     measure       measures a profile on the device
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
