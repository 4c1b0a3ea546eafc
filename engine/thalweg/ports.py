"""The ports: every outside thing that the runtime awaits, in the language of that thing's own client.

An adapter translates one of these to an SDK, a fake stands in for it in memory. Neither decides: retries, rebalance
handling, ack order and conflict merging live in `runtime` and `core`, so that the simulator runs them too.

Every method may raise `Transient` (did not happen), `Ambiguous` (may have happened) or `Permanent`; further errors are
named at the method.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from thalweg.core.batch import Cursor, Partition
from thalweg.core.coverage import RangeSet

T = TypeVar("T")


@dataclass(frozen=True)
class Capabilities:
    """What a technology can promise; the plan refuses a role that a technology cannot hold."""

    durable: bool  # a returned write survives a power cut of everything but the store itself
    replayable: bool  # a source can be read again from an older cursor
    read_back: bool  # what was written can be read again by window
    idempotent: bool  # writing the same range or record twice leaves one


# --- time and CPU -------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Time. Sleeping and timeouts go through asyncio itself, so the event loop owns them."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...


class Compute(Protocol):
    """CPU work off the loop (inline in the simulator)."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)`, a pure function of its arguments, and return or raise what it does."""
        ...


# --- sources ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Records of one partition and the interval `[start, stop)` they claim. `batch` has the schema `ENVELOPE`."""

    part: Partition
    start: Cursor
    stop: Cursor
    batch: pa.RecordBatch

    @cached_property
    def size_bytes(self) -> int:
        """Arrow bytes of `batch`."""
        return int(self.batch.nbytes)


@dataclass(frozen=True)
class Position:
    """The cursor moved past positions that hold no record for us (markers, aborted or compacted offsets)."""

    part: Partition
    at: Cursor


@dataclass(frozen=True)
class Assigned:
    """Newly owned partitions; nothing is read until `start(token, …)`. `parts` may be empty: complete it all the same."""

    token: int
    parts: tuple[Partition, ...]


@dataclass(frozen=True)
class Revoked:
    """Partitions to be given up; still owned, commits still legal, until `release(token)`."""

    token: int
    parts: tuple[Partition, ...]


@dataclass(frozen=True)
class Lost:
    """Partitions already owned by somebody else. No token: there is nothing to complete."""

    parts: tuple[Partition, ...]


@dataclass(frozen=True)
class Adrift:
    """The broker no longer has the position asked for (`OFFSET_OUT_OF_RANGE`); the partition is not read until `seek`."""

    part: Partition
    at: Cursor


@dataclass(frozen=True)
class Ended:
    """A bounded partition was read to its end; `at` is its last cursor. Unbounded sources never send it."""

    part: Partition
    at: Cursor


Event: TypeAlias = Records | Position | Assigned | Revoked | Lost | Adrift | Ended


@dataclass(frozen=True)
class Bounds:
    """Log start and log end (the last stable offset for read_committed) of one partition, as cursors of its own kind."""

    low: Cursor
    high: Cursor


class LogConsumer(Protocol):
    """One member of a consumer group, or one reader of bounded files. See DESIGN section 7 in ARCHITECTURE.md.

    There are no callbacks. `poll` returns records *and* rebalance events; `Assigned` and `Revoked` carry a token which
    the runtime completes by `start` or `release`. Between a token and its completion no `Records` come, except those
    polled in the same call as the rebalance.
    """

    capabilities: Capabilities

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        """Events in order, [] when `wait_s` passed. Cancelling loses nothing: undelivered events come next time.

        Raises `Permanent` when the client is beyond help (authorisation, fatal error).
        """
        ...

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        """Complete an `Assigned`: read each of its partitions from the cursor given (all must be given)."""
        ...

    async def release(self, token: int) -> None:
        """Complete a `Revoked`. From here on the partitions are somebody else's."""
        ...

    async def seek(self, part: Partition, at: Cursor) -> None:
        """Go on from `at` in an owned partition (after `Adrift`)."""
        ...

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        """The group's stored cursor of each, None where there is none."""
        ...

    async def bounds(self, parts: Sequence[Partition], *, known: bool = False) -> Mapping[Partition, Bounds]:
        """Where each log begins and ends now. `known`: only what the client has heard lately, without asking; such
        partitions as it knows nothing of are left out.
        """
        ...

    async def commit(self, at: Mapping[Partition, Cursor]) -> None:
        """Store cursors; legal for owned partitions, between `Revoked` and `release` too.

        Raises `RefusedNow` (group is rebalancing; ownership unchanged), `Ambiguous`.
        """
        ...

    async def pause(self, parts: Sequence[Partition]) -> None:
        """Stop fetching; ownership is kept. Unknown or not owned partitions are ignored."""
        ...

    async def resume(self, parts: Sequence[Partition]) -> None:
        """Undo `pause`."""
        ...

    async def leave(self) -> None:
        """Leave the group. The caller keeps polling until the last `Revoked` has been answered."""
        ...

    async def close(self) -> None:
        """Free the client. Idempotent; without `leave` before, it is a crash as far as the group is concerned."""
        ...


# --- object store -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An object's body and the version to name in a compare-and-swap."""

    body: bytes
    version: str


@dataclass(frozen=True)
class Listed:
    """One entry of a listing: key relative to the store's root, size in bytes, version (as `Stored.version`)."""

    key: str
    size: int
    version: str


