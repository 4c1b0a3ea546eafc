"""A Kafka cluster and its clients, in memory: the twin of the `LogConsumer` port.

`Cluster` is what survives everything: logs and groups. `ConsumerTwin` is one client of one process, background threads
included: it hears of rebalances at its heartbeats, joins, leaves when nobody polls it, and can lag behind what the group
has decided. Protocol facts: KIP-62 (heartbeats apart from polling), KIP-429 (cooperative rebalancing), KIP-98 (transactions),
KIP-516 (topic ids), and what `docs/conformance.md` records of a broker.

A group's generation, as its members live it:

    STABLE ──a member joins, leaves or falls silent──▶ PREPARING   everybody must join anew; commits of the old
      ▲                                                   │          generation are still taken
      │                                                   ▼ all have joined, or the time for it is over
      └──── all have their share ◀──────────────── COMPLETING       the generation is new; commits are refused, also of
                                                                    members that will keep what they have

It may: refuse a commit while the group rebalances, to members that keep their partitions too; give an empty assignment;
hand records over in the same call as a revoke, before or after it; take partitions from a member that stood still (lost,
no token) and let it go on as a zombie that does not know yet; refuse what a zombie commits; drop old records by retention;
lose a group's reply; write the same record twice when a producer's acknowledgement is lost; leave holes (compaction,
aborted transactions, markers); be cut off.

It must not: hand a record to a member that does not own its partition, after the call that took it away; lose a record
above the log start or alter a byte, a null, a header or its place; deliver an aborted record, or one above the last stable
offset; move a position back; forget an offset that it acknowledged; change ownership because a commit was refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from fakes.faults import REQUEST_TIMEOUT_S, Air, Wire
from thalweg.core.batch import ENVELOPE, HEADERS, Cursor, KafkaCursor, Partition
from thalweg.errors import Permanent, RefusedNow, Transient
from thalweg.ports import Adrift, Assigned, Bounds, Capabilities, Event, Lost, Position, Records, Revoked

INTERNED_MAX: Final = 20_000


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """A record's content. Equal only to itself: what was decoded of it once need not be decoded again."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = 0


class Kind(StrEnum):
    """What lies at an offset."""

    DATA = "data"
    MARKER = "marker"  # end of a transaction: never delivered
    ABORTED = "aborted"
    GONE = "gone"  # compacted away


Entry = tuple[int, Message]
"""An offset and what lies there."""

_INTERNED: dict[tuple[Entry, ...], pa.RecordBatch] = {}
_ENTRIES: dict[int, tuple[Entry, ...]] = {}


def entries_of(batch: pa.RecordBatch) -> tuple[Entry, ...] | None:
    """What an envelope that was handed out holds; None for one that was not made here."""
    return _ENTRIES.get(id(batch))


def envelope(messages: Sequence[Entry]) -> pa.RecordBatch:
    """Messages with their offsets as a batch of schema `ENVELOPE`. The same ones give the same object again."""
    key = tuple(messages)
    found = _INTERNED.get(key)
    if found is None:
        if len(_INTERNED) >= INTERNED_MAX:
            _INTERNED.clear()
            _ENTRIES.clear()
        headers = [[{"key": k, "value": v} for k, v in m.headers] if m.headers else None for _, m in messages]
        found = _INTERNED[key] = pa.RecordBatch.from_arrays(
            [
                pa.array([at for at, _ in messages], pa.int64()),
                pa.array([m.timestamp_ms for _, m in messages], pa.timestamp("ms", tz="UTC")),
                pa.array([0 if m.timestamp_ms is None else 1 for _, m in messages], pa.int8()),
                pa.array([m.key for _, m in messages], pa.binary()),
                pa.array(headers, HEADERS),
                pa.array([m.value for _, m in messages], pa.binary()),
            ],
            schema=ENVELOPE,
        )
        _ENTRIES[id(found)] = key
    return found


