"""The tree of transform nodes over one decoded batch: SQL by DataFusion, unnest by Arrow, then the node's rules.

Decides how a row keeps its origin (a hidden ordinal through SQL, parent indices through unnest) and how a row that
cannot be evaluated is isolated from its neighbours. One SessionContext serves all batches of one `Transform`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datafusion import SessionConfig, SessionContext, SQLOptions

from thalweg.core.batch import Refusals
from thalweg.core.quality import judge, reason
from thalweg.core.sql import ORDINAL, SOURCE, with_ordinal
from thalweg.core.topology import ROOT, Node, Rule, SqlNode, UnnestNode, Verdict
from thalweg.errors import Permanent

DETAIL_MAX: Final = 300
BATCH_ROWS: Final = 1 << 20  # DataFusion would otherwise cut our batches into pieces of 8,192 rows


@dataclass(frozen=True)
class NodeRows:
    """Rows that left a node. `origin[i]` is the envelope row that `rows[i]` derives from, ascending; `child[i]`, below an
    unnest, numbers the rows of one record from 0."""

    rows: pa.RecordBatch
    origin: pa.Int32Array
    child: pa.Int32Array | None = None

    def take(self, indices: npt.NDArray[np.int64]) -> NodeRows:
        """Some of the rows."""
        at = pa.array(indices)
        child = None if self.child is None else self.child.take(at)
        return NodeRows(self.rows.take(at), self.origin.take(at), child)


@dataclass(frozen=True)
class Outcome:
    """What became of one decoded batch.

    `nodes` are the clean rows of each node; `refused` rows that could not be evaluated, by stage, with their children's
    ordinals; `verdicts` what each node's rules set aside.
    """

    nodes: dict[str, NodeRows] = field(default_factory=dict)
    refused: list[tuple[str, Refusals, pa.Int32Array | None]] = field(default_factory=list)
    verdicts: dict[str, list[tuple[Verdict, Refusals, pa.Int32Array | None]]] = field(default_factory=dict)


class Transform:
    """All nodes and rules of a topology. Not for two threads at once."""

    def __init__(self, nodes: Sequence[Node], rules: Sequence[Rule]) -> None:
        self._nodes = [(node, with_ordinal(node.sql) if isinstance(node, SqlNode) else "") for node in nodes]
        self._rules: dict[str, list[Rule]] = {}
        for rule in rules:
            self._rules.setdefault(rule.input, []).append(rule)
        self._predicates = {
            name: [r for r in of_node if r.sql is not None]
            for name, of_node in self._rules.items()
            if any(r.sql for r in of_node)
        }

    def run(self, rows: pa.RecordBatch, origin: pa.Int32Array) -> Outcome:
        """Evaluate every node. Raises `Permanent` for what no row can mend (an unknown column, say)."""
        outcome = Outcome()
        outcome.nodes[ROOT] = self._judged(ROOT, NodeRows(rows, origin), outcome)
        for node, sql in self._nodes:
            given = outcome.nodes[node.input]
            derived = unnested(node, given) if isinstance(node, UnnestNode) else self._selected(node, sql, given, outcome)
            outcome.nodes[node.name] = self._judged(node.name, derived, outcome)
        return outcome

    # --- SQL ------------------------------------------------------------------------------------------------------

    @cached_property
    def _context(self) -> SessionContext:
        """One for all batches, made when the first SQL is met: a pipeline without any needs none."""
        config = (
            SessionConfig()
            .with_target_partitions(1)  # with more, row order differs from run to run
            .with_batch_size(BATCH_ROWS)
            .set("datafusion.sql_parser.enable_ident_normalization", "false")  # a column is called as it is written
        )
        return SessionContext(config)

    @cached_property
    def _options(self) -> SQLOptions:
        return SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)

    def _query(self, sql: str, rows: pa.RecordBatch, name: str) -> pa.Table:
        """Raises `Permanent` when it cannot be planned, whatever DataFusion raises when a row fails."""
        self._context.register_record_batches(SOURCE, [[rows]])
        try:
            try:
                frame = self._context.sql_with_options(sql, self._options)
            except Exception as error:  # DataFusion raises ValueError or bare Exception, by kind of fault
                raise Permanent(f"the SQL of {name} cannot be planned: {_short(error)}", where=f"transform {name}") from None
            return pa.Table.from_batches(frame.collect(), frame.schema())
        finally:
            self._context.deregister_table(SOURCE)

    def _selected(self, node: SqlNode, sql: str, given: NodeRows, outcome: Outcome) -> NodeRows:
        n = given.rows.num_rows
        numbered = _appended(given.rows, ORDINAL, pa.array(np.arange(n, dtype=np.int32)))
        tables, failures = self._isolated(sql, numbered, node.name)
        if failures:
            indices = np.array([i for i, _ in failures])
            outcome.refused.append(_refused(f"transform:{node.name}", given, indices, [d for _, d in failures]))
        table = _plain(pa.concat_tables(tables))
        ordinals = table.column(ORDINAL).combine_chunks().to_numpy()
        if (ordinals[1:] <= ordinals[:-1]).any():  # what the check does not know of; a wrong origin would be a wrong identity
            raise Permanent(
                f"the SQL of {node.name} gives several rows for one, or in another order", where=f"transform {node.name}"
            )
        batch = _one_batch(table.drop_columns([ORDINAL]))
        if len(ordinals) == n and not failures:
            return NodeRows(batch, given.origin, given.child)
        kept = pa.array(ordinals)
        return NodeRows(batch, given.origin.take(kept), None if given.child is None else given.child.take(kept))

    def _isolated(self, sql: str, rows: pa.RecordBatch, name: str) -> tuple[list[pa.Table], list[tuple[int, str]]]:
        """Tables in row order, and the rows that fail by themselves, found by halving."""
        tables: list[pa.Table] = []
        failures: list[tuple[int, str]] = []
        spans = [(0, rows.num_rows)]
        while spans:
            start, stop = spans.pop()
            try:
                tables.append(self._query(sql, rows.slice(start, stop - start), name))
            except Permanent:
                raise
            except Exception as error:  # evaluation failed: DataFusion has no class of its own for it
                if stop - start <= 1:
                    failures.append((start, _short(error)))
                else:
                    middle = (start + stop) // 2
                    spans += [(middle, stop), (start, middle)]
        if not tables:
            try:
                tables.append(self._query(sql, rows.slice(0, 0), name))
            except Permanent:
                raise
            except Exception as error:  # as above; here no row is to blame
                what = f"the SQL of {name} cannot be evaluated, whatever the row: {_short(error)}"
                raise Permanent(what, where=f"transform {name}") from None
        return tables, failures

    # --- rules ----------------------------------------------------------------------------------------------------

    def _judged(self, name: str, given: NodeRows, outcome: Outcome) -> NodeRows:
        rules = self._rules.get(name)
        if not rules or given.rows.num_rows == 0:
            return given
        given, predicates = self._held(name, given, outcome)
        judged = judge(rules, given.rows, predicates)
        if judged.clean is None:
            return given
        for verdict, (indices, named) in judged.broken.items():
            at = pa.array(indices)
            refusals = Refusals(
                given.origin.take(at),
                pa.array([r.code for r in named], pa.string()),
                pa.array([reason(r) for r in named], pa.string()),
                pa.array([r.id for r in named], pa.string()),
            )
            child = None if given.child is None else given.child.take(at)
            outcome.verdicts.setdefault(name, []).append((verdict, refusals, child))
        return given.take(judged.clean)

    def _held(self, name: str, given: NodeRows, outcome: Outcome) -> tuple[NodeRows, Mapping[str, pa.BooleanArray]]:
        """Values of the node's SQL predicates; a row on which one cannot be evaluated is refused."""
        rules = self._predicates.get(name)
        if not rules:
            return given, {}
        listed = ", ".join(f"({rule.sql}\n) AS p{i}" for i, rule in enumerate(rules))
        numbered = _appended(given.rows, ORDINAL, pa.array(np.arange(given.rows.num_rows, dtype=np.int32)))
        tables, failures = self._isolated(f'SELECT {listed}, "{ORDINAL}" FROM {SOURCE}', numbered, name)
        table = pa.concat_tables(tables)
        if failures:
            indices = np.array([i for i, _ in failures])
            outcome.refused.append(_refused(f"rule:{name}", given, indices, [d for _, d in failures]))
            given = given.take(table.column(ORDINAL).to_numpy().astype(np.int64))
        return given, {rule.id: table.column(f"p{i}").combine_chunks() for i, rule in enumerate(rules)}

    # --- what a configuration check wants to know -----------------------------------------------------------------

    def schemas(self, root: pa.Schema) -> tuple[dict[str, pa.Schema], dict[str, str]]:
        """Output schema of each node for records of schema `root`, and per node (or rule id) what is wrong with it.

        Nodes below a faulty one are left out of both.
        """
        known: dict[str, pa.Schema] = {ROOT: root}
        faults: dict[str, str] = {}
        for node, sql in self._nodes:
            if node.input not in known:
                continue
            rows = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in known[node.input]], schema=known[node.input])
            empty = NodeRows(rows, pa.array([], pa.int32()))
            try:
                derived = unnested(node, empty) if isinstance(node, UnnestNode) else self._selected(node, sql, empty, Outcome())
            except Permanent as error:
                faults[node.name] = error.what
                continue
            known[node.name] = derived.rows.schema
        for name, rules in self._predicates.items():
            if name not in known:
                continue
            rows = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in known[name]], schema=known[name])
            for rule in rules:
                try:
                    table = self._query(f"SELECT ({rule.sql}\n) AS p FROM {SOURCE}", rows, f"rule {rule.id}")
                except Exception as error:  # DataFusion has no class of its own for what fails over no rows at all
                    faults[rule.id] = error.what if isinstance(error, Permanent) else _short(error)
                    continue
                if not pa.types.is_boolean(table.schema.field("p").type):
                    faults[rule.id] = f"the predicate gives {table.schema.field('p').type}, not a boolean"
        return known, faults


