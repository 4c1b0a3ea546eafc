"""The object store twin: its promises, each fault it may inject, and that no generated script tells it from a folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from fakes.conformance_objects import LARGE, SCRIPTS, Broken, Clients, Step, agree
from fakes.faults import (
    COMPLETE_ERROR,
    CONFLICT,
    DISK_FULL,
    DONE,
    KILLED_AFTER,
    KILLED_BEFORE,
    NEVER_ARRIVED,
    REFUSED,
    REPLY_LOST,
    SLOW_DOWN,
    TORN,
    Calm,
    Fate,
    Wire,
)
from fakes.objects import Bucket, ObjectsTwin
from thalweg.adapters.objects import FolderStore
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, Chunk, Frame, Partition
from thalweg.core.coverage import NOTHING, Document, RangeSet
from thalweg.core.topology import OnFailure, Role, Sink
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, Transient
from thalweg.ports import Listed, ObjectStore, Stored
from thalweg.runtime.checkpoint import ObjectCheckpoints
from thalweg.runtime.lake import LakeLander


class Doomed(Calm):
    """The next changes meet these fates."""

    def __init__(self, *fates: Fate) -> None:
        super().__init__()
        self.fates = list(fates)
        self.addresses: list[str] = []
        self.killed = asyncio.Event()

    def fate(self, effect: str, operation: str) -> Fate:
        self.addresses.append(effect)
        return self.fates.pop(0) if self.fates else DONE

    def kill(self, node: str) -> None:
        self.killed.set()


class Later(Calm):
    """A clock that a test moves."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s


def twin(air: Calm | None = None, root: str = "", **settings_: Any) -> ObjectsTwin:
    made = air or Calm()
    return ObjectsTwin(Bucket(made, **settings_), Wire(made, "w0", "raw"), "s3://lake", root)


async def test_create_is_create_only() -> None:
    store = twin()
    version = await store.create("a/b", b"one")
    with pytest.raises(Exists):
        await store.create("a/b", b"two")
    found = await store.get("a/b")
    assert found is not None
    assert (found.body, found.version) == (b"one", version)
    assert await store.get("a") is None


async def test_replace_wants_the_current_version() -> None:
    store = twin()
    first = await store.create("k", b"one")
    second = await store.replace("k", b"two", first)
    with pytest.raises(Stale):
        await store.replace("k", b"three", first)
    await store.delete("k")
    with pytest.raises(Stale):
        await store.replace("k", b"three", second)
    await store.delete("k")  # no error where there is none


async def test_a_content_that_comes_back_brings_its_version_back() -> None:
    store = twin()
    a = await store.create("k", b"A")
    b = await store.replace("k", b"B", a)
    assert await store.replace("k", b"A", b) == a
    await store.replace("k", b"C", a)  # ABA: the version is current again, whoever it was handed to


async def test_list_is_whole_ordered_and_below_its_root() -> None:
    bucket, air = Bucket(Calm()), Calm()
    one = ObjectsTwin(bucket, Wire(air, "w0", "raw"), "s3://lake/one", "one/")
    other = ObjectsTwin(bucket, Wire(air, "w0", "raw"), "s3://lake/two", "two/")
    for key in ("b", "a/2", "a/1", "a/10"):
        await one.create(key, b"x")
    await other.create("a/1", b"else")
    assert [e.key for e in await one.list("")] == ["a/1", "a/10", "a/2", "b"]
    assert [e.key for e in await one.list("a/", "a/10")] == ["a/2"]
    assert [(e.key, e.size) for e in await other.list("a")] == [("a/1", 4)]


@pytest.mark.parametrize("fate", [REFUSED, SLOW_DOWN, CONFLICT, DISK_FULL], ids=lambda f: f.label)
async def test_a_refused_change_has_not_happened_and_claims_nothing(fate: Fate) -> None:
    air = Doomed(fate, DONE, fate, DONE, fate, DONE)
    store = twin(air)
    with pytest.raises(Transient):
        await store.create("k", b"1")
    assert await store.get("k") is None
    version = await store.create("k", b"1")
    with pytest.raises(Transient):
        await store.replace("k", b"2", version)
    assert store.bucket.body("k") == b"1"
    await store.replace("k", b"2", version)
    with pytest.raises(Transient):
        await store.delete("k")
    assert store.bucket.body("k") == b"2"
    await store.delete("k")
    assert not store.bucket.objects
    assert not store.bucket.parts
    assert air.addresses == [f"w0:raw.{operation}:k" for operation in ("create", "replace", "delete") for _ in range(2)]


