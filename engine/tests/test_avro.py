"""Avro: what each record becomes equals what fastavro reads, and a bad datum costs its neighbours nothing."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thalweg.codecs import codec_of
from thalweg.codecs.avro import HEADER, SENTINEL, AvroCodec, Invalid, shape_of
from thalweg.core.batch import ENVELOPE, Decoded
from thalweg.core.topology import CodecPlan, Tombstone
from thalweg.errors import Permanent
from thalweg.ports import RegisteredSchema

GUID = "89791762-2336-4186-9674-299b90a802e2"
Schema = Any


def envelope(values: list[bytes | None], headers: list[Any] | None = None) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "position": pa.array(range(count), pa.int64()),
        "timestamp_type": pa.array([0] * count, pa.int8()),
        "headers": pa.array(headers or [None] * count, ENVELOPE.field("headers").type),
        "value": pa.array(values, pa.binary()),
    }
    return pa.RecordBatch.from_arrays([columns.get(f.name, pa.nulls(count, f.type)) for f in ENVELOPE], schema=ENVELOPE)


def fates(got: Decoded, count: int) -> list[Any]:
    """For each record its row or its code; none may have both."""
    out: list[Any] = [None] * count
    origin = got.origin.to_pylist()
    assert origin == sorted(set(origin))
    for at, row in zip(origin, got.rows.to_pylist(), strict=True):
        out[at] = row
    for at, code, detail in zip(
        got.refused.rows.to_pylist(), got.refused.codes.to_pylist(), got.refused.details.to_pylist(), strict=True
    ):
        assert out[at] is None
        assert detail
        out[at] = code
    return out


def encoded(schema: Schema, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def record(**fields: Schema) -> Schema:
    return {"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, t in fields.items()]}


def bare(schema: Schema, tombstone: Tombstone = Tombstone.ROW) -> AvroCodec:
    made = codec_of(CodecPlan("avro", avro_schema=json.dumps(schema), framing="none", tombstone=tombstone))
    assert isinstance(made, AvroCodec)
    return made


def run(schema: Schema, datums: list[bytes | None]) -> list[Any]:
    return fates(bare(schema).decode(envelope(datums)), len(datums))


def v0(schema_id: int, datum: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + datum


def v1(guid: str, datum: bytes) -> bytes:
    return b"\x01" + uuid.UUID(guid).bytes + datum


def registered(schemas: Mapping[Any, Any], **plan: Any) -> AvroCodec:
    made = AvroCodec(CodecPlan("avro", registry_url="http://registry.test", **plan))
    for reference, schema in schemas.items():
        made.learn(reference, schema if isinstance(schema, RegisteredSchema | None) else taught(schema))
    return made


def taught(schema: Schema) -> RegisteredSchema:
    return RegisteredSchema("AVRO", json.dumps(schema), {})


# --- types --------------------------------------------------------------------------------------------------------

DAY = {"type": "int", "logicalType": "date"}
INNER = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "bytes"]}]}


def long(logical: str) -> Schema:
    return {"type": "long", "logicalType": logical}


def dec(precision: Any, scale: Any) -> Schema:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.mark.parametrize(
    ("schema", "raw", "kind", "value"),
    [
        ("null", b"", pa.string(), None),
        ("boolean", b"\x01", pa.bool_(), True),
        ("int", b"\x01", pa.int32(), -1),
        ("long", b"\xff" * 9 + b"\x01", pa.int64(), -(1 << 63)),
        ("float", b"\0\0\xc0\x3f", pa.float32(), 1.5),
        ("double", b"\0\0\0\0\0\0\xf8\x3f", pa.float64(), 1.5),
        ("bytes", b"\x06\xff\0\xfe", pa.binary(), b"\xff\0\xfe"),
        ("string", b"\x06a\0b", pa.string(), "a\0b"),
        ({"type": "string", "logicalType": "uuid"}, b"\x02x", pa.string(), "x"),
        ({"type": "fixed", "name": "F", "size": 3}, b"abc", pa.binary(), b"abc"),
        ({"type": "fixed", "name": "F", "size": 12, "logicalType": "duration"}, b"x" * 12, pa.binary(), b"x" * 12),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x02", pa.string(), "B"),
        ({"type": "array", "items": "int"}, b"\x03\x04\x02\x04\x00", pa.list_(pa.int32()), [1, 2]),
        ({"type": "map", "values": DAY}, b"\x02\x02k\x02\x00", pa.map_(pa.string(), pa.date32()), [("k", dt.date(1970, 1, 2))]),
        (INNER, b"\x02\x02\x02\xff", pa.struct([("x", pa.int32()), ("y", pa.binary())]), {"x": 1, "y": b"\xff"}),
        (["null", "int"], b"\x00", pa.int32(), None),
        (["int", "null"], b"\x00\x02", pa.int32(), 1),
        (["null"], b"\x00", pa.struct([]), None),
        (
            ["null", "int", "string"],
            b"\x04\x02x",
            pa.struct([("int", pa.int32()), ("string", pa.string())]),
            {"int": None, "string": "x"},
        ),
        (["null", "int", "string"], b"\x00", pa.struct([("int", pa.int32()), ("string", pa.string())]), None),
        (["int", "long"], b"\x02\x02", pa.struct([("int", pa.int32()), ("long", pa.int64())]), {"int": None, "long": 1}),
        (
            ["bytes", "string"],
            b"\x00\x02\xff",
            pa.struct([("bytes", pa.binary()), ("string", pa.string())]),
            {"bytes": b"\xff", "string": None},
        ),
        ({"type": "array", "items": ["null", INNER]}, b"\x04\x00\x02\x02\x00\x00", None, [None, {"x": 1, "y": None}]),
        ({"type": "map", "values": {"type": "array", "items": "string"}}, b"\x02\x02k\x02\x02v\x00\x00", None, [("k", ["v"])]),
        ({"type": "record", "name": "Z", "fields": []}, b"", pa.string(), None),
        (DAY, b"\x02", pa.date32(), dt.date(1970, 1, 2)),
        ({"type": "int", "logicalType": "time-millis"}, b"\x02", pa.time32("ms"), dt.time(0, 0, 0, 1000)),
        (long("time-micros"), b"\x02", pa.time64("us"), dt.time(0, 0, 0, 1)),
        (long("timestamp-millis"), b"\x02", pa.timestamp("ms", "UTC"), dt.datetime(1970, 1, 1, 0, 0, 0, 1000, dt.UTC)),
        (long("timestamp-micros"), b"\x01", pa.timestamp("us", "UTC"), dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC)),
        (long("timestamp-nanos"), b"\xd0\x0f", pa.timestamp("ns", "UTC"), None),
        (long("local-timestamp-millis"), b"\x02", pa.timestamp("ms"), None),
        (long("no-such-type"), b"\x02", pa.int64(), 1),
        ({"type": "string", "logicalType": "timestamp-millis"}, b"\x02x", pa.string(), "x"),
        (dec(5, 2), b"\x02\x7b", pa.decimal128(5, 2), Decimal("1.23")),
        (dec(5, 2), b"\x02\x85", pa.decimal128(5, 2), Decimal("-1.23")),
        (dec(5, 2), b"\x04\xff\x85", pa.decimal128(5, 2), Decimal("-1.23")),
        (dec(5, 2), b"\x28" + b"\0" * 19 + b"\x7b", pa.decimal128(5, 2), Decimal("1.23")),
        (dec(5, 2), b"\x28" + b"\xff" * 20, pa.decimal128(5, 2), Decimal("-0.01")),
        (dec(60, 0), b"\x2a\x01" + b"\0" * 20, pa.decimal256(60, 0), Decimal(1 << 160)),
        (
            {"type": "fixed", "name": "F", "size": 2, "logicalType": "decimal", "precision": 4},
            b"\xff\xfe",
            pa.decimal128(4, 0),
            Decimal(-2),
        ),
        (dec(2, 5), b"\x02\x7b", pa.binary(), b"\x7b"),
        (dec(5, -1), b"\x02\x7b", pa.binary(), b"\x7b"),
        (dec(0, 0), b"\x02\x7b", pa.binary(), b"\x7b"),
        (dec("5", 0), b"\x02\x7b", pa.binary(), b"\x7b"),
        (dec(77, 0), b"\x02\x7b", pa.binary(), b"\x7b"),
        ({"type": "bytes", "logicalType": "decimal"}, b"\x02\x7b", pa.binary(), b"\x7b"),
    ],
)
def test_types(schema: Schema, raw: bytes, kind: pa.DataType | None, value: Any) -> None:
    """Twice alone and twice beside each other type's worth of trouble: on the fast path and record by record."""
    whole = record(v=schema)
    assert shape_of(json.dumps(whole)).arrow == shape_of(json.dumps(whole)).arrow
    got = bare(whole).decode(envelope([raw, raw]))
    assert len(got.refused) == 0
    if kind is not None:
        assert got.rows.schema == pa.schema([("v", kind)])
    if kind is not None and not (pa.types.is_timestamp(kind) and value is None):
        assert got.rows.to_pylist() == [{"v": value}] * 2
    again = bare(whole).decode(envelope([raw, raw + b"!", raw]))
    assert again.origin.to_pylist() == [0, 2]
    assert again.refused.codes.to_pylist() == ["avro-decode"]
    assert again.rows.equals(pa.concat_batches([got.rows.slice(0, 1)] * 2))
    if not isinstance(schema, dict) or schema["type"] != "record":  # a schema that is no record gives the column `value`
        alone = bare(schema).decode(envelope([raw, raw]))
        assert alone.rows.columns == got.rows.columns
        assert alone.rows.schema.names == ["value"]


