"""Rows that are set aside: what of the record they keep, against the record itself."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from thalweg.core.batch import ENVELOPE, HEADERS, Partition, Refusals
from thalweg.core.dlq import dlq_rows, dlq_schema

PART = Partition("s", "c", "t", 3, "i")
HEADER_LISTS = st.none() | st.lists(st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), max_size=3)
RECORDS = st.lists(
    st.tuples(st.none() | st.binary(max_size=4), HEADER_LISTS, st.none() | st.binary(max_size=6)), min_size=1, max_size=6
)


@given(records=RECORDS, data=st.data())
def test_each_row_is_its_record_byte_for_byte(
    records: list[tuple[bytes | None, list[tuple[str, bytes | None]] | None, bytes | None]], data: st.DataObject
) -> None:
    """No headers and an empty list of them are two things, as are a null value of a header and an empty one."""
    keys, headers, values = zip(*records, strict=True)
    n = len(records)
    envelope = pa.RecordBatch.from_arrays(
        [
            pa.array(range(10, 10 + n), pa.int64()),
            pa.array(range(n), pa.timestamp("ms", tz="UTC")),
            pa.array([1] * n, pa.int8()),
            pa.array(keys, pa.binary()),
            pa.array([None if h is None else [{"key": k, "value": v} for k, v in h] for h in headers], HEADERS),
            pa.array(values, pa.binary()),
        ],
        schema=ENVELOPE,
    )
    at = data.draw(st.lists(st.integers(0, n - 1), max_size=2 * n))  # a record may be refused twice, by two rules
    rows = dlq_rows("_twg_", PART, envelope, Refusals.of([(i, "code", f"detail {i}", "r") for i in at]), "decode")
    assert rows.schema == dlq_schema("_twg_")
    assert rows.num_rows == len(at)
    for row, i in zip(rows.to_pylist(), at, strict=True):
        assert row["_twg_source_offset"] == 10 + i
        assert (row["_twg_source_topic"], row["_twg_source_partition"], row["_twg_child"]) == ("t", 3, -1)
        assert (row["_twg_message_key"], row["_twg_payload"]) == (keys[i], values[i])
        its = headers[i]
        assert row["_twg_header_keys"] == (None if its is None else [k for k, _ in its])
        assert row["_twg_header_values"] == (None if its is None else [v for _, v in its])
        assert (row["code"], row["detail"], row["stage"], row["rule"]) == ("code", f"detail {i}", "decode", "r")
