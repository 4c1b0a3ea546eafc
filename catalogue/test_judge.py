"""The judge: each invariant, broken by hand, is named; and what is right is let be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from catalogue.invariants import Checkpoint, Judge, Key

KEY: Key = ("t", "i", 0)


class Log:
    """Ten records: the fourth belongs to the DLQ, the fifth is a marker."""

    low, end = 0, 10

    def expected(self, sink: str) -> npt.NDArray[np.int32]:
        rows = np.ones(10, dtype=np.int32)
        rows[4] = 0
        if sink == "dlq":
            return np.array([int(i == 3) for i in range(10)], dtype=np.int32)
        if sink == "dest":
            rows[3] = 0
        return rows


def judge(log: Log | None = None) -> Judge:
    made = log or Log()
    return Judge(["raw", "dest", "dlq"], ["dest", "dlq"], lambda _key: made)


def some(*offsets: int) -> npt.NDArray[np.int64]:
    return np.array(offsets, dtype=np.int64)


def document(base: int = 0, explained: list[tuple[int, int]] | None = None, **sinks: list[tuple[int, int]]) -> Checkpoint:
    return Checkpoint("t", 0, base, sinks, explained or [])


def everything(one: Judge, stop: int = 10) -> None:
    for sink in ("raw", "dest", "dlq"):
        at = np.flatnonzero(Log().expected(sink)[:stop])
        one.landed(sink, KEY, at)


def whole(stop: int = 10) -> Checkpoint:
    return document(raw=[(0, stop)], dest=[(0, stop)], dlq=[(0, stop)])


def test_what_is_right_is_let_be() -> None:
    one = judge()
    everything(one, 6)
    one.checkpointed(KEY, whole(6))
    one.committed(KEY, 6)
    one.landed("raw", KEY, some(5))  # raw may repeat
    for sink in ("raw", "dest"):
        one.landed(sink, KEY, np.arange(6, 10))
    one.checkpointed(KEY, whole(10))
    one.committed(KEY, 10)
    assert one.final([KEY], ["raw", "dest", "dlq"]) == []
    assert one.repeats == 1


BREAKS: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("content", [("landed", "raw", KEY, some(1), "offset 1 is not as it was")]),
    ("phantom", [("landed", "raw", KEY, some(4))]),  # a marker
    ("phantom", [("landed", "raw", KEY, some(10))]),  # beyond the log
    ("phantom", [("landed", "dest", KEY, some(3))]),  # the DLQ's
    ("once", [("landed", "dest", KEY, some(1, 2)), ("landed", "dest", KEY, some(2))]),
    ("coverage-before-durable", [("checkpointed", KEY, document(raw=[(0, 1)]))]),
    ("coverage-before-durable", [("landed", "raw", KEY, some(0, 2)), ("claimed", KEY, "raw", [(0, 3)])]),
    ("coverage-beyond-log", [("everything",), ("checkpointed", KEY, document(raw=[(0, 11)]))]),
    ("coverage-forgotten", [("everything",), ("checkpointed", KEY, whole()), ("checkpointed", KEY, whole(9))]),
    ("explained-untrue", [("checkpointed", KEY, document(explained=[(0, 3)]))]),
    ("commit-beyond-checkpoint", [("everything",), ("committed", KEY, 5)]),
    ("commit-beyond-checkpoint", [("everything",), ("checkpointed", KEY, whole(4)), ("committed", KEY, 5)]),
    ("commit-before-durable", [("committed", KEY, 2)]),
    ("commit-beyond-log", [("committed", KEY, 11)]),
    ("commit-went-back", [("everything",), ("checkpointed", KEY, whole()), ("committed", KEY, 9), ("committed", KEY, 8)]),
    ("no-loss", [("landed", "raw", KEY, some(0)), ("final", [KEY], ["raw"])]),
    ("no-loss", [("removed", "raw", KEY, some(3))]),
]


@pytest.mark.parametrize(("invariant", "steps"), BREAKS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BREAKS)])
def test_what_is_wrong_is_named(invariant: str, steps: list[tuple[Any, ...]]) -> None:
    one = judge()
    for name, *words in steps:
        if name == "everything":
            everything(one)
        else:
            getattr(one, name)(*words)
    assert invariant in {v.invariant for v in one.violations}
    assert all("t/0@i" in v.detail for v in one.violations)


def test_what_retention_took_before_the_start_was_never_promised() -> None:
    log = Log()
    log.low = 6
    one = judge(log)
    one.committed(KEY, 6)
    assert one.violations == []


def test_what_retention_took_later_is_a_gap_on_record_and_no_loss() -> None:
    log = Log()
    one = judge(log)
    everything(one, 3)
    one.checkpointed(KEY, whole(3))
    log.low = 6
    for sink in ("raw", "dest"):
        one.landed(sink, KEY, np.arange(6, 10))
    ranges = [(0, 3), (6, 10)]
    one.checkpointed(KEY, document(explained=[(3, 6)], raw=ranges, dest=ranges, dlq=ranges))
    one.committed(KEY, 10)
    assert one.final([KEY], ["raw", "dest", "dlq"]) == []


def test_a_gap_that_nobody_explains_may_not_be_committed_over() -> None:
    log = Log()
    one = judge(log)
    everything(one, 3)
    one.checkpointed(KEY, whole(3))
    log.low = 6
    for sink in ("raw", "dest"):
        one.landed(sink, KEY, np.arange(6, 10))
    ranges = [(0, 3), (6, 10)]
    one.checkpointed(KEY, document(raw=ranges, dest=ranges, dlq=ranges))
    one.committed(KEY, 10)
    assert {v.invariant for v in one.violations} == {"commit-beyond-checkpoint", "commit-before-durable"}
