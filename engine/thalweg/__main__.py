"""The command line: check, run, new, schema, coverage.

Exit status: 0 fine, 69 a service did not answer, 70 it cannot go on, 78 the configuration is refused (sysexits.h).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from thalweg import __version__, starter
from thalweg.config import Secrets, read
from thalweg.core.coverage import Document
from thalweg.core.plan import Planned, plan
from thalweg.core.shape import json_schema
from thalweg.core.topology import Node, Rule
from thalweg.errors import Fault, Permanent, Refused, ThalwegError, Transient

EXIT_USAGE: Final = 64
EXIT_CONFIG: Final = 78

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Streaming ingestion that loses nothing."
)

File = Annotated[Path, typer.Argument(help="A pipeline: .yaml, .json or .toml", metavar="FILE")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


class _Inputs:
    """What planning needs from outside, beside one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secrets = Secrets(folder)

    def resolved(self, text: str) -> str:
        return self._secrets.resolved(text)

    def located(self, path: str) -> str:
        return str(self._folder / path)

    def text_of(self, path: str) -> str:
        return (self._folder / path).read_text(encoding="utf-8")

    def schemas(
        self, nodes: Sequence[Node], rules: Sequence[Rule], root: pa.Schema
    ) -> tuple[Mapping[str, pa.Schema], Mapping[str, str]]:
        from thalweg.runtime.transform import Transform

        return Transform(nodes, rules).schemas(root)


def planned(path: Path, *, strict: bool) -> Planned:
    """The topology of a file. Raises `Refused`; `strict`, for missing secrets too."""
    return plan(read(path), _Inputs(path.resolve().parent), strict=strict)


def _lines(kind: str, faults: Sequence[Fault], path: Path) -> list[str]:
    return [f"{path}:{f.line}:{f.column}: {kind} [{f.code}] {f.what}. {f.remedy}" for f in faults]


@app.command()
def check(file: File, as_json: AsJson = False) -> None:
    """Name every fault of a pipeline at once; exit 78 if there is one."""
    faults: Sequence[Fault] = ()
    warnings: Sequence[Fault] = ()
    try:
        warnings = planned(file, strict=False).warnings
    except Refused as refused:
        faults = refused.faults
    if as_json:
        body = {
            "file": str(file),
            "ok": not faults,
            "faults": [_described(f) for f in faults],
            "warnings": [_described(f) for f in warnings],
        }
        print(json.dumps(body, indent=2))
    else:
        for line in (*_lines("error", faults, file), *_lines("warning", warnings, file)):
            print(line)
        print(f"{file}: {len(faults)} fault(s), {len(warnings)} warning(s)" if faults or warnings else f"{file}: fine")
    raise typer.Exit(EXIT_CONFIG if faults else 0)


def _described(fault: Fault) -> dict[str, Any]:
    names = ("line", "column", "code", "what", "remedy", "path")
    return {name: getattr(fault, name) for name in names}


def _topology(file: Path) -> Planned:
    try:
        found = planned(file, strict=True)
    except Refused as refused:
        print("\n".join(_lines("error", refused.faults, file)), file=sys.stderr)
        raise typer.Exit(EXIT_CONFIG) from None
    for line in _lines("warning", found.warnings, file):
        print(line, file=sys.stderr)
    return found


@app.command()
def run(
    file: File,
    log: Annotated[str, typer.Option(help="text or json")] = "text",
) -> None:
    """Run a pipeline until its sources end, or until SIGTERM."""
    from thalweg import node
    from thalweg.log import reporter

    if log not in ("text", "json"):
        print("--log is text or json", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    topology = _topology(file).topology
    try:
        status = asyncio.run(node.run(topology, reporter(log)))
    except ThalwegError as error:
        print(f"error: {error}", file=sys.stderr)
        status = node.EXIT_UNAVAILABLE if isinstance(error, Transient) else node.EXIT_FAILED
    raise typer.Exit(status)


@app.command()
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or missing folder")]) -> None:
    """Write a starter pipeline that runs without any server."""
    try:
        starter.write(folder)
    except Permanent as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    print(f"Wrote {folder}. Try: thalweg check {folder / 'pipeline.yaml'} && thalweg run {folder / 'pipeline.yaml'}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a pipeline file, for editors."""
    print(json.dumps(json_schema(), indent=2))


@app.command()
def coverage(file: File, as_json: AsJson = False) -> None:
    """Print which ranges of each partition reached which sink, and the gaps."""
    from thalweg import node

    topology = _topology(file).topology
    try:
        documents = asyncio.run(node.coverage(topology, lambda *_, **__: None))
    except ThalwegError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(node.EXIT_UNAVAILABLE if isinstance(error, Transient) else node.EXIT_FAILED) from None
    rows = [row for document in documents for row in gaps_of(document)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("partition", "sink", "covered", "gaps")
    for row in rows:
        table.add_row(row["partition"], row["sink"], _spans(row["covered"]), _gaps(row["gaps"]))
    Console().print(table)


def gaps_of(document: Document) -> list[dict[str, Any]]:
    """Per sink of one partition: covered ranges and, up to the furthest sink's end, the gaps with their reason."""
    ends = [stop for ranges in (*document.sinks.values(), *document.explained.values()) for _, stop in ranges]
    stop = max(ends, default=0)
    out = []
    for sink, ranges in sorted(document.sinks.items()):
        gaps: list[dict[str, Any]] = []
        unexplained = ranges.gaps(document.base or 0, stop)
        for reason, excused in sorted(document.explained.items()):
            gaps += [{"start": a, "stop": b, "reason": reason} for a, b in unexplained & excused]
            unexplained = unexplained - excused
        gaps += [{"start": a, "stop": b, "reason": None} for a, b in unexplained]
        gaps.sort(key=lambda g: g["start"])
        out.append({"partition": document.partition, "sink": sink, "covered": [list(r) for r in ranges], "gaps": gaps})
    return out


def _spans(ranges: list[list[int]]) -> str:
    return " ".join(f"[{a},{b})" for a, b in ranges) or "nothing"


def _gaps(gaps: list[dict[str, Any]]) -> str:
    return " ".join(f"[{g['start']},{g['stop']})" + (f" {g['reason']}" if g["reason"] else "") for g in gaps) or "none"


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Streaming ingestion whose source moves only after one durable write."""


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
