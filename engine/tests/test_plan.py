"""Configuration: every fault at once, each at its place; what `check` accepts, editors accept; nothing secret is ever shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thalweg.__main__ import judged_file
from thalweg.config import BYTES_MAX, Secrets, read
from thalweg.core.plan import Judged, same_place, within
from thalweg.core.shape import ROOT_SHAPE, Reader, Value, json_schema, plain
from thalweg.core.topology import OnFailure, Role, Topology
from thalweg.errors import Fault, Refused

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_FILES = sorted(
    str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*") if p.suffix in (".yaml", ".toml", ".json") and p.is_file()
)
SCHEMA = json_schema()

BASE = """\
pipeline: {name: p}
sources:
  - name: s
    type: kafka
    cluster_id: c
    topics: [t]
    options: {bootstrap.servers: "b:9092"}
    codec: {type: json, schema: {id: int64, name: string, at: "timestamp[ms]", tags: "list<string>"}}
TRANSFORMS
sinks:
  - {name: raw, type: parquet, role: primary-raw, url: out/raw}
  - {name: rejects, type: parquet, role: dlq, url: out/rejects}
  - {name: aside, type: parquet, role: quarantine, url: out/aside}
  SINK
"""


COLUMNS = '{id: int64, name: string, at: "timestamp[ms]", tags: "list<string>"}'
CODEC = f"type: json, schema: {COLUMNS}"


def checked(folder: Path, text: str, name: str = "p.yaml", *, strict: bool = False) -> Judged:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return judged_file(path, strict=strict)


def base(transforms: str = "", sink: str = "", **replaced: str) -> str:
    text = BASE.replace("TRANSFORMS\n", transforms).replace("  SINK\n", sink)
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def codes(found: Judged) -> list[str]:
    return [f.code for f in found.faults]


def place(text: str, needle: str, nth: int = 0) -> tuple[int, int]:
    """Line and column of the nth `needle`, from 1."""
    at = -1
    for _ in range(nth + 1):
        at = text.index(needle, at + 1)
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def topology(found: Judged) -> Topology:
    assert found.topology is not None, found.faults
    return found.topology


# --- all at once, and where ---------------------------------------------------------------------------------------

SEVEN = """\
pipeline:
  name: seven
metdata: {prefix: _twg_}
sources:
  - name: orders
    type: kafka
    clusterId: prod-a
    topics: [orders]
    options:
      bootstrap.servers: "broker:9092"
      enable.auto.commit: true
    codec: {type: json, schema: {id: int64, amount: float64, kind: strng}}
transforms:
  - name: totals
    sql: |
      SELECT id,
             sum(amount) AS total
      FROM source
  - {name: lines, input: recrods, unnest: items}
sinks:
  - {name: raw, type: parquet, role: primary-raw, url: out/raw, durable: false}
  - {name: rejects, type: parquet, role: dlq, url: out/rejects}
