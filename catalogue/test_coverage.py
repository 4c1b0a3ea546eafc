"""Rows of the catalogue about what the coverage store says, and that it says no more than is so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from catalogue.given import orders
from catalogue.invariants import complete, identities, once
from catalogue.test_durability import at_ends, covered_to, landed, pipeline, stored
from catalogue.world import Cut, Engine, Fill, LoseReply, Refuse, Retain, Tear, World
from thalweg.__main__ import judged_file
from thalweg.core.ack import Ledger
from thalweg.core.coverage import Document, RangeSet
from thalweg.errors import Exists, Stale
from thalweg.ports import Capabilities, Listed, Stored
from thalweg.runtime.checkpoint import DatabaseCheckpoints, ObjectCheckpoints


def claimed(world: World, sink: str) -> set[int]:
    """Identities of all that the stored documents say is in `sink`."""
    out: set[int] = set()
    for document in world.truth.checkpoints():
        for start, stop in document.sinks.get(sink, []):
            out.update(identities([document.partition] * (stop - start), range(start, stop)).tolist())
    return out


def never_ahead(world: World, condition: Callable[[], bool]) -> Callable[[], bool]:
    """`condition`, and at each look: nothing is claimed of raw that is not there."""

    seen: set[int] = set()

    def look() -> bool:
        nonlocal seen
        now = claimed(world, "raw")  # first, since raw only grows
        if now != seen:
            assert now <= set(stored(world)), "coverage names what raw does not hold"
            seen = now
        return condition()

    return look


def test_coverage_never_over_claims_an_unwritten_batch(world: World) -> None:
    """If this is false, recovery trusts a range that was never written, and the loss is for good."""
    world.topic(world.name, 1)
    first = world.engine(pipeline(world.name))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", never_ahead(world, lambda: at_ends(world)))
    assert first.stop() == 0
    produced = 20
    # The power goes at the second try after a torn upload; between the write and its report; between that and its record.
    for kill_at, written in (("raw.sent#2", 20), ("raw.durable#1", 21), ("coverage.recorded#1", 21)):
        if kill_at == "raw.sent#2":
            world.inject(Tear("raw"))
        world.produce(world.name, orders(range(produced, produced + 20), 1))
        produced += 20
        engine = world.engine(pipeline(world.name), kill_at=kill_at)
        world.wait_until(f"it has lost its power at {kill_at}", never_ahead(world, _ended(engine)))
        assert covered_to(world, "raw") == {0: 20}, kill_at
        assert len(set(stored(world))) >= written, "what was written is there, and on no record"
    world.inject(Refuse("raw", "create", 3))
    world.inject(LoseReply("raw", "create"))
    world.produce(world.name, orders(range(produced, produced + 20), 1))
    world.engine(pipeline(world.name))
    world.wait_until("committed", never_ahead(world, lambda: at_ends(world)))
    assert covered_to(world, "raw") == world.truth.ends(world.name)
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def _ended(engine: Engine) -> Callable[[], bool]:
    return lambda: not engine.running


INTERVAL_S = 2.0
UNDER_WAY = 4
"""Times as long as one batch takes into every sink: what comes before it there, and the checkpoint and commit after it."""


def test_pod_loss_replays_at_most_one_checkpoint_interval(world: World) -> None:
    """If this is false, each crash repeats more work than an operator has been told, or leaves some of it undone."""
    world.topic(world.name, 1)
    steady = pipeline(world.name, on_failure="hold").replace("interval_ms: 200", "interval_ms: 2000")
    engine = world.engine(steady)
    n, way_s = 0, 0.0
    arrivals: list[tuple[float, int]] = []

    def arrive() -> None:
        nonlocal n
        world.produce(world.name, orders(range(n, n + 5), 1))
        n += 5
        arrivals.append((world.seconds(), n))

    for _ in range(4):
        arrive()
        world.wait_until("it is in every sink", lambda: len(set(stored(world))) == len(landed(world)) == n)
        way_s = max(way_s, world.seconds() - arrivals[-1][0])
    bound_s = INTERVAL_S + UNDER_WAY * way_s
    for phase in (0.13, 0.47, 0.91):
        began, before = world.seconds(), n
        while world.seconds() < began + 1.3 * bound_s + phase * INTERVAL_S:
            arrive()
            world.pass_time(0.6)
        arrive()
        killed = world.seconds()
        engine.kill()
        committed = world.truth.committed(world.name, world.name).get(0, 0)
        allowed = n - max((end for at, end in arrivals if at <= killed - bound_s), default=0)
        assert allowed < n - before, "the run is longer than what may be replayed"
        assert 0 < n - committed <= allowed, f"{n - committed} to be replayed, {allowed} arrived within {bound_s:.1f} s"
        engine = world.engine(steady)
        world.wait_until("committed", lambda: at_ends(world))
        assert covered_to(world, "raw") == covered_to(world, "dest") == world.truth.ends(world.name)
    assert once("dest", np.array(landed(world))).holds
    assert complete("dest", world.truth.produced(world.name), np.array(landed(world))).holds
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


class Counted:
    """A client of an object store: what was asked of it, what it read, and what was written through it."""

    def __init__(self, store: Any) -> None:
        self._store, self.url, self.capabilities = store, store.url, store.capabilities
        self.requests = self.bytes_read = 0
        self.written: list[tuple[bytes, str]] = []

    async def get(self, key: str) -> Stored | None:
        self.requests += 1
        found: Stored | None = await self._store.get(key)
        self.bytes_read += 0 if found is None else len(found.body)
        return found

    async def create(self, key: str, body: Any) -> str:
        self.requests += 1
        version: str = await self._store.create(key, body)
        self.written.append((bytes(body), version))
        return version

    async def replace(self, key: str, body: bytes, version: str) -> str:
        self.requests += 1
        made: str = await self._store.replace(key, body, version)
        self.written.append((body, made))
        return made

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        self.requests += 1
        found: list[Listed] = await self._store.list(prefix, after)
        return found

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def close(self) -> None:
        return


SLUG = "orders/t/0@i"


def says(*ranges: tuple[int, int], sink: str = "raw") -> Document:
    return Document(SLUG, 0, 0, {sink: RangeSet(ranges)})


def test_object_coverage_cas_conflict_retries_and_converges(world: World) -> None:
    """If this is false, two nodes at one checkpoint lose each other's ranges, or go round for ever."""
    each = 100

    async def both(one: Any, other: Any) -> None:
        clients = [Counted(one), Counted(other)]
        writers = [ObjectCheckpoints(client, "p") for client in clients]

        async def write(number: int) -> None:
            for i in range(each):
                start = 20 * i + 10 * number
                mine = says((start, start + 7))
                assert (await writers[number].merge(mine)).includes(mine)

        await asyncio.gather(write(0), write(1))
        everything = says(*((10 * i, 10 * i + 7) for i in range(2 * each)))
        found = await ObjectCheckpoints(clients[0], "p").load(SLUG)
        assert found is not None
        assert found.ranges("raw") == everything.ranges("raw")
        assert sum(w.conflicts for w in writers) > 0, "they never met"
        assert all(w.conflicts <= each for w in writers), "each conflict is a success of the other one"
        assert all(c.requests <= 3 * each + 3 * w.conflicts for c, w in zip(clients, writers, strict=True))
        written = [w for c in clients for w in c.written]
        assert sorted(Document.decoded(body).version for body, _ in written) == list(range(1, 2 * each + 1))
        assert len({version for _, version in written}) == 2 * each

        # Content that comes back brings its version back: whoever remembers that version must lose nothing by it.
        key = next(entry.key for entry in await one.list("_coverage/p/"))
        old = await one.get(key)
        await writers[0].load(SLUG)
        later = await writers[1].merge(says((5_000, 5_010)))
        newest = await one.get(key)
        assert newest.version != old.version
        await one.replace(key, old.body, newest.version)
        await writers[0].merge(says((6_000, 6_010)))
        await writers[1].merge(later.merged(says((7_000, 7_010))))
        found = await ObjectCheckpoints(one, "p").load(SLUG)
        assert found is not None
        assert found.ranges("raw") == everything.ranges("raw") | RangeSet([(5_000, 5_010), (6_000, 6_010), (7_000, 7_010)])

    world.between("objects", both)


