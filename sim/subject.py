"""What can be simulated: any pipeline file that `thalweg check` accepts and whose technologies have twins.

Decides what comes in and what must come of it. Records come from a sample file (a line, a record), else they are drawn from
the codec's schema, bad ones among them. What must come of a record is what the pipeline's pure part says of it alone, in one
pass, before anything runs: a run may then neither lose it, nor double it, nor send it elsewhere, whatever happens. Of the
standard subject it is written down by hand instead, so that the pure part is judged too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fakes.kafka import Message, envelope
from sim.world import Subject
from thalweg.__main__ import judged_file
from thalweg.codecs import codec_of
from thalweg.core.batch import KafkaCursor, Partition
from thalweg.core.topology import Role, Source, Topology
from thalweg.errors import Fault, Refused
from thalweg.ports import Records
from thalweg.runtime.pipeline import digested
from thalweg.runtime.transform import Transform

STANDARD: Final = Path(__file__).parent / "standard" / "pipeline.yaml"
BLOCK: Final = 512


class Load:
    """Messages by partition and index, made in blocks and kept: the same object each time."""

    def __init__(self, make: Callable[[int, int], Message], topology: Topology) -> None:
        self._make, self._topology = make, topology
        self._made: dict[int, list[Message]] = {}
        self._rows: dict[Message, Mapping[str, int]] = {}

    def __call__(self, partition: int, index: int) -> Message:
        made = self._made.setdefault(partition, [])
        while len(made) <= index:
            made.append(self._make(partition, len(made)))
        return made[index]

    def some(self, partition: int, first: int, n: int) -> list[Message]:
        """`n` of them from `first` on."""
        if n:
            self(partition, first + n - 1)
        return self._made[partition][first : first + n]

    def expected(self, messages: Sequence[Message], sink: str) -> list[int]:
        """Rows of each message in `sink`, by the pipeline's pure part."""
        todo = [m for m in messages if m not in self._rows]
        for start in range(0, len(todo), BLOCK):
            self._rows.update(expectation(self._topology, todo[start : start + BLOCK]))
        return [self._rows[m].get(sink, 0) for m in messages]


def expectation(topology: Topology, messages: list[Message]) -> dict[Message, dict[str, int]]:
    """How many rows each message has in each sink."""
    out: dict[Message, dict[str, int]] = {m: {} for m in messages}
    source = topology.sources[0]
    part = Partition(source.name, source.cluster_id, "t", 0, "x")
    batch = envelope(list(enumerate(messages)))
    records = Records(part, KafkaCursor(0), KafkaCursor(len(messages)), batch)
    done = digested(topology, source, codec_of(source.codec), Transform(topology.nodes, topology.rules), part, records)
    roles = {s.name: s.role for s in topology.sinks}
    for sink, frame in done.frames:
        if roles[sink] in (Role.DLQ, Role.QUARANTINE):
            at = (
                frame.rows.column(f"{topology.prefix}source_offset").to_numpy() if frame.rows.num_rows else np.array([], np.int64)
            )
        else:
            at = frame.envelope.column("position").to_numpy()[frame.origin.to_numpy()]
        for position, n in zip(*np.unique(at, return_counts=True), strict=True):
            out[messages[int(position)]][sink] = int(n)
    return out


def subject_of(path: Path, sample: Path | None = None) -> Subject:
    """A pipeline file as a subject. Raises `Refused` with every fault, those of missing twins included."""
    found = judged_file(path, strict=False)
    if found.topology is None:
        raise Refused(found.faults)
    topology = _fit_for_simulation(found.topology, path)
    if path.resolve() == STANDARD.resolve():
        return Subject("standard", topology, Load(standard_message, topology).some, standard_expected)
    beside = path.with_name("sample.ndjson")
    lines = _lines(sample or (beside if beside.exists() else None))
    source = topology.sources[0]
    make = _from_lines(lines) if lines else _from_schema(source)
    load = Load(make, topology)
    return Subject(path.stem if path.stem != "pipeline" else topology.name, topology, load.some, load.expected)


def _fit_for_simulation(topology: Topology, path: Path) -> Topology:
    faults = []
    for source in topology.sources:
        if source.type != "kafka":
            what = f"source {source.name} is of type {source.type}, which has no twin yet"
            faults.append(Fault(0, 0, "sim-no-twin", what, "Simulate a pipeline that reads from Kafka", "sources", str(path)))
        if source.codec.registry_url is not None:
            what = f"source {source.name} asks a schema registry, which has no twin yet"
            faults.append(Fault(0, 0, "sim-no-twin", what, "Use a schema file", "sources", str(path)))
    if faults:
        raise Refused(faults)
    return replace(topology, http=None)


