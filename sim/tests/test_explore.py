"""The ways through the space of faults, and back."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalogue.sabotage import INVARIANTS, PLANTS
from sim import __main__ as command
from sim import explore, fence
from sim.air import SimAir
from sim.campaign import Campaign, Order
from sim.explore import Range
from sim.loop import SimLoop
from sim.plan import Fault, Plan
from sim.subject import STANDARD, expectation, standard_rows, subject_of
from sim.world import Subject

ROOT = Path(__file__).parent.parent.parent
FLIGHTS = ROOT / "examples" / "flights" / "pipeline.yaml"
SMALL = Plan("standard", records=120, partitions=2)


@pytest.fixture(scope="module", autouse=True)
def fenced() -> None:
    fence.install()


@cache
def standard() -> Subject:
    return subject_of(STANDARD)


@cache
def space() -> Range:
    return Range.of(standard(), SMALL)


class Drawn:
    """Draws by Hypothesis, which can take them back one by one."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def whole(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def pick(self, some):  # type: ignore[no-untyped-def]  # generic in `Choice`
        return self._data.draw(st.sampled_from(some))

    def flag(self) -> bool:
        return self._data.draw(st.booleans())


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_invariant_holds_in_drawn_worlds(data: st.DataObject) -> None:
    """Workload, topology, latencies and faults are drawn; nothing may be lost, doubled, altered, over-claimed or stuck."""
    plan = Plan(
        "standard", seed=data.draw(st.integers(0, 10**6)), load=data.draw(st.integers(0, 10**6)),
        nodes=data.draw(st.integers(1, 3)),
        partitions=data.draw(st.integers(1, 6)), records=data.draw(st.sampled_from([30, 120, 400])),
    )  # fmt: skip
    result = explore.simulate(standard(), explore.drawn(space(), plan, Drawn(data)))
    assert not result.violations, (result.plan.encoded(), result.violations)


def test_the_same_plan_gives_the_same_events_with_and_without_memo() -> None:
    for seed in range(1, 6):
        plan = explore.plan_of(space(), SMALL, seed)
        one = explore.simulate(standard(), plan)
        assert explore.first_difference(one.trace, explore.simulate(standard(), plan).trace) == ""
        assert explore.simulate(standard(), plan, memo=False).digest == one.digest


def test_garbage_is_collected_between_runs_only() -> None:
    subject, seen = standard(), list[str]()

    def hear(phase: str, _info: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(hear)
    try:
        result = explore.simulate(subject, SMALL)
        seen.append("over")
    finally:
        gc.callbacks.remove(hear)
    assert seen[:3] == ["start", "stop", "over"]  # one sweep, when the run had been judged
    assert result.ok
    assert gc.isenabled()


def test_another_seed_gives_other_events() -> None:
    assert len({explore.simulate(standard(), explore.plan_of(space(), SMALL, s)).digest for s in range(1, 9)}) == 8


def test_every_crash_point_is_struck_and_survived() -> None:
    points = explore.crash_points(standard(), SMALL)
    assert len(points) == 4 * len({p.address for p in points}) > 40
    for point in points:
        result = explore.at_point(standard(), SMALL, point)
        assert sum(result.fired.values()) == 1, point
        assert not result.violations, (point, result.violations)


def test_a_pair_of_crash_points_is_of_two_effects() -> None:
    points = explore.crash_points(standard(), SMALL)[:8]
    found = list(explore.pairs(points))
    assert len(found) == 16  # two effects, four positions each
    assert all(one.address != other.address for one, other in found)


def test_a_failure_shrinks_to_what_causes_it() -> None:
    noise = (
        Fault("slow", 0.3, service="pg", for_s=1.0, factor=3.0),
        Fault("spike", 0.4),
        Fault("skew", 0.6),
        Fault("kill", 1.0, node="w1"),
    )
    plan = SMALL.with_faults([*noise, Fault("reply-lost", "pg.commit#2")])
    small, result, _ = explore.shrunk(standard(), plan, PLANTS["never-trims"])
    assert {v.invariant for v in result.violations} >= {"once"}
    assert len(small.faults) <= 1
    assert small.invariant == "once"


def test_what_breaks_nothing_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="breaks nothing"):
        explore.shrunk(standard(), SMALL)


def test_every_invariant_names_bugs_that_exist() -> None:
    assert {name for plants in INVARIANTS.values() for name in plants} <= set(PLANTS)


