"""What a spec may ask of a world. A spec takes the fixture `world`, and cannot tell which world it is in.

A world owns time: a spec never sleeps, it says what it waits for. It owns addresses too: a pipeline names them by
`{kafka}`, `{postgres}` and `{lake}`, which the world fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Engine(Protocol):
    """One running node."""

    def stop(self) -> int:
        """Ask it to drain; its exit status."""
        ...

    def kill(self) -> None:
        """A power cut."""
        ...

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

    def checkpoints(self) -> Sequence[Checkpoint]: ...

    def raw(self) -> list[dict[str, Any]]:
        """Every row of every raw object, as it is stored, repeats included."""
        ...

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What the destination says."""
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

    def engine(self, pipeline: str, **environment: str) -> Engine:
        """Start a node on this pipeline."""
        ...

    def wait_until(self, what: str, condition: Callable[[], bool], within_s: float = 60) -> None:
        """Until `condition()`; fails naming `what` when the world's time is over."""
        ...
