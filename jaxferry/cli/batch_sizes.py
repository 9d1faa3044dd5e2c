"""The search for the largest batch that fits: few sizes are traced, since each takes seconds."""

from __future__ import annotations

from collections.abc import Callable

from jaxferry.cli.profile import Traced

MOST_TRACES = 30  # traces of a search; linear memory needs three, nearly linear memory a few more
_MOST_GUESSES = 6  # traces at sizes where a line meets the budget; the search then halves
MOST_SAMPLES = (1 << 24) - 1  # larger batches are not tried


class Sizes:
    """The batch sizes that have been traced; saved activations may take `left_bytes` of host memory, None for any."""

    def __init__(self, trace: Callable[[int], Traced], budget_bytes: int) -> None:
        self._trace, self._budget_bytes = trace, budget_bytes
        self.left_bytes: int | None = None
        self._known: dict[int, Traced] = {}
        self._is_loading = True

    def of(self, batch_size: int) -> Traced:
        """Returns the model for batches of a size."""
        if batch_size not in self._known:
            self._known[batch_size] = self._limited(self._trace(batch_size))
        return self._known[batch_size]

    def limit(self, left_bytes: int) -> None:
        """Lets saved activations take no more host memory than this."""
        self.left_bytes = left_bytes
        self._known = {size: self._limited(each) for size, each in self._known.items()}

    def _limited(self, traced: Traced) -> Traced:
        if self.left_bytes is None:
            return traced
        left_bytes = max(self.left_bytes, 0)
        return traced.changed(lambda profile: profile.offloading_at_most(left_bytes))

    def largest(self, loading: bool) -> Traced:
        """Returns the largest size that fits, with all layers loaded or not; a size that fits so must be known."""
        self._is_loading = loading
        while len(self._known) < MOST_TRACES and (size := self._next()) is not None:
            self.of(size)
        return self._known[max(size for size, traced in self._known.items() if self._fits(traced))]

    def fits_on_host(self, traced: Traced) -> bool:
        """Returns whether saved activations fit into the host memory that training leaves; true without any."""
        num_bytes = 0 if self.left_bytes is None else traced.saved_bytes
        return not num_bytes or num_bytes <= (self.left_bytes or 0)

    def _need(self, traced: Traced) -> int:
        return traced.loading_bytes if self._is_loading else traced.smallest_bytes

    def _fits(self, traced: Traced) -> bool:
        return self._need(traced) <= self._budget_bytes and self.fits_on_host(traced)

    def _next(self) -> int | None:
        """Returns the size to trace next; None if the largest is known."""
        needs = sorted((size, self._need(traced)) for size, traced in self._known.items())
        fitting = [each for each in needs if self._fits(self._known[each[0]])]
        others = [each for each in needs if not self._fits(self._known[each[0]])]
        first, last = fitting[-1][0] + 1, others[0][0] - 1 if others else MOST_SAMPLES
        if first > last:
            return None
        if len(needs) > _MOST_GUESSES:
            return (first + last) // 2 if others else min(2 * first, last)
        # Where the line through the largest two sizes, or through one and none, meets the budget.
        none = 0, self._need(next(iter(self._known.values())).without_samples)
        (one, bytes_of_one), (two, bytes_of_two) = [none, *[*fitting[-2:], *others[:1]][-2:]][-2:]
        slope = (bytes_of_two - bytes_of_one) / (two - one)
        meets = int(one + (self._budget_bytes - bytes_of_one) / slope) if slope > 0 else 2 * two
        return min(max(meets, first), last)
