"""Postgres through psycopg: binary COPY fed by pgpq, coverage as `int8multirange`.

Translates the `Database` port. It casts columns to the types the table really has, and names each row that cannot be
cast or that Postgres could not hold, before anything is sent; what only the server can judge comes back as
`DataRefused`. It never retries and never narrows a refusal: that is the runtime's business.

Sources: PostgreSQL manual, "COPY" (binary format), "Data Types", appendix A (SQLSTATE classes).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import numpy as np
import orjson
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from thalweg.core.coverage import RangeSet
from thalweg.errors import Ambiguous, DataRefused, Permanent, RowRefusal, RowsRefused, Stale, ThalwegError, Transient
from thalweg.ports import Capabilities, Compute, TableName, Transaction

IDLE_MAX: Final = 8
CONNECT_S: Final = 5
WRITE_BYTES: Final = 4 << 20

COVERAGE: Final = "_thalweg_coverage"
DOCUMENTS: Final = "_thalweg_checkpoint"

_LATER: Final = re.compile(r"08...|40001|40P01|53...|55P03|57P0[1-5]|57014|58030|25P03|XX000")
"""Connection trouble, serialisation, deadlock, no resources (53100: disk full), lock timeout, shutdown, I/O error."""

_DATA: Final = re.compile(r"22...|23...")
_HOPELESS: Final = re.compile(
    r"password authentication failed|no password supplied|does not exist|no pg_hba.conf entry|not permitted to log in|sslmode"
)
_LINE: Final = re.compile(r"COPY \S+, line (\d+)")

# PostgreSQL manual, "Date/Time Types": 4713 BC to 5874897 AD for dates, to 294276 AD for timestamps.
_DATE_MIN: Final = -2_440_588
_DATE_MAX: Final = 2_145_031_948
_US_MIN: Final = -210_866_803_200_000_000
_US_MAX: Final = 9_223_371_331_199_999_999


class PostgresDatabase:
    """One database."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, dsn: str, compute: Compute) -> None:
        self._dsn, self._compute = dsn, compute
        try:
            known = conninfo_to_dict(dsn)
        except psycopg.Error as error:
            raise Permanent(f"not a Postgres connection string: {_plain(error)}") from None
        host, port = known.get("host", "localhost"), known.get("port", 5432)
        self._where = f"{known.get('user', '?')}@{host}:{port}/{known.get('dbname', '?')}"
        self.identity = ""
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._columns: dict[TableName, dict[str, str]] = {}
        self._closed = False

    # --- connections ----------------------------------------------------------------------------------------------

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._dsn,
                connect_timeout=CONNECT_S,
                application_name="thalweg",
                keepalives=1,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                options="-c lock_timeout=30s -c idle_in_transaction_session_timeout=120s -c TimeZone=UTC",
            )
            if not self.identity:
                found = await connection.execute(
                    "select coalesce(host(inet_server_addr()), 'local') || ':' || coalesce(inet_server_port(), 0)"
                    " || '/' || current_database()"
                )
                row = await found.fetchone()
                self.identity = str(row[0]) if row else self._where
                await connection.rollback()
        except psycopg.Error as error:
            raise self._connect_error(error) from None
        return connection

    def _connect_error(self, error: psycopg.Error) -> ThalwegError:
        text, state = _plain(error), error.sqlstate or ""
        if state.startswith(("28", "3D", "42")) or _HOPELESS.search(text):
            return Permanent(text, where=self._where, remedy="Check user, password, database and pg_hba.conf")
        return Transient(text, where=self._where)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                break
        else:
            connection = await self._connect()
        try:
            yield connection
        except BaseException:
            await connection.close()  # its state is unknown; a lost connection rolls back by itself
            raise
        if connection.closed or connection.broken or self._closed or len(self._idle) >= IDLE_MAX:
            await connection.close()
        else:
            if connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                await connection.rollback()
            self._idle.append(connection)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        async with self._connection() as connection:
            yield PostgresTransaction(self, connection)

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    # --- tables ---------------------------------------------------------------------------------------------------

    async def ensure_table(
        self, table: TableName, columns: pa.Schema, *, unique: Sequence[str] = (), index: Sequence[str] = ()
    ) -> None:
        wanted = {field.name: ddl_type(field.type) for field in columns}
        try:
            async with self._connection() as connection:
                await connection.execute("select pg_advisory_xact_lock(hashtext('thalweg:ddl'))")
                have = await self._catalog(connection, table)
                if not have:
                    if table.schema:
                        await connection.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(table.schema)))
                    body = sql.SQL(", ").join(
                        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in wanted.items()
                    )
                    await connection.execute(sql.SQL("create table {} ({})").format(_table(table), body))
                for name in (n for n in wanted if have and n not in have):
                    await connection.execute(
                        sql.SQL("alter table {} add column {} {}").format(
                            _table(table), sql.Identifier(name), sql.SQL(wanted[name])
                        )
                    )
                for keys, kind in ((unique, "unique index"), (index, "index")):
                    if keys:
                        name = f"{table.name[:30]}_twg_{'u' if kind.startswith('u') else 'i'}"
                        await connection.execute(
                            sql.SQL("create {} if not exists {} on {} ({})").format(
                                sql.SQL(kind),
                                sql.Identifier(name),
                                _table(table),
                                sql.SQL(", ").join(map(sql.Identifier, keys)),
                            )
                        )
                self._columns[table] = await self._catalog(connection, table)
                await connection.commit()
        except psycopg.Error as error:
            raise self.translated(error) from None
        for field in columns:
            have_type = self._columns[table][field.name]
            if wire_type(have_type, field.type) is None:
                raise Permanent(
                    f"column {field.name} of table {table} is {have_type}, which cannot hold {field.type}",
                    where=self._where,
                    remedy=f"Cast it in the SQL transform, or alter the column to {wanted[field.name]}",
                )

    async def _catalog(self, connection: psycopg.AsyncConnection[Any], table: TableName) -> dict[str, str]:
        found = await connection.execute(
            "select a.attname, format_type(a.atttypid, a.atttypmod) from pg_attribute a"
            " where a.attrelid = to_regclass(%s) and a.attnum > 0 and not a.attisdropped order by a.attnum",
            [_table(table).as_string(None)],
        )
        return dict(await found.fetchall())

    def column_types(self, table: TableName) -> Mapping[str, str]:
        """Types of a table that `ensure_table` has seen."""
        return self._columns.get(table, {})

    # --- coverage -------------------------------------------------------------------------------------------------

    async def ensure_coverage(self) -> None:
        await self._execute("select pg_advisory_xact_lock(hashtext('thalweg:ddl'))", then=[
            f"create table if not exists {COVERAGE} (scope text, partition text, sink text,"
            " ranges int8multirange not null, primary key (scope, partition, sink))",
            f"create table if not exists {DOCUMENTS} (scope text, partition text, version int8 not null,"
            " body text not null, primary key (scope, partition))",
        ])  # fmt: skip

    async def ranges(self, scope: str, partition: str) -> Mapping[str, RangeSet]:
        statement = f"select sink, ranges::text from {COVERAGE} where scope = %s and partition = %s"
        return {sink: parse_ranges(text) for sink, text in await self._execute(statement, [scope, partition])}

    async def partitions(self, scope: str) -> Sequence[str]:
        rows = await self._execute(f"select partition from {DOCUMENTS} where scope = %s order by 1", [scope])
        return [row[0] for row in rows]

    async def get_document(self, scope: str, partition: str) -> tuple[str, int] | None:
        statement = f"select body, version from {DOCUMENTS} where scope = %s and partition = %s"
        rows = await self._execute(statement, [scope, partition])
        return (rows[0][0], rows[0][1]) if rows else None

    async def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        if version == 0:
            rows = await self._execute(
                f"insert into {DOCUMENTS} values (%s, %s, 1, %s) on conflict do nothing returning version",
                [scope, partition, body],
            )
        else:
            rows = await self._execute(
                f"update {DOCUMENTS} set body = %s, version = version + 1"
                " where scope = %s and partition = %s and version = %s returning version",
                [body, scope, partition, version],
            )
        if not rows:
            raise Stale(f"checkpoint of {partition} has changed", where=self._where)
        return int(rows[0][0])

    async def _execute(self, statement: str, values: Sequence[object] = (), then: Sequence[str] = ()) -> list[Any]:
        """One short transaction. A commit whose reply is lost is `Ambiguous`."""
        committing = False
        try:
            async with self._connection() as connection:
                cursor = await connection.execute(statement, values)
                rows = await cursor.fetchall() if cursor.description else []
                for more in then:
                    await connection.execute(more)
                committing = True
                await connection.commit()
        except psycopg.Error as error:
            raise self.translated(error, committing) from None
        return rows

    # --- errors ---------------------------------------------------------------------------------------------------

    def translated(self, error: psycopg.Error, committing: bool = False) -> ThalwegError:
        """By SQLSTATE; without one the connection broke."""
        state, words = error.sqlstate, _plain(error)
        if committing and (state is None or state.startswith(("08", "57P"))):
            return Ambiguous(f"commit: {words}", where=self._where)
        if state is None:
            kind = Transient if isinstance(error, psycopg.OperationalError) else Permanent
            return kind(words, where=self._where)
        if _LATER.fullmatch(state):
            return Transient(f"{words} (SQLSTATE {state})", where=self._where)
        if _DATA.fullmatch(state):
            found = _LINE.search(error.diag.context or "")
            return DataRefused(words, code=f"sqlstate-{state}", row=int(found[1]) - 1 if found else -1, where=self._where)
        return Permanent(f"{words} (SQLSTATE {state})", where=self._where)


