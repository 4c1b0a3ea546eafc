"""What lies between a node and a service, and what may go wrong there.

A twin holds the service's state and applies each effect in one synchronous step. Everything else about a call (how long
it travels, whether it arrives, whether the answer does, whether the node is still alive to hear it) is the `Wire`'s, and
the `Air` decides it. So a twin has no clock, no chance and no faults of its own beyond those it lists by name.

    node ──── forth ────▶ effect ──── back ────▶ node
              may be cut    │           may be cut
                            ▼
              fate: applied or not · answered, refused, or silent · the node lives or dies

A request that has left lands, or not, whatever becomes of the node afterwards: its flight is the Air's, not the caller's.

An effect has an address, `<node>:<service>.<operation>:<detail>#<ordinal>`, such as `w0:raw.create:orders/2#3`: the third
time that node w0 did that. Ordinals, unlike indices into a trace, do not move when something elsewhere is added or taken
away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from thalweg.errors import Ambiguous, RefusedNow, ThalwegError, Transient

T = TypeVar("T")
Reply = Callable[[Any], None]
Fail = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one effect. `label` names the cause in traces: `refused`, `reply-lost`, `disk-full`, …"""

    label: str
    applies: bool = True
    error: Callable[[str], ThalwegError] | None = None  # what the node hears instead of the result
    kills: bool = False  # the node loses its power at this instant and hears nothing


DONE: Final = Fate("done")

REFUSED: Final = Fate("refused", applies=False, error=Transient)
REPLY_LOST: Final = Fate("reply-lost", error=Ambiguous)
KILLED_BEFORE: Final = Fate("killed-before", applies=False, kills=True)
KILLED_AFTER: Final = Fate("killed-after", kills=True)

POSITIONS: Final = (REFUSED, REPLY_LOST, KILLED_BEFORE, KILLED_AFTER)
"""The four positions of a crash or an error relative to any effect."""

NEVER_ARRIVED: Final = Fate("never-arrived", applies=False, error=Ambiguous)
"""The half of ambiguity that did not happen: a commit whose connection broke on its way there."""

COMMIT_REFUSED: Final = Fate("commit-refused", applies=False, error=RefusedNow)
"""Of a group's commit alone: the group rebalances. It says nothing of who owns what."""

SLOW_DOWN: Final = Fate("slow-down", applies=False, error=Transient)
"""503 of an object store: not applied, come back later."""

CONFLICT: Final = Fate("conflict", applies=False, error=Transient)
"""409 of an object store: another conditional write of this key was under way. Unlike 412 it claims nothing about the key."""

TORN: Final = Fate("torn", applies=False, error=Ambiguous)
"""An upload that broke in the middle: no object, parts left behind, and the client cannot know."""

COMPLETE_ERROR: Final = Fate("complete-error", error=Ambiguous)
"""CompleteMultipartUpload answered 200 with an error in its body, and the object is there."""

DISK_FULL: Final = Fate("disk-full", applies=False, error=Transient)
"""53100 of a database, ENOSPC of a folder."""

SERIALIZATION: Final = Fate("serialization", applies=False, error=Transient)
"""40001: the transaction is rolled back, and may be tried again as a whole."""

CONNECTION_KILLED: Final = Fate("connection-killed", applies=False, error=Transient)
"""57P01 before COMMIT was sent: the server rolls back."""

FATES: Final = {
    fate.label: fate
    for fate in (
        REFUSED, REPLY_LOST, KILLED_BEFORE, KILLED_AFTER, NEVER_ARRIVED, COMMIT_REFUSED, SLOW_DOWN, CONFLICT, TORN,
        COMPLETE_ERROR, DISK_FULL, SERIALIZATION, CONNECTION_KILLED,
    )
}  # fmt: skip


