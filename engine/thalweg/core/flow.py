"""How many bytes the node may hold, and when a sink's open chunk is due.

Decides admission: a batch enters only when the budget can hold what it will cost until every sink has let go of it.
It never waits and never measures by itself; the runtime does both and asks. (The four-state machine with its measured
p95, staging and shedding is a layer on top of this budget.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COPIES: Final = 3
"""Bytes held at the peak for one byte of payload: the envelope, its decoded columns, and one sink's encoding of them."""

FIRST_POLL: Final = 50
"""Records asked for before any has been seen: they may be of any size."""

GRANT_MIN: Final = 4 << 20
"""A budget never shrinks below this: with less, not one ordinary fetch could enter and nothing would ever drain."""


def grantable(limit_bytes: int, baseline_bytes: int) -> int:
    """Payload bytes that may be held when the whole process may have `limit_bytes` and needs `baseline_bytes` idle."""
    return max(GRANT_MIN, limit_bytes - baseline_bytes)


class Budget:
    """Permits counted in bytes. Giving back never waits, so acks progress however full the budget is.

    What is held by the engine's own count is one thing; what the process really occupies above its idle size (allocators
    keep, clients copy) is another. The larger of the two counts.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.observed_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What could be granted now; negative while something oversized is held."""
        return self.limit_bytes - max(self.used_bytes, self.observed_bytes)

    def try_take(self, cost_bytes: int) -> bool:
        """Grant if it fits. A cost above the whole limit is granted when nothing else is held: else it would wait forever."""
        if cost_bytes > self.free_bytes and self.used_bytes > 0:
            return False
        self.used_bytes += cost_bytes
        return True

    def observe(self, occupied_bytes: int) -> None:
        """What the process occupies above its idle size, measured now."""
        self.observed_bytes = max(0, occupied_bytes)

    def adjust(self, delta_bytes: int) -> None:
        """Correct an estimate once the real size is known."""
        self.used_bytes += delta_bytes

    def give(self, cost_bytes: int) -> None:
        """Return a grant. `ValueError` on returning what was never taken."""
        if cost_bytes > self.used_bytes:
            raise ValueError(f"{cost_bytes} bytes returned to a budget of which {self.used_bytes} are taken")
        self.used_bytes -= cost_bytes


def poll_records(free_bytes: int, record_bytes: float, records_max: int) -> int:
    """How many records to ask the client for, so that what comes back can be granted: at least 1."""
    if record_bytes <= 0:
        return min(FIRST_POLL, records_max)
    return max(1, min(records_max, int(free_bytes / (COPIES * record_bytes))))


@dataclass(frozen=True)
class Closing:
    """When an open chunk is handed to its sink: the first of these to be reached."""

    bytes_max: int
    rows_max: int
    age_s_max: float

    def due(self, size_bytes: int, rows: int) -> bool:
        """Whether size alone closes it."""
        return size_bytes >= self.bytes_max or rows >= self.rows_max
