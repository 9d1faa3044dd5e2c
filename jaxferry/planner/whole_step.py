"""The whole step over GFGB, DHA and DFGB: one dynamic program decides forward and backward together.

The backward visits the layers in reverse, so a state carries its cost as a tail: `a` is the longest path from the GPU's
arrival at the backward of the last layer so far to the end of the step. It depends only on the layers so far. So do the
tails t of the layers' gradients, which are independent of modes:

    a_l = inter_backward_s + backward_s(mode) + max(a_{l-1}, t_l)            step_s = C_L + a_L

Names: a state is (X, C, a, S, Y): the link's end, the GPU's end, the tail, the sum S of the DFGB loads, and the end Y
that these loads would have without GFGB loads. They end at max(X_L + S, Y), which must lie inside MemFerry's window.

The formula omits waits for room, for saved values and for a shared link down, so it is at most the step's time. It is
exact if there are no such waits and all gradients leave by the link. The search is exact while it drops only provably
worse states. A beam limits the number of states, so on long models the result is a heuristic. `planner/bounds.py`
bounds its distance from the optimum.
"""

import dataclasses

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.frontier import SharedCopies, holds_as_much
from jaxferry.step import DFGB, DHA, GFGB, effective_codes

_MOST_FOUND = 32


def first_trained(profile: Profile) -> int:
    """The first layer that has a gradient."""
    return next(index for index, layer in enumerate(profile.layers) if layer.has_gradient)


def gradient_tails(profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
    """A lower bound on the seconds from each backward's end to the step's end, in either update order; (layers,).

    No update of this layer or a lower one starts before this backward has ended, so all of them follow it. If the
    gradient leaves by the link, all lower layers' gradients on the link follow it, and so do their updates.

    Args:
      profile: the layers.
      grad_on_host: effective flags of the gradients that are written to the host, (layers,).
    """
    updates_s, after_link_s, link_tail_s = 0.0, 0.0, 0.0
    updated, after_link = set[int](), set[int]()
    tails = np.zeros(len(profile.layers))
    for index, layer in enumerate(profile.layers):
        if not layer.has_gradient:
            continue
        group = profile.group_of[index]
        if group not in updated:
            updated.add(group)
            updates_s += profile.group_update_s[group]
        tails[index] = updates_s
        if not grad_on_host[index]:
            if group not in after_link:
                after_link.add(group)
                after_link_s += profile.group_update_s[group]
            link_tail_s = layer.offload_s + max(link_tail_s, after_link_s)
            tails[index] = max(updates_s, link_tail_s)
    return tails


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of each layer for the recursion, (layers,) each; compute times include the parameterless parts.

    `num_last` is the number of layers of the last program. Layers of other programs count as if each ran by itself,
    which is never slower.
    """

    load: np.ndarray
    read: np.ndarray
    forward: np.ndarray
    forward_dha: np.ndarray
    inter_forward: np.ndarray
    backward: np.ndarray
    backward_dha: np.ndarray
    offload: np.ndarray
    tails: np.ndarray
    num_last: int

    @classmethod
    def of(cls, profile: Profile, grad_on_host: np.ndarray) -> "StepCosts":
        """The costs of a profile's layers, given which gradients are written to the host, (layers,)."""
        none = np.zeros((len(profile.layers), 1), dtype=np.int8)
        grad_on_host = effective_codes(profile, none, np.asarray(grad_on_host, dtype=bool)[:, None])[1][:, 0]

        def column(key: str) -> np.ndarray:
            return np.array([getattr(layer, key) for layer in profile.layers])

        def backward(by_dha: bool) -> np.ndarray:
            return np.array(
                [x.backward_for(by_dha, bool(host)) for x, host in zip(profile.layers, grad_on_host, strict=True)]
            )

        # A step ends with its last update, so backwards below the first trained layer do not count.
        counts = np.arange(len(profile.layers)) >= first_trained(profile)
        inter_forward, inter_backward = column("inter_forward_s"), column("inter_backward_s")
        return cls(
            load=column("load_s"),
            read=column("forward_read_s"),
            forward=column("forward_s") + inter_forward,
            forward_dha=column("forward_dha_s") + inter_forward,
            inter_forward=inter_forward,
            backward=np.where(counts, backward(False) + inter_backward, 0.0),
            backward_dha=np.where(counts, backward(True) + inter_backward, 0.0),
            offload=np.where(grad_on_host, 0.0, column("offload_s")),
            tails=gradient_tails(profile, grad_on_host),
            num_last=len(profile.programs[-1]),
        )

    def longest_window_s(self) -> float:
        """The most seconds from the end of the forward to the window's end, which is that of the last program."""
        last = slice(-self.num_last, None)
        return float(np.maximum(self.backward[last], self.backward_dha[last]).sum())

    def least_tail(self) -> float:
        """The tail a_L if every backward takes its least time."""
        tail = 0.0
        for least, own in zip(np.minimum(self.backward, self.backward_dha), self.tails, strict=True):
            tail = least + max(tail, own)
        return float(tail)


@dataclasses.dataclass
class _States:
    """Frontier states, (states,) each; `held`, the copies on the device, is (states, words)."""

    link: np.ndarray
    gpu: np.ndarray
    tail: np.ndarray
    between_sum: np.ndarray
    between_end: np.ndarray
    held: np.ndarray
    origin: np.ndarray

    def take(self, keep: np.ndarray) -> "_States":
        return _States(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))

    @classmethod
    def joined(cls, parts: list["_States"]) -> "_States":
        return cls(*(np.concatenate([getattr(x, field.name) for x in parts]) for field in dataclasses.fields(cls)))


