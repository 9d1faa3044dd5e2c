"""The engine: programs, transfers and host optimizer of a training step.

    Placement   where arrays live          Programs    what runs on the device
    script      what happens in which order HostOptimizer what runs on the host
    TrainState  what outlives a step       Executor    issues a step
"""

from jaxferry.engine.evaluator import Evaluator
from jaxferry.engine.executor import Executor, StepResult
from jaxferry.engine.host_optimizer import HostOptimizer
from jaxferry.engine.placement import Placement, make_placement
from jaxferry.engine.programs import Programs, compile_programs, derivatives_of
from jaxferry.engine.script import Event, Kind, Peak, make_script, peak_bytes, resident_layers
from jaxferry.engine.state import TrainState

__all__ = [
    "Evaluator",
    "Event",
    "Executor",
    "HostOptimizer",
    "Kind",
    "Peak",
    "Placement",
    "Programs",
    "StepResult",
    "TrainState",
    "compile_programs",
    "derivatives_of",
    "make_placement",
    "make_script",
    "peak_bytes",
    "resident_layers",
]
