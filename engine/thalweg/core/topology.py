"""A pipeline that may be run: what `core.plan` makes of a configuration without faults.

Everything here is frozen, already defaulted and already checked; nothing below the plan looks at raw configuration.
Shape: sources → one decode per source → `records` (the root node) → a tree of transform nodes → sinks. Every node has
a single input, so each derived row has exactly one origin record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

ROOT = "records"
"""Name of the node that decoded records enter by; transforms and sinks without an `input` read it."""


class Role(StrEnum):
    """What a sink is for."""

    PRIMARY_RAW = "primary-raw"  # every record as it came; gates the source
    DESTINATION = "destination"  # rows of one node that passed the rules
    DLQ = "dlq"  # what could not be decoded, transformed, accepted by a rule or taken by a sink
    QUARANTINE = "quarantine"  # what a rule set aside


class OnFailure(StrEnum):
    """What a sink's trouble means for the source."""

    HOLD = "hold"  # the sink gates: offsets wait until it has landed; a permanent failure stops the pipeline
    ISOLATE = "isolate"  # the source goes on; the sink's gap is recorded (needs a primary raw to recover from)


class OffsetReset(StrEnum):
    """Where to start when there is no stored position, or the stored one is gone."""

    ERROR = "error"
    EARLIEST = "earliest"
    LATEST = "latest"


class Tombstone(StrEnum):
    """What becomes of a record without a value on the decoded path (raw keeps it in any case)."""

    ROW = "row"  # a row whose columns are all null
    DROP = "drop"
    DLQ = "dlq"


class Verdict(StrEnum):
    """What a rule does with a row that breaks it."""

    DLQ = "dlq"
    QUARANTINE = "quarantine"
    DROP = "drop"


@dataclass(frozen=True)
class CodecPlan:
    """How a source's bytes become rows.

    `json` and `csv` need `schema`; `avro` a registry or a schema file's text; `bytes` gives the one column `value`;
    `arrow` takes the source's own columns.
    """

    type: str  # json | csv | avro | bytes | arrow
    schema: pa.Schema | None = None
    avro_schema: str | None = None  # text of a schema file (bare datums, or the reader's schema beside a registry)
    registry_url: str | None = field(default=None, repr=False)
    registry_options: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # username, password, ca, timeout_s; secrets inside
    framing: str = "confluent"  # confluent (v0 and v1) | none
    tombstone: Tombstone = Tombstone.ROW
    delimiter: str = ","
    quote: str = '"'


@dataclass(frozen=True)
class Source:
    """A log to read. `options` goes to the client as it is (librdkafka properties, store credentials)."""

    name: str
    type: str  # kafka | files
    cluster_id: str
    codec: CodecPlan
    topics: tuple[str, ...] = ()  # kafka
    group: str = ""  # kafka
    path: str = ""  # files: URL or path with glob
    format: str = ""  # files: ndjson | csv | parquet
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # secrets inside
    offset_reset: OffsetReset = OffsetReset.ERROR
    prefetch_bytes: int = 0  # the source's declared share of the byte budget


@dataclass(frozen=True)
class SqlNode:
    """Row-wise SQL over its input, which the SQL calls `source`."""

    name: str
    input: str
    sql: str


@dataclass(frozen=True)
class UnnestNode:
    """One row per element of list column `column`; a struct element becomes columns, the rest repeat. 0 elements: no row."""

    name: str
    input: str
    column: str


Node = SqlNode | UnnestNode


@dataclass(frozen=True)
class Rule:
    """A row of node `input` that breaks this gets `verdict` with reason `code` (default: the rule's kind).

    Exactly one of the conditions is set. Null values break `not_null` only, except in `sql`, where NULL counts as broken.
    """

    id: str
    input: str
    verdict: Verdict
    code: str
    column: str = ""
    not_null: bool = False
    minimum: float | int | str | None = None
    maximum: float | int | str | None = None
    regex: str | None = None
    accepted: tuple[str | int | float | bool, ...] | None = None
    sql: str | None = None  # a predicate that must hold
    version: int = 1


@dataclass(frozen=True)
class Sink:
    """Where rows go."""

    name: str
    type: str  # parquet | postgres
    role: Role
    on_failure: OnFailure
    input: str = ROOT  # node whose rows it takes (destinations only)
    url: str = field(default="", repr=False)  # parquet: store URL or folder; postgres: connection string (secret)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    table: str = ""  # postgres: [schema.]table
    idempotency: str = "range"  # postgres: range | record-id | key
    key: tuple[str, ...] = ()  # postgres, idempotency key: the user's own columns
    bytes_max: int = 64 << 20  # a chunk is closed at so many Arrow bytes,
    age_ms_max: int = 5_000  # or so long after its first row,
    rows_max: int = 1_000_000  # or at so many rows


@dataclass(frozen=True)
class CoveragePlan:
    """Where checkpoints live. `store` is objects (`url` a store URL or folder) or relational (`url` a connection string)."""

    store: str
    url: str = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    interval_ms: int = 1_000


@dataclass(frozen=True)
class Flow:
    """`memory_limit_bytes` is for the whole process, what the interpreter and libraries need included."""

    memory_limit_bytes: int = 512 << 20
    prefetch_share: float = 0.2  # of the grantable bytes, split over the sources, for the clients' own prefetch
    poll_records_max: int = 50_000
    poll_wait_ms: int = 200


@dataclass(frozen=True)
class Topology:
    """One runnable pipeline."""

    name: str
    prefix: str
    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]  # inputs before their readers
    rules: tuple[Rule, ...]
    sinks: tuple[Sink, ...]
    coverage: CoveragePlan
    flow: Flow
    http: str | None = "127.0.0.1:0"  # host:port, None for no server
    drain_ms: int = 5_000

    @property
    def gating(self) -> frozenset[str]:
        """Sinks that the source's position waits for."""
        return frozenset(s.name for s in self.sinks if s.on_failure is OnFailure.HOLD)

    @property
    def primary_raw(self) -> Sink | None:
        return next((s for s in self.sinks if s.role is Role.PRIMARY_RAW), None)

    def sinks_of(self, role: Role) -> tuple[Sink, ...]:
        return tuple(s for s in self.sinks if s.role is role)