class Air(Protocol):
    """Who decides what happens between nodes and services. A simulator brings one; `Calm` is one where nothing does."""

    def now(self) -> float:
        """Seconds."""
        ...

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call(*args)` after `delay_s`, whatever becomes of the node that asks."""
        ...

    def latency_s(self, node: str, service: str) -> float:
        """How long one way takes now."""
        ...

    def cut(self, node: str, service: str) -> bool:
        """Whether nothing passes between the two now."""
        ...

    def alive(self, node: str) -> bool:
        """Whether the node still is. What it sent before may yet arrive."""
        ...

    def awake(self, node: str) -> bool:
        """Whether its process runs now: alive, and not stopped by its scheduler."""
        ...

    def fate(self, effect: str, operation: str) -> Fate:
        """What becomes of an effect, asked once for each, at the instant at which it would be applied.

        `effect` is its address without the ordinal: who answers counts, also over the incarnations of a node.
        """
        ...

    def kill(self, node: str) -> None:
        """Take the node's power away now."""
        ...

    def happened(self, node: str, operation: str, detail: str, outcome: str) -> None:
        """Something for the trace: an effect, a read, an event of a service. `outcome` holds no address of an object."""
        ...


class Calm:
    """Nothing goes wrong and everything takes no time: for conformance and for tests of a twin by itself."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, str]] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_later(delay_s, call, *args)

    def latency_s(self, node: str, service: str) -> float:
        return 0.0

    def cut(self, node: str, service: str) -> bool:
        return False

    def alive(self, node: str) -> bool:
        return True

    def awake(self, node: str) -> bool:
        return True

    def fate(self, effect: str, operation: str) -> Fate:
        return DONE

    def kill(self, node: str) -> None:
        raise AssertionError("nobody dies in the calm")

    def happened(self, node: str, operation: str, detail: str, outcome: str) -> None:
        self.seen.append((node, operation, detail, outcome))


REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client waits for an answer that does not come before it says so."""


class Wire:
    """One node's line to one service. `where` is what its errors say of it.

    `ordered` is one connection: what is sent first arrives first. Else it is a pool of them, and nothing is promised.
    """

    __slots__ = ("_arrival_s", "air", "node", "ordered", "service", "where")

    def __init__(self, air: Air, node: str, service: str, where: str = "", *, ordered: bool = False) -> None:
        self.air, self.node, self.service, self.where, self.ordered = air, node, service, where or service, ordered
        self._arrival_s = 0.0

    def ask(
        self,
        operation: str,
        arrive: Callable[[Reply, Fail], None],
        *,
        detail: str = "",
        changes: bool = False,
        refused: Callable[[Fate], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Send a request. `arrive(reply, fail)` runs at the service when it gets there, and answers now or later.
        `refused(fate)` runs there instead when the effect is not to be applied.

        `changes` makes it an effect: it has an address and a fate. An effect must be applied within `arrive`, at once,
        unless the service itself makes the caller wait (a lock). Errors: `Transient` where it is known not to have
        happened, `Ambiguous` where an effect may have.
        """
        air, node = self.air, self.node
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not air.alive(node):  # its power went within this very step of it, at a probe: what comes after was never sent
            return future
        if air.cut(node, self.service):
            air.later(air.latency_s(node, self.service), self._settle, future, None, self._error(Transient, "unreachable"))
            air.happened(node, f"{self.service}.{operation}", detail, "unreachable")
            return future
        delay_s = air.latency_s(node, self.service)
        if self.ordered:
            now = air.now()
            self._arrival_s = max(now + delay_s, self._arrival_s + 1e-9)
            delay_s = self._arrival_s - now
        if delay_s > REQUEST_TIMEOUT_S:  # the client will not wait for it; it may land all the same
            air.later(REQUEST_TIMEOUT_S, self._give_up, future, changes)
        air.later(delay_s, self._arrived, future, operation, arrive, detail, changes, refused)
        return future

    async def call(
        self,
        operation: str,
        apply: Callable[[], T],
        *,
        detail: str = "",
        changes: bool = False,
        refused: Callable[[Fate], None] | None = None,
    ) -> T:
        """`ask` for what is answered on the spot: `apply` returns the result or raises an error of the engine."""

        def arrive(reply: Reply, fail: Fail) -> None:
            try:
                result = apply()
            except ThalwegError as error:
                fail(error)
            else:
                reply(result)

        result: T = await self.ask(operation, arrive, detail=detail, changes=changes, refused=refused)
        return result

    # --- the way there and back -----------------------------------------------------------------------------------

    def _arrived(
        self,
        future: asyncio.Future[Any],
        operation: str,
        arrive: Callable[[Reply, Fail], None],
        detail: str,
        changes: bool,
        refused: Callable[[Fate], None] | None,
    ) -> None:
        air, node = self.air, self.node
        named = f"{self.service}.{operation}"
        if self.ordered and future.done() and not future.cancelled():  # given up: its connection was closed before it was read
            air.happened(node, named, detail, "lost")
            return
        if air.cut(node, self.service):  # it was on its way when the line went down: nobody will ever answer
            air.happened(node, named, detail, "lost")
            kind = Ambiguous if changes else Transient
            air.later(REQUEST_TIMEOUT_S, self._settle, future, None, self._error(kind, "no answer"))
            return
        fate = air.fate(f"{node}:{named}:{detail}", named) if changes else DONE
        if fate.applies:
            self._serve(future, named, arrive, detail, fate, changes)
            return
        air.happened(node, named, detail, fate.label)
        if refused is not None:
            refused(fate)
        if fate.kills:
            air.kill(node)
        elif fate.error is not None:
            air.later(air.latency_s(node, self.service), self._settle, future, None, self._error(fate.error, fate.label))

    def _serve(
        self,
        future: asyncio.Future[Any],
        named: str,
        arrive: Callable[[Reply, Fail], None],
        detail: str,
        fate: Fate,
        changes: bool,
    ) -> None:
        air, node = self.air, self.node

        def reply(result: Any) -> None:
            air.happened(node, named, detail, fate.label)
            if fate.kills:
                air.kill(node)
                return
            error = None if fate.error is None else self._error(fate.error, fate.label)
            self._answer(future, result, error, changes)

        def fail(error: BaseException) -> None:
            air.happened(node, named, detail, type(error).__name__)
            if fate.kills:
                air.kill(node)
                return
            self._answer(future, None, error, changes)

        arrive(reply, fail)

    def _give_up(self, future: asyncio.Future[Any], changes: bool) -> None:
        """Nobody answers: the connection is closed, and what comes next goes over a new one."""
        self._arrival_s = 0.0
        self._settle(future, None, self._error(Ambiguous if changes else Transient, "no answer"))

    def _answer(self, future: asyncio.Future[Any], result: Any, error: BaseException | None, changes: bool) -> None:
        delay_s = self.air.latency_s(self.node, self.service)
        if delay_s > REQUEST_TIMEOUT_S:
            late = self._error(Ambiguous if changes else Transient, "no answer")
            self.air.later(REQUEST_TIMEOUT_S, self._settle, future, None, late)
            return
        self.air.later(delay_s, self._back, future, result, error, changes)

    def _back(self, future: asyncio.Future[Any], result: Any, error: BaseException | None, changes: bool) -> None:
        if self.air.cut(self.node, self.service):
            self.air.happened(self.node, f"{self.service}.answer", "", "lost")
            lost = self._error(Ambiguous if changes else Transient, "the answer was lost")
            self.air.later(REQUEST_TIMEOUT_S, self._settle, future, None, lost)
            return
        self._settle(future, result, error)

    def _settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if future.done():  # its caller gave up
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
            future.exception()  # the caller may be dead by now, which is no news

    def _error(self, kind: Callable[..., ThalwegError], label: str) -> ThalwegError:
        return kind(label, where=self.where)
