"""Parquet objects as a sink: the primary raw, or a destination, DLQ or quarantine.

An object is `<partition slug>/<start>-<stop>.parquet`, positions padded to 20 digits, created and never replaced. Its
name says which interval it holds, so a window is read by listing, with no manifest, and after a crash the next owner
finds what was durable but not yet recorded by listing from the committed cursor on.

At least once: a zombie's late put may hold an interval that another object holds under other borders. Every reader
removes duplicates by record id (`read_window` does). Within one owner nothing is written twice: intervals that were
found, recorded or landed are trimmed away before a put.

Why a listed object may be adopted unread: puts are whole or absent (see `adapters.objects`), so a name that is listed
holds all that its writer was given for that interval of that incarnation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from thalweg.core.batch import HEADERS, Chunk, Frame, Partition, record_ids
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.stamp import stamped
from thalweg.core.topology import Role, Sink
from thalweg.errors import Exists, Permanent
from thalweg.ports import Compute, ObjectStore

NAME: Final = re.compile(r"(\d{20})-(\d{20})\.parquet")
_ROW: Final = "thalweg.row"
PROBE: Final = "_thalweg_probe/"


def raw_schema(prefix: str, payload: pa.Field, metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """Columns of the primary raw: identity and locator, then key, headers and payload byte for byte."""
    return pa.schema(
        [
            pa.field(f"{prefix}record_id", pa.binary(16), nullable=False),
            pa.field(f"{prefix}source_topic", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            pa.field(f"{prefix}source_partition", pa.int32(), nullable=False),
            pa.field(f"{prefix}source_offset", pa.int64(), nullable=False),
            pa.field(f"{prefix}event_ts", pa.timestamp("ms", tz="UTC")),
            pa.field(f"{prefix}event_ts_type", pa.int8(), nullable=False),
            pa.field(f"{prefix}message_key", pa.binary()),
            pa.field(f"{prefix}source_headers", HEADERS),
            payload,
        ],
        metadata=metadata,
    )


def raw_rows(prefix: str, frame: Frame) -> pa.RecordBatch:
    """The frame's envelope as rows of the primary raw."""
    envelope, n = frame.envelope, frame.envelope.num_rows
    positions = envelope.column("position")
    last = envelope.schema.field(envelope.num_columns - 1)  # `value`, or `payload` of a source that is Arrow already
    payload = pa.field(f"{prefix}payload", last.type)
    topic = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, dtype=np.int32)), pa.array([frame.partition.topic]))
    columns = [
        record_ids(frame.partition, positions),
        topic,
        pa.repeat(pa.scalar(frame.partition.number, pa.int32()), n),
        positions,
        envelope.column("timestamp"),
        envelope.column("timestamp_type"),
        envelope.column("key"),
        envelope.column("headers"),
        envelope.column(envelope.num_columns - 1),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=raw_schema(prefix, payload))


