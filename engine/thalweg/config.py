"""A configuration file as values with their places: YAML, JSON or TOML, and the secrets they refer to.

Reads; decides nothing about pipelines. A file is bounded in size, depth and number of values while it is read, so that
no file can keep the process busy: aliases count each time they are used.

Places are exact in all three formats, within a text that runs over several lines too. `tomllib` keeps none, so a small
scanner walks what it has found valid.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from thalweg.core.shape import Mark, Value
from thalweg.errors import Fault, Refused

BYTES_MAX: Final = 1 << 20
VALUES_MAX: Final = 10_000
DEPTH_MAX: Final = 50
DOTS_MAX: Final = 1_000  # in one line of TOML: a dotted key costs the square of its length to read
SECRET_BYTES_MAX: Final = 64 << 10
FORMATS: Final = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

_REFERENCE: Final = re.compile(r"\$\{(?:(env|file):([^}]*)|([^}]*))\}")
_BOOLEAN: Final = {"true": True, "false": False}
_BLANK: Final = " \t\r\n"
_ESCAPE_LENGTH: Final = {"x": 4, "u": 6, "U": 10}
_ESCAPED_BLANK: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True)
class Contents:
    """A file's values, and what is wrong with it already (keys that are there twice)."""

    value: Value
    faults: tuple[Fault, ...] = ()


def read(path: Path) -> Contents:
    """The file's values. Raises `Refused` for a file that cannot be read as what its ending says."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise _refused(path, 0, 0, "config-format", f"{path.name} has no known ending", "Use .yaml, .yml, .json or .toml")
    try:
        body = bounded(path, BYTES_MAX)
    except OSError as error:
        what = f"{path} cannot be read: {reason_of(error)}"
        raise _refused(path, 0, 0, "config-unreadable", what, "Name a file that can be read") from None
    if body is None:
        raise _refused(path, 0, 0, "config-too-large", f"{path.name} is larger than {BYTES_MAX} bytes", "Split the pipeline")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise _refused(path, line, 1, "config-encoding", f"{path.name} is not UTF-8", "Save it as UTF-8") from None
    try:
        return {"yaml": _yaml, "json": _json, "toml": _toml}[kind](path, text)
    except RecursionError:
        raise _too_big(path, 1, 1) from None


def bounded(path: Path, bytes_max: int) -> bytes | None:
    """All bytes of a regular file, None when it is larger. `OSError` for what is no regular file (a pipe would not end)."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "not a regular file")
            body = file.read(bytes_max + 1)
    except ValueError:  # a name with a NUL
        raise OSError(0, "no such name") from None
    return None if len(body) > bytes_max else body


def reason_of(error: OSError) -> str:
    """Why, without the name that the caller shows anyway."""
    return error.strerror or "cannot be read"


def _refused(path: Path, line: int, column: int, code: str, what: str, remedy: str) -> Refused:
    return Refused([Fault(line, column, code, what, remedy, "", str(path))])


def _too_big(path: Path, line: int, column: int) -> Refused:
    what = f"{path.name} has more than {VALUES_MAX} values or {DEPTH_MAX} levels (an alias counts each time)"
    return _refused(path, line, column, "config-too-deep", what, "Write it smaller, or flatter")


# --- places -------------------------------------------------------------------------------------------------------