class Log:
    """One partition of one incarnation of a topic. Offsets `[low, end)` are there, holes included."""

    def __init__(self) -> None:
        self.low = 0
        self.kinds: list[Kind] = []
        self.entries: list[tuple[int, Message]] = []
        self.open: dict[str, list[range]] = {}  # producers with a transaction under way: what is theirs, in order
        self.whole = True  # nothing but data in it
        self.changes = 0  # how often what was there already has become something else

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def stable(self) -> int:
        """The last stable offset: what a read_committed reader may see ends here. Never before the log's start."""
        if not self.open:
            return len(self.entries)
        return max(self.low, min(theirs[0].start for theirs in self.open.values()))

    def append(self, messages: Iterable[Message], kind: Kind = Kind.DATA) -> int:
        """The first offset."""
        first = len(self.entries)
        self.entries.extend(enumerate(messages, first))
        self.kinds.extend([kind] * (len(self.entries) - first))
        self.whole = self.whole and kind is Kind.DATA
        return first

    def visible(self, start: int = 0, stop: int | None = None) -> list[tuple[int, Message]]:
        """What a reader sees of `[start, stop)`."""
        stop = self.stable if stop is None else min(stop, self.stable)
        kinds, data = self.kinds, Kind.DATA
        return [self.entries[at] for at in range(max(start, self.low), stop) if kinds[at] is data]


@dataclass
class Topic:
    """One incarnation of a topic."""

    name: str
    incarnation: str
    logs: list[Log]


class Phase(StrEnum):
    """Of a group; see the module's own words."""

    STABLE = "stable"
    PREPARING = "preparing"
    COMPLETING = "completing"


@dataclass
class Seat:
    """A member as the coordinator knows it."""

    member: int
    client: ConsumerTwin
    heard_at: float
    joined: bool = False
    owns: frozenset[tuple[str, int]] = frozenset()  # what it said it has, when it joined
    given: tuple[tuple[str, int], ...] = ()
    synced: bool = False


@dataclass
class Settings:
    """Of a group's members; the names and defaults of librdkafka."""

    session_s: float = 45.0
    heartbeat_s: float = 3.0
    poll_interval_s: float = 300.0
    cooperative: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Settings:
        """From a source's client properties."""

        def seconds(name: str, default_ms: int) -> float:
            return float(options.get(name, default_ms)) / 1000

        return cls(
            seconds("session.timeout.ms", 45_000),
            seconds("heartbeat.interval.ms", 3_000),
            seconds("max.poll.interval.ms", 300_000),
            "cooperative" in options.get("partition.assignment.strategy", "cooperative-sticky"),
        )


