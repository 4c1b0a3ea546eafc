"""What SQL a transform may be: row-wise, over one input, the same for the same rows.

Decides which statements are refused, and where in them the fault is; and how a hidden row ordinal travels through a
statement, so that each output row can name the record it derives from. The user's text is never regenerated: the
ordinal is injected between its own characters, and what DataFusion reads is otherwise what was written.

Row-wise means: every output row depends on one input row. Aggregates, DISTINCT, LIMIT, windows, ORDER BY, joins and set
operations break that; functions that differ from call to call break replay.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

ORDINAL: Final = "__twg_row"
SOURCE: Final = "source"
DIALECTS: Final = ("postgres", "duckdb", "")
"""DataFusion's grammar is near PostgreSQL's; a statement that any of these reads is looked at, DataFusion has the last word."""

# information_schema.routines of DataFusion 55, by function_type.
AGGREGATES: Final = frozenset(
    (
        "any_value approx_distinct approx_median approx_percentile_cont approx_percentile_cont_with_weight array_agg"
        " avg bit_and bit_or bit_xor bool_and bool_or corr count covar covar_pop covar_samp first_value grouping"
        " last_value max mean median min nth_value percentile_cont quantile_cont regr_avgx regr_avgy regr_count"
        " regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy stddev stddev_pop stddev_samp string_agg sum var"
        " var_pop var_population var_samp var_sample"
    ).split()
)
WINDOWS: Final = frozenset(("cume_dist dense_rank lag lead ntile percent_rank rank row_number").split())
VOLATILE: Final = frozenset(
    (
        "current_date current_time current_timestamp localtime localtimestamp now rand random today uuid uuidv4 uuidv7"
        " input_file_name file_row_index"
    ).split()
)
SEVERAL_ROWS: Final = frozenset(("explode", "generate_subscripts", "unnest"))
BARE_VOLATILE: Final = frozenset(("current_date current_time current_timestamp localtime localtimestamp").split())


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a statement; `line` and `column` count from 1 within its text."""

    line: int
    column: int
    code: str
    what: str
    remedy: str


def _tokens(sql: str) -> list[Token]:
    return list(sqlglot.tokenize(sql, read="postgres"))


def _parsed(sql: str) -> list[exp.Expression]:
    """The statements; `SqlglotError` of the first dialect when none reads it."""
    first: SqlglotError | None = None
    for dialect in DIALECTS:
        try:
            parsed = sqlglot.parse(sql, read=dialect or None)
            return [s for s in parsed if s is not None and not isinstance(s, exp.Semicolon)]  # type: ignore[misc]
        except SqlglotError as error:
            first = first or error
    assert first is not None
    raise first


def _at(token: Token | None) -> tuple[int, int]:
    return (1, 1) if token is None else (token.line, max(1, token.col - len(token.text) + 1))


