"""Where coverage is kept: one document per partition, changed only by compare-and-swap, merged only by union.

Decides what a conflict means: somebody else wrote meanwhile, so read again, unite, try again. A document carries its
own generation number, because a store's version tag may be a hash of the content, which comes back when content does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from thalweg.core.coverage import Document
from thalweg.errors import Exists, Permanent, Stale, Transient
from thalweg.ports import Database, ObjectStore

ATTEMPTS_MAX: Final = 50
FOLDER: Final = "_coverage"


class CheckpointStore(Protocol):
    """Durable coverage."""

    async def open(self) -> None:
        """Make it ready. Raises `Transient`, `Permanent`."""
        ...

    async def load(self, partition: str) -> Document | None:
        """The stored document of a partition slug, read now."""
        ...

    async def merge(self, delta: Document) -> Document:
        """Store the union of what is stored and `delta`; what is stored now. Raises `Transient`, `Ambiguous`."""
        ...

    async def partitions(self) -> Sequence[str]:
        """Slugs that have a document."""
        ...


def _parsed(body: bytes | str, where: str) -> Document:
    try:
        return Document.decoded(body)
    except ValueError as error:
        raise Permanent(
            str(error), where=where, remedy="Restore the document from a copy; without it nothing may be committed"
        ) from None


class ObjectCheckpoints:
    """Documents in an object store: `_coverage/<scope>/<partition slug>.json`."""

    def __init__(self, store: ObjectStore, scope: str) -> None:
        self._store, self._folder = store, f"{FOLDER}/{scope}/"
        self._seen: dict[str, tuple[Document, str]] = {}  # saves a read while nobody else writes; never an authority
        self.conflicts = 0

    async def open(self) -> None:
        await self._store.get(self._folder + "probe")

    async def load(self, partition: str) -> Document | None:
        key = f"{self._folder}{partition}.json"
        stored = await self._store.get(key)
        if stored is None:
            self._seen.pop(partition, None)
            return None
        document = _parsed(stored.body, f"{self._store.url}/{key}")
        self._seen[partition] = document, stored.version
        return document

    async def merge(self, delta: Document) -> Document:
        partition, key = delta.partition, f"{self._folder}{delta.partition}.json"
        for _ in range(ATTEMPTS_MAX):
            seen = self._seen.pop(partition, None)
            if seen is None:
                await self.load(partition)
                seen = self._seen.pop(partition, None)
            before, tag = seen if seen is not None else (Document(partition), "")
            wanted = replace(before.merged(delta), version=before.version + 1)
            if seen is not None and before.includes(delta):
                self._seen[partition] = seen
                return before
            try:
                if seen is None:
                    version = await self._store.create(key, wanted.encoded())
                else:
                    version = await self._store.replace(key, wanted.encoded(), tag)
            except (Exists, Stale):
                self.conflicts += 1
                continue
            # After any other error `_seen` is empty: the next try reads what really is there.
            self._seen[partition] = wanted, version
            return wanted
        raise Transient(f"{ATTEMPTS_MAX} writers were faster, one after the other", where=f"{self._store.url}/{key}")

    async def partitions(self) -> Sequence[str]:
        found = await self._store.list(self._folder)
        names = [entry.key.removeprefix(self._folder) for entry in found]
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]


class DatabaseCheckpoints:
    """Documents in the database that holds the primary raw, or the one sink that holds the source."""

    def __init__(self, database: Database, scope: str) -> None:
        self._database, self._scope = database, scope
        self.conflicts = 0

    async def open(self) -> None:
        await self._database.ensure_coverage()

    async def load(self, partition: str) -> Document | None:
        found = await self._database.get_document(self._scope, partition)
        return None if found is None else _parsed(found[0], f"coverage of {self._scope} in {self._database.identity}")

    async def merge(self, delta: Document) -> Document:
        for _ in range(ATTEMPTS_MAX):
            found = await self._database.get_document(self._scope, delta.partition)
            before = Document(delta.partition) if found is None else _parsed(found[0], self._database.identity)
            if found is not None and before.includes(delta):
                return before
            version = 0 if found is None else found[1]
            wanted = replace(before.merged(delta), version=version + 1)
            try:
                await self._database.put_document(self._scope, delta.partition, wanted.encoded().decode(), version)
            except Stale:
                self.conflicts += 1
                continue
            return wanted
        raise Transient(f"{ATTEMPTS_MAX} writers were faster, one after the other", where=self._database.identity)

    async def partitions(self) -> Sequence[str]:
        return await self._database.partitions(self._scope)
