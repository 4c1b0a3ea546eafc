"""The shape of a configuration file: which keys there are, of which kind, and what each is for.

One description serves twice: reading a file (every fault at once, with its place) and the JSON Schema for editors. What
keys *mean* together is `core.plan`'s business.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from thalweg.errors import Fault

Plain: TypeAlias = Any
"""What a file says: str, int, float, bool, None, list, dict."""


@dataclass(frozen=True)
class Mark:
    """A place in the file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Value:
    """A value and its place. `content` is a scalar, a list of Values, or a dict of name to (the key's place, Value).

    `inside`, of a text, finds the place in the file of a line and column of it, both from 1.
    """

    content: Any
    mark: Mark
    inside: Callable[[int, int], Mark] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Kind:
    """Of what kind a value is, and what it is for."""

    doc: str = ""
    required: bool = False


@dataclass(frozen=True)
class Text(Kind):
    pattern: str = ""  # must match whole
    secret: bool = False  # never shown
    refers: bool = False  # may hold ${env:NAME} and ${file:PATH}
    longest: int = 4_000
    blank: bool = False  # may be empty, or nothing but blanks


@dataclass(frozen=True)
class Choice(Kind):
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole(Kind):
    minimum: int = 0
    maximum: int = 1 << 62


@dataclass(frozen=True)
class Share(Kind):
    """A fraction between 0 and 1, both excluded."""


@dataclass(frozen=True)
class Size(Kind):
    """Bytes: a whole number, or a number and a unit (KiB, MiB, GiB, kB, MB, GB)."""

    minimum: int = 1


@dataclass(frozen=True)
class Flag(Kind):
    pass


@dataclass(frozen=True)
class Scalar(Kind):
    """Text, a number or a boolean."""


@dataclass(frozen=True)
class Address(Kind):
    """host:port, or false for none."""


@dataclass(frozen=True)
class Many(Kind):
    of: Kind = field(default_factory=Text)
    least: int = 0
    most: int = 1_000


@dataclass(frozen=True)
class Free(Kind):
    """Names that the engine passes on: name to scalar."""


@dataclass(frozen=True)
class Columns(Kind):
    """Column name to type, nested as it likes."""


@dataclass(frozen=True)
class Group(Kind):
    keys: Mapping[str, Kind] = field(default_factory=dict)


NAME: Final = r"[A-Za-z_][A-Za-z0-9_.-]{0,99}"
SQL_LONGEST: Final = 20_000
REFERENCE: Final = re.compile(r"\$\{(env|file):")

CODEC: Final = Group("How the source's bytes become rows.", keys={
    "type": Choice("Format of a record.", True, ("json", "csv", "avro", "bytes", "arrow")),
    "schema": Columns("Columns and their types (json, csv): what is not named here is left out."),
    "schema_file": Text("Path of an Avro schema, relative to this file."),
    "registry": Group("A Confluent-compatible schema registry.", keys={
        "url": Text("Its base URL.", True, secret=True, refers=True),
        "options": Free("username, password, token, ca."),
    }),
    "framing": Choice("How a record names its schema.", options=("confluent", "none")),
    "tombstone": Choice("What becomes of a record without a value: a row of nulls, nothing, or a DLQ row.", options=("row", "drop", "dlq")),
    "delimiter": Text("CSV field separator, one character.", blank=True),
    "quote": Text("CSV quote, one character; '' for none.", blank=True),
})  # fmt: skip

