"""A relational table as a sink.

Exactly once by range: the partition's coverage row is locked, what it covers already is trimmed away, the rest is
copied, the range united into the row, and all of it committed as one. A second try, a zombie, or a lost reply to the
commit finds the range covered and writes nothing. Rows of a DLQ or quarantine have an identity of their own instead,
since late ones come into intervals that were landed before.

Decides how a refusal by the server is narrowed to the guilty rows: by the row it names, else by halving, in savepoints.
A DLQ or quarantine has nowhere to send what it cannot take, so there a row is made to fit instead: U+0000 is spelled out
in its texts, a time that no table holds becomes null. Key, header values and payload stay byte for byte.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thalweg.core.batch import Chunk, Partition
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.dlq import dlq_key
from thalweg.core.stamp import stamped
from thalweg.core.topology import Role, Sink
from thalweg.errors import DataRefused, Permanent, RowRefusal, RowsRefused
from thalweg.ports import Compute, Database, TableName, Transaction

END: Final = 1 << 62  # beyond every position

HINTS_MAX: Final = 8  # rows removed one by one, as the server names them, before halving begins


def table_name(text: str) -> TableName:
    """`[schema.]table`, unquoted."""
    schema, _, name = text.rpartition(".")
    return TableName(schema, name)


def stamped_rows(prefix: str, chunk: Chunk) -> pa.RecordBatch:
    """The chunk's rows with their metadata columns, as one batch."""
    batches = [stamped(prefix, frame) for frame in chunk.frames]
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def joined_rows(chunk: Chunk) -> pa.RecordBatch:
    """The chunk's rows, as one batch; it has some."""
    return pa.concat_batches([frame.rows for frame in chunk.frames if frame.rows.num_rows])


class TableLander:
    """Lands chunks of one sink in one table."""

    def __init__(self, database: Database, compute: Compute, sink: Sink, scope: str, prefix: str) -> None:
        self._database, self._compute, self._sink, self._scope, self._prefix = database, compute, sink, scope, prefix
        self._table = table_name(sink.table)
        self._ready: list[pa.Schema] = []  # what the table is known to hold: few, unless a registry brings many
        self._aside = sink.role in (Role.DLQ, Role.QUARANTINE)
        self._updates = sink.idempotency == "key" and not self._aside

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
        try:
            await (self._land_aside(chunk) if self._aside else self._land_range(chunk))
        except (RowsRefused, DataRefused):
            raise
        except Permanent:
            self._ready.clear()  # whoever mends the table must not have to restart the node
            raise

    async def _land_range(self, chunk: Chunk) -> None:
        rows = await self._compute.run(stamped_rows, self._prefix, chunk)
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
        if chunk.rows == 0:
            return
        rows = await self._compute.run(joined_rows, chunk)
        await self._ensure(rows.schema)
        try:
            await self._merged_aside(rows)
        except RowsRefused as refused:
            await self._merged_aside(fitting(rows, np.array(sorted({r.row for r in refused.rows}))))

    async def _merged_aside(self, rows: pa.RecordBatch) -> None:
        async with self._database.transaction() as transaction:
            await self._write(transaction, rows, np.arange(rows.num_rows))
            await transaction.commit()

    async def _ensure(self, schema: pa.Schema) -> None:
        if any(known.equals(schema) for known in self._ready):
            return
        place = [f"{self._prefix}source_partition", f"{self._prefix}source_offset"]
        unique: list[str] = []
        if self._aside or self._sink.idempotency != "range":
            unique = list(self._keys(schema))
        await self._database.ensure_coverage()
        await self._database.ensure_table(self._table, schema, unique=unique, index=place)
        self._ready.append(schema)

    def _keys(self, schema: pa.Schema) -> tuple[str, ...]:
        if self._aside:
            return dlq_key(self._prefix)
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
        if self._sink.idempotency == "range" and not self._aside:
            await transaction.copy(self._table, rows)
        else:
            await transaction.merge(self._table, rows, self._keys(rows.schema), update=self._updates)

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
        """Left to right, keeping what was taken, so that a duplicate is blamed and not its first occurrence.

        A row the server names is set apart at once, so even a chunk of nothing but guilty rows costs one try a row.
        """
        guilty: list[RowRefusal] = []
        spans = [which]
        savepoint = await transaction.savepoint()
        while spans:
            span = spans.pop()
            refused = await self._tried(transaction, rows, span)
            if refused is None:
                await transaction.release(savepoint)
                savepoint = await transaction.savepoint()
                continue
            await transaction.rollback_to(savepoint)
            at = 0 if len(span) == 1 else refused.row
            if 0 <= at < len(span):
                guilty.append(RowRefusal(int(span[at]), refused.code, refused.what))
                before, after = span[:at], span[at + 1 :]
            else:
                before, after = span[:0], span
            middle = len(after) // 2
            spans += [part for part in (after[middle:], after[:middle], before) if len(part)]
        return guilty


def fitting(rows: pa.RecordBatch, which: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Set-aside rows with `which` of them made to fit: `\\u0000` for U+0000 in texts, null for their times."""
    mask = np.zeros(rows.num_rows, dtype=bool)
    mask[which] = True
    chosen = pa.array(mask)
    columns = []
    for column in rows.columns:
        if pa.types.is_string(column.type):
            column = pc.if_else(chosen, _spelled(column), column)
        elif pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), _spelled(column.flatten()), mask=column.is_null())
        elif pa.types.is_timestamp(column.type):
            column = pc.if_else(chosen, pa.scalar(None, column.type), column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _spelled(texts: pa.Array) -> pa.Array:
    return pc.replace_substring(texts, "\x00", "\\u0000")
