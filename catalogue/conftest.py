"""What the catalogue says of itself in a test run: which rows have a spec, and which specs had no world to run in.

A row without a spec, or a spec without a world, is open. It is counted and printed, and never passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from catalogue.__main__ import load, told

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
    for line in told(*load()):
        terminalreporter.write_line(f"catalogue: {line}")
    for name in config.stash.get(HOMELESS, []):
        terminalreporter.write_line(f"catalogue: {name} is open: no world to run in (pytest -p chaos.plugin)")
