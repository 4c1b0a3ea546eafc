"""The consumer port, held to its rules: on librdkafka's mock cluster, and on a real broker."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from hypothesis import HealthCheck, Phase, given, settings

from chaos.embedded import embedded_kafka
from chaos.stack import Stack
from fakes.conformance import SCRIPTS, Outside, Step, live
from thalweg.adapters.kafka import KafkaConsumer
from thalweg.core.topology import CodecPlan, Source
from thalweg.ports import LogConsumer

PARTITIONS = 4  # as many as the mock cluster gives a topic that is produced to
NUMBERS = itertools.count()
TOTALS: dict[str, Counter[str]] = {}


def outside(brokers: str, strategy: str) -> Outside:
    """A new topic and group on `brokers`."""
    name = f"conformance-{next(NUMBERS)}"
    admin = AdminClient({"bootstrap.servers": brokers})
    if not str(admin.list_topics(timeout=10).cluster_id).startswith("mockCluster"):
        admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(20)
    producer = Producer({"bootstrap.servers": brokers})
    watcher = Consumer({"bootstrap.servers": brokers, "group.id": name, "enable.auto.commit": False})
    options = {
        "bootstrap.servers": brokers, "partition.assignment.strategy": strategy, "session.timeout.ms": "6000",
        "heartbeat.interval.ms": "300", "max.poll.interval.ms": "20000",
    }  # fmt: skip
    source = Source("s", "kafka", "c", CodecPlan("bytes"), (name,), name, options=options, prefetch_bytes=8 << 20)
    made = 0

    def member() -> LogConsumer:
        return KafkaConsumer(source, report=lambda event, **fields: None, deadline_s=15)

    def produced(n: int) -> Mapping[int, int]:
        nonlocal made
        for i in range(n):
            producer.produce(name, b"%d" % (made + i), partition=(made + i) % PARTITIONS)
        made += n
        assert producer.flush(20) == 0
        return {p: watcher.get_watermark_offsets(TopicPartition(name, p), timeout=10)[1] for p in range(PARTITIONS)}

    def stored() -> Mapping[int, int]:
        found = watcher.committed([TopicPartition(name, p) for p in range(PARTITIONS)], timeout=10)
        return {entry.partition: max(entry.offset, 0) for entry in found}

    return Outside(member, lambda n: asyncio.to_thread(produced, n), lambda: asyncio.to_thread(stored))


def life(where: str, brokers: str, script: list[Step], strategy: str) -> Counter[str]:
    """Run a script; what was seen is added to the totals of `where`."""
    seen = asyncio.run(live(script, outside(brokers, strategy), within_s=90))
    TOTALS.setdefault(where, Counter()).update(seen.events)
    return seen.events


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with embedded_kafka() as brokers:
        yield brokers


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    yield
    for where, totals in TOTALS.items():
        print(f"{where}: " + ", ".join(f"{name} {n}" for name, n in sorted(totals.items())))


GENERATED = settings(
    max_examples=4, deadline=None, phases=(Phase.generate,), derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@given(script=SCRIPTS)
@GENERATED
def test_generated_lives_on_the_mock_cluster(mock: str, script: list[Step]) -> None:
    life("mock cluster", mock, script, "cooperative-sticky")


@given(script=SCRIPTS)
@GENERATED
def test_generated_lives_on_a_real_broker(servers: Stack, script: list[Step]) -> None:
    life("real broker", servers.endpoints.kafka, script, "cooperative-sticky")


CROWD = [*[Step("join")] * 4, Step("settle"), Step("produce", amount=300), Step("leave", 0), Step("produce", amount=300)]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_more_members_than_partitions_on_a_real_broker(servers: Stack, strategy: str) -> None:
    """One of five members of four partitions is assigned nothing, and must say so that it heard."""
    events = life("real broker", servers.endpoints.kafka, CROWD, strategy)
    assert events["assigned nothing"] > 0
    assert events["revoked"] > 0


def test_more_members_than_partitions_on_the_mock_cluster(mock: str) -> None:
    events = life("mock cluster", mock, CROWD, "cooperative-sticky")
    assert events["assigned nothing"] > 0


def test_machine_sees_a_consumer_that_skips(servers: Stack) -> None:
    """A check must be seen to fail: an adapter that jumps over a batch is found."""

    class Skips(KafkaConsumer):
        skipped = False

        def _deliver(self, events):  # type: ignore[no-untyped-def]  # a planted bug
            kept = [e for e in events if self.skipped or type(e).__name__ != "Records"]
            self.skipped = self.skipped or len(kept) < len(events)
            super()._deliver(kept)

    made = outside(servers.endpoints.kafka, "cooperative-sticky")
    member: Callable[[], LogConsumer] = made.member

    def bad() -> LogConsumer:
        good = member()
        assert isinstance(good, KafkaConsumer)
        good.__class__ = Skips
        return good

    with pytest.raises(AssertionError, match=r"went from|not drained|claimed"):
        asyncio.run(live([Step("produce", amount=200)], Outside(bad, made.produce, made.stored), within_s=40))
