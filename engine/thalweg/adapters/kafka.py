"""Kafka through librdkafka: the consumer port of `thalweg.ports`, translated.

One thread owns the client. librdkafka calls back for a rebalance *inside* `consume`, on that thread, and goes on only
when the callback returns; so the callback resolves the pending `poll` with an `Assigned` or `Revoked` event and then
serves commands on the same thread (a commit before a revoke is legal there and only there) until the runtime completes
the event's token, or a deadline passes and the partitions count as lost.

It decides nothing: which offsets to start from, what to commit and what a refusal means is the runtime's business.

Sources: librdkafka INTRODUCTION.md (rebalance callbacks, "Transactional consumer"), CONFIGURATION.md; KIP-98 (markers),
KIP-429 (cooperative rebalance), KIP-516 (topic ids).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final

import confluent_kafka as ck
import numpy as np
import pyarrow as pa
from confluent_kafka.admin import AdminClient

from thalweg.adapters.system import Actor
from thalweg.core.batch import ENVELOPE, Cursor, KafkaCursor, Partition
from thalweg.core.topology import Source
from thalweg.errors import Ambiguous, Permanent, RefusedNow, ThalwegError, Transient
from thalweg.ports import Adrift, Assigned, Bounds, Capabilities, Event, Lost, Position, Records, Revoked

SLICE_S: Final = 0.02
"""A command to the client waits at most this long for a `consume` under way."""

GATHER_S: Final = 0.1
"""While records keep coming, a poll goes on gathering for so long: large batches are cheaper to decode."""

REQUEST_S: Final = 10.0
CLOSE_S: Final = 5.0
"""A client that does not close in this time is left to its own (daemon) thread."""

REPEAT_S: Final = 10.0
DEADLINE_S: Final = 60.0
"""How long the runtime may take to complete a token; far below `max.poll.interval.ms`."""

_NO_ID: Final = "0"

BATCH_BYTES_MAX: Final = 1 << 30
"""32-bit Arrow offsets hold 2 GiB; one poll stays well below."""

NO_TIMESTAMP: Final = ck.TIMESTAMP_NOT_AVAILABLE

OURS: Final = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
}
"""Properties the engine's promises rest on; a configuration that sets them is refused by the plan."""

DEFAULTS: Final = {
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "fetch.queue.backoff.ms": 5,
    "queued.min.messages": 1_000_000,
    "client.id": "thalweg",
}

