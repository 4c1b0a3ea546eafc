"""Planted bugs: each turns at least one row or invariant red. A check that has never failed is not yet a check.

    python -m catalogue.sabotage NAME -- run pipeline.yaml

plants one in a process of the installed engine. A plant replaces one function of the engine by a wrong one for as long
as its context lasts; when the engine no longer has what it replaces, planting fails loudly.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

Plant = Callable[[], AbstractContextManager[None]]


@contextmanager
def commit_before_durable() -> Iterator[None]:
    """The source's offset moves when records arrive, not when they are stored."""
    from thalweg.adapters.kafka import KafkaConsumer
    from thalweg.ports import Records

    poll = KafkaConsumer.poll

    async def early(self: KafkaConsumer, records_max: int, wait_s: float) -> Any:
        events = await poll(self, records_max, wait_s)
        arrived = {e.part: e.stop for e in events if isinstance(e, Records)}
        if arrived:
            await self.commit(arrived)
            await asyncio.sleep(1)
        return events

    with patch.object(KafkaConsumer, "poll", early):
        yield


@contextmanager
def commit_a_batch_early() -> Iterator[None]:
    """What is committed stops one record short of what is stored."""
    from thalweg.adapters.kafka import KafkaConsumer

    commit = KafkaConsumer.commit

    async def short(self: KafkaConsumer, at: Mapping[Any, Any]) -> Any:
        return await commit(self, {part: type(cursor)(max(cursor.next - 1, 0)) for part, cursor in at.items()})

    with patch.object(KafkaConsumer, "commit", short):
        yield


@contextmanager
def lose_the_last_row() -> Iterator[None]:
    """Each chunk of a table claims its whole interval and writes all rows but the last."""
    from dataclasses import replace

    from thalweg.core.batch import Chunk
    from thalweg.runtime.table import TableLander

    land = TableLander.land

    async def short(self: TableLander, chunk: Chunk, label: str = "") -> None:
        frames = list(chunk.frames)
        if frames and not label:
            last = frames[-1]
            n = last.rows.num_rows - 1
            frames[-1] = replace(
                last, rows=last.rows.slice(0, n), origin=last.origin.slice(0, n),
                child=None if last.child is None else last.child.slice(0, n),
            )  # fmt: skip
        await land(self, replace(chunk, frames=tuple(frames)), label)

    with patch.object(TableLander, "land", short):
        yield


@contextmanager
def insert_instead_of_copy() -> Iterator[None]:
    """Rows reach their table one INSERT at a time."""
    from psycopg import sql

    from thalweg.adapters.postgres import PostgresTransaction

    async def insert(self: Any, table: Any, rows: Any) -> None:
        columns = rows.schema.names
        statement = sql.SQL("insert into {} ({}) values ({})").format(
            sql.Identifier(table.name),
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join(sql.Placeholder() * len(columns)),
        )
        async with self._connection.cursor() as cursor:
            uuids = [{k: UUID(bytes=v) if k.endswith("record_id") else v for k, v in row.items()} for row in rows.to_pylist()]
            await cursor.executemany(statement, [tuple(row.values()) for row in uuids])

    with patch.object(PostgresTransaction, "copy", insert):
        yield


# --- bugs of the runtime and of the core, which any world must find ------------------------------------------------------


@contextmanager
def ack_before_durable() -> Iterator[None]:
    """A raw chunk is reported durable when its put is sent."""
    from thalweg.core.batch import Chunk
    from thalweg.runtime.lake import LakeLander

    land = LakeLander.land
    sent: list[asyncio.Task[None]] = []

    async def early(self: LakeLander, chunk: Chunk, label: str = "") -> None:
        sent.append(asyncio.create_task(land(self, chunk, label)))

    with patch.object(LakeLander, "land", early):
        yield


@contextmanager
def coverage_before_durable() -> Iterator[None]:
    """Coverage learns of a frame when it is queued for its sink."""
    from thalweg.runtime.pipeline import Lane

    put = Lane.put

    def early(self: Lane, owned: Any, frame: Any, held: Any) -> None:
        put(self, owned, frame, held)
        owned.landed(self.sink.name, frame.start, frame.stop)

    with patch.object(Lane, "put", early):
        yield


