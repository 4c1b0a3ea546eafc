"""From one batch of records to every sink's durable rows: decode → transform → rules → fan-out → ack.

Decides when a batch may be held (asking `core.flow`), what is retried and what is not (by error class), and in which
order a partition's chunks reach a sink. It never stores a checkpoint and never commits a source: it only reports to
the partition's ledger what has become durable; `runtime.worker` does the rest.

Each sink has a lane; each lane has a channel per owned partition, which lands its chunks in order. Channels of one
lane run side by side, a few at a time. A batch's bytes are given back when the last lane has let go of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from thalweg.codecs.codec import Codec
from thalweg.core.ack import Ledger
from thalweg.core.batch import Chunk, Frame, Partition, Refusals
from thalweg.core.dlq import dlq_rows
from thalweg.core.flow import COPIES, Budget, Closing
from thalweg.core.health import Board
from thalweg.core.topology import ROOT, OnFailure, Role, Sink, Source, Topology, Verdict
from thalweg.errors import Ambiguous, Permanent, RowRefusal, RowsRefused, ThalwegError, Transient
from thalweg.ports import Outside, Records, SchemaRegistry
from thalweg.probes import Probes
from thalweg.runtime.lander import Lander
from thalweg.runtime.transform import NodeRows, Transform

T = TypeVar("T")

BACKOFF_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
LOOK_AGAIN_S: Final = 0.2  # measured memory may fall without anything being given back
LANDINGS_MAX: Final = 2  # chunks of one sink under way at once
ISOLATED_SHARE: Final = 0.25  # of the budget, that one isolated sink in trouble may hold before it sheds


class Held:
    """Bytes of one batch, granted once, given back when the last holder releases."""

    __slots__ = ("_budget", "_freed", "_holders", "cost_bytes")

    def __init__(self, budget: Budget, cost_bytes: int, freed: asyncio.Event) -> None:
        self._budget, self.cost_bytes, self._freed, self._holders = budget, cost_bytes, freed, 1

    def resize(self, cost_bytes: int) -> None:
        """The real cost, once it is known."""
        self._budget.adjust(cost_bytes - self.cost_bytes)
        self.cost_bytes = cost_bytes
        self._freed.set()

    def retain(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._budget.give(self.cost_bytes)
            self._freed.set()


@dataclass
class Owned:
    """One partition while it is ours. `alive` turns false when it is released or lost: nothing may be reported after."""

    part: Partition
    ledger: Ledger
    acked: int  # what the source has stored
    queued: int  # end of what was taken from the consumer, claimed or not yet
    alive: bool = True
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def landed(self, sink: str, start: int, stop: int) -> None:
        if self.alive:
            self.ledger.landed(sink, start, stop)
            self.changed.set()


@dataclass
class _Pending:
    frame: Frame
    held: Held
    size_bytes: int
    at: float  # monotonic seconds


class _Channel:
    """Frames of one partition waiting for, or on their way into, one sink."""

    def __init__(self, owned: Owned) -> None:
        self.owned = owned
        self.pending: deque[_Pending] = deque()
        self.size_bytes = 0
        self.rows = 0
        self.wake = asyncio.Event()
        self.flying_rows = 0  # of the chunk that is on its way
        self.flush = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.task: asyncio.Task[None] | None = None

    def take(self, closing: Closing) -> tuple[Chunk, list[Held]]:
        """The next chunk: what waits, up to the closing size and never across a hole."""
        frames: list[Frame] = []
        helds: list[Held] = []
        size = rows = 0
        while self.pending:
            head = self.pending[0]
            if frames and (
                head.frame.start != frames[-1].stop
                or head.frame.rows.schema != frames[-1].rows.schema  # a registry brought a newer schema
                or closing.due(size, rows)
            ):
                break
            self.pending.popleft()
            frames.append(head.frame)
            helds.append(head.held)
            size += head.size_bytes
            rows += head.frame.rows.num_rows
        self.size_bytes -= size
        self.rows -= rows
        return Chunk(self.owned.part, frames[0].start, frames[-1].stop, tuple(frames)), helds


class Lane:
    """One sink."""

    def __init__(self, sink: Sink, lander: Lander, pipeline: Pipeline) -> None:
        self.sink, self.lander, self._pipeline = sink, lander, pipeline
        self.closing = Closing(sink.bytes_max, sink.rows_max, sink.age_ms_max / 1000)
        self.holds = sink.on_failure is OnFailure.HOLD
        self.size_bytes = 0
        self.troubled = False
        self._channels: dict[Partition, _Channel] = {}
        self._slots = asyncio.Semaphore(LANDINGS_MAX)
        raw = sink.role is Role.PRIMARY_RAW
        self._sent, self._durable = ("raw.sent", "raw.durable") if raw else ("sink.sent", "sink.durable")
        if sink.role is Role.DLQ:
            self._durable = "dlq.durable"

    # --- called by the pipeline -----------------------------------------------------------------------------------

    def put(self, owned: Owned, frame: Frame, held: Held) -> None:
        """Queue a frame. Never waits: what may be held was decided at admission."""
        rows = frame.rows.num_rows
        if rows == 0 and self.sink.role in (Role.DLQ, Role.QUARANTINE):
            owned.landed(self.sink.name, frame.start, frame.stop)
            return
        size = frame.size_bytes
        if not self.holds and self.troubled and self.size_bytes + size > ISOLATED_SHARE * self._pipeline.budget.limit_bytes:
            self._pipeline.board.shed(self.sink.name, rows)  # its gap stays in the coverage, for recovery from raw
            return
        channel = self._channels.get(owned.part)
        if channel is None or channel.owned is not owned:
            channel = self._channels[owned.part] = _Channel(owned)
            channel.task = self._pipeline.spawn(self._serve(channel), f"{self.sink.name}:{owned.part.slug}")
        held.retain()
        channel.pending.append(_Pending(frame, held, size, self._pipeline.outside.clock.monotonic()))
        channel.size_bytes += size
        channel.rows += rows
        self.size_bytes += size
        channel.idle.clear()
        if len(channel.pending) == 1 or self.closing.due(channel.size_bytes, channel.rows):
            channel.wake.set()

    def press(self, part: Partition | None = None) -> None:
        """Close open chunks now: of one partition (revoke, drain), or all (the budget is full)."""
        for channel in self._channels.values() if part is None else filter(None, [self._channels.get(part)]):
            channel.flush = True
            channel.wake.set()

    def quiet(self, part: Partition) -> bool:
        """Whether nothing of `part` waits here, or waits only because an isolated sink is in trouble."""
        channel = self._channels.get(part)
        return channel is None or channel.idle.is_set() or (self.troubled and not self.holds)

    def partitions(self) -> list[Partition]:
        """Partitions with a channel."""
        return list(self._channels)

    def shed(self) -> int:
        """Give up all that is held here; its bytes come back as soon as the landings under way have ended. The rows left out."""
        rows = sum(channel.rows + channel.flying_rows for channel in self._channels.values())
        for part in self.partitions():
            owned = self._channels[part].owned
            self.forget(part)
            owned.changed.set()
        self._pipeline.board.shed(self.sink.name, rows)
        return rows

    def forget(self, part: Partition) -> None:
        """Drop what waits: the partition is not ours any more."""
        channel = self._channels.pop(part, None)
        if channel is None:
            return
        if channel.task is not None:
            channel.task.cancel()
        while channel.pending:
            pending = channel.pending.popleft()
            self.size_bytes -= pending.size_bytes
            pending.held.release()

    # --- the channel's own task -----------------------------------------------------------------------------------

    async def _serve(self, channel: _Channel) -> None:
        while True:
            await self._wait_due(channel)
            before = channel.size_bytes
            chunk, helds = channel.take(self.closing)
            size = before - channel.size_bytes
            channel.flying_rows = chunk.rows
            try:
                async with self._slots:
                    await self._land(channel.owned, chunk)
            finally:
                self.size_bytes -= size
                channel.flying_rows = 0
                for held in helds:
                    held.release()
            channel.owned.landed(self.sink.name, chunk.start, chunk.stop)
            self._pipeline.board.landed(self.sink.name, chunk.rows)
            self._pipeline.probes(self._durable)
            if not channel.pending:
                channel.idle.set()
                channel.flush = False
                channel.owned.changed.set()

    async def _wait_due(self, channel: _Channel) -> None:
        clock = self._pipeline.outside.clock
        while True:
            channel.wake.clear()
            left: float | None = None
            if channel.pending:
                if channel.flush or self.closing.due(channel.size_bytes, channel.rows):
                    return
                left = channel.pending[0].at + self.closing.age_s_max - clock.monotonic()
                if left <= 0:
                    return
            if left is None:
                await channel.wake.wait()
                continue
            try:
                async with asyncio.timeout(left):
                    await channel.wake.wait()
            except TimeoutError:
                continue

    async def _land(self, owned: Owned, chunk: Chunk) -> None:
        """Until it is durable. Retries what may be retried; refused rows go to the DLQ first, then the rest again."""
        attempt = 0
        while True:
            self._pipeline.probes(self._sent)
            try:
                await self.lander.land(chunk)
            except RowsRefused as refused:
                chunk = await self._divert(owned, chunk, refused)
                continue
            except (Transient, Ambiguous) as error:
                self._trouble(error)
            except Permanent as error:
                if self.holds:
                    self._pipeline.board.failing(self.sink.name, str(error))
                    raise
                self._trouble(error)
            else:
                if self.troubled:
                    self._pipeline.outside.report("sink.recovered", sink=self.sink.name)
                self.troubled = False
                self._pipeline.board.ok(self.sink.name)
                return
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1

    def _trouble(self, error: ThalwegError) -> None:
        self.troubled = True
        self._pipeline.board.failing(self.sink.name, str(error))
        self._pipeline.outside.report("sink.retry", sink=self.sink.name, kind=type(error).__name__, error=str(error))

    async def _divert(self, owned: Owned, chunk: Chunk, refused: RowsRefused) -> Chunk:
        """The chunk without its refused rows, once those are durable in the DLQ."""
        by_row = {entry.row: entry for entry in refused.rows}
        if not by_row:
            raise Permanent(f"sink {self.sink.name} refused rows without naming them") from refused
        frames: list[Frame] = []
        offset = 0
        for frame in chunk.frames:
            mine = {row - offset: by_row[row] for row in by_row if offset <= row < offset + frame.rows.num_rows}
            offset += frame.rows.num_rows
            if mine:
                await self._pipeline.divert(owned, frame, mine, self.sink)
                frame = frame.without(np.array(sorted(mine), dtype=np.int64))
            frames.append(frame)
        return replace(chunk, frames=tuple(frames))


class Pipeline:
    """The part of a node between a consumer and its sinks; shared by all sources of a topology."""

    def __init__(
        self,
        topology: Topology,
        outside: Outside,
        landers: Mapping[str, Lander],
        codecs: Mapping[str, Codec],
        registries: Mapping[str, SchemaRegistry],
        transforms: Mapping[str, Transform],
        budget: Budget,
        board: Board,
        probes: Probes,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.topology, self.outside, self.budget, self.board, self.probes = topology, outside, budget, board, probes
        self._codecs, self._registries, self._transforms, self._tasks = codecs, registries, transforms, tasks
        self.freed = asyncio.Event()
        self.lanes = {sink.name: Lane(sink, landers[sink.name], self) for sink in topology.sinks}
        self._dlq = next((lane for lane in self.lanes.values() if lane.sink.role is Role.DLQ), None)
        self._quarantine = next((lane for lane in self.lanes.values() if lane.sink.role is Role.QUARANTINE), None)

    def spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        """A task whose failure stops the node."""
        return self._tasks.create_task(work, name=name)  # type: ignore[arg-type]  # always a coroutine

    async def open(self) -> None:
        """Open every sink: one that holds the source must answer, an isolated one may come later."""
        for lane in self.lanes.values():
            try:
                await self.retried(lane.lander.open, f"opening sink {lane.sink.name}", attempts=3)
            except ThalwegError as error:
                if lane.holds:
                    raise
                lane.troubled = True
                self.board.failing(lane.sink.name, str(error))
                self.outside.report("sink.unavailable", sink=lane.sink.name, error=str(error))

    async def retried(self, call: Callable[[], Awaitable[T]], doing: str, attempts: int | None = None) -> T:
        """Call until it succeeds; only for calls that may be repeated after `Ambiguous` too. `Permanent` is raised."""
        attempt = 0
        while True:
            try:
                return await call()
            except (Transient, Ambiguous) as error:
                attempt += 1
                if attempts is not None and attempt >= attempts:
                    raise
                self.outside.report("retry", doing=doing, attempt=attempt, error=str(error))
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])

    # --- budget ---------------------------------------------------------------------------------------------------

    async def hold(self, owned: Owned, size_bytes: int) -> Held | None:
        """Wait until `size_bytes` of payload may be held; None when the partition was given up meanwhile."""
        cost = COPIES * size_bytes
        while owned.alive:
            self.freed.clear()
            if self.budget.try_take(cost):
                self.probes("budget.granted")
                return Held(self.budget, cost, self.freed)
            self.press()
            self._shed()
            waits = [asyncio.ensure_future(self.freed.wait()), asyncio.ensure_future(self._gone(owned))]
            try:
                await asyncio.wait(waits, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return None

    def _shed(self) -> None:
        """When all that is held waits for isolated sinks in trouble, which give nothing back, those let go of it.

        The source never waits for an isolated sink: what is shed stays a gap in its coverage.
        """
        stuck = [lane for lane in self.lanes.values() if lane.troubled and not lane.holds and lane.size_bytes]
        moving = any(lane.size_bytes for lane in self.lanes.values() if lane not in stuck)
        if moving or not any(lane.partitions() for lane in stuck):
            return
        largest = max((lane for lane in stuck if lane.partitions()), key=lambda lane: lane.size_bytes)
        self.outside.report("sink.shed", sink=largest.sink.name, rows=largest.shed())

    async def _gone(self, owned: Owned) -> None:
        while owned.alive:
            owned.changed.clear()
            await owned.changed.wait()

    def press(self) -> None:
        """The budget is full: let every open chunk go now."""
        for lane in self.lanes.values():
            lane.press()

    # --- one batch ------------------------------------------------------------------------------------------------

    async def digest(self, source: Source, owned: Owned, records: Records, held: Held) -> None:
        """Claim the batch's interval and hand its rows to every lane. Releases its own hold on `held`."""
        try:
            codec = self._codecs[source.name]
            for reference in sorted(codec.wants(records.batch), key=str):
                registry = self._registries[source.name]
                fetch = (
                    partial(registry.by_id, reference)
                    if isinstance(reference, int)
                    else partial(registry.by_guid, str(reference))
                )
                codec.learn(reference, await self.retried(fetch, f"schema {reference}"))
            transform = self._transforms[source.name]
            done = await self.outside.compute.run(digested, self.topology, source, codec, transform, owned.part, records)
            for verdict, rows in done.judged:
                self.board.count(verdict.value, rows)
            self.board.decoded(source.name, records.batch.num_rows, records.size_bytes)
            if not owned.alive:
                return
            frames = done.frames
            self.probes("decoded")
            held.resize(2 * records.size_bytes + done.derived_bytes)
            owned.ledger.claim(records.start.next, records.stop.next)
            for sink, frame in frames:
                self.lanes[sink].put(owned, frame, held)
        finally:
            held.release()

    def advance(self, owned: Owned, stop: int) -> None:
        """Claim positions without records, up to `stop` (markers, aborted or compacted offsets)."""
        start = owned.ledger.end
        if stop <= start:
            return
        owned.ledger.claim(start, stop)
        for name in self.lanes:
            owned.landed(name, start, stop)  # there is nothing to make durable

    # --- rows a sink refused --------------------------------------------------------------------------------------

    async def divert(self, owned: Owned, frame: Frame, refused: Mapping[int, RowRefusal], sink: Sink) -> None:
        """Make rows that `sink` refused durable in the DLQ; `refused` maps a row of `frame` to its refusal."""
        if self._dlq is None or sink.role is Role.DLQ:
            first = next(iter(refused.values()))
            raise Permanent(f"sink {sink.name} refused a row and there is no DLQ for it: [{first.code}] {first.detail}")
        rows = sorted(refused)
        origins = frame.origin.take(pa.array(rows, pa.int32()))
        child = None if frame.child is None else frame.child.take(pa.array(rows, pa.int32()))
        entries = [(int(o), refused[r].code, refused[r].detail, "") for o, r in zip(origins.to_pylist(), rows, strict=True)]
        stage = f"sink:{sink.name}"
        batch = dlq_rows(self.topology.prefix, frame.partition, frame.envelope, Refusals.of(entries), stage, child)
        late = _prepared(frame.partition, frame.start, frame.stop, frame.envelope, [batch])
        chunk = Chunk(frame.partition, frame.start, frame.stop, (late,))
        dlq = self._dlq
        await self.retried(lambda: dlq.lander.land(chunk, sink.name), f"DLQ rows of sink {sink.name}")
        self.board.landed(dlq.sink.name, len(rows))
        self.probes("dlq.durable")

    # --- giving partitions up -------------------------------------------------------------------------------------

    async def drain(self, owned: Sequence[Owned], within_s: float) -> bool:
        """Close what is open and wait until every sink has it (isolated sinks in trouble excepted); False on time-out."""

        def done(one: Owned) -> bool:
            return not one.alive or (one.ledger.drained() and all(lane.quiet(one.part) for lane in self.lanes.values()))

        try:
            async with asyncio.timeout(within_s):
                for one in owned:
                    while not done(one):
                        for lane in self.lanes.values():
                            lane.press(one.part)
                        one.changed.clear()
                        if done(one):
                            break
                        await one.changed.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End every channel; what they hold was drained or is read again."""
        for lane in self.lanes.values():
            for part in lane.partitions():
                lane.forget(part)

    def forget(self, owned: Owned) -> None:
        """Nothing of this partition may be reported from here on."""
        owned.alive = False
        owned.changed.set()
        for lane in self.lanes.values():
            lane.forget(owned.part)


@dataclass(frozen=True)
class Digested:
    """What became of one batch: a frame for each sink, all of the batch's interval, and how many rows met which verdict."""

    frames: tuple[tuple[str, Frame], ...]
    judged: tuple[tuple[Verdict, int], ...]
    derived_bytes: int = 0  # of all rows that are not the envelope itself


