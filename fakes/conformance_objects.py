"""The object store port's conformance machine: one generated script, run on two stores, must tell the same story.

Two clients work on a few keys: get, create, replace (with the version they last saw, with a stale one, with one of another
key), delete and list. What is compared: results, their order, error classes, and what is there in the end. How a store names
versions is its own affair: some name the content, so that a content that comes back brings its version back; some never repeat.
So no name is compared, and a stale version is not tried where its content has come back: there the two may rightly differ.

It knows no technology: the same scripts run on the adapter over a folder and on the in-memory twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

from thalweg.errors import ThalwegError
from thalweg.ports import ObjectStore

KEYS = ("k", "a/b", "a/c/d.json", "a b/ü=1%.parquet", "z/00000000000000000000-00000000000000000007.parquet", "zz")
BODIES = (b"", b"x", b"y", b"{}" * 50, b"\x00\xff" * 4_000)


@dataclass(frozen=True)
class Step:
    """`with_version` of a replace: the one this client last saw of the key, the one before, or one of another key."""

    kind: Literal["get", "create", "replace", "delete", "list"]
    client: int = 0
    key: str = "k"
    body: bytes = b""
    with_version: Literal["last", "stale", "foreign"] = "last"
    after: str = ""


def _steps() -> st.SearchStrategy[Step]:
    client, key, body = st.integers(0, 1), st.sampled_from(KEYS), st.sampled_from(BODIES)
    return st.one_of(
        st.builds(Step, st.just("get"), client, key),
        st.builds(Step, st.just("create"), client, key, body),
        st.builds(Step, st.just("replace"), client, key, body, st.sampled_from(["last", "last", "stale", "foreign"])),
        st.builds(Step, st.just("delete"), client, key),
        st.builds(
            Step,
            st.just("list"),
            client,
            st.sampled_from(["", "a", "a/", "a/b", "z/", "none"]),
            after=st.sampled_from(["", *KEYS]),
        ),
    )


SCRIPTS = st.lists(_steps(), min_size=4, max_size=24)


class Teller:
    """Runs a script on one store and tells what happened, in words that do not depend on what it calls a version."""

    def __init__(self, clients: Sequence[ObjectStore]) -> None:
        self._clients = clients
        self._seen: dict[tuple[int, str], list[tuple[str, bytes]]] = {}  # versions with their contents, as each client met them

    async def told(self, script: Sequence[Step]) -> list[Any]:
        """One entry a step, and the contents at the end."""
        story: list[Any] = []
        for step in script:
            try:
                story.append(await self._one(step))
            except ThalwegError as error:
                story.append((step.kind, type(error).__name__))
        everything = []
        for entry in await self._clients[0].list(""):
            stored = await self._clients[0].get(entry.key)
            everything.append((entry.key, entry.size, None if stored is None else bytes(stored.body)))
        return [*story, everything]

    def _saw(self, step: Step, version: str, body: bytes) -> None:
        self._seen.setdefault((step.client, step.key), []).append((version, body))

    async def _one(self, step: Step) -> Any:
        store = self._clients[step.client]
        if step.kind == "get":
            stored = await store.get(step.key)
            if stored is None:
                return None
            self._saw(step, stored.version, bytes(stored.body))
            return "got", bytes(stored.body)
        if step.kind == "create":
            self._saw(step, await store.create(step.key, step.body), step.body)
            return "created"
        if step.kind == "replace":
            version = await self._version(step, store)
            if version is None:
                return "came back"
            self._saw(step, await store.replace(step.key, step.body, version), step.body)
            return "replaced"
        if step.kind == "delete":
            await store.delete(step.key)
            return "deleted"
        return [(entry.key, entry.size) for entry in await store.list(step.key, step.after)]

    async def _version(self, step: Step, store: ObjectStore) -> str | None:
        """The version to name; None where its content is there again under a name that may or may not be the same."""
        if step.with_version == "foreign":
            found = next((v[-1] for (_, key), v in sorted(self._seen.items()) if key != step.key), None)
        else:
            seen = self._seen.get((step.client, step.key), [])
            found = None if not seen else seen[-1] if step.with_version == "last" else seen[0]
        if found is None:
            return "no-such-version"
        now = await store.get(step.key)
        if now is not None and now.version != found[0] and bytes(now.body) == found[1]:
            return None
        if now is not None and step.with_version != "last" and now.version == found[0]:
            return None
        return found[0]
