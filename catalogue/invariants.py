"""What must hold whatever happened, judged on identities and never on counts alone.

These functions share no code with the engine: they read what producers, brokers, stores and databases say, and the
checkpoint documents by the format that ARCHITECTURE.md specifies. An identity is a record's partition and offset, packed
into one integer; inputs are arrays of them, in any order, repeats included where repeats matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
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
