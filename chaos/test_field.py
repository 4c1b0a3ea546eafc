"""Inputs met in the field, on a real broker: markers, aborted records, lost offsets, hostile headers, wrong passwords."""

from __future__ import annotations

import json

from confluent_kafka.admin import AdminClient

from catalogue.given import orders, orders_pipeline
from catalogue.invariants import covered
from catalogue.world import Message
from chaos.world import RealWorld


def _lag(page: str) -> float:
    return float(sum(json.loads(page).get("lag_records", {"none": 1}).values()))


def _at_end(world: RealWorld, name: str) -> bool:
    return world.truth.committed(name, name) == world.truth.ends(name)


def test_topic_that_ends_with_a_transaction_marker_reaches_lag_zero_and_ready(world: RealWorld) -> None:
    """If this is false, a transactional topic never looks read, and no deployment ever becomes ready."""
    name = world.name
    world.topic(name, 1)
    producer = world.producer(transactional_id=f"{name}-tx")
    producer.init_transactions(20)
    producer.begin_transaction()
    for message in orders(range(3), 1):
        producer.produce(name, message.value, partition=0)
    producer.commit_transaction(20)
    assert world.truth.ends(name) == {0: 4}  # three records and the marker
    engine = world.engine(orders_pipeline(name))
    world.wait_until("the offset past the marker", lambda: _at_end(world, name))
    world.wait_until("ready", lambda: engine.page("/ready")[0] == 200)
    world.wait_until("lag 0", lambda: _lag(engine.page("/stats")[1]) == 0)
    assert [r[0] for r in world.truth.rows(f"select id from {name} order by id")] == [0, 1, 2]


def test_committed_and_aborted_records_between_markers(world: RealWorld) -> None:
    """Offsets 0, [marker], 2 aborted, [marker], 4: if this is false, an aborted record lands or a marker looks like a gap."""
    name = world.name
    world.topic(name, 1)
    producer = world.producer(transactional_id=f"{name}-tx")
    producer.init_transactions(20)
    for number, commits in ((0, True), (1, False)):
        producer.begin_transaction()
        producer.produce(name, b'{"id":%d,"customer":"c","amount":1}' % number, partition=0)
        producer.flush(20)
        if commits:
            producer.commit_transaction(20)
        else:
            producer.abort_transaction(20)
    world.produce(name, [Message(b'{"id":4,"customer":"c","amount":1}')])
    assert world.truth.ends(name) == {0: 5}
    world.engine(orders_pipeline(name))
    world.wait_until("the end of the log", lambda: _at_end(world, name))
    assert world.truth.rows(f"select id, _twg_source_offset from {name} order by 2") == [(0, 0), (4, 4)]
    assert covered(world.truth.checkpoints(), "raw", {0: 5}).holds
    assert covered(world.truth.checkpoints(), "dest", {0: 5}).holds


def test_wrong_sink_password_moves_no_offset(world: RealWorld) -> None:
    """If this is false, a typing error in a secret loses records in silence."""
    name = world.name
    world.topic(name, 1)
    world.produce(name, orders(range(10), 1))
    dsn = world.stack.endpoints.postgres.replace("password=postgres", "password=not-the-one")
    engine = world.engine(orders_pipeline(name), WORLD_POSTGRES=dsn)
    assert engine.wait_exit() == 70
    assert "password authentication failed" in engine.log()
    assert "Traceback" not in engine.log()
    assert "not-the-one" not in engine.log()
    assert world.truth.committed(name, name) == {}


def test_stored_offset_below_the_log_start(world: RealWorld) -> None:
    """If this is false, what retention took away while the engine was down is jumped over without a word."""
    name = world.name
    world.topic(name, 1)
    world.produce(name, orders(range(20), 1))
    first = world.engine(orders_pipeline(name))
    world.wait_until("the first twenty", lambda: _at_end(world, name))
    assert first.stop() == 0
    world.produce(name, orders(range(20, 40), 1))
    _delete_below(world, name, 30)

    careful = orders_pipeline(name).replace("offset_reset: earliest", "offset_reset: error")
    refused = world.engine(careful)
    assert refused.wait_exit() == 70
    assert "below the log start 30" in refused.log()
    assert world.truth.committed(name, name) == {0: 20}

    world.engine(orders_pipeline(name))
    world.wait_until("the end", lambda: _at_end(world, name))
    (document,) = world.truth.checkpoints()
    assert document.explained == [(20, 30)]
    assert (20, 30) not in document.sinks["raw"]
    assert [r[0] for r in world.truth.rows(f"select id from {name} order by id")] == [*range(20), *range(30, 40)]


def _delete_below(world: RealWorld, topic: str, offset: int) -> None:
    from confluent_kafka import TopicPartition

    admin = AdminClient({"bootstrap.servers": world.stack.endpoints.kafka})
    for done in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        done.result(20)


def test_headers_keys_and_tombstones_come_back_byte_for_byte(world: RealWorld) -> None:
    """If this is false, raw is not what was sent, and nothing can be rebuilt from it."""
    name = world.name
    world.topic(name, 1)
    odd = (("k", b"\xff"), ("k", b"2"), ("n", None), ("e", b""))
    world.produce(
        name,
        [
            Message(b'{"id":1,"customer":"c","amount":1}', key=b"\x00\xff", headers=odd),
            Message(None, key=b"gone"),
            Message(b"", key=None),
            Message(b'{"a":1iii}', headers=odd),
            Message(b'{"id":99999999999999999999,"customer":"c","amount":1}'),
            Message(b'{"id":2,"customer":"a\\u0000b","amount":1}'),
            Message(b'{"id":3,"customer":"c","amount":1}'),
        ],
    )
    world.engine(orders_pipeline(name))
    world.wait_until("the end", lambda: _at_end(world, name))
    raw = sorted(world.truth.raw(), key=lambda r: r["_twg_source_offset"])
    assert [r["_twg_payload"] for r in raw[:4]] == [b'{"id":1,"customer":"c","amount":1}', None, b"", b'{"a":1iii}']
    assert [r["_twg_message_key"] for r in raw[:3]] == [b"\x00\xff", b"gone", None]
    assert [(h["key"], h["value"]) for h in raw[0]["_twg_source_headers"]] == list(odd)
    rows = world.truth.rows(f"select _twg_source_offset, id from {name} order by 1")
    assert rows == [(0, 1), (1, None), (6, 3)]
    rejects = world.truth.rows(
        f"select _twg_source_offset, stage, _twg_payload, _twg_header_keys, _twg_header_values from {name}_dlq order by 1"
    )
    assert [(r[0], r[1]) for r in rejects] == [(2, "decode"), (3, "decode"), (4, "decode"), (5, "sink:dest")]
    assert bytes(rejects[1][2]) == b'{"a":1iii}'
    assert list(zip(rejects[1][3], (None if v is None else bytes(v) for v in rejects[1][4]), strict=True)) == list(odd)