@contextmanager
def commit_from_the_live_ledger() -> Iterator[None]:
    """What is committed is what has landed, stored in a checkpoint or not."""
    from thalweg.core.ack import Ledger

    with patch.object(Ledger, "safe", Ledger.landed_prefix):
        yield


@contextmanager
def commit_before_the_checkpoint_is_stored() -> Iterator[None]:
    """The ledger takes a checkpoint for stored while its compare-and-swap is still under way."""
    from thalweg.runtime.worker import Worker

    store = Worker._try_checkpoint

    async def early(self: Worker, owned: Any) -> bool:
        if owned.alive and owned.ledger.unsaved():
            owned.ledger.checkpointed(owned.ledger.document())
            wanted = owned.ledger.document()
            await self._try_commit([owned])
            try:
                await self.store.merge(wanted)
            except Exception:  # the bug is to go on as if nothing had been
                return False
            return True
        return await store(self, owned)

    with patch.object(Worker, "_try_checkpoint", early):
        yield


@contextmanager
def commits_what_was_found() -> Iterator[None]:
    """What an owner finds durable at assignment is committed before any checkpoint says so."""
    from thalweg.core.ack import Ledger

    init = Ledger.__init__

    def trusting(self: Ledger, partition: str, base: int, gating: Any, stored: Any = None, committed: Any = None) -> None:
        init(self, partition, base, gating, stored, None)

    with patch.object(Ledger, "__init__", trusting):
        yield


@contextmanager
def commit_on_receive() -> Iterator[None]:
    """The source is told of everything that was polled."""
    from thalweg.runtime.worker import Worker

    async def eager(self: Worker, candidates: list[Any]) -> bool:
        at = {o.part: self._cursor(o.queued) for o in candidates if o.alive and o.queued > o.acked}
        if at:
            try:
                await self.consumer.commit(at)
            except Exception:
                return False
            for owned in candidates:
                owned.acked = owned.queued
        return True

    with patch.object(Worker, "_try_commit", eager):
        yield


@contextmanager
def refused_commit_means_lost() -> Iterator[None]:
    """A member whose commit is refused stops reading what it still owns."""
    from thalweg.errors import RefusedNow
    from thalweg.runtime.worker import Worker

    commit = Worker._try_commit

    async def gives_up(self: Worker, candidates: list[Any]) -> bool:
        real = self.consumer.commit

        async def noticed(at: Any) -> None:
            try:
                await real(at)
            except RefusedNow:
                for owned in list(self.owned.values()):
                    self._forget(owned)
                raise

        with patch.object(self.consumer, "commit", noticed):
            return await commit(self, candidates)

    with patch.object(Worker, "_try_commit", gives_up):
        yield


@contextmanager
def commit_gives_up() -> Iterator[None]:
    """After the first commit that fails, none is tried again."""
    from thalweg.runtime.worker import Worker

    commit = Worker._try_commit

    async def once(self: Worker, candidates: list[Any]) -> bool:
        if getattr(self, "gave_up", False):
            return True
        done = await commit(self, candidates)
        if not done:
            self.gave_up = True  # type: ignore[attr-defined]  # the bug's own
        return done

    with patch.object(Worker, "_try_commit", once):
        yield


@contextmanager
def gap_is_bridged() -> Iterator[None]:
    """A jump of the source (retention) is claimed as if it had been read."""
    from thalweg.core.ack import Ledger

    def bridged(self: Ledger, to: int, reason: str) -> None:
        start = self.end
        self.claim(start, to)
        for sink in self.gating:
            self.landed(sink, start, to)

    with patch.object(Ledger, "jump", bridged):
        yield


@contextmanager
def explains_too_much() -> Iterator[None]:
    """An explained gap reaches beyond what was lost."""
    from thalweg.core.ack import Ledger
    from thalweg.core.coverage import NOTHING, RangeSet

    jump = Ledger.jump

    def wide(self: Ledger, to: int, reason: str) -> None:
        jump(self, to, reason)
        self._explained[reason] = self._explained.get(reason, NOTHING) | RangeSet([(to, to + 7)])

    with patch.object(Ledger, "jump", wide):
        yield