class _Lines:
    """Index to line and column."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def mark(self, index: int) -> Mark:
        line = bisect_right(self._starts, index)
        return Mark(line, index - self._starts[line - 1] + 1)

    def within(self, start: int, content: str, quote: str, escapes: bool) -> Callable[[int, int], Mark]:
        """Where line and column of `content` stand, when it was written from `start` on.

        Folding, dedenting and escapes of line ends change only blanks, so the two are walked side by side over all the rest.
        """
        source = self.text

        def find(line: int, column: int) -> Mark:
            target = 0
            for _ in range(line - 1):
                target = content.find("\n", target) + 1
                if target == 0:
                    break
            target = min(target + column - 1, len(content))
            i = start
            for j, wanted in enumerate(content):
                if wanted in _BLANK:
                    if j >= target:
                        break
                    continue
                while i < len(source):
                    if source[i] in _BLANK:
                        i += 1
                    elif escapes and source[i] == "\\" and source[i + 1 : i + 2] in (*_ESCAPED_BLANK, *_BLANK):
                        i += 2
                    else:
                        break
                if j >= target or i >= len(source):
                    break
                if escapes and source[i] == "\\":
                    i += _ESCAPE_LENGTH.get(source[i + 1 : i + 2], 2)
                elif quote == "'" and source.startswith("''", i):
                    i += 2
                else:
                    i += 1
            return self.mark(min(i, max(0, len(source) - 1)))

        return find


# --- YAML and JSON ------------------------------------------------------------------------------------------------


class _Walk:
    """YAML nodes to values; refuses what grows without bound, notes what repeats."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.count, self.faults, self._lines = path, 0, list[Fault](), _Lines(text)

    def value(self, node: Node, depth: int) -> Value:
        mark = Mark(node.start_mark.line + 1, node.start_mark.column + 1)
        self.count += 1
        if self.count > VALUES_MAX or depth > DEPTH_MAX:
            raise _too_big(self.path, mark.line, mark.column)
        if isinstance(node, SequenceNode):
            return Value([self.value(item, depth + 1) for item in node.value], mark)
        if isinstance(node, MappingNode):
            return self._mapping(node, depth, mark)
        assert isinstance(node, ScalarNode)
        content = self._scalar(node)
        if not isinstance(content, str):
            return Value(content, mark)
        start = node.start_mark.index
        if node.style in ("|", ">"):
            start = self._lines.text.find("\n", start) + 1 or start
        elif node.style in ('"', "'"):
            start += 1
        inside = self._lines.within(start, content, node.style or "", node.style == '"')
        return Value(content, mark, inside)

    def _mapping(self, node: MappingNode, depth: int, mark: Mark) -> Value:
        out: dict[str, tuple[Mark, Value]] = {}
        for key, inner in node.value:
            place = Mark(key.start_mark.line + 1, key.start_mark.column + 1)
            if not isinstance(key, ScalarNode):
                self._fault(place, "bad-key", "a key is a list or a mapping", "Use text as key")
                continue
            name = _paired(str(key.value))
            if name in out:
                what = f"key {name} is there twice (first in line {out[name][0].line})"
                self._fault(place, "duplicate-key", what, "Remove one of them", name)
            elif name == "<<" and key.style is None:
                self._fault(place, "merge-key", "merge keys are not supported", "Write the keys out", name)
            else:
                out[name] = place, self.value(inner, depth + 1)
        return Value(out, mark)

    def _fault(self, place: Mark, code: str, what: str, remedy: str, path: str = "") -> None:
        self.faults.append(Fault(place.line, place.column, code, what, remedy, path))

    def _scalar(self, node: Node) -> Any:
        text, tag = str(node.value), str(node.tag).rpartition(":")[2]
        try:
            if tag == "int":
                return _number(int(text.replace("_", ""), 0) if not re.fullmatch(r"[-+]?0\d+", text) else int(text))
            if tag == "float":
                return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()).replace("_", ""))
        except ValueError:
            return text
        if tag == "bool":
            return _BOOLEAN.get(text.lower(), text)
        if tag == "null":
            return None
        return _paired(text)


def _number(number: int) -> int | str:
    """Nothing here counts beyond 128 bits, and Python will not even print some of what lies there."""
    return number if number.bit_length() <= 128 else "a number beyond 128 bits"


def _paired(text: str) -> str:
    """JSON writes a character beyond U+FFFF as two halves; half a character alone is no text."""
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _yaml(path: Path, text: str) -> Contents:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor that is used again is YAML all the same
            _measured(path, text)
            node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        line, column = (at.line + 1, at.column + 1) if at else (1, 1)
        what = f"not YAML: {_one_line(error.problem or error.context)}"
        raise _refused(path, line, column, "config-syntax", what, "Mend the syntax") from None
    except (YAMLError, ValueError, KeyError, IndexError) as error:
        found = re.search(r"position (\d+)", str(error))
        mark = _Lines(text).mark(min(int(found[1]), len(text))) if found else Mark(1, 1)
        what = f"not YAML: {_one_line(error)}"
        raise _refused(path, mark.line, mark.column, "config-syntax", what, "Mend the syntax") from None
    if node is None:
        return Contents(Value({}, Mark(1, 1)))
    walk = _Walk(path, text)
    return Contents(walk.value(node, 0), tuple(walk.faults))


