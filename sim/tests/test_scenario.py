"""Cases met in the field, each as a story in the simulated world. Every invariant is judged at every effect meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from catalogue.given import orders
from catalogue.world import Cut, LoseReply, Message, Recreate, Refuse
from sim import fence
from sim.spec import SimWorld

PIPELINE = """\
pipeline: {name: t}
sources:
  - name: orders
    type: kafka
    cluster_id: c1
    topics: [t]
    offset_reset: earliest
    options: {bootstrap.servers: "{kafka}", session.timeout.ms: 6000, heartbeat.interval.ms: 500, max.poll.interval.ms: 20000}
    codec: {type: json, schema: {id: int64, customer: string, amount: float64}}
quality:
  rules:
    - {id: sane, input: records, column: amount, min: 0, action: dlq}
sinks:
  - {name: raw, type: parquet, role: primary-raw, url: "{lake}/raw", age_ms_max: 300}
  - {name: dest, type: postgres, url: "{postgres}", table: t, on_failure: hold, age_ms_max: 300}
  - {name: dlq, type: postgres, role: dlq, url: "postgresql://other/db", table: t_dlq, age_ms_max: 300}
coverage: {interval_ms: 300}
"""


@pytest.fixture(params=[1, 2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[SimWorld]:
    fence.install()
    made = SimWorld("t", seed=request.param)
    try:
        yield made
        made.judge()
    finally:
        made.close()


def at_ends(world: SimWorld) -> bool:
    return world.truth.committed("t", "t") == world.truth.ends("t")


def ids(world: SimWorld) -> list[int]:
    return sorted(row[0] for row in world.truth.rows("select id from t"))


def events(world: SimWorld, operation: str, outcome: str = "") -> int:
    return sum(e[2] == operation and (not outcome or e[4] == outcome) for e in world.stage.air.trace)


def test_sink_and_dlq_fail_on_the_second_of_three_batches(world: SimWorld) -> None:
    """The offset stays behind the batch whose bad rows have nowhere to go yet."""
    world.topic("t", 1)
    engine = world.engine(PIPELINE)
    world.produce("t", orders(range(10), 1))
    world.wait_until("the first batch is committed", lambda: at_ends(world))
    world.inject(Cut("dlq", 20.0))
    world.inject(Refuse("dest", "commit", 3))
    world.produce("t", [Message(b'{"id":10,"customer":"c","amount":-1}'), Message(b'{"id":11,"customer":"c","amount":1}')])
    world.produce("t", orders(range(12, 22), 1))
    world.pass_time(15)
    assert world.truth.committed("t", "t") == {0: 10}
    assert engine.running
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert ids(world) == [*range(10), *range(11, 22)]
    assert len(world.truth.rows("select code from t_dlq")) == 1


def test_second_consumer_comes_in_the_middle_of_a_batch_with_eight_partitions(world: SimWorld) -> None:
    world.topic("t", 8)
    world.produce("t", orders(range(400), 8))
    world.engine(PIPELINE)
    world.wait_until("something has landed", lambda: len(ids(world)) > 0)
    world.produce("t", orders(range(400, 800), 8))
    second = world.engine(PIPELINE)
    world.wait_until(
        "the second one has partitions", lambda: "partitions.assigned {'source': 'orders', 'starts': {'" in second.log()
    )
    world.produce("t", orders(range(800, 1200), 8))
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert ids(world) == list(range(1200))


def test_member_paused_beyond_its_session_is_fenced(world: SimWorld) -> None:
    world.topic("t", 2)
    world.produce("t", orders(range(50), 2))
    first = world.engine(PIPELINE)
    world.wait_until("the first batch is committed", lambda: at_ends(world))
    world.produce("t", orders(range(50, 100), 2))
    world.pass_time(0.05)  # in flight
    first.pause(15)
    second = world.engine(PIPELINE)
    world.wait_until("the second one has taken over", lambda: at_ends(world))
    world.pass_time(20)
    assert "partition.lost" in first.log()
    world.produce("t", orders(range(100, 150), 2))
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert ids(world) == list(range(150))
    assert second.running
    assert first.running


def test_later_acks_while_earlier_ones_are_in_flight(world: SimWorld) -> None:
    """Durable in one sink up to 37, in the other not yet from 32: the offset waits at 32."""
    world.topic("t", 1)
    world.engine(PIPELINE)
    world.produce("t", orders(range(32), 1))
    world.wait_until("the first ones are committed", lambda: at_ends(world))
    world.inject(Cut("dest", 10.0))
    world.produce("t", orders(range(32, 34), 1))
    world.produce("t", orders(range(34, 38), 1))
    world.wait_until("raw has all of it", lambda: len(world.truth.raw()) == 38)
    world.pass_time(3)
    assert world.truth.committed("t", "t") == {0: 32}
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert ids(world) == list(range(38))


def test_partition_goes_away_and_comes_back(world: SimWorld) -> None:
    world.topic("t", 2)
    first = world.engine(PIPELINE)
    world.produce("t", orders(range(20), 2))
    world.wait_until("committed", lambda: at_ends(world))
    second = world.engine(PIPELINE)
    world.wait_until("the second one has a partition", lambda: "starts': {'" in second.log())
    world.produce("t", orders(range(20, 40), 2))
    world.wait_until("committed by both", lambda: at_ends(world))
    assert second.stop() == 0
    world.produce("t", orders(range(40, 60), 2))
    world.wait_until("committed by the first alone again", lambda: at_ends(world))
    assert ids(world) == list(range(60))
    assert first.running


def test_late_ack_after_a_revoke_frees_its_bytes(world: SimWorld) -> None:
    world.topic("t", 2)
    first = world.engine(PIPELINE)
    world.wait_until("assigned", lambda: "partitions.assigned" in first.log())
    second = world.engine(PIPELINE)
    world.wait_until("the second one is open", lambda: "node.budget" in second.log())
    world.inject(Cut("dest", 12.0))  # longer than a drain
    world.produce("t", orders(range(200), 2))
    world.wait_until("everything is committed", lambda: at_ends(world))
    node = world.stage.machines["w0"].node
    assert node is not None
    world.wait_until("nothing is held", lambda: node.budget.used_bytes == 0)
    assert first.running
    assert ids(world) == list(range(200))


def test_two_writers_of_one_object_name_the_shorter_one_last(world: SimWorld) -> None:
    """A zombie's put of an interval that its successor wrote under other borders doubles rows at most; none is cut short."""
    world.topic("t", 1)
    first = world.engine(PIPELINE)
    world.wait_until("assigned", lambda: "partitions.assigned" in first.log())
    world.produce("t", orders(range(10), 1))
    world.pass_time(0.1)
    first.pause(12)
    world.produce("t", orders(range(10, 30), 1))
    world.engine(PIPELINE)
    world.wait_until("the successor has it all", lambda: at_ends(world))
    world.pass_time(20)
    offsets = [row["_twg_source_offset"] for row in world.truth.raw()]
    assert set(offsets) == set(range(30))
    assert ids(world) == list(range(30))


