"""What SQL is refused, where, and how the ordinal gets into what is not."""

from __future__ import annotations

import pytest

from thalweg.core.sql import ORDINAL, predicate_problems, problems_of, with_ordinal

REFUSED = {
    "SELECT sum(a) AS s FROM source": ("sql-aggregate", 1, 8),
    "SELECT a,\n       count(*) AS n\nFROM source": ("sql-aggregate", 2, 8),
    "SELECT approx_distinct(a) AS d FROM source": ("sql-aggregate", 1, 8),
    "SELECT DISTINCT a FROM source": ("sql-distinct", 1, 8),
    "SELECT a FROM source LIMIT 3": ("sql-limit", 1, 22),
    "SELECT a FROM source OFFSET 3": ("sql-limit", 1, 22),
    "SELECT row_number() OVER (ORDER BY a) AS r FROM source": ("sql-window", 1, 8),
    "SELECT a FROM source ORDER BY a": ("sql-order-by", 1, 22),
    "SELECT a FROM source GROUP BY a": ("sql-group-by", 1, 22),
    "SELECT a FROM source HAVING a > 1": ("sql-group-by", 1, 22),
    "SELECT a FROM source UNION ALL SELECT a FROM source": ("sql-set-operation", 1, 22),
    "SELECT s.a FROM source s JOIN source t ON s.a = t.a": ("sql-join", 1, 26),
    "SELECT s.a FROM source s, source t": ("sql-join", 1, 12),
    "SELECT * FROM source": ("sql-wildcard", 1, 8),
    "SELECT s.* FROM source s": ("sql-wildcard", 1, 10),
    "SELECT a FROM source WHERE a IN (SELECT a FROM source)": ("sql-subquery", 1, 34),
    "SELECT (SELECT 1 FROM source) AS x FROM source": ("sql-subquery", 1, 9),
    "SELECT a FROM source WHERE EXISTS (SELECT a FROM source)": ("sql-subquery", 1, 28),
    "DELETE FROM source": ("sql-not-select", 1, 1),
    "CREATE TABLE x AS SELECT a FROM source": ("sql-not-select", 1, 1),
    "SELECT a FROM source; SELECT a FROM source": ("sql-not-select", 1, 21),
    "SELECT a FROM other": ("sql-unknown-table", 1, 15),
    "SELECT 1 AS one": ("sql-unknown-table", 1, 1),
    "SELECT unnest(a) AS x FROM source": ("sql-unnest", 1, 8),
    "FROM source SELECT a": ("sql-not-select", 1, 1),
    "SELECT a FROM source TABLESAMPLE BERNOULLI (50)": ("sql-volatile", 1, 22),
    "SELECT now() AS t FROM source": ("sql-volatile", 1, 8),
    "SELECT current_date AS t FROM source": ("sql-volatile", 1, 8),
    "SELECT random() AS t FROM source": ("sql-volatile", 1, 8),
    "SELECT a AS x, b AS x FROM source": ("sql-duplicate-column", 1, 13),
    f"SELECT {ORDINAL} FROM source": ("sql-reserved-name", 1, 8),
    "SELECT a FROM (SELECT max(a) AS a FROM source)": ("sql-aggregate", 1, 23),
    "WITH c AS (SELECT a FROM source LIMIT 1) SELECT a FROM c": ("sql-limit", 1, 33),
}


@pytest.mark.parametrize("sql", REFUSED)
def test_what_is_not_row_wise_is_refused_at_its_place(sql: str) -> None:
    code, line, column = REFUSED[sql]
    assert (code, line, column) in {(p.code, p.line, p.column) for p in problems_of(sql)}


@pytest.mark.parametrize(
    "sql", ["SELECT FROM WHERE", "SELEC a", "SELECT a FROM source WHERE (a", "SELECT 'open FROM source", "", ";;"]
)
def test_what_is_no_sql_is_one_problem(sql: str) -> None:
    assert problems_of(sql)


def test_every_problem_is_reported_at_once() -> None:
    found = {p.code for p in problems_of("SELECT DISTINCT sum(a) AS x, now() AS x FROM other ORDER BY 1 LIMIT 2")}
    wanted = "distinct aggregate volatile duplicate-column unknown-table order-by limit".split()
    assert {f"sql-{name}" for name in wanted} <= found


FINE = {
    "SELECT a FROM source": 'SELECT a , "{o}" FROM source',
    "SELECT a FROM source WHERE a > 1;": 'SELECT a , "{o}" FROM source WHERE a > 1',
    "SELECT a FROM source; -- FROM x": 'SELECT a , "{o}" FROM source',
    "select a\n-- FROM here\nfrom source": 'select a\n-- FROM here\n, "{o}" from source',
    "SELECT 'x FROM y' AS t FROM source": "SELECT 'x FROM y' AS t , \"{o}\" FROM source",
    'SELECT "FROM" FROM source': 'SELECT "FROM" , "{o}" FROM source',
    "SELECT EXTRACT(year FROM t) AS y FROM source": 'SELECT EXTRACT(year FROM t) AS y , "{o}" FROM source',
    "SELECT SUBSTRING(a FROM 2) AS y, TRIM(BOTH ' ' FROM b) AS z FROM source": (
        "SELECT SUBSTRING(a FROM 2) AS y, TRIM(BOTH ' ' FROM b) AS z , \"{o}\" FROM source"
    ),
    "SELECT a IS DISTINCT FROM b AS d FROM source": 'SELECT a IS DISTINCT FROM b AS d , "{o}" FROM source',
    "SELECT CASE WHEN a > 1 THEN 'x' ELSE 'y' END AS c FROM source": (
        "SELECT CASE WHEN a > 1 THEN 'x' ELSE 'y' END AS c , \"{o}\" FROM source"
    ),
    "WITH c AS (SELECT a FROM source) SELECT a + 1 AS b FROM c": (
        'WITH c AS (SELECT a , "{o}" FROM source) SELECT a + 1 AS b , "{o}" FROM c'
    ),
    "SELECT b FROM (SELECT a AS b FROM source WHERE a > 0) AS d": (
        'SELECT b , "{o}" FROM (SELECT a AS b , "{o}" FROM source WHERE a > 0) AS d'
    ),
}


@pytest.mark.parametrize("sql", FINE)
def test_ordinal_is_injected_and_nothing_else_changes(sql: str) -> None:
    assert problems_of(sql) == []
    assert with_ordinal(sql) == FINE[sql].format(o=ORDINAL)


def test_predicates_are_held_to_the_same() -> None:
    assert predicate_problems("a > 1 AND b IS NOT NULL") == []
    (problem,) = predicate_problems("a > max(b)")
    assert (problem.code, problem.line, problem.column) == ("sql-aggregate", 1, 5)
