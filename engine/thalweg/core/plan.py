"""From what a file says to a topology that may be run, or to *all* the reasons why not.

Decides defaults, what may be combined, and every refusal that needs no server. It opens nothing: secrets, SQL files and
the schemas that DataFusion plans are handed in as functions.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from thalweg.arrow import schema_of
from thalweg.core.quality import bound
from thalweg.core.shape import ROOT_SHAPE, Mark, Reader, Value
from thalweg.core.sql import ORDINAL, predicate_problems, problems_of
from thalweg.core.topology import (
    ROOT,
    CodecPlan,
    CoveragePlan,
    Flow,
    Node,
    OffsetReset,
    OnFailure,
    Role,
    Rule,
    Sink,
    Source,
    SqlNode,
    Tombstone,
    Topology,
    UnnestNode,
    Verdict,
)
from thalweg.errors import Fault, Refused

OURS: Final = frozenset(
    "enable.auto.commit enable.auto.offset.store auto.offset.reset enable.partition.eof group.id"
    " queued.max.messages.kbytes test.mock.num.brokers".split()
)
"""librdkafka properties on which the engine's promises rest."""

FORMAT_OF: Final = {
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
    ".json": "ndjson",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
SCHEMES: Final = frozenset("file s3 s3a gs az abfs abfss adl azure".split())
"""Kinds of store URL; a text without :// is a folder."""

REGISTRY_OPTIONS: Final = ("username", "password", "token", "ca", "timeout_s")
CODEC_KEYS: Final = {
    "json": {"schema"},
    "csv": {"schema", "delimiter", "quote"},
    "avro": {"schema_file", "registry", "framing"},
    "bytes": set[str](),
    "arrow": set[str](),
}
CODECS_OF: Final = {"ndjson": ("json", "bytes"), "csv": ("csv", "bytes"), "parquet": ("arrow",)}
DESTINATION_BYTES: Final = 8 << 20
DESTINATION_AGE_MS: Final = 250
ASIDE_AGE_MS: Final = 1_000


SECRET_NAME: Final = re.compile(
    r"(password|secret|token|access_key|account_key|sas_key|key\.pem)(?!\.endpoint|_url|_id$)", re.IGNORECASE
)
"""Names of client settings whose values nobody else may read."""


class Inputs(Protocol):
    """What planning needs from outside."""

    def resolved(self, text: str) -> str:
        """Replace secret references; `LookupError` has one sentence for each that cannot be."""
        ...

    def located(self, path: str) -> str:
        """A path, made absolute from the folder of the configuration."""
        ...

    def text_of(self, path: str) -> str:
        """A file beside the configuration; `OSError`, `UnicodeDecodeError`."""
        ...

    def codec_faults(self, plan: CodecPlan) -> Sequence[str]:
        """What its codec cannot do, one `<what>; <remedy>` each."""
        ...

    def schemas(
        self, nodes: Sequence[Node], rules: Sequence[Rule], root: pa.Schema
    ) -> tuple[Mapping[str, pa.Schema], Mapping[str, str]]:
        """Output schema per node, and faults per node or rule id."""
        ...


@dataclass(frozen=True)
class Judged:
    """All that is wrong with a configuration, what is allowed but worth saying, and the topology where nothing is wrong."""

    topology: Topology | None
    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...]


@dataclass(frozen=True)
class Planned:
    """A topology, and what is allowed but worth saying."""

    topology: Topology
    warnings: Sequence[Fault] = ()


def judged(tree: Value, inputs: Inputs, *, strict: bool) -> Judged:
    """Every fault and warning of a configuration, in file order.

    Not `strict`, a secret that is missing is a warning: a file may be checked where its secrets must not be.
    """
    reader = Reader()
    said = reader.read(tree, ROOT_SHAPE)
    planner = _Planner(reader, said if isinstance(said, dict) else {}, inputs, strict)
    topology = planner.run()
    return Judged(None if reader.faults else topology, _once(reader.faults), _once(planner.warnings))


def plan(tree: Value, inputs: Inputs, *, strict: bool) -> Planned:
    """The topology of a configuration. Raises `Refused` with every fault; `strict` as in `judged`."""
    found = judged(tree, inputs, strict=strict)
    if found.topology is None:
        raise Refused(found.faults)
    return Planned(found.topology, found.warnings)


def _once(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(set(faults)))


