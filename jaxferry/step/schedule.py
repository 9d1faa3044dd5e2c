"""Lowering: a plan becomes one list of tasks, the same for simulator and engine.

Up to five lanes work at once, each in the order of the list:

    H2D    load, load, ...      DFGB loads      second loads of RELOAD         refreshes of RESIDENT
    GPU         forward, inter_forward, ...     inter_backward, backward, ...
    D2H         (save, ...)                        offload, ...
    host                                              update, ...
    disk   state_read, ...                                  state_write, state_read, ...

Rules (the machine model; MemFerry, section IV-B):

- **H2D**: loads for the forward (GFGB, RELOAD) in layer order; then DFGB loads in layer order, each not before its own
  DHA forward has ended; then second loads of RELOAD layers in backward order; then refreshes in update order.
- **GPU**: forward 1..L, then backward L..1. A program that needs a copy on the device waits for its load.
  `inter_forward_s` follows a forward. `inter_backward_s` precedes a backward and waits for no load.
- **D2H**: gradients in backward order, none for GO layers. **Host**: updates in backward order, each once all gradients
  of its parameters are on the host.
- **Room for gradients**: a backward waits only for those offloads without which it would not fit into device memory
  (`step/gradient_room.py`). A backward that adds to a gradient in host memory waits until that gradient has arrived.
- **Gradients in host memory** (`gradient_buffers`): the backward of a program waits until the updates have ended that
  followed the backward so many programs before it.
- `loads: "bulk"`: no forward starts before the last load for the forward has ended. Loads follow the order of updates,
  so each layer's load for the next step starts once that layer is updated. `updates: "after-all"`: no update starts
  before all gradients are on the host.
- `update_order: "need"`: of the updates that could start, the host picks the one whose parameters the next forward
  needs first. Not where a step waits for its own updates: with `gradient_buffers` or state in a scratch file.
- `deferred_updates`: the updates of so many groups, spread evenly, follow all others, those first that the next forward
  needs first, and run beside it. Only with state in a scratch file, and without `gradient_buffers`.
- **RELOAD** layers share two slots on the device, so one computes while the next one loads. A load of a RELOAD layer
  starts once the use before the previous one has ended. The uses are the forwards, then the backwards.
- **RESIDENT** layers are on the device before the first step. A load refreshes each of them in place after its update,
  unless that runs on the GPU.
- **Updates on the device** (`update: "resident"`): master parameters and optimizer state stay there as well. The update
  follows the group's last backward on the GPU, or waits for all gradients if the others do. Nothing of the group moves.
- **Updates through the GPU** (`update: "gpu"`): once the group's gradient is whole on the device, masters and optimizer
  state go up, are updated there and go back down with the new compute copy, in subgroups (`jaxferry.step.streaming`).
  The gradient never leaves. Second loads for the next backward go up first. The next step's load (or DHA read) waits
  for the last transfer down. The compute copy of a RESIDENT group stays: updates write the new one in its place, the
  next step's forward waits for the last of them, and only masters and state go down. Updates left after the last
  backward run between the forwards of the next step (`jaxferry.step.streaming`).
- **Shared links**: where the profile says so, programs that read or write host memory take time of the links
  (`Task.read_s`, `Task.write_s`). Programs go first, and the transfers that follow in the list get what they leave
  (`jaxferry.step.shared_work`).
- **Shared host memory**: where the profile says so (`contention`), each second of a link's or the host's work takes a
  share of a second from the other lanes that use host memory. After each step they lose what they lost in it, as far as
  they are not idle before their next task.
- **Parameter groups**: a group has one update, in the place of its last backward. It is due when the group's last
  gradient is on the host. GFGB and DFGB hold a copy from the load to the backward, RELOAD during the forward and during
  the backward, RESIDENT always. While a group's copy is held, every layer of the group uses it and loads no other. The
  copy is freed when the last backward that reads it has ended.
- **Recomputation** (`remat: "full"`): the backward takes `recompute_s` longer, and by DHA also the extra time of the
  forward by DHA. The layer keeps `recompute_activation_bytes` instead of `activation_bytes`. With `remat: "products"`,
  the backward takes `products_recompute_s` longer, and the layer keeps `products_activation_bytes`.
- **State in a scratch file** (`state_read_s`): the file is a lane of its own. Before a group's update on the host, its
  masters and optimizer state are read, and afterwards written back. The first reads begin with the step, each further
  one when a write has left its slot, of which there are `DISK_SLOTS`.
- **Programs**: optional keys of the profile's layers state facts beyond times. With `fused_backward`, forward and
  backward of the last layer are one program, and one copy serves both. Without `backward_reads` a backward needs no
  copy, unless it runs its forward again. Gradients with `gradient_rows` stay on the device. Without `has_gradient`
  there is no offload and no update. Without `has_backward` there is no backward either.
- **Several groups in a program** (`shares_program`): the layers of a program follow each other on the GPU. The first of
  them waits for what any of them needs. When the last of them has ended, their copies are free and their gradients may
  leave. RELOAD layers of a program take one slot together.
- **Values in host memory** (`save_bytes` and `fetch_bytes`; with `activations: "host"` also `offloadable_bytes`): a
  save follows the last forward that reads its values. The second program after that forward waits for the save, so at
  most `CROSSING_SLOTS` programs' values are in flight. A fetch starts when the second program before its backward has
  ended; second loads for the backward before it go first. Saves share D2H with offloads, fetches share H2D with loads.
  They take the average time per byte of all offloads, or all loads, of the profile.
- **Chain of steps**: a forward that reads host memory, and a load for the forward, wait for the previous step's update
  of these parameters. A forward on a RESIDENT copy waits for its refresh, or for its update on the GPU. If there is no
  update, a load waits for the last use of the previous step's copy.

Memory is counted over these spans:

- a copy: from the start of its load to the end of its last use;
- activations: from the start of the forward to the end of the backward;
- a workspace and temporaries: while their program runs;
- a gradient on the device: from the start of the backward to the end of its offload;
- a gradient that never leaves: from the start of the backward to the end of its update;
- a subgroup's masters and state: from the start of their transfer up to the end of that down; its new compute copy:
  from the start of the update, unless it replaces a RESIDENT one;
- a gradient on the host: from the start of the task that writes it to the end of its update.
"""

