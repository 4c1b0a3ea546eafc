"""The consumer port's conformance machine: generated lives of a group, and what must hold in each of them.

A script is a list of steps: a member joins, leaves, closes without leaving, stands still for a while; records are
produced. Each member is served by the plainest owner there can be: it starts where the group's commits say, commits what
it was given, answers every token. While it runs, and at the end, the rules of the port are checked:

- the records of one ownership continue each other without a hole, from the cursor given to `start`;
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

Kind = Literal["join", "leave", "close", "still", "produce", "settle"]


@dataclass(frozen=True)
class Step:
    """`which` picks a member (modulo those alive), `amount` is records to produce or seconds to stand still.

    `settle` waits until every member alive has heard what it is assigned, nothing included.
    """

    kind: Kind
    which: int = 0
    amount: int = 0


MEMBERS_MAX = 5

SCRIPTS = st.lists(
    st.one_of(
        st.builds(Step, st.just("join")),
        st.builds(Step, st.just("leave"), st.integers(0, 3)),
        st.builds(Step, st.just("close"), st.integers(0, 3)),
        st.builds(Step, st.just("still"), st.integers(0, 3), st.integers(1, 2)),
        st.builds(Step, st.just("produce"), amount=st.integers(1, 400)),
    ),
    min_size=3,
    max_size=6,
)


@dataclass
class Outside:
    """What a script runs against: a fresh topic and group, by three functions."""

    member: Callable[[], LogConsumer]
    produce: Callable[[int], Awaitable[Mapping[int, int]]]  # so many records; log ends by partition number afterwards
    stored: Callable[[], Awaitable[Mapping[int, int]]]  # the group's commits by partition number, read by somebody else


class Broken(AssertionError):
    """A rule of the port does not hold."""


@dataclass
class Seen:
    """What happened, to be counted: the twin must be able to do all of it."""

    events: Counter[str] = field(default_factory=Counter)
    claims: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class Member:
    """The plainest owner of a consumer."""

    def __init__(self, name: str, consumer: LogConsumer, seen: Seen) -> None:
        self.name, self.consumer, self.seen = name, consumer, seen
        self.at: dict[Partition, int] = {}
        self.leaving = self.ended = self.heard = False
        self.still_s = 0
        self.refused: set[Partition] = set()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        asked = False
        while True:
            if self.still_s:
                seconds, self.still_s = self.still_s, 0
                await asyncio.sleep(seconds)
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
        await self.consumer.start(event.token, at)
        self.at.update({part: cursor.next for part, cursor in at.items()})

    async def _revoked(self, event: Revoked) -> None:
        self.seen.events["revoked"] += 1
        if strange := [p for p in event.parts if p not in self.at]:
            raise Broken(f"{self.name} was revoked {strange}, which it does not own")
        await self._commit()
        await self.consumer.release(event.token)
        for part in event.parts:
            del self.at[part]

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

    ends = await outside.produce(50)
    join()
    try:
        async with asyncio.timeout(within_s):
            for step in script:
                checked()
                some = alive()
                if step.kind == "join" and len(some) < MEMBERS_MAX:
                    join()
                elif step.kind == "produce":
                    ends = await outside.produce(step.amount)
                elif step.kind == "settle":
                    while not all(m.heard for m in alive()):
                        checked()
                        await asyncio.sleep(0.1)
                elif some and step.kind == "leave":
                    some[step.which % len(some)].leaving = True
                elif some and step.kind == "still":
                    some[step.which % len(some)].still_s = step.amount
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
            ends = await outside.produce(50)
            while dict(await outside.stored()) != dict(ends):
                checked()
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
    for number, end in ends.items():
        reach = 0
        for start, stop in sorted(seen.claims.get(number, [])):
            if start > reach:
                raise Broken(f"partition {number}: nobody claimed [{reach}, {start})")
            reach = max(reach, stop)
        if reach != end:
            raise Broken(f"partition {number}: claimed to {reach} of {end}")
    return seen
