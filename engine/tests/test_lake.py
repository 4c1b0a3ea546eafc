"""Parquet objects as a sink: byte for byte, never twice by one owner, adopted after a crash, read back once."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.adapters.objects import FolderStore
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, HEADERS, Chunk, Frame, Partition, record_ids
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.topology import OnFailure, Role, Sink
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, Transient
from thalweg.ports import Capabilities, Listed, Stored
from thalweg.runtime.lake import LakeLander

PART = Partition("s", "c", "t", 0, "i")
PREFIX = "_twg_"


class MemoryStore:
    """Objects in memory; `errors` are raised by the next creates, an `Ambiguous` one after its effect."""

    capabilities = Capabilities(True, True, True, True)
    url = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.errors: list[Exception] = []
        self.lists: list[str] = []

    async def get(self, key: str) -> Stored | None:
        return Stored(self.objects[key], "v") if key in self.objects else None

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        error = self.errors.pop(0) if self.errors else None
        if isinstance(error, Transient):
            raise error
        if key in self.objects:
            raise Exists(key)
        self.objects[key] = bytes(memoryview(body))
        if error is not None:
            raise error
        return "v"

    async def replace(self, key: str, body: bytes, version: str) -> str:
        raise Stale(key)

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        self.lists.append(prefix)
        return [Listed(k, len(b), "v") for k, b in sorted(self.objects.items()) if k.startswith(prefix) and k > after]

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    async def close(self) -> None:
        return


def sink_of(role: Role = Role.PRIMARY_RAW) -> Sink:
    return Sink("lake", "parquet", role, OnFailure.HOLD, url="memory")


def lander_of(store: MemoryStore | FolderStore, role: Role = Role.PRIMARY_RAW) -> LakeLander:
    return LakeLander(store, InlineCompute(), sink_of(role), PREFIX)


def envelope_of(positions: list[int]) -> pa.RecordBatch:
    n = len(positions)
    columns = [
        pa.array(positions, pa.int64()),
        pa.nulls(n, ENVELOPE.field("timestamp").type),
        pa.array(np.zeros(n, dtype=np.int8)),
        pa.nulls(n, pa.binary()),
        pa.nulls(n, HEADERS),
        pa.array([b"v%d" % p for p in positions], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE)


def frame_of(start: int, stop: int, envelope: pa.RecordBatch | None = None) -> Frame:
    """Odd positions hold no record (they are markers)."""
    if envelope is None:
        envelope = envelope_of([p for p in range(start, stop) if p % 2 == 0])
    return Frame(PART, start, stop, envelope, envelope, pa.array(np.arange(envelope.num_rows, dtype=np.int32)))


def chunk_of(start: int, stop: int, *cuts: int) -> Chunk:
    borders = [start, *cuts, stop]
    frames = tuple(frame_of(a, b) for a, b in itertools.pairwise(borders))
    return Chunk(PART, start, stop, frames)


def name_of(start: int, stop: int) -> str:
    return f"s/t/0@i/{start:020}-{stop:020}.parquet"


def rows_in(store: MemoryStore) -> list[int]:
    """Positions of every row of every object, repeats included."""
    tables = [pq.read_table(pa.BufferReader(body)) for body in store.objects.values() if body]
    return sorted(p for table in tables for p in table.column(f"{PREFIX}source_offset").to_pylist())


async def test_raw_is_byte_for_byte() -> None:
    headers = [[("k", b"\x00\xff"), ("k", None), ("", b"")], [], None]
    envelope = pa.RecordBatch.from_arrays(
        [
            pa.array([7, 9, 2**62], pa.int64()),
            pa.array([0, None, 1_700_000_000_123], pa.timestamp("ms", "UTC")),
            pa.array([1, 0, 2], pa.int8()),
            pa.array([b"\x00key", b"", None], pa.binary()),
            pa.array([None if h is None else [{"key": k, "value": v} for k, v in h] for h in headers], HEADERS),
            pa.array([b"\xff\xfe{", b"", None], pa.binary()),  # empty is no tombstone
        ],
        schema=ENVELOPE.with_metadata({b"thalweg.columns": b'["a"]'}),
    )
    store = MemoryStore()
    await lander_of(store).land(Chunk(PART, 5, 2**62 + 1, (frame_of(5, 2**62 + 1, envelope),)))
    (name, body), *others = store.objects.items()
    assert (name, others) == (name_of(5, 2**62 + 1), [])
    table = pq.read_table(pa.BufferReader(body))
    names = "record_id source_topic source_partition source_offset event_ts event_ts_type message_key source_headers payload"
    assert table.schema.names == [PREFIX + name for name in names.split()]
    assert table.column(0).combine_chunks() == record_ids(PART, envelope.column("position"))
    assert table.column(1).to_pylist() == ["t"] * 3
    assert pa.types.is_dictionary(table.schema.field(1).type)
    assert table.column(2).to_pylist() == [0] * 3
    for mine, theirs in ((3, "position"), (4, "timestamp"), (5, "timestamp_type"), (6, "key"), (7, "headers"), (8, "value")):
        assert table.column(mine).to_pylist() == envelope.column(theirs).to_pylist()
    assert table.schema.metadata[b"thalweg.partition"] == b"s/t/0@i"
    assert table.schema.metadata[b"thalweg.start"] == b"5"
    assert table.schema.metadata[b"thalweg.stop"] == str(2**62 + 1).encode()
    assert table.schema.metadata[b"thalweg.columns"] == b'["a"]'


async def test_a_source_that_is_arrow_keeps_its_struct() -> None:
    payload = pa.array(
        [{"a": 1, "b": None}, {"a": None, "b": ["x"]}], pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
    )
    envelope = envelope_of([0, 1])
    schema = pa.schema([*list(ENVELOPE)[:-1], pa.field("payload", payload.type)])
    arrow = pa.RecordBatch.from_arrays([*envelope.columns[:-1], payload], schema=schema)
    store = MemoryStore()
    lander = lander_of(store)
    await lander.land(Chunk(PART, 0, 2, (frame_of(0, 2, arrow),)))
    (batch,) = await lander.read_window(PART, 0, 2)
    assert batch.column(f"{PREFIX}payload").to_pylist() == payload.to_pylist()


async def test_destination_rows_carry_where_they_come_from() -> None:
    rows = pa.record_batch({"a": [1, 2, 3]})
    frame = Frame(PART, 0, 10, envelope_of([4, 6]), rows, pa.array([0, 0, 1], pa.int32()), pa.array([0, 1, 0], pa.int32()))
    store = MemoryStore()
    lander = lander_of(store, Role.DESTINATION)
    await lander.land(Chunk(PART, 0, 10, (frame,)))
    await lander_of(store, Role.DESTINATION).land(Chunk(PART, 0, 10, (frame,)))
    (batch,) = await lander.read_window(PART, 0, 10)
    assert batch.column("a").to_pylist() == [1, 2, 3]
    assert batch.column(f"{PREFIX}source_offset").to_pylist() == [4, 4, 6]
    assert batch.column(f"{PREFIX}child").to_pylist() == [0, 1, 0]
    assert list(store.objects) == [name_of(0, 10)]


async def test_an_interval_without_rows_makes_no_object() -> None:
    store = MemoryStore()
    await lander_of(store).land(chunk_of(5, 6))
    assert store.objects == {}


@pytest.mark.parametrize("error", [Ambiguous("reply lost"), Transient("not now")])
async def test_tried_again_after_an_error_it_is_there_once(error: Exception) -> None:
    store = MemoryStore()
    lander = lander_of(store)
    store.errors = [error]
    with pytest.raises(type(error)):
        await lander.land(chunk_of(0, 10))
    await lander.land(chunk_of(0, 10))
    assert list(store.objects) == [name_of(0, 10)]
    assert rows_in(store) == [0, 2, 4, 6, 8]


async def test_the_next_owner_adopts_what_is_durable_and_writes_only_the_rest() -> None:
    store = MemoryStore()
    for start, stop in ((0, 10), (10, 14), (20, 30)):
        await lander_of(store).land(chunk_of(start, stop))
    await store.create("s/t/0@i/" + "0" * 20 + "-late.parquet", b"")  # not ours
    await store.create("s/t/0@other/" + name_of(14, 20)[-49:], b"")
    lander = lander_of(store)
    assert await lander.found(PART, 10, RangeSet([(0, 10)])) == RangeSet([(10, 14), (20, 30)])
    await lander.land(chunk_of(8, 40, 12, 15, 21))
    assert rows_in(store) == list(range(0, 40, 2))
    assert [k for k in store.objects if "0@i" in k and "late" not in k] == [
        name_of(0, 10), name_of(10, 14), name_of(20, 30), name_of(14, 20), name_of(30, 40),
    ]  # fmt: skip


async def test_at_a_first_start_too_what_a_crash_left_is_not_written_again() -> None:
    store = MemoryStore()
    await lander_of(store).land(chunk_of(0, 10))
    lander = lander_of(store)  # nothing was committed or checkpointed: nobody asks what is found
    await lander.land(chunk_of(0, 8))
    await lander.land(chunk_of(8, 20))
    assert rows_in(store) == list(range(0, 20, 2))
    assert store.lists.count("s/t/0@i/") == 2  # once an owner


@settings(max_examples=80, deadline=None)
@given(data=st.data())
async def test_any_crashes_and_borders_leave_each_record_once(data: st.DataObject) -> None:
    """Owners follow one another, each dying after some puts, each cutting as it likes; all start at the same commit."""
    store = MemoryStore()
    for _ in range(data.draw(st.integers(1, 4))):
        lander = lander_of(store)
        if data.draw(st.booleans()):
            await lander.found(PART, 0, NOTHING)
        borders = [0, *sorted(data.draw(st.sets(st.integers(1, 59), max_size=6))), 60]
        alive = data.draw(st.integers(1, len(borders)))
        for a, b in list(itertools.pairwise(borders))[:alive]:
            if data.draw(st.booleans()):
                store.errors = [Ambiguous("lost")]
                try:
                    await lander.land(chunk_of(a, b))
                except Ambiguous:
                    if data.draw(st.booleans()):
                        break  # dead with it
            store.errors = []
            await lander.land(chunk_of(a, b))
    lander = lander_of(store)
    await lander.land(chunk_of(0, 60))
    assert rows_in(store) == list(range(0, 60, 2))
    got = await lander.read_window(PART, 0, 60)
    assert [p for batch in got for p in batch.column(f"{PREFIX}source_offset").to_pylist()] == list(range(0, 60, 2))


async def test_a_zombie_doubles_rows_and_a_reader_sees_each_once() -> None:
    store = MemoryStore()
    zombie = lander_of(store)
    await zombie.found(PART, 0, NOTHING)
    for start, stop in ((0, 10), (10, 24), (24, 40)):
        await lander_of(store).land(chunk_of(start, stop))
    await zombie.land(chunk_of(6, 30))
    assert len(rows_in(store)) == 20 + 12
    reader = lander_of(store)
    for start, stop in ((0, 40), (7, 9), (9, 25), (12, 13), (39, 40), (40, 50)):
        batches = await reader.read_window(PART, start, stop)
        got = [p for batch in batches for p in batch.column(f"{PREFIX}source_offset").to_pylist()]
        assert got == [p for p in range(start, min(stop, 40)) if p % 2 == 0]
        values = [v for batch in batches for v in batch.column(f"{PREFIX}payload").to_pylist()]
        assert values == [b"v%d" % p for p in got]


@pytest.mark.parametrize("damage", ["torn", "alien", "empty"])
async def test_an_object_that_cannot_be_read_is_named(damage: str) -> None:
    store = MemoryStore()
    lander = lander_of(store)
    await lander.land(chunk_of(0, 10))
    name = name_of(0, 10)
    alien = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), alien)
    store.objects[name] = {"torn": store.objects[name][:-20], "alien": alien.getvalue().to_pybytes(), "empty": b""}[damage]
    with pytest.raises(Permanent, match=name):
        await lander.read_window(PART, 0, 5)
    assert await lander.read_window(PART, 10, 20) == []


def rejects(start: int, stop: int, codes: list[str]) -> Chunk:
    rows = pa.record_batch(
        {f"{PREFIX}record_id": pa.array([b"%016d" % i for i in range(len(codes))], pa.binary(16)), "code": codes}
    )
    frame = Frame(PART, start, stop, envelope_of([]), rows, pa.array(np.zeros(len(codes), dtype=np.int32)))
    return Chunk(PART, start, stop, (frame,))


@pytest.mark.parametrize("role", [Role.DLQ, Role.QUARANTINE])
async def test_rejects_of_one_interval_may_come_more_than_once(role: Role) -> None:
    store = MemoryStore()
    lander = lander_of(store, role)
    await lander.land(rejects(0, 10, ["a", "b"]))
    await lander.land(rejects(0, 10, ["a", "b"]))  # the same again
    await lander.land(rejects(0, 10, ["c"]), "warehouse")  # late, for the same interval
    await lander.land(rejects(0, 10, ["d"]), "warehouse")  # later, other rows
    await lander.land(rejects(0, 10, ["d"]), "warehouse")  # its reply was lost
    assert len(store.objects) == 3
    codes = [c for body in store.objects.values() for c in pq.read_table(pa.BufferReader(body)).column("code").to_pylist()]
    assert sorted(codes) == ["a", "b", "c", "d"]
    assert await lander.found(PART, 0, NOTHING) == NOTHING  # their names prove nothing


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(tmp_path)
    yield store
    await store.close()


async def test_in_a_real_folder_with_the_longest_names(folder: FolderStore) -> None:
    part = Partition("s", "c", "/deep" * 300 + "/é.csv", 0, "i")
    assert part.slug != Partition("s", "c", "/deep" * 300 + "/e.csv", 0, "i").slug
    frame = frame_of(0, 10)
    lander = lander_of(folder)
    await lander.open()
    assert await lander.found(part, 0, NOTHING) == NOTHING
    await lander.land(Chunk(part, 0, 10, (Frame(part, 0, 10, frame.envelope, frame.rows, frame.origin),)))
    again = lander_of(folder)
    assert await again.found(part, 0, NOTHING) == RangeSet([(0, 10)])
    (batch,) = await again.read_window(part, 0, 10)
    assert batch.num_rows == 5
    await again.close()
