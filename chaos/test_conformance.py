"""The consumer port, held to its rules: on librdkafka's mock cluster, and on a real broker."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from hypothesis import HealthCheck, Phase, given, settings

from chaos.embedded import embedded_kafka
from chaos.stack import Stack
from fakes.conformance import SCRIPTS, ZOMBIE_S, How, Outside, Step, live
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
    real = not str(admin.list_topics(timeout=10).cluster_id).startswith("mockCluster")
    if real:
        admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(20)
    producer = Producer({"bootstrap.servers": brokers})
    transactional = Producer({"bootstrap.servers": brokers, "transactional.id": name}) if real else None
    if transactional is not None:
        transactional.init_transactions(20)
    watcher = Consumer({"bootstrap.servers": brokers, "group.id": name, "enable.auto.commit": False})
    options = {
        "bootstrap.servers": brokers, "partition.assignment.strategy": strategy, "session.timeout.ms": "3000",
        "heartbeat.interval.ms": "300", "max.poll.interval.ms": "4000",
    }  # fmt: skip
    source = Source("s", "kafka", "c", CodecPlan("bytes"), (name,), name, options=options, prefetch_bytes=8 << 20)
    made = 0
    book: dict[int, dict[int, bytes]] = {p: {} for p in range(PARTITIONS)}

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        book[message.partition() or 0][message.offset() or 0] = message.value() or b""

    def member() -> LogConsumer:
        return KafkaConsumer(source, report=lambda event, **fields: None, deadline_s=3)

    def produced(n: int, how: How) -> Mapping[int, int]:
        nonlocal made
        by = producer if how == "produce" or transactional is None else transactional
        if by is transactional:
            by.begin_transaction()
        for i in range(made, made + n):
            callback = (lambda e, m: None) if by is transactional and how == "abort" else delivered
            by.produce(name, b"%d" % i, partition=i % PARTITIONS, on_delivery=callback)
            by.poll(0)
        made += n
        assert by.flush(20) == 0
        if by is transactional:
            (by.commit_transaction if how == "commit" else by.abort_transaction)(20)
        return {p: watcher.get_watermark_offsets(TopicPartition(name, p), timeout=10)[1] for p in range(PARTITIONS)}

    def stored() -> Mapping[int, int]:
        found = watcher.committed([TopicPartition(name, p) for p in range(PARTITIONS)], timeout=10)
        return {entry.partition: max(entry.offset, 0) for entry in found}

    return Outside(member, lambda n, how: asyncio.to_thread(produced, n, how), lambda: book, lambda: asyncio.to_thread(stored))


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


TRAILING = [Step("abort", amount=8), Step("commit", amount=4), Step("abort", amount=8), Step("abort", amount=4)]


def test_markers_and_aborted_records_are_claimed_to_the_end(servers: Stack) -> None:
    """Offsets 0, [marker], 2 aborted, [marker], 4 …: no hole, and the group's offset reaches the end, which is a marker."""
    made = outside(servers.endpoints.kafka, "cooperative-sticky")

    async def aborted_last(n: int, how: How) -> Mapping[int, int]:
        ends = await made.produce(n, how)
        return await made.produce(PARTITIONS, "abort") if n else ends

    seen = asyncio.run(live(TRAILING, replace(made, produce=aborted_last), within_s=60))
    assert seen.events["positions"] > 0


ZOMBIES = [
    Step("join"),
    Step("settle"),
    Step("produce", amount=400),
    Step("still", 0, ZOMBIE_S),
    *[Step("produce", amount=400)] * 14,
]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_zombie_on_a_real_broker(servers: Stack, strategy: str) -> None:
    """A member that stood still for too long is told that it lost its partitions, and can go on afterwards."""
    events = life("real broker", servers.endpoints.kafka, ZOMBIES, strategy)
    assert events["lost"] > 0


def test_zombie_on_the_mock_cluster(mock: str) -> None:
    assert life("mock cluster", mock, ZOMBIES, "cooperative-sticky")["lost"] > 0


LOAD = [Step("produce", amount=40_000)]
STRESS = [*LOAD, Step("join"), *LOAD, Step("join"), *LOAD, Step("leave", 0), *LOAD, Step("join"), *LOAD, Step("close", 1), *LOAD]


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_members_come_and_go_under_load_on_a_real_broker(servers: Stack, strategy: str) -> None:
    events = life("real broker", servers.endpoints.kafka, STRESS, strategy)
    assert events["revoked"] > 0


def test_members_come_and_go_under_load_on_the_mock_cluster(mock: str) -> None:
    assert life("mock cluster", mock, STRESS, "cooperative-sticky")["revoked"] > 0


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
        asyncio.run(live([Step("produce", amount=200)], replace(made, member=bad), within_s=40))
