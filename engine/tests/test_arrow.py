"""Type names: every declared type is read back, and every mistake is told with its place and remedy."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.arrow import PLAIN, name_of, schema_of, type_of

LEAVES = [
    *PLAIN.values(),
    *(pa.timestamp(u, z) for u in ("s", "ms", "us", "ns") for z in (None, "UTC", "Europe/Berlin", "+05:30")),
    *(pa.duration(u) for u in ("s", "ms", "us", "ns")),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
    pa.decimal128(10, 2),
    pa.decimal128(38, 38),
    pa.decimal256(76, 0),
]
NAMES = st.one_of(
    st.from_regex(r"\w{1,5}", fullmatch=True), st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)
)
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(lambda t: pa.map_(pa.string(), t)),
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(lambda d: pa.struct(list(d.items()))),
    ),
    max_leaves=5,
)


@given(TYPES)
@settings(deadline=None, max_examples=200)
def test_every_type_reads_back_from_its_name(kind: pa.DataType) -> None:
    assert type_of(name_of(kind)) == kind
    assert type_of(f"  {name_of(kind)} ") == kind


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("int64", pa.int64()),
        ("Boolean", pa.bool_()),
        ("double", pa.float64()),
        ("timestamp[ms]", pa.timestamp("ms")),
        ("timestamp[us, tz=UTC]", pa.timestamp("us", "UTC")),
        ("timestamp[us,tz=America/New_York]", pa.timestamp("us", "America/New_York")),
        ("timestamp", pa.timestamp("us")),
        ("date32[day]", pa.date32()),
        ("decimal128(10,2)", pa.decimal128(10, 2)),
        ("decimal(10, 2)", pa.decimal128(10, 2)),
        ("decimal128(5)", pa.decimal128(5, 0)),
        ("list<list< string >>", pa.list_(pa.list_(pa.string()))),
        ({"lat": "float64"}, pa.struct([("lat", pa.float64())])),
        ([{"sku": "string"}], pa.list_(pa.struct([("sku", pa.string())]))),
        ('struct<"a b": int64>', pa.struct([("a b", pa.int64())])),
    ],
)
def test_spellings(spec: object, kind: pa.DataType) -> None:
    assert type_of(spec) == kind


def test_schema_keeps_the_order_of_its_columns() -> None:
    schema = schema_of({"z": "int64", "geo": {"lat": "float64"}, "items": [{"sku": "string"}]})
    assert schema == pa.schema(
        [
            ("z", pa.int64()),
            ("geo", pa.struct([("lat", pa.float64())])),
            ("items", pa.list_(pa.struct([("sku", pa.string())]))),
        ]
    )


def test_all_problems_come_at_once_with_their_places() -> None:
    with pytest.raises(ValueError, match="int46") as caught:
        schema_of(
            {
                "a": "int46",
                "b": {"c": "decimal128(50,2)", "d": ["string", "int64"]},
                "e": "timestamp[min]",
                "f": "timestamp[us, tz=Mars/Olympus]",
                "g": 3,
                "h": "list<string",
                "i": {},
                "": "string",
                "j": "int64 int64",
                "k": "time32",
                "l": "decimal128(4,9)",
                "fine": "string",
            }
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "b.c", "b.d", "e", "f", "g", "h", "i", "''", "j", "k", "l"]
    assert "did you mean 'int64'" in lines[0]
    assert "decimal256" in lines[1]
    assert "timestamp[s]" in lines[3]
    assert all(";" in line for line in lines)


def test_a_schema_without_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="no columns"):
        schema_of({})


@pytest.mark.parametrize(
    "spec", ["list<" * 5_000, "list<" * 40 + "int8" + ">" * 40, "", " ", "<", "struct<a>", "struct<a: int8, a: int8>"]
)
def test_nonsense_is_a_value_error(spec: str) -> None:
    with pytest.raises(ValueError, match="type"):
        type_of(spec)


def test_nested_mappings_are_bounded() -> None:
    spec: object = "int64"
    for _ in range(5_000):
        spec = [spec]
    with pytest.raises(ValueError, match="levels deep"):
        type_of(spec)
