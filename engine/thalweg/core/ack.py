"""The ack ledger: up to where may a source be told that its records are safe?

Theory. A source's order is the integers; the pipeline claims it interval by interval, from where the previous batch
ended. Each sink reports the intervals that are *durable* in it (an interval counts only when every row derived from
every record in it has landed there, so an unnest with 0, 1 or n children needs no counting of its own). A cursor `c`
is *safe* when `[base, c)` is durable in every gating sink: the primary raw, and each sink whose failure the topology
says must hold the source. Non-gating sinks never appear in that minimum, so none of them can hold or move a source.

    claimed ⊇ durable(sink) ⊇ checkpointed(sink);   committed ≤ prefix(⋂ gating checkpointed) ≤ prefix(⋂ gating durable)

The ledger is pure bookkeeping: it neither stores nor commits. It refuses a report of an interval that was never
claimed, since an over-claim is the one error this engine exists to prevent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from thalweg.core.coverage import NOTHING, Document, RangeSet


class Ledger:
    """Of one partition in one assignment."""

    def __init__(
        self, partition: str, base: int, gating: Iterable[str], stored: Document | None = None, committed: int | None = None
    ) -> None:
        """`base` is the cursor handed to `start()`; `stored` the checkpoint read at assignment, if there was one.

        `committed` is what the source has stored, where that is below `base`: what lies between was found durable, and
        may not be committed before a checkpoint says so.
        """
        self.partition = partition
        self.gating = frozenset(gating)
        if not self.gating:
            raise ValueError("a ledger needs at least one gating sink")
        self.base = base
        self.end = base  # everything in [base, end) is claimed
        self._stored = stored or Document(partition)
        self._durable: dict[str, RangeSet] = {}
        self._explained: dict[str, RangeSet] = {}
        self._told = False  # something was reported since `unsaved` last said no
        self.committed = base if committed is None else committed

    def claim(self, start: int, stop: int) -> None:
        """The next interval is on its way. It must begin where the last one ended."""
        if start != self.end or stop < start:
            raise ValueError(f"claim of [{start}, {stop}) does not continue {self.end}")
        self.end = stop

    def jump(self, to: int, reason: str) -> None:
        """The source went from `end` to `to` without us (retention, reset): an explained gap, never a claim."""
        if to < self.end:
            raise ValueError(f"cannot jump back from {self.end} to {to}")
        self._explained[reason] = self._explained.get(reason, NOTHING) | RangeSet([(self.end, to)])
        self._told = True
        self.end = to

    def landed(self, sink: str, start: int, stop: int) -> None:
        """`[start, stop)` is durable in `sink`. `ValueError` where it was never claimed."""
        if not (self.base <= start <= stop <= self.end):
            raise ValueError(f"{sink} reports [{start}, {stop}) but only [{self.base}, {self.end}) was claimed")
        self._durable[sink] = self._durable.get(sink, NOTHING) | RangeSet([(start, stop)])
        self._told = True

    def adopt(self, sink: str, ranges: RangeSet) -> None:
        """Ranges found durable in `sink` from before this assignment (orphans of a crash)."""
        self._durable[sink] = self._durable.get(sink, NOTHING) | ranges
        self._told = True

    def durable(self, sink: str) -> RangeSet:
        """What is durable in `sink` as far as this assignment knows, the stored checkpoint included."""
        return self._stored.ranges(sink) | self._durable.get(sink, NOTHING)

    def document(self) -> Document:
        """What a checkpoint should now say: the stored document and all that has been reported since."""
        return self._stored.merged(Document(self.partition, 0, self.base, dict(self._durable), dict(self._explained)))

    def unsaved(self) -> bool:
        """Whether a checkpoint would say more than the stored one does."""
        if self._told:
            self._told = not self._stored.includes(self.document())
        return self._told

    def checkpointed(self, stored: Document) -> None:
        """`stored` is now durable in the coverage store (it may hold other writers' ranges too)."""
        self._stored = self._stored.merged(stored)

    def safe(self) -> int:
        """The cursor that may be committed *now*: from the checkpoint just stored, never from live reports."""
        return self._prefix({name: self._stored.ranges(name) for name in self.gating}, self._stored.explained)

    def landed_prefix(self) -> int:
        """The cursor that could be committed once everything durable is checkpointed."""
        durable = {name: self.durable(name) for name in self.gating}
        return self._prefix(durable, self.document().explained)

    def drained(self) -> bool:
        """Whether all that was claimed is durable in every gating sink."""
        return self.landed_prefix() >= self.end

    def _prefix(self, sinks: Mapping[str, RangeSet], explained: Mapping[str, RangeSet]) -> int:
        excused = NOTHING
        for ranges in explained.values():
            excused = excused | ranges
        reach = min((ranges | excused).prefix(self.committed) for ranges in sinks.values())
        return max(self.committed, min(reach, self.end))
