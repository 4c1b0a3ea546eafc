"""JSON and CSV records to columns of a given schema, a whole envelope in one vectorised pass.

Decides what is one record and what is none. The fast pass joins all values with line feeds and parses them at once;
it is believed only when it gives exactly one row per value. Before it, values that could lie about that are set apart:
those without anything in them, and those that hold a line feed. When the pass fails, JSON values are first looked at one
by one for their syntax (a fast parser), then halved until each value of a wrong type stands alone.

A field that the schema does not name is left out; a field that a value lacks is null.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from thalweg.core.batch import Decoded, Refusals
from thalweg.core.topology import CodecPlan, Tombstone
from thalweg.ports import RegisteredSchema

DETAIL_MAX: Final = 300
DEPTH_MAX: Final = 200
"""Brackets that may be open at once; the native parsers recurse."""

Entry = tuple[int, str, str, str]
Ints = npt.NDArray[np.int64]


def joined(values: pa.BinaryArray) -> pa.Buffer:
    """All values (no nulls), each followed by a line feed but the last."""
    whole = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    buffer: pa.Buffer = pc.binary_join(whole, b"\n")[0].as_buffer()
    return buffer


class _Text:
    """What JSON and CSV share: tombstones, isolation by halving, the order of rows."""

    def __init__(self, plan: CodecPlan) -> None:
        assert plan.schema is not None
        self.plan, self.schema = plan, pa.schema([pa.field(f.name, f.type) for f in plan.schema])

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        return frozenset()

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        raise AssertionError("text needs no registry")

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        values = envelope.column("value")
        refused: list[Entry] = []
        rows = np.arange(len(values), dtype=np.int64)
        empty = np.array([], dtype=np.int64)
        if values.null_count:
            nulls = values.is_null().to_numpy(zero_copy_only=False)
            empty, rows = np.flatnonzero(nulls), np.flatnonzero(~nulls)
            values = values.filter(values.is_valid())
            if self.plan.tombstone is Tombstone.DLQ:
                refused += [(int(i), "tombstone", "the record has no value", "") for i in empty]
        batch, kept = self._parsed(envelope, values, rows, refused)
        if len(empty) and self.plan.tombstone is Tombstone.ROW:
            blank = pa.RecordBatch.from_arrays([pa.nulls(len(empty), f.type) for f in self.schema], schema=self.schema)
            origin = np.concatenate([kept, empty])
            order = np.argsort(origin, kind="stable")
            batch, kept = pa.concat_batches([batch, blank]).take(pa.array(order)), origin[order]
        refused.sort()
        return Decoded(batch, pa.array(kept.astype(np.int32)), Refusals.of(refused))

    def _parsed(
        self, envelope: pa.RecordBatch, values: pa.BinaryArray, rows: Ints, refused: list[Entry]
    ) -> tuple[pa.RecordBatch, Ints]:
        raise NotImplementedError

    def _nothing(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in self.schema], schema=self.schema)

    def _halved(
        self,
        values: pa.BinaryArray,
        rows: Ints,
        parse: Callable[[pa.BinaryArray], pa.RecordBatch],
        code: Callable[[str], str],
        refused: list[Entry],
    ) -> tuple[pa.RecordBatch, Ints]:
        """Parse what can be parsed; a value that cannot be parsed alone is refused."""
        batches: list[pa.RecordBatch] = []
        kept: list[Ints] = []
        spans = [(0, len(values))]
        while spans:
            start, stop = spans.pop()
            if start == stop:
                continue
            try:
                batches.append(parse(values.slice(start, stop - start)))
                kept.append(rows[start:stop])
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                if stop - start == 1:
                    detail = " ".join(str(error).split())[:DETAIL_MAX]
                    refused.append((int(rows[start]), code(detail), detail, ""))
                else:
                    middle = (start + stop) // 2
                    spans += [(middle, stop), (start, middle)]
        if not batches:
            return self._nothing(), np.array([], dtype=np.int64)
        return pa.concat_batches(batches), np.concatenate(kept)


class JsonCodec(_Text):
    """One JSON object per value (RFC 8259)."""

    def _parsed(
        self, envelope: pa.RecordBatch, values: pa.BinaryArray, rows: Ints, refused: list[Entry]
    ) -> tuple[pa.RecordBatch, Ints]:
        values, rows = self._sorted_out(values, rows, refused)
        if len(values) == 0:
            return self._nothing(), rows
        try:
            return self._pass(values), rows
        except pa.ArrowInvalid:
            values, rows = self._sound(values, rows, refused)
            return self._halved(values, rows, self._pass, lambda _: "json-type", refused)

    def _sorted_out(self, values: pa.BinaryArray, rows: Ints, refused: list[Entry]) -> tuple[pa.BinaryArray, Ints]:
        """Without the values that would change how many rows the fast pass gives."""
        data = _bytes_of(values)
        suspicious = pc.less(pc.binary_length(values), 2)
        if (data == 10).any() or (data == 13).any():
            suspicious = pc.or_(suspicious, pc.match_substring_regex(values, r"[\r\n]"))
        first_bytes = pc.binary_slice(values, 0, 1)
        if not pc.all(pc.equal(first_bytes, b"{")).as_py():  # blank, or blanks in front, or no object at all
            suspicious = pc.or_(suspicious, pc.not_equal(first_bytes, b"{"))
        if _depth(data) > DEPTH_MAX:
            deep = pa.array([_depth(np.frombuffer(v, dtype=np.uint8)) > DEPTH_MAX for v in values.to_pylist()])
            suspicious = pc.or_(suspicious, deep)
        if not pc.any(suspicious).as_py():
            return values, rows
        mended: list[bytes] = []
        keep = np.ones(len(values), dtype=bool)
        for i, value in enumerate(values.to_pylist()):
            if suspicious[i].as_py():
                problem = _problem(value)
                if problem is not None:
                    refused.append((int(rows[i]), *problem, ""))
                    keep[i] = False
                    continue
                # Sound JSON has line ends between its tokens only, so this changes no value.
                value = value.replace(b"\r", b" ").replace(b"\n", b" ")
            mended.append(value)
        return pa.array(mended, pa.binary()), rows[keep]

    def _sound(self, values: pa.BinaryArray, rows: Ints, refused: list[Entry]) -> tuple[pa.BinaryArray, Ints]:
        keep = np.ones(len(values), dtype=bool)
        for i, value in enumerate(values.to_pylist()):
            problem = _problem(value)
            if problem is not None:
                refused.append((int(rows[i]), *problem, ""))
                keep[i] = False
        return values.filter(pa.array(keep)), rows[keep]

    def _pass(self, values: pa.BinaryArray) -> pa.RecordBatch:
        body = joined(values)
        table = pa.json.read_json(
            pa.BufferReader(body),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=max(body.size + 1, 1024)),
            parse_options=pa.json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != len(values):
            raise pa.ArrowInvalid(f"{table.num_rows} rows from {len(values)} values")
        return _one(table, self.schema)


class CsvCodec(_Text):
    """One CSV record per value (RFC 4180). `thalweg.columns` in the envelope's metadata names the fields, else the schema."""

    def _parsed(
        self, envelope: pa.RecordBatch, values: pa.BinaryArray, rows: Ints, refused: list[Entry]
    ) -> tuple[pa.RecordBatch, Ints]:
        noted = (envelope.schema.metadata or {}).get(b"thalweg.columns")
        names = json.loads(noted) if noted is not None else list(self.schema.names)
        if len(set(names)) != len(names) or (missing := [n for n in self.schema.names if n not in names]):
            what = "two columns have one name" if len(set(names)) != len(names) else f"there is no column {missing[0]}"
            refused += [(int(r), "csv-header", f"{what} in the header {names}"[:DETAIL_MAX], "") for r in rows]
            return self._nothing(), np.array([], dtype=np.int64)
        keep = np.ones(len(values), dtype=bool)
        widths = self._widths(values, len(names))
        for i in np.flatnonzero(widths != len(names)):
            keep[i] = False
            what = "a quote is not closed" if widths[i] < 0 else f"{widths[i]} fields, the header has {len(names)}"
            refused.append((int(rows[i]), "csv-ragged", what, ""))
        values, rows = values.filter(pa.array(keep)), rows[keep]
        if len(values) == 0:
            return self._nothing(), rows
        return self._halved(values, rows, lambda v: self._pass(v, names), lambda _: "csv-type", refused)

    def _widths(self, values: pa.BinaryArray, expected: int) -> Ints:
        """Fields per value, -1 where a quote stays open. Vectorised where no quote is in sight."""
        delimiter, quote = self.plan.delimiter.encode(), self.plan.quote.encode()
        widths: Ints = pc.add(pc.count_substring(values, delimiter), 1).to_numpy(zero_copy_only=False).astype(np.int64)
        for i in np.flatnonzero(pc.match_substring(values, quote).to_numpy(zero_copy_only=False)):
            text = values[int(i)].as_py().decode("utf-8", "replace")
            try:
                records = list(
                    csv.reader(
                        io.StringIO(text, newline=""), delimiter=self.plan.delimiter, quotechar=self.plan.quote, strict=True
                    )
                )
                widths[i] = len(records[0]) if len(records) == 1 else -1
            except csv.Error:
                widths[i] = -1
        return widths

    def _pass(self, values: pa.BinaryArray, names: list[str]) -> pa.RecordBatch:
        body = joined(values)
        table = pa.csv.read_csv(
            pa.BufferReader(body),
            read_options=pa.csv.ReadOptions(use_threads=False, column_names=names, block_size=max(body.size + 1, 1024)),
            parse_options=pa.csv.ParseOptions(
                delimiter=self.plan.delimiter, quote_char=self.plan.quote, newlines_in_values=True, ignore_empty_lines=False
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types={f.name: f.type for f in self.schema},
                include_columns=list(self.schema.names),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,  # "" is an empty text, nothing at all is null
            ),
        )
        if table.num_rows != len(values):
            raise pa.ArrowInvalid(f"{table.num_rows} rows from {len(values)} values")
        return _one(table, self.schema)


