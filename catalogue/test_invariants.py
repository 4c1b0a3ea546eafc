"""Each invariant is silent about what is right and names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catalogue.invariants import (
    Checkpoint,
    checkpoint,
    committed_within,
    complete,
    covered,
    identities,
    no_loss,
    once,
    reach,
    spans,
)

NONE = identities([], [])


def at(*pairs: tuple[int, int]) -> Any:
    return identities([p for p, _ in pairs], [o for _, o in pairs])


ALL = at((0, 0), (0, 1), (1, 0), (3, 9_000_000_000))


def test_every_record_in_one_place_is_no_loss() -> None:
    assert no_loss(ALL, at((0, 0), (0, 1)), at((1, 0)), at((3, 9_000_000_000))).holds
    assert no_loss(ALL, at((0, 0), (0, 0), (0, 1), (1, 0), (3, 9_000_000_000)), NONE, NONE).holds  # repeats are `once`'s


@pytest.mark.parametrize(
    ("landed", "dlq", "dropped", "word"),
    [
        (at((0, 0), (0, 1)), at((1, 0)), NONE, "missing: partition 3 offsets [9000000000,9000000001)"),
        (ALL, NONE, at((0, 1)), "in two places: partition 0 offsets [1,2)"),
        (ALL, at((2, 5)), NONE, "extra: partition 2 offsets [5,6)"),
        (NONE, NONE, NONE, "missing: partition 0 offsets [0,2), partition 1 offsets [0,1)"),
    ],
)
def test_loss_is_named(landed: Any, dlq: Any, dropped: Any, word: str) -> None:
    found = no_loss(ALL, landed, dlq, dropped)
    assert not found.holds
    assert word in found.detail


def test_equal_counts_are_no_proof() -> None:
    assert not no_loss(at((0, 0), (0, 1)), at((0, 0), (0, 2)), NONE, NONE).holds
    assert not complete("raw", at((0, 0), (0, 1)), at((0, 0), (0, 2))).holds


def test_repeats_break_once_and_not_complete() -> None:
    twice = at((0, 0), (0, 1), (0, 1))
    assert not once("rows", twice).holds
    assert "partition 0 offsets [1,2)" in once("rows", twice).detail
    assert once("rows", at((0, 1), (1, 1))).holds
    assert complete("raw", at((0, 0), (0, 1)), twice).holds
    assert not complete("raw", at((0, 0), (0, 1)), at((0, 0))).holds


def document(**ranges: list[tuple[int, int]]) -> Checkpoint:
    return Checkpoint("t", 0, 0, ranges, [])


def test_gaps_are_seen() -> None:
    whole = document(raw=[(0, 10)], rows=[(0, 4), (5, 10)])
    assert covered([whole], "raw", {0: 10}).holds
    assert not covered([whole], "rows", {0: 10}).holds
    assert not covered([whole], "raw", {0: 11}).holds
    assert not covered([whole], "raw", {0: 10, 1: 1}).holds  # a partition without a document
    assert not covered([whole], "other", {0: 1}).holds
    explained = Checkpoint("t", 0, 0, {"rows": [(0, 4), (5, 10)]}, [(4, 5)])
    assert covered([explained], "rows", {0: 10}).holds


def test_reach_starts_at_the_base_and_never_bridges() -> None:
    assert reach([(5, 9), (9, 12)], 5) == 12
    assert reach([(6, 9)], 5) == 5
    assert reach([(0, 7), (3, 4), (8, 9)], 0) == 7
    assert reach([], 3) == 3


def test_commits_beyond_what_is_durable_are_seen() -> None:
    stored = document(raw=[(0, 10)], rows=[(0, 8)])
    assert committed_within([stored], ["raw"], {0: 10}).holds
    assert committed_within([stored], ["raw", "rows"], {0: 8}).holds
    assert not committed_within([stored], ["raw", "rows"], {0: 9}).holds
    assert not committed_within([], ["raw"], {0: 1}).holds
    assert committed_within([], ["raw"], {0: 0}).holds


def test_documents_are_read_by_their_format() -> None:
    body = {
        "format": "thalweg-coverage/1",
        "partition": "orders/a%2Fb/3@x",
        "version": 2,
        "base": 4,
        "sinks": {"raw": [[4, 9]]},
        "explained": {"retention": [[20, 30]], "reset": [[9, 10]]},
    }
    found = checkpoint(json.dumps(body))
    assert (found.partition, found.base, found.sinks, found.explained) == (3, 4, {"raw": [(4, 9)]}, [(9, 10), (20, 30)])
    assert found.topic == "a/b"
    with pytest.raises(ValueError, match="unknown coverage format"):
        checkpoint(json.dumps(body | {"format": "thalweg-coverage/2"}))


def test_ranges_are_told_shortly() -> None:
    assert spans(NONE) == "none"
    assert spans(at((1, 4), (1, 5), (2, 6))) == "partition 1 offsets [4,6), partition 2 offsets [6,7)"
    assert spans(at(*((0, 2 * i) for i in range(9)))).endswith("and 5 more range(s)")
