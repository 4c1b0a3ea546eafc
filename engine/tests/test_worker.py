"""The worker and the pipeline on stock asyncio, with a log and sinks in memory: what is acked, when, and what is not.

Nothing here sleeps to let something happen: each step waits for the event it is about, under one generous deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.codecs import codec_of
from thalweg.core.batch import ENVELOPE, Chunk, Cursor, Frame, KafkaCursor, Partition
from thalweg.core.coverage import NOTHING, Document, RangeSet
from thalweg.core.flow import Budget, Closing
from thalweg.core.health import Board
from thalweg.core.topology import (
    CodecPlan,
    CoveragePlan,
    Flow,
    OffsetReset,
    OnFailure,
    Role,
    Rule,
    Sink,
    Source,
    SqlNode,
    Topology,
    Verdict,
)
from thalweg.errors import Permanent, RefusedNow, RowRefusal, RowsRefused, Transient
from thalweg.ports import (
    Adrift,
    Assigned,
    Bounds,
    Capabilities,
    Event,
    Lost,
    Outside,
    Position,
    Records,
    Revoked,
)
from thalweg.probes import Probes
from thalweg.runtime.pipeline import Pipeline, _Channel, _Pending
from thalweg.runtime.transform import Transform
from thalweg.runtime.worker import Worker

T = TypeVar("T")
PART = Partition("s", "c", "t", 0, "i")
OTHER = replace(PART, number=1)
DEADLINE_S = 20


class Log:
    """A consumer whose events a test pushes; it remembers what it was told."""

    capabilities = Capabilities(True, True, True, False)

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.stored: dict[Partition, Cursor | None] = {}
        self.log: dict[Partition, Bounds] = {}
        self.commits: list[dict[Partition, int]] = []
        self.refusals: list[Exception] = []
        self.done: dict[int, asyncio.Event] = {}
        self.starts: dict[Partition, int] = {}
        self.order: list[str] = []
        self.paused: set[Partition] = set()
        self.changed = asyncio.Event()
        self.token = 0

    def _note(self, what: str) -> None:
        self.order.append(what)
        self.changed.set()

    def push(self, *events: Event) -> None:
        for event in events:
            self.events.put_nowait(event)

    def assign(self, *parts: Partition) -> int:
        self.token += 1
        self.push(Assigned(self.token, parts))
        return self.token

    def revoke(self, *parts: Partition) -> int:
        self.token += 1
        self.push(Revoked(self.token, parts))
        return self.token

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        try:
            async with asyncio.timeout(0.01):
                out = [await self.events.get()]
        except TimeoutError:
            return []
        while not self.events.empty():
            out.append(self.events.get_nowait())
        return out

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        self.starts.update({p: c.next for p, c in at.items()})
        self._note("start")

    async def release(self, token: int) -> None:
        self._note(f"release {token}")

    async def seek(self, part: Partition, at: Cursor) -> None:
        self._note(f"seek {at.next}")

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        return {p: self.stored.get(p) for p in parts}

    async def bounds(self, parts: Sequence[Partition], *, known: bool = False) -> Mapping[Partition, Bounds]:
        return {p: self.log.get(p, Bounds(KafkaCursor(0), KafkaCursor(1 << 40))) for p in parts}

    async def commit(self, at: Mapping[Partition, Cursor]) -> None:
        if self.refusals:
            self._note("refused")
            raise self.refusals.pop(0)
        self.commits.append({p: c.next for p, c in at.items()})
        self.stored.update(at)
        self._note(f"commit {sorted(c.next for c in at.values())}")

    async def pause(self, parts: Sequence[Partition]) -> None:
        self.paused |= set(parts)
        self._note("pause")

    async def resume(self, parts: Sequence[Partition]) -> None:
        self.paused -= set(parts)
        self._note("resume")

    async def leave(self) -> None:
        self.revoke(*self.starts)
        self._note("leave")

    async def close(self) -> None:
        self._note("close")


class Memory:
    """A sink in memory: `gate` holds it back, `errors` are raised first, one a call."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.chunks: list[tuple[int, int, int]] = []
        self.late: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.forever: Exception | None = None
        self.already: RangeSet = NOTHING
        self.changed = asyncio.Event()

    async def open(self) -> None: ...

    async def found(self, part: Partition, base: int, recorded: RangeSet) -> RangeSet:
        return self.already

    async def land(self, chunk: Chunk, label: str = "") -> None:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        if self.forever is not None:
            self.changed.set()
            raise self.forever
        for frame in chunk.frames:
            positions = frame.envelope.column("position").to_pylist()
            for row, origin in zip(frame.rows.to_pylist(), frame.origin.to_pylist(), strict=True):
                self.rows.append({"_at": positions[origin] if positions else None, **row})
        if label:
            self.late.append(label)
        else:
            self.chunks.append((chunk.start, chunk.stop, chunk.rows))
        self.changed.set()

    async def close(self) -> None: ...