class Group:
    """A consumer group's coordinator."""

    def __init__(self, cluster: Cluster, name: str, topics: tuple[str, ...]) -> None:
        self.cluster, self.name, self.topics = cluster, name, topics
        self.phase, self.generation = Phase.STABLE, 0
        self.seats: dict[int, Seat] = {}
        self.offsets: dict[tuple[str, int], tuple[int, str]] = {}  # offset, and the incarnation it was stored for
        self._round = 0
        self._watching = False
        self._fresh = True  # nobody has ever been here, or all have left: wait a little for others

    # --- members --------------------------------------------------------------------------------------------------

    def join(self, client: ConsumerTwin, member: int, owns: frozenset[tuple[str, int]]) -> None:
        seat = self.seats.get(member)
        if seat is None:
            seat = self.seats[member] = Seat(member, client, self.cluster.air.now())
        if self.phase is not Phase.PREPARING:
            self._prepare(f"m{member} joins")
        seat.joined, seat.synced, seat.owns = True, False, owns
        seat.heard_at = self.cluster.air.now()
        self._watch()
        self._complete_if_all()

    def leave(self, member: int) -> None:
        if self.seats.pop(member, None) is not None:
            self._said("leave", f"m{member}")
            if not self.seats:
                self._fresh = True
            if self.phase is not Phase.PREPARING:
                self._prepare(f"m{member} left")
            self._complete_if_all()

    def knows(self, member: int, generation: int) -> bool:
        return member in self.seats and generation == self.generation

    def rebalance(self) -> None:
        """Somebody asks for one (a subscription or a topic changed)."""
        if self.phase is not Phase.PREPARING:
            self._prepare("asked for")
            self._complete_if_all()

    # --- a generation ---------------------------------------------------------------------------------------------

    def _prepare(self, why: str) -> None:
        self._said("prepare", why)
        self.phase = Phase.PREPARING
        self._round += 1
        for seat in self.seats.values():
            seat.joined = False
            seat.client.at_next_heartbeat(seat.client.hear_rebalance)
        patience = max((s.client.settings.poll_interval_s for s in self.seats.values()), default=0.0)
        self.cluster.air.later(patience, self._out_of_patience, self._round)

    def _out_of_patience(self, number: int) -> None:
        if self.phase is Phase.PREPARING and number == self._round:
            for member in [m for m, seat in self.seats.items() if not seat.joined]:
                del self.seats[member]
                self._said("expelled", f"m{member}")
            self._complete_if_all()

    def _complete_if_all(self) -> None:
        if self.phase is not Phase.PREPARING or not all(seat.joined for seat in self.seats.values()):
            return
        if not self.seats:
            self.phase = Phase.STABLE
            return
        if self._fresh:  # group.initial.rebalance.delay.ms
            self._fresh = False
            self.cluster.air.later(self.cluster.initial_delay_s, self._complete_if_all)
            return
        self.generation += 1
        self.phase = Phase.COMPLETING
        self._assign()
        self._said("generation", str(self.generation))
        for seat in self.seats.values():
            seat.client.hear_assignment(self.generation, seat.given)

    def synced(self, member: int, generation: int) -> None:
        """A member has its share."""
        if generation == self.generation and member in self.seats:
            self.seats[member].synced = True
            if self.phase is Phase.COMPLETING and all(seat.synced for seat in self.seats.values()):
                self.phase = Phase.STABLE
                self._said("stable", str(self.generation))

    def _assign(self) -> None:
        """Sticky: who has keeps, up to its share. Cooperatively, what must move is given to nobody until it was given up."""
        places = [
            (name, number)
            for name in sorted(self.topics)
            if name in self.cluster.topics
            for number in range(len(self.cluster.topics[name].logs))
        ]
        seats = sorted(self.seats.values(), key=lambda s: s.member)
        cooperative = all(seat.client.settings.cooperative for seat in seats)
        owner: dict[tuple[str, int], Seat] = {}
        for seat in seats:
            for place in sorted(seat.owns):
                owner.setdefault(place, seat)
        least, extra = divmod(len(places), len(seats))
        share: dict[int, list[tuple[str, int]]] = {seat.member: [] for seat in seats}
        more = extra
        left = []
        for place in places:
            seat = owner.get(place) if cooperative else None  # type: ignore[assignment]  # None: nobody's
            if seat is not None:
                kept = share[seat.member]
                if len(kept) < least or (len(kept) == least and more > 0):
                    more -= len(kept) == least
                    kept.append(place)
                    continue
            left.append(place)
        for place in left:
            poorest = min(seats, key=lambda s: (len(share[s.member]), s.member))
            share[poorest.member].append(place)
        for seat in seats:
            given = share[seat.member]
            if cooperative:
                given = [place for place in given if owner.get(place, seat) is seat]
            seat.given = tuple(sorted(given))

    # --- silence --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._look()

    def _look(self) -> None:
        air, now = self.cluster.air, self.cluster.air.now()
        every = 3.0
        for member, seat in list(self.seats.items()):
            settings = seat.client.settings
            every = min(every, settings.heartbeat_s)
            if seat.client.heartbeats:
                seat.heard_at = now
            elif seat.client.overdue:  # nobody polls: the client itself leaves
                self._said("overdue", f"m{member}")
                self.leave(member)
            elif now - seat.heard_at > settings.session_s:
                self._said("silent", f"m{member}")
                self.leave(member)
        self._watching = bool(self.seats)
        if self._watching:
            air.later(every, self._look)

    def _said(self, what: str, detail: str) -> None:
        self.cluster.air.happened(self.name, f"group.{what}", detail, self.phase)

    # --- offsets --------------------------------------------------------------------------------------------------

    def commit(self, member: int, generation: int, at: Mapping[Partition, int]) -> None:
        """Raises `RefusedNow`. It does not look at who owns what: brokers do not."""
        if member not in self.seats:
            raise RefusedNow("UNKNOWN_MEMBER_ID", where=self.name)
        if generation != self.generation:
            raise RefusedNow("ILLEGAL_GENERATION", where=self.name)
        if self.phase is Phase.COMPLETING:
            raise RefusedNow("REBALANCE_IN_PROGRESS", where=self.name)
        for part, offset in at.items():
            self.offsets[part.topic, part.number] = offset, part.incarnation
        self.cluster.observe("commit", (self.name, dict(at)))


