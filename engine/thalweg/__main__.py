"""The command line: check, run, new, schema, coverage.

Exit status: 0 fine, 69 a service did not answer, 70 it cannot go on, 78 the configuration is refused (sysexits.h).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg import __version__, starter
from thalweg.config import BYTES_MAX, Secrets, bounded, read
from thalweg.core.coverage import Document
from thalweg.core.plan import Judged, judged
from thalweg.core.shape import json_schema
from thalweg.core.topology import CodecPlan, Node, Rule, Topology
from thalweg.errors import Fault, Permanent, Refused, ThalwegError, Transient
from thalweg.log import Veil, make_report, secrets_of

EXIT_USAGE: Final = 64
EXIT_UNAVAILABLE: Final = 69
EXIT_FAILED: Final = 70
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
        body = bounded(self._folder / path, BYTES_MAX)
        if body is None:
            raise OSError(0, f"larger than {BYTES_MAX} bytes")
        return body.decode("utf-8-sig")

    def codec_faults(self, plan: CodecPlan) -> Sequence[str]:
        from thalweg.codecs import plan_faults

        return plan_faults(plan)

    def schemas(
        self, nodes: Sequence[Node], rules: Sequence[Rule], root: pa.Schema
    ) -> tuple[Mapping[str, pa.Schema], Mapping[str, str]]:
        from thalweg.runtime.transform import Transform

        return Transform(nodes, rules).schemas(root)


def judged_file(path: Path, *, strict: bool) -> Judged:
    """All that can be said about a file without a server; `strict`, a missing secret is a fault."""
    try:
        contents = read(path)
    except Refused as refused:
        return Judged(None, refused.faults, ())
    found = judged(contents.value, _Inputs(path.resolve().parent), strict=strict)
    if not contents.faults:
        return found
    return Judged(None, tuple(sorted({*found.faults, *contents.faults})), found.warnings)


def _lines(kind: str, faults: Sequence[Fault], path: Path) -> list[str]:
    out = []
    for f in faults:
        place = f"{path}:{f.line}:{f.column}" if f.line else str(path)
        out.append(_printable(f"{place}: {kind} [{f.code}] {f.what}. {f.remedy}"))
    return out


def _printable(text: str) -> str:
    """One line, without whatever a terminal would obey."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "\ufffd" for c in text)


@app.command()
def check(file: File, as_json: AsJson = False) -> None:
    """Name every fault of a pipeline at once; exit 78 if there is one."""
    found = judged_file(file, strict=False)
    if as_json:
        body = {
            "file": str(file),
            "ok": not found.faults,
            "faults": [_described(f) for f in found.faults],
            "warnings": [_described(f) for f in found.warnings],
        }
        print(json.dumps(body, indent=2))
    else:
        for line in (*_lines("error", found.faults, file), *_lines("warning", found.warnings, file)):
            print(line)
        told = f"{_counted(len(found.faults), 'fault')}, {_counted(len(found.warnings), 'warning')}"
        print(f"{file}: {told}" if found.faults or found.warnings else f"{file}: fine")
    raise typer.Exit(EXIT_CONFIG if found.faults else 0)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _described(fault: Fault) -> dict[str, Any]:
    names = ("line", "column", "code", "what", "remedy", "path")
    return {name: getattr(fault, name) for name in names}


def _topology(file: Path) -> Topology:
    found = judged_file(file, strict=True)
    for line in (*_lines("error", found.faults, file), *_lines("warning", found.warnings, file)):
        print(line, file=sys.stderr)
    if found.topology is None:
        raise typer.Exit(EXIT_CONFIG)
    return found.topology


def _stopped(error: ThalwegError, veil: Veil) -> int:
    """Say what happened; the exit status for it."""
    print(_printable(f"error: {veil.over(str(error))}"), file=sys.stderr)
    return EXIT_UNAVAILABLE if isinstance(error, Transient) else EXIT_FAILED


class LogForm(StrEnum):
    """How events are written."""

    TEXT = "text"
    JSON = "json"


@app.command()
def run(
    file: File,
    log: Annotated[LogForm, typer.Option(help="Events on standard error: for people, or one JSON object a line.")] = LogForm.TEXT,
) -> None:
    """Run a pipeline until its sources end, or until SIGTERM."""
    topology = _topology(file)
    veil = Veil(secrets_of(topology))
    from thalweg import node

    try:
        status = asyncio.run(node.run(topology, make_report(log.value, veil)))
    except ThalwegError as error:
        status = _stopped(error, veil)
    raise typer.Exit(status)


@app.command()
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or missing folder")]) -> None:
    """Write a starter pipeline that runs without any server."""
    try:
        starter.write(folder)
    except Permanent as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    except OSError as error:
        print(f"error: {folder} cannot be written: {error.strerror}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    print(f"Wrote {folder}. Try: thalweg check {folder / 'pipeline.yaml'} && thalweg run {folder / 'pipeline.yaml'}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a pipeline file, for editors."""
    print(json.dumps(json_schema(), indent=2))


@app.command()
def coverage(file: File, as_json: AsJson = False) -> None:
    """Print which ranges of each partition reached which sink, and the gaps."""
    topology = _topology(file)
    veil = Veil(secrets_of(topology))
    from thalweg import node

    try:
        documents = asyncio.run(node.coverage(topology, lambda *_, **__: None))
    except ThalwegError as error:
        raise typer.Exit(_stopped(error, veil)) from None
    rows = [row for document in documents for row in gaps_of(document, [s.name for s in topology.sinks])]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("nothing is covered yet")
    elif sys.stdout.isatty():
        table = Table("partition", "sink", "covered", "gaps")
        for row in rows:
            table.add_row(*map(escape, _cells(row)))
        Console().print(table)
    else:
        for row in rows:
            print("\t".join(_cells(row)))


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["partition"], row["sink"], _spans(row["covered"]), _gaps(row["gaps"])


def gaps_of(document: Document, sinks: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Per sink of one partition: covered ranges and, up to the furthest sink's end, the gaps with their reason.

    `sinks` are those of the topology: one that nothing has ever reached is not in the document, and is all gap.
    """
    ends = [stop for ranges in (*document.sinks.values(), *document.explained.values()) for _, stop in ranges]
    stop = max(ends, default=0)
    out = []
    for sink in sorted({*document.sinks, *sinks}):
        ranges = document.ranges(sink)
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