def test_what_looks_like_the_sentinel_is_still_left_over() -> None:
    schema = record(k="int")
    for datum in (b"\x00" + SENTINEL, b"\x00" + SENTINEL * 2):
        assert run(schema, [datum]) == ["avro-decode"]
        assert run(schema, [b"\x02", datum, b""]) == [{"k": 1}, "avro-decode", "avro-decode"]
    text = record(s="string")
    assert run(text, [b"\x10" + b"xTHALWEG"] * 2) == [{"s": "xTHALWEG"}] * 2
    assert run(record(b="bytes"), [b"\x10" + SENTINEL] * 2) == [{"b": SENTINEL}] * 2


@pytest.mark.parametrize("unit", ["millis", "micros", "nanos"])
@pytest.mark.parametrize("local", ["", "local-"])
def test_timestamps_keep_every_bit(unit: str, local: str) -> None:
    low, high = b"\xff" * 9 + b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01"
    got = bare(record(v=long(f"{local}timestamp-{unit}"))).decode(envelope([low, high, b"\x02"]))
    assert got.rows.column("v").cast(pa.int64()).to_pylist() == [-(1 << 63), (1 << 63) - 1, 1]


@pytest.mark.parametrize(
    ("schema", "raw"),
    [
        ("int", b""),
        ("int", b"\xff"),
        ("int", b"\xff\xff\xff\xff\xff\x01"),
        ("long", b"\xff" * 11),
        ("boolean", b"\x02"),
        ("double", b"\0" * 7),
        ("string", b"\x04x"),
        ("string", b"\x01"),
        ("string", b"\xfe\xff\xff\xff\x0f"),
        ("string", b"\x02\xff"),
        ("string", b"\x06\xed\xa0\x80"),
        ("bytes", b"\x04x"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x01"),
        (["null", "int"], b"\x04\x02"),
        (["null", "int"], b"\x01"),
        (["int", "string", "null"], b"\x06"),
        ({"type": "fixed", "name": "F", "size": 3}, b"ab"),
        ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x02"),
        ({"type": "array", "items": "int"}, b"\x02\x02"),
        ({"type": "map", "values": "int"}, b"\x02\x02\xff\x02\x00"),
        ({"type": "array", "items": "string"}, b"\x02\x02\xff\x00"),
        ({"type": "int", "logicalType": "time-millis"}, b"\x01"),
        (long("time-micros"), b"\x80\xc0\xad\xe8\xf6\x05"),
        (dec(3, 2), b"\x04\x27\x10"),
        (dec(5, 2), b"\x28\x01" + b"\0" * 19),
        (dec(38, 2), b"\x22\x00" + b"\xff" * 16),
        (dec(5, 2), b"\x00"),
    ],
)
def test_a_bad_datum_stands_alone(schema: Schema, raw: bytes) -> None:
    whole = record(a="long", v=schema, b="string")
    good = {
        "boolean": False,
        "double": 1.5,
        "string": "é",
        "bytes": b"\xff",
    }
    value: Any = good.get(schema, 5) if isinstance(schema, str) else None
    if isinstance(schema, list):
        value = None
    elif isinstance(schema, dict):
        value = {
            "enum": "A",
            "fixed": b"abc",
            "array": [],
            "map": {},
            "int": dt.time(1),
            "long": dt.time(1),
            "bytes": Decimal(1),
        }[schema["type"]]
    fine = encoded(whole, {"a": 7, "v": value, "b": "x"})
    alone = run(whole, [fine])
    assert alone[0]["a"] == 7
    bad = b"\x0e" + raw
    assert run(whole, [bad]) == ["avro-decode"]
    datums: list[bytes | None] = [fine, bad, fine, fine[:-1], fine, fine + b"\0", b"", fine]
    expected = [alone[0], "avro-decode", alone[0], "avro-decode", alone[0], "avro-decode", "avro-decode", alone[0]]
    assert run(whole, datums) == expected
    assert run(whole, datums * 40) == expected * 40


# --- schemas ------------------------------------------------------------------------------------------------------


def test_names_namespaces_and_references() -> None:
    text = json.dumps(
        {
            "type": "record",
            "name": "R",
            "namespace": "x.y",
            "fields": [
                {"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A"]}},
                {"name": "b", "type": "E"},
                {"name": "c", "type": ["null", "x.y.E"]},
                {"name": "d", "type": "other.Ref"},
                {"name": "e", "type": {"type": "record", "name": "z.N", "fields": [{"name": "f", "type": "Deep"}]}},
            ],
        }
    )
    references = {
        "some-name": json.dumps(
            {"type": "record", "name": "Ref", "namespace": "other", "fields": [{"name": "g", "type": "z.Deep"}]}
        ),
        "z.Deep": json.dumps({"type": "fixed", "name": "Deep", "namespace": "z", "size": 1}),
    }
    found = shape_of(text, references)
    assert [kid.arrow for _, kid in found.kids] == [
        pa.string(),
        pa.string(),
        pa.string(),
        pa.struct([("g", pa.binary())]),
        pa.struct([("f", pa.binary())]),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "schema-invalid"),
        ('{"type":"zz"}', "schema-invalid"),
        ("3", "schema-invalid"),
        ("[]", "schema-invalid"),
        ('["int","int"]', "schema-invalid"),
        ('["null",["int","null"]]', "schema-invalid"),
        ('{"type":"record","fields":[]}', "schema-invalid"),
        ('{"type":"record","name":"R"}', "schema-invalid"),
        ('{"type":"record","name":"R","fields":[{"name":"a"}]}', "schema-invalid"),
        ('{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}', "schema-invalid"),
        ('{"type":"enum","name":"E"}', "schema-invalid"),
        ('{"type":"fixed","name":"F","size":-1}', "schema-invalid"),
        ('{"type":"array"}', "schema-invalid"),
        ('{"type":"array","items":"null"}', "schema-unsupported"),
        ('{"type":"array","items":{"type":"fixed","name":"F","size":0}}', "schema-unsupported"),
        ('{"type":"array","items":{"type":"record","name":"R","fields":[{"name":"n","type":"null"}]}}', "schema-unsupported"),
        ('{"type":"record","name":"R","fields":[]}', "schema-unsupported"),
        ('{"type":"record","name":"R","fields":[{"name":"n","type":["null","R"]}]}', "schema-unsupported"),
        ('{"type":"array","items":' * 200 + '"int"' + "}" * 200, "schema-unsupported"),
        ("[" * 100_000, "schema-unsupported"),
    ],
)
def test_schemas_that_cannot_be_used(text: str, code: str) -> None:
    with pytest.raises(Invalid) as caught:
        shape_of(text)
    assert caught.value.code == code
    codec = registered({7: RegisteredSchema("AVRO", text, {}), 8: record(a="int")})
    assert fates(codec.decode(envelope([v0(7, b"x"), v0(8, b"\x02"), v0(7, b"")])), 3) == [code, {"a": 1}, code]


