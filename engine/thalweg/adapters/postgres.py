"""Postgres through psycopg: binary COPY fed by pgpq, coverage as `int8multirange`.

Translates the `Database` port. It casts columns to the types the table really has, and names each row that cannot be
cast or that Postgres could not hold, before anything is sent; what only the server can judge comes back as
`DataRefused`. It never retries and never narrows a refusal: that is the runtime's business.

Sources: PostgreSQL manual, "COPY" (binary format), "Data Types", appendix A (SQLSTATE classes).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import numpy as np
import orjson
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql, waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.errors import Ambiguous, DataRefused, Permanent, RowRefusal, RowsRefused, Stale, ThalwegError, Transient
from thalweg.ports import Capabilities, Compute, TableName, Transaction

RV = TypeVar("RV")

IDLE_MAX: Final = 8
CONNECT_S: Final = 5
CANCEL_S: Final = 1.0
NAME_BYTES_MAX: Final = 63  # NAMEDATALEN - 1; longer names are cut by the server, with a mere notice

# Nothing waits for ever, on either side: a vanished client must not hold the coverage row that its successor needs.
# (TCP_USER_TIMEOUT ends what keepalives cannot see: sent bytes that nobody acknowledges.)
SETTINGS: Final = (
    "-c lock_timeout=30s -c statement_timeout=10min -c idle_in_transaction_session_timeout=120s -c TimeZone=UTC"
    " -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3 -c tcp_user_timeout=30s"
)

COVERAGE: Final = "_thalweg_coverage"
DOCUMENTS: Final = "_thalweg_checkpoint"

_LATER: Final = re.compile(r"08...|25006|25P03|40001|40P01|53...|55P03|57P0[1-5]|57014|58030|XX000")
"""Connection trouble, a server that is (still) read-only after a fail-over, serialisation, deadlock, no resources
(53100: disk full), lock timeout, shutdown, I/O error."""

_DATA: Final = re.compile(r"22...|23...|44000|54...|P0001")
"""Also what depends on a row without looking so: a view's check option, limits (an index entry too long, JSON nested too
deep), and what a user's trigger raises."""

_OTHER_TABLE: Final = re.compile(r"22P03|42804|42703|42P01")
"""In answer to COPY: the binary form is not what the column reads. We chose it by the catalog, so that has changed."""

_HOPELESS: Final = re.compile(
    r"password authentication failed|no password supplied|does not exist|no pg_hba.conf entry|not permitted to log in"
    r"|sslmode|SSL was required|certificate verify failed|invalid .*(value|option|port)"
)
_LINE: Final = re.compile(r"COPY .+, line (\d+)")

# PostgreSQL manual, "Date/Time Types": 4713 BC to 5874897 AD for dates, to 294276 AD for timestamps.
_DATE_MIN: Final = -2_440_588
_DATE_MAX: Final = 2_145_031_948
_US_MIN: Final = -210_866_803_200_000_000
_US_MAX: Final = 9_223_371_331_199_999_999


class _Connection(psycopg.AsyncConnection[Any]):
    """Gives up at once when its task is cancelled, also where the server is frozen and answers no request to cancel."""

    async def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            with suppress(psycopg.Error):
                await self.cancel_safe(timeout=CANCEL_S)
            self.pgconn.finish()
            raise