class Checkpoints:
    """A coverage store in memory."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.errors: list[Exception] = []

    async def open(self) -> None: ...

    async def load(self, partition: str) -> Document | None:
        return self.documents.get(partition)

    async def merge(self, delta: Document) -> Document:
        if self.errors:
            raise self.errors.pop(0)
        before = self.documents.get(delta.partition, Document(delta.partition))
        self.documents[delta.partition] = stored = replace(before.merged(delta), version=before.version + 1)
        return stored

    async def partitions(self) -> Sequence[str]:
        return sorted(self.documents)

    async def close(self) -> None: ...


class Here:
    """Clock of the running loop, and computing on the spot."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return 0

    async def run(self, work: Callable[..., T], *args: object) -> T:
        return work(*args)


def records(*values: bytes | None, start: int = 0, stop: int | None = None, part: Partition = PART) -> Records:
    """Consecutive records from `start`; `stop` beyond them claims the rest."""
    n = len(values)
    batch = pa.record_batch(
        [
            pa.array(range(start, start + n), pa.int64()),
            pa.array([0] * n, pa.timestamp("ms", tz="UTC")),
            pa.array([1] * n, pa.int8()),
            pa.array([None] * n, pa.binary()),
            pa.array([None] * n, ENVELOPE.field("headers").type),
            pa.array(values, pa.binary()),
        ],
        schema=ENVELOPE,
    )
    return Records(part, KafkaCursor(start), KafkaCursor(stop if stop is not None else start + n), batch)


def row(value: int) -> bytes:
    return b'{"a":%d}' % value


RAW = Sink("raw", "parquet", Role.PRIMARY_RAW, OnFailure.HOLD, age_ms_max=5)
DEST = Sink("dest", "postgres", Role.DESTINATION, OnFailure.HOLD, input="kept", age_ms_max=5)
DLQ = Sink("dlq", "postgres", Role.DLQ, OnFailure.HOLD, age_ms_max=5)
SOURCE = Source(
    "s", "kafka", "c", CodecPlan("json", pa.schema([("a", pa.int64())])), ("t",), "g", offset_reset=OffsetReset.EARLIEST
)


