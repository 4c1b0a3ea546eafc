"""Ways through the space of what may go wrong, and back from a failure to the least that causes it.

*Crash points*: the effects of a clean run, from its trace, times the four positions: not applied and an error; applied and
the answer lost; not applied and the node dies; applied and the node dies. Each is one run. So the denominator is known.

*Drawn*: plans by the seed. A swarm: each seed first draws which kinds of faults it will use, because a run in which
everything goes wrong finds other bugs than one in which only commits are lost. Latencies span three decades by service.

*Shrinking*: leave faults out, make the rest smaller, as long as the same invariant is broken.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from typing import Any, Final, Protocol, TypeVar

from catalogue.invariants import Violation
from fakes.faults import POSITIONS
from sim.air import Event, line
from sim.fence import ESCAPES
from sim.plan import EFFECTS, TIMED, Fault, Plan, applicable
from sim.world import Result, Simulation, Subject
from thalweg.core.topology import OffsetReset

T = TypeVar("T")

FAULTS_MAX: Final = 6
SHRINKS_MAX: Final = 400
SWEPT_DEEPER_EVERY: Final = 25

Planting = Callable[[], AbstractContextManager[None]]


def simulate(subject: Subject, plan: Plan, *, memo: bool = True) -> Result:
    """One run. An escape from the simulation is a violation of its own."""
    before = len(ESCAPES)
    with _Unswept():
        result = Simulation(subject, plan, memo=memo).run()
    result.escapes = ESCAPES[before:]
    result.violations += [Violation("escape", escape) for escape in result.escapes]
    return result


class _Unswept:
    """No garbage is collected during a run, so finalizers do not run at moments that no seed decides; each world is swept
    out whole when it is over, which is also when it is cheapest."""

    _runs = 0

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        _Unswept._runs += 1
        gc.collect(1 if _Unswept._runs % SWEPT_DEEPER_EVERY == 0 else 0)
        if self._was_on:
            gc.enable()


# --- drawing ----------------------------------------------------------------------------------------------------------


class Choice(Protocol):
    """Who decides a draw: a seed, or Hypothesis, which can take its decisions back one by one."""

    def whole(self, low: int, high: int) -> int:
        """A number of `[low, high]`."""
        ...

    def pick(self, some: Sequence[T]) -> T: ...

    def flag(self) -> bool: ...


class Seeded:
    """Draws by a seed."""

    def __init__(self, seed: str) -> None:
        self._chance = Random(seed)

    def whole(self, low: int, high: int) -> int:
        return self._chance.randint(low, high)

    def pick(self, some: Sequence[T]) -> T:
        return self._chance.choice(some)

    def flag(self) -> bool:
        return self._chance.random() < 0.5


@dataclass(frozen=True)
class Range:
    """What a clean run of a subject does: the space that plans are drawn from."""

    operations: dict[str, int]  # effects by operation
    services: tuple[str, ...]
    ends_s: float
    forgives: bool  # a source that lost records to retention goes on, with an explained gap

    @classmethod
    def of(cls, subject: Subject, plan: Plan) -> Range:
        clean = simulate(subject, replace(plan, faults=(), seed=0))
        if not clean.ok:
            raise AssertionError(f"a run of {subject.name} without any fault fails: {clean.violations[0]}")
        counts = Counter(operation for _, operation in clean.effects)
        services = sorted({operation.partition(".")[0] for operation in counts})
        forgives = all(s.offset_reset is OffsetReset.EARLIEST for s in subject.topology.sources)
        return cls(dict(sorted(counts.items())), tuple(services), clean.virtual_s, forgives)


def drawn(space: Range, plan: Plan, choice: Choice, only: Sequence[str] = ()) -> Plan:
    """`plan` with faults, drawn (of the kinds in `only`, if any). Durations are in tenths, so that a shrunk plan reads well."""
    every = [kind for kind in (*sorted(EFFECTS), *sorted(TIMED)) if kind != "retention" or space.forgives]
    kinds = list(only) or [kind for kind in every if choice.flag()] or ["killed-after"]
    faults = []
    for _ in range(choice.whole(1, FAULTS_MAX)):
        fault = _fault(space, plan, choice.pick(kinds), choice)
        if fault is not None:
            faults.append(fault)
    return plan.with_faults(faults)


def _fault(space: Range, plan: Plan, kind: str, choice: Choice) -> Fault | None:
    if kind in EFFECTS:
        operations = [o for o in space.operations if applicable(kind, o)]
        if not operations:
            return None
        operation = choice.pick(operations)
        return Fault(kind, f"{operation}#{choice.whole(1, max(1, space.operations[operation]))}")
    at = choice.whole(1, max(2, int(space.ends_s * 10))) / 10
    node = f"w{choice.whole(0, plan.nodes - 1)}"
    if kind in ("spike", "skew", "echo", "abort"):
        return Fault(kind, at)
    if kind == "retention":
        return Fault(kind, at, node=str(choice.whole(0, plan.partitions - 1)), factor=choice.pick((0.5, 1.0)))
    if kind == "kill":
        return Fault(kind, at, node=node)
    if kind == "rebalance":
        return Fault(kind, at, for_s=choice.whole(5, 60) / 10)
    if kind == "pause":
        return Fault(kind, at, node=node, for_s=choice.pick((0.5, 8.0, 12.0, 25.0)))
    if kind == "cut":
        return Fault(
            kind, at, node=choice.pick((node, "")), service=choice.pick(space.services), for_s=choice.pick((0.3, 2.0, 9.0))
        )
    if kind == "slow":
        service = choice.pick(space.services)
        return Fault(kind, at, service=service, for_s=choice.whole(5, 50) / 10, factor=choice.pick((3.0, 30.0, 300.0)))
    stores = [s for s in space.services if s != "kafka"]
    return Fault("fill", at, service=choice.pick(stores), for_s=choice.whole(3, 40) / 10) if stores else None


def plan_of(space: Range, plan: Plan, seed: int, only: Sequence[str] = ()) -> Plan:
    """The plan of one seed."""
    return drawn(space, replace(plan, seed=seed, load=seed), Seeded(f"plan {seed}"), only)


# --- crash points -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One effect in one position."""

    address: str
    operation: str
    position: str