def test_deep_but_allowed_nesting_works_on_both_paths() -> None:
    schema: Schema = "int"
    raw = b"\x02"
    for _ in range(60):
        schema, raw = {"type": "array", "items": schema}, b"\x02" + raw + b"\x00"
    got = bare(record(v=schema)).decode(envelope([raw, raw[:-1], raw]))
    assert got.origin.to_pylist() == [0, 2]


# --- frames and registries ----------------------------------------------------------------------------------------

A = record(n="int", s="string")
B = record(n="long", t=["null", "double"])
ROW = {"n": None, "s": None, "t": None}


def test_several_schemas_in_one_batch() -> None:
    codec = registered({1: A, GUID: B})
    one, two = encoded(A, {"n": 1, "s": "x"}), encoded(B, {"n": 2, "t": 0.5})
    values = [v0(1, one), v1(GUID, two), None, v0(9, one), v0(1, one + b"!"), v1(GUID, two), v0(1, one)]
    batch = envelope(values)
    assert codec.wants(batch) == {9}
    codec.learn(9, None)
    assert codec.wants(batch) == frozenset()
    got = codec.decode(batch)
    assert got.rows.schema == pa.schema([("n", pa.int64()), ("s", pa.string()), ("t", pa.float64())])
    first, second = {"n": 1, "s": "x", "t": None}, {"n": 2, "s": None, "t": 0.5}
    assert fates(got, 7) == [first, second, ROW, "schema-unknown", "avro-decode", second, first]


