"""Where a record came from, how far a source was read, and the shapes in which records travel.

Decides identity: two records are the same record exactly when their `Locator`s are equal, and the 16-byte record id
is a function of the locator alone. It never looks at payload bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

Headers: TypeAlias = list[tuple[str, bytes | None]]
"""Message headers in wire order; keys may repeat, a value may be null (distinct from empty), bytes are kept as they are."""

HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())]))

ENVELOPE: Final = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),  # Kafka offset; byte offset or row number in a file
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),  # the broker's or producer's, null where there is none
        pa.field("timestamp_type", pa.int8(), nullable=False),  # 0 none, 1 create time, 2 log-append time
        pa.field("key", pa.binary()),
        pa.field("headers", HEADERS),  # null: no headers at all
        pa.field("value", pa.binary()),  # null: a tombstone
    ]
)
"""The columns in which a consumer port hands over records of one partition, ordered by `position`, strictly ascending.

A source that is Arrow already (Parquet files) has a `payload` struct column in place of `value`.
Schema metadata `thalweg.columns` (JSON list of strings) carries a CSV header row where the format needs one.
"""

RECORD_ID: Final = pa.binary(16)


SEGMENT_MAX: Final = 249  # characters of a slug's piece; Kafka's topics have no more, and encoding lengthens none of them


def _segment(piece: str) -> str:
    quoted = quote(piece, safe="") or "-"
    if len(quoted) <= SEGMENT_MAX:
        return quoted
    return f"{quoted[: SEGMENT_MAX - 33]}~{xxhash.xxh3_128_hexdigest(piece.encode())}"


@dataclass(frozen=True, order=True)
class Partition:
    """One ordered log: a topic partition, or one file.

    `incarnation` tells a re-created topic or a rewritten file from the one before (Kafka topic id; file identity), so
    that neither its record ids nor its coverage can be taken for the other's.
    """

    source: str  # name of the source node in the topology
    cluster: str
    topic: str  # topic name, or the file's path
    number: int
    incarnation: str

    @cached_property
    def slug(self) -> str:
        """`<source>/<topic>/<partition>@<incarnation>`, each piece percent-encoded so that it is one path segment.

        File systems end a segment at 255 bytes: a longer piece is cut, and its hash follows.
        """
        source, topic, incarnation = (_segment(p) for p in (self.source, self.topic, self.incarnation))
        return f"{source}/{topic}/{self.number}@{incarnation}"


@dataclass(frozen=True, order=True)
class KafkaCursor:
    """The *next* offset to read: after consuming offset 41 it holds 42 (as `__consumer_offsets` stores it)."""

    next: int


@dataclass(frozen=True, order=True)
class StoreCursor:
    """The *next* position in a source whose position Thalweg keeps itself: a byte offset or a row number of a file."""

    next: int


@dataclass(frozen=True, order=True)
class PulsarCursor:
    """The *last consumed* message id, all four parts of it; never one number."""

    ledger: int
    entry: int
    partition: int
    batch: int


Cursor: TypeAlias = KafkaCursor | StoreCursor
"""Cursors of sources whose order is the integers; ranges over them are half-open `[start, stop)`."""


@dataclass(frozen=True, order=True)
class Locator:
    """The one name of one record."""

    partition: Partition
    position: int


def _prefix(partition: Partition) -> tuple[int, int]:
    """128 bits of the partition's identity (its `source` node name is no part of it: renaming a node moves no id)."""
    packed = b"".join(
        len(piece).to_bytes(4, "little") + piece
        for piece in (
            partition.cluster.encode(),
            partition.topic.encode(),
            partition.incarnation.encode(),
            str(partition.number).encode(),
        )
    )
    digest = xxhash.xxh3_128_intdigest(packed)
    return digest & 0xFFFF_FFFF_FFFF_FFFF, digest >> 64


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words, wrapping by design."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def record_ids(partition: Partition, positions: pa.Int64Array) -> pa.FixedSizeBinaryArray:
    """Ids of the records of `partition` at `positions`: `binary(16)`, as long as `positions`, no nulls.

    Each 64-bit half is `mix(prefix + position * odd)`: for one partition a bijection of the position, so two records
    of one partition never share an id; across partitions the 128-bit prefix makes a collision a matter of 2^-64 odds.
    """
    low, high = _prefix(partition)
    at = positions.to_numpy(zero_copy_only=False).astype(np.uint64)
    halves = np.empty((len(at), 2), dtype="<u8")
    halves[:, 0] = _mixed(at * np.uint64(0x9E3779B97F4A7C15) + np.uint64(low))
    halves[:, 1] = _mixed(at * np.uint64(0xD1B54A32D192ED03) + np.uint64(high))
    return pa.FixedSizeBinaryArray.from_buffers(RECORD_ID, len(at), [None, pa.py_buffer(halves)])