@pytest.mark.parametrize("fate", [REPLY_LOST, COMPLETE_ERROR], ids=lambda f: f.label)
async def test_a_change_whose_answer_is_lost_is_there_and_meets_itself(fate: Fate) -> None:
    store = twin(Doomed(fate, DONE, fate, DONE, fate))
    with pytest.raises(Ambiguous):
        await store.create("k", b"1")
    assert store.bucket.body("k") == b"1"
    with pytest.raises(Exists):
        await store.create("k", b"1")
    stored = await store.get("k")
    assert stored is not None
    with pytest.raises(Ambiguous):
        await store.replace("k", b"2", stored.version)
    assert store.bucket.body("k") == b"2"
    with pytest.raises(Stale):
        await store.replace("k", b"2", stored.version)
    with pytest.raises(Ambiguous):
        await store.delete("k")
    assert await store.get("k") is None
    await store.delete("k")


async def test_what_never_arrived_is_as_unknown_as_what_did() -> None:
    store = twin(Doomed(NEVER_ARRIVED))
    with pytest.raises(Ambiguous):
        await store.create("k", b"1")
    assert not store.bucket.objects


@pytest.mark.parametrize("fate", [KILLED_BEFORE, KILLED_AFTER], ids=lambda f: f.label)
async def test_a_node_that_dies_of_its_put_hears_nothing(fate: Fate) -> None:
    air = Doomed(fate)
    store = twin(air)
    put = asyncio.ensure_future(store.create("k", b"1"))
    await air.killed.wait()
    assert not put.done()
    put.cancel()
    with suppress(asyncio.CancelledError):
        await put
    assert list(store.bucket.objects) == (["k"] if fate is KILLED_AFTER else [])


async def test_a_torn_upload_leaves_parts_that_nobody_sees() -> None:
    store = twin(Doomed(TORN, DONE, TORN), root="r/")
    with pytest.raises(Ambiguous):
        await store.create("k", b"x" * 10)
    assert await store.get("k") is None
    assert await store.list("") == []
    assert store.bucket.parts == [("r/k", 5)]
    version = await store.create("k", b"x" * 10)  # the parts are in nobody's way
    with pytest.raises(Ambiguous):
        await store.replace("k", b"y" * 8, version)
    assert store.bucket.body("r/k") == b"x" * 10
    assert store.bucket.parts == [("r/k", 5), ("r/k", 4)]


async def test_a_body_is_what_it_was_when_it_was_handed_over() -> None:
    store, body = twin(), bytearray(b"one")
    version = await store.create("k", memoryview(body))
    body[:] = b"two"
    assert store.bucket.body("k") == b"one"
    assert await store.create("l", memoryview(body)) != version
    assert await store.create("m", pa.py_buffer(b"one")) == version


@pytest.mark.parametrize("key", ["", "/etc", "../x", "a//b", "./a", "a/", "a/.1-2.tmp", ".k.lock", "a\0b"])
async def test_what_is_no_key_never_sets_out(key: str) -> None:
    air = Calm()
    store = twin(air)
    for call in (store.get(key), store.create(key, b""), store.replace(key, b"", "v"), store.delete(key)):
        with pytest.raises(Permanent, match="not a key"):
            await call
    with pytest.raises(Permanent, match="not a key"):
        await store.list("../")
    assert air.seen == []