@contextmanager
def last_writer_wins() -> Iterator[None]:
    """A checkpoint replaces what is stored instead of being united with it."""
    from dataclasses import replace

    from thalweg.errors import Exists, Stale
    from thalweg.runtime.checkpoint import ObjectCheckpoints

    async def overwrite(self: ObjectCheckpoints, delta: Any) -> Any:
        key = f"{self._folder}{delta.partition}.json"
        while True:
            stored = await self._store.get(key)
            wanted = replace(delta, version=delta.version + 1)
            try:
                if stored is None:
                    await self._store.create(key, wanted.encoded())
                else:
                    await self._store.replace(key, wanted.encoded(), stored.version)
            except (Exists, Stale):
                continue
            return wanted

    with patch.object(ObjectCheckpoints, "merge", overwrite):
        yield


@contextmanager
def conflict_counts_as_stored() -> Iterator[None]:
    """A checkpoint that met another writer's is taken for stored."""
    from thalweg.errors import Exists, Stale
    from thalweg.runtime.checkpoint import ObjectCheckpoints

    merge = ObjectCheckpoints.merge

    async def careless(self: ObjectCheckpoints, delta: Any) -> Any:
        class Once(Exception):
            pass

        store = self._store

        class Deaf:
            url, capabilities = store.url, store.capabilities

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def create(self, *words: Any) -> Any:
                try:
                    return await store.create(*words)
                except Exists:
                    raise Once from None

            async def replace(self, *words: Any) -> Any:
                try:
                    return await store.replace(*words)
                except Stale:
                    raise Once from None

        self._store = Deaf()  # a store that hears no conflict
        try:
            return await merge(self, delta)
        except Once:
            return delta
        finally:
            self._store = store

    with patch.object(ObjectCheckpoints, "merge", careless):
        yield


@contextmanager
def high_water_mark() -> Iterator[None]:
    """A sink's coverage is kept as one number: everything below what landed last."""
    from thalweg.core.ack import Ledger
    from thalweg.core.coverage import NOTHING, RangeSet

    def landed(self: Ledger, sink: str, start: int, stop: int) -> None:
        self._durable[sink] = self._durable.get(sink, NOTHING) | RangeSet([(self.base, stop)])

    async def beside(self: Any, channel: Any) -> None:
        """Chunks of one partition land side by side, so that their order is nobody's."""
        import asyncio as aio

        while True:
            await self._wait_due(channel)
            before = channel.size_bytes
            chunk, helds = channel.take(self.closing)
            size = before - channel.size_bytes

            async def one(chunk: Any = chunk, helds: Any = helds, size: int = size) -> None:
                try:
                    await self._land(channel.owned, chunk)
                finally:
                    self.size_bytes -= size
                    for held in helds:
                        held.release()
                channel.owned.landed(self.sink.name, chunk.start, chunk.stop)

            channel.flying = [*getattr(channel, "flying", ()), aio.create_task(one())]
            if not channel.pending:
                channel.idle.set()
                channel.flush = False
                channel.owned.changed.set()

    from thalweg.runtime.pipeline import Lane, _Channel

    class Roomy(_Channel):
        pass

    with (
        patch.object(Ledger, "landed", landed),
        patch.object(Lane, "_serve", beside),
        patch("thalweg.runtime.pipeline._Channel", Roomy),
    ):
        yield


@contextmanager
def gaps_of_one_are_closed() -> Iterator[None]:
    """Ranges are united when a single position is missing between them; a claim then runs a position ahead."""
    from thalweg.core.ack import Ledger
    from thalweg.core.coverage import NOTHING, RangeSet

    def landed(self: Ledger, sink: str, start: int, stop: int) -> None:
        self._durable[sink] = self._durable.get(sink, NOTHING) | RangeSet([(start, min(stop + 1, self.end))])

    with patch.object(Ledger, "landed", landed):
        yield


