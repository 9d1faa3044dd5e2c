"""The machine model of GFGB, DHA and DFGB, written once more from its text alone: times by recursion over names.

Updates come in backward order, and there is room for all gradients. Shares no code with `jaxferry.schedule`,
`jaxferry.simulate` or `jaxferry.plan.recurrences`.
"""

import contextlib
import functools
import sys

from jaxferry.modes import GradientPlace, Mode

DEPTH = 100_000


@contextlib.contextmanager
def deep_recursion():
    """Allows deep recursion here alone: with such a limit, a parser of nested JSON overflows the stack."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(DEPTH)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class Oracle:
    """When everything ends: `end(what, layer, step)` in seconds; `what` is load, forward, backward, offload, update."""

    def __init__(self, profile, plan):
        self.layers, self.size = profile.layers, len(profile.layers)
        self.mode = [layer.mode for layer in plan.layers]
        self.on_host = [layer.gradient is GradientPlace.HOST for layer in plan.layers]
        self.recomputes = [layer.remat == "full" for layer in plan.layers]
        self.bulk, self.after_all = plan.loads == "bulk", plan.updates == "after-all"
        self._cached = functools.cache(self._end)
        names = [layer.parameters for layer in self.layers]
        self.same = [
            [other for other in range(self.size) if names[other] == names[layer]] for layer in range(self.size)
        ]
        self.loader, order, between = {}, [], []
        for mode, queue in ((Mode.GFGB, order), (Mode.DFGB, between)):
            for layer in range(self.size):
                if self.mode[layer] is mode and names[layer] not in self.loader:
                    self.loader[names[layer]] = layer
                    queue.append(layer)
        if self.bulk:
            order.sort(key=lambda layer: (-self.same[layer][0], layer))
        self.first_loads, self.link_order = order, order + between
        self.updaters = [layer for layer in reversed(range(self.size)) if self.same[layer][0] == layer]
        self.movers = [layer for layer in reversed(range(self.size)) if not self.on_host[layer]]

    def end(self, what, layer, step):
        with deep_recursion():
            return self._cached(what, layer, step)

    def forward_s(self, step=0):
        return self.end("forward", self.size - 1, step) + self.layers[-1].inter_forward_s

    def step_s(self):
        return self.last_update(0)

    def steady_step_s(self, steps=12):
        return self.last_update(steps) - self.last_update(steps - 1)

    def last_update(self, step):
        return self.end("update", self.updaters[-1], step)

    def keeps_window(self):
        """DFGB loads end before the first gradient leaves, at the last layer's backward's end; it is never DFGB."""
        between = [layer for layer in self.link_order if layer not in self.first_loads]
        ends = [self.end("load", layer, 0) for layer in between]
        return self.mode[-1] is not Mode.DFGB and all(end <= self.end("backward", self.size - 1, 0) for end in ends)

    def _end(self, what, layer, step):
        if step < 0:
            return 0.0
        return getattr(self, "_" + what)(layer, step)

    def _queued(self, what, order, layer, step):
        place = order.index(layer)
        return self._cached(what, order[place - 1], step) if place else self._cached(what, order[-1], step - 1)

    def _load(self, layer, step):
        ready = self._cached("update", self.same[layer][0], step - 1)
        if layer not in self.first_loads:
            ready = self._cached("forward", layer, step)
        return max(ready, self._queued("load", self.link_order, layer, step)) + self.layers[layer].load_s

    def _forward(self, layer, step):
        profile = self.layers[layer]
        if layer:
            free = self._cached("forward", layer - 1, step) + self.layers[layer - 1].inter_forward_s
        else:
            free = self._cached("backward", 0, step - 1)
        if self.bulk and self.first_loads:
            free = max(free, self._cached("load", self.first_loads[-1], step))
        if self.mode[layer] is Mode.GFGB:
            return max(free, self._cached("load", self.loader[profile.parameters], step)) + profile.forward_s
        return max(free, self._cached("update", self.same[layer][0], step - 1)) + profile.forward_dha_s

    def _backward(self, layer, step):
        profile = self.layers[layer]
        above = layer + 1
        free = self._cached("backward", above, step) if above < self.size else self.forward_s(step)
        start = free + profile.inter_backward_s
        if self.mode[layer] is not Mode.DHA:
            start = max(start, self._cached("load", self.loader[profile.parameters], step))
        duration = profile.backward_dha_s if self.mode[layer] is Mode.DHA else profile.backward_s
        if self.on_host[layer]:
            # It adds to the gradient of the group's later layers, once that has arrived.
            later = [other for other in self.same[layer] if other > layer and not self.on_host[other]]
            start = max([start, *(self._cached("offload", other, step) for other in later)])
            duration = max(duration + profile.backward_go_s - profile.backward_s, 0.0)
        if self.recomputes[layer]:
            duration += profile.recompute_s
            if self.mode[layer] is Mode.DHA:
                duration += max(profile.forward_dha_s - profile.forward_s, 0.0)
        return start + duration

    def _offload(self, layer, step):
        ready = max(self._cached("backward", layer, step), self._queued("offload", self.movers, layer, step))
        return ready + self.layers[layer].offload_s

    def _arrival(self, layer, step):
        return self._cached("backward" if self.on_host[layer] else "offload", layer, step)

    def _update(self, layer, step):
        waits = range(self.size) if self.after_all else self.same[layer]
        ready = max(self._arrival(other, step) for other in waits)
        duration = max(self.layers[other].update_s for other in self.same[layer])
        return max(ready, self._queued("update", self.updaters, layer, step)) + duration