def test_schemas_taking_turns_come_out_in_order() -> None:
    codec = registered({2: A, 1: B})
    one, two = encoded(A, {"n": 1, "s": "x"}), encoded(B, {"n": 2, "t": 0.5})
    first, second = {"n": 1, "s": "x", "t": None}, {"n": 2, "s": None, "t": 0.5}
    assert fates(codec.decode(envelope([v0(2, one), v0(1, two)] * 3)), 6) == [first, second] * 3


def test_references_wanted_are_ids_and_guids() -> None:
    codec = registered({})
    header = [{"key": HEADER, "value": b"\0\0\0\0\x05"}]
    batch = envelope([v0(3, b""), v1(GUID, b""), b"", b"\x02zzzzz", b"\0\0", None, b"bare"], [None] * 6 + [header])
    assert codec.wants(batch) == {3, GUID, 5}
    assert fates(codec.decode(batch), 7) == [
        "schema-unknown",
        "schema-unknown",
        "avro-frame",
        "avro-frame",
        "avro-frame",
        "tombstone",
        "schema-unknown",
    ]


def test_a_schema_id_in_a_header_wins_and_leaves_the_value_bare() -> None:
    codec = registered({0: A, 1: A, GUID: B})
    one, two = encoded(A, {"n": 1, "s": "x"}), encoded(B, {"n": 2, "t": None})
    guid = b"\x01" + uuid.UUID(GUID).bytes
    headers: list[Any] = [
        [{"key": "other", "value": b"y"}, {"key": HEADER, "value": b"\0\0\0\0\x01"}, {"key": HEADER, "value": b"bad"}],
        [{"key": HEADER, "value": guid}],
        None,
        [{"key": HEADER, "value": None}],
        [{"key": HEADER, "value": b"bad"}],
        [],
        [{"key": HEADER, "value": guid}],
    ]
    first, second = {"n": 1, "s": "x", "t": None}, {"n": 2, "s": None, "t": None}
    values = [one, two, v0(1, one), v0(1, one), one, v0(1, one), None]
    batch = envelope(values, headers)
    expected = [first, second, first, first, "avro-frame", first, ROW]
    assert fates(codec.decode(batch), 7) == expected
    assert fates(codec.decode(batch.slice(1, 5)), 5) == expected[1:6]


