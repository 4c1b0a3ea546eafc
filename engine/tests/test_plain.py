"""Payloads that are taken as they are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from thalweg.codecs import codec_of
from thalweg.core.batch import ENVELOPE
from thalweg.core.topology import CodecPlan, Tombstone


def envelope(values: pa.Array, name: str) -> pa.RecordBatch:
    count = len(values)
    schema = ENVELOPE.remove(ENVELOPE.get_field_index("value")).append(pa.field(name, values.type))
    columns = {
        "position": pa.array(range(count), pa.int64()),
        "timestamp_type": pa.array([0] * count, pa.int8()),
        name: values,
    }
    return pa.RecordBatch.from_arrays([columns.get(f.name, pa.nulls(count, f.type)) for f in schema], schema=schema)


@pytest.mark.parametrize(
    ("policy", "origin", "codes"),
    [(Tombstone.ROW, [0, 1, 2], []), (Tombstone.DROP, [0, 2], []), (Tombstone.DLQ, [0, 2], [(1, "tombstone")])],
)
def test_bytes_and_arrow_keep_order_and_treat_tombstones(policy: Tombstone, origin: list[int], codes: list[Any]) -> None:
    payload = [{"a": 1, "b": "x"}, None, {"a": None, "b": ""}]
    columns = pa.struct([("a", pa.int8()), ("b", pa.string())])
    cases: list[tuple[str, pa.RecordBatch, list[Any], pa.Schema]] = [
        (
            "bytes",
            envelope(pa.array([b"\x00\xff", None, b""], pa.binary()), "value"),
            [{"value": b"\x00\xff"}, {"value": None}, {"value": b""}],
            pa.schema([("value", pa.binary())]),
        ),
        (
            "arrow",
            envelope(pa.array(payload, columns), "payload"),
            [payload[0], {"a": None, "b": None}, payload[2]],
            pa.schema(list(columns)),
        ),
    ]
    for type_, batch, rows, schema in cases:
        got = codec_of(CodecPlan(type_, tombstone=policy)).decode(batch)
        assert got.rows.schema == schema
        assert got.origin.to_pylist() == origin
        assert got.rows.to_pylist() == [rows[i] for i in origin]
        assert list(zip(got.refused.rows.to_pylist(), got.refused.codes.to_pylist(), strict=True)) == codes


def test_empty_and_sliced_envelopes() -> None:
    batch = envelope(pa.array([b"a", b"b", b"c"], pa.binary()), "value")
    codec = codec_of(CodecPlan("bytes"))
    assert codec.decode(batch.slice(0, 0)).rows.num_rows == 0
    assert codec.decode(batch.slice(1, 2)).rows.to_pylist() == [{"value": b"b"}, {"value": b"c"}]
    assert codec.wants(batch) == frozenset()
