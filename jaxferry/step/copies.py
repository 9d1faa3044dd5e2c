"""The copies of parameters that the programs of one step read on the device."""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxferry.modes import Mode
from jaxferry.step.effective_plan import EffectivePlan, reads_back
from jaxferry.step.tasks import Kind, Lane, StepTasks


@dataclasses.dataclass
class Copy:
    """A copy of a group's parameters on the device: its load, and its last use so far."""

    load: int
    last_use: int | None = None


class Copies:
    """The copies of parameters on the device.

    Attributes:
      all: in the order of their loads.
      first_loads: the loads for forwards, each with its group; they wait for the previous step's update.
      held: by group, the copy that every layer of the group uses.
      fused: by layer, the RELOAD copies that serve a forward and a backward in one program.
      reload_uses: the programs that read RELOAD copies, in order; a load into a slot waits for the one before the last.
      resident: the groups whose copy is on the device before the step.
      ahead: by layer, the copy that its backward will read, where that is known already.
    """

    def __init__(self, effective: EffectivePlan, tasks: StepTasks):
        self.profile, self.modes, self.remats = effective.profile, effective.modes, effective.remats
        self.tasks = tasks
        self.all: list[Copy] = []
        self.first_loads: list[tuple[int, int]] = []
        self.held: dict[int, Copy] = {}
        self.fused: dict[int, Copy] = {}
        self.reload_uses: list[int] = []
        self.ahead: dict[int, Copy | None] = {}
        self.resident = {group for group, is_resident in enumerate(effective.resident) if is_resident}

    def load(self, kind: Kind, layer: int, after: tuple[int, ...] = ()) -> Copy:
        """Emits a load of a layer's group, which waits for these tasks."""
        profile = self.profile.layers[layer]
        task = self.tasks.emit(kind, Lane.H2D, layer, ("load_s", profile.load_s), after)
        self.tasks[task].start_bytes += profile.param_bytes
        self.all.append(Copy(task))
        return self.all[-1]

    def for_forward(self, layer: int) -> Copy | None:
        """The copy that a forward reads, loaded unless it is held; None if it reads another place."""
        mode, group = self.modes[layer], self.profile.group_of[layer]
        if group in self.resident or mode not in (Mode.GFGB, Mode.RELOAD):
            return None
        if group in self.held:
            return self.held[group]
        copy = self.load(Kind.LOAD, layer, tuple(self.reload_uses[-2:-1]) if mode is Mode.RELOAD else ())
        self.first_loads.append((copy.load, group))
        if mode is Mode.GFGB:
            self.held[group] = copy
        return copy

    def between(self, layer: int, forward: int) -> None:
        """Loads a DFGB layer's copy after its forward."""
        group = self.profile.group_of[layer]
        if self.modes[layer] is Mode.DFGB and group not in self.resident and group not in self.held:
            self.held[group] = self.load(Kind.LOAD, layer, (forward,))

    def find_ahead(self, layers: Iterable[int], forwards: Mapping[int, int]) -> None:
        """Finds the copies of the next backward; a load is listed now. All earlier uses are noted."""
        self.ahead = {layer: self.for_backward(layer, forwards[layer]) for layer in layers}

    def for_backward(self, layer: int, forward: int) -> Copy | None:
        """The copy that a backward reads, loaded unless it is held; None if it reads another place, or nothing."""
        if layer in self.ahead:
            return self.ahead[layer]
        mode, group = self.modes[layer], self.profile.group_of[layer]
        if mode is Mode.DHA or group in self.resident:
            return None
        if layer in self.fused:
            return self.fused[layer]
        if mode is not Mode.RELOAD or self.still_held(layer, group):
            return self.held[group]
        if not reads_back(self.profile.layers[layer], self.remats[layer]):
            return None
        return self.load(Kind.RELOAD, layer, tuple(sorted({forward, *self.reload_uses[-2:-1]})))

    def still_held(self, layer: int, group: int) -> bool:
        """Whether another layer holds the group's copy beyond this layer's backward."""
        members = self.profile.groups[group]
        return any(other < layer and self.modes[other] in (Mode.GFGB, Mode.DFGB) for other in members)

    def note_uses(self, copies: Mapping[int, Copy], tasks: Mapping[int, int], end: int) -> None:
        """Notes that the forwards or backwards of a program's layers read copies.

        Args:
          copies: by layer.
          tasks: the layers' tasks.
          end: the task that ends the program.
        """
        reloaded: dict[int, Copy] = {}
        for layer, copy in copies.items():
            copy.last_use = end
            self.tasks[tasks[layer]].copy = copy.load
            if copy is not self.held.get(self.profile.group_of[layer]):
                reloaded[layer] = copy
        if any(self.fused.get(layer) is copy for layer, copy in reloaded.items()):
            self.reload_uses[-1] = end
        elif reloaded:
            self.reload_uses.append(end)
            self.fused = {layer: copy for layer, copy in reloaded.items() if self.profile.layers[layer].fused_backward}

    def free(self) -> None:
        """Frees each copy at its last use."""
        for copy in self.all:
            if copy.last_use is not None:
                num_bytes = self.profile.layers[self.tasks[copy.load].segment].param_bytes
                self.tasks[copy.last_use].end_bytes += num_bytes
