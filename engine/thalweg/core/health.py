"""What a node says about itself: counters, gauges, the state of each stage, and what follows from them.

Decides readiness: a node is ready when it has been given its partitions, its primary raw (or, without one, each sink
that holds the source) takes writes, and the coverage store answers. An isolated sink in trouble is shown and changes
nothing else. Liveness depends on none of it: a restart would not mend a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.core.topology import OnFailure, Role, Topology


@dataclass
class Stage:
    """One source, sink or store: `reason` is empty while it works."""

    name: str
    kind: str
    gating: bool
    reason: str = ""
    failures: int = 0


class Board:
    """One node's notice board. Written by the runtime, read by whoever renders it; holds no clock."""

    def __init__(self, topology: Topology, stages: Iterable[str] = ()) -> None:
        self.pipeline = topology.name
        sources = {s.name for s in topology.sources}
        raw = topology.primary_raw
        known = [Stage(name, "source", True) for name in sorted(sources)]
        for sink in topology.sinks:
            gating = sink.role is Role.PRIMARY_RAW if raw is not None else sink.on_failure is OnFailure.HOLD
            known.append(Stage(sink.name, "sink", gating))
        called = {stage.name for stage in known}
        known += [Stage(name, "store", True) for name in sorted({"coverage", *(n for n in stages if n not in called)})]
        self.stages: dict[str, Stage] = {f"{stage.kind}:{stage.name}": stage for stage in known}
        self.counters: Counter[tuple[str, str]] = Counter()
        self.gauges: dict[tuple[str, str], float] = {}
        self.assigned: set[str] = set()
        self._sources = sources

    # --- written by the runtime -----------------------------------------------------------------------------------

    def ok(self, stage: str) -> None:
        """The stage just did what it is for. A bare name is a sink's, else a source's, else a store's."""
        self._stage(stage).reason = ""

    def failing(self, stage: str, reason: str) -> None:
        """The stage just failed; it stays so until `ok`."""
        found = self._stage(stage)
        found.reason = reason or "failing"
        found.failures += 1

    def _stage(self, name: str) -> Stage:
        keys = (name, f"sink:{name}", f"source:{name}", f"store:{name}")
        return next(self.stages[key] for key in keys if key in self.stages)

    def started(self, source: str) -> None:
        """The source has been given its partitions (possibly none)."""
        self.assigned.add(source)

    def decoded(self, source: str, rows: int, size_bytes: int) -> None:
        self.counters["records_in", source] += rows
        self.counters["bytes_in", source] += size_bytes

    def landed(self, sink: str, rows: int) -> None:
        self.counters["rows_landed", sink] += rows

    def shed(self, sink: str, rows: int) -> None:
        self.counters["rows_shed", sink] += rows

    def count(self, verdict: str, rows: int) -> None:
        self.counters["rows_judged", verdict] += rows

    def refused_commit(self, source: str) -> None:
        self.counters["commits_refused", source] += 1

    def gauge(self, name: str, label: str, value: float) -> None:
        """A level, such as the lag of one partition in records or the bytes of the budget in use."""
        self.gauges[name, label] = value

    def forget(self, label: str) -> None:
        """Take down the levels of a partition that is no longer here."""
        for key in [key for key in self.gauges if key[1] == label]:
            del self.gauges[key]

    # --- read by whoever renders ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether traffic may be counted on to be made durable."""
        return self._sources <= self.assigned and not any(s.gating and s.reason for s in self.stages.values())

    def health(self) -> Mapping[str, Any]:
        """The tree of draft-inadarei-api-health-check: status pass, warn or fail, and one check per stage."""
        checks = {
            key: [
                {
                    "status": "pass" if not stage.reason else "fail" if stage.gating else "warn",
                    **({"output": stage.reason} if stage.reason else {}),
                    "failures": stage.failures,
                }
            ]
            for key, stage in self.stages.items()
        }
        worst = {check[0]["status"] for check in checks.values()}
        status = "fail" if "fail" in worst or not self.ready else "warn" if "warn" in worst else "pass"
        return {"status": status, "serviceId": self.pipeline, "checks": checks}

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges, by name and label."""
        out: dict[str, dict[str, float]] = {}
        for (name, label), value in sorted((*self.counters.items(), *self.gauges.items())):
            out.setdefault(name, {})[label] = value
        return out
