"""A configuration file as values with their places: YAML, JSON or TOML, and the secrets they refer to.

Reads; decides nothing about pipelines. A file is bounded in size, depth and number of values before it is looked at, so
that no file can keep the process busy.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from thalweg.core.shape import Mark, Value
from thalweg.errors import Fault, Refused

BYTES_MAX: Final = 4 << 20
VALUES_MAX: Final = 100_000
DEPTH_MAX: Final = 50
FORMATS: Final = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

_REFERENCE: Final = re.compile(r"\$\{(?:(env|file):([^}]*)|([^}]*))\}")
_BOOLEAN: Final = {"true": True, "false": False}


def read(path: Path) -> Value:
    """The file's values. Raises `Refused` for a file that cannot be read as what its ending says."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise _refused(path, 0, 0, "config-format", f"{path.name} has no known ending", "Use .yaml, .yml, .json or .toml")
    try:
        with path.open("rb") as file:
            body = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise _refused(path, 0, 0, "config-unreadable", f"{path}: {error.strerror}", "Name a file that can be read") from None
    if len(body) > BYTES_MAX:
        raise _refused(path, 0, 0, "config-too-large", f"{path.name} is larger than {BYTES_MAX} bytes", "Split it") from None
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise _refused(path, line, 1, "config-encoding", f"{path.name} is not UTF-8", "Save it as UTF-8") from None
    try:
        return {"yaml": _yaml, "json": _json, "toml": _toml}[kind](path, text)
    except RecursionError:
        raise _refused(
            path, 0, 0, "config-too-deep", f"{path.name} is nested too deeply", f"At most {DEPTH_MAX} levels"
        ) from None


def _refused(path: Path, line: int, column: int, code: str, what: str, remedy: str) -> Refused:
    return Refused([Fault(line, column, code, what, remedy, "", str(path))])


class _Walk:
    """YAML nodes to values; refuses what repeats, refers to itself or grows without bound."""

    def __init__(self, path: Path) -> None:
        self.path, self.count, self.faults = path, 0, list[Fault]()

    def value(self, node: Node, depth: int) -> Value:
        mark = Mark(node.start_mark.line + 1, node.start_mark.column + 1)
        self.count += 1
        if self.count > VALUES_MAX or depth > DEPTH_MAX:
            what = f"{self.path.name} has too many values or levels (aliases counted each time)"
            raise _refused(self.path, mark.line, mark.column, "config-too-deep", what, "Write it without such repetition")
        if isinstance(node, SequenceNode):
            return Value([self.value(item, depth + 1) for item in node.value], mark)
        if isinstance(node, MappingNode):
            out: dict[str, tuple[Mark, Value]] = {}
            for key, inner in node.value:
                place = Mark(key.start_mark.line + 1, key.start_mark.column + 1)
                name = str(key.value) if isinstance(key, ScalarNode) else "?"
                if name in out:
                    first = out[name][0].line
                    what, remedy = f"key {name} is there twice (first in line {first})", "Remove one of them"
                    self.faults.append(Fault(place.line, place.column, "duplicate-key", what, remedy, name, str(self.path)))
                    continue
                if name == "<<":
                    what, remedy = "merge keys are not supported", "Write the keys out"
                    self.faults.append(Fault(place.line, place.column, "merge-key", what, remedy, name, str(self.path)))
                    continue
                out[name] = place, self.value(inner, depth + 1)
            return Value(out, mark)
        assert isinstance(node, ScalarNode)
        if node.style in ("|", ">"):
            mark = Mark(mark.line + 1, 1)  # the text begins in the line below its indicator
        return Value(self._scalar(node, mark), mark)

    def _scalar(self, node: Node, mark: Mark) -> Any:
        text, tag = str(node.value), str(node.tag).rpartition(":")[2]
        try:
            if tag == "int":
                return int(text.replace("_", ""), 0) if not re.fullmatch(r"[-+]?0\d+", text) else int(text)
            if tag == "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan").replace("_", ""))
        except ValueError:
            return text
        if tag == "bool":
            return _BOOLEAN.get(text.lower(), text)
        if tag == "null":
            return None
        return text