def crash_points(subject: Subject, plan: Plan) -> list[Point]:
    """Every effect of a clean run in each of the four positions."""
    clean = simulate(subject, replace(plan, faults=()))
    if not clean.ok:
        raise AssertionError(f"a run of {subject.name} without any fault fails: {clean.violations[0]}")
    return [Point(address, operation, fate.label) for address, operation in clean.effects for fate in POSITIONS]


def at_point(subject: Subject, plan: Plan, *points: Point) -> Result:
    """A run with just these faults."""
    return simulate(subject, plan.with_faults([Fault(p.position, p.address) for p in points]))


def pairs(points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    """Two different effects, in every two positions."""
    return ((one, other) for one, other in combinations(points, 2) if one.address != other.address)


# --- shrinking --------------------------------------------------------------------------------------------------------


def shrunk(subject: Subject, plan: Plan, planting: Planting = nullcontext) -> tuple[Plan, Result, int]:
    """The least plan found that breaks the same invariant, its run, and how many runs it took."""
    with planting():
        result = simulate(subject, plan)
    if result.ok:
        raise ValueError("this plan breaks nothing")
    invariant, runs = result.violations[0].invariant, 1
    best = plan

    def breaks(candidate: Plan) -> bool:
        nonlocal best, result, runs
        if runs >= SHRINKS_MAX or candidate == best:
            return False
        runs += 1
        with planting():
            found = simulate(subject, candidate)
        if any(v.invariant == invariant for v in found.violations):
            best, result = candidate, found
            return True
        return False

    changed = True
    while changed and runs < SHRINKS_MAX:
        changed = False
        for size in (len(best.faults), len(best.faults) // 2, 1):
            at = 0
            while size and at < len(best.faults) and size <= len(best.faults):
                if breaks(best.with_faults(best.faults[:at] + best.faults[at + size :])):
                    changed = True
                else:
                    at += size
        for smaller in _smaller(best):
            if breaks(smaller):
                changed = True
                break
    return replace(best, invariant=invariant), result, runs


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans a little simpler, the simplest first."""
    for name, values in (
        ("records", (60, 120, 250, 500)),
        ("partitions", (1, 2)),
        ("nodes", (1, 2)),
        ("seed", (0,)),
        ("load", (0,)),
    ):
        for value in values:
            if value < getattr(plan, name):
                yield replace(plan, **dict[str, Any]({name: value}))
    for i, fault in enumerate(plan.faults):
        for for_s in (0.5, 2.0):
            if for_s < fault.for_s:
                yield plan.with_faults([*plan.faults[:i], replace(fault, for_s=for_s), *plan.faults[i + 1 :]])
        if isinstance(fault.at, str):
            operation, _, ordinal = fault.at.rpartition("#")
            for n in sorted({1, int(ordinal or 1) // 2}):
                if 0 < n < int(ordinal or 1):
                    yield plan.with_faults([*plan.faults[:i], replace(fault, at=f"{operation}#{n}"), *plan.faults[i + 1 :]])


# --- telling ----------------------------------------------------------------------------------------------------------

MATTERS: Final = (
    "fault",
    "node.",
    "group.",
    "topic.",
    "retention",
    "calm",
    "partition",
    "gap.",
    "sink.",
    "commit.",
    "coverage.",
    "drain",
)
EFFECT_ENDS: Final = (".commit", ".create", ".replace", ".put_document")


def story(result: Result, around: int = 14) -> list[str]:
    """The events that matter, and the last ones before the end."""
    found: list[str] = []
    last = len(result.trace) - around
    for number, event in enumerate(result.trace):
        at, node, operation, detail, outcome = event
        told = operation.startswith(MATTERS) or (operation.endswith(EFFECT_ENDS) and outcome not in ("done", ""))
        if told or (number >= last and operation.endswith(EFFECT_ENDS)):
            found.append(f"{at:9.3f} s  {node:<8} {operation:<22} {detail[:90]} {outcome}".rstrip())
    return found


def first_difference(one: Sequence[Event], other: Sequence[Event]) -> str:
    """Where two traces part."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"event {number}:\n  {line(a)}\n  {line(b)}"
    if len(one) != len(other):
        longer, at = max(one, other, key=len), min(len(one), len(other))
        return f"event {at}: one trace ends, the other goes on with\n  {line(longer[at])}"
    return ""


def encoded(result: Result) -> dict[str, Any]:
    """One run for machines."""
    return {
        "plan": result.plan.encoded(),
        "violations": [str(v) for v in result.violations],
        "digest": result.digest,
        "virtual_s": result.virtual_s,
    }
