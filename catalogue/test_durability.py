"""Rows of the catalogue about when something counts as safe."""

from __future__ import annotations

import json

import numpy as np
import pytest

from catalogue.given import orders
from catalogue.invariants import Checkpoint, complete, identities, once, reach
from catalogue.world import Cut, Fill, Message, Slow, World

PIPELINE = """\
pipeline: {{name: {name}}}
sources:
  - name: orders
    type: kafka
    cluster_id: c1
    topics: [{name}]
    offset_reset: earliest
    options: {{bootstrap.servers: "{{kafka}}", session.timeout.ms: 6000, heartbeat.interval.ms: 500}}
    codec: {{type: json, schema: {{id: int64, customer: string, amount: float64}}}}
{quality}
sinks:
  - {{name: raw, type: parquet, role: primary-raw, url: "{{lake}}/raw", options: {{lake_options}}, age_ms_max: 300}}
{sinks}
coverage: {{interval_ms: 200}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""

DEST = '  - {{name: dest, type: postgres, url: "{{postgres}}", table: {name}, on_failure: {on_failure}, age_ms_max: 300}}\n'
SET_ASIDE = """\
quality:
  rules:
    - {id: small, input: records, column: amount, max: 50, action: quarantine}
"""


def pipeline(name: str, *, on_failure: str = "", quality: str = "", more: str = "") -> str:
    """Kafka into raw, and into a table where `on_failure` says what its trouble means."""
    sinks = (DEST.format(name=name, on_failure=on_failure) if on_failure else "") + more
    return PIPELINE.format(name=name, quality=quality, sinks=sinks)


def at_ends(world: World) -> bool:
    return world.truth.committed(world.name, world.name) == world.truth.ends(world.name)


def stored(world: World) -> list[int]:
    """Identities of every row of raw, repeats included."""
    raw = world.truth.raw()
    return list(identities([r["_twg_source_partition"] for r in raw], [r["_twg_source_offset"] for r in raw]))


def landed(world: World) -> list[int]:
    rows = world.truth.rows(f"select _twg_source_partition, _twg_source_offset from {world.name}")
    return list(identities([r[0] for r in rows], [r[1] for r in rows]))


def covered_to(world: World, sink: str) -> dict[int, int]:
    """Up to where the stored documents say that `sink` has everything, by partition."""

    def to(document: Checkpoint) -> int:
        return reach([*document.sinks.get(sink, []), *document.explained], document.base)

    return {c.partition: to(c) for c in world.truth.checkpoints() if c.topic == world.name}


def test_primary_raw_ack_ordering_survives_secondary_sink_failure(world: World) -> None:
    """If this is false, one broken secondary stops the source, or its gap is on no record when it comes back."""
    world.topic(world.name, 2)
    engine = world.engine(pipeline(world.name, on_failure="isolate"))
    world.produce(world.name, orders(range(40), 2))
    world.wait_until("the first records are everywhere", lambda: at_ends(world) and len(landed(world)) == 40)
    world.inject(Cut("dest", 600.0))
    lags = []
    for batch in range(20):
        world.produce(world.name, orders(range(40 + 20 * batch, 60 + 20 * batch), 2))
        world.pass_time(15)
        lags.append(sum(world.truth.ends(world.name).values()) - sum(world.truth.committed(world.name, world.name).values()))
    assert max(lags) == 0, lags
    assert engine.running
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds
    assert covered_to(world, "raw") == world.truth.ends(world.name)
    behind = covered_to(world, "dest")
    assert all(0 < behind[p] < end for p, end in world.truth.ends(world.name).items()), "the gap of the secondary is on record"
    assert engine.page("/ready")[0] == 200


def test_source_advances_only_after_primary_raw_durable_ack(world: World) -> None:
    """If this is false, a crash loses records whose offsets were committed before they were stored."""
    world.topic(world.name, 1)
    world.engine(pipeline(world.name))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.inject(Fill("raw", 20.0))
    world.produce(world.name, orders(range(20, 40), 1))
    world.pass_time(15)
    assert world.truth.committed(world.name, world.name) == {0: 20}, "raw refuses, so the offset stays"
    world.wait_until("committed", lambda: at_ends(world))
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def test_slow_secondary_does_not_slow_the_commits(world: World) -> None:
    """Part of the row above: a secondary that takes a hundred times as long changes nothing about the source's offsets."""

    def commit_after_s(first: int) -> float:
        world.produce(world.name, orders(range(first, first + 20), 1))
        begun = world.seconds()
        world.wait_until("committed", lambda: at_ends(world))
        return world.seconds() - begun

    world.topic(world.name, 1)
    world.engine(pipeline(world.name, on_failure="isolate"))
    commit_after_s(0)
    usual = max(commit_after_s(20 * i) for i in range(1, 6))
    world.inject(Slow("dest", 100.0, 120.0))
    slowed = min(commit_after_s(20 * i) for i in range(6, 11))
    assert slowed <= usual


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_crash_between_send_and_durable_replays_not_loses(world: World, batch: int) -> None:
    """If this is false, a power cut while raw is being written loses or doubles what was on its way."""
    world.topic(world.name, 1)
    engine = world.engine(pipeline(world.name, on_failure="hold"), kill_at=f"raw.sent#{batch}")
    for i in range(4):
        world.produce(world.name, orders(range(15 * i, 15 * (i + 1)), 1))
        world.pass_time(1.0)
    world.wait_until("it has lost its power", lambda: not engine.running)
    assert not at_ends(world)
    world.engine(pipeline(world.name, on_failure="hold"))
    world.wait_until("committed", lambda: at_ends(world))
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds
    assert once("dest", np.array(landed(world))).holds
    assert complete("dest", world.truth.produced(world.name), np.array(landed(world))).holds