def _yaml(path: Path, text: str) -> Value:
    try:
        node = YAML(typ="rt", pure=True).compose(text)
    except MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        line, column = (at.line + 1, at.column + 1) if at else (1, 1)
        raise _refused(
            path, line, column, "config-syntax", f"not YAML: {error.problem or error.context}", "Mend the syntax"
        ) from None
    except (YAMLError, ValueError) as error:
        raise _refused(path, 1, 1, "config-syntax", f"not YAML: {str(error).splitlines()[0]}", "Mend the syntax") from None
    if node is None:
        return Value({}, Mark(1, 1))
    walk = _Walk(path)
    value = walk.value(node, 0)
    if walk.faults:
        raise Refused(walk.faults)
    return value


def _json(path: Path, text: str) -> Value:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(path, error.lineno, error.colno, "config-syntax", f"not JSON: {error.msg}", "Mend the syntax") from None
    return _yaml(path, text.replace("\t", " "))  # a raw tab stands only between tokens there, and YAML minds it


def _toml(path: Path, text: str) -> Value:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+), column (\d+)", str(error))
        line, column = (int(found[1]), int(found[2])) if found else (1, 1)
        raise _refused(path, line, column, "config-syntax", f"not TOML: {error}", "Mend the syntax") from None
    lines = _toml_lines(text)

    def value(content: Any, at: tuple[str, ...], line: int) -> Value:
        line = lines.get(at, line)
        if isinstance(content, dict):
            return Value(
                {k: (Mark(lines.get((*at, k), line), 1), value(v, (*at, k), line)) for k, v in content.items()}, Mark(line, 1)
            )
        if isinstance(content, list):
            return Value([value(item, (*at, str(i)), line) for i, item in enumerate(content)], Mark(line, 1))
        if content is not None and not isinstance(content, str | int | float | bool):
            content = str(content)  # TOML's own dates
        begins_below = isinstance(content, str) and "\n" in content
        return Value(content, Mark(line + 1 if begins_below else line, 1))

    return value(data, (), 1)


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line of each table header and key. tomllib keeps none; keys of an inline table share the line they stand in."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    quoted = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quoted:
            quoted = "" if quoted in line else quoted
            continue
        bare = line.strip()
        header = re.match(r"(\[\[?)\s*([^\]]+?)\s*\]\]?", bare)
        if header and "=" not in header[2]:
            pieces: list[str] = []
            for piece in header[2].split("."):
                pieces.append(piece.strip().strip("\"'"))
                if tuple(pieces) in counts and not (header[1] == "[[" and len(pieces) == len(header[2].split("."))):
                    pieces.append(str(counts[tuple(pieces)]))
            if header[1] == "[[":
                counts[tuple(pieces)] = counts.get(tuple(pieces), -1) + 1
                pieces.append(str(counts[tuple(pieces)]))
            table = tuple(pieces)
            lines.setdefault(table, number)
        else:
            key = re.match(r"([A-Za-z0-9_.\"'-]+)\s*=", bare)
            if key:
                at = (*table, *(p.strip("\"'") for p in key[1].split(".")))
                lines.setdefault(at, number)
        for mark in ('"""', "'''"):
            if bare.count(mark) % 2:
                quoted = mark
    return lines


class Secrets:
    """Resolves `${env:NAME}` and `${file:PATH}` inside texts. What they hold is never shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def resolved(self, text: str) -> str:
        """`text` with its references replaced. `LookupError` names the reference that cannot be."""

        def one(found: re.Match[str]) -> str:
            kind, name = found[1], (found[2] or "").strip()
            if kind == "env":
                if name not in os.environ:
                    raise LookupError(f"environment variable {name} is not set")
                return os.environ[name]
            if kind == "file":
                try:
                    return (self._folder / name).read_text(encoding="utf-8").rstrip("\r\n")
                except (OSError, UnicodeDecodeError) as error:
                    reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                    raise LookupError(f"secret file {name}: {reason}") from None
            raise LookupError(f"${{{found[3]}}} is no reference; write ${{env:NAME}} or ${{file:PATH}}")

        return _REFERENCE.sub(one, text)
