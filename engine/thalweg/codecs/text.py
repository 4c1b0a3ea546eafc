"""JSON and CSV records to columns of a declared schema.

Decides which bytes are a record of the schema; it never guesses a type, never alters a value to make it fit, and never
lets one record's bytes reach into its neighbour's row. A whole batch goes through Arrow's own reader in one pass;
only where that fails are records looked at one by one.

**JSON.** A value is one RFC 8259 object in UTF-8; white space and a byte order mark around it are ignored. Fields that
are not declared are ignored, missing ones are null.

==================  ==================================================================================================
declared            taken
==================  ==================================================================================================
bool                `true`, `false`
integers            a number without fraction or exponent that the type can hold (`1.0` and `"1"` are refused)
float32, float64    a number; also the common extensions `NaN`, `Infinity`, `-Infinity`, `Inf`, `-Inf`
decimal             a number or text, exact: digits beyond the scale or precision are refused, never rounded
string              text (a number is refused); `\\u0000` is kept
binary              text, as its UTF-8 bytes (no base64)
timestamp           ISO 8601 text. With a zone: an offset or `Z` is shifted to UTC, and text without one is UTC in a UTC column
                    and refused in any other. Without a zone: text without one; `Z` and `+00:00` are dropped, other
                    offsets refused. More fraction digits than the unit holds are refused
date32, time        `YYYY-MM-DD`, `HH:MM[:SS[.f]]`
duration            an integer number of its unit
list, struct        array, object
==================  ==================================================================================================

Refusals: `json-empty`, `json-syntax`, `json-not-object`, `json-type` (does not fit the declared type; an exponent beyond
float64 anywhere), `json-duplicate-key` (a *declared* field twice in one object: which one was meant cannot be known).

**CSV.** A value is the bytes of one record, without or with its line end, possibly with quoted line breaks. An empty
unquoted field is null in every column; `""` is empty text. Text is taken as it stands (`007`, blanks); white space around
numbers is ignored; `0x1F` is no number. Booleans are `true`, `false`, `1`, `0`; the rest as for JSON, binary as its bytes.
Refusals: `csv-ragged` (not as many fields as the header, or not one record), `csv-type`, `csv-header` (the header lacks every
declared column or names one twice).
"""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from thalweg.arrow import name_of
from thalweg.codecs.codec import Refused, Rows, Taught, decoded, joined_batches, sifted, values_of
from thalweg.core.batch import Decoded
from thalweg.core.topology import CodecPlan

BLOCK_BYTES: Final = 128 << 20  # of values in one pass; Arrow's 32-bit offsets end at 2 GiB
BLOCK_ROWS: Final = 256  # a failing block of so few records is looked at more closely
HINTS: Final = 4  # bad records that the reader itself is asked to point at, before each record of the block is judged
_WHITE: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"
SINGLES: Final = 8  # values of one column that are tried one by one
_ROW: Final = re.compile(r"in row (\d+)\Z")
_CLIP: Final = 60  # characters of a bad value shown in a detail


# --- text to typed columns ----------------------------------------------------------------------------------------


