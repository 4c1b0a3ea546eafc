"""The Postgres adapter and the table lander on a real (embedded) server: types by value, rows refused alone, exactly once."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest

from chaos.embedded import EmbeddedPostgres, embedded_postgres
from thalweg.adapters.postgres import PostgresDatabase, parse_ranges
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, Chunk, Frame, Partition, Refusals
from thalweg.core.coverage import RangeSet
from thalweg.core.dlq import dlq_rows
from thalweg.core.topology import OnFailure, Role, Sink
from thalweg.errors import DataRefused, Permanent, RowsRefused, Stale, Transient
from thalweg.ports import TableName
from thalweg.runtime.checkpoint import DatabaseCheckpoints
from thalweg.runtime.table import TableLander

PART = Partition("s", "c", "t", 0, "i")
UTC = dt.UTC


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with embedded_postgres() as running:
        yield running


@pytest.fixture
def dsn(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
    """A database of the test's own."""
    name = f"d{abs(hash(request.node.nodeid)) % 10**12}"
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"drop database if exists {name}".encode())
        connection.execute(f"create database {name}".encode())
    return server.dsn.replace("dbname=postgres", f"dbname={name}")


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[PostgresDatabase]:
    database = PostgresDatabase(dsn, InlineCompute())
    try:
        await database.ensure_coverage()
        yield database
    finally:
        await database.close()