class PostgresDatabase:
    """One database."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, dsn: str, compute: Compute) -> None:
        self._dsn, self._compute = dsn, compute
        try:
            known = conninfo_to_dict(dsn)
        except psycopg.Error:  # libpq quotes the piece it stumbled over, which may be half a password
            raise Permanent(
                "not a Postgres connection string", remedy="Write postgresql://user:password@host:port/database, specials encoded"
            ) from None
        self._settings = f"{known.get('options') or ''} {SETTINGS}".strip()
        host, port = known.get("host", "localhost"), known.get("port", 5432)
        self._where = f"{known.get('user', '?')}@{host}:{port}/{known.get('dbname', '?')}"
        self.identity = ""
        self._idle: list[_Connection] = []
        self._columns: dict[TableName, dict[str, str]] = {}
        self._covered = self._closed = False

    # --- connections ----------------------------------------------------------------------------------------------

    async def _connect(self) -> _Connection:
        try:
            connection = await _Connection.connect(
                self._dsn,
                connect_timeout=CONNECT_S,
                application_name="thalweg",
                client_encoding="UTF8",  # binary COPY of text is read in it, whatever PGCLIENTENCODING says
                prepare_threshold=None,  # poolers that share sessions do not know our prepared statements
                keepalives=1,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
                options=self._settings,
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
    async def _connection(self) -> AsyncIterator[_Connection]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                break
        else:
            connection = await self._connect()
        try:
            yield connection
        except Permanent:  # the server answered: the connection is as good as before
            try:
                await connection.rollback()
            except psycopg.Error:
                await connection.close()
            else:
                await self._keep(connection)
            raise
        except BaseException:
            await connection.close()  # its state is unknown; a lost connection rolls back by itself
            if connection.broken or connection.pgconn.status is psycopg.pq.ConnStatus.BAD:
                await self._forget_idle()  # a server that went away took the others along
            raise
        await self._keep(connection)

    async def _keep(self, connection: _Connection) -> None:
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

    async def _forget_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def close(self) -> None:
        self._closed = True
        await self._forget_idle()

    # --- tables ---------------------------------------------------------------------------------------------------

    async def ensure_table(
        self, table: TableName, columns: pa.Schema, *, unique: Sequence[str] = (), index: Sequence[str] = ()
    ) -> None:
        wanted = {field.name: ddl_type(field.type) for field in columns}
        self._check_names([table.schema, table.name, *wanted])
        try:
            async with self._connection() as connection:
                await connection.execute("select pg_advisory_xact_lock(hashtext('thalweg:ddl'))")
                await connection.execute("set local statement_timeout = 0")  # an index on a big table takes what it takes
                have = await self._catalog(connection, table)
                if not have:
                    await self._create(connection, table, wanted)
                for name in (n for n in wanted if have and n not in have):
                    await connection.execute(
                        sql.SQL("alter table {} add column {} {}").format(
                            _table(table), sql.Identifier(name), sql.SQL(wanted[name])
                        )
                    )
                for keys, kind in ((unique, "unique index"), (index, "index")):
                    if keys and not await self._has_index(connection, table, keys, kind != "index"):
                        await connection.execute(
                            sql.SQL("create {} if not exists {} on {} ({})").format(
                                sql.SQL(kind),
                                sql.Identifier(index_name(table, keys, kind != "index")),
                                _table(table),
                                sql.SQL(", ").join(map(sql.Identifier, keys)),
                            )
                        )
                now = await self._catalog(connection, table)
                await connection.commit()
        except psycopg.Error as error:
            raise self.translated(error) from None
        for field in columns:
            if wire_type(now[field.name], field.type) is None:
                raise Permanent(
                    f"column {field.name} of table {table} is {now[field.name]}, which cannot hold {field.type}",
                    where=self._where,
                    remedy=f"Cast it in the SQL transform, or alter the column to {wanted[field.name]}",
                )
        self._columns[table] = now

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if len(name.encode()) > NAME_BYTES_MAX or "\x00" in name:
                raise Permanent(
                    f"{name!r} is no name for Postgres: at most {NAME_BYTES_MAX} bytes, without U+0000",
                    where=self._where,
                    remedy="Rename it in the SQL transform",
                )

    async def _create(self, connection: _Connection, table: TableName, wanted: Mapping[str, str]) -> None:
        if table.schema:  # `if not exists` asks for the right to create even where it does
            found = await connection.execute("select 1 from pg_namespace where nspname = %s", [table.schema])
            if await found.fetchone() is None:
                await connection.execute(sql.SQL("create schema {}").format(sql.Identifier(table.schema)))
        body = sql.SQL(", ").join(sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in wanted.items())
        await connection.execute(sql.SQL("create table {} ({})").format(_table(table), body))

    async def _has_index(self, connection: _Connection, table: TableName, keys: Sequence[str], unique: bool) -> bool:
        """Whether a valid, whole (not partial) index over exactly these columns, in any order where unique, is there."""
        found = await connection.execute(
            "select array(select a.attname::text from unnest(i.indkey) with ordinality as k(n, o)"
            " join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.n order by k.o), i.indnkeyatts, i.indisunique"
            " from pg_index i where i.indrelid = to_regclass(%s) and i.indisvalid and i.indimmediate"
            " and i.indpred is null and i.indexprs is null",
            [_table(table).as_string(None)],
        )
        for columns, n, is_unique in await found.fetchall():
            if unique and is_unique and sorted(columns[:n]) == sorted(keys):
                return True
            if not unique and columns[: len(keys)] == list(keys):
                return True
        return False

    async def _catalog(self, connection: psycopg.AsyncConnection[Any], table: TableName) -> dict[str, str]:
        found = await connection.execute(
            "select a.attname, format_type(a.atttypid, a.atttypmod) from pg_attribute a"
            " where a.attrelid = to_regclass(%s) and a.attnum > 0 and not a.attisdropped order by a.attnum",
            [_table(table).as_string(None)],
        )
        return dict(await found.fetchall())

    async def column_types(self, connection: _Connection, table: TableName) -> Mapping[str, str]:
        """Types of a table's columns, as seen last."""
        if table not in self._columns:
            self._columns[table] = await self._catalog(connection, table)
        return self._columns[table]

    def forget_columns(self, table: TableName) -> None:
        """Look again at the next COPY."""
        self._columns.pop(table, None)

    # --- coverage -------------------------------------------------------------------------------------------------

    async def ensure_coverage(self) -> None:
        if self._covered:
            return
        names = f"to_regclass('{COVERAGE}') is not null and to_regclass('{DOCUMENTS}') is not null"
        if not (await self._execute(f"select {names}"))[0][0]:  # `if not exists` asks for the right to create all the same
            await self._execute("select pg_advisory_xact_lock(hashtext('thalweg:ddl'))", then=[
                f"create table if not exists {COVERAGE} (scope text, partition text, sink text,"
                " ranges int8multirange not null, primary key (scope, partition, sink))",
                f"create table if not exists {DOCUMENTS} (scope text, partition text, version int8 not null,"
                " body text not null, primary key (scope, partition))",
            ])  # fmt: skip
        self._covered = True

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
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # what broke on the way out of a cancelled call is no news
        state, words = error.sqlstate, _plain(error)
        if committing and (state is None or state.startswith(("08", "57P"))):
            return Ambiguous(f"commit: {words}", where=self._where)
        if state is None:
            kind = Transient if isinstance(error, psycopg.OperationalError) else Permanent
            return kind(words, where=self._where)
        if state == "08P01" and error.diag.severity_nonlocalized == "ERROR":  # poolers say it, FATAL, of their own trouble
            return Permanent(f"{words} (SQLSTATE {state})", where=self._where)
        if _LATER.fullmatch(state):
            return Transient(f"{words} (SQLSTATE {state})", where=self._where)
        if _DATA.fullmatch(state):
            found = _LINE.search(error.diag.context or "")
            return DataRefused(words, code=f"sqlstate-{state}", row=int(found[1]) - 1 if found else -1, where=self._where)
        return Permanent(f"{words} (SQLSTATE {state})", where=self._where)


