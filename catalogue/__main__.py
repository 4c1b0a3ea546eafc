"""What the catalogue promises and how far it is proven.

    python -m catalogue list [--json]

prints each row and case with its spec, its status in each world and the bugs that must turn it red, and the counts. It
reads the index and judges nothing. Exit status: 0 printed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

INDEX: Final = Path(__file__).parent / "index.toml"
WORLDS: Final[Mapping[str, str]] = {"sim": "in the simulator", "real": "on real servers"}

PIPED_WIDTH: Final = 240
"""Where nobody looks at a terminal, an entry is a line."""

Entry = Mapping[str, Any]


def load() -> tuple[list[Entry], list[Entry]]:
    """The index: its rows, and the cases of the federated query."""
    index = tomllib.loads(INDEX.read_text(encoding="utf-8"))
    return index["row"], index["case"]


def function(entry: Entry) -> str:
    """The name of an entry's spec in its file: `test_<id>`. A case's id already begins with Test, which it loses."""
    return f"test_{entry['id'].removeprefix('Test')}"


def is_written(entry: Entry) -> bool:
    """Some world has it. What is open in every world has been proven nowhere."""
    return any(entry["status"][world] == "written" for world in WORLDS)


def counts(rows: Sequence[Entry], cases: Sequence[Entry]) -> dict[str, dict[str, int]]:
    """How many there are, how many each world has, and how many no world has. A row may be in both worlds."""
    return {
        name: {"total": len(entries)}
        | {world: sum(e["status"][world] == "written" for e in entries) for world in WORLDS}
        | {"open": sum(not is_written(e) for e in entries)}
        for name, entries in (("rows", rows), ("cases", cases))
    }


def told(rows: Sequence[Entry], cases: Sequence[Entry]) -> list[str]:
    """The counts in words, one line for rows and one for cases."""
    return [
        f"{of['total']} {name}: {', '.join(f'{of[world]} written {place}' for world, place in WORLDS.items())}, {of['open']} open"
        for name, of in counts(rows, cases).items()
    ]


def show(rows: Sequence[Entry], cases: Sequence[Entry], console: Console) -> None:
    """A table of rows, one of cases, and the counts."""
    for kind, entries in (("row", rows), ("case", cases)):
        table = Table(kind, "spec", *WORLDS, "sabotages" if kind == "row" else "group")
        for column in table.columns:
            column.overflow = "fold"  # a name that is cut short cannot be looked for
        for entry in entries:
            last = ", ".join(entry["sabotages"]) if kind == "row" else entry["group"]
            table.add_row(entry["id"], entry["spec"], *(entry["status"][world] for world in WORLDS), last)
        console.print(table)
    for line in told(rows, cases):
        console.print(line, highlight=False)


def as_json(rows: Sequence[Entry], cases: Sequence[Entry]) -> str:
    """The index and the counts for a program."""
    return json.dumps({"rows": rows, "cases": cases, "counts": counts(rows, cases)}, ensure_ascii=False, indent=2)


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m catalogue", description="What the catalogue promises and how far it is proven.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="each row and case: its spec, its status in each world, its planted bugs")
    listing.add_argument("--json", action="store_true", help="print JSON for a program")
    options = parser.parse_args(words)
    rows, cases = load()
    if options.json:
        print(as_json(rows, cases))
    else:
        show(rows, cases, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    return 0


if __name__ == "__main__":
    sys.exit(main())
