"""What the catalogue says of itself in a test run: which rows have a spec, and which specs had no world to run in.

A row without a spec, or a spec without a world, is open. It is counted and printed, and never passes.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

HOMELESS = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out specs that want a world when no plugin brings one."""
    here = Path(__file__).parent
    if any(config.pluginmanager.hasplugin(name) for name in ("chaos.plugin", "sim.plugin")):
        return
    homeless = [i for i in items if here in i.path.parents and "world" in getattr(i, "fixturenames", ())]
    config.stash[HOMELESS] = [i.name for i in homeless]
    if homeless:
        config.hook.pytest_deselected(items=homeless)
        items[:] = [i for i in items if i not in homeless]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How much of the catalogue is written."""
    rows = tomllib.loads((Path(__file__).parent / "index.toml").read_text(encoding="utf-8"))["row"]
    written = [r["id"] for r in rows if r["status"] == "written"]
    terminalreporter.write_line(f"catalogue: {len(rows)} rows, {len(written)} written, {len(rows) - len(written)} open")
    for name in config.stash.get(HOMELESS, []):
        terminalreporter.write_line(f"catalogue: {name} is open: no world to run in (pytest -p chaos.plugin)")