def test_numbers_widen_and_conflicts_are_refused() -> None:
    codec = registered(
        {1: record(a="int", b="float", c="string"), 2: record(a="double", b="double"), 3: record(c="int"), 4: record(a="long")}
    )
    values: list[bytes | None] = [
        v0(1, encoded(record(a="int", b="float", c="string"), {"a": 1, "b": 0.5, "c": "x"})),
        v0(2, encoded(record(a="double", b="double"), {"a": 0.1, "b": 0.1})),
        v0(3, b"\x02"),
        v0(4, b"\x02"),
        v0(4, encoded(record(a="long"), {"a": (1 << 53) + 1})),
        v0(4, b"\x04"),
    ]
    assert fates(codec.decode(envelope(values)), 6) == [
        {"a": 1.0, "b": 0.5, "c": "x"},
        {"a": 0.1, "b": 0.1, "c": None},
        "schema-conflict",
        {"a": 1.0, "b": None, "c": None},
        "avro-decode",
        {"a": 2.0, "b": None, "c": None},
    ]


def test_nested_columns_grow_too() -> None:
    def nested(*fields: str) -> Schema:
        inner = {"type": "record", "name": "I", "fields": [{"name": n, "type": ["null", "int"]} for n in fields]}
        return record(o=["null", inner], l={"type": "array", "items": "I"}, m={"type": "map", "values": "I"})

    old, new = nested("x"), nested("x", "y")
    codec = registered({1: old, 2: new})
    first = {"o": {"x": 1}, "l": [{"x": 2}], "m": {"k": {"x": None}}}
    second: dict[str, Any] = {"o": None, "l": [], "m": {"k": {"x": 1, "y": 2}}}
    got = codec.decode(envelope([v0(1, encoded(old, first)), v0(2, encoded(new, second))]))
    assert fates(got, 2) == [
        {"o": {"x": 1, "y": None}, "l": [{"x": 2, "y": None}], "m": [("k", {"x": None, "y": None})]},
        {"o": None, "l": [], "m": [("k", {"x": 1, "y": 2})]},
    ]