def test_what_becomes_of_standard_records_is_what_the_pure_part_makes_of_them() -> None:
    """By hand and by the engine: two accounts of the same records."""
    some = standard().load(1, 0, 200)
    by_engine = expectation(standard().topology, some)
    for message in some:
        for sink in ("raw", "dest", "dlq"):
            assert by_engine[message].get(sink, 0) == standard_rows(message, sink), (message.value, sink)


def test_a_fault_is_felt_by_what_answers_it_on_the_node_that_it_struck() -> None:
    struck, other = Fault("refused", "raw.create#1"), Fault("kill", 1.0, node="w0")
    air = SimAir(SimLoop(), SMALL.with_faults([struck, other]), lambda _node: None)  # type: ignore[abstract]  # see `sim.loop`
    air.fire(struck, "w0")
    air.fire(other, "w0")
    air.reacted("w1", "sink.retry")  # somebody else's
    air.reacted("w0", "partitions.assigned")  # no answer to either
    assert not air.felt
    air.reacted("w0", "sink.retry")
    assert air.felt == {"refused": 1}
    air.reacted("w0", "node.restarted")
    assert air.felt == {"refused": 1, "kill": 1}


def test_a_kind_that_was_never_felt_is_named() -> None:
    campaign = Campaign()
    campaign.armed.update(["kill", "cut"])
    campaign.felt.update(["cut"])
    assert campaign.unfelt == ["kill"]


# --- the command line ---------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = command.main(list(words))
    return status, capsys.readouterr().out


def test_run_says_what_it_saw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    status, text = said(
        capsys, "run", "standard", "--seeds", "6", "--records", "120", "--json", str(out), "--corpus", str(tmp_path)
    )
    assert status == 0
    assert "holds: every invariant in 6 seeds" in text
    figures = json.loads(out.read_text())
    assert figures["runs"] == 6
    assert figures["failures"] == []


@given(seeds=st.integers(1, 200), jobs=st.integers(1, 9), first=st.integers(1, 50))
def test_processes_are_dealt_each_seed_once(seeds: int, jobs: int, first: int) -> None:
    deals = Order(SMALL, first=first, seeds=seeds).dealt(jobs)
    assert [n for d in deals for n in range(d.first, d.first + d.seeds)] == list(range(first, first + seeds))


def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    """From a shell, as fresh processes are started by whatever the command line is."""
    seen = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        words = ["run", "standard", "--seeds", "7", "--records", "120", "--jobs", jobs, "--json", str(out)]
        done = subprocess.run([sys.executable, "-m", "sim", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        seen.append({k: v for k, v in json.loads(out.read_text()).items() if not k.endswith("per_second") and "real" not in k})
        del seen[-1]["seconds"]
    assert seen[0] == seen[1]
    assert seen[0]["runs"] == 7


def test_a_failure_that_another_process_found_is_told_and_kept(tmp_path: Path) -> None:
    words = ["run", "standard", "--seeds", "8", "--records", "120", "--jobs", "2", "--sabotage", "ack-before-durable"]
    words += ["--corpus", str(tmp_path), "--keep-going"]
    done = subprocess.run([sys.executable, "-m", "sim", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "of 8 seeds" in done.stdout
    assert list(tmp_path.glob("*.json"))


def test_processes_stop_when_their_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["run", "standard", "--seconds", "0.2", "--records", "120", "--jobs", "2", "--json", str(out)]
    done = subprocess.run([sys.executable, "-m", "sim", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["runs"] >= 2  # each process runs one at least


def test_run_of_a_planted_bug_fails_and_leaves_a_plan_that_fails_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (
        "run",
        "standard",
        "--seeds",
        "20",
        "--records",
        "120",
        "--sabotage",
        "ack-before-durable",
        "--corpus",
        str(tmp_path),
    )
    status, text = said(capsys, *words)
    assert status == 1
    assert "coverage-before-durable" in text
    (file,) = tmp_path.glob("*.json")
    assert said(capsys, "replay", str(file))[0] == 1
    assert said(capsys, "replay", str(file), "--without-sabotage")[0] == 0


def test_crash_points_of_the_flights(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "crashpoints", str(FLIGHTS), "--records", "60", "--partitions", "2", "--nodes", "1")
    assert status == 0
    assert "(100 %)" in text


def test_what_cannot_be_simulated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["run", str(ROOT / "examples" / "csv-files.toml"), "--seeds", "1"])
    assert ended.value.code == 78
    assert "[sim-no-twin]" in capsys.readouterr().err


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["run", "standard", "--records", "0"]) == 2
    assert command.main(["replay", str(tmp_path / "none.json")]) == 2
    capsys.readouterr()
