"""The machine model of GFGB, DHA and DFGB, written once more from its text alone: times by recursion over names.

Updates come in backward order, and there is room for all gradients. Shares no code with `jaxferry.step.schedule`
or `jaxferry.step.simulate`.
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
        self.remat = [str(layer.remat) for layer in plan.layers]
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
        self.first_loads, self.between = order, between
        self.link_order = self._up()
        self.updaters = [layer for layer in reversed(range(self.size)) if self.same[layer][0] == layer]
        self.down = [("write" if self.on_host[x] else "offload", x) for x in reversed(range(self.size))]

    def _up(self):
        """What takes time of the link up, in order: loads, and reads of programs."""
        loads, size = [("load", layer) for layer in self.first_loads], range(self.size)
        reads = [("read", layer) for layer in size if self.mode[layer] in (Mode.DHA, Mode.DFGB)]
        if not self.bulk:
            loads, reads = sorted(loads + reads, key=lambda item: item[1]), []
        again = [("read_again", layer) for layer in reversed(size) if self.mode[layer] is Mode.DHA]
        return loads + reads + [("load", layer) for layer in self.between] + again

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
        ends = [self.end("load", layer, 0) for layer in self.between]
        return self.mode[-1] is not Mode.DFGB and all(end <= self.end("backward", self.size - 1, 0) for end in ends)

    def _end(self, what, layer, step):
        if step < 0:
            return 0.0
        return getattr(self, "_" + what)(layer, step)

    def _queued(self, order, item, step):
        place = order.index(item)
        return self._cached(*order[place - 1], step) if place else self._cached(*order[-1], step - 1)

    def _load(self, layer, step):
        ready = self._cached("update", self.same[layer][0], step - 1)
        if layer not in self.first_loads:
            ready = self._cached("forward", layer, step)
        return max(ready, self._queued(self.link_order, ("load", layer), step)) + self.layers[layer].load_s

    def _read(self, layer, step):
        return self._queued(self.link_order, ("read", layer), step) + self.layers[layer].forward_read_s

    def _read_again(self, layer, step):
        profile = self.layers[layer]
        seconds = profile.backward_read_s + profile.forward_read_s * (self.remat[layer] == "full")
        return self._queued(self.link_order, ("read_again", layer), step) + seconds

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
        return sum(self._start_and_duration(layer, step))

    def _write(self, layer, step):
        """What the link down has done once this gradient is written: nothing more if that takes none of its time."""
        before, seconds = self._queued(self.down, ("write", layer), step), self.layers[layer].backward_write_s
        return max(before, self._start_and_duration(layer, step)[0]) + seconds if seconds else before

    def _start_and_duration(self, layer, step):
        """Of a backward."""
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
        if self.remat[layer] == "products":
            duration += profile.products_recompute_s
        if self.remat[layer] == "full":
            duration += profile.recompute_s
            if self.mode[layer] is Mode.DHA:
                duration += max(profile.forward_dha_s - profile.forward_s, 0.0)
        return start, duration

    def _offload(self, layer, step):
        ready = max(self._cached("backward", layer, step), self._queued(self.down, ("offload", layer), step))
        return ready + self.layers[layer].offload_s

    def _arrival(self, layer, step):
        return self._cached("backward" if self.on_host[layer] else "offload", layer, step)

    def _update(self, layer, step):
        waits = range(self.size) if self.after_all else self.same[layer]
        ready = max(self._arrival(other, step) for other in waits)
        duration = max(self.layers[other].update_s for other in self.same[layer])
        order = [("update", other) for other in self.updaters]
        return max(ready, self._queued(order, ("update", layer), step)) + duration
