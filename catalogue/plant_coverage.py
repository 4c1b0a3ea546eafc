"""Planted bugs of the rows about coverage and locators. Each turns a row red; see `catalogue.sabotage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final
from unittest.mock import patch

from catalogue import sabotage
from catalogue.sabotage import Plant


@contextmanager
def records_before_the_put() -> Iterator[None]:
    """Coverage learns of a chunk when its put begins."""
    from thalweg.runtime.pipeline import Lane

    land = Lane._land

    async def early(self: Lane, owned: Any, chunk: Any) -> None:
        owned.landed(self.sink.name, chunk.start, chunk.stop)
        await land(self, owned, chunk)

    with patch.object(Lane, "_land", early):
        yield


@contextmanager
def checkpoints_now_and_then() -> Iterator[None]:
    """Coverage is stored at every twentieth tick."""
    from thalweg.runtime.worker import Worker

    tick = Worker._tick

    async def seldom(self: Worker) -> None:
        topology = self.pipeline.topology
        slow = replace(topology, coverage=replace(topology.coverage, interval_ms=20 * topology.coverage.interval_ms))
        with patch.object(self.pipeline, "topology", slow):
            await tick(self)

    with patch.object(Worker, "_tick", seldom):
        yield


@contextmanager
def overwrites_without_precondition() -> Iterator[None]:
    """A checkpoint that has met another one is put again as it is, under whatever version is there now."""
    from thalweg.errors import Exists, Stale
    from thalweg.runtime.checkpoint import ObjectCheckpoints

    merge = ObjectCheckpoints.merge

    async def forceful(self: ObjectCheckpoints, delta: Any) -> Any:
        store = self._store

        class Blunt:
            url = store.url

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def create(_, key: str, body: bytes) -> str:
                try:
                    return await store.create(key, body)
                except Exists:
                    return await _.replace(key, body, "")

            async def replace(_, key: str, body: bytes, version: str) -> str:
                try:
                    return await store.replace(key, body, version)
                except Stale:
                    self.conflicts += 1
                    found = await store.get(key)
                    return await _.replace(key, body, "" if found is None else found.version)

        self._store = Blunt()  # type: ignore[assignment]  # as much of a store as is used here
        try:
            return await merge(self, delta)
        finally:
            self._store = store

    with patch.object(ObjectCheckpoints, "merge", forceful):
        yield


@contextmanager
def generation_stands_still() -> Iterator[None]:
    """A document is stored under the generation that it had before."""
    from thalweg.core.coverage import Document

    encoded = Document.encoded

    with patch.object(Document, "encoded", lambda self: encoded(replace(self, version=1))):
        yield


@contextmanager
def coverage_lives_in_the_destination() -> Iterator[None]:
    """The checkpoints are kept in the first table there is, whoever's it is."""
    from thalweg import node
    from thalweg.runtime.checkpoint import DatabaseCheckpoints

    def beside_the_table(topology: Any, world: Any) -> Any:
        return DatabaseCheckpoints(world.database(next(s.url for s in topology.sinks if s.table)), topology.name)

    with patch.object(node, "checkpoints_of", beside_the_table):
        yield


@contextmanager
def what_was_never_reached_is_not_told() -> Iterator[None]:
    """The command lists the sinks that the document knows, and so none that has been down from the start."""
    from thalweg import __main__ as command

    gaps_of = command.gaps_of

    with patch.object(command, "gaps_of", lambda document, sinks=(): gaps_of(document)):
        yield


@contextmanager
def an_alias_is_another_host() -> Iterator[None]:
    """Hosts are one only when they are written alike."""
    from thalweg.core import plan

    with patch.object(plan, "_host", lambda host: host):
        yield


@contextmanager
def only_destinations_are_asked() -> Iterator[None]:
    """Whether coverage would live in a sink is asked of destinations, and not of a DLQ or a quarantine."""
    from thalweg.core import plan
    from thalweg.core.topology import Role

    coverage = plan._Planner.coverage

    def lenient(self: Any, sinks: Any) -> Any:
        return coverage(self, [s for s in sinks if s.role not in (Role.DLQ, Role.QUARANTINE)])

    with patch.object(plan._Planner, "coverage", lenient):
        yield


@contextmanager
def takes_what_the_last_owner_held() -> Iterator[None]:
    """A new owner goes on from where the last one in this process had read to, stored or not."""
    from thalweg.core.ack import Ledger
    from thalweg.core.coverage import Document, RangeSet
    from thalweg.runtime.worker import Worker

    held: dict[str, Document] = {}
    claim, ready = Ledger.claim, Worker._ready

    def remembered(self: Ledger, start: int, stop: int) -> None:
        claim(self, start, stop)
        known = held.get(self.partition, Document(self.partition))
        mine = Document(self.partition, 0, self.base, {name: RangeSet([(self.base, self.end)]) for name in self.gating})
        held[self.partition] = known.merged(mine)

    async def cached(self: Worker, part: Any, stored: Any, bounds: Any) -> Any:
        load = self.store.load

        async def from_memory(slug: str) -> Any:
            return held.get(slug) or await load(slug)

        with patch.object(self.store, "load", from_memory):
            return await ready(self, part, stored, bounds)

    with patch.object(Ledger, "claim", remembered), patch.object(Worker, "_ready", cached):
        yield