@contextmanager
def reads_what_the_last_owner_had_in_memory() -> Iterator[None]:
    """A new owner starts from a cache that the whole process shares, ahead of what is stored."""
    from thalweg.runtime.worker import Worker

    cache: dict[str, Any] = {}
    ready, checkpoint = Worker._ready, Worker._try_checkpoint

    async def remembered(self: Worker, owned: Any) -> bool:
        cache[owned.part.slug] = owned.ledger.document()
        return await checkpoint(self, owned)

    async def cached(self: Worker, part: Any, stored: Any, bounds: Any) -> Any:
        load = self.store.load

        async def from_memory(slug: str) -> Any:
            return cache.get(slug) or await load(slug)

        with patch.object(self.store, "load", from_memory):
            return await ready(self, part, stored, bounds)

    from thalweg.runtime.pipeline import Owned

    landed = Owned.landed

    def eager(self: Owned, sink: str, start: int, stop: int) -> None:
        landed(self, sink, start, stop)
        cache[self.part.slug] = self.ledger.document()

    with (
        patch.object(Worker, "_try_checkpoint", remembered),
        patch.object(Worker, "_ready", cached),
        patch.object(Owned, "landed", eager),
    ):
        yield


@contextmanager
def adopts_what_was_never_written() -> Iterator[None]:
    """An owner takes the interval after the last stored object for stored, too."""
    from thalweg.core.coverage import RangeSet
    from thalweg.runtime.lake import LakeLander

    found = LakeLander.found

    async def generous(self: LakeLander, part: Any, base: int, recorded: Any) -> Any:
        ranges = await found(self, part, base, recorded)
        if ranges:
            stop = max(b for _, b in ranges)
            more = RangeSet([(stop, stop + 3)])
            self._have[part] |= more
            return ranges | more
        return ranges

    with patch.object(LakeLander, "found", generous):
        yield


@contextmanager
def tidies_up() -> Iterator[None]:
    """An owner that finds stored objects deletes the first of them."""
    from thalweg.runtime.lake import LakeLander

    found = LakeLander.found

    async def tidy(self: LakeLander, part: Any, base: int, recorded: Any) -> Any:
        ranges = await found(self, part, base, recorded)
        for _, _, key in (await self._objects(part, ""))[:1]:
            await self._store.delete(key)
        return ranges

    with patch.object(LakeLander, "found", tidy):
        yield


@contextmanager
def never_trims() -> Iterator[None]:
    """A chunk is copied whole, whatever of it the table has."""
    from thalweg.core.coverage import RangeSet
    from thalweg.runtime.table import TableLander

    def everything(self: TableLander, rows: Any, missing: Any, chunk: Any) -> Any:
        import numpy as np

        return np.arange(rows.num_rows)

    assert RangeSet is not None
    with patch.object(TableLander, "_missing_rows", everything):
        yield


@contextmanager
def ranges_without_their_rows() -> Iterator[None]:
    """The table's coverage is committed by itself, before the rows."""
    from thalweg.runtime.table import TableLander

    land = TableLander._land_range

    async def apart(self: TableLander, chunk: Any) -> None:
        await self._database.ensure_coverage()
        async with self._database.transaction() as transaction:
            have = await transaction.lock_ranges(self._scope, chunk.partition.slug, self._sink.name)
            missing = have.gaps(chunk.start, chunk.stop)
            if missing:
                await transaction.put_ranges(self._scope, chunk.partition.slug, self._sink.name, missing)
            await transaction.commit()
        await land(self, chunk)

    with patch.object(TableLander, "_land_range", apart):
        yield


@contextmanager
def ambiguous_is_success() -> Iterator[None]:
    """Who hears no answer takes it for a yes."""
    from thalweg.errors import Ambiguous
    from thalweg.runtime.lake import LakeLander
    from thalweg.runtime.table import TableLander

    lake, table = LakeLander.land, TableLander.land

    async def sure_lake(self: LakeLander, chunk: Any, label: str = "") -> None:
        try:
            await lake(self, chunk, label)
        except Ambiguous:
            return

    async def sure_table(self: TableLander, chunk: Any, label: str = "") -> None:
        try:
            await table(self, chunk, label)
        except Ambiguous:
            return

    with patch.object(LakeLander, "land", sure_lake), patch.object(TableLander, "land", sure_table):
        yield


@contextmanager
def transient_is_dropped() -> Iterator[None]:
    """A chunk that meets a passing error is let go."""
    from thalweg.errors import Transient
    from thalweg.runtime.table import TableLander

    land = TableLander.land

    async def lazy(self: TableLander, chunk: Any, label: str = "") -> None:
        try:
            await land(self, chunk, label)
        except Transient:
            return

    with patch.object(TableLander, "land", lazy):
        yield