def test_a_reader_fixes_the_shape() -> None:
    reader = record(n="double", z="string", s="string")
    reader["fields"][1]["default"] = "none"
    codec = registered({1: A, 2: record(q="int"), 3: record(n="string")}, avro_schema=json.dumps(reader))
    one = encoded(A, {"n": 1, "s": "x"})
    got = codec.decode(envelope([v0(1, one), None, v0(2, b"\x02"), v0(3, b"\x02x")]))
    assert got.rows.schema == pa.schema([("n", pa.float64()), ("z", pa.string()), ("s", pa.string())])
    assert fates(got, 4) == [
        {"n": 1.0, "z": "none", "s": "x"},
        {"n": None, "z": None, "s": None},
        {"n": None, "z": "none", "s": None},
        "schema-conflict",
    ]
    assert codec.decode(envelope([])).rows.schema == got.rows.schema


def test_other_kinds_of_schema_are_refused() -> None:
    codec = registered({1: RegisteredSchema("PROTOBUF", "message A {}", {}), 2: A})
    assert fates(codec.decode(envelope([v0(1, b"x"), v0(2, b"\x02\x02x")])), 2) == ["schema-invalid", {"n": 1, "s": "x"}]


@pytest.mark.parametrize(("policy", "fate"), [(Tombstone.ROW, {"v": None}), (Tombstone.DROP, None), (Tombstone.DLQ, "tombstone")])
def test_tombstones(policy: Tombstone, fate: Any) -> None:
    codec = bare(record(v="int"), policy)
    assert fates(codec.decode(envelope([None, b"\x02", None, b"", None])), 5) == [fate, {"v": 1}, fate, "avro-decode", fate]
    assert fates(codec.decode(envelope([None])), 1) == [fate]