@dataclass
class Bench:
    """A running worker and what surrounds it."""

    log: Log
    sinks: dict[str, Memory]
    store: Checkpoints
    worker: Worker
    pipeline: Pipeline
    reports: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for the engine to make `done()` true; every pass yields to it until something moved."""
        async with asyncio.timeout(DEADLINE_S):
            while not done():  # noqa: ASYNC110 - a yield to whatever moves, not a wait of some length
                await asyncio.sleep(0)

    def committed(self, part: Partition = PART) -> int | None:
        cursor = self.log.stored.get(part)
        return None if cursor is None else cursor.next

    def moved(self) -> int:
        """How far the source was ever told to move (a start position is stored as such, which moves nothing)."""
        return max((at - self.log.starts[part] for commit in self.log.commits for part, at in commit.items()), default=0)

    async def stop(self) -> None:
        self.worker.stop()
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task


@asynccontextmanager
async def bench(
    *,
    source: Source = SOURCE,
    sinks: Sequence[Sink] = (RAW, DEST, DLQ),
    rules: Sequence[Rule] = (),
    sql: str = "SELECT a FROM source",
    budget: int = 64 << 20,
    prepare: Callable[[Bench], None] = lambda b: None,
    drain_ms: int = 2_000,
) -> AsyncIterator[Bench]:
    topology = Topology(
        "p", "_twg_", (source,), (SqlNode("kept", "records", sql),), tuple(rules), tuple(sinks),
        CoveragePlan("objects", "", {}, interval_ms=1), Flow(poll_wait_ms=10), None, drain_ms,
    )  # fmt: skip
    log, store, here = Log(), Checkpoints(), Here()
    landers = {sink.name: Memory() for sink in sinks}
    reports: list[str] = []

    def unused(*_: object) -> object:
        raise AssertionError("not in this test")

    world = Outside(here, here, unused, unused, unused, unused, lambda: 0, lambda: None, lambda event, **_: reports.append(event))  # type: ignore[arg-type]
    stages = [source.name, *(s.name for s in sinks), "coverage"]
    ready: asyncio.Future[Bench] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline = Pipeline(
                topology,
                world,
                landers,
                {source.name: codec_of(source.codec)},
                {},
                {source.name: Transform(topology.nodes, topology.rules)},
                Budget(budget),
                Board(topology, stages),
                Probes(),
                tasks,
            )
            worker = Worker(source, log, store, pipeline)
            b = Bench(log, landers, store, worker, pipeline, reports)
            prepare(b)
            ready.set_result(b)
            await tasks.create_task(worker.run())
            pipeline.close()

    task = asyncio.create_task(run())
    b = await ready
    b.task = task
    try:
        yield b
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_committed_is_the_end_once_every_gating_sink_has_it() -> None:
    async with bench() as b:
        b.log.assign(PART)
        b.log.push(records(row(1), row(2)), records(row(3), start=2, stop=5))
        await b.until(lambda: b.committed() == 5)
        assert [r["a"] for r in b.sinks["dest"].rows] == [1, 2, 3]
        assert [r["value"] for r in b.sinks["raw"].rows] == [row(1), row(2), row(3)]
        document = b.store.documents[PART.slug]
        assert document.ranges("raw") == document.ranges("dest") == document.ranges("dlq") == RangeSet([(0, 5)])
        await b.stop()
        assert b.log.order[-1] == "close"


async def test_batch_emptied_by_a_filter_is_acked() -> None:
    async with bench(sql="SELECT a FROM source WHERE a > 100") as b:
        b.log.assign(PART)
        b.log.push(records(row(1), row(2)))
        await b.until(lambda: b.committed() == 2)
        assert b.sinks["dest"].rows == []
        assert b.sinks["dest"].chunks == [(0, 2, 0)]


async def test_dropping_a_later_record_does_not_commit_past_an_undelivered_one() -> None:
    drop = Rule("r", "kept", Verdict.DROP, "dropped", column="a", maximum=2)
    async with bench(rules=[drop]) as b:
        b.sinks["dest"].gate.clear()
        b.log.assign(PART)
        b.log.push(records(row(2), start=0), records(row(3), start=1), records(row(4), start=2))
        await b.until(lambda: b.store.documents.get(PART.slug, Document("")).ranges("raw").covers(0, 3))
        assert b.moved() == 0
        b.sinks["dest"].gate.set()
        await b.until(lambda: b.committed() == 3)
        assert [r["a"] for r in b.sinks["dest"].rows] == [2]
        assert b.sinks["dlq"].rows == []


async def test_bad_record_goes_to_the_dlq_and_its_neighbours_flow() -> None:
    async with bench() as b:
        b.log.assign(PART)
        b.log.push(records(row(1), b'{"a":1iii}', row(3), None))
        await b.until(lambda: b.committed() == 4)
        assert [r["a"] for r in b.sinks["dest"].rows] == [1, 3, None]
        (bad,) = b.sinks["dlq"].rows
        assert (bad["_twg_source_offset"], bad["_twg_payload"]) == (1, b'{"a":1iii}')


async def test_refused_commit_is_tried_again_and_ownership_stays() -> None:
    async with bench() as b:
        b.log.refusals = [RefusedNow("rebalance in progress")] * 3
        b.log.assign(PART)
        b.log.push(records(row(1)))
        await b.until(lambda: b.committed() == 1)
        assert b.log.order.count("refused") == 3
        b.log.push(records(row(2), start=1))
        await b.until(lambda: b.committed() == 2)


async def test_revoke_lands_checkpoints_and_commits_before_release() -> None:
    slow = replace(RAW, age_ms_max=3_600_000)  # would stay open for an hour
    async with bench(sinks=(slow, DEST, DLQ)) as b:
        b.log.assign(PART, OTHER)
        b.log.push(records(row(1)))
        await b.until(lambda: b.sinks["dest"].rows != [])
        token = b.log.revoke(PART)
        await b.until(lambda: f"release {token}" in b.log.order)
        assert b.committed() == 1
        assert b.log.order.index("commit [1]") < b.log.order.index(f"release {token}")
        b.log.push(records(row(9), start=1))  # polled in the same call as the revoke: not ours any more
        b.log.push(records(row(5), part=OTHER))
        await b.until(lambda: len(b.sinks["dest"].rows) == 2)
        assert [r["a"] for r in b.sinks["dest"].rows] == [1, 5]


async def test_lost_partition_is_forgotten_at_once() -> None:
    async with bench() as b:
        b.sinks["raw"].gate.clear()
        b.log.assign(PART)
        b.log.push(records(row(1)))
        await b.until(lambda: b.sinks["dest"].rows != [])
        b.log.push(Lost((PART,)))
        await b.until(lambda: not b.worker.owned)
        b.sinks["raw"].gate.set()
        await b.until(lambda: b.pipeline.budget.used_bytes == 0)
        assert b.moved() == 0
        assert b.moved() == 0


async def test_isolated_sink_in_trouble_never_holds_the_source_and_its_gap_is_recorded() -> None:
    isolated = replace(DEST, on_failure=OnFailure.ISOLATE)
    async with bench(sinks=(RAW, isolated, DLQ)) as b:
        b.sinks["dest"].forever = Transient("connection refused")
        b.log.assign(PART)
        b.log.push(records(row(1), row(2)))
        await b.until(lambda: b.committed() == 2)
        document = b.store.documents[PART.slug]
        assert document.ranges("raw") == RangeSet([(0, 2)])
        assert not document.ranges("dest")
        await b.stop()


async def test_isolated_sink_in_trouble_lets_go_of_what_the_source_needs() -> None:
    isolated = replace(DEST, on_failure=OnFailure.ISOLATE)
    wide = b'{"a":3,"x":"' + b"x" * 1_000 + b'"}'
    first = records(row(1), row(2))
    async with bench(sinks=(RAW, isolated, DLQ), budget=6_000) as b:
        b.sinks["dest"].forever = Transient("connection refused")
        b.log.assign(PART)
        b.log.push(first)
        await b.until(lambda: b.committed() == 2 and "sink.retry" in b.reports)
        assert b.pipeline.budget.used_bytes > 0
        b.log.push(records(wide, wide, start=2))  # more than is free, and only the isolated sink could give it back
        await b.until(lambda: b.committed() == 4)
        assert b.reports.count("sink.shed") == 1
        assert b.pipeline.board.counters["rows_shed", "dest"] == 4  # those that it held, and the new ones, too many for its share
        await b.until(lambda: b.pipeline.budget.used_bytes == 0)
        b.sinks["dest"].forever = None
        b.log.push(records(row(5), start=4))
        await b.until(lambda: b.store.documents[PART.slug].ranges("dest") == RangeSet([(4, 5)]))
        assert [r["a"] for r in b.sinks["dest"].rows] == [5]
        await b.stop()


async def test_permanent_failure_of_a_holding_sink_stops_and_moves_nothing() -> None:
    async with bench() as b:
        b.sinks["dest"].errors = [Permanent("password authentication failed")]
        b.log.assign(PART)
        b.log.push(records(row(1)))
        assert b.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await b.task
        assert caught.group_contains(Permanent, match="password")
        assert b.moved() == 0
        assert b.log.order[-1] == "close"


async def test_row_refused_by_a_sink_is_in_the_dlq_before_the_rest_lands() -> None:
    async with bench() as b:
        b.sinks["dest"].errors = [RowsRefused([RowRefusal(1, "text-nul", "NUL in text")])]
        b.sinks["dlq"].gate.clear()
        b.log.assign(PART)
        b.log.push(records(row(1), row(2), row(3)))
        await b.until(lambda: not b.sinks["dest"].errors)
        assert b.sinks["dest"].rows == []
        b.sinks["dlq"].gate.set()
        await b.until(lambda: b.committed() == 3)
        assert [r["a"] for r in b.sinks["dest"].rows] == [1, 3]
        (bad,) = b.sinks["dlq"].rows
        assert (bad["code"], bad["stage"], bad["_twg_payload"]) == ("text-nul", "sink:dest", row(2))
        assert b.sinks["dlq"].late == ["dest"]


async def test_refused_record_without_a_dlq_stops_with_the_reason() -> None:
    async with bench(sinks=(RAW, DEST)) as b:
        b.log.assign(PART)
        b.log.push(records(b"nonsense"))
        assert b.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await b.task
        assert caught.group_contains(Permanent, match="no DLQ")
        assert b.moved() == 0


async def test_trailing_marker_is_committed() -> None:
    async with bench() as b:
        b.log.assign(PART)
        b.log.push(records(row(1)), Position(PART, KafkaCursor(2)))
        b.log.push(records(row(3), start=2), Position(PART, KafkaCursor(9)))
        await b.until(lambda: b.committed() == 9)
        assert b.store.documents[PART.slug].ranges("raw") == RangeSet([(0, 9)])
        assert [r["_at"] for r in b.sinks["dest"].rows] == [0, 2]


async def test_unreachable_coverage_store_holds_commits_not_records() -> None:
    async with bench() as b:
        b.store.errors = [Transient("503 SlowDown")] * 5
        b.log.assign(PART)
        b.log.push(records(row(1)))
        await b.until(lambda: b.committed() == 1)
        assert b.store.errors == []


async def test_start_skips_what_every_gating_sink_holds_and_commits_it() -> None:
    def prepare(b: Bench) -> None:
        b.log.stored[PART] = KafkaCursor(5)
        for sink in b.sinks.values():
            sink.already = RangeSet([(5, 8)])

    async with bench(prepare=prepare) as b:
        b.log.assign(PART)
        await b.until(lambda: b.committed() == 8)
        assert b.log.starts[PART] == 8


async def test_stored_offset_below_the_log_start_is_an_error_unless_allowed() -> None:
    def prepare(b: Bench) -> None:
        b.log.stored[PART] = KafkaCursor(5)
        b.log.log[PART] = Bounds(KafkaCursor(100), KafkaCursor(200))

    async with bench(source=replace(SOURCE, offset_reset=OffsetReset.ERROR), prepare=prepare) as b:
        b.log.assign(PART)
        assert b.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await b.task
        assert caught.group_contains(Permanent, match="below the log start 100")
        assert b.moved() == 0

    async with bench(prepare=prepare) as b:
        b.log.assign(PART)
        b.log.push(records(row(1), start=100))
        await b.until(lambda: b.committed() == 101)
        document = b.store.documents[PART.slug]
        assert document.explained == {"retention": RangeSet([(5, 100)])}
        assert document.ranges("raw") == RangeSet([(100, 101)])


async def test_adrift_in_the_middle_becomes_an_explained_gap() -> None:
    async with bench() as b:
        b.log.assign(PART)
        b.log.push(records(row(1)))
        await b.until(lambda: b.committed() == 1)
        b.log.log[PART] = Bounds(KafkaCursor(50), KafkaCursor(60))
        b.log.push(Adrift(PART, KafkaCursor(1)))
        await b.until(lambda: "seek 50" in b.log.order)
        b.log.push(records(row(2), start=50))
        await b.until(lambda: b.committed() == 51)
        assert b.store.documents[PART.slug].explained == {"retention": RangeSet([(1, 50)])}


async def test_full_budget_pauses_the_source_still_serves_the_group_and_drains_after() -> None:
    big = b'{"a":1,"pad":"' + b"x" * 100_000 + b'"}'
    async with bench(budget=400_000) as b:
        b.sinks["dest"].gate.clear()
        b.log.assign(PART, OTHER)
        for i in range(12):
            b.log.push(records(big, start=i))
        await b.until(lambda: b.log.paused == {PART, OTHER})
        assert b.pipeline.budget.used_bytes <= 400_000
        token = b.log.revoke(OTHER)
        await b.until(lambda: f"release {token}" in b.log.order)
        b.sinks["dest"].gate.set()
        await b.until(lambda: b.committed() == 12)
        await b.until(lambda: "resume" in b.log.order and b.pipeline.budget.used_bytes == 0)


async def test_stop_drains_open_chunks_and_leaves() -> None:
    slow = replace(RAW, age_ms_max=3_600_000)
    async with bench(sinks=(slow, DEST, DLQ)) as b:
        b.log.assign(PART)
        b.log.push(records(row(1)))
        await b.until(lambda: b.sinks["dest"].rows != [])
        await b.stop()
        assert b.committed() == 1
        assert b.log.order[-1] == "close"


async def test_empty_assignment_is_completed() -> None:
    async with bench() as b:
        b.log.assign()
        await b.until(lambda: b.log.order == ["start"])
        await b.stop()


# --- what a channel hands to its sink at once --------------------------------------------------------------------------

NARROW, WIDE = pa.schema([("a", pa.int64())]), pa.schema([("a", pa.int64()), ("b", pa.int64())])


@dataclass
class Nobody:
    """As much of an owned partition as a chunk needs."""

    part = PART


def frame(start: int, stop: int, schema: pa.Schema) -> Frame:
    n = stop - start
    rows = pa.RecordBatch.from_arrays([pa.array(range(start, stop), pa.int64())] * len(schema), schema=schema)
    return Frame(PART, start, stop, ENVELOPE.empty_table().to_batches()[0] if n == 0 else envelope(start, n), rows,
                 pa.array(np.arange(n, dtype=np.int32)))  # fmt: skip


def envelope(start: int, n: int) -> pa.RecordBatch:
    return records(*(row(i) for i in range(n)), start=start).batch


@given(
    shape=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), min_size=1, max_size=8),
    rows_max=st.integers(1, 9),
    bytes_max=st.integers(1, 60),
)
def test_a_chunk_is_an_unbroken_run_of_frames_of_one_schema(
    shape: list[tuple[int, int, bool]], rows_max: int, bytes_max: int
) -> None:
    """A chunk is recorded as one interval: what was left out between two frames (shed, refused) must not be inside it."""
    channel = _Channel(Nobody())  # type: ignore[arg-type]  # nothing else of it is looked at
    waiting: list[Frame] = []
    at = 100
    for gap, n, wide in shape:
        at += gap
        waiting.append(frame(at, at + n, WIDE if wide else NARROW))
        at += n
    for one in waiting:
        channel.pending.append(_Pending(one, None, 10, 0.0))  # type: ignore[arg-type]  # what it holds is not given back here
        channel.size_bytes += 10
        channel.rows += one.rows.num_rows
    closing = Closing(bytes_max, rows_max, 1.0)
    taken: list[Frame] = []
    while channel.pending:
        chunk, helds = channel.take(closing)
        assert len(helds) == len(chunk.frames) > 0
        assert (chunk.start, chunk.stop) == (chunk.frames[0].start, chunk.frames[-1].stop)
        assert all(a.stop == b.start for a, b in zip(chunk.frames, chunk.frames[1:], strict=False))
        assert len({one.rows.schema for one in chunk.frames}) == 1
        before = chunk.frames[:-1]
        assert not before or not closing.due(10 * len(before), sum(one.rows.num_rows for one in before))
        after = channel.pending[0].frame if channel.pending else None
        whole = closing.due(10 * len(chunk.frames), sum(one.rows.num_rows for one in chunk.frames))
        assert after is None or whole or after.start != chunk.stop or after.rows.schema != chunk.frames[0].rows.schema
        taken += chunk.frames
    assert taken == waiting
    assert (channel.size_bytes, channel.rows) == (0, 0)


async def test_refused_rows_are_found_in_whichever_frame_they_are() -> None:
    """A sink numbers the rows of a chunk; the frames before one may have lost rows already."""
    dest = Sink("dest", "postgres", Role.DESTINATION, OnFailure.HOLD, input="kept", age_ms_max=3_600_000, rows_max=6)
    async with bench(sinks=(RAW, dest, DLQ)) as b:
        refusals = [RowRefusal(i, "text-nul", f"row {i}") for i in (0, 3, 5)]
        b.sinks["dest"].errors = [RowsRefused(refusals)]
        b.log.assign(PART)
        b.log.push(records(*(row(i) for i in range(2))))
        b.log.push(records(*(row(i) for i in range(2, 4)), start=2))
        b.log.push(records(*(row(i) for i in range(4, 6)), start=4))
        await b.until(lambda: b.committed() == 6)
        assert b.sinks["dest"].chunks == [(0, 6, 3)]
        assert [r["a"] for r in b.sinks["dest"].rows] == [1, 2, 4]
        late = [r for r in b.sinks["dlq"].rows if r["stage"] == "sink:dest"]
        assert sorted((r["_twg_source_offset"], r["_twg_payload"], r["detail"]) for r in late) == [
            (i, row(i), f"row {i}") for i in (0, 3, 5)
        ]
