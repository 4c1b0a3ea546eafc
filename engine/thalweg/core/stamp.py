"""The metadata columns that every destination row carries: where its record came from.

Decides their names and types. The prefix is the topology's; nothing else in the engine spells a metadata column.
"""

from __future__ import annotations

import pyarrow as pa

from thalweg.core.batch import Frame, record_ids


def stamp_schema(prefix: str, child: bool) -> pa.Schema:
    """`record_id` binary(16), `source_topic` string, `source_partition` int32, `source_offset` int64, `event_ts`, and
    `child` int32 (ordinal among the rows of one record) where there is an unnest upstream."""
    fields = [
        pa.field(f"{prefix}record_id", pa.binary(16), nullable=False),
        pa.field(f"{prefix}source_topic", pa.string(), nullable=False),
        pa.field(f"{prefix}source_partition", pa.int32(), nullable=False),
        pa.field(f"{prefix}source_offset", pa.int64(), nullable=False),
        pa.field(f"{prefix}event_ts", pa.timestamp("ms", tz="UTC")),
    ]
    if child:
        fields.append(pa.field(f"{prefix}child", pa.int32(), nullable=False))
    return pa.schema(fields)


def stamped(prefix: str, frame: Frame) -> pa.RecordBatch:
    """The frame's rows: user columns, then the metadata columns."""
    rows, n = frame.rows, frame.rows.num_rows
    whole = n == frame.envelope.num_rows and n > 0 and frame.child is None and frame.origin[n - 1].as_py() == n - 1
    envelope = frame.envelope.select(["position", "timestamp"])
    at = envelope if whole else envelope.take(frame.origin)  # ascending and n of n: every record, once
    positions = at.column("position")
    columns = [
        *rows.columns,
        record_ids(frame.partition, positions),
        pa.repeat(pa.scalar(frame.partition.topic, pa.string()), n),
        pa.repeat(pa.scalar(frame.partition.number, pa.int32()), n),
        positions,
        at.column("timestamp"),
    ]
    if frame.child is not None:
        columns.append(frame.child)
    schema = pa.schema([*rows.schema, *stamp_schema(prefix, frame.child is not None)])
    return pa.RecordBatch.from_arrays(columns, schema=schema)