def record_id(locator: Locator) -> bytes:
    """The id of one record: 16 bytes."""
    ids = record_ids(locator.partition, pa.array([locator.position], pa.int64()))
    value = ids[0].as_py()
    assert isinstance(value, bytes)
    return value


@dataclass(frozen=True)
class Refusals:
    """Records of one envelope that go no further on the clean path, one entry a record.

    `rows` are indices into the envelope, `codes` stable kebab-case reasons, `details` human words, `rules` rule ids
    ("" where no rule spoke); all four have one length.
    """

    rows: pa.Int32Array
    codes: pa.StringArray
    details: pa.StringArray
    rules: pa.StringArray

    @classmethod
    def of(cls, entries: list[tuple[int, str, str, str]]) -> Refusals:
        """From `(row, code, detail, rule)` entries."""
        rows, codes, details, rules = zip(*entries, strict=True) if entries else ((), (), (), ())
        return cls(
            pa.array(rows, pa.int32()),
            pa.array(codes, pa.string()),
            pa.array(details, pa.string()),
            pa.array(rules, pa.string()),
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Decoded:
    """What a codec made of an envelope: `rows` (user columns), `origin[i]` = envelope row that `rows[i]` came from."""

    rows: pa.RecordBatch
    origin: pa.Int32Array
    refused: Refusals


@dataclass(frozen=True)
class Frame:
    """Rows of one claimed interval `[start, stop)` of one partition on their way to one sink.

    `envelope` has the `ENVELOPE` columns of every record in the interval; `rows` are the sink's user columns (possibly
    none: the interval is claimed all the same); `origin[i]` is the envelope row that `rows[i]` derives from, ascending.
    `child[i]`, where there is an unnest upstream, is the ordinal of the row among the children of its record.
    """

    partition: Partition
    start: int
    stop: int
    envelope: pa.RecordBatch
    rows: pa.RecordBatch
    origin: pa.Int32Array
    child: pa.Int32Array | None = None

    @cached_property
    def size_bytes(self) -> int:
        """What it holds, of envelope and rows together; what both share counts once."""
        own = 0 if self.rows is self.envelope else self.rows.nbytes
        return int(self.envelope.nbytes + own)

    def within(self, start: int, stop: int) -> Frame:
        """The frame's records at positions in `[start, stop)`, and the rows derived from them."""
        at = self.envelope.column("position").to_numpy()
        low, high = (int(i) for i in np.searchsorted(at, (start, stop)))
        origin = self.origin.to_numpy()
        first, last = (int(i) for i in np.searchsorted(origin, (low, high)))
        return Frame(
            self.partition,
            start,
            stop,
            self.envelope.slice(low, high - low),
            self.rows.slice(first, last - first),
            pa.array(origin[first:last] - low, pa.int32()),
            None if self.child is None else self.child.slice(first, last - first),
        )

    def without(self, rows: npt.NDArray[np.int64]) -> Frame:
        """The same interval without these rows (indices into `rows`): they went elsewhere, their records are still claimed."""
        keep = np.ones(self.rows.num_rows, dtype=bool)
        keep[rows] = False
        mask = pa.array(keep)
        child = None if self.child is None else self.child.filter(mask)
        return replace(self, rows=self.rows.filter(mask), origin=self.origin.filter(mask), child=child)


@dataclass(frozen=True)
class Chunk:
    """What one sink is asked to make durable in one go: frames of one partition that follow each other without a hole."""

    partition: Partition
    start: int
    stop: int
    frames: tuple[Frame, ...]

    @property
    def rows(self) -> int:
        """How many rows (an interval may have none)."""
        return sum(frame.rows.num_rows for frame in self.frames)

    def within(self, start: int, stop: int) -> Chunk:
        """The part of the chunk that lies in `[start, stop)`, which must lie in the chunk. Records are never split."""
        frames = []
        for frame in self.frames:
            low, high = max(start, frame.start), min(stop, frame.stop)
            if low < high:
                frames.append(frame if (low, high) == (frame.start, frame.stop) else frame.within(low, high))
        return Chunk(self.partition, start, stop, tuple(frames))
