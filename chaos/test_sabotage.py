"""Each planted bug that a written row names turns that row red, on real servers.

A row that stays green under its own bug proves nothing when it is green without it.
"""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from chaos.stack import Stack
from chaos.world import RealWorld

INDEX = tomllib.loads((Path(__file__).parent.parent / "catalogue" / "index.toml").read_text(encoding="utf-8"))
PLANTED = [
    (row["id"], row["spec"], plant) for row in INDEX["row"] if row["status"]["real"] == "written" for plant in row["sabotages"]
]
PATIENCE_S = 12.0


@pytest.mark.parametrize(("row", "spec", "plant"), PLANTED, ids=[f"{row}-{plant}" for row, _, plant in PLANTED])
def test_planted_bug_is_found(servers: Stack, tmp_path: Path, row: str, spec: str, plant: str) -> None:
    judge = getattr(import_module(f"catalogue.{Path(spec).stem}"), f"test_{row}")
    world = RealWorld(servers, tmp_path, plant, PATIENCE_S)
    try:
        with pytest.raises(AssertionError) as found:
            judge(world)
    finally:
        world.close()
    assert "the engine ended" not in str(found.value)  # a bug that cannot even start is no bug planted
