"""The consumer port's conformance machine on the Kafka twin, on virtual time: what the real adapter passes on real brokers."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fakes.conformance import SCRIPTS, ZOMBIE_S, Broken, How, Outside, Step, live
from fakes.faults import DONE, Fate, Wire
from fakes.kafka import Cluster, ConsumerTwin, Message, Settings
from sim.loop import SimLoop

PARTITIONS = 4
SEEN: Counter[str] = Counter()
SCRIPTS_RUN = itertools.count()


class Breeze:
    """Latencies, and nothing worse."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self._loop, self._chance = loop, Random(seed)

    def now(self) -> float:
        return self._loop.time()

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay_s, call, *args)

    def latency_s(self, node: str, service: str) -> float:
        return 0.001 + 0.03 * self._chance.random()

    def cut(self, node: str, service: str) -> bool:
        return False

    def alive(self, node: str) -> bool:
        return True

    def awake(self, node: str) -> bool:
        return True

    def fate(self, effect: str, operation: str) -> Fate:
        return DONE

    def kill(self, node: str) -> None:
        raise AssertionError("nobody dies here")

    def happened(self, node: str, operation: str, detail: str, outcome: str) -> None:
        return


def outside(
    loop: SimLoop, seed: int, cooperative: bool, twin: type[ConsumerTwin] = ConsumerTwin, cluster: Cluster | None = None
) -> Outside:
    air = Breeze(loop, seed)
    brokers = cluster or Cluster(air)
    brokers.create("t", PARTITIONS)
    made = itertools.count()
    numbers = itertools.count()
    # A member that stands still polls nothing, and this machine's zombies stand still for longer than that is borne.
    ours = Settings(session_s=3.0, heartbeat_s=0.3, poll_interval_s=4.0, cooperative=cooperative)

    def member() -> ConsumerTwin:
        wire = Wire(air, f"m{next(made)}", "kafka", ordered=True)
        return twin(brokers, wire, source="s", cluster_id="c", group="g", topics=("t",), settings=ours)

    async def produce(n: int, how: How) -> Mapping[int, int]:
        by: dict[int, list[Message]] = {}
        for _ in range(n):
            i = next(numbers)
            by.setdefault(i % PARTITIONS, []).append(Message(b"%d" % i))
        for number, some in by.items():
            if how == "produce":
                brokers.produce("t", number, some)
            else:
                brokers.begin("p", "t", number, some)
        if how != "produce":
            brokers.end_transaction("p", "t", commit=how == "commit")
        return {p: log.stable for p, log in enumerate(brokers.topics["t"].logs)}

    def visible() -> Mapping[int, Mapping[int, bytes]]:
        return {p: {at: m.value or b"" for at, m in log.visible()} for p, log in enumerate(brokers.topics["t"].logs)}

    async def stored() -> Mapping[int, int]:
        offsets = brokers.groups["g"].offsets if "g" in brokers.groups else {}
        return {p: offsets.get(("t", p), (0, ""))[0] for p in range(PARTITIONS)}

    return Outside(member, produce, visible, stored)


def life(script: list[Step], seed: int, cooperative: bool, twin: type[ConsumerTwin] = ConsumerTwin) -> Counter[str]:
    """One script in a world of its own; what was seen is added to the totals."""
    loop = SimLoop(Random(seed))  # type: ignore[abstract]  # the rest are set below the class
    try:
        seen = loop.run_until_complete(live(script, outside(loop, seed, cooperative, twin), within_s=300))
    finally:
        loop.close()
    next(SCRIPTS_RUN)
    SEEN.update(seen.events)
    events: Counter[str] = seen.events
    return events


