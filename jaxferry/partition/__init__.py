"""Cuts a loss function into segments: `partition` finds them, `print_table` shows them.

loss_fn --trace--> graph --analyse--> dataflow --cuts--> stretches --> segments --> derivative of each program

`partition_forward` cuts any function of parameters for a run without derivatives.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
