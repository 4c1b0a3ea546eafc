"""The single door to Arrow's type names: what a configuration may write for a column's type, and back.

Decides which types a column may be declared with and how they are spelt. It never infers a type from data.

====================================  =============================================================
written                               Arrow type
====================================  =============================================================
`bool`                                bool
`int8` … `int64`, `uint8` … `uint64`  integers
`float32`, `float64`                  IEEE floats
`string`, `binary`                    UTF-8 text, bytes
`date32`                              days since 1970-01-01
`time32[s|ms]`, `time64[us|ns]`       time of day
`timestamp[s|ms|us|ns]`               wall-clock time without a zone
`timestamp[us, tz=UTC]`               instant
`duration[s|ms|us|ns]`                elapsed time
`decimal128(p,s)`, `decimal256(p,s)`  exact decimals; 1 ≤ p ≤ 38 or 76, 0 ≤ s ≤ p
`list<T>` or `[T]`                    list
`struct<a: T, b: U>` or `{a: T}`      struct
`map<T>`                              string keys to `T`
====================================  =============================================================

A few common spellings are taken as well (`boolean`, `int`, `long`, `float`, `double`, `str`, `text`, `bytes`, `date`,
`timestamp`, `decimal(p,s)`); `name_of` gives the one in the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final
from zoneinfo import available_timezones

import pyarrow as pa

PLAIN: Final[Mapping[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
}
ALIASES: Final[Mapping[str, str]] = {
    "boolean": "bool",
    "int": "int32",
    "integer": "int32",
    "long": "int64",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "str": "string",
    "utf8": "string",
    "text": "string",
    "bytes": "binary",
    "date": "date32",
    "date32[day]": "date32",
    "timestamp": "timestamp[us]",
    "timestamptz": "timestamp[us, tz=UTC]",
}
EXAMPLES: Final = "int64, float64, string, bool, date32, timestamp[us, tz=UTC], decimal128(10,2), list<string>, struct<a: int64>"
DEPTH_MAX: Final = 32  # levels of nesting in a declared type; deeper is a mistake, and the parser is recursive

_WORDS: Final = [
    *PLAIN,
    *ALIASES,
    "timestamp",
    "time32",
    "time64",
    "duration",
    "decimal128",
    "decimal256",
    "list",
    "struct",
    "map",
]
_UNITS: Final[Mapping[str, tuple[str, ...]]] = {
    "timestamp": ("s", "ms", "us", "ns"),
    "duration": ("s", "ms", "us", "ns"),
    "time32": ("s", "ms"),
    "time64": ("us", "ns"),
}
_UNIT_MAKERS: Final[Mapping[str, Callable[[str], pa.DataType]]] = {
    "duration": pa.duration,
    "time32": pa.time32,
    "time64": pa.time64,
}
_DECIMAL_DIGITS_MAX: Final = {"decimal": 38, "decimal128": 38, "decimal256": 76}
_OFFSET: Final = re.compile(r"[+-]([01]\d|2[0-3]):[0-5]\d\Z")


class _Bad(ValueError):
    """One problem; `what` and `remedy` without the place, which the caller knows."""


def type_of(spec: object) -> pa.DataType:
    """The type that `spec` (a type string, `{name: spec}` or `[spec]`) declares. Raises `ValueError`, all problems in it."""
    problems: list[str] = []
    found = _walk(spec, "type", problems, 0)
    if found is None or problems:
        raise ValueError("\n".join(problems))
    return found


def schema_of(columns: Mapping[str, Any]) -> pa.Schema:
    """The schema that a mapping of column name to type declares, in its order, every column nullable.

    Raises `ValueError` whose message has one line a problem: `<column path>: <what>; <remedy>`.
    """
    problems: list[str] = []
    fields = _fields(columns, "", problems, 0)
    if not columns:
        problems.append("schema: it has no columns; name at least one, such as id: int64")
    if problems:
        raise ValueError("\n".join(problems))
    return pa.schema(fields)


def name_of(kind: pa.DataType) -> str:
    """How the type is written; `type_of(name_of(t)) == t` for every type a configuration can declare."""
    types = pa.types
    if types.is_list(kind):
        return f"list<{name_of(kind.value_type)}>"
    if types.is_struct(kind):
        return f"struct<{', '.join(f'{_quoted(field.name)}: {name_of(field.type)}' for field in kind)}>"
    if types.is_map(kind):
        return f"map<{name_of(kind.item_type)}>"
    if types.is_decimal(kind):
        return f"decimal{kind.bit_width}({kind.precision},{kind.scale})"
    if types.is_timestamp(kind):
        return f"timestamp[{kind.unit}]" if kind.tz is None else f"timestamp[{kind.unit}, tz={kind.tz}]"
    return next((name for name, plain in PLAIN.items() if plain == kind), str(kind))


# --- specs of mappings and lists ----------------------------------------------------------------------------------


def _fields(columns: Mapping[Any, Any], where: str, problems: list[str], depth: int) -> list[pa.Field]:
    fields = []
    for name, spec in columns.items():
        path = f"{where}.{name}" if where else str(name)
        if not isinstance(name, str) or not name:
            problems.append(f"{path or repr(name)}: a column's name must be non-empty text; quote it")
            continue
        if "\0" in name:
            problems.append(f"{path!r}: a column's name holds a NUL; no store takes that, rename it")
            continue
        found = _walk(spec, path, problems, depth)
        if found is not None:
            fields.append(pa.field(name, found))
    return fields


def _walk(spec: object, where: str, problems: list[str], depth: int) -> pa.DataType | None:
    if depth > DEPTH_MAX:
        problems.append(f"{where}: nested more than {DEPTH_MAX} levels deep; declare it as string or flatten it")
        return None
    if isinstance(spec, Mapping):
        if not spec:
            problems.append(f"{where}: a struct without fields; name at least one, such as {{id: int64}}")
            return None
        return pa.struct(_fields(spec, where, problems, depth + 1))
    if isinstance(spec, list | tuple):
        if len(spec) != 1:
            problems.append(f"{where}: a list of {len(spec)} types; write the one type of its elements, such as [string]")
            return None
        item = _walk(spec[0], f"{where}[]", problems, depth + 1)
        return None if item is None else pa.list_(item)
    if isinstance(spec, str):
        try:
            return _Parser(spec, depth).whole()
        except _Bad as bad:
            problems.append(f"{where}: {bad}")
            return None
    problems.append(f"{where}: {spec!r} is no type; write one of {EXAMPLES}")
    return None


# --- type strings -------------------------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"'


class _Parser:
    """Recursive descent over one type string."""

    def __init__(self, text: str, depth: int) -> None:
        self.text, self.at, self.depth = text, 0, depth

    def whole(self) -> pa.DataType:
        found = self._type()
        if self.at < len(self.text):
            raise _Bad(f"{self.text!r} goes on after a whole type with {self.text[self.at :]!r}; remove that")
        return found

    def _space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _try(self, mark: str) -> bool:
        self._space()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._try(mark):
            raise _Bad(f"{self.text!r} lacks {mark!r} at character {self.at + 1}; write one of {EXAMPLES}")
        self._space()

    def _word(self) -> str:
        self._space()
        match = re.compile(r"\w+").match(self.text, self.at)
        if match is None:
            raise _Bad(f"{self.text!r} has no type at character {self.at + 1}; write one of {EXAMPLES}")
        self.at = match.end()
        return match.group()

    def _type(self) -> pa.DataType:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise _Bad(f"nested more than {DEPTH_MAX} levels deep; declare it as string or flatten it")
        word = self._word()
        low = word.lower()
        found: pa.DataType
        if low == "list":
            self._expect("<")
            found = pa.list_(self._type())
            self._expect(">")
        elif low == "map":
            self._expect("<")
            found = pa.map_(pa.string(), self._type())
            self._expect(">")
        elif low == "struct":
            found = self._struct()
        elif low in _DECIMAL_DIGITS_MAX:
            found = self._decimal(low)
        elif low == "date32":
            if self._try("[") and not self._try("day]"):
                raise _Bad(f"{self.text!r}: date32 has no unit but day; write date32")
            found = pa.date32()
        elif low in _UNITS and self._try("["):
            found = self._unit(low)
        elif low in ("time32", "time64", "duration"):
            raise _Bad(f"{word!r} lacks its unit; write {low}[{_UNITS[low][0]}]")
        elif ALIASES.get(low, low) in PLAIN:
            found = PLAIN[ALIASES.get(low, low)]
        elif low in ALIASES:
            found = _Parser(ALIASES[low], self.depth).whole()
        else:
            near = get_close_matches(low, _WORDS, 1)
            raise _Bad(f"{word!r} is no type; {f'did you mean {near[0]!r}?' if near else f'write one of {EXAMPLES}'}")
        self._space()
        self.depth -= 1
        return found

    def _struct(self) -> pa.DataType:
        self._expect("<")
        fields: list[pa.Field] = []
        while True:
            name = self._name()
            if any(field.name == name for field in fields):
                raise _Bad(f"the struct names {name!r} twice; a field's name must be its own")
            self._expect(":")
            fields.append(pa.field(name, self._type()))
            if not self._try(","):
                break
        self._expect(">")
        return pa.struct(fields)

    def _name(self) -> str:
        self._space()
        if not self.text.startswith('"', self.at):
            return self._word()
        match = re.compile(r'"((?:[^"]|"")+)"').match(self.text, self.at)
        if match is None:
            raise _Bad(f"{self.text!r} has a field name at character {self.at + 1} that is empty or lacks its closing quote")
        self.at = match.end()
        return match.group(1).replace('""', '"')

    def _number(self) -> int:
        self._space()
        match = re.compile(r"-?\d{1,9}").match(self.text, self.at)
        if match is None:
            raise _Bad(f"{self.text!r} lacks a number at character {self.at + 1}; write decimal128(10,2)")
        self.at = match.end()
        return int(match.group())

    def _decimal(self, word: str) -> pa.DataType:
        self._expect("(")
        digits = self._number()
        scale = self._number() if self._try(",") else 0
        self._expect(")")
        top = _DECIMAL_DIGITS_MAX[word]
        if not 1 <= digits <= top:
            wider = "; decimal256 holds up to 76" if top == 38 and digits <= 76 else ""
            raise _Bad(
                f"{word} holds 1 to {top} digits, not {digits}{wider or f'; write {word}({top},{max(0, min(scale, top))})'}"
            )
        if not 0 <= scale <= digits:
            raise _Bad(
                f"scale {scale} of {word}({digits},{scale}) must lie between 0 and its {digits} digits; change one of them"
            )
        return pa.decimal256(digits, scale) if word == "decimal256" else pa.decimal128(digits, scale)

    def _unit(self, word: str) -> pa.DataType:
        unit = self._word()
        if unit not in _UNITS[word]:
            raise _Bad(f"{word} has no unit {unit!r}; write one of {', '.join(f'{word}[{u}]' for u in _UNITS[word])}")
        if word != "timestamp":
            self._expect("]")
            return _UNIT_MAKERS[word](unit)
        zone = None
        if self._try(","):
            self._expect("tz")
            self._expect("=")
            end = self.text.find("]", self.at)
            zone = self.text[self.at : end if end >= 0 else None].strip()
            self.at = end if end >= 0 else len(self.text)
            if not (_OFFSET.match(zone) or zone in available_timezones()):
                raise _Bad(f"{zone!r} is no time zone; write UTC, an IANA name such as Europe/Berlin, or +01:00")
        self._expect("]")
        return pa.timestamp(unit, zone)
