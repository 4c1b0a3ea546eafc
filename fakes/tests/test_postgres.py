"""The Postgres twin: beside a real server by generated scripts, and by itself for each fault that it may inject."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings

from chaos.embedded import EmbeddedPostgres, embedded_postgres
from fakes.conformance_database import (
    PLAIN,
    SCRIPTS,
    UNIQUE,
    Abandon,
    Broken,
    Commit,
    Copy,
    Ensure,
    Kill,
    Lock,
    Look,
    Merge,
    Outside,
    Put,
    PutDocument,
    Release,
    RollbackTo,
    Savepoint,
    Step,
    compared,
)  # fmt: skip
from fakes.faults import (
    CONNECTION_KILLED,
    DISK_FULL,
    DONE,
    KILLED_AFTER,
    KILLED_BEFORE,
    NEVER_ARRIVED,
    REFUSED,
    REPLY_LOST,
    SERIALIZATION,
    Calm,
    Fate,
    Wire,
)  # fmt: skip
from fakes.postgres import IDLE_S, LOCK_TIMEOUT_S, PostgresTwin, Server, Session, Steps
from thalweg.adapters.postgres import PostgresDatabase, encoded
from thalweg.adapters.system import InlineCompute
from thalweg.core.coverage import RangeSet
from thalweg.errors import Ambiguous, DataRefused, Permanent, RowsRefused, ThalwegError, Transient
from thalweg.ports import Database, TableName

NUMBERS = itertools.count()
TOTALS: Counter[str] = Counter()
T = TableName("", "t")
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def batch(*rows: tuple[int | None, str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([k for k, _ in rows], pa.int64()), pa.array([v for _, v in rows], pa.string())], schema=SCHEMA
    )


# --- beside a real server -----------------------------------------------------------------------------------------


class Real:
    """One server and one watcher, on one loop; two new adapters a script, for what their pools hold is part of a story."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.runner = asyncio.Runner()
        self.dsn = server.dsn
        self.watcher = self.runner.run(psycopg.AsyncConnection.connect(server.dsn, autocommit=True))

    async def asked(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await (await self.watcher.execute(query.encode(), values)).fetchall()

    async def waiting(self) -> int:
        return int((await self.asked("select count(*) from pg_locks where not granted"))[0][0])

    async def kill(self) -> None:
        query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'thalweg'"
        for which in (" and wait_event_type = 'Lock'", ""):  # who waits first, or the end of another lets it go on
            while await self.asked(query + which):
                pass

    async def columns(self, table: TableName) -> list[str]:
        query = "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0"
        return [row[0] for row in await self.asked(query, [table.name])]

    async def rows(self, table: TableName, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return await self.asked(f"select {', '.join(columns)} from {table.name}")

    def outside(self, name: str) -> Outside:
        clients = PostgresDatabase(self.dsn, InlineCompute()), PostgresDatabase(self.dsn, InlineCompute())
        return Outside(name, clients, self.waiting, self.kill, self.rows, self.columns)

    def close(self) -> None:
        self.runner.run(self.watcher.close())
        self.runner.close()


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    fast = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}
    with embedded_postgres(fast) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:  # many connections are made: let that be cheap
            connection.execute("set scram_iterations = 1")
            connection.execute(f"alter role {server.user} password '{server.password}'".encode())
        made = Real(server)
        yield made
        made.close()
    print("scripts beside a server: " + ", ".join(f"{name} {n}" for name, n in sorted(TOTALS.items())))


def twin_outside(name: str, server: Server, make: Callable[[Server, Wire], Database] = PostgresTwin) -> Outside:
    clients = make(server, Wire(server.air, "a", "pg")), make(server, Wire(server.air, "b", "pg"))

    async def waiting() -> int:
        await asyncio.sleep(0)
        return server.waiting

    async def kill() -> None:
        server.kill_pool()

    async def rows(table: TableName, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return server.rows(table, columns)

    async def columns(table: TableName) -> list[str]:
        return list(server.tables[str(table)].types)

    return Outside(name, clients, waiting, kill, rows, columns)


def beside(real: Real, script: Sequence[Step]) -> Counter[str]:
    name = f"c{next(NUMBERS)}"
    story = real.runner.run(compared(script, real.outside(name), twin_outside(name, Server(Calm()))))
    TOTALS.update(story.counts)
    TOTALS["scripts"] += 1
    return story.counts


@given(script=SCRIPTS)
@settings(max_examples=240, deadline=None, phases=(Phase.generate,), derandomize=True, database=None)
def generated(real: Real, script: list[Step]) -> None:
    beside(real, script)


def test_generated_scripts_tell_the_same_story_on_both(real: Real) -> None:
    generated(real)
    assert TOTALS["scripts"] >= 200
    for event in ("waits", "RowsRefused", "DataRefused", "Permanent", "Stale", "Transient", "Ambiguous", "killed"):
        assert TOTALS[event] > 5, f"{event} was hardly seen: {TOTALS}"


BY_HAND: dict[str, list[Step]] = {
    "a locked row's successor sees what was put": [Lock(0, 0), Put(0, 0, 3, 9), Lock(1, 0), Commit(0), Commit(1)],
    "an abandoned row was never there": [Lock(0, 0), Lock(1, 0), Abandon(0, True), Commit(1), Lock(0, 0)],
    "going back lets a waiter go on": [
        Lock(0, 0), Savepoint(0), Lock(0, 1), Lock(1, 1), RollbackTo(0, 0), Put(1, 1, 0, 5), Commit(1), Commit(0),
    ],
    "an error lets a waiter go on": [
        Copy(0, UNIQUE, ((1, "a"), (2, "b"), (1, "c"))), Copy(1, UNIQUE, ((2, "d"),)), Commit(1), Commit(0),
    ],
    "an error within a savepoint keeps what came before": [
        Copy(0, UNIQUE, ((1, "a"),)), Savepoint(0), Copy(0, UNIQUE, ((2, "b"), (2, "c"))), Copy(1, UNIQUE, ((2, "d"),)),
        Merge(1, UNIQUE, ((1, "e"),), False), RollbackTo(0, 0), Commit(0), Commit(1),
    ],
    "an equal key waits and is refused": [Copy(0, UNIQUE, ((4, "a"),)), Copy(1, UNIQUE, ((3, "b"), (4, "c"))), Commit(0)],
    "an equal key waits and is taken": [
        Copy(0, UNIQUE, ((4, "a"),)), Copy(1, UNIQUE, ((3, "b"), (4, "c"))), Abandon(0, False), Commit(1),
    ],
    "merges of one key, one after the other": [
        Merge(0, UNIQUE, ((1, "a"), (2, "b")), True), Commit(0), Merge(0, UNIQUE, ((1, "c"), (1, "d"), (3, "e")), True),
        Merge(1, UNIQUE, ((0, "x"), (1, "f")), True), Commit(0),
        Merge(0, UNIQUE, ((0, "g"), (9, "h")), False), Commit(1), Commit(0),
    ],
    "a merge that leaves what is there": [
        Copy(0, UNIQUE, ((1, "a"),)), Commit(0), Merge(0, UNIQUE, ((5, "b"), (1, "c"), (5, "d")), False), Commit(0),
    ],
    "an update in another unique index": [
        Ensure(0, UNIQUE, 4), Copy(0, UNIQUE, ((1, "a"), (2, "b"))), Commit(0), Merge(0, UNIQUE, ((1, "c"),), True),
        Merge(0, UNIQUE, ((2, "a"),), True), Merge(1, UNIQUE, ((3, "b"),), True), Commit(0), Commit(1),
        Merge(0, UNIQUE, ((5, "a"),), True), Abandon(0, False),
    ],
    "an update keeps the columns it does not name": [
        Ensure(0, UNIQUE, 1), Copy(0, UNIQUE, ((1, "a"), (2, "b")), True), Merge(0, UNIQUE, ((1, "c"), (3, "d")), True),
        Commit(0),
    ],
    "a column is added once the writer is done": [
        Copy(0, PLAIN, ((1, "a"),)), Ensure(1, PLAIN, 1), Commit(0), Copy(0, PLAIN, ((2, "b"),), True), Abandon(0, False),
        Ensure(0, PLAIN, 1), Copy(0, PLAIN, ((2, "b"),), True), Commit(0),
    ],
    "an index waits for the writer, and a merge's refusal leaves one that it does not wait for": [
        Merge(0, UNIQUE, ((1, "n\x00l"),), False), Ensure(1, UNIQUE, 4), Ensure(1, UNIQUE, 1), Abandon(0, False),
    ],
    "an index over what is there twice": [
        Copy(0, PLAIN, ((1, "a"), (1, "b"), (None, "b"))), Commit(0), Ensure(0, PLAIN, 5), Ensure(0, PLAIN, 4),
        Ensure(1, PLAIN, 6), Ensure(1, PLAIN, 7), Ensure(1, PLAIN, 3), Merge(1, PLAIN, ((1, "c"),), False), Commit(1),
    ],
    "ended by the server": [
        Lock(0, 0), Lock(1, 0), Kill(0), Commit(0), RollbackTo(1, 0), Abandon(0, False), Abandon(1, False), Lock(0, 0), Kill(0),
        Copy(0, PLAIN, ((1, "n\x00l"),)), Commit(0), Look(1, 0), PutDocument(1, 0, 0),
    ],
    "a savepoint that is gone": [
        Savepoint(0), Savepoint(0), RollbackTo(0, 1), RollbackTo(0, 0), RollbackTo(0, 1), Release(0, 1), Release(0, 1), Commit(0),
    ],
    "a stale document": [PutDocument(0, 0, 0), PutDocument(1, 0, 0), PutDocument(0, 0, 1), PutDocument(0, 1, -1), Look(1, 0)],
}  # fmt: skip


@pytest.mark.parametrize("what", BY_HAND)
def test_story_written_by_hand_is_the_same_on_both(real: Real, what: str) -> None:
    beside(real, BY_HAND[what])


# --- planted bugs -------------------------------------------------------------------------------------------------


class KeepsRowsGoneBack(Server):
    """`rollback_to` forgets to undo."""

    def rollback_to(self, session: Session, number: int) -> Steps:
        rows = list(session.rows)
        yield from super().rollback_to(session, number)
        for table, piece in rows[len(session.rows) :]:
            self._append(session, table, piece)


class LocksNothing(Server):
    """Two owners hold one coverage row."""

    def _lock(self, session: Session, key: Any, mode: str) -> Steps:
        if key[0] != "cover":
            yield from super()._lock(session, key, mode)


class CountsRowsFromOne(Server):
    def copy(self, session: Session, name: str, rows: pa.RecordBatch) -> Steps:
        try:
            yield from super().copy(session, name, rows)
        except DataRefused as error:
            error.row += 1
            raise


class ForgetsTheOther(Server):
    """A put replaces what is there instead of uniting with it."""

    def put_ranges(self, session: Session, key: Any, ranges: RangeSet) -> Steps:
        yield from super().put_ranges(session, key, ranges)
        session.cover[key] = ranges


class TakesStaleDocuments(Server):
    def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        found = self.documents.get((scope, partition))
        return super().put_document(scope, partition, body, 0 if found is None else found[1])


class CommitsWhatFailed(Server):
    """A failed statement leaves the transaction usable."""

    def _failed(self, session: Session) -> list[Any]:
        freed = super()._failed(session)
        session.failed = False
        return freed


def hunted(kind: type[Server], scripts: int = 300) -> None:
    """The generated scripts, on a twin beside one with a bug."""
    runner = asyncio.Runner()

    @given(script=SCRIPTS)
    @settings(max_examples=scripts, deadline=None, phases=(Phase.generate,), derandomize=True, database=None)
    def hunt(script: list[Step]) -> None:
        runner.run(compared(script, twin_outside("c", Server(Calm())), twin_outside("c", kind(Calm()))))

    with runner:
        hunt()


@pytest.mark.parametrize(
    "bug", [KeepsRowsGoneBack, LocksNothing, CountsRowsFromOne, ForgetsTheOther, TakesStaleDocuments, CommitsWhatFailed]
)
def test_generated_scripts_find_a_planted_bug(bug: type[Server]) -> None:
    with pytest.raises((Broken, ExceptionGroup)) as found:
        hunted(bug)
    errors = found.value.exceptions if isinstance(found.value, ExceptionGroup) else (found.value,)
    assert any(isinstance(error, Broken) for error in errors)


def test_generated_scripts_find_nothing_between_twins() -> None:
    hunted(Server, 60)


# --- the twin by itself -------------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    """In turns of the loop."""
    for _ in range(1_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


class Weather(Calm):
    """Fates by operation, once each; time that passes only when it is told to; nodes that die."""

    def __init__(self, **fates: Fate) -> None:
        super().__init__()
        self.fates = {f"pg.{name}": fate for name, fate in fates.items()}
        self.asked: list[str] = []
        self.killed: list[str] = []
        self.at = 0.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.down = False
        self.server = Server(self)

    def now(self) -> float:
        return self.at

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        if delay_s > 0:
            self.timers.append((self.at + delay_s, len(self.timers), call, args))
        else:
            super().later(0, call, *args)

    def passes(self, seconds: float) -> bool:
        end = self.at + seconds
        while due := sorted(timer for timer in self.timers if timer[0] <= end):
            self.timers.remove(due[0])
            self.at = due[0][0]
            due[0][2](*due[0][3])
        self.at = end
        return False

    def cut(self, node: str, service: str) -> bool:
        return self.down

    def fate(self, effect: str, operation: str) -> Fate:
        self.asked.append(effect)
        return self.fates.pop(operation, DONE)

    def kill(self, node: str) -> None:
        self.killed.append(node)
        self.server.connection_lost(node)

    def twin(self, node: str) -> PostgresTwin:
        return PostgresTwin(self.server, Wire(self, node, "pg"), "db:5432/x")


async def opened(air: Weather, node: str = "a", unique: Sequence[str] = ()) -> PostgresTwin:
    twin = air.twin(node)
    await twin.ensure_coverage()
    await twin.ensure_table(T, SCHEMA, unique=unique)
    return twin


async def landed(twin: PostgresTwin, *rows: tuple[int | None, str | None], start: int = 0, stop: int = 5) -> None:
    """As a lander does it."""
    async with twin.transaction() as transaction:
        await transaction.lock_ranges("p", "s/t/0@i", "dest")
        await transaction.savepoint()
        await transaction.copy(T, batch(*rows))
        await transaction.put_ranges("p", "s/t/0@i", "dest", RangeSet([(start, stop)]))
        await transaction.commit()


def stored(air: Weather) -> tuple[list[tuple[Any, ...]], RangeSet]:
    rows = air.server.rows("t", ["k", "v"])
    return rows, air.server.coverage.get(("p", "s/t/0@i", "dest"), RangeSet())


ALL = ([(1, "a")], RangeSet([(0, 5)]))
NONE: tuple[list[tuple[Any, ...]], RangeSet] = ([], RangeSet())


@pytest.mark.parametrize(
    ("fates", "error", "left"),
    [
        ({"commit": REFUSED}, Transient, NONE),
        ({"commit": REPLY_LOST}, Ambiguous, ALL),
        ({"commit": NEVER_ARRIVED}, Ambiguous, NONE),
        ({"commit": SERIALIZATION}, Transient, NONE),
        ({"commit": CONNECTION_KILLED}, Transient, NONE),
        ({"copy": DISK_FULL}, Transient, NONE),
        ({"copy": REPLY_LOST}, Transient, NONE),
        ({"copy": CONNECTION_KILLED}, Transient, NONE),
    ],
)
async def test_fate_of_a_landing(fates: dict[str, Fate], error: type[ThalwegError], left: object) -> None:
    air = Weather(**fates)
    twin = await opened(air)
    with pytest.raises(ThalwegError) as raised:
        await landed(twin, (1, "a"))
    assert type(raised.value) is error
    assert stored(air) == left
    async with (await opened(air, "b")).transaction() as transaction:  # no lock was left behind
        assert await transaction.lock_ranges("p", "s/t/0@i", "dest") == stored(air)[1]
    await landed(twin, (1, "b"), start=5, stop=6)
    assert not air.server.locks


@pytest.mark.parametrize(("fate", "left"), [(KILLED_BEFORE, NONE), (KILLED_AFTER, ALL)])
@pytest.mark.parametrize("operation", ["commit", "copy"])
async def test_power_goes_at_an_effect(fate: Fate, left: object, operation: str) -> None:
    air = Weather(**{operation: fate})
    twin = await opened(air)
    task = asyncio.create_task(landed(twin, (1, "a")))
    successor = await opened(air, "b")
    await until(lambda: bool(air.killed))
    async with successor.transaction() as transaction:
        lock = asyncio.create_task(transaction.lock_ranges("p", "s/t/0@i", "dest"))
        await until(lambda: lock.done() or air.passes(0.01))
        assert stored(air) == (left if operation == "commit" else NONE)
        assert await lock == stored(air)[1]
    assert not task.done()  # a dead node hears nothing
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_commit_that_had_left_lands_after_its_node_died() -> None:
    air = Weather()
    twin = await opened(air)
    async with twin.transaction() as transaction:
        await transaction.copy(T, batch((1, "a")))
        task = asyncio.ensure_future(transaction.commit())
        await asyncio.sleep(0)  # it is on its way
        air.server.connection_lost("a")
        await task
    assert stored(air)[0] == [(1, "a")]
    assert not air.server.sessions


@pytest.mark.parametrize(("operation", "detail"), [("commit", "s/t/0@i"), ("copy", "t"), ("ensure_table", "t")])
async def test_effects_have_addresses(operation: str, detail: str) -> None:
    air = Weather()
    await landed(await opened(air), (1, "a"))
    assert f"a:pg.{operation}:{detail}" in air.asked
    assert not {"a:pg.lock:s/t/0@i", "a:pg.put_ranges:s/t/0@i"} & set(air.asked)


async def test_session_of_a_node_that_was_cut_keeps_its_locks_until_it_was_idle_for_too_long() -> None:
    air = Weather()
    one, other = await opened(air, "a"), await opened(air, "b")

    async def cut_off() -> None:
        async with one.transaction() as transaction:
            await transaction.lock_ranges("p", "s/t/0@i", "dest")
            air.down = True
            await transaction.commit()

    with pytest.raises(Transient, match="unreachable"):
        await cut_off()
    air.down = False

    async def takes_over() -> None:
        async with other.transaction() as transaction:
            await transaction.lock_ranges("p", "s/t/0@i", "dest")
            await transaction.commit()

    task = asyncio.create_task(takes_over())
    await until(lambda: air.server.waiting == 1)
    air.passes(LOCK_TIMEOUT_S)
    with pytest.raises(Transient, match="55P03"):
        await task
    task = asyncio.create_task(takes_over())
    await until(lambda: air.server.waiting == 1)
    air.at = IDLE_S - LOCK_TIMEOUT_S / 2  # without what happens meanwhile
    air.timers = [timer for timer in air.timers if timer[2].__name__ == "_sweep"]
    air.passes(LOCK_TIMEOUT_S)
    await task


async def test_deadlock_has_one_victim() -> None:
    air = Weather()
    nodes = [await opened(air, "a"), await opened(air, "b")]
    locked = asyncio.Barrier(2)

    async def crosses(number: int) -> str:
        async with nodes[number].transaction() as transaction:
            await transaction.lock_ranges("p", str(number), "dest")
            await locked.wait()
            await transaction.lock_ranges("p", str(1 - number), "dest")
            await transaction.commit()
        return "done"

    tasks = [asyncio.create_task(crosses(number)) for number in (0, 1)]
    await until(lambda: air.server.waiting == 2)
    air.passes(1.0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(end) for end in ends if isinstance(end, Transient)] == ["deadlock detected (SQLSTATE 40P01) (pg)"]
    assert "done" in ends


async def test_cancelled_waiter_leaves_the_queue() -> None:
    air = Weather()
    one, other = await opened(air, "a"), await opened(air, "b")
    async with one.transaction() as transaction:
        await transaction.lock_ranges("p", "s/t/0@i", "dest")
        task = asyncio.create_task(landed(other, (1, "a")))
        await until(lambda: air.server.waiting == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: air.server.waiting == 0)
        await transaction.commit()
    assert not air.server.locks


async def test_full_disk_takes_no_rows_and_a_full_one_at_the_commit_neither() -> None:
    air = Weather()
    twin = await opened(air)
    air.server.full = True
    with pytest.raises(Transient, match="full"):
        await landed(twin, (1, "a"))
    air.server.full = False
    with pytest.raises(Transient, match="full"):
        await _filled_up(air, twin)
    assert stored(air) == NONE
    air.server.full = False
    await landed(twin, (1, "a"))
    assert stored(air) == ALL


async def _filled_up(air: Weather, twin: PostgresTwin) -> None:
    async with twin.transaction() as transaction:
        await transaction.copy(T, batch((1, "a")))
        air.server.full = True
        await transaction.commit()


async def test_judge_hears_of_each_effect_as_it_is_applied() -> None:
    air = Weather()
    heard: list[tuple[str, Any, int]] = []
    air.server = Server(air, lambda kind, what: heard.append((kind, what, len(air.server.rows("t", ["k"])))))
    twin = await opened(air, unique=["k"])
    await landed(twin, (1, "a"))
    async with twin.transaction() as transaction:
        await transaction.merge(T, batch((1, "b"), (2, "c"), (2, "d")), ["k"], update=False)
        await transaction.commit()
    await twin.put_document("p", "s/t/0@i", "{}", 0)
    assert [(kind, rows) for kind, _, rows in heard] == [("rows", 1), ("ranges", 1), ("rows", 2), ("document", 2)]
    assert heard[1][1] == ("p", "s/t/0@i", "dest", RangeSet([(0, 5)]))
    table, [merged] = heard[2][1]
    assert (table, merged.to_pylist()) == ("t", [{"k": 2, "v": "d"}])
    assert heard[3][1] == ("p", "s/t/0@i", "{}")


async def test_batch_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    air, calls = Weather(), 0
    twin = await opened(air)
    rows = batch((1, "a\x00"))

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return encoded(*args)

    monkeypatch.setattr("fakes.postgres.encoded", counted)
    for _ in range(3):
        async with twin.transaction() as transaction:
            with pytest.raises(RowsRefused) as refused:
                await transaction.copy(T, rows)
            assert [(r.row, r.code) for r in refused.value.rows] == [(0, "text-nul")]
            await transaction.savepoint()  # nothing was sent: the transaction goes on
    assert calls == 1


async def test_identity_is_known_once_the_server_was_reached() -> None:
    twin = Weather().twin("a")
    assert twin.identity == ""
    await twin.ensure_coverage()
    assert twin.identity == "db:5432/x"
    assert twin.capabilities == PostgresDatabase.capabilities


async def test_lost_answer_of_an_idempotent_statement_is_transient_and_of_a_document_ambiguous() -> None:
    air = Weather(ensure_table=REPLY_LOST, put_document=REPLY_LOST)
    twin = air.twin("a")
    await twin.ensure_coverage()
    with pytest.raises(Transient):
        await twin.ensure_table(T, SCHEMA)
    with pytest.raises(Ambiguous):
        await twin.put_document("p", "x", "{}", 0)
    assert await twin.get_document("p", "x") == ("{}", 1)


async def test_table_without_coverage_is_permanent() -> None:
    twin = Weather().twin("a")
    with pytest.raises(Permanent):
        await twin.ranges("p", "x")
    async with twin.transaction() as transaction:
        with pytest.raises(Permanent):
            await transaction.lock_ranges("p", "x", "s")
        with pytest.raises(Permanent, match="failed"):
            await transaction.commit()
