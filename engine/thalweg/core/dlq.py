"""The shape of a row that was set aside: enough to tell what it was, where it came from and why it is here.

Decides the columns of every DLQ and quarantine sink. It keeps key, headers and payload byte for byte; header names and
values are two parallel lists, so that order, repeated names and null values survive in a relational table too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thalweg.core.batch import Partition, Refusals, record_ids

KEY = ("record_id", "child", "stage", "rule")
"""What makes a set-aside row the same row when it is written again; metadata columns carry the prefix."""


def dlq_schema(prefix: str) -> pa.Schema:
    """The Arrow schema of DLQ and quarantine rows."""
    return pa.schema(
        [
            pa.field(f"{prefix}record_id", pa.binary(16), nullable=False),
            pa.field(f"{prefix}source_topic", pa.string(), nullable=False),
            pa.field(f"{prefix}source_partition", pa.int32(), nullable=False),
            pa.field(f"{prefix}source_offset", pa.int64(), nullable=False),
            pa.field(f"{prefix}event_ts", pa.timestamp("ms", tz="UTC")),
            pa.field(f"{prefix}message_key", pa.binary()),
            pa.field(f"{prefix}header_keys", pa.list_(pa.string())),
            pa.field(f"{prefix}header_values", pa.list_(pa.binary())),
            pa.field(f"{prefix}payload", pa.binary()),
            pa.field(f"{prefix}child", pa.int32(), nullable=False),  # -1: the record as a whole
            pa.field("code", pa.string(), nullable=False),
            pa.field("detail", pa.string(), nullable=False),
            pa.field("stage", pa.string(), nullable=False),  # decode | transform:<node> | rule:<node> | sink:<name>
            pa.field("rule", pa.string(), nullable=False),
        ]
    )


def dlq_key(prefix: str) -> tuple[str, ...]:
    """Columns that identify a set-aside row."""
    return (f"{prefix}record_id", f"{prefix}child", "stage", "rule")


def _parallel(headers: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    """Header lists as two lists of equal lengths; null where there were no headers."""
    structs = headers.flatten()
    lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(headers) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = headers.is_null()
    at = pa.array(offsets, pa.int32())
    return tuple(pa.ListArray.from_arrays(at, structs.field(i), mask=mask) for i in (0, 1))


def _readable(value: pa.Scalar) -> str:
    """A value in words. Arrow holds years and zones that Python's own types do not: those show as the number they are."""
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError, KeyError):
        if pa.types.is_struct(value.type):
            return "{" + ", ".join(f"{name!r}: {_readable(inner)}" for name, inner in value.items()) + "}"
        return repr(value.value) if hasattr(value, "value") else f"<{value.type}>"


def dlq_rows(
    prefix: str,
    partition: Partition,
    envelope: pa.RecordBatch,
    refusals: Refusals,
    stage: str,
    child: pa.Int32Array | None = None,
) -> pa.RecordBatch:
    """One row per refusal, schema `dlq_schema(prefix)`. `child` is as long as `refusals` where rows came from an unnest."""
    n = len(refusals)
    rows = envelope.take(refusals.rows)
    positions = rows.column("position")
    keys, values = _parallel(rows.column("headers"))
    if "value" in rows.schema.names:
        payload = rows.column("value")
    else:  # a source that was Arrow already: its columns, as one readable line per row
        payload = pa.array([_readable(v).encode() for v in rows.column("payload")], pa.binary())
    columns = [
        record_ids(partition, positions),
        pa.repeat(pa.scalar(partition.topic, pa.string()), n),
        pa.repeat(pa.scalar(partition.number, pa.int32()), n),
        positions,
        rows.column("timestamp"),
        rows.column("key"),
        keys,
        values,
        payload,
        pa.repeat(pa.scalar(-1, pa.int32()), n) if child is None else child,
        refusals.codes,
        refusals.details,
        pa.repeat(pa.scalar(stage, pa.string()), n),
        refusals.rules,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=dlq_schema(prefix))
