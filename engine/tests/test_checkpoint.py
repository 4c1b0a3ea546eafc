"""Where coverage is kept: nothing recorded is ever forgotten, whoever writes at the same time, whatever reply is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pyarrow as pa
import pytest

from thalweg.adapters import objects
from thalweg.adapters.objects import FolderStore
from thalweg.core.coverage import Document, RangeSet
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, Transient
from thalweg.ports import Capabilities, Listed, Stored, TableName, Transaction
from thalweg.runtime import checkpoint
from thalweg.runtime.checkpoint import CheckpointStore, DatabaseCheckpoints, ObjectCheckpoints

SLUG = "s/t/0@i"
ENGINE = str(Path(objects.__file__).parents[2])


class Memory:
    """One compare-and-swap place as object store and as database. Its tags are content hashes, so they come back."""

    capabilities = Capabilities(True, True, True, True)
    url = identity = "memory"

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.rows: dict[tuple[str, str], tuple[str, int]] = {}
        self.before: list[Exception] = []  # raised by the next puts, which then do nothing
        self.after: list[Exception] = []  # raised by the next puts, which have happened
        self.reads = self.puts = 0

    def _put(self) -> None:
        self.puts += 1
        if self.before:
            raise self.before.pop(0)

    def _done(self) -> None:
        if self.after:
            raise self.after.pop(0)

    # as an object store

    async def get(self, key: str) -> Stored | None:
        await asyncio.sleep(0)
        self.reads += 1
        return Stored(self.bodies[key], str(hash(self.bodies[key]))) if key in self.bodies else None

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        await asyncio.sleep(0)
        self._put()
        if key in self.bodies:
            raise Exists(key)
        self.bodies[key] = bytes(memoryview(body))
        self._done()
        return str(hash(self.bodies[key]))

    async def replace(self, key: str, body: bytes, version: str) -> str:
        await asyncio.sleep(0)
        self._put()
        if key not in self.bodies or str(hash(self.bodies[key])) != version:
            raise Stale(key)
        self.bodies[key] = body
        self._done()
        return str(hash(body))

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [Listed(k, len(b), "") for k, b in sorted(self.bodies.items()) if k.startswith(prefix) and k > after]

    async def delete(self, key: str) -> None:
        self.bodies.pop(key, None)

    async def close(self) -> None:
        return

    # as a database

    async def get_document(self, scope: str, partition: str) -> tuple[str, int] | None:
        await asyncio.sleep(0)
        self.reads += 1
        return self.rows.get((scope, partition))

    async def put_document(self, scope: str, partition: str, body: str, version: int) -> int:
        await asyncio.sleep(0)
        self._put()
        if self.rows.get((scope, partition), ("", 0))[1] != version:
            raise Stale(partition)
        self.rows[scope, partition] = body, version + 1
        self._done()
        return version + 1

    async def partitions(self, scope: str) -> Sequence[str]:
        return sorted(partition for name, partition in self.rows if name == scope)

    async def ensure_coverage(self) -> None:
        return

    async def ensure_table(
        self, table: TableName, columns: pa.Schema, *, unique: Sequence[str] = (), index: Sequence[str] = ()
    ) -> None:
        raise NotImplementedError

    async def ranges(self, scope: str, partition: str) -> Mapping[str, RangeSet]:
        raise NotImplementedError

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        raise NotImplementedError

    def damage(self, body: bytes) -> None:
        for key in self.bodies:
            self.bodies[key] = body
        for name in self.rows:
            self.rows[name] = body.decode(), self.rows[name][1]


def store_of(kind: str, memory: Memory, scope: str = "p") -> ObjectCheckpoints | DatabaseCheckpoints:
    return ObjectCheckpoints(memory, scope) if kind == "objects" else DatabaseCheckpoints(memory, scope)


def delta_of(start: int, stop: int, sink: str = "raw", slug: str = SLUG) -> Document:
    return Document(slug, 0, 0, {sink: RangeSet([(start, stop)])})


both = pytest.mark.parametrize("kind", ["objects", "relational"])


@both
async def test_what_was_merged_is_what_is_loaded(kind: str) -> None:
    memory = Memory()
    one: CheckpointStore = store_of(kind, memory)
    await one.open()
    assert await one.load(SLUG) is None
    first = await one.merge(delta_of(0, 10))
    assert first == Document(SLUG, 1, 0, {"raw": RangeSet([(0, 10)])})
    second = await one.merge(delta_of(20, 30, "warehouse"))
    assert second == Document(SLUG, 2, 0, {"raw": RangeSet([(0, 10)]), "warehouse": RangeSet([(20, 30)])})
    assert await one.load(SLUG) == await store_of(kind, memory).load(SLUG) == second
    assert await store_of(kind, memory, "other").load(SLUG) is None
    await one.merge(delta_of(0, 1, slug="s/t/1@i"))
    assert await one.partitions() == [SLUG, "s/t/1@i"]
    assert await store_of(kind, memory, "other").partitions() == []


@both
async def test_nothing_new_is_not_written(kind: str) -> None:
    memory = Memory()
    one = store_of(kind, memory)
    stored = await one.merge(delta_of(0, 10))
    assert await one.merge(delta_of(2, 5)) == stored
    assert memory.puts == 1


@both
async def test_another_writer_is_united_with(kind: str) -> None:
    memory = Memory()
    one, two = store_of(kind, memory), store_of(kind, memory)
    await one.merge(delta_of(0, 10))
    await two.merge(delta_of(10, 20))
    merged = await one.merge(delta_of(30, 40))  # what it remembers is stale by now
    assert merged.sinks == {"raw": RangeSet([(0, 20), (30, 40)])}
    assert merged.version == 3
    assert await two.load(SLUG) == merged


@both
async def test_many_writers_at_once_converge_to_the_union(kind: str) -> None:
    memory = Memory()
    stores = [store_of(kind, memory) for _ in range(4)]

    async def write(i: int) -> None:
        for k in range(40):
            while True:
                try:
                    await stores[i].merge(delta_of(2 * (4 * k + i), 2 * (4 * k + i) + 1))
                except Transient:  # in lockstep the same writer may win each time; then it is for the caller to come again
                    continue
                break

    await asyncio.gather(*(write(i) for i in range(4)))
    final = await stores[0].load(SLUG)
    assert final is not None
    assert final.ranges("raw") == RangeSet((2 * n, 2 * n + 1) for n in range(160))
    assert final.version == 160
    assert sum(store.conflicts for store in stores) > 0


@both
@pytest.mark.parametrize("happened", [False, True])
async def test_a_lost_reply_is_the_caller_s_to_try_again_and_then_read_anew(kind: str, happened: bool) -> None:
    memory = Memory()
    one = store_of(kind, memory)
    for start in (0, 10):  # of a create, then of a replace
        (memory.after if happened else memory.before).append(Ambiguous("lost"))
        with pytest.raises(Ambiguous):
            await one.merge(delta_of(start, start + 5))
        stored = await one.merge(delta_of(start, start + 5))
        assert stored == await store_of(kind, memory).load(SLUG)
        assert (start, start + 5) in list(stored.ranges("raw"))
    assert stored.version == 2


@both
async def test_always_slower_than_others_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "ATTEMPTS_MAX", 5)
    memory = Memory()
    memory.before = [Stale("k")] * 5
    with pytest.raises(Transient, match="5 writers were faster"):
        await store_of(kind, memory).merge(delta_of(0, 1))
    assert (await store_of(kind, memory).merge(delta_of(0, 1))).version == 1


@both
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"format":"thalweg-coverage/2"}', b'{"format":"thalweg-coverage/1","partition":1}']
)
async def test_a_damaged_document_is_never_written_over(kind: str, body: bytes) -> None:
    memory = Memory()
    await store_of(kind, memory).merge(delta_of(0, 10))
    memory.damage(body)
    one = store_of(kind, memory)
    for call in (one.load(SLUG), one.merge(delta_of(0, 20))):
        with pytest.raises(Permanent, match="coverage document") as caught:
            await call
        assert "memory" in caught.value.where
    assert memory.puts == 1


async def test_one_writer_alone_reads_once() -> None:
    memory = Memory()
    one = ObjectCheckpoints(memory, "p")
    for k in range(10):
        await one.merge(delta_of(k, k + 1))
    assert memory.reads == 1


# --- processes --------------------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from pathlib import Path
from thalweg.adapters.objects import FolderStore
from thalweg.core.coverage import Document, RangeSet
from thalweg.runtime.checkpoint import ObjectCheckpoints

async def main():
    files, me = FolderStore(Path(sys.argv[1])), int(sys.argv[2])
    store = ObjectCheckpoints(files, "p")
    print("ready", flush=True)
    sys.stdin.readline()
    for k in range(200):
        start = 2 * (2 * k + me)
        done = await store.merge(Document("s/t/0@i", 0, me, {f"sink{me}": RangeSet([(start, start + 1)])}))
        assert done.sinks[f"sink{me}"].size == k + 1
    print(store.conflicts, flush=True)
    await files.close()

asyncio.run(main())
"""


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(tmp_path)
    yield store
    await store.close()


async def test_two_processes_at_once_converge_to_the_union(tmp_path: Path, folder: FolderStore) -> None:
    environment = {**os.environ, "PYTHONPATH": ENGINE}
    pipe = asyncio.subprocess.PIPE
    commands = [(sys.executable, "-c", WRITER, str(tmp_path), str(me)) for me in range(2)]
    writers = [await asyncio.create_subprocess_exec(*c, stdin=pipe, stdout=pipe, env=environment) for c in commands]
    for writer in writers:
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"ready\n"
    outcomes = await asyncio.gather(*(writer.communicate(b"go\n") for writer in writers))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert sum(int(out) for out, _ in outcomes) > 0  # they did meet
    final = await ObjectCheckpoints(folder, "p").load(SLUG)
    assert final is not None
    assert final.sinks == {f"sink{me}": RangeSet((2 * (2 * k + me), 2 * (2 * k + me) + 1) for k in range(200)) for me in range(2)}
    assert (final.version, final.base) == (400, 0)