@contextmanager
def retry_forgets_the_first_frame() -> Iterator[None]:
    """The second try of a chunk begins at its second frame."""
    from dataclasses import replace

    from thalweg.errors import Ambiguous, Transient
    from thalweg.runtime.lake import LakeLander

    land = LakeLander.land
    failed: set[int] = set()

    async def short(self: LakeLander, chunk: Any, label: str = "") -> None:
        if id(self) in failed and len(chunk.frames) > 1:
            failed.discard(id(self))
            chunk = replace(chunk, start=chunk.frames[1].start, frames=chunk.frames[1:])
        try:
            await land(self, chunk, label)
        except (Transient, Ambiguous):
            failed.add(id(self))
            raise

    with patch.object(LakeLander, "land", short):
        yield


@contextmanager
def refused_rows_vanish() -> Iterator[None]:
    """What is refused goes nowhere."""
    from dataclasses import replace

    from thalweg.runtime import pipeline

    whole = pipeline.digested

    def silent(*words: Any) -> Any:
        done = whole(*words)
        frames = [
            (name, replace(f, rows=f.rows.slice(0, 0), origin=f.origin.slice(0, 0)) if f.envelope.num_rows == 0 else f)
            for name, f in done.frames
        ]
        return replace(done, frames=tuple(frames))

    with patch.object(pipeline, "digested", silent):
        yield


@contextmanager
def dropped_rows_land() -> Iterator[None]:
    """A rule that drops a row lets it through as well."""
    from thalweg.core.quality import judge
    from thalweg.core.topology import Verdict
    from thalweg.runtime import transform

    def lenient(rules: Any, rows: Any, predicates: Any) -> Any:
        kept = [rule for rule in rules if rule.verdict is not Verdict.DROP]
        return judge(kept, rows, predicates)

    with patch.object(transform, "judge", lenient), _unmemoised():
        yield


@contextmanager
def header_values_as_text() -> Iterator[None]:
    """Header values pass through UTF-8, with replacement characters."""
    from thalweg.runtime import lake

    rows = lake.raw_rows

    def lossy(prefix: str, frame: Any) -> Any:
        import pyarrow as pa

        batch = rows(prefix, frame)
        at = batch.schema.get_field_index(f"{prefix}source_headers")
        headers = [
            None if h is None else [{"key": e["key"], "value": _texted(e["value"])} for e in h]
            for h in batch.column(at).to_pylist()
        ]
        return batch.set_column(at, batch.schema.field(at), pa.array(headers, batch.schema.field(at).type))

    with patch.object(lake, "raw_rows", lossy), _unmemoised():
        yield


def _texted(value: bytes | None) -> bytes | None:
    return None if value is None else value.decode(errors="replace").encode()


@contextmanager
def null_keys_become_empty() -> Iterator[None]:
    """A record without a key gets an empty one in raw."""
    from thalweg.runtime import lake

    rows = lake.raw_rows

    def filled(prefix: str, frame: Any) -> Any:
        import pyarrow.compute as pc

        batch = rows(prefix, frame)
        at = batch.schema.get_field_index(f"{prefix}message_key")
        return batch.set_column(at, batch.schema.field(at), pc.fill_null(batch.column(at), b""))

    with patch.object(lake, "raw_rows", filled), _unmemoised():
        yield


@contextmanager
def shifted_positions() -> Iterator[None]:
    """A destination's rows carry the position after their own."""
    from thalweg.core import stamp
    from thalweg.runtime import table

    whole = stamp.stamped

    def shifted(prefix: str, frame: Any) -> Any:
        import pyarrow.compute as pc

        batch = whole(prefix, frame)
        at = batch.schema.get_field_index(f"{prefix}source_offset")
        return batch.set_column(at, batch.schema.field(at), pc.add(batch.column(at), 1).cast(batch.schema.field(at).type))

    with patch.object(table, "stamped", shifted), _unmemoised():
        yield


