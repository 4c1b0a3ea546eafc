"""Rows of the catalogue about what the coverage store says, and that it says no more than is so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalogue.given import orders
from catalogue.invariants import complete, identities, once
from catalogue.test_durability import at_ends, covered_to, landed, pipeline, stored
from catalogue.world import Cut, Refuse, Retain, Tear, World
from thalweg.core.ack import Ledger
from thalweg.core.coverage import Document, RangeSet


def test_coverage_never_over_claims_an_unwritten_batch(world: World) -> None:
    """If this is false, recovery trusts a range that was never written, and the loss is for good."""
    world.topic(world.name, 1)
    engine = world.engine(pipeline(world.name), kill_at="raw.sent#3")
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("the first batch is committed", lambda: at_ends(world))
    world.inject(Tear("raw"))
    world.produce(world.name, orders(range(20, 40), 1))
    world.wait_until("torn once, it has lost its power at the second try", lambda: not engine.running)
    assert covered_to(world, "raw") == {0: 20}
    assert len(set(stored(world))) == 20
    world.engine(pipeline(world.name))
    world.wait_until("committed", lambda: at_ends(world))
    assert covered_to(world, "raw") == {0: 40}
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


@pytest.mark.parametrize("after_s", [0.9, 2.3, 4.1])
def test_pod_loss_replays_at_most_one_checkpoint_interval(world: World, after_s: float) -> None:
    """If this is false, each crash repeats more work than an operator has been told, or leaves some of it undone."""
    world.topic(world.name, 1)
    slow = pipeline(world.name, on_failure="hold").replace("interval_ms: 200", "interval_ms: 1000")
    engine = world.engine(slow)
    world.produce(world.name, orders(range(10), 1))
    world.wait_until("committed", lambda: at_ends(world))
    begun, arrived = world.seconds(), [(world.seconds(), 10)]
    while world.seconds() < begun + after_s:
        first = arrived[-1][1]
        world.produce(world.name, orders(range(first, first + 5), 1))
        arrived.append((world.seconds(), first + 5))
        world.pass_time(0.1)
    engine.kill()
    killed = world.seconds()
    committed = world.truth.committed(world.name, world.name)[0]
    # One interval, and what was under way: a chunk's age, the checkpoint and the commit.
    older = [end for at, end in arrived if at < killed - 1.0 - 0.3 - 1.0]
    assert committed >= max(older, default=10), (committed, arrived, killed)
    world.engine(slow)
    world.wait_until("committed", lambda: at_ends(world))
    assert once("dest", np.array(landed(world))).holds
    assert complete("dest", world.truth.produced(world.name), np.array(landed(world))).holds
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def test_coverage_survives_the_sink_it_describes_being_down(world: World) -> None:
    """If this is false, the gaps of an outage are known only to the sink that had it."""
    world.topic(world.name, 2)
    world.engine(pipeline(world.name, on_failure="isolate"))
    world.inject(Cut("dest", 900.0))
    reached = []
    for i in range(3):
        world.produce(world.name, orders(range(20 * i, 20 * (i + 1)), 2))
        world.wait_until("committed", lambda: at_ends(world))
        reached.append((sum(covered_to(world, "raw").values()), sum(covered_to(world, "dest").values())))
    assert reached == [(20, 0), (40, 0), (60, 0)]
    assert landed(world) == []


def test_rebalance_owner_reads_durable_not_previous_local(world: World) -> None:
    """If this is false, a new owner skips what its predecessor had only in memory."""
    world.topic(world.name, 1)
    first = world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(50), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.inject(Refuse("raw", "replace", 50))  # what lands from here on is on no checkpoint
    world.produce(world.name, orders(range(50, 550), 1))
    world.wait_until("it has landed", lambda: len(landed(world)) == 550)
    assert covered_to(world, "raw") == {0: 50}
    first.kill()
    world.inject(Refuse("raw", "replace", 0))
    second = world.engine(pipeline(world.name, on_failure="hold"))
    world.wait_until("committed", lambda: at_ends(world))
    assert "starts" in second.log()
    assert covered_to(world, "raw") == covered_to(world, "dest") == {0: 550}
    assert once("dest", np.array(landed(world))).holds
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def test_concurrent_coverage_writers_merge_by_union(world: World) -> None:
    """If this is false, the later of two writers erases what the other one had recorded."""
    world.topic(world.name, 2)
    first = world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(100), 2))
    world.wait_until("something has landed", lambda: len(stored(world)) > 0)
    world.produce(world.name, orders(range(100, 200), 2))
    first.pause(10)
    world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(200, 300), 2))
    world.wait_until("the second one has everything", lambda: at_ends(world))
    world.pass_time(15)  # the first one wakes up, and writes what it still knows
    world.produce(world.name, orders(range(300, 400), 2))
    world.wait_until("committed", lambda: at_ends(world))
    assert covered_to(world, "raw") == covered_to(world, "dest") == world.truth.ends(world.name)


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=12)


@given(one=ranges, other=ranges, lost=ranges)
@settings(max_examples=300, deadline=None)
def test_range_compaction_never_closes_an_unverified_gap(
    one: list[tuple[int, int]], other: list[tuple[int, int]], lost: list[tuple[int, int]]
) -> None:
    """If this is false, tidying the coverage turns a gap of one record into a claim."""
    points = {p for a, b in (*one, *other) for p in range(a, b)}
    merged = Document("p", 0, 0, {"s": RangeSet(one)}, {"retention": RangeSet(lost)}).merged(
        Document("p", 0, 0, {"s": RangeSet(other)})
    )
    again = Document.decoded(merged.encoded())
    for found in (merged.ranges("s"), again.ranges("s"), RangeSet(one) | RangeSet(other)):
        assert {p for a, b in found for p in range(a, b)} == points
        assert all(b < c for (_, b), (c, _) in zip(list(found), list(found)[1:], strict=False)), "touching ranges are one"
    assert {p for a, b in again.explained["retention"] for p in range(a, b)} == {p for a, b in lost for p in range(a, b)}


def test_retention_jump_stays_a_gap(world: World) -> None:
    """Part of the row above: what retention took while nobody read is explained, and never covered."""
    world.topic(world.name, 1)
    engine = world.engine(pipeline(world.name))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))
    assert engine.stop() == 0
    world.produce(world.name, orders(range(20, 60), 1))
    world.inject(Retain(world.name, 0, 40))
    world.engine(pipeline(world.name))
    world.wait_until("committed", lambda: at_ends(world))
    (document,) = world.truth.checkpoints()
    assert document.sinks["raw"] == [(0, 20), (40, 60)]
    assert document.explained == [(20, 40)]


def test_coverage_scan_cost_scales_with_gaps_not_updates() -> None:
    """If this is false, a pipeline that has run for a year pays for every batch of it at each start."""

    def size(batches: int) -> int:
        """Bytes of the stored document after so many batches of ten records, ten of which failed."""
        failed = {round(batches * (i + 0.5) / 10) for i in range(10)}
        ledger = Ledger("p", 0, ["raw"], None)
        stored = Document("p")
        for batch in range(batches):
            start, stop = batch * 10, batch * 10 + 10
            ledger.claim(start, stop)
            if batch not in failed:
                ledger.landed("raw", start, stop)
            if batch % max(1, batches // 100) == 0:
                stored = replace(stored.merged(ledger.document()), version=stored.version + 1)
                ledger.checkpointed(stored)
        stored = replace(stored.merged(ledger.document()), version=10**6)
        assert len(stored.ranges("raw")) == 11
        return len(stored.encoded())

    few, many = size(1_000), size(100_000)
    # The numbers themselves grow by their digits: two more for a hundred times as many records, in 22 of them.
    assert many - few <= 22 * 2


def test_coverage_store_refuses_colocation_with_a_non_raw_sink(world: World) -> None:
    """If this is false, the outage of a destination takes the record of its own gaps with it."""
    for url in ("postgresql://db.example/orders", "postgres://DB.example:5432/orders?sslmode=require"):
        wrong = (
            pipeline(world.name, on_failure="hold")
            .replace("{postgres}", "postgresql://db.example/orders")
            .replace("coverage: {interval_ms: 200}", f'coverage: {{store: relational, url: "{url}", interval_ms: 200}}')
        )
        engine = world.engine(wrong)
        assert engine.wait_exit() == 78
        assert "coverage-colocated-with-non-raw-sink" in engine.log()


def test_overlapping_identities_are_told_apart() -> None:
    """The helpers of this file tell a repeat from a loss: a spec that could not would prove nothing."""
    produced = identities([0, 0], [0, 1])
    assert not once("dest", identities([0, 0, 0], [0, 1, 1])).holds
    assert not complete("raw", produced, identities([0], [0])).holds
