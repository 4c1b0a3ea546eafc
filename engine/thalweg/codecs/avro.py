"""Avro records to columns, by the schema each was written with.

Decides which schema a record was written with, which columns that schema gives, and whether a datum is exactly one value
of it. It never fetches a schema, never alters a value to make it fit, and never lets a bad datum touch its neighbours.

**Framing** (Confluent's wire format, as its own clients read it). A header `__value_schema_id`, the first of that name, wins
and the value is then a bare datum; else the value begins with it. Version 0 is the byte 0x00 and a big-endian int32 schema
id, version 1 the byte 0x01 and the schema's 16-byte GUID. With framing `none` every value is a bare datum of the schema file.

==========================================  ==========================================================================
Avro                                        Arrow (every column nullable)
==========================================  ==========================================================================
boolean, int, long, float, double           bool, int32, int64, float32, float64
string, enum, uuid                          string
bytes, fixed, uuid and duration as fixed    binary
null, a record without fields               string, always null
array, map, record                          list, map<string, …>, struct
union with null and one other               that other
any other union                             struct with a field for each branch but null, named by its type
date, time-*, timestamp-*                   date32, time32[ms], time64[us], timestamp[…, tz=UTC]
local-timestamp-*                           timestamp[…]
decimal                                     decimal128 up to 38 digits, decimal256 up to 76. With a precision or scale that is
                                            missing or makes no sense, or of more digits: binary, byte for byte
==========================================  ==========================================================================

A schema that is not a record gives the one column `value`. Records written with several schemas come out in one shape: the
reader's where one is configured, else the columns of the first schema met and, after them, those that later ones add. Columns
match by name; a number is widened where both can be held (a value that float64 cannot hold exactly is refused). Aliases are
not followed; a reader's default fills a column that the writer lacks where it is null, a boolean, a number or text.

Refusals: `avro-frame`, `avro-decode` (not exactly one value: too short, bytes left over, not UTF-8, out of range),
`schema-unknown`, `schema-invalid`, `schema-unsupported` (recursive; an array of items without width, which a count alone
makes endless; nested too deeply), `schema-conflict` (a column that cannot be reconciled with the shape so far).

**Fast path**: pyruhvro, vectorised. It knows few types, panics on the others (a `BaseException`), does not look whether text is
UTF-8, wraps an int beyond 32 bits and ignores left-over bytes. So it is given a schema of our own with the same
bytes: logical types stripped, `int` as `long`, `bytes` as `string`, the frame as fields in front, and at the end a
`double` for which eight known bytes are appended to each datum: found intact, the datum was consumed to its last byte. **Slow
path**: a reader of our own, per record, for schemas with `fixed` and for finding the bad record of a batch.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyruhvro

from thalweg.codecs.codec import Refused, Rows, decoded, joined_batches, sifted, values_of
from thalweg.core.batch import Decoded
from thalweg.core.topology import CodecPlan, Tombstone
from thalweg.ports import RegisteredSchema

HEADER: Final = "__value_schema_id"
SENTINEL: Final = b"\xf7THALWEG"
DEPTH_MAX: Final = 64  # levels of nesting in a schema
BLOCK_ROWS: Final = 64  # a failing block of so few datums is looked at one by one
PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_UNITS: Final = {"millis": "ms", "micros": "us", "nanos": "ns"}

Reason = tuple[str, str]
"""Code and detail."""


class Invalid(ValueError):
    """A schema that cannot be used; `code` says in which way."""

    def __init__(self, detail: str, code: str = "schema-invalid") -> None:
        super().__init__(detail)
        self.code = code


class _Bad(ValueError):
    """Some datum of those tried is not a value of its schema."""


class _Slow(ValueError):
    """The fast path cannot read such a schema."""


# --- schemas ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A type. `kids`: fields of a record, branches of a union, the one item of an array, map or `optional`."""

    kind: str  # a primitive, enum, fixed, array, map, record, optional (null and one other), union
    name: str = ""
    kids: tuple[tuple[str, Shape], ...] = ()
    symbols: tuple[str, ...] = ()
    size: int = 0
    nulls: int = 0  # optional: index of the null branch
    logical: tuple[Any, ...] = ()  # checked: ("date",), ("time", unit), ("timestamp", unit, zone), ("decimal", precision, scale)
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)  # record: of its fields

    @property
    def width_zero(self) -> bool:
        """Whether a value takes no bytes."""
        if self.kind == "record":
            return all(kid.width_zero for _, kid in self.kids)
        return self.kind == "null" or (self.kind == "fixed" and self.size == 0)

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type by the table above."""
        if self.logical:
            return _logical_type(self.logical)
        if self.kind == "array":
            return pa.list_(self.kids[0][1].arrow)
        if self.kind == "map":
            return pa.map_(pa.string(), self.kids[0][1].arrow)
        if self.kind == "optional":
            return self.kids[0][1].arrow
        if self.kind == "record":
            return pa.struct([(n, kid.arrow) for n, kid in self.kids]) if self.kids else pa.string()
        if self.kind == "union":
            return pa.struct([(n, kid.arrow) for n, kid in self.kids if kid.kind != "null"])
        return _PLAIN[self.kind]


_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "null": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}


def _logical_type(logical: tuple[Any, ...]) -> pa.DataType:
    if logical[0] == "date":
        return pa.date32()
    if logical[0] == "time":
        return pa.time32("ms") if logical[1] == "ms" else pa.time64("us")
    if logical[0] == "timestamp":
        return pa.timestamp(logical[1], logical[2])
    precision, scale = logical[1:]
    return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)


def _logical(spec: Mapping[str, Any], kind: str) -> tuple[Any, ...]:
    """The logical type that `spec` puts on `kind`; () where it has none, or one that the specification says to ignore."""
    name = spec.get("logicalType")
    if not isinstance(name, str):
        return ()
    if name == "date" and kind == "int":
        return ("date",)
    if (name, kind) in (("time-millis", "int"), ("time-micros", "long")):
        return ("time", _UNITS[name[5:]])
    head, _, unit = name.rpartition("-")
    if head in ("timestamp", "local-timestamp") and unit in _UNITS and kind == "long":
        return ("timestamp", _UNITS[unit], "UTC" if head == "timestamp" else None)
    if name == "decimal" and kind in ("bytes", "fixed"):
        precision, scale = spec.get("precision"), spec.get("scale", 0)
        if type(precision) is int and type(scale) is int and 0 < precision <= 76 and 0 <= scale <= precision:
            return ("decimal", precision, scale)
    return ()


class _Names:
    """Named types of one schema and of what it refers to."""

    def __init__(self, references: Mapping[str, str]) -> None:
        self.known: dict[str, Shape | None] = {}  # None: being defined
        self._unread = dict(references)

    def find(self, name: str) -> Shape:
        if name not in self.known and name in self._unread:
            self.shape(_json(self._unread.pop(name)), "", 0)
        while name not in self.known and self._unread:
            other = next(iter(self._unread))
            self.shape(_json(self._unread.pop(other)), "", 0)
        if name not in self.known:
            raise Invalid(f"type {name!r} is defined nowhere")
        found = self.known[name]
        if found is None:
            raise Invalid(f"type {name!r} holds itself; a column cannot", "schema-unsupported")
        return found

    def shape(self, spec: Any, space: str, depth: int) -> Shape:
        if depth > DEPTH_MAX:
            raise Invalid(f"nested more than {DEPTH_MAX} levels deep", "schema-unsupported")
        if isinstance(spec, str):
            if spec in PRIMITIVES:
                return Shape(spec)
            full = spec if "." in spec or not space else f"{space}.{spec}"
            return self.find(full if full in self.known or "." in spec or spec not in self.known else spec)
        if isinstance(spec, list):
            return self._union(spec, space, depth)
        if not isinstance(spec, dict) or "type" not in spec:
            raise Invalid(f"{_clipped(json.dumps(spec, default=str))} is no type")
        kind = spec["type"]
        if not isinstance(kind, str):
            return self.shape(kind, space, depth + 1)
        if kind in PRIMITIVES:
            return Shape(kind, logical=_logical(spec, kind))
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in spec:
                raise Invalid(f"{kind} without {key}")
            item = self.shape(spec[key], space, depth + 1)
            if kind == "array" and item.width_zero:
                raise Invalid("an array whose items take no bytes; its length cannot be bounded", "schema-unsupported")
            return Shape(kind, kids=(("item", item),))
        if kind in ("record", "error", "enum", "fixed"):
            return self._named(spec, kind, space, depth)
        return self.shape(kind, space, depth + 1)

    def _union(self, spec: list[Any], space: str, depth: int) -> Shape:
        branches = [self.shape(branch, space, depth + 1) for branch in spec]
        if not branches or any(b.kind in ("union", "optional") for b in branches):
            raise Invalid("a union that is empty or holds a union")
        names = [b.name.rpartition(".")[2] or b.kind for b in branches]
        names = [b.name.replace(".", "_") if names.count(n) > 1 and b.name else n for n, b in zip(names, branches, strict=True)]
        if len(set(names)) < len(names):
            raise Invalid(f"a union with two branches of one type: {', '.join(names)}")
        if len(branches) == 2 and "null" in names:
            at = names.index("null")
            return Shape("optional", kids=(("item", branches[1 - at]),), nulls=at)
        if names == ["null"]:
            return Shape("union", kids=(("null", branches[0]),))
        return Shape("union", kids=tuple(zip(names, branches, strict=True)))

    def _named(self, spec: dict[str, Any], kind: str, space: str, depth: int) -> Shape:
        name = spec.get("name")
        if not isinstance(name, str) or not name:
            raise Invalid(f"{kind} without a name")
        if "." in name:
            space, full = name.rpartition(".")[0], name
        else:
            space = str(spec.get("namespace", space) or "")
            full = f"{space}.{name}" if space else name
        if full in self.known:
            raise Invalid(f"type {full!r} is defined twice")
        if kind == "fixed":
            size = spec.get("size")
            if type(size) is not int or size < 0:
                raise Invalid(f"fixed {full!r} without a size")
            found = Shape("fixed", full, size=size, logical=_logical(spec, kind))
        elif kind == "enum":
            symbols = spec.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols) or len(set(symbols)) < len(symbols):
                raise Invalid(f"enum {full!r} without its symbols")
            found = Shape("enum", full, symbols=tuple(symbols))
        else:
            self.known[full] = None
            fields = spec.get("fields")
            if not isinstance(fields, list) or not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in fields):
                raise Invalid(f"record {full!r} without its fields")
            kids = tuple((f["name"], self.shape(f.get("type"), space, depth + 1)) for f in fields)
            if len({n for n, _ in kids}) < len(kids):
                raise Invalid(f"record {full!r} has two fields of one name")
            found = Shape("record", full, kids=kids, defaults={f["name"]: f["default"] for f in fields if "default" in f})
        self.known[full] = found
        return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise Invalid("nested too deeply", "schema-unsupported") from None
    except ValueError as error:
        if text.strip() in PRIMITIVES:  # a registry may give a primitive bare
            return text.strip()
        raise Invalid(f"not JSON: {error}") from None


def shape_of(text: str, references: Mapping[str, str] | None = None) -> Shape:
    """The shape that a schema's text gives. A schema that is no record becomes a record of the one field `value`.

    Raises `Invalid`.
    """
    try:
        found = _Names(references or {}).shape(_json(text), "", 0)
    except RecursionError:
        raise Invalid("nested too deeply", "schema-unsupported") from None
    if found.kind != "record":
        return Shape("record", kids=(("value", found),))
    if not found.kids:
        raise Invalid("a record without fields has no columns", "schema-unsupported")
    return found


def _clipped(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"


# --- fast path ----------------------------------------------------------------------------------------------------

FRAMES: Final[Mapping[int, tuple[str, ...]]] = {0: (), 5: ("boolean", "float"), 17: ("boolean", "double", "double")}
"""Length of a frame to primitives that take as many bytes (the first byte is 0 or 1, so a boolean)."""


def _fast_schema(shape: Shape, frame: int) -> str:
    """A schema for pyruhvro that reads a frame, a datum and the sentinel. Raises `_Slow`."""
    names = 0

    def named(spec: dict[str, Any]) -> dict[str, Any]:
        nonlocal names
        names += 1
        return {"name": f"T{names}", **spec}

    def of(shape: Shape) -> Any:
        if shape.kind in ("int", "long"):
            return "long"
        if shape.kind in ("bytes", "string"):
            return "string"
        if shape.kind in PRIMITIVES:
            return shape.kind
        if shape.kind == "enum" and shape.symbols:
            return named({"type": "enum", "symbols": list(shape.symbols)})
        if shape.kind == "array":
            return {"type": "array", "items": of(shape.kids[0][1])}
        if shape.kind == "map":
            return {"type": "map", "values": of(shape.kids[0][1])}
        if shape.kind == "record" and shape.kids:
            return named({"type": "record", "fields": [{"name": f"f{i}", "type": of(k)} for i, (_, k) in enumerate(shape.kids)]})
        if shape.kind == "optional":
            branches = ["null", of(shape.kids[0][1])]
            return branches if shape.nulls == 0 else branches[::-1]
        if shape.kind == "union" and len(shape.kids) > 1:
            branches = [of(k) for _, k in shape.kids]
            kinds = [b if isinstance(b, str) else b["type"] for b in branches]
            if len(set(kinds)) == len(kinds):
                return branches
        raise _Slow(shape.kind)

    top = of(shape)
    top["fields"] = [
        *({"name": f"h{i}", "type": kind} for i, kind in enumerate(FRAMES[frame])),
        *top["fields"],
        {"name": "end", "type": "double"},
    ]
    return json.dumps(top)


def _vectorised(datums: Sequence[bytes], schema: str) -> pa.RecordBatch:
    """All datums at once. Raises `_Bad`."""
    try:
        found = pyruhvro.deserialize_array(datums, schema)
    except ValueError as error:
        raise _Bad(str(error)) from None
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # PanicException, a BaseException that cannot be imported
            raise
        raise _Bad(f"the decoder gave up: {error}") from None
    ends = found.column(found.num_columns - 1).to_numpy(zero_copy_only=False).view(np.int64)
    if np.any(ends != np.frombuffer(SENTINEL, "<i8")):
        raise _Bad("bytes are left over")
    return found


# --- slow path ----------------------------------------------------------------------------------------------------

Reader = Callable[[bytes, int], tuple[Any, int]]
"""Reads one value at a position; gives it and where it ends. Raises `_Bad`."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint of at most ten bytes, its bits beyond the 64th dropped."""
    found = 0
    for i in range(10):
        if at + i >= len(data):
            raise _Bad(f"it ends within a number at byte {at}")
        byte = data[at + i]
        found |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            found &= 0xFFFF_FFFF_FFFF_FFFF
            return (found >> 1) ^ -(found & 1), at + i + 1
    raise _Bad(f"a number of more than ten bytes at byte {at}")


