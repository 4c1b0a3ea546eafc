"""The object stores: what each answer of a service means, and that a folder keeps a store's promises, sudden deaths included."""

from __future__ import annotations

import asyncio
import fcntl
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from thalweg.adapters import objects
from thalweg.adapters.objects import FolderStore, RemoteStore, matching, object_store
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, ThalwegError, Transient

ENGINE = str(Path(objects.__file__).parents[2])


@asynccontextmanager
async def folder_store(folder: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(folder)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FolderStore]:
    async with folder_store(tmp_path / "root") as made:
        yield made


# --- a folder ---------------------------------------------------------------------------------------------------------


async def test_a_folder_of_objects_is_no_object(store: FolderStore) -> None:
    """`Exists` would be read as "durable": a claim of data that nobody has written."""
    await store.create("a/b", b"x")
    with pytest.raises(Permanent, match="folder of other objects") as raised:
        await store.create("a", b"y")
    assert not isinstance(raised.value, Exists)
    await store.delete("a")
    assert await store.get("a") is None
    assert await store.get("a/b") is not None


async def test_create_is_create_only_and_takes_what_arrow_hands_out(store: FolderStore) -> None:
    for key, body in (("a/b", b"one"), ("a/c", memoryview(b"one")), ("a/d", pa.py_buffer(b"one"))):
        version = await store.create(key, body)
        with pytest.raises(Exists):
            await store.create(key, b"two")
        stored = await store.get(key)
        assert stored is not None
        assert (stored.body, stored.version) == (b"one", version)


async def test_replace_is_by_version_and_no_version_comes_back(store: FolderStore) -> None:
    version = await store.create("k", b"same")
    seen = {version}
    for _ in range(200):  # equal bodies, faster than a coarse clock ticks: freed inodes are used again
        stale, version = version, await store.replace("k", b"same", version)
        with pytest.raises(Stale):
            await store.replace("k", b"other", stale)
        seen.add(version)
    assert len(seen) == 201
    future = 4_000_000_000_000_000_000  # a clock that went back, or has not ticked since
    os.utime(f"{store.url}/k", ns=(future, future))
    stored = await store.get("k")
    assert stored is not None
    version = await store.replace("k", b"same", stored.version)
    assert os.stat(f"{store.url}/k").st_mtime_ns > future
    await store.delete("k")
    with pytest.raises(Stale):
        await store.replace("k", b"x", version)
    with pytest.raises(Stale):
        await store.replace("never/was", b"x", version)
    assert await store.get("k") is None
    await store.delete("k")


async def test_list_is_by_prefix_after_a_key_in_order_and_shows_no_temporary_file(store: FolderStore, tmp_path: Path) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/1", "ab/1", ".topic/0@x/1"]
    for key in keys:
        await store.create(key, b"12")
    await store.replace("a/1", b"123", (await store.list("a/1"))[0].version)  # leaves its lock
    (tmp_path / "root/a/.9-9.tmp").write_bytes(b"left by a crash")
    assert [e.key for e in await store.list("")] == sorted(keys)
    assert [e.key for e in await store.list("a/")] == ["a/1", "a/10", "a/2", "a/b/1"]
    assert [e.key for e in await store.list("a")] == ["a/1", "a/10", "a/2", "a/b/1", "ab/1"]
    assert [e.key for e in await store.list("a/", "a/10")] == ["a/2", "a/b/1"]
    assert [e.key for e in await store.list("a/", "a/1a")] == ["a/2", "a/b/1"]
    assert [e.key for e in await store.list("nothing/")] == []
    first = (await store.list("a/1"))[0]
    stored = await store.get("a/1")
    assert stored is not None
    assert (first.size, first.version) == (3, stored.version)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.1-2.tmp", ".k.lock", "a\0b"])
async def test_keys_stay_inside_the_root(store: FolderStore, key: str, tmp_path: Path) -> None:
    for call in (store.get(key), store.create(key, b""), store.replace(key, b"", "v"), store.delete(key)):
        with pytest.raises(Permanent, match="not a key"):
            await call
    assert not os.listdir(tmp_path)
    with pytest.raises(Permanent, match="not a key"):
        await store.list("../")


async def test_what_cannot_be_is_permanent_and_what_may_pass_is_not(store: FolderStore, tmp_path: Path) -> None:
    await store.create("file", b"")
    with pytest.raises(Permanent, match="in the way"):
        await store.create("file/below", b"")
    assert await store.get("file/below") is None
    assert await store.list("file/") == []
    with pytest.raises(Permanent, match="too long"):
        await store.create("x" * 300, b"")  # tried again, it would be tried for ever
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Transient, match="No space left"):
            await store.create("b", b"")
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["file"]  # nothing is left behind


