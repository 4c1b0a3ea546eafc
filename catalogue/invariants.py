"""What must hold whatever happened, judged on identities and never on counts alone.

These functions share no code with the engine: they read what producers, brokers, stores and databases say, and the
checkpoint documents by the format that ARCHITECTURE.md specifies. An identity is a record's partition and offset, packed
into one integer; inputs are arrays of them, in any order, repeats included where repeats matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

Identities = npt.NDArray[np.int64]

OFFSET_BITS = 40


@dataclass(frozen=True)
class Finding:
    """One line of a proof."""

    invariant: str
    holds: bool
    detail: str


def identities(partitions: Iterable[int] | npt.NDArray[Any], offsets: Iterable[int] | npt.NDArray[Any]) -> Identities:
    """Pack partitions and offsets of equal number."""
    return (np.asarray(partitions, dtype=np.int64) << OFFSET_BITS) | np.asarray(offsets, dtype=np.int64)


def spans(found: Identities, limit: int = 4) -> str:
    """Identities as ranges for a person: `0:[17,18) 3:[5,9)`."""
    ids = np.unique(found)
    if len(ids) == 0:
        return "none"
    breaks = np.flatnonzero(np.diff(ids) != 1)
    starts, stops = ids[np.r_[0, breaks + 1]], ids[np.r_[breaks, len(ids) - 1]] + 1
    mask = (1 << OFFSET_BITS) - 1
    out = [
        f"partition {a >> OFFSET_BITS} offsets [{a & mask},{b & mask})"
        for a, b in zip(starts[:limit], stops[:limit], strict=True)
    ]
    more = len(starts) - limit
    return ", ".join(out) + (f" and {more} more range(s)" if more > 0 else "")


def no_loss(produced: Identities, landed: Identities, dlq: Identities, dropped: Identities) -> Finding:
    """Every record that was produced is in exactly one place it may be in, and nothing else is anywhere."""
    places = np.concatenate([np.unique(landed), np.unique(dlq), np.unique(dropped)])
    missing, extra = np.setdiff1d(produced, places), np.setdiff1d(places, produced)
    unique, counts = np.unique(places, return_counts=True)
    twice = unique[counts > 1]
    what = f"{len(np.unique(produced)):,} produced = {len(landed):,} landed + {len(dlq):,} DLQ + {len(dropped):,} dropped"
    faults = [
        f"{name}: {spans(ids)}" for name, ids in (("missing", missing), ("extra", extra), ("in two places", twice)) if len(ids)
    ]
    return Finding("no-loss", not faults, "; ".join(faults) if faults else what)


def once(name: str, rows: Identities) -> Finding:
    """No record is there twice."""
    unique, counts = np.unique(rows, return_counts=True)
    twice = unique[counts > 1]
    detail = f"{len(rows):,} rows, each record once" if not len(twice) else f"more than once: {spans(twice)}"
    return Finding(f"once-in-{name}", not len(twice), detail)


def complete(name: str, produced: Identities, found: Identities) -> Finding:
    """All that was produced is in `name` (repeats allowed), and nothing else."""
    missing, extra = np.setdiff1d(produced, found), np.setdiff1d(found, produced)
    faults = [f"{word}: {spans(ids)}" for word, ids in (("missing", missing), ("extra", extra)) if len(ids)]
    repeats = len(found) - len(np.unique(found))
    detail = f"{len(produced):,} records" + (f", {repeats:,} of them repeated" if repeats else "")
    return Finding(f"complete-{name}", not faults, "; ".join(faults) if faults else detail)


@dataclass(frozen=True)
class Checkpoint:
    """One stored coverage document, as the format says."""

    topic: str
    partition: int
    base: int
    sinks: Mapping[str, list[tuple[int, int]]]
    explained: list[tuple[int, int]]


def checkpoint(body: bytes | str) -> Checkpoint:
    """Parse a document of format `thalweg-coverage/1`."""
    raw = json.loads(body)
    if raw["format"] != "thalweg-coverage/1":
        raise ValueError(f"unknown coverage format {raw['format']}")
    _, topic, tail = raw["partition"].split("/")
    explained = sorted((a, b) for ranges in raw["explained"].values() for a, b in ranges)
    sinks = {name: [(a, b) for a, b in ranges] for name, ranges in raw["sinks"].items()}
    return Checkpoint(unquote(topic), int(tail.split("@")[0]), raw["base"] or 0, sinks, explained)


def reach(ranges: Iterable[tuple[int, int]], base: int) -> int:
    """Up to where ranges cover everything from `base` on."""
    at = base
    for start, stop in sorted(ranges):
        if start > at:
            break
        at = max(at, stop)
    return at


def covered(checkpoints: Iterable[Checkpoint], sink: str, ends: Mapping[int, int]) -> Finding:
    """Coverage of `sink` reaches from the base to the end of each partition without a gap that nobody explained."""
    found = {c.partition: c for c in checkpoints}
    faults = []
    for partition, end in sorted(ends.items()):
        one = found.get(partition)
        at = reach([*one.sinks.get(sink, []), *one.explained], one.base) if one else 0
        if at < end:
            faults.append(f"partition {partition}: gap at [{at}, …) of {end}")
    detail = f"{len(ends)} partitions to their ends" if not faults else "; ".join(faults)
    return Finding(f"coverage-{sink}", not faults, detail)


def committed_within(checkpoints: Iterable[Checkpoint], sinks: Iterable[str], committed: Mapping[int, int]) -> Finding:
    """No stored offset is beyond what the checkpoint says is durable in every sink that holds the source."""
    found = {c.partition: c for c in checkpoints}
    faults = []
    for partition, offset in sorted(committed.items()):
        one = found.get(partition)
        for sink in sinks:
            at = reach([*one.sinks.get(sink, []), *one.explained], one.base) if one else 0
            if offset > at:
                faults.append(f"partition {partition}: committed {offset}, durable in {sink} only to {at}")
    total = sum(committed.values())
    return Finding("committed-within-durable", not faults, f"{total:,} offsets committed" if not faults else "; ".join(faults))


Key = tuple[str, str, int]
"""A partition as brokers know it: topic, incarnation, number."""

Ranges = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold, and where."""

    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