class PostgresTransaction:
    """One transaction on one connection."""

    def __init__(self, database: PostgresDatabase, connection: psycopg.AsyncConnection[Any]) -> None:
        self._database, self._connection = database, connection
        self._savepoints = self._stages = 0

    async def _run(self, statement: sql.SQL | sql.Composed | str, values: Sequence[object] = ()) -> psycopg.AsyncCursor[Any]:
        query = sql.SQL(statement) if isinstance(statement, str) else statement
        try:
            return await self._connection.execute(query, values)
        except psycopg.Error as error:
            raise self._database.translated(error) from None

    async def lock_ranges(self, scope: str, partition: str, sink: str) -> RangeSet:
        key = [scope, partition, sink]
        await self._run(f"insert into {COVERAGE} values (%s, %s, %s, '{{}}') on conflict do nothing", key)
        found = await self._run(
            f"select ranges::text from {COVERAGE} where scope = %s and partition = %s and sink = %s for update", key
        )
        row = await found.fetchone()
        return parse_ranges(row[0]) if row else RangeSet()

    async def put_ranges(self, scope: str, partition: str, sink: str, ranges: RangeSet) -> None:
        text = "{" + ",".join(f"[{start},{stop})" for start, stop in ranges) + "}"
        await self._run(
            f"update {COVERAGE} set ranges = ranges + %s::int8multirange where scope = %s and partition = %s and sink = %s",
            [text, scope, partition, sink],
        )

    async def copy(self, table: TableName, rows: pa.RecordBatch) -> None:
        await self._copy(table, _table(table), rows)

    async def _copy(self, typed_as: TableName, target: sql.Composable, rows: pa.RecordBatch) -> None:
        types = {**self._database.column_types(typed_as), _ORDINAL: "bigint"}
        body = await self._database._compute.run(lambda: encoded(rows, types, str(typed_as)))
        names = sql.SQL(", ").join(map(sql.Identifier, rows.schema.names))
        statement = sql.SQL("copy {} ({}) from stdin (format binary)").format(target, names)
        try:
            async with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
                for at in range(0, len(body), WRITE_BYTES):
                    await copy.write(body[at : at + WRITE_BYTES])
        except psycopg.Error as error:
            raise self._database.translated(error) from None

    async def merge(self, table: TableName, rows: pa.RecordBatch, keys: Sequence[str], update: bool) -> None:
        _refuse_null_keys(rows, keys)
        self._stages += 1
        stage = sql.Identifier(f"_thalweg_stage_{self._stages}")
        names = [sql.Identifier(name) for name in rows.schema.names]
        listed, by = sql.SQL(", ").join(names), sql.SQL(", ").join(map(sql.Identifier, keys))
        await self._run(
            sql.SQL("create temp table {} on commit drop as select {}, 0::int8 as {} from {} with no data").format(
                stage, listed, sql.Identifier(_ORDINAL), _table(table)
            )
        )
        numbered = rows.append_column(_ORDINAL, pa.array(np.arange(rows.num_rows, dtype=np.int64)))
        await self._copy(table, stage, numbered)
        changed = [sql.Identifier(n) for n in rows.schema.names if n not in keys]
        action = (
            sql.SQL("do update set {}").format(
                sql.SQL(", ").join(sql.SQL("{} = excluded.{}").format(column, column) for column in changed)
            )
            if update and changed
            else sql.SQL("do nothing")
        )
        await self._run(
            sql.SQL(
                "insert into {} ({}) select {} from (select distinct on ({}) * from {} order by {}, {} desc) as last_of_each"
                " on conflict ({}) {}"
            ).format(_table(table), listed, listed, by, stage, by, sql.Identifier(_ORDINAL), by, action)
        )

    async def savepoint(self) -> int:
        self._savepoints += 1
        await self._run(sql.SQL("savepoint {}").format(sql.Identifier(f"s{self._savepoints}")))
        return self._savepoints

    async def rollback_to(self, savepoint: int) -> None:
        await self._run(sql.SQL("rollback to savepoint {}").format(sql.Identifier(f"s{savepoint}")))

    async def commit(self) -> None:
        try:
            await self._connection.commit()
        except psycopg.Error as error:
            raise self._database.translated(error, committing=True) from None


