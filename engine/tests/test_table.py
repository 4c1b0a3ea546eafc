"""Tables as sinks: exactly once by range under every failure, guilty rows alone refused, nothing hangs; awkward values."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.embedded import EmbeddedPostgres, embedded_postgres
from thalweg.adapters.postgres import PostgresDatabase, encoded, index_name
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, Chunk, Frame, Partition, Refusals
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.dlq import dlq_rows
from thalweg.core.topology import OnFailure, Role, Sink
from thalweg.errors import Ambiguous, DataRefused, Permanent, RowsRefused, ThalwegError, Transient
from thalweg.ports import Capabilities, TableName
from thalweg.runtime.table import TableLander

PART = Partition("s", "c", "t", 0, "i")
PREFIX = "_twg_"
T = TableName("", "t")


# --- on a real server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with embedded_postgres({"fsync": "off"}) as running:
        yield running


@pytest.fixture
def dsn(server: EmbeddedPostgres) -> str:
    """A database with nothing in it."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("drop schema if exists public, mine cascade")
        connection.execute("create schema public")
    return server.dsn


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[PostgresDatabase]:
    database = PostgresDatabase(dsn, InlineCompute())
    try:
        yield database
    finally:
        await database.close()


def asked(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


def one_column(values: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([values], schema=pa.schema([("v", values.type)]))


async def sent(dsn: str, column: str, values: pa.Array) -> list[Any]:
    """What a column of an existing table reads after `values` were copied into it."""
    asked(dsn, f"drop table if exists t; create table t (n serial, v {column})")
    async with opened(dsn) as database:
        rows = one_column(values)
        await database.ensure_table(T, rows.schema)
        async with database.transaction() as transaction:
            await transaction.copy(T, rows)
            await transaction.commit()
    return [row[0] for row in asked(dsn, "select v from t order by n")]


def frame(start: int, values: Sequence[object], timestamps: list[int] | None = None, headers: list[Any] | None = None) -> Frame:
    n = len(values)
    times = pa.array(timestamps or [0] * n, pa.int64()).view(ENVELOPE.field("timestamp").type)
    envelope = pa.RecordBatch.from_arrays(
        [
            pa.array(range(start, start + n), pa.int64()), times, pa.array([1] * n, pa.int8()), pa.nulls(n, pa.binary()),
            pa.array(headers or [None] * n, ENVELOPE.field("headers").type), pa.array([b"p"] * n, pa.binary()),
        ],
        schema=ENVELOPE,
    )  # fmt: skip
    return Frame(PART, start, start + n, envelope, pa.record_batch({"v": pa.array(values)}), pa.array(range(n), pa.int32()))


def chunk(*frames: Frame) -> Chunk:
    return Chunk(PART, frames[0].start, frames[-1].stop, frames)


def lander_of(database: Any, **more: Any) -> TableLander:
    return TableLander(
        database, InlineCompute(), Sink("dest", "postgres", Role.DESTINATION, OnFailure.HOLD, table="dest", **more), "p", PREFIX
    )


async def test_an_owner_waits_for_the_one_before_and_finds_its_range_covered(dsn: str) -> None:
    async with opened(dsn) as one, opened(dsn) as two:
        lander = lander_of(two)
        await lander.land(chunk(frame(0, ["a"])))
        async with one.transaction() as zombie:
            assert await zombie.lock_ranges("p", PART.slug, "dest") == RangeSet([(0, 1)])
            task = asyncio.create_task(lander.land(chunk(frame(1, ["mine", "c"]))))
            while not asked(
                dsn, "select 1 from pg_stat_activity where application_name = 'thalweg' and wait_event_type = 'Lock'"
            ):
                assert not task.done()
                await asyncio.sleep(0)
            rows = pa.record_batch({"v": ["theirs"], f"{PREFIX}source_offset": [1]})
            await zombie.copy(TableName("", "dest"), rows)
            await zombie.put_ranges("p", PART.slug, "dest", RangeSet([(1, 2)]))
            await zombie.commit()
        await task
    assert asked(dsn, "select v from dest order by _twg_source_offset") == [("a",), ("theirs",), ("c",)]


async def test_a_chunk_without_rows_claims_its_range(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["a", "b"]).without(np.array([0, 1]))))
        assert await lander.found(PART, 0, NOTHING) == RangeSet([(0, 2)])
    assert asked(dsn, "select count(*) from dest") == [(0,)]


