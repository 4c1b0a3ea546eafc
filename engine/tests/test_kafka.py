"""The Kafka adapter on librdkafka's mock cluster: what is handed over, byte for byte, and what each error becomes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import confluent_kafka as ck
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.adapters import kafka
from thalweg.adapters.kafka import KafkaConsumer
from thalweg.core.batch import ENVELOPE, KafkaCursor, Partition
from thalweg.core.topology import CodecPlan, Source
from thalweg.errors import Permanent
from thalweg.ports import Adrift, Assigned, Event, Lost, Position, Records, Revoked

NUMBERS = itertools.count()
Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]  # key, value, headers


@pytest.fixture(scope="module")
def cluster() -> tuple[ck.Producer, str]:
    producer = ck.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused:1", "log_level": 0})
    return producer, ",".join(f"{b.host}:{b.port}" for b in producer.list_topics(timeout=20).brokers.values())


@pytest.fixture
def topic(cluster: tuple[ck.Producer, str]) -> str:
    return f"topic-{next(NUMBERS)}"


def produce(cluster: tuple[ck.Producer, str], topic: str, rows: Sequence[Row], partition: int = 0) -> None:
    for key, value, headers in rows:
        cluster[0].produce(topic, value, key, partition=partition, headers=list(headers) if headers is not None else None)
    assert cluster[0].flush(20) == 0


def source(cluster: tuple[ck.Producer, str], topic: str, **options: str) -> Source:
    quick = {"bootstrap.servers": cluster[1], "session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}
    return Source("s", "kafka", "c", CodecPlan("bytes"), (topic,), topic, options={**quick, **options}, prefetch_bytes=8 << 20)


def silent(event: str, **fields: Any) -> None:
    """Reports nowhere."""


@asynccontextmanager
async def member(made: Source, **more: Any) -> AsyncIterator[KafkaConsumer]:
    consumer = KafkaConsumer(made, report=more.pop("report", silent), **more)
    try:
        yield consumer
    finally:
        await consumer.close()


async def until(
    consumer: KafkaConsumer,
    enough: Callable[[list[Event]], bool],
    at: int = 0,
    answer: Callable[[Assigned], Awaitable[None]] | None = None,
) -> list[Event]:
    """Poll, start at `at`, release when asked, until `enough`."""
    seen: list[Event] = []
    async with asyncio.timeout(30):
        while not enough(seen):
            for event in await consumer.poll(1000, 0.3):
                seen.append(event)
                if isinstance(event, Assigned):
                    await (answer(event) if answer else consumer.start(event.token, {p: KafkaCursor(at) for p in event.parts}))
                elif isinstance(event, Revoked):
                    await consumer.release(event.token)
    return seen


def of(kind: type[Any], seen: list[Event]) -> list[Any]:
    return [e for e in seen if isinstance(e, kind)]


def rows_of(seen: list[Event]) -> int:
    return sum(e.batch.num_rows for e in of(Records, seen))


async def test_bytes_come_as_they_were_sent(cluster: tuple[ck.Producer, str], topic: str) -> None:
    """Null and empty are two things; headers keep order, duplicates, nulls and bytes that are no text."""
    sent: list[Row] = [
        (None, b"plain", None),
        (b"", b"", [("k", b"\xff"), ("k", b"2"), ("none", None), ("empty", b"")]),
        (b"key", None, None),
        (b"\x00\xff", b"\n{", [("", b"x")]),
    ]
    produce(cluster, topic, sent)
    async with member(source(cluster, topic)) as consumer:
        seen = await until(consumer, lambda s: rows_of(s) >= 4)
        came = of(Records, seen)
    for records in came:
        assert records.batch.schema == ENVELOPE
        records.batch.validate(full=True)
    got = pa.Table.from_batches([r.batch for r in came]).to_pydict()
    assert got["position"] == [0, 1, 2, 3]
    assert (came[0].start, came[-1].stop) == (KafkaCursor(0), KafkaCursor(4))
    assert got["key"] == [r[0] for r in sent]
    assert got["value"] == [r[1] for r in sent]
    headers = [h and [(e["key"], e["value"]) for e in h] for h in got["headers"]]
    assert headers == [r[2] for r in sent]
    assert got["timestamp_type"] == [ck.TIMESTAMP_CREATE_TIME] * 4
    assert None not in got["timestamp"]
    assert {r.part for r in came} == {Partition("s", "c", topic, 0, "0")}


async def test_partitions_are_told_apart_and_start_where_asked(cluster: tuple[ck.Producer, str], topic: str) -> None:
    for number in (2, 0, 1):
        produce(cluster, topic, [(None, b"%d:%d" % (number, i), None) for i in range(20)], number)
    async with member(source(cluster, topic)) as consumer:
        seen = await until(consumer, lambda s: rows_of(s) >= 39, at=7)
    for number in range(3):
        mine = [e for e in of(Records, seen) if e.part.number == number]
        assert mine[0].start == KafkaCursor(7)
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        values = [v for e in mine for v in e.batch["value"].to_pylist()]
        assert values == [b"%d:%d" % (number, i) for i in range(7, 20)]


async def test_position_that_is_gone_sets_adrift_until_seek(cluster: tuple[ck.Producer, str], topic: str) -> None:
    produce(cluster, topic, [(None, b"x", None)] * 20)
    for strategy in ("cooperative-sticky", "range"):
        made = replace(source(cluster, topic, **{"partition.assignment.strategy": strategy}), group=f"{topic}-{strategy}")
        async with member(made) as consumer:
            seen = await until(consumer, lambda s: bool([e for e in of(Adrift, s) if e.part.number == 0]), at=500)
            (adrift,) = [e for e in of(Adrift, seen) if e.part.number == 0]
            assert adrift.at == KafkaCursor(500)
            assert rows_of(seen) == 0
            await consumer.seek(adrift.part, KafkaCursor(3))
            seen = await until(consumer, lambda s: rows_of(s) >= 17)
            assert (of(Records, seen)[0].start, of(Records, seen)[-1].stop) == (KafkaCursor(3), KafkaCursor(20))


async def test_commit_is_for_one_incarnation(cluster: tuple[ck.Producer, str], topic: str) -> None:
    """An offset outlives a topic that is deleted and made anew; it says nothing about the new one."""
    produce(cluster, topic, [(None, b"x", None)] * 5)
    async with member(source(cluster, topic)) as consumer:
        part = of(Records, await until(consumer, lambda s: rows_of(s) >= 5))[0].part
        assert await consumer.committed([part]) == {part: None}
        await consumer.commit({})
        assert await consumer.committed([part]) == {part: None}
        await consumer.commit({part: KafkaCursor(4)})
        other = replace(part, incarnation="another")
        assert await consumer.committed([part, other]) == {part: KafkaCursor(4), other: None}
        assert await consumer.committed([]) == {}


async def test_token_that_nobody_completes_is_lost_and_given_anew(cluster: tuple[ck.Producer, str], topic: str) -> None:
    """Else the group takes the member for the reader of partitions that it does not read, for ever."""
    produce(cluster, topic, [(None, b"x", None)] * 5)
    missed: list[Assigned] = []

    async with member(source(cluster, topic), deadline_s=0.3) as consumer:

        async def answer(event: Assigned) -> None:
            if not missed:
                missed.append(event)
            else:
                await consumer.start(event.token, {p: KafkaCursor(0) for p in event.parts})

        seen = await until(consumer, lambda s: rows_of(s) >= 5, answer=answer)
        assert of(Lost, seen)[0].parts == missed[0].parts
        await consumer.start(missed[0].token, {p: KafkaCursor(2) for p in missed[0].parts})  # too late: changes nothing
        assert consumer.counts["token_deadline_passed"] == 1


async def test_records_that_a_failed_poll_dropped_come_again(
    cluster: tuple[ck.Producer, str], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals are claimed from where the last one ended: dropped records would be claimed unseen."""
    made = kafka._batch
    failures = [MemoryError("no room")]

    def once(messages: list[ck.Message]) -> Any:
        if failures:
            raise failures.pop()
        return made(messages)

    monkeypatch.setattr(kafka, "_batch", once)
    produce(cluster, topic, [(None, b"%d" % i, None) for i in range(50)])
    async with member(source(cluster, topic)) as consumer:
        with pytest.raises(Permanent, match="no room"):
            await until(consumer, lambda s: rows_of(s) >= 50)
        seen = await until(consumer, lambda s: rows_of(s) >= 50)
    assert [v for e in of(Records, seen) for v in e.batch["value"].to_pylist()] == [b"%d" % i for i in range(50)]