def test_commit_applied_and_answered_by_an_error(world: SimWorld) -> None:
    world.topic("t", 1)
    world.engine(PIPELINE)
    world.inject(LoseReply("dest", "commit"))
    world.produce("t", orders(range(50), 1))
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert events(world, "dest.commit", "reply-lost") == 1
    assert ids(world) == list(range(50))


def test_checkpoint_fails_after_the_data_was_committed(world: SimWorld) -> None:
    world.topic("t", 1)
    engine = world.engine(PIPELINE)
    world.produce("t", orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.inject(Refuse("raw", "replace", 3))
    world.produce("t", orders(range(20, 40), 1))
    world.wait_until("the rows are there", lambda: ids(world) == list(range(40)))
    engine.kill()
    world.engine(PIPELINE)
    world.wait_until("everything is committed", lambda: at_ends(world))
    assert ids(world) == list(range(40))


def test_topic_made_anew_under_the_same_name(world: SimWorld) -> None:
    """Old coverage stands for old records only; the new ones have other ids and all of them land."""
    world.topic("t", 1)
    world.engine(PIPELINE)
    world.produce("t", orders(range(30), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.inject(Recreate("t", 1))
    world.produce("t", orders(range(100, 140), 1))
    world.wait_until("the new ones are committed", lambda: at_ends(world))
    assert ids(world) == [*range(30), *range(100, 140)]
    assert len({bytes(row[0]) for row in world.truth.rows("select _twg_record_id from t")}) == 70
