"""Files as a source: NDJSON, CSV and Parquet, local or in an object store, compressed or not.

Translates files to the consumer port: each file is one partition, assigned at the first poll, read one after another in
the order of their paths, each ending with `Ended`. Positions are byte offsets in the (decompressed) file, row numbers in
Parquet; they are kept by the runtime's checkpoints, so `commit` has nothing to do and `committed` knows nothing.

Framing finds record borders in a whole block at once; the bytes of a record are handed on as they are, without the line
end. A CSV header names the columns and travels in the schema's metadata. A byte-order mark belongs to no record.

A file is identified by size and modification time (or ETag): changed, it is another file. One that is altered in place
while it is read is an error, for nobody can say what was read; one that is replaced under its name is read to its end,
and the new one is another file at the next start.
"""

from __future__ import annotations

import asyncio
import bz2
import csv
import gzip
import hashlib
import json
import zlib
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from thalweg.adapters.objects import Changed, SourceFile, matching
from thalweg.core.batch import ENVELOPE, Cursor, Partition, StoreCursor
from thalweg.core.topology import Source
from thalweg.errors import Permanent
from thalweg.ports import Assigned, Bounds, Capabilities, Compute, Ended, Event, Position, Records, Revoked

BLOCK_BYTES: Final = 4 << 20
RECORD_BYTES_MAX: Final = 32 << 20
BOM: Final = b"\xef\xbb\xbf"
END: Final = 1 << 62

Int64s = npt.NDArray[np.int64]


