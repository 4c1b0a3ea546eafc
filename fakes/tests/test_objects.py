"""The object store twin: its promises, each fault it may inject, and that no generated script tells it from a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fakes.conformance_objects import SCRIPTS, Step, Teller
from fakes.faults import COMPLETE_ERROR, CONFLICT, DISK_FULL, DONE, REFUSED, REPLY_LOST, SLOW_DOWN, TORN, Calm, Fate, Wire
from fakes.objects import Bucket, ObjectsTwin
from thalweg.adapters.objects import FolderStore
from thalweg.adapters.system import InlineCompute
from thalweg.core.batch import ENVELOPE, Chunk, Frame, Partition
from thalweg.core.coverage import NOTHING, RangeSet
from thalweg.core.topology import OnFailure, Role, Sink
from thalweg.errors import Ambiguous, Exists, Stale, Transient
from thalweg.runtime.lake import LakeLander


class Doomed(Calm):
    """The next change meets this fate."""

    def __init__(self, *fates: Fate) -> None:
        super().__init__()
        self.fates = list(fates)
        self.at_s = 0.0

    def fate(self, effect: str, operation: str) -> Fate:
        return self.fates.pop(0) if self.fates else DONE


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
async def test_a_refused_put_has_not_happened_and_claims_nothing(fate: Fate) -> None:
    store = twin(Doomed(fate))
    with pytest.raises(Transient):
        await store.create("k", b"x")
    assert await store.get("k") is None
    await store.create("k", b"x")


@pytest.mark.parametrize("fate", [REPLY_LOST, COMPLETE_ERROR], ids=lambda f: f.label)
async def test_a_put_whose_answer_is_lost_is_there_and_meets_itself(fate: Fate) -> None:
    store = twin(Doomed(fate))
    with pytest.raises(Ambiguous):
        await store.create("k", b"x")
    assert store.bucket.body("k") == b"x"
    with pytest.raises(Exists):
        await store.create("k", b"x")


async def test_a_torn_upload_leaves_parts_that_nobody_sees() -> None:
    store = twin(Doomed(TORN))
    with pytest.raises(Ambiguous):
        await store.create("k", b"x" * 10)
    assert await store.get("k") is None
    assert await store.list("") == []
    assert store.bucket.parts == [("k", 5)]


async def test_only_the_lagging_profile_lags() -> None:
    air = Later()
    store = twin(air, profile="lagging-list", lag_s=2.0)
    await store.create("k", b"x")
    assert await store.list("") == []
    assert await store.get("k") is not None
    air.at_s = 2.0
    assert [e.key for e in await store.list("")] == ["k"]
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


# --- conformance --------------------------------------------------------------------------------------------------------

FOLDERS = iter(range(10**9))


def stories(script: list[Step], folder: Path, make: Callable[[Bucket, Calm], list[ObjectsTwin]]) -> tuple[list[Any], list[Any]]:
    async def both() -> tuple[list[Any], list[Any]]:
        real = [FolderStore(folder), FolderStore(folder)]
        try:
            told = await Teller(real).told(script)
        finally:
            for store in real:
                await store.close()
        air = Calm()
        return told, await Teller(make(Bucket(air), air)).told(script)

    return asyncio.run(both())


def twins(bucket: Bucket, air: Calm) -> list[ObjectsTwin]:
    return [ObjectsTwin(bucket, Wire(air, f"w{i}", "raw"), "s3://lake") for i in range(2)]


@given(script=SCRIPTS)
@settings(max_examples=250, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
def test_no_script_tells_the_twin_from_a_folder(script: list[Step], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, here = stories(script, tmp_path_factory.mktemp(f"f{next(FOLDERS)}"), twins)
    assert here == folder


class Overwrites(ObjectsTwin):
    """A create that replaces."""

    async def create(self, key: str, body: Any) -> str:
        return await self.wire.call("create", lambda: self.bucket.put(key, body, "create"))


class Careless(ObjectsTwin):
    """A replace that looks at no version."""

    async def replace(self, key: str, body: bytes, version: str) -> str:
        return await self.wire.call("replace", lambda: self.bucket.put(key, body, "replace"))


class Unordered(ObjectsTwin):
    """A listing in another order."""

    async def list(self, prefix: str, after: str = "") -> Any:
        return (await super().list(prefix, after))[::-1]


@pytest.mark.parametrize("bad", [Overwrites, Careless, Unordered])
def test_the_machine_finds_a_twin_that_breaks_the_port(bad: type[ObjectsTwin], tmp_path: Path) -> None:
    def made(bucket: Bucket, air: Calm) -> list[ObjectsTwin]:
        return [bad(bucket, Wire(air, f"w{i}", "raw"), "s3://lake") for i in range(2)]

    script = [
        Step("create", 0, "k", b"1"),
        Step("create", 1, "k", b"2"),
        Step("create", 0, "zz", b"3"),
        Step("replace", 1, "k", b"4", "last"),
        Step("list", 0, ""),
    ]
    folder, here = stories(script, tmp_path / "f", made)
    assert here != folder
