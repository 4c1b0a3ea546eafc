"""Thalweg whose primary raw and coverage store answer at once and keep nothing: what is left is the cost of all the rest.

Against Thalweg as it is, the difference is what raw and coverage cost the client: making record ids and Parquet, writing
objects, and encoding and swapping checkpoints. Everything else is the engine's own code, unchanged.
"""

from __future__ import annotations

from unittest.mock import patch

from thalweg import node
from thalweg.__main__ import main
from thalweg.core.batch import Chunk, Partition
from thalweg.core.coverage import NOTHING, Document, RangeSet
from thalweg.runtime.checkpoint import ObjectCheckpoints
from thalweg.runtime.lake import LakeLander


class HollowLander(LakeLander):
    async def found(self, part: Partition, base: int, recorded: RangeSet) -> RangeSet:
        return NOTHING

    async def land(self, chunk: Chunk, label: str = "") -> None:
        return


class HollowCheckpoints(ObjectCheckpoints):
    async def load(self, partition: str) -> Document | None:
        return None

    async def merge(self, delta: Document) -> Document:
        return delta


if __name__ == "__main__":
    # This process exists to run without them.
    with patch.object(node, "LakeLander", HollowLander), patch.object(node, "ObjectCheckpoints", HollowCheckpoints):
        main()
