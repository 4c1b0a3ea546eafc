"""Object stores through obstore, and folders that keep the same promises.

Translates the `ObjectStore` port: create-only puts, compare-and-swap puts, listings. It never retries (obstore's own
retries are switched off: a conditional put repeated in secret answers 412 to its own success) and never decides what a
conflict means.

What a returned put guarantees. S3 and its like: an object appears whole or not at all, under its key, once the service
has answered. A folder: the body is written beside, synced, and linked or renamed into place, and the folder is synced;
a crash leaves at most a hidden temporary file that no listing shows.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote, urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from thalweg.adapters.system import ThreadCompute
from thalweg.errors import Ambiguous, Exists, Permanent, Stale, ThalwegError, Transient
from thalweg.ports import Capabilities, Listed, ObjectStore, Stored

T = TypeVar("T")

CAPABILITIES: Final = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)
CLIENT_OPTIONS: Final = frozenset(
    {"allow_http", "timeout", "connect_timeout", "proxy_url", "user_agent", "allow_invalid_certificates"}
)

# What the service said it did not do, and may do later (S3 error codes; the HTTP status is in the client's text).
_LATER: Final = re.compile(
    r"\b(409|429|503)\b|SlowDown|OperationAborted|ConditionalRequestConflict|ServiceUnavailable|RequestTimeTooSkewed"
)
_UNSENT: Final = re.compile(r"connection refused|dns error|tcp connect|error trying to connect|failed to lookup", re.IGNORECASE)


def is_folder(url: str) -> bool:
    """Whether `url` names a local folder: a plain path, or a file URL."""
    return "://" not in url or url.startswith("file://")


def folder_of(url: str) -> Path:
    """The folder that `url` names."""
    return Path(unquote(urlsplit(url).path) if url.startswith("file://") else url)


def object_store(url: str, options: Mapping[str, str]) -> ObjectStore:
    """The store at `url`: a folder, or s3://, gs://, az:// with the client's own option names (endpoint, region, …)."""
    return FolderStore(folder_of(url)) if is_folder(url) else RemoteStore(url, options)


def _checked(key: str) -> str:
    if not key or key.startswith("/") or any(piece in ("", ".", "..") for piece in key.split("/")):
        raise Permanent(f"{key!r} is not a key of an object store", remedy="Keys are relative and have no empty or dot segments")
    return key


class RemoteStore:
    """One bucket, or a prefix of one."""

    capabilities = CAPABILITIES

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self._store = _remote(url, options)

    async def get(self, key: str) -> Stored | None:
        try:
            found = await obstore.get_async(self._store, _checked(key))
            body = bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise self._translated(error, f"get {key}", reading=True) from None
            return None
        except BaseError as error:
            raise self._translated(error, f"get {key}", reading=True) from None
        return Stored(body, found.meta["e_tag"] or "")

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        try:
            done = await obstore.put_async(self._store, _checked(key), _bytes(body), mode="create", use_multipart=False)
        except AlreadyExistsError:
            raise Exists(f"{key} exists", where=self.url) from None
        except (BaseError, FileNotFoundError) as error:
            raise self._translated(error, f"create {key}") from None
        return done["e_tag"] or ""

    async def replace(self, key: str, body: bytes, version: str) -> str:
        try:
            done = await obstore.put_async(self._store, _checked(key), body, mode={"e_tag": version}, use_multipart=False)
        except (PreconditionError, NotFoundError, FileNotFoundError, AlreadyExistsError) as error:
            if "NoSuchBucket" in str(error):
                raise self._translated(error, f"replace {key}") from None
            raise Stale(f"{key} has changed", where=self.url) from None
        except BaseError as error:
            raise self._translated(error, f"replace {key}") from None
        return done["e_tag"] or ""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        folder, _, _ = prefix.rpartition("/")
        try:
            found = await obstore.list(self._store, prefix=folder or None, offset=after or None).collect_async()
        except (BaseError, FileNotFoundError) as error:
            raise self._translated(error, f"list {prefix}", reading=True) from None
        entries = [Listed(str(f["path"]), f["size"], f["e_tag"] or "") for f in found]
        return sorted((e for e in entries if e.key.startswith(prefix) and e.key > after), key=lambda e: e.key)

    async def delete(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, _checked(key))
        except (NotFoundError, FileNotFoundError):
            return
        except BaseError as error:
            raise self._translated(error, f"delete {key}") from None

    async def close(self) -> None:
        return

    def _translated(self, error: Exception, doing: str, reading: bool = False) -> ThalwegError:
        text, words = str(error), f"{doing}: {_first_line(error)}"
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return Permanent(words, where=self.url, remedy="Check the store's credentials and its policy")
        if "NoSuchBucket" in text or isinstance(error, NotFoundError | FileNotFoundError):
            return Permanent(words, where=self.url, remedy="Create the bucket, or correct the URL")
        if reading or _LATER.search(text) or _UNSENT.search(text):
            return Transient(words, where=self.url)
        return Ambiguous(words, where=self.url)


