"""Rows about durability and whole pipelines: red under each bug that is planted for them, green without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalogue import plant_durability, sabotage, test_durability, test_pipelines
from sim import fence
from sim.spec import SimWorld

NEVER_LETS_GO = ("quarantine_never_gates_source_ack", "isolated-sinks-never-let-go")
"""A bug that the engine had until the row found it; the index does not name it."""

PLANTS = {
    **sabotage.PLANTS,
    **plant_durability.PLANTS,
    NEVER_LETS_GO[1]: plant_durability.isolated_sinks_never_let_go,
}
PLANTED = [*((row, plant) for row, plants in plant_durability.ROWS.items() for plant in plants), NEVER_LETS_GO]


@pytest.fixture(scope="module", autouse=True)
def fenced() -> None:
    fence.install()


def spec_of(row: str) -> Callable[..., None]:
    found: Callable[..., None] | None = getattr(test_durability, f"test_{row}", None) or getattr(test_pipelines, f"test_{row}")
    assert found is not None
    return found


def cases_of(spec: Callable[..., None]) -> list[dict[str, Any]]:
    """What its `parametrize`, if it has one, gives it: of one argument, as specs have it."""
    marks = [m for m in getattr(spec, "pytestmark", []) if m.name == "parametrize"]
    return [{m.args[0]: value} for m in marks for value in m.args[1]] or [{}]


def judged(row: str, seed: int, tmp_path: Path) -> None:
    """Run each case of the spec in a world of its own; raises what it raises."""
    spec = spec_of(row)
    wanted = inspect.signature(spec).parameters
    for values in cases_of(spec):
        world = SimWorld("spec", seed=seed)
        try:
            spec(world=world, **values, **({"tmp_path": tmp_path} if "tmp_path" in wanted else {}))
            world.judge()
        finally:
            world.close()


def test_every_bug_of_these_rows_is_named_by_one() -> None:
    assert set(plant_durability.PLANTS) <= {plant for _, plant in PLANTED}
    assert not set(plant_durability.PLANTS) & set(sabotage.PLANTS)


@pytest.mark.parametrize("row", plant_durability.ROWS)
def test_row_is_green_without_a_bug(row: str, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        judged(row, seed, tmp_path)


@pytest.mark.parametrize(("row", "plant"), PLANTED)
def test_planted_bug_turns_the_row_red(row: str, plant: str, tmp_path: Path) -> None:
    found: list[str] = []
    for seed in range(1, 11):
        with PLANTS[plant]():
            try:
                judged(row, seed, tmp_path)
            except (AssertionError, ExceptionGroup) as error:
                found.append(f"seed {seed}: {error}")
                break
    assert found, f"{row} stays green under {plant} in ten worlds"
    print(row, plant, found[0][:300])
