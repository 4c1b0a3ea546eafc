"""Files as a source: records against naive readers, resuming anywhere, compressed streams, damaged and altered files."""

from __future__ import annotations

import asyncio
import bz2
import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thalweg.adapters import files
from thalweg.adapters.files import FileSource, Int64s, _sliced, frame
from thalweg.adapters.objects import SourceFile
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, Partition, StoreCursor, record_ids
from thalweg.core.topology import CodecPlan, Source
from thalweg.errors import Permanent, Transient
from thalweg.ports import Assigned, Ended, Event, Position, Records, Revoked

T = TypeVar("T")
Row = tuple[int, object]


def source_of(path: Path | str, form: str = "ndjson", delimiter: str = ",", quote: str = '"') -> Source:
    codec = CodecPlan({"ndjson": "json", "csv": "csv", "parquet": "arrow"}[form], delimiter=delimiter, quote=quote)
    return Source("s", "files", "c", codec, path=str(path), format=form)


async def read(
    source: Source, at: Mapping[str, int] | None = None, records_max: int = 10**9
) -> tuple[dict[str, list[Row]], dict[str, int], list[Records]]:
    """Rows and end of each file, every interval checked to follow on from the last."""
    consumer = FileSource(source, InlineCompute())
    rows: dict[str, list[Row]] = {}
    ends: dict[str, int] = {}
    batches: list[Records] = []
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    starts = {part: StoreCursor((at or {}).get(Path(part.topic).name, 0)) for part in assigned.parts}
    await consumer.start(assigned.token, starts)
    queued = {part: cursor.next for part, cursor in starts.items()}
    while len(ends) < len(assigned.parts):
        for event in await consumer.poll(records_max, 0):
            match event:
                case Records():
                    assert event.start.next == queued[event.part]
                    positions = event.batch.column("position").to_pylist()
                    assert positions == sorted(set(positions))
                    assert 1 <= len(positions) <= records_max
                    assert event.start.next <= positions[0]
                    assert positions[-1] < event.stop.next
                    event.batch.validate(full=True)
                    queued[event.part] = event.stop.next
                    rows.setdefault(Path(event.part.topic).name, []).extend(
                        zip(positions, event.batch.column(5).to_pylist(), strict=True)
                    )
                    batches.append(event)
                case Position():
                    assert event.at.next > queued[event.part]
                    queued[event.part] = event.at.next
                case Ended():
                    assert event.at.next == queued[event.part]
                    ends[Path(event.part.topic).name] = event.at.next
                case _:
                    raise AssertionError(event)
    await consumer.close()
    assert consumer.bytes_done == consumer.bytes_total
    return rows, ends, batches


async def rows_of(tmp_path: Path, body: bytes, form: str = "ndjson", at: int = 0, name: str = "f", **more: str) -> list[Row]:
    (tmp_path / name).write_bytes(body)
    return (await read(source_of(tmp_path / name, form, **more), {name: at}))[0].get(name, [])


# --- framing ----------------------------------------------------------------------------------------------------------


def naive_lines(data: bytes) -> list[bytes]:
    return [line for line in (piece.removesuffix(b"\r") for piece in data.split(b"\n")) if line]


def sliced(data: bytes, starts: Int64s, stops: Int64s) -> list[bytes]:
    values: list[bytes] = _sliced(data, starts, stops).to_pylist() if len(starts) else []
    assert values == [data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    return values


def framed(data: bytes, dialect: tuple[int, int | None] | None, block: int) -> list[bytes]:
    """What framing finds when the data comes in blocks."""
    out, held = [], b""
    for at in range(0, len(data) + block, block):
        ended = at >= len(data)
        held += data[at : at + block]
        starts, stops, used = frame(held, ended, dialect)
        out += sliced(held, starts, stops)
        held = held[used:]
    assert held == b""
    return out


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"{}", b'"', b",", b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf"]), max_size=24).map(b"".join),
    block=st.integers(1, 40),
)
def test_lines_are_what_splitting_gives(data: bytes, block: int) -> None:
    # A return at the end of the last line, which no line feed follows, is taken for a line end too.
    assert framed(data, None, block) == naive_lines(data)