import dataclasses

from jaxferry.costs import Profile
from jaxferry.modes import GradientPlace
from jaxferry.step.builder import StepBuilder
from jaxferry.step.effective_plan import EffectivePlan, may_reorder
from jaxferry.step.gradient_room import UNLIMITED, Demand, waits
from jaxferry.step.machine import SteadyStep
from jaxferry.step.plans import Plan, UpdateOrder
from jaxferry.step.tasks import Schedule, repeat


def schedule_step(profile: Profile, plan: Plan) -> Schedule:
    """The tasks of one step of a plan.

    Args:
      profile: the layers.
      plan: their modes.

    Raises:
      InputError: if the plan is for another profile.
    """
    return StepSchedules(profile, plan).within(plan.memory_bytes)


class StepSchedules:
    """The tasks of one step of a plan, for any `memory_bytes`. What does not depend on these is found once.

    Args:
      profile: the layers.
      plan: their modes; its `memory_bytes` do not count.

    Raises:
      InputError: if the plan is for another profile.
    """

    def __init__(self, profile: Profile, plan: Plan):
        plan.check_profile(profile)
        self.profile, self.plan = profile, plan
        self.effective, self.needs = step_demand(profile, plan)
        self._other_order: StepSchedules | None = None
        self._rooms: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[tuple[int, ...], int], Schedule] = {}
        self._steady: dict[int, SteadyStep] = {}

    def in_order(self, order: UpdateOrder) -> "StepSchedules":
        """The tasks with updates in this order. Memory differs only if some backward writes its gradient to the host.

        These updates wait for no transfer, but in backward order for the updates before them.
        """
        if order is self.plan.update_order or GradientPlace.HOST not in self.plan.gradients:
            return self
        if self._other_order is None:
            self._other_order = StepSchedules(self.profile, dataclasses.replace(self.plan, update_order=order))
        return self._other_order

    def within(self, memory_bytes: int | None) -> Schedule:
        """The tasks if the plan has these `memory_bytes`."""
        room = self._room(memory_bytes or 0)
        limit = max(self.needs.natural, memory_bytes or 0)
        key = room, limit if any(self.plan.updates_streamed) else 0
        if key not in self._known:
            self._known[key] = StepBuilder(self.effective, room, limit - self.needs.forward).build()
        return self._known[key]

    @property
    def may_reorder(self) -> bool:
        """Whether updates by need are possible, see `effective_plan.may_reorder`."""
        return may_reorder(self.profile, self.plan)

    def steady(self, memory_bytes: int | None) -> SteadyStep:
        """The endless chain of this step."""
        step = self.within(memory_bytes)
        if id(step) not in self._steady:
            self._steady[id(step)] = SteadyStep(step)
        return self._steady[id(step)]

    def waits_for_room(self, memory_bytes: int) -> bool:
        """Whether some backward, or streamed update, is not where it would be with unlimited memory."""
        if self._room(memory_bytes) != self._room(UNLIMITED):
            return True
        if not any(self.plan.updates_streamed):
            return False
        return self.within(memory_bytes).tasks != self.within(UNLIMITED).tasks

    def _room(self, memory_bytes: int) -> tuple[int, ...]:
        """For each layer, the layer whose offload its backward waits for, or `NO_WAIT`."""
        if memory_bytes not in self._rooms:
            self._rooms[memory_bytes] = tuple(waits(self.effective, self.needs, memory_bytes))
        return self._rooms[memory_bytes]


def schedule_chain(profile: Profile, plan: Plan, steps: int) -> Schedule:
    """The tasks of `steps` consecutive steps, with the waits between them."""
    return repeat(schedule_step(profile, plan), steps)


def step_demand(profile: Profile, plan: Plan) -> tuple[EffectivePlan, Demand]:
    """The plan as it runs, and each program's need on the device, see `step/gradient_room.py`."""
    effective = EffectivePlan(profile, plan)
    return effective, Demand.of(effective)


def needed_bytes(profile: Profile, plan: Plan) -> int:
    """The least memory budget within which the plan's step runs, however long its transfers take."""
    return step_demand(profile, plan)[1].natural