async def test_three_owners_at_once_on_an_empty_database(dsn: str) -> None:
    async with opened(dsn) as one, opened(dsn) as two, opened(dsn) as three:
        landers = [lander_of(database) for database in (one, two, three)]
        await asyncio.gather(*(lander.land(chunk(frame(i, ["x"] * 40))) for i, lander in enumerate(landers)))
    assert asked(dsn, "select _twg_source_offset from dest order by 1") == [(i,) for i in range(42)]
    assert asked(dsn, "select ranges::text from _thalweg_coverage") == [("{[0,42)}",)]


async def test_numbers_reach_a_numeric_column_unaltered(dsn: str) -> None:
    assert await sent(dsn, "numeric(10,2)", pa.array([5, -7, None], pa.int64())) == [Decimal(5), Decimal(-7), None]
    assert await sent(dsn, "numeric(10,2)", pa.array([19.99, 0.1, 5.0])) == [Decimal("19.99"), Decimal("0.1"), 5]
    for column in ("numeric", "numeric(60,20)"):
        got = await sent(dsn, column, pa.array([19.99, 1e-7, 1e22, None]))
        assert got == [Decimal("19.99"), Decimal("1e-7"), Decimal("1e22"), None]
    assert await sent(dsn, "numeric", pa.array([0.1], pa.float32())) == [Decimal("0.1")]
    assert await sent(dsn, "numeric", pa.array([2**64 - 1], pa.uint64())) == [2**64 - 1]


async def test_values_of_every_awkward_type(dsn: str) -> None:
    assert await sent(dsn, "real", pa.array([np.float16(1.5), None], pa.float16())) == [1.5, None]
    assert await sent(dsn, "text", pa.array(["a", None], pa.string_view())) == ["a", None]
    assert await sent(dsn, "bytea", pa.array([b"\x00", None], pa.binary_view())) == [b"\x00", None]
    assert await sent(dsn, "timestamp", pa.array([1_000, None], pa.timestamp("ns"))) == [
        dt.datetime.fromisoformat("1970-01-01T00:00:00.000001"),
        None,
    ]
    assert await sent(dsn, "date", pa.array([86_400_000, None], pa.date64())) == [dt.date(1970, 1, 2), None]
    assert await sent(dsn, "varchar(3)", pa.array(["üüü", None])) == ["üüü", None]
    sliced = pa.array([["z"], ["a", None], None, []]).slice(1)
    assert await sent(dsn, "text[]", sliced) == [["a", None], None, []]
    assert await sent(dsn, "numeric(5,1)[]", pa.array([[1, None], [2]])) == [[1, None], [2]]
    for column in ("uuid", "int", "numeric(4,2)", "timestamptz", "time", "jsonb", "bool", "bytea", "date", "interval", "float4"):
        assert await sent(dsn, column, pa.nulls(2)) == [None, None]


async def test_lists_of_types_without_an_array_form_get_the_nearest(dsn: str) -> None:
    instants = pa.array([[0, None]], pa.list_(pa.timestamp("ms", "UTC")))
    ids = pa.array([[b"0123456789abcdef"]], pa.list_(pa.binary(16)))
    rows = pa.RecordBatch.from_arrays([instants, ids], ["i", "u"])
    async with opened(dsn) as database:
        await database.ensure_table(T, rows.schema)
        async with database.transaction() as transaction:
            await transaction.copy(T, rows)
            await transaction.commit()
    assert asked(dsn, "select i, u from t") == [([dt.datetime.fromisoformat("1970-01-01"), None], [b"0123456789abcdef"])]


async def test_nested_values_as_json(dsn: str) -> None:
    maps = pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.string(), pa.int64()))
    assert await sent(dsn, "jsonb", maps) == [{"a": 1, "b": None}, None]
    assert await sent(dsn, "jsonb", pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string()))) == [[[1, "x"]]]
    deep = pa.array([{"l": [{"d": Decimal("1.50"), "b": b"\xff"}]}])
    assert await sent(dsn, "jsonb", deep) == [{"l": [{"d": "1.50", "b": "ff"}]}]
    backslash = json.dumps("\\u0000")  # six plain characters, no NUL
    assert await sent(dsn, "jsonb", pa.array([backslash, None, "[1]"])) == ["\\u0000", None, [1]]


