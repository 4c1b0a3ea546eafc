"""The command line: what it prints, where, with which exit status; no traceback for a fault of configuration or connection."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from thalweg import __version__
from thalweg.__main__ import app, gaps_of, judged_file
from thalweg.core.coverage import Document, RangeSet
from thalweg.log import STRUCK, Veil, make_report, secrets_of
from thalweg.starter import PIPELINE

ENGINE = Path(__file__).parents[1]
SECRET = "tr0ub4dor&3"


def invoke(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error; inside this process."""
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def spawn(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program itself, as a user starts it."""
    given = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(ENGINE), **environment}
    return subprocess.run(
        [sys.executable, "-m", "thalweg", *words], cwd=cwd, env=given, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    status, _, _ = invoke("new", str(tmp_path / "s"))
    assert status == 0
    return tmp_path / "s"


# --- check --------------------------------------------------------------------------------------------------------


def test_check_of_a_sound_file_is_quiet_and_exits_0(starter: Path) -> None:
    file = starter / "pipeline.yaml"
    assert invoke("check", str(file)) == (0, f"{file}: fine\n", "")


def test_check_tells_every_fault_with_its_place_and_exits_78(starter: Path) -> None:
    file = starter / "pipeline.yaml"
    file.write_text(PIPELINE.replace("round(amount * 0.2, 2)", "sum(amount)").replace("http: false", "htp: false"))
    status, out, _ = invoke("check", str(file))
    lines = out.splitlines()
    assert status == 78
    assert [line.split(" ")[:3] for line in lines[:2]] == [
        [f"{file}:24:36:", "error", "[sql-aggregate]"],
        [f"{file}:38:3:", "error", "[unknown-key]"],
    ]
    assert lines[2] == f"{file}: 2 faults, 0 warnings"
    assert "Did you mean http?" in lines[1]


def test_check_for_machines(starter: Path) -> None:
    file = starter / "pipeline.yaml"
    status, out, _ = invoke("check", str(file), "--json")
    assert (status, json.loads(out)) == (0, {"file": str(file), "ok": True, "faults": [], "warnings": []})
    file.write_text(PIPELINE.replace("name: starter", "nam: starter").replace("http: false", "http: '0.0.0.0:80'"))
    status, out, _ = invoke("check", str(file), "--json")
    said = json.loads(out)
    assert (status, said["ok"], [f["code"] for f in said["faults"]]) == (78, False, ["unknown-key"])
    assert [w["code"] for w in said["warnings"]] == ["http-public"]
    assert set(said["faults"][0]) == {"line", "column", "code", "what", "remedy", "path"}
    assert said["faults"][0]["line"] == 6


def test_a_name_in_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text('"\\e[31mred\\u202e\\n": 1\n')
    status, out, _ = invoke("check", str(file))
    assert status == 78
    assert all(c.isprintable() or c == "\n" for c in out)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    for word in ("check", "run", "coverage"):
        status, out, err = invoke(word, str(tmp_path / "none.yaml"))
        assert status == 78
        assert (out + err).splitlines()[0].startswith(f"{tmp_path / 'none.yaml'}: error [config-unreadable]")


# --- new, run, coverage -------------------------------------------------------------------------------------------


def test_the_starter_runs_and_a_second_run_writes_nothing(starter: Path) -> None:
    first = spawn("run", "pipeline.yaml", "--log", "json", cwd=starter)
    assert first.returncode == 0, first.stderr
    events = [json.loads(line) for line in first.stderr.splitlines()]
    assert [e["event"] for e in events][-1] == "node.stopped"
    assert all(e["timestamp"].endswith("Z") for e in events)
    written = {p.relative_to(starter): p.stat().st_mtime_ns for p in starter.rglob("*.parquet")}
    assert {p.parts[1] for p in written} == {"raw", "orders", "rejects"}
    second = spawn("run", "pipeline.yaml", cwd=starter)
    assert second.returncode == 0, second.stderr
    assert "\x1b[" not in second.stderr
    assert {p.relative_to(starter): p.stat().st_mtime_ns for p in starter.rglob("*.parquet")} == written

    told = spawn("coverage", "pipeline.yaml", cwd=starter)
    assert told.returncode == 0, told.stderr
    size = (starter / "data" / "orders.ndjson").stat().st_size
    cells = [line.split("\t") for line in told.stdout.splitlines()]
    assert [(sink, covered, gaps) for _, sink, covered, gaps in cells] == [
        (sink, f"[0,{size})", "none") for sink in ("orders", "raw", "rejects")
    ]
    machine = json.loads(spawn("coverage", "pipeline.yaml", "--json", cwd=starter).stdout)
    assert [(r["sink"], r["covered"], r["gaps"]) for r in machine] == [
        (sink, [[0, size]], []) for sink in ("orders", "raw", "rejects")
    ]


def test_nothing_covered_yet_is_said(starter: Path) -> None:
    assert invoke("coverage", str(starter / "pipeline.yaml"))[:2] == (0, "nothing is covered yet\n")


def test_new_leaves_what_is_there_alone(starter: Path, tmp_path: Path) -> None:
    before = (starter / "pipeline.yaml").read_text()
    (starter / "pipeline.yaml").write_text(before + "# mine\n")
    status, _, err = invoke("new", str(starter))
    assert (status, "is not empty" in err) == (64, True)
    assert (starter / "pipeline.yaml").read_text().endswith("# mine\n")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        status, _, err = invoke("new", str(folder))
        assert (status, err.count("\n"), err[:7]) == (64, 1, "error: ")


def test_run_refuses_what_check_refuses_and_missing_secrets_too(starter: Path) -> None:
    file = starter / "pipeline.yaml"
    file.write_text(PIPELINE.replace("cluster_id: starter ", "cluster_id: ${env:T_NOT_SET}"))
    assert invoke("check", str(file))[0] == 0
    status, out, err = invoke("run", str(file))
    assert (status, out) == (78, "")
    assert "[secret-missing]" in err
    assert "T_NOT_SET" in err


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("{name: orders, type: parquet,", "{name: orders, type: postgres, table: t,", 69, "refused"),
        ("path: data/", "path: nowhere/", 70, "no file matches"),
        ("raw, url: out/raw", 'raw, options: {rgion: x}, url: "s3://b"', 70, "rgion"),
        ("http: false", 'http: "127.0.0.1:99"', 70, "cannot be served"),
    ],
)
def test_what_cannot_be_reached_or_had_is_said_without_a_traceback(
    starter: Path, old: str, new: str, status: int, said: str
) -> None:
    text = PIPELINE.replace(old, new).replace("url: out/orders", "url: '${env:T_DSN}'" if status == 69 else "url: out/orders")
    if "99" in new and os.geteuid() == 0:
        text = text.replace("127.0.0.1:99", "203.0.113.7:99")  # root may bind any port, but no foreign address
    (starter / "pipeline.yaml").write_text(text)
    dsn = f"postgresql://u:{SECRET.replace('&', '%26')}@127.0.0.1:9/d"
    done = spawn("run", "pipeline.yaml", cwd=starter, T_DSN=dsn)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr
    assert "tr0ub4dor" not in done.stderr


def test_schema_and_version() -> None:
    status, out, _ = invoke("schema")
    assert status == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(out))
    assert invoke("--version")[:2] == (0, f"{__version__}\n")
    assert invoke("run", "x.yaml", "--log", "xml")[0] == 2


# --- gaps ---------------------------------------------------------------------------------------------------------


def test_gaps_are_told_with_their_reason_up_to_the_furthest_sink() -> None:
    document = Document(
        "s/t/0@x",
        base=10,
        sinks={"raw": RangeSet([(10, 20), (30, 50)]), "pg": RangeSet([(10, 15), (40, 45)])},
        explained={"retention": RangeSet([(20, 30)])},
    )
    pg, raw = gaps_of(document)
    assert (raw["sink"], raw["covered"]) == ("raw", [[10, 20], [30, 50]])
    assert raw["gaps"] == [{"start": 20, "stop": 30, "reason": "retention"}]
    assert pg["gaps"] == [
        {"start": 15, "stop": 20, "reason": None},
        {"start": 20, "stop": 30, "reason": "retention"},
        {"start": 30, "stop": 40, "reason": None},
        {"start": 45, "stop": 50, "reason": None},
    ]


def test_gaps_are_not_told_below_the_start_nor_without_any_range() -> None:
    assert gaps_of(Document("p", base=5, sinks={"raw": RangeSet()})) == [
        {"partition": "p", "sink": "raw", "covered": [], "gaps": []}
    ]
    assert gaps_of(Document("p")) == []


def test_a_sink_that_nothing_ever_reached_is_all_gap() -> None:
    document = Document("p", base=10, sinks={"raw": RangeSet([(10, 20)])})
    pg, raw = gaps_of(document, ["raw", "pg"])
    assert (pg["sink"], pg["covered"], pg["gaps"]) == ("pg", [], [{"start": 10, "stop": 20, "reason": None}])
    assert (raw["sink"], raw["gaps"]) == ("raw", [])


# --- events -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_struck_out_of_events(form: str) -> None:
    out = io.StringIO()
    report = make_report(form, Veil([SECRET, "key"]), out)
    report(
        "sink.retry", error=f"login as u:{SECRET} refused", deep={"list": [f"x{SECRET}"], SECRET: 1}, why=ValueError(SECRET), n=3
    )
    text = out.getvalue()
    assert SECRET not in text
    assert text.count(STRUCK) >= 4
    assert "sink.retry" in text
    assert text.count("\n") == 1
    if form == "json":
        assert json.loads(text)["n"] == 3


def test_without_secrets_events_are_as_they_are() -> None:
    out = io.StringIO()
    make_report("json", None, out)("a", b=[1, "x"], c=None)
    said = json.loads(out.getvalue())
    assert (said["event"], said["b"], said["c"]) == ("a", [1, "x"], None)


def test_secrets_of_a_pipeline_are_all_that_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_DSN", "host=h password='tr0ub 4dor' dbname=d")
    (tmp_path / "p.yaml").write_text(
        """\
pipeline: {name: p}
sources:
  - name: s
    type: kafka
    cluster_id: c
    topics: [t]
    options: {bootstrap.servers: broker, sasl.password: one11, sasl.username: user, ssl.key.password: two22}
    codec: {type: avro, registry: {url: "http://u:three33@r:8081", options: {password: four44, token: five55}}}
sinks:
  - {name: raw, type: parquet, role: primary-raw, url: s3://b/raw, options: {access_key_id: open, secret_access_key: six66}}
  - {name: d, type: postgres, url: "postgresql://u:seven%2677@h/d", table: t}
  - {name: e, type: postgres, role: dlq, url: "${env:T_DSN}", table: dlq}
"""
    )
    found = judged_file(tmp_path / "p.yaml", strict=True).topology
    assert found is not None
    told = ["one11", "two22", "three33", "four44", "five55", "six66", "seven%2677", "seven&77", "tr0ub 4dor"]
    assert secrets_of(found) == frozenset(told)