async def test_only_the_lagging_profile_lags() -> None:
    air = Later()
    store = twin(air, profile="lagging-list", lag_s=2.0)
    await store.create("k", b"x")
    assert await store.list("") == []
    assert await store.get("k") is not None
    air.at_s = 2.0
    assert [e.key for e in await store.list("")] == ["k"]
    plain = twin(air)
    await plain.create("k", b"x")
    assert [e.key for e in await plain.list("")] == ["k"]
    with pytest.raises(ValueError, match="no profile"):
        Bucket(air, profile="eventual")


async def test_each_change_is_told_in_the_step_that_makes_it() -> None:
    seen: list[tuple[str, str, Any]] = []
    store = twin(observe=lambda operation, key, body: seen.append((operation, key, body)))
    version = await store.create("k", b"1")
    await store.replace("k", b"2", version)
    await store.delete("k")
    assert seen == [("create", "k", b"1"), ("replace", "k", b"2"), ("delete", "k", None)]


async def test_a_lander_writes_finds_and_reads_its_objects() -> None:
    store = twin()
    lander = LakeLander(store, InlineCompute(), Sink("raw", "parquet", Role.PRIMARY_RAW, OnFailure.HOLD), "_twg_")
    part = Partition("s", "c", "t", 0, "i")
    envelope = pa.RecordBatch.from_pylist(
        [{"position": i, "timestamp_type": 0, "value": b"%d" % i} for i in range(5)], schema=ENVELOPE
    )
    frame = Frame(part, 0, 5, envelope, envelope, pa.array(range(5), pa.int32()))
    await lander.land(Chunk(part, 0, 5, (frame,)))
    again = LakeLander(store, InlineCompute(), Sink("raw", "parquet", Role.PRIMARY_RAW, OnFailure.HOLD), "_twg_")
    assert await again.found(part, 0, NOTHING) == RangeSet([(0, 5)])
    (rows,) = await again.read_window(part, 1, 3)
    assert rows.column("_twg_payload").to_pylist() == [b"1", b"2"]


async def test_checkpoints_of_two_nodes_unite_and_an_answer_lost_is_no_conflict_for_ever() -> None:
    air = Doomed(DONE, DONE, REPLY_LOST)
    bucket = Bucket(air)
    one, two = (ObjectCheckpoints(ObjectsTwin(bucket, Wire(air, f"w{i}", "raw"), "s3://lake"), "p") for i in range(2))
    await one.merge(Document("t/0", sinks={"raw": RangeSet([(0, 5)])}))
    await two.merge(Document("t/0", sinks={"raw": RangeSet([(5, 9)])}))
    with pytest.raises(Ambiguous):
        await two.merge(Document("t/0", sinks={"raw": RangeSet([(9, 12)])}))
    after = await one.merge(Document("t/0", sinks={"raw": RangeSet([(20, 21)])}))
    assert after.sinks["raw"] == RangeSet([(0, 12), (20, 21)])
    assert one.conflicts == 1
    assert await two.partitions() == ["t/0"]


# --- conformance --------------------------------------------------------------------------------------------------------


def folder(path: Path) -> Clients:
    @asynccontextmanager
    async def made() -> AsyncIterator[Sequence[ObjectStore]]:
        stores = [FolderStore(path), FolderStore(path)]
        try:
            yield stores
        finally:
            for store in stores:
                await store.close()

    return made


def twins(kind: type[ObjectsTwin] = ObjectsTwin) -> Clients:
    @asynccontextmanager
    async def made() -> AsyncIterator[Sequence[ObjectStore]]:
        air = Calm()
        bucket = Bucket(air)
        yield [kind(bucket, Wire(air, f"w{i}", "raw"), "s3://lake", "root/") for i in range(2)]

    return made


CAME_BACK = (
    Step("create", 0, "k", b"x"),
    Step("get", 1, "k"),
    Step("replace", 1, "k", b"y"),
    Step("replace", 1, "k", b"x"),
    Step("replace", 0, "k", b"z"),
)


