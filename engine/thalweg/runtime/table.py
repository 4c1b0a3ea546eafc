"""A relational table as a sink.

Exactly once by range: the partition's coverage row is locked, what it covers already is trimmed away, the rest is
copied, the range united into the row, and all of it committed as one. A second try, a zombie, or a lost reply to the
commit finds the range covered and writes nothing. Rows of a DLQ or quarantine have an identity of their own instead,
since late ones come into intervals that were landed before.

Decides how a refusal by the server is narrowed to the guilty rows: by the row it names, else by halving, in savepoints.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thalweg.core.batch import Chunk, Partition
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.dlq import dlq_key
from thalweg.core.stamp import stamped
from thalweg.core.topology import Role, Sink
from thalweg.errors import DataRefused, RowRefusal, RowsRefused
from thalweg.ports import Database, TableName, Transaction

END: Final = 1 << 62  # beyond every position

HINTS_MAX: Final = 8  # rows removed one by one, as the server names them, before halving begins


def table_name(text: str) -> TableName:
    """`[schema.]table`, unquoted."""
    schema, _, name = text.rpartition(".")
    return TableName(schema, name)


class TableLander:
    """Lands chunks of one sink in one table."""

    def __init__(self, database: Database, sink: Sink, scope: str, prefix: str) -> None:
        self._database, self._sink, self._scope, self._prefix = database, sink, scope, prefix
        self._table = table_name(sink.table)
        self._ready: pa.Schema | None = None
        self._aside = sink.role in (Role.DLQ, Role.QUARANTINE)

    async def open(self) -> None:
        await self._database.ensure_coverage()

    async def found(self, part: Partition, base: int, recorded: RangeSet) -> RangeSet:
        if self._aside:
            return NOTHING
        await self._database.ensure_coverage()  # an isolated sink may not have answered at `open`
        ranges = await self._database.ranges(self._scope, part.slug)
        return ranges.get(self._sink.name, NOTHING) & RangeSet([(base, END)])

    async def close(self) -> None:
        return

    async def land(self, chunk: Chunk, label: str = "") -> None:
        if self._aside:
            await self._land_aside(chunk)
            return
        batches = [stamped(self._prefix, frame) for frame in chunk.frames]
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        await self._ensure(rows.schema)
        async with self._database.transaction() as transaction:
            have = await transaction.lock_ranges(self._scope, chunk.partition.slug, self._sink.name)
            missing = have.gaps(chunk.start, chunk.stop)
            kept = self._missing_rows(rows, missing, chunk)
            if len(kept) < rows.num_rows:
                rows = rows.take(pa.array(kept))
            if rows.num_rows:
                await self._write(transaction, rows, kept)
            if missing:
                await transaction.put_ranges(self._scope, chunk.partition.slug, self._sink.name, missing)
            await transaction.commit()

    def _missing_rows(self, rows: pa.RecordBatch, missing: RangeSet, chunk: Chunk) -> npt.NDArray[np.int64]:
        """Indices of the rows whose positions are not covered yet, ascending."""
        if list(missing) == [(chunk.start, chunk.stop)]:
            return np.arange(rows.num_rows)
        at = rows.column(f"{self._prefix}source_offset").to_numpy()
        keep = np.zeros(rows.num_rows, dtype=bool)
        for start, stop in missing:
            keep[np.searchsorted(at, start) : np.searchsorted(at, stop)] = True
        return np.flatnonzero(keep)

    async def _land_aside(self, chunk: Chunk) -> None:
        rows = pa.concat_batches([frame.rows for frame in chunk.frames if frame.rows.num_rows])
        await self._ensure(rows.schema)
        async with self._database.transaction() as transaction:
            await transaction.merge(self._table, rows, dlq_key(self._prefix), update=False)
            await transaction.commit()

    async def _ensure(self, schema: pa.Schema) -> None:
        if self._ready is not None and self._ready.equals(schema):
            return
        place = [f"{self._prefix}source_partition", f"{self._prefix}source_offset"]
        unique: list[str] = []
        if self._aside:
            unique = list(dlq_key(self._prefix))
        elif self._sink.idempotency != "range":
            unique = list(self._keys(schema))
        await self._database.ensure_coverage()
        await self._database.ensure_table(self._table, schema, unique=unique, index=place)
        self._ready = schema

    def _keys(self, schema: pa.Schema) -> tuple[str, ...]:
        if self._sink.idempotency == "key":
            return self._sink.key
        child = f"{self._prefix}child"
        return (f"{self._prefix}record_id", *([child] if child in schema.names else []))

    async def _write(self, transaction: Transaction, rows: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> None:
        """Copy or merge; `numbers` are the rows' numbers in the chunk, for whoever must be told of a refusal."""
        savepoint = await transaction.savepoint()
        try:
            await self._send(transaction, rows)
        except RowsRefused as refused:
            raise RowsRefused([RowRefusal(int(numbers[r.row]), r.code, r.detail) for r in refused.rows]) from None
        except DataRefused as refused:
            guilty = await self._narrowed(transaction, savepoint, rows, refused)
            if not guilty:
                raise
            raise RowsRefused([RowRefusal(int(numbers[r.row]), r.code, r.detail) for r in guilty]) from None

    async def _send(self, transaction: Transaction, rows: pa.RecordBatch) -> None:
        if self._sink.idempotency == "range":
            await transaction.copy(self._table, rows)
        else:
            await transaction.merge(self._table, rows, self._keys(rows.schema), update=self._sink.idempotency == "key")

    async def _narrowed(
        self, transaction: Transaction, savepoint: int, rows: pa.RecordBatch, first: DataRefused
    ) -> list[RowRefusal]:
        """The rows without which the rest would be taken."""
        guilty: list[RowRefusal] = []
        left = np.arange(rows.num_rows)
        refused: DataRefused | None = first
        while refused is not None and 0 <= refused.row < len(left) and len(guilty) < HINTS_MAX:
            guilty.append(RowRefusal(int(left[refused.row]), refused.code, refused.what))
            left = np.delete(left, refused.row)
            await transaction.rollback_to(savepoint)
            refused = await self._tried(transaction, rows, left)
        if refused is not None:
            await transaction.rollback_to(savepoint)
            guilty += await self._halved(transaction, rows, left)
        return sorted(guilty, key=lambda r: r.row)

    async def _tried(self, transaction: Transaction, rows: pa.RecordBatch, which: npt.NDArray[np.int64]) -> DataRefused | None:
        if len(which) == 0:
            return None
        try:
            await self._send(transaction, rows.take(pa.array(which)))
        except DataRefused as refused:
            return refused
        return None

    async def _halved(self, transaction: Transaction, rows: pa.RecordBatch, which: npt.NDArray[np.int64]) -> list[RowRefusal]:
        """Left to right, keeping what was taken, so that a duplicate is blamed and not its first occurrence."""
        guilty: list[RowRefusal] = []
        spans = [which]
        while spans:
            span = spans.pop()
            savepoint = await transaction.savepoint()
            refused = await self._tried(transaction, rows, span)
            if refused is None:
                continue
            await transaction.rollback_to(savepoint)
            if len(span) == 1:
                guilty.append(RowRefusal(int(span[0]), refused.code, refused.what))
            else:
                middle = len(span) // 2
                spans += [span[middle:], span[:middle]]
        return guilty