class Cluster:
    """Brokers: topics and groups. `observe(what, value)` hears of each effect in the step that applies it."""

    def __init__(self, air: Air, observe: Callable[[str, Any], None] | None = None, *, initial_delay_s: float = 0.2) -> None:
        self.air, self.initial_delay_s = air, initial_delay_s
        self.observe: Callable[[str, Any], None] = observe or (lambda _what, _value: None)
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.clients: list[ConsumerTwin] = []
        self._ever: dict[tuple[str, str], Topic] = {}
        self._incarnations = 0
        self._members = 0

    def create(self, name: str, partitions: int) -> Topic:
        """A new topic; of a name that is there, a new incarnation, as after a deletion."""
        self._incarnations += 1
        again = name in self.topics
        topic = self.topics[name] = Topic(name, f"id{self._incarnations:04}", [Log() for _ in range(partitions)])
        self._ever[name, topic.incarnation] = topic
        if again:
            self.air.happened("cluster", "topic.recreated", name, topic.incarnation)
            for client in self.clients:
                client.at_next_heartbeat(client.hear_topics)
        return topic

    def produce(self, name: str, number: int, messages: Iterable[Message]) -> int:
        """Append to one partition; the first offset."""
        log = self.topics[name].logs[number]
        first = log.append(messages)
        self.observe("produced", (name, number, first, log.end))
        self.wake()
        return first

    def begin(self, producer: str, name: str, number: int, messages: Iterable[Message]) -> int:
        """Append within a transaction of `producer`, which stays open; the first offset."""
        log = self.topics[name].logs[number]
        first = log.append(messages)
        if log.end > first:  # a partition is in a transaction as soon as it has a record of it
            log.open.setdefault(producer, []).append(range(first, log.end))
        return first

    def end_transaction(self, producer: str, name: str, *, commit: bool) -> None:
        """Write the markers. Aborted records stay in the log, unseen."""
        for number, log in enumerate(self.topics[name].logs):
            theirs = log.open.pop(producer, None)
            if theirs is None:
                continue
            if not commit:  # its own records, and not what others wrote between them
                for at in (at for some in theirs for at in some):
                    log.kinds[at] = Kind.ABORTED
                log.changes += 1
            log.append([MARKER], Kind.MARKER)
            self.observe("produced", (name, number, theirs[0].start, log.end))
        self.wake()

    def compact(self, name: str, number: int, offsets: Iterable[int]) -> None:
        """Take records out of the middle."""
        log = self.topics[name].logs[number]
        for at in offsets:
            log.kinds[at] = Kind.GONE
        log.changes += 1
        log.whole = False
        self.observe("compacted", (name, number))

    def retain(self, name: str, number: int, low: int) -> None:
        """Retention: the log now begins at `low`."""
        log = self.topics[name].logs[number]
        log.low = min(max(log.low, low), log.end)
        self.air.happened("cluster", "retention", f"{name}/{number}", str(log.low))
        self.observe("retained", (name, number, log.low))
        self.wake()

    def log_of(self, name: str, incarnation: str, number: int) -> Log:
        """Also of incarnations that are gone."""
        return self._ever[name, incarnation].logs[number]

    def vanish(self, node: str) -> None:
        """The node's process is gone. Its clients say nothing any more, and the group finds out by their silence."""
        for client in [c for c in self.clients if c.wire.node == node]:
            client.vanish()

    def wake(self) -> None:
        """There is something new to fetch."""
        for client in self.clients:
            client.wake()

    def group(self, name: str, topics: tuple[str, ...]) -> Group:
        if name not in self.groups:
            self.groups[name] = Group(self, name, topics)
        return self.groups[name]

    def next_member(self) -> int:
        self._members += 1
        return self._members