def _one_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:200]


def _measured(path: Path, text: str) -> None:
    """Raises `Refused` as soon as there are too many values or levels; the composer would read on to the end."""
    count = depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        count += isinstance(event, NodeEvent)
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if count > 2 * VALUES_MAX or depth > DEPTH_MAX:
            raise _too_big(path, event.start_mark.line + 1, event.start_mark.column + 1)


def _json(path: Path, text: str) -> Contents:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(path, error.lineno, error.colno, "config-syntax", f"not JSON: {error.msg}", "Mend the syntax") from None
    except ValueError as error:
        raise _refused(path, 1, 1, "config-syntax", f"not JSON: {_one_line(error)}", "Mend the syntax") from None
    return _yaml(path, text.replace("\t", " "))  # a raw tab stands only between tokens there, and YAML minds it


# --- TOML ---------------------------------------------------------------------------------------------------------


def _toml(path: Path, text: str) -> Contents:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > DOTS_MAX:
            raise _too_big(path, number, 1)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+), column (\d+)", str(error))
        mark = Mark(int(found[1]), int(found[2])) if found else Mark(1, 1)
        if "at end of document" in str(error):
            mark = Mark(text.rstrip("\n").count("\n") + 1, 1)
        what = f"not TOML: {re.sub(r' [(]at .*[)]$', '', str(error))}"
        raise _refused(path, mark.line, mark.column, "config-syntax", what, "Mend the syntax") from None
    except ValueError as error:
        raise _refused(path, 1, 1, "config-syntax", f"not TOML: {_one_line(error)}", "Mend the syntax") from None
    places = _TomlPlaces(text.replace("\r\n", "\n"))
    places.document()
    count = 0

    def value(content: Any, at: tuple[str | int, ...], near: Mark) -> Value:
        nonlocal count
        count += 1
        mark, start, quote = places.values.get(at, (places.keys.get(at, near), 0, ""))
        if count > VALUES_MAX or len(at) > DEPTH_MAX:
            raise _too_big(path, mark.line, mark.column)
        if isinstance(content, dict):
            return Value({k: (places.keys.get((*at, k), mark), value(v, (*at, k), mark)) for k, v in content.items()}, mark)
        if isinstance(content, list):
            return Value([value(item, (*at, i), mark) for i, item in enumerate(content)], mark)
        if isinstance(content, str):
            return Value(content, mark, places.lines.within(start, content, "", quote == '"') if quote else None)
        if isinstance(content, int) and not isinstance(content, bool):
            content = _number(content)
        elif not isinstance(content, float | bool):
            content = str(content)  # TOML's own dates
        return Value(content, mark)

    return Contents(value(data, (), Mark(1, 1)))