def test_plans() -> None:
    with pytest.raises(Permanent, match="registry"):
        codec_of(CodecPlan("avro"))
    with pytest.raises(Permanent, match="schema file"):
        codec_of(CodecPlan("avro", framing="none"))
    broken = codec_of(CodecPlan("avro", framing="none", avro_schema="{"))
    assert fates(broken.decode(envelope([b"x"])), 1) == ["schema-invalid"]


# --- against a naive reader ---------------------------------------------------------------------------------------

LEAVES: list[tuple[Schema, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    ("long", st.integers(-(1 << 63), (1 << 63) - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=5)),
    ("string", st.text(max_size=5)),
    ({"type": "enum", "symbols": ["A", "B"]}, st.sampled_from("AB")),
    ({"type": "fixed", "size": 2}, st.binary(min_size=2, max_size=2)),
    (DAY, st.dates()),
    (long("timestamp-micros"), st.datetimes(timezones=st.just(dt.UTC))),
    (dec(9, 3), st.integers(-999_999_999, 999_999_999).map(lambda n: Decimal(n).scaleb(-3))),
    (dec(76, 10), st.integers(-(10**70), 10**70).map(lambda n: decimal.Context(prec=80).scaleb(Decimal(n), -10))),
]


@st.composite
def typed(draw: st.DrawFn, names: list[int], depth: int = 0) -> tuple[Schema, st.SearchStrategy[Any]]:
    """A type and values of it."""

    def fresh() -> str:
        names.append(0)
        return f"N{len(names)}"

    how = draw(st.integers(0, 8 if depth < 3 else 4))
    if how <= 4:
        schema, values = draw(st.sampled_from(LEAVES))
        if isinstance(schema, dict) and schema["type"] in ("enum", "fixed"):
            schema = {**schema, "name": fresh()}
        return schema, values
    inner, values = draw(typed(names, depth + 1))
    if how == 5 and inner != "null":
        return {"type": "array", "items": inner}, st.lists(values, max_size=3)
    if how == 6:
        return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=2), values, max_size=3)
    if how == 7 and inner != "null" and not isinstance(inner, list):
        return draw(st.sampled_from([["null", inner], [inner, "null"]])), st.none() | values
    other, more = draw(typed(names, depth + 1))
    schema = {"type": "record", "name": fresh(), "fields": [{"name": "p", "type": inner}, {"name": "q", "type": other}]}
    return schema, st.fixed_dictionaries({"p": values, "q": more})