def naive_csv(data: bytes) -> list[bytes]:
    """Python's csv module, asked one physical line more at a time whether the record is whole."""
    out, held = [], b""
    for line in data.splitlines(keepends=True):
        held += line
        reader = csv.reader(io.StringIO((held + b"\x00").decode("latin-1"), newline=""))
        # Were the record open, the byte after the line would still be inside of its quotes.
        if len(list(reader)) == 2:
            out.append(held.removesuffix(b"\n").removesuffix(b"\r"))
            held = b""
    return [record for record in (*out, held) if record]  # what is left is open to the end of the file


@settings(max_examples=600, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b'"', b'"', b'""', b",", b"\n", b"\r\n", b'"\n', b',"']), max_size=24).map(b"".join),
    block=st.integers(1, 40),
)
def test_csv_records_are_those_of_the_csv_module(data: bytes, block: int) -> None:
    assert framed(data, (ord(","), ord('"')), block) == naive_csv(data)


def test_a_quote_inside_a_field_joins_no_records() -> None:
    data = b'pipe 5",1\nrod 6",2\n"a ""b"" c\nd",3\n'
    assert framed(data, (44, 34), 1_000) == [b'pipe 5",1', b'rod 6",2', b'"a ""b"" c\nd",3']
    assert framed(data, (44, None), 1_000) == [b'pipe 5",1', b'rod 6",2', b'"a ""b"" c', b'd",3']


# --- lines ------------------------------------------------------------------------------------------------------------


async def test_ndjson_positions_are_bytes_and_intervals_reach_the_end(tmp_path: Path) -> None:
    body = b'\xef\xbb\xbf{"a":1}\r\n\n\r\n{"a":2}\n{"a":3}'
    (tmp_path / "f").write_bytes(body)
    rows, ends, batches = await read(source_of(tmp_path / "f"))
    assert rows["f"] == [(3, b'{"a":1}'), (15, b'{"a":2}'), (23, b'{"a":3}')]
    assert ends == {"f": len(body)}
    assert [(b.start.next, b.stop.next) for b in batches] == [(0, 23), (23, 30)]
    assert batches[0].batch.schema == ENVELOPE


@pytest.mark.parametrize("body", [b"", b"\xef\xbb\xbf", b"\n\r\n\n"])
async def test_a_file_without_records_ends(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "f").write_bytes(body)
    for form in ("ndjson", "csv"):
        rows, ends, _ = await read(source_of(tmp_path / "f", form))
        assert rows == {}
        assert ends == {"f": len(body)}


async def test_a_header_alone_is_claimed_and_no_record(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a,b\n")
    rows, ends, batches = await read(source_of(tmp_path / "f", "csv"))
    assert (rows, ends, batches) == ({}, {"f": 4}, [])


CSV = b'\xef\xbb\xbf\r\n"a","b\nc"\r\n1,"x\ny"\n\n2,z\na,b\n"a","b\nc"\n3,end'


async def test_csv_header_travels_beside_and_is_data_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CSV)
    rows, ends, batches = await read(source_of(tmp_path / "f", "csv"))
    assert [value for _, value in rows["f"]] == [b'1,"x\ny"', b"2,z", b"a,b", b'"a","b\nc"', b"3,end"]
    assert all(json.loads(b.batch.schema.metadata[b"thalweg.columns"]) == ["a", "b\nc"] for b in batches)
    assert ends == {"f": len(CSV)}


@pytest.mark.parametrize(("quote", "names"), [('"', ["a", 'b"c']), ("'", ["a", '"b""c"']), ("", ["a", '"b""c"'])])
async def test_csv_dialects(tmp_path: Path, quote: str, names: list[str]) -> None:
    (tmp_path / "f").write_bytes(b'a;"b""c"\n1;2\n')
    rows, _, batches = await read(source_of(tmp_path / "f", "csv", ";", quote))
    assert rows["f"] == [(9, b"1;2")]
    assert json.loads(batches[0].batch.schema.metadata[b"thalweg.columns"]) == names


