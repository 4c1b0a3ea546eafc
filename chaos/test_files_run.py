"""Files into a lake by the engine as a process, killed at named instants: each record once in the end, the bad one aside."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

CONFIGURATION = {
    "pipeline": {"name": "prices"},
    "sources": [
        {
            "name": "prices",
            "type": "files",
            "cluster_id": "drop",
            "path": "in/*.csv*",
            "format": "csv",
            "codec": {"type": "csv", "schema": {"sku": "string", "n": "int64"}},
        }
    ],
    "sinks": [
        {"name": "raw", "type": "parquet", "role": "primary-raw", "url": "out/raw", "rows_max": 20_000, "age_ms_max": 100},
        {"name": "rows", "type": "parquet", "on_failure": "hold", "url": "out/rows", "rows_max": 15_000, "age_ms_max": 100},
        {"name": "rejects", "type": "parquet", "role": "dlq", "url": "out/rejects"},
    ],
    "coverage": {"interval_ms": 20},
}
RECORDS = 120_000


def run(folder: Path, kill: str = "") -> int:
    environment = os.environ | {"THALWEG_PROBE_KILL": kill}
    command = [sys.executable, "-m", "thalweg", "run", "pipeline.json"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120).returncode


def column(folder: Path, name: str) -> list[object]:
    """Of every row of every object under `folder`, once a record id."""
    seen: dict[object, object] = {}
    for path in sorted(folder.glob("**/*.parquet")):
        if "_coverage" not in path.parts:
            table = pq.read_table(path)
            seen.update(zip(table.column("_twg_record_id").to_pylist(), table.column(name).to_pylist(), strict=True))
    return list(seen.values())


@pytest.mark.parametrize(
    "kills", [("raw.sent", "raw.durable#2"), ("coverage.checkpointed#2", "raw.durable"), ("sink.durable#3", "dlq.durable")]
)
def test_killed_and_started_again_each_record_arrives(tmp_path: Path, kills: tuple[str, ...]) -> None:
    (tmp_path / "in").mkdir()
    lines = [b'"a ""%d""\nb",%d' % (n, n) for n in range(RECORDS)]
    lines[777] = b"bad,x"
    half = RECORDS // 2
    (tmp_path / "in/1.csv").write_bytes(b"\n".join([b"sku,n", *lines[:half]]))
    (tmp_path / "in/2.csv.gz").write_bytes(
        gzip.compress(b"\r\n".join([b"n,sku", *(b"%d,two" % n for n in range(half, RECORDS))]), 1)
    )
    (tmp_path / "pipeline.json").write_text(json.dumps(CONFIGURATION))
    for kill in kills:
        assert run(tmp_path, kill) == -signal.SIGKILL  # it was reached
    assert run(tmp_path) == 0
    out = tmp_path / "out"
    assert sorted(n for n in column(out / "rows", "n") if isinstance(n, int)) == [n for n in range(RECORDS) if n != 777]
    assert sorted(str(p) for p in column(out / "raw", "_twg_payload")) == sorted(
        str(p) for p in [*lines[:half], *(b"%d,two" % n for n in range(half, RECORDS))]
    )
    rejected = column(out / "rejects", "_twg_record_id")
    assert len(rejected) == 1
    written = {path: path.stat().st_mtime_ns for path in out.glob("**/*.parquet")}
    rows = sum(pq.read_metadata(path).num_rows for path in (out / "raw").glob("**/*.parquet"))
    assert rows == RECORDS  # what a crash left behind was adopted, not written again
    assert run(tmp_path) == 0  # and once all is done, nothing is done again
    assert {path: path.stat().st_mtime_ns for path in out.glob("**/*.parquet")} == written
