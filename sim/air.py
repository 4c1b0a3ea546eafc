"""The air of a simulated world: how long things take, what is cut, what becomes of each effect, and the trace of it all.

Chance comes in separate streams (latencies, interleaving, workload), so that one more draw in one moves nothing in the
others. Faults come from the plan alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final

from fakes.faults import DONE, FATES, Fate
from sim.loop import Power, SimLoop
from sim.plan import Fault, Plan

DECADES: Final = 3
FASTEST_S: Final = 0.0005

Event = tuple[float, str, str, str, str]
"""Virtual time, node or service, operation, detail, outcome."""

_TRIED_AGAIN: Final = frozenset(
    {
        "sink.retry",
        "retry",
        "coverage.retry",
        "commit.retry",
        "source.retry",
        "sink.unavailable",
        "partition.lost",
        "node.restarted",
    }
)
_STARTED_AGAIN: Final = frozenset({"node.restarted"})

FELT_BY: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(FATES, _TRIED_AGAIN),
    "commit-refused": frozenset({"commit.refused"}),
    "killed-before": _STARTED_AGAIN,
    "killed-after": _STARTED_AGAIN,
    "kill": _STARTED_AGAIN,
    "cut": _TRIED_AGAIN,
    "rebalance": frozenset({"partitions.assigned", "partitions.released"}),
    "retention": frozenset({"gap.explained"}),
}
"""What a node must report after a fault of this kind for it to count as felt. The other kinds are felt by what the world
sees: a call that took longer, a full disk met, steps that were due while a node stood still, an offset that has passed the
records in question."""


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
        self._base: dict[str, float] = {}
        self._slow: dict[str, float] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._full: set[str] = set()
        self._ordinals: Counter[str] = Counter()
        self._fates: dict[str, Fault] = {f.at: f for f in plan.faults if isinstance(f.at, str)}
        self.pending: set[Fault] = set(self._fates.values())  # faults of effects that have not come yet; never iterated
        self.next: dict[str, list[Fate]] = {}  # by operation: what becomes of the next ones, whatever their address
        self._waiting: list[tuple[Fault, str]] = []  # fired and not felt yet, and the node that it struck, if it struck one

    # --- what twins ask -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.loop.env._now

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.loop.befall(delay_s, call, args)

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
                self.feel("slow")
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
            self.fire(fault, effect.partition(":")[0])
            return FATES[fault.kind]
        if self._full and operation.partition(".")[0] in self._full and not operation.startswith("kafka"):
            self.feel("fill")
            return FATES["disk-full"]
        return DONE

    def kill(self, node: str) -> None:
        self._fall(node)

    def happened(self, node: str, operation: str, detail: str, outcome: str) -> None:
        self.trace.append((self.loop.env._now, node, operation, detail, outcome))

    # --- faults of time -------------------------------------------------------------------------------------------

    def fire(self, fault: Fault, node: str = "") -> None:
        """It happens now, to `node` or to all."""
        self.fired[fault.kind] += 1
        self.pending.discard(fault)
        self._waiting.append((fault, node))
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

    def feel(self, kind: str) -> None:
        """A fault of this kind has made a difference."""
        for entry in self._waiting:
            if entry[0].kind == kind:
                self.felt[kind] += 1
                self._waiting.remove(entry)
                return

    def reacted(self, node: str, what: str) -> None:
        """`node` has reported something: the faults it may answer were felt."""
        if self._waiting:
            answered = [e for e in self._waiting if e[1] in ("", node) and what in FELT_BY.get(e[0].kind, ())]
            for entry in answered:
                self.felt[entry[0].kind] += 1
                self._waiting.remove(entry)

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