_ORDINAL: Final = "_thalweg_ordinal"


def _table(table: TableName) -> sql.Identifier:
    return sql.Identifier(table.schema, table.name) if table.schema else sql.Identifier(table.name)


def _plain(error: BaseException) -> str:
    """The message on one line; libpq repeats the connection string nowhere in it."""
    return " ".join(str(error).split())[:500]


def parse_ranges(text: str) -> RangeSet:
    """`int8multirange` in text form, canonical: `{[0,5),[7,9)}`."""
    return RangeSet((int(a), int(b)) for a, b in re.findall(r"\[(-?\d+),(-?\d+)\)", text))


# --- types --------------------------------------------------------------------------------------------------------


def ddl_type(kind: pa.DataType) -> str:
    """The Postgres type of a column that the engine creates for an Arrow type."""
    if pa.types.is_dictionary(kind):
        return ddl_type(kind.value_type)
    simple = {
        pa.bool_(): "boolean", pa.int8(): "smallint", pa.int16(): "smallint", pa.uint8(): "smallint", pa.int32(): "integer",
        pa.uint16(): "integer", pa.int64(): "bigint", pa.uint32(): "bigint", pa.uint64(): "numeric(20,0)",
        pa.float16(): "real", pa.float32(): "real", pa.float64(): "double precision",
        pa.date32(): "date", pa.date64(): "date", pa.binary(16): "uuid",
    }.get(kind)  # fmt: skip
    if simple is not None:
        return simple
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if pa.types.is_time(kind):
        return "time without time zone"
    if pa.types.is_duration(kind):
        return "interval"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})" if kind.scale >= 0 else "numeric"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return "bytea"
    if _is_list(kind) and not pa.types.is_nested(kind.value_type):
        return ddl_type(kind.value_type) + "[]"
    return "jsonb"


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def wire_type(column: str, kind: pa.DataType) -> pa.DataType | None:
    """The Arrow type whose pgpq encoding a column of Postgres type `column` reads; None where ours cannot become it."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    bytes_ = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if column.endswith("[]"):
        inner = wire_type(column[:-2], kind.value_type) if _is_list(kind) else None
        return pa.list_(inner) if inner is not None else None
    if column in ("jsonb", "json"):
        return pa.binary() if text or pa.types.is_nested(kind) else None
    if pa.types.is_null(kind):
        kind, text = pa.string(), True
    whole = {"smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64()}.get(column)
    if whole is not None:
        return whole if pa.types.is_integer(kind) or pa.types.is_decimal(kind) else None
    if column in ("real", "double precision"):
        return (pa.float32() if column == "real" else pa.float64()) if number else None
    if column.startswith("numeric"):
        found = re.fullmatch(r"numeric\((\d+),(-?\d+)\)", column)
        if not number:
            return None
        if found and int(found[1]) <= 38:
            return pa.decimal128(int(found[1]), int(found[2]))
        if pa.types.is_decimal(kind):
            return pa.decimal128(38, max(0, kind.scale))
        return pa.decimal128(20, 0) if pa.types.is_integer(kind) else None
    if column == "text" or column.startswith("character"):
        return pa.string() if text or number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind) else None
    if column == "bytea":
        return pa.binary() if bytes_ or text else None
    if column == "uuid":
        return pa.binary(16) if kind == pa.binary(16) else None
    if column == "boolean":
        return pa.bool_() if pa.types.is_boolean(kind) else None
    if column == "date":
        return pa.date32() if pa.types.is_date(kind) else None
    if column.startswith("timestamp"):
        zoned = "with time zone" in column and "without" not in column
        return pa.timestamp("us", "UTC" if zoned else None) if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else None
    if column.startswith("time "):
        return pa.time64("us") if pa.types.is_time(kind) else None
    if column == "interval":
        return pa.duration("us") if pa.types.is_duration(kind) else None
    return None


def encoded(rows: pa.RecordBatch, types: Mapping[str, str], table: str) -> bytes:
    """`rows` as binary COPY for a table whose columns have `types`. Raises `RowsRefused`, `Permanent` (unknown column)."""
    refused: dict[int, RowRefusal] = {}
    columns: list[pa.Array] = []
    fields: list[pa.Field] = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        target = types.get(field.name)
        if target is None:
            raise Permanent(f"table {table} has no column {field.name}")
        array = _cast(field.name, column, target, refused)
        columns.append(array)
        fields.append(pa.field(field.name, array.type))
    if refused:
        raise RowsRefused([refused[row] for row in sorted(refused)], where=f"table {table}")
    batch = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
    encoder = ArrowToPostgresBinaryEncoder(batch.schema)
    return b"".join((encoder.write_header(), encoder.write_batch(batch), encoder.finish()))


def _cast(name: str, column: pa.Array, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """The column in the wire type of `target`; rows that cannot be held are put in `refused` and null in the result."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wire = wire_type(target, column.type)
    if wire is None:
        raise Permanent(f"column {name} is {target}, which cannot hold {column.type}")
    if target in ("jsonb", "json"):
        return _json(name, column, target, refused)
    if pa.types.is_timestamp(wire):
        return _timestamps(name, column, wire, refused)
    if pa.types.is_date(wire):
        days = column.cast(pa.date32()) if column.type != pa.date32() else column
        numbers = days.view(pa.int32())
        bad = pc.or_(pc.less(numbers, _DATE_MIN), pc.greater(numbers, _DATE_MAX))
        return _without(name, days, bad, "date-range", "Postgres dates reach from 4713 BC to 5874897 AD", refused)
    if pa.types.is_floating(column.type) and pa.types.is_decimal(wire):
        column = _without(name, column, pc.invert(pc.is_finite(column)), "numeric-not-finite", "not a finite number", refused)
    if column.type != wire:
        column = _safe(name, column, wire, refused)
    if pa.types.is_string(wire) or (pa.types.is_list(wire) and pa.types.is_string(wire.value_type)):
        column = _no_nul(name, column, refused)
    return column