"""


def test_seven_different_faults_are_told_at_once_each_at_its_place(tmp_path: Path) -> None:
    found = checked(tmp_path, SEVEN)
    assert [(f.code, f.line, f.column) for f in found.faults] == [
        ("unknown-key", *place(SEVEN, "metdata")),
        ("unknown-key", *place(SEVEN, "clusterId")),
        ("option-not-yours", *place(SEVEN, "enable.auto")),
        ("schema-type", *place(SEVEN, "kind: strng")),
        ("sql-aggregate", *place(SEVEN, "sum(")),
        ("unknown-node", *place(SEVEN, "input: recrods")),
        ("primary-raw-not-durable", *place(SEVEN, "durable: false")),
    ]
    assert all(f.what and f.remedy for f in found.faults)
    remedies = {f.what: f.remedy for f in found.faults if f.code == "unknown-key"}
    assert list(remedies.values()) == ["Did you mean metadata?", "Did you mean cluster_id?"]


def test_faults_of_values_come_with_keys_that_are_there_twice(tmp_path: Path) -> None:
    text = base("drain_ms: no\ndrain_ms: 5\n")
    found = checked(tmp_path, text)
    assert [(f.code, f.line) for f in found.faults] == [("bad-type", 9), ("duplicate-key", 10)]
    twice = '{"pipeline": {"name": "p"},\n "pipeline": {"name": "q"}}'
    assert ("duplicate-key", 2, 2) in [(f.code, f.line, f.column) for f in checked(tmp_path, twice, "p.json").faults]


SQLS = {
    "block": "sql: |\n      SELECT id,\n\n        max(id) AS m\n      FROM source\n",
    "block with a remark": "sql: |- # why\n      SELECT id,\n        max(id) AS m\n      FROM source\n",
    "folded": "sql: >\n      SELECT id,\n      max(id) AS m\n      FROM source\n",
    "plain": "sql: SELECT id, max(id) AS m FROM source\n",
    "plain over lines": "sql: SELECT id,\n      max(id) AS m\n\n      FROM source\n",
    "double": 'sql: "SELECT id,\\n \\"name\\", \\u0031 AS x,\\\n       max(id) AS m FROM source"\n',
    "single": "sql: 'SELECT ''a'' AS a,\n      max(id) AS m FROM source'\n",
}


@pytest.mark.parametrize("how", list(SQLS))
def test_a_place_in_sql_is_the_place_in_the_file(tmp_path: Path, how: str) -> None:
    text = base(f"transforms:\n  - name: n\n    {SQLS[how]}")
    found = checked(tmp_path, text)
    assert [(f.code, f.line, f.column) for f in found.faults] == [("sql-aggregate", *place(text, "max("))]
    wrong = text.replace("max(id)", "nmae")
    (fault,) = checked(tmp_path, wrong).faults
    assert (fault.code, fault.line, fault.column, fault.remedy) == ("unknown-column", *place(wrong, "nmae"), "Did you mean name?")


TOML = '''\
# a remark with [brackets] = "x"
pipeline = { name = "p", "nmae" = 1 }
drain_ms = 5_000

[[sources]]
name = "s"
type = "kafka"
cluster_id = 'c'
topics = [
  "t", # one = 1
  5,
]
[sources.options]
"bootstrap.servers" = "b:9092"
[sources.codec]
type = "json"
schema.id = "int64"
schema."a b" = "strng"

[[transforms]]
name = "n"
sql = """
SELECT id,
       \\"x\\" AS x, count(*) AS n FROM source"""

[[transforms]]
name = "m"
sql = \'\'\'SELECT id, min(id) AS m
FROM source\'\'\'

[[sinks]]
name = "raw"
type = "parquet"
role = "primary-raw"
url = "out/raw"
  [[sinks]]
  name = "raw"
  type = "parket"
  role = "dlq"
  url = "out/dlq"
'''


def test_toml_faults_stand_at_their_places(tmp_path: Path) -> None:
    found = checked(tmp_path, TOML, "p.toml")
    assert [(f.code, f.line, f.column) for f in found.faults] == [
        ("unknown-key", *place(TOML, '"nmae"')),
        ("bad-type", *place(TOML, "5,")),
        ("schema-type", *place(TOML, '"a b"')),
        ("sql-aggregate", *place(TOML, "count(")),
        ("sql-aggregate", *place(TOML, "min(")),
        ("duplicate-name", *place(TOML, 'name = "raw"', 1)),
        ("bad-value", *place(TOML, 'type = "parket"')),
    ]


def test_a_fault_in_a_sql_file_names_the_file_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "n.sql").write_text("SELECT id,\n  avg(id) AS a\nFROM source\n")
    text = base(
        "transforms:\n  - {name: n, sql_file: n.sql}\n  - {name: m, sql_file: none.sql}\n  - {name: o, sql_file: '/dev/zero'}\n"
    )
    found = checked(tmp_path, text)
    assert [(f.code, f.line) for f in found.faults] == [("sql-aggregate", 10), ("sql-file", 11), ("sql-file", 12)]
    assert "n.sql, line 2:" in found.faults[0].what
    assert "not a regular file" in found.faults[2].what


def test_remarks_anywhere_are_no_trouble(tmp_path: Path) -> None:
    text = base().replace("sinks:", "sinks: #|\n\n  # more\n").replace("    topics", "# at the edge\n\n    topics")
    assert checked(tmp_path, text).faults == ()


# --- one fault each -----------------------------------------------------------------------------------------------

ID = "sql: SELECT id FROM source"
NN = "not_null: true, action: drop"
D = "  - {name: d, type: parquet, url: out/d}\n"
PG = "url: 'postgresql://h/d', table: t"
FAULTY = [
    ("unknown-key", base(pipeline="pipelin")),
    ("unknown-node", base(sink="  - {name: d, type: parquet, url: out/d, input: nowhere}\n")),
    ("cycle", base(f"transforms:\n  - {{name: a, input: b, {ID}}}\n  - {{name: b, input: a, {ID}}}\n")),
    ("cycle", base("transforms:\n  - {name: a, input: a, unnest: tags}\n")),
    ("duplicate-name", base("transforms:\n  - {name: records, sql: SELECT id FROM source}\n")),
    ("duplicate-name", base("transforms:\n" + "  - {name: a, sql: SELECT id FROM source}\n" * 2)),
    ("transform-kind", base("transforms:\n  - {name: a, sql: SELECT id FROM source, unnest: tags}\n")),
    ("transform-kind", base("transforms:\n  - {name: a}\n")),
    ("unknown-column", base("transforms:\n  - {name: a, unnest: tag}\n")),
    ("sql-unplanned", base("transforms:\n  - {name: a, unnest: name}\n")),
    ("sql-unplanned", base("transforms:\n  - {name: a, sql: SELECT no_such_function(id) AS x FROM source}\n")),
    ("sql-unplanned", base("transforms:\n  - {name: a, sql: \"SELECT date_trunc('dy', at) AS d FROM source\"}\n")),
    ("rule-sql", base("quality: {rules: [{id: r, sql: \"date_trunc('dy', at) > at\", action: drop}]}\n")),
    ("metadata-prefix-collision", base(**{"id: int64": "_twg_id: int64"})),
    ("metadata-prefix-collision", base("transforms:\n  - {name: a, sql: SELECT id AS _twg_mine FROM source}\n")),
    ("schema-type", base(**{"id: int64": "id: int46"})),
    ("schema-missing", base(**{f", schema: {COLUMNS}": ""})),
    ("avro-schema-missing", base(**{CODEC: "type: avro"})),
    ("avro-registry-missing", base(**{CODEC: "type: avro, schema_file: s.avsc"})),
    ("codec-not-for-format", base(**{CODEC: "type: arrow"})),
    ("key-not-for-type", base(**{"codec: {type: json": "codec: {delimiter: ';', type: json"})),
    ("codec-cannot", base(**{"codec: {type: json": "codec: {type: csv"})),
    ("bad-value", base(**{f"codec: {{{CODEC}}}": "codec: {type: csv, delimiter: ';;', schema: {id: int64}}"})),
    ("bad-value", base(**{"topics: [t]": "topics: ['a b']"})),
    ("bad-regex", base(**{"topics: [t]": "topics: ['^(']"})),
    ("duplicate-topic", base(**{"topics: [t]": "topics: [t, t]"})),
    ("empty-list", base(**{"topics: [t]": "topics: []"})),
    ("missing-key", base(**{"    topics: [t]\n": ""})),
    ("missing-key", base(**{"    cluster_id: c\n": ""})),
    ("missing-key", base(**{"bootstrap.servers": "bootstrap_servers"})),
    ("bad-type", base(**{"cluster_id: c": "cluster_id: "})),
    ("option-not-yours", base(**{'"b:9092"': '"b:9092", auto.offset.reset: latest'})),
    ("option-not-yours", base(**{'"b:9092"': '"b:9092", group.id: g'})),
    ("key-not-for-type", base(**{"topics: [t]": "topics: [t]\n    path: x.csv"})),
    ("bad-value", base(**{"topics: [t]": "topics: [t]\n    offset_reset: earlist"})),
    ("reference-not-here", base("transforms:\n  - {name: a, sql: \"SELECT '${env:X}' AS x FROM source\"}\n")),
    ("rule-kind", base("quality: {rules: [{id: r, column: id, action: drop}]}\n")),
    ("rule-kind", base("quality: {rules: [{id: r, column: id, action: drop, not_null: true, min: 3}]}\n")),
    ("rule-kind", base("quality: {rules: [{id: r, column: id, action: drop, not_null: false}]}\n")),
    ("missing-key", base("quality: {rules: [{id: r, action: drop, not_null: true}]}\n")),
    ("missing-key", base("quality: {rules: [{id: r, column: id, not_null: true}]}\n")),
    ("bad-regex", base("quality: {rules: [{id: r, column: name, regex: '(', action: drop}]}\n")),
    ("empty-list", base("quality: {rules: [{id: r, column: name, accepted: [], action: drop}]}\n")),
    ("bad-type", base("quality: {rules: [{id: r, column: name, accepted: [1, a], action: drop}]}\n")),
    ("bad-value", base("quality: {rules: [{id: r, column: id, min: 5, max: 4, action: drop}]}\n")),
    ("bad-type", base("quality: {rules: [{id: r, column: id, min: 5, max: a, action: drop}]}\n")),
    ("bad-type", base("quality: {rules: [{id: r, column: id, min: .nan, action: drop}]}\n")),
    ("rule-type", base("quality: {rules: [{id: r, column: name, min: 5, action: drop}]}\n")),
    ("rule-type", base("quality: {rules: [{id: r, column: at, min: yesterday, action: drop}]}\n")),
    ("rule-type", base("quality: {rules: [{id: r, column: id, regex: a, action: drop}]}\n")),
    ("rule-type", base("quality: {rules: [{id: r, column: id, accepted: [a], action: drop}]}\n")),
    ("rule-type", base("quality: {rules: [{id: r, column: id, accepted: [99999999999999999999999999], action: drop}]}\n")),
    ("unknown-column", base("quality: {rules: [{id: r, column: nam, not_null: true, action: drop}]}\n")),
    ("unknown-column", base("quality: {rules: [{id: r, sql: idd > 3, action: drop}]}\n")),
    ("rule-sql", base("quality: {rules: [{id: r, sql: id + 1, action: drop}]}\n")),
    ("sql-aggregate", base("quality: {rules: [{id: r, sql: id > avg(id), action: drop}]}\n")),
    ("unknown-node", base("quality: {rules: [{id: r, input: x, column: id, not_null: true, action: drop}]}\n")),
    ("duplicate-name", base(f"quality: {{rules: [{{id: r, column: id, {NN}}}, {{id: r, column: name, {NN}}}]}}\n")),
    ("verdict-without-sink", base("quality: {rules: [{id: r, column: id, not_null: true, action: dlq}]}\n",
                                  **{", role: dlq,": ", input: records, on_failure: hold,"})),
    ("primary-raw-not-durable", base(**{"url: out/raw": "url: out/raw, durable: false"})),
    ("primary-raw-isolated", base(**{"url: out/raw": "url: out/raw, on_failure: isolate"})),
    ("primary-raw-unsupported", base(**{"parquet, role: primary-raw, url: out/raw": f"postgres, role: primary-raw, {PG}"})),
    ("duplicate-role", base(sink="  - {name: raw2, type: parquet, role: primary-raw, url: out/raw2}\n")),
    ("duplicate-role", base(sink="  - {name: r2, type: parquet, role: dlq, url: out/r2}\n")),
    ("isolate-without-primary-raw", base(**{"role: primary-raw": "on_failure: isolate"})),
    ("second-sink-without-recovery", base(sink=D + D.replace(" d,", " e,").replace("/d", "/e"))),
    ("recovery-without-primary-raw", base("recovery: {enabled: true}\n", **{"role: primary-raw": "on_failure: hold"})),
    ("sinks-share-place", base(sink="  - {name: d, type: parquet, url: ./out//raw/}\n")),
    ("sinks-share-place", base("recovery: {enabled: true}\n", f"  - {{name: d, type: postgres, {PG}}}\n"
                               "  - {name: e, type: postgres, url: 'host=h dbname=d', table: public.t}\n")),
    ("coverage-colocated-with-non-raw-sink", base("coverage: {store: objects, url: out/aside}\n")),
    ("coverage-colocated-with-non-raw-sink", base("coverage: {store: objects, url: out/x/../aside/cov}\n")),
    ("coverage-colocated-with-non-raw-sink", base("coverage: {store: relational, url: 'postgres://localhost:5432/d'}\n",
     "  - {name: d, type: postgres, url: 'host=127.0.0.1 dbname=d', table: t}\n")),
    ("key-not-for-type", base("coverage: {url: out/cov}\n")),
    ("missing-key", base("coverage: {store: objects}\n")),
    ("bad-url", base("coverage: {store: relational, url: out/cov}\n")),
    ("bad-url", base(**{"url: out/raw": "url: 's4://bucket/raw'"})),
    ("bad-url", base(sink="  - {name: d, type: postgres, url: 'mysql://h/d', table: t}\n")),
    ("missing-key", base(sink="  - {name: d, type: postgres, url: 'postgresql://h/d'}\n")),
    ("bad-value", base(sink="  - {name: d, type: postgres, url: 'postgresql://h/d', table: a.b.c}\n")),
    ("missing-key", base(sink=f"  - {{name: d, type: postgres, {PG}, idempotency: key}}\n")),
    ("key-not-for-type", base(sink=f"  - {{name: d, type: postgres, {PG}, key: [id]}}\n")),
    ("unknown-column", base(sink=f"  - {{name: d, type: postgres, {PG}, idempotency: key, key: [idd]}}\n")),
    ("key-not-for-type", base(sink="  - {name: d, type: parquet, url: out/d, table: t}\n")),
    ("key-not-for-type", base(**{"role: dlq": "role: dlq, input: records"})),
    ("bad-value", base("flow: {memory_limit_bytes: 1MiB}\n")),
    ("bad-type", base("flow: {memory_limit_bytes: 1QB}\n")),
    ("bad-value", base(f"flow: {{memory_limit_bytes: {'9' * 400}GiB}}\n")),
    ("bad-type", base("observability: {http: '127.0.0.1'}\n")),
    ("bad-type", base("observability: {http: '127.0.0.1:99999'}\n")),
    ("bad-type", base("observability: {http: true}\n")),
    ("unknown-key", base(**{CODEC: "type: avro, registry: {url: 'http://r', options: {user: u}}"})),
    ("bad-url", base(**{CODEC: "type: avro, registry: {url: 'r:8081'}"})),
    ("merge-key", base("flow: &f {poll_wait_ms: 5}\nobservability: {<<: *f}\n")),
    ("bad-key", base("flow: {? [a, b] : 1}\n")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text"), FAULTY, ids=[f"{i}-{code}" for i, (code, _) in enumerate(FAULTY)])
def test_a_fault_is_refused_under_its_code_and_alone(tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / "s.avsc").write_text('"string"')
    found = checked(tmp_path, text)
    assert set(codes(found)) == {code}, found.faults
    for fault in found.faults:
        assert 0 < fault.line <= text.count("\n") + 1
        assert fault.what
        assert fault.remedy
    assert found.topology is None


def test_the_base_itself_is_fine(tmp_path: Path) -> None:
    found = checked(tmp_path, base(sink="  - {name: d, type: parquet, url: out/d}\n"))
    assert (found.faults, found.warnings) == ((), ())


def test_a_fault_of_a_node_is_not_told_again_for_its_readers(tmp_path: Path) -> None:
    text = base(
        "transforms:\n"
        "  - {name: a, sql: SELECT count(*) AS n FROM source}\n"
        "  - {name: b, input: a, sql: SELECT n FROM source}\n"
        "  - {name: c, sql: SELECT nmae FROM source}\n"
        "quality: {rules: [{id: r, input: b, column: zzz, not_null: true, action: drop}]}\n",
        "  - {name: d, type: parquet, url: out/d, input: a}\n",
    )
    found = checked(tmp_path, text)
    assert [(f.code, f.line) for f in found.faults] == [("sql-aggregate", 10), ("unknown-column", 12)]


def test_nodes_are_ordered_inputs_first_however_they_are_written(tmp_path: Path) -> None:
    text = base(
        "transforms:\n"
        "  - {name: c, input: b, sql: SELECT id FROM source}\n"
        "  - {name: b, input: a, sql: SELECT id FROM source}\n"
        "  - {name: a, sql: SELECT id FROM source}\n"
    )
    assert [n.name for n in topology(checked(tmp_path, text)).nodes] == ["a", "b", "c"]


def test_columns_are_checked_for_each_source_that_feeds_them(tmp_path: Path) -> None:
    second = (
        "  - {name: s2, type: files, cluster_id: c2, path: 'x/*.csv', codec: {type: csv, schema: {id: int64}}}\n"
        "transforms:\n  - {name: a, sql: 'SELECT id, name FROM source'}\n"
    )
    (fault,) = checked(tmp_path, base(second)).faults
    assert fault.code == "unknown-column"
    assert "source s2" in fault.what


# --- defaults -----------------------------------------------------------------------------------------------------


def test_defaults_follow_from_the_roles(tmp_path: Path) -> None:
    found = topology(checked(tmp_path, base(sink="  - {name: d, type: parquet, url: out/d}\n")))
    held = {s.name: s.on_failure for s in found.sinks}
    assert held == {"raw": OnFailure.HOLD, "rejects": OnFailure.HOLD, "aside": OnFailure.ISOLATE, "d": OnFailure.HOLD}
    assert (found.coverage.store, found.coverage.url) == ("objects", str(tmp_path / "out/raw"))
    assert (found.sources[0].group, found.prefix, found.http, found.drain_ms) == ("p", "_twg_", "127.0.0.1:0", 5_000)


def test_without_a_primary_raw_destinations_hold_and_coverage_lives_with_them(tmp_path: Path) -> None:
    text = base(
        sink=f"  - {{name: d, type: postgres, {PG}}}\n",
        **{"  - {name: raw, type: parquet, role: primary-raw, url: out/raw}\n": ""},
    )
    found = topology(checked(tmp_path, text))
    assert found.gating == {"rejects", "d"}
    assert (found.coverage.store, found.coverage.url) == ("relational", "postgresql://h/d")
    explicit = text.replace("sinks:", "coverage: {store: relational, url: 'postgres://h:5432/d'}\nsinks:")
    assert codes(checked(tmp_path, explicit)) == []


@pytest.mark.parametrize("url", ["out/raw", "out/raw/_coverage", "out/elsewhere"])
def test_coverage_may_live_in_the_primary_raw_or_in_a_place_of_its_own(tmp_path: Path, url: str) -> None:
    found = topology(checked(tmp_path, base(f"coverage: {{store: objects, url: {url}}}\n")))
    assert found.coverage.url == str(tmp_path / url)


@pytest.mark.parametrize(
    ("written", "expected"), [("64MiB", 64 << 20), ("'1.5 GiB'", 3 << 29), ("100000000", 10**8), ("100MB", 10**8)]
)
def test_sizes_have_units(tmp_path: Path, written: str, expected: int) -> None:
    found = topology(checked(tmp_path, base(f"flow: {{memory_limit_bytes: {written}}}\n")))
    assert found.flow.memory_limit_bytes == expected


@pytest.mark.parametrize(("mark", "said"), [("\\t", "\t"), (";", ";"), (" ", " ")])
def test_a_blank_may_separate_csv_fields(tmp_path: Path, mark: str, said: str) -> None:
    text = base(**{f"codec: {{{CODEC}}}":
                   f'codec: {{type: csv, delimiter: "{mark}", quote: "", schema: {{id: int64}}}}'})  # fmt: skip
    codec = topology(checked(tmp_path, text)).sources[0].codec
    assert (codec.delimiter, codec.quote) == (said, "")


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("a/*.csv", "csv"),
        ("a.ndjson.gz", "ndjson"),
        ("s3://b/**/*.jsonl.zst", "ndjson"),
        ("x.tsv", "csv"),
        ("x.parquet", "parquet"),
    ],
)
def test_the_format_of_files_is_told_by_their_ending(tmp_path: Path, path: str, form: str) -> None:
    codec = {"parquet": "", "csv": ", codec: {type: csv, schema: {id: int64}}"}.get(form, ", codec: {type: bytes}")
    text = f"""\
