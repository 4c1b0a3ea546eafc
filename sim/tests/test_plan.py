"""Plans as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.faults import FATES
from sim.plan import TIMED, Fault, Plan, applicable

OPERATIONS = ("raw.create", "raw.replace", "pg.commit", "pg.copy", "pg.merge", "kafka.commit")


def faults() -> st.SearchStrategy[Fault]:
    of_effects = st.builds(
        lambda kind, operation, n: Fault(kind, f"{operation}#{n}"),
        st.sampled_from(sorted(FATES)), st.sampled_from(OPERATIONS), st.integers(1, 99),
    )  # fmt: skip
    of_time = st.builds(
        Fault, st.sampled_from(sorted(TIMED)), st.floats(0, 60).map(lambda x: round(x, 1)), st.sampled_from(["", "w0", "w1"]),
        st.sampled_from(["", "kafka", "raw"]), st.sampled_from([0.0, 0.5, 8.0]), st.sampled_from([1.0, 30.0]),
    )  # fmt: skip
    return st.one_of(of_effects, of_time)


@given(st.builds(Plan, st.just("standard"), st.integers(0, 10**6), st.integers(0, 9), faults=st.lists(faults()).map(tuple)))
def test_a_plan_survives_its_file(plan: Plan) -> None:
    assert Plan.decoded(plan.encoded()) == plan


@given(st.lists(faults(), max_size=3))
def test_a_shrunk_plan_has_at_most_25_lines(some: list[Fault]) -> None:
    plan = Plan("standard", faults=tuple(some), sabotage="x", invariant="y", commit="z", notes={"sample": "s"})
    assert len(plan.encoded().splitlines()) <= 25


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "no plan of format"),
        ('{"format": "thalweg-plan/2"}', "no plan of format"),
        ('{"format": "thalweg-plan/1"}', "damaged"),
        ('{"format": "thalweg-plan/1", "subject": "s", "colour": 1}', "damaged"),
        ('{"format": "thalweg-plan/1", "subject": "s", "faults": [{"kind": "melt", "at": 1}]}', "no fault is called 'melt'"),
        ('{"format": "thalweg-plan/1", "subject": "s", "faults": [{"kind": "kill", "at": "x#1"}]}', "which is no second"),
        ('{"format": "thalweg-plan/1", "subject": "s", "faults": [{"kind": "torn", "at": 1.0}]}', "which is no address"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan.decoded(text)


def test_fates_belong_to_operations() -> None:
    assert applicable("commit-refused", "kafka.commit")
    assert not applicable("commit-refused", "pg.commit")
    assert not applicable("torn", "kafka.commit")
    assert applicable("torn", "raw.create")
    assert not applicable("serialization", "raw.create")
    assert all(applicable(position, operation) for position in ("refused", "killed-after") for operation in OPERATIONS)
