"""Object stores through obstore, and folders that keep the same promises.

Translates the `ObjectStore` port: create-only puts, compare-and-swap puts, listings. It never retries (obstore's own
retries are switched off: a conditional put repeated in secret answers 412 to its own success) and never decides what a
conflict means.

What a returned put guarantees. S3 and its like: an object appears whole or not at all, under its key, once the service
has answered. A folder: the body is written beside, synced, and linked or renamed into place, and the folder is synced;
a crash leaves at most a temporary file that no listing shows. A reader of a folder syncs what it saw before it tells of
it: else an object linked just before its writer's death could be adopted, acknowledged, and undone by a power cut.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import re
from asyncio import sleep
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote

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
LOCK_WAITS: Final = 500  # of 10 ms each: a lock is held for two syncs, unless its holder was stopped
LOCK_WAIT_S: Final = 0.01

_STATUS: Final = re.compile(r"status code: (\d{3})")  # obstore hands a service's answer on as text alone
# The service says that it did nothing, and may do it later (S3 API reference, "List of error codes").
_LATER: Final = re.compile(r"SlowDown|OperationAborted|ConditionalRequestConflict|RequestTimeTooSkewed|<Code>RequestTimeout<")
_LATER_STATUS: Final = frozenset({409, 425, 429, 503})
_UNSENT: Final = re.compile(r"connection refused|dns error|tcp connect|error trying to connect|failed to lookup", re.IGNORECASE)
_PASSING: Final = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM,
        errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip


def is_folder(url: str) -> bool:
    """Whether `url` names a local folder: a plain path, or a file URL."""
    return "://" not in url or url.startswith("file://")


def folder_of(url: str) -> Path:
    """The folder that `url` names."""
    if url.startswith("file://"):
        host, slash, path = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise Permanent(f"{url} names a folder of the host {host!r}", remedy="Write file:/// and the whole path")
        return Path(slash + unquote(path))
    return Path(url)


def object_store(url: str, options: Mapping[str, str]) -> ObjectStore:
    """The store at `url`: a folder, or s3://, gs://, az:// with the client's own option names (endpoint, region, …)."""
    return FolderStore(folder_of(url)) if is_folder(url) else RemoteStore(url, options)


def _checked(key: str) -> str:
    pieces = key.split("/")
    if any(piece in ("", ".", "..") for piece in pieces) or _hidden(pieces[-1]) or "\0" in key:
        raise Permanent(f"{key!r} is not a key of an object store", remedy="Keys are relative and have no empty or dot segments")
    return key


def _folder(prefix: str) -> str:
    """The folder part of a listing's prefix: what lies under it is looked through."""
    folder = prefix.rpartition("/")[0]
    if folder:
        _checked(folder)
    return folder