@contextmanager
def never_released() -> Iterator[None]:
    """The bytes of a batch are not given back when its partition goes away."""
    from thalweg.runtime.pipeline import Lane

    def leaky(self: Lane, part: Any) -> None:
        channel = self._channels.pop(part, None)
        if channel is not None and channel.task is not None:
            channel.task.cancel()

    with patch.object(Lane, "forget", leaky):
        yield


@contextmanager
def revoke_never_answered() -> Iterator[None]:
    """A revoked partition is drained and forgotten, and the group is not told."""
    from thalweg.runtime.worker import Worker

    revoked = Worker._revoked

    async def silent(self: Worker, event: Any) -> None:
        async def nobody(token: int) -> None:
            return

        with patch.object(self.consumer, "release", nobody):
            await revoked(self, event)

    with patch.object(Worker, "_revoked", silent):
        yield


@contextmanager
def reads_in_circles() -> Iterator[None]:
    """A poll that brings nothing is repeated at once."""
    from thalweg.runtime.worker import Worker

    polled = Worker._polled

    async def hasty(self: Worker, records_max: int, wait_s: float) -> list[object]:
        while True:
            if events := await polled(self, records_max, 0.0):
                return events
            await asyncio.sleep(0)

    with patch.object(Worker, "_polled", hasty):
        yield


@contextmanager
def stops_without_leaving() -> Iterator[None]:
    """SIGTERM is heard, and nothing follows from it."""
    from thalweg.runtime.worker import Worker

    with patch.object(Worker, "stop", lambda self: None):
        yield


@contextmanager
def commits_for_the_old_topic() -> Iterator[None]:
    """Offsets are committed one lower than the last ones, now and then."""
    from thalweg.runtime.worker import Worker

    commit = Worker._try_commit

    async def wavering(self: Worker, candidates: list[Any]) -> bool:
        done = await commit(self, candidates)
        lower = {o.part: self._cursor(o.acked - 1) for o in candidates if o.alive and o.acked > 1}
        if done and lower:
            try:
                await self.consumer.commit(lower)
            except Exception:
                return False
        return done

    with patch.object(Worker, "_try_commit", wavering):
        yield


@contextmanager
def claims_beyond_the_log() -> Iterator[None]:
    """The last interval of a poll is claimed a little further than it goes."""
    from thalweg.core.coverage import Document, RangeSet

    encoded = Document.encoded

    def wide(self: Document) -> bytes:
        from dataclasses import replace

        sinks = {
            n: RangeSet([*list(r)[:-1], (list(r)[-1][0], list(r)[-1][1] + 1_000_000)]) if r else r for n, r in self.sinks.items()
        }
        return encoded(replace(self, sinks=sinks))

    with patch.object(Document, "encoded", wide):
        yield


@contextmanager
def reads_the_clock() -> Iterator[None]:
    """A lane looks at the machine's clock."""
    from thalweg.runtime.pipeline import Lane

    put = Lane.put

    def timed(self: Lane, owned: Any, frame: Any, held: Any) -> None:
        import time

        time.monotonic()
        put(self, owned, frame, held)

    with patch.object(Lane, "put", timed):
        yield


# --- bugs that a row's own spec must find ---------------------------------------------------------------------------------


@contextmanager
def every_sink_gates() -> Iterator[None]:
    """The source waits for every sink, whatever its `on_failure` says."""
    from thalweg.core.topology import Topology

    with patch.object(Topology, "gating", property(lambda self: frozenset(s.name for s in self.sinks))):
        yield


@contextmanager
def calls_a_third_party() -> Iterator[None]:
    """Every node looks for coordination in an object store, asked for or not."""
    from thalweg.runtime.pipeline import Pipeline

    opened = Pipeline.open

    async def chatty(self: Pipeline) -> None:
        await self.outside.objects("s3://coordination", {}).list("")
        await opened(self)

    with patch.object(Pipeline, "open", chatty):
        yield


@contextmanager
def first_descendant_acks() -> Iterator[None]:
    """What has landed in one sink counts as landed in all."""
    from thalweg.runtime.pipeline import Owned

    def landed(self: Owned, sink: str, start: int, stop: int) -> None:
        if self.alive:
            for name in self.ledger.gating:
                self.ledger.landed(name, start, stop)
            self.changed.set()

    with patch.object(Owned, "landed", landed):
        yield