def typed(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """`texts` (string) as `kind`, by the table above. Raises `pa.ArrowInvalid` when any of them does not fit."""
    if pa.types.is_timestamp(kind):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            pass  # a zone that is missing or too many: see `_ready`
    return _plain(_ready(texts, kind), kind)


def _ready(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """`texts` in the one spelling that `_plain` reads; what has no such spelling is left as it is, or spoilt on purpose."""
    types = pa.types
    if types.is_timestamp(kind):
        if kind.tz is None:
            return pc.replace_substring_regex(texts, r"^(.*[T ].*?)(?:Z|[+-]00:?00)$", r"\1")
        if kind.tz in ("UTC", "Etc/UTC", "+00:00"):
            timed = pc.match_substring_regex(texts, r"[T ]")
            zoned = pc.match_substring_regex(texts, r"[T ].*(?:Z|[+-]\d\d(?::?\d\d)?)$")
            zone = pc.if_else(zoned, "", pc.if_else(timed, "Z", "T00:00Z"))
            return pc.binary_join_element_wise(texts, zone, "")
        return texts
    if types.is_time(kind):
        return pc.binary_join_element_wise("1970-01-01T", texts, "")
    if types.is_string(kind) or types.is_binary(kind) or types.is_date(kind):
        return texts
    bare = pc.utf8_trim_whitespace(texts)
    if types.is_integer(kind) or types.is_duration(kind):
        hexadecimal = pc.match_substring(bare, "x", ignore_case=True)
        if pc.any(hexadecimal).as_py():
            bare = pc.if_else(hexadecimal, "no decimal number", bare)
    return bare


def _plain(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    types = pa.types
    if types.is_time(kind):
        return texts.cast(pa.timestamp(kind.unit)).cast(kind)
    if types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    if types.is_floating(kind):
        return _floats(texts, kind)
    found = texts if texts.type == kind else texts.cast(kind)
    if types.is_decimal(kind):
        found.validate(full=True)
    return found


def _floats(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Arrow reads `1e400` as infinity; here only the word is."""
    found = texts.cast(pa.float64()).cast(kind)
    endless = pc.is_inf(found)
    if pc.any(endless).as_py() and not pc.all(pc.match_substring_regex(texts.filter(endless), r"^[+-]?(?i:inf)")).as_py():
        raise pa.ArrowInvalid(f"a number beyond {kind}")
    return found


def _wire(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow's JSON reader is given for `kind`: it would read a number as a date and lose a zone."""
    types = pa.types
    if types.is_temporal(kind):
        return pa.int64() if types.is_duration(kind) else pa.string()
    if kind == pa.float32():
        return pa.float64()  # read as float32 a number beyond it is silently infinite
    if types.is_list(kind):
        return pa.list_(_wire(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, _wire(f.type)) for f in kind])
    return kind


def _exact(kind: pa.DataType) -> bool:
    """Whether there are decimals in it."""
    types = pa.types
    if types.is_list(kind):
        return _exact(kind.value_type)
    return any(_exact(f.type) for f in kind) if types.is_struct(kind) else bool(types.is_decimal(kind))


def _validate(found: pa.Array) -> None:
    """Raises `pa.ArrowInvalid` on a decimal wider than its type: Arrow's JSON reader puts 123 into decimal128(4,2)."""
    types = pa.types
    if types.is_list(found.type):
        _validate(found.flatten())  # `validate` itself would look at what lies outside of a slice
    elif types.is_struct(found.type):
        for child in found.flatten():
            _validate(child)
    elif types.is_decimal(found.type):
        found.validate(full=True)


def _shaped(found: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of type `_wire(kind)` as `kind`. Raises `pa.ArrowInvalid`."""
    types = pa.types
    if found.type == kind:
        if _exact(kind):
            _validate(found)
        return found
    if types.is_string(kind):  # from the bytes of a CSV field
        return found.cast(kind)
    if types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(found), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(found) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        mask = found.is_null() if found.null_count else None
        return pa.ListArray.from_arrays(pa.array(offsets), _shaped(found.flatten(), kind.value_type), type=kind, mask=mask)
    if types.is_struct(kind):
        children = [_shaped(child, f.type) for child, f in zip(found.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=found.is_null())
    if kind == pa.float32():
        narrow = found.cast(kind)
        if pc.sum(pc.is_inf(narrow)).as_py() != pc.sum(pc.is_inf(found)).as_py():
            raise pa.ArrowInvalid("a number beyond float32")
        return narrow
    return found.cast(kind) if types.is_duration(kind) else typed(found, kind)


def _column(found: pa.Array, kind: pa.DataType, path: str, bad: dict[int, str]) -> pa.Array:
    """`found` as `kind`; rows with a value that does not fit go to `bad` with a detail, and are null in the result."""
    if found.type == kind and not _exact(kind):
        return found
    if pa.types.is_struct(kind):
        children = [_column(c, f.type, f"{path}.{f.name}", bad) for c, f in zip(found.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=found.is_null())
    textual = pa.types.is_string(found.type)
    try:
        return typed(found, kind) if textual else _shaped(found, kind)
    except pa.ArrowInvalid:
        ready = _ready(found, kind) if textual else found

    def one(start: int, stop: int) -> pa.Array:
        part = ready.slice(start, stop - start)
        return _plain(part, kind) if textual else _shaped(part, kind)

    def single(start: int, stop: int) -> Iterator[tuple[Rows, pa.Array]]:
        for row in range(start, stop):
            at = np.array([row])
            try:
                yield at, one(row, row + 1)
            except pa.ArrowInvalid:
                bad.setdefault(row, _misfit(path, found[row].as_py(), kind))
                yield at, pa.nulls(1, kind)

    return pa.concat_arrays([part for _, part in sifted(one, single, 0, len(ready), errors=(pa.ArrowInvalid,), block=SINGLES)])


def _columns(
    found: Sequence[pa.Array], schema: pa.Schema, rows: Rows, refused: list[Refused], code: str
) -> tuple[pa.RecordBatch, Rows]:
    """Each column of `found` read as its declared type; rows with a value that does not fit go to `refused`."""
    bad: dict[int, str] = {}
    columns = []
    for column, field in zip(found, schema, strict=True):
        if code == "csv-type" and not pa.types.is_binary(field.type):
            column = _column(column, pa.string(), field.name, bad)
        columns.append(_column(column, field.type, field.name, bad))
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if bad:
        refused += [(int(rows[row]), code, detail) for row, detail in bad.items()]
        keep = np.ones(len(rows), bool)
        keep[list(bad)] = False
        batch, rows = batch.filter(pa.array(keep)), rows[keep]
    return batch, rows


def _misfit(path: str, value: object, kind: pa.DataType) -> str:
    shown = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    shown = shown if len(shown) <= _CLIP else shown[: _CLIP - 1] + "…"
    return f"column {path}: {shown!r} does not fit {name_of(kind)}"


# --- JSON ---------------------------------------------------------------------------------------------------------


class _Number(str):
    """The text of a JSON number."""

    __slots__ = ()


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object, as they came."""

    __slots__ = ()


class _Unsure(ValueError):
    """A number whose exponent is so large that only Arrow's reader knows whether it takes it."""


def _number(text: str) -> _Number:
    if ("e" in text or "E" in text) and math.isinf(float(text)):
        raise _Unsure(text)
    return _Number(text)


_LOADER: Final = json.JSONDecoder(object_pairs_hook=_Pairs, parse_float=_number, parse_int=_Number, parse_constant=_Number)
_EXACT: Final = json.JSONDecoder(object_pairs_hook=_Pairs, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
_INF: Final = re.compile(r"(?<![\w\"])(-?)Inf(?![\w\"])")
_DECIMAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?\Z", re.ASCII)


class JsonCodec(Taught):
    """JSON objects to the columns of `plan.schema`. See the module for what fits which type.

    The proof that no record leaks into another: every message handed to the reader begins with `{` and ends with `}`.
    At the line feed between two messages the reader is then either between two documents or inside a document that
    ends with `}` and goes on with `{`, which no JSON grammar allows, or inside a string, where a line feed is refused. So when
    the pass succeeds each message holds one document or more, and as many rows as messages means one each.
    """

    def __init__(self, plan: CodecPlan) -> None:
        assert plan.schema is not None
        self._plan, self._schema = plan, plan.schema
        self._types = {f.name: f.type for f in plan.schema}
        wire = pa.schema([pa.field(f.name, _wire(f.type)) for f in plan.schema])
        self._options = pyarrow.json.ParseOptions(explicit_schema=wire, unexpected_field_behavior="ignore")
        self._wire = wire

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """`rows` has exactly the declared schema."""
        values, rows, tombstones = values_of(envelope)
        refused: list[Refused] = []
        values, rows = self._objects(values, rows, refused)
        pieces: list[pa.RecordBatch] = []
        kept: list[Rows] = []

        def whole(start: int, stop: int) -> pa.RecordBatch:
            return self._parse(values.slice(start, stop - start))

        def judged(row: int) -> bool:
            reason = self._fault(values[row].as_buffer())
            if reason is not None:
                refused.append((int(rows[row]), *reason))
            return reason is None

        def closely(start: int, stop: int) -> Iterator[tuple[Rows, pa.RecordBatch]]:
            todo = list(range(start, stop))
            for _ in range(HINTS):
                try:
                    yield np.array(todo), self._parse(values.take(pa.array(todo)))
                except pa.ArrowInvalid as error:
                    hint = _ROW.search(str(error))  # where the reader stopped; that row is bad, others may be
                    at = int(hint[1]) if hint else len(todo)
                    if at >= len(todo) or judged(todo[at]):
                        break
                    del todo[at]
                    if not todo:
                        return
                else:
                    return
            good = np.array([row for row in todo if judged(row)], np.int64)
            if not len(good):
                return
            try:
                yield good, self._parse(values.take(pa.array(good)))
                return
            except pa.ArrowInvalid:
                pass
            for row in good:
                try:
                    yield good[good == row], self._parse(values.slice(row, 1))
                except pa.ArrowInvalid as error:
                    refused.append((int(rows[row]), "json-type", _clipped(str(error))))

        for low, high in _blocks(values):
            for taken, batch in sifted(whole, closely, low, high, errors=(pa.ArrowInvalid,), block=BLOCK_ROWS):
                pieces.append(batch)
                kept.append(taken)
        batch = joined_batches(pieces, self._wire)
        at = np.concatenate(kept) if kept else np.empty(0, np.int64)
        overflowed = self._overflowed(batch, values, at)
        if overflowed:
            refused += [(int(rows[at[i]]), "json-type", detail) for i, detail in overflowed.items()]
            fine = np.setdiff1d(np.arange(len(at)), list(overflowed))
            batch, at = batch.take(pa.array(fine)), at[fine]
        rows = rows[at]
        batch, rows = _columns(batch.columns, self._schema, rows, refused, "json-type")
        return decoded(batch, rows, tombstones, refused, self._plan.tombstone)

    def _objects(self, values: pa.BinaryArray, rows: Rows, refused: list[Refused]) -> tuple[pa.BinaryArray, Rows]:
        """Only values that begin with `{` and end with `}`, what is around them trimmed; the others are refused."""
        if not len(values):
            return values, rows
        offsets, data = _raw(values)
        starts, ends = offsets[:-1], offsets[1:]
        odd = starts == ends
        if not odd.all():
            top = max(len(data) - 1, 0)
            odd |= (data[np.minimum(starts, top)] != ord("{")) | (data[np.maximum(ends - 1, 0)] != ord("}"))
        if not odd.any():
            return values, rows
        trimmed: list[bytes | None] = values.filter(pa.array(odd)).to_pylist()
        for i, at in enumerate(np.flatnonzero(odd)):
            value = (trimmed[i] or b"").removeprefix(_BOM).strip(_WHITE)
            if value.startswith(b"{") and value.endswith(b"}"):
                trimmed[i] = value
                continue
            trimmed[i] = None
            refused.append((int(rows[at]), *_shapeless(value)))
        values = pc.replace_with_mask(values, pa.array(odd), pa.array(trimmed, pa.binary()))
        if values.null_count:
            rows = rows[values.is_valid().to_numpy(zero_copy_only=False)]
            values = values.drop_null()
        return values, rows

    def _parse(self, values: pa.BinaryArray) -> pa.RecordBatch:
        """One pass over all of `values`. Raises `pa.ArrowInvalid` when any of them is bad."""
        joined = _joined(values)
        text = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, pa.py_buffer(np.array([0, joined.size], np.int32)), joined])
        text.cast(pa.string())  # the reader does not look whether text is UTF-8
        table = pyarrow.json.read_json(
            pa.BufferReader(joined),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(joined.size + 1, 64)),
            parse_options=self._options,
        )
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("more than one document in a record")
        return table.combine_chunks().to_batches()[0]

    def _overflowed(self, batch: pa.RecordBatch, values: pa.BinaryArray, at: Rows) -> dict[int, str]:
        """Rows of `batch` whose infinity was written as a number, each with a detail: Arrow's reader lets most of them by."""
        found: dict[int, str] = {}
        for column in batch.columns:
            for i in _endless(column):
                text = values[at[i]].as_buffer().to_pybytes().decode()
                try:
                    fault = _unfit(_EXACT.decode(_INF.sub(r"\1Infinity", text)), self._types, "")
                except RecursionError:
                    continue
                if fault is not None:
                    found[int(i)] = fault[1]
        return found

    def _fault(self, value: pa.Buffer) -> tuple[str, str] | None:
        """Why one record is refused; None if it looks right (the reader has the last word)."""
        raw = value.to_pybytes()
        try:
            text = raw.decode()
            found = _LOADER.decode(_INF.sub(r"\1Infinity", text) if "Inf" in text else text)
        except UnicodeDecodeError as error:
            return "json-syntax", f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}"
        except (_Unsure, RecursionError):
            return None
        except ValueError as error:
            return "json-syntax", _clipped(str(error))
        if "\\u" in text:
            try:
                orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                # Half a surrogate pair; but orjson also refuses NaN, and this must not.
                if "surrogate" in str(error) or "escape" in str(error):
                    return "json-syntax", _clipped(str(error))
        return _unfit(found, self._types, "")


def _clipped(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"


def _raw(values: pa.BinaryArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Offsets (one more than values) and the bytes that they index."""
    _, offsets, data = values.buffers()
    at = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4)
    return at, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)


def _joined(values: pa.BinaryArray) -> pa.Buffer:
    """All of `values` with a line feed between them."""
    one = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pc.binary_join(one, b"\n")[0].as_buffer()


def _blocks(values: pa.BinaryArray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows of about `BLOCK_BYTES` each."""
    if not len(values):
        return
    offsets, _ = _raw(values)
    start = 0
    while start < len(values):
        stop = int(np.searchsorted(offsets, offsets[start].astype(np.int64) + BLOCK_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), len(values))
        yield start, stop
        start = stop


def _endless(column: pa.Array) -> Rows:
    """Rows that hold an infinity."""
    types = pa.types
    empty = np.empty(0, np.int64)
    if types.is_floating(column.type):
        return np.flatnonzero(pc.fill_null(pc.is_inf(column), False).to_numpy(zero_copy_only=False))
    if types.is_struct(column.type):
        return np.unique(np.concatenate([empty, *(_endless(child) for child in column.flatten())]))
    if types.is_list(column.type):
        inner = _endless(column.flatten())
        return np.unique(pc.list_parent_indices(column).to_numpy()[inner]) if len(inner) else empty
    return empty


def _shapeless(value: bytes) -> tuple[str, str]:
    """Why a value that is not `{…}` is refused."""
    if not value:
        return "json-empty", "the record's value is empty"
    try:
        found = json.loads(value.decode())
    except UnicodeDecodeError as error:
        return "json-syntax", f"not UTF-8: byte 0x{value[error.start]:02x} at {error.start}"
    except RecursionError:
        return "json-syntax", "nested too deeply to tell"
    except ValueError as error:
        return "json-syntax", _clipped(str(error))
    kind = {list: "an array", str: "text", bool: "a boolean", type(None): "null"}.get(type(found), "a number")
    return "json-not-object", f"the record is {kind}, not an object"


_KINDS: Final = {_Pairs: "an object", list: "an array", bool: "a boolean", str: "text"}


def _unfit(members: Any, types: dict[str, pa.DataType], path: str) -> tuple[str, str] | None:
    """What in a JSON object does not fit the declared fields, by the rules of Arrow's reader."""
    seen: set[str] = set()
    for name, value in members:
        kind = types.get(name)
        if kind is None:
            continue
        where = f"{path}.{name}" if path else name
        if name in seen:
            return "json-duplicate-key", f"column {where} is there twice"
        seen.add(name)
        fault = None if value is None else _wrong(value, kind, where)
        if fault is not None:
            return fault
    return None


def _wrong(value: Any, kind: pa.DataType, path: str) -> tuple[str, str] | None:
    types = pa.types
    if types.is_struct(kind):
        if type(value) is _Pairs:
            return _unfit(value, {f.name: f.type for f in kind}, path)
        fits = False
    elif types.is_list(kind):
        if type(value) is list:
            faults = (_wrong(item, kind.value_type, f"{path}[]") for item in value if item is not None)
            return next((fault for fault in faults if fault is not None), None)
        fits = False
    elif type(value) is _Number:
        fits = _fits(value, kind)
    elif type(value) is str:
        textual = (types.is_temporal(kind) and not types.is_duration(kind)) or types.is_string(kind) or types.is_binary(kind)
        fits = textual or (types.is_decimal(kind) and _fits(value, kind))
    else:
        fits = type(value) is bool and types.is_boolean(kind)
    if fits:
        return None
    what = _KINDS.get(type(value))
    if what is None or type(value) is str:
        return "json-type", _misfit(path, value, kind)
    return "json-type", f"column {path}: {what} where {name_of(kind)} is declared"


def _fits(text: str, kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_floating(kind):
        return "Inf" in text or not math.isinf(float(text))
    if types.is_integer(kind) or types.is_duration(kind):
        if not text.lstrip("-").isdigit() or len(text) > 20:
            return False
        signed = not types.is_unsigned_integer(kind)
        low, high = (-(1 << kind.bit_width - 1), 1 << kind.bit_width - 1) if signed else (0, 1 << kind.bit_width)
        return (signed or text[0] != "-") and low <= int(text) < high
    if types.is_decimal(kind) and _DECIMAL.match(text):
        _, digits, exponent = decimal.Decimal(text).as_tuple()
        assert isinstance(exponent, int)
        kept = "".join(map(str, digits)).rstrip("0").lstrip("0")
        dropped = len("".join(map(str, digits)).lstrip("0")) - len(kept) if kept else 0
        lowest = exponent + dropped  # power of ten of the last digit that is not 0
        return not kept or (lowest >= -kind.scale and len(kept) + lowest + kind.scale <= kind.precision)
    return False


# --- CSV ----------------------------------------------------------------------------------------------------------


class CsvCodec(Taught):
    """CSV records to the columns of `plan.schema`, by the header in the envelope's `thalweg.columns` metadata or by position.

    No record leaks into another: records without any line break are read together, and as many rows as records means
    that each break between two of them was one; records that hold a line break are read together only if
    each of them closes all its quotes (so every one begins and ends outside of quotes), the rest alone.
    """

    def __init__(self, plan: CodecPlan) -> None:
        assert plan.schema is not None
        self._plan, self._schema = plan, plan.schema
        self._parsing = pyarrow.csv.ParseOptions(
            delimiter=plan.delimiter,
            quote_char=plan.quote or False,
            double_quote=bool(plan.quote),
            newlines_in_values=True,
            ignore_empty_lines=False,
        )
        separator, quote = re.escape(plan.delimiter), re.escape(plan.quote)
        bare = f"[^{separator}{quote}\\r\\n]*"
        field = f"(?:{quote}(?:[^{quote}]|{quote}{quote})*+{quote}|{bare})" if quote else bare
        self._closed = re.compile(f"{field}(?:{separator}{field})*+\\Z".encode())
        # As Arrow's reader has it: only a quote that begins a field opens it, and what follows the closing one is plain text.
        opened = f"(?:{quote}(?:[^{quote}]|{quote}{quote})*+{quote}|(?!{quote}))" if quote else ""
        self._field = re.compile(f"{opened}[^{separator}\\r\\n]*+".encode())

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """`rows` has exactly the declared schema; declared columns that the header lacks are null."""
        values, rows, tombstones = values_of(envelope)
        refused: list[Refused] = []
        names = self._names(envelope)
        fault = self._header_fault(names)
        if fault is not None:
            refused += [(int(row), "csv-header", fault) for row in rows]
            values, rows = values.slice(0, 0), rows[:0]
        values, rows = self._lines(values, rows, refused, len(names))
        pieces: list[pa.RecordBatch] = []
        kept: list[Rows] = []
        for part, at in self._groups(values, rows, refused, len(names)):
            self._read(part, at, names, refused, pieces, kept)
        batch = joined_batches(pieces, pa.schema([(f.name, pa.binary()) for f in self._schema]))
        rows = np.concatenate(kept) if kept else np.empty(0, np.int64)
        batch, rows = _columns(batch.columns, self._schema, rows, refused, "csv-type")
        return decoded(batch, rows, tombstones, refused, self._plan.tombstone)

    def _names(self, envelope: pa.RecordBatch) -> list[str]:
        written = (envelope.schema.metadata or {}).get(b"thalweg.columns")
        return self._schema.names if written is None else [str(name) for name in json.loads(written)]

    def _header_fault(self, names: list[str]) -> str | None:
        there = [name for name in self._schema.names if name in names]
        twice = [name for name in there if names.count(name) > 1]
        if twice:
            return f"the header names {twice[0]} twice"
        if not there:
            return f"the header has none of the declared columns: {_clipped(', '.join(names))}"
        return None

    def _lines(self, values: pa.BinaryArray, rows: Rows, refused: list[Refused], width: int) -> tuple[pa.BinaryArray, Rows]:
        """Without byte order marks and trailing line ends; empty records are refused where there is more than one column."""
        if not len(values):
            return values, rows
        offsets, data = _raw(values)
        starts, ends = offsets[:-1], offsets[1:]
        last, first = data[np.maximum(ends - 1, 0)], data[np.minimum(starts, len(data) - 1)]
        odd = (starts == ends) | (last == 10) | (last == 13) | (first == 0xEF)
        if not odd.any():
            return values, rows
        trimmed: list[bytes | None] = values.filter(pa.array(odd)).to_pylist()
        for i, at in enumerate(np.flatnonzero(odd)):
            value = (trimmed[i] or b"").removeprefix(_BOM)
            value = value[:-2] if value.endswith(b"\r\n") else value[:-1] if value.endswith((b"\n", b"\r")) else value
            trimmed[i] = value
            if not value and width > 1:
                trimmed[i] = None
                refused.append((int(rows[at]), "csv-ragged", f"the record is empty, the header has {width} columns"))
        values = pc.replace_with_mask(values, pa.array(odd), pa.array(trimmed, pa.binary()))
        if values.null_count:
            rows = rows[values.is_valid().to_numpy(zero_copy_only=False)]
            values = values.drop_null()
        return values, rows

    def _groups(
        self, values: pa.BinaryArray, rows: Rows, refused: list[Refused], width: int
    ) -> Iterator[tuple[pa.BinaryArray, Rows]]:
        """Values that may be read together, with their envelope rows."""
        if not len(values):
            return
        offsets, data = _raw(values)
        used = data[offsets[0] : offsets[-1]]
        breaks = np.flatnonzero((used == 10) | (used == 13)) + offsets[0]
        if not len(breaks):
            yield values, rows
            return
        broken = np.zeros(len(values), bool)
        broken[np.searchsorted(offsets, breaks, side="right") - 1] = True
        plain = ~broken
        if plain.any():
            yield values.filter(pa.array(plain)), rows[plain]
        closed: list[int] = []
        alone: list[int] = []
        for at, value in zip(np.flatnonzero(broken).tolist(), values.filter(pa.array(broken)).to_pylist(), strict=True):
            fault = self._fault(value, width)
            if fault is not None:
                refused.append((int(rows[at]), "csv-ragged", fault))
            elif self._closed.match(value):
                closed.append(at)
            else:
                alone.append(at)
        if closed:
            yield values.take(pa.array(closed)), rows[closed]
        for at in alone:
            yield values.slice(at, 1), rows[at : at + 1]

    def _read(
        self,
        values: pa.BinaryArray,
        rows: Rows,
        names: list[str],
        refused: list[Refused],
        pieces: list[pa.RecordBatch],
        kept: list[Rows],
    ) -> None:
        def whole(start: int, stop: int) -> pa.RecordBatch:
            return self._parse(values.slice(start, stop - start), names)

        def closely(start: int, stop: int) -> Iterator[tuple[Rows, pa.RecordBatch]]:
            good = []
            for row, value in enumerate(values.slice(start, stop - start).to_pylist(), start):
                fault = self._fault(value, len(names))
                if fault is None:
                    good.append(row)
                else:
                    refused.append((int(rows[row]), "csv-ragged", fault))
            if not good:
                return
            try:
                yield np.array(good), self._parse(values.take(pa.array(good)), names)
                return
            except pa.ArrowInvalid:
                pass
            for row in good:  # the reader has the last word
                try:
                    yield np.array([row]), whole(row, row + 1)
                except pa.ArrowInvalid as error:
                    refused.append((int(rows[row]), "csv-ragged", _clipped(str(error))))

        for low, high in _blocks(values):
            for taken, batch in sifted(whole, closely, low, high, errors=(pa.ArrowInvalid,), block=BLOCK_ROWS):
                pieces.append(batch)
                kept.append(rows[taken])

    def _fault(self, value: bytes, width: int) -> str | None:
        """Why one value is no record of `width` fields; None if it is, by the rules of Arrow's reader."""
        separator, at, count = self._plan.delimiter.encode(), 0, 0
        while True:
            found = self._field.match(value, at)
            if found is None:
                return f"field {count + 1} opens a quote that nothing closes"
            at, count = found.end(), count + 1
            if at == len(value):
                return None if count == width else f"it has {count} fields, the header {width}"
            if not value.startswith(separator, at):
                return "it holds a line break outside of quotes"
            at += 1

    def _parse(self, values: pa.BinaryArray, names: list[str]) -> pa.RecordBatch:
        """The declared columns as binary, unread. Raises `pa.ArrowInvalid` where a record is not one row of the header."""
        # One more record at the end: a quote left open by the last one swallows it, and the count tells.
        joined = _joined(pa.concat_arrays([values, pa.array([b"0" + self._plan.delimiter.encode() * (len(names) - 1)])]))
        table = pyarrow.csv.read_csv(
            pa.BufferReader(joined),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=max(joined.size + 1, 64), column_names=names),
            parse_options=self._parsing,
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pa.binary() for name in self._schema.names},
                include_columns=self._schema.names,
                include_missing_columns=True,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        if table.num_rows != len(values) + 1:
            raise pa.ArrowInvalid("not one record: a quote that is not closed, or a line break outside of quotes")
        return table.combine_chunks().to_batches()[0].slice(0, len(values))