def asked(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


async def copied(database: PostgresDatabase, table: TableName, rows: pa.RecordBatch) -> None:
    async with database.transaction() as transaction:
        await transaction.copy(table, rows)
        await transaction.commit()


VALUES: list[tuple[pa.DataType, list[Any], list[Any] | None]] = [
    (pa.int8(), [1, None, -5], None),
    (pa.uint32(), [2**32 - 1, 0], None),
    (pa.uint64(), [2**64 - 1, 0, None], [Decimal(2**64 - 1), Decimal(0), None]),
    (pa.float32(), [1.5, None, float("-inf")], None),
    (pa.float64(), [float("inf"), None, 1.25], None),
    (pa.string(), ["a", None, "ü€", ""], None),
    (pa.large_string(), ["a", None], None),
    (pa.dictionary(pa.int32(), pa.string()), ["a", None, "b", "a"], None),
    (pa.binary(), [b"\x00\xff", None, b""], None),
    (pa.binary(16), [b"0123456789abcdef", None], [UUID(bytes=b"0123456789abcdef"), None]),
    (pa.bool_(), [True, None, False], None),
    (pa.date32(), [dt.date(1, 1, 1), None, dt.date(9999, 12, 31)], None),
    (pa.timestamp("ms", "UTC"), [dt.datetime(1, 1, 1, tzinfo=UTC), None, dt.datetime(9999, 12, 31, tzinfo=UTC)], None),
    (
        pa.timestamp("s"),
        [dt.datetime.fromisoformat("0001-01-01T00:00:00"), None, dt.datetime.fromisoformat("2020-02-29T01:02:03")],
        None,
    ),
    (pa.time64("us"), [dt.time(1, 2, 3), None, dt.time(23, 59, 59, 999999)], None),
    (pa.duration("s"), [dt.timedelta(days=1, seconds=3), None, dt.timedelta(seconds=-5)], None),
    (pa.decimal128(10, 2), [Decimal("-123.45"), None, Decimal("0.01")], None),
    (pa.decimal128(38, 10), [Decimal("-1234567890123456789012345678.0123456789"), None], None),
    (pa.list_(pa.int64()), [[1, None, 3], None, []], None),
    (pa.list_(pa.binary()), [[b"a", None, b""], None, []], None),
    (pa.struct([("a", pa.int64()), ("n", pa.list_(pa.string()))]), [{"a": 1, "n": ["q"]}, None, {"a": None, "n": []}], None),
    (pa.null(), [None, None], None),
]


@pytest.mark.parametrize("kind", range(len(VALUES)), ids=[str(v[0])[:30] for v in VALUES])
async def test_values_come_back(dsn: str, kind: int) -> None:
    arrow, values, wanted = VALUES[kind]
    schema = pa.schema([("v", arrow)])
    table = TableName("", "t")
    async with opened(dsn) as database:
        await database.ensure_table(table, schema)
        await copied(database, table, pa.RecordBatch.from_arrays([pa.array(values, arrow)], schema=schema))
    assert [row[0] for row in asked(dsn, "select v from t")] == (values if wanted is None else wanted)


async def test_year_20231_is_kept(dsn: str) -> None:
    micros = int((20231 - 1970) * 365.2425 * 86_400) * 1_000_000
    schema = pa.schema([("v", pa.timestamp("us", "UTC"))])
    async with opened(dsn) as database:
        await database.ensure_table(TableName("", "t"), schema)
        rows = pa.RecordBatch.from_arrays([pa.array([micros], pa.int64()).cast(schema.field(0).type)], schema=schema)
        await copied(database, TableName("", "t"), rows)
    assert asked(dsn, "select extract(year from v)::int from t") == [(20231,)]


REFUSED: list[tuple[str, pa.DataType, list[Any], list[int], str]] = [
    ("text", pa.string(), ["a", "b\x00", None, "c"], [1], "text-nul"),
    ("text[]", pa.list_(pa.string()), [["a"], ["x", "b\x00"], None], [1], "text-nul"),
    ("integer", pa.int64(), [1, 2**31, None, -(2**31) - 1], [1, 3], "out-of-range"),
    ("numeric(5,2)", pa.decimal128(20, 4), [Decimal("1.5"), Decimal("1.005"), Decimal("12345.0")], [1, 2], "numeric-scale"),
    ("timestamp with time zone", pa.timestamp("ms", "UTC"), [0, 2**62, -(2**62)], [1, 2], "timestamp-range"),
    ("timestamp without time zone", pa.timestamp("ns"), [1_000, 1_001], [1], "timestamp-precision"),
    ("date", pa.date32(), [0, 2**31 - 1], [1], "date-range"),
    ("jsonb", pa.string(), ['{"a":1}', '"\\u0000"'], [1], "text-nul"),
]


@pytest.mark.parametrize(("column", "arrow", "values", "bad", "code"), REFUSED)
async def test_what_a_column_cannot_hold_is_refused_by_row(
    dsn: str, column: str, arrow: pa.DataType, values: list[Any], bad: list[int], code: str
) -> None:
    asked(dsn, f"create table t (v {column})")
    plain = pa.int64() if pa.types.is_timestamp(arrow) else pa.int32() if pa.types.is_date(arrow) else arrow
    array = pa.array(values, plain).cast(arrow) if plain != arrow else pa.array(values, arrow)
    async with opened(dsn) as database:
        schema = pa.schema([("v", arrow)])
        await database.ensure_table(TableName("", "t"), schema)
        with pytest.raises(RowsRefused) as refused:
            await copied(database, TableName("", "t"), pa.RecordBatch.from_arrays([array], schema=schema))
        assert [(r.row, r.code) for r in refused.value.rows] == [(row, code) for row in bad]
        good = array.take(pa.array([i for i in range(len(array)) if i not in bad]))
        await copied(database, TableName("", "t"), pa.RecordBatch.from_arrays([good], schema=schema))
    assert asked(dsn, "select count(*) from t") == [(len(values) - len(bad),)]


async def test_table_is_evolved_and_a_conflict_is_named(dsn: str) -> None:
    table = TableName("s", "t")
    async with opened(dsn) as database:
        await database.ensure_table(table, pa.schema([("a", pa.int64())]))
        await database.ensure_table(table, pa.schema([("a", pa.int64()), ("b", pa.string())]), index=["a"])
        with pytest.raises(Permanent, match=r"column b of table s\.t is text, which cannot hold list"):
            await database.ensure_table(table, pa.schema([("b", pa.list_(pa.int64()))]))


async def test_failures_are_told_apart(server: EmbeddedPostgres, dsn: str) -> None:
    with pytest.raises(Permanent, match="password authentication failed") as wrong:
        await PostgresDatabase(dsn.replace("password=postgres", "password=guess"), InlineCompute()).ensure_coverage()
    assert "guess" not in str(wrong.value)
    with pytest.raises(Permanent, match="does not exist"):
        await PostgresDatabase(dsn.replace("dbname=d", "dbname=no"), InlineCompute()).ensure_coverage()
    with pytest.raises(Transient, match="refused"):
        await PostgresDatabase("host=127.0.0.1 port=1 user=u dbname=d", InlineCompute()).ensure_coverage()
    async with opened(dsn) as database:
        await database.ensure_table(TableName("", "t"), pa.schema([("a", pa.int64())]))
        rows = pa.record_batch({"a": [1]})
        with pytest.raises(Transient):
            await _copied_after_a_kill(dsn, database, rows)
        await copied(database, TableName("", "t"), rows)
    assert asked(dsn, "select count(*) from t") == [(1,)]


async def _copied_after_a_kill(dsn: str, database: PostgresDatabase, rows: pa.RecordBatch) -> None:
    """The server ends the session between two copies of one transaction."""
    async with database.transaction() as transaction:
        await transaction.copy(TableName("", "t"), rows)
        asked(dsn, "select pg_terminate_backend(pid) from pg_stat_activity where state like 'idle in transaction%'")
        await transaction.copy(TableName("", "t"), rows)


def frame(start: int, values: list[str], child: list[int] | None = None) -> Frame:
    n = len(values)
    envelope = pa.RecordBatch.from_arrays(
        [
            pa.array(range(start, start + n), pa.int64()), pa.array([0] * n, ENVELOPE.field(1).type),
            pa.array([1] * n, pa.int8()),
            pa.nulls(n, pa.binary()), pa.nulls(n, ENVELOPE.field(4).type), pa.array([v.encode() for v in values], pa.binary()),
        ],
        schema=ENVELOPE,
    )  # fmt: skip
    rows = pa.record_batch({"v": values})
    children = None if child is None else pa.array(child, pa.int32())
    return Frame(PART, start, start + n, envelope, rows, pa.array(range(n), pa.int32()), children)


def chunk(*frames: Frame) -> Chunk:
    return Chunk(PART, frames[0].start, frames[-1].stop, frames)


def sink(**more: Any) -> Sink:
    return Sink("dest", "postgres", Role.DESTINATION, OnFailure.HOLD, table="dest", **more)


async def test_ranges_land_exactly_once_whatever_the_borders(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(), "p", "_twg_")
        await lander.land(chunk(frame(0, ["a", "b"]), frame(2, ["c", "d"])))
        await lander.land(chunk(frame(1, ["b", "c", "d", "e"])))
        await lander.land(chunk(frame(8, ["x"])))
        await lander.land(chunk(frame(0, list("abcdefghxy"))))
        assert await lander.found(PART, 3, RangeSet()) == RangeSet([(3, 10)])
    assert asked(dsn, "select _twg_source_offset, v from dest order by 1") == list(enumerate("abcdefghxy"))
    assert asked(dsn, "select count(distinct _twg_record_id) from dest") == [(10,)]


async def test_two_owners_at_once_write_each_row_once(dsn: str) -> None:
    async with opened(dsn) as one, opened(dsn) as two:
        landers = [TableLander(database, InlineCompute(), sink(), "p", "_twg_") for database in (one, two)]
        await landers[0].land(chunk(frame(0, ["first"])))
        work = [lander.land(chunk(frame(1, [f"v{i}" for i in range(500)]))) for lander in landers]
        await asyncio.gather(*work)
    assert asked(dsn, "select count(*), count(distinct _twg_source_offset) from dest") == [(501, 501)]


async def test_nothing_of_an_uncommitted_chunk_stays(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(), "p", "_twg_")
        await lander.land(chunk(frame(0, ["a"])))
        async with database.transaction() as transaction:
            have = await transaction.lock_ranges("p", PART.slug, "dest")
            assert have == RangeSet([(0, 1)])
            await transaction.put_ranges("p", PART.slug, "dest", RangeSet([(1, 9)]))
        assert await lander.found(PART, 0, RangeSet()) == RangeSet([(0, 1)])


async def test_one_nul_in_a_thousand_is_refused_alone(dsn: str) -> None:
    values = [f"v{i}" for i in range(1_000)]
    values[417] = "a\x00b"
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(), "p", "_twg_")
        whole = chunk(frame(0, values[:300]), frame(300, values[300:]))
        with pytest.raises(RowsRefused) as refused:
            await lander.land(whole)
        assert [(r.row, r.code) for r in refused.value.rows] == [(417, "text-nul")]
        assert asked(dsn, "select count(*) from dest") == [(0,)]


