"""The object store adapter, the lake, checkpoints and the files source against a real S3 server."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.stack import ACCESS_KEY, S3, SECRET_KEY, Stack
from thalweg.adapters.files import FileSource
from thalweg.adapters.objects import RemoteStore
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, HEADERS, Chunk, Frame, Partition, StoreCursor
from thalweg.core.coverage import NOTHING, Document, RangeSet
from thalweg.core.topology import CodecPlan, OnFailure, Role, Sink, Source
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, Transient
from thalweg.ports import Assigned, Ended, Records
from thalweg.runtime.checkpoint import ObjectCheckpoints
from thalweg.runtime.lake import LakeLander

PART = Partition("s", "c", "/data/ä b%/x+y~z.csv", 0, "i")  # much to encode, and an encoding inside


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    running = Stack(["s3"], tmp_path_factory.mktemp("s3"))
    assert running.s3 is not None
    running.start()
    yield running.s3
    running.stop()


@pytest.fixture
def bucket(server: S3, request: pytest.FixtureRequest) -> str:
    name = "b" + str(abs(hash(request.node.name)))
    server.bucket(name)
    return f"s3://{name}/pre/fix"


def options_of(server: S3, secret: str = SECRET_KEY) -> dict[str, str]:
    return {
        "endpoint": server.address,
        "allow_http": "true",
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY,
        "secret_access_key": secret,
    }


@pytest.fixture
def store(server: S3, bucket: str) -> RemoteStore:
    return RemoteStore(bucket, options_of(server))


async def test_conditional_puts(store: RemoteStore) -> None:
    assert await store.get("k") is None
    version = await store.create("k", pa.py_buffer(b"1"))
    with pytest.raises(Exists):
        await store.create("k", b"2")
    newer = await store.replace("k", b"2", version)
    for stale in (version, '"nonsense"'):
        with pytest.raises(Stale):
            await store.replace("k", b"3", stale)
    with pytest.raises(Stale):
        await store.replace("never", b"3", version)
    stored = await store.get("k")
    assert stored is not None
    assert (stored.body, stored.version) == (b"2", newer)
    await store.delete("k")
    await store.delete("k")
    assert await store.get("k") is None


async def test_of_many_creates_at_once_one_wins_and_no_loser_is_told_that_it_did(store: RemoteStore) -> None:
    for key in ("a", "b", "c"):
        done = await asyncio.gather(*(store.create(key, b"%d" % i) for i in range(16)), return_exceptions=True)
        won = [i for i, d in enumerate(done) if isinstance(d, str)]
        stored = await store.get(key)
        assert stored is not None
        assert len(won) == 1
        assert stored.body == b"%d" % won[0]
        assert all(isinstance(d, str | Exists | Transient) for d in done)


async def test_lists_are_whole_in_order_and_after_a_key(store: RemoteStore) -> None:
    keys = [f"p/{i:020}-{i + 1:020}.parquet" for i in range(1_100)]  # more than a page
    for at in range(0, len(keys), 50):
        await asyncio.gather(*(store.create(key, b"x") for key in keys[at : at + 50]))
    await store.create("pq", b"")
    await store.create(f"{PART.slug}/x", b"")
    assert [e.key for e in await store.list("p/")] == keys
    assert [e.key for e in await store.list("p/", keys[1_050])] == keys[1_051:]
    assert [e.key for e in await store.list("p/", f"p/{1_050:020}")] == keys[1_050:]
    assert [e.key for e in await store.list(f"{PART.slug}/")] == [f"{PART.slug}/x"]
    assert await store.list("nothing/") == []


async def test_wrong_credentials_and_no_bucket_are_permanent_and_tell_no_secret(server: S3, bucket: str) -> None:
    for broken in (RemoteStore(bucket, options_of(server, "wrong-secret")), RemoteStore("s3://nowhere", options_of(server))):
        for call in (broken.get("k"), broken.create("k", b""), broken.replace("k", b"", "v"), broken.list("")):
            with pytest.raises(Permanent) as caught:
                await call
            assert type(caught.value) is Permanent
            assert "s3://" in str(caught.value)
            assert "wrong-secret" not in str(caught.value)


async def test_a_server_that_went_away_is_no_answer(tmp_path: Path) -> None:
    running = Stack(["s3"], tmp_path)
    assert running.s3 is not None
    running.start()
    try:
        running.s3.bucket("bucket")
        store = RemoteStore("s3://bucket", options_of(running.s3))
        version = await store.create("k", b"1")
        running.s3.kill()
        for call in (store.get("k"), store.list(""), store.create("new", b""), store.replace("k", b"", version)):
            with pytest.raises((Transient, Ambiguous)):
                await call
        running.s3.start()
        stored = await store.get("k")
        assert stored is not None
        assert stored.body == b"1"
    finally:
        running.stop()


async def test_checkpoints_of_two_writers_converge(server: S3, bucket: str) -> None:
    stores = [ObjectCheckpoints(RemoteStore(bucket, options_of(server)), "p") for _ in range(2)]

    async def write(me: int) -> None:
        for k in range(50):
            while True:
                try:
                    await stores[me].merge(Document(PART.slug, 0, 0, {f"sink{me}": RangeSet([(2 * k, 2 * k + 1)])}))
                except (Transient, Ambiguous):
                    continue
                break

    await asyncio.gather(write(0), write(1))
    final = await stores[0].load(PART.slug)
    assert final is not None
    assert final.sinks == {f"sink{me}": RangeSet((2 * k, 2 * k + 1) for k in range(50)) for me in range(2)}
    assert final.version == 100
    assert sum(s.conflicts for s in stores) > 0
    assert await stores[1].partitions() == [PART.slug]


def chunk_of(start: int, stop: int) -> Chunk:
    n = stop - start
    columns = [
        pa.array(range(start, stop), pa.int64()),
        pa.nulls(n, ENVELOPE.field("timestamp").type),
        pa.array(np.zeros(n, dtype=np.int8)),
        pa.nulls(n, pa.binary()),
        pa.nulls(n, HEADERS),
        pa.array([b"v%d" % p for p in range(start, stop)], pa.binary()),
    ]
    envelope = pa.RecordBatch.from_arrays(columns, schema=ENVELOPE)
    return Chunk(PART, start, stop, (Frame(PART, start, stop, envelope, envelope, pa.array(np.arange(n, dtype=np.int32))),))


async def test_a_lake_is_adopted_and_read_back(store: RemoteStore) -> None:
    sink = Sink("lake", "parquet", Role.PRIMARY_RAW, OnFailure.HOLD)
    first = LakeLander(store, InlineCompute(), sink, "_twg_")
    await first.open()
    await first.land(chunk_of(0, 10))
    await first.land(chunk_of(20, 30))
    second = LakeLander(store, InlineCompute(), sink, "_twg_")
    assert await second.found(PART, 0, NOTHING) == RangeSet([(0, 10), (20, 30)])
    await second.land(chunk_of(5, 40))
    values = [v for b in await second.read_window(PART, 0, 40) for v in b.column("_twg_payload").to_pylist()]
    assert values == [b"v%d" % p for p in range(40)]
    assert len(await store.list(f"{PART.slug}/")) == 4


async def read(source: Source) -> dict[str, list[object]]:
    consumer = FileSource(source, InlineCompute())
    rows: dict[str, list[object]] = {}
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    ended = 0
    while ended < len(assigned.parts):
        for event in await consumer.poll(1_000_000, 0):
            ended += isinstance(event, Ended)
            if isinstance(event, Records):
                rows.setdefault(event.part.topic.rpartition("/")[2], []).extend(event.batch.column(5).to_pylist())
    await consumer.close()
    return rows


async def test_files_are_read_from_a_bucket(server: S3, bucket: str, store: RemoteStore) -> None:
    lines = [json.dumps({"n": n, "pad": "x" * 200}).encode() for n in range(50_000)]  # some blocks
    body = b"\n".join(lines)
    await store.create("in/1/a.json", body)
    await store.create("in/2/b.json.gz", gzip.compress(body, 1))
    await store.create("in/2/c.txt", b"not asked for")
    codec = CodecPlan("json")
    source = Source("s", "files", "c", codec, path=f"{bucket}/in/*/*.json*", format="ndjson", options=options_of(server))
    assert await read(source) == {"a.json": lines, "b.json.gz": lines}
    table = pa.table({"n": range(50_000)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=7_000)
    await store.create("in/t.parquet", sink.getvalue())
    source = Source(
        "s", "files", "c", CodecPlan("arrow"), path=f"{bucket}/in/t.parquet", format="parquet", options=options_of(server)
    )
    assert (await read(source))["t.parquet"] == table.to_pylist()


async def test_an_object_replaced_while_it_is_read_is_an_error_and_one_file_is_one_version(
    server: S3, bucket: str, store: RemoteStore
) -> None:
    body = b"x" * 999 + b"\n"
    version = await store.create("in/a.json", body * 10_000)
    source = Source("s", "files", "c", CodecPlan("json"), path=f"{bucket}/in/*", format="ndjson", options=options_of(server))
    consumer = FileSource(source, InlineCompute())
    (assigned,) = await consumer.poll(1, 0)
    assert isinstance(assigned, Assigned)
    await consumer.start(assigned.token, dict.fromkeys(assigned.parts, StoreCursor(0)))
    (first,) = await consumer.poll(10**6, 0)
    assert isinstance(first, Records)
    await store.replace("in/a.json", body.upper() * 10_000, version)
    with pytest.raises(Permanent, match=r"a\.json changed while it was read"):
        await consumer.poll(10**6, 0)
    await consumer.close()


async def test_what_cannot_be_listed_is_said(server: S3, bucket: str) -> None:
    for path, options, words in (
        (f"{bucket}/none/*.json", options_of(server), "no file matches"),
        ("s3://nowhere/*.json", options_of(server), "NoSuchBucket"),
        (f"{bucket}/*.json", options_of(server, "wrong"), "403"),
    ):
        source = Source("s", "files", "c", CodecPlan("json"), path=path, format="ndjson", options=options)
        with pytest.raises(Permanent, match=words):
            await FileSource(source, InlineCompute()).poll(1, 0)
