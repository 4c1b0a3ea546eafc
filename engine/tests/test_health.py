"""The notice board: what makes a node ready, and what is merely shown."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.core.health import Board
from thalweg.core.topology import CodecPlan, CoveragePlan, Flow, OnFailure, Role, Sink, Source, Topology

HOLD, ISOLATE = OnFailure.HOLD, OnFailure.ISOLATE


def topology(*sinks: Sink) -> Topology:
    sources = tuple(Source(n, "kafka", "c", CodecPlan("bytes"), topics=(n,)) for n in ("orders", "clicks"))
    return Topology("p", "_twg_", sources, (), (), sinks, CoveragePlan("objects", "x", {}), Flow())


WITH_RAW = topology(
    Sink("raw", "parquet", Role.PRIMARY_RAW, HOLD),
    Sink("orders", "postgres", Role.DESTINATION, ISOLATE),
    Sink("held", "postgres", Role.DESTINATION, HOLD),
    Sink("dlq", "postgres", Role.DLQ, HOLD),
)
WITHOUT_RAW = topology(Sink("pg", "postgres", Role.DESTINATION, HOLD), Sink("aside", "parquet", Role.QUARANTINE, ISOLATE))


def assigned(of: Topology) -> Board:
    board = Board(of)
    for source in of.sources:
        board.started(source.name)
    return board


def test_a_node_is_ready_once_every_source_has_its_partitions() -> None:
    board = Board(WITH_RAW)
    assert not board.ready
    board.started("orders")
    assert not board.ready
    assert board.health()["status"] == "fail"
    board.started("clicks")
    assert board.ready
    assert board.health()["status"] == "pass"


@pytest.mark.parametrize(
    ("of", "stage", "ready", "status"),
    [
        (WITH_RAW, "sink:raw", False, "fail"),
        (WITH_RAW, "store:coverage", False, "fail"),
        (WITH_RAW, "source:orders", False, "fail"),
        (WITH_RAW, "sink:orders", True, "warn"),
        (WITH_RAW, "sink:dlq", True, "warn"),
        (WITHOUT_RAW, "sink:pg", False, "fail"),
        (WITHOUT_RAW, "sink:aside", True, "warn"),
    ],
)
def test_trouble_that_holds_the_source_ends_readiness_and_other_trouble_is_shown(
    of: Topology, stage: str, ready: bool, status: str
) -> None:
    board = assigned(of)
    board.failing(stage, "connection refused")
    health = board.health()
    assert (board.ready, health["status"]) == (ready, status)
    (check,) = health["checks"][stage]
    assert check == {"status": status, "output": "connection refused", "failures": 1}
    board.failing(stage, "")
    assert board.ready is ready
    board.ok(stage)
    assert (board.ready, board.health()["status"]) == (True, "pass")
    assert board.health()["checks"][stage] == [{"status": "pass", "failures": 2}]


def test_a_source_and_a_sink_of_one_name_are_two_stages() -> None:
    board = assigned(WITH_RAW)
    board.failing("sink:orders", "down")
    assert board.ready
    board.failing("source:orders", "down")
    assert not board.ready
    board.ok("source:orders")
    assert board.health()["checks"]["sink:orders"][0]["status"] == "warn"
    board.ok("orders")  # a bare name is the sink's
    assert board.health()["status"] == "pass"
    board.failing("clicks", "down")  # and a source's where no sink is called so
    assert board.health()["checks"]["source:clicks"][0]["status"] == "fail"


def test_levels_of_a_partition_go_with_it() -> None:
    board = Board(WITH_RAW)
    board.gauge("lag_records", "t/0", 5)
    board.gauge("lag_records", "t/1", 7)
    board.gauge("budget_used_bytes", "all", 9)
    board.forget("t/0")
    assert board.stats() == {"lag_records": {"t/1": 7}, "budget_used_bytes": {"all": 9}}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["orders", "clicks"]), st.integers(0, 9), st.sampled_from(["in", "landed", "shed", "dlq", "refused"])
    )
)


@given(STEPS)
def test_counters_are_sums(steps: list[tuple[str, int, str]]) -> None:
    board = Board(WITH_RAW)
    for name, n, what in steps:
        match what:
            case "in":
                board.decoded(name, n, 10 * n)
            case "landed":
                board.landed(name, n)
            case "shed":
                board.shed(name, n)
            case "dlq":
                board.count("dlq", n)
            case "refused":
                board.refused_commit(name)
    stats = board.stats()
    for name, (what, counter) in itertools.product(
        ("orders", "clicks"), {"in": "records_in", "landed": "rows_landed", "shed": "rows_shed"}.items()
    ):
        assert stats.get(counter, {}).get(name, 0) == sum(n for m, n, w in steps if (m, w) == (name, what))
    assert stats.get("bytes_in", {}).get("orders", 0) == 10 * stats.get("records_in", {}).get("orders", 0)
    assert stats.get("rows_judged", {}).get("dlq", 0) == sum(n for _, n, w in steps if w == "dlq")
    assert sum(stats.get("commits_refused", {}).values()) == sum(w == "refused" for *_, w in steps)
