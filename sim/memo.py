"""Computing within the simulator: in line, and each pure piece of work once for all runs of a process.

A run asks for the same decoding and the same Parquet encoding as thousands before it. What makes two pieces of work the
same is their content: which records, of which partition, for which sink. How the records were cut into batches does not
matter to an encoding of them all, so the key is the records themselves.

One run in twenty does without, and its trace must be the same: `sim.explore` compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

from fakes.kafka import entries_of
from thalweg.codecs.codec import Codec, Taught
from thalweg.core.batch import Chunk, Frame, Partition
from thalweg.core.topology import Source, Topology
from thalweg.ports import Records
from thalweg.runtime.lake import encoded
from thalweg.runtime.pipeline import Digested, digested
from thalweg.runtime.table import joined_rows, stamped_rows
from thalweg.runtime.transform import Transform

T = TypeVar("T")

ENTRIES_MAX: Final = 50_000


class Memo:
    """Results of pure work, by content; shared by all runs of one process over one topology."""

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self.read: dict[str, tuple[Any, Any]] = {}  # what a judge read in an object, by the object's content
        self.parsed: dict[int, tuple[Any, Any]] = {}  # what a judge read in a batch, which is kept, so ids stay
        self.same: dict[int, tuple[Any, Any]] = {}  # contents found to be as they were produced, and of which messages
        self.validated: dict[int, Any] = {}  # what a server found in a batch, likewise
        self._results: dict[Hashable, Any] = {}
        self._named: dict[int, tuple[Frame, Hashable]] = {}  # frame -> its content's name; the frame is kept, so ids stay

    def call(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        """`work(*args)`, or what it was."""
        key = self._key(work, args)
        if key is None:
            return work(*args)
        if key in self._results:
            self.hits += 1
            found: T = self._results[key]
            return found
        self.misses += 1
        if len(self._results) > ENTRIES_MAX:
            for kept in (self._results, self._named, self.read, self.parsed, self.same):
                kept.clear()
        result = self._results[key] = work(*args)
        if isinstance(result, Digested):
            self._name(key, result)
        return result

    def _name(self, key: Hashable, done: Digested) -> None:
        assert isinstance(key, tuple)
        _, topology, source, part, _, _, entries = key
        for sink, frame in done.frames:
            self._named[id(frame)] = frame, (topology, source, part, sink, entries)

    def _key(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Hashable:
        if work is digested:
            return self._key_of_batch(*args)
        if work is encoded:
            sink, prefix, chunk, labelled = args
            content = self._content(chunk)
            return None if content is None or labelled else ("encoded", sink.name, prefix, chunk.start, chunk.stop, content)
        if work is stamped_rows:
            prefix, chunk = args
            content = self._content(chunk)
            return None if content is None else ("stamped", prefix, chunk.start, chunk.stop, content)
        if work is joined_rows:
            content = self._content(args[0])
            return None if content is None else ("joined", args[0].start, args[0].stop, content)
        return None

    def _key_of_batch(
        self, topology: Topology, source: Source, codec: Codec, transform: Transform, part: Partition, records: Records
    ) -> Hashable:
        entries = entries_of(records.batch)
        if entries is None or not isinstance(codec, Taught):  # a codec that learns gives another answer later
            return None
        return "digested", id(topology), source.name, part, records.start.next, records.stop.next, entries

    def _content(self, chunk: Chunk) -> Hashable:
        """Names of the frames' contents, run together; None when one of them was cut up since."""
        names = []
        for frame in chunk.frames:
            found = self._named.get(id(frame))
            if found is None:
                return None
            names.append(found[1])
        first = names[0]
        if len(names) == 1:
            return first
        whole: tuple[Any, ...] = ()
        for name in names:
            whole += name[4]  # type: ignore[index]  # made above
        return (*first[:4], whole)  # type: ignore[index]  # as above


class SimCompute:
    """The `Compute` port: in line, at once, with one turn of the loop in between, as a pool of threads would give."""

    def __init__(self, memo: Memo | None) -> None:
        self._memo = memo

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        result = work(*args) if self._memo is None else self._memo.call(work, args)
        await asyncio.sleep(0)
        return result
