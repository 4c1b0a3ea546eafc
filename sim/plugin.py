"""`pytest -p sim.plugin catalogue`: specs get the simulated world.

A spec that needs a service without a twin is taken out, counted and printed as open: it never passes.
`--seeds N` gives each spec N worlds, with other latencies and another interleaving in each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sim import fence
from sim.spec import SimWorld

TWINS = {"kafka", "pg", "s3"}
OPEN = pytest.StashKey[dict[str, str]]()


def _needs() -> dict[str, list[str]]:
    index = tomllib.loads((Path(__file__).parent.parent / "catalogue" / "index.toml").read_text(encoding="utf-8"))
    return {f"test_{row['id']}": row["needs"] for row in index["row"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seeds N`."""
    parser.addoption("--seeds", type=int, default=3, help="worlds for each spec")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing of the real world gets in."""
    fence.install()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One world a seed."""
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", range(1, metafunc.config.getoption("--seeds") + 1), indirect=True, ids=lambda s: f"seed{s}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what needs a service that has no twin yet."""
    needs = _needs()
    missing = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        lack = set(needs.get(name, ())) - TWINS
        if "world" in getattr(item, "fixturenames", ()) and lack:
            missing[item.name] = " ".join(sorted(lack))
    config.stash[OPEN] = missing
    if missing:
        config.hook.pytest_deselected(items=[i for i in items if i.name in missing])
        items[:] = [i for i in items if i.name not in missing]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what could not run here."""
    for name, lack in config.stash.get(OPEN, {}).items():
        terminalreporter.write_line(f"sim: {name} is open: there is no twin of {lack} yet")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[SimWorld]:
    """A world of its own."""
    made = SimWorld("spec", seed=request.param)
    try:
        yield made
        made.judge()
    finally:
        made.close()