class FileSource:
    """The files that `source.path` matches when it is first polled."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, source: Source, compute: Compute) -> None:
        self._source, self._compute = source, compute
        self._where = f"source {source.name}"
        self._identity: dict[Partition, str] = {}  # of every file, in the order of reading
        self._size: dict[Partition, int] = {}
        self._at: dict[Partition, int] = {}  # end of what was read of each started file
        self._waiting: deque[Partition] = deque()  # started, not yet read to the end; the first is being read
        self._reader: Generator[Records | Position, None, None] | None = None
        self._reading: asyncio.Future[Records | Position | None] | None = None
        self._rest: Records | None = None  # what of the last block a smaller poll left
        self._pending: list[Event] = []
        self._paused: set[Partition] = set()
        self._token = 0
        self._changed = asyncio.Event()
        self.bytes_total = 0
        self.bytes_done = 0  # of files read to their end

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        if self._token == 0:
            await self._list()
        if not self._pending and self._idle():
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
        if self._pending or self._idle():
            events, self._pending = self._pending, []
            return events
        return [await self._next(max(1, records_max))]

    def _idle(self) -> bool:
        """Whether there is nothing to read now."""
        return not self._waiting or self._waiting[0] in self._paused

    async def _list(self) -> None:
        found = await self._compute.run(lambda: matching(self._source.path, self._source.options))
        if not found:
            raise Permanent(f"no file matches {self._source.path}", where=self._where, remedy="Correct the path")
        for path, size, identity in found:
            digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
            part = Partition(self._source.name, self._source.cluster_id, path, 0, digest)
            self._identity[part], self._size[part] = identity, size
            self.bytes_total += size
        self._token = 1
        self._pending.append(Assigned(self._token, tuple(self._identity)))

    async def _next(self, records_max: int) -> Event:
        part = self._waiting[0]
        found: Records | Position | None = self._rest
        self._rest = None
        if found is None:
            if self._reading is None:
                reader = self._reader = self._reader or self._read(part, self._at[part])
                self._reading = asyncio.ensure_future(self._compute.run(lambda: next(reader, None)))
            # Cancelled or not, the read goes on: what it finds is for the next poll.
            await asyncio.wait([self._reading])
            reading, self._reading = self._reading, None
            try:
                found = reading.result()
            except BaseException:
                self._reader = None  # a generator that raised is at its end: the file is not
                raise
            if found is None:
                self._reader = None
                self._waiting.popleft()
                self.bytes_done += self._size[part]
                return Ended(part, StoreCursor(self._at[part]))
            self._at[part] = found.at.next if isinstance(found, Position) else found.stop.next
        if isinstance(found, Records) and found.batch.num_rows > records_max:
            at = found.batch.column("position")[records_max].as_py()
            self._rest = Records(part, StoreCursor(at), found.stop, found.batch.slice(records_max))
            found = Records(part, found.start, StoreCursor(at), found.batch.slice(0, records_max))
        return found

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        self._at.update((part, cursor.next) for part, cursor in at.items())
        self._waiting.extend(part for part in self._identity if part in at)
        self._changed.set()

    async def release(self, token: int) -> None:
        self._changed.set()

    async def seek(self, part: Partition, at: Cursor) -> None:
        raise Permanent(f"{part.topic} cannot be sought in", where=self._where)

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        return dict.fromkeys(parts)

    async def bounds(self, parts: Sequence[Partition], *, known: bool = False) -> Mapping[Partition, Bounds]:
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
        self._rest = None
        self._pending.append(Revoked(self._token, tuple(self._identity)))
        self._changed.set()

    async def close(self) -> None:
        self._waiting.clear()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)  # nobody asks for it any more
            self._reading = None
        if self._reader is not None:
            await self._compute.run(self._reader.close)
            self._reader = None

    # --- reading, off the loop ------------------------------------------------------------------------------------

    def _read(self, part: Partition, position: int) -> Generator[Records | Position, None, None]:
        """All records from `position` on."""
        path = part.topic
        try:
            opened = SourceFile(path, self._source.options, self._identity[part])
        except Changed:
            raise self._changed_file(path) from None
        except OSError as error:
            raise Permanent(f"{path}: {error.strerror or error}", where=self._where) from None
        try:
            if not opened.unchanged():
                raise self._changed_file(path)
            whole = self._rows if self._source.format == "parquet" else self._lines
            for records in whole(part, opened.file, position):
                if not opened.unchanged():
                    raise self._changed_file(path)
                yield records
        except Changed:
            raise self._changed_file(path) from None
        except (OSError, EOFError, pa.ArrowException, zlib.error) as error:
            what = f"{path} cannot be read: {error}"
            raise Permanent(what, where=self._where, remedy="Mend the file, or take it out of the path") from None
        finally:
            opened.close()

    def _changed_file(self, path: str) -> Permanent:
        return Permanent(
            f"{path} changed while it was read", where=self._where, remedy="Write files under another name and rename them"
        )

    def _rows(self, part: Partition, file: Any, position: int) -> Generator[Records | Position, None, None]:
        parquet = pq.ParquetFile(file)
        at = 0
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            if at + about.num_rows <= position:
                at += about.num_rows
                continue
            rows_max = max(1, min(65_536, BLOCK_BYTES * 4 * about.num_rows // max(1, about.total_byte_size)))
            for batch in parquet.iter_batches(rows_max, row_groups=[group]):
                first, at = max(at, position), at + batch.num_rows
                if first < at:
                    piece = batch.slice(batch.num_rows - (at - first))
                    positions = np.arange(first, at, dtype=np.int64)
                    payload = pa.StructArray.from_arrays(piece.columns, fields=list(piece.schema))
                    yield self._records(part, first, at, positions, payload, None)

    def _lines(self, part: Partition, plain: Any, position: int) -> Generator[Records | Position, None, None]:
        codec = self._source.codec
        file = _decompressed(part.topic, plain)
        dialect = (ord(codec.delimiter), ord(codec.quote) if codec.quote else None) if self._source.format == "csv" else None
        columns: list[str] | None = None
        base, data, ended = 0, b"", False  # `data` begins at byte `base`, where a record begins
        while position > 0 and dialect is not None and columns is None and not ended:
            data, ended = _more(file, data)
            starts, stops, _ = frame(data, ended, dialect, _mark(data))
            if len(starts):
                columns = self._names(part, data[starts[0] : stops[0]])
        if position > 0:
            base = position
            if position > len(data):
                ended = not _skipped(file, len(data), position)
            data = data[position:]
        while True:
            if not ended:
                data, ended = _more(file, data)
            mark = _mark(data) if base == 0 else 0
            starts, stops, used = frame(data, ended, dialect, mark)
            if not used and len(data) > RECORD_BYTES_MAX:
                what = f"{part.topic}: the record at byte {base} is longer than {RECORD_BYTES_MAX} bytes"
                raise Permanent(what, where=self._where, remedy="A quote may be open; mend the file")
            if dialect is not None and columns is None and len(starts):
                columns = self._names(part, data[starts[0] : stops[0]])
                starts, stops = starts[1:], stops[1:]
            if len(starts):
                yield self._records(part, base, base + used, base + starts, _sliced(data, starts, stops), columns)
            elif used:
                yield Position(part, StoreCursor(base + used))
            if ended:
                return
            base, data = base + used, data[used:]

    def _names(self, part: Partition, row: bytes) -> list[str]:
        codec = self._source.codec
        try:
            text = row.decode("utf-8")
            if not codec.quote:
                return text.split(codec.delimiter)
            return next(csv.reader([text], delimiter=codec.delimiter, quotechar=codec.quote), [])
        except (UnicodeDecodeError, csv.Error) as error:
            what = f"{part.topic}: the header row cannot be read: {error}"
            raise Permanent(what, where=self._where, remedy="Mend the file's first row") from None

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


def frame(data: bytes, ended: bool, dialect: tuple[int, int | None] | None, mark: int = 0) -> tuple[Int64s, Int64s, int]:
    """Borders of the whole records in `data`, which begins a record: starts, stops, and how many bytes were looked through.

    A line feed ends a record, a carriage return before it belongs to the line end, at the file's end the rest is a
    record too, and an empty line is none. In CSV (`dialect`: delimiter and quote bytes) a line feed between quotes
    ends nothing; a quote opens only where a field begins, elsewhere it is text (as Python's csv module has it).
    `mark` bytes before the first record belong to none.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(raw == 10)
    if dialect is not None and dialect[1] is not None and len(ends):
        ends = ends[np.searchsorted(_flips(raw, dialect[0], dialect[1], mark), ends) % 2 == 0]
    used = int(ends[-1]) + 1 if len(ends) else 0
    if ended and used < len(data):
        ends = np.append(ends, len(data))
        used = len(data)
    if not len(ends):
        return ends, ends, used
    starts = np.r_[mark, ends[:-1] + 1]
    stops = ends - ((ends > starts) & (raw[np.maximum(ends - 1, 0)] == 13))
    filled = stops > starts
    return starts[filled], stops[filled], used


def _flips(raw: npt.NDArray[np.uint8], delimiter: int, quote: int, mark: int) -> Int64s:
    """Where quoting begins and ends, alternately. A doubled quote inside may end and begin it at once."""
    quotes = np.flatnonzero(raw == quote)
    before = raw[np.maximum(quotes[::2] - 1, 0)]
    if np.all((quotes[::2] == mark) | (before == delimiter) | (before == 10) | (before == quote)):
        return quotes
    # Some quote stands inside a field: look at each of them.
    out, inside, doubled = [], False, -1
    following = np.append(quotes[1:], -1).tolist()
    for at, after in zip(quotes.tolist(), following, strict=True):
        if at == doubled:
            continue
        if inside and after == at + 1:
            doubled = after
        elif inside or at == mark or raw[at - 1] in (delimiter, 10):
            inside = not inside
            out.append(at)
    return np.array(out, dtype=np.int64)


def _mark(data: bytes) -> int:
    """Length of the byte-order mark at a file's beginning."""
    return len(BOM) if data.startswith(BOM) else 0


def _more(file: Any, data: bytes) -> tuple[bytes, bool]:
    """`data` and the block after it; whether the file ended instead."""
    block = file.read(BLOCK_BYTES)
    return (data + block, False) if block else (data, True)


def _sliced(data: bytes, starts: Int64s, stops: Int64s) -> pa.BinaryArray:
    """The pieces `data[start:stop]`, which are not empty and do not touch, as one array."""
    offsets = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(stops - starts, out=offsets[1:])
    body = data[starts[0] : stops[-1]]
    # Between records stand line ends. If nothing but them is lost with all line ends, this is what a mask would leave,
    # twenty times faster.
    joined = (body.replace(b"\r\n", b"") if b"\r" in body else body).replace(b"\n", b"")
    if len(joined) != offsets[-1]:
        joined = _masked(body, starts - starts[0], stops - starts[0]).tobytes()
    return pa.BinaryArray.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])


def _masked(body: bytes, starts: Int64s, stops: Int64s) -> npt.NDArray[np.uint8]:
    """`body` without what lies between the pieces."""
    keep = np.ones(len(body), dtype=bool)
    keep[stops[:-1]] = False
    wide = np.flatnonzero(starts[1:] - stops[:-1] > 1)  # a carriage return or empty lines between
    if len(wide):
        lengths = starts[wide + 1] - stops[wide]
        shift = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        keep[np.repeat(stops[wide], lengths) + shift] = False
    return np.frombuffer(body, dtype=np.uint8)[keep]


def _decompressed(path: str, file: Any) -> Any:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if path.endswith(".bz2"):
        return bz2.BZ2File(file)
    if path.endswith(".zst"):
        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return file


def _skipped(file: Any, at: int, position: int) -> bool:
    """Go from `at` to `position`: by seeking in a plain file, by reading on in a compressed one. False if it ends before."""
    if not isinstance(file, gzip.GzipFile | bz2.BZ2File | pa.CompressedInputStream):
        file.seek(position)
        return True
    while at < position:
        block = file.read(min(BLOCK_BYTES, position - at))
        if not block:
            return False
        at += len(block)
    return True
