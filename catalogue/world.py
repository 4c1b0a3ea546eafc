"""What a spec may ask of a world. A spec takes the fixture `world`, and cannot tell which world it is in.

A world owns time: a spec never sleeps, it says what it waits for. It owns addresses too: a pipeline names them by
`{kafka}`, `{postgres}` and `{lake}`, which the world fills in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from catalogue.invariants import Checkpoint, Identities


@dataclass(frozen=True)
class Message:
    """One record to be produced."""

    value: bytes | None
    partition: int = 0
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


# --- what may go wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Nothing passes between the engines and a service: `kafka`, or the one behind the sink that is named."""

    service: str
    for_s: float


@dataclass(frozen=True)
class Slow:
    """A service takes `factor` times as long."""

    service: str
    factor: float
    for_s: float


@dataclass(frozen=True)
class Fill:
    """A service's disk is full."""

    service: str
    for_s: float


@dataclass(frozen=True)
class Tear:
    """The next upload to the store behind this sink breaks in the middle."""

    service: str


@dataclass(frozen=True)
class LoseReply:
    """The next change of this sort (`create`, `commit`, …) at this service is applied, and its answer lost."""

    service: str
    operation: str


@dataclass(frozen=True)
class Refuse:
    """The next change of this sort at this service is refused for now, `times` over."""

    service: str
    operation: str
    times: int = 1


@dataclass(frozen=True)
class Retain:
    """Retention: a partition's log now begins at `low`."""

    topic: str
    partition: int
    low: int


@dataclass(frozen=True)
class Recreate:
    """The topic is deleted, and another one made under its name."""

    topic: str
    partitions: int


Fault = Cut | Slow | Fill | Tear | LoseReply | Refuse | Retain | Recreate
"""Kills and pauses are the engine's (`Engine.kill`, `Engine.pause`, `kill_at`); a rebalance is one engine more, or less."""


class Engine(Protocol):
    """One running node."""

    def stop(self) -> int:
        """Ask it to drain; its exit status."""
        ...

    def kill(self) -> None:
        """A power cut."""
        ...

    def pause(self, for_s: float) -> None:
        """Its process stands still for so long, then goes on as if nothing had been."""
        ...

    @property
    def running(self) -> bool: ...

    def wait_exit(self) -> int:
        """Until it ends by itself; its exit status."""
        ...

    def page(self, path: str) -> tuple[int, str]:
        """A status page: HTTP status (0 when it does not answer) and body."""
        ...

    def log(self) -> str:
        """What it has reported so far."""
        ...


class Truth(Protocol):
    """What is so, read by clients of the world's own and never asked of the engine."""

    def produced(self, topic: str) -> Identities: ...

    def ends(self, topic: str) -> dict[int, int]:
        """Log end per partition (the last stable offset)."""
        ...

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Stored offsets; partitions without one are left out."""
        ...

    def commits(self, group: str, topic: str) -> Sequence[tuple[float, int, int]]:
        """Every commit that the group has stored: when (seconds of the world), partition, offset."""
        ...

    def checkpoints(self) -> Sequence[Checkpoint]: ...

    def raw(self) -> list[dict[str, Any]]:
        """Every row of every raw object, as it is stored, repeats included."""
        ...

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What the destination says."""
        ...

    def contacted(self) -> set[str]:
        """Services that engines have called: `kafka`, and others by the sink that is theirs."""
        ...

    def binary_copies(self) -> int:
        """How many binary COPY statements the destination has served."""
        ...


class World(Protocol):
    """Servers, a producer, engines, and the truth about them."""

    truth: Truth
    name: str  # unique to the spec: for topics, groups, tables

    def topic(self, name: str, partitions: int, **settings: str) -> None: ...

    def produce(self, topic: str, messages: Sequence[Message]) -> None:
        """Until all are acknowledged."""
        ...

    def produce_transaction(self, topic: str, messages: Sequence[Message], *, commit: bool) -> None:
        """Within a transaction that ends so."""
        ...

    def engine(self, pipeline: str, *, kill_at: str = "", **environment: str) -> Engine:
        """Start a node on this pipeline. `kill_at` is a probe with its ordinal, `raw.durable#2`: it loses its power there."""
        ...

    def coverage(self, pipeline: str) -> list[dict[str, Any]]:
        """What `thalweg coverage --json` prints for it."""
        ...

    def between(self, kind: str, work: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """What `work` makes of two nodes' clients (the engine's port) of one new store: `objects`, or `database`."""
        ...

    def inject(self, fault: Fault) -> None:
        """It goes wrong now, or the next time that the thing it is about comes."""
        ...

    def seconds(self) -> float:
        """The world's time."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let the world go on for so long, whatever happens in it."""
        ...

    def wait_until(self, what: str, condition: Callable[[], bool], within_s: float = 60) -> None:
        """Until `condition()`; fails naming `what` when the world's time is over."""
        ...