REFUSED: list[tuple[str, pa.Array, list[int], str]] = [
    ("numeric(10,2)", pa.array([1.23, 1.239, 1e9]), [1, 2], "numeric-scale"),
    ("numeric(10,2)", pa.array([float("nan"), 1.0, float("inf")]), [0, 2], "numeric-not-finite"),
    ("numeric(4,2)", pa.array([99, 100, -100]), [1, 2], "numeric-scale"),
    ("real", pa.array([1e300, 0.1, float("inf")]), [0], "out-of-range"),
    ("varchar(2)", pa.array(["ab", "abc", None, "üü"]), [1], "text-too-long"),
    ("smallint[]", pa.array([[1], [2, 70_000], None, [70_000]]), [1, 3], "out-of-range"),
    ("text[]", pa.array([["z"], ["a"], None, ["b", "\x00"]]).slice(1), [2], "text-nul"),
    ("timestamp[]", pa.array([[0], [2**62]], pa.list_(pa.timestamp("ms"))), [1], "timestamp-range"),
    ("text", pa.array([0, 2**62], pa.timestamp("us")), [1], "out-of-range"),
    ("jsonb", pa.array([{"a": 1.0}, {"a": float("nan")}, None]), [1], "json-not-finite"),
    ("jsonb", pa.array([[("a", 1), ("a", 2)], [("a", 3)]], pa.map_(pa.string(), pa.int64())), [0], "json-duplicate-key"),
    ("jsonb", pa.array([{"t": 0}, {"t": 2**61}], pa.struct([("t", pa.timestamp("us"))])), [1], "json-range"),
    ("jsonb", pa.array([{"s": "a\x00b"}, {"s": "\\u0000"}]), [0], "text-nul"),
]


@pytest.mark.parametrize(("column", "values", "bad", "code"), REFUSED)
def test_rows_that_a_column_cannot_hold_are_named(column: str, values: pa.Array, bad: list[int], code: str) -> None:
    full = {"timestamp[]": "timestamp without time zone[]", "varchar(2)": "character varying(2)"}.get(column, column)
    with pytest.raises(RowsRefused) as refused:
        encoded(one_column(values), {"v": full}, "t")
    assert [(r.row, r.code) for r in refused.value.rows] == [(row, code) for row in bad]
    good = values.take(pa.array([i for i in range(len(values)) if i not in bad]))
    assert encoded(one_column(good), {"v": full}, "t")[0].startswith(b"PGCOPY")


@pytest.mark.parametrize("column", ["timetz", "uuid[]", "varchar(9)[]", "jsonb[]", "inet", "timestamptz[]"])
async def test_a_column_that_cannot_be_written_is_refused_before_any_row(dsn: str, column: str) -> None:
    kinds = {"timetz": pa.array([0], pa.time64("us")), "uuid[]": pa.array([[b"0" * 16]], pa.list_(pa.binary(16)))}
    values = kinds.get(column, pa.array(["x"]) if column == "inet" else pa.array([["x"]]))
    with pytest.raises(Permanent, match=r"column v of table t is .* which cannot hold .* or alter the column to"):
        await sent(dsn, column, values)


