"""A fault plan: what goes wrong in one run, as data.

A plan and its seeds are the whole of a run: two runs of one plan are the same to the last event. A plan is a small JSON
file, so that it can be kept, shrunk and sent to somebody.

Two sorts of faults. Those of an *effect* say what becomes of it, by its address: `w0:raw.create:orders/2#3`, or by
operation over all nodes, `raw.create#7`. Those of *time* begin at a second and last for some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fakes.faults import FATES

FORMAT: Final = "thalweg-plan/1"

TIMED: Final = {
    "kill": "a node loses its power, and is started again",
    "pause": "a node's process stands still, then goes on as if nothing had been",
    "cut": "nothing passes between nodes and a service",
    "slow": "a service takes many times as long",
    "rebalance": "one more node joins the group, and leaves it again",
    "fill": "a service's disk is full",
    "spike": "much of what would come later comes now",
    "echo": "a producer hears no acknowledgement, and sends its batch again",
    "abort": "a transaction writes to every partition, and is aborted",
    "retention": "the oldest records of a partition are dropped, read or not",
    "skew": "what was meant for all partitions comes to one",
}

EFFECTS: Final = dict(FATES.items())

APPLICABLE: Final = {
    "commit-refused": ("kafka.commit",),
    "slow-down": (".create", ".replace"),
    "conflict": (".create", ".replace"),
    "torn": (".create",),
    "complete-error": (".create",),
    "disk-full": (".copy", ".create"),
    "serialization": (".commit",),
    "connection-killed": (".commit",),
}
"""Operations a fate belongs to, by the end of their name; the four positions and `never-arrived` belong to every effect."""


def applicable(label: str, operation: str) -> bool:
    """Whether `operation` (`raw.create`) can meet this fate."""
    if operation == "kafka.commit":
        return label in ("commit-refused", "refused", "reply-lost", "killed-before", "killed-after", "never-arrived")
    if label == "commit-refused":
        return False
    return label not in APPLICABLE or any(operation.endswith(end) for end in APPLICABLE[label])


@dataclass(frozen=True)
class Fault:
    """One fault. `at` is an effect's address, or a second of the run as a number."""

    kind: str
    at: str | float
    node: str = ""  # "" is all, or whichever comes
    service: str = ""
    for_s: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        timed = self.kind in TIMED
        if not timed and self.kind not in EFFECTS:
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(sorted((*TIMED, *EFFECTS)))}")
        if timed == isinstance(self.at, str):
            raise ValueError(f"fault {self.kind}: at is {self.at!r}, which is no {'second' if timed else 'address'}")

    def words(self) -> str:
        """For a person."""
        what = f"{self.kind} at {self.at}" + ("" if isinstance(self.at, str) else " s")
        where = "".join(f" {name} {value}" for name, value in (("node", self.node), ("service", self.service)) if value)
        return (
            what + where + (f" for {self.for_s:g} s" if self.for_s else "") + (f" ×{self.factor:g}" if self.factor != 1 else "")
        )


@dataclass(frozen=True)
class Plan:
    """One run of one subject (a pipeline file or a catalogue row)."""

    subject: str
    seed: int = 0  # of latencies and of the interleaving
    load: int = 0  # of the workload
    nodes: int = 2
    records: int = 1_000
    partitions: int = 4
    faults: tuple[Fault, ...] = ()
    sabotage: str = ""  # a planted bug
    invariant: str = ""  # what it was found to break
    commit: str = ""  # of the code it was found in
    notes: dict[str, Any] = field(default_factory=dict)

    def with_faults(self, faults: Iterable[Fault]) -> Plan:
        return replace(self, faults=tuple(faults))

    def encoded(self) -> str:
        """JSON of a few lines: one for what is common, one a fault."""
        common = {"format": FORMAT, **{k: v for k, v in asdict(self).items() if k != "faults" and v not in ("", {})}}
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in common.items()]
        faults = [
            "  "
            + json.dumps({k: v for k, v in asdict(f).items() if v not in ("", 0.0) and (k, v) != ("factor", 1.0)} | {"at": f.at})
            for f in self.faults
        ]
        lines.append(' "faults": [' + ("\n" + ",\n".join(faults) + "\n ]" if faults else "]"))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def decoded(cls, text: str, where: str = "plan") -> Plan:
        """Raises `ValueError` that names what is wrong."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise ValueError(f"{where} is no plan of format {FORMAT}")
        try:
            faults = tuple(Fault(**entry) for entry in raw.pop("faults", []))
            return cls(**raw, faults=faults)
        except TypeError as error:
            raise ValueError(f"{where} is damaged: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls.decoded(path.read_text(encoding="utf-8"), str(path))