pipeline: {{name: p}}
sources: [{{name: s, type: files, cluster_id: c, path: '{path}'{codec}}}]
sinks: [{{name: raw, type: parquet, role: primary-raw, url: out}}]
"""
    assert topology(checked(tmp_path, text)).sources[0].format == form
    assert codes(checked(tmp_path, text.replace(path, "a/data"))) == ["format-unknown"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("no-dlq", base(**{"  - {name: rejects, type: parquet, role: dlq, url: out/rejects}\n": ""})),
        ("http-public", base("observability: {http: '0.0.0.0:8080'}\n")),
        ("http-public", base("observability: {http: '10.1.2.3:8080'}\n")),
        ("plain-secret", base(**{'"b:9092"': '"b:9092", sasl.password: hunter2'})),
        ("plain-secret", base(sink="  - {name: d, type: postgres, url: 'postgresql://u:hunter2@h/d', table: t}\n")),
        ("plain-secret", base(sink="  - {name: d, type: postgres, url: 'host=h password=hunter2', table: t}\n")),
        ("secret-missing", base(sink="  - {name: d, type: postgres, url: '${env:NO_SUCH_VARIABLE}', table: t}\n")),
    ],
)
def test_what_is_allowed_but_worth_saying_is_a_warning(tmp_path: Path, code: str, text: str) -> None:
    found = checked(tmp_path, text)
    assert found.faults == ()
    assert [w.code for w in found.warnings] == [code]
    assert found.warnings[0].line > 0
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:8080", "'[::1]:0'", "127.9.9.9:1"])
def test_loopback_is_no_cause_for_a_warning(tmp_path: Path, bind: str) -> None:
    assert checked(tmp_path, base(f"observability: {{http: {bind}}}\n")).warnings == ()


# --- places of stores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgresql://u:p@localhost/d", "postgres://127.0.0.1:5432/d", True),
        ("postgresql://u@h/d?sslmode=require", "host=H dbname=d user=x", True),
        ("postgresql:///d?host=/run/a&port=1", "postgresql:///d?host=/run/b&port=1", False),
        ("postgresql:///d?host=/var/run/postgresql", "host=LOCALHOST. dbname=d", True),
        ("postgresql://db.example./d", "host=DB.example dbname=d", True),
        ("postgresql://h/d?port=1", "postgresql://h:1/d", True),
        ("postgresql://u@h", "postgresql://h/u", True),
        ("postgresql://h/d", "postgresql://h/e", False),
        ("s3://b/raw/", "s3://B/raw", True),
        ("s3://b/raw", "gs://b/raw", False),
        ("/a/b/../c", "file:///a/c", True),
    ],
)
def test_two_spellings_of_one_store_are_one_place(one: str, other: str, same: bool) -> None:
    assert same_place(one, other) is same
    assert same_place(other, one) is same


def test_a_folder_is_within_its_parent_and_not_within_its_neighbour() -> None:
    assert within("s3://b/raw", "s3://b/raw/x")
    assert not within("s3://b/raw", "s3://b/raws")
    assert not within("s3://b/raw/x", "s3://b/raw")


# --- secrets ------------------------------------------------------------------------------------------------------

SECRET = "tr0ub4dor&3"
WITH_SECRETS = base(
    sink="  - {name: d, type: postgres, url: '${file:dsn}', table: t}\n",
    **{'"b:9092"': '"${env:T_HOST}:${env:T_PORT}", sasl.password: "${env:T_SECRET}"'},
)


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T_HOST", "broker")
    monkeypatch.setenv("T_PORT", "9092")
    monkeypatch.setenv("T_SECRET", SECRET)
    (tmp_path / "dsn").write_text(f"postgresql://u:{SECRET}@h/d\n")
    return tmp_path


def test_references_are_resolved_and_never_shown(secrets: Path) -> None:
    found = checked(secrets, WITH_SECRETS, strict=True)
    made = topology(found)
    assert made.sources[0].options == {"bootstrap.servers": "broker:9092", "sasl.password": SECRET}
    assert made.sinks[-1].url == f"postgresql://u:{SECRET}@h/d"
    assert found.warnings == ()
    assert SECRET not in repr(made)


def test_every_missing_reference_is_named_two_in_one_text_too(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("T_HOST", "T_PORT", "T_SECRET"):
        monkeypatch.delenv(name)
    (secrets / "dsn").unlink()
    strict = checked(secrets, WITH_SECRETS, strict=True)
    assert strict.topology is None
    told = " ".join(f.what for f in strict.faults)
    assert set(codes(strict)) == {"secret-missing"}
    assert all(name in told for name in ("T_HOST", "T_PORT", "T_SECRET", "dsn"))
    lenient = checked(secrets, WITH_SECRETS)
    assert (lenient.faults, {w.code for w in lenient.warnings}) == ((), {"secret-missing"})
    assert {w.what for w in lenient.warnings} == {f.what for f in strict.faults}


def test_a_reference_that_is_none_is_refused_even_leniently(tmp_path: Path) -> None:
    assert codes(checked(tmp_path, base(**{"url: out/raw": "url: '${ENV:X}'"}))) == ["secret-missing"]


@pytest.mark.parametrize("name", ["no/such", "a\0b", ".", "/dev/zero", "big", "binary"])
def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "big").write_bytes(b"x" * 70_000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(LookupError, match="secret file"):
        Secrets(tmp_path).resolved(f"${{file:{name}}}")


def test_a_resolved_value_is_not_looked_into_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_SECRET", "${env:PATH}")
    assert Secrets(tmp_path).resolved("a ${env:T_SECRET}") == "a ${env:PATH}"


@pytest.mark.parametrize(
    "text",
    [
        base(**{'{bootstrap.servers: "b:9092"}': SECRET}),
        base(**{'"b:9092"': f'"b:9092", sasl.password: [{SECRET}]'}),
        base(**{"url: out/raw": f"url: [{SECRET}]"}),
        base(**{"url: out/raw": f"url: 's9://k:{SECRET}@h/d'"}),
        base(sink=f"  - {{name: d, type: postgres, url: 'pq://u:{SECRET}@h/d', table: t}}\n"),
        base(f"coverage: {{store: relational, url: 'u:{SECRET}@h'}}\n"),
        base(**{"url: out/raw": f"url: out/raw, options: '{SECRET}'"}),
    ],
)
def test_a_fault_near_a_secret_does_not_show_it(tmp_path: Path, text: str) -> None:
    found = checked(tmp_path, text)
    assert found.faults
    assert SECRET not in repr(found)


# --- files that are no configuration ------------------------------------------------------------------------------

HOSTILE: Mapping[str, tuple[str, bytes]] = {
    "binary": ("p.yaml", bytes(range(256)) * 100),
    "zeros": ("p.yaml", b"\0" * 1000),
    "utf-16": ("p.yaml", "pipeline: {}".encode("utf-16")),
    "empty": ("p.yaml", b""),
    "a scalar": ("p.yaml", b"hello"),
    "a list": ("p.yaml", b"- a\n- b\n"),
    "two documents": ("p.yaml", b"a: 1\n---\nb: 2\n"),
    "a tab": ("p.yaml", b"a:\n\tb: 1\n"),
    "unclosed": ("p.yaml", b"a: [1, 2\nb: 3\n"),
    "ten megabytes": ("p.yaml", b"a: " + b"x" * (10 << 20)),
    "deep flow": ("p.yaml", b"[" * 100_000),
    "deep block": ("p.yaml", b"- " * 100_000 + b"1"),
    "wide": ("p.yaml", b"[" + b"1," * 200_000 + b"1]"),
    "aliases": ("p.yaml", b"a: &a [1,1,1,1,1,1,1,1]\n" + b"".join(
        b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 8)) for i in range(12))),
    "itself": ("p.yaml", b"a: &a [*a]\n"),
    "unknown alias": ("p.yaml", b"a: *b\n"),
    "a tag": ("p.yaml", b"!!python/object/apply:os.system ['true']\n"),
    "huge int": ("p.yaml", b"drain_ms: 0x" + b"f" * 10_000 + b"\n"),
    "json, unclosed": ("p.json", b'{"a": [1,'),
    "json, deep": ("p.json", b"[" * 100_000),
    "json, huge int": ("p.json", b'{"drain_ms": ' + b"9" * 5_000 + b"}"),
    "toml, unclosed": ("p.toml", b"a = [1,"),
    "toml, deep": ("p.toml", b"a=" + b"[" * 100_000),
    "toml, dots": ("p.toml", b".".join([b"a"] * 100_000) + b"=1"),
    "toml, huge int": ("p.toml", b"drain_ms = 0x" + b"f" * 10_000),
    "toml, twice": ("p.toml", b"a = 1\na = 2\n"),
    "no ending": ("p.conf", b"a: 1"),
    "many rules": ("p.json", json.dumps({"quality": {"rules": [{"id": f"r{i}"} for i in range(4_000)]}}).encode()),
    "long names": ("p.yaml", b"? " + b"k" * 100_000 + b"\n: 1\n"),
    "long value": ("p.yaml", b"pipeline: {name: '" + b"k" * 500_000 + b"'}\n"),
    "many passwords": ("p.yaml", b"coverage: {url: '" + b"://x:" * 100_000 + b"'}\n"),
    "deep sql": ("p.yaml", b"transforms: [{name: a, sql: 'SELECT " + b"(" * 5_000 + b"1" + b")" * 5_000 + b" FROM source'}]\n"),
    "long sql": ("p.yaml", b"transforms: [{name: a, sql: 'SELECT " + b"1+" * 9_000 + b"1 AS x FROM source'}]\n"),
}  # fmt: skip


UNENDING = {
    "ten megabytes": "config-too-large",
    **dict.fromkeys(
        ("deep flow", "deep block", "wide", "aliases", "itself", "json, deep", "toml, deep", "toml, dots"), "config-too-deep"
    ),
}


@pytest.mark.parametrize("how", list(HOSTILE))
def test_a_hostile_file_is_refused_with_a_place(tmp_path: Path, how: str) -> None:
    name, body = HOSTILE[how]
    path = tmp_path / name
    path.write_bytes(body)
    found = judged_file(path, strict=False)
    assert found.faults
    if how in UNENDING:
        assert codes(found) == [UNENDING[how]]  # given up early: read to the end, these take minutes, or all memory
    for fault in found.faults:
        assert fault.code
        assert len(fault.what) < 1_000
        assert 0 <= fault.line <= body.count(b"\n") + 1


@pytest.mark.parametrize(
    ("name", "body", "line"),
    [
        ("p.yaml", "a: 1\nb: [1,\nc: }\n", 3),
        ("p.yaml", "a:\n\tb: 1\n", 2),
        ("p.json", '{"a": 1,\n "b": }', 2),
        ("p.toml", "a = 1\nb = \n", 2),
        ("p.toml", "a = 1\nb = [\n1,\n", 3),
    ],
)
def test_a_syntax_error_is_one_fault_with_its_line(tmp_path: Path, name: str, body: str, line: int) -> None:
    assert [(f.code, f.line) for f in checked(tmp_path, body, name).faults] == [("config-syntax", line)]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "folder.yaml", "none.yaml"):
        assert codes(judged_file(tmp_path / name, strict=False)) == ["config-unreadable"]


# --- the three formats say the same -------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), TEXTS)
TREES = st.recursive(SCALARS, lambda t: st.one_of(st.lists(t, max_size=3), st.dictionaries(TEXTS, t, max_size=3)), max_leaves=8)


def toml_of(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ",\n ".join(map(toml_of, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_of(k)} = {toml_of(v)}" for k, v in value.items()) + "}"
    return str(value)


def places(value: Value) -> Iterator[tuple[int, int]]:
    yield value.mark.line, value.mark.column
    if isinstance(value.content, dict):
        for mark, inner in value.content.values():
            yield mark.line, mark.column
            yield from places(inner)
    elif isinstance(value.content, list):
        for inner in value.content:
            yield from places(inner)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(TEXTS, TREES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_json_and_toml_give_what_their_own_readers_give_with_places(
    tmp_path: Path, tree: dict[str, Any], indent: int | None, escaped: bool
) -> None:
    as_json = json.dumps(tree, indent=indent, ensure_ascii=escaped)
    as_toml = "\n# x = 1\n".join(f"{toml_of(k)} = {toml_of(v)}" for k, v in tree.items())
    for name, text in (("p.json", as_json), ("p.toml", as_toml)):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        contents = read(path)
        assert plain(contents.value) == tree
        lines = text.split("\n")
        for line, column in places(contents.value):
            assert 1 <= line <= len(lines)
            assert column == 1 or lines[line - 1][column - 1] not in " \t,:="


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["SELECT", "a", "'x y'", '"q"', "+", "é", "\\"]), min_size=1, max_size=9), st.data())
def test_a_place_within_a_text_leads_to_the_same_character(tmp_path: Path, words: list[str], data: st.DataObject) -> None:
    blanks = [data.draw(st.sampled_from([" ", "  ", "\n", "\n\n", "\n   "])) for _ in words]
    text = "".join(f"{w}{b}" for w, b in zip(words, blanks, strict=True)).strip()
    block = "k: |\n" + "".join(f"  {line}\n" for line in text.split("\n"))
    forms = {"p.json": json.dumps({"k": text}), "q.json": json.dumps({"k": text}, ensure_ascii=False), "p.yaml": block}
    if "'''" not in text:
        forms["p.toml"] = f"k = '''\n{text}'''"
    forms["q.toml"] = f'k = """{text}"""'.replace("\\", "\\\\").replace('"q"', '\\"q\\"')
    for name, body in forms.items():
        path = tmp_path / name
        path.write_text(body, encoding="utf-8")
        value = read(path).value.content["k"][1]
        assert value.content.rstrip("\n") == text
        assert value.inside is not None
        for number, line in enumerate(text.split("\n"), 1):
            for column, character in enumerate(line, 1):
                if character in "SaE+'x":
                    at = value.inside(number, column)
                    assert body.split("\n")[at.line - 1][at.column - 1] == character


# --- editors ------------------------------------------------------------------------------------------------------


def described(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in [*kind.get("properties", {}).values(), *([kind["items"]] if "items" in kind else [])]:
        yield from described(inner)


def test_the_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for kind in described(SCHEMA):
        if kind.get("type") == "object" and "properties" in kind:
            assert kind["additionalProperties"] is False
            assert all(inner.get("description") for inner in kind["properties"].values())


@pytest.mark.parametrize("example", EXAMPLE_FILES)
def test_examples_pass_the_check_and_the_schema(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROKERS", "DEMO_BROKERS", "REGISTRY", "KAFKA_PASSWORD", "POSTGRES", "DEMO_POSTGRES", "S3_KEY", "S3_SECRET"):
        monkeypatch.setenv(
            name,
            {"POSTGRES": "postgresql://h/d", "DEMO_POSTGRES": "postgresql://h/d", "REGISTRY": "http://r:8081"}.get(name, "x"),
        )
    found = judged_file(EXAMPLES / example, strict=True)
    assert found.faults == ()
    assert found.warnings == ()
    jsonschema.validate(plain(read(EXAMPLES / example).value), SCHEMA)
    remark = (EXAMPLES / example).read_text(encoding="utf-8")
    assert example.endswith(".json") or "# Environment:" in remark


def test_there_are_at_least_seven_examples() -> None:
    assert len(EXAMPLE_FILES) >= 7


def mutated(tree: Any, data: st.DataObject) -> Any:
    """The tree with one key removed, renamed, or one value replaced."""
    tree = json.loads(json.dumps(tree))
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    node, key = data.draw(st.sampled_from(spots))
    how = data.draw(st.sampled_from(["remove", "rename", "replace"]))
    if how == "replace" or isinstance(node, list):
        node[key] = data.draw(st.sampled_from([None, True, 0, -1, 7, 2.5, "", "x", "x y", [], {}, ["a"], {"a": "b"}]))
    elif how == "remove":
        del node[key]
    else:
        node[key + data.draw(st.sampled_from(["x", "_"]))] = node.pop(key)
    return tree


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(EXAMPLE_FILES), st.data())
def test_what_the_check_accepts_editors_accept_and_unknown_keys_fail_in_both(
    tmp_path: Path, example: str, data: st.DataObject
) -> None:
    tree = mutated(plain(read(EXAMPLES / example).value), data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree))
    found = judged_file(path, strict=False)
    errors = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(tree))
    if not found.faults:
        assert errors == []
    unknown = any(e.validator == "additionalProperties" and e.validator_value is False for e in errors)
    assert unknown == ("unknown-key" in codes(found))


def test_reading_alone_finds_what_has_the_wrong_shape() -> None:
    reader = Reader()
    assert reader.read(Value({}, reader.at("")), ROOT_SHAPE) == {}
    assert [f.code for f in reader.faults] == ["missing-key"] * 3


def test_refused_carries_its_faults_in_file_order() -> None:
    refused = Refused([Fault(3, 1, "b", "x", "y"), Fault(1, 9, "a", "x", "y")])
    assert [f.line for f in refused.faults] == [1, 3]


def test_roles_are_those_of_the_schema() -> None:
    roles = SCHEMA["properties"]["sinks"]["items"]["properties"]["role"]["enum"]
    assert set(roles) == {r.value for r in Role}


def test_the_largest_file_is_one_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"#" * BYTES_MAX)
    assert codes(judged_file(path, strict=False)) == ["missing-key"] * 3
    path.write_bytes(b"#" * (BYTES_MAX + 1))
    assert codes(judged_file(path, strict=False)) == ["config-too-large"]