def _refused(
    stage: str, given: NodeRows, indices: npt.NDArray[np.int64], details: list[str]
) -> tuple[str, Refusals, pa.Int32Array | None]:
    at = pa.array(indices)
    origins = given.origin.take(at).to_pylist()
    refusals = Refusals.of([(o, "transform-failed", d, "") for o, d in zip(origins, details, strict=True)])
    return stage, refusals, None if given.child is None else given.child.take(at)


def _short(error: Exception) -> str:
    return " ".join(str(error).removeprefix("DataFusion error: ").split())[:DETAIL_MAX]


def _appended(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*rows.columns, column], schema=rows.schema.append(pa.field(name, column.type)))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return kind


def _plain(table: pa.Table) -> pa.Table:
    """The same values in the types that the rest of the engine knows; every column nullable, whatever the plan inferred."""
    target = pa.schema([pa.field(f.name, _plain_type(f.type)) for f in table.schema])
    return table if table.schema.equals(target) else table.cast(target)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in table.schema], schema=table.schema)


def unnested(node: UnnestNode, given: NodeRows) -> NodeRows:
    """One row per element of the list column. Raises `Permanent` when it is no list, or a name would be there twice."""
    index = given.rows.schema.get_field_index(node.column)
    if index < 0:
        names = ", ".join(given.rows.schema.names)
        raise Permanent(f"there is no column {node.column} to unnest (there are: {names})", where=f"transform {node.name}")
    column = given.rows.column(index)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise Permanent(f"column {node.column} is {kind}, not a list", where=f"transform {node.name}")
    if not pa.types.is_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    offsets = column.offsets.to_numpy()
    lengths = np.diff(offsets)
    lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    parents = np.repeat(np.arange(len(column)), lengths)
    values = column.flatten()  # leaves out what lies under null lists, as the lengths do
    rest = [(f, given.rows.column(i)) for i, f in enumerate(given.rows.schema) if i != index]
    at = pa.array(parents)
    columns = [c.take(at) for _, c in rest]
    fields = [f for f, _ in rest]
    if pa.types.is_struct(values.type):
        columns += values.flatten()  # with the struct's own nulls
        fields += [pa.field(f.name, f.type) for f in values.type]
    else:
        columns.append(values)
        fields.append(pa.field(node.column, values.type))
    called = [f.name for f in fields]
    twice = sorted({n for n in called if called.count(n) > 1})
    if twice:
        what = f"unnesting {node.column} would give two columns called {twice[0]}"
        raise Permanent(what, where=f"transform {node.name}", remedy="Rename one of them in a SQL transform before")
    origin = given.origin.take(at)
    return NodeRows(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)), origin, _numbered(origin))


def _numbered(origin: pa.Int32Array) -> pa.Int32Array:
    """0, 1, … within each run of equal origins."""
    values = origin.to_numpy()
    n = len(values)
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]]) if n else np.array([], dtype=np.int64)
    first = np.repeat(starts, np.diff(np.r_[starts, n]))
    return pa.array((np.arange(n) - first).astype(np.int32))