def digested(
    topology: Topology, source: Source, codec: Codec, transform: Transform, part: Partition, records: Records
) -> Digested:
    """Decode, transform, judge and split up one batch. Raises `Permanent` when a record is refused and there is no DLQ."""
    envelope, start, stop = records.batch, records.start.next, records.stop.next
    decoded = codec.decode(envelope)
    outcome = transform.run(decoded.rows, decoded.origin)
    refused = [("decode", decoded.refused, None), *outcome.refused]
    rejected = [dlq_rows(topology.prefix, part, envelope, r, stage, child) for stage, r, child in refused if len(r)]
    aside: list[pa.RecordBatch] = []
    judged: list[tuple[Verdict, int]] = []
    for node, verdicts in outcome.verdicts.items():
        for verdict, refusals, child in verdicts:
            judged.append((verdict, len(refusals)))
            if verdict is Verdict.DROP:
                continue
            rows = dlq_rows(topology.prefix, part, envelope, refusals, f"rule:{node}", child)
            (aside if verdict is Verdict.QUARANTINE else rejected).append(rows)
    if rejected and not topology.sinks_of(Role.DLQ):
        first = rejected[0].slice(0, 1).to_pylist()[0]
        raise Permanent(
            f"a record was refused and there is no DLQ: [{first['code']}] {first['detail']}",
            where=f"{part.slug} position {first[topology.prefix + 'source_offset']}",
            remedy="Add a sink with role: dlq",
        )
    every = pa.array(np.arange(envelope.num_rows, dtype=np.int32))
    frames: list[tuple[str, Frame]] = []
    for sink in topology.sinks:
        if sink.role is Role.PRIMARY_RAW:
            frame = Frame(part, start, stop, envelope, envelope, every)
        elif sink.role is Role.DESTINATION:
            derived: NodeRows = outcome.nodes[sink.input]
            frame = Frame(part, start, stop, envelope, derived.rows, derived.origin, derived.child)
        else:
            frame = _prepared(part, start, stop, envelope, rejected if sink.role is Role.DLQ else aside)
        frames.append((sink.name, frame))
    own = sum(frame.rows.nbytes for _, frame in frames if frame.rows is not envelope)
    return Digested(tuple(frames), tuple(judged), own)


def _prepared(part: Partition, start: int, stop: int, envelope: pa.RecordBatch, rows: Sequence[pa.RecordBatch]) -> Frame:
    """A frame of rows that hold all they need already (DLQ, quarantine): no envelope goes with it."""
    nothing = envelope.slice(0, 0)
    batch = pa.concat_batches(rows) if rows else nothing
    return Frame(part, start, stop, nothing, batch, pa.array(np.zeros(batch.num_rows, dtype=np.int32)))


__all__ = ["ROOT", "Digested", "Held", "Lane", "Owned", "Pipeline", "digested"]
