"""Files as a source: NDJSON, CSV and Parquet, local or in an object store, compressed or not.

Translates files to the consumer port: each file is one partition, assigned at the first poll, read one after another in
the order of their paths, each ending with `Ended`. Positions are byte offsets in the (decompressed) file, row numbers in
Parquet; they are kept by the runtime's checkpoints, so `commit` has nothing to do and `committed` knows nothing.

Framing finds record borders in a whole block at once; the bytes of a record are handed on as they are, without the line
end. A CSV header names the columns and travels in the schema's metadata. A byte-order mark belongs to no record.

A file is identified by size and modification time (or ETag): changed, it is another file. One that changes while it is
read is an error, for nobody can say what was read.
"""

from __future__ import annotations

import asyncio
import bz2
import csv
import gzip
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from thalweg.adapters.objects import matching, open_file
from thalweg.core.batch import ENVELOPE, Cursor, Partition, StoreCursor
from thalweg.core.topology import Source
from thalweg.errors import Permanent
from thalweg.ports import Assigned, Bounds, Capabilities, Compute, Ended, Event, Records, Revoked

T = TypeVar("T")

BLOCK_BYTES: Final = 4 << 20
RECORD_BYTES_MAX: Final = 128 << 20
BOM: Final = b"\xef\xbb\xbf"
END: Final = 1 << 62