@pytest.mark.parametrize("bad", [1, 40])
async def test_rows_that_the_server_refuses_are_narrowed_down(dsn: str, bad: int) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(), "p", "_twg_")
        await lander.land(chunk(frame(0, ["taken"])))
        asked(dsn, "create unique index on dest (v)")
        values = [f"v{i}" for i in range(100)]
        wanted = sorted({(i * 7) % 100 for i in range(bad)})
        for i in wanted:
            values[i] = "taken"
        with pytest.raises(RowsRefused) as refused:
            await lander.land(chunk(frame(1, values)))
        assert [r.row for r in refused.value.rows] == wanted
        assert {r.code for r in refused.value.rows} == {"sqlstate-23505"}


async def test_duplicate_in_one_batch_is_blamed_and_not_its_first_occurrence(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(), "p", "_twg_")
        await lander.land(chunk(frame(0, ["z"])))
        asked(dsn, "create unique index on dest (v)")
        with pytest.raises(RowsRefused) as refused:
            await lander.land(chunk(frame(1, ["a", "b", "a", "c"])))
        assert [r.row for r in refused.value.rows] == [2]


async def test_user_key_is_merged_and_the_last_of_a_batch_wins(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(idempotency="key", key=("v",)), "p", "_twg_")
        await lander.land(chunk(frame(0, ["a", "b", "a"])))
        await lander.land(chunk(frame(3, ["b"])))
    assert asked(dsn, "select v, _twg_source_offset from dest order by 1") == [("a", 2), ("b", 3)]


