"""`pytest -p chaos.plugin catalogue`: specs get the world of real servers.

Starts one stack for the run, with only the servers that the collected specs need. A spec whose row is not written for real
servers yet is taken out, counted and printed as open: it never passes. `--sabotage NAME` plants a bug of
`catalogue.sabotage` in every engine process; the specs that name it in the index must then fail.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.stack import Stack, stack
from chaos.world import RealWorld

OPEN = pytest.StashKey[list[str]]()


def _written() -> set[str]:
    """Specs that are written for this world."""
    index = tomllib.loads((Path(__file__).parent.parent / "catalogue" / "index.toml").read_text(encoding="utf-8"))
    return {f"test_{row['id']}" for row in index["row"] if row["status"]["real"] == "written"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sabotage NAME`."""
    parser.addoption("--sabotage", help="a planted bug of catalogue.sabotage; the run must fail")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is not written for real servers yet."""
    written, here = _written(), Path(__file__).parent.parent / "catalogue"
    missing = [
        item
        for item in items
        if here in item.path.parents
        and "world" in getattr(item, "fixturenames", ())
        and getattr(item, "originalname", item.name) not in written
    ]
    config.stash[OPEN] = sorted({getattr(item, "originalname", item.name) for item in missing})
    if missing:
        config.hook.pytest_deselected(items=missing)
        items[:] = [i for i in items if i not in missing]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what could not run here."""
    for name in config.stash.get(OPEN, []):
        terminalreporter.write_line(f"chaos: {name} is open: it is not written for real servers yet")


@pytest.fixture(scope="session")
def servers() -> Iterator[Stack]:
    """Kafka, Postgres and S3, for the whole run. Not below pytest's own folder, which Postgres's user may not enter."""
    with stack() as running:
        yield running


@pytest.fixture
def world(servers: Stack, tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[RealWorld]:
    """A world of its own on shared servers."""
    made = RealWorld(servers, tmp_path, pytestconfig.getoption("--sabotage"))
    try:
        yield made
    finally:
        made.close()