ROOT_SHAPE: Final = Group("A Thalweg pipeline.", keys={
    "pipeline": Group("The pipeline itself.", True, keys={
        "name": Text("Its name: scope of its coverage and default of its consumer group.", True, NAME),
    }),
    "metadata": Group("Columns that the engine adds.", keys={
        "prefix": Text("Prefix of every such column.", pattern=r"[a-z_][a-z0-9_]{0,30}"),
    }),
    "sources": Many("What is read.", True, least=1, of=Group(keys={
        "name": Text("Name of the source.", True, NAME),
        "type": Choice("Technology.", True, ("kafka", "files")),
        "cluster_id": Text("Which cluster (or store) this is. Hashed into every record id: never change it.", True, refers=True),
        "topics": Many("Topics; a name that begins with ^ is a pattern (kafka).", of=Text(refers=True)),
        "group": Text("Consumer group (kafka); the pipeline's name by default.", refers=True),
        "path": Text("Path or URL of the files, with * and ** (files).", refers=True),
        "format": Choice("Format of the files; by their ending by default.", options=("ndjson", "csv", "parquet")),
        "options": Free("The client's own settings: librdkafka properties, or those of the object store."),
        "offset_reset": Choice("Where to start without a stored offset, or when it is gone (kafka).", options=("error", "earliest", "latest")),
        "codec": CODEC,
    })),
    "transforms": Many("A tree of nodes, each with one input.", of=Group(keys={
        "name": Text("Name of the node.", True, NAME),
        "input": Text("Node that it reads; `records`, the decoded records, by default."),
        "sql": Text("Row-wise SQL over its input, which it calls `source`.", longest=SQL_LONGEST),
        "sql_file": Text("Path of a file with that SQL, relative to this file."),
        "unnest": Text("A list column: one row per element."),
    })),
    "quality": Group("Rules.", keys={
        "rules": Many("Each row that breaks a rule gets its action.", of=Group(keys={
            "id": Text("Name of the rule.", True, NAME),
            "input": Text("Node whose rows are judged; `records` by default."),
            "column": Text("Column that is judged."),
            "not_null": Flag("The column must have a value."),
            "min": Scalar("Least value that is allowed."),
            "max": Scalar("Greatest value that is allowed."),
            "regex": Text("Must be found in the value (RE2)."),
            "accepted": Many("All values that are allowed.", of=Scalar(), most=5_000),
            "sql": Text("A predicate that must hold.", longest=SQL_LONGEST),
            "action": Choice("What becomes of a row that breaks it.", True, ("dlq", "quarantine", "drop")),
            "code": Text("Reason code of such a row; the kind of rule by default.", pattern=r"[a-z0-9-]{1,60}"),
            "version": Whole("Version of the rule.", minimum=1),
        })),
    }),
    "sinks": Many("Where rows go.", True, least=1, of=Group(keys={
        "name": Text("Name of the sink.", True, NAME),
        "type": Choice("Technology.", True, ("parquet", "postgres")),
        "role": Choice("What it is for; a destination by default.", options=("primary-raw", "destination", "dlq", "quarantine")),
        "input": Text("Node whose rows it takes; `records` by default (destinations)."),
        "url": Text("Folder or store URL (parquet), or connection string (postgres).", True, secret=True, refers=True),
        "options": Free("The store's own settings."),
        "table": Text("[schema.]table (postgres).", refers=True),
        "on_failure": Choice("Whether its trouble holds the source back or leaves a gap.", options=("hold", "isolate")),
        "durable": Flag("Whether a landed row survives a power cut; a primary raw must."),
        "idempotency": Choice("What makes a row the same row when it is written again (postgres).", options=("range", "record-id", "key")),
        "key": Many("Columns of that key.", of=Text()),
        "bytes_max": Size("A chunk is closed at so many bytes,", minimum=1024),
        "age_ms_max": Whole("so long after its first row,", minimum=1, maximum=86_400_000),
        "rows_max": Whole("or at so many rows.", minimum=1),
    })),
    "coverage": Group("Where it is kept which ranges reached which sink.", keys={
        "store": Choice("Beside the primary raw (auto), in an object store, or in a database.", options=("auto", "objects", "relational")),
        "url": Text("The store, unless auto.", secret=True, refers=True),
        "options": Free("The store's own settings."),
        "interval_ms": Whole("Between checkpoints.", minimum=1, maximum=3_600_000),
    }),
    "recovery": Group("Filling gaps of destinations from the primary raw.", keys={
        "enabled": Flag("Needed for more than one destination."),
    }),
    "flow": Group("Limits.", keys={
        "memory_limit_bytes": Size("For the whole process.", minimum=64 << 20),
        "prefetch_share": Share("Of what may be held, for the clients' own prefetch."),
        "poll_records_max": Whole("Records of one poll.", minimum=1, maximum=1_000_000),
        "poll_wait_ms": Whole("How long a poll waits for records.", minimum=1, maximum=10_000),
    }),
    "observability": Group("What can be seen of it.", keys={
        "http": Address("Where /live, /ready, /health, /stats and /metrics are served; false for nowhere."),
    }),
    "drain_ms": Whole("How long SIGTERM waits for open work.", minimum=0, maximum=600_000),
})  # fmt: skip

