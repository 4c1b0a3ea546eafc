"""Rules over the rows of one node, and the verdict of each row.

Decides which rows are clean and why the others are not. Every rule is evaluated on every row; a row that breaks several
gets the strongest verdict (drop before dlq before quarantine), and of those the first in the configuration's order
names it. Null breaks `not_null` only, except in a SQL predicate, where NULL counts as broken. NaN lies in no range. A
regex matches anywhere in the value (RE2 syntax; anchor with ^ and $).

Contracts will add rules of their own to the list given here; audit rows will be made from `Judged.broken`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from thalweg.core.topology import Rule, Verdict

PRECEDENCE: Final = (Verdict.DROP, Verdict.DLQ, Verdict.QUARANTINE)


@dataclass(frozen=True)
class Judged:
    """`clean` are row indices (None: all rows are clean); `broken` the others: row index and the rule that names each."""

    clean: npt.NDArray[np.int64] | None
    broken: Mapping[Verdict, tuple[npt.NDArray[np.int64], list[Rule]]]


def bound(value: float | int | str, kind: pa.DataType) -> pa.Scalar:
    """A range's end as a scalar that compares with a column of `kind`. `ValueError` where it cannot."""
    try:
        if pa.types.is_decimal(kind):
            return pa.scalar(Decimal(str(value)))
        if pa.types.is_temporal(kind) or pa.types.is_string(kind):
            scalar: pa.Scalar = pc.cast(pa.scalar(str(value)), kind) if pa.types.is_temporal(kind) else pa.scalar(str(value))
            return scalar
        return pa.scalar(value)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ArithmeticError) as error:
        raise ValueError(f"{value!r} is no {kind}: {error}") from None


EXACT: Final = Context(prec=400)  # enough for any double, and for any decimal256


def _beyond(column: pa.Array, value: float | int | str, low: bool) -> Any:
    """Where `column` lies below (`low`) or above `value`; null where it is null.

    Arrow compares an integer with a double, or two decimals, in a type common to both, and raises when a *value* does
    not fit it. So the end is moved to the nearest number within the range that the column's own type can hold.
    """
    kind = column.type
    compare = pc.less if low else pc.greater
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        return compare(column, bound(value, kind))
    try:
        end = Decimal(str(value))
        if not end.is_infinite():
            unit = Decimal(1).scaleb(-kind.scale if pa.types.is_decimal(kind) else 0)
            end = end.quantize(unit, ROUND_CEILING if low else ROUND_FLOOR, EXACT)
            return compare(column, pa.scalar(end if pa.types.is_decimal(kind) else int(end), kind))
    except (pa.ArrowInvalid, OverflowError):
        pass  # beyond all that the type can hold
    except ArithmeticError as error:
        raise ValueError(f"{value!r} is no {kind}: {error}") from None
    return pa.array(np.full(len(column), (end > 0) == low))


def broken_by(rule: Rule, rows: pa.RecordBatch, held: pa.BooleanArray | None) -> pa.BooleanArray:
    """True where a row breaks `rule`, no nulls. `held` is the value of its SQL predicate, where it has one."""
    if rule.sql is not None:
        assert held is not None
        return pc.invert(pc.fill_null(held, False))
    column = rows.column(rule.column)
    if rule.not_null:
        return column.is_null()
    if rule.regex is not None:
        return pc.fill_null(pc.invert(pc.match_substring_regex(column, rule.regex)), False)
    if rule.accepted is not None:
        values = pa.array(list(rule.accepted)).cast(column.type) if rule.accepted else pa.array([], column.type)
        return pc.and_(pc.invert(pc.is_in(column, value_set=values)), column.is_valid())
    bad: Any = pa.array(np.zeros(rows.num_rows, dtype=bool))
    if rule.minimum is not None:
        bad = pc.or_(bad, pc.fill_null(_beyond(column, rule.minimum, low=True), False))
    if rule.maximum is not None:
        bad = pc.or_(bad, pc.fill_null(_beyond(column, rule.maximum, low=False), False))
    if pa.types.is_floating(column.type):
        bad = pc.or_(bad, pc.fill_null(pc.is_nan(column), False))
    return pc.and_(bad, column.is_valid())


def judge(rules: Sequence[Rule], rows: pa.RecordBatch, predicates: Mapping[str, pa.BooleanArray]) -> Judged:
    """The verdicts of all rows; `predicates` maps a rule's id to its SQL predicate's values."""
    named = np.full(rows.num_rows, -1, dtype=np.int32)  # index of the rule that names the row
    ranked = sorted(range(len(rules)), key=lambda i: (PRECEDENCE.index(rules[i].verdict), i))
    for i in ranked:
        bad = broken_by(rules[i], rows, predicates.get(rules[i].id))
        if pc.any(bad).as_py():
            named[(named < 0) & bad.to_numpy(zero_copy_only=False)] = i
    if (named < 0).all():
        return Judged(None, {})
    broken: dict[Verdict, tuple[npt.NDArray[np.int64], list[Rule]]] = {}
    for verdict in PRECEDENCE:
        members = [i for i in ranked if rules[i].verdict is verdict]
        which = np.flatnonzero(np.isin(named, members))
        if len(which):
            broken[verdict] = which, [rules[i] for i in named[which].tolist()]
    return Judged(np.flatnonzero(named < 0), broken)


def reason(rule: Rule) -> str:
    """Why a row that breaks `rule` was set aside, in words."""
    if rule.not_null:
        return f"{rule.column} is null"
    if rule.regex is not None:
        return f"{rule.column} does not match {rule.regex}"
    if rule.accepted is not None:
        return f"{rule.column} is none of the accepted values"
    if rule.sql is not None:
        return f"does not hold: {' '.join(rule.sql.split())[:200]}"
    low, high = ("" if end is None else end for end in (rule.minimum, rule.maximum))
    return f"{rule.column} is outside [{low}, {high}]"