def test_coverage_survives_the_sink_it_describes_being_down(world: World) -> None:
    """If this is false, the gaps of an outage are known only to the sink that had it."""
    world.topic(world.name, 2)
    world.inject(Cut("dest", 900.0))  # before anything has ever reached it
    mine = pipeline(world.name, on_failure="isolate")
    world.engine(mine)
    for i in range(1, 4):
        world.produce(world.name, orders(range(20 * (i - 1), 20 * i), 2))
        world.wait_until("committed", lambda: at_ends(world))
        told = world.coverage(mine)
        assert sorted((r["sink"], _size(r["covered"]), sum(g["stop"] - g["start"] for g in r["gaps"])) for r in told) == [
            ("dest", 0, 10 * i),
            ("dest", 0, 10 * i),
            ("raw", 10 * i, 0),
            ("raw", 10 * i, 0),
        ]
        assert len(world.truth.checkpoints()) == 2
        assert covered_to(world, "raw") == world.truth.ends(world.name)
    assert landed(world) == []


def _size(ranges: Sequence[Sequence[int]]) -> int:
    return sum(stop - start for start, stop in ranges)


DATABASE = "postgresql://thalweg@db.example/orders"
SAME_DATABASE = (
    DATABASE,
    "postgres://DB.example:5432/orders?sslmode=require",
    "postgresql://somebody:secret@db.example./orders/",
    "postgresql:///orders?host=db.example&port=5432",
    "postgresql://db%2Eexample/%6Frders",
    "host = 'db.example' dbname = 'orders' user=somebody",
    "${file:FOLDER/dsn}",
)
LOCAL = "postgresql://localhost/orders"
SAME_LOCAL = ("postgresql://127.0.0.1/orders", "postgresql://[::1]:5432/orders", "host=LOCALHOST dbname=orders", "dbname=orders")
FOLDER = "s3://bucket/curated"
SAME_FOLDER = (FOLDER, "s3://Bucket/curated/", "s3://bucket//curated", "s3://bucket/curated/coverage")