async def test_a_put_that_is_in_place_but_may_not_last_is_ambiguous(store: FolderStore) -> None:
    version = await store.create("k", b"1")

    def failed(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_sync_folder", failed)
        with pytest.raises(Ambiguous):
            await store.create("new", b"1")
        with pytest.raises(Ambiguous):
            await store.replace("k", b"2", version)
        with pytest.raises(Transient):
            await store.get("k")  # who reads it would take for lasting what is not known to be
        with pytest.raises(Transient):
            await store.list("")
        with pytest.raises(Transient):
            await store.create("new", b"1")  # nor is `Exists` said of it


async def test_every_new_folder_is_synced_up_to_the_root(store: FolderStore, tmp_path: Path) -> None:
    synced: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_sync_folder", synced.append)
        await store.create("a/b/c", b"1")
    root = tmp_path / "root"
    assert {root / "a/b", root / "a", root, tmp_path} <= set(synced)


async def test_a_stopped_lock_holder_hangs_nobody(store: FolderStore, tmp_path: Path) -> None:
    version = await store.create("k", b"1")
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "root/.k.lock").open("w") as lock:
        patch.setattr(objects, "LOCK_WAITS", 3)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Transient, match="another process has held its lock"):
            await store.replace("k", b"2", version)
    assert await store.replace("k", b"2", version) != version


async def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    async with folder_store(tmp_path) as one, folder_store(tmp_path) as two:
        done = await asyncio.gather(*(s.create("k", b"%d" % i) for i, s in enumerate([one, two] * 8)), return_exceptions=True)
        won = [d for d in done if isinstance(d, str)]
        assert len(won) == 1
        assert sum(isinstance(d, Exists) for d in done) == 15
        done = await asyncio.gather(
            *(s.replace("k", b"%d" % i, won[0]) for i, s in enumerate([one, two] * 8)), return_exceptions=True
        )
        assert sum(isinstance(d, str) for d in done) == 1
        assert sum(isinstance(d, Stale) for d in done) == 15


WRITER = """
import asyncio, sys
from pathlib import Path
from thalweg.adapters.objects import FolderStore

async def main():
    store, who, i = FolderStore(Path(sys.argv[1])), sys.argv[2], 0
    version = await store.create(f"{who}/changed", b"%08d" % 0 * 20_000)
    while True:
        await store.create(f"{who}/{i:08d}", b"%08d" % i * 20_000)
        version = await store.replace(f"{who}/changed", b"%08d" % i * 20_000, version)
        print(i, flush=True)
        i += 1

asyncio.run(main())
"""


async def test_killed_at_any_instant_every_answered_put_is_whole_and_no_other_is_torn(tmp_path: Path) -> None:
    for kill in range(4):
        who = f"w{kill}"
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), who]
        environment = {**os.environ, "PYTHONPATH": ENGINE}
        writer = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, env=environment)
        assert writer.stdout is not None
        answered = [int(await writer.stdout.readline()) for _ in range(3 + kill)]
        writer.send_signal(signal.SIGKILL)  # somewhere in the next put
        answered += [int(line) async for line in writer.stdout if line.endswith(b"\n")]
        await writer.wait()
        async with folder_store(tmp_path) as store:
            listed = {e.key: e for e in await store.list(f"{who}/")}
            for i in answered:
                assert f"{who}/{i:08d}" in listed
            for key, entry in listed.items():
                stored = await store.get(key)
                assert stored is not None
                assert len(stored.body) == entry.size == 160_000
                assert stored.body == stored.body[:8] * 20_000
            changed = await store.get(f"{who}/changed")
            assert changed is not None
            assert int(changed.body[:8]) >= answered[-1]
            await store.replace(f"{who}/changed", b"free", changed.version)  # no lock is left either


# --- what a service answers -------------------------------------------------------------------------------------------


