"""Rows of the catalogue about whole pipelines."""

from __future__ import annotations

import json

import numpy as np

from catalogue.given import orders, orders_pipeline
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
pipeline: {{name: {name}}}
sources:
  - name: orders
    type: kafka
    cluster_id: c1
    topics: [{name}]
    offset_reset: earliest
    options: {{bootstrap.servers: "{{kafka}}", session.timeout.ms: 6000, heartbeat.interval.ms: 500}}
    codec: {{type: json, schema: {{id: int64, customer: string, amount: float64}}}}
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
    engine = world.engine(ALONE.format(name=name))
    world.wait_until("offsets at the ends", lambda: world.truth.committed(name, name) == world.truth.ends(name))
    assert engine.page("/ready")[0] == 200
    assert engine.stop() == 0
    rows = world.truth.rows(f"select _twg_source_partition, _twg_source_offset from {name}")
    landed = identities([r[0] for r in rows], [r[1] for r in rows])
    assert no_loss(world.truth.produced(name), landed, NONE, NONE).holds
    assert world.truth.contacted() == {"kafka", "dest"}


FAN_OUT = """\
pipeline: {{name: {name}}}
sources:
  - name: orders
    type: kafka
    cluster_id: c1
    topics: [{name}]
    offset_reset: earliest
    options: {{bootstrap.servers: "{{kafka}}", session.timeout.ms: 6000, heartbeat.interval.ms: 500}}
    codec: {{type: json, schema: {{id: int64, lines: [{{sku: string, n: int64}}]}}}}
transforms:
  - {{name: lines, unnest: lines}}
sinks:
  - {{name: raw, type: parquet, role: primary-raw, url: "{{lake}}/raw", options: {{lake_options}}, age_ms_max: 300}}
  - {{name: lines, type: postgres, input: lines, url: "{{postgres}}", table: {name}, on_failure: hold, age_ms_max: 300}}
  - {{name: dlq, type: parquet, role: dlq, url: "{{lake}}/dlq", options: {{lake_options}}, age_ms_max: 300}}
coverage: {{interval_ms: 200}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""


def with_lines(ids: range) -> list[Message]:
    """Orders with 0, 1, 2, 3, 0, … lines each."""

    def one(i: int) -> bytes:
        return json.dumps({"id": i, "lines": [{"sku": f"s{i}-{k}", "n": k} for k in range(i % 4)]}).encode()

    return [Message(one(i)) for i in ids]


def test_multi_sink_fanout_dag_with_unnest_offset_correlation(world: World) -> None:
    """If this is false, an order's lines come loose from it, or it is called done while some of them are still on their way."""
    name = world.name
    world.topic(name, 1)
    world.engine(FAN_OUT.format(name=name))
    world.produce(name, with_lines(range(40)))
    world.wait_until("offsets at the ends", lambda: world.truth.committed(name, name) == {0: 40})
    world.inject(Cut("lines", 10.0))
    world.produce(name, with_lines(range(40, 80)))
    world.pass_time(6)
    assert world.truth.committed(name, name) == {0: 40}, "one descendant is missing, so the source waits"
    world.wait_until("offsets at the ends", lambda: world.truth.committed(name, name) == {0: 80})
    world.produce(name, with_lines(range(80, 81)))  # no lines at all: nothing to land, and still done
    world.wait_until("a record without children is acked", lambda: world.truth.committed(name, name) == {0: 81})
    rows = world.truth.rows(f"select _twg_source_offset, _twg_child, id, sku, n from {name}")
    assert sorted(rows) == sorted((i, k, i, f"s{i}-{k}", k) for i in range(81) for k in range(i % 4))
