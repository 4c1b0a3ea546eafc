"""The bench's arithmetic: a ratio must be that of the numbers it is made of."""

from __future__ import annotations

import pytest

from chaos.bench import data
from chaos.bench.__main__ import Contender, Run, per_cpu_second, raw_share, report


def _contender(name: str, cpu_s: tuple[float, ...], start_s: float) -> Contender:
    return Contender(name, [Run(c, 2.0, 100.0) for c in cpu_s], [Run(start_s, 1.0, 50.0)])


def test_start_is_taken_off_and_the_median_counts() -> None:
    assert per_cpu_second(1_000, 3.0, 1.0) == 500
    assert _contender("x", (2.0, 9.0, 3.0), 1.0).rate(data.FEW + 1_000) == 500


def test_ratios_are_of_the_contenders_they_name() -> None:
    n = data.FEW + 1_000
    everyone = [
        _contender("bare-json", (2.0,), 1.0),
        _contender("thalweg-json", (3.0,), 1.0),
        _contender("thalweg-json-hollow", (2.5,), 1.0),
        _contender("quix", (11.0,), 1.0),
        _contender("dlt", (5.0,), 1.0),
        Contender("pathway", failure="it needs a network"),
    ]
    figures = report(everyone, n)
    assert figures["ratios"] == {
        "thalweg / bare limit, json": 0.5,
        "thalweg / best peer (dlt)": 2.0,
        "share of client CPU for raw and coverage": 0.25,
    }
    assert figures["failed"] == {"pathway": "it needs a network"}


def test_raw_share_is_the_part_that_would_fall_away() -> None:
    assert raw_share(75, 100) == pytest.approx(0.25)