class Service:
    """Answers every request the same way; 0 hangs up instead."""

    def __init__(self) -> None:
        self.status, self.code, self.requests = 200, "", 0
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                service.requests += 1
                if service.status == 0:
                    self.close_connection = True
                    return
                body = f"<Error><Code>{service.code}</Code></Error>".encode()
                self.send_response(service.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def store(self) -> RemoteStore:
        made = object_store(
            "s3://bucket/pre?sig=s3cret",
            {
                "endpoint": f"http://127.0.0.1:{self.server.server_port}",
                "allow_http": "true",
                "access_key_id": "AKID",
                "secret_access_key": "hunter2",
                "region": "us-east-1",
            },
        )
        assert isinstance(made, RemoteStore)
        return made

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.stop()


P, T, A = Permanent, Transient, Ambiguous


@pytest.mark.parametrize(
    ("status", "code", "create", "replace", "read"),
    [
        (412, "PreconditionFailed", Exists, Stale, None),
        (409, "ConditionalRequestConflict", T, T, None),  # taken for `Exists`, it would be data that was never written
        (409, "OperationAborted", T, T, None),
        (409, "BlobAlreadyExists", Exists, T, None),
        (429, "TooManyRequests", T, T, T),
        (503, "SlowDown", T, T, T),
        (400, "RequestTimeout", T, T, T),
        (403, "RequestTimeTooSkewed", T, T, T),
        (500, "InternalError", A, A, T),
        (502, "", A, A, T),
        (504, "", A, A, T),
        (408, "", A, A, T),
        (0, "", A, A, T),
        (403, "AccessDenied", P, P, P),
        (403, "InvalidAccessKeyId", P, P, P),
        (401, "", P, P, P),
        (400, "InvalidRequest", P, P, P),
        (404, "NoSuchBucket", P, P, P),
        (301, "PermanentRedirect", P, P, P),
        (405, "MethodNotAllowed", P, P, P),
        (501, "NotImplemented", P, P, P),
    ],
)
async def test_answers_of_a_service(
    service: Service, status: int, code: str, create: type, replace: type, read: type | None
) -> None:
    store = service.store()
    service.status, service.code = status, code
    key = "409/429/503"  # a key is no answer
    wanted: list[tuple[Awaitable[object], type]] = [
        (store.create(key, b"1"), create),
        (store.replace(key, b"1", "v"), replace),
    ]
    wanted += [(store.get(key), read or ThalwegError), (store.list("a/"), read or ThalwegError)]
    for call, error in wanted:
        service.requests = 0
        with pytest.raises(error) as caught:
            await call
        if error is not ThalwegError:
            assert type(caught.value) is error
        assert service.requests == 1  # never again in secret
        assert "hunter2" not in str(caught.value)
        assert "s3cret" not in str(caught.value)
        assert "s3://bucket/pre" in str(caught.value)


async def test_no_such_key_is_none_and_stale(service: Service) -> None:
    service.status, service.code = 404, "NoSuchKey"
    store = service.store()
    assert await store.get("k") is None
    with pytest.raises(Stale):
        await store.replace("k", b"", "v")


async def test_a_service_that_is_not_there_was_not_asked() -> None:
    service = Service()
    store = service.store()
    service.stop()
    for call in (store.create("k", b"1"), store.replace("k", b"1", "v"), store.get("k"), store.list("")):
        with pytest.raises(Transient, match="Connection refused"):
            await call


def test_options_that_nobody_knows_are_refused() -> None:
    with pytest.raises(Permanent, match="refused its configuration"):
        object_store("s3://bucket", {"no_such_option": "1"})
    with pytest.raises(Permanent, match="refused its configuration"):
        object_store("ftp://bucket", {})


# --- which files a pattern means --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("d/*.csv", ["d/a.csv", "d/b.csv"]),
        ("./d//*.csv", ["d/a.csv", "d/b.csv"]),
        ("d/a.csv", ["d/a.csv"]),
        ("d/?.csv", ["d/a.csv", "d/b.csv"]),
        ("d/[!a].csv", ["d/b.csv"]),
        ("d/[ab].csv", ["d/a.csv", "d/b.csv"]),
        ("d/[1].json", ["d/[1].json"]),  # called exactly so
        ("**/*.csv", ["d/a.csv", "d/b.csv", "d/e/f/c.csv", "top.csv"]),
        ("d/**", ["d/[1].json", "d/a.csv", "d/b.csv", "d/e/f/c.csv"]),
        ("d/*/*/c.csv", ["d/e/f/c.csv"]),
        ("*/a.csv", ["d/a.csv"]),
        ("*.csv", ["top.csv"]),
        ("d/*/c.csv", []),
        ("d/e", []),
        ("nowhere/*.csv", []),
        ("top.csv/*", []),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("d/b.csv", "d/a.csv", "d/[1].json", "d/e/f/c.csv", "top.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12")
    monkeypatch.chdir(tmp_path)
    found = matching(pattern, {})
    assert [path for path, _, _ in found] == wanted
    assert all(size == 2 for _, size, _ in found)
    if not pattern.startswith("."):
        assert [path for path, _, _ in matching(f"{tmp_path}/{pattern}", {})] == [f"{tmp_path}/{name}" for name in wanted]
        assert [path for path, _, _ in matching(f"file://{tmp_path}/{pattern}", {})] == [f"{tmp_path}/{name}" for name in wanted]
