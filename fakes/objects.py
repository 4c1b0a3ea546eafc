"""An object store, in memory: the twin of the `ObjectStore` port.

`Bucket` is what survives everything; `ObjectsTwin` is one node's client of one URL of it. Protocol facts: Amazon S3 API,
"Conditional writes": a put with `If-None-Match: *` on a key that is there, or with `If-Match` on another ETag, answers
412 Precondition Failed; 409 Conflict says that a conditional write of this key was under way at the same time, and
nothing about the key. "CompleteMultipartUpload": it may answer 200 with an error in the body.

It may, when the Air says so: refuse with 503 SlowDown; refuse with 409; tear an upload, which leaves parts that neither a
get nor a listing ever shows; complete an upload and answer an error; lose the answer to a put that was applied, so that the
client's own second try meets 412; be full. Under the profile `lagging-list` alone, a listing leaves out what is younger
than `lag_s`: no store that the engine supports does that, so nothing may be proven under it but that the engine would notice.

It must not: lose a put that was answered; show half an object, or a part; answer 412 to a create of a key that is not
there; give two contents one version; list out of order or leave an object out (but for that profile); let a body change
after it was handed over.

A version is a hash of the content, as an ETag is: content that comes back brings its version back (ABA), and whoever needs
a generation keeps one in the body, as the coverage document does.

What is kept for likeness, and for whom: `Stored.version` and what the puts return for the checkpoints, which swap by it;
`Listed.key` for the lander, which reads intervals out of names; `Listed.size` and `Listed.version` for the conformance
machine, and nobody in the engine; `Bucket.parts` for tests of torn uploads: nobody may ever come to depend on them. The
engine's own client puts in one request and leaves no parts, but what it hears of a torn one is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pyarrow as pa
import xxhash

from fakes.faults import TORN, Air, Fate, Wire
from thalweg.errors import Exists, Permanent, Stale
from thalweg.ports import Capabilities, Listed, Stored

Body: TypeAlias = bytes | memoryview | pa.Buffer
PROFILES: Final = ("strong", "lagging-list")
HASHED_MAX: Final = 1_000
_NO_KEY: Final = re.compile(r"\0|(\A|/)\.{0,2}(/|\Z)|(\A|/)\.([^/]*\.)?(tmp|lock)\Z")
"""An empty piece, one of dots, a name that a local store keeps for itself, a NUL."""


class Bucket:
    """Objects by key. `observe(operation, key, body)` hears of each change in the step that makes it."""

    def __init__(
        self,
        air: Air,
        observe: Callable[[str, str, Any], None] | None = None,
        *,
        profile: str = "strong",
        lag_s: float = 2.0,
    ) -> None:
        if profile not in PROFILES:
            raise ValueError(f"no profile is called {profile!r}; there are {', '.join(PROFILES)}")
        self.air, self.profile, self.lag_s = air, profile, lag_s
        self.observe: Callable[[str, str, Any], None] = observe or (lambda _operation, _key, _body: None)
        self.objects: dict[str, tuple[Body, str]] = {}
        self.parts: list[tuple[str, int]] = []  # of torn uploads: key and bytes
        self._made: dict[str, float] = {}
        self._hashed: dict[int, tuple[Body, str]] = {}  # by identity, of bodies that are held here

    def body(self, key: str) -> bytes:
        """What is stored, without a wire. `KeyError` where there is none."""
        return bytes(self.objects[key][0])

    def version_of(self, body: Body) -> str:
        """The ETag of a content."""
        found = self._hashed.get(id(body))
        if found is None:
            if len(self._hashed) >= HASHED_MAX:
                self._hashed.clear()
            found = self._hashed[id(body)] = body, xxhash.xxh3_128_hexdigest(body)
        return found[1]

    def put(self, key: str, body: Body, operation: str) -> str:
        """Set an object, in whatever state its key is; its version."""
        version = self.version_of(body)
        self.objects[key] = body, version
        self._made.setdefault(key, self.air.now())
        self.observe(operation, key, body)
        return version

    def listed(self, prefix: str, after: str) -> list[Listed]:
        """What a listing shows now."""
        found = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
        if self.profile == "lagging-list":
            now = self.air.now()
            found = [k for k in found if now - self._made[k] >= self.lag_s]
        return [Listed(k, len(self.objects[k][0]), self.objects[k][1]) for k in found]

    def remove(self, key: str) -> None:
        """Delete an object, if it is there."""
        if self.objects.pop(key, None) is not None:
            del self._made[key]
            self.observe("delete", key, None)


class ObjectsTwin:
    """One node's client of `url`; `root` is the key prefix in the bucket that the URL stands for."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=True, idempotent=True)

    def __init__(self, bucket: Bucket, wire: Wire, url: str, root: str = "") -> None:
        self.bucket, self.wire, self.url, self._root = bucket, wire, url, root

    async def get(self, key: str) -> Stored | None:
        name = self._name(key)

        def apply() -> Stored | None:
            found = self.bucket.objects.get(name)
            return None if found is None else Stored(bytes(found[0]), found[1])

        return await self.wire.call("get", apply, detail=key)

    async def create(self, key: str, body: Body) -> str:
        name, body = self._name(key), _kept(body)

        def apply() -> str:
            if name in self.bucket.objects:
                raise Exists(f"object {key} exists", where=self.url)
            return self.bucket.put(name, body, "create")

        return await self.wire.call("create", apply, detail=key, changes=True, refused=self._torn(name, body))

    async def replace(self, key: str, body: bytes, version: str) -> str:
        name = self._name(key)

        def apply() -> str:
            found = self.bucket.objects.get(name)
            if found is None or found[1] != version:
                raise Stale(f"object {key} has changed", where=self.url)
            return self.bucket.put(name, body, "replace")

        return await self.wire.call("replace", apply, detail=key, changes=True, refused=self._torn(name, body))

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        folder, root = prefix.rpartition("/")[0], self._root
        if folder:
            self._name(folder)

        def apply() -> list[Listed]:
            found = self.bucket.listed(root + prefix, root + after if after else "")
            return [Listed(entry.key.removeprefix(root), entry.size, entry.version) for entry in found] if root else found

        return await self.wire.call("list", apply, detail=prefix)

    async def delete(self, key: str) -> None:
        name = self._name(key)
        await self.wire.call("delete", lambda: self.bucket.remove(name), detail=key, changes=True)

    async def close(self) -> None:
        return

    def _name(self, key: str) -> str:
        """The key in the bucket. What is no key on a real client is none here either, and never sets out."""
        if _NO_KEY.search(key):
            raise Permanent(f"{key!r} is not a key of an object store", where=self.url)
        return self._root + key

    def _torn(self, name: str, body: Body) -> Callable[[Fate], None]:
        def refused(fate: Fate) -> None:
            if fate == TORN:
                self.bucket.parts.append((name, len(body) // 2))

        return refused


def _kept(body: Body) -> Body:
    """The body as it is now. Bytes and Arrow's buffers are nobody's to change any more; what a view shows may be."""
    return bytes(body) if isinstance(body, memoryview) else body