class LakeLander:
    """Lands chunks of one sink as Parquet objects."""

    def __init__(self, store: ObjectStore, compute: Compute, sink: Sink, prefix: str) -> None:
        self._store, self._compute, self._sink, self._prefix = store, compute, sink, prefix
        self._have: dict[Partition, RangeSet] = {}

    async def open(self) -> None:
        await self._store.list(PROBE)

    async def found(self, part: Partition, base: int, recorded: RangeSet) -> RangeSet:
        if self._sink.role in (Role.DLQ, Role.QUARANTINE):
            return NOTHING  # an interval may have no rows here, and late ones: names prove nothing
        # An object that begins before `base` and ends after it is not looked for: `base` was committed from a checkpoint
        # that has whole objects in it, so such a one is in `recorded`, or a zombie's late put, which only doubles rows.
        ranges = RangeSet((o[0], o[1]) for o in await self._objects(part, f"{base:020}"))
        self._have[part] = ranges | recorded
        return ranges

    async def land(self, chunk: Chunk, label: str = "") -> None:
        if label or self._sink.role in (Role.DLQ, Role.QUARANTINE):
            await self._put(chunk, label or "rows")
            return
        if chunk.partition not in self._have:  # a first start: nothing was stored, but a crash may have left objects
            await self.found(chunk.partition, chunk.start, NOTHING)
        have = self._have[chunk.partition]
        for start, stop in have.gaps(chunk.start, chunk.stop):
            piece = chunk.within(start, stop)
            await self._put(piece, "")
            self._have[chunk.partition] |= RangeSet([(start, stop)])

    async def close(self) -> None:
        return

    async def _put(self, chunk: Chunk, label: str) -> None:
        if chunk.rows == 0:
            return
        body, digest = await self._compute.run(encoded, self._sink, self._prefix, chunk, bool(label))
        suffix = f"-{label}-{digest}" if label else ""
        key = f"{chunk.partition.slug}/{chunk.start:020}-{chunk.stop:020}{suffix}.parquet"
        try:
            await self._store.create(key, body)
        except Exists:
            return  # our own put whose reply was lost, or another owner's of the same interval: it is durable

    async def _objects(self, part: Partition, after: str) -> list[tuple[int, int, str]]:
        out = []
        for entry in await self._store.list(f"{part.slug}/", f"{part.slug}/{after}"):
            match = NAME.fullmatch(entry.key.rpartition("/")[2])
            if match is not None:
                out.append((int(match[1]), int(match[2]), entry.key))
        return out

    async def read_window(self, part: Partition, start: int, stop: int) -> list[pa.RecordBatch]:
        """Rows of `[start, stop)` in position order, each once. Raises `Permanent` naming an object that cannot be read."""
        position, child = f"{self._prefix}source_offset", f"{self._prefix}child"
        tables = []
        for low, high, key in await self._objects(part, ""):
            if low < stop and start < high:
                stored = await self._store.get(key)
                if stored is None:
                    raise Permanent(f"object {key} vanished while it was read", where=self._store.url)
                try:
                    table = pq.read_table(pa.BufferReader(stored.body))
                    at = table.column(position)
                except (pa.ArrowException, OSError, KeyError) as error:
                    raise Permanent(
                        f"object {key} cannot be read: {error}",
                        where=self._store.url,
                        remedy="Restore it from a copy, or move it away and read its interval from the source again",
                    ) from None
                tables.append(table.filter(pc.and_(pc.greater_equal(at, start), pc.less(at, stop))))
        if not tables:
            return []
        table = pa.concat_tables(tables, promote_options="default")
        identity = [f"{self._prefix}record_id", *(c for c in [child] if c in table.column_names)]
        table = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
        first = table.select([*identity, _ROW]).group_by(identity).aggregate([(_ROW, "min")]).column(f"{_ROW}_min")
        order = [(c, "ascending") for c in (position, *identity[1:])]
        batches: list[pa.RecordBatch] = table.take(first).sort_by(order).drop_columns([_ROW]).combine_chunks().to_batches()
        return batches


def encoded(sink: Sink, prefix: str, chunk: Chunk, labelled: bool) -> tuple[pa.Buffer, str]:
    """The chunk as a Parquet object, and a digest of its rows where `labelled` (else empty)."""
    raw = sink.role is Role.PRIMARY_RAW
    aside = sink.role in (Role.DLQ, Role.QUARANTINE)
    batches = [raw_rows(prefix, f) if raw else f.rows if aside else stamped(prefix, f) for f in chunk.frames if f.rows.num_rows]
    schema = batches[0].schema
    digest = ""
    if labelled:
        hashed = xxhash.xxh3_128()
        for batch in batches:
            hashed.update(_content(batch))
        digest = hashed.hexdigest()
    notes = {
        b"thalweg.partition": chunk.partition.slug.encode(),
        b"thalweg.start": str(chunk.start).encode(),
        b"thalweg.stop": str(chunk.stop).encode(),
    }
    columns = (chunk.frames[0].envelope.schema.metadata or {}).get(b"thalweg.columns")
    if columns is not None:
        notes[b"thalweg.columns"] = columns
    table = pa.Table.from_batches(batches, schema).replace_schema_metadata(notes)
    out = pa.BufferOutputStream()
    # Of 190-byte JSON records, in records per CPU second and bytes a record: zstd 1 1.5M and 60, zstd 3 0.7M and 62,
    # lz4 1.5M and 102, snappy 1.7M and 103. Dictionaries and statistics of payloads only cost.
    topic, position, timestamp = (f"{prefix}{name}" for name in ("source_topic", "source_offset", "event_ts"))
    pq.write_table(
        table,
        out,
        compression="zstd",
        compression_level=1,
        use_dictionary=[topic] if raw else True,
        column_encoding=dict.fromkeys((position, timestamp), "DELTA_BINARY_PACKED") if raw else None,
        write_statistics=[position] if raw else True,
    )
    return out.getvalue(), digest


def _content(batch: pa.RecordBatch) -> bytes:
    """Bytes that are equal for equal rows."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = out.getvalue().to_pybytes()
    return body
