"""Named instants where order matters.

`probe("raw.durable")` marks that the thing named has just become true. Unarmed it costs one attribute load and a
call. A simulator or a test arms a `Probes` object it hands to the node; on a real process the environment variable
`THALWEG_PROBE_KILL=name[#ordinal]` arms the same name, and the process then kills itself with SIGKILL there.

It decides nothing and never alters what the engine does besides ending it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

NAMES: Final = frozenset(
    {
        "budget.granted",
        "decoded",
        "raw.sent",
        "raw.durable",
        "sink.sent",
        "sink.durable",
        "dlq.durable",
        "coverage.recorded",
        "coverage.checkpointed",
        "source.acked",
        "partition.assigned",
        "partition.released",
        "lease.taken",
        "window.written",
    }
)


class Probes:
    """Counts each named instant and calls `armed` (if any) with the name and its ordinal, counted from 1."""

    __slots__ = ("_armed", "reached")

    def __init__(self, armed: Callable[[str, int], None] | None = None) -> None:
        self._armed = armed
        self.reached: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        if name not in NAMES:
            raise ValueError(f"no probe is called {name!r}")
        self.reached[name] += 1
        if self._armed is not None:
            self._armed(name, self.reached[name])
