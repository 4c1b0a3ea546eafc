"""Many seeds, in one process or dealt to several, and what they showed together.

What a process is told is an `Order` and what it answers is a `Campaign`; both travel between processes. A process that has
none of its parent's memory must find its work by import, hence this module and not the command line's.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from catalogue.sabotage import every_plant
from sim import explore, fence
from sim.explore import Range
from sim.plan import Plan
from sim.subject import STANDARD, subject_of
from sim.world import Result, Subject
from thalweg.errors import Refused

EXIT_CONFIG: Final = 78
UNMEMOISED_EVERY: Final = 20
FAR_APART: Final = 10_000_000
"""Between the first seeds of processes that run until their time is over."""


def prepared() -> None:
    """What a process does once before it simulates."""
    fence.install()
    gc.collect()
    gc.freeze()


def loaded(name: str, sample: Path | None = None) -> Subject:
    """The subject that is named. Ends the process with every fault of a pipeline that cannot be simulated."""
    path = STANDARD if name == "standard" else Path(name)
    try:
        return subject_of(path, sample)
    except Refused as refused:
        for fault in refused.faults:
            print(f"{path}:{fault.line}: error: [{fault.code}] {fault.what}. {fault.remedy}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None


def planted(name: str) -> AbstractContextManager[None]:
    """A planted bug by its name. Ends the process when there is none of it."""
    if not name:
        return nullcontext()
    plants = every_plant()
    if name not in plants:
        print(f"no planted bug is called {name!r}; there are {', '.join(plants)}", file=sys.stderr)
        raise SystemExit(2)
    return plants[name]()


@dataclass(frozen=True)
class Order:
    """Which seeds to run: `seeds` of them from `first` on, or as many as `seconds` allow (0: no such bound)."""

    plan: Plan
    sample: Path | None = None
    first: int = 1
    seeds: int = 0
    seconds: float = 0.0
    keep_going: bool = False

    def dealt(self, jobs: int) -> list[Order]:
        """An order for each process. Together they run each seed once; without a number of seeds, each has a range of its own."""
        if not self.seeds:
            return [replace(self, first=self.first + job * FAR_APART) for job in range(jobs)]
        edges = [self.first + self.seeds * job // jobs for job in range(jobs + 1)]
        return [replace(self, first=a, seeds=b - a) for a, b in pairwise(edges) if a < b]


@dataclass
class Campaign:
    """What many runs showed together."""

    runs: int = 0
    failures: list[Result] = field(default_factory=list)
    armed: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    felt: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    steps: int = 0
    records: int = 0
    batches: int = 0
    effects: int = 0
    restarts: int = 0
    repeats: int = 0
    compared: int = 0
    differing: list[Result] = field(default_factory=list)
    escapes: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.runs += 1
        if not result.ok:
            self.failures.append(result)
        self.armed.update(result.armed)
        self.fired.update(result.fired)
        self.felt.update(result.felt)
        self.virtual_s += result.virtual_s
        self.steps += result.steps
        self.records += result.records
        self.batches += result.batches
        self.effects += len(result.effects)
        self.restarts += result.restarts
        self.repeats += result.repeats
        self.escapes += result.escapes

    def merge(self, other: Campaign) -> None:
        """Add what another process saw."""
        for name in ("runs", "virtual_s", "steps", "records", "batches", "effects", "restarts", "repeats", "compared"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("failures", "differing", "escapes"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("armed", "fired", "felt"):
            getattr(self, name).update(getattr(other, name))

    @property
    def unfelt(self) -> list[str]:
        """Kinds of fault that were armed, and never felt in any run: they have proven nothing."""
        return sorted(kind for kind in self.armed if not self.felt[kind])

    @property
    def ok(self) -> bool:
        return not (self.failures or self.differing or self.escapes)


def run(order: Order, seen: Callable[[Result], None] = lambda _: None) -> Campaign:
    """Run an order in this process. One seed in twenty runs a second time without the memo, and must be the same."""
    subject = loaded(order.plan.subject, order.sample)
    prepared()
    space = Range.of(subject, order.plan)
    until = time.perf_counter() + order.seconds if order.seconds else float("inf")
    numbers: Iterator[int] | range = range(order.first, order.first + order.seeds) if order.seeds else count(order.first)
    campaign = Campaign()
    with planted(order.plan.sabotage):
        for number in numbers:
            plan = explore.plan_of(space, order.plan, number)
            result = explore.simulate(subject, plan)
            campaign.add(result)
            if number % UNMEMOISED_EVERY == UNMEMOISED_EVERY - 1:
                campaign.compared += 1
                if explore.simulate(subject, plan, memo=False).digest != result.digest:
                    campaign.differing.append(result)
            seen(result)
            if time.perf_counter() >= until or not (result.ok or order.keep_going):
                break
    return campaign


def run_in_processes(order: Order, jobs: int, seen: Callable[[Campaign], None] = lambda _: None) -> Campaign:
    """The same, dealt to `jobs` fresh processes."""
    loaded(order.plan.subject, order.sample)  # what is wrong with them is said once, here
    planted(order.plan.sabotage)
    whole = Campaign()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for part in pool.map(run, order.dealt(jobs)):
            whole.merge(part)
            seen(part)
    return whole