async def test_cancelled_poll_loses_nothing(cluster: tuple[ck.Producer, str], topic: str) -> None:
    produce(cluster, topic, [(None, b"x", None)] * 50)
    async with member(source(cluster, topic)) as consumer:
        await until(consumer, lambda s: bool(of(Assigned, s)))
        kept: list[Event] = []
        for _ in range(20):
            poll = asyncio.ensure_future(consumer.poll(10, 0.2))
            await asyncio.sleep(0)
            poll.cancel()
            (outcome,) = await asyncio.gather(poll, return_exceptions=True)
            if isinstance(outcome, list):  # it had ended before it could be cancelled: what it returned is ours
                kept += outcome
        seen = kept + await until(consumer, lambda s: rows_of(kept + s) >= 50)
        assert of(Records, seen)[0].start == KafkaCursor(0)
        assert rows_of(seen) == 50


async def test_leave_is_answered_then_nothing_comes(cluster: tuple[ck.Producer, str], topic: str) -> None:
    produce(cluster, topic, [(None, b"x", None)] * 5)
    async with member(source(cluster, topic)) as consumer:
        part = of(Records, await until(consumer, lambda s: rows_of(s) >= 5))[0].part
        await consumer.pause([part, replace(part, number=99)])
        await consumer.resume([part, replace(part, number=99)])
        await consumer.leave()
        seen = await until(consumer, lambda s: bool(of(Revoked, s)))
        assert part in of(Revoked, seen)[0].parts
        produce(cluster, topic, [(None, b"late", None)])
        assert of(Records, await consumer.poll(10, 0.5)) == []