@given(script=SCRIPTS, seed=st.integers(0, 999), cooperative=st.booleans())
@settings(
    max_examples=250, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_generated_lives(script: list[Step], seed: int, cooperative: bool) -> None:
    life(script, seed, cooperative)


CROWD = [*[Step("join")] * 4, Step("settle"), Step("produce", amount=300), Step("leave", 0), Step("produce", amount=300)]
ZOMBIES = [
    Step("join"),
    Step("settle"),
    Step("produce", amount=400),
    Step("still", 0, ZOMBIE_S),
    *[Step("produce", amount=400)] * 14,
]
LOAD = [Step("produce", amount=2_000)]
STRESS = [*LOAD, Step("join"), *LOAD, Step("join"), *LOAD, Step("leave", 0), *LOAD, Step("join"), *LOAD, Step("close", 1), *LOAD]


@pytest.mark.parametrize("cooperative", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_more_members_than_partitions(seed: int, cooperative: bool) -> None:
    events = life(CROWD, seed, cooperative)
    assert events["assigned nothing"] > 0
    assert events["revoked"] > 0


@pytest.mark.parametrize("cooperative", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_zombie_loses_its_partitions_and_goes_on(seed: int, cooperative: bool) -> None:
    assert life(ZOMBIES, seed, cooperative)["lost"] > 0


@pytest.mark.parametrize("cooperative", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_members_come_and_go_under_load(seed: int, cooperative: bool) -> None:
    assert life(STRESS, seed, cooperative)["revoked"] > 0


def test_markers_and_aborted_records_are_claimed_to_the_end() -> None:
    loop = SimLoop(Random(1))  # type: ignore[abstract]  # the rest are set below the class
    made = outside(loop, 1, True)

    async def aborted_last(n: int, how: How) -> Mapping[int, int]:
        ends = await made.produce(n, how)
        return await made.produce(PARTITIONS, "abort") if n else ends

    script = [Step("abort", amount=8), Step("commit", amount=4), Step("abort", amount=8), Step("abort", amount=4)]
    try:
        seen = loop.run_until_complete(live(script, replace(made, produce=aborted_last), within_s=300))
    finally:
        loop.close()
    assert seen.events["positions"] > 0


def test_the_twin_does_all_that_was_seen_of_real_brokers() -> None:
    """`docs/conformance.md`: what happened there must be able to happen here. Runs its own scripts, so that order is nobody's."""
    before = SEEN.copy()
    for seed in range(8):
        life(CROWD, seed, True)
        life(ZOMBIES, seed, seed % 2 == 0)
        life(STRESS, seed, True)
        life([Step("abort", amount=8), Step("pause", 0), Step("join"), Step("leave", 0), Step("abort", amount=4)], seed, True)
    found = SEEN - before
    wanted = (
        "assigned nothing", "commits refused", "records after a refused commit", "revoked", "lost", "positions",
        "polls cancelled", "records in the call of a revoke", "paused", "polls with a token open",
    )  # fmt: skip
    assert not [name for name in wanted if found[name] == 0], found


# --- a check must be seen to fail ---------------------------------------------------------------------------------------


class Skips(ConsumerTwin):
    """Jumps over a batch."""

    async def poll(self, records_max: int, wait_s: float) -> list[Any]:
        events = await super().poll(records_max, wait_s)
        skipped = [e for e in events if type(e).__name__ == "Records"]
        if skipped and not getattr(self, "skipped", False):
            self.skipped = True
            return [e for e in events if e is not skipped[0]]
        return events


class Refuser(ConsumerTwin):
    """Takes a refused commit for a loss: reads no more, and says nothing."""

    async def commit(self, at: Mapping[Any, Any]) -> None:
        try:
            await super().commit(at)
        except Exception:
            for fetch in self._owned.values():
                fetch.paused = True
            raise


class Careless(ConsumerTwin):
    """Hands records over while a token is open."""

    def _due(self, records_max: int) -> list[Any]:
        return self._fetched(records_max) if self._open is not None else super()._due(records_max)


@pytest.mark.parametrize("twin", [Skips, Refuser, Careless])
def test_the_machine_finds_a_twin_that_breaks_a_rule(twin: type[ConsumerTwin]) -> None:
    broken = 0
    for seed in range(6):
        try:
            life(STRESS, seed, True, twin)
        except (Broken, TimeoutError, asyncio.CancelledError):
            broken += 1
    assert broken
