"""What the runtime asks of a codec, and what every codec shares: which rows come out, in which order, for which records.

Sans-I/O: a codec names the schemas it lacks, the runtime fetches and teaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thalweg.core.batch import Decoded, Refusals
from thalweg.core.topology import Tombstone
from thalweg.ports import RegisteredSchema

T = TypeVar("T")
Rows = npt.NDArray[np.int64]
"""Indices into an envelope, ascending."""

Refused = tuple[int, str, str]
"""One refused record: its row in the envelope, a code, human words."""

PARTS = 8
"""Into how many parts a failing block is cut: one bad record among n costs one more pass over the block and log8 n small ones."""


class Codec(Protocol):
    """Turns an envelope's values into columns. One instance a source; not shared between threads at once."""

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        """Schema references in this envelope that were not taught yet: `int` ids, or `str` GUIDs."""
        ...

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        """Teach one. None: the registry says there is no such schema, so its records are refused (`schema-unknown`)."""
        ...

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """Decode all of it. Never raises for bad payload: bad records are in `Decoded.refused`, their neighbours in `rows`.

        The schema of `rows` does not depend on the data, except where a registry brings a newer schema.
        """
        ...


class Taught:
    """A codec that needs no registry."""

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        """Nothing."""
        return frozenset()

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        """Nothing to learn."""


def values_of(envelope: pa.RecordBatch) -> tuple[pa.BinaryArray, Rows, Rows]:
    """The values that are there, the rows they are from, and the rows of tombstones."""
    values = envelope.column("value")
    if values.null_count == 0:
        return values, np.arange(len(values), dtype=np.int64), np.empty(0, np.int64)
    there = values.is_valid().to_numpy(zero_copy_only=False)
    return values.drop_null(), np.flatnonzero(there), np.flatnonzero(~there)


def decoded(batch: pa.RecordBatch, origin: Rows, tombstones: Rows, refused: Sequence[Refused], policy: Tombstone) -> Decoded:
    """Put decoded rows (of envelope rows `origin`, any order) and tombstones together, in the order of the envelope."""
    entries = list(refused)
    if len(tombstones) and policy is Tombstone.DLQ:
        entries += [(int(row), "tombstone", "the record has no value") for row in tombstones]
    elif len(tombstones) and policy is Tombstone.ROW:
        take = np.concatenate([np.arange(len(origin)), np.full(len(tombstones), -1)])
        origin = np.concatenate([origin, tombstones])
        order = np.argsort(origin, kind="stable")
        take, origin = take[order], origin[order]
        batch = batch.take(pa.array(take, mask=take < 0))  # a null index gives a row of nulls
    elif len(origin) > 1 and np.any(np.diff(origin) < 0):
        order = np.argsort(origin, kind="stable")
        batch, origin = batch.take(pa.array(order)), origin[order]
    entries.sort(key=lambda entry: entry[0])
    return Decoded(
        batch,
        pa.array(origin.astype(np.int32)),
        Refusals.of([(row, code, detail, "") for row, code, detail in entries]),
    )


def joined_batches(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """One batch of all of them, without a copy where there is but one."""
    batches = [batch for batch in batches if batch.num_rows]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def sifted(
    work: Callable[[int, int], T],
    last: Callable[[int, int], Iterator[tuple[Rows, T]]],
    start: int,
    stop: int,
    *,
    errors: tuple[type[BaseException], ...],
    block: int,
) -> Iterator[tuple[Rows, T]]:
    """`work` over `[start, stop)` in as few calls as succeed: `(indices, result)`, ascending.

    A call that raises one of `errors` is cut into `PARTS`; a failing one of at most `block` rows goes to `last`, which
    yields what it can save of it.
    """
    if start >= stop:
        return
    try:
        result = work(start, stop)
    except errors:
        if stop - start <= block:
            yield from last(start, stop)
            return
        edges = np.linspace(start, stop, PARTS + 1).astype(int).tolist()
        for low, high in pairwise(edges):
            yield from sifted(work, last, low, high, errors=errors, block=block)
    else:
        yield np.arange(start, stop), result
