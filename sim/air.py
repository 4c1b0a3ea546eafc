"""The air of a simulated world: how long things take, what is cut, what becomes of each effect, and the trace of it all.

Chance comes in separate streams (latencies, interleaving, workload), so that one more draw in one moves nothing in the
others. Faults come from the plan alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any, Final

from fakes.faults import DONE, FATES, Fate
from sim.loop import Power, SimLoop
from sim.plan import Fault, Plan

DECADES: Final = 3
FASTEST_S: Final = 0.0005

Event = tuple[float, str, str, str, str]
"""Virtual time, node or service, operation, detail, outcome."""

REACTIONS: Final = frozenset(
    {
        "sink.retry", "retry", "coverage.retry", "commit.retry", "commit.refused", "source.retry", "partition.lost",
        "partitions.assigned", "partitions.released", "drain.timeout", "source.paused", "node.restarted", "gap.explained",
        "sink.unavailable", "topic.recreated",
    }
)  # fmt: skip
"""Reports of the engine, or of the world about it, by which a fault is known to have been felt."""


class SimAir:
    """See `fakes.faults.Air`. `fall` is called with the name of a node that loses its power."""

    def __init__(self, loop: SimLoop, plan: Plan, fall: Callable[[str], None]) -> None:
        self.loop, self.plan = loop, plan
        self.trace: list[Event] = []
        self.powers: dict[str, Power] = {}
        self.calm = False  # the phase without faults
        self.effects: list[tuple[str, str]] = []  # address and operation of each, in order
        self.armed: Counter[str] = Counter(f.kind for f in plan.faults)
        self.fired: Counter[str] = Counter()
        self.felt: Counter[str] = Counter()
        self._fall = fall
        self._chance = Random(f"latency {plan.seed}").random
        self._context = Context()
        self._base: dict[str, float] = {}
        self._slow: dict[str, float] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._full: set[str] = set()
        self._ordinals: Counter[str] = Counter()
        self._fates: dict[str, Fault] = {f.at: f for f in plan.faults if isinstance(f.at, str)}
        self.pending: set[Fault] = set(self._fates.values())  # faults of effects that have not come yet; never iterated
        self.next: dict[str, list[Fate]] = {}  # by operation: what becomes of the next ones, whatever their address
        self._waiting: list[Fault] = []  # fired, and not felt yet

    # --- what twins ask -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.loop.env._now

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        loop = self.loop
        loop.call_at(loop.env._now + delay_s, call, *args, context=self._context)

    def latency_s(self, node: str, service: str) -> float:
        base = self._base.get(service)
        if base is None:
            # Three decades for each service by itself: bugs hide where one is a thousand times as slow as another.
            draw = Random(f"latency {self.plan.seed} {service}").random()
            base = self._base[service] = FASTEST_S * 10 ** (DECADES * draw) if self.plan.seed else FASTEST_S
        took = base * (0.5 + self._chance())
        if self._slow:
            factor = self._slow.get(service, 1.0)
            if factor != 1.0:
                took *= factor
                self._feel("slow")
        return took

    def cut(self, node: str, service: str) -> bool:
        if not self._cuts:
            return False
        return self._cuts[node, service] > 0 or self._cuts["", service] > 0

    def alive(self, node: str) -> bool:
        power = self.powers.get(node)
        return power is not None and not power.off

    def awake(self, node: str) -> bool:
        power = self.powers.get(node)
        return power is not None and not power.off and not power.held

    def fate(self, effect: str, operation: str) -> Fate:
        if effect.endswith(".parquet"):
            effect = effect.rpartition("/")[0]  # the interval in the name depends on timing; the partition does not
        self._ordinals[effect] += 1
        self._ordinals[operation] += 1
        address = f"{effect}#{self._ordinals[effect]}"
        self.effects.append((address, operation))
        if self.calm:
            return DONE
        if self.next and (fates := self.next.get(operation)):
            return fates.pop(0)
        fault = self._fates.get(address) or self._fates.get(f"{operation}#{self._ordinals[operation]}")
        if fault is not None and fault in self.pending:
            self.pending.discard(fault)
            self.fire(fault)
            return FATES[fault.kind]
        if self._full and operation.partition(".")[0] in self._full and not operation.startswith("kafka"):
            self._feel("fill")
            return FATES["disk-full"]
        return DONE

    def kill(self, node: str) -> None:
        self._fall(node)

    def happened(self, node: str, operation: str, detail: str, outcome: str) -> None:
        self.trace.append((self.loop.env._now, node, operation, detail, outcome))

    # --- faults of time -------------------------------------------------------------------------------------------

    def fire(self, fault: Fault) -> None:
        """It happens now."""
        self.fired[fault.kind] += 1
        self._waiting.append(fault)
        self.happened(fault.node or "world", "fault", fault.kind, str(fault.at))

    def begin(self, fault: Fault) -> None:
        """A cut, a slow service, a full disk."""
        if fault.kind == "cut":
            self._cuts[fault.node, fault.service] += 1
        elif fault.kind == "slow":
            self._slow[fault.service] = self._slow.get(fault.service, 1.0) * fault.factor
        elif fault.kind == "fill":
            self._full.add(fault.service)

    def end(self, fault: Fault) -> None:
        """It is over."""
        if fault.kind == "cut" and self._cuts[fault.node, fault.service] > 0:
            self._cuts[fault.node, fault.service] -= 1
            self._cuts += Counter()
        elif fault.kind == "slow" and fault.service in self._slow:
            del self._slow[fault.service]
        elif fault.kind == "fill":
            self._full.discard(fault.service)

    def clear(self) -> None:
        """From here on nothing goes wrong."""
        self.calm = True
        self._cuts.clear()
        self._slow.clear()
        self._full.clear()

    # --- felt -----------------------------------------------------------------------------------------------------

    def _feel(self, kind: str) -> None:
        for fault in self._waiting:
            if fault.kind == kind:
                self.felt[kind] += 1
                self._waiting.remove(fault)
                return

    def reacted(self, what: str) -> None:
        """The engine has done something that it does when something went wrong."""
        if what in REACTIONS and self._waiting:
            for fault in self._waiting:
                self.felt[fault.kind] += 1
            self._waiting.clear()

    # --- the trace ------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """BLAKE2 of the trace: equal exactly when every event is."""
        hashed = hashlib.blake2b(digest_size=16)
        hashed.update("\n".join(map(line, self.trace)).encode())
        return hashed.hexdigest()


def line(event: Event) -> str:
    """One event as text."""
    at, node, operation, detail, outcome = event
    return f"{at:.6f} {node} {operation} {detail} {outcome}"
