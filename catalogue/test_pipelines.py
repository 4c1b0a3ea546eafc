"""Rows of the catalogue about whole pipelines."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import numpy as np

from catalogue.given import orders, orders_pipeline, orders_source
from catalogue.invariants import committed_within, complete, covered, identities, no_loss, once
from catalogue.world import Cut, Message, World

NONE = np.array([], dtype=np.int64)


def test_kafka_to_postgres_happy_path(world: World) -> None:
    """If this is false, the plainest of pipelines loses, doubles or alters records, or commits what it has not stored."""
    name, n, partitions = world.name, 10_000, 4
    world.topic(name, partitions)
    world.produce(name, orders(range(n), partitions))
    engine = world.engine(orders_pipeline(name))
    ends = world.truth.ends(name)
    world.wait_until("offsets at the end of every partition", lambda: world.truth.committed(name, name) == ends)
    assert engine.page("/ready")[0] == 200, (engine.page("/health"), engine.log())
    assert engine.stop() == 0

    committed, documents = world.truth.committed(name, name), world.truth.checkpoints()
    raw = world.truth.raw()
    rows = world.truth.rows(
        f"select _twg_source_partition, _twg_source_offset, id, customer, doubled, _twg_record_id from {name}"
    )
    produced = world.truth.produced(name)
    landed = identities([r[0] for r in rows], [r[1] for r in rows])
    stored = identities([r["_twg_source_partition"] for r in raw], [r["_twg_source_offset"] for r in raw])
    for finding in (
        no_loss(produced, landed, NONE, NONE),
        once("dest", landed),
        complete("raw", produced, stored),
        covered(documents, "raw", ends),
        covered(documents, "dest", ends),
        committed_within(documents, ("raw", "dest", "dlq"), committed),
    ):
        assert finding.holds, finding
    assert committed == ends
    assert {r[2:5] for r in rows} == {(i, f"C-{i % 97}", (i + 0.5) * 2) for i in range(n)}
    assert len({r[5] for r in rows}) == n
    assert {r["_twg_payload"] for r in raw} == {m.value for m in orders(range(n), partitions)}
    assert world.truth.binary_copies() > 0


ALONE = """\
sinks:
  - {{name: dest, type: postgres, url: "{{postgres}}", table: {name}, on_failure: hold, age_ms_max: 300}}