def test_no_script_tells_the_twin_from_a_folder(tmp_path: Path) -> None:
    numbers, came_back = count(), [0, 0]

    @given(script=SCRIPTS)
    @example(script=list(LARGE))
    @example(script=list(CAME_BACK))
    @settings(max_examples=220, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def scripts(script: list[Step]) -> None:
        here, there = asyncio.run(agree(script, folder(tmp_path / str(next(numbers))), twins()))
        came_back[0] += here
        came_back[1] += there

    scripts()
    assert next(numbers) >= 220
    assert came_back[0] == 0  # a folder never repeats a version
    assert came_back[1] > 0  # an ETag does


class Overwrites(ObjectsTwin):
    """A create that replaces."""

    async def create(self, key: str, body: Any) -> str:
        return self.bucket.put(self._name(key), body, "create")


class Refuses(ObjectsTwin):
    """A create that says 412 of a key that once was there."""

    async def create(self, key: str, body: Any) -> str:
        if any(seen[2] == key for seen in self.wire.air.seen if seen[1] == "raw.delete"):  # type: ignore[attr-defined]
            raise Exists("it was here")
        return await super().create(key, body)


class Careless(ObjectsTwin):
    """A replace that looks at no version."""

    async def replace(self, key: str, body: bytes, version: str) -> str:
        if self._name(key) not in self.bucket.objects:
            raise Stale("gone")
        return self.bucket.put(self._name(key), body, "replace")


class Creates(ObjectsTwin):
    """A replace that makes what is not there."""

    async def replace(self, key: str, body: bytes, version: str) -> str:
        if self._name(key) not in self.bucket.objects:
            return await self.create(key, body)
        return await super().replace(key, body, version)


class Racy(ObjectsTwin):
    """A create that looks and writes in two steps."""

    async def create(self, key: str, body: Any) -> str:
        if await self.get(key) is not None:
            raise Exists("it is here")
        return self.bucket.put(self._name(key), body, "create")


class Forgets(ObjectsTwin):
    """An empty put that is answered and lost."""

    async def create(self, key: str, body: Any) -> str:
        version = await super().create(key, body)
        if len(body) == 0:
            self.bucket.remove(self._name(key))
        return version


class Torn(ObjectsTwin):
    """A get that shows half an object."""

    async def get(self, key: str) -> Stored | None:
        stored = await super().get(key)
        return stored and Stored(stored.body[: len(stored.body) // 2], stored.version)


class Unordered(ObjectsTwin):
    """A listing in another order."""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        return (await super().list(prefix, after))[::-1]


class Inclusive(ObjectsTwin):
    """A listing that begins with `after` itself."""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        everything = await super().list(prefix)
        return [entry for entry in everything if entry.key >= after]


class Foldered(ObjectsTwin):
    """A listing whose prefix is a folder."""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [e for e in await super().list(prefix, after) if not prefix or e.key.startswith(prefix.rstrip("/") + "/")]


class Lags(ObjectsTwin):
    """A listing that leaves out the youngest."""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        youngest = next(reversed(self.bucket.objects), None)
        return [e for e in await super().list(prefix, after) if self._name(e.key) != youngest]


class Misnames(ObjectsTwin):
    """A listing that names versions as nobody else does."""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [Listed(e.key, e.size, f'"{e.version}"') for e in await super().list(prefix, after)]


class Decodes(ObjectsTwin):
    """Keys that are decoded on their way."""

    def _name(self, key: str) -> str:
        return super()._name(key).replace("%20", " ")


class Picky(ObjectsTwin):
    """A delete that minds where there is nothing."""

    async def delete(self, key: str) -> None:
        if await self.get(key) is None:
            raise Permanent("nothing there")
        await super().delete(key)


class Sloppy(ObjectsTwin):
    """Every key will do."""

    def _name(self, key: str) -> str:
        return self._root + key


BAD = [
    Overwrites, Refuses, Careless, Creates, Racy, Forgets, Torn, Unordered, Inclusive, Foldered, Lags, Misnames, Decodes, Picky,
    Sloppy,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_the_machine_finds_a_twin_that_breaks_the_port(bad: type[ObjectsTwin]) -> None:
    @given(script=SCRIPTS)
    @settings(
        max_examples=1_000, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def scripts(script: list[Step]) -> None:
        asyncio.run(agree(script, twins(), twins(bad)))

    with pytest.raises(Broken):
        scripts()