# --- where records come from ------------------------------------------------------------------------------------------


def _lines(path: Path | None) -> list[bytes]:
    if path is None:
        return []
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if not lines:
        raise Refused([Fault(0, 0, "sim-sample-empty", f"{path} has no line", "Put one record a line", "", str(path))])
    return lines


def _from_lines(lines: list[bytes]) -> Callable[[int, int], Message]:
    def make(partition: int, index: int) -> Message:
        line = lines[(partition * 7919 + index) % len(lines)]
        return Message(line, b"%d-%d" % (partition, index), (), 1_700_000_000_000 + index)

    return make


def _from_schema(source: Source) -> Callable[[int, int], Message]:
    schema = source.codec.schema

    def make(partition: int, index: int) -> Message:
        chance = Random(f"record {partition} {index}")
        key = b"%d-%d" % (partition, index)
        if chance.random() < 0.02:
            return Message(None, key, (), 1_700_000_000_000 + index)
        if source.codec.type != "json" or schema is None:
            return Message(chance.randbytes(chance.randrange(64)), key, (("n", None),), 1_700_000_000_000 + index)
        if chance.random() < 0.03:
            return Message(b'{"broken":' + key, key, (), 1_700_000_000_000 + index)
        record = {field.name: _value(field.type, chance) for field in schema}
        return Message(json.dumps(record).encode(), key, (), 1_700_000_000_000 + index)

    return make


def _value(kind: pa.DataType, chance: Random) -> Any:
    """Something that a field of this type may be in JSON; now and then null."""
    if chance.random() < 0.05:
        return None
    if pa.types.is_boolean(kind):
        return chance.random() < 0.5
    if pa.types.is_integer(kind):
        bits = min(kind.bit_width - 1, 20)
        return chance.getrandbits(bits)
    if pa.types.is_floating(kind):
        return round(chance.uniform(-1e3, 1e6), 2)
    if pa.types.is_decimal(kind):
        return f"{chance.randrange(10 ** min(kind.precision - kind.scale, 6))}.{'5'.zfill(kind.scale)[: kind.scale]}"
    if pa.types.is_timestamp(kind):
        return f"20{chance.randrange(10, 30)}-0{chance.randrange(1, 10)}-1{chance.randrange(10)}T0{chance.randrange(10)}:00:00Z"
    if pa.types.is_date(kind):
        return f"20{chance.randrange(10, 30)}-0{chance.randrange(1, 10)}-1{chance.randrange(10)}"
    if pa.types.is_list(kind):
        return [_value(kind.value_type, chance) for _ in range(chance.randrange(4))]
    if pa.types.is_struct(kind):
        return {field.name: _value(field.type, chance) for field in kind}
    return "".join(chance.choices("abcdefghij äß", k=chance.randrange(12)))


# --- the standard subject ---------------------------------------------------------------------------------------------


def standard_message(partition: int, index: int) -> Message:
    """Mostly good orders; see `standard_rows` for what becomes of each kind."""
    i = index * 31 + partition
    headers: tuple[tuple[str, bytes | None], ...] = (("k", b"\xff"), ("k", b"2"), ("n", None)) if i % 11 == 0 else ()
    key = None if i % 5 == 0 else b"k%d" % i
    if i % 50 == 7:
        value: bytes | None = b'{"id":%dii}' % i  # broken
    elif i % 50 == 11:
        value = b'{"id":%d,"customer":null,"amount":1.0}' % i  # breaks has-customer
    elif i % 50 == 19:
        value = b'{"id":%d,"customer":"c","amount":-1.0}' % i  # breaks sane-amount
    else:
        value = b'{"id":%d,"customer":"c-%d","amount":%d.5}' % (i, i % 97, i)
    return Message(value, key, headers, 1_700_000_000_000 + i)


def standard_expected(messages: Sequence[Message], sink: str) -> list[int]:
    """`standard_rows` of each."""
    return [standard_rows(m, sink) for m in messages]


def standard_rows(message: Message, sink: str) -> int:
    """By hand: broken JSON and missing customers go to the DLQ, bad amounts are dropped, the rest lands; raw has all."""
    if sink == "raw":
        return 1
    value = message.value or b""
    aside = b"ii}" in value or b'"customer":null' in value
    dropped = b"-1.0" in value
    return int(aside) if sink == "dlq" else int(not aside and not dropped)
