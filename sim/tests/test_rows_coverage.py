"""Rows about coverage and locators: red under each bug that is planted for them, green without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalogue import plant_coverage, sabotage, test_coverage, test_locator
from sim import fence
from sim.spec import SimWorld

PLANTS = {**sabotage.PLANTS, **plant_coverage.PLANTS}
PLANTED = [(row, plant) for row, plants in plant_coverage.ROWS.items() for plant in plants]


@pytest.fixture(scope="module", autouse=True)
def fenced() -> None:
    fence.install()


def spec_of(row: str) -> Callable[..., None]:
    found: Callable[..., None] | None = getattr(test_coverage, f"test_{row}", None) or getattr(test_locator, f"test_{row}")
    assert found is not None
    return found


def judged(row: str, seed: int, tmp_path: Path) -> None:
    """Run the spec, in a world of its own where it takes one; raises what it raises."""
    spec = spec_of(row)
    wanted = inspect.signature(spec).parameters
    given: dict[str, Any] = {"tmp_path": tmp_path} if "tmp_path" in wanted else {}
    if "world" not in wanted:
        spec(**given)
        return
    world = SimWorld("spec", seed=seed)
    try:
        spec(world=world, **given)
        world.judge()
    finally:
        world.close()


def test_every_bug_of_these_rows_is_named_by_one() -> None:
    assert set(plant_coverage.PLANTS) <= {plant for _, plant in PLANTED}
    assert not set(plant_coverage.PLANTS) & set(sabotage.PLANTS)


@pytest.mark.parametrize("row", plant_coverage.ROWS)
def test_row_is_green_without_a_bug(row: str, tmp_path: Path) -> None:
    for seed in (1, 2, 3) if "world" in inspect.signature(spec_of(row)).parameters else (1,):
        judged(row, seed, tmp_path)


@pytest.mark.parametrize(("row", "plant"), PLANTED)
def test_planted_bug_turns_the_row_red(row: str, plant: str, tmp_path: Path) -> None:
    found: list[str] = []
    for seed in range(1, 11):
        with PLANTS[plant]():
            try:
                judged(row, seed, tmp_path)
            except (AssertionError, ExceptionGroup) as error:
                found.append(str(error))
                break
    assert found, f"{row} stays green under {plant} in ten worlds"