def packed(name: str, body: bytes) -> bytes:
    if name.endswith(".gz"):
        half = len(body) // 2
        return gzip.compress(body[:half]) + gzip.compress(body[half:])  # members may follow each other
    if name.endswith(".bz2"):
        return bz2.compress(body)
    if name.endswith(".zst"):
        half = len(body) // 2
        return b"".join(pa.compress(piece, codec="zstd", asbytes=True) for piece in (body[:half], body[half:]))
    return body


@pytest.mark.parametrize("name", ["f", "f.gz", "f.bz2", "f.zst"])
@pytest.mark.parametrize("form", ["ndjson", "csv"])
@pytest.mark.parametrize("block", [1, 7, 4 << 20])
async def test_reading_goes_on_from_any_border_and_gives_the_rest(
    tmp_path: Path, name: str, form: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    body = CSV if form == "csv" else b'\xef\xbb\xbf{"a":1}\r\n\n{"a":"22"}\n{}\n\n{"a":3}'
    (tmp_path / name).write_bytes(packed(name, body))
    source = source_of(tmp_path / name, form)
    whole, ends, batches = await read(source, records_max=1)
    assert ends == {name: len(body)}
    for batch in batches:
        rest, ends, after = await read(source, {name: batch.stop.next})
        assert rest.get(name, []) == [row for row in whole[name] if row[0] >= batch.stop.next]
        assert ends == {name: len(body)}
        assert all(b.batch.schema.metadata == batch.batch.schema.metadata for b in after)


LINE = st.binary(min_size=1, max_size=30).filter(lambda b: b"\n" not in b and b[-1:] != b"\r" and b[:3] != files.BOM)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r\n\r\n"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(LINE, max_size=20), end=ENDS, block=st.integers(1, 64), records_max=st.integers(1, 5))
async def test_any_bytes_of_a_line_arrive_as_they_are(
    tmp_path: Path, values: list[bytes], end: bytes, block: int, records_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    body = b"".join(value + end for value in values)
    (tmp_path / "f").write_bytes(body)
    rows, ends, _ = await read(source_of(tmp_path / "f"), records_max=records_max)
    assert [value for _, value in rows.get("f", [])] == values
    assert all(body[at:].startswith(value) for at, value in rows.get("f", []))  # type: ignore[arg-type]  # bytes here
    assert ends == {"f": len(body)}


async def test_a_record_longer_than_a_block_is_read_and_one_without_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    monkeypatch.setattr(files, "RECORD_BYTES_MAX", 100)
    assert [len(str(v)) for _, v in await rows_of(tmp_path, b"1\n" + b"x" * 80 + b"\n2\n")] == [4, 83, 4]
    with pytest.raises(Permanent, match="record at byte 4 is longer than 100 bytes"):
        await rows_of(tmp_path, b'a\n1\n"' + b"y\n" * 200, "csv")


@pytest.mark.parametrize("header", [b"a\rb,c\n1,2\n", b"\xff,b\n1,2\n"])
async def test_a_header_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(Permanent, match=r"f: the header row cannot be read"):
        await rows_of(tmp_path, header, "csv")


# --- Parquet ----------------------------------------------------------------------------------------------------------


async def test_parquet_rows_are_numbered_over_row_groups_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": pa.array(range(1_000)), "b": pa.array([None, "x"] * 500)})
    pq.write_table(table, tmp_path / "f", row_group_size=300)
    monkeypatch.setattr(files, "BLOCK_BYTES", 200)  # batches by bytes, too
    wanted = list(enumerate(table.to_pylist()))
    source = source_of(tmp_path / "f", "parquet")
    for at in (0, 1, 299, 300, 301, 650, 999, 1_000):
        rows, ends, batches = await read(source, {"f": at}, 64)
        assert rows.get("f", []) == wanted[at:]
        assert ends == {"f": 1_000}
        assert all(b.batch.schema.names[5] == "payload" for b in batches)
    pq.write_table(table.slice(0, 0), tmp_path / "f")
    rows, ends, _ = await read(source)
    assert (rows, ends) == ({}, {"f": 0})


# --- files that are not as they should be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "body"),
    [
        ("f.gz", "ndjson", gzip.compress(b"1\n" * 1_000)[:-10]),
        ("f.gz", "ndjson", b"no gzip at all"),
        ("f.gz", "ndjson", gzip.compress(b"1\n" * 1_000)[:20] + b"\xff" * 20),
        ("f.bz2", "csv", bz2.compress(b"1\n" * 1_000)[:-10]),
        ("f.zst", "ndjson", pa.compress(os.urandom(1_000), codec="zstd", asbytes=True)[:-10]),
        ("f.zst", "ndjson", b"no zstd at all"),
        ("f", "parquet", b"no parquet at all"),
        ("f", "parquet", b"PAR1" + b"x" * 100 + b"PAR1"),
    ],
)
async def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, form: str, body: bytes) -> None:
    with pytest.raises(Permanent, match=rf"{name} cannot be read") as caught:
        await rows_of(tmp_path, body, form, name=name)
    assert caught.value.where == "source s"


