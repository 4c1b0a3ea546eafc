"""The index says what is so: every written row has a spec with a reason, and bugs that it must find."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

from catalogue.sabotage import PLANTS

HERE = Path(__file__).parent
ROWS = tomllib.loads((HERE / "index.toml").read_text(encoding="utf-8"))["row"]
SERVERS = {"kafka", "pulsar", "pg", "s3", "ice", "sh", "zb", "flight"}


def test_each_row_is_named_once_and_promises_something() -> None:
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids)) == 117
    promises = [row["promise"] for row in ROWS]
    assert len(set(promises)) == len(promises)
    assert all(promise.endswith(".") and promise.count(". ") == 0 for promise in promises)
    assert all(set(row["needs"]) <= SERVERS and row["status"] in ("written", "open") for row in ROWS)


def test_what_is_written_has_a_spec_and_a_planted_bug() -> None:
    for row in ROWS:
        module = HERE / row["spec"]
        spec = getattr(import_module(f"catalogue.{module.stem}"), f"test_{row['id']}", None) if module.exists() else None
        assert (spec is not None) == (row["status"] == "written"), row["id"]
        if spec is not None:
            assert (spec.__doc__ or "").strip(), row["id"]
            assert row["sabotages"], row["id"]
        assert set(row["sabotages"]) <= set(PLANTS), row["id"]


def test_every_planted_bug_is_somebody_s() -> None:
    assert set(PLANTS) == {name for row in ROWS for name in row["sabotages"]}