def test_quarantine_never_gates_source_ack(world: World) -> None:
    """If this is false, a full quarantine stops the pipeline that it was to keep clean."""
    world.topic(world.name, 1)
    aside = '  - {{name: aside, type: postgres, role: quarantine, url: "postgresql://other/db", table: aside, age_ms_max: 300}}\n'
    engine = world.engine(
        pipeline(world.name, on_failure="hold", quality=SET_ASIDE, more=aside.replace("{{", "{").replace("}}", "}"))
    )
    world.produce(world.name, orders(range(100), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.wait_until("set aside", lambda: len(world.truth.rows("select code from aside")) == 50)
    world.inject(Cut("aside", 300.0))
    world.produce(world.name, [Message(b'{"id":%d,"customer":"c","amount":99}' % i) for i in range(100, 150)])
    begun = world.seconds()
    world.wait_until("committed without the quarantine", lambda: at_ends(world))
    assert world.seconds() - begun < 10
    assert engine.page("/ready")[0] == 200
    assert json.loads(engine.page("/health")[1])["status"] == "warn"
    assert len(world.truth.rows("select code from aside")) == 50


def test_parquet_object_store_sink_is_primary_raw_eligible(world: World) -> None:
    """If this is false, keeping raw needs a catalogue service that may be down, or its windows cannot be read back."""
    world.topic(world.name, 2)
    engine = world.engine(pipeline(world.name))
    some = [Message(b'{"id":%d}' % i, i % 2, b"k%d" % i if i % 3 else None, (("h", b"\xff"), ("h", None))) for i in range(60)]
    world.produce(world.name, some)
    world.wait_until("committed", lambda: at_ends(world))
    assert engine.stop() == 0
    raw = world.truth.raw()
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds
    assert {(r["_twg_payload"], r["_twg_message_key"]) for r in raw} == {(m.value, m.key) for m in some}
    assert all(r["_twg_source_headers"] == [{"key": "h", "value": b"\xff"}, {"key": "h", "value": None}] for r in raw)
    assert covered_to(world, "raw") == world.truth.ends(world.name)


def test_primary_raw_with_durable_disabled_rejected_at_config(world: World) -> None:
    """If this is false, somebody turns durability off for speed, and learns what it was for after an outage."""
    wrong = pipeline(world.name).replace("role: primary-raw,", "role: primary-raw, durable: false,")
    engine = world.engine(wrong)
    assert engine.wait_exit() == 78
    line = 1 + wrong[: wrong.index("durable: false")].count("\n")
    assert "durable" in engine.log()
    assert f"line {line}:" in engine.log() or f":{line}:" in engine.log()