class FileSource:
    """The files that `source.path` matches when it is first polled."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, source: Source, compute: Compute) -> None:
        self._source, self._compute = source, compute
        self._where = f"source {source.name}"
        self._parts: dict[Partition, str] = {}  # partition -> path
        self._identity: dict[Partition, str] = {}
        self._waiting: deque[tuple[Partition, int]] = deque()  # started, not yet read
        self._reader: Iterator[Records] | None = None
        self._current: Partition | None = None
        self._cut: deque[Records] = deque()
        self._pending: list[Event] = []
        self._paused: set[Partition] = set()
        self._token = 0
        self._changed = asyncio.Event()
        self.bytes_total = 0

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        if self._token == 0:
            self._token = 1
            await self._list()
        if self._pending:
            events, self._pending = self._pending, []
            return events
        if self._idle():
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
        if self._pending or self._idle():
            events, self._pending = self._pending, []
            return events
        return [await self._next(records_max)]

    def _idle(self) -> bool:
        """Whether there is nothing to read now."""
        current = self._current if self._current is not None else (self._waiting[0][0] if self._waiting else None)
        return current is None or current in self._paused

    async def _list(self) -> None:
        try:
            found = await self._compute.run(lambda: matching(self._source.path, self._source.options))
        except OSError as error:
            raise Permanent(f"{self._source.path}: {error.strerror}", where=self._where) from None
        if not found:
            raise Permanent(f"no file matches {self._source.path}", where=self._where, remedy="Correct the path")
        for path, size, identity in found:
            digest = hashlib.blake2b(identity.partition("-")[2].encode() or identity.encode(), digest_size=8).hexdigest()
            part = Partition(self._source.name, self._source.cluster_id, path, 0, digest)
            self._parts[part], self._identity[part] = path, identity
            self.bytes_total += size
        self._pending.append(Assigned(self._token, tuple(self._parts)))

    async def _next(self, records_max: int) -> Event:
        if self._current is None:
            self._current, position = self._waiting.popleft()
            self._reader = self._read(self._current, position)
        part, reader = self._current, self._reader
        assert reader is not None
        if not self._cut:
            # Finish the read even if the caller goes away: what it found must not be lost.
            found = await asyncio.shield(asyncio.ensure_future(self._advance(reader)))
            if found is None:
                self._current = self._reader = None
                return Ended(part, StoreCursor(self._ends[part]))
        records = self._cut.popleft()
        if records.batch.num_rows > records_max:
            at = records.batch.column("position")[records_max].as_py()
            rest = Records(part, StoreCursor(at), records.stop, records.batch.slice(records_max))
            self._cut.appendleft(rest)
            records = Records(part, records.start, StoreCursor(at), records.batch.slice(0, records_max))
        return records

    async def _advance(self, reader: Iterator[Records]) -> Records | None:
        records = await self._compute.run(lambda: next(reader, None))
        if records is not None:
            self._cut.append(records)
        return records

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        self._waiting.extend((part, at[part].next) for part in self._parts if part in at)
        self._ends = {part: cursor.next for part, cursor in at.items()}
        self._changed.set()

    async def release(self, token: int) -> None:
        self._changed.set()

    async def seek(self, part: Partition, at: Cursor) -> None:
        raise Permanent(f"{part.topic} cannot be sought in", where=self._where)

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        return dict.fromkeys(parts)

    async def bounds(self, parts: Sequence[Partition]) -> Mapping[Partition, Bounds]:
        return {part: Bounds(StoreCursor(0), StoreCursor(END)) for part in parts}

    async def commit(self, at: Mapping[Partition, Cursor]) -> None:
        """The checkpoint that this commit follows is the position."""

    async def pause(self, parts: Sequence[Partition]) -> None:
        self._paused |= set(parts)

    async def resume(self, parts: Sequence[Partition]) -> None:
        self._paused -= set(parts)
        self._changed.set()

    async def leave(self) -> None:
        self._token += 1
        self._waiting.clear()
        self._cut.clear()
        self._current = self._reader = None
        self._pending.append(Revoked(self._token, tuple(self._parts)))
        self._changed.set()

    async def close(self) -> None:
        self._reader = None

    # --- reading, off the loop ------------------------------------------------------------------------------------

    def _read(self, part: Partition, position: int) -> Iterator[Records]:
        """All records from `position` on; leaves the file's end in `self._ends`."""
        path = self._parts[part]
        try:
            file, identity = open_file(path, self._source.options)
        except OSError as error:
            raise Permanent(f"{path}: {error.strerror or error}", where=self._where) from None
        if identity != self._identity[part]:
            raise self._changed_file(path)
        try:
            if self._source.format == "parquet":
                yield from self._rows(part, file, position)
            else:
                yield from self._lines(part, _decompressed(path, file), position)
        except (OSError, EOFError, pa.ArrowInvalid) as error:
            raise Permanent(f"{path} cannot be read: {error}", where=self._where) from None
        finally:
            file.close()
        again, identity = open_file(path, self._source.options)
        again.close()
        if identity != self._identity[part]:
            raise self._changed_file(path)

    def _changed_file(self, path: str) -> Permanent:
        return Permanent(
            f"{path} changed while it was read", where=self._where, remedy="Write files under another name and rename them"
        )

    def _rows(self, part: Partition, file: Any, position: int) -> Iterator[Records]:
        parquet = pq.ParquetFile(file)
        at = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if at + rows <= position:
                at += rows
                continue
            for batch in parquet.iter_batches(65_536, row_groups=[group]):
                skip = max(0, position - at)
                if skip < batch.num_rows:
                    piece = batch.slice(skip)
                    positions = np.arange(at + skip, at + batch.num_rows, dtype=np.int64)
                    self._ends[part] = at + batch.num_rows
                    payload = pa.StructArray.from_arrays(piece.columns, fields=list(piece.schema))
                    yield self._records(part, at + skip, at + batch.num_rows, positions, payload, None)
                at += batch.num_rows
        self._ends[part] = max(position, at)

    def _lines(self, part: Partition, file: Any, position: int) -> Iterator[Records]:
        quoted = self._source.format == "csv"
        codec = self._source.codec
        quote = codec.quote.encode()[0] if quoted else None
        columns: list[str] | None = None
        base, data, ended = 0, b"", False
        if quoted and position > 0:
            columns, base, data, ended = self._header(file, quote)
        if position > 0:
            base, data, ended = _seek(file, position, base, data, ended)
        while True:
            block = b"" if ended else file.read(BLOCK_BYTES)
            ended = ended or not block
            data += block
            if base == 0 and len(data) < 3 and not ended:
                continue
            mark = len(BOM) if base == 0 and data.startswith(BOM) else 0
            starts, stops, used = frame(data, ended, quote)
            if len(starts) and mark:
                starts[0] = max(starts[0], mark)
            if quoted and columns is None and len(starts):
                columns = self._names(data[starts[0] : stops[0]])
                starts, stops = starts[1:], stops[1:]
            if used == 0 and not ended:
                if len(data) > RECORD_BYTES_MAX:
                    what = f"{part.topic}: the record at byte {base} is longer than {RECORD_BYTES_MAX} bytes"
                    raise Permanent(what, where=self._where, remedy="A quote may be open; mend the file")
                continue
            if used:
                filled = stops > starts
                starts, stops = starts[filled], stops[filled]
                values = _sliced(data, starts, stops)
                self._ends[part] = base + used
                yield self._records(part, base, base + used, base + starts, values, columns)
                base, data = base + used, data[used:]
            if ended:
                self._ends[part] = max(position, base)
                return

    def _header(self, file: Any, quote: int | None) -> tuple[list[str], int, bytes, bool]:
        """The header row, and what was read with it."""
        data, ended = b"", False
        while True:
            block = file.read(BLOCK_BYTES)
            ended = not block
            data += block
            starts, stops, _ = frame(data, ended, quote)
            if len(starts) or ended:
                begin = len(BOM) if data.startswith(BOM) else 0
                names = self._names(data[max(starts[0], begin) : stops[0]]) if len(starts) else []
                return names, 0, data, ended

    def _names(self, row: bytes) -> list[str]:
        codec = self._source.codec
        return next(csv.reader([row.decode("utf-8", "replace")], delimiter=codec.delimiter, quotechar=codec.quote), [])

    def _records(
        self,
        part: Partition,
        start: int,
        stop: int,
        positions: npt.NDArray[np.int64],
        values: pa.Array,
        columns: list[str] | None,
    ) -> Records:
        n = len(positions)
        last = pa.field("value", pa.binary()) if pa.types.is_binary(values.type) else pa.field("payload", values.type)
        metadata = None if columns is None else {b"thalweg.columns": json.dumps(columns).encode()}
        schema = pa.schema([*list(ENVELOPE)[:-1], last], metadata=metadata)
        arrays = [
            pa.array(positions.astype(np.int64)),
            pa.nulls(n, ENVELOPE.field("timestamp").type),
            pa.array(np.zeros(n, dtype=np.int8)),
            pa.nulls(n, pa.binary()),
            pa.nulls(n, ENVELOPE.field("headers").type),
            values,
        ]
        return Records(part, StoreCursor(start), StoreCursor(stop), pa.RecordBatch.from_arrays(arrays, schema=schema))