class PostgresTransaction:
    """One transaction on one connection."""

    def __init__(self, database: PostgresDatabase, connection: _Connection) -> None:
        self._database, self._connection = database, connection
        self._savepoints = self._stages = 0
        self._strict = False

    async def _run(self, statement: sql.SQL | sql.Composed | str, values: Sequence[object] = ()) -> psycopg.AsyncCursor[Any]:
        query = sql.SQL(statement) if isinstance(statement, str) else statement
        try:
            return await self._connection.execute(query, values)
        except psycopg.Error as error:
            raise self._database.translated(error) from None

    async def lock_ranges(self, scope: str, partition: str, sink: str) -> RangeSet:
        key = [scope, partition, sink]
        query = f"select ranges::text from {COVERAGE} where scope = %s and partition = %s and sink = %s for update"
        row = await (await self._run(query, key)).fetchone()
        if row is None:  # the first time; somebody else may be at it too
            await self._run(f"insert into {COVERAGE} values (%s, %s, %s, '{{}}') on conflict do nothing", key)
            row = await (await self._run(query, key)).fetchone()
        return parse_ranges(row[0]) if row else NOTHING

    async def put_ranges(self, scope: str, partition: str, sink: str, ranges: RangeSet) -> None:
        text = "{" + ",".join(f"[{start},{stop})" for start, stop in ranges) + "}"
        await self._run(
            f"insert into {COVERAGE} as known values (%s, %s, %s, %s::int8multirange)"
            " on conflict (scope, partition, sink) do update set ranges = known.ranges + excluded.ranges",
            [scope, partition, sink, text],
        )

    def _strictly(self) -> str:
        """Deferred constraints would speak at the commit, where nobody can tell the row. Before the first savepoint, or
        going back to that would defer them again."""
        first, self._strict = not self._strict, True
        return "set constraints all immediate; " if first else ""

    async def copy(self, table: TableName, rows: pa.RecordBatch) -> None:
        await self._copy(table, _table(table), rows)

    async def _copy(self, typed_as: TableName, target: sql.Composable, rows: pa.RecordBatch) -> None:
        database = self._database
        if strictly := self._strictly():
            await self._run(strictly)
        try:
            types = {**await database.column_types(self._connection, typed_as), _ORDINAL: "bigint"}
        except psycopg.Error as error:
            raise database.translated(error) from None
        pieces = await database._compute.run(lambda: encoded(rows, types, str(typed_as)))
        names = sql.SQL(", ").join(map(sql.Identifier, rows.schema.names))
        statement = sql.SQL("copy {} ({}) from stdin (format binary)").format(target, names)
        try:
            async with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
                for piece in pieces:
                    await copy.write(piece)
        except psycopg.Error as error:
            known = database.translated(error)
            if isinstance(known, Permanent):
                database.forget_columns(typed_as)
                if error.sqlstate is not None and _OTHER_TABLE.fullmatch(error.sqlstate):
                    raise Transient(f"table {typed_as} was altered: {known.what}", where=known.where) from None
            raise known from None

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
        await self._run(f"{self._strictly()}savepoint s{self._savepoints}")
        return self._savepoints

    async def rollback_to(self, savepoint: int) -> None:
        await self._run(sql.SQL("rollback to savepoint {}").format(sql.Identifier(f"s{savepoint}")))

    async def release(self, savepoint: int) -> None:
        await self._run(sql.SQL("release savepoint {}").format(sql.Identifier(f"s{savepoint}")))

    async def commit(self) -> None:
        if self._connection.info.transaction_status is psycopg.pq.TransactionStatus.INERROR:
            # The server would answer COMMIT with a rollback, and call that no error.
            raise Permanent("a statement of this transaction failed, so it cannot be committed")
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


