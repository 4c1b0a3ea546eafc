"""The ledger against a naive model that keeps every position in a set."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from thalweg.core.ack import Ledger
from thalweg.core.coverage import Document, RangeSet

GATING = ("raw", "dest")
SINKS = (*GATING, "isolated")


class LedgerMachine(RuleBasedStateMachine):
    """Claims, landings in any order, jumps, checkpoints and commits."""

    @initialize(base=st.integers(0, 5), orphans=st.booleans())
    def start(self, base: int, orphans: bool) -> None:
        self.base = self.end = base
        self.durable: dict[str, set[int]] = {s: set() for s in SINKS}
        self.saved: dict[str, set[int]] = {s: set() for s in SINKS}
        self.excused: set[int] = set()
        self.saved_excused: set[int] = set()
        self.claims: list[tuple[int, int]] = []
        self.ledger = Ledger("p", base, GATING)
        if orphans:
            for sink in GATING:
                self.ledger.adopt(sink, RangeSet([(base, base + 3)]))
                self.durable[sink] |= set(range(base, base + 3))

    @rule(length=st.integers(0, 4))
    def claim(self, length: int) -> None:
        self.ledger.claim(self.end, self.end + length)
        self.claims.append((self.end, self.end + length))
        self.end += length

    @rule(length=st.integers(0, 3))
    def jump(self, length: int) -> None:
        self.ledger.jump(self.end + length, "retention")
        self.excused |= set(range(self.end, self.end + length))
        self.end += length

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), sink=st.sampled_from(SINKS))
    def land(self, data: st.DataObject, sink: str) -> None:
        start, stop = data.draw(st.sampled_from(self.claims))
        self.ledger.landed(sink, start, stop)
        self.durable[sink] |= set(range(start, stop))

    @rule()
    def checkpoint(self) -> None:
        document = self.ledger.document()
        for sink in SINKS:
            assert {i for a, b in document.ranges(sink) for i in range(a, b)} == self.durable[sink]
        self.ledger.checkpointed(document)
        self.saved = {s: set(v) for s, v in self.durable.items()}
        self.saved_excused = set(self.excused)
        assert not self.ledger.unsaved()

    @rule()
    def commit(self) -> None:
        self.ledger.committed = self.ledger.safe()

    def reach(self, sets: dict[str, set[int]], excused: set[int]) -> int:
        at = self.ledger.committed
        while at < self.end and all(at in sets[s] or at in excused for s in GATING):
            at += 1
        return at

    @invariant()
    def safe_is_the_prefix_of_the_checkpoint(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.safe() == self.reach(self.saved, self.saved_excused)
        assert self.ledger.landed_prefix() == self.reach(self.durable, self.excused)
        assert self.base <= self.ledger.committed <= self.ledger.safe() <= self.ledger.landed_prefix() <= self.end
        all_saved = self.durable == self.saved and self.excused == self.saved_excused
        assert self.ledger.unsaved() or all_saved
        assert self.ledger.drained() == (self.ledger.landed_prefix() == self.end)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_unclaimed_interval_cannot_land() -> None:
    ledger = Ledger("p", 10, ["raw"])
    ledger.claim(10, 12)
    for start, stop in ((9, 11), (11, 13), (12, 11)):
        with pytest.raises(ValueError, match="claimed"):
            ledger.landed("raw", start, stop)


def test_claims_follow_each_other() -> None:
    ledger = Ledger("p", 0, ["raw"])
    ledger.claim(0, 5)
    for start, stop in ((4, 6), (6, 7), (5, 4)):
        with pytest.raises(ValueError, match="does not continue"):
            ledger.claim(start, stop)
    with pytest.raises(ValueError, match="jump back"):
        ledger.jump(4, "reset")


def test_sink_that_does_not_gate_never_holds_and_never_moves() -> None:
    ledger = Ledger("p", 0, ["raw"])
    ledger.claim(0, 5)
    ledger.landed("isolated", 0, 5)
    ledger.checkpointed(ledger.document())
    assert ledger.safe() == 0
    ledger.landed("raw", 0, 5)
    assert ledger.safe() == 0  # durable, and not in the checkpoint yet
    ledger.checkpointed(ledger.document())
    assert ledger.safe() == 5


def test_other_writers_ranges_in_the_stored_document_count_only_as_far_as_claimed() -> None:
    ledger = Ledger("p", 0, ["raw"], Document("p", 1, 0, {"raw": RangeSet([(0, 100)])}))
    ledger.claim(0, 5)
    assert ledger.safe() == 5


def test_ledger_without_a_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="gating"):
        Ledger("p", 0, [])
