"""Payloads that need no decoding: bytes as they are, and columns that a source has already.

Decides nothing about data; it only puts it in the place where decoded rows are looked for.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from thalweg.codecs.codec import Taught, decoded, values_of
from thalweg.core.batch import Decoded
from thalweg.core.topology import CodecPlan


class BytesCodec(Taught):
    """`rows` is the one column `value: binary`, byte for byte."""

    SCHEMA = pa.schema([("value", pa.binary())])

    def __init__(self, plan: CodecPlan) -> None:
        self._plan = plan

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """Refuses nothing, tombstones apart."""
        values, rows, tombstones = values_of(envelope)
        batch = pa.RecordBatch.from_arrays([values], schema=self.SCHEMA)
        return decoded(batch, rows, tombstones, (), self._plan.tombstone)


class ArrowCodec(Taught):
    """`rows` is the fields of the envelope's `payload` struct; a null struct is a tombstone."""

    def __init__(self, plan: CodecPlan) -> None:
        self._plan = plan

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """Refuses nothing, tombstones apart."""
        payload = envelope.column("payload")
        there = payload.is_valid().to_numpy(zero_copy_only=False)
        batch = pa.RecordBatch.from_arrays(payload.drop_null().flatten(), schema=pa.schema(list(payload.type)))
        return decoded(batch, np.flatnonzero(there), np.flatnonzero(~there), (), self._plan.tombstone)