coverage: {{interval_ms: 200}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""


def test_pipeline_runs_with_a_single_source_and_sink(world: World) -> None:
    """If this is false, the smallest pipeline needs services that nobody has asked for."""
    name = world.name
    world.topic(name, 2)
    world.produce(name, orders(range(100), 2))
    engine = world.engine(orders_source(name) + ALONE.format(name=name))
    world.wait_until("offsets at the ends", lambda: world.truth.committed(name, name) == world.truth.ends(name))
    assert engine.page("/ready")[0] == 200
    assert set(json.loads(engine.page("/health")[1])["checks"]) == {"source:orders", "sink:dest", "store:coverage"}
    assert engine.stop() == 0
    world.produce(name, orders(range(100, 150), 2))
    engine = world.engine(orders_source(name) + ALONE.format(name=name))  # it goes on where it was, by what the one database says
    world.wait_until("offsets at the ends", lambda: world.truth.committed(name, name) == world.truth.ends(name))
    assert engine.stop() == 0
    rows = world.truth.rows(f"select _twg_source_partition, _twg_source_offset from {name}")
    landed = identities([r[0] for r in rows], [r[1] for r in rows])
    assert no_loss(world.truth.produced(name), landed, NONE, NONE).holds
    assert once("dest", landed).holds
    assert world.truth.contacted() == {"kafka", "dest"}


FAN_OUT = """\
transforms:
  - {{name: lines, unnest: lines}}
  - {{name: large, input: lines, sql: "SELECT id, sku, qty * 10 AS tens FROM source WHERE qty >= 2"}}
sinks:
  - {{name: raw, type: parquet, role: primary-raw, url: "{{lake}}/raw", options: {{lake_options}}, age_ms_max: 300}}
  - {{name: heads, type: parquet, url: "{{lake}}/heads", options: {{lake_options}}, age_ms_max: 300, on_failure: hold}}
  - {{name: all, type: postgres, input: lines, url: "{{postgres}}", table: {name}, age_ms_max: 300, on_failure: hold}}
  - {{name: kept, input: large, type: parquet, url: "{{lake}}/kept", options: {{lake_options}}, age_ms_max: 300}}
  - {{name: some, type: postgres, input: large, url: "{{postgres}}", table: {name}_large, age_ms_max: 300, on_failure: isolate}}
recovery: {{enabled: true}}
coverage: {{interval_ms: 200}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""


def test_multi_sink_fanout_dag_with_unnest_offset_correlation(world: World) -> None:
    """If this is false, an order of no lines stops its partition, or one of many is called safe with some lines missing."""
    name, partitions = world.name, 2
    world.topic(name, partitions)
    world.engine(orders_source(name, "{id: int64, lines: [{sku: string, qty: int64}]}") + FAN_OUT.format(name=name))
    sizes: list[int] = []  # lines of each order, by id

    def produce(*more: int) -> None:
        """Orders of so many lines each."""
        some = []
        for n in more:
            i = len(sizes)
            lines = ",".join(f'{{"sku":"{i}-{k}","qty":{k + 1}}}' for k in range(n))
            some.append(Message(f'{{"id":{i},"lines":[{lines}]}}'.encode(), i % partitions))
            sizes.append(n)
        world.produce(name, some)

    def safe() -> bool:
        return world.truth.committed(name, name) == world.truth.ends(name)

    produce(*[0] * 10)
    world.wait_until("orders without lines are safe", safe)
    produce(*[0, 1, 2, 5, 1, 0, 17, 3] * 10)
    world.wait_until("orders of every size are safe", safe)

    # The branches end at different times: while one is away, that the others have everything moves nothing.
    before = world.truth.committed(name, name)
    world.inject(Cut("all", 30.0))
    produce(*[3, 0, 1, 4] * 10, 0, 0)

    def others() -> bool:
        ends = world.truth.ends(name)
        return all(covered(world.truth.checkpoints(), sink, ends).holds for sink in ("raw", "heads", "kept"))

    world.wait_until("each other required sink has them", others, 25)
    world.pass_time(5)
    assert world.truth.committed(name, name) == before
    world.wait_until("all is safe", safe)

    ends = world.truth.ends(name)
    world.wait_until("what is not required is there too", lambda: covered(world.truth.checkpoints(), "some", ends).holds)
    for sink in ("raw", "heads", "all", "kept"):
        finding = covered(world.truth.checkpoints(), sink, ends)
        assert finding.holds, finding
    raw = {(r["_twg_source_partition"], r["_twg_source_offset"]): _id(r["_twg_record_id"]) for r in world.truth.raw()}
    assert len(raw) == len(set(raw.values())) == len(sizes)
    locator = "_twg_source_partition, _twg_source_offset, _twg_record_id, _twg_child"
    parents = {i: (i % partitions, i // partitions) for i in range(len(sizes))}
    every = [(i, k) for i, n in enumerate(sizes) for k in range(n)]
    rows = world.truth.rows(f"select {locator}, id, sku, qty from {name}")
    assert sorted((*r[:2], _id(r[2]), *r[3:]) for r in rows) == sorted(
        (*parents[i], raw[parents[i]], k, i, f"{i}-{k}", k + 1) for i, k in every
    )
    rows = world.truth.rows(f"select {locator}, id, sku, tens from {name}_large")
    assert sorted((*r[:2], _id(r[2]), *r[4:]) for r in rows) == sorted(
        (*parents[i], raw[parents[i]], i, f"{i}-{k}", (k + 1) * 10) for i, k in every if k >= 1
    )
    assert len({r[2:4] for r in rows}) == len(rows), "a line keeps an ordinal of its own"


def _id(value: Any) -> bytes:
    """A record id, as a store or a database gives it."""
    return value.bytes if isinstance(value, UUID) else bytes(value)