@pytest.mark.parametrize(
    ("ddl", "values", "bad", "state"),
    [
        ("alter table dest add constraint u unique (v) deferrable initially deferred", ["a", "b", "a", "c"], [2], "23505"),
        ("create table other (v text primary key); insert into other values ('a'); insert into dest (v) values ('a');"
         "alter table dest add foreign key (v) references other", ["a", "x", "a", "y"], [1, 3], "23503"),
        ("create function f() returns trigger language plpgsql as 'begin if new.v = ''x'' then raise ''no''; end if;"
         " return new; end'; create trigger g before insert on dest"
         " for each row execute function f()", ["a", "x", "b"], [1], "P0001"),
        ("alter table dest alter v type int using null", [str(i) for i in range(3)], [], ""),
        ("create index on dest (v); alter table dest alter v set storage external", ["a", "y" * 9_000, "b"], [1], "54000"),
    ],
    ids=["deferred", "foreign-key", "trigger", "altered", "index-row-too-long"],
)  # fmt: skip
async def test_what_only_the_server_knows_is_narrowed(dsn: str, ddl: str, values: list[str], bad: list[int], state: str) -> None:
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["first"])))
        asked(dsn, "truncate dest; " + ddl)
        if not bad:  # no row is to blame for a column whose type was altered
            with pytest.raises((Transient, Permanent)) as altered:
                await lander.land(chunk(frame(1, values)))
            assert not isinstance(altered.value, (RowsRefused, DataRefused))
            asked(dsn, "alter table dest alter v type text")
            await lander.land(chunk(frame(1, values)))
            assert asked(dsn, "select v from dest order by 1") == [(v,) for v in values]
            return
        with pytest.raises(RowsRefused) as refused:
            await lander.land(chunk(frame(1, values)))
        assert [(r.row, r.code) for r in refused.value.rows] == [(row, f"sqlstate-{state}") for row in bad]
        await lander.land(chunk(frame(1, values).without(np.array(bad))))
        assert await lander.found(PART, 0, NOTHING) == RangeSet([(0, 1 + len(values))])


async def test_an_altered_column_is_looked_at_again(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, [1])))
        asked(dsn, "alter table dest alter v type int")
        with pytest.raises(Transient, match="table dest was altered"):
            await lander.land(chunk(frame(1, [2])))
        await lander.land(chunk(frame(1, [2])))
    assert asked(dsn, "select v from dest order by 1") == [(1,), (2,)]


async def test_a_set_aside_row_always_fits(dsn: str) -> None:
    """A header key with U+0000 and a time beyond every calendar would otherwise stop the node for good."""
    whole = frame(0, ["a", "b"], [2**62, 0], [[("k\x00", b"\x00")], [("k", None)]])
    refusals = Refusals.of([(0, "text-nul", "a\x00b", ""), (1, "x", "fine", "")])
    rows = dlq_rows(PREFIX, PART, whole.envelope, refusals, "decode")
    one = Frame(PART, 0, 2, whole.envelope.slice(0, 0), rows, pa.array([0, 0], pa.int32()))
    empty = Frame(PART, 2, 3, whole.envelope.slice(0, 0), rows.slice(0, 0), pa.array([], pa.int32()))
    async with opened(dsn) as database:
        lander = TableLander(
            database, InlineCompute(), Sink("dlq", "postgres", Role.DLQ, OnFailure.HOLD, table="dlq"), "p", PREFIX
        )
        await lander.land(chunk(empty))
        await lander.land(chunk(one, empty))
        await lander.land(chunk(one))
    got = asked(
        dsn, "select detail, _twg_header_keys, _twg_header_values, _twg_event_ts is null, _twg_payload from dlq order by detail"
    )
    assert got == [("a\\u0000b", ["k\\u0000"], [b"\x00"], True, b"p"), ("fine", ["k"], [None], False, b"p")]


def test_a_row_of_an_arrow_source_is_shown_whatever_it_holds() -> None:
    payload = pa.array([{"t": 2**60, "a": 1}, {"t": 0, "a": None}], pa.struct([("t", pa.timestamp("us")), ("a", pa.int8())]))
    envelope = frame(0, ["a", "b"]).envelope.drop_columns(["value"]).append_column("payload", payload)
    rows = dlq_rows(PREFIX, PART, envelope, Refusals.of([(0, "x", "", ""), (1, "x", "", "")]), "decode")
    assert rows.column(f"{PREFIX}payload").to_pylist() == [
        b"{'t': 1152921504606846976, 'a': 1}",
        b"{'t': datetime.datetime(1970, 1, 1, 0, 0), 'a': None}",
    ]


async def test_names_too_long_for_the_server(dsn: str) -> None:
    async with opened(dsn) as database:
        with pytest.raises(Permanent, match=r"at most 63 bytes.*Rename it"):
            await database.ensure_table(T, pa.schema([("ü" * 32, pa.int64())]))
        await database.ensure_table(T, pa.schema([("ü" * 31, pa.int64())]))