class RemoteStore:
    """One bucket, or a prefix of one."""

    capabilities = CAPABILITIES

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = _shown(url)
        self._store = _remote(url, options)

    async def get(self, key: str) -> Stored | None:
        try:
            found = await obstore.get_async(self._store, _checked(key))
            body = bytes(await found.bytes_async())
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, NotFoundError | FileNotFoundError) and "NoSuchBucket" not in str(error):
                return None
            raise _translated(error, f"get {key}", self.url, reading=True) from None
        return Stored(body, found.meta["e_tag"] or "")

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        try:
            done = await obstore.put_async(self._store, _checked(key), _bytes(body), mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            # 409 is also S3's word for two conditional puts at once, of which it may have refused both. Only Azure says
            # 409 of a key that is there, and then says so.
            if _status(error) == 409 and "BlobAlreadyExists" not in str(error):
                raise Transient(f"create {key}: {_first_line(error)}", where=self.url) from None
            raise Exists(f"{key} exists", where=self.url) from None
        except (BaseError, FileNotFoundError) as error:
            raise _translated(error, f"create {key}", self.url) from None
        return done["e_tag"] or ""

    async def replace(self, key: str, body: bytes, version: str) -> str:
        try:
            done = await obstore.put_async(self._store, _checked(key), body, mode={"e_tag": version}, use_multipart=False)
        except (PreconditionError, NotFoundError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise _translated(error, f"replace {key}", self.url) from None
            raise Stale(f"{key} has changed", where=self.url) from None
        except BaseError as error:
            raise _translated(error, f"replace {key}", self.url) from None
        return done["e_tag"] or ""

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        try:
            found = await obstore.list(self._store, prefix=_folder(prefix) or None, offset=after or None).collect_async()
        except (BaseError, FileNotFoundError) as error:
            raise _translated(error, f"list {prefix}", self.url, reading=True) from None
        entries = [Listed(str(f["path"]), f["size"], f["e_tag"] or "") for f in found]
        return sorted((e for e in entries if e.key.startswith(prefix) and e.key > after), key=lambda e: e.key)

    async def delete(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, _checked(key))
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, NotFoundError | FileNotFoundError) and "NoSuchBucket" not in str(error):
                return
            raise _translated(error, f"delete {key}", self.url) from None

    async def close(self) -> None:
        return


def _status(error: BaseException) -> int:
    """The HTTP status the service answered with; 0 where it did not answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _translated(error: BaseException, doing: str, where: str, reading: bool = False) -> ThalwegError:
    """What the client's error means: by the service's own words, then by its status, then by whether it was asked at all."""
    text, words, status = str(error), f"{doing}: {_first_line(error)}", _status(error)
    if _LATER.search(text) or status in _LATER_STATUS:
        return Transient(words, where=where)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return Permanent(words, where=where, remedy="Check the store's credentials and its policy")
    if "NoSuchBucket" in text or isinstance(error, NotFoundError | FileNotFoundError) or status == 404:
        return Permanent(words, where=where, remedy="Create the bucket, or correct the URL")
    if "incorrectly configured region" in text or status in (301, 307, 308):
        return Permanent(words, where=where, remedy="Set option region to the bucket's own")
    if status in (405, 501):
        return Permanent(words, where=where, remedy="The store must support conditional puts (If-None-Match, If-Match)")
    if 400 <= status < 500 and status != 408:
        return Permanent(words, where=where, remedy="Check the URL and the store's options")
    if reading or _UNSENT.search(text):
        return Transient(words, where=where)
    return Ambiguous(words, where=where)


class FolderStore:
    """A folder with the promises of an object store, for one host: locks are `flock`, so no network file system."""

    capabilities = CAPABILITIES

    def __init__(self, folder: Path) -> None:
        self._root = folder.expanduser().absolute()
        self.url = str(self._root)
        self._compute = ThreadCompute(2)
        self._names = itertools.count()
        self._settled: set[Path] = set()

    async def get(self, key: str) -> Stored | None:
        path = self._root / _checked(key)

        def read() -> Stored | None:
            try:
                with path.open("rb") as file:
                    version = _version(os.fstat(file.fileno()))
                    body = file.read()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            self._settle(path.parent)
            return Stored(body, version)

        return await self._run(f"get {key}", read)

    async def create(self, key: str, body: bytes | memoryview | pa.Buffer) -> str:
        path = self._root / _checked(key)

        def write() -> str:
            temporary, version = self._written(path, body)
            try:
                os.link(temporary, path)  # atomic, and refused where the name is taken
            except FileExistsError:
                if path.is_dir():  # keys below it made it; to say that this one exists would be a claim of data never written
                    what = f"{key} cannot be an object here: it is a folder of other objects"
                    raise Permanent(what, where=self.url, remedy="Use an object store, or another folder") from None
                self._settle(path.parent)  # its writer may have died before it could
                raise Exists(f"{key} exists", where=self.url) from None
            finally:
                temporary.unlink()
            self._settled_after(path, f"create {key}")
            return version

        return await self._run(f"create {key}", write)

    async def replace(self, key: str, body: bytes, version: str) -> str:
        path = self._root / _checked(key)

        def write() -> str | None:
            try:
                lock = (path.parent / f".{path.name}.lock").open("w")
            except FileNotFoundError:
                raise Stale(f"{key} has changed", where=self.url) from None
            with lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
                try:
                    current = path.stat()
                except FileNotFoundError:
                    current = None
                if current is None or _version(current) != version:
                    raise Stale(f"{key} has changed", where=self.url)
                # Inodes come back and clocks are coarse: what is written later is also marked as later.
                temporary, new = self._written(path, body, current.st_mtime_ns + 1)
                os.replace(temporary, path)
                self._settled_after(path, f"replace {key}")
                return new

        for _ in range(LOCK_WAITS):
            done = await self._run(f"replace {key}", write)
            if done is not None:
                return done
            await sleep(LOCK_WAIT_S)
        raise Transient(f"replace {key}: another process has held its lock for {LOCK_WAITS * LOCK_WAIT_S:.0f} s", where=self.url)

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        folder = self._root / _folder(prefix)

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        def walk() -> list[Listed]:
            found: list[Listed] = []
            for parent, _, names in os.walk(folder, onerror=failed):
                seen = len(found)
                for name in names:
                    key = os.path.relpath(os.path.join(parent, name), self._root).replace(os.sep, "/")
                    if not _hidden(name) and key.startswith(prefix) and key > after:
                        with suppress(FileNotFoundError):
                            stat = os.stat(os.path.join(parent, name))
                            found.append(Listed(key, stat.st_size, _version(stat)))
                if len(found) > seen:
                    self._settle(Path(parent))
            return sorted(found, key=lambda e: e.key)

        return await self._run(f"list {prefix}", walk)

    async def delete(self, key: str) -> None:
        path = self._root / _checked(key)

        def remove() -> None:
            if path.is_dir():
                return  # of other objects; there is none by this name
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
                self._settle(path.parent)

        await self._run(f"delete {key}", remove)

    async def close(self) -> None:
        self._compute.close()

    def _written(self, path: Path, body: bytes | memoryview | pa.Buffer, after_ns: int = 0) -> tuple[Path, str]:
        """A synced temporary file beside `path`, modified no earlier than `after_ns`, and the version it will be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            temporary = path.parent / f".{os.getpid()}-{next(self._names)}.tmp"
            try:
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileExistsError:
                continue  # left by a process that had our number
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                file.flush()
                stat = os.fstat(handle)
                if stat.st_mtime_ns < after_ns:
                    os.utime(handle, ns=(stat.st_atime_ns, after_ns))
                os.fsync(handle)
                return temporary, _version(os.fstat(handle))
        except BaseException:
            temporary.unlink()
            raise

    def _settle(self, folder: Path) -> None:
        """Sync the entries of `folder`; the first time those of its parents too, who may be new."""
        _sync_folder(folder)
        if folder not in self._settled:
            for parent in folder.parents:
                if parent.is_relative_to(self._root) or parent == self._root.parent:
                    _sync_folder(parent)
                else:
                    with suppress(OSError):  # others' folders, seldom ours to open
                        _sync_folder(parent)
            self._settled.add(folder)

    def _settled_after(self, path: Path, doing: str) -> None:
        try:
            self._settle(path.parent)
        except OSError as error:
            raise Ambiguous(f"{doing}: written, but not known to be on disk: {error.strerror}", where=self.url) from None

    async def _run(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return await self._compute.run(work)
        except PermissionError as error:
            raise Permanent(
                f"{doing}: {error.strerror}", where=self.url, remedy="Give the process access to the folder"
            ) from None
        except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
            raise Permanent(f"{doing}: {error.strerror}", where=self.url, remedy="A file is in the way of a folder") from None
        except OSError as error:  # nothing was put into place
            kind = Transient if error.errno in _PASSING else Permanent
            raise kind(f"{doing}: {error.strerror or error}", where=self.url) from None


def _hidden(name: str) -> bool:
    """A lock, or what a crash left behind."""
    return name.startswith(".") and name.endswith((".tmp", ".lock"))


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    """The client's sentence; of the service's answer its code and message, or what the system says of the connection."""
    text = str(error)
    line = re.sub(r"(://[^\s?]+)\?\S+", r"\1", text.split("\n", 1)[0].partition("<")[0])  # a query may hold a signature
    said = [found[1] for tag in ("Code", "Message") if (found := re.search(f"<{tag}>([^<]+)</{tag}>", text))]
    said += re.findall(r'kind: \w+,\s+message: "([^"]+)"', text)[-1:]
    return f"{line.strip()} {': '.join(said)}".strip(" :")[:400]


def _shown(url: str) -> str:
    """`url` for messages: without user, password, query."""
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0])


