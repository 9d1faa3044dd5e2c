"""The engine: lowers a plan to a step program, and runs it.

instruction, lower    the step program              memory, budget    its memory, what fits
programs              run on the device             HostOptimizer     runs on the host
TrainState            outlives a step               StepContext       one step in progress
executor              one function an operation     StepRunner        runs steps, rolls back what fails
Lanes                 the threads                   Recorder, Marks   start and end of each task
"""

from jaxferry.engine.budget import fit
from jaxferry.engine.device_updates import DeviceUpdateCompiler, DeviceUpdates
from jaxferry.engine.early_loads import groups_to_keep, groups_to_reserve, loads_ahead
from jaxferry.engine.evaluator import Evaluator
from jaxferry.engine.lanes import make_lanes
from jaxferry.engine.lifetimes import unsplit_by_step
from jaxferry.engine.loss_scale import UNSCALED, LossScale
from jaxferry.engine.lower import lower, summed_groups, widened_groups
from jaxferry.engine.memory import Footprint, Peak, footprints, peak_bytes
from jaxferry.engine.norms import Norms
from jaxferry.engine.owner import Owner
from jaxferry.engine.prefetch import PrefetchSlot
from jaxferry.engine.program_functions import trace_program
from jaxferry.engine.programs import Programs, derivatives_of, lower_traced
from jaxferry.engine.ready_tasks import TaskList
from jaxferry.engine.remat_variants import RematVariants
from jaxferry.engine.runner import StepRunner
from jaxferry.engine.state import TrainState
from jaxferry.engine.step import Resources, Rules, RunnableStep, StepResult
from jaxferry.engine.trace.recorder import Recorder
from jaxferry.optimizer.initialise import host_array, masters_from_arrays, masters_layer_by_layer
from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.step.instruction import Instruction, Operation, StepProgram
from jaxferry.step.program_keys import (
    ProgramKey,
    ProgramKind,
    Source,
    Target,
    groups_summed_on_host,
    program_keys,
    variants_of,
)
from jaxferry.transport.base import Transport
from jaxferry.transport.choice import TRANSPORTS, choose_transport, make_transport
from jaxferry.transport.placement import Placement, make_placement

__all__ = [
    "TRANSPORTS",
    "UNSCALED",
    "DeviceUpdateCompiler",
    "DeviceUpdates",
    "Evaluator",
    "Footprint",
    "HostOptimizer",
    "Instruction",
    "LossScale",
    "Norms",
    "Operation",
    "Owner",
    "Peak",
    "Placement",
    "PrefetchSlot",
    "ProgramKey",
    "ProgramKind",
    "Programs",
    "Recorder",
    "RematVariants",
    "Resources",
    "Rules",
    "RunnableStep",
    "Source",
    "StepProgram",
    "StepResult",
    "StepRunner",
    "Target",
    "TaskList",
    "TrainState",
    "Transport",
    "choose_transport",
    "derivatives_of",
    "fit",
    "footprints",
    "groups_summed_on_host",
    "groups_to_keep",
    "groups_to_reserve",
    "host_array",
    "loads_ahead",
    "lower",
    "lower_traced",
    "make_lanes",
    "make_placement",
    "make_transport",
    "masters_from_arrays",
    "masters_layer_by_layer",
    "peak_bytes",
    "program_keys",
    "summed_groups",
    "trace_program",
    "unsplit_by_step",
    "variants_of",
    "widened_groups",
]
