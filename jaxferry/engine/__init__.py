"""The engine: programs, transfers and host optimizer of a training step.

Placement   where arrays live          Programs    what runs on the device
script      what happens in which order HostOptimizer what runs on the host
TrainState  what outlives a step       Executor    issues a step
"""

from jaxferry.engine import checkpoint
from jaxferry.engine.evaluator import Evaluator
from jaxferry.engine.executor import Executor, StepResult
from jaxferry.engine.fit import fit_modes, peak_of
from jaxferry.engine.host_optimizer import HostOptimizer
from jaxferry.engine.initialise import masters_from_arrays, masters_layer_by_layer
from jaxferry.engine.measure import measure_profile
from jaxferry.engine.placement import Placement, make_placement
from jaxferry.engine.programs import Programs, derivatives_of, lower, trace_program
from jaxferry.engine.script import Event, Peak, make_script, peak_bytes
from jaxferry.engine.shadow import Kind, Source, Target, Use, resident_layers, shadow_model
from jaxferry.engine.state import TrainState
from jaxferry.engine.transports import TRANSPORTS, choose_transport, make_transport

__all__ = [
    "TRANSPORTS",
    "Evaluator",
    "Event",
    "Executor",
    "HostOptimizer",
    "Kind",
    "Peak",
    "Placement",
    "Programs",
    "Source",
    "StepResult",
    "Target",
    "TrainState",
    "Use",
    "checkpoint",
    "choose_transport",
    "derivatives_of",
    "fit_modes",
    "lower",
    "make_placement",
    "make_script",
    "make_transport",
    "masters_from_arrays",
    "masters_layer_by_layer",
    "measure_profile",
    "peak_bytes",
    "peak_of",
    "resident_layers",
    "shadow_model",
    "trace_program",
]
