"""Plans that once broke something: with the bug planted again they break the same invariant, and without it they hold."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from catalogue.sabotage import PLANTS, RARE
from sim import explore
from sim.plan import Plan
from sim.subject import STANDARD, subject_of

FILES = sorted((Path(__file__).parent.parent / "corpus").glob("*.json"))


def test_what_a_search_seldom_finds_is_in_the_corpus() -> None:
    assert not RARE - {Plan.read(file).sabotage for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_plan_of_the_corpus(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 25
    plan = Plan.read(file)
    assert plan.invariant
    assert len(plan.faults) <= 3
    subject = subject_of(STANDARD if plan.subject == "standard" else Path(plan.subject))
    with PLANTS[plan.sabotage]() if plan.sabotage else nullcontext():
        broken = explore.simulate(subject, plan)
    if plan.sabotage:
        assert plan.invariant in {v.invariant for v in broken.violations}
    assert not explore.simulate(subject, plan).violations