MARKER: Final = Message(None, None, (), None)


@dataclass
class _Fetch:
    """Where a client reads one partition it owns."""

    part: Partition
    at: int
    paused: bool = False
    adrift: bool = False


@dataclass
class _Token:
    event: Assigned | Revoked


class ConsumerTwin:
    """One client. `source` and `cluster_id` name its partitions as the adapter does."""

    capabilities = Capabilities(durable=False, replayable=True, read_back=False, idempotent=False)

    def __init__(
        self,
        cluster: Cluster,
        wire: Wire,
        *,
        source: str,
        cluster_id: str,
        group: str,
        topics: tuple[str, ...],
        settings: Settings,
    ) -> None:
        self.cluster, self.wire, self.settings = cluster, wire, settings
        self._air, self._node = cluster.air, wire.node
        self._source, self._cluster_id = source, cluster_id
        self._group = cluster.group(group, topics)
        self._topics = topics
        self._member = cluster.next_member()
        self._born = self._air.now()
        self._generation = -1
        self._owned: dict[tuple[str, int], _Fetch] = {}
        self._parts: dict[tuple[str, int], Partition] = {}  # given, started or not
        self._pending: deque[_Token | Lost] = deque()
        self._open: _Token | None = None
        self._count = 0
        self._turn = 0
        self._polled_at = self._born
        self._waiter: asyncio.Future[None] | None = None
        self._seated = self._joining = self._leaving = self._left = self._closed = False
        cluster.clients.append(self)
        self._rejoin()

    # --- the port -------------------------------------------------------------------------------------------------

    async def poll(self, records_max: int, wait_s: float) -> list[Event]:
        if self._closed:
            raise Permanent("the consumer is closed", where=self._group.name)
        until = self._air.now() + wait_s
        while True:
            self._polled_at = now = self._air.now()
            if self._seated and self._member not in self._group.seats and self.heartbeats:
                self._hear_expulsion()
            events = self._due(records_max)
            if events or now >= until:
                return events
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            over = loop.call_later(until - now, _set, waiter)
            try:
                await waiter
            finally:
                over.cancel()
                self._waiter = None
            if self._closed:
                return []

    async def start(self, token: int, at: Mapping[Partition, Cursor]) -> None:
        opened = self._completed(token)
        if opened is None:
            return  # lost meanwhile
        missing = [part for part in opened.event.parts if part not in at]
        if missing:
            raise ValueError(f"no cursor for {missing}")
        for part in opened.event.parts:
            place = (part.topic, part.number)
            if self._parts.get(place) == part:
                self._owned[place] = _Fetch(part, at[part].next)
        if self._leaving:  # asked to while this token was open
            self._revoke_all()
        self._wake()

    async def release(self, token: int) -> None:
        opened = self._completed(token)
        if opened is None:
            return
        for part in opened.event.parts:
            self._owned.pop((part.topic, part.number), None)
            self._parts.pop((part.topic, part.number), None)
        if self._leaving:  # what this token did not name is still to be given up
            self._revoke_all()
        else:
            self._rejoin()

    async def seek(self, part: Partition, at: Cursor) -> None:
        fetch = self._owned.get((part.topic, part.number))
        if fetch is not None and fetch.part == part:
            fetch.at, fetch.adrift = at.next, False
            self._wake()

    async def committed(self, parts: Sequence[Partition]) -> Mapping[Partition, Cursor | None]:
        def apply() -> Mapping[Partition, Cursor | None]:
            out: dict[Partition, Cursor | None] = {}
            for part in parts:
                offset, incarnation = self._group.offsets.get((part.topic, part.number), (-1, ""))
                out[part] = KafkaCursor(offset) if offset >= 0 and incarnation == part.incarnation else None
            return out

        return await self.wire.call("committed", apply)

    async def bounds(self, parts: Sequence[Partition], *, known: bool = False) -> Mapping[Partition, Bounds]:
        def apply() -> Mapping[Partition, Bounds]:
            found = {}
            for part in parts:
                topic = self.cluster.topics.get(part.topic)
                if topic is not None and part.number < len(topic.logs):
                    log = topic.logs[part.number]
                    found[part] = Bounds(KafkaCursor(log.low), KafkaCursor(log.stable))
                elif not known:  # made anew, with fewer
                    raise Transient(f"there is no partition {part.number} of {part.topic}", where=self._group.name)
            return found

        return apply() if known else await self.wire.call("bounds", apply)

    async def commit(self, at: Mapping[Partition, Cursor]) -> None:
        if not at:
            return
        member, generation = self._member, self._generation
        wanted = {part: cursor.next for part, cursor in at.items()}
        await self.wire.call(
            "commit", lambda: self._group.commit(member, generation, wanted), detail=self._group.name, changes=True
        )

    async def pause(self, parts: Sequence[Partition]) -> None:
        self._set_paused(parts, True)

    async def resume(self, parts: Sequence[Partition]) -> None:
        self._set_paused(parts, False)
        self._wake()

    async def leave(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        for part in self._untold():
            del self._parts[part.topic, part.number]
        self._pending = deque(e for e in self._pending if isinstance(e, Lost))
        if self._open is None:
            self._revoke_all()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._left:
                self._depart()
            if self in self.cluster.clients:
                self.cluster.clients.remove(self)
            self._wake()

    def vanish(self) -> None:
        """Its process has ended without a word."""
        self._closed = True
        if self in self.cluster.clients:
            self.cluster.clients.remove(self)

    # --- what poll hands over -------------------------------------------------------------------------------------

    def _due(self, records_max: int) -> list[Event]:
        if self._open is not None:
            return []
        if not self._pending:
            return self._fetched(records_max)
        head = self._pending.popleft()
        if isinstance(head, Lost):
            return [head]
        self._open = head
        # A call that begins a rebalance may have records of its own, fetched before it; sometimes they are told first,
        # sometimes last, when their partition may be given up already.
        event: list[Event] = [head.event]
        if isinstance(head.event, Assigned) or head.event.token % 3 == 0:
            return event
        records: list[Event] = []
        for fetched in self._fetched(records_max):
            if isinstance(fetched, Adrift):  # said by a later call, if the partition is still ours by then
                self._owned[fetched.part.topic, fetched.part.number].adrift = False
            else:
                records.append(fetched)
        return [*records, *event] if head.event.token % 3 == 1 else [*event, *records]

    def _fetched(self, records_max: int) -> list[Event]:
        events: list[Event] = []
        left = records_max
        places = list(self._owned)
        if not places or self._air.cut(self._node, self.wire.service):
            return events
        self._turn = (self._turn + 1) % len(places)
        for place in places[self._turn :] + places[: self._turn]:
            fetch = self._owned[place]
            topic = self.cluster.topics.get(place[0])
            if fetch.paused or fetch.adrift or topic is None or topic.incarnation != fetch.part.incarnation:
                continue
            log = topic.logs[place[1]]
            if fetch.at < log.low or fetch.at > log.end:
                fetch.adrift = True
                events.append(Adrift(fetch.part, KafkaCursor(fetch.at)))
                continue
            if left <= 0:
                continue
            found: list[tuple[int, Message]] = []
            at, stable = fetch.at, log.stable
            kinds, entries, data = log.kinds, log.entries, Kind.DATA
            if log.whole:
                found = entries[at : min(stable, at + left)]
                at += len(found)
            while at < stable and len(found) < left:
                if kinds[at] is data:
                    found.append(entries[at])
                at += 1
            if found:
                left -= len(found)
                stop = found[-1][0] + 1
                events.append(Records(fetch.part, KafkaCursor(fetch.at), KafkaCursor(stop), envelope(found)))
                fetch.at = stop
            if at > fetch.at and at == stable:  # nothing to see up to the end: markers, aborted or compacted records
                fetch.at = at
                events.append(Position(fetch.part, KafkaCursor(at)))
        return events

    # --- the client's own threads ---------------------------------------------------------------------------------

    @property
    def heartbeats(self) -> bool:
        """Whether the coordinator hears from it now: its process runs, somebody polls it, and the line is up."""
        return self._online and not self._neglected

    @property
    def overdue(self) -> bool:
        """Whether it lives, and nobody has polled it for too long."""
        return self._online and self._neglected

    @property
    def _neglected(self) -> bool:
        return self._waiter is None and self._air.now() - self._polled_at > self.settings.poll_interval_s

    @property
    def _online(self) -> bool:
        air, node = self._air, self._node
        return not self._closed and not self._left and air.awake(node) and not air.cut(node, self.wire.service)

    def at_next_heartbeat(self, call: Callable[[], None]) -> None:
        every = self.settings.heartbeat_s
        self._background(call, every - (self._air.now() - self._born) % every)

    def _background(self, call: Callable[[], None], delay_s: float | None = None) -> None:
        one_way = min(self._air.latency_s(self._node, self.wire.service), REQUEST_TIMEOUT_S)  # then over a new connection
        self._air.later(one_way if delay_s is None else delay_s, self._ran, call)

    def _ran(self, call: Callable[[], None]) -> None:
        if self._closed or not self._air.alive(self._node):
            return
        if not self._air.awake(self._node) or self._air.cut(self._node, self.wire.service):
            self._air.later(RETRY_S, self._ran, call)
            return
        call()

    def _rejoin(self) -> None:
        """A join is on its way, and one is enough."""
        if not self._joining:
            self._joining = True
            self._background(self._join)

    def _join(self) -> None:
        self._joining = False
        if self._left or self._leaving:
            return
        if self._seated and self._member not in self._group.seats:  # UNKNOWN_MEMBER_ID
            self._hear_expulsion()
            return
        self._seated = True
        self._group.join(self, self._member, frozenset(self._parts))

    def hear_rebalance(self) -> None:
        """At a heartbeat: the group rebalances."""
        if self._left or self._leaving or self._joining or self._member not in self._group.seats:
            return
        if self._group.seats[self._member].joined:
            return
        if self._open is not None or self._pending:
            self._background(self.hear_rebalance, RETRY_S)  # it is in the middle of the last one
        elif self.settings.cooperative or not self._parts:
            self._join()
        else:
            self._push(Revoked(self._token(), tuple(self._parts[p] for p in sorted(self._parts))))

    def hear_assignment(self, generation: int, given: tuple[tuple[str, int], ...]) -> None:
        """The coordinator's answer to a join, on its way."""
        member = self._member
        self._background(lambda: self._given(member, generation, given))

    def _given(self, member: int, generation: int, given: tuple[tuple[str, int], ...]) -> None:
        group = self._group
        seat = group.seats.get(member)
        if self._left or seat is None or member != self._member or generation != group.generation:
            return
        if seat.joined and group.phase is Phase.PREPARING:  # it has joined anew meanwhile, with what it had before
            return
        self._generation = generation
        group.synced(self._member, generation)
        if self._leaving:
            return
        gone = [place for place in sorted(self._parts) if place not in given]
        new = [place for place in given if place not in self._parts]
        if gone:
            self._push(Revoked(self._token(), tuple(self._parts[p] for p in gone)))
            return  # its release joins again, and what is new comes then
        parts = []
        for place in new:
            topic = self.cluster.topics[place[0]]
            self._parts[place] = part = Partition(self._source, self._cluster_id, place[0], place[1], topic.incarnation)
            parts.append(part)
        self._push(Assigned(self._token(), tuple(parts)))

    def hear_topics(self) -> None:
        """Metadata are read anew: a topic may be another one under the same name."""
        lost = [
            place for place, part in self._parts.items()
            if place[0] in self.cluster.topics and self.cluster.topics[place[0]].incarnation != part.incarnation
        ]  # fmt: skip
        if lost and (self._open is not None or self._pending):
            self._background(self.hear_topics, RETRY_S)
        elif lost:
            self._lose(lost)
            if self.settings.cooperative or not self._parts:
                self._rejoin()
            else:  # who joins eagerly has nothing
                self._push(Revoked(self._token(), tuple(self._parts[p] for p in sorted(self._parts))))

    def _hear_expulsion(self) -> None:
        """It stood still for too long: what it had is somebody else's. It joins as a new member."""
        self._lose(list(self._parts))
        self._member = self.cluster.next_member()
        self._generation = -1
        self._seated = False
        if self._leaving:
            self._left = True
        else:
            self._rejoin()

    def _lose(self, places: Sequence[tuple[str, int]]) -> None:
        untold = self._untold()
        parts = tuple(self._parts[p] for p in sorted(places) if self._parts[p] not in untold)
        for place in places:
            self._owned.pop(place, None)
            self._parts.pop(place, None)
        self._pending = deque(e for e in self._pending if isinstance(e, Lost))
        self._open = None
        if parts:
            self._pending.append(Lost(parts))
        self._wake()

    def _untold(self) -> set[Partition]:
        """What it was given and nobody has heard of yet."""
        tokens = [e.event for e in self._pending if not isinstance(e, Lost)]
        return {part for event in tokens if isinstance(event, Assigned) for part in event.parts}

    def _revoke_all(self) -> None:
        parts = tuple(self._parts[p] for p in sorted(self._owned))
        if parts:
            self._push(Revoked(self._token(), parts))
        else:
            self._depart()

    def _depart(self) -> None:
        """LeaveGroup: sent, and not waited for."""
        self._left = True
        member, group = self._member, self._group
        if not self._air.cut(self._node, self.wire.service):
            self._air.later(self._air.latency_s(self._node, self.wire.service), group.leave, member)

    def _completed(self, token: int) -> _Token | None:
        opened = self._open
        if opened is None or opened.event.token != token:
            return None
        self._open = None
        return opened

    def _set_paused(self, parts: Sequence[Partition], paused: bool) -> None:
        for part in parts:
            fetch = self._owned.get((part.topic, part.number))
            if fetch is not None and fetch.part == part:
                fetch.paused = paused

    def _token(self) -> int:
        self._count += 1
        return self._count

    def _push(self, event: Assigned | Revoked) -> None:
        self._pending.append(_Token(event))
        self._wake()

    def wake(self) -> None:
        """There may be something to fetch, as soon as it has travelled."""
        if self._waiter is not None:
            self._air.later(self._air.latency_s(self._node, self.wire.service), self._wake)

    def _wake(self) -> None:
        if self._waiter is not None:
            _set(self._waiter)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


RETRY_S: Final = 0.25
"""How soon a client's thread that could not do its work tries again."""

__all__ = ["MARKER", "Cluster", "ConsumerTwin", "Group", "Kind", "Log", "Message", "Settings", "Topic", "entries_of", "envelope"]
