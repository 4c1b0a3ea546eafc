"""The index says what is so: every written row has a spec with a reason, and bugs that it must find."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from catalogue import plant_coverage, plant_durability
from catalogue.__main__ import WORLDS, counts, function, is_written, load, main, told
from catalogue.sabotage import INVARIANTS, PLANTS, REAL_ONLY, SPEC_ONLY, every_plant

HERE = Path(__file__).parent
ROWS, CASES = load()
SERVERS = {"kafka", "pulsar", "pg", "s3", "ice", "sh", "zb", "flight"}
CASES_OF = {"TC-01": 7, "TC-02": 7, "TC-03": 6, "TC-04": 7, "TC-05": 7, "TC-06": 9, "TC-07": 9, "TC-08": 8, "TC-09": 8}


def test_each_entry_is_named_once_and_promises_something() -> None:
    assert (len(ROWS), len(CASES)) == (117, 68)
    entries = ROWS + CASES
    assert len({entry["id"] for entry in entries}) == len({function(entry) for entry in entries}) == len(entries)
    promises = [entry["promise"] for entry in entries]
    assert len(set(promises)) == len(promises)
    assert all(promise.endswith(".") and promise.count(". ") == 0 for promise in promises)
    assert all(set(entry["needs"]) <= SERVERS for entry in entries)


def test_each_entry_has_a_status_in_each_world() -> None:
    for entry in ROWS + CASES:
        assert set(entry["status"]) == set(WORLDS), entry["id"]
        assert set(entry["status"].values()) <= {"written", "open"}, entry["id"]


def test_cases_are_all_there() -> None:
    assert {group: sum(case["group"] == group for case in CASES) for group in CASES_OF} == CASES_OF
    assert len({(case["group"], case["id"].partition("_")[0]) for case in CASES}) == len(CASES_OF)  # a group has one prefix


def test_what_is_written_has_a_spec() -> None:
    for entry in ROWS + CASES:
        module = HERE / entry["spec"]
        spec = getattr(import_module(f"catalogue.{module.stem}"), function(entry), None) if module.exists() else None
        assert (spec is not None) == is_written(entry), entry["id"]
        assert spec is None or (spec.__doc__ or "").strip(), entry["id"]


def test_what_is_written_has_a_planted_bug() -> None:
    assert all(row["sabotages"] for row in ROWS if is_written(row))
    assert all(set(row["sabotages"]) <= set(every_plant()) for row in ROWS)


def test_every_planted_bug_is_looked_for() -> None:
    """By the rows that name it, or by the simulator's search, which takes what neither set leaves to a spec."""
    of_invariants = {name for names in INVARIANTS.values() for name in names}
    assert len(every_plant()) == len(PLANTS) + len(plant_coverage.PLANTS) + len(plant_durability.PLANTS)  # each name once
    of_rows = {name for row in ROWS for name in row["sabotages"]}
    assert of_invariants | REAL_ONLY | SPEC_ONLY <= set(PLANTS)
    assert of_rows >= REAL_ONLY | SPEC_ONLY | (set(every_plant()) - set(PLANTS))


def test_counts_never_take_what_is_open_for_written() -> None:
    def entry(sim: str, real: str) -> dict[str, dict[str, str]]:
        return {"status": {"sim": sim, "real": real}}

    rows = [entry("open", "open"), entry("written", "open"), entry("open", "written"), entry("written", "written")]
    assert counts(rows, [entry("open", "open")]) == {
        "rows": {"total": 4, "sim": 2, "real": 2, "open": 1},
        "cases": {"total": 1, "sim": 0, "real": 0, "open": 1},
    }


def test_list_shows_each_entry_on_a_line_and_ends_with_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == told(ROWS, CASES)
    for entry in ROWS + CASES:
        shown = [cells for line in lines if (cells := [cell.strip() for cell in line.split("│")])[1:2] == [entry["id"]]]
        last = ", ".join(entry["sabotages"]) if "sabotages" in entry else entry["group"]
        assert [cells[2:-1] for cells in shown] == [[entry["spec"], *(entry["status"][world] for world in WORLDS), last]]


def test_list_is_readable_by_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": ROWS, "cases": CASES, "counts": counts(ROWS, CASES)}


@pytest.mark.parametrize("words", [[], ["lst"], ["list", "--jsn"]])
def test_a_wrong_command_line_is_told_how(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: python -m catalogue" in capsys.readouterr().err