async def test_close_answers_everybody_and_comes_twice(cluster: tuple[ck.Producer, str], topic: str) -> None:
    cluster[0].produce(topic, b"x")  # or the cluster says, sooner or later, that there is no such topic
    assert cluster[0].flush(20) == 0
    consumer = KafkaConsumer(source(cluster, topic), report=silent)
    poll = asyncio.ensure_future(consumer.poll(10, 30.0))
    await asyncio.sleep(0)
    await consumer.close()
    await consumer.close()
    assert await asyncio.wait_for(poll, 10) == []
    with pytest.raises(Permanent, match="closed"):
        await consumer.poll(10, 0.1)
    with pytest.raises(Permanent, match="closed"):
        await asyncio.wait_for(consumer.commit({Partition("s", "c", topic, 0, "0"): KafkaCursor(1)}), 10)


async def test_configuration_that_the_client_refuses(cluster: tuple[ck.Producer, str], topic: str) -> None:
    async with member(source(cluster, topic, **{"session.timeout.ms": "never"})) as consumer:
        with pytest.raises(Permanent, match=r"session\.timeout\.ms"):
            await consumer.poll(10, 5.0)
        with pytest.raises(Permanent):
            await consumer.committed([Partition("s", "c", topic, 0, "0")])


async def test_broker_that_is_not_there_is_reported(topic: str) -> None:
    reports: list[str] = []
    made = Source("s", "kafka", "c", CodecPlan("bytes"), (topic,), topic, options={"bootstrap.servers": "127.0.0.1:1"})
    async with member(made, report=lambda event, **fields: reports.append(f"{event} {fields}")) as consumer:
        async with asyncio.timeout(20):
            while not any("kafka.error" in r for r in reports):
                assert await consumer.poll(10, 0.3) == []
    assert len(reports) <= 4  # each once, not at each attempt


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_messages_are_grouped_stably(runs: list[tuple[int, int]]) -> None:
    numbers = np.array([n for n, length in runs for _ in range(length)], dtype=np.int64)
    messages: list[Any] = list(enumerate(numbers.tolist()))
    assert kafka._grouped(messages, numbers) == sorted(messages, key=lambda m: m[1])


@given(st.lists(st.one_of(st.none(), st.binary(max_size=5)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_binary_keeps_nulls_and_empties(values: list[bytes | None]) -> None:
    made = kafka._binary(values)
    made.validate(full=True)
    assert made.to_pylist() == values


async def test_end_of_an_older_ownership_claims_nothing(cluster: tuple[ck.Producer, str], topic: str) -> None:
    """An end-of-partition mark that was fetched before the partition was given anew must not move its cursor."""
    produce(cluster, topic, [(None, b"x", None)] * 5)
    async with member(source(cluster, topic)) as consumer:
        part = of(Records, await until(consumer, lambda s: rows_of(s) >= 5))[0].part

        class Mark:
            def error(self) -> ck.KafkaError:
                return ck.KafkaError(ck.KafkaError._PARTITION_EOF)

            def topic(self) -> str:
                return topic

            def partition(self) -> int:
                return 0

            def offset(self) -> int:
                return 100

        def marked(_: Any) -> tuple[Event | None, Event | None]:
            consumer._touched.add((topic, 0))
            stale = consumer._mark(Mark())  # type: ignore[arg-type]  # a message of our own making
            consumer._touched.clear()
            again = (topic, 0) in consumer._again
            consumer._again.clear()
            assert again
            return stale, consumer._mark(Mark())  # type: ignore[arg-type]  # as above

        stale, fresh = await consumer._actor.ask(marked)
        assert stale is None
        assert fresh == Position(part, KafkaCursor(100))
