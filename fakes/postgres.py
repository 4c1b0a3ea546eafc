"""A Postgres server and its clients, in memory: the twin of the `Database` port.

It stands in for `thalweg.adapters.postgres` together with the server behind it. `Server` is what survives every node:
tables, coverage, documents, and sessions with their locks. `PostgresTwin` is one node's handle, pool included. Rows are
validated by the adapter's own `encoded`, so what a column cannot hold is refused alike. Facts: PostgreSQL manual,
"Explicit Locking", "Transaction Isolation", "SAVEPOINT", appendix A; held to the real server by `conformance_database`.

A transaction is read committed. Its writes wait in its session and are applied in one synchronous step at the commit. A
statement that fails undoes what came since the innermost savepoint, locks included, and leaves the transaction failed until
`rollback_to`. `copy` and `merge` are effects for the Air (a disk may be full there) though they change nothing durable; what
they cannot have changed is never `Ambiguous`.

It may: lose a request or an answer (the Wire); refuse by the Air's fate: at `copy` and `merge` for want of disk, at `commit`
as a serialisation failure, a killed connection, a commit that never arrived, a lost reply; let a session, with its locks,
outlive its node until `connection_lost`, or a line that was cut until it was idle for `IDLE_S`; land a commit that had left
before its node died; make a caller wait for a lock, up to `LOCK_TIMEOUT_S`; choose a victim of a deadlock; lose every session
(`kill_pool`); be full (`full`).

It must not: lose a committed row, range or document, or alter one; apply half a transaction; show anybody what is not
committed; let two transactions hold one coverage row; apply what it answered `Transient`; take a second row of a unique
key; call a refusal by a constraint anything but `DataRefused`; keep the locks of a transaction that has ended.

Kept for realism, and who depends on it: a session's `active` and `begun` (idle time-out: successors that wait for a dead
owner's row), `flying` and `hung_up` (a zombie's last commit), `savepoints` and `failed` (narrowing a refusal to its rows),
`locks` and their queues (two owners at once), the pool (`kill_pool` is heard once per handle, late), a handle's `_columns`
(a table altered under a node that remembers it), `identity` (empty until the server was reached; two sinks in one table).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Final, TypeAlias

import pyarrow as pa

from fakes.faults import (
    CONNECTION_KILLED,
    DISK_FULL,
    NEVER_ARRIVED,
    REFUSED,
    SERIALIZATION,
    Air,
    Fail,
    Reply,
    Wire,
)
from thalweg.adapters.postgres import (
    IDLE_MAX,
    NAME_BYTES_MAX,
    _cast,
    _refuse_null_keys,
    ddl_type,
    encoded,
    wire_type,
)
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.errors import Ambiguous, DataRefused, Permanent, RowsRefused, Stale, ThalwegError, Transient
from thalweg.ports import Capabilities, Database, TableName, Transaction

LOCK_TIMEOUT_S: Final = 30.0
IDLE_S: Final = 120.0
DEADLOCK_S: Final = 1.0
"""After so long a wait a session looks for a deadlock, and is its victim if it finds one."""

HANGUP_S: Final = 1.0
"""A dead node's connection ends behind its last request; if that never lands, after this."""

VALIDATED_MAX: Final = 4_096
INT8_MAX: Final = 2**63 - 1

_SYSTEM: Final = frozenset(("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"))

Key: TypeAlias = tuple[Any, ...]

_ddl_type = cache(ddl_type)


@cache
def _holds(column: str, kind: pa.DataType) -> bool:
    return wire_type(column, kind) is not None


Observe: TypeAlias = Callable[[str, object], None]
Steps: TypeAlias = Generator["tuple[Key, str]", None, Any]
"""What the server does for one statement. It yields each lock it has to wait for, and goes on when it has it."""

READ: Final = "read"  # ACCESS SHARE
WRITE: Final = "write"  # ROW EXCLUSIVE
SHARE: Final = "share"  # SHARE: an index is built
ALTER: Final = "alter"  # ACCESS EXCLUSIVE
ROW: Final = "row"  # a row, an index entry, an advisory lock

_CONFLICTS: Final[Mapping[str, frozenset[str]]] = {
    READ: frozenset((ALTER,)),
    WRITE: frozenset((SHARE, ALTER)),
    SHARE: frozenset((WRITE, ALTER)),
    ALTER: frozenset((READ, WRITE, SHARE, ALTER)),
    ROW: frozenset((ROW,)),
}


# --- what is stored -----------------------------------------------------------------------------------------------


class Piece:
    """Rows as they were sent, and which of them were superseded since."""

    __slots__ = ("batch", "gone")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.gone: set[int] | None = None

    def without(self, row: int) -> None:
        self.gone = {row} if self.gone is None else self.gone | {row}

    @property
    def rows(self) -> pa.RecordBatch:
        """Those that are there."""
        gone = self.gone
        if gone is None:
            return self.batch
        return self.batch.take(pa.array([i for i in range(self.batch.num_rows) if i not in gone], pa.int64()))


Place: TypeAlias = tuple[Piece, int]


_KEYS: dict[tuple[int, tuple[str, ...]], tuple[pa.RecordBatch, tuple[str, ...], list[Any]]] = {}
"""Keys of batches met before; each is kept, so that its id stays its own."""