class Log(Protocol):
    """What a judge must know of one partition: told by the broker, never by the engine."""

    @property
    def low(self) -> int: ...

    @property
    def end(self) -> int:
        """The last stable offset."""
        ...

    def expected(self, sink: str) -> npt.NDArray[np.int32]:
        """How many rows each offset must have in `sink` in the end, from 0 to `end`; records that retention took included."""
        ...


class Judge:
    """Judges each effect in the step in which it lands, and everything again at the end.

    The chain that must hold at every instant, for every sink that holds the source:

        committed ≤ what the stored checkpoint covers without a gap ⊆ what is durable ⊆ what was produced

    `exact` names the sinks in which no record may ever be twice; the others may repeat one, under the same identity.
    """

    def __init__(self, gating: Iterable[str], exact: Iterable[str], log: Callable[[Key], Log]) -> None:
        self.gating, self.exact = tuple(sorted(gating)), frozenset(exact)
        self.violations: list[Violation] = []
        self.have: dict[tuple[Key, str], npt.NDArray[np.int32]] = {}
        self.documents: dict[Key, Checkpoint] = {}
        self.commits: dict[Key, int] = {}
        self.repeats = 0
        self._log = log

    def _found(self, invariant: str, key: Key, sink: str, detail: str) -> None:
        where = f"{key[0]}/{key[2]}@{key[1]}" + (f" in {sink}" if sink else "")
        self.violations.append(Violation(invariant, f"{where}: {detail}"))

    def _counts(self, key: Key, sink: str, end: int) -> npt.NDArray[np.int32]:
        have = self.have.get((key, sink))
        if have is None or len(have) < end:
            longer = np.zeros(end, dtype=np.int32)
            if have is not None:
                longer[: len(have)] = have
            have = self.have[key, sink] = longer
        return have

    # --- effects --------------------------------------------------------------------------------------------------

    def landed(self, sink: str, key: Key, offsets: npt.NDArray[np.int64], altered: str = "") -> None:
        """Rows of `sink` are durable now: the offset of each, in any order. `altered` says what is wrong with their content."""
        if altered:
            self._found("content", key, sink, altered)
        if len(offsets) == 0:
            return
        expected = self._log(key).expected(sink)
        if int(offsets.max()) >= len(expected) or int(offsets.min()) < 0:
            self._found("phantom", key, sink, f"offset {int(offsets.max())} of {len(expected)} was never readable")
            return
        have = self._counts(key, sink, len(expected))
        np.add.at(have, offsets, 1)
        mine, wanted = have[offsets], expected[offsets]
        if sink in self.exact:
            if (over := mine > wanted).any():
                at = offsets[over]
                kind = "phantom" if (wanted[over] == 0).any() else "once"
                self._found(kind, key, sink, f"more rows than there should be: {_offsets(at)}")
        else:
            if (never := wanted == 0).any():
                self._found("phantom", key, sink, f"never to be here: {_offsets(offsets[never])}")
            self.repeats += int((mine > wanted).sum())

    def claimed(self, key: Key, sink: str, ranges: Ranges) -> None:
        """Coverage of `sink` now says that `ranges` have landed."""
        expected = self._log(key).expected(sink)
        have = self._counts(key, sink, len(expected))
        for start, stop in ranges:
            if stop > len(expected):
                self._found("coverage-beyond-log", key, sink, f"[{start}, {stop}) claimed of {len(expected)}")
            if (short := expected[start:stop] > have[start:stop]).any():
                at = start + np.flatnonzero(short)
                self._found("coverage-before-durable", key, sink, f"[{start}, {stop}) is claimed, not there: {_offsets(at)}")

    def checkpointed(self, key: Key, document: Checkpoint) -> None:
        """A coverage document was stored."""
        for sink, ranges in document.sinks.items():
            self.claimed(key, sink, ranges)
        log = self._log(key)
        for start, stop in document.explained:
            if stop > max(log.low, document.base):
                self._found("explained-untrue", key, "", f"[{start}, {stop}) is called gone, the log begins at {log.low}")
        before = self.documents.get(key)
        if before is not None:
            for sink, ranges in before.sinks.items():
                if lost := _beyond(ranges, document.sinks.get(sink, [])):
                    self._found("coverage-forgotten", key, sink, f"{lost} was recorded and is not any more")
        self.documents[key] = document

    def committed(self, key: Key, offset: int) -> None:
        """The source was told that everything below `offset` is safe."""
        if offset < self.commits.get(key, 0):
            self._found("commit-went-back", key, "", f"from {self.commits[key]} to {offset}")
        self.commits[key] = offset
        document = self.documents.get(key)
        for sink in self.gating:
            expected = self._log(key).expected(sink)
            if offset > len(expected):
                self._found("commit-beyond-log", key, sink, f"{offset} of {len(expected)}")
                continue
            # Without a document the pipeline has promised nothing yet; what was gone before it began it never will.
            base, explained = (document.base, document.explained) if document else (self._log(key).low, [])
            covered = reach([*(document.sinks.get(sink, []) if document else []), *explained], base)
            if offset > covered and (document is not None or expected[:offset].any()):
                self._found("commit-beyond-checkpoint", key, sink, f"committed {offset}, the stored checkpoint reaches {covered}")
            short = expected[:offset] > self._counts(key, sink, len(expected))[:offset]
            for start, stop in explained:
                short[start:stop] = False
            short[:base] = False
            if short.any():
                self._found(
                    "commit-before-durable", key, sink, f"committed {offset}, not there: {_offsets(np.flatnonzero(short))}"
                )

    def removed(self, sink: str, key: Key, offsets: npt.NDArray[np.int64]) -> None:
        """Rows that were durable are gone. Nothing that a pipeline has stored may it take away."""
        self._found("no-loss", key, sink, f"was durable and was taken away: {_offsets(offsets)}")

    # --- the end --------------------------------------------------------------------------------------------------

    def final(self, keys: Iterable[Key], sinks: Iterable[str]) -> list[Violation]:
        """After a phase without faults everything must be where it belongs; all violations, those found before included."""
        for key in keys:
            log = self._log(key)
            document = self.documents.get(key)
            explained = document.explained if document else []
            base = document.base if document else log.low
            for sink in sinks:
                expected = log.expected(sink)
                have = self._counts(key, sink, len(expected))
                excused = np.zeros(len(expected), dtype=bool)
                excused[:base] = True
                for start, stop in explained:
                    excused[start:stop] = True
                # What the source has dropped, and coverage does not claim, is a gap on record: a zombie may have learnt of
                # it before its successor began above it.
                unclaimed = np.arange(len(expected)) < log.low
                for start, stop in document.sinks.get(sink, []) if document else []:
                    unclaimed[start:stop] = False
                if (short := (expected > have) & ~excused & ~unclaimed).any():
                    self._found("no-loss", key, sink, f"missing {_offsets(np.flatnonzero(short))}")
        return self.violations


def _offsets(at: npt.NDArray[np.int64]) -> str:
    """A few ranges of offsets, for a person."""
    return spans(at).replace("partition 0 offsets ", "")


def _beyond(ranges: Ranges, kept: Ranges) -> str:
    """The first of `ranges` that is not within `kept`."""
    kept = list(kept)
    for start, stop in ranges:
        if not any(a <= start and stop <= b for a, b in kept):
            return f"[{start}, {stop})"
    return ""