ASIDE = '  - {{name: aside, type: postgres, role: {role}, url: "{url}", table: aside}}\n'
CURATED = '  - {name: dest, type: parquet, url: "s3://bucket/curated"}\n'
COLOCATED = "coverage-colocated-with-non-raw-sink"


def test_coverage_store_refuses_colocation_with_a_non_raw_sink(tmp_path: Path) -> None:
    """If this is false, the outage of a destination takes the record of its own gaps with it."""
    (tmp_path / "dsn").write_text(DATABASE, encoding="utf-8")
    path = tmp_path / "pipeline.yaml"

    def faults(sinks: str, store: str, url: str, raw: str = "") -> list[str]:
        text = pipeline("p", more=sinks).replace("{http}", "0").replace("{kafka}", "k:9092")
        text = text.replace("{lake_options}", "{}").replace("{lake}", "s3://lake")
        if raw:
            text = re.sub(r"  - \{name: raw.*\n", raw, text)
        where = f'coverage: {{store: {store}, url: "{url}", interval_ms: 200}}'.replace("FOLDER", str(tmp_path))
        path.write_text(text.replace("coverage: {interval_ms: 200}", where), encoding="utf-8")
        return [f.code for f in judged_file(path, strict=True).faults]

    for url, spellings in ((DATABASE, SAME_DATABASE), (LOCAL, SAME_LOCAL)):
        dest = f'  - {{name: dest, type: postgres, url: "{url}", table: t, on_failure: hold}}\n'
        secondaries = [dest, *(ASIDE.format(role=role, url=url) for role in ("dlq", "quarantine"))]
        for sink in secondaries:
            for spelling in spellings:
                assert faults(sink, "relational", spelling) == [COLOCATED], (sink, spelling)
            for elsewhere in ("postgresql://db.example/coverage", "postgresql://other.example/orders", f"{url}?port=5433"):
                assert faults(sink, "relational", elsewhere) == [], (sink, elsewhere)
    for spelling in SAME_FOLDER:
        assert faults(CURATED, "objects", spelling) == [COLOCATED], spelling
    for elsewhere in ("s3://bucket/curated-coverage", "s3://bucket/coverage", "s3://lake/raw"):
        assert faults(CURATED, "objects", elsewhere) == [], elsewhere
    beside = f'  - {{name: raw, type: postgres, role: primary-raw, url: "{DATABASE}", table: raw}}\n'
    for spelling in SAME_DATABASE:
        assert COLOCATED not in faults(CURATED, "relational", spelling, beside), "beside raw is where it belongs"