class Index:
    """Keys exist only where an index is unique. `pending`: by session, with None for a key that it frees."""

    __slots__ = ("columns", "pending", "taken", "unique")

    def __init__(self, columns: tuple[str, ...], unique: bool) -> None:
        self.columns, self.unique = columns, unique
        self.taken: dict[Key, Place] = {}
        self.pending: dict[Key, tuple[Session, Place | None]] = {}

    def keys(self, rows: pa.RecordBatch, types: Mapping[str, str]) -> list[Key | None]:
        """One a row; None where a part is null, which equals nothing."""
        if not set(self.columns) <= set(rows.schema.names):
            return [None] * rows.num_rows
        known = _KEYS.get((id(rows), self.columns))
        if known is None:
            parts = [_comparable(_cast(name, rows.column(name), types[name], {})) for name in self.columns]
            keys = [None if None in key else key for key in zip(*parts, strict=True)]
            if len(_KEYS) >= VALIDATED_MAX:
                _KEYS.clear()
            known = _KEYS[id(rows), self.columns] = rows, tuple(types[name] for name in self.columns), keys
        assert known[1] == tuple(types[name] for name in self.columns)
        return known[2]


def _comparable(column: pa.Array) -> list[Any]:
    """Values that are equal where Postgres' are."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind) or pa.types.is_duration(kind):
        return list(column.view(pa.int64()).to_pylist())
    if pa.types.is_date32(kind):
        return list(column.view(pa.int32()).to_pylist())
    values = column.to_pylist()
    if pa.types.is_floating(kind):
        return ["NaN" if v is not None and v != v else v for v in values]
    if pa.types.is_list(kind):
        return [None if v is None else ("list", *v) for v in values]
    return list(values)


class Table:
    """Committed rows, in the order of their commits."""

    __slots__ = ("indexes", "name", "pieces", "types")

    def __init__(self, name: str) -> None:
        self.name = name
        self.types: dict[str, str] = {}
        self.indexes: list[Index] = []
        self.pieces: list[Piece] = []


# --- sessions and locks -------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for a lock that is not granted yet."""

    session: Session
    key: Key
    mode: str
    go: Callable[[], None]
    fail: Fail
    steps: Steps


class Lock:
    __slots__ = ("holders", "queue")

    def __init__(self) -> None:
        self.holders: list[tuple[Session, str]] = []
        self.queue: deque[Waiter] = deque()


class Session:
    """One connection, as the server has it: its transaction under way, and how to undo it."""

    __slots__ = (
        "active", "alive", "begun", "cover", "failed", "flying", "hung_up", "log", "node", "number", "rows", "savepoints",
        "superseded", "waiter",
    )  # fmt: skip

    def __init__(self, node: str, number: int) -> None:
        self.node, self.number = node, number
        self.alive, self.hung_up = True, False
        self.begun = self.failed = False
        self.active = 0.0
        self.flying = 0  # requests on their way here
        self.waiter: Waiter | None = None
        self.savepoints: dict[int, int] = {}  # name: length of the log then
        self.log: list[tuple[Any, ...]] = []
        self.cover: dict[Key, RangeSet] = {}
        self.rows: list[tuple[Table, Piece]] = []
        self.superseded: list[Place] = []

    def __repr__(self) -> str:
        return f"Session({self.node} {self.number})"