class _TomlPlaces:
    """Where each key and value of a *valid* TOML text stands; tables of an array are numbered."""

    def __init__(self, text: str) -> None:
        self.text, self.lines, self.at = text, _Lines(text), 0
        self.keys: dict[tuple[str | int, ...], Mark] = {}
        self.values: dict[tuple[str | int, ...], tuple[Mark, int, str]] = {}  # place, where a text begins, its quote
        self._counts: dict[tuple[str | int, ...], int] = {}

    def document(self) -> None:
        """Walk it all."""
        table: tuple[str | int, ...] = ()
        while self._skip(" \t\r\n"):
            if self.text[self.at] != "[":
                self._pair(table)
                continue
            mark = self.lines.mark(self.at)
            double = self.text.startswith("[[", self.at)
            self.at += 1 + double
            names = self._key()
            table = ()
            for n, (name, place) in enumerate(names):
                table = (*table, name)
                self.keys.setdefault(table, place)
                if double and n == len(names) - 1:
                    self._counts[table] = self._counts.get(table, -1) + 1
                    table = (*table, self._counts[table])
                    self.values[table] = mark, 0, ""
                elif table in self._counts:
                    table = (*table, self._counts[table])
            self._skip(" \t")
            self.at += 1 + double

    def _skip(self, blanks: str) -> bool:
        """Past blanks and, between lines, comments; whether anything is left."""
        while self.at < len(self.text):
            if self.text[self.at] in blanks:
                self.at += 1
            elif self.text[self.at] == "#" and "\n" in blanks:
                self.at = self.text.find("\n", self.at)
                if self.at < 0:
                    self.at = len(self.text)
            else:
                return True
        return False

    def _key(self) -> list[tuple[str, Mark]]:
        out: list[tuple[str, Mark]] = []
        while True:
            self._skip(" \t")
            start, mark = self.at, self.lines.mark(self.at)
            if self.text[start] in "\"'":
                self._string()
                name = next(iter(tomllib.loads(f"{self.text[start : self.at]} = 0")))
            else:
                found = re.compile(r"[A-Za-z0-9_-]+").match(self.text, start)
                assert found is not None
                name, self.at = found[0], found.end()
            out.append((name, mark))
            self._skip(" \t")
            if self.text[self.at] != ".":
                return out
            self.at += 1

    def _pair(self, table: tuple[str | int, ...]) -> None:
        path = table
        for name, mark in self._key():
            path = (*path, name)
            self.keys.setdefault(path, mark)
        self.at += 1  # =
        self._skip(" \t")
        self._value(path)

    def _value(self, path: tuple[str | int, ...]) -> None:
        mark, first = self.lines.mark(self.at), self.text[self.at]
        if first in "\"'":
            self.values[path] = mark, self._string(), first
            return
        self.values[path] = mark, 0, ""
        if first not in "[{":
            found = re.compile(r"[^,\]}#\n]*").match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            return
        self.at += 1
        n = 0
        while self._skip(" \t\r\n,"):
            if self.text[self.at] in "]}":
                self.at += 1
                return
            if first == "[":
                self._value((*path, n))
                n += 1
            else:
                self._pair(path)

    def _string(self) -> int:
        """Past a string; where its text begins."""
        quote = self.text[self.at]
        long = self.text.startswith(quote * 3, self.at)
        self.at += 3 if long else 1
        start = self.at
        if long:
            ending = re.compile(rf"(?:\\.|[^\\])*?{quote * 3}{quote}{{0,2}}" if quote == '"' else r"[\s\S]*?'{3,5}", re.DOTALL)
        else:
            ending = re.compile(r'(?:\\.|[^"\\])*"' if quote == '"' else "[^']*'")
        found = ending.match(self.text, start)
        assert found is not None
        self.at = found.end()
        return start


# --- secrets ------------------------------------------------------------------------------------------------------


class Secrets:
    """Resolves `${env:NAME}` and `${file:PATH}` inside texts. What they hold is never shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def resolved(self, text: str) -> str:
        """`text` with its references replaced. `LookupError` has one sentence for each that cannot be."""
        missing: list[str] = []

        def one(found: re.Match[str]) -> str:
            kind, name = found[1], (found[2] or "").strip()
            if kind == "env" and name in os.environ:
                return os.environ[name]
            if kind == "env":
                missing.append(f"environment variable {name or '(no name)'} is not set")
            elif kind == "file":
                try:
                    body = bounded(self._folder / name, SECRET_BYTES_MAX)
                    if body is not None:
                        return body.decode("utf-8").rstrip("\r\n")
                    missing.append(f"secret file {name} is larger than {SECRET_BYTES_MAX} bytes")
                except OSError as error:
                    missing.append(f"secret file {name}: {reason_of(error)}")
                except UnicodeDecodeError:
                    missing.append(f"secret file {name} is not UTF-8")
            else:
                missing.append(f"${{{found[3]}}} is no reference; write ${{env:NAME}} or ${{file:PATH}}")
            return ""

        out = _REFERENCE.sub(one, text)
        if missing:
            raise LookupError(*missing)
        return out