class FolderStore:
    """A folder with the promises of an object store, for one host: locks are `flock`, so no network file system."""

    capabilities = CAPABILITIES

    def __init__(self, folder: Path) -> None:
        self._root = folder.expanduser().absolute()
        self.url = str(self._root)
        self._compute = ThreadCompute(2)

    async def get(self, key: str) -> Stored | None:
        path = self._root / _checked(key)

        def read() -> Stored | None:
            try:
                with path.open("rb") as file:
                    version = _version(os.fstat(file.fileno()))
                    return Stored(file.read(), version)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

        return await self._run(f"get {key}", read)

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        path = self._root / _checked(key)

        def write() -> str:
            temporary = self._written(path, body)
            try:
                os.link(temporary, path)  # atomic, and refused where the name is taken
            except FileExistsError:
                raise Exists(f"{key} exists", where=self.url) from None
            finally:
                temporary.unlink()
            _sync_folder(path.parent)
            return _version(path.stat())

        return await self._run(f"create {key}", write)

    async def replace(self, key: str, body: bytes, version: str) -> str:
        path = self._root / _checked(key)

        def write() -> str:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / f".{path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    current = _version(path.stat())
                except FileNotFoundError:
                    current = ""
                if current != version:
                    raise Stale(f"{key} has changed", where=self.url)
                temporary = self._written(path, body)
                os.replace(temporary, path)
                _sync_folder(path.parent)
                return _version(path.stat())

        return await self._run(f"replace {key}", write)

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        folder = self._root / prefix.rpartition("/")[0]

        def walk() -> list[Listed]:
            found = []
            for parent, folders, names in os.walk(folder):
                folders[:] = [f for f in folders if not f.startswith(".")]
                for name in names:
                    if name.startswith("."):
                        continue  # a lock, or what a crash left behind
                    key = os.path.relpath(os.path.join(parent, name), self._root).replace(os.sep, "/")
                    if key.startswith(prefix) and key > after:
                        with suppress(FileNotFoundError):
                            stat = os.stat(os.path.join(parent, name))
                            found.append(Listed(key, stat.st_size, _version(stat)))
            return sorted(found, key=lambda e: e.key)

        return await self._run(f"list {prefix}", walk)

    async def delete(self, key: str) -> None:
        path = self._root / _checked(key)
        await self._run(f"delete {key}", lambda: path.unlink(missing_ok=True))

    async def close(self) -> None:
        self._compute.close()

    def _written(self, path: Path, body: bytes | memoryview | pa.Buffer) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(name)
            raise
        return Path(name)

    async def _run(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return await self._compute.run(work)
        except PermissionError as error:
            raise Permanent(
                f"{doing}: {error.strerror}", where=self.url, remedy="Give the process access to the folder"
            ) from None
        except (NotADirectoryError, FileExistsError) as error:
            raise Permanent(f"{doing}: {error.strerror}", where=self.url, remedy="A file is in the way of a folder") from None
        except OSError as error:  # disk full, quota, I/O error: nothing was linked into place
            raise Transient(f"{doing}: {error.strerror or error}", where=self.url) from None


def _version(stat: os.stat_result) -> str:
    """A new inode for every write, and the instant of it: inode numbers alone come back."""
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes(body: bytes | memoryview | pa.Buffer) -> obstore.Bytes:
    """For the client, without a copy; Arrow's buffers call themselves signed."""
    return obstore.Bytes(memoryview(body).cast("B"))


def _plain(value: str) -> Any:
    return value.lower() == "true" if value.lower() in ("true", "false") else value


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]


# --- reading files of a source ------------------------------------------------------------------------------------


def matching(url: str, options: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Files that match the glob `url`, by path: (path or URL, size in bytes, identity). `*` stays in one folder, `**` crosses."""
    if is_folder(url):
        pattern = folder_of(url)
        anchor = Path(pattern.anchor or ".")
        wanted = str(pattern.relative_to(anchor)) if pattern.anchor else str(pattern)
        paths = sorted(p for p in anchor.glob(wanted) if p.is_file())
        return [(str(p), p.stat().st_size, _version(p.stat())) for p in paths]
    head, _, _ = re.split(r"([*?\[])", url + "*", maxsplit=1)
    root, _, _ = head.rpartition("/")
    store = _remote(root, options)
    found = []
    expression = _glob(url)
    for entry in obstore.list(store).collect():
        full = f"{root}/{entry['path']}"
        if expression.fullmatch(full):
            found.append((full, entry["size"], entry["e_tag"] or ""))
    return sorted(found)


def open_file(path: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """A seekable binary file and its identity now."""
    if is_folder(path):
        file = folder_of(path).open("rb")
        return file, _version(os.fstat(file.fileno()))
    root, _, name = path.rpartition("/")
    store = _remote(root, options)
    meta = obstore.head(store, name)
    return obstore.open_reader(store, name), meta["e_tag"] or ""


def _remote(url: str, options: Mapping[str, str]) -> Any:
    """obstore's store for `url`. Raises `Permanent` for options that it does not know."""
    client: dict[str, Any] = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=5)}
    client.update({k: _plain(v) for k, v in options.items() if k in CLIENT_OPTIONS})
    config: Any = {k: v for k, v in options.items() if k not in CLIENT_OPTIONS} or None  # names differ between stores
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
    try:
        return from_url(url, config=config, client_options=cast("Any", client), retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise Permanent(f"the object store refused its configuration: {_first_line(error)}", where=url) from None


def _glob(pattern: str) -> re.Pattern[str]:
    out = ""
    i = 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif pattern.startswith("**", i):
            out, i = out + ".*", i + 2
        elif pattern[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif pattern[i] == "?":
            out, i = out + "[^/]", i + 1
        else:
            out, i = out + re.escape(pattern[i]), i + 1
    return re.compile(out)
