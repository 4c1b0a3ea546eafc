"""Which ranges of a partition reached which sink.

Decides the algebra of coverage (`RangeSet`), the checkpoint document that stores it, and how two writers' documents
become one: by union, so a range once recorded is never forgotten and the order of merging does not matter (union is
commutative, associative and idempotent: a join semilattice). Nothing here ever *bridges*: two ranges become one only
where they touch, so a gap of length 1 stays a gap until that one position is covered.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FORMAT: Final = "thalweg-coverage/1"


class RangeSet:
    """An immutable set of integers, held as disjoint, non-touching, ascending half-open ranges `[start, stop)`."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """From ranges in any order, overlapping or not; empty ones vanish. `ValueError` where stop < start."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if stop < start:
                raise ValueError(f"range [{start}, {stop}) runs backwards")
            if start == stop:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        self._ranges: tuple[tuple[int, int], ...] = tuple(merged)

    @classmethod
    def _of(cls, ranges: tuple[tuple[int, int], ...]) -> RangeSet:
        """From ranges that are known to be disjoint, non-touching and ascending."""
        made = cls.__new__(cls)
        made._ranges = ranges
        return made

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def __len__(self) -> int:
        """How many ranges (not how many integers: see `size`)."""
        return len(self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __repr__(self) -> str:
        return "RangeSet(" + " ".join(f"[{a},{b})" for a, b in self._ranges) + ")"

    @property
    def size(self) -> int:
        """How many integers."""
        return sum(stop - start for start, stop in self._ranges)

    def __contains__(self, position: int) -> bool:
        i = bisect_right(self._ranges, position, key=lambda r: r[0]) - 1
        return i >= 0 and position < self._ranges[i][1]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `[start, stop)` is in the set (an empty range always is)."""
        if start >= stop:
            return True
        i = bisect_right(self._ranges, start, key=lambda r: r[0]) - 1
        return i >= 0 and stop <= self._ranges[i][1]

    def __or__(self, other: RangeSet) -> RangeSet:
        if not other._ranges:
            return self
        if not self._ranges or self._ranges == other._ranges:
            return other
        if len(other._ranges) == 1:  # what an interval that landed adds: mostly at the end
            (first, last), (start, stop) = self._ranges[-1], other._ranges[0]
            if start >= first:
                if start > last:
                    return RangeSet._of((*self._ranges, (start, stop)))
                return self if stop <= last else RangeSet._of((*self._ranges[:-1], (first, stop)))
        return RangeSet((*self._ranges, *other._ranges))

    def __and__(self, other: RangeSet) -> RangeSet:
        out: list[tuple[int, int]] = []
        i = j = 0
        while i < len(self._ranges) and j < len(other._ranges):
            (a, b), (c, d) = self._ranges[i], other._ranges[j]
            if (start := max(a, c)) < (stop := min(b, d)):
                out.append((start, stop))
            if b < d:
                i += 1
            else:
                j += 1
        return RangeSet(out)

    def __sub__(self, other: RangeSet) -> RangeSet:
        out: list[tuple[int, int]] = []
        j = 0
        for start, stop in self._ranges:
            while j < len(other._ranges) and other._ranges[j][1] <= start:
                j += 1
            k = j
            while k < len(other._ranges) and other._ranges[k][0] < stop:
                if start < other._ranges[k][0]:
                    out.append((start, other._ranges[k][0]))
                start = max(start, other._ranges[k][1])
                k += 1
            if start < stop:
                out.append((start, stop))
        return RangeSet(out)

    def prefix(self, base: int) -> int:
        """The largest `stop` such that `[base, stop)` is covered; `base` itself where nothing is."""
        i = bisect_right(self._ranges, base, key=lambda r: r[0]) - 1
        return max(base, self._ranges[i][1]) if i >= 0 else base

    def gaps(self, start: int, stop: int) -> RangeSet:
        """What of `[start, stop)` is not covered."""
        return RangeSet([(start, stop)] if start < stop else []) - self


NOTHING: Final = RangeSet()


@dataclass(frozen=True)
class Explained:
    """Positions that will never be covered, and why: `retention`, `reset`, `refused` …; not a loss by this engine."""

    ranges: RangeSet
    reason: str


@dataclass(frozen=True)
class Document:
    """The checkpoint of one (source node, partition, incarnation): *all* sinks' ranges inside one document.

    `sinks` maps a sink's name to the ranges durable in it; `explained` maps a reason to ranges that no sink will get.
    `version` counts stored generations (the store's own tag may repeat: a content hash comes back when content does).
    `base` is the lowest position this pipeline was ever started at: nothing below it was promised.
    """

    partition: str  # Partition.slug
    version: int = 0
    base: int | None = None
    sinks: Mapping[str, RangeSet] = field(default_factory=dict)
    explained: Mapping[str, RangeSet] = field(default_factory=dict)

    def merged(self, other: Document) -> Document:
        """The union of two views of one partition; keeps the higher version. `ValueError` on different partitions."""
        if self.partition != other.partition:
            raise ValueError(f"coverage of {self.partition} cannot be merged with that of {other.partition}")
        bases = [b for b in (self.base, other.base) if b is not None]
        return Document(
            self.partition,
            max(self.version, other.version),
            min(bases) if bases else None,
            _union(self.sinks, other.sinks),
            _union(self.explained, other.explained),
        )

    def includes(self, other: Document) -> bool:
        """Whether merging `other` in would change nothing."""
        mine = self.merged(other)
        return (mine.base, mine.sinks, mine.explained) == (self.base, self.sinks, self.explained)

    def ranges(self, sink: str) -> RangeSet:
        """What is durable in `sink`."""
        return self.sinks.get(sink, NOTHING)

    def encoded(self) -> bytes:
        """The stored form: JSON, UTF-8, keys sorted; specified in ARCHITECTURE.md so that others can read it."""
        body = {
            "format": FORMAT,
            "partition": self.partition,
            "version": self.version,
            "base": self.base,
            "sinks": {name: [list(r) for r in ranges] for name, ranges in sorted(self.sinks.items())},
            "explained": {reason: [list(r) for r in ranges] for reason, ranges in sorted(self.explained.items())},
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, body: bytes | str) -> Document:
        """From the stored form. `ValueError` on anything else, naming what is wrong."""
        try:
            raw: Any = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"coverage document is not JSON: {error}") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"coverage document has format {found!r}, expected {FORMAT!r}")
        try:
            partition, base = raw["partition"], raw["base"]
            if not isinstance(partition, str):
                raise TypeError(f"partition is {partition!r}")
            return cls(
                partition,
                _whole(raw["version"]),
                None if base is None else _whole(base),
                {str(k): RangeSet((_whole(a), _whole(b)) for a, b in v) for k, v in raw["sinks"].items()},
                {str(k): RangeSet((_whole(a), _whole(b)) for a, b in v) for k, v in raw["explained"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"coverage document is damaged: {error!r}") from None


def _whole(value: object) -> int:
    """A position as it stands. Rounding one that is damaged could claim what was never written."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _union(one: Mapping[str, RangeSet], other: Mapping[str, RangeSet]) -> dict[str, RangeSet]:
    both = dict(one)
    for name, ranges in other.items():
        mine = both.get(name)
        both[name] = ranges if mine is None else mine | ranges
    return both
