"""Times and memory of many plans at once, for the searches of this package."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxferry.costs import Profile, flags_of
from jaxferry.planner.batch import Batch
from jaxferry.planner.effort import fewer, is_searched
from jaxferry.planner.recurrences import Chain, Step, gpu_s, loops_s, shared_lanes_s
from jaxferry.step import (
    DFGB,
    STEPS_BY_NEED,
    UNLIMITED,
    Loads,
    OnDevice,
    Plan,
    UpdateOrder,
    Updates,
    as_updated,
    gradient_flags,
    gradients_to_update,
    mode_codes,
)

_MOST_STEPS = 24
_CHUNK_ELEMENTS = 1 << 18
_LEAST_IN_CHUNK = 64
_LEAST_STEPS = 4
_FEW_STEPS_BY_NEED = (2, 5)
_SAME = 1e-12


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Arrays with one element per plan.

    Attributes:
      forward_s: seconds to the end of the last inter_forward.
      step_s: seconds to the end of the last update.
      steady_step_s: seconds per step in an endless chain. It is exact for plans of GFGB, DHA and DFGB within the window
        if every layer has a gradient and no values go to host memory: such plans repeat from the second step on. For
        other plans it is exact, or an upper bound if the chain is not yet periodic after some steps. For DFGB outside
        the window it is the second step's time. With updates by need it equals the simulator's, or for a long model
        (`planner/effort.py`) the mean over fewer steps.
      needed_bytes: the least memory budget within which each plan runs, however long its transfers take; zeros if not
        requested.
      in_window: whether DFGB keeps MemFerry's rule: the last layer is not DFGB, and DFGB loads end before the first
        gradient leaves, at the end of the last layer's backward.
      room_matters: whether some backward waits for an offload to have room.
    """

    forward_s: np.ndarray
    step_s: np.ndarray
    steady_step_s: np.ndarray
    needed_bytes: np.ndarray
    in_window: np.ndarray
    room_matters: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Outcomes"]) -> "Outcomes":
        """The outcomes of all parts, one after another."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def some(self, rows: np.ndarray) -> "Outcomes":
        """The outcomes of some of the plans."""
        return Outcomes(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def replaced(self, rows: np.ndarray, others: "Outcomes") -> "Outcomes":
        """A copy with other outcomes in these rows."""
        fields = {field.name: getattr(self, field.name).copy() for field in dataclasses.fields(self)}
        for name, values in fields.items():
            values[rows] = getattr(others, name)
        return Outcomes(**fields)


class PlanEvaluator:
    """Evaluates plans for one profile."""

    def __init__(self, profile: Profile):
        self.profile = profile

    def __call__(
        self,
        modes: np.ndarray,
        grad_on_host: np.ndarray,
        recomputes: np.ndarray | bool = False,
        on_device: np.ndarray | bool = False,
        *,
        bulk: bool = False,
        after_all: bool = False,
        by_need: bool = False,
        memory_bytes: int | None = None,
        steady: bool = True,
        memory: bool = True,
    ) -> Outcomes:
        """Evaluates plans.

        Args:
          modes: (plans, layers) or (layers,) codes, see `recurrences.CODES`.
          grad_on_host: likewise, whether the gradient is written to the host.
          recomputes: likewise, whether the backward runs the forward again; only for layers that can do so.
          on_device: likewise, whether the layer's group is updated on the device; only if its layers are RESIDENT and
            their gradients stay.
          bulk: `loads: "bulk"`.
          after_all: `updates: "after-all"`.
          by_need: `update_order: "need"`.
          memory_bytes: the plans' `memory_bytes`.
          steady: whether to compute `steady_step_s`; else it is `step_s`.
          memory: whether to compute `needed_bytes`.
        """
        modes = np.atleast_2d(np.asarray(modes, dtype=np.int8))
        flags = (np.asarray(each, dtype=bool) for each in (grad_on_host, recomputes, on_device))
        columns = modes, *(np.broadcast_to(each, modes.shape) for each in flags)
        parts = []
        size = max(_LEAST_IN_CHUNK, _CHUNK_ELEMENTS // modes.shape[1])
        for first in range(0, max(len(modes), 1), size):  # one chunk even of no plans
            chunk = [each[first : first + size] for each in columns]
            batch = self._batch(chunk, bulk, after_all, by_need, memory_bytes or 0)
            parts.append(_outcomes(batch, steady, memory))
        return Outcomes.joined(parts)

    def _batch(
        self, columns: Sequence[np.ndarray], bulk: bool, after_all: bool, by_need: bool, memory_bytes: int
    ) -> Batch:
        """The plans with these modes and flags of gradients, recomputation and updates, (plans, layers) each."""
        modes, grad_on_host, recomputes, on_device = columns
        after_all = after_all or self.profile.updates_after_all
        again = recomputes.T.copy() if recomputes.any() else None
        there = None
        if on_device.any():
            groups = on_device[:, [members[0] for members in self.profile.groups]]
            groups = groups.T.copy()
            gradients = gradients_to_update(self.profile, groups, after_all)
            there = OnDevice(groups, self._updated_everywhere(after_all), gradients)
        return Batch(
            self.profile,
            modes.T.copy(),
            grad_on_host.T.copy(),
            bulk,
            after_all,
            again,
            by_need,
            memory_bytes,
            there,
        )

    @functools.cache  # noqa: B019 - as long as the evaluator lives
    def _updated_everywhere(self, after_all: bool) -> Profile:
        return as_updated(self.profile, range(len(self.profile.groups)), after_all)

    def bounds_s(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Lower bounds on `steady_step_s`, (plans,), without running a step.

        Takes modes and flags of gradients, recomputation and updates on the device, (plans, layers) each.

        A period is no shorter than the work of the GPU, of a link or of the host, or than the loops of a step. With
        updates by need `steady_step_s` is a mean over steps of the GPU. All updates of a step but the first start after
        the GPU's end in the step before the first, so the host's work counts one time less, and so do the links' and
        the loops.
        """
        return _bounds_s(self._batch(columns, False, False, False, UNLIMITED))

    def bounds(self, columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Likewise, and `needed_bytes`."""
        batch = self._batch(columns, False, False, False, UNLIMITED)
        return _bounds_s(batch), batch.needs.natural

    def waits_for_room(
        self, columns: Sequence[np.ndarray], bulk: bool, after_all: bool, memory_bytes: int
    ) -> np.ndarray:
        """`Outcomes.room_matters` with so much memory, without running a step; see `bounds` for `columns`."""
        return self._batch(columns, bulk, after_all, False, memory_bytes).room_matters

    def plan(self, plan: Plan) -> Outcomes:
        """Evaluates one plan; arrays of one element.

        Only the simulator knows updates that stream through the GPU.
        """
        assert not any(plan.updates_streamed)
        return self(
            mode_codes(plan),
            gradient_flags(plan),
            np.array(plan.recomputes),
            np.array(plan.updates_on_device) & flags_of(self.profile, "has_gradient")[:, 0],
            bulk=plan.loads is Loads.BULK,
            after_all=plan.updates is Updates.AFTER_ALL,
            by_need=plan.update_order is UpdateOrder.NEED,
            memory_bytes=plan.memory_bytes,
        )


def _outcomes(batch: Batch, steady: bool, memory: bool) -> Outcomes:
    chain = Chain(batch)
    first = Step(chain)
    step_s = np.maximum(chain.host, first.updated_on_gpu)
    period_s = _period_s(batch, chain, first) if steady else step_s
    is_late = (batch.modes[list(batch.profile.programs[-1])] == DFGB).any(axis=0)
    in_window = ~is_late & (first.between_end <= first.window)
    needed_bytes = batch.needs.natural if memory else np.zeros(batch.num_plans, dtype=np.int64)
    return Outcomes(first.forward_end, step_s, period_s, needed_bytes, in_window, batch.room_matters)


def _period_s(batch: Batch, chain: Chain, step: Step) -> np.ndarray:
    """The growth of the host's end over a step, once all boundary times grow equally, given the first step.

    If they do not, the largest growth is an upper bound on the period (Collatz and Wielandt's). With updates by need it
    is the mean between two steps, as in the simulator. Plans whose times grow equally take no part in further steps.

    The second step's time is the period if every load waits for an update and there is no RELOAD, no RESIDENT and no
    fetch. Then a step depends on the previous one only by the lead of its loads. The lead comes from the backward,
    which no load delays within the window.
    """
    most_steps = fewer(_MOST_STEPS, batch.num_layers, _LEAST_STEPS)
    from_step, to_step = _steps_by_need(batch.num_layers)
    before_s, num_steps = chain.host, 1
    if not batch.by_need:
        Step(chain)
        num_steps = 2
        if batch.is_plain and (batch.modes <= DFGB).all():
            return chain.host - before_s
    most_steps = to_step if batch.by_need else most_steps
    period_s, rows, from_s = np.zeros(batch.num_plans), np.arange(batch.num_plans), step.last_program
    ended = np.zeros(batch.num_plans, dtype=bool)
    while True:
        before = chain.boundary()
        step, num_steps = Step(chain), num_steps + 1
        from_s = step.last_program if num_steps == from_step else from_s
        growth = chain.boundary() - before
        highest = growth.max(axis=0)
        is_same = (highest - growth.min(axis=0) <= _SAME * chain.host) & (num_steps > 2)
        highest = (step.last_program - from_s) / (to_step - from_step) if batch.by_need else highest
        # By need, rounding may part times that have grown equally: as in the simulator, the first such growth counts.
        period_s[rows] = np.where(ended, period_s[rows], np.where(is_same, growth[0], highest))
        ended |= is_same
        if num_steps >= most_steps or ended.all():
            return period_s
        if len(rows) > _LEAST_IN_CHUNK and 2 * ended.sum() > len(rows):
            left = np.flatnonzero(~ended)
            rows, from_s, ended, chain = rows[left], from_s[left], ended[left], chain.some(left)


def _bounds_s(batch: Batch) -> np.ndarray:
    first, last = _steps_by_need(batch.num_layers)
    others_s = np.maximum(shared_lanes_s(batch).max(axis=0), loops_s(batch)) * (1 - 1 / (last - first))
    return np.maximum(gpu_s(batch), others_s)


def _steps_by_need(num_layers: int) -> tuple[int, int]:
    """The first and the last step of the mean."""
    return STEPS_BY_NEED if is_searched(num_layers) else _FEW_STEPS_BY_NEED
