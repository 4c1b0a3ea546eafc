"""The consumer port's conformance machine: generated lives of a group, and what must hold in each of them.

A script is a list of steps: a member joins, leaves, closes without leaving, stands still (for longer than the group bears,
too), pauses its partitions; records are produced, in transactions that commit or abort where there are any. Each member is
served by the plainest owner there can be: it starts where the group's commits say, commits what it was given, answers every
token. While it runs, and at the end, the rules of the port are checked:

- the records of one ownership continue each other without a hole, from the cursor given to `start`;
- each claimed interval holds exactly the log's visible records of that interval, byte for byte: markers and aborted records
  lie inside claims, and everything else is there;
- between a token and its completion come no records, but for those polled in the same call as the event;
- after `release` or `Lost` nothing of the partition comes until it is assigned anew;
- a refused commit changes nothing: who was refused goes on receiving;
- empty assignments come and are completed;
- cancelling a poll loses nothing;
- at the end the claims of all members, as far as they were committed, cover every log from its start to its end.

It knows no technology: the same scripts run on the adapter with an embedded cluster, on the adapter with a real broker,
and on the in-memory twin, whose faults must then be those that were seen here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

from thalweg.core.batch import Cursor, KafkaCursor, Partition
from thalweg.errors import Ambiguous, RefusedNow, Transient
from thalweg.ports import Assigned, LogConsumer, Lost, Position, Records, Revoked

Kind = Literal["join", "leave", "close", "still", "pause", "produce", "commit", "abort", "settle"]
How = Literal["produce", "commit", "abort"]


@dataclass(frozen=True)
class Step:
    """`which` picks a member (modulo those alive), `amount` is records to produce or seconds to stand still.

    `commit` and `abort` produce within a transaction that ends so; `settle` waits until every member alive has heard what it
    is assigned, nothing included.
    """

    kind: Kind
    which: int = 0
    amount: int = 0


MEMBERS_MAX = 5
ZOMBIE_S = 6
"""Longer than the group waits for a member that polls nothing: set its `max.poll.interval.ms` below."""

SCRIPTS = st.lists(
    st.one_of(
        st.builds(Step, st.just("join")),
        st.builds(Step, st.just("leave"), st.integers(0, 3)),
        st.builds(Step, st.just("close"), st.integers(0, 3)),
        st.builds(Step, st.just("still"), st.integers(0, 3), st.sampled_from([1, ZOMBIE_S])),
        st.builds(Step, st.just("pause"), st.integers(0, 3)),
        st.builds(Step, st.sampled_from(["commit", "abort"]), amount=st.integers(1, 20)),
        st.builds(Step, st.just("produce"), amount=st.integers(1, 400)),
    ),
    min_size=3,
    max_size=6,
)


@dataclass
class Outside:
    """What a script runs against: a fresh topic and group, by three functions."""

    member: Callable[[], LogConsumer]
    produce: Callable[[int, How], Awaitable[Mapping[int, int]]]  # so many records; log ends by partition number afterwards
    visible: Callable[[], Mapping[int, Mapping[int, bytes]]]  # partition, offset, value that a reader must see
    stored: Callable[[], Awaitable[Mapping[int, int]]]  # the group's commits by partition number, read by somebody else


class Broken(AssertionError):
    """A rule of the port does not hold."""


@dataclass
class Seen:
    """What happened, to be counted: the twin must be able to do all of it."""

    events: Counter[str] = field(default_factory=Counter)
    claims: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    rows: list[tuple[int, int, int, dict[int, bytes]]] = field(default_factory=list)  # partition, start, stop, value by offset


class Member:
    """The plainest owner of a consumer."""

    def __init__(self, name: str, consumer: LogConsumer, seen: Seen) -> None:
        self.name, self.consumer, self.seen = name, consumer, seen
        self.at: dict[Partition, int] = {}
        self.leaving = self.ended = self.heard = False
        self.still_s = 0
        self.pausing = False
        self.refused: set[Partition] = set()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        asked = False
        while True:
            if self.still_s:
                seconds, self.still_s = self.still_s, 0
                await asyncio.sleep(seconds)
                await self._commit()  # a zombie's: it does not know yet
            if self.pausing:
                self.pausing = False
                parts = sorted(self.at)
                await self.consumer.pause(parts)
                self.seen.events["paused"] += 1
                await asyncio.sleep(0.2)
                await self.consumer.resume(parts)
            if self.leaving and not asked:
                asked = True
                await self.consumer.leave()
            if asked and not self.at:
                break
            poll = asyncio.ensure_future(self.consumer.poll(100, 0.2))
            if self.seen.events["polls"] % 7 == 3:  # cancel one poll in seven: nothing may be lost by it
                await asyncio.wait({poll}, timeout=0.01)
                if not poll.done():
                    poll.cancel()
                    await asyncio.gather(poll, return_exceptions=True)
                    self.seen.events["polls cancelled"] += 1
                    self.seen.events["polls"] += 1
                    continue
            self.seen.events["polls"] += 1
            try:
                events = await poll
            except Transient:
                self.seen.events["transient"] += 1
                continue
            rebalanced = False
            for event in events:
                match event:
                    case Records():
                        self._take(event, rebalanced)
                    case Position():
                        self._move(event)
                    case Assigned():
                        rebalanced = True
                        await self._assigned(event)
                    case Revoked():
                        rebalanced = True
                        await self._revoked(event)
                    case Lost():
                        self.seen.events["lost"] += 1
                        for part in event.parts:
                            self.at.pop(part, None)
            await self._commit()
        await self.consumer.close()

    def _take(self, event: Records, rebalanced: bool) -> None:
        if event.part not in self.at:
            if not rebalanced:
                raise Broken(f"{self.name} got records of {event.part.number}, which it does not own")
            self.seen.events["records in the call of a revoke"] += 1
            return
        if event.start.next != self.at[event.part]:
            raise Broken(f"{self.name}: partition {event.part.number} went from {self.at[event.part]} to {event.start.next}")
        positions = event.batch.column("position").to_pylist()
        values = dict(zip(positions, event.batch.column("value").to_pylist(), strict=True))
        self.seen.rows.append((event.part.number, event.start.next, event.stop.next, values))
        if positions != sorted(set(positions)) or not all(event.start.next <= p < event.stop.next for p in positions):
            raise Broken(f"{self.name}: positions {positions[:3]}… outside [{event.start.next}, {event.stop.next})")
        self._claim(event.part, event.stop.next)
        if event.part in self.refused:
            self.refused.discard(event.part)
            self.seen.events["records after a refused commit"] += 1

    def _move(self, event: Position) -> None:
        if event.part in self.at:
            if event.at.next < self.at[event.part]:
                raise Broken(f"{self.name}: partition {event.part.number} went back to {event.at.next}")
            self.seen.rows.append((event.part.number, self.at[event.part], event.at.next, {}))
            self.seen.events["positions"] += event.at.next > self.at[event.part]
            self._claim(event.part, event.at.next)

    def _claim(self, part: Partition, stop: int) -> None:
        self.seen.claims.setdefault(part.number, []).append((self.at[part], stop))
        self.at[part] = stop

    async def _assigned(self, event: Assigned) -> None:
        self.seen.events["assigned"] += 1
        self.heard = True
        if not event.parts:
            self.seen.events["assigned nothing"] += 1
        stored = await self.consumer.committed(event.parts)
        at: dict[Partition, Cursor] = {p: stored[p] or KafkaCursor(0) for p in event.parts}
        if any(part in self.at for part in event.parts):
            raise Broken(f"{self.name} was assigned what it owns")
        await self._nothing_comes()
        await self.consumer.start(event.token, at)
        self.at.update({part: cursor.next for part, cursor in at.items()})

    async def _revoked(self, event: Revoked) -> None:
        self.seen.events["revoked"] += 1
        if strange := [p for p in event.parts if p not in self.at]:
            raise Broken(f"{self.name} was revoked {strange}, which it does not own")
        await self._commit()
        await self._nothing_comes()
        await self.consumer.release(event.token)
        for part in event.parts:
            del self.at[part]

    async def _nothing_comes(self) -> None:
        """A token is open: a poll may wait or bring other events, but no records."""
        if self.seen.events["assigned"] % 2:
            return
        poll = asyncio.ensure_future(self.consumer.poll(100, 0.05))
        await asyncio.wait({poll}, timeout=0.05)
        self.seen.events["polls with a token open"] += 1
        if not poll.done():
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)
        elif (events := poll.result()) and any(isinstance(e, Records) for e in events):
            raise Broken(f"{self.name} got records while a token was open")

    async def _commit(self) -> None:
        if not self.at:
            return
        try:
            await self.consumer.commit({part: KafkaCursor(at) for part, at in self.at.items()})
        except RefusedNow:
            self.seen.events["commits refused"] += 1
            self.refused |= set(self.at)
        except (Ambiguous, Transient):
            self.seen.events["commits unanswered"] += 1
        else:
            self.seen.events["commits"] += 1


async def live(script: Sequence[Step], outside: Outside, within_s: float) -> Seen:
    """Run a script to its end, then two members until everything is committed. Raises `Broken`."""
    seen = Seen()
    members: list[Member] = []

    def join() -> None:
        member = Member(f"m{len(members)}", outside.member(), seen)
        member.task = asyncio.create_task(member.run(), name=member.name)
        members.append(member)

    def alive() -> list[Member]:
        return [m for m in members if not m.ended and not m.leaving]

    def checked() -> None:
        for member in members:
            if member.task is not None and member.task.done() and not member.task.cancelled():
                member.task.result()

    ends = await outside.produce(50, "produce")
    join()
    try:
        async with asyncio.timeout(within_s):
            for step in script:
                checked()
                some = alive()
                if step.kind == "join" and len(some) < MEMBERS_MAX:
                    join()
                elif step.kind in ("produce", "commit", "abort"):
                    ends = await outside.produce(step.amount, step.kind)
                elif step.kind == "settle":
                    while not all(m.heard for m in alive()):
                        checked()
                        await asyncio.sleep(0.1)
                elif some and step.kind == "leave":
                    some[step.which % len(some)].leaving = True
                elif some and step.kind == "still":
                    some[step.which % len(some)].still_s = step.amount
                elif some and step.kind == "pause":
                    some[step.which % len(some)].pausing = True
                elif some and step.kind == "close":
                    gone = some[step.which % len(some)]
                    gone.ended = True
                    assert gone.task is not None
                    gone.task.cancel()
                    await asyncio.gather(gone.task, return_exceptions=True)
                    await gone.consumer.close()
                await asyncio.sleep(0.5)  # let the group begin to react; what it makes of it is checked, not awaited
            while len(alive()) < 2:
                join()
            ends = await outside.produce(50, "produce")
            while dict(await outside.stored()) != dict(ends):
                checked()
                ends = await outside.produce(0, "produce")  # a transaction's markers may be written after its end was answered
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Broken(f"not drained: committed {await outside.stored()} of {ends} after {dict(seen.events)}") from None
    finally:
        for member in members:
            member.leaving = True
        running = [m.task for m in members if m.task is not None and not m.task.done()]
        if running:
            _, stuck = await asyncio.wait(running, timeout=30)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    checked()
    visible = outside.visible()
    for number, start, stop, values in seen.rows:
        there = {at: value for at, value in visible[number].items() if start <= at < stop}
        if values != there:
            wrong = sorted(set(values.items()) ^ set(there.items()))[:3]
            raise Broken(f"partition {number}: [{start}, {stop}) holds {len(there)} records, {len(values)} came; wrong {wrong}")
    for number, end in ends.items():
        reach = 0
        for start, stop in sorted(seen.claims.get(number, [])):
            if start > reach:
                raise Broken(f"partition {number}: nobody claimed [{reach}, {start})")
            reach = max(reach, stop)
        if reach != end:
            raise Broken(f"partition {number}: claimed to {reach} of {end}")
    return seen