class ObjectStore(Protocol):
    """Keys are relative, `/`-separated. A returned put is durable and seen by every later get and list."""

    capabilities: Capabilities
    url: str  # without credentials, for messages and for telling two stores apart

    async def get(self, key: str) -> Stored | None:
        """The object, None where there is none."""
        ...

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        """Put if absent; returns the version. Raises `Exists`."""
        ...

    async def replace(self, key: str, body: bytes, version: str) -> str:
        """Put if `version` is still current; returns the new one. Raises `Stale` (also when the key is gone)."""
        ...

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        """Objects whose key starts with `prefix` and sorts after `after`, in key order, whole (pages are joined)."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; no error where there is none."""
        ...

    async def close(self) -> None: ...


# --- relational store ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableName:
    """A table: schema ("" for the default) and name, unquoted."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


class Transaction(Protocol):
    """One open transaction. Leaving its context without `commit` rolls back."""

    async def lock_ranges(self, scope: str, partition: str, sink: str) -> RangeSet:
        """Lock the coverage row of (scope = pipeline, partition slug, sink), made empty if absent; what it holds."""
        ...

    async def put_ranges(self, scope: str, partition: str, sink: str, ranges: RangeSet) -> None:
        """Union `ranges` into the locked row, in one statement."""
        ...

    async def copy(self, table: TableName, rows: pa.RecordBatch) -> None:
        """Append `rows` by binary COPY, columns by name. Raises `RowsRefused` for rows that cannot be encoded (nothing was
        sent), `DataRefused` for a refusal by the server (the transaction is usable again after `rollback_to`).
        """
        ...

    async def merge(self, table: TableName, rows: pa.RecordBatch, keys: Sequence[str], update: bool) -> None:
        """Through a staging table: insert rows whose `keys` are new; where they exist, update or (not `update`) leave."""
        ...

    async def savepoint(self) -> int:
        """A point to return to."""
        ...

    async def rollback_to(self, savepoint: int) -> None:
        """Undo everything since; the savepoint can be used again."""
        ...

    async def release(self, savepoint: int) -> None:
        """Forget a savepoint, keeping what came after it. Thousands of open ones would make the server slow."""
        ...

    async def commit(self) -> None:
        """Raises `Ambiguous` when the reply was lost."""
        ...


class Database(Protocol):
    """A relational store."""

    capabilities: Capabilities
    identity: str  # host, port and database as the *server* knows them, without credentials; "" before `ensure_table`

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Begin, read committed. Raises `Transient` where no connection can be had, `Permanent` on a wrong password."""
        ...

    async def ensure_table(
        self,
        table: TableName,
        columns: pa.Schema,
        *,
        unique: Sequence[str] = (),
        index: Sequence[str] = (),
    ) -> None:
        """Create the table, or add the columns it lacks (nullable). Raises `Permanent` naming a column that cannot hold ours.

        `unique` makes a unique index over those columns, `index` a plain one.
        """
        ...

    async def ensure_coverage(self) -> None:
        """Create the coverage table (`int8multirange`) if absent."""
        ...

    async def ranges(self, scope: str, partition: str) -> Mapping[str, RangeSet]:
        """Committed coverage of one partition: sink name to ranges. No lock."""
        ...

    async def partitions(self, scope: str) -> Sequence[str]:
        """Partition slugs that have coverage rows."""
        ...

    async def get_document(self, scope: str, partition: str) -> tuple[str, int] | None:
        """A checkpoint document (text, version) stored beside the ranges."""
        ...

    async def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        """Compare-and-swap of that document; `version` 0 means absent. Returns the new version; raises `Stale`."""
        ...

    async def close(self) -> None: ...


# --- schema registry ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegisteredSchema:
    """`kind` is AVRO, PROTOBUF or JSON; `text` the schema; `references` name -> text of what it imports, transitively."""

    kind: str
    text: str
    references: Mapping[str, str]


class SchemaRegistry(Protocol):
    """A Confluent-compatible schema registry."""

    async def by_id(self, schema_id: int) -> RegisteredSchema | None:
        """None when the registry answers that there is no such id (the record's fault); `Transient` when it does not answer."""
        ...

    async def by_guid(self, guid: str) -> RegisteredSchema | None:
        """As `by_id`, for the 16-byte schema GUID of framing v1."""
        ...

    async def close(self) -> None: ...


# --- what a node is given -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outside:
    """All that a node may reach, handed over at its start. Worlds differ in nothing but this.

    Each factory is called once a node for each name in the topology.
    """

    clock: Clock
    compute: Compute
    consumer: Callable[[Any], LogConsumer]  # of a core.topology.Source
    objects: Callable[[str, Mapping[str, str]], ObjectStore]  # of URL and options
    database: Callable[[str], Database]  # of a connection string
    registry: Callable[[str, Mapping[str, str]], SchemaRegistry]
    rss_bytes: Callable[[], int]  # resident memory of this process
    release_memory: Callable[[], None]  # give freed memory back to the operating system
    report: Callable[..., None]  # structured event: report("sink.retry", sink=…, error=…)


__all__ = [
    "Adrift",
    "Assigned",
    "AsyncIterator",
    "Bounds",
    "Capabilities",
    "Clock",
    "Compute",
    "Database",
    "Ended",
    "Event",
    "Iterable",
    "Listed",
    "LogConsumer",
    "Lost",
    "ObjectStore",
    "Outside",
    "Position",
    "Records",
    "RegisteredSchema",
    "Revoked",
    "SchemaRegistry",
    "Stored",
    "TableName",
    "Transaction",
]
