"""The object store port's conformance machine: one generated script, run on two stores, must tell the same story.

Two clients work on a few keys: get, create, replace (by a version just read, the last seen, the first seen, one of another
key), delete, list, and both at once for the same key. What is compared: results, their order, error classes, and what is there
in the end. What a store calls its versions is its own affair, so no name is compared; what the port promises of them is checked
on each store by itself:

- a get and a listing name the version that the put of that content returned;
- a put of another content changes the version;
- a version names a content: where another is there now, or none, it is stale.

Some stores name the content, so that a content that comes back brings its version back (ABA); others never repeat a version.
The port allows both. Where a replace could tell them apart, either answer is right: who is refused reads again and repeats it,
as the engine would, and the story goes on the same. `Teller.accepted` counts how often a version came back.

Whether an object and a "folder" may have one name is not asked: a store of files cannot.

It knows no technology: the same scripts run on the adapter over a folder and on the in-memory twin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from hypothesis import strategies as st

from thalweg.errors import Stale, ThalwegError
from thalweg.ports import ObjectStore

Clients: TypeAlias = Callable[[], AbstractAsyncContextManager[Sequence[ObjectStore]]]
"""Two clients of a store with nothing in it, made anew for each script."""

KEYS = ("k", "a/b", "a/c/d.json", "a b/ü=1%.parquet", "a%20b/.t@0/x", "z/00000000000000000000-00000000000000000007.parquet", "zz")
FOLDERS = ("a", "z")  # what keys have in front, and no key
NO_KEYS = ("", "/k", "k/", "a//b", "./k", "a/../k", "a/.1.tmp", ".k.lock", "a\0b")
PREFIXES = ("", "a", "a/", "a/b", "a b/ü", "a%", "k", "z/", "none", "none/", "../", "a//")
BODIES = (b"x", b"x", b"y", b"y", b"", b"\x00\xff")
UNKNOWN = "no-such-version"

Kind = Literal["get", "create", "replace", "delete", "list", "create-both", "replace-both"]
Which = Literal["read", "last", "first", "foreign", "unknown"]
Form = Literal["bytes", "view", "buffer"]


@dataclass(frozen=True)
class Step:
    """`key` is the prefix of a list. `body` is put so many `times` over, which keeps a script short to read.

    `version` of a replace: the one it reads just before, the last that this client saw of the key, the first, one of another key.
    """

    kind: Kind
    client: int = 0
    key: str = "k"
    body: bytes = b""
    times: int = 1
    version: Which = "last"
    after: str = ""
    form: Form = "bytes"

    @property
    def content(self) -> bytes:
        """What is put."""
        return self.body * self.times


def _steps(keys: Sequence[str]) -> st.SearchStrategy[Step]:
    client, body, times = st.integers(0, 1), st.sampled_from(BODIES), st.sampled_from([*[1] * 9, 4_000])
    key = st.sampled_from(keys)
    any_key, some_key = st.sampled_from([*keys] * 20 + [*FOLDERS, *NO_KEYS]), st.sampled_from([*keys] * 20 + [*NO_KEYS])
    form: st.SearchStrategy[Form] = st.sampled_from(["bytes", "view", "buffer"])
    which: st.SearchStrategy[Which] = st.sampled_from(["read", "read", "read", "last", "last", "first", "foreign", "unknown"])
    after = st.one_of(st.just(""), key, st.sampled_from(["a", "a/", "y", *KEYS]))
    return st.one_of(
        st.builds(Step, st.just("get"), client, any_key),
        st.builds(Step, st.just("create"), client, some_key, body, times, form=form),
        st.builds(Step, st.just("replace"), client, key, body, times, which),
        st.builds(Step, st.just("replace"), client, any_key, body, times, which),
        st.builds(Step, st.just("delete"), client, some_key),
        st.builds(Step, st.just("list"), client, st.sampled_from(["", "", "", "", "a", "a", *PREFIXES]), after=after),
        st.builds(Step, st.sampled_from(["create-both", "replace-both"]), client, key, body, times),
    )


SCRIPTS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True).flatmap(  # few enough to meet each other again
    lambda keys: st.lists(_steps(keys), min_size=6, max_size=24)
)

LARGE = (
    Step("create", 0, "k", b"0123456789abcdef", 400_000, form="buffer"),
    Step("get", 1, "k"),
    Step("create", 1, "k", b"0123456789abcdef", 400_000, form="view"),
    Step("replace", 1, "k", b"0123456789abcde", 400_001),
    Step("list", 0, ""),
    Step("replace", 0, "k", b"0123456789abcdef", 400_000),
    Step("get", 0, "k"),
    Step("replace", 0, "k", b"0123456789abcdef", 400_000),
)
"""Bodies above 5 MiB, where clients and services begin to put in parts."""


class Broken(AssertionError):
    """A promise of the port does not hold, or two stores tell different stories."""


@dataclass(frozen=True)
class _Now:
    """What must be under a key by what was answered. `number` counts what was put there, so that no two are one."""

    number: int
    body: bytes
    version: str


class Teller:
    """Runs a script on one store and tells what happened, in words that do not depend on what it calls a version."""

    def __init__(self, clients: Sequence[ObjectStore]) -> None:
        self._clients = clients
        self._now: dict[str, _Now] = {}
        self._seen: dict[tuple[int, str], list[_Now]] = {}  # as each client met them
        self._puts = 0
        self.accepted = 0  # versions that came back with their content

    async def told(self, script: Sequence[Step]) -> list[Any]:
        """One entry a step, and the contents at the end. Raises `Broken`."""
        story: list[Any] = []
        for step in script:
            try:
                story.append(await self._one(step))
            except ThalwegError as error:
                story.append((step.kind, type(error).__name__))
        everything = []
        for client, store in enumerate(self._clients):
            listed = await store.list("")
            everything += [(client, entry.key, entry.size, await self._get(client, entry.key)) for entry in listed]
        return [*story, everything]

    async def _one(self, step: Step) -> Any:
        store = self._clients[step.client]
        match step.kind:
            case "get":
                return "got", await self._get(step.client, step.key)
            case "create":
                self._put(step, await store.create(step.key, _formed(step.content, step.form)))
                return "created"
            case "replace":
                return await self._replace(step, store)
            case "delete":
                await store.delete(step.key)
                self._now.pop(step.key, None)
                return "deleted"
            case "list":
                return await self._list(step, store)
            case "create-both":
                return await self._both(step, lambda one: one.create(step.key, step.content))
            case "replace-both":
                now = self._now.get(step.key)
                if now is not None and now.body == step.content:
                    return "nothing to change"  # where versions name the content, both may have it
                version = UNKNOWN if now is None else now.version
                return await self._both(step, lambda one: one.replace(step.key, step.content, version))

    async def _get(self, client: int, key: str) -> bytes | None:
        stored = await self._clients[client].get(key)
        if stored is None:
            return None
        now = self._now.get(key)
        if now is None:
            raise Broken(f"{key!r} is there, and nobody put it there")
        if stored.version != now.version:
            raise Broken(f"a get of {key!r} names another version than its put")
        self._seen.setdefault((client, key), []).append(now)
        return bytes(stored.body)

    async def _list(self, step: Step, store: ObjectStore) -> Any:
        found = await store.list(step.key, step.after)
        for entry in found:
            if entry.key not in self._now or entry.version != self._now[entry.key].version:
                raise Broken(f"a listing names another version of {entry.key!r} than its put")
        return [(entry.key, entry.size) for entry in found]

    async def _replace(self, step: Step, store: ObjectStore) -> Any:
        if step.version == "read":
            await self._get(step.client, step.key)
        meant, now = self._meant(step), self._now.get(step.key)
        came_back = meant is not None and now is not None and meant.number != now.number and meant.body == now.body
        try:
            version = await store.replace(step.key, step.content, UNKNOWN if meant is None else meant.version)
        except Stale:
            if not came_back or now is None:
                raise
            version = await store.replace(step.key, step.content, now.version)
        else:
            self.accepted += came_back
            if not came_back and (now is None or meant is None or meant.number != now.number):
                raise Broken(f"a replace of {step.key!r} by a version that is not there")
        self._put(step, version)
        return "replaced"

    async def _both(self, step: Step, put: Callable[[ObjectStore], Any]) -> Any:
        """Both clients at once: who wins is nobody's affair, but one does where one can."""
        done = await asyncio.gather(*(put(one) for one in self._clients), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, ThalwegError):
                raise result
        for result in done:
            if isinstance(result, str):
                self._put(step, result)
        return step.kind, sorted("done" if isinstance(result, str) else type(result).__name__ for result in done)

    def _put(self, step: Step, version: str) -> None:
        before = self._now.get(step.key)
        if before is not None and before.body != step.content and before.version == version:
            raise Broken(f"{step.key!r} has another content and the same version")
        self._puts += 1
        self._now[step.key] = now = _Now(self._puts, step.content, version)
        self._seen.setdefault((step.client, step.key), []).append(now)

    def _meant(self, step: Step) -> _Now | None:
        if step.version == "unknown":
            return None
        if step.version == "foreign":
            others = [now for (_, key), seen in sorted(self._seen.items()) if key != step.key for now in seen[-1:]]
            return others[0] if others else None
        seen = self._seen.get((step.client, step.key))
        return None if not seen else seen[-1] if step.version != "first" else seen[0]


def _formed(body: bytes, form: Form) -> bytes | memoryview | pa.Buffer:
    return body if form == "bytes" else memoryview(body) if form == "view" else pa.py_buffer(body)


async def agree(script: Sequence[Step], one: Clients, other: Clients) -> tuple[int, int]:
    """Run `script` on both. Raises `Broken` where they differ; how many versions came back with their content, in each."""
    stories, accepted = [], []
    for make in (one, other):
        async with make() as clients:
            teller = Teller(clients)
            stories.append(await teller.told(script))
            accepted.append(teller.accepted)
    for step, here, there in zip([*script, "the end"], *stories, strict=True):
        if here != there:
            raise Broken(f"at {_brief(step)}: {_brief(here)} here, {_brief(there)} there")
    return accepted[0], accepted[1]


def _brief(what: Any) -> str:
    text = repr(what)
    return text if len(text) <= 300 else f"{text[:300]}…"
