"""The engine: programs, transfers and host optimizer of a training step.

Placement   where arrays live          Programs    what runs on the device
script      what happens in which order HostOptimizer what runs on the host
TrainState  what outlives a step       Executor    carries out the tasks of a step
Lanes       the threads that it has    Recorder    when each task started and ended
                                       Marks       the same on a device that works by itself
"""

from jaxferry.engine import checkpoint
from jaxferry.engine.ahead import OneAhead
from jaxferry.engine.evaluator import Evaluator
from jaxferry.engine.executor import Executor, make_lanes, num_kept_backwards
from jaxferry.engine.fit import fit_modes, fit_plan
from jaxferry.engine.flight import StepResult
from jaxferry.engine.host_optimizer import HostOptimizer
from jaxferry.engine.initialise import masters_from_arrays, masters_layer_by_layer
from jaxferry.engine.loss_scale import UNSCALED, LossScale
from jaxferry.engine.placement import Placement, make_placement
from jaxferry.engine.programs import Programs, derivatives_of, lower, trace_program
from jaxferry.engine.recorder import Recorder
from jaxferry.engine.script import Event, Peak, kept_layers, loads_ahead, lower_plan, make_script, peak_bytes
from jaxferry.engine.shadow import Kind, Source, Target, Use, onto_sums, resident_layers, shadow_model
from jaxferry.engine.state import TrainState
from jaxferry.engine.transfers import Transport
from jaxferry.engine.transports import TRANSPORTS, choose_transport, make_transport
from jaxferry.engine.variants import Variants

__all__ = [
    "TRANSPORTS",
    "UNSCALED",
    "Evaluator",
    "Event",
    "Executor",
    "HostOptimizer",
    "Kind",
    "LossScale",
    "OneAhead",
    "Peak",
    "Placement",
    "Programs",
    "Recorder",
    "Source",
    "StepResult",
    "Target",
    "TrainState",
    "Transport",
    "Use",
    "Variants",
    "checkpoint",
    "choose_transport",
    "derivatives_of",
    "fit_modes",
    "fit_plan",
    "kept_layers",
    "loads_ahead",
    "lower",
    "lower_plan",
    "make_lanes",
    "make_placement",
    "make_script",
    "make_transport",
    "masters_from_arrays",
    "masters_layer_by_layer",
    "num_kept_backwards",
    "onto_sums",
    "peak_bytes",
    "resident_layers",
    "shadow_model",
    "trace_program",
]
