"""Coverage against sets of integers: the algebra, the document, the union of two writers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.core.coverage import Document, RangeSet

LIMIT = 40
RANGES = st.lists(st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)).map(lambda r: (min(r), max(r))), max_size=8)


def points(ranges: RangeSet) -> set[int]:
    return {i for start, stop in ranges for i in range(start, stop)}


def model(ranges: list[tuple[int, int]]) -> set[int]:
    return {i for start, stop in ranges for i in range(start, stop)}


@given(RANGES, RANGES)
def test_algebra_is_that_of_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b, x, y = RangeSet(one), RangeSet(other), model(one), model(other)
    assert points(a | b) == x | y
    assert points(a & b) == x & y
    assert points(a - b) == x - y
    assert a.size == len(x)
    assert bool(a) == bool(x)
    assert (a == b) == (x == y)
    if x == y:
        assert hash(a) == hash(b)


@given(RANGES)
def test_ranges_are_disjoint_never_touch_and_close_no_gap(said: list[tuple[int, int]]) -> None:
    found = list(RangeSet(said))
    assert all(start < stop for start, stop in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    assert points(RangeSet(said)) == model(said)


@given(RANGES, st.integers(-2, LIMIT + 2), st.integers(-2, LIMIT + 2))
def test_questions_are_answered_as_by_sets(said: list[tuple[int, int]], start: int, stop: int) -> None:
    ranges, have = RangeSet(said), model(said)
    assert (start in ranges) == (start in have)
    assert ranges.covers(start, stop) == (set(range(start, stop)) <= have)
    assert points(ranges.gaps(start, stop)) == set(range(start, stop)) - have
    reach = ranges.prefix(start)
    assert reach >= start
    assert set(range(start, reach)) <= have
    assert reach not in have or (reach == start and reach not in have)


def test_gap_of_one_position_stays_a_gap() -> None:
    assert list(RangeSet([(0, 5), (6, 9)])) == [(0, 5), (6, 9)]
    assert list(RangeSet([(0, 5), (5, 9)])) == [(0, 9)]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=5), st.integers(0, 15), st.integers(1, 3))
def test_one_more_interval_closes_no_gap_but_its_own(ranges: list[tuple[int, int]], start: int, length: int) -> None:
    before = RangeSet((a, a + n) for a, n in ranges)
    members = {i for a, b in before for i in range(a, b)} | set(range(start, start + length))
    after = before | RangeSet([(start, start + length)])
    assert {i for a, b in after for i in range(a, b)} == members
    assert after == RangeSet((i, i + 1) for i in members)  # one form for one set


def test_backward_range_is_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        RangeSet([(5, 4)])


SETS = st.dictionaries(st.sampled_from(["raw", "dest", "dlq"]), RANGES.map(RangeSet), max_size=3)
DOCUMENTS = st.builds(
    Document, st.just("p"), st.integers(0, 5), st.none() | st.integers(0, 9), SETS,
    st.dictionaries(st.sampled_from(["retention", "reset"]), RANGES.map(RangeSet), max_size=2),
)  # fmt: skip


def content(document: Document) -> tuple[object, ...]:
    sinks = {k: v for k, v in document.sinks.items() if v}
    return document.base, sinks, {k: v for k, v in document.explained.items() if v}


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
@settings(max_examples=60)
def test_merging_is_commutative_associative_and_idempotent(a: Document, b: Document, c: Document) -> None:
    assert content(a.merged(b)) == content(b.merged(a))
    assert content(a.merged(b).merged(c)) == content(a.merged(b.merged(c)))
    assert content(a.merged(a)) == content(a)
    assert a.merged(b).includes(a)
    assert a.merged(b).includes(b)
    if a.includes(b):
        assert content(a.merged(b)) == content(a)
        assert content(b.merged(a)) == content(a)
    else:
        assert (a.merged(b).base, a.merged(b).sinks, a.merged(b).explained) != (a.base, a.sinks, a.explained)


@given(DOCUMENTS)
def test_document_comes_back_as_it_was_stored(document: Document) -> None:
    assert Document.decoded(document.encoded()) == document


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"format":"other/1"}', b'{"format":"thalweg-coverage/1"}',
        b'{"format":"thalweg-coverage/1","partition":"p","version":1,"base":0,"sinks":{"raw":[[5,1]]},"explained":{}}',
        b'{"format":"thalweg-coverage/1","partition":"p","version":1,"base":0,"sinks":[],"explained":{}}',
        b"[" * 100_000,
        *(
            b'{"format":"thalweg-coverage/1","partition":%s,"version":%s,"base":%s,"sinks":%s,"explained":{}}' % some
            for some in (
                (b'"p"', b"1", b"0", b'{"raw":[[1.9,2.1]]}'),  # cut to [1,2) it would claim what was never written
                (b'"p"', b"1", b"0", b'{"raw":["12"]}'),
                (b'"p"', b"1", b"0", b'{"raw":[[true,5]]}'),
                (b'"p"', b"1", b"1e400", b"{}"),
                (b'"p"', b"1", b"0.5", b"{}"),
                (b'"p"', b"1.5", b"0", b"{}"),
                (b"null", b"1", b"0", b"{}"),
            )
        ),
    ],
)  # fmt: skip
def test_damaged_document_is_named_and_never_guessed(body: bytes) -> None:
    with pytest.raises(ValueError, match="coverage document"):
        Document.decoded(body)


def test_documents_of_two_partitions_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        Document("a").merged(Document("b"))


def test_stored_form_is_the_one_that_others_read() -> None:
    body = Document("s/t/0@i", 3, 5, {"raw": RangeSet([(5, 9)])}, {"retention": RangeSet([(9, 12)])}).encoded()
    assert json.loads(body) == {
        "format": "thalweg-coverage/1", "partition": "s/t/0@i", "version": 3, "base": 5,
        "sinks": {"raw": [[5, 9]]}, "explained": {"retention": [[9, 12]]},
    }  # fmt: skip