def frame(data: bytes, ended: bool, quote: int | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Borders of the whole records in `data`: starts, stops (line end left out), and how many bytes they take.

    A line feed ends a record unless it stands between quotes; a carriage return before it belongs to the line end. At
    the end of the file the rest is a record too.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(raw == 10)
    if quote is not None and len(ends):
        quotes = np.flatnonzero(raw == quote)
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]  # a doubled quote flips twice
    used = int(ends[-1]) + 1 if len(ends) else 0
    if ended and used < len(data):
        ends = np.append(ends, len(data))
        used = len(data)
    starts = np.r_[0, ends[:-1] + 1] if len(ends) else np.array([], dtype=np.int64)
    stops = ends.copy()
    returns = (stops > starts) & (raw[np.maximum(stops - 1, 0)] == 13) if len(ends) else np.array([], dtype=bool)
    stops[returns] -= 1
    return starts.astype(np.int64), stops.astype(np.int64), used


def _sliced(data: bytes, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """The pieces `data[start:stop]` as one array, copied once."""
    keep = np.zeros(len(data) + 1, dtype=np.int8)
    np.add.at(keep, starts, 1)
    np.add.at(keep, stops, -1)
    mask = np.cumsum(keep[:-1], dtype=np.int8).astype(bool)
    offsets = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(stops - starts, out=offsets[1:])
    body = np.frombuffer(data, dtype=np.uint8)[mask]
    return pa.BinaryArray.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(body)])


def _decompressed(path: str, file: Any) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if path.endswith(".bz2"):
        return bz2.BZ2File(file)
    if path.endswith(".zst"):
        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return file


def _seek(file: Any, position: int, base: int, data: bytes, ended: bool) -> tuple[int, bytes, bool]:
    """Go to `position`: by reading on in a compressed file, by seeking in a plain one."""
    if base + len(data) >= position:
        return position, data[position - base :], ended
    at = base + len(data)
    if isinstance(file, gzip.GzipFile | bz2.BZ2File | pa.CompressedInputStream):
        while at < position:
            block = file.read(min(BLOCK_BYTES, position - at))
            if not block:
                return at, b"", True
            at += len(block)
    else:
        file.seek(position)
        at = position
    return at, b"", False