class _Planner:
    def __init__(self, reader: Reader, said: Mapping[str, Any], inputs: Inputs, strict: bool) -> None:
        self.reader, self.said, self.inputs, self.strict = reader, said, inputs, strict
        self.warnings: list[Fault] = []
        self.fault = reader.fault
        self.nodes_by_path: dict[str, str] = {}  # name to path
        self.unsound: set[str] = set()  # nodes and rules that DataFusion must not be shown

    def warn(self, path: str, code: str, what: str, remedy: str) -> None:
        mark = self.reader.at(path)
        self.warnings.append(Fault(mark.line, mark.column, code, what, remedy, path))

    def group(self, key: str) -> Mapping[str, Any]:
        found = self.said.get(key)
        return found if isinstance(found, dict) else {}

    def entries(self, key: str, *below: str) -> list[tuple[str, Mapping[str, Any]]]:
        """(path, mapping) of each well-shaped entry of a list."""
        found: Any = self.said.get(key)
        path = key
        for name in below:
            found = found.get(name) if isinstance(found, dict) else None
            path += f".{name}"
        return [(f"{path}[{i}]", e) for i, e in enumerate(found or []) if isinstance(e, dict)]

    def secret(self, path: str, text: str | None) -> str:
        """The text with its references replaced; a fault where one cannot be."""
        if not isinstance(text, str):
            return ""
        try:
            return self.inputs.resolved(text)
        except LookupError as error:
            for reason in error.args:
                if self.strict or "is no reference" in str(reason):
                    self.fault(path, "secret-missing", f"{path}: {reason}", "Set it, or correct the reference")
                else:
                    self.warn(path, "secret-missing", f"{path}: {reason}", "Set it before the pipeline is run")
            return text

    def place(self, path: str, text: str | None) -> str:
        """A store URL, or a folder seen from the configuration's own."""
        found = self.secret(path, text)
        return found if not found or "://" in found else self.inputs.located(found)

    def options(self, path: str, said: Any) -> dict[str, str]:
        out = {}
        for name, text in (said or {}).items():
            out[name] = self.secret(f"{path}.{name}", text)
            if SECRET_NAME.search(name) and text and "${" not in text:
                self.warn(f"{path}.{name}", "plain-secret", f"{name} stands in the file", "Write ${env:NAME} or ${file:PATH}")
        return out

    # --- the whole ------------------------------------------------------------------------------------------------

    def run(self) -> Topology | None:
        """None where a value that the topology needs is unfit; faults say which."""
        name = self.group("pipeline").get("name") or ""
        prefix = self.group("metadata").get("prefix") or "_twg_"
        sources = [(path, self.source(path, said, name)) for path, said in self.entries("sources")]
        declared = [n for _, said in self.entries("transforms") if isinstance(n := said.get("name"), str)]
        nodes = self.nodes([ROOT, *declared])
        rules = self.rules([ROOT, *declared])
        sinks = self.sinks([ROOT, *declared])
        self.unique("sources", [(path, s.name) for path, s in sources])
        self.unique("sinks", [(path, s.name) for path, s in sinks])
        self.apart(sources, sinks)
        self.together([s for _, s in sources], nodes, rules, sinks)
        self.columns(sources, nodes, rules, sinks, prefix)
        coverage = self.coverage([s for _, s in sinks])
        flow = self.flow()
        http = self.http()
        if self.reader.faults:
            return None
        return Topology(
            name, prefix, tuple(s for _, s in sources), tuple(nodes), tuple(r for _, r in rules), tuple(s for _, s in sinks),
            coverage, flow, http, self.said.get("drain_ms", 5_000),
        )  # fmt: skip

    def http(self) -> str | None:
        said = self.group("observability").get("http", "127.0.0.1:0")
        if not isinstance(said, str):
            return None
        host = said.rpartition(":")[0].strip("[]")
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = host == "localhost"
        if not loopback:
            what = f"the status pages are served at {host}, to whoever can reach it"
            self.warn("observability.http", "http-public", what, "Bind to 127.0.0.1 unless that is meant")
        return said

    def unique(self, key: str, names: Sequence[tuple[str, str]]) -> None:
        seen: set[str] = set()
        for path, name in names:
            if name and name in seen:
                self.fault(f"{path}.name", "duplicate-name", f"two of {key} are called {name}", "Rename one of them")
            seen.add(name)

    def apart(self, sources: Sequence[tuple[str, Source]], sinks: Sequence[tuple[str, Sink]]) -> None:
        """No record may come in by two ways, no two sinks may write to one place: identities would be doubled or hidden."""
        topics: dict[tuple[str, str], str] = {}
        for path, source in sources:
            for i, topic in enumerate(source.topics):
                where = f"{path}.topics[{i}]"
                if topics.setdefault((source.cluster_id, topic), where) != where:
                    what = f"topic {topic} of cluster {source.cluster_id} is read twice"
                    self.fault(where, "duplicate-topic", what, "Read it in one source, once")
        places: dict[tuple[str, ...], tuple[str, str]] = {}
        for path, sink in sinks:
            if not sink.url:
                continue
            table = (sink.table if "." in sink.table else f"public.{sink.table}",) if sink.type == "postgres" else ()
            first, other = places.setdefault((*_place(sink.url), *table), (path, sink.name))
            if first != path:
                where = f"table {sink.table}" if table else "one place"
                what = f"sinks {other} and {sink.name} write to {where}: each would take the other's rows for its own"
                self.fault(f"{path}.{'table' if table else 'url'}", "sinks-share-place", what, "Give each a place of its own")

    # --- sources --------------------------------------------------------------------------------------------------

    def source(self, path: str, said: Mapping[str, Any], pipeline: str) -> Source:
        kind = said.get("type") or ""
        options = self.options(f"{path}.options", said.get("options"))
        topics = said.get("topics")
        names = [self.secret(f"{path}.topics[{i}]", t) for i, t in enumerate(topics if isinstance(topics, list) else []) if t]
        form = ""
        if kind == "kafka":
            self.kafka(path, said, options)
        elif kind == "files":
            form = self.files(path, said)
        untold = kind == "files" and not form  # a fault already; whether a codec is needed cannot be said
        codec = CodecPlan("bytes") if untold and "codec" not in said else self.codec(f"{path}.codec", said.get("codec"), form)
        return Source(
            said.get("name") or "", kind, self.secret(f"{path}.cluster_id", said.get("cluster_id")), codec, tuple(names),
            self.secret(f"{path}.group", said.get("group")) or pipeline, self.place(f"{path}.path", said.get("path")), form,
            options, OffsetReset(said.get("offset_reset") or "error"),
        )  # fmt: skip

    def kafka(self, path: str, said: Mapping[str, Any], options: Mapping[str, str]) -> None:
        if "topics" not in said:
            self.fault(path, "missing-key", f"{path}.topics is missing", "Name the topics to read")
        elif said["topics"] == []:
            self.fault(f"{path}.topics", "empty-list", f"{path}.topics is empty", "Name the topics to read")
        for i, topic in enumerate(said.get("topics") or []):
            self.topic(f"{path}.topics[{i}]", topic)
        if not {"bootstrap.servers", "metadata.broker.list"} & set(options):
            near = difflib.get_close_matches("bootstrap.servers", [_dotted(o) for o in options], 1, 0.7)
            found = next((o for o in options if near and _dotted(o) == near[0]), None)
            hint = f"Write bootstrap.servers instead of {found}" if found else "Name the brokers: bootstrap.servers: host:port,…"
            where = f"{path}.options.{found}" if found else f"{path}.options"
            self.fault(where, "missing-key", f"{path}.options has no bootstrap.servers", hint)
        for name in options:
            if name in OURS or name.endswith("_cb"):
                own = {"auto.offset.reset": "Use offset_reset", "group.id": "Use group"}.get(name, "Leave it out")
                self.fault(f"{path}.options.{name}", "option-not-yours", f"{name} is the engine's own", own)
        for key in ("path", "format"):
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a kafka source", "Leave it out")

    def topic(self, path: str, topic: str | None) -> None:
        """Kafka's own rule for names; a pattern is a regular expression."""
        if not topic or "${" in topic:
            return
        if topic.startswith("^"):
            try:
                re.compile(topic)
            except (re.error, OverflowError, RecursionError) as error:
                self.fault(path, "bad-regex", f"the pattern {topic[:60]} is no regular expression: {error}", "Mend it")
        elif not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic):
            what = f"{topic[:60]!r} can be no topic's name"
            self.fault(path, "bad-value", what, "Letters, digits and . _ -; a pattern begins with ^")

    def files(self, path: str, said: Mapping[str, Any]) -> str:
        location = said.get("path") or ""
        if "path" not in said:
            self.fault(path, "missing-key", f"{path}.path is missing", "Name the files to read")
        self.scheme(f"{path}.path", location)
        for key in ("topics", "group", "offset_reset"):
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a files source", "Leave it out")
        form = said.get("format") or ""
        if not form and location:
            bare = re.sub(r"\.(gz|zst|bz2)$", "", location)
            form = next((f for ending, f in FORMAT_OF.items() if bare.endswith(ending)), "")
            if not form:
                what = f"the format of {bare.rpartition('/')[2][:60]} cannot be told by its ending"
                self.fault(f"{path}.path", "format-unknown", what, "Set format: ndjson, csv or parquet")
        return form

    def scheme(self, path: str, url: Any) -> None:
        """A store URL must be of a store that there is."""
        found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url) if isinstance(url, str) else None
        if found and found[1].lower() not in SCHEMES:
            near = difflib.get_close_matches(found[1].lower(), sorted(SCHEMES), 1, 0.5)
            hint = f"Did you mean {near[0]}://?" if near else "Use a folder, s3://, gs:// or az://"
            self.fault(path, "bad-url", f"there is no store {found[1][:20]}://", hint)

    def codec(self, path: str, said: Any, form: str) -> CodecPlan:
        if not isinstance(said, dict):
            if form == "parquet":
                return CodecPlan("arrow")
            if said is None and path not in self.reader.marks:
                above = path.rpartition(".")[0]
                self.fault(above, "missing-key", f"{path} is missing", "Say how its bytes become rows: codec: {type: json, …}")
            return CodecPlan("bytes")
        kind, before = said.get("type") or "", len(self.reader.faults)
        if form and kind and kind not in CODECS_OF[form]:
            fits = " or ".join(CODECS_OF[form])
            self.fault(f"{path}.type", "codec-not-for-format", f"codec {kind} cannot read {form} files", f"Use {fits}")
        if not form and kind == "arrow":
            self.fault(f"{path}.type", "codec-not-for-format", "codec arrow is for Parquet files", "Use json, avro, csv or bytes")
        for key in sorted(set().union(*CODEC_KEYS.values()) - CODEC_KEYS.get(kind, set()) if kind else ()):
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to codec {kind}", "Leave it out")
        schema = self.schema(path, said, kind)
        avro, url, registry = None, None, said.get("registry")
        options: dict[str, str] = {}
        if isinstance(registry, dict):
            url = self.secret(f"{path}.registry.url", registry.get("url"))
            if url and "${" not in url and not re.match(r"https?://[^/]", url):
                self.fault(
                    f"{path}.registry.url", "bad-url", "the registry's URL is not http(s)://host…", "Write http://host:8081"
                )
            options = self.options(f"{path}.registry.options", registry.get("options"))
            for name in sorted(set(options) - set(REGISTRY_OPTIONS)):
                near = difflib.get_close_matches(name[:80], REGISTRY_OPTIONS, 1, 0.6)
                hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(REGISTRY_OPTIONS)}"
                self.fault(f"{path}.registry.options.{name}", "unknown-key", f"a registry has no option {name[:80]}", hint)
        if said.get("schema_file"):
            avro = self.avro(f"{path}.schema_file", said["schema_file"])
        framing = said.get("framing") or "confluent"
        if kind == "avro":
            if "schema_file" not in said and "registry" not in said:
                self.fault(path, "avro-schema-missing", "codec avro needs a registry or a schema_file", "Add one of them")
            elif framing == "confluent" and "registry" not in said:
                what = "framed Avro names its schema by id, which only a registry can resolve"
                self.fault(path, "avro-registry-missing", what, "Add registry, or set framing: none")
            elif framing == "none" and "schema_file" not in said:
                what = "a bare datum names no schema"
                self.fault(path, "avro-schema-missing", what, "Add schema_file, or set framing: confluent")
        delimiter, quote = said.get("delimiter", ","), said.get("quote", '"')
        if isinstance(delimiter, str) and (len(delimiter.encode()) != 1 or delimiter in "\r\n"):
            self.fault(
                f"{path}.delimiter", "bad-value", f"{path}.delimiter is not one ASCII character", 'Write "," or ";" or "\\t"'
            )
        if isinstance(quote, str) and (len(quote.encode()) > 1 or quote in ("\r", "\n", delimiter)):
            what = f"{path}.quote is not one ASCII character of its own"
            self.fault(f"{path}.quote", "bad-value", what, "Write '\"', or '' for none")
        tombstone = Tombstone(said.get("tombstone") or "row")
        made = CodecPlan(kind, schema, avro, url, options, framing, tombstone, delimiter or ",", '"' if quote is None else quote)
        if len(self.reader.faults) == before and kind:
            for line in self.inputs.codec_faults(made):
                what, _, remedy = line.rpartition("; ")
                column = re.match(r"column (.*): codec", what)
                where = f"{path}.schema.{column[1]}" if column else path
                self.fault(where, "codec-cannot", what, remedy[:1].upper() + remedy[1:])
        return made

    def schema(self, path: str, said: Mapping[str, Any], kind: str) -> pa.Schema | None:
        columns = said.get("schema")
        if isinstance(columns, dict):
            try:
                return schema_of(columns)
            except ValueError as error:
                for line in str(error).split("\n"):
                    column, _, rest = line.partition(": ")
                    what, _, remedy = rest.rpartition("; ")
                    where = f"{path}.schema" if column == "schema" else f"{path}.schema.{column}"
                    self.fault(where, "schema-type", f"{column}: {what or rest}", remedy[:1].upper() + remedy[1:])
        elif "schema" not in said and kind in ("json", "csv"):
            remedy = "Name the columns: schema: {id: int64, name: string}"
            self.fault(path, "schema-missing", f"codec {kind} needs a schema", remedy)
        return None

    def avro(self, path: str, name: str) -> str | None:
        text = self.file(path, name, "schema-file")
        if text is not None:
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
                self.fault(path, "schema-file", f"{name}{where}: not JSON", "An Avro schema is JSON")
        return text

    def file(self, path: str, name: str, code: str) -> str | None:
        try:
            return self.inputs.text_of(name)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            self.fault(path, code, f"{name} cannot be read: {reason}", "Correct the path, relative to the configuration")
            return None

    # --- nodes and rules ------------------------------------------------------------------------------------------

    def nodes(self, declared: Sequence[str]) -> list[Node]:
        """Sound enough to be run, inputs before their readers. A fault in one node is no fault of its readers."""
        inputs: dict[str, str] = {}
        given: dict[str, Node] = {}
        for path, said in self.entries("transforms"):
            name, source = said.get("name") or "", said.get("input") or ROOT
            if name == ROOT or name in inputs:
                self.fault(f"{path}.name", "duplicate-name", f"a node is called {name} already", "Choose another name")
                continue
            if name:
                self.nodes_by_path[name], inputs[name] = path, source
            if source not in declared:
                self.dangling(f"{path}.input", source, declared)
            node = self.node(path, said, name, source)
            if name and node is not None:
                given[name] = node
        return self.ordered(given, inputs)

    def node(self, path: str, said: Mapping[str, Any], name: str, source: str) -> Node | None:
        ways = [key for key in ("sql", "sql_file", "unnest") if key in said]
        if len(ways) != 1:
            found = " and ".join(ways) or "none of them"
            self.fault(path, "transform-kind", f"{path} has {found}", "Give exactly one of sql, sql_file, unnest")
            return None
        if ways[0] == "unnest":
            return UnnestNode(name, source, said["unnest"]) if said["unnest"] else None
        text, in_file = said.get("sql"), said.get("sql_file")
        if in_file:
            text = self.file(f"{path}.sql_file", in_file, "sql-file")
        if text is None:
            return None
        problems = problems_of(text)
        for problem in problems:
            if in_file:
                what = f"{in_file}, line {problem.line}: {problem.what}"
                self.fault(f"{path}.sql_file", problem.code, what, problem.remedy)
            else:
                mark = self.reader.inside(f"{path}.sql", problem.line, problem.column)
                self.fault(f"{path}.sql", problem.code, problem.what, problem.remedy, mark)
        if problems:
            self.unsound.add(name)
        return SqlNode(name, source, text)

    def ordered(self, given: Mapping[str, Node], inputs: Mapping[str, str]) -> list[Node]:
        """Inputs before their readers; one fault for each cycle."""
        depth: dict[str, int] = {}
        told: set[str] = set()
        for name in inputs:
            trail: list[str] = []
            seen: set[str] = set()
            at = name
            while at in inputs and at not in depth and at not in seen:
                seen.add(at)
                trail.append(at)
                at = inputs[at]
            if at in seen:
                cycle = trail[trail.index(at) :]
                if not told & set(cycle):
                    how = " reads ".join([*cycle, at])
                    self.fault(f"{self.nodes_by_path[at]}.input", "cycle", f"transforms go in a circle: {how}", "Break it")
                told.update(cycle)
                depth.update(dict.fromkeys(trail, -1))
                continue
            base = depth.get(at, 0)
            for n, member in enumerate(reversed(trail), 1):
                depth[member] = base + n if base >= 0 else -1
        return sorted((n for name, n in given.items() if depth[name] > 0), key=lambda n: depth[n.name])

    def dangling(self, path: str, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}"
        self.fault(path, "unknown-node", f"there is no node {name}", hint)

    def rules(self, declared: Sequence[str]) -> list[tuple[str, Rule]]:
        out: list[tuple[str, Rule]] = []
        seen: set[str] = set()
        for path, said in self.entries("quality", "rules"):
            name, node = said.get("id") or "", said.get("input") or ROOT
            if name and name in seen:
                self.fault(f"{path}.id", "duplicate-name", f"two rules are called {name}", "Rename one of them")
                name = ""
            seen.add(name)
            if node not in declared:
                self.dangling(f"{path}.input", node, declared)
            rule = self.rule(path, said, name, node)
            if rule is not None:
                out.append((path, rule))
        return out

    def rule(self, path: str, said: Mapping[str, Any], name: str, node: str) -> Rule | None:
        ways = [key for key in ("not_null", "regex", "accepted", "sql") if key in said]
        if "min" in said or "max" in said:
            ways.append("min/max")
        if len(ways) != 1:
            found, remedy = " and ".join(ways) or "no condition", "Give exactly one of not_null, min/max, regex, accepted, sql"
            self.fault(path, "rule-kind", f"{path} has {found}", remedy)
            return None
        way, column = ways[0], said.get("column") or ""
        if way == "sql":
            if "column" in said:
                self.fault(f"{path}.column", "key-not-for-type", "a SQL rule has no column", "Leave it out")
            for problem in predicate_problems(said["sql"]) if said["sql"] else ():
                place = self.reader.inside(f"{path}.sql", problem.line, problem.column)
                self.fault(f"{path}.sql", problem.code, problem.what, problem.remedy, place)
                self.unsound.add(name)
        elif "column" not in said:
            self.fault(path, "missing-key", f"{path}.column is missing", "Name the column that is judged")
        if way == "not_null" and said["not_null"] is False:
            self.fault(f"{path}.not_null", "rule-kind", "not_null: false is no rule", "Remove the rule")
        if way == "regex" and said["regex"]:
            try:
                pc.match_substring_regex(pa.array([""]), said["regex"])
            except pa.ArrowInvalid as error:
                self.fault(f"{path}.regex", "bad-regex", str(error), "RE2 has no look-around and no back-references")
        accepted: tuple[Any, ...] | None = None
        if way == "accepted" and isinstance(said["accepted"], list):
            accepted = tuple(v for v in said["accepted"] if v is not None)
            if not said["accepted"]:
                self.fault(f"{path}.accepted", "empty-list", "no value is accepted", "List the values that are allowed")
            elif len({_sort(v) for v in accepted}) > 1:
                self.fault(f"{path}.accepted", "bad-type", "the accepted values are of several kinds", "Write all as one kind")
                accepted = None
        low, high = said.get("min"), said.get("max")
        for key, value in (("min", low), ("max", high)):
            if isinstance(value, bool):
                self.fault(f"{path}.{key}", "bad-type", f"{key} is {str(value).lower()}", "Write a number or a text")
        if low is not None and high is not None:
            if _sort(low) != _sort(high):
                self.fault(f"{path}.min", "bad-type", "min and max are of two kinds", "Write both as numbers or both as text")
                low = high = None
            elif low > high:
                self.fault(f"{path}.min", "bad-value", f"min {low} is above max {high}", "Swap them")
        return Rule(
            name, node, Verdict(said.get("action") or "dlq"), said.get("code") or _code(way), column,
            way == "not_null", low, high, said.get("regex"), accepted, said.get("sql"), said.get("version") or 1,
        )  # fmt: skip

    # --- sinks ----------------------------------------------------------------------------------------------------

    def sinks(self, declared: Sequence[str]) -> list[tuple[str, Sink]]:
        entries = self.entries("sinks")
        raw = any(said.get("role") == "primary-raw" for _, said in entries)
        return [(path, self.sink(path, said, declared, raw)) for path, said in entries]

    def sink(self, path: str, said: Mapping[str, Any], declared: Sequence[str], raw: bool) -> Sink:
        role, kind = Role(said.get("role") or "destination"), said.get("type") or ""
        node = said.get("input") or ROOT
        if role is not Role.DESTINATION and "input" in said:
            what = f"a {role} sink takes what its role says, not the rows of a node"
            self.fault(f"{path}.input", "key-not-for-type", what, "Leave it out")
        elif node not in declared:
            self.dangling(f"{path}.input", node, declared)
        hold = role is not Role.QUARANTINE  # what an isolated sink misses at a crash is a gap: that is to be asked for
        on_failure = OnFailure(said.get("on_failure") or ("hold" if hold else "isolate"))
        self.duties(path, said, role, kind, on_failure, raw)
        table = ""
        if role is Role.PRIMARY_RAW and kind == "postgres":
            what = "a Postgres table as primary raw is not supported yet"
            self.fault(f"{path}.type", "primary-raw-unsupported", what, "Use type: parquet, in an object store or a folder")
        if kind == "postgres":
            url = self.secret(f"{path}.url", said.get("url"))
            table = self.table(path, said)
            if url and "${" not in url and not (re.match(r"postgres(ql)?://", url) or ("=" in url and "://" not in url)):
                what, remedy = f"{path}.url is no connection string", "Write postgresql://user@host/database"
                self.fault(f"{path}.url", "bad-url", what, remedy)
        else:
            url = self.place(f"{path}.url", said.get("url"))
            self.scheme(f"{path}.url", said.get("url"))
        for key in ("options",) if kind == "postgres" else ("table", "idempotency", "key") if kind else ():
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a {kind} sink", "Leave it out")
        idempotency = said.get("idempotency") or "range"
        if kind == "postgres" and idempotency == "key" and not said.get("key"):
            self.fault(path, "missing-key", f"{path}.key is missing", "Name the columns of the key")
        if kind == "postgres" and "key" in said and idempotency != "key":
            what = f"key means nothing with idempotency {idempotency}"
            self.fault(f"{path}.key", "key-not-for-type", what, "Set idempotency: key")
        if role is not Role.DESTINATION and idempotency != "range":
            self.fault(f"{path}.idempotency", "key-not-for-type", f"a {role} sink has its own identity", "Leave it out")
        big = role is Role.PRIMARY_RAW
        aside = role in (Role.DLQ, Role.QUARANTINE)
        bytes_max = said.get("bytes_max") or (64 << 20 if big or (kind == "parquet" and not aside) else DESTINATION_BYTES)
        age = said.get("age_ms_max") or (ASIDE_AGE_MS if aside else 5_000 if kind == "parquet" else DESTINATION_AGE_MS)
        if isinstance(said.get("url"), str) and _plain_password(said["url"]):
            self.warn(f"{path}.url", "plain-secret", "a password stands in the file", "Write ${env:NAME} or ${file:PATH}")
        options = self.options(f"{path}.options", said.get("options"))
        key_columns = tuple(column for column in said.get("key") or () if column)
        for i, column in enumerate(key_columns):
            if column in key_columns[:i]:
                self.fault(f"{path}.key[{i}]", "duplicate-name", f"column {column} is in the key twice", "Remove one of them")
        return Sink(
            said.get("name") or "", kind, role, on_failure, node, url, options, table, idempotency, key_columns, bytes_max, age,
            said.get("rows_max") or 1_000_000,
        )  # fmt: skip

    def table(self, path: str, said: Mapping[str, Any]) -> str:
        if "table" not in said:
            self.fault(path, "missing-key", f"{path}.table is missing", "Name the table: [schema.]table")
        table = self.secret(f"{path}.table", said.get("table"))
        pieces = table.split(".")
        if table and "${" not in table and (len(pieces) > 2 or not all(0 < len(p.encode()) <= 63 for p in pieces)):
            what = f"{table[:80]} is no [schema.]table of at most 63 bytes each"
            self.fault(f"{path}.table", "bad-value", what, "Write schema.table")
        return table

    def duties(self, path: str, said: Mapping[str, Any], role: Role, kind: str, on_failure: OnFailure, raw: bool) -> None:
        if role is Role.PRIMARY_RAW:
            if said.get("durable") is False:
                what = "the primary raw must be durable: the source moves on its word alone"
                self.fault(f"{path}.durable", "primary-raw-not-durable", what, "Remove durable: false")
            if on_failure is OnFailure.ISOLATE:
                what = "the primary raw cannot be isolated: the source moves on its word alone"
                self.fault(f"{path}.on_failure", "primary-raw-isolated", what, "Remove on_failure")
        elif said.get("durable") is False:
            self.fault(f"{path}.durable", "not-supported", "durable: false is not supported yet", "Leave it out")
        elif on_failure is OnFailure.ISOLATE and not raw and role is not Role.QUARANTINE:
            what = "without a primary raw, what an isolated sink misses would be lost"
            at = f"{path}.on_failure" if "on_failure" in said else path
            self.fault(at, "isolate-without-primary-raw", what, "Add a sink with role: primary-raw, or set on_failure: hold")

    def together(
        self,
        sources: Sequence[Source],
        nodes: Sequence[Node],
        rules: Sequence[tuple[str, Rule]],
        sinks: Sequence[tuple[str, Sink]],
    ) -> None:
        by_role = {role: [path for path, s in sinks if s.role is role] for role in Role}
        for role in (Role.PRIMARY_RAW, Role.DLQ, Role.QUARANTINE):
            for path in by_role[role][1:]:
                self.fault(f"{path}.role", "duplicate-role", f"two sinks are {role}", "Keep one of them")
        recovery, raw = self.group("recovery").get("enabled", False), bool(by_role[Role.PRIMARY_RAW])
        if recovery and not raw:
            what = "recovery fills gaps from a primary raw, and there is none"
            self.fault("recovery.enabled", "recovery-without-primary-raw", what, "Add a sink with role: primary-raw")
        if len(by_role[Role.DESTINATION]) > 1 and not (recovery and raw):
            what = "a second destination needs recovery from a primary raw: without it one of them could miss rows in silence"
            remedy = "Set recovery: {enabled: true} and add a sink with role: primary-raw"
            self.fault(by_role[Role.DESTINATION][1], "second-sink-without-recovery", what, remedy)
        if not raw and not by_role[Role.DESTINATION] and sinks:
            self.fault("sinks", "no-destination", "no sink takes the records", "Add a primary-raw or a destination")
        wanted = {Verdict.QUARANTINE: Role.QUARANTINE, Verdict.DLQ: Role.DLQ}
        for path, rule in rules:
            role_wanted = wanted.get(rule.verdict)
            if role_wanted is not None and not by_role[role_wanted]:
                what = f"rule {rule.id} sends rows to a {role_wanted} sink and there is none"
                self.fault(f"{path}.action", "verdict-without-sink", what, f"Add a sink with role: {role_wanted}")
        refusing = any(s.codec.type not in ("bytes", "arrow") or s.codec.tombstone is Tombstone.DLQ for s in sources)
        if not by_role[Role.DLQ] and (refusing or nodes or any(s.type == "postgres" for _, s in sinks)):
            what = "without a dlq sink the pipeline stops at the first record that cannot be decoded, transformed or landed"
            self.warn("sinks", "no-dlq", what, "Add a sink with role: dlq")

    # --- columns --------------------------------------------------------------------------------------------------

    def columns(
        self,
        sources: Sequence[tuple[str, Source]],
        nodes: Sequence[Node],
        rules: Sequence[tuple[str, Rule]],
        sinks: Sequence[tuple[str, Sink]],
        prefix: str,
    ) -> None:
        """What can be said about columns beforehand: for each source whose schema is known, all nodes over its rows."""
        seen: list[pa.Schema] = []
        for path, source in sources:
            root = self.root_schema(source)
            if root is None or root in seen:
                continue
            seen.append(root)
            for name in root.names:
                if name.startswith(prefix) or name == ORDINAL:
                    what = f"column {name} begins with the metadata prefix {prefix}"
                    remedy = "Rename it, or set metadata.prefix"
                    self.fault(f"{path}.codec.schema.{name}", "metadata-prefix-collision", what, remedy)
            of = f" (rows of source {source.name})" if len(sources) > 1 else ""
            self.columns_of(root, of, nodes, rules, sinks, prefix)

    def columns_of(
        self,
        root: pa.Schema,
        of: str,
        nodes: Sequence[Node],
        rules: Sequence[tuple[str, Rule]],
        sinks: Sequence[tuple[str, Sink]],
        prefix: str,
    ) -> None:
        sound = [n for n in nodes if n.name not in self.unsound]
        judged = {rule.id: (path, rule) for path, rule in rules if rule.id and rule.id not in self.unsound}
        known, faults = self.inputs.schemas(sound, [rule for _, rule in judged.values()], root)
        by_name = {n.name: n for n in sound}
        for name, what in faults.items():
            if name in by_name:
                node, path = by_name[name], self.nodes_by_path[name]
                key = next(k for k in ("sql", "sql_file", "unnest") if f"{path}.{k}" in self.reader.marks)
                text = node.sql if isinstance(node, SqlNode) else ""
                self.unplanned(f"{path}.{key}", "sql-unplanned", what, text, node.input, known, of)
            elif name in judged:
                path, rule = judged[name]
                self.unplanned(f"{path}.sql", "rule-sql", what, rule.sql or "", rule.input, known, of)
        for name, schema in known.items():
            for column in schema.names if name != ROOT else ():
                if column.startswith(prefix):
                    what = f"node {name} makes a column {column}, which begins with the metadata prefix {prefix}"
                    remedy = "Rename it, or set metadata.prefix"
                    self.fault(self.nodes_by_path[name], "metadata-prefix-collision", what, remedy)
        for path, rule in judged.values():
            self.rule_column(path, rule, known, of)
        for path, sink in sinks:
            if sink.idempotency == "key" and sink.input in known:
                for i, column in enumerate(sink.key):
                    if column not in known[sink.input].names:
                        self.unknown_column(f"{path}.key[{i}]", column, known[sink.input].names, f"node {sink.input}{of}")

    def root_schema(self, source: Source) -> pa.Schema | None:
        if source.codec.type in ("json", "csv"):
            return source.codec.schema
        return pa.schema([pa.field("value", pa.binary())]) if source.codec.type == "bytes" else None

    def unplanned(self, path: str, code: str, what: str, text: str, node: str, known: Mapping[str, pa.Schema], of: str) -> None:
        missing = re.search(r"No field named (?:source\.)?(?:\"([^\"]+)\"|([^\s\".]+))", what) or re.search(
            r"there is no column (\S+)( to unnest)", what
        )
        if not missing or node not in known:
            self.fault(path, code, what + of, "It must make sense over the columns of its input")
            return
        column = missing[1] or missing[2]
        mark = None
        for number, line in enumerate(text.splitlines() if path.endswith(".sql") else (), 1):
            found = re.search(rf"(?<!\w){re.escape(column)}(?!\w)", line)
            if found:
                mark = self.reader.inside(path, number, found.start() + 1)
                break
        self.unknown_column(path, column, known[node].names, f"node {node}{of}", mark)

    def unknown_column(self, path: str, column: str, names: Sequence[str], where: str, mark: Mark | None = None) -> None:
        near = difflib.get_close_matches(column[:80], list(names), 1, 0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names[:12])}"
        self.fault(path, "unknown-column", f"{where} has no column {column}", hint, mark)

    def rule_column(self, path: str, rule: Rule, known: Mapping[str, pa.Schema], of: str) -> None:
        schema = known.get(rule.input)
        if schema is None or not rule.column:
            return
        if rule.column not in schema.names:
            self.unknown_column(f"{path}.column", rule.column, schema.names, f"node {rule.input}{of}")
            return
        kind = schema.field(rule.column).type
        if rule.regex is not None and not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            self.fault(f"{path}.regex", "rule-type", f"{rule.column} is {kind}; a regex needs text", "Cast it in a SQL transform")
        for key, value in (("min", rule.minimum), ("max", rule.maximum)):
            if value is None:
                continue
            reason = "a range over text compares it letter by letter; write text" if pa.types.is_string(kind) else ""
            if not (reason and not isinstance(value, str)):
                try:
                    pc.less(pa.array([None], kind), bound(value, kind))
                    continue
                except (ValueError, OverflowError, pa.ArrowException) as error:
                    reason = _first_line(error)
            self.fault(f"{path}.{key}", "rule-type", f"{rule.column} is {kind}: {reason}", "Write a value of that type")
        if rule.accepted:
            try:
                pa.array(list(rule.accepted)).cast(kind)
            except (ValueError, OverflowError, TypeError, pa.ArrowException) as error:
                what = f"{rule.column} is {kind}: {_first_line(error)}"
                self.fault(f"{path}.accepted", "rule-type", what, "Write values of that type")

    # --- coverage and flow ----------------------------------------------------------------------------------------

    def coverage(self, sinks: Sequence[Sink]) -> CoveragePlan:
        said = self.group("coverage")
        store, url = said.get("store") or "auto", said.get("url")
        interval = said.get("interval_ms") or 1_000
        raw = next((s for s in sinks if s.role is Role.PRIMARY_RAW), None)
        gating = sorted((s for s in sinks if s.on_failure is OnFailure.HOLD), key=lambda s: s.role is not Role.DESTINATION)
        beside = raw or next(iter(gating), None)
        options = self.options("coverage.options", said.get("options"))
        if store == "auto":
            for key in ("url", "options"):
                if key in said:
                    what = f"{key} means nothing with store auto"
                    self.fault(f"coverage.{key}", "key-not-for-type", what, "Set store: objects or relational, or leave it out")
            if beside is None:
                return CoveragePlan("objects", "", {}, interval)
            return CoveragePlan("relational" if beside.type == "postgres" else "objects", beside.url, beside.options, interval)
        if "url" not in said:
            self.fault("coverage", "missing-key", "coverage.url is missing", "Name the store, or set store: auto")
        if store == "relational" and "options" in said:
            self.fault("coverage.options", "key-not-for-type", "options means nothing to a database", "Leave it out")
        resolved = (self.secret if store == "relational" else self.place)("coverage.url", url)
        if store == "objects":
            self.scheme("coverage.url", url)
        elif resolved and "${" not in resolved and _place(resolved)[:1] != ("postgres",):
            what, remedy = "coverage.url is no connection string", "Write postgresql://user@host/database"
            self.fault("coverage.url", "bad-url", what, remedy)
        if isinstance(url, str) and _plain_password(url):
            self.warn("coverage.url", "plain-secret", "a password stands in the file", "Write ${env:NAME} or ${file:PATH}")
        if not resolved or (beside is not None and same_place(beside.url, resolved)):
            return CoveragePlan(store, resolved, options, interval)
        for sink in sinks:
            if sink is not beside and within(sink.url, resolved):
                what = f"coverage would live in sink {sink.name}, whose failure it must survive"
                self.fault("coverage.url", "coverage-colocated-with-non-raw-sink", what, "Set store: auto, or name another store")
        return CoveragePlan(store, resolved, options, interval)

    def flow(self) -> Flow:
        said = self.group("flow")
        default = Flow()
        return Flow(
            said.get("memory_limit_bytes") or default.memory_limit_bytes,
            said.get("prefetch_share") or default.prefetch_share,
            said.get("poll_records_max") or default.poll_records_max,
            said.get("poll_wait_ms") or default.poll_wait_ms,
        )