def _safe(name: str, column: pa.Array, wire: pa.DataType, refused: dict[int, RowRefusal]) -> pa.Array:
    """A cast that never alters a value; the rows that would be altered are refused one by one."""
    try:
        return column.cast(wire)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if isinstance(error, pa.ArrowNotImplementedError):
            raise Permanent(f"column {name}: {column.type} cannot be sent as {wire}") from None
    bad = np.zeros(len(column), dtype=bool)
    code = "numeric-scale" if pa.types.is_decimal(wire) else "out-of-range"
    spans = [(0, len(column))]
    while spans:  # halve until each refused value stands alone
        start, stop = spans.pop()
        try:
            column.slice(start, stop - start).cast(wire)
        except pa.ArrowInvalid:
            if stop - start == 1:
                bad[start] = True
            else:
                middle = (start + stop) // 2
                spans += [(start, middle), (middle, stop)]
    mask = pa.array(bad)
    return _without(name, column, mask, code, f"the value does not fit {wire}", refused).cast(wire)


def _without(name: str, column: pa.Array, bad: pa.Array, code: str, detail: str, refused: dict[int, RowRefusal]) -> pa.Array:
    bad = pc.fill_null(bad, False)
    if not pc.any(bad).as_py():
        return column
    for row in np.flatnonzero(bad.to_numpy(zero_copy_only=False)).tolist():
        refused.setdefault(row, RowRefusal(row, code, f"column {name}: {detail}"))
    return pc.if_else(bad, pa.scalar(None, column.type), column)