def _problem(value: bytes) -> tuple[str, str] | None:
    """What keeps a value from being one JSON object: code and detail."""
    if not value.strip():
        return "json-empty", "the value is empty"
    if _depth(np.frombuffer(value, dtype=np.uint8)) > DEPTH_MAX:
        return "json-depth", f"more than {DEPTH_MAX} levels"
    try:
        found = orjson.loads(value)
    except (orjson.JSONDecodeError, RecursionError) as error:
        return "json-syntax", str(error)[:DETAIL_MAX]
    return None if isinstance(found, dict) else ("json-not-object", f"the value is a {type(found).__name__}, not an object")


def _depth(data: npt.NDArray[np.uint8]) -> int:
    """An upper bound of how many brackets are open at once (those inside strings are counted too)."""
    opens = (data == 0x7B) | (data == 0x5B)
    closes = (data == 0x7D) | (data == 0x5D)
    if not opens.any():
        return 0
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max())


def _bytes_of(values: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    buffers = values.buffers()
    if len(values) == 0 or buffers[2] is None:
        return np.array([], dtype=np.uint8)
    offsets = np.frombuffer(buffers[1], dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    return np.frombuffer(buffers[2], dtype=np.uint8)[offsets[0] : offsets[-1]]


def _one(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    batches = table.select(schema.names).cast(schema).combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
