"""Contention for host memory: what the work of one lane takes of another lane's time.

Transfers and updates on the host all read and write host memory ("Breaking the Memory Wall", observation 5). Where it
is not fast enough for all of them at once, each is slower beside the others than alone. The model counts that as time
that a lane loses: a share of each second that another lane works. So a lane that is always busy, beside one that works
for some of that time, takes as much longer as was measured with both of them busy all the time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from jaxferry.errors import InputError
from jaxferry.records import check_keys, check_share

UP, DOWN, HOST = SHARING = ("H2D", "D2H", "host")
"""The lanes whose work is in host memory."""


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a JSON object, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True)
class Contention:
    """The shares of all pairs of lanes.

    Attributes:
      shares: for a lane that loses time, and each other lane: the seconds that it loses for each second of the other's
        work, in [0, 1]; lanes that are not named lose and take nothing.

    Raises:
      InputError: if a lane is not known or paired with itself, or a share is not acceptable.
    """

    shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        found: dict[str, dict[str, float]] = {}
        check_keys(_object(self.shares, "contention"), SHARING, "contention")
        for lane, others in self.shares.items():
            where = f"contention of {lane}"
            check_keys(_object(others, where), [other for other in SHARING if other != lane], where)
            own = {other: check_share(share, f"{where}: {other}") for other, share in others.items()}
            if kept := {other: share for other, share in own.items() if share}:
                found[lane] = kept
        object.__setattr__(self, "shares", found)

    def __bool__(self) -> bool:
        """Whether any lane loses time."""
        return bool(self.shares)

    def __hash__(self) -> int:
        return hash(self.matrix.tobytes())

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """The shares, (losing lanes, other lanes), in the order of `SHARING`."""
        return np.array([[self.shares.get(lane, {}).get(other, 0.0) for other in SHARING] for lane in SHARING])

    def lost_s(self, work_s: np.ndarray) -> np.ndarray:
        """The seconds that each lane loses to the others' work, both (lanes, ...) in the order of `SHARING`."""
        return np.tensordot(self.matrix, work_s, 1)

    @classmethod
    def between(cls, speeds: Mapping[tuple[str, str], float]) -> Self:
        """That of lanes which work all the time, in pairs.

        Args:
          speeds: of a lane beside another one, relative to its speed alone; for both lanes of each pair.
        """
        shares: dict[str, dict[str, float]] = {}
        for (lane, other), own in speeds.items():
            # In each second, `beside` seconds of the other's work, and `own` of this lane's.
            beside = speeds[other, lane]
            shares.setdefault(lane, {})[other] = min(max(1 - own, 0.0) / beside, 1.0) if beside > 0 else 1.0
        return cls(shares)

    @classmethod
    def of_matrix(cls, matrix: np.ndarray) -> Self:
        """That with these shares, see `matrix`."""
        shares: dict[str, dict[str, float]] = {lane: {} for lane in SHARING}
        for row, column in itertools.permutations(range(len(SHARING)), 2):
            shares[SHARING[row]][SHARING[column]] = float(matrix[row, column])
        return cls(shares)

    @classmethod
    def of_bandwidth(cls, up_bytes_per_s: float, down_bytes_per_s: float, host_bytes_per_s: float) -> Self:
        """That of transfers in both directions, and updates that take all the bandwidth of host memory.

        Transfers go first: updates get what they leave.
        """
        shares = {UP: up_bytes_per_s / host_bytes_per_s, DOWN: down_bytes_per_s / host_bytes_per_s}
        return cls({HOST: {lane: min(share, 1.0) for lane, share in shares.items()}})

    def to_json(self) -> dict[str, dict[str, float]]:
        """The shares as JSON."""
        return {lane: dict(others) for lane, others in self.shares.items()}


NO_CONTENTION = Contention()