def index_name(table: TableName, keys: Sequence[str], unique: bool) -> str:
    """A name of our own for an index: the same for the same columns, never that of another table or other columns."""
    said = "\0".join((table.schema, table.name, *keys)).encode()
    head = table.name.encode()[:40].decode(errors="ignore")
    return f"{head}_twg_{'u' if unique else 'i'}_{xxhash.xxh3_64_hexdigest(said)[:10]}"


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
    if _is_text(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if pa.types.is_time(kind):
        return "time without time zone"
    if pa.types.is_duration(kind):
        return "interval"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})" if kind.scale >= 0 else "numeric"
    if _is_bytes(kind):
        return "bytea"
    if _is_list(kind) and not pa.types.is_nested(kind.value_type):
        inner = ddl_type(kind.value_type)
        # pgpq has no elements of these types: uuids go as bytes, instants as wall clocks of UTC
        named = {"uuid": "bytea", "timestamp with time zone": "timestamp without time zone"}
        return f"{named.get(inner, inner)}[]"
    return "jsonb"


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


_ELEMENT: Final = re.compile(
    r"text|smallint|integer|bigint|real|double precision|boolean|bytea|date|interval|numeric.*|time.* without time zone"
)
"""Element types whose arrays pgpq names rightly: the server compares the type's number in the data with the column's."""


