"""The failures the engine tells apart, by what may be done about them.

An adapter raises one of these and never retries by itself; the runtime decides by class:

=====================  ==========================================================================
`Refused`              the configuration is wrong; nothing was started. Carries *every* fault found.
`Transient`            nothing happened; the same call may be made again.
`Ambiguous`            it may have happened; look (read back, re-read coverage) before trying again.
`Permanent`            it did not happen and never will as asked.
`RowsRefused`          a `Permanent` that names the guilty rows; the others would have been taken.
=====================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Fault:
    """One thing wrong with a configuration. `line` and `column` count from 1; 0 means the file as a whole."""

    line: int
    column: int
    code: str  # stable, kebab-case
    what: str  # the fault, naming the key or value at fault (never a secret's value)
    remedy: str  # what to write instead
    path: str = ""  # dotted path of the key, "sinks[1].table"
    file: str = ""


class ThalwegError(Exception):
    """Base of every error the engine raises on purpose: what happened, where, and the remedy, each in plain words."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.what}{where}{remedy}"


class Refused(ThalwegError):
    """The configuration cannot be run. `faults` holds all of them, in file order; exit status 78 (EX_CONFIG)."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults))
        super().__init__("; ".join(f"line {f.line}: [{f.code}] {f.what}" for f in self.faults))


class Transient(ThalwegError):
    """Nothing happened: connection refused, disk full, throttled, serialisation failure. Try again later."""


class RefusedNow(Transient):
    """A commit refused while the group rebalances. Says nothing about ownership; only `Revoked` and `Lost` do."""


class Ambiguous(ThalwegError):
    """The request may have been applied and its reply lost. Read back before repeating it."""


class Permanent(ThalwegError):
    """Not applied and never will be as asked: wrong password, no such table, a schema that cannot be reconciled."""


class Exists(Permanent):
    """Create-only put on a key that is already there."""


class Stale(Permanent):
    """Compare-and-swap put on a version that is no longer current."""


class DataRefused(Permanent):
    """The server refused data it was sent; `row` is the row it named (from 0, in what was sent), -1 if it named none."""

    def __init__(self, what: str, *, code: str, row: int = -1, where: str = "") -> None:
        super().__init__(what, where=where)
        self.code, self.row = code, row


@dataclass(frozen=True)
class RowRefusal:
    """Why one row of the chunk handed to a sink was refused. `row` indexes the rows as handed over, from 0."""

    row: int
    code: str
    detail: str


class RowsRefused(Permanent):
    """Some rows cannot be taken (bad text, out of range, a constraint); *nothing* of the chunk was applied."""

    def __init__(self, rows: Sequence[RowRefusal], *, where: str = "") -> None:
        self.rows = tuple(rows)
        first = self.rows[0] if self.rows else RowRefusal(0, "unknown", "")
        super().__init__(f"{len(self.rows)} row(s) refused, first: [{first.code}] {first.detail}", where=where)