async def test_record_id_is_unique_with_its_child(dsn: str) -> None:
    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), sink(idempotency="record-id"), "p", "_twg_")
        await lander.land(chunk(frame(0, ["a", "b"], child=[0, 1])))
        asked(dsn, "update _thalweg_coverage set ranges = '{}'")  # as if an older backup had come back
        await lander.land(chunk(frame(0, ["a", "b"], child=[0, 1])))
    assert asked(dsn, "select count(*) from dest") == [(2,)]


async def test_dlq_rows_are_kept_once_and_late_ones_come_in(dsn: str) -> None:
    aside = Sink("dlq", "postgres", Role.DLQ, OnFailure.HOLD, table="dlq")
    whole = frame(0, ["a", "b"])
    rows = dlq_rows("_twg_", PART, whole.envelope, Refusals.of([(1, "json-syntax", "bad", "")]), "decode")
    late = dlq_rows("_twg_", PART, whole.envelope, Refusals.of([(0, "text-nul", "bad", "")]), "sink:dest")

    def prepared(batch: pa.RecordBatch) -> Chunk:
        return chunk(Frame(PART, 0, 2, whole.envelope.slice(0, 0), batch, pa.array([0] * batch.num_rows, pa.int32())))

    async with opened(dsn) as database:
        lander = TableLander(database, InlineCompute(), aside, "p", "_twg_")
        await lander.land(prepared(rows))
        await lander.land(prepared(rows))
        await lander.land(prepared(late), "dest")
    found = asked(dsn, "select _twg_source_offset, code, stage, _twg_payload from dlq order by 1")
    assert [(a, b, c, bytes(d)) for a, b, c, d in found] == [
        (0, "text-nul", "sink:dest", b"a"),
        (1, "json-syntax", "decode", b"b"),
    ]


async def test_checkpoints_in_the_database_merge_by_union(dsn: str) -> None:
    from thalweg.core.coverage import Document

    async with opened(dsn) as one, opened(dsn) as two:
        stores = [DatabaseCheckpoints(database, "p") for database in (one, two)]
        for store in stores:
            await store.open()

        async def writes(store: DatabaseCheckpoints, start: int) -> None:
            for i in range(start, 60, 2):
                await store.merge(Document("s/t/0@i", 0, 0, {"raw": RangeSet([(i, i + 1)])}))

        await asyncio.gather(writes(stores[0], 0), writes(stores[1], 1))
        stored = await stores[0].load("s/t/0@i")
        assert stored is not None
        assert stored.ranges("raw") == RangeSet([(0, 60)])
        assert stores[0].conflicts + stores[1].conflicts > 0
        with pytest.raises(Stale):
            await one.put_document("p", "s/t/0@i", "{}", 1)
        assert list(await stores[1].partitions()) == ["s/t/0@i"]


def test_multirange_text_is_read() -> None:
    assert parse_ranges("{[0,5),[7,9)}") == RangeSet([(0, 5), (7, 9)])
    assert parse_ranges("{}") == RangeSet()


async def test_data_refusal_names_the_row_of_the_copy(dsn: str) -> None:
    asked(dsn, "create table t (v text check (v <> 'no'))")
    async with opened(dsn) as database:
        await database.ensure_table(TableName("", "t"), pa.schema([("v", pa.string())]))
        with pytest.raises(DataRefused) as refused:
            await copied(database, TableName("", "t"), pa.record_batch({"v": ["a", "b", "no", "c"]}))
        assert refused.value.row == 2
