"""Rows of the catalogue about when something counts as safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from catalogue.given import orders, orders_source
from catalogue.invariants import Checkpoint, complete, identities, once, reach
from catalogue.world import Cut, Engine, Fault, Fill, LoseReply, Message, Slow, Tear, World
from thalweg.__main__ import app, judged_file

PIPELINE = """\
{quality}
sinks:
  - {{name: raw, type: parquet, role: primary-raw, url: "{{lake}}/raw", options: {{lake_options}}, age_ms_max: 300}}
{sinks}
coverage: {{interval_ms: 200}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""

DEST = '  - {{name: dest, type: postgres, url: "{{postgres}}", table: {name}, on_failure: {on_failure}, age_ms_max: 300}}\n'
ASIDE = '  - {name: aside, type: postgres, role: quarantine, url: "{postgres}", table: aside, age_ms_max: 300}\n'
SET_ASIDE = """\
quality:
  rules:
    - {id: small, input: records, column: amount, max: 50, action: quarantine}
"""


def pipeline(name: str, *, on_failure: str = "", quality: str = "", more: str = "") -> str:
    """Kafka into raw, and into a table where `on_failure` says what its trouble means."""
    sinks = (DEST.format(name=name, on_failure=on_failure) if on_failure else "") + more
    return orders_source(name) + PIPELINE.format(name=name, quality=quality, sinks=sinks)


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


def lacks(world: World, sink: str) -> bool:
    """Whether `sink` has less than there is, by the stored documents."""
    return covered_to(world, sink) != world.truth.ends(world.name)


def lag(world: World) -> int:
    """Records that the source has not been told of as safe."""
    return sum(world.truth.ends(world.name).values()) - sum(world.truth.committed(world.name, world.name).values())


def health_of(engine: Engine, stage: str) -> dict[str, Any]:
    """What the node says of one of its stages; nothing when it does not answer."""
    _, body = engine.page("/health")
    (check,) = json.loads(body)["checks"][stage] if body else ({},)
    return dict(check)


def in_order(world: World) -> None:
    """Committed ≤ stored coverage of raw ≤ raw, read in this order: each of them only grows, so it holds as it was read."""
    committed = world.truth.committed(world.name, world.name)
    covered = covered_to(world, "raw")
    have = set(stored(world))
    for number, offset in committed.items():
        assert offset <= covered.get(number, 0), f"committed {offset} of partition {number}, covered to {covered.get(number, 0)}"
    for number, to in covered.items():
        missing = set(identities([number] * to, range(to))) - have
        assert not missing, f"covered to {to} in partition {number}, and {len(missing)} record(s) of it are not in raw"


def gaps(world: World, text: str, sink: str) -> set[int]:
    """Identities that the command `coverage` lists as gaps of `sink`."""
    found: set[int] = set()
    for row in world.coverage(text):
        number = int(row["partition"].rpartition("/")[2].partition("@")[0])
        if row["sink"] == sink:
            for gap in row["gaps"]:
                found.update(identities([number] * (gap["stop"] - gap["start"]), range(gap["start"], gap["stop"])))
    return found


def test_primary_raw_ack_ordering_survives_secondary_sink_failure(world: World) -> None:
    """If this is false, one broken secondary stops the source, or its gap is on no record when it comes back."""
    world.topic(world.name, 2)
    text = pipeline(world.name, on_failure="isolate")
    engine = world.engine(text)
    world.produce(world.name, orders(range(40), 2))
    world.wait_until("the first records are everywhere", lambda: at_ends(world) and not lacks(world, "dest"))
    world.inject(Cut("dest", 660.0))
    begun, first = world.seconds(), 40
    while world.seconds() < begun + 600:
        world.produce(world.name, orders(range(first, first + 20), 2))
        first += 20
        world.pass_time(20)
        assert lag(world) == 0, f"{lag(world)} records behind, {world.seconds() - begun:.0f} s into the outage"
        assert health_of(engine, "sink:dest")["status"] == "warn", "it fails while records arrive, and says so"
    assert engine.running
    assert engine.page("/ready")[0] == 200
    produced = world.truth.produced(world.name)
    assert complete("raw", produced, np.array(stored(world))).holds
    assert covered_to(world, "raw") == world.truth.ends(world.name)

    # What it misses stands beside raw, where it can be read while the secondary is away, and the node says why.
    missed = set(produced) - set(landed(world))
    assert len(missed) == first - 40
    assert gaps(world, text, "dest") == missed
    assert gaps(world, text, "raw") == set()
    assert health_of(engine, "sink:dest")["output"]


def test_source_advances_only_after_primary_raw_durable_ack(world: World) -> None:
    """If this is false, a crash loses records whose offsets were committed before they were stored."""
    world.topic(world.name, 1)
    world.engine(pipeline(world.name, on_failure="isolate"))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))

    world.inject(Fill("raw", 20.0))
    world.produce(world.name, orders(range(20, 40), 1))
    world.pass_time(15)
    assert world.truth.committed(world.name, world.name) == {0: 20}, "raw refuses, so the offset stays"
    world.wait_until("committed", lambda: at_ends(world))

    faults: tuple[Fault, ...] = (Tear("raw"), LoseReply("raw", "create"), Slow("raw", 20.0, 3.0))
    for number, fault in enumerate(faults):
        world.inject(fault)
        world.produce(world.name, orders(range(40 + 20 * number, 60 + 20 * number), 1))
        for _ in range(20):
            world.pass_time(0.1)
            in_order(world)
        world.wait_until("committed", lambda: at_ends(world))
    in_order(world)
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds

    def delays_s(first: int) -> tuple[float, float]:
        """After how long twenty records are committed, and after how long (or 20 s) they are in the secondary."""
        world.produce(world.name, orders(range(first, first + 20), 1))
        begun = world.seconds()
        after_s: dict[str, float] = {}

        def seen() -> bool:
            passed = world.seconds() - begun
            if at_ends(world):
                after_s.setdefault("committed", passed)
            if passed > 20 or len(landed(world)) == first + 20:
                after_s.setdefault("landed", passed)
            return len(after_s) == 2

        world.wait_until("committed, and in the secondary or late", seen)
        return after_s["committed"], after_s["landed"]

    usual = [delays_s(100 + 20 * i) for i in range(4)]
    world.inject(Slow("dest", 100.0, 120.0))
    slowed = [delays_s(180 + 20 * i) for i in range(2)]
    assert min(b for _, b in slowed) > min(b for _, b in usual), "the secondary is slow indeed"
    assert max(a for a, _ in slowed) <= 1.5 * max(a for a, _ in usual) + 0.2


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_crash_between_send_and_durable_replays_not_loses(world: World, batch: int) -> None:
    """If this is false, a power cut while raw is being written loses or doubles what was on its way."""
    world.topic(world.name, 1)
    # The table is prompter than raw, so that it mostly has what raw lacks when the power fails.
    text = pipeline(world.name, on_failure="hold").replace(
        "on_failure: hold, age_ms_max: 300", "on_failure: hold, age_ms_max: 20"
    )
    engine = world.engine(text, kill_at=f"raw.sent#{batch}")
    for i in range(batch):
        world.produce(world.name, orders(range(15 * i, 15 * (i + 1)), 1))
        world.wait_until("committed, or without power", lambda: at_ends(world) or not engine.running)
    world.wait_until("it has lost its power", lambda: not engine.running)
    produced = world.truth.produced(world.name)
    assert set(stored(world)) < set(produced), "what was being sent is not there yet"
    assert not at_ends(world)
    world.produce(world.name, orders(range(15 * batch, 15 * (batch + 1)), 1))
    world.engine(text)
    world.wait_until("committed", lambda: at_ends(world))
    produced = world.truth.produced(world.name)
    assert complete("raw", produced, np.array(stored(world))).holds
    assert once("dest", np.array(landed(world))).holds
    assert complete("dest", produced, np.array(landed(world))).holds
    ids = [row[0] for row in world.truth.rows(f"select id from {world.name}")]
    assert sorted(ids) == list(range(15 * (batch + 1)))