@st.composite
def batches(draw: st.DrawFn) -> tuple[Schema, list[bytes]]:
    names: list[int] = []
    schema, values = draw(typed(names))
    whole = {"type": "record", "name": "Top", "fields": [{"name": "k", "type": "int"}, {"name": "v", "type": schema}]}
    datums = []
    for i in range(draw(st.integers(0, 6))):
        raw = encoded(whole, {"k": i, "v": draw(values)})
        how = draw(st.integers(0, 5))
        if how == 0:
            raw = raw[: draw(st.integers(0, len(raw)))]
        elif how == 1:
            raw += draw(st.binary(min_size=1, max_size=9))
        elif how == 2 and len(raw) > 1:
            at = draw(st.integers(1, len(raw) - 1))
            raw = raw[:at] + draw(st.binary(min_size=1, max_size=1)) + raw[at + 1 :]
        datums.append(raw)
    return whole, datums


def naive(schema: Schema, raw: bytes) -> Any:
    """What fastavro makes of one datum, or "refused"."""
    source = io.BytesIO(raw)
    try:
        with decimal.localcontext() as context:
            context.prec = 100
            found = fastavro.schemaless_reader(source, fastavro.parse_schema(json.loads(json.dumps(schema))), None)
    except Exception:  # fastavro raises what it likes on garbage: EOFError, IndexError, UnicodeDecodeError, OverflowError…
        return "refused"
    return found if source.tell() == len(raw) else "refused"


def plain(found: Any) -> Any:
    """Maps as lists of pairs, as Arrow gives them."""
    if isinstance(found, dict):
        return {k: plain(v) for k, v in found.items()}
    if isinstance(found, list) and found and isinstance(found[0], tuple):
        return {k: plain(v) for k, v in found}
    return [plain(v) for v in found] if isinstance(found, list) else found


def alike(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(alike(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(alike(a, b) for a, b in zip(left, right, strict=True))
    if not left and not right and isinstance(left, list | dict) and isinstance(right, list | dict):
        return True  # an empty map is an empty list of pairs
    return bool(left == right) or (left != left and right != right)


WITHOUT_WIDTH = ('"null"',)  # arrays of records of these alone are refused as a schema


def _usable(schema: Schema) -> bool:
    try:
        shape_of(json.dumps(schema))
    except Invalid as error:
        return error.code != "schema-unsupported"
    return True


@given(batches())
@settings(deadline=None, max_examples=150)
def test_avro_equals_a_naive_reader(drawn: tuple[Schema, list[bytes]]) -> None:
    schema, datums = drawn
    if any(part in json.dumps(schema) for part in WITHOUT_WIDTH):
        assume(_usable(schema))
    codec = bare(schema)
    got = codec.decode(envelope(list(datums)))
    out: list[Any] = ["refused"] * len(datums)
    for i, at in enumerate(got.origin.to_pylist()):
        row = got.rows.slice(i, 1)
        assert codec.decode(envelope([datums[at]])).rows.equals(row)
        try:
            out[at] = plain(row.to_pylist()[0])
        except (OverflowError, ValueError):  # dates that Python cannot hold
            out[at] = None
    assert sorted([*got.origin.to_pylist(), *got.refused.rows.to_pylist()]) == list(range(len(datums)))
    for raw, fate in zip(datums, out, strict=True):
        if fate is None:
            continue
        expected = naive(schema, raw)
        if fate == "refused":
            assert bare(schema).decode(envelope([raw])).rows.num_rows == 0
            # Only what one of our own bounds forbids may be refused here and read there.
            assert expected == "refused" or _stricter(schema, raw, expected), (schema, raw, expected)
        else:
            assert alike(fate, plain(expected)), (schema, raw, fate, expected)


def _stricter(schema: Schema, raw: bytes, found: Any) -> bool:
    """Whether `raw` is not how a value is written: fastavro reads ints of any size, booleans of any byte, negative indices and
    decimals of too many digits, but does not write them so."""
    try:
        with decimal.localcontext() as context:
            context.prec = 100
            return encoded(schema, found) != raw
    except Exception:  # as above: whatever fastavro raises, it does not write that
        return True
