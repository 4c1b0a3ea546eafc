"""Each planted bug that a row names turns that row red in the simulator, and without it the row is green.

A row that stays green under its own bug proves nothing when it is green without it.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from catalogue.sabotage import REAL_ONLY, every_plant
from sim import fence
from sim.spec import SimWorld

INDEX = tomllib.loads((Path(__file__).parent.parent.parent / "catalogue" / "index.toml").read_text(encoding="utf-8"))
ROWS = {row["id"]: row for row in INDEX["row"] if row["status"]["sim"] == "written"}
PLANTS = every_plant()
PLANTED = [(row, plant) for row, entry in ROWS.items() for plant in entry["sabotages"] if plant not in REAL_ONLY]
SEEDS = range(1, 11)


@pytest.fixture(scope="module", autouse=True)
def fenced() -> None:
    fence.install()


def spec_of(row: str) -> Callable[..., None]:
    found: Callable[..., None] = getattr(import_module(f"catalogue.{Path(ROWS[row]['spec']).stem}"), f"test_{row}")
    return found


def judged(row: str, seed: int, tmp_path: Path) -> None:
    """Run the spec in a world of its own; raises what it raises."""
    spec = spec_of(row)
    wanted = inspect.signature(spec).parameters
    for values in cases_of(spec):
        given: dict[str, Any] = {**values, **({"tmp_path": tmp_path} if "tmp_path" in wanted else {})}
        if "world" not in wanted:
            spec(**given)
            continue
        world = SimWorld("spec", seed=seed)
        try:
            spec(world=world, **given)
            world.judge()
        finally:
            world.close()


def cases_of(spec: Callable[..., None]) -> list[dict[str, Any]]:
    """What its `parametrize` gives it: of one argument, as specs have it."""
    marks = [m for m in getattr(spec, "pytestmark", []) if m.name == "parametrize"]
    assert len(marks) <= 1
    return [{m.args[0]: value} for m in marks for value in m.args[1]] or [{}]


def test_every_row_of_the_simulator_has_a_bug_that_runs_there() -> None:
    assert {row for row, _ in PLANTED} == set(ROWS)


@pytest.mark.parametrize(("row", "plant"), PLANTED, ids=[f"{row}-{plant}" for row, plant in PLANTED])
def test_planted_bug_turns_the_row_red(row: str, plant: str, tmp_path: Path) -> None:
    found: list[str] = []
    for seed in SEEDS:
        with PLANTS[plant]():
            try:
                judged(row, seed, tmp_path)
            except (AssertionError, ExceptionGroup) as error:
                found.append(str(error))
                break
    assert found, f"{row} stays green under {plant} in {len(SEEDS)} worlds"
