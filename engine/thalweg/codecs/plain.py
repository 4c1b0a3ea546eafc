"""Records that need no parsing: bytes as they are, and columns that were Arrow from the start."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pyarrow as pa

from thalweg.core.batch import Decoded, Refusals
from thalweg.core.topology import CodecPlan, Tombstone
from thalweg.ports import RegisteredSchema


class PlainCodec:
    """`bytes`: one column `value`. `arrow`: the fields of the envelope's `payload` struct."""

    def __init__(self, plan: CodecPlan) -> None:
        self.plan = plan

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        return frozenset()

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        raise AssertionError("nothing to learn")

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        every = np.arange(envelope.num_rows, dtype=np.int32)
        last = envelope.column(envelope.num_columns - 1)
        if self.plan.type == "arrow":
            fields = [pa.field(f.name, f.type) for f in last.type]
            rows = pa.RecordBatch.from_arrays(last.flatten(), schema=pa.schema(fields))
            return Decoded(rows, pa.array(every), Refusals.of([]))
        rows = pa.RecordBatch.from_arrays([last], schema=pa.schema([pa.field("value", pa.binary())]))
        if not last.null_count or self.plan.tombstone is Tombstone.ROW:
            return Decoded(rows, pa.array(every), Refusals.of([]))
        nulls = last.is_null().to_numpy(zero_copy_only=False)
        refused = []
        if self.plan.tombstone is Tombstone.DLQ:
            refused = [(int(i), "tombstone", "the record has no value", "") for i in np.flatnonzero(nulls)]
        kept = pa.array(every[~nulls])
        return Decoded(rows.take(kept), kept, Refusals.of(refused))