@contextmanager
def durable_off_is_let_through() -> Iterator[None]:
    """The plan takes no notice of `durable: false`."""
    from thalweg.core import plan

    init = plan._Planner.__init__

    def hard_of_hearing(self: Any, *words: Any, **more: Any) -> None:
        init(self, *words, **more)
        fault = self.fault

        def heard(path: str, *rest: Any) -> None:
            if not path.endswith(".durable"):
                fault(path, *rest)

        self.fault = heard

    with patch.object(plan._Planner, "__init__", hard_of_hearing):
        yield


@contextmanager
def colocation_compares_spelling() -> Iterator[None]:
    """Two connection strings name one database only when they are the same text."""
    from thalweg.core import plan

    with patch.object(plan, "within", lambda outer, inner: outer == inner):
        yield


@contextmanager
def checkpoints_only_at_the_end() -> Iterator[None]:
    """Coverage is stored when a partition is given up, and not before."""
    from thalweg.runtime.worker import Worker

    async def idle(self: Worker) -> None:
        await asyncio.Event().wait()

    with patch.object(Worker, "_tick", idle):
        yield


@contextmanager
def one_range_a_batch() -> Iterator[None]:
    """Ranges that touch are kept apart."""
    from thalweg.core.coverage import RangeSet

    def apart(self: RangeSet, ranges: Any = ()) -> None:
        self._ranges = tuple(sorted({(a, b) for a, b in ranges if a < b}))

    with patch.object(RangeSet, "__init__", apart):
        yield


@contextmanager
def ranges_meet_at_a_distance() -> Iterator[None]:
    """Ranges become one when a single position is missing between them."""
    from thalweg.core.coverage import RangeSet

    init = RangeSet.__init__

    def near(self: RangeSet, ranges: Any = ()) -> None:
        some = sorted((a, b) for a, b in ranges if a < b)
        init(self, [*some, *((b, c) for (_, b), (c, _) in pairwise(some) if c == b + 1)])

    with patch.object(RangeSet, "__init__", near):
        yield


@contextmanager
def cluster_left_out_of_the_id() -> Iterator[None]:
    """Record ids do not know which cluster a record is from."""
    from dataclasses import replace

    from thalweg.core import batch

    prefix = batch._prefix

    with patch.object(batch, "_prefix", lambda partition: prefix(replace(partition, cluster=""))):
        yield


def _unmemoised() -> AbstractContextManager[None]:
    """Where a world keeps the results of pure work, a bug in that work is planted beneath what it keeps."""
    return FRESH()


FRESH: Callable[[], AbstractContextManager[None]] = nullcontext
"""Set by a world that keeps results: a context in which it keeps none."""

REAL_ONLY: Final = frozenset({"commit-before-durable", "commit-a-batch-early", "insert-instead-of-copy"})
"""Bugs of an adapter: no simulator runs those."""

FOCUS: Final[Mapping[str, tuple[str, ...]]] = {
    "last-writer-wins": ("pause",),
    "conflict-counts-as-stored": ("pause",),
    "gap-is-bridged": ("retention", "kill", "pause"),
    "explains-too-much": ("retention", "kill", "pause"),
}
"""Kinds of faults without which a bug does nothing: the search for it draws no others."""

RARE: Final = frozenset({"commits-what-was-found"})
"""Bugs that a search finds once in more than a thousand seeds: a plan of the corpus shows each of them every time."""

SPEC_ONLY: Final = frozenset(
    {
        "every-sink-gates", "calls-a-third-party", "durable-off-is-let-through", "colocation-compares-spelling",
        "checkpoints-only-at-the-end",
        "one-range-a-batch", "ranges-meet-at-a-distance", "cluster-left-out-of-the-id",
    }
)  # fmt: skip
"""Bugs that only a row's own spec can show: what they spoil, no invariant speaks of."""

INVARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "coverage-before-durable": ("ack-before-durable", "coverage-before-durable", "high-water-mark", "ambiguous-is-success"),
    "coverage-beyond-log": ("claims-beyond-the-log",),
    "coverage-forgotten": ("last-writer-wins",),
    "no-loss": ("tidies-up",),
    "commit-beyond-checkpoint": (
        "commit-from-the-live-ledger",
        "commit-before-the-checkpoint-is-stored",
        "conflict-counts-as-stored",
    ),
    "commit-before-durable": ("commit-on-receive",),
    "commit-went-back": ("commits-for-the-old-topic",),
    "explained-untrue": ("explains-too-much",),
    "once": ("never-trims",),
    "phantom": ("dropped-rows-land", "shifted-positions"),
    "content": ("header-values-as-text", "null-keys-become-empty"),
    "liveness": ("refused-commit-means-lost", "commit-gives-up", "revoke-never-answered"),
    "livelock": ("reads-in-circles",),
    "stops": ("stops-without-leaving",),
    "budget": ("never-released",),
    "escape": ("reads-the-clock",),
}
"""Each invariant, and the bugs that must break it."""

PLANTS: Final[Mapping[str, Plant]] = {
    "commit-before-durable": commit_before_durable,
    "commit-a-batch-early": commit_a_batch_early,
    "lose-the-last-row": lose_the_last_row,
    "insert-instead-of-copy": insert_instead_of_copy,
    "ack-before-durable": ack_before_durable,
    "coverage-before-durable": coverage_before_durable,
    "commit-from-the-live-ledger": commit_from_the_live_ledger,
    "commit-before-the-checkpoint-is-stored": commit_before_the_checkpoint_is_stored,
    "commits-what-was-found": commits_what_was_found,
    "commit-on-receive": commit_on_receive,
    "refused-commit-means-lost": refused_commit_means_lost,
    "commit-gives-up": commit_gives_up,
    "gap-is-bridged": gap_is_bridged,
    "explains-too-much": explains_too_much,
    "last-writer-wins": last_writer_wins,
    "conflict-counts-as-stored": conflict_counts_as_stored,
    "high-water-mark": high_water_mark,
    "gaps-of-one-are-closed": gaps_of_one_are_closed,
    "reads-what-the-last-owner-had-in-memory": reads_what_the_last_owner_had_in_memory,
    "adopts-what-was-never-written": adopts_what_was_never_written,
    "tidies-up": tidies_up,
    "never-trims": never_trims,
    "ranges-without-their-rows": ranges_without_their_rows,
    "ambiguous-is-success": ambiguous_is_success,
    "transient-is-dropped": transient_is_dropped,
    "retry-forgets-the-first-frame": retry_forgets_the_first_frame,
    "refused-rows-vanish": refused_rows_vanish,
    "dropped-rows-land": dropped_rows_land,
    "header-values-as-text": header_values_as_text,
    "null-keys-become-empty": null_keys_become_empty,
    "shifted-positions": shifted_positions,
    "never-released": never_released,
    "revoke-never-answered": revoke_never_answered,
    "reads-in-circles": reads_in_circles,
    "stops-without-leaving": stops_without_leaving,
    "commits-for-the-old-topic": commits_for_the_old_topic,
    "claims-beyond-the-log": claims_beyond_the_log,
    "reads-the-clock": reads_the_clock,
    "every-sink-gates": every_sink_gates,
    "calls-a-third-party": calls_a_third_party,
    "first-descendant-acks": first_descendant_acks,
    "durable-off-is-let-through": durable_off_is_let_through,
    "colocation-compares-spelling": colocation_compares_spelling,
    "checkpoints-only-at-the-end": checkpoints_only_at_the_end,
    "one-range-a-batch": one_range_a_batch,
    "ranges-meet-at-a-distance": ranges_meet_at_a_distance,
    "cluster-left-out-of-the-id": cluster_left_out_of_the_id,
}


def every_plant() -> Mapping[str, Plant]:
    """Those of the rows too, which stand in modules of their own."""
    from catalogue import plant_coverage, plant_durability

    return {**PLANTS, **plant_coverage.PLANTS, **plant_durability.PLANTS}


def main() -> None:
    """Plant the bug that is named, then be the engine's command line."""
    name, dashes, *words = sys.argv[1:]
    plants = every_plant()
    if dashes != "--" or name not in plants:
        raise SystemExit(f"python -m catalogue.sabotage NAME -- …, where NAME is one of: {', '.join(plants)}")
    from thalweg.__main__ import main as engine

    sys.argv = ["thalweg", *words]
    with plants[name]():
        engine()


if __name__ == "__main__":
    main()