class _Finder:
    """Locates a keyword of the statement, for a problem that the tree has shown."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    def word(self, *words: str) -> Token | None:
        return next((t for t in self.tokens if t.text.upper() in words and t.token_type is not TokenType.STRING), None)

    def name(self, name: str) -> Token | None:
        return next((t for t in self.tokens if t.text == name and t.token_type is not TokenType.STRING), None)

    def calls(self) -> Iterator[Token]:
        for token, after in zip(self.tokens, [*self.tokens[1:], None], strict=True):
            word = token.text.lower()
            if token.token_type in (TokenType.STRING, TokenType.NUMBER):
                continue
            if (after is not None and after.token_type is TokenType.L_PAREN) or word in BARE_VOLATILE:
                yield token


ROW_WISE: Final = "Transforms are row-wise; aggregate in the destination, or in a view over it"


def problems_of(sql: str, known_tables: frozenset[str] = frozenset({SOURCE})) -> list[Problem]:
    """Everything that makes `sql` no row-wise SELECT over `source`, in text order; empty when it may be run."""
    try:
        tokens = _tokens(sql)
        statements = _parsed(sql)
    except SqlglotError as error:
        detail = error.errors[0] if getattr(error, "errors", None) else {}  # type: ignore[attr-defined]
        line, column = int(detail.get("line") or 1), int(detail.get("col") or 1)
        what = str(detail.get("description") or str(error).split("\n")[0])
        near = f" near {detail['highlight']!r}" if detail.get("highlight") else ""
        return [Problem(line, column, "sql-syntax", f"not SQL: {what}{near}", "Write one SELECT … FROM source")]
    except RecursionError:
        return [Problem(1, 1, "sql-syntax", "nested too deeply", "Write one SELECT … FROM source")]
    find = _Finder(tokens)
    out: set[Problem] = set()

    def add(token: Token | None, code: str, what: str, remedy: str) -> None:
        out.add(Problem(*_at(token), code, what, remedy))

    if len(statements) != 1:
        second = next((t for t in tokens if t.token_type is TokenType.SEMICOLON), None)
        add(second, "sql-not-select", f"{len(statements)} statements", "Write exactly one SELECT")
        return sorted(out)
    root = statements[0]
    for token in find.calls():
        name = token.text.lower()
        if name in AGGREGATES:
            add(token, "sql-aggregate", f"{name}() looks at more than one row", ROW_WISE)
        elif name in WINDOWS:
            add(token, "sql-window", f"{name}() looks at more than one row", ROW_WISE)
        elif name in SEVERAL_ROWS:
            what = f"{name}() makes several rows of one, and they could not be told apart"
            add(token, "sql-unnest", what, "Use a transform of type unnest")
        elif name in VOLATILE:
            what = f"{name} differs from run to run, so a replay would give other rows"
            add(token, "sql-volatile", what, f"Use a column of the record instead of {name}")
    for token in tokens:
        if token.text == ORDINAL:
            add(token, "sql-reserved-name", f"{ORDINAL} is the engine's own", "Use another name")
    if any(True for _ in root.find_all(exp.Window)):
        add(find.word("OVER"), "sql-window", "a window looks at more than one row", ROW_WISE)
    if isinstance(root, exp.SetOperation) or any(True for _ in root.find_all(exp.SetOperation)):
        add(
            find.word("UNION", "INTERSECT", "EXCEPT"),
            "sql-set-operation",
            "set operations mix rows of several selects",
            "Use one transform per branch",
        )
    elif not isinstance(root, exp.Select):
        add(
            tokens[0] if tokens else None,
            "sql-not-select",
            f"{type(root).__name__.upper()} is no SELECT",
            "Write one SELECT … FROM source",
        )
        return sorted(out)
    if tokens[0].token_type is TokenType.FROM:
        add(tokens[0], "sql-not-select", "FROM comes before SELECT", "Write one SELECT … FROM source")
    if any(True for _ in root.find_all(exp.TableSample)):
        add(find.word("TABLESAMPLE", "TABLE_SAMPLE"), "sql-volatile", "a sample differs from run to run", "Leave TABLESAMPLE out")
    ctes = {cte.alias for cte in root.find_all(exp.CTE)}
    for select in root.find_all(exp.Select):
        _check_select(select, find, add, known_tables | ctes)
    for query in root.find_all(exp.Subquery, exp.Exists):
        if isinstance(query, exp.Exists) or not isinstance(query.parent, exp.From):
            add(find.word("EXISTS") or _inner_select(tokens), "sql-subquery", "a subquery inside an expression", ROW_WISE)
    for inside in root.find_all(exp.In):
        if inside.args.get("query") is not None:
            add(_inner_select(tokens), "sql-subquery", "IN (SELECT …) looks at more than one row", ROW_WISE)
    return sorted(out)


def _inner_select(tokens: list[Token]) -> Token | None:
    selects = [t for t in tokens if t.token_type is TokenType.SELECT]
    return selects[1] if len(selects) > 1 else (selects[0] if selects else None)


def _check_select(select: exp.Select, find: _Finder, add, known: frozenset[str] | set[str]) -> None:  # type: ignore[no-untyped-def]
    clauses = (
        ("distinct", "sql-distinct", "DISTINCT compares rows", ("DISTINCT",)),
        ("limit", "sql-limit", "LIMIT depends on the batch that a row happens to be in", ("LIMIT", "FETCH")),
        ("offset", "sql-limit", "OFFSET depends on the batch that a row happens to be in", ("OFFSET",)),
        ("order", "sql-order-by", "ORDER BY compares rows; the order of a source is kept", ("ORDER", "ORDER BY")),
        ("group", "sql-group-by", "GROUP BY looks at more than one row", ("GROUP", "GROUP BY")),
        ("having", "sql-group-by", "HAVING looks at more than one row", ("HAVING",)),
        ("qualify", "sql-window", "QUALIFY looks at more than one row", ("QUALIFY",)),
    )
    for key, code, what, words in clauses:
        if select.args.get(key) is not None:
            add(find.word(*words), code, what, ROW_WISE)
    if select.args.get("joins") or select.args.get("laterals"):
        remedy = "Join in the destination, or enrich the records upstream"
        add(find.word("JOIN", "LATERAL") or find.word("FROM"), "sql-join", "a join looks at more than one row", remedy)
    table = select.args.get("from_") or select.args.get("from")
    if table is None:
        add(find.word("SELECT"), "sql-unknown-table", "no FROM", f"Write FROM {SOURCE}")
    elif isinstance(table.this, exp.Table):
        name = table.this.name
        if name not in known or table.this.args.get("db"):
            token = find.name(name) or find.word("FROM")
            add(token, "sql-unknown-table", f"there is no table {table.this.sql()}", f"The input is called {SOURCE}")
    elif not isinstance(table.this, exp.Subquery):
        add(find.word("FROM"), "sql-unknown-table", "FROM names no table", f"Write FROM {SOURCE}")
    names: list[str] = []
    for column in select.expressions:
        if column.is_star:
            star = next((t for t in find.tokens if t.token_type is TokenType.STAR), None)
            what = "a wildcard changes with its input, and the destination's columns with it"
            add(star, "sql-wildcard", what, "Name each column")
        elif column.alias_or_name:
            names.append(column.alias_or_name)
    for name in sorted({n for n in names if names.count(n) > 1}):
        remedy = "Give one of them another name with AS"
        add(find.name(name), "sql-duplicate-column", f"two output columns are called {name}", remedy)


def with_ordinal(sql: str) -> str:
    """`sql`, which has no problems, with the ordinal as one more column of every select list in it."""
    tokens = [t for t in _tokens(sql) if t.token_type is not TokenType.SEMICOLON]
    end = tokens[-1].end + 1 if tokens else 0
    insertions: list[int] = []
    depth = 0
    open_selects: list[int] = []  # depths of select lists that are still open
    for i, token in enumerate(tokens):
        if token.token_type is TokenType.L_PAREN:
            depth += 1
        elif token.token_type is TokenType.R_PAREN:
            depth -= 1
        elif token.token_type is TokenType.SELECT:
            open_selects.append(depth)
        elif token.token_type is TokenType.FROM and open_selects and open_selects[-1] == depth:
            if i and tokens[i - 1].token_type is TokenType.DISTINCT:
                continue  # IS [NOT] DISTINCT FROM
            open_selects.pop()
            insertions.append(token.start)
    out, last = [], 0
    for at in insertions:
        out += [sql[last:at], f', "{ORDINAL}" ']
        last = at
    return "".join(out) + sql[last:end]


def predicate_problems(predicate: str) -> list[Problem]:
    """What makes a rule's SQL predicate unfit: the same as for a transform that selects it."""
    lead = "SELECT "
    problems = problems_of(f"{lead}({predicate}\n) AS p FROM {SOURCE}")
    return [
        Problem(p.line, max(1, p.column - len(lead) - 1) if p.line == 1 else p.column, p.code, p.what, p.remedy) for p in problems
    ]


def likely(name: str, candidates: list[str]) -> str:
    """A hint naming the candidate nearest to `name`, or all of them when few."""
    near = difflib.get_close_matches(name, candidates, 1, 0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"There are: {', '.join(sorted(candidates)[:12])}" if candidates else ""
