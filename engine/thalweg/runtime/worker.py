"""One consumer of one source: assignment, reading, checkpoints, commits, revocation, end.

Decides what happens at each event of the consumer port. Ownership changes by `Assigned`, `Revoked` and `Lost` alone: a
refused commit is tried again at the next checkpoint and is no verdict on ownership. What is committed is the contiguous
prefix of the *checkpoint just stored*, never of what the ledger has heard since.

A partition's life:

    Assigned → document, stored cursor, bounds, orphans read → start(token) → records … → Revoked → drained,
    checkpointed, committed → release(token)
                                                            ↘ Lost → forgotten at once, nothing more is reported
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Final

from thalweg.core.ack import Ledger
from thalweg.core.batch import Cursor, KafkaCursor, Partition, StoreCursor
from thalweg.core.coverage import NOTHING, Document
from thalweg.core.flow import COPIES, poll_records
from thalweg.core.start import Start, start_of
from thalweg.core.topology import OffsetReset, Source
from thalweg.errors import Ambiguous, Permanent, RefusedNow, ThalwegError, Transient
from thalweg.ports import Adrift, Assigned, Bounds, Ended, LogConsumer, Lost, Position, Records, Revoked
from thalweg.runtime.checkpoint import CheckpointStore
from thalweg.runtime.pipeline import BACKOFF_S, Owned, Pipeline

READ_AHEAD_SHARE: Final = 0.125  # of the budget, that may wait between the consumer and the decoder
LAG_EVERY_S: Final = 2.0
ROOM_WAIT_S: Final = 0.5  # how long to wait for that room before pausing the source


class Worker:
    """Runs one source of the topology to its end, to `stop()`, or to a failure."""

    def __init__(self, source: Source, consumer: LogConsumer, store: CheckpointStore, pipeline: Pipeline) -> None:
        self.source, self.consumer, self.store, self.pipeline = source, consumer, store, pipeline
        self.owned: dict[Partition, Owned] = {}
        self._hand: deque[tuple[Owned, Records | Position | Ended]] = deque()
        self._hand_bytes = 0
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._stopping = asyncio.Event()
        self._assigned_once = False
        self._digesting: Owned | None = None
        self._paused: frozenset[Partition] = frozenset()
        self._record_bytes = 0.0
        self._cursor: type[KafkaCursor] | type[StoreCursor] = KafkaCursor if source.type == "kafka" else StoreCursor

    def stop(self) -> None:
        """Drain and leave; `run` then returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Until the source is bounded and done, or `stop()`. Raises what cannot be retried."""
        background = [
            asyncio.create_task(self._digest(), name=f"digest:{self.source.name}"),
            asyncio.create_task(self._tick(), name=f"checkpoint:{self.source.name}"),
        ]
        try:
            main = asyncio.create_task(self._poll(), name=f"poll:{self.source.name}")
            done, _ = await asyncio.wait({main, *background}, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda t: t.get_name()):
                task.result()
        finally:
            for task in (main, *background):
                task.cancel()
            await asyncio.gather(main, *background, return_exceptions=True)
            for owned in list(self.owned.values()):
                self._forget(owned)
            await self.consumer.close()

    # --- reading --------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        leaving = False
        flow = self.pipeline.topology.flow
        while True:
            if self._stopping.is_set() and not leaving:
                leaving = True
                await self.consumer.leave()
            if leaving and not self.owned:
                return
            if self._finished():
                await self._finish()
                return
            if not leaving:
                await self._regulate()
            free = self.pipeline.budget.free_bytes - COPIES * self._hand_bytes
            records_max = poll_records(free, self._record_bytes, flow.poll_records_max)
            for event in await self._polled(records_max, flow.poll_wait_ms / 1000):
                match event:
                    case Records():
                        self._take(event)
                    case Position() | Ended():
                        owned = self.owned.get(event.part)
                        if owned is not None:
                            owned.queued = max(owned.queued, event.at.next)
                            self._hand.append((owned, event))
                            self._arrived.set()
                    case Assigned():
                        await self._assigned(event)
                    case Revoked():
                        await self._revoked(event)
                    case Lost():
                        for part in event.parts:
                            if part in self.owned:
                                self.pipeline.outside.report("partition.lost", partition=part.slug)
                                self._forget(self.owned[part])
                    case Adrift():
                        await self._adrift(event)

    async def _polled(self, records_max: int, wait_s: float) -> list[object]:
        attempt = 0
        while True:
            try:
                events: list[object] = list(await self.consumer.poll(records_max, wait_s))
                if attempt:
                    self.pipeline.board.ok(f"source:{self.source.name}")
                return events
            except (Transient, Ambiguous) as error:
                self.pipeline.board.failing(f"source:{self.source.name}", str(error))
                self.pipeline.outside.report("source.retry", source=self.source.name, error=str(error))
            if self._stopping.is_set():
                return []
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1

    def _take(self, records: Records) -> None:
        owned = self.owned.get(records.part)
        if owned is None:
            return  # polled in the same call as the revoke that took the partition away
        if records.start.next != owned.queued:
            if records.stop.next <= owned.queued:
                return  # seen before a seek
            raise AssertionError(f"{records.part.slug}: records from {records.start.next}, expected {owned.queued}")
        owned.queued = records.stop.next
        rows, size = records.batch.num_rows, records.size_bytes
        if rows:
            self._record_bytes = max(size / rows, 0.8 * self._record_bytes + 0.2 * size / rows)
        self._hand.append((owned, records))
        self._hand_bytes += size
        self._arrived.set()

    async def _regulate(self) -> None:
        """Wait for room between consumer and decoder; where none comes, pause fetching and go on serving the group."""
        room = READ_AHEAD_SHARE * self.pipeline.budget.limit_bytes
        if self._hand and self._hand_bytes >= room:
            try:
                async with asyncio.timeout(ROOM_WAIT_S):
                    while self._hand and self._hand_bytes >= room:
                        self._room.clear()
                        await self._room.wait()
            except TimeoutError:
                ours = frozenset(self.owned)
                if ours != self._paused:
                    self.pipeline.outside.report("source.paused", source=self.source.name, waiting_bytes=self._hand_bytes)
                    await self.consumer.pause(sorted(ours))
                    self._paused = ours
                return
        if self._paused and not self._hand:
            await self.consumer.resume(sorted(self._paused))
            self._paused = frozenset()

    async def _digest(self) -> None:
        while True:
            while not self._hand:
                self._arrived.clear()
                await self._arrived.wait()
            owned, event = self._hand.popleft()
            self._digesting = owned
            try:
                if isinstance(event, Records):
                    held = await self.pipeline.hold(owned, event.size_bytes)
                    self._hand_bytes -= event.size_bytes
                    if held is not None:
                        await self.pipeline.digest(self.source, owned, event, held)
                elif owned.alive:
                    self.pipeline.advance(owned, event.at.next)
                    owned.ended = owned.ended or isinstance(event, Ended)
            finally:
                self._digesting = None
                self._room.set()
                owned.changed.set()

    # --- assignment -----------------------------------------------------------------------------------------------

    async def _assigned(self, event: Assigned) -> None:
        retried = self.pipeline.retried
        at: dict[Partition, Cursor] = {}
        if event.parts:
            stored = await retried(lambda: self.consumer.committed(event.parts), "committed offsets")
            bounds = await retried(lambda: self.consumer.bounds(event.parts), "log bounds")
            readied = await asyncio.gather(*(self._ready(part, stored[part], bounds[part]) for part in event.parts))
            for owned, start in readied:
                self.owned[owned.part] = owned
                at[owned.part] = self._cursor(start.at)
        await self.consumer.start(event.token, at)
        self._assigned_once = True
        self._paused = frozenset()
        self.pipeline.board.ok(f"source:{self.source.name}")
        self.pipeline.board.started(self.source.name)
        self.pipeline.outside.report(
            "partitions.assigned", source=self.source.name, starts={p.slug: c.next for p, c in sorted(at.items())}
        )
        self.pipeline.probes("partition.assigned")

    async def _ready(self, part: Partition, stored: Cursor | None, bounds: Bounds) -> tuple[Owned, Start]:
        """Everything a partition's start depends on, from durable places only."""
        pipeline = self.pipeline
        document = await pipeline.retried(lambda: self.store.load(part.slug), f"checkpoint of {part.slug}")
        known = stored.next if stored is not None else (document.base if document is not None else None)
        found = {}
        prefix = None
        if known is not None:
            for name, lane in pipeline.lanes.items():
                try:
                    find, attempts = lane.lander.found, None if lane.holds else 1
                    recorded = NOTHING if document is None else document.ranges(name)
                    found[name] = await pipeline.retried(partial(find, part, known, recorded), f"what {name} holds", attempts)
                except ThalwegError as error:
                    if lane.holds:
                        raise
                    pipeline.outside.report("sink.unavailable", sink=name, error=str(error))
            seen = Ledger(part.slug, known, pipeline.topology.gating, document)
            for name, ranges in found.items():
                seen.adopt(name, ranges)
            prefix = min(seen.durable(name).prefix(known) for name in pipeline.topology.gating)
        start = start_of(
            None if stored is None else stored.next,
            document,
            prefix,
            bounds.low.next,
            bounds.high.next,
            self.source.offset_reset if self.source.type == "kafka" else OffsetReset.EARLIEST,  # a file begins at its beginning
            f"source {self.source.name}, {part.topic}[{part.number}]",
        )
        ledger = Ledger(part.slug, start.base, pipeline.topology.gating, document, known)
        for name, ranges in found.items():
            ledger.adopt(name, ranges)
        if start.at != start.base:
            ledger.jump(start.at, start.reason)
            pipeline.outside.report("gap.explained", partition=part.slug, start=start.base, stop=start.at, reason=start.reason)
        return Owned(part, ledger, -1 if stored is None else stored.next, start.at), start

    async def _adrift(self, event: Adrift) -> None:
        """The position asked for is gone: an explained gap if the configuration allows it, else an error."""
        owned = self.owned.get(event.part)
        if owned is None:
            return
        bounds = (await self.pipeline.retried(lambda: self.consumer.bounds([event.part]), "log bounds"))[event.part]
        where = f"source {self.source.name}, {event.part.topic}[{event.part.number}]"
        start = start_of(event.at.next, None, None, bounds.low.next, bounds.high.next, self.source.offset_reset, where)
        await self._settle(owned)
        if start.at > owned.ledger.end:
            owned.ledger.jump(start.at, start.reason)
            owned.queued = start.at
            self.pipeline.outside.report(
                "gap.explained", partition=event.part.slug, start=start.base, stop=start.at, reason=start.reason
            )
        await self.consumer.seek(event.part, self._cursor(start.at))

    # --- checkpoints and commits ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        looked_at = float("-inf")
        while True:
            await asyncio.sleep(self.pipeline.topology.coverage.interval_ms / 1000)
            for owned in sorted(self.owned.values(), key=lambda o: o.part):
                await self._try_checkpoint(owned)
            await self._try_commit([o for o in self.owned.values() if o.alive])
            if self.pipeline.outside.clock.monotonic() >= looked_at + LAG_EVERY_S:
                looked_at = self.pipeline.outside.clock.monotonic()
                await self._measure_lag()

    async def _measure_lag(self) -> None:
        """How far the stored offsets are behind the logs' ends; what cannot be asked now is left as it was."""
        parts = sorted(part for part, owned in self.owned.items() if owned.alive)
        if not parts or self._cursor is not KafkaCursor:
            return
        try:
            bounds = await self.consumer.bounds(parts, known=True)
        except (Transient, Ambiguous):
            return
        for part in parts:
            if part in self.owned and part in bounds:
                at = max(self.owned[part].acked, bounds[part].low.next)
                self.pipeline.board.gauge("lag_records", part.slug, max(0, bounds[part].high.next - at))
        self.pipeline.board.gauge("budget_used_bytes", "all", self.pipeline.budget.used_bytes)

    async def _try_checkpoint(self, owned: Owned) -> bool:
        """Store what the ledger has learnt; False when the store does not answer (tried again at the next tick)."""
        async with owned.storing:
            if not owned.alive or not owned.ledger.unsaved():
                return True
            wanted = owned.ledger.document()
            self.pipeline.probes("coverage.recorded")
            try:
                stored: Document = await self.store.merge(wanted)
            except (Transient, Ambiguous) as error:
                self.pipeline.board.failing("store:coverage", str(error))
                self.pipeline.outside.report("coverage.retry", partition=owned.part.slug, error=str(error))
                return False
            if owned.alive:
                owned.ledger.checkpointed(stored)
            self.pipeline.board.ok("store:coverage")
            self.pipeline.probes("coverage.checkpointed")
            return True

    async def _try_commit(self, candidates: list[Owned]) -> bool:
        """Tell the source what is safe; a refusal changes nothing and is tried again."""
        safe = {o.part: at for o in candidates if o.alive and (at := o.ledger.safe()) > o.acked}
        if not safe:
            return True
        cursors: Mapping[Partition, Cursor] = {part: self._cursor(position) for part, position in sorted(safe.items())}
        try:
            await self.consumer.commit(cursors)
        except RefusedNow as error:
            self.pipeline.board.refused_commit(self.source.name)
            self.pipeline.outside.report("commit.refused", source=self.source.name, error=str(error))
            return False
        except (Transient, Ambiguous) as error:
            self.pipeline.outside.report("commit.retry", source=self.source.name, error=str(error))
            return False
        for owned in candidates:
            if owned.part in safe:
                owned.acked = max(owned.acked, safe[owned.part])
                owned.ledger.committed = max(owned.ledger.committed, safe[owned.part])
        self.pipeline.probes("source.acked")
        return True

    # --- giving up ------------------------------------------------------------------------------------------------

    async def _settle(self, owned: Owned) -> None:
        """Drop what was polled and not yet claimed, and wait for the batch that is being decoded."""
        kept = deque(entry for entry in self._hand if entry[0] is not owned)
        for entry in self._hand:
            if entry[0] is owned and isinstance(entry[1], Records):
                self._hand_bytes -= entry[1].size_bytes
        self._hand = kept
        while self._digesting is owned:
            owned.changed.clear()
            if self._digesting is owned:
                await owned.changed.wait()

    async def _revoked(self, event: Revoked) -> None:
        going = [self.owned[part] for part in event.parts if part in self.owned]
        drain_s = self.pipeline.topology.drain_ms / 1000
        until = self.pipeline.outside.clock.monotonic() + drain_s
        try:
            async with asyncio.timeout(drain_s / 2):
                for owned in going:
                    await self._settle(owned)
        except TimeoutError:
            pass  # the budget is full: what is not claimed yet is read again by the next owner
        if not await self.pipeline.drain(going, until - self.pipeline.outside.clock.monotonic()):
            self.pipeline.outside.report("drain.timeout", source=self.source.name, seconds=drain_s)
        for owned in going:
            await self._try_checkpoint(owned)
        await self._try_commit(going)
        for owned in going:
            self._forget(owned)
        await self.consumer.release(event.token)
        self.pipeline.outside.report("partitions.released", source=self.source.name, parts=[o.part.slug for o in going])
        self.pipeline.probes("partition.released")

    def _forget(self, owned: Owned) -> None:
        self.owned.pop(owned.part, None)
        self.pipeline.board.forget(owned.part.slug)
        self.pipeline.forget(owned)

    def _finished(self) -> bool:
        return (
            self._assigned_once
            and not self._hand
            and self._digesting is None
            and bool(self.owned)
            and all(owned.ended for owned in self.owned.values())
        )

    async def _finish(self) -> None:
        """A bounded source was read to its end: land all of it, then leave."""
        everything = list(self.owned.values())
        while not self._stopping.is_set():
            if await self.pipeline.drain(everything, ROOM_WAIT_S):
                break
        for owned in everything:
            for delay_s in itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1])):
                if await self._try_checkpoint(owned) or self._stopping.is_set():
                    break
                await asyncio.sleep(delay_s)
        await self._try_commit(everything)
        if self._stopping.is_set():
            return
        unfinished = [o.part.slug for o in everything if o.ledger.safe() < o.ledger.end]
        if unfinished:
            raise Permanent(f"stopped before {len(unfinished)} partition(s) were durable: {', '.join(unfinished[:5])}")