def _timestamps(name: str, column: pa.Array, wire: pa.DataType, refused: dict[int, RowRefusal]) -> pa.Array:
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s"))
    numbers = column.view(pa.int64())
    per_us = {"s": 1_000_000, "ms": 1_000, "us": 1}.get(column.type.unit)
    if per_us is None:  # nanoseconds
        lost = pc.not_equal(pc.subtract(numbers, pc.multiply(pc.divide(numbers, 1000), 1000)), 0)
        detail = "nanoseconds would be lost: Postgres keeps microseconds"
        numbers = pc.divide(_without(name, numbers, lost, "timestamp-precision", detail, refused), 1000)
    else:
        bad = pc.or_(pc.less(numbers, -(-_US_MIN // per_us)), pc.greater(numbers, _US_MAX // per_us))
        detail = "Postgres timestamps reach from 4713 BC to 294276 AD"
        numbers = _without(name, numbers, bad, "timestamp-range", detail, refused)
        if per_us != 1:
            numbers = pc.multiply(numbers, per_us)
    return numbers.view(wire)


def _no_nul(name: str, column: pa.Array, refused: dict[int, RowRefusal]) -> pa.Array:
    """Postgres text cannot hold U+0000."""
    flat = column.flatten() if pa.types.is_list(column.type) else column
    buffer = flat.buffers()[2]
    if buffer is None or len(flat) == 0:
        return column
    offsets = np.frombuffer(flat.buffers()[1], dtype=np.int32)[flat.offset : flat.offset + len(flat) + 1]
    data = np.frombuffer(buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    if data.size == 0 or data.all():
        return column
    bad = pc.match_substring(flat, "\x00")
    if pa.types.is_list(column.type):
        parents = pc.list_parent_indices(column).filter(pc.fill_null(bad, False)).to_numpy()
        mask = np.zeros(len(column), dtype=bool)
        mask[parents] = True
        bad = pa.array(mask)
    return _without(name, column, bad, "text-nul", "text holds U+0000, which Postgres cannot store", refused)


def _json(name: str, column: pa.Array, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """JSON text per row; binary COPY of jsonb begins with the version byte 1 (src/backend/utils/adt/jsonb.c)."""
    lead = b"\x01" if target == "jsonb" else b""
    out: list[bytes | None] = []
    for row, value in enumerate(column.to_pylist()):
        if value is None:
            out.append(None)
            continue
        text = isinstance(value, str)
        body = value.encode() if text else orjson.dumps(value, default=_jsonable, option=orjson.OPT_NON_STR_KEYS)
        if b"\\u0000" in body or b"\x00" in body:
            refused.setdefault(row, RowRefusal(row, "text-nul", f"column {name}: JSON text holds U+0000"))
            body = b"null"
        out.append(lead + body)
    return pa.array(out, pa.binary())


def _jsonable(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _refuse_null_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> None:
    bad: dict[int, RowRefusal] = {}
    for key in keys:
        for row in np.flatnonzero(rows.column(key).is_null().to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(row, RowRefusal(row, "key-null", f"key column {key} is null"))
    if bad:
        raise RowsRefused([bad[row] for row in sorted(bad)])