async def test_tables_with_a_common_prefix_have_indexes_of_their_own(dsn: str) -> None:
    async with opened(dsn) as database:
        for name in ("x" * 50 + "a", "x" * 50 + "b"):
            for keys in (["k"], ["j", "k"]):
                await database.ensure_table(TableName("", name), pa.schema([("j", pa.int64()), ("k", pa.int64())]), unique=keys)
    assert asked(dsn, "select tablename, count(*) from pg_indexes where schemaname = 'public' group by 1 order by 1") == [
        ("x" * 50 + "a", 2),
        ("x" * 50 + "b", 2),
    ]
    assert len(index_name(TableName("", "ü" * 40), ["k"], True).encode()) <= 63


async def test_a_primary_key_of_the_users_own_is_used(dsn: str) -> None:
    asked(dsn, "create table dest (v text primary key)")
    async with opened(dsn) as database:
        await lander_of(database, idempotency="key", key=("v",)).land(chunk(frame(0, ["a", "b", "a"])))
    assert asked(dsn, "select v, _twg_source_offset from dest order by 1") == [("a", 2), ("b", 1)]
    assert asked(dsn, "select count(*) from pg_indexes where tablename = 'dest' and indexdef like '%UNIQUE%'") == [(1,)]


async def test_a_user_with_few_rights_can_load_what_is_prepared(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["a"])))
    asked(dsn, "drop role if exists loader; create role loader login password 'l'")
    asked(
        dsn,
        "revoke create on schema public from public; grant usage on schema public to loader;"
        " grant select, insert, update on all tables in schema public to loader",
    )
    async with opened(dsn.replace("user=postgres password=postgres", "user=loader password=l")) as database:
        await lander_of(database).land(chunk(frame(1, ["b"])))
    assert asked(dsn, "select v from dest order by 1") == [("a",), ("b",)]
    asked(dsn, "drop owned by loader; drop role loader")


async def test_what_the_environment_says_of_encodings_does_not_garble(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    asked(dsn, "create schema mine")
    async with opened(dsn + " options='-c search_path=mine'") as database:
        await lander_of(database).land(chunk(frame(0, ["ü€"])))
    monkeypatch.delenv("PGCLIENTENCODING")
    assert asked(dsn, "select v from mine.dest") == [("ü€",)]  # and the user's own options hold


def test_a_malformed_connection_string_is_not_repeated() -> None:
    with pytest.raises(Permanent) as wrong:
        PostgresDatabase("host=h password=one secret", InlineCompute())
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("state", "committing", "kind"),
    [
        ("53100", False, Transient), ("53200", False, Transient), ("53300", False, Transient), ("40001", False, Transient),
        ("40P01", False, Transient), ("57P01", False, Transient), ("57P03", False, Transient), ("55P03", False, Transient),
        ("08006", False, Transient), ("25006", False, Transient), ("57P01", True, Ambiguous), ("08006", True, Ambiguous),
        ("53100", True, Transient), ("40001", True, Transient), ("42501", False, Permanent), ("42P01", False, Permanent),
        ("22001", False, DataRefused), ("23505", False, DataRefused), ("54000", False, DataRefused),
    ],
)  # fmt: skip
def test_states_are_told_apart(state: str, committing: bool, kind: type[ThalwegError]) -> None:
    database = PostgresDatabase("host=h user=u password=hush dbname=d", InlineCompute())
    told = database_told(database, psycopg.errors.lookup(state)("words"), committing)
    assert type(told) is kind
    assert "u@h:5432/d" in str(told)
    assert "hush" not in str(told)


def test_a_lost_connection_is_ambiguous_only_at_the_commit() -> None:
    database = PostgresDatabase("host=h", InlineCompute())
    assert type(database_told(database, psycopg.OperationalError("gone"), False)) is Transient
    assert type(database_told(database, psycopg.OperationalError("gone"), True)) is Ambiguous


def database_told(database: PostgresDatabase, error: psycopg.Error, committing: bool) -> ThalwegError:
    async def inside() -> ThalwegError:
        return database.translated(error, committing)

    return asyncio.run(inside())


