"""The public training step.

entry         train_step, its arguments               options           these, checked
trainer       TrainStep                               saving            a state to a checkpoint and back
compiler      a batch structure -> a step             model, disk       parameters and optimizer, where they are
cuts          a loss function -> segments             profiles          what a step is planned with
choice        the plan                                measured_profile  measures that on the device
step          plan -> program -> compiled             host_usage        what host memory holds, by use

`measured_profile` rests on `microbenchmarks`, their arguments (`samples`), clocks (`timers`), links (`contention`) and
earlier results (`profile_cache`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