# --- reading files of a source ------------------------------------------------------------------------------------


def matching(url: str, options: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Files that match the glob `url`, by path: (path or URL, size in bytes, identity).

    `*`, `?` and `[…]` stay in one folder, `**` crosses. A local file that is called exactly so matches itself. Raises
    `Permanent`, `Transient`.
    """
    if is_folder(url):
        pattern = str(folder_of(url))  # one slash at a time, no leading dot
        return _matching_here(pattern, _glob(pattern))
    expression = _glob(url)
    root = re.split(r"[*?\[]", url, maxsplit=1)[0].rpartition("/")[0]
    found: list[tuple[str, int, str]] = []
    try:
        for entry in obstore.list(_remote(root, options)).collect():
            full = f"{root}/{entry['path']}"
            if expression.fullmatch(full):
                found.append((full, entry["size"], entry["e_tag"] or ""))
    except (BaseError, FileNotFoundError) as error:
        raise _translated(error, f"list {_shown(url)}", _shown(root), reading=True) from None
    return sorted(found)


def _matching_here(pattern: str, expression: re.Pattern[str]) -> list[tuple[str, int, str]]:
    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found: list[tuple[str, int, str]] = []
    try:
        if os.path.isfile(pattern):
            paths = [pattern]
        else:
            paths = []
            head, slash, _ = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")
            for parent, folders, names in os.walk(head or slash or ".", onerror=failed):
                inside = (parent if slash else parent.removeprefix(".").removeprefix("/")).rstrip("/")
                before = f"{inside}/" if inside or slash else ""
                paths.extend(p for p in (before + name for name in names) if expression.fullmatch(p) and os.path.isfile(p))
                if "**" not in pattern and before.count("/") >= pattern.count("/"):
                    folders.clear()  # what is below has more slashes than any match
        for path in sorted(paths):
            with suppress(FileNotFoundError):
                stat = os.stat(path)
                found.append((path, stat.st_size, _identity(stat)))
    except OSError as error:
        raise Permanent(
            f"{error.filename or pattern}: {error.strerror or error}", remedy="Correct the path, or its access"
        ) from None
    return found


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns}-{stat.st_size}"


class SourceFile:
    """An open file of a source: a seekable binary `file`, and whether it still is the one that was listed."""

    def __init__(self, path: str, options: Mapping[str, str], identity: str) -> None:
        """Raises `Permanent` when `path` is gone, `Transient`."""
        self._wanted, self._local = identity, is_folder(path)
        self.file: io.BufferedIOBase
        if self._local:
            self.file = folder_of(path).open("rb")
        else:
            root, _, name = path.rpartition("/")
            self.file = io.BufferedReader(_RemoteFile(_remote(root, options), name, path, identity), 1 << 20)

    def unchanged(self) -> bool:
        """Looked up at the file that is open. An object store is asked for the one version with each read instead."""
        return not self._local or _identity(os.fstat(self.file.fileno())) == self._wanted

    def close(self) -> None:
        self.file.close()


class Changed(Exception):
    """The object is not the version asked for."""


class _RemoteFile(io.RawIOBase):
    """One version of an object, read by ranges."""

    def __init__(self, store: Any, name: str, path: str, version: str) -> None:
        self._store, self._name, self._path, self._version, self._at = store, name, path, version, 0
        meta = self._asked(lambda: obstore.head(store, name))
        if (meta["e_tag"] or "") != version:
            raise Changed
        self._size: int = meta["size"]

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except PreconditionError:
            raise Changed from None
        except (BaseError, OSError) as error:
            raise _translated(error, f"read {_shown(self._path)}", "", reading=True) from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        wanted: Any = {"range": (self._at, stop)}
        if self._version:
            wanted["if_match"] = self._version
        body = self._asked(lambda: memoryview(obstore.get(self._store, self._name, options=wanted).bytes()))
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)


def _remote(url: str, options: Mapping[str, str]) -> Any:
    """obstore's store for `url`. Raises `Permanent` for options that it does not know."""
    client: dict[str, Any] = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=5)}
    client.update({k: _plain(v) for k, v in options.items() if k in CLIENT_OPTIONS})
    config: Any = {k: v for k, v in options.items() if k not in CLIENT_OPTIONS} or None  # names differ between stores
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
    try:
        return from_url(url, config=config, client_options=cast("Any", client), retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise Permanent(f"the object store refused its configuration: {_first_line(error)}", where=_shown(url)) from None


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
        elif pattern[i] == "[" and (close := pattern.find("]", i + 2)) > 0:
            inside = pattern[i + 1 : close].replace("\\", "\\\\").replace("[", "\\[")
            inside = "^/" + inside[1:] if inside[0] == "!" else inside.replace("^", "\\^")
            out, i = f"{out}[{inside}]", close + 1
        else:
            out, i = out + re.escape(pattern[i]), i + 1
    return re.compile(out, re.DOTALL)