async def test_what_breaks_while_a_call_is_cancelled_is_no_failure_to_retry() -> None:
    """If this is false, a channel that was told to stop sees a lost connection, and tries again for ever."""
    database = PostgresDatabase("host=h", InlineCompute())
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        with pytest.raises(asyncio.CancelledError):
            database.translated(psycopg.OperationalError("gone"))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
    finally:
        task.uncancel()


async def test_a_failed_transaction_is_not_taken_for_committed(dsn: str) -> None:
    """The server answers COMMIT of a failed transaction with a rollback and no error."""
    async with opened(dsn) as database:
        await lander_of(database).land(chunk(frame(0, ["a"])))
        async with database.transaction() as transaction:
            with pytest.raises(Permanent):
                await transaction.rollback_to(99)
            with pytest.raises(Permanent, match="cannot be committed"):
                await transaction.commit()


class Wire:
    """A proxy in front of the server that can lose the reply to a commit: the server does it, the client never hears."""

    def __init__(self, port: int) -> None:
        self._port, self.lose_commit, self.lose_before = port, False, False
        self.port = 0
        self._served: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.wait_for(asyncio.gather(*self._served), 5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.append(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        mute = False

        async def upwards() -> None:
            nonlocal mute
            while data := await reader.read(65_536):
                if b"COMMIT" in data and self.lose_before:
                    self.lose_before = False
                    break
                if b"COMMIT" in data and self.lose_commit:
                    self.lose_commit, mute = False, True
                up_writer.write(data)
                await up_writer.drain()

        async def downwards() -> None:
            while data := await up_reader.read(65_536):
                if mute:  # the answer has come, so it is done: now the line breaks
                    break
                writer.write(data)
                await writer.drain()

        both = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        for end in (up_writer, writer):
            end.close()
            await end.wait_closed()


@pytest.mark.parametrize("after", [True, False])
async def test_a_lost_reply_to_the_commit_is_ambiguous_and_the_next_try_settles_it(
    server: EmbeddedPostgres, dsn: str, after: bool
) -> None:
    async with (
        Wire(server.port).running() as wire,
        opened(dsn.replace(f"port={server.port}", f"port={wire.port}") + " sslmode=disable gssencmode=disable") as database,
    ):
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["a"])))
        wire.lose_commit, wire.lose_before = after, not after
        with pytest.raises(Ambiguous):
            await lander.land(chunk(frame(1, ["b", "c"])))
        assert len(asked(dsn, "select * from dest")) == (3 if after else 1)
        await lander.land(chunk(frame(1, ["b", "c"])))
    assert asked(dsn, "select v, _twg_source_offset from dest order by 2") == [("a", 0), ("b", 1), ("c", 2)]


async def test_a_cancelled_landing_ends_on_a_frozen_server(server: EmbeddedPostgres, dsn: str) -> None:
    """A node must be able to leave while its database does not answer; and cancelling must look like cancelling."""
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["a"])))
        server.pause()
        try:
            task = asyncio.create_task(lander.land(chunk(frame(1, ["b" * 1_000] * 20_000))))
            done, _ = await asyncio.wait([task], timeout=0.2)
            assert not done
            task.cancel()
            async with asyncio.timeout(5):
                with pytest.raises(asyncio.CancelledError):
                    await task
        finally:
            server.resume()
        await lander.land(chunk(frame(1, ["b"])))
    assert asked(dsn, "select v from dest order by 1") == [("a",), ("b",)]


async def test_a_server_that_dies_between_copy_and_commit_keeps_nothing(server: EmbeddedPostgres, dsn: str) -> None:
    async with opened(dsn) as database:
        lander = lander_of(database)
        await lander.land(chunk(frame(0, ["a"])))
        async with database.transaction() as transaction:
            await transaction.lock_ranges("p", PART.slug, "dest")
            await transaction.copy(TableName("", "dest"), pa.record_batch({"v": ["b"]}))
            await transaction.put_ranges("p", PART.slug, "dest", RangeSet([(1, 2)]))
            server.kill()
            with pytest.raises(Ambiguous):
                await transaction.commit()
        with pytest.raises(Transient, match="refused"):
            await lander.land(chunk(frame(1, ["b"])))
        server.start()
        assert await lander.found(PART, 0, NOTHING) == RangeSet([(0, 1)])
        await lander.land(chunk(frame(1, ["b"])))
    assert asked(dsn, "select v, _twg_source_offset from dest order by 2") == [("a", 0), ("b", 1)]