UNITS: Final = {
    "": 1, "B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip


SIZE_MAX: Final = 1 << 50


class Reader:
    """Reads one file's values against a shape and remembers where everything stood."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.marks: dict[str, Mark] = {"": Mark(1, 1)}
        self.texts: dict[str, Value] = {}

    def at(self, path: str) -> Mark:
        """The place of `path`, or of the nearest thing around it that is in the file."""
        while path not in self.marks:
            path = path.rpartition("[")[0] if path.endswith("]") else path.rpartition(".")[0]
        return self.marks[path]

    def inside(self, path: str, line: int, column: int) -> Mark:
        """A place within the text at `path`, as a place in the file."""
        text = self.texts.get(path)
        if text is not None and text.inside is not None:
            return text.inside(line, column)
        return self.at(path) if text is None else text.mark

    def fault(self, path: str, code: str, what: str, remedy: str, mark: Mark | None = None) -> None:
        place = mark or self.at(path)
        self.faults.append(Fault(place.line, place.column, code, what, remedy, path))

    def read(self, value: Value, kind: Kind, path: str = "") -> Plain:
        """The plain value, or None where it is unfit (a fault says so)."""
        self.marks.setdefault(path, value.mark)
        content = value.content
        if isinstance(content, str):
            self.texts[path] = value
        match kind:
            case Group():
                return self._group(value, kind, path)
            case Many():
                if not isinstance(content, list):
                    return self._unfit(path, "a list", content)
                if len(content) < kind.least:
                    self.fault(path, "empty-list", f"{path} is empty", f"Name at least {kind.least}")
                if len(content) > kind.most:
                    self.fault(path, "too-long", f"{path} has {len(content)} entries", f"At most {kind.most}")
                    return None
                return [self.read(item, kind.of, f"{path}[{i}]") for i, item in enumerate(content)]
            case Text():
                if not isinstance(content, str) or not (content.strip() or kind.blank):
                    return self._unfit(path, "text", content, kind.secret)
                return content if self._text_fits(content, kind, path) else None
            case Choice():
                if content in kind.options and isinstance(content, str):
                    return content
                near = difflib.get_close_matches(str(content)[:80].lower(), kind.options, 1, 0.5)
                hint = f"Did you mean {near[0]}?" if near else f"One of: {', '.join(kind.options)}"
                self.fault(path, "bad-value", f"{path} is {_shown(content)}", hint)
                return None
            case Flag():
                return content if isinstance(content, bool) else self._unfit(path, "true or false", content)
            case Whole():
                if isinstance(content, bool) or not isinstance(content, int):
                    return self._unfit(path, "a whole number", content)
                if not kind.minimum <= content <= kind.maximum:
                    self.fault(path, "bad-value", f"{path} is {content}", f"Between {kind.minimum} and {kind.maximum}")
                    return None
                return content
            case Share():
                if isinstance(content, bool) or not isinstance(content, int | float) or not 0 < content < 1:
                    return self._unfit(path, "a number between 0 and 1", content)
                return float(content)
            case Size():
                return self._size(content, kind, path)
            case Scalar():
                if isinstance(content, str) and REFERENCE.search(content):
                    return self._no_reference(path)
                if isinstance(content, str | int) or (isinstance(content, float) and math.isfinite(content)):
                    return content
                return self._unfit(path, "text, a number, true or false", content)
            case Address():
                return self._address(content, path)
            case Free():
                return self._free(value, path)
            case Columns():
                return self._columns(value, path)
        raise AssertionError(kind)

    def _unfit(self, path: str, wanted: str, content: Any, secret: bool = False) -> None:
        found = _kind_of(content) if secret else _shown(content)
        self.fault(path, "bad-type", f"{path or 'the file'} is {found}, not {wanted}", f"Write {wanted}")

    def _no_reference(self, path: str) -> None:
        what = f"{path} holds a reference, which is not resolved here"
        self.fault(path, "reference-not-here", what, "Write the value itself")

    def _text_fits(self, content: str, kind: Text, path: str) -> bool:
        if len(content) > kind.longest:
            self.fault(path, "too-long", f"{path} has {len(content)} characters", f"At most {kind.longest}")
            return False
        if REFERENCE.search(content) and not kind.refers:
            self._no_reference(path)
            return False
        if "\0" in content:
            self.fault(path, "bad-value", f"{path} holds a NUL", "Remove it")
            return False
        if kind.pattern and not re.fullmatch(kind.pattern, content):
            self.fault(path, "bad-value", f"{path} is {_shown(content)}", f"It must match {kind.pattern}")
            return False
        return True

    def _group(self, value: Value, kind: Group, path: str) -> Plain:
        if not isinstance(value.content, dict):
            return self._unfit(path, "a mapping", value.content)
        out = {}
        meant: set[str] = set()  # keys that are there, misspelt: they are not missing as well
        for name, (mark, inner) in value.content.items():
            below = f"{path}.{name}" if path else name
            self.marks[below] = mark
            if name in kind.keys:
                out[name] = self.read(inner, kind.keys[name], below)
                continue
            near = difflib.get_close_matches(_snake(name[:80]), list(kind.keys), 1, 0.6)
            meant.update(near)
            known = f"There are: {', '.join(kind.keys)}"
            self.fault(
                below,
                "unknown-key",
                f"there is no key {name[:80]} in {path or 'the file'}",
                f"Did you mean {near[0]}?" if near else known,
            )
        for name, inner_kind in kind.keys.items():
            if inner_kind.required and name not in value.content and name not in meant:
                what = f"{path + '.' if path else ''}{name} is missing"
                self.fault(path, "missing-key", what, inner_kind.doc or f"Add {name}")
        return out

    def _size(self, content: Any, kind: Size, path: str) -> int | None:
        size: int | None = None
        if isinstance(content, int) and not isinstance(content, bool):
            size = content
        elif isinstance(content, str):
            found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", content)
            if found and found[2] in UNITS:
                size = int(min(float(found[1]) * UNITS[found[2]], SIZE_MAX + 1))
        if size is None:
            self._unfit(path, "a size such as 64MiB", content)
            return None
        if size < kind.minimum:
            self.fault(path, "bad-value", f"{path} is {size} bytes", f"At least {kind.minimum}")
            return None
        if size > SIZE_MAX:
            self.fault(path, "bad-value", f"{path} is more than any machine has", f"At most {SIZE_MAX}")
            return None
        return size

    def _address(self, content: Any, path: str) -> Plain:
        if content is False:
            return False
        found = re.fullmatch(r"(.+):([0-9]{1,5})", content) if isinstance(content, str) else None
        if not found or int(found[2]) > 65535:
            return self._unfit(path, "host:port, or false", content)
        return content

    def _free(self, value: Value, path: str) -> Plain:
        if not isinstance(value.content, dict):
            return self._unfit(path, "a mapping", value.content, True)
        out = {}
        for name, (mark, inner) in value.content.items():
            self.marks[f"{path}.{name}"] = mark
            if isinstance(inner.content, bool):
                out[name] = str(inner.content).lower()
            elif isinstance(inner.content, str | int | float):
                out[name] = str(inner.content)
            else:
                self._unfit(f"{path}.{name}", "text, a number, true or false", inner.content, True)
        return out

    def _columns(self, value: Value, path: str) -> Plain:
        if not isinstance(value.content, dict):
            return self._unfit(path, "a mapping of column to type", value.content)
        self._column_marks(value, path)
        return plain(value)

    def _column_marks(self, value: Value, path: str) -> None:
        if isinstance(value.content, dict):
            for name, (mark, inner) in value.content.items():
                self.marks.setdefault(f"{path}.{name}", mark)
                self._column_marks(inner, f"{path}.{name}")
        elif isinstance(value.content, list):
            for inner in value.content:
                self._column_marks(inner, f"{path}[]")


def plain(value: Value) -> Plain:
    """A value without its places."""
    if isinstance(value.content, dict):
        return {name: plain(inner) for name, (_, inner) in value.content.items()}
    if isinstance(value.content, list):
        return [plain(item) for item in value.content]
    return value.content


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower().replace("-", "_")


def _kind_of(content: Any) -> str:
    """What sort of value it is, the value itself unsaid."""
    if content is None or content == "" or (isinstance(content, str) and not content.strip()):
        return "empty"
    if isinstance(content, bool):
        return "true or false"
    names = {dict: "a mapping", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names.get(type(content), "a value")


def _shown(content: Any) -> str:
    """A value for a message; text may hold a secret, so only what is short and has no look of one."""
    if content is None or isinstance(content, dict | list):
        return _kind_of(content)
    text = repr(content)
    return text if len(text) <= 40 and not re.search("://|password|secret|token", text.lower()) else _kind_of(content)


def json_schema(kind: Kind = ROOT_SHAPE) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the same shape."""
    out: dict[str, Any] = {"description": kind.doc} if kind.doc else {}
    if kind is ROOT_SHAPE:
        out = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Thalweg pipeline", **out}
    match kind:
        case Group():
            out |= {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: json_schema(inner) for name, inner in kind.keys.items()},
                "required": [name for name, inner in kind.keys.items() if inner.required],
            }
        case Many():
            out |= {"type": "array", "items": json_schema(kind.of), "minItems": kind.least, "maxItems": kind.most}
        case Text():
            out |= {"type": "string", "minLength": 0 if kind.blank else 1, "maxLength": kind.longest}
            out |= {"pattern": f"^{kind.pattern}$"} if kind.pattern else {}
        case Choice():
            out |= {"enum": list(kind.options)}
        case Flag():
            out |= {"type": "boolean"}
        case Whole():
            out |= {"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}
        case Share():
            out |= {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        case Size():
            out |= {
                "anyOf": [
                    {"type": "integer", "minimum": kind.minimum},
                    {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({'|'.join(UNITS)})\s*$"},
                ]
            }
        case Scalar():
            out |= {"type": ["string", "number", "boolean"]}
        case Address():
            out |= {"anyOf": [{"const": False}, {"type": "string", "pattern": r"^.+:\d{1,5}$"}]}
        case Free():
            out |= {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
        case Columns():
            out |= {"type": "object", "additionalProperties": {"type": ["string", "object", "array"]}}
    return out


__all__: Sequence[str] = ["ROOT_SHAPE", "Mark", "Plain", "Reader", "Value", "json_schema", "plain"]
