"""How one sink makes a chunk durable, whatever its technology. Implemented by `runtime.lake` and `runtime.table`."""

from __future__ import annotations

from typing import Protocol

from thalweg.core.batch import Chunk, Partition
from thalweg.core.coverage import RangeSet


class Lander(Protocol):
    """One sink's way of landing. It does not retry: `runtime.pipeline` does, by error class, calling `land` again.

    `land` may therefore be called again with the same chunk after `Transient` or `Ambiguous`, also by the next
    incarnation of the node with other chunk borders; it must leave the sink as if it had been called once per record
    (or, for an at-least-once sink, with duplicates that share their record id).
    """

    async def open(self) -> None:
        """Make the target ready (create or evolve tables are done at first `land`, when the schema is known)."""
        ...

    async def found(self, part: Partition, base: int, recorded: RangeSet) -> RangeSet:
        """Ranges from `base` on that are durable already, recorded in a checkpoint or not (orphans of a crash).
        `recorded` is what the checkpoint says of this sink; called at each assignment, before the first `land`.
        """
        ...

    async def land(self, chunk: Chunk, label: str = "") -> None:
        """Return once every row of the chunk is durable. Raises `RowsRefused` (rows numbered over all frames of the
        chunk in order; nothing was applied), `Transient`, `Ambiguous`, `Permanent`.

        A `label` marks rows that come late into an interval this sink has landed before (rows another sink refused, on
        their way to the DLQ): they are written beside it, never trimmed as covered and never taken for it, and claim
        no range. Two late chunks with the same interval and label but other rows are two chunks.
        """
        ...

    async def close(self) -> None: ...