class StepSearch:
    """Searches plans of whole steps; `best` returns the modes of several final states, best first."""

    def __init__(self, profile: Profile, grad_on_host: np.ndarray, beam: int):
        self.profile, self.beam = profile, beam
        self.costs = StepCosts.of(profile, grad_on_host)
        self.size = len(profile.layers)
        self.copies = SharedCopies(profile)
        least_forward = np.minimum(self.costs.forward, self.costs.forward_dha)
        least_backward = np.minimum(self.costs.backward, self.costs.backward_dha)
        self.rest_forward = np.concatenate([np.cumsum(least_forward[::-1])[::-1][1:], [0.0]])
        self.rest_backward = np.concatenate([np.cumsum(least_backward[::-1])[::-1][1:], [0.0]])
        self.least_tail = self.costs.least_tail()
        self.complete = self.copies.num_words == 0

    def best(self, limit_s: float, fixed: np.ndarray | None = None, head: int = 0, lead_s: float = 0.0) -> np.ndarray:
        """Modes, (plans, layers) codes, with a step below the limit, best first.

        Args:
          limit_s: seconds of a known step; plans that cannot be faster are skipped.
          fixed: forward modes to keep, GFGB or DHA for each layer, so that only DFGB is decided; None decides all.
          head: the number of first layers that are not GFGB.
          lead_s: seconds by which loads begin before the step, as they can in a chain if the first layers are not
            loaded.
        """
        link, gpu, tail, between_sum, between_end = (np.array([x]) for x in (-lead_s, 0.0, 0.0, 0.0, -np.inf))
        origin = np.zeros(1, dtype=np.int64)
        states = _States(link, gpu, tail, between_sum, between_end, self.copies.none(), origin)
        history, modes_of = [], []
        for index in range(self.size):
            options = self.options(index, fixed, head)
            states = _States.joined([self.after(states, index, mode) for mode in options])
            states = states.take(self.promising(states, index, limit_s))
            history.append(states.origin // 3)
            modes_of.append(states.origin % 3)
        closes = states.gpu + self.window_s(modes_of[-1])
        fits = np.flatnonzero(np.maximum(states.link + states.between_sum, states.between_end) <= closes)
        order = fits[np.argsort((states.gpu + states.tail)[fits], kind="stable")]
        found = [_trace(history, modes_of, int(state)) for state in order[:_MOST_FOUND]]
        return np.array(found, dtype=np.int8).reshape(len(found), self.size)

    def options(self, index: int, fixed: np.ndarray | None, head: int) -> tuple[int, ...]:
        """The allowed modes of a layer."""
        options: tuple[int, ...] = (GFGB, DHA, DFGB)
        if fixed is not None:
            options = (GFGB,) if fixed[index] == GFGB else (DHA, DFGB)
        elif index < head:
            options = (DHA, DFGB)
        is_last = index >= self.size - self.costs.num_last
        return tuple(mode for mode in options if mode != DFGB) if is_last else options

    def window_s(self, last_mode: np.ndarray) -> np.ndarray:
        """Seconds from the end of the forward to the window's end, at most if several layers share the last program."""
        if self.costs.num_last > 1:
            return np.full(len(last_mode), self.costs.longest_window_s())
        return np.where(last_mode == DHA, self.costs.backward_dha[-1], self.costs.backward[-1])

    def after(self, states: _States, index: int, mode: int) -> _States:
        """The states after one more layer in the given mode; `origin` is 3 * state + mode."""
        costs, held = self.costs, self.copies.held(states.held, index)
        load = np.where(held, 0.0, costs.load[index])
        link, gpu = states.link, states.gpu
        between_sum, between_end = states.between_sum, states.between_end
        if mode == GFGB:
            link = link + load
            gpu = np.where(held, gpu, np.maximum(gpu, link)) + costs.forward[index]
        else:
            link = link + costs.read[index]
            gpu = gpu + costs.forward_dha[index]
        if mode == DFGB:
            forward_end = gpu - costs.inter_forward[index]
            between_sum = between_sum + load
            between_end = np.maximum(between_end, forward_end) + load
        backward = costs.backward_dha if mode == DHA else costs.backward
        tail = backward[index] + np.maximum(states.tail, costs.tails[index])
        copies = self.copies.after(states.held, index, mode == GFGB)
        return _States(link, gpu, tail, between_sum, between_end, copies, 3 * np.arange(len(gpu)) + mode)

    def promising(self, states: _States, index: int, limit_s: float) -> np.ndarray:
        """Indices of at most a beam of states that may still beat the limit and that no other state beats."""
        forward = states.gpu + self.rest_forward[index]
        bound = forward + np.maximum(states.tail + self.rest_backward[index], self.least_tail)
        latest = limit_s - self.least_tail + self.costs.longest_window_s()
        between = np.maximum(states.link + states.between_sum, states.between_end)
        alive = np.flatnonzero((bound < limit_s) & (between <= latest))
        order = alive[np.argsort(bound[alive] + 0.5 * np.maximum(between - forward, 0.0)[alive], kind="stable")]
        if len(order) > 4 * self.beam:
            self.complete = False
            order = order[: 4 * self.beam]
        order = order[_undominated(states.take(order))]
        if len(order) > self.beam:
            self.complete = False
            order = order[: self.beam]
        return order


def _undominated(states: _States) -> np.ndarray:
    """Whether no other state is at least as good in every component; of equal states the first one stays.

    An earlier GPU also closes the window earlier, so DFGB loads are measured relative to the GPU's end.
    """
    keys = np.stack(
        [
            states.link,
            states.gpu,
            states.tail,
            states.link + states.between_sum - states.gpu,
            states.between_end - states.gpu,
        ]
    )
    as_good = holds_as_much(states.held)
    for key in keys:
        as_good &= key[:, None] <= key[None, :]
    equal = as_good & as_good.T
    earlier = np.arange(len(states.gpu))[:, None] < np.arange(len(states.gpu))[None, :]
    beaten = as_good & (~equal | earlier)
    return ~beaten.any(axis=0)


def _trace(history: list[np.ndarray], modes_of: list[np.ndarray], state: int) -> np.ndarray:
    modes = np.zeros(len(history), dtype=np.int8)
    for index in reversed(range(len(history))):
        modes[index] = modes_of[index][state]
        state = int(history[index][state])
    return modes