def wire_type(column: str, kind: pa.DataType) -> pa.DataType | None:
    """The Arrow type whose pgpq encoding a column of Postgres type `column` reads; None where ours cannot become it."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if column.endswith("[]"):
        if not _is_list(kind) or not _ELEMENT.fullmatch(column[:-2]):
            return None
        inner = wire_type(column[:-2], kind.value_type)
        return None if inner is None else pa.list_(inner)
    if column in ("jsonb", "json"):
        return pa.binary() if _is_text(kind) or pa.types.is_nested(kind) or pa.types.is_null(kind) else None
    if pa.types.is_null(kind):
        kind = _null_stand_in(column)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    whole = {"smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64()}.get(column)
    if whole is not None:
        return whole if pa.types.is_integer(kind) or pa.types.is_decimal(kind) else None
    if column in ("real", "double precision"):
        return (pa.float32() if column == "real" else pa.float64()) if number else None
    if column.startswith("numeric"):
        return _numeric(column, kind) if number else None
    if column == "text" or re.fullmatch(r"character( varying)?(\(\d+\))?", column):
        return pa.string() if _is_text(kind) or number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind) else None
    if column == "bytea":
        return pa.binary() if _is_bytes(kind) or _is_text(kind) else None
    if column == "uuid":
        return pa.binary(16) if kind == pa.binary(16) else None
    if column == "boolean":
        return pa.bool_() if pa.types.is_boolean(kind) else None
    if column == "date":
        return pa.date32() if pa.types.is_date(kind) else None
    if column.startswith("timestamp"):
        zoned = "with time zone" in column
        return pa.timestamp("us", "UTC" if zoned else None) if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else None
    if column.startswith("time") and column.endswith("without time zone"):
        return pa.time64("us") if pa.types.is_time(kind) else None
    if column == "interval":
        return pa.duration("us") if pa.types.is_duration(kind) else None
    return None


def _null_stand_in(column: str) -> pa.DataType:
    """A type whose nulls go into the column: columns of nothing but nulls fit everywhere we can write."""
    known = {
        "uuid": pa.binary(16), "boolean": pa.bool_(), "date": pa.date32(), "interval": pa.duration("us"), "bytea": pa.binary(),
        "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64(), "real": pa.float32(),
        "double precision": pa.float64(),
    }  # fmt: skip
    if column in known:
        return known[column]
    if column.startswith("timestamp"):
        return pa.timestamp("us")
    if column.startswith("time"):
        return pa.time64("us")
    return pa.int32() if column.startswith("numeric") else pa.string()


def _numeric(column: str, kind: pa.DataType) -> pa.DataType:
    """Decimals of the column's own precision and scale; without one, of ours. Floats: the scale their digits need (`_floats`)."""
    found = re.fullmatch(r"numeric\((\d+),(-?\d+)\)", column)
    if found and int(found[1]) <= 38 and int(found[2]) >= 0:
        return pa.decimal128(int(found[1]), int(found[2]))
    if pa.types.is_decimal(kind):
        return pa.decimal128(38, min(38, max(0, kind.scale)))
    return pa.decimal128(38 if pa.types.is_floating(kind) else 20, 0)


def encoded(rows: pa.RecordBatch, types: Mapping[str, str], table: str) -> tuple[bytes, ...]:
    """`rows` as binary COPY for a table whose columns have `types`; in pieces, for joining them would copy them all.

    Raises `RowsRefused`, `Permanent` (unknown column).
    """
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
    return encoder.write_header(), encoder.write_batch(batch), encoder.finish()