def _sized(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if size < 0 or at + size > len(data):
        raise _Bad(f"{size} bytes are announced at byte {at}, {len(data) - at} are left")
    return data[at : at + size], at + size


def _reader(shape: Shape) -> Reader:
    kind = shape.kind
    if kind == "null":
        return lambda data, at: (None, at)
    if kind == "boolean":

        def boolean(data: bytes, at: int) -> tuple[Any, int]:
            value, end = _sized(data, at, 1)
            if value[0] > 1:
                raise _Bad(f"boolean {value[0]} at byte {at}")
            return value[0] == 1, end

        return boolean
    if kind == "int":

        def integer(data: bytes, at: int) -> tuple[Any, int]:
            value, end = _varint(data, at)
            if not -(1 << 31) <= value < 1 << 31:
                raise _Bad(f"int {value} at byte {at} takes more than 32 bits")
            return value, end

        return integer
    if kind == "long":
        return _varint
    if kind in ("float", "double"):
        width, code = (4, "<f") if kind == "float" else (8, "<d")

        def real(data: bytes, at: int) -> tuple[Any, int]:
            value, end = _sized(data, at, width)
            return struct.unpack(code, value)[0], end

        return real
    if kind == "fixed":
        return lambda data, at: _sized(data, at, shape.size)
    if kind in ("bytes", "string"):

        def text(data: bytes, at: int) -> tuple[Any, int]:
            size, start = _varint(data, at)
            value, end = _sized(data, start, size)
            if kind == "bytes":
                return value, end
            try:
                return value.decode(), end
            except UnicodeDecodeError:
                raise _Bad(f"text at byte {start} is not UTF-8") from None

        return text
    if kind == "enum":

        def symbol(data: bytes, at: int) -> tuple[Any, int]:
            index, end = _varint(data, at)
            if not 0 <= index < len(shape.symbols):
                raise _Bad(f"enum has no symbol {index} at byte {at}")
            return shape.symbols[index], end

        return symbol
    if kind in ("array", "map"):
        item = _reader(shape.kids[0][1])
        key = _reader(Shape("string"))

        def blocks(data: bytes, at: int) -> tuple[Any, int]:
            found: list[Any] = []
            while True:
                count, at = _varint(data, at)
                if count == 0:
                    return found, at
                if count < 0:
                    count = -count
                    _, at = _varint(data, at)
                if count > len(data) - at:
                    raise _Bad(f"{count} items are announced at byte {at}, {len(data) - at} bytes are left")
                for _ in range(count):
                    if kind == "map":
                        name, at = key(data, at)
                        value, at = item(data, at)
                        found.append((name, value))
                    else:
                        value, at = item(data, at)
                        found.append(value)

        return blocks
    if kind == "record":
        fields = [(f"f{i}", _reader(kid)) for i, (_, kid) in enumerate(shape.kids)]

        def record(data: bytes, at: int) -> tuple[Any, int]:
            found: dict[str, Any] = {}
            for name, read in fields:
                found[name], at = read(data, at)
            return found or None, at

        return record
    if kind == "optional":
        inner = _reader(shape.kids[0][1])

        def optional(data: bytes, at: int) -> tuple[Any, int]:
            branch, at = _varint(data, at)
            if branch not in (0, 1):
                raise _Bad(f"union has no branch {branch} before byte {at}")
            return (None, at) if branch == shape.nulls else inner(data, at)

        return optional
    readers = [(f"f{i}", kid.kind, _reader(kid)) for i, (_, kid) in enumerate(shape.kids)]

    def union(data: bytes, at: int) -> tuple[Any, int]:
        branch, at = _varint(data, at)
        if not 0 <= branch < len(readers):
            raise _Bad(f"union has no branch {branch} before byte {at}")
        name, kind, read = readers[branch]
        value, at = read(data, at)
        return None if kind == "null" else {name: value}, at

    return union


def _wire(shape: Shape) -> pa.DataType:
    """The type in which the slow path's values become an array: logical types stripped, fields numbered."""
    kind = shape.kind
    if kind == "int":
        return pa.int64()
    if kind == "array":
        return pa.list_(_wire(shape.kids[0][1]))
    if kind == "map":
        return pa.map_(pa.string(), _wire(shape.kids[0][1]))
    if kind == "optional":
        return _wire(shape.kids[0][1])
    if kind in ("record", "union") and shape.kids:
        return pa.struct([(f"f{i}", _wire(kid)) for i, (_, kid) in enumerate(shape.kids)])
    return pa.string() if kind == "record" else _PLAIN[kind]


# --- decoded arrays to the table's types --------------------------------------------------------------------------


def _cast(found: pa.Array, shape: Shape) -> pa.Array:
    """`found` (from either path, without an offset) as `shape.arrow`. Raises `_Bad`, `pa.ArrowInvalid`."""
    kind, target = shape.kind, shape.arrow
    if kind == "null" or (kind == "record" and not shape.kids):
        return pa.nulls(len(found), pa.string())
    if kind == "optional":
        return _cast(found, shape.kids[0][1])
    if kind == "union":
        return _spread(found, shape, target)
    if kind == "record":
        children = [_cast(child, kid) for child, (_, kid) in zip(found.flatten(), shape.kids, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=found.is_null() if found.null_count else None)
    if kind in ("array", "map"):
        mask = found.is_null() if found.null_count else None
        item = shape.kids[0][1]
        if kind == "array":
            return pa.ListArray.from_arrays(found.offsets, _cast(found.values, item), type=target, mask=mask)
        keys = found.keys
        keys.validate(full=True)
        return pa.MapArray.from_arrays(found.offsets, keys, _cast(found.items, item), type=target, mask=mask)
    if kind == "string":
        found.validate(full=True)  # neither path's strings need be UTF-8 before this
        return found
    if kind == "enum":
        return found
    if kind in ("bytes", "fixed"):
        raw = found if pa.types.is_binary(found.type) else found.view(pa.binary())
        return _decimals(raw, target) if shape.logical else raw
    if kind == "int":
        found = found.cast(pa.int32())
    if shape.logical and shape.logical[0] == "time":
        day = 86_400_000 if target.unit == "ms" else 86_400_000_000
        if pc.any(pc.or_(pc.less(found, 0), pc.greater_equal(found, day))).as_py():
            raise _Bad("a time outside of the day")
    return found.view(target) if shape.logical else found.cast(target)


def _spread(found: pa.Array, shape: Shape, target: pa.DataType) -> pa.Array:
    """A union of several branches as a struct with a field for each; all null where the null branch was written."""
    if not target.num_fields:
        return pa.nulls(len(found), target)
    if pa.types.is_union(found.type):
        codes = found.type_codes.to_numpy(zero_copy_only=False)
        chosen = [pa.array(codes == i) for i in range(len(shape.kids))]
        branches = [found.field(i) for i in range(len(shape.kids))]
        gone = [c for c, (_, kid) in zip(chosen, shape.kids, strict=True) if kid.kind == "null"]
    else:
        branches, gone = found.flatten(), [found.is_null()]
        chosen = [branch.is_valid() for branch in branches]
    columns = [
        pc.if_else(c, _cast(branch, kid), pa.scalar(None, kid.arrow))
        for c, branch, (_, kid) in zip(chosen, branches, shape.kids, strict=True)
        if kid.kind != "null"
    ]
    return pa.StructArray.from_arrays(columns, fields=list(target), mask=gone[0] if gone else None)


def _decimals(raw: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    """Big-endian two's complement of any length as exact decimals. Raises `_Bad` where the type cannot hold one."""
    count, width = len(raw), target.bit_width // 8
    if count == 0:
        return pa.array([], target)
    _, offsets, data = raw.buffers()
    at = np.frombuffer(offsets, np.int32, count + 1, raw.offset * 4).astype(np.int64)
    used = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    starts, ends = at[:-1], at[1:]
    lengths = ends - starts
    there = raw.is_valid().to_numpy(zero_copy_only=False)
    if np.any(there & (lengths == 0)):
        raise _Bad("a decimal without a byte")
    sign = np.where(used[np.minimum(starts, len(used) - 1)] >= 0x80, 0xFF, 0).astype(np.uint8)
    digits = np.repeat(sign[:, None], width, axis=1)  # little-endian, as Arrow holds them
    longest = int(lengths.max())
    for i in range(min(width, longest)):
        has = lengths > i
        digits[has, i] = used[ends[has] - 1 - i]
    for i in range(width, longest):  # more bytes than the type has: they may only repeat the sign
        has = lengths > i
        if np.any(used[ends[has] - 1 - i] != sign[has]):
            raise _Bad(f"a decimal of more than {target.precision} digits")
    if longest > width and np.any((digits[:, -1] >= 0x80) != (sign == 0xFF)):
        raise _Bad(f"a decimal of more than {target.precision} digits")
    valid = None if raw.null_count == 0 else pa.array(there).buffers()[1]
    made = pa.Array.from_buffers(target, count, [valid, pa.py_buffer(digits)])
    made.validate(full=True)
    return made


# --- one shape for all --------------------------------------------------------------------------------------------


def _widest(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """A type for values of both. Raises `Invalid` (`schema-conflict`)."""
    types = pa.types
    if old == new:
        return old
    if types.is_struct(old) and types.is_struct(new):
        return pa.struct(_merged(list(old), list(new)))
    if types.is_list(old) and types.is_list(new):
        return pa.list_(_widest(old.value_type, new.value_type))
    if types.is_map(old) and types.is_map(new):
        return pa.map_(pa.string(), _widest(old.item_type, new.item_type))
    if types.is_integer(old) and types.is_integer(new):
        return pa.int64()
    numbers = [types.is_integer(t) or types.is_floating(t) for t in (old, new)]
    if all(numbers):
        return pa.float64()
    textual = [types.is_string(t) or types.is_binary(t) for t in (old, new)]
    alike = [types.is_timestamp(t) for t in (old, new)]
    if all(textual) or (all(alike) and old.tz == new.tz) or (types.is_decimal(old) and types.is_decimal(new)):
        return old  # values that do not fit are refused one by one
    raise Invalid(f"{new} where it was {old}", "schema-conflict")


def _merged(old: Sequence[pa.Field], new: Sequence[pa.Field]) -> list[pa.Field]:
    added = {f.name: f for f in new}
    out = []
    for known in old:
        other = added.pop(known.name, None)
        if other is None:
            out.append(known)
            continue
        try:
            out.append(pa.field(known.name, _widest(known.type, other.type)))
        except Invalid as error:
            raise Invalid(f"column {known.name}: {error}", error.code) from None
    return [*out, *(f for f in new if f.name in added)]


def _refit(found: pa.Array, target: pa.DataType) -> pa.Array:
    """`found` (without an offset) as the common shape's type. Raises `pa.ArrowInvalid`."""
    types = pa.types
    if found.type == target:
        return found
    mask = found.is_null() if found.null_count else None
    if types.is_struct(target) and types.is_struct(found.type):
        held = {f.name: child for f, child in zip(found.type, found.flatten(), strict=True)}
        children = [_refit(held[f.name], f.type) if f.name in held else pa.nulls(len(found), f.type) for f in target]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    if types.is_list(target) and types.is_list(found.type):
        return pa.ListArray.from_arrays(found.offsets, _refit(found.values, target.value_type), type=target, mask=mask)
    if types.is_map(target) and types.is_map(found.type):
        return pa.MapArray.from_arrays(found.offsets, found.keys, _refit(found.items, target.item_type), type=target, mask=mask)
    return found.cast(target)


class Writer:
    """A schema that records were written with, ready to read them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.schema = pa.schema([pa.field(name, kid.arrow) for name, kid in shape.kids])
        self.read = _reader(shape)
        self._fast: dict[int, str | None] = {}

    def fast(self, frame: int) -> str | None:
        """The fast path's schema for datums behind a frame of so many bytes; None where there is no fast path."""
        if frame not in self._fast:
            try:
                schema: str | None = _fast_schema(self.shape, frame)
                assert schema is not None
                _vectorised([], schema)
            except (_Slow, _Bad):
                schema = None
            self._fast[frame] = schema
        return self._fast[frame]

    def columns(self, found: pa.RecordBatch, skip: int) -> pa.RecordBatch:
        """Decoded columns, after `skip` that are the frame's, as `self.schema`."""
        arrays = [_cast(found.column(skip + i), kid) for i, (_, kid) in enumerate(self.shape.kids)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


# --- codec --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Values written with one schema: indices into the envelope's non-null values, and the length of their frame."""

    reference: Hashable
    frame: int
    at: Rows


_FAILURES: Final = (_Bad, pa.ArrowInvalid)
_OWN: Final = "schema file"


class AvroCodec:
    """See the module. `learn` fixes the shape: what was learnt first comes first."""

    def __init__(self, plan: CodecPlan) -> None:
        self._plan = plan
        self._writers: dict[Hashable, Writer | Reason] = {}
        self._shape = pa.schema([])
        self._defaults: Mapping[str, Any] = {}
        self._reader = False
        self._framed: tuple[pa.RecordBatch, list[_Group], list[Refused]] | None = None
        if plan.avro_schema is not None:
            try:
                own = Writer(shape_of(plan.avro_schema))
            except Invalid as error:
                self._writers[_OWN] = (error.code, str(error))
            else:
                self._writers[_OWN], self._shape, self._reader = own, own.schema, True
                self._defaults = own.shape.defaults

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        """Ids (`int`) and GUIDs (`str`, lower case with dashes) not taught yet."""
        groups, _ = self._frames(envelope)
        return frozenset(g.reference for g in groups if g.reference not in self._writers)

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        """Teach one; the shape of rows may grow by it."""
        self._writers[reference] = self._taught(reference, schema)

    def _taught(self, reference: Hashable, schema: RegisteredSchema | None) -> Writer | Reason:
        if schema is None:
            return "schema-unknown", f"the registry has no schema {reference}"
        if schema.kind != "AVRO":
            return "schema-invalid", f"schema {reference} is {schema.kind}, not AVRO"
        try:
            writer = Writer(shape_of(schema.text, schema.references))
            merged = pa.schema(_merged(list(self._shape), list(writer.schema)))
        except Invalid as error:
            return error.code, f"schema {reference}: {_clipped(str(error))}"
        if not self._reader:
            self._shape = merged
        return writer

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """`rows` has the shape learnt so far."""
        values, rows, tombstones = values_of(envelope)
        groups, unframed = self._frames(envelope)
        self._framed = None
        refused = list(unframed)
        pieces: list[pa.RecordBatch] = []
        kept: list[Rows] = []
        for group in groups:
            writer = self._writers.get(group.reference)
            if isinstance(writer, Writer):
                self._read(writer, group, values, rows, refused, pieces, kept)
            else:
                code, detail = writer or ("schema-unknown", f"schema {group.reference} was not looked up")
                refused += [(int(row), code, detail) for row in rows[group.at]]
        policy = self._plan.tombstone
        if len(tombstones) and policy is Tombstone.ROW and not len(self._shape):
            # Before the first schema there is no column to be null in.
            refused += [(int(row), "tombstone", "the record has no value, and no schema is known yet") for row in tombstones]
            tombstones = tombstones[:0]
        batch = joined_batches(pieces, self._shape)
        origin = np.concatenate(kept) if kept else np.empty(0, np.int64)
        return decoded(batch, origin, tombstones, refused, policy)

    def _read(
        self,
        writer: Writer,
        group: _Group,
        values: pa.BinaryArray,
        rows: Rows,
        refused: list[Refused],
        pieces: list[pa.RecordBatch],
        kept: list[Rows],
    ) -> None:
        whole = values if len(group.at) == len(values) else values.take(pa.array(group.at))
        rows = rows[group.at]
        schema, skip = writer.fast(group.frame), len(FRAMES[group.frame])

        def fast(chosen: pa.BinaryArray) -> pa.RecordBatch:
            assert schema is not None
            if pc.any(pc.ends_with(chosen, SENTINEL)).as_py():
                raise _Bad("a datum ends like the sentinel, which then proves nothing")
            datums = pc.binary_join_element_wise(chosen, SENTINEL, b"").to_pylist()
            return self._fitted(writer.columns(_vectorised(datums, schema), skip))

        def slow(found: list[Any]) -> pa.RecordBatch:
            wire = pa.array(found, _wire(writer.shape))
            return self._fitted(writer.columns(pa.RecordBatch.from_struct_array(wire), 0))

        def block(start: int, stop: int) -> pa.RecordBatch:
            if schema is None:
                raise _Bad("no fast path")
            return fast(whole.slice(start, stop - start))

        def closely(start: int, stop: int) -> Iterator[tuple[Rows, pa.RecordBatch]]:
            good: list[int] = []
            found: list[Any] = []
            for row, datum in enumerate(whole.slice(start, stop - start).to_pylist(), start):
                try:
                    value, end = writer.read(datum, group.frame)
                    if end < len(datum):
                        raise _Bad(f"{len(datum) - end} bytes are left over at byte {end}")
                except _Bad as error:
                    refused.append((int(rows[row]), "avro-decode", str(error)))
                else:
                    good.append(row)
                    found.append(value)
            if not good:
                return
            try:
                yield np.array(good), slow(found)
                return
            except _FAILURES:
                pass
            for row, value in zip(good, found, strict=True):
                try:
                    yield np.array([row]), slow([value])
                except _FAILURES as error:
                    refused.append((int(rows[row]), "avro-decode", _clipped(str(error))))

        # Without a fast path there is nothing to gain from trying ever smaller blocks.
        limit = BLOCK_ROWS if schema is not None else max(len(whole), 1)
        for taken, batch in sifted(block, closely, 0, len(whole), errors=_FAILURES, block=limit):
            pieces.append(batch)
            kept.append(rows[taken])

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` in the common shape. Raises `pa.ArrowInvalid`."""
        if batch.schema == self._shape:
            return batch
        held = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        columns = [
            _refit(held[f.name], f.type) if f.name in held else _filled(self._defaults.get(f.name), f.type, batch.num_rows)
            for f in self._shape
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._shape)

    # --- frames ---------------------------------------------------------------------------------------------------

    def _frames(self, envelope: pa.RecordBatch) -> tuple[list[_Group], list[Refused]]:
        """Which schema wrote which value, and what cannot be told."""
        if self._framed is not None and self._framed[0] is envelope:
            return self._framed[1], self._framed[2]
        values, rows, _ = values_of(envelope)
        refused: list[Refused] = []
        if self._plan.framing == "none":
            groups = [_Group(_OWN, 0, np.arange(len(values)))] if len(values) else []
        else:
            groups = _confluent(envelope, values, rows, refused)
        self._framed = (envelope, groups, refused)
        return groups, refused


def _confluent(envelope: pa.RecordBatch, values: pa.BinaryArray, rows: Rows, refused: list[Refused]) -> list[_Group]:
    if not len(values):
        return []
    todo = np.ones(len(values), bool)
    apart: dict[Hashable, list[int]] = {}
    where = {int(row): i for i, row in enumerate(rows)} if (named := _header_ids(envelope)) else {}
    for row, raw in named.items():
        if row not in where:
            continue  # a tombstone
        at = where[row]
        todo[at] = False
        reference = _reference(raw)
        if reference is None:
            refused.append((row, "avro-frame", f"header {HEADER} holds {raw[:20].hex()}, neither an id nor a GUID"))
        else:
            apart.setdefault(reference, []).append(at)
    groups = [_Group(reference, 0, np.array(at)) for reference, at in apart.items()]
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
    starts, lengths = ends[:-1], np.diff(ends)
    used = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    magic = np.where(lengths > 0, used[np.minimum(starts, len(used) - 1)], 0xFF)
    for version, frame in ((0, 5), (1, 17)):
        mine = np.flatnonzero(todo & (magic == version) & (lengths >= frame))
        if not len(mine):
            continue
        todo[mine] = False
        keys = used[starts[mine, None] + np.arange(1, frame)]
        if version == 0:
            ids: npt.NDArray[Any] = keys.copy().view(">i4")[:, 0]
        else:
            ids = keys.copy().view("V16")[:, 0]
        if np.all(ids == ids[0]):
            groups.append(_Group(_named_by(ids[0]), frame, mine))
            continue
        unique, inverse = np.unique(ids, return_inverse=True)
        groups += [_Group(_named_by(key), frame, mine[inverse == i]) for i, key in enumerate(unique)]
    for at in np.flatnonzero(todo).tolist():
        begin = bytes(used[starts[at] : starts[at] + min(int(lengths[at]), 8)])
        why = (
            f"{int(lengths[at])} bytes, too few for a frame"
            if magic[at] in (0, 1) or not begin
            else f"begins with 0x{begin.hex()}"
        )
        refused.append((int(rows[at]), "avro-frame", why))
    return groups


def _named_by(key: Any) -> Hashable:
    return str(uuid.UUID(bytes=key.tobytes())) if key.dtype.kind == "V" else int(key)


def _reference(raw: bytes) -> Hashable | None:
    if len(raw) == 5 and raw[0] == 0:
        return int.from_bytes(raw[1:], "big", signed=True)
    return str(uuid.UUID(bytes=raw[1:])) if len(raw) == 17 and raw[0] == 1 else None


def _header_ids(envelope: pa.RecordBatch) -> dict[int, bytes]:
    """Row to the value of its first header `HEADER`; a null one counts as none."""
    headers = envelope.column("headers")
    if headers.null_count == len(headers):
        return {}
    flat = headers.flatten()
    hits = pc.equal(pc.struct_field(flat, "key"), HEADER)
    if not pc.any(hits).as_py():
        return {}
    found: dict[int, bytes | None] = {}
    chosen = flat.filter(hits)
    for row, raw in zip(
        pc.list_parent_indices(headers).filter(hits).to_pylist(), pc.struct_field(chosen, "value").to_pylist(), strict=True
    ):
        found.setdefault(row, raw)
    return {row: raw for row, raw in found.items() if raw is not None}


def _filled(default: Any, kind: pa.DataType, count: int) -> pa.Array:
    """A column that the writer lacks, of the reader's default where that is a plain value."""
    plain = type(default) in (bool, int, float) and not pa.types.is_decimal(kind)
    if plain or (type(default) is str and pa.types.is_string(kind)):
        try:
            return pa.repeat(pa.scalar(default, kind), count)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            pass
    return pa.nulls(count, kind)