@pytest.mark.parametrize("trouble", ["down", "full"])
def test_quarantine_never_gates_source_ack(world: World, trouble: str) -> None:
    """If this is false, a full quarantine stops the pipeline that it was to keep clean."""
    world.topic(world.name, 1)
    text = pipeline(world.name, quality=SET_ASIDE, more=ASIDE) + "flow: {memory_limit_bytes: 160MiB}\n"
    engine = world.engine(text)
    produced = 0

    def batch(n: int, weight: int) -> list[Message]:
        """Records of so many bytes, each second one for the quarantine."""
        nonlocal produced
        produced += n
        text = b"x" * weight
        return [Message(b'{"id":%d,"customer":"%b","amount":%d}' % (i, text, 99 if i % 2 else 1)) for i in range(n)]

    def aside() -> int:
        return len(world.truth.rows("select code from aside"))

    def stats(name: str) -> int:
        return int(json.loads(engine.page("/stats")[1]).get(name, {}).get("aside", 0))

    def committed_after_s(n: int = 40, weight: int = 25_000) -> float:
        """1 MB, unless said otherwise: a few of these fill what one isolated sink may hold."""
        world.produce(world.name, batch(n, weight))
        begun = world.seconds()
        world.wait_until("committed", lambda: at_ends(world))
        return world.seconds() - begun

    usual = [committed_after_s() for _ in range(3)]
    world.wait_until("set aside, and it knows", lambda: stats("rows_landed") == aside() == produced // 2)
    before = produced // 2
    world.inject(Cut("aside", 240.0) if trouble == "down" else Fill("aside", 240.0))
    since = world.seconds()
    troubled = [committed_after_s()]
    world.wait_until("the quarantine is felt", lambda: health_of(engine, "sink:aside").get("status") == "warn")
    troubled += [committed_after_s() for _ in range(3)]
    # Many small records, and then more at once than there is room for beside what is held for the quarantine.
    troubled += [*(committed_after_s(10, 10) for _ in range(15)), committed_after_s(60, 60_000)]
    assert world.seconds() < since + 240, "all that while the quarantine was in trouble"
    assert max(troubled) <= 1.5 * max(usual) + 0.2, (usual, troubled)
    assert engine.page("/ready")[0] == 200
    assert aside() == before
    shed = stats("rows_shed")
    assert shed > 0, "more than it may hold was for the quarantine"
    world.pass_time(240)
    world.wait_until("what was held for it is there", lambda: aside() == produced // 2 - shed)
    world.pass_time(30)
    assert aside() == produced // 2 - shed, "the rows that were left out are those that were counted"
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds


def test_parquet_object_store_sink_is_primary_raw_eligible(world: World) -> None:
    """If this is false, keeping raw needs a catalogue service that may be down, or its windows cannot be read back."""
    world.topic(world.name, 2)
    engine = world.engine(pipeline(world.name))
    some = [Message(b'{"id":%d}' % i, i % 2, b"k%d" % i if i % 3 else None, (("h", b"\xff"), ("h", None))) for i in range(90)]
    world.produce(world.name, some[:30])
    world.wait_until("committed", lambda: at_ends(world))
    for first, fault in ((30, Tear("raw")), (60, LoseReply("raw", "create"))):
        world.inject(fault)
        world.produce(world.name, some[first : first + 30])
        for _ in range(10):
            world.pass_time(0.1)
            in_order(world)
        world.wait_until("committed", lambda: at_ends(world))
    assert engine.stop() == 0
    in_order(world)
    raw = world.truth.raw()
    assert complete("raw", world.truth.produced(world.name), np.array(stored(world))).holds
    assert covered_to(world, "raw") == world.truth.ends(world.name)

    # A window that begins and ends within objects, by identity: what is there twice has the same id, and is read once.
    for number in range(2):
        produced = [m for m in some if m.partition == number]
        found: dict[bytes, tuple[Any, ...]] = {}
        for r in raw:
            if r["_twg_source_partition"] == number and 7 <= r["_twg_source_offset"] < 38:
                row = (r["_twg_source_offset"], r["_twg_payload"], r["_twg_message_key"], r["_twg_source_headers"])
                assert found.setdefault(r["_twg_record_id"], row) == row
        headers = [{"key": "h", "value": b"\xff"}, {"key": "h", "value": None}]
        assert sorted(found.values(), key=lambda row: row[0]) == [
            (at, produced[at].value, produced[at].key, headers) for at in range(7, 38)
        ]


@pytest.mark.parametrize(
    "wrong",
    [
        ("primary-raw-not-durable", "role: primary-raw,", "role: primary-raw, durable: false,"),
        ("primary-raw-isolated", "role: primary-raw,", "role: primary-raw, on_failure: isolate,"),
        # A sink type whose word is not enough for a raw.
        (
            "primary-raw-unsupported",
            'type: parquet, role: primary-raw, url: "{lake}/raw", options: {lake_options},',
            'type: postgres, role: primary-raw, url: "{postgres}", table: raw,',
        ),
    ],
)
def test_primary_raw_with_durable_disabled_rejected_at_config(world: World, tmp_path: Path, wrong: tuple[str, str, str]) -> None:
    """If this is false, somebody turns durability off for speed, and learns what it was for after an outage."""
    code, right, instead = wrong
    text = pipeline(world.name).replace(right, instead)
    assert instead in text
    line = 1 + text[: text.index(instead)].count("\n")

    engine = world.engine(text)
    assert engine.wait_exit() == 78
    assert any(f"[{code}]" in said and (f"line {line}:" in said or f":{line}:" in said) for said in engine.log().splitlines())

    file = tmp_path / "pipeline.yaml"
    plain = {"{kafka}": "kafka:9092", "{postgres}": "postgresql://pg/db", "{lake}": "s3://lake", "{lake_options}": "{}"}
    for placeholder, value in {**plain, "{http}": "0"}.items():
        text = text.replace(placeholder, value)
    file.write_text(text, encoding="utf-8")
    assert [(f.code, f.line) for f in judged_file(file, strict=False).faults] == [(code, line)]
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 78
    assert f"{file}:{line}:" in checked.output
    assert f"[{code}]" in checked.output