def _cast(name: str, column: pa.Array, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """The column in the wire type of `target`; rows that cannot be held are put in `refused` and null in the result."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wire = wire_type(target, column.type)
    if wire is None:
        raise Permanent(f"column {name} is {target}, which cannot hold {column.type}")
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), wire)
    if target.endswith("[]"):
        return _list(name, column, target[:-2], refused)
    if target in ("jsonb", "json"):
        return _json(name, column, target, refused)
    if pa.types.is_timestamp(wire):
        return _timestamps(name, column, wire, refused)
    if pa.types.is_date(wire):
        days = column.cast(pa.date32(), safe=False) if column.type != pa.date32() else column
        numbers = days.view(pa.int32())
        bad = pc.or_(pc.less(numbers, _DATE_MIN), pc.greater(numbers, _DATE_MAX))
        return _without(name, days, bad, "date-range", "Postgres dates reach from 4713 BC to 5874897 AD", refused)
    if pa.types.is_decimal(wire):
        return _decimals(name, column, wire, target, refused)
    if pa.types.is_float32(wire) and pa.types.is_float64(column.type):
        large = pc.and_(pc.is_finite(column), pc.invert(pc.is_finite(column.cast(wire))))
        column = _without(name, column, large, "out-of-range", "the value does not fit real", refused)
    if column.type != wire:
        column = _safe(name, column, wire, refused)
    if pa.types.is_string(wire):
        column = _no_nul(name, column, refused)
        if (found := re.fullmatch(r"character(?: varying)?\((\d+)\)", target)) is not None:
            long = pc.greater(pc.utf8_length(column), int(found[1]))
            column = _without(name, column, long, "text-too-long", f"longer than {target}", refused)
    return column


def _list(name: str, column: pa.Array, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """Lists element by element; a bad element refuses its row."""
    column = column.cast(pa.list_(column.type.value_type))
    bad: dict[int, RowRefusal] = {}
    elements = _cast(name, column.flatten(), target, bad)
    if bad:
        parents = pc.list_parent_indices(column).to_pylist()
        for at, why in bad.items():
            refused.setdefault(parents[at], RowRefusal(parents[at], why.code, why.detail))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), elements, mask=column.is_null())


_SCALES: Final = (0, 2, 4, 6, 9, 12, 15, 18, 22, 26, 30, 34, 38)


def _decimals(name: str, column: pa.Array, wire: pa.DataType, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """Numbers as decimals, never rounded: a float stands for the shortest decimal that reads back as that float."""
    if pa.types.is_integer(column.type):
        column = column.cast(pa.decimal128(20, 0))  # straight to a short decimal it is refused by type, whatever the values
    elif pa.types.is_floating(column.type):
        column = _without(name, column, pc.invert(pc.is_finite(column)), "numeric-not-finite", "not a finite number", refused)
        if pa.types.is_float16(column.type):
            column = column.cast(pa.float32())
        column = column.cast(pa.string())
        if target == "numeric" or not target.endswith(f",{wire.scale})"):
            wire = _scale_for(column)
    return column if column.type == wire else _safe(name, column, wire, refused)


def _scale_for(texts: pa.Array) -> pa.DataType:
    for scale in _SCALES:
        with suppress(pa.ArrowInvalid):
            texts.cast(pa.decimal128(38, scale))
            return pa.decimal128(38, scale)
    return pa.decimal128(38, 15)  # no scale suits them all: some rows are refused


def _safe(name: str, column: pa.Array, wire: pa.DataType, refused: dict[int, RowRefusal]) -> pa.Array:
    """A cast that never alters a value; the rows that would be altered are refused one by one."""
    code = "numeric-scale" if pa.types.is_decimal(wire) else "out-of-range"
    detail = f"the value does not fit {wire}"
    try:
        out = column.cast(wire)
    except pa.ArrowNotImplementedError:
        raise Permanent(f"column {name}: {column.type} cannot be sent as {wire}") from None
    except pa.ArrowInvalid:
        bad = np.zeros(len(column), dtype=bool)
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
        return _without(name, column, pa.array(bad), code, detail, refused).cast(wire)
    if pa.types.is_temporal(column.type) and pa.types.is_string(wire):  # Arrow writes words where it has no digits
        return _without(name, out, pc.starts_with(out, "<value out of range"), code, detail, refused)
    return out


def _without(name: str, column: pa.Array, bad: pa.Array, code: str, detail: str, refused: dict[int, RowRefusal]) -> pa.Array:
    bad = pc.fill_null(bad, False)
    if not pc.any(bad).as_py():
        return column
    for row in np.flatnonzero(bad.to_numpy(zero_copy_only=False)).tolist():
        refused.setdefault(row, RowRefusal(row, code, f"column {name}: {detail}"))
    return pc.if_else(bad, pa.scalar(None, column.type), column)


def _timestamps(name: str, column: pa.Array, wire: pa.DataType, refused: dict[int, RowRefusal]) -> pa.Array:
    """Instants count from 1970 in UTC, also where only one side has a zone: a wall clock without one is taken as UTC."""
    if pa.types.is_date(column.type):
        days = column.cast(pa.date32(), safe=False).view(pa.int32())
        numbers, unit = pc.multiply(days.cast(pa.int64()), 86_400), "s"
    else:
        numbers, unit = column.view(pa.int64()), column.type.unit
    per_us = {"s": 1_000_000, "ms": 1_000, "us": 1}.get(unit)
    if per_us is None:  # nanoseconds
        lost = pc.not_equal(pc.subtract(numbers, pc.multiply(pc.divide(numbers, 1000), 1000)), 0)
        detail = "nanoseconds would be lost: Postgres keeps microseconds"
        numbers = pc.divide(_without(name, numbers, lost, "timestamp-precision", detail, refused), 1000)
    else:
        low, high = -(-_US_MIN // per_us) if per_us > 1 else _US_MIN, _US_MAX // per_us
        if (span := pc.min_max(numbers))["min"].is_valid and (span["min"].as_py() < low or span["max"].as_py() > high):
            bad = pc.or_(pc.less(numbers, low), pc.greater(numbers, high))
            detail = "Postgres timestamps reach from 4713 BC to 294276 AD"
            numbers = _without(name, numbers, bad, "timestamp-range", detail, refused)
        if per_us != 1:
            numbers = pc.multiply(numbers, per_us)
    return numbers.view(wire)


def _no_nul(name: str, column: pa.Array, refused: dict[int, RowRefusal]) -> pa.Array:
    """Postgres text cannot hold U+0000."""
    _, ends, buffer = column.buffers()
    if buffer is None or len(column) == 0:
        return column
    offsets = np.frombuffer(ends, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    if data.size == 0 or data.all():
        return column
    bad = pc.match_substring(column, "\x00")
    return _without(name, column, bad, "text-nul", "text holds U+0000, which Postgres cannot store", refused)


_NUL_IN_JSON: Final = rb"(^|[^\\])(\\\\)*\\u0000"  # an escaped backslash before `u0000` makes it six plain characters


def _json(name: str, column: pa.Array, target: str, refused: dict[int, RowRefusal]) -> pa.Array:
    """JSON text per row; binary COPY of jsonb begins with the version byte 1 (src/backend/utils/adt/jsonb.c).

    Nested values: struct and map with text keys → object, other map → array of pairs, list → array, bytes → hex text,
    decimal → text, times → ISO 8601 text. A value without a JSON form (NaN, a year beyond 9999) refuses its row.
    """
    texts = column.cast(pa.binary()) if _is_text(column.type) else _dumped(name, column, refused)
    nul = pc.match_substring(texts, b"\x00")
    if target == "jsonb":
        nul = pc.or_(nul, pc.match_substring_regex(texts, _NUL_IN_JSON)) if _any(texts, rb"\u0000") else nul
    texts = _without(name, texts, nul, "text-nul", "JSON text holds U+0000", refused)
    if target == "json":
        return texts
    lead = pa.scalar(b"\x01", pa.binary())
    return pc.binary_join_element_wise(lead, texts, pa.scalar(b"", pa.binary()))


def _any(texts: pa.Array, piece: bytes) -> bool:
    return bool(pc.any(pc.match_substring(texts, piece)).as_py())


def _dumped(name: str, column: pa.Array, refused: dict[int, RowRefusal]) -> pa.Array:
    maps = "strict" if _text_maps(column.type) else None
    try:
        values = column.to_pylist(maps_as_pydicts=maps)
    except (ValueError, OverflowError, KeyError):  # one of them has no Python form: find it
        values = [None] * len(column)
        for row in range(len(column)):
            try:
                values[row] = column[row].as_py(maps_as_pydicts=maps)
            except KeyError:
                refused.setdefault(row, RowRefusal(row, "json-duplicate-key", f"column {name}: a map holds a key twice"))
            except (ValueError, OverflowError) as error:
                refused.setdefault(row, RowRefusal(row, "json-range", f"column {name}: {error}"))
    floats = _has_floats(column.type)
    out: list[bytes | None] = []
    for row, value in enumerate(values):
        if value is None:
            out.append(None)
            continue
        if floats and not _finite(value):
            refused.setdefault(row, RowRefusal(row, "json-not-finite", f"column {name}: JSON has no NaN and no infinity"))
            out.append(None)
            continue
        out.append(orjson.dumps(value, default=_jsonable, option=orjson.OPT_NON_STR_KEYS))
    return pa.array(out, pa.binary())


def _inner(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    if pa.types.is_struct(kind):
        return [kind.field(i).type for i in range(kind.num_fields)]
    return [kind.value_type] if _is_list(kind) else []


def _text_maps(kind: pa.DataType) -> bool:
    """Whether each map within has text keys, so that it can be a JSON object."""
    return (not pa.types.is_map(kind) or _is_text(kind.key_type)) and all(map(_text_maps, _inner(kind)))


def _has_floats(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind)) or any(map(_has_floats, _inner(kind)))


def _finite(value: object) -> bool:
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_finite, value))


def _jsonable(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _refuse_null_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> None:
    bad: dict[int, RowRefusal] = {}
    for key in keys:
        if rows.column(key).null_count == 0:
            continue
        for row in np.flatnonzero(rows.column(key).is_null().to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(row, RowRefusal(row, "key-null", f"key column {key} is null"))
    if bad:
        raise RowsRefused([bad[row] for row in sorted(bad)])
