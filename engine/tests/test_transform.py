"""Nodes and rules over one batch: rows keep their origin, a bad row stands alone, one context serves all batches."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from datafusion import SessionConfig, SessionContext
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.core.topology import Node, Rule, SqlNode, UnnestNode, Verdict
from thalweg.errors import Permanent
from thalweg.runtime.transform import NodeRows, Outcome, Transform


def run(rows: pa.RecordBatch, *nodes: Node, rules: tuple[Rule, ...] = ()) -> Outcome:
    return Transform(nodes, rules).run(rows, pa.array(range(rows.num_rows), pa.int32()))


def said(node: NodeRows) -> list[tuple[int, dict[str, object]]]:
    return list(zip(node.origin.to_pylist(), node.rows.to_pylist(), strict=True))


@given(st.lists(st.none() | st.integers(-50, 50), max_size=30))
@settings(max_examples=25, deadline=None)
def test_every_row_keeps_its_origin_through_filters_and_nested_selects(values: list[int | None]) -> None:
    rows = pa.record_batch({"a": pa.array(values, pa.int64())})
    sql = "WITH p AS (SELECT a, a * 2 AS b FROM source WHERE a > 0) SELECT b + 1 AS c FROM p WHERE b < 60"
    found = run(rows, SqlNode("n", "records", sql))
    wanted = [(i, {"c": v * 2 + 1}) for i, v in enumerate(values) if v is not None and v > 0 and v * 2 < 60]
    assert said(found.nodes["n"]) == wanted


def test_names_are_as_they_are_written() -> None:
    rows = pa.record_batch({"carrierName": ["x"], "CARRIERNAME": ["y"]})
    found = run(rows, SqlNode("n", "records", "SELECT UPPER(carrierName) AS up, CARRIERNAME AS other FROM source"))
    assert found.nodes["n"].rows.to_pylist() == [{"up": "X", "other": "y"}]


def test_failing_rows_stand_alone_and_their_neighbours_flow() -> None:
    values = [1, 0, 2, 0, 5]
    rows = pa.record_batch({"a": pa.array(values, pa.int64())})
    found = run(rows, SqlNode("n", "records", "SELECT 10 / a AS q FROM source"))
    assert said(found.nodes["n"]) == [(0, {"q": 10}), (2, {"q": 5}), (4, {"q": 2})]
    ((stage, refusals, child),) = found.refused
    assert (stage, refusals.rows.to_pylist(), child) == ("transform:n", [1, 3], None)
    assert set(refusals.codes.to_pylist()) == {"transform-failed"}
    assert "zero" in refusals.details[0].as_py().lower()


def test_batch_without_rows_has_the_same_schema() -> None:
    node = SqlNode("n", "records", "SELECT upper(s) AS u, a + 1 AS b FROM source")
    transformer = Transform([node], [])
    full = transformer.run(pa.record_batch({"a": [1], "s": ["x"]}), pa.array([0], pa.int32()))
    empty = transformer.run(pa.record_batch({"a": [1], "s": ["x"]}).slice(0, 0), pa.array([], pa.int32()))
    assert full.nodes["n"].rows.schema == empty.nodes["n"].rows.schema
    assert full.nodes["n"].rows.schema.field("u").type == pa.string()


def test_one_context_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(config: SessionConfig) -> SessionContext:
        nonlocal made
        made += 1
        return SessionContext(config)

    monkeypatch.setattr("thalweg.runtime.transform.SessionContext", counted)
    transformer = Transform([SqlNode("n", "records", "SELECT a FROM source")], [])
    for i in range(50):
        found = transformer.run(pa.record_batch({"a": [i]}), pa.array([0], pa.int32()))
        assert found.nodes["n"].rows.to_pylist() == [{"a": i}]
    assert made == 1


LISTS = st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), max_size=12)


@given(LISTS, st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_unnest_gives_one_row_per_element_and_numbers_them(lists: list[list[int] | None], kind: pa.DataType, skip: int) -> None:
    rows = pa.record_batch({"k": pa.array(range(len(lists)), pa.int64()), "v": pa.array(lists, kind)}).slice(skip)
    found = run(rows, UnnestNode("u", "records", "v")).nodes["u"]
    wanted = [
        (i, j, {"k": i + skip, "v": element}) for i, some in enumerate(lists[skip:]) for j, element in enumerate(some or [])
    ]
    assert found.child is not None
    assert list(zip(found.origin.to_pylist(), found.child.to_pylist(), found.rows.to_pylist(), strict=True)) == wanted


def test_unnest_of_structs_in_unnest_numbers_all_children_of_a_record() -> None:
    kind = pa.list_(pa.struct([("sku", pa.string()), ("tags", pa.list_(pa.string()))]))
    value = [[{"sku": "a", "tags": ["x", "y"]}, {"sku": "b", "tags": []}, {"sku": "c", "tags": ["z"]}], []]
    rows = pa.record_batch({"id": [1, 2], "lines": pa.array(value, kind)})
    found = run(rows, UnnestNode("lines", "records", "lines"), UnnestNode("tags", "lines", "tags"))
    assert [r["sku"] for r in found.nodes["lines"].rows.to_pylist()] == ["a", "b", "c"]
    tags = found.nodes["tags"]
    assert tags.child is not None
    assert (tags.origin.to_pylist(), tags.child.to_pylist()) == ([0, 0, 0], [0, 1, 2])
    assert [(r["sku"], r["tags"]) for r in tags.rows.to_pylist()] == [("a", "x"), ("a", "y"), ("c", "z")]


def test_unnest_that_cannot_be_is_explained() -> None:
    rows = pa.record_batch({"id": [1], "v": pa.array([[{"id": 2}]], pa.list_(pa.struct([("id", pa.int64())])))})
    with pytest.raises(Permanent, match="two columns called id"):
        run(rows, UnnestNode("u", "records", "v"))
    with pytest.raises(Permanent, match="not a list"):
        run(rows, UnnestNode("u", "records", "id"))
    with pytest.raises(Permanent, match="no column w"):
        run(rows, UnnestNode("u", "records", "w"))


def rule(name: str, verdict: Verdict, **condition: object) -> Rule:
    return Rule(name, "records", verdict, f"code-{name}", **condition)  # type: ignore[arg-type]


def verdicts(outcome: Outcome) -> dict[str, list[tuple[int, str]]]:
    return {
        verdict.value: list(zip(refusals.rows.to_pylist(), refusals.rules.to_pylist(), strict=True))
        for verdict, refusals, _ in outcome.verdicts.get("records", [])
    }


def test_strongest_verdict_wins_and_the_first_rule_of_it_names_the_row() -> None:
    rows = pa.record_batch({"a": pa.array([1, None, 50, 200, 7], pa.int64()), "s": ["ok", "ok", "bad", "bad", None]})
    found = run(
        rows,
        rules=(
            rule("q", Verdict.QUARANTINE, column="a", maximum=40),
            rule("n", Verdict.DLQ, column="a", not_null=True),
            rule("s", Verdict.DLQ, column="s", regex="^ok$"),
            rule("s2", Verdict.DLQ, column="s", accepted=("ok",)),
            rule("d", Verdict.DROP, column="a", maximum=100),
        ),
    )
    assert verdicts(found) == {"drop": [(3, "d")], "dlq": [(1, "n"), (2, "s")]}
    assert [r["a"] for r in found.nodes["records"].rows.to_pylist()] == [1, 7]
    assert found.nodes["records"].origin.to_pylist() == [0, 4]


@pytest.mark.parametrize(
    ("column", "low", "high", "kept"),
    [
        (pa.array([1.0, math.nan, None, math.inf, -1.0]), 0, 10, [0, 2]),
        (pa.array([Decimal("1.10"), Decimal("1.11"), None]), None, 1.1, [0, 2]),
        (pa.array([datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)]), "2020-06-01T00:00:00Z", None, [1]),
        (pa.array(["a", "m", "z", None]), "b", "n", [1, 3]),
        (pa.array([2**60 + 1, 1, 2, None], pa.int64()), 1.5, None, [0, 2, 3]),
        (pa.array([2**53 + 1, 2**53], pa.int64()), None, float(2**53), [1]),
        (pa.array([2**63 + 1, 0], pa.uint64()), 1, None, [0]),
        (pa.array([1, None], pa.int64()), None, 2**64, [0, 1]),
        (pa.array([1, None], pa.int64()), 2**64, None, [1]),
        (pa.array([Decimal(5), Decimal(0), None], pa.decimal128(38, 0)), 0.5, 10**40, [0, 2]),
    ],
)
def test_ranges_over_types(column: pa.Array, low: object, high: object, kept: list[int]) -> None:
    found = run(pa.record_batch({"a": column}), rules=(rule("r", Verdict.DLQ, column="a", minimum=low, maximum=high),))
    assert found.nodes["records"].origin.to_pylist() == kept


def test_sql_predicate_null_is_broken_and_a_failing_row_is_refused() -> None:
    rows = pa.record_batch({"a": pa.array([1, None, 0, 5], pa.int64())})
    found = run(rows, rules=(rule("p", Verdict.QUARANTINE, sql="10 / a > 3"),))
    assert verdicts(found) == {"quarantine": [(1, "p"), (3, "p")]}
    ((stage, refusals, _),) = found.refused
    assert (stage, refusals.rows.to_pylist()) == ("rule:records", [2])
    assert found.nodes["records"].origin.to_pylist() == [0]


def test_children_see_only_clean_rows() -> None:
    rows = pa.record_batch({"a": pa.array([1, None], pa.int64())})
    found = run(rows, SqlNode("n", "records", "SELECT a FROM source"), rules=(rule("n", Verdict.DLQ, column="a", not_null=True),))
    assert said(found.nodes["n"]) == [(0, {"a": 1})]


def test_schemas_and_faults_before_any_row() -> None:
    nodes = [SqlNode("good", "records", "SELECT a + 1 AS b FROM source"), SqlNode("bad", "good", "SELECT nope FROM source")]
    known, faults = Transform(nodes, [rule("p", Verdict.DLQ, sql="a + 1")]).schemas(pa.schema([("a", pa.int64())]))
    assert known["good"] == pa.schema([("b", pa.int64())])
    assert "nope" in faults["bad"]
    assert "boolean" in faults["p"]


def test_several_rows_for_one_never_get_a_wrong_origin() -> None:
    rows = pa.record_batch({"l": pa.array([[1, 2], []], pa.list_(pa.int64()))})
    with pytest.raises(Permanent, match="several rows for one"):
        run(rows, SqlNode("n", "records", "SELECT unnest(l) AS x FROM source"))
