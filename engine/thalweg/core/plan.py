"""From what a file says to a topology that may be run, or to *all* the reasons why not.

Decides defaults, what may be combined, and every refusal that needs no server. It opens nothing: secrets, SQL files and
the schemas that DataFusion plans are handed in as functions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import pyarrow as pa

from thalweg.arrow import schema_of
from thalweg.core.quality import bound
from thalweg.core.shape import ROOT_SHAPE, Mark, Reader, Value
from thalweg.core.sql import ORDINAL, predicate_problems, problems_of
from thalweg.core.stamp import stamp_schema
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
CODECS_OF: Final = {"ndjson": ("json", "bytes"), "csv": ("csv", "bytes"), "parquet": ("arrow",)}
DESTINATION_BYTES: Final = 8 << 20
DESTINATION_AGE_MS: Final = 250
ASIDE_AGE_MS: Final = 1_000


class Inputs(Protocol):
    """What planning needs from outside."""

    def resolved(self, text: str) -> str:
        """Replace secret references; `LookupError` names one that cannot be."""
        ...

    def located(self, path: str) -> str:
        """A path, made absolute from the folder of the configuration."""
        ...

    def text_of(self, path: str) -> str:
        """A file beside the configuration; `OSError`, `UnicodeDecodeError`."""
        ...

    def schemas(
        self, nodes: Sequence[Node], rules: Sequence[Rule], root: pa.Schema
    ) -> tuple[Mapping[str, pa.Schema], Mapping[str, str]]:
        """Output schema per node, and faults per node or rule id."""
        ...


@dataclass
class Planned:
    """A topology, and what is allowed but worth saying."""

    topology: Topology
    warnings: list[Fault] = field(default_factory=list)


def plan(tree: Value, inputs: Inputs, *, strict: bool) -> Planned:
    """The topology of a configuration. Raises `Refused` with every fault, in file order.

    Not `strict`, a secret that is missing is a warning: a file may be checked where its secrets must not be.
    """
    reader = Reader()
    said = reader.read(tree, ROOT_SHAPE)
    planner = _Planner(reader, said if isinstance(said, dict) else {}, inputs, strict)
    planned = planner.run()
    if reader.faults:
        raise Refused(_once(reader.faults))
    assert planned is not None
    return Planned(planned, planner.warnings)


def _once(faults: list[Fault]) -> list[Fault]:
    return sorted(set(faults))


class _Planner:
    def __init__(self, reader: Reader, said: Mapping[str, Any], inputs: Inputs, strict: bool) -> None:
        self.reader, self.said, self.inputs, self.strict = reader, said, inputs, strict
        self.warnings: list[Fault] = []
        self.fault = reader.fault

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
            what, remedy = f"{path}: {error.args[0]}", "Set it, or correct the reference"
            if self.strict or "is no reference" in what:
                self.fault(path, "secret-missing", what, remedy)
                return ""
            self.warn(path, "secret-missing", what, remedy)
            return text

    def place(self, path: str, text: str | None) -> str:
        """A store URL, or a folder seen from the configuration's own."""
        found = self.secret(path, text)
        return found if not found or "://" in found else self.inputs.located(found)

    def options(self, path: str, said: Any) -> dict[str, str]:
        out = {}
        for name, text in (said or {}).items():
            out[name] = self.secret(f"{path}.{name}", text)
            if re.search(r"password|secret|token", name) and isinstance(text, str) and text and "${" not in text:
                self.warn(f"{path}.{name}", "plain-secret", f"{name} stands in the file", "Write ${env:NAME} or ${file:PATH}")
        return out

    # --- the whole ------------------------------------------------------------------------------------------------

    def run(self) -> Topology | None:
        name = self.group("pipeline").get("name") or ""
        prefix = self.group("metadata").get("prefix") or "_twg_"
        sources = [self.source(path, said, name) for path, said in self.entries("sources")]
        nodes = self.nodes()
        rules = self.rules({ROOT, *(n.name for n in nodes)})
        sinks = self.sinks({ROOT, *(n.name for n in nodes)})
        self.unique("sources", [s.name for s in sources])
        self.unique("sinks", [s.name for s in sinks])
        self.together(sources, sinks, rules)
        self.columns(sources, nodes, rules, sinks, prefix)
        coverage = self.coverage(sinks)
        flow = self.flow()
        observability = self.group("observability")
        http = observability.get("http", "127.0.0.1:0")
        if isinstance(http, str) and http.rpartition(":")[0] in ("0.0.0.0", "::", "[::]"):
            self.warn("observability.http", "http-public", "the status pages are served to every interface", "Bind to 127.0.0.1")
        if self.reader.faults:
            return None
        return Topology(
            name, prefix, tuple(sources), tuple(nodes), tuple(rules), tuple(sinks), coverage, flow,
            None if http is False else http, self.said.get("drain_ms", 5_000),
        )  # fmt: skip

    def unique(self, key: str, names: Sequence[str]) -> None:
        for i, name in enumerate(names):
            if name and name in names[:i]:
                self.fault(f"{key}[{i}].name", "duplicate-name", f"two of {key} are called {name}", "Rename one of them")

    # --- sources --------------------------------------------------------------------------------------------------

    def source(self, path: str, said: Mapping[str, Any], pipeline: str) -> Source:
        kind = said.get("type") or ""
        options = self.options(f"{path}.options", said.get("options"))
        form = ""
        if kind == "kafka":
            self.kafka(path, said, options)
        elif kind == "files":
            form = self.files(path, said)
        codec = self.codec(f"{path}.codec", said.get("codec"), form)
        return Source(
            said.get("name") or "", kind, said.get("cluster_id") or "", codec, tuple(t for t in said.get("topics") or [] if t),
            said.get("group") or pipeline, self.place(f"{path}.path", said.get("path")), form, options,
            OffsetReset(said.get("offset_reset") or "error"),
        )  # fmt: skip

    def kafka(self, path: str, said: Mapping[str, Any], options: Mapping[str, str]) -> None:
        if not said.get("topics"):
            self.fault(path, "missing-key", f"{path}.topics is missing", "Name the topics to read")
        if "bootstrap.servers" not in options:
            self.fault(path, "missing-key", f"{path}.options has no bootstrap.servers", "Name the brokers, host:port,host:port")
        for name in sorted(OURS & set(options)):
            where = f"{path}.options.{name}"
            own = "Use offset_reset" if name == "auto.offset.reset" else "Use group" if name == "group.id" else "Leave it out"
            self.fault(where, "option-not-yours", f"{name} is the engine's own", own)
        for key in ("path", "format"):
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a kafka source", "Leave it out")

    def files(self, path: str, said: Mapping[str, Any]) -> str:
        location = said.get("path") or ""
        if not location:
            self.fault(path, "missing-key", f"{path}.path is missing", "Name the files to read")
        for key in ("topics", "group", "offset_reset"):
            if key in said:
                self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a files source", "Leave it out")
        form = said.get("format") or ""
        if not form and location:
            bare = re.sub(r"\.(gz|zst|bz2)$", "", location)
            form = next((f for ending, f in FORMAT_OF.items() if bare.endswith(ending)), "")
            if not form:
                self.fault(f"{path}.path", "format-unknown", f"the format of {location} cannot be told", "Set format")
        return form

    def codec(self, path: str, said: Any, form: str) -> CodecPlan:
        if not isinstance(said, dict):
            if form == "parquet":
                return CodecPlan("arrow")
            if said is None:
                above = path.rpartition(".")[0]
                self.fault(above, "missing-key", f"{path} is missing", "Say how its bytes become rows: codec: {type: json, …}")
            return CodecPlan("bytes")
        kind = said.get("type") or ""
        if form and kind and kind not in CODECS_OF[form]:
            fits = " or ".join(CODECS_OF[form])
            self.fault(f"{path}.type", "codec-not-for-format", f"codec {kind} cannot read {form} files", f"Use {fits}")
        if not form and kind in ("arrow",):
            self.fault(f"{path}.type", "codec-not-for-format", "codec arrow is for Parquet files", "Use json, avro, csv or bytes")
        schema = None
        if isinstance(said.get("schema"), dict):
            try:
                schema = schema_of(said["schema"])
            except ValueError as error:
                self.fault(f"{path}.schema", "schema-type", str(error), "See the type names in ARCHITECTURE.md")
        elif kind in ("json", "csv"):
            self.fault(
                path, "schema-missing", f"codec {kind} needs a schema", "Name the columns: schema: {id: int64, name: string}"
            )
        avro, url, registry = None, None, said.get("registry")
        if isinstance(registry, dict):
            url = self.secret(f"{path}.registry.url", registry.get("url"))
        if said.get("schema_file"):
            avro = self.file(f"{path}.schema_file", said["schema_file"], "schema-file")
        framing = said.get("framing") or "confluent"
        if kind == "avro":
            if avro is None and url is None:
                self.fault(path, "avro-schema-missing", "codec avro needs a registry or a schema_file", "Add one of them")
            elif framing == "confluent" and url is None:
                what = "framed Avro names its schema by id, which only a registry can resolve"
                self.fault(path, "avro-registry-missing", what, "Add registry, or set framing: none")
        marks = []
        for key, default in (("delimiter", ","), ("quote", '"')):
            mark = said.get(key) or default
            if len(mark.encode()) != 1:
                self.fault(f"{path}.{key}", "bad-value", f"{path}.{key} is not one ASCII character", f"Use {default}")
            marks.append(mark)
        options = self.options(f"{path}.registry.options", registry.get("options")) if isinstance(registry, dict) else {}
        return CodecPlan(kind, schema, avro, url, options, framing, Tombstone(said.get("tombstone") or "row"), marks[0], marks[1])

    def file(self, path: str, name: str, code: str) -> str | None:
        try:
            return self.inputs.text_of(name)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            self.fault(path, code, f"{name} cannot be read: {reason}", "Correct the path, relative to this file")
            return None

    # --- nodes and rules ------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        given: dict[str, tuple[str, Node]] = {}
        for path, said in self.entries("transforms"):
            name, source = said.get("name") or "", said.get("input") or ROOT
            if name == ROOT or name in given:
                self.fault(f"{path}.name", "duplicate-name", f"a node is called {name} already", "Choose another name")
                continue
            ways = [key for key in ("sql", "sql_file", "unnest") if key in said]
            if len(ways) != 1:
                found = " and ".join(ways) or "none of them"
                self.fault(path, "transform-kind", f"{path} has {found}", "Give exactly one of sql, sql_file, unnest")
                continue
            if ways[0] == "unnest":
                if name and said["unnest"]:
                    given[name] = path, UnnestNode(name, source, said["unnest"])
                continue
            text = said.get("sql")
            if ways[0] == "sql_file" and said["sql_file"]:
                text = self.file(f"{path}.sql_file", said["sql_file"], "sql-file")
            if text is None:
                continue
            self.sql(f"{path}.{ways[0]}", text, said.get("sql_file") if ways[0] == "sql_file" else None)
            if name:
                given[name] = path, SqlNode(name, source, text)
        for name, (path, node) in given.items():
            if node.input != ROOT and node.input not in given:
                self.dangling(f"{path}.input", node.input, [ROOT, *given])
            elif node.input == name:
                self.fault(f"{path}.input", "cycle", f"node {name} reads itself", "Name another input")
        return self.ordered(given)

    def sql(self, path: str, text: str, in_file: str | None) -> None:
        for problem in problems_of(text):
            if in_file is not None:
                what = f"{in_file}, line {problem.line}: {problem.what}"
                self.fault(path, problem.code, what, problem.remedy)
            else:
                self.fault(path, problem.code, problem.what, problem.remedy, self.inside(path, problem.line, problem.column))

    def inside(self, path: str, line: int, column: int) -> Mark:
        """A place within the text at `path`, as a place in the file."""
        begin = self.reader.text_marks.get(path) or self.reader.at(path)
        return Mark(begin.line + line - 1, begin.column + column - 1 if line == 1 else column)

    def ordered(self, given: Mapping[str, tuple[str, Node]]) -> list[Node]:
        """Inputs before their readers; a fault for each cycle."""
        done: dict[str, Node] = {}
        waiting = dict(given)
        while waiting:
            ready = [n for n, (_, node) in waiting.items() if node.input == ROOT or node.input in done]
            if not ready:
                for name, (path, node) in waiting.items():
                    if node.input in waiting and node.input != name:
                        self.fault(
                            f"{path}.input", "cycle", f"node {name} depends on itself through {node.input}", "Break the cycle"
                        )
                break
            for name in ready:
                done[name] = waiting.pop(name)[1]
        return list(done.values())

    def dangling(self, path: str, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}"
        self.fault(path, "unknown-node", f"there is no node {name}", hint)

    def rules(self, nodes: set[str]) -> list[Rule]:
        out: list[Rule] = []
        for path, said in self.entries("quality", "rules"):
            node = said.get("input") or ROOT
            if node not in nodes:
                self.dangling(f"{path}.input", node, sorted(nodes))
            ways = [key for key in ("not_null", "regex", "accepted", "sql") if key in said]
            if "min" in said or "max" in said:
                ways.append("min/max")
            if len(ways) != 1:
                found = " and ".join(ways) or "no condition"
                self.fault(
                    path, "rule-kind", f"{path} has {found}", "Give exactly one of not_null, min/max, regex, accepted, sql"
                )
                continue
            way = ways[0]
            column = said.get("column") or ""
            if way == "sql":
                if column:
                    self.fault(f"{path}.column", "key-not-for-type", "a SQL rule has no column", "Leave it out")
                for problem in predicate_problems(said["sql"] or "true"):
                    place = self.inside(f"{path}.sql", problem.line, problem.column)
                    self.fault(f"{path}.sql", problem.code, problem.what, problem.remedy, place)
            elif not column:
                self.fault(path, "missing-key", f"{path}.column is missing", "Name the column that is judged")
            if way == "not_null" and said["not_null"] is False:
                self.fault(f"{path}.not_null", "rule-kind", "not_null: false is no rule", "Remove the rule")
            if way == "regex" and said["regex"]:
                try:
                    pa.compute.match_substring_regex(pa.array([""]), said["regex"])
                except pa.ArrowInvalid as error:
                    self.fault(f"{path}.regex", "bad-regex", str(error), "RE2 has no look-around and no back-references")
            if way == "accepted" and not said["accepted"]:
                self.fault(f"{path}.accepted", "empty-list", "no value is accepted", "List the values that are allowed")
            low, high = said.get("min"), said.get("max")
            try:
                if low is not None and high is not None and low > high:
                    self.fault(f"{path}.min", "bad-value", f"min {low} is above max {high}", "Swap them")
            except TypeError:
                self.fault(f"{path}.min", "bad-type", "min and max are of two kinds", "Write both as numbers or both as text")
            accepted = tuple(v for v in said["accepted"] if v is not None) if way == "accepted" and said["accepted"] else None
            out.append(
                Rule(
                    said.get("id") or "", node, Verdict(said.get("action") or "dlq"), said.get("code") or _code(way), column,
                    way == "not_null", low, high, said.get("regex"), accepted, said.get("sql"), said.get("version") or 1,
                )
            )  # fmt: skip
        ids = [r.id for r in out]
        for i, (path, said) in enumerate(self.entries("quality", "rules")):
            if said.get("id") and [e.get("id") for _, e in self.entries("quality", "rules")].index(said["id"]) != i:
                self.fault(f"{path}.id", "duplicate-name", f"two rules are called {said['id']}", "Rename one of them")
        assert len(ids) == len(out)
        return out

    # --- sinks ----------------------------------------------------------------------------------------------------

    def sinks(self, nodes: set[str]) -> list[Sink]:
        entries = self.entries("sinks")
        raw = any(said.get("role") == "primary-raw" for _, said in entries)
        out: list[Sink] = []
        for path, said in entries:
            role, kind = Role(said.get("role") or "destination"), said.get("type") or ""
            node = said.get("input") or ROOT
            if role is not Role.DESTINATION and "input" in said:
                what = f"a {role} sink takes what its role says, not the rows of a node"
                self.fault(f"{path}.input", "key-not-for-type", what, "Leave it out")
            elif node not in nodes:
                self.dangling(f"{path}.input", node, sorted(nodes))
            hold = role in (Role.PRIMARY_RAW, Role.DLQ) or (not raw and role is not Role.QUARANTINE)
            on_failure = OnFailure(said.get("on_failure") or ("hold" if hold else "isolate"))
            self.duties(path, said, role, kind, on_failure, raw)
            if kind == "postgres":
                if not said.get("table"):
                    self.fault(path, "missing-key", f"{path}.table is missing", "Name the table: [schema.]table")
                if role is Role.PRIMARY_RAW:
                    what = "a Postgres table as primary raw is not supported yet"
                    self.fault(f"{path}.type", "primary-raw-unsupported", what, "Use type: parquet on an object store or folder")
            else:
                for key in ("table", "idempotency", "key"):
                    if key in said:
                        self.fault(f"{path}.{key}", "key-not-for-type", f"{key} means nothing to a {kind} sink", "Leave it out")
            idempotency = said.get("idempotency") or "range"
            if idempotency == "key" and not said.get("key"):
                self.fault(path, "missing-key", f"{path}.key is missing", "Name the columns of the key")
            if said.get("key") and idempotency != "key":
                self.fault(
                    f"{path}.key", "key-not-for-type", f"key means nothing with idempotency {idempotency}", "Set idempotency: key"
                )
            if role is not Role.DESTINATION and idempotency != "range":
                self.fault(f"{path}.idempotency", "key-not-for-type", f"a {role} sink has its own identity", "Leave it out")
            big = role is Role.PRIMARY_RAW
            aside = role in (Role.DLQ, Role.QUARANTINE)
            bytes_max = said.get("bytes_max") or (64 << 20 if big or (kind == "parquet" and not aside) else DESTINATION_BYTES)
            age = said.get("age_ms_max") or (ASIDE_AGE_MS if aside else 5_000 if kind == "parquet" else DESTINATION_AGE_MS)
            url = (self.secret if kind == "postgres" else self.place)(f"{path}.url", said.get("url"))
            text = said.get("url")
            if isinstance(text, str) and re.search(r"password=[^$\s]|://[^/\s:@]+:[^@$\s]+@", text):
                self.warn(f"{path}.url", "plain-secret", "a password stands in the file", "Write ${env:NAME} or ${file:PATH}")
            options = self.options(f"{path}.options", said.get("options"))
            out.append(
                Sink(
                    said.get("name") or "", kind, role, on_failure, node, url, options,
                    said.get("table") or "", idempotency, tuple(said.get("key") or ()), bytes_max, age,
                    said.get("rows_max") or 1_000_000,
                )
            )  # fmt: skip
        return out

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

    def together(self, sources: Sequence[Source], sinks: Sequence[Sink], rules: Sequence[Rule]) -> None:
        by_role = {role: [i for i, s in enumerate(sinks) if s.role is role] for role in Role}
        for role in (Role.PRIMARY_RAW, Role.DLQ, Role.QUARANTINE):
            for i in by_role[role][1:]:
                self.fault(f"sinks[{i}].role", "duplicate-role", f"two sinks are {role}", "Keep one of them")
        recovery = self.group("recovery").get("enabled", False)
        if len(by_role[Role.DESTINATION]) > 1 and not (recovery and by_role[Role.PRIMARY_RAW]):
            what = "a second destination needs recovery from a primary raw: without it one of them could miss rows in silence"
            remedy = "Set recovery: {enabled: true} and add a sink with role: primary-raw"
            self.fault(f"sinks[{by_role[Role.DESTINATION][1]}]", "second-sink-without-recovery", what, remedy)
        if not by_role[Role.PRIMARY_RAW] and not by_role[Role.DESTINATION] and sinks:
            self.fault("sinks", "no-destination", "no sink takes the records", "Add a primary-raw or a destination")
        wanted = {Verdict.QUARANTINE: Role.QUARANTINE, Verdict.DLQ: Role.DLQ}
        for i, rule in enumerate(rules):
            role_wanted = wanted.get(rule.verdict)
            if role_wanted is not None and not by_role[role_wanted]:
                what = f"rule {rule.id} sends rows to a {role_wanted} sink and there is none"
                self.fault(f"quality.rules[{i}].action", "verdict-without-sink", what, f"Add a sink with role: {role_wanted}")
        if not by_role[Role.DLQ] and any(s.codec.type not in ("bytes", "arrow") for s in sources):
            self.warn(
                "sinks", "no-dlq", "the pipeline stops at the first record that cannot be decoded", "Add a sink with role: dlq"
            )

    # --- columns --------------------------------------------------------------------------------------------------

    def columns(
        self, sources: Sequence[Source], nodes: Sequence[Node], rules: Sequence[Rule], sinks: Sequence[Sink], prefix: str
    ) -> None:
        """What can be said about columns when every source's are known beforehand."""
        roots = [self.root_schema(s) for s in sources]
        sql_is_sound = not any(f.code.startswith("sql-") for f in self.reader.faults)
        root = roots[0] if roots and all(r is not None and r == roots[0] for r in roots) else None
        if root is None or not sql_is_sound:
            return
        for name in root.names:
            if name.startswith(prefix) or name == ORDINAL:
                what = f"column {name} begins with the metadata prefix {prefix}"
                self.fault("sources[0].codec.schema", "metadata-prefix-collision", what, "Rename it, or set metadata.prefix")
        known, faults = self.inputs.schemas(nodes, rules, root)
        paths = {said.get("name"): path for path, said in self.entries("transforms")}
        rule_paths = {said.get("id"): path for path, said in self.entries("quality", "rules")}
        for name, what in faults.items():
            if name in paths:
                key = next((k for k in ("sql", "sql_file", "unnest") if f"{paths[name]}.{k}" in self.reader.marks), "name")
                self.unplanned(f"{paths[name]}.{key}", what, nodes, name, known)
            elif name in rule_paths:
                self.fault(f"{rule_paths[name]}.sql", "rule-sql", what, "The predicate reads the columns of its input node")
        reserved = set(stamp_schema(prefix, True).names)
        for name, schema in known.items():
            for column in sorted(reserved & set(schema.names)) if name != ROOT else []:
                what = f"node {name} makes a column {column}, which the engine adds itself"
                self.fault(paths.get(name, "transforms"), "metadata-prefix-collision", what, "Rename it, or set metadata.prefix")
        for rule in rules:
            self.rule_column(rule_paths.get(rule.id, "quality"), rule, known)
        for i, sink in enumerate(sinks):
            if sink.idempotency == "key" and sink.input in known:
                for column in sink.key:
                    if column not in known[sink.input].names:
                        self.unknown_column(f"sinks[{i}].key", column, known[sink.input].names, f"node {sink.input}")

    def root_schema(self, source: Source) -> pa.Schema | None:
        if source.codec.type in ("json", "csv"):
            return source.codec.schema
        return pa.schema([pa.field("value", pa.binary())]) if source.codec.type == "bytes" else None

    def unplanned(self, path: str, what: str, nodes: Sequence[Node], name: str, known: Mapping[str, pa.Schema]) -> None:
        missing = re.search(r"No field named \"?([^\s\".]+)\"?", what)
        node = next(n for n in nodes if n.name == name)
        if missing and node.input in known:
            mark = None
            if isinstance(node, SqlNode) and path.endswith(".sql"):
                for number, line in enumerate(node.sql.splitlines(), 1):
                    found = re.search(rf"\b{re.escape(missing[1])}\b", line)
                    if found:
                        mark = self.inside(path, number, found.start() + 1)
                        break
            self.unknown_column(path, missing[1], known[node.input].names, f"node {node.input}", mark)
        else:
            self.fault(path, "sql-unplanned", what, "DataFusion must be able to plan it over the input's columns")

    def unknown_column(self, path: str, column: str, names: Sequence[str], where: str, mark: Mark | None = None) -> None:
        near = difflib.get_close_matches(column, list(names), 1, 0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}"
        self.fault(path, "unknown-column", f"{where} has no column {column}", hint, mark)

    def rule_column(self, path: str, rule: Rule, known: Mapping[str, pa.Schema]) -> None:
        schema = known.get(rule.input)
        if schema is None or not rule.column:
            return
        if rule.column not in schema.names:
            self.unknown_column(f"{path}.column", rule.column, schema.names, f"node {rule.input}")
            return
        kind = schema.field(rule.column).type
        if rule.regex is not None and not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            self.fault(f"{path}.regex", "rule-type", f"{rule.column} is {kind}; a regex needs text", "Cast it in a SQL transform")
        for key, value in (("min", rule.minimum), ("max", rule.maximum)):
            if value is None:
                continue
            try:
                pa.compute.less(pa.array([None], kind), bound(value, kind))
            except (ValueError, pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                self.fault(f"{path}.{key}", "rule-type", f"{rule.column} is {kind}: {error}", "Write a value of that type")
        if rule.accepted:
            try:
                pa.array(list(rule.accepted)).cast(kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                self.fault(f"{path}.accepted", "rule-type", f"{rule.column} is {kind}: {error}", "Write values of that type")

    # --- coverage and flow ----------------------------------------------------------------------------------------

    def coverage(self, sinks: Sequence[Sink]) -> CoveragePlan:
        said = self.group("coverage")
        store, url = said.get("store") or "auto", said.get("url")
        interval = said.get("interval_ms") or 1_000
        raw = next((s for s in sinks if s.role is Role.PRIMARY_RAW), None)
        options = self.options("coverage.options", said.get("options"))
        if store == "auto":
            if url:
                self.fault("coverage.url", "key-not-for-type", "url means nothing with store auto", "Set store, or leave url out")
            beside = raw or next((s for s in sinks if s.on_failure is OnFailure.HOLD), None)
            if beside is None:
                return CoveragePlan("objects", "", {}, interval)
            return CoveragePlan("relational" if beside.type == "postgres" else "objects", beside.url, beside.options, interval)
        if not url:
            self.fault("coverage", "missing-key", "coverage.url is missing", "Name the store, or set store: auto")
        resolved = (self.secret if store == "relational" else self.place)("coverage.url", url)
        for sink in sinks:
            beside_raw = raw is not None and same_place(raw.url, resolved)
            if resolved and sink is not raw and same_place(sink.url, resolved) and not beside_raw:
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


def same_place(one: str, other: str) -> bool:
    """Whether two URLs or connection strings name one store, spelling aside."""
    return bool(one) and _place(one) == _place(other)


def _place(url: str) -> tuple[str, ...]:
    if re.match(r"postgres(ql)?://", url):
        parts = urlsplit(url)
        return ("postgres", _host(parts.hostname or ""), str(parts.port or 5432), parts.path.strip("/"))
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


def _host(host: str) -> str:
    return "127.0.0.1" if host in ("", "localhost", "::1", "[::1]") else host.lower()
