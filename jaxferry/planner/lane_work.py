"""The work of a step's lanes for many plans at once, in seconds: what no order of tasks can undercut; (plans,) each."""

import numpy as np

from jaxferry.costs.tables import flags_of
from jaxferry.planner.batch import Batch


def shared_lanes_s(batch: Batch) -> np.ndarray:
    """The work in a step of the lanes that use host memory, with what they lose to each other, (lanes, plans).

    Lanes are in the order of `contention.SHARING`; each reuse of a copy counts as none.
    """
    work_s = np.stack([*_links_s(batch), _host_s(batch)])
    return work_s + batch.profile.contention.lost_s(work_s)


def lost_s(batch: Batch) -> np.ndarray:
    """What these lanes lose to each other, (lanes, plans)."""
    crossings_s = np.array([[sum(batch.fetch_s)], [sum(batch.save_s)], [0.0]])
    return batch.profile.contention.lost_s(np.stack([*_links_s(batch), _host_s(batch)]) + crossings_s)


def _links_s(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The work of the links up and down; values that leave and return do not count."""
    held, load_s = batch.held, batch.column("load_s")
    first = [members[0] for members in batch.profile.groups]
    up = (load_s * held.loads_forward).sum(axis=0) + (load_s * (held.loads_between | held.loads_backward)).sum(axis=0)
    trained = flags_of(batch.profile, "has_gradient")[first]
    up = up + (load_s[first] * (held.group_resident & batch.updates_on_host & trained)).sum(axis=0)
    down = (batch.column("offload_s") * held.offloads).sum(axis=0)
    if batch.shares_links:
        up = up + batch.forward_read_s.sum(axis=0) + batch.backward_read_s.sum(axis=0)
        down = down + batch.write_s.sum(axis=0)
    return up, down


def loops_s(batch: Batch) -> np.ndarray:
    """The longest loop of a layer's forward, all GPU work from there on, and the updates that follow; (plans,).

    No update of the layers up to this one starts before its backward has ended, and the last of them belongs to one
    of these, whose next forward waits for it.
    """
    programs_s = batch.forward_s + batch.column("inter_forward_s")
    backwards_s = batch.backward_s + batch.column("inter_backward_s")
    programs_s = programs_s + np.where(batch.column("has_backward"), backwards_s, 0.0)
    if not batch.after_all:
        programs_s = programs_s + batch.device_updates_s
    updates_s = np.zeros_like(programs_s)
    for group, members in enumerate(batch.profile.groups):
        updates_s[members[0]] = batch.profile.group_update_s[group] * batch.updates_on_host[group]
    loops_s = np.cumsum(programs_s[::-1], axis=0)[::-1] + np.cumsum(updates_s, axis=0)
    return np.where(updates_s > 0, loops_s, 0.0).max(axis=0)


def _host_s(batch: Batch) -> np.ndarray:
    """The work of the host."""
    return np.array(batch.profile.group_update_s) @ batch.updates_on_host


def gpu_s(batch: Batch) -> np.ndarray:
    """The GPU's work in a step, (plans,)."""
    runs_back = [layer.has_backward for layer in batch.layers]
    parameterless_s = sum(x.inter_forward_s + x.inter_backward_s * x.has_backward for x in batch.layers)
    programs_s = batch.forward_s.sum(axis=0) + batch.backward_s[runs_back].sum(axis=0) + parameterless_s
    return programs_s + batch.device_updates_s.sum(axis=0)