_REFUSED: Final = {
    ck.KafkaError.ILLEGAL_GENERATION,
    ck.KafkaError.UNKNOWN_MEMBER_ID,
    ck.KafkaError.REBALANCE_IN_PROGRESS,
    ck.KafkaError.FENCED_INSTANCE_ID,
    ck.KafkaError._STATE,
    ck.KafkaError._ASSIGNMENT_LOST,
}
_DENIED: Final = {
    ck.KafkaError._AUTHENTICATION,
    ck.KafkaError.SASL_AUTHENTICATION_FAILED,
    ck.KafkaError._SSL,
    ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
    ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
_GONE: Final = {ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError.OFFSET_OUT_OF_RANGE}
_MISSING: Final = {ck.KafkaError.UNKNOWN_TOPIC_OR_PART, ck.KafkaError._UNKNOWN_TOPIC, ck.KafkaError._UNKNOWN_PARTITION}
_PASSING: Final = {ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._TRANSPORT, ck.KafkaError._RESOLVE, ck.KafkaError._TIMED_OUT}


@dataclass(frozen=True)
class _Poll:
    records_max: int
    wait_s: float


@dataclass(frozen=True)
class _Complete:
    token: int
    at: Mapping[Partition, Cursor] | None  # None: release


Place = tuple[str, int]

_NEW_ID: Final = re.compile(r"Topic (\S+) changed id from \S+ to (\S+)")
_STORED_FOR: Final = "incarnation="
"""Before the topic id, in the metadata of a commit: an offset outlives a topic that is deleted and made again."""


class _Log(logging.Handler):
    """librdkafka's log. It comes inside `consume`, in order with the records, and alone tells that a topic was re-created."""

    def __init__(self, renewed: Callable[[str, str], None], say: Callable[[str], None] | None) -> None:
        super().__init__(logging.DEBUG)
        self._renewed, self._say = renewed, say

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if found := _NEW_ID.search(text):
            self._renewed(found[1], found[2])
        if self._say is not None:
            self._say(text)


class KafkaConsumer:
    """One member of the group `source.group`, reading `source.topics`. Make it on a running loop."""

    capabilities = Capabilities(durable=True, replayable=True, read_back=False, idempotent=False)

    def __init__(self, source: Source, report: Callable[..., None], deadline_s: float = DEADLINE_S) -> None:
        self._source, self._report, self._deadline_s = source, report, deadline_s
        self._where = f"source {source.name}, brokers {source.options.get('bootstrap.servers', '?')}"
        self._out: deque[Event] = deque()
        self._polling: asyncio.Future[Any] | None = None
        self._arrived = asyncio.Event()
        self._failure: ThalwegError | None = None
        self._closed = False
        self.counts: dict[str, int] = {}  # what was seen: rebalances, refused commits, late records
        # thread side
        self._parts: dict[Place, Partition] = {}
        self._next: dict[Place, int] = {}
        self._touched: set[Place] = set()  # given to us anew in the call under way
        self._again: set[Place] = set()  # what was fetched of these is void; to be read again from `_next`
        self._rejoin = False
        self._large = True
        self._parked: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._token = 0
        self._closing = False
        self._last_said: dict[int, float] = {}
        self._by_broker = source.options.get("group.protocol", "").lower() == "consumer"  # KIP-848: the broker assigns
        strategy = {**DEFAULTS, **source.options}["partition.assignment.strategy"]
        self._cooperative = self._by_broker or "cooperative" in str(strategy)
        self._actor = Actor(f"kafka:{source.name}", self._main)
        self._actor.begin()

    # --- port, loop side ------------------------------------------------------------------------------------------

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._closed:
            raise Permanent("the consumer is closed", where=self._where)
        if not self._out:
            if self._polling is None or self._polling.done():
                self._polling = self._actor.ask(_Poll(records_max, wait_s))
                self._polling.add_done_callback(lambda _: self._arrived.set())
            self._arrived.clear()
            if not self._polling.done():
                await self._arrived.wait()
        if not self._out and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        events = list(self._out)
        self._out.clear()
        return events

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        await self._actor.ask(_Complete(token, at))

    async def release(self, token: int) -> None:
        await self._actor.ask(_Complete(token, None))

    async def seek(self, part: Partition, at: Cursor) -> None:
        await self._actor.ask(lambda client: self._seek(client, part, at.next))

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        found: Mapping[Partition, Cursor | None] = await self._actor.ask(lambda client: self._committed(client, parts))
        return found

    async def bounds(self, parts: Sequence[Partition], *, known: bool = False) -> Mapping[Partition, Bounds]:
        found: Mapping[Partition, Bounds] = await self._actor.ask(lambda client: self._bounds(client, parts, known))
        return found

    async def commit(self, at: Mapping[Partition, Cursor]) -> None:
        await self._actor.ask(lambda client: self._commit(client, at))

    async def pause(self, parts: Sequence[Partition]) -> None:
        await self._actor.ask(lambda client: client.pause(self._ours(parts)))

    async def resume(self, parts: Sequence[Partition]) -> None:
        await self._actor.ask(lambda client: client.resume(self._ours(parts)))

    async def leave(self) -> None:
        await self._actor.ask(lambda client: client.unsubscribe())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        done = self._actor.ask("close")
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(done)
        except TimeoutError:
            self._report("kafka.close_timeout", source=self._source.name)

    def _deliver(self, events: list[Event]) -> None:
        self._out.extend(events)
        self._arrived.set()

    def _fail(self, error: ThalwegError) -> None:
        self._failure = error
        self._arrived.set()

    # --- thread side ----------------------------------------------------------------------------------------------

    def _main(self, actor: Actor) -> None:
        try:
            client = self._client()
        except (ck.KafkaException, ValueError) as error:
            actor.on_loop(self._fail, Permanent(f"the client refused its configuration: {_words(error)}", where=self._where))
            self._serve_dead(actor)
            return
        while True:
            entry = self._parked.popleft() if self._parked else actor.next(1.0)
            if entry is None:
                continue
            command, future = entry
            if command == "close":
                self._closing = True
                try:
                    client.close()
                finally:
                    actor.reply(future)
                    for _, parked in self._parked:
                        actor.reply(parked)  # polls; whatever else is still queued, the actor refuses
                return
            if isinstance(command, _Poll):
                try:
                    if not self._closing:
                        actor.on_loop(self._deliver, self._gather(client, command))
                except ThalwegError as error:
                    actor.on_loop(self._fail, error)
                except ck.KafkaException as error:
                    actor.on_loop(self._fail, self._translated(error.args[0], "poll"))
                except Exception as error:  # a fault of ours must end the poll, not leave it waiting for a dead thread
                    actor.on_loop(self._fail, Permanent(f"fault in the Kafka adapter: {error!r}", where=self._where))
                actor.reply(future)
            elif isinstance(command, _Complete):
                actor.reply(future)  # its deadline has passed; `Lost` has been sent
            else:
                self._run(client, command, future)

    def _serve_dead(self, actor: Actor) -> None:
        """The client could not be made: answer everything, so that nobody waits for ever."""
        while True:
            entry = actor.next(1.0)
            if entry is None:
                continue
            command, future = entry
            if command == "close":
                actor.reply(future)
                return
            if isinstance(command, _Poll):
                actor.reply(future)
            else:
                actor.reply(future, error=Permanent("the client could not be made", where=self._where))

    def _client(self) -> ck.Consumer:
        logger = logging.Logger(f"thalweg.kafka.{self._source.name}", logging.DEBUG)
        debug = self._source.options.get("debug", "")
        logger.addHandler(_Log(self._renewed, self._logged if debug else None))
        half = max(1 << 20, self._source.prefetch_bytes // 2)
        self._large = half >= BATCH_BYTES_MAX // 4  # below, no poll can gather that much
        limits: dict[str, Any] = {
            "queued.max.messages.kbytes": max(1024, half // 1024),
            "fetch.max.bytes": max(1 << 20, min(52_428_800, half)),
            "fetch.message.max.bytes": max(1 << 19, min(1 << 20, half)),
        }
        conf = {**DEFAULTS, **limits, **self._source.options, **OURS, "group.id": self._source.group}
        conf["error_cb"] = self._on_error
        conf["debug"] = f"{debug},metadata" if debug else "metadata"
        if self._by_broker:
            conf.pop("partition.assignment.strategy")
        client = ck.Consumer(conf, logger=logger)
        self._subscribe(client)
        return client

    def _subscribe(self, client: ck.Consumer) -> None:
        client.subscribe(
            list(self._source.topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def _run(self, client: ck.Consumer, command: Callable[[ck.Consumer], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = command(client)
        except ThalwegError as error:
            self._actor.reply(future, error=error)
        except ck.KafkaException as error:
            self._actor.reply(future, error=self._translated(error.args[0], "request"))
        except RuntimeError as error:  # the client is closed
            self._actor.reply(future, error=Permanent(str(error), where=self._where))
        except Exception as error:  # a fault of ours must reach the caller, not end the thread that others wait for
            self._actor.reply(future, error=Permanent(f"fault in the Kafka adapter: {error!r}", where=self._where))
        else:
            self._actor.reply(future, result)

    # --- records --------------------------------------------------------------------------------------------------

    def _gather(self, client: ck.Consumer, poll: _Poll) -> list[Event]:
        """Events of one poll. An interval is claimed from where the one before ended, so records that were fetched and
        then dropped would be claimed unseen: whatever goes wrong in here, all owned partitions are read again.
        """
        self._read_again(client)
        if self._rejoin:
            self._rejoin = False
            client.unsubscribe()
            self._subscribe(client)
        try:
            return self._events(client, self._consumed(client, poll))
        except BaseException:
            self._again |= set(self._next)
            raise
        finally:
            self._touched.clear()

    def _consumed(self, client: ck.Consumer, poll: _Poll) -> list[ck.Message]:
        now = self._actor.monotonic
        begun = now()
        token = self._token
        messages: list[ck.Message] = []
        size = 0
        while True:
            some = client.consume(min(poll.records_max - len(messages), 100_000), SLICE_S)
            messages += some
            if self._large:
                size += sum(map(len, some))
            if self._token != token or self._failure is not None or len(messages) >= poll.records_max or size > BATCH_BYTES_MAX:
                return messages
            waited = now() - begun
            if messages and (not some or waited > GATHER_S):
                return messages
            if waited >= poll.wait_s or self._actor.waiting:
                return messages

    def _read_again(self, client: ck.Consumer) -> None:
        for place in sorted(self._again & set(self._next)):
            wanted = ck.TopicPartition(*place, self._next[place])
            try:
                client.seek(wanted)
            except ck.KafkaException:  # `_STATE`: it does not fetch, because its last position was not there (`Adrift`)
                if self._cooperative:
                    client.incremental_unassign([wanted])
                    client.incremental_assign([wanted])
                else:
                    client.assign([ck.TopicPartition(*each, offset) for each, offset in self._next.items()])
        self._again.clear()

    def _events(self, client: ck.Consumer, messages: list[ck.Message]) -> list[Event]:
        events: list[Event] = []
        marks: list[ck.Message] = []
        if any(map(ck.Message.error, messages)):
            marks = [m for m in messages if m.error() is not None]
            messages = [m for m in messages if m.error() is None]
        if messages:
            events += self._records(messages)
        for mark in marks:
            try:
                event = self._mark(mark)
            except ThalwegError as error:  # the records that came with it are good
                self._actor.on_loop(self._fail, error)
                continue
            if event is not None:
                events.append(event)
        return events

    def _mark(self, mark: ck.Message) -> Event | None:
        error, topic, number, offset = mark.error(), mark.topic(), mark.partition(), mark.offset()
        assert error is not None
        code, place = error.code(), (topic or "", -1 if number is None else number)
        if code == ck.KafkaError._PARTITION_EOF:
            # Its offset is the next one to fetch: past trailing markers and aborted records, which are never delivered.
            if place not in self._next or offset is None or offset <= self._next[place] or place in self._again:
                return None
            if place in self._touched:
                self._again.add(place)  # it may be about the time before; the client will say it anew
                return None
            self._next[place] = offset
            return Position(self._parts[place], KafkaCursor(offset))
        if code in _GONE:
            return Adrift(self._parts[place], KafkaCursor(self._next[place])) if place in self._next else None
        if code in _PASSING or error.retriable():
            self._said(error)
            return None
        if code == ck.KafkaError._MAX_POLL_EXCEEDED:
            self._report("kafka.poll_interval_exceeded", source=self._source.name)
            return None
        raise self._translated(error, "consume")

    def _records(self, messages: list[ck.Message]) -> list[Event]:
        one = len(self._source.topics) == 1 and not self._source.topics[0].startswith("^")
        topics = [str(messages[0].topic())] if one else sorted({str(m.topic()) for m in messages})
        numbers = _integers(ck.Message.partition, messages)
        if len(topics) > 1:
            index: dict[str | None, int] = {topic: i << 32 for i, topic in enumerate(topics)}
            numbers += np.array([index[m.topic()] for m in messages], dtype=np.int64)
        if (numbers != numbers[0]).any():
            messages = _grouped(messages, numbers)
            numbers = np.sort(numbers, kind="stable")
        batch, offsets = _batch(messages)
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        events: list[Event] = []
        for low, high in pairwise(edges):
            key = int(numbers[low])
            place = (topics[key >> 32], key & 0xFFFF_FFFF)
            at = self._next.get(place)
            if at is None:
                self._count("records_of_partitions_given_up", high - low)
                continue  # polled in the same call as the revoke
            if place in self._again:
                continue
            if place in self._touched and (int(offsets[low]) != at or (np.diff(offsets[low:high]) <= 0).any()):
                # Polled before this partition was given to us anew: read again from where the runtime said.
                self._count("records_from_before_a_rebalance", high - low)
                self._again.add(place)
                continue
            fresh = low + int(np.searchsorted(offsets[low:high], at))
            if fresh == high:
                continue
            self._next[place] = stop = int(offsets[high - 1]) + 1
            rows = batch.slice(fresh, high - fresh)
            events.append(Records(self._parts[place], KafkaCursor(at), KafkaCursor(stop), rows))
        return events

    # --- rebalances -----------------------------------------------------------------------------------------------

    def _on_assign(self, client: ck.Consumer, given: list[ck.TopicPartition]) -> None:
        try:
            ids = self._incarnations(sorted({g.topic for g in given}))
        except ThalwegError as error:
            self._actor.on_loop(self._fail, error)
            self._rejoin = True
            return
        parts = {
            (g.topic, g.partition): Partition(self._source.name, self._source.cluster_id, g.topic, g.partition, ids[g.topic])
            for g in given
        }
        done = self._answered(client, Assigned(self._next_token(), tuple(parts.values())))
        if done is None or done.at is None:
            # The group takes us for their reader, and we read nothing of them: give them back by joining anew.
            self._lose(tuple(parts.values()))
            self._rejoin = True
            return
        starts = [ck.TopicPartition(p.topic, p.number, c.next) for p, c in done.at.items()]
        (client.incremental_assign if self._cooperative else client.assign)(starts)
        for part, cursor in done.at.items():
            place = (part.topic, part.number)
            self._parts[place], self._next[place] = part, cursor.next
            self._touched.add(place)
            self._again.discard(place)

    def _on_revoke(self, client: ck.Consumer, taken: list[ck.TopicPartition]) -> None:
        # librdkafka may name partitions that were never started; they are not ours to give up.
        places = [(t.topic, t.partition) for t in taken if (t.topic, t.partition) in self._parts]
        parts = tuple(self._parts[p] for p in places)
        if not self._closing and self._answered(client, Revoked(self._next_token(), parts)) is None:
            self._lose(parts)
        for place in places:
            self._parts.pop(place, None)
            self._next.pop(place, None)
        if self._cooperative:
            client.incremental_unassign(taken)
        else:
            client.unassign()

    def _on_lost(self, client: ck.Consumer, taken: list[ck.TopicPartition]) -> None:
        places = [(t.topic, t.partition) for t in taken if (t.topic, t.partition) in self._parts]
        self._lose(tuple(self._parts[p] for p in places))
        for place in places:
            self._parts.pop(place, None)
            self._next.pop(place, None)

    def _lose(self, parts: tuple[Partition, ...]) -> None:
        self._count("lost", len(parts))
        if not self._closing:
            self._actor.on_loop(self._deliver, [Lost(parts)])

    def _renewed(self, topic: str, incarnation: str) -> None:
        """The client has learnt the topic's id. It reads on at its old offsets in a topic that was deleted and made anew."""
        places = [p for p, part in self._parts.items() if p[0] == topic and part.incarnation not in (_NO_ID, incarnation)]
        if places:
            self._report("kafka.topic_recreated", source=self._source.name, topic=topic, incarnation=incarnation)
            self._lose(tuple(self._parts[p] for p in places))
            for place in places:
                del self._parts[place], self._next[place]
            self._rejoin = True

    def _logged(self, text: str) -> None:
        self._report("kafka.log", source=self._source.name, text=text)

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    def _answered(self, client: ck.Consumer, event: Assigned | Revoked) -> _Complete | None:
        """Hand the event to the runtime and serve its commands here until it is completed; None after the deadline."""
        self._count(type(event).__name__.lower(), 1)
        self._actor.on_loop(self._deliver, [event])
        until = self._actor.monotonic() + self._deadline_s
        while (left := until - self._actor.monotonic()) > 0:
            entry = self._actor.next(min(left, 1.0))
            if entry is None:
                continue
            command, future = entry
            if command == "close":
                self._closing = True
                self._parked.append(entry)
                return None
            if isinstance(command, _Complete):
                self._actor.reply(future)
                if command.token == event.token:
                    return command
            elif isinstance(command, _Poll):
                self._parked.append(entry)
            else:
                self._run(client, command, future)
        self._count("token_deadline_passed", 1)
        return None

    def _incarnations(self, topics: list[str]) -> Mapping[str, str]:
        """Topic ids (KIP-516). "0" where the broker has none: Kafka before 2.8, and librdkafka's own mock cluster."""
        if not topics:
            return {}
        consuming = ("queued.", "fetch.", "isolation.", "partition.", "group.", "session.", "heartbeat.", "max.poll.", "debug")
        options = {k: v for k, v in self._source.options.items() if not k.startswith(consuming)}
        admin = AdminClient({**options, "log_level": 0})
        for _ in range(3):
            try:
                cluster = admin.list_topics(timeout=REQUEST_S).cluster_id or ""
                if cluster.startswith("mockCluster"):  # it has no controller, which describe_topics waits for
                    return dict.fromkeys(topics, _NO_ID)
                found = admin.describe_topics(ck.TopicCollection(topics), request_timeout=REQUEST_S)
                ids = {topic: found[topic].result().topic_id for topic in topics}
                # 128 bits as two 64-bit halves; all zero means the broker does not know topic ids
                return {t: f"{i}" if i is not None and str(i).strip("A") else _NO_ID for t, i in ids.items()}
            except ck.KafkaException as error:
                last = error.args[0]
                if last.code() in _MISSING:
                    return dict.fromkeys(topics, _NO_ID)
                if last.code() in _DENIED:
                    raise self._translated(last, "topic ids") from None
        raise Transient(f"the topic ids could not be read: {last.str()}", where=self._where)

    # --- requests -------------------------------------------------------------------------------------------------

    def _ours(self, parts: Sequence[Partition]) -> list[ck.TopicPartition]:
        return [ck.TopicPartition(p.topic, p.number) for p in parts if (p.topic, p.number) in self._next]

    def _seek(self, client: ck.Consumer, part: Partition, offset: int) -> None:
        if (part.topic, part.number) in self._next:
            self._next[part.topic, part.number] = offset
            self._again.add((part.topic, part.number))
            self._read_again(client)

    def _committed(self, client: ck.Consumer, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        if not parts:
            return {}
        found = client.committed([ck.TopicPartition(p.topic, p.number) for p in parts], timeout=REQUEST_S)
        out: dict[Partition, Cursor | None] = {}
        for part, entry in zip(parts, found, strict=True):
            if entry.error is not None:
                raise self._translated(entry.error, "committed offsets")
            stored_for = str(entry.metadata or "")
            another = stored_for.startswith(_STORED_FOR) and stored_for != f"{_STORED_FOR}{part.incarnation}"
            out[part] = KafkaCursor(entry.offset) if entry.offset >= 0 and not another else None
        return out

    def _bounds(self, client: ck.Consumer, parts: Sequence[Partition], known: bool) -> Mapping[Partition, Bounds]:
        # A request waits behind the fetches under way on the same connection, so a mere look uses what they brought.
        out = {}
        for part in parts:
            place = ck.TopicPartition(part.topic, part.number)
            low, high = client.get_watermark_offsets(place, timeout=REQUEST_S, cached=known)
            if high >= 0:
                out[part] = Bounds(KafkaCursor(max(low, 0)), KafkaCursor(high))
        return out

    def _commit(self, client: ck.Consumer, at: Mapping[Partition, Cursor]) -> None:
        wanted = [ck.TopicPartition(p.topic, p.number, c.next, f"{_STORED_FOR}{p.incarnation}") for p, c in at.items()]
        if not wanted:
            return  # the client would take it for "whatever is stored"
        try:
            stored = client.commit(offsets=wanted, asynchronous=False)
        except ck.KafkaException as error:
            raise self._commit_error(error.args[0]) from None
        for entry in stored or []:
            if entry.error is not None:
                raise self._commit_error(entry.error)

    def _commit_error(self, error: ck.KafkaError) -> ThalwegError:
        if error.code() in _REFUSED:
            self._count("commits_refused", 1)
            return RefusedNow(error.str(), where=self._where)
        if error.code() in _DENIED:
            return self._translated(error, "commit")
        return Ambiguous(error.str(), where=self._where)

    # --- errors ---------------------------------------------------------------------------------------------------

    def _on_error(self, error: ck.KafkaError) -> None:
        """Errors of the client as a whole. It retries connections by itself; only what cannot heal is raised."""
        if error.code() in _DENIED or error.fatal():
            self._actor.on_loop(self._fail, self._translated(error, "connection"))
        else:
            self._said(error)

    def _said(self, error: ck.KafkaError) -> None:
        """Report a passing error, the same one at most every few seconds: the client repeats itself at every attempt."""
        now = self._actor.monotonic()
        if now - self._last_said.get(error.code(), float("-inf")) >= REPEAT_S:
            self._last_said[error.code()] = now
            self._report("kafka.error", source=self._source.name, error=error.str())

    def _translated(self, error: ck.KafkaError, doing: str) -> ThalwegError:
        code, words = error.code(), f"{doing}: {error.str()}"
        if code in _DENIED:
            return Permanent(
                words, where=self._where, remedy="Check the credentials, the protocol and the ACLs of the source's options"
            )
        if code in _MISSING:
            topics = ", ".join(self._source.topics)
            return Permanent(words, where=self._where, remedy=f"Create the topic, or correct its name ({topics})")
        if error.fatal():
            return Permanent(words, where=self._where)
        if code in (ck.KafkaError._TIMED_OUT, ck.KafkaError.REQUEST_TIMED_OUT):
            return Ambiguous(words, where=self._where)
        return Transient(words, where=self._where)

    def _count(self, what: str, n: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + n


def _batch(messages: list[ck.Message]) -> tuple[pa.RecordBatch, np.ndarray[Any, np.dtype[np.int64]]]:
    """Messages as one envelope batch. Each list below is one pass over what the client handed over."""
    n = len(messages)
    offsets = _integers(ck.Message.offset, messages)
    # Lazily: each pair is freed before the next is made, so no 100,000 of them wake the garbage collector.
    stamps = np.fromiter(chain.from_iterable(map(ck.Message.timestamp, messages)), dtype=np.int64, count=2 * n).reshape(n, 2)
    types = stamps[:, 0].astype(np.int8)
    absent = types == NO_TIMESTAMP
    times = pa.array(stamps[:, 1], pa.int64(), mask=absent if absent.any() else None).cast(pa.timestamp("ms", tz="UTC"))
    kind = ENVELOPE.field("headers").type
    headers = pa.array([m.headers() for m in messages], kind) if any(map(ck.Message.headers, messages)) else pa.nulls(n, kind)
    keys = list(map(ck.Message.key, messages))
    columns = [
        pa.array(offsets),
        times,
        pa.array(types),
        pa.nulls(n, pa.binary()) if keys.count(None) == n else _binary(keys),
        headers,
        _binary(list(map(ck.Message.value, messages))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE), offsets


def _integers(field: Callable[[ck.Message], int | None], messages: list[ck.Message]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(field, messages), dtype=np.int64, count=len(messages))


def _grouped(messages: list[ck.Message], numbers: np.ndarray[Any, np.dtype[np.int64]]) -> list[ck.Message]:
    """Messages by number, within a number as they came. A fetch brings them in long runs, so runs are moved, not messages."""
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    if len(edges) * 8 > len(numbers):
        return list(map(messages.__getitem__, np.argsort(numbers, kind="stable").tolist()))
    runs = sorted(pairwise(edges), key=lambda run: (int(numbers[run[0]]), run[0]))
    return list(chain.from_iterable(messages[low:high] for low, high in runs))


def _binary(values: list[bytes | None]) -> pa.BinaryArray:
    """One join is several times faster than appending value by value; only where there are no nulls."""
    try:
        lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))  # type: ignore[arg-type]  # TypeError is handled
    except TypeError:
        return pa.array(values, pa.binary())
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    body = b"".join(values)  # type: ignore[arg-type]  # no nulls here
    return pa.BinaryArray.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(body)])


def _words(error: BaseException) -> str:
    inner = error.args[0] if error.args else error
    return str(inner.str() if isinstance(inner, ck.KafkaError) else inner)