@contextmanager
def last_writer_wins_in_the_database() -> Iterator[None]:
    """A checkpoint replaces the row that is stored instead of being united with it."""
    from thalweg.errors import Stale
    from thalweg.runtime.checkpoint import DatabaseCheckpoints

    async def overwrite(self: DatabaseCheckpoints, delta: Any) -> Any:
        while True:
            found = await self._database.get_document(self._scope, delta.partition)
            version = 0 if found is None else found[1]
            wanted = replace(delta, version=version + 1)
            try:
                await self._database.put_document(self._scope, delta.partition, wanted.encoded().decode(), version)
            except Stale:
                self.conflicts += 1
                continue
            return wanted

    with patch.object(DatabaseCheckpoints, "merge", overwrite):
        yield


@contextmanager
def a_line_for_each_checkpoint() -> Iterator[None]:
    """The document grows by an entry whenever it is stored."""
    from thalweg.core.coverage import Document

    encoded = Document.encoded

    with patch.object(Document, "encoded", lambda self: encoded(self) + b"\n" * (32 * self.version)):
        yield


@contextmanager
def gaps_of_one_are_tidied_away() -> Iterator[None]:
    """Two views of a partition are merged without the gaps of a single position in them."""
    from thalweg.core.coverage import Document, RangeSet

    merged = Document.merged

    def tidy(ranges: RangeSet) -> RangeSet:
        some = list(ranges)
        return RangeSet([*some, *((b, c) for (_, b), (c, _) in pairwise(some) if c - b <= 1)])

    def near(self: Document, other: Document) -> Document:
        made = merged(self, other)
        return replace(made, sinks={name: tidy(ranges) for name, ranges in made.sinks.items()})

    with patch.object(Document, "merged", near):
        yield


@contextmanager
def _headers(changed: Any) -> Iterator[None]:
    """Raw's headers as `changed` makes them of a list of key and value."""
    import pyarrow as pa

    from thalweg.runtime import lake

    rows = lake.raw_rows

    def other(prefix: str, frame: Any) -> Any:
        batch = rows(prefix, frame)
        at = batch.schema.get_field_index(f"{prefix}source_headers")
        field = batch.schema.field(at)
        lists = [None if h is None else changed([(e["key"], e["value"]) for e in h]) for h in batch.column(at).to_pylist()]
        made = [None if h is None else [{"key": k, "value": v} for k, v in h] for h in lists]
        return batch.set_column(at, field, pa.array(made, field.type))

    with patch.object(lake, "raw_rows", other), sabotage._unmemoised():
        yield


def headers_as_a_dictionary() -> Any:
    """Of headers that share a key, the last one stays."""
    return _headers(lambda headers: list(dict(headers).items()))


def null_headers_become_empty() -> Any:
    """A header without a value gets an empty one."""
    return _headers(lambda headers: [(k, v or b"") for k, v in headers])


@contextmanager
def incarnation_left_out_of_the_id() -> Iterator[None]:
    """Record ids do not know a topic from the one that had its name before."""
    from thalweg.core import batch

    prefix = batch._prefix

    with patch.object(batch, "_prefix", lambda partition: prefix(replace(partition, incarnation=""))):
        yield


@contextmanager
def id_by_the_hash_of_the_process() -> Iterator[None]:
    """Record ids are salted by what `hash` is in this process."""
    from thalweg.core import batch

    prefix = batch._prefix

    def salted(partition: Any) -> tuple[int, int]:
        low, high = prefix(partition)
        return low ^ (hash("salt") & 0xFFFF_FFFF), high

    with patch.object(batch, "_prefix", salted):
        yield


PLANTS: Final[Mapping[str, Plant]] = {
    "records-before-the-put": records_before_the_put,
    "checkpoints-now-and-then": checkpoints_now_and_then,
    "overwrites-without-precondition": overwrites_without_precondition,
    "generation-stands-still": generation_stands_still,
    "coverage-lives-in-the-destination": coverage_lives_in_the_destination,
    "what-was-never-reached-is-not-told": what_was_never_reached_is_not_told,
    "an-alias-is-another-host": an_alias_is_another_host,
    "only-destinations-are-asked": only_destinations_are_asked,
    "takes-what-the-last-owner-held": takes_what_the_last_owner_held,
    "last-writer-wins-in-the-database": last_writer_wins_in_the_database,
    "a-line-for-each-checkpoint": a_line_for_each_checkpoint,
    "gaps-of-one-are-tidied-away": gaps_of_one_are_tidied_away,
    "headers-as-a-dictionary": headers_as_a_dictionary,
    "null-headers-become-empty": null_headers_become_empty,
    "incarnation-left-out-of-the-id": incarnation_left_out_of_the_id,
    "id-by-the-hash-of-the-process": id_by_the_hash_of_the_process,
}