class Server:
    """Durable state, shared by all nodes. `observe` hears of each effect within the step that applies it."""

    def __init__(self, air: Air, observe: Observe | None = None) -> None:
        self.air, self._observe = air, observe
        self.full = False
        self.covered = False
        self.tables: dict[str, Table] = {}
        self.coverage: dict[Key, RangeSet] = {}
        self.documents: dict[tuple[str, str], tuple[str, int]] = {}
        self.sessions: dict[int, Session] = {}
        self.locks: dict[Key, Lock] = {}
        self._numbers = 0
        self._sweeping = False
        self._validated: dict[int, tuple[pa.RecordBatch, Mapping[str, str], RowsRefused | None]] = {}

    # --- ground truth, for a world ---------------------------------------------------------------------------------

    def table(self, name: str | TableName) -> list[pa.RecordBatch]:
        """Committed rows, in pieces; [] where there is no such table."""
        found = self.tables.get(_named(name))
        return [] if found is None else [piece.rows for piece in found.pieces]

    def rows(self, name: str | TableName, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Committed rows as tuples; a column that a row was sent without is None."""
        out: list[tuple[Any, ...]] = []
        for batch in self.table(name):
            have = set(batch.schema.names)
            values = [batch.column(c).to_pylist() if c in have else [None] * batch.num_rows for c in columns]
            out += zip(*values, strict=True)
        return out

    @property
    def waiting(self) -> int:
        """How many sessions wait for a lock."""
        return sum(1 for session in self.sessions.values() if session.waiter is not None)

    # --- what a world does -----------------------------------------------------------------------------------------

    def connection_lost(self, node: str) -> None:
        """The node is gone, and its kernel or a keepalive says so: its transactions are rolled back.

        A request still on its way comes before the end of its connection, and is served.
        """
        for session in [s for s in self.sessions.values() if s.node == node]:
            if session.flying > 0:
                session.hung_up = True
                self.air.later(HANGUP_S, self.end, session)
            else:
                self.end(session)

    def kill_pool(self) -> None:
        """Every session is ended by the server; its client hears of it at its next call."""
        for session in sorted(self.sessions.values(), key=lambda s: s.waiter is None):  # nobody gains by another's end
            self.end(session, Transient("terminating connection due to administrator command (SQLSTATE 57P01)"))

    def reap(self, session: Session) -> None:
        """A session was idle in its transaction for too long."""
        if session.alive:
            self.air.happened(session.node, "database.reap", str(session.number), "idle in transaction")
            self.end(session)

    def end(self, session: Session, error: Transient | None = None) -> None:
        """Roll back and forget; a request of it that waits is answered if there is an `error` to say."""
        if not session.alive:
            return
        session.alive = False
        self.sessions.pop(session.number, None)
        waiter, freed = session.waiter, []
        if waiter is not None:
            freed.append(self._unqueue(waiter))
        heard = session.failed
        freed += self._undo(session, 0)
        session.begun, session.failed = False, heard  # what its client was told last
        if waiter is not None and error is not None:
            waiter.fail(error)
        self._pump(freed)

    # --- statements ------------------------------------------------------------------------------------------------

    def open(self, node: str) -> Session:
        self._numbers += 1
        session = self.sessions[self._numbers] = Session(node, self._numbers)
        return session

    def serve(self, session: Session, steps: Steps, reply: Reply, fail: Fail) -> None:
        """Run a statement, now and, where it has to wait, on."""
        now = self.air.now()
        session.active, session.begun = now, True
        if not self._sweeping:
            self._sweeping = True
            self.air.later(IDLE_S, self._sweep)

        def go() -> None:
            try:
                key, mode = next(steps)
            except StopIteration as done:
                session.active = self.air.now()
                reply(done.value)
            except ThalwegError as error:
                session.active = self.air.now()
                freed = self._failed(session)
                fail(error)
                self._pump(freed)
            else:
                self._queue(Waiter(session, key, mode, go, fail, steps))

        go()

    def commit(self, session: Session, reply: Reply, fail: Fail) -> None:
        """All of it, in this step."""
        if self.full and session.rows:
            freed = self._undo(session, 0)
            session.begun = False
            fail(Transient("disk full (SQLSTATE 53100)"))
            self._pump(freed)
            return
        tables = self._apply(session)
        cover = list(session.cover.items())
        freed = [entry[1] for entry in session.log if entry[0] == "lock"]
        for key in freed:
            self._released(session, key)
        self._forget(session)
        session.begun = False
        if self._observe is not None:
            for name, batches in tables.items():
                self._observe("rows", (name, batches))
            for (scope, partition, sink), ranges in cover:
                self._observe("ranges", (scope, partition, sink, ranges))
        reply(None)
        self._pump(freed)

    def rollback(self, session: Session) -> None:
        freed = self._undo(session, 0)
        session.begun = False
        self._pump(freed)

    def _apply(self, session: Session) -> dict[str, list[pa.RecordBatch]]:
        for piece, row in session.superseded:
            piece.without(row)
        written: dict[str, list[pa.RecordBatch]] = {}
        for table, piece in session.rows:
            table.pieces.append(piece)
            written.setdefault(table.name, []).append(piece.rows)
        for entry in session.log:
            if entry[0] == "key":
                _, index, key, _ = entry
                pending = index.pending.pop(key, None)  # None: a key that was touched twice
                if pending is not None and pending[1] is not None:
                    index.taken[key] = pending[1]
                elif pending is not None:
                    index.taken.pop(key, None)
        self.coverage.update(session.cover)
        return written

    @staticmethod
    def _forget(session: Session) -> None:
        session.failed = False
        session.log, session.savepoints, session.cover = [], {}, {}
        session.rows, session.superseded = [], []

    def _undo(self, session: Session, mark: int) -> list[Key]:
        """Back to the log's length `mark`; the keys of the locks freed by it."""
        freed: list[Key] = []
        log = session.log
        while len(log) > mark:
            match log.pop():
                case ("lock", key):
                    self._released(session, key)
                    freed.append(key)
                case ("cover", key, None):
                    del session.cover[key]
                case ("cover", key, before):
                    session.cover[key] = before
                case ("rows",):
                    session.rows.pop()
                case ("superseded",):
                    session.superseded.pop()
                case ("key", index, key, None):
                    del index.pending[key]
                case ("key", index, key, entry):
                    index.pending[key] = entry
        if mark == 0:
            self._forget(session)
        return freed

    def _failed(self, session: Session) -> list[Key]:
        """A statement failed: what came since the innermost savepoint is undone now, not when somebody asks for it."""
        mark = list(session.savepoints.values())[-1] if session.savepoints else 0
        kept = session.savepoints
        freed = self._undo(session, mark)
        session.savepoints, session.failed = kept, True
        return freed

    def fail(self, session: Session) -> None:
        """As if a statement had failed: an error that the Air chose."""
        if session.alive:
            self._pump(self._failed(session))

    def _sweep(self) -> None:
        now, oldest = self.air.now(), None
        for session in list(self.sessions.values()):
            if not session.begun or session.waiter is not None:
                continue
            if now - session.active >= IDLE_S:
                self.reap(session)
            else:
                oldest = session.active if oldest is None else min(oldest, session.active)
        if oldest is None and not any(s.waiter is not None for s in self.sessions.values()):
            self._sweeping = False
        else:
            self.air.later(max(0.001, IDLE_S if oldest is None else oldest + IDLE_S - now), self._sweep)

    # --- locks -----------------------------------------------------------------------------------------------------

    def _lock(self, session: Session, key: Key, mode: str) -> Steps:
        lock = self.locks.get(key)
        if lock is None:
            lock = self.locks[key] = Lock()
        elif (session, mode) in lock.holders:
            return
        elif not self._grantable(lock, session, mode, lock.queue):
            yield key, mode  # whoever resumes this has granted it
            return
        self._grant(lock, session, key, mode)

    @staticmethod
    def _grant(lock: Lock, session: Session, key: Key, mode: str) -> None:
        lock.holders.append((session, mode))
        session.log.append(("lock", key))

    @staticmethod
    def _grantable(lock: Lock, session: Session, mode: str, ahead: Iterable[Waiter]) -> bool:
        bad = _CONFLICTS[mode]
        if any(other is not session and held in bad for other, held in lock.holders):
            return False
        mine = [held for other, held in lock.holders if other is session]
        # Who holds what an earlier waiter wants goes before it.
        return not any(w.mode in bad and not any(held in _CONFLICTS[w.mode] for held in mine) for w in ahead)

    def _released(self, session: Session, key: Key) -> None:
        """Give back the lock taken last under this key."""
        lock = self.locks[key]
        at = max(i for i, (holder, _) in enumerate(lock.holders) if holder is session)
        del lock.holders[at]
        if not lock.holders and not lock.queue:
            del self.locks[key]

    def _queue(self, waiter: Waiter) -> None:
        waiter.session.waiter = waiter
        self.locks[waiter.key].queue.append(waiter)
        self.air.later(DEADLOCK_S, self._deadlock, waiter)
        self.air.later(LOCK_TIMEOUT_S, self._lock_timeout, waiter)

    def _unqueue(self, waiter: Waiter) -> Key:
        waiter.session.waiter = None
        waiter.steps.close()
        lock = self.locks[waiter.key]
        lock.queue.remove(waiter)
        if not lock.holders and not lock.queue:
            del self.locks[waiter.key]
        return waiter.key

    def _pump(self, keys: Iterable[Key]) -> None:
        """Grant what can be granted, first come, first served."""
        for key in dict.fromkeys(keys):
            while (waiter := self._next(key)) is not None:
                self.locks[key].queue.remove(waiter)
                waiter.session.waiter = None
                self._grant(self.locks[key], waiter.session, key, waiter.mode)
                waiter.go()

    def _next(self, key: Key) -> Waiter | None:
        lock = self.locks.get(key)
        if lock is None:
            return None
        ahead: list[Waiter] = []
        for waiter in lock.queue:
            if self._grantable(lock, waiter.session, waiter.mode, ahead):
                return waiter
            ahead.append(waiter)
        return None

    def _lock_timeout(self, waiter: Waiter) -> None:
        if waiter.session.waiter is waiter:
            self._give_up(waiter, "canceling statement due to lock timeout (SQLSTATE 55P03)")

    def _deadlock(self, waiter: Waiter) -> None:
        if waiter.session.waiter is waiter and self._waits_for(waiter.session, waiter.session, set()):
            self._give_up(waiter, "deadlock detected (SQLSTATE 40P01)")

    def _give_up(self, waiter: Waiter, why: str) -> None:
        key = self._unqueue(waiter)
        freed = self._failed(waiter.session)
        waiter.fail(Transient(why))
        self._pump([key, *freed])

    def _waits_for(self, session: Session, wanted: Session, seen: set[int]) -> bool:
        waiter = session.waiter
        if waiter is None or session.number in seen:
            return False
        seen.add(session.number)
        lock, bad = self.locks[waiter.key], _CONFLICTS[waiter.mode]
        before = [holder for holder, held in lock.holders if held in bad and holder is not session]
        for other in lock.queue:
            if other is waiter:
                break
            if other.mode in bad:
                before.append(other.session)
        return any(other is wanted or self._waits_for(other, wanted, seen) for other in before)

    # --- coverage and documents ------------------------------------------------------------------------------------

    def _must_be_usable(self, session: Session) -> None:
        if session.failed:
            raise Permanent("current transaction is aborted (SQLSTATE 25P02)")

    def _must_be_covered(self) -> None:
        if not self.covered:
            raise Permanent("the coverage table does not exist (SQLSTATE 42P01)")

    def lock_ranges(self, session: Session, key: Key) -> Steps:
        self._must_be_usable(session)
        self._must_be_covered()
        yield from self._lock(session, ("cover", *key), ROW)
        return self._held(session, key)

    def _held(self, session: Session, key: Key) -> RangeSet:
        """What the locked row holds, for its holder; the row is made if absent."""
        found = session.cover.get(key)
        if found is None:
            found = self.coverage.get(key)
        if found is None:
            session.log.append(("cover", key, None))
            found = session.cover[key] = NOTHING
        return found

    def put_ranges(self, session: Session, key: Key, ranges: RangeSet) -> Steps:
        self._must_be_usable(session)
        self._must_be_covered()
        if any(not -INT8_MAX - 1 <= end <= INT8_MAX for span in ranges for end in span):
            raise DataRefused("value is out of range for type bigint", code="sqlstate-22003")
        yield from self._lock(session, ("cover", *key), ROW)
        before = self._held(session, key)
        session.log.append(("cover", key, session.cover.get(key)))
        session.cover[key] = before | ranges

    def ranges(self, scope: str, partition: str) -> dict[str, RangeSet]:
        self._must_be_covered()
        found = [(k[2], v) for k, v in self.coverage.items() if k[0] == scope and k[1] == partition]
        return dict(sorted(found))

    def partitions(self, scope: str) -> list[str]:
        self._must_be_covered()
        return sorted(partition for of, partition in self.documents if of == scope)

    def get_document(self, scope: str, partition: str) -> tuple[str, int] | None:
        self._must_be_covered()
        return self.documents.get((scope, partition))

    def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        self._must_be_covered()
        found = self.documents.get((scope, partition))
        if (0 if found is None else found[1]) != version:
            raise Stale(f"checkpoint of {partition} has changed")
        self.documents[scope, partition] = body, version + 1
        if self._observe is not None:
            self._observe("document", (scope, partition, body))
        return version + 1

    # --- savepoints ------------------------------------------------------------------------------------------------

    def savepoint(self, session: Session, number: int) -> Steps:
        self._must_be_usable(session)
        session.savepoints[number] = len(session.log)
        yield from ()

    def rollback_to(self, session: Session, number: int) -> Steps:
        mark = self._savepoint(session, number)
        kept = {name: at for name, at in session.savepoints.items() if name <= number}
        freed = self._undo(session, mark)
        session.savepoints, session.failed = kept, False
        self._pump(freed)
        yield from ()

    def release(self, session: Session, number: int) -> Steps:
        self._must_be_usable(session)
        self._savepoint(session, number)
        session.savepoints = {name: at for name, at in session.savepoints.items() if name < number}
        yield from ()

    def _savepoint(self, session: Session, number: int) -> int:
        if number not in session.savepoints:
            raise Permanent(f"savepoint s{number} does not exist (SQLSTATE 3B001)")
        return session.savepoints[number]

    # --- rows ------------------------------------------------------------------------------------------------------

    def usable(self, session: Session) -> Steps:
        """A statement that changes nothing."""
        self._must_be_usable(session)
        yield from ()

    def columns(self, session: Session, name: str) -> Steps:
        self._must_be_usable(session)
        table = self.tables.get(name)
        yield from ()
        return {} if table is None else dict(table.types)

    def validate(self, rows: pa.RecordBatch, types: Mapping[str, str], table: str) -> None:
        """As the adapter does before anything is sent; once for each batch object."""
        known = self._validated.get(id(rows))
        if known is None or known[0] is not rows or known[1] != types:
            refused = None
            try:
                encoded(rows, types, table)
            except RowsRefused as error:
                refused = error
            if len(self._validated) >= VALIDATED_MAX:
                self._validated.clear()
            known = self._validated[id(rows)] = rows, types, refused
        if known[2] is not None:
            raise RowsRefused(known[2].rows, where=known[2].where)

    def _table(self, name: str, columns: Iterable[str]) -> Table:
        table = self.tables.get(name)
        if table is None:
            raise Permanent(f"relation {name} does not exist (SQLSTATE 42P01)")
        for column in columns:
            if column not in table.types:
                raise Permanent(f"column {column} does not exist (SQLSTATE 42703)")
        return table

    def _must_have_room(self) -> None:
        if self.full:
            raise Transient("disk full (SQLSTATE 53100)")

    def copy(self, session: Session, name: str, rows: pa.RecordBatch) -> Steps:
        self._must_be_usable(session)
        table = self._table(name, rows.schema.names)
        yield from self._lock(session, ("table", name), WRITE)
        self._must_have_room()
        piece = Piece(rows)
        unique = [(i, index, index.keys(rows, table.types)) for i, index in enumerate(table.indexes) if index.unique]
        if unique:
            for row in range(rows.num_rows):
                for i, index, keys in unique:
                    key = keys[row]
                    if key is not None:
                        yield from self._take(session, table, i, index, key, (piece, row), row)
        self._append(session, table, piece)

    @staticmethod
    def _append(session: Session, table: Table, piece: Piece) -> None:
        session.rows.append((table, piece))
        session.log.append(("rows",))

    def _take(self, session: Session, table: Table, number: int, index: Index, key: Key, place: Place, row: int) -> Steps:
        """A key for one row: wait for whoever is about to take it or to give it up, then see."""
        yield from self._lock(session, ("key", table.name, number, key), ROW)
        if self._there(index, key) is not None:
            raise DataRefused(f"duplicate key in {table.name}", code="sqlstate-23505", row=row)
        self._pend(session, index, key, place)

    @staticmethod
    def _there(index: Index, key: Key) -> Place | None:
        """The row of a key, as its lock's holder sees it."""
        pending = index.pending.get(key)
        return index.taken.get(key) if pending is None else pending[1]

    @staticmethod
    def _pend(session: Session, index: Index, key: Key, place: Place | None) -> None:
        session.log.append(("key", index, key, index.pending.get(key)))
        index.pending[key] = session, place

    def stage(self, session: Session, name: str, columns: Sequence[str]) -> Steps:
        """The staging table of a merge."""
        self._must_be_usable(session)
        yield from self._lock(session, ("table", name), READ)
        self._table(name, columns)

    def merge(self, session: Session, name: str, rows: pa.RecordBatch, keys: Sequence[str], update: bool) -> Steps:
        self._must_be_usable(session)
        table = self._table(name, rows.schema.names)
        arbiter = next((i for i in table.indexes if i.unique and sorted(i.columns) == sorted(keys)), None)
        if arbiter is None:
            raise Permanent("no unique constraint matches the ON CONFLICT specification (SQLSTATE 42P10)")
        self._must_have_room()
        yield from self._lock(session, ("table", name), WRITE)
        number, mark = table.indexes.index(arbiter), len(session.log)
        wanted = arbiter.keys(rows, table.types)
        last = {key: row for row, key in enumerate(wanted) if key is not None}
        changed = [column for column in rows.schema.names if column not in keys]
        others = [(i, x, x.keys(rows, table.types)) for i, x in enumerate(table.indexes) if x.unique and x is not arbiter]
        plan: list[tuple[int, Place | None]] = []  # row, and what it takes the place of
        piece = Piece(rows)
        for key in _sorted(last):
            row = last[key]
            yield from self._lock(session, ("key", name, number, key), ROW)
            old = self._there(arbiter, key)
            if old is not None and not (update and changed):
                continue
            self._pend(session, arbiter, key, (piece, row))
            for i, index, its in others:
                yield from self._moved(session, table, i, index, its[row], old, (piece, row), changed)
            if old is not None:
                session.superseded.append(old)
                session.log.append(("superseded",))
            plan.append((row, old))
        plan.sort(key=lambda entry: entry[0])
        piece.batch = _merged_rows(rows, plan)
        self._renumber(session.log[mark:], piece, [row for row, _ in plan])
        if plan:
            self._append(session, table, piece)

    def _moved(
        self, session: Session, table: Table, number: int, index: Index, key: Key | None, old: Place | None, place: Place,
        changed: Sequence[str],
    ) -> Steps:  # fmt: skip
        """Another unique index, of a row that is inserted or takes the place of `old`."""
        if old is not None:
            before = index.keys(old[0].batch.slice(old[1], 1), table.types)[0]
            if not set(index.columns) & set(changed):
                key = before
            if before is not None:
                yield from self._lock(session, ("key", table.name, number, before), ROW)
                self._pend(session, index, before, None)
        if key is not None:
            yield from self._take(session, table, number, index, key, place, -1)

    @staticmethod
    def _renumber(entries: Iterable[tuple[Any, ...]], piece: Piece, kept: Sequence[int]) -> None:
        """The piece holds only the rows that were taken: say so where its places are noted."""
        now = {row: at for at, row in enumerate(kept)}
        indexes = {(id(entry[1]), entry[2]): entry[1] for entry in entries if entry[0] == "key"}
        for (_, key), index in indexes.items():
            session, place = index.pending[key]
            if place is not None and place[0] is piece:
                index.pending[key] = session, (piece, now[place[1]])

    # --- tables ----------------------------------------------------------------------------------------------------

    def ensure_table(
        self, session: Session, name: str, wanted: Mapping[str, str], unique: Sequence[str], index: Sequence[str]
    ) -> Steps:
        yield from self._lock(session, ("ddl",), ROW)
        table = self.tables.get(name)
        missing = [column for column in wanted if table is not None and column not in table.types]
        if strange := [column for column in (wanted if table is None else missing) if column in _SYSTEM or not column]:
            raise Permanent(f"{strange[0]!r} is no name for a column (SQLSTATE 42701)")
        if table is None:
            table, missing = Table(name), list(wanted)
        elif missing:
            yield from self._lock(session, ("table", name), ALTER)
        new: list[Index] = []
        for keys, is_unique in ((unique, True), (index, False)):
            if keys and not _has_index([*table.indexes, *new], keys, is_unique):
                new.append(Index(tuple(keys), is_unique))
        if new and name in self.tables:
            yield from self._lock(session, ("table", name), SHARE)
        types = {**table.types, **{column: wanted[column] for column in missing}}
        for made in new:
            self._build(table, made, types)
        # Nothing waits and nothing fails from here on.
        table.types = types
        table.indexes = [*table.indexes, *new]
        self.tables[name] = table
        return dict(types)

    @staticmethod
    def _build(table: Table, index: Index, types: Mapping[str, str]) -> None:
        for column in index.columns:
            if column not in types:
                raise Permanent(f"column {column} does not exist (SQLSTATE 42703)")
            if types[column] == "json":
                raise Permanent("data type json has no default operator class (SQLSTATE 42704)")
        if not index.unique:
            return
        for piece in table.pieces:
            gone = piece.gone or ()
            for row, key in enumerate(index.keys(piece.batch, types)):
                if key is None or row in gone:
                    continue
                if key in index.taken:
                    raise DataRefused(f"could not create unique index on {table.name}", code="sqlstate-23505")
                index.taken[key] = piece, row


def _named(name: str | TableName) -> str:
    return str(name).removeprefix("public.")


def _has_index(indexes: Iterable[Index], keys: Sequence[str], unique: bool) -> bool:
    if unique:
        return any(i.unique and sorted(i.columns) == sorted(keys) for i in indexes)
    return any(list(i.columns[: len(keys)]) == list(keys) for i in indexes)


def _sorted(keys: Iterable[Key]) -> list[Key]:
    """As `distinct on` brings them; where Python does not know their order, as they came."""
    found = list(keys)
    try:
        return sorted(found)
    except TypeError:
        return found


def _merged_rows(rows: pa.RecordBatch, plan: Sequence[tuple[int, Place | None]]) -> pa.RecordBatch:
    """The rows of a merge as they are stored: what takes another's place keeps the columns that it does not name."""
    if len(plan) == rows.num_rows and all(old is None for _, old in plan):
        return rows
    taken = rows.take(pa.array([row for row, _ in plan], pa.int64()))
    kept: dict[str, pa.DataType] = {}
    for _, old in plan:
        if old is not None:
            kept.update({f.name: f.type for f in old[0].batch.schema if f.name not in rows.schema.names})
    for name, kind in kept.items():
        values = [
            None if old is None or name not in old[0].batch.schema.names else old[0].batch.column(name)[old[1]].as_py()
            for _, old in plan
        ]
        taken = taken.append_column(name, pa.array(values, kind))
    return taken


# --- a node's handle ----------------------------------------------------------------------------------------------

_FAILS: Final = frozenset(fate.label for fate in (REFUSED, DISK_FULL, SERIALIZATION))
"""Fates that are an error of a statement: the connection goes on."""

_ENDS: Final = frozenset(fate.label for fate in (CONNECTION_KILLED, NEVER_ARRIVED))
"""Fates that are the end of a connection, of which the server knows."""


class _Line:
    """One connection, as its client has it."""

    __slots__ = ("broken", "session")

    def __init__(self, session: Session) -> None:
        self.session, self.broken = session, False


class PostgresTwin(Database):
    """One node's handle on the database."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, server: Server, wire: Wire, identity: str = "10.0.0.1:5432/thalweg") -> None:
        self._server, self._wire, self._identity = server, wire, identity
        self.identity = ""
        self._idle: list[_Line] = []
        self._columns: dict[str, dict[str, str]] = {}
        self._covered = self._closed = False

    # --- connections -----------------------------------------------------------------------------------------------

    async def acquire(self) -> _Line:
        if self._idle:
            return self._idle.pop()
        session = await self._wire.call("begin", lambda: self._server.open(self._wire.node))
        self.identity = self._identity
        return _Line(session)

    async def ask(
        self, line: _Line, operation: str, work: Callable[[Reply, Fail], None], *, detail: str = "", changes: bool = False
    ) -> Any:
        """One round trip on a connection. Errors of the server leave it usable, anything else breaks it."""
        session, server = line.session, self._server
        if line.broken:
            raise Transient("the connection is closed", where=self._wire.where)
        flying, said = True, False

        def arrive(reply: Reply, fail: Fail) -> None:
            nonlocal flying
            flying = False
            session.flying -= 1

            def refused(error: BaseException) -> None:
                nonlocal said
                said = session.alive
                if isinstance(error, ThalwegError):
                    error.where = error.where or self._wire.where
                fail(error)
                if session.hung_up:
                    server.end(session)

            def replied(result: Any) -> None:
                reply(result)
                if session.hung_up:
                    server.end(session)

            if session.alive:
                work(replied, refused)
            else:
                refused((Ambiguous if operation == "commit" else Transient)("the server closed the connection"))

        session.flying += 1
        try:
            return await self._wire.ask(operation, arrive, detail=detail, changes=changes)
        except ThalwegError as error:
            if flying:
                session.flying -= 1
            if not said:
                if error.what in _FAILS:
                    server.fail(session)
                elif error.what in _ENDS:
                    line.broken = True
                    server.end(session)
                else:
                    line.broken = True
            raise

    async def keep(self, line: _Line) -> None:
        if line.broken or self._closed or len(self._idle) >= IDLE_MAX:
            self.hang_up(line)
        else:
            self._idle.append(line)

    def hang_up(self, line: _Line) -> None:
        """Close a connection. Nobody waits for the server to hear of it, and it may not."""
        session, server = line.session, self._server
        line.broken = True

        def ended(reply: Reply, fail: Fail) -> None:
            server.end(session)
            reply(None)

        if session.alive:
            self._wire.ask("terminate", ended)

    async def roll_back(self, line: _Line) -> None:
        def work(reply: Reply, fail: Fail) -> None:
            self._server.rollback(line.session)
            reply(None)

        await self.ask(line, "rollback", work)

    async def leave(self, line: _Line, begun: bool, error: BaseException | None) -> None:
        """Give a connection back after a transaction that is over, or rolls back now."""
        if error is None:
            if begun and not line.broken:
                await self.roll_back(line)
            await self.keep(line)
        elif isinstance(error, Permanent):
            try:
                if begun or line.broken:
                    await self.roll_back(line)
            except ThalwegError:
                self.hang_up(line)
            else:
                await self.keep(line)
        else:
            broken = line.broken
            self.hang_up(line)
            if broken:  # a server that went away took the others along
                while self._idle:
                    self.hang_up(self._idle.pop())

    async def _short(
        self, operation: str, apply: Callable[[], Any], *, detail: str = "", changes: bool = False, texts: Sequence[str] = ()
    ) -> Any:
        """A short transaction of one statement, committed with it."""

        def work(reply: Reply, fail: Fail) -> None:
            try:
                result = apply()
            except ThalwegError as error:
                fail(error)
            else:
                reply(result)

        return await self._served(operation, lambda _: work, detail, changes, texts)

    async def _served(
        self,
        operation: str,
        work: Callable[[_Line], Callable[[Reply, Fail], None]],
        detail: str,
        changes: bool,
        texts: Sequence[str] = (),
    ) -> Any:
        line = await self.acquire()
        try:
            self.must_be_text(*texts)
            result = await self.ask(line, operation, work(line), detail=detail, changes=changes)
        except BaseException as error:
            await self.leave(line, line.session.begun, error)
            raise
        await self.keep(line)
        return result

    def must_be_text(self, *texts: str) -> None:
        for text in texts:
            if "\x00" in text:
                raise Permanent("PostgreSQL text fields cannot contain NUL (0x00) bytes", where=self._wire.where)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return _Opening(self)

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            self.hang_up(self._idle.pop())

    # --- tables ----------------------------------------------------------------------------------------------------

    async def ensure_table(
        self, table: TableName, columns: pa.Schema, *, unique: Sequence[str] = (), index: Sequence[str] = ()
    ) -> None:
        wanted = {f.name: _ddl_type(f.type) for f in columns}
        for name in (table.schema, table.name, *wanted):
            if len(name.encode()) > NAME_BYTES_MAX or "\x00" in name:
                raise Permanent(f"{name!r} is no name for Postgres", where=self._wire.where)
        server, name = self._server, _named(table)

        def work(line: _Line) -> Callable[[Reply, Fail], None]:
            def run(reply: Reply, fail: Fail) -> None:
                session = line.session

                def created(types: Any) -> None:
                    server.commit(session, lambda _: reply(types), fail)

                def refused(error: BaseException) -> None:
                    fail(error)
                    server.rollback(session)

                server.serve(session, server.ensure_table(session, name, wanted, unique, index), created, refused)

            return run

        try:
            now = await self._served("ensure_table", work, name, True)
        except Ambiguous as error:
            raise Transient(error.what, where=error.where) from None
        for f in columns:
            if not _holds(now[f.name], f.type):
                raise Permanent(f"column {f.name} of table {table} is {now[f.name]}, which cannot hold {f.type}")
        self._columns[name] = now

    async def column_types(self, line: _Line, name: str) -> Mapping[str, str]:
        """Types of a table's columns, as seen last."""
        if name not in self._columns:
            server, session = self._server, line.session
            self._columns[name] = await self.ask(
                line, "columns", lambda reply, fail: server.serve(session, server.columns(session, name), reply, fail)
            )
        return self._columns[name]

    def forget_columns(self, name: str) -> None:
        self._columns.pop(name, None)

    @property
    def server(self) -> Server:
        return self._server

    # --- coverage --------------------------------------------------------------------------------------------------

    async def ensure_coverage(self) -> None:
        def apply() -> None:
            self._server.covered = True

        if not self._covered:
            await self._short("ensure_coverage", apply, changes=True)
            self._covered = True

    async def ranges(self, scope: str, partition: str) -> Mapping[str, RangeSet]:
        found: Mapping[str, RangeSet] = await self._short(
            "ranges", lambda: self._server.ranges(scope, partition), detail=partition, texts=(scope, partition)
        )
        return found

    async def partitions(self, scope: str) -> Sequence[str]:
        found: Sequence[str] = await self._short("partitions", lambda: self._server.partitions(scope), texts=(scope,))
        return found

    async def get_document(self, scope: str, partition: str) -> tuple[str, int] | None:
        found: tuple[str, int] | None = await self._short(
            "get_document", lambda: self._server.get_document(scope, partition), detail=partition, texts=(scope, partition)
        )
        return found

    async def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        found: int = await self._short(
            "put_document", lambda: self._server.put_document(scope, partition, body, version),
            detail=partition, changes=True, texts=(scope, partition, body),
        )  # fmt: skip
        return found


class _Opening:
    """A transaction's context."""

    __slots__ = ("_transaction", "_twin")

    def __init__(self, twin: PostgresTwin) -> None:
        self._twin = twin

    async def __aenter__(self) -> Transaction:
        self._transaction = TwinTransaction(self._twin, await self._twin.acquire())
        return self._transaction

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._twin.leave(self._transaction.line, self._transaction.begun, error)


@dataclass(eq=False)
class TwinTransaction:
    """One transaction on one connection."""

    _twin: PostgresTwin
    line: _Line
    begun: bool = False
    _savepoints: int = 0
    _strict: bool = False
    _about: str = field(default="", repr=False)  # the partition locked first, or the table: names the commit

    async def _run(self, operation: str, steps: Steps, *, detail: str = "", changes: bool = False) -> Any:
        server, session = self._twin.server, self.line.session
        self.begun = True
        try:
            return await self._twin.ask(
                self.line,
                operation,
                lambda reply, fail: server.serve(session, steps, reply, fail),
                detail=detail,
                changes=changes,
            )
        except Ambiguous as error:  # nothing of it is durable before the commit
            raise Transient(error.what, where=error.where) from None

    async def lock_ranges(self, scope: str, partition: str, sink: str) -> RangeSet:
        self._about = self._about or partition
        self._twin.must_be_text(scope, partition, sink)
        steps = self._twin.server.lock_ranges(self.line.session, (scope, partition, sink))
        found: RangeSet = await self._run("lock", steps, detail=partition)
        return found

    async def put_ranges(self, scope: str, partition: str, sink: str, ranges: RangeSet) -> None:
        self._twin.must_be_text(scope, partition, sink)
        steps = self._twin.server.put_ranges(self.line.session, (scope, partition, sink), ranges)
        await self._run("put_ranges", steps, detail=partition)

    async def _strictly(self) -> None:
        if not self._strict:
            self._strict = True
            await self._run("constraints", self._twin.server.usable(self.line.session))

    async def _validated(self, name: str, table: TableName, rows: pa.RecordBatch) -> None:
        await self._strictly()
        types = await self._twin.column_types(self.line, name)
        self._twin.server.validate(rows, types, str(table))

    async def copy(self, table: TableName, rows: pa.RecordBatch) -> None:
        name = _named(table)
        self._about = self._about or name
        await self._validated(name, table, rows)
        steps = self._twin.server.copy(self.line.session, name, rows)
        try:
            await self._run("copy", steps, detail=name, changes=True)
        except Permanent:
            self._twin.forget_columns(name)
            raise

    async def merge(self, table: TableName, rows: pa.RecordBatch, keys: Sequence[str], update: bool) -> None:
        name = _named(table)
        self._about = self._about or name
        _refuse_null_keys(rows, keys)
        server, session = self._twin.server, self.line.session
        await self._run("stage", server.stage(session, name, rows.schema.names), detail=name)
        await self._validated(name, table, rows)
        await self._run("merge", server.merge(session, name, rows, keys, update), detail=name, changes=True)

    async def savepoint(self) -> int:
        self._savepoints += 1
        self._strict = True
        await self._run("savepoint", self._twin.server.savepoint(self.line.session, self._savepoints))
        return self._savepoints

    async def rollback_to(self, savepoint: int) -> None:
        await self._run("rollback_to", self._twin.server.rollback_to(self.line.session, savepoint))

    async def release(self, savepoint: int) -> None:
        await self._run("release", self._twin.server.release(self.line.session, savepoint))

    async def commit(self) -> None:
        line, session, server = self.line, self.line.session, self._twin.server
        if line.broken:
            raise Ambiguous("commit: the connection is closed")
        if session.failed:
            raise Permanent("a statement of this transaction failed, so it cannot be committed")
        if not self.begun:
            return
        ended = False

        def work(reply: Reply, fail: Fail) -> None:
            nonlocal ended
            ended = True
            server.commit(session, reply, fail)

        try:
            await self._twin.ask(line, "commit", work, detail=self._about, changes=True)
        except Transient as error:
            if not ended and error.what in _FAILS:  # the Air refused it, so the server rolls back
                server.rollback(session)
                self.begun = False
            raise
        self.begun = False