# --- against a model ----------------------------------------------------------------------------------------------


@dataclass
class Table:
    """What a database would keep: positions landed, coverage, and the failures to come."""

    landed: list[int] = field(default_factory=list)
    ranges: RangeSet = NOTHING
    fails: list[str] = field(default_factory=list)  # "copy" | "before" (the commit) | "after"
    bad: frozenset[int] = frozenset()
    hints: bool = True
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(True, True, True, True))
    identity: str = "memory"

    async def ensure_coverage(self) -> None:
        return

    async def ensure_table(self, table: TableName, columns: pa.Schema, *, unique: Any = (), index: Any = ()) -> None:
        return

    async def ranges_of(self) -> Mapping[str, RangeSet]:
        return {"dest": self.ranges}

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        yield Session(self, self.fails.pop(0) if self.fails else "")


@dataclass
class Session:
    table: Table
    fails: str
    rows: list[int] = field(default_factory=list)
    ranges: RangeSet = NOTHING
    marks: dict[int, int] = field(default_factory=dict)

    async def lock_ranges(self, scope: str, partition: str, sink: str) -> RangeSet:
        return self.table.ranges

    async def put_ranges(self, scope: str, partition: str, sink: str, ranges: RangeSet) -> None:
        self.ranges = self.ranges | ranges

    async def copy(self, table: TableName, rows: pa.RecordBatch) -> None:
        if self.fails == "copy":
            raise Transient("disk full")
        at = rows.column(f"{PREFIX}source_offset").to_pylist()
        for i, position in enumerate(at):
            if position in self.table.bad:
                raise DataRefused("bad", code="sqlstate-23514", row=i if self.table.hints else -1)
        self.rows += at

    async def savepoint(self) -> int:
        self.marks[len(self.marks)] = len(self.rows)
        return len(self.marks) - 1

    async def rollback_to(self, savepoint: int) -> None:
        del self.rows[self.marks[savepoint] :]

    async def release(self, savepoint: int) -> None:
        assert savepoint in self.marks

    async def commit(self) -> None:
        if self.fails == "before":
            raise Ambiguous("reply lost")
        self.table.landed += self.rows
        self.table.ranges = self.table.ranges | self.ranges
        if self.fails == "after":
            raise Ambiguous("reply lost")


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=8)
FAILS = st.lists(st.sampled_from(["", "copy", "before", "after"]), max_size=6)


@settings(max_examples=150, deadline=None)
@given(SPANS, FAILS)
def test_any_borders_and_any_failures_land_each_position_once(spans: list[tuple[int, int]], fails: list[str]) -> None:
    table = Table(fails=list(fails))

    async def run() -> None:
        for start, n in spans:
            lander = lander_of(table)  # the next incarnation knows nothing of the one before
            whole = chunk(frame(start, ["x"] * n))
            while True:
                try:
                    await lander.land(whole)
                    break
                except (Transient, Ambiguous):
                    continue

    asyncio.run(run())
    wanted = {i for start, n in spans for i in range(start, start + n)}
    assert sorted(table.landed) == sorted(wanted)
    assert table.ranges == RangeSet((i, i + 1) for i in wanted)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.booleans(), st.integers(0, 60))
def test_exactly_the_guilty_rows_are_named(n: int, bad: set[int], hints: bool, covered: int) -> None:
    table = Table(bad=frozenset(bad), hints=hints, ranges=RangeSet([(0, min(covered, n))]))
    guilty = sorted(i for i in bad if min(covered, n) <= i < n)
    middle = n // 2
    frames = [frame(0, ["x"] * middle), frame(middle, ["x"] * (n - middle))] if middle else [frame(0, ["x"] * n)]

    async def run() -> list[int]:
        try:
            await lander_of(table).land(chunk(*frames))
        except RowsRefused as refused:
            return [r.row for r in refused.rows]
        return []

    assert asyncio.run(run()) == guilty
    assert table.landed == ([] if guilty else list(range(min(covered, n), n)))