async def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    for path in ("none*.json", "no/such/folder/*.json"):
        with pytest.raises(Permanent, match="no file matches"):
            await FileSource(source_of(tmp_path / path), InlineCompute()).poll(1, 0)


async def test_a_file_altered_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 4)
    path = tmp_path / "f"
    for alter in (lambda: path.write_bytes(b"1\n2\n3\n4\n5"), lambda: os.utime(path, ns=(1, 1))):
        path.write_bytes(b"1\n2\n3\n4\n")
        consumer = await begun(source_of(path))
        assert isinstance((await consumer.poll(9, 0))[0], Records)
        alter()
        with pytest.raises(Permanent, match="f changed while it was read"):
            await consumer.poll(9, 0)
    path.unlink()
    path.write_bytes(b"1\n")
    consumer = FileSource(source_of(path), InlineCompute())
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    path.write_bytes(b"2222\n")  # between listing and reading
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    with pytest.raises(Permanent, match="changed"):
        await consumer.poll(9, 0)


async def begun(source: Source) -> FileSource:
    consumer = FileSource(source, InlineCompute())
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    return consumer


async def test_a_file_replaced_under_its_name_is_read_to_its_end_and_the_new_one_is_another(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1\n")
    consumer = await begun(source_of(path))
    (tmp_path / "new").write_bytes(b"2\n3\n")
    (first,) = await consumer.poll(9, 0)
    (tmp_path / "new").replace(path)
    (last,) = await consumer.poll(9, 0)
    assert isinstance(first, Records)
    assert last == Ended(first.part, StoreCursor(2))
    again = FileSource(source_of(path), InlineCompute())
    (assigned,) = await again.poll(1, 0)
    assert isinstance(assigned, Assigned)
    assert assigned.parts[0].incarnation != first.part.incarnation
    zero = pa.array([0], pa.int64())
    assert record_ids(assigned.parts[0], zero) != record_ids(first.part, zero)


# --- the port ---------------------------------------------------------------------------------------------------------


class Gate:
    """Computing that waits until it is let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0

    async def run(self, work: Callable[[], T]) -> T:
        self.running += 1
        assert self.running == 1  # a generator cannot be asked twice at once
        try:
            await self.open.wait()
            return work()
        finally:
            self.running -= 1


async def test_a_cancelled_poll_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 2)
    (tmp_path / "f").write_bytes(b"1\n2\n3\n4\n")
    gate = Gate()
    consumer = FileSource(source_of(tmp_path / "f"), gate)
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    got: list[Event] = []
    while not got or not isinstance(got[-1], Ended):
        gate.open.clear()
        for _ in range(2):  # the same read is under way, both times
            poll = asyncio.ensure_future(consumer.poll(9, 0))
            for _ in range(5):
                await asyncio.sleep(0)
            poll.cancel()
            with pytest.raises(asyncio.CancelledError):
                await poll
        gate.open.set()
        got += await consumer.poll(9, 0)
    values = [v for e in got if isinstance(e, Records) for v in e.batch.column("value").to_pylist()]
    assert values == [b"1", b"2", b"3", b"4"]
    await consumer.close()


@pytest.mark.parametrize("form", ["ndjson", "csv"])
async def test_after_a_passing_failure_it_goes_on_where_it_was(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 3)
    failures = iter([False, True, False, False, True, True, *[False] * 1_000])

    class Shaky(SourceFile):
        def unchanged(self) -> bool:
            if next(failures):
                raise Transient("connection reset")
            return super().unchanged()

    monkeypatch.setattr(files, "SourceFile", Shaky)
    (tmp_path / "f").write_bytes(b"a\n1\n2\n3\n4\n5\n")
    consumer = await begun(source_of(tmp_path / "f", form))
    values: list[bytes] = []
    failed = 0
    last: Event | None = None
    while not isinstance(last, Ended):
        try:
            (last,) = await consumer.poll(9, 0)
        except Transient:
            failed += 1
            continue
        if isinstance(last, Records):
            values += last.batch.column("value").to_pylist()
    assert failed == 3
    assert values == [b"a", b"1", b"2", b"3", b"4", b"5"][form == "csv" :]
    assert last.at == StoreCursor(12)


async def test_closed_while_it_reads(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1\n")
    gate = Gate()
    consumer = FileSource(source_of(tmp_path / "f"), gate)
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    gate.open.clear()
    poll = asyncio.ensure_future(consumer.poll(9, 0))
    for _ in range(5):
        await asyncio.sleep(0)
    poll.cancel()
    closing = asyncio.ensure_future(consumer.close())
    gate.open.set()
    await closing
    assert poll.cancelled()
    assert gate.running == 0


async def test_pause_keeps_and_resume_goes_on_and_a_smaller_poll_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n3\n")
    (tmp_path / "b").write_bytes(b"4\n")
    consumer = await begun(source_of(tmp_path / "?"))
    (first,) = await consumer.poll(2, 0)
    assert isinstance(first, Records)
    assert (first.start, first.stop) == (StoreCursor(0), StoreCursor(4))
    await consumer.pause([first.part])
    assert await consumer.poll(2, 0) == []
    await consumer.resume([first.part])
    (rest,) = await consumer.poll(2, 0)
    assert isinstance(rest, Records)
    assert (rest.start, rest.stop, rest.batch.column("value").to_pylist()) == (StoreCursor(4), StoreCursor(6), [b"3"])
    assert await consumer.poll(2, 0) == [Ended(first.part, StoreCursor(6))]
    (other,) = await consumer.poll(2, 0)  # one file after the other, by path
    assert isinstance(other, Records)
    assert other.part.topic == str(tmp_path / "b")


async def test_assigned_once_left_on_request_and_positions_are_the_runtime_s(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1\n")
    consumer = FileSource(source_of(tmp_path / "f"), InlineCompute())
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    part = assigned.parts[0]
    assert part == Partition("s", "c", str(tmp_path / "f"), 0, part.incarnation)
    assert await consumer.committed([part]) == {part: None}
    assert await consumer.poll(1, 0) == []  # nothing before start
    await consumer.start(assigned.token, {part: StoreCursor(0)})
    await consumer.commit({part: StoreCursor(2)})
    await consumer.leave()
    (revoked,) = await consumer.poll(1, 0)
    assert isinstance(revoked, Revoked)
    assert revoked.parts == (part,)
    await consumer.release(revoked.token)
    assert await consumer.poll(1, 0) == []
    await consumer.close()