def started_at(engine: Engine) -> list[int]:
    """From where it has begun to read, at each assignment of its one partition."""
    return [int(at) for at in re.findall(r"starts\W+[^'\"]+@[^'\"]+['\"]:\s*(\d+)", engine.log())]


def test_rebalance_owner_reads_durable_not_previous_local(world: World) -> None:
    """If this is false, a new owner skips what its predecessor had only in memory."""
    world.topic(world.name, 1)
    first = world.engine(pipeline(world.name))
    world.produce(world.name, orders(range(50), 1))
    world.wait_until("committed", lambda: at_ends(world))
    # It holds 500 that it could store nowhere, and does not know yet that it is no longer the owner.
    world.inject(Fill("raw", 30.0))
    world.produce(world.name, orders(range(50, 550), 1))
    world.wait_until("it holds them", lambda: "sink.retry" in first.log())
    world.pass_time(5)
    assert covered_to(world, "raw") == {0: 50}
    assert len(stored(world)) == 50
    asleep = world.seconds()
    first.pause(60)
    second = world.engine(pipeline(world.name))
    world.wait_until("committed", lambda: at_ends(world))
    assert started_at(second)[0] == 50, "at the stored checkpoint"
    assert covered_to(world, "raw") == {0: 550}
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds
    world.pass_time(max(0.0, asleep + 70 - world.seconds()))  # the first one wakes up, and is told
    first.kill()
    world.pass_time(15)
    # The other one has stored 500 more, and that is on no checkpoint.
    world.inject(Refuse("raw", "replace", 40))
    world.produce(world.name, orders(range(550, 1050), 1))
    world.wait_until("a checkpoint is refused", lambda: "coverage.retry" in second.log())
    world.pass_time(3)
    assert len(set(stored(world))) == 1050
    assert covered_to(world, "raw") == {0: 550}
    assert world.truth.committed(world.name, world.name) == {0: 550}
    second.kill()
    world.engine(pipeline(world.name))
    world.wait_until("committed", lambda: at_ends(world))
    assert covered_to(world, "raw") == {0: 1050}
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def test_concurrent_coverage_writers_merge_by_union(world: World) -> None:
    """If this is false, the later of two writers erases what the other one had recorded."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "objects": lambda client: ObjectCheckpoints(client, "p"),
        "database": lambda client: DatabaseCheckpoints(client, "p"),
    }
    for kind, store_of in kinds.items():
        wrote, found, conflicts = world.between(kind, partial(two_owners, store_of))
        for document in wrote:
            assert found.includes(document), f"{kind}: something of {document} is not in {found}"
        assert found.ranges("raw") == RangeSet([(0, 600)]), kind
        for sink, first in (("dest", 0), ("dlq", 20)):
            gaps = RangeSet((start, start + 10) for start in range(first, 600, 30))
            assert found.ranges(sink).gaps(0, 600) == gaps, (kind, sink)
        assert sum(conflicts) > 0, f"{kind}: they never met"


async def two_owners(store_of: Callable[[Any], Any], one: Any, other: Any) -> tuple[list[Document], Document | None, list[int]]:
    """Both have the partition for the moment. What each wrote, what is stored in the end, and how often they met."""
    stores = [store_of(one), store_of(other)]
    for store in stores:
        await store.open()

    async def own(number: int) -> Document:
        """As a worker does: what its ledger has learnt, over and over."""
        ledger, mine = Ledger(SLUG, 0, ["raw"]), ("dest", "dlq")[number]
        for i in range(60):
            ledger.claim(10 * i, 10 * i + 10)
            if (i + number) % 3:
                ledger.landed("raw", 10 * i, 10 * i + 10)
                ledger.landed(mine, 10 * i, 10 * i + 10)
            now = await stores[number].merge(ledger.document())
            assert now.includes(ledger.document())
            ledger.checkpointed(now)
        return ledger.document()

    wrote = await asyncio.gather(own(0), own(1))
    return list(wrote), await store_of(one).load(SLUG), [store.conflicts for store in stores]


def test_zombie_and_its_successor_forget_nothing(world: World) -> None:
    """Part of the row above: an owner that slept through a rebalance stores what it still knows, and nothing goes missing."""
    world.topic(world.name, 2)
    first = world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(100), 2))
    world.wait_until("something has landed", lambda: len(stored(world)) > 0)
    world.produce(world.name, orders(range(100, 200), 2))
    first.pause(10)
    world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(200, 300), 2))
    world.wait_until("the second one has everything", lambda: at_ends(world))
    world.pass_time(15)  # the first one wakes up, and writes what it still knows
    world.produce(world.name, orders(range(300, 400), 2))
    world.wait_until("committed", lambda: at_ends(world))
    assert covered_to(world, "raw") == covered_to(world, "dest") == world.truth.ends(world.name)


class Shelf:
    """An object store in a dictionary: what it costs to read is the same on every store."""

    url, capabilities = "shelf://", Capabilities(True, True, True, True)

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self._made = 0

    async def get(self, key: str) -> Stored | None:
        return self.objects.get(key)

    async def create(self, key: str, body: Any) -> str:
        if key in self.objects:
            raise Exists(key)
        return self._put(key, bytes(body))

    async def replace(self, key: str, body: bytes, version: str) -> str:
        if key not in self.objects or self.objects[key].version != version:
            raise Stale(key)
        return self._put(key, body)

    def _put(self, key: str, body: bytes) -> str:
        self._made += 1
        self.objects[key] = Stored(body, str(self._made))
        return str(self._made)

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        found = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
        return [Listed(k, len(self.objects[k].body), self.objects[k].version) for k in found]

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    async def close(self) -> None:
        return


def test_coverage_scan_cost_scales_with_gaps_not_updates() -> None:
    """If this is false, a pipeline that has run for a year pays for every batch of it at each start."""

    async def cost(batches: int) -> tuple[int, int]:
        """Requests and bytes of reading the coverage after so many batches, ten of which have failed."""
        base = 10**12  # a log that is not new: its positions have the same number of digits all along
        failed = {round(batches * (i + 0.5) / 10) for i in range(10)}
        shelf = Shelf()
        ledger, store = Ledger(SLUG, base, ["raw"]), ObjectCheckpoints(shelf, "p")
        for batch in range(batches):
            start = base + 10 * batch
            ledger.claim(start, start + 10)
            if batch not in failed:
                ledger.landed("raw", start, start + 10)
            if batch % 500 == 499:
                ledger.checkpointed(await store.merge(ledger.document()))
        reader = Counted(shelf)
        fresh = ObjectCheckpoints(reader, "p")
        (found,) = [await fresh.load(slug) for slug in await fresh.partitions()]
        assert found is not None
        assert found.ranges("raw").gaps(base, ledger.end).size == 10 * 10, "all ten gaps are on record"
        return reader.requests, reader.bytes_read

    few = asyncio.run(cost(1_000))
    for batches in (2_000, 1_000_000):
        many = asyncio.run(cost(batches))
        for before, after in zip(few, many, strict=True):
            assert abs(after - before) <= before / 10, f"{few} after 1,000 batches, {many} after {batches:,}"


ranges = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])),
        st.integers(0, 10).map(lambda i: (6 * i, 6 * i + 5)),  # neighbours of these lack one position each
    ),
    max_size=12,
)
steps = st.lists(st.tuples(st.sampled_from(["land", "miss", "jump"]), st.integers(1, 4)), max_size=15)


def points(found: RangeSet | list[tuple[int, int]]) -> set[int]:
    return {p for a, b in found for p in range(a, b)}


@given(one=ranges, other=ranges, walk=steps, chance=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None, database=None, phases=(Phase.generate,))  # an example is small as it is found
def test_range_compaction_never_closes_an_unverified_gap(
    one: list[tuple[int, int]], other: list[tuple[int, int]], walk: list[tuple[str, int]], chance: Any
) -> None:
    """If this is false, tidying the coverage turns a gap of one record into a claim."""
    wanted = points(one) | points(other)
    merged = says(*one).merged(says(*other))
    for found in (merged.ranges("raw"), Document.decoded(merged.encoded()).ranges("raw"), RangeSet(one) | RangeSet(other)):
        assert points(found) == wanted
        assert len(found) == sum(p - 1 not in wanted for p in wanted), "no range that could be two, no two that touch"
        assert all((p in found) is (p in wanted) for p in range(-1, 75))

    # The same over a ledger: records that landed in any order, records that failed, positions that retention took.
    ledger, at = Ledger(SLUG, 0, ["raw"]), 0
    landings: list[tuple[int, int]] = []
    gone: set[int] = set()
    lost: set[int] = set()
    for what, n in walk:
        if what == "jump":
            ledger.jump(at + n, "retention")
            gone.update(range(at, at + n))
        else:
            ledger.claim(at, at + n)
            if what == "land":
                landings.append((at, at + n))
            else:
                lost.update(range(at, at + n))
        at += n
    chance.shuffle(landings)
    stored = Document(SLUG)
    for start, stop in landings:
        ledger.landed("raw", start, stop)
        if chance.random() < 0.5:
            stored = Document.decoded(stored.merged(ledger.document()).encoded())
            ledger.checkpointed(stored)
    stored = Document.decoded(stored.merged(ledger.document()).encoded())
    ledger.checkpointed(stored)
    assert points(stored.ranges("raw")) == points(landings)
    assert points(stored.explained.get("retention", RangeSet())) == gone
    assert ledger.safe() == min(lost, default=at)


def test_retention_jump_stays_a_gap(world: World) -> None:
    """Part of the row above: what retention took while nobody read is explained, and never covered."""
    world.topic(world.name, 1)
    engine = world.engine(pipeline(world.name))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))
    assert engine.stop() == 0
    world.produce(world.name, orders(range(20, 60), 1))
    world.inject(Retain(world.name, 0, 40))
    world.engine(pipeline(world.name))
    world.wait_until("committed", lambda: at_ends(world))
    (document,) = world.truth.checkpoints()
    assert document.sinks["raw"] == [(0, 20), (40, 60)]
    assert document.explained == [(20, 40)]


def test_overlapping_identities_are_told_apart() -> None:
    """The helpers of this file tell a repeat from a loss: a spec that could not would prove nothing."""
    produced = identities([0, 0], [0, 1])
    assert not once("dest", identities([0, 0, 0], [0, 1, 1])).holds
    assert not complete("raw", produced, identities([0], [0])).holds