def _code(way: str) -> str:
    return {"not_null": "null", "min/max": "out-of-range", "regex": "no-match", "accepted": "not-accepted", "sql": "predicate"}[
        way
    ]


def _sort(value: str | int | float) -> str:
    return "truth" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def _dotted(name: str) -> str:
    return name.lower().replace("_", ".").replace("-", ".")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]


def _plain_password(url: str) -> bool:
    """Whether a password stands in the URL or connection string as it was written."""
    parts = re.match(r"[a-z0-9+.-]+://[^/@\s:]*:([^/@\s]+)@", url)
    pair = re.search(r"\bpassword\s*=\s*([^\s&]+)", url)
    return any(found is not None and "${" not in found[1] for found in (parts, pair))


def same_place(one: str, other: str) -> bool:
    """Whether two URLs or connection strings name one store, spelling aside."""
    return bool(one) and _place(one) == _place(other)


def within(outer: str, inner: str) -> bool:
    """Whether `inner` is the same store as `outer`, or a folder in it."""
    around = _place(outer) if outer else ()
    return bool(around) and _place(inner)[: len(around)] == around


def _place(url: str) -> tuple[str, ...]:
    if re.match(r"postgres(ql)?://", url):
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return ("postgres", url)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        user = query.get("user", unquote(parts.username or ""))
        host = query.get("host", query.get("hostaddr", unquote(parts.hostname or "")))
        database = query.get("dbname", unquote(parts.path.strip("/"))) or user
        return ("postgres", _host(host), query.get("port", str(port or 5432)), database)
    if "=" in url and "://" not in url:
        pairs: dict[str, str] = dict(re.findall(r"(\w+)\s*=\s*'?([^'\s]*)'?", url))
        host = _host(pairs.get("host", pairs.get("hostaddr", "")))
        return ("postgres", host, pairs.get("port", "5432"), pairs.get("dbname", pairs.get("user", "")))
    if "://" in url and not url.startswith("file://"):
        parts = urlsplit(url)
        return (parts.scheme.lower(), parts.netloc.lower(), *(p for p in parts.path.split("/") if p))
    pieces: list[str] = []
    for piece in url.removeprefix("file://").split("/"):
        if piece == ".." and pieces:
            pieces.pop()
        elif piece not in ("", "."):
            pieces.append(piece)
    return ("folder", *pieces)


LOOPBACK: Final = frozenset(("", "localhost", "::1", "[::1]", "/tmp", "/run/postgresql", "/var/run/postgresql"))
"""What reaches this machine's own server: libpq's usual socket folders, too."""


def _host(host: str) -> str:
    plain = host.lower().rstrip("./")
    return "127.0.0.1" if plain in LOOPBACK else plain
