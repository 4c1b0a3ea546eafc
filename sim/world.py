"""A simulated world: servers, nodes, time and a judge, for one run.

    plan ──▶ Simulation ──▶ Result
              │  Cluster, Bucket, Server …  what survives
              │  Machine w0, w1 …           nodes: the engine's own `Node` over twins, killed and started again
              │  Judge                      hears of every effect in the step that applies it
              └─ SimAir                     latencies, cuts, fates, trace

A run has two phases. In the first the workload arrives and the plan's faults happen. Then everything is mended, dead nodes
are started again, and the pipeline must drain within a bound of virtual time: what is not where it belongs by then is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from catalogue import sabotage
from catalogue.invariants import Judge, Key, Violation, checkpoint
from fakes.faults import Wire
from fakes.kafka import MARKER, Cluster, ConsumerTwin, Entry, Log, Message, Settings
from fakes.objects import Bucket, ObjectsTwin
from fakes.postgres import PostgresTwin, Server
from sim.air import Event, SimAir
from sim.fence import Escape
from sim.loop import POWER, Power, SimLoop, Stalled
from sim.memo import Memo, SimCompute
from sim.plan import Fault, Plan
from thalweg.core.topology import Source, Topology
from thalweg.errors import ThalwegError
from thalweg.node import Node
from thalweg.ports import Database, LogConsumer, ObjectStore, Outside, SchemaRegistry
from thalweg.probes import Probes

DRAIN_S: Final = 300.0
"""Virtual seconds within which everything must be where it belongs once nothing goes wrong any more."""

STOP_S: Final = 60.0
RESTART_S: Final = 0.5
FAULTS_END_S: Final = 30.0
IDLE_BYTES: Final = 150 << 20


@dataclass(frozen=True)
class Subject:
    """What is simulated: a topology, what comes in, and what must come of each message.

    `load(partition, first, n)` gives `n` messages of a partition from its `first` on: always the same objects.
    `expected(messages, sink)` how many rows each must have in a sink.
    """

    name: str
    topology: Topology
    load: Callable[[int, int, int], list[Message]]
    expected: Callable[[Sequence[Message], str], Sequence[int]]
    memo: Memo = field(default_factory=Memo)

    @cached_property
    def weighed(self) -> Weighed:
        return Weighed([s.name for s in self.topology.sinks], self.expected)


@dataclass
class Result:
    """What one run showed."""

    plan: Plan
    violations: list[Violation]
    digest: str
    trace: list[Event]
    effects: list[tuple[str, str]]
    armed: Mapping[str, int]
    fired: Mapping[str, int]
    felt: Mapping[str, int]
    virtual_s: float
    steps: int
    records: int
    batches: int
    repeats: int
    restarts: int
    escapes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations


class PartitionTruth:
    """One log as the judge asks for it."""

    __slots__ = ("_changes", "_log", "_rows", "_seen", "_weighed")

    def __init__(self, log: Log, weighed: Weighed) -> None:
        self._log, self._weighed = log, weighed
        self._rows: dict[str, npt.NDArray[np.int32]] = {s: np.zeros(0, np.int32) for s in weighed.sinks}
        self._seen, self._changes = 0, 0

    @property
    def low(self) -> int:
        return self._log.low

    @property
    def end(self) -> int:
        return self._log.stable

    def expected(self, sink: str) -> npt.NDArray[np.int32]:
        log = self._log
        stable = log.stable
        if self._changes != log.changes:
            self._seen, self._changes = 0, log.changes
            self._rows = {s: np.zeros(0, np.int32) for s in self._weighed.sinks}
        if self._seen != stable:
            fresh = self._weighed(log.entries[self._seen : stable])
            hidden = [] if log.whole else [i for i in range(self._seen, stable) if log.kinds[i] != "data"]
            for name, before in self._rows.items():
                rows = self._rows[name] = np.concatenate([before, fresh[name]])
                rows[hidden] = 0
            self._seen = stable
        return self._rows[sink]


class Weighed:
    """What must come of runs of messages; each run is weighed once for all worlds of a process."""

    def __init__(self, sinks: Sequence[str], expected: Callable[[Sequence[Message], str], Sequence[int]]) -> None:
        self.sinks, self._expected = tuple(sinks), expected
        self._known: dict[tuple[Entry, ...], dict[str, npt.NDArray[np.int32]]] = {}

    def __call__(self, entries: Sequence[Entry]) -> dict[str, npt.NDArray[np.int32]]:
        """By sink, the number of rows of each entry."""
        key = tuple(entries)
        found = self._known.get(key)
        if found is None:
            records = [m for _, m in entries if m is not MARKER]
            there = np.array([m is not MARKER for _, m in entries])
            found = self._known[key] = {}
            for sink in self.sinks:
                rows = found[sink] = np.zeros(len(entries), dtype=np.int32)
                rows[there] = self._expected(records, sink)
        return found


class Machine:
    """One place for a node. It is started again after a crash, as a supervisor would."""

    def __init__(self, world: Stage, name: str) -> None:
        self.world, self.name = world, name
        self.power: Power | None = None
        self.node: Node | None = None
        self.task: asyncio.Task[None] | None = None
        self.starts = 0
        self.ended: list[str] = []
        self.failure: BaseException | None = None
        self.wanted = False

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done() and self.power is not None and not self.power.off

    def start(self) -> None:
        """Switch on."""
        if self.running:
            return
        self.wanted = True
        self.starts += 1
        world = self.world
        self.power = power = Power(self.name)
        world.air.powers[self.name] = power
        context = copy_context()
        context.run(POWER.set, power)
        self.node = Node(world.subject.topology, world.outside(self.name), Probes(world.on_probe(self.name)))
        world.air.happened(self.name, "node.start", str(self.starts), "")
        if self.starts > 1:
            world.air.reacted(self.name, "node.restarted")
        self.task = world.loop.create_task(self.node.run(), name=self.name, context=context)
        self.task.add_done_callback(self._done, context=world.context)

    def kill(self) -> None:
        """A power cut. What it had in memory is gone; what it had sent is on its way."""
        if self.power is None or self.power.off:
            return
        self.world.loop.cut_power(self.power)
        self.world.vanished(self.name)
        self.world.air.happened(self.name, "node.killed", "", "")
        if self.world.restarts_s is not None:
            self.world.air.later(self.world.restarts_s, self._again)

    def stop(self) -> None:
        """SIGTERM."""
        self.wanted = False
        if self.node is not None and self.running:
            assert self.power is not None
            context = copy_context()
            context.run(POWER.set, self.power)
            self.world.loop.call_soon(self.node.stop, context=context)

    def _again(self) -> None:
        if self.wanted and not self.running:
            self.start()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task is not self.task or self.power is None or self.power.off:
            return
        error = task.exception() if not task.cancelled() else None
        self.power.off = True
        self.world.vanished(self.name)
        if error is None:
            self.world.air.happened(self.name, "node.stopped", "", "")
            return
        words = leaf(error)
        self.failure = first(error)
        self.ended.append(words)
        self.world.air.happened(self.name, "node.failed", words[:200], "")
        if not isinstance(first(error), ThalwegError | Escape):  # an escape was counted where it happened
            self.world.judge.violations.append(Violation("engine-bug", words))
        if self.world.restarts_s is not None:
            self.world.air.later(self.world.restarts_s, self._again)


def first(error: BaseException) -> BaseException:
    """The error within groups that says most: a bug before a deliberate one."""
    leaves: list[BaseException] = []
    todo = [error]
    while todo:
        one = todo.pop(0)
        if isinstance(one, BaseExceptionGroup):
            todo.extend(one.exceptions)
        else:
            leaves.append(one)
    return next((e for e in leaves if not isinstance(e, ThalwegError)), leaves[0])


def leaf(error: BaseException) -> str:
    """Its first cause in words."""
    one = first(error)
    return f"{type(one).__name__}: {one}"


class Stage:
    """Servers, nodes, air and judge, before anything happens. `adopt` says which pipeline the nodes run."""

    def __init__(self, plan: Plan, *, ties: bool = True) -> None:
        self.plan = plan
        self.loop = SimLoop(Random(f"ties {plan.seed}") if ties else None)  # type: ignore[abstract]  # the rest are set below the class
        self.air = SimAir(self.loop, plan, self._fall)
        self.context = Context()  # nobody's: without power
        self.cluster = Cluster(self.air, self._observed)
        self.buckets: dict[str, Bucket] = {}
        self.servers: dict[str, Server] = {}
        self.machines: dict[str, Machine] = {}
        self.restarts_s: float | None = RESTART_S  # None: whoever kills a node starts it again
        self.on_report: Callable[[str, str, dict[str, Any]], None] | None = None
        self._armed_probes: dict[str, list[tuple[str, int, Fault]]] = {}
        self._drained = self._loaded = self._echo = False
        self._passing: list[tuple[str, Key, int]] = []  # faults that are felt when the group's offset is here

    def adopt(self, subject: Subject, *, memo: bool = True) -> None:
        """From here on nodes run this subject's topology, and the judge knows what must come of its records."""
        memo = memo and not _Fresh.depth
        topology = subject.topology
        self.subject = subject
        exact = [s.name for s in topology.sinks if s.type == "postgres"]
        self.judge = Judge(topology.gating, exact, self._log_of)
        self._memo = subject.memo if memo else None
        self._tables = {s.table: s.name for s in topology.sinks if s.type == "postgres"}
        self._truths: dict[Key, PartitionTruth] = {}
        self._parsed: dict[int, tuple[Any, Any]] = subject.memo.parsed if memo else {}
        self._same: dict[int, tuple[Any, list[tuple[int, Message]]]] = subject.memo.same if memo else {}
        self._services = _service_names(topology)

    # --- what a node is given -------------------------------------------------------------------------------------

    def outside(self, node: str) -> Outside:
        """Twins, as one node reaches them."""
        twins: dict[tuple[str, str], Any] = {}
        compute = SimCompute(self._memo)

        def consumer(source: Source) -> LogConsumer:
            if source.type != "kafka":
                raise NotImplementedError(f"no twin of source type {source.type}")
            return ConsumerTwin(
                self.cluster, Wire(self.air, node, "kafka", ordered=True), source=source.name, cluster_id=source.cluster_id,
                group=source.group, topics=source.topics, settings=Settings.of(source.options),
            )  # fmt: skip

        def objects(url: str, options: Mapping[str, str]) -> ObjectStore:
            if ("objects", url) not in twins:
                name = self._services[url]
                twins["objects", url] = ObjectsTwin(self.bucket(url), Wire(self.air, node, name), url)
            found: ObjectStore = twins["objects", url]
            return found

        def database(dsn: str) -> Database:
            if ("database", dsn) not in twins:
                twins["database", dsn] = PostgresTwin(self.server(dsn), Wire(self.air, node, self._services[dsn]))
            found: Database = twins["database", dsn]
            return found

        def registry(url: str, options: Mapping[str, str]) -> SchemaRegistry:
            raise NotImplementedError("there is no twin of a schema registry")

        def report(event: str, **fields: Any) -> None:
            self.air.happened(node, event, _brief(fields), "")
            self.air.reacted(node, event)
            if self.on_report is not None:
                self.on_report(node, event, fields)

        return Outside(
            _Clock(self.loop), compute, consumer, objects, database, registry, lambda: IDLE_BYTES, lambda: None, report
        )

    def bucket(self, url: str) -> Bucket:
        if url not in self.buckets:
            self.buckets[url] = Bucket(self.air, lambda operation, key, body: self._put(url, operation, key, body))
        return self.buckets[url]

    def server(self, dsn: str) -> Server:
        if dsn not in self.servers:
            self.servers[dsn] = server = Server(self.air, self._observed)
            if self._memo is not None:
                server._validated = self._memo.validated
        return self.servers[dsn]

    def vanished(self, node: str) -> None:
        """Its process is gone: connections break, and nobody says goodbye."""
        self.cluster.vanish(node)
        for server in self.servers.values():
            server.connection_lost(node)

    def on_probe(self, node: str) -> Callable[[str, int], None] | None:
        armed = self._armed_probes.get(node)
        if not armed:
            return None

        def reached(name: str, ordinal: int) -> None:
            for entry in armed:
                if entry[0] == name and entry[1] == ordinal:
                    armed.remove(entry)
                    self.air.fire(entry[2], node)
                    self.machines[node].kill()
                    return

        return reached

    # --- effects, as the judge hears of them ----------------------------------------------------------------------

    def _log_of(self, key: Key) -> PartitionTruth:
        found = self._truths.get(key)
        if found is None:
            log = self.cluster.log_of(key[0], key[1], key[2])
            found = self._truths[key] = PartitionTruth(log, self.subject.weighed)
        return found

    def _observed(self, what: str, value: Any) -> None:
        if what == "commit":
            _, at = value
            for part, offset in at.items():
                key = part.topic, part.incarnation, part.number
                self.judge.committed(key, offset)
                for entry in [e for e in self._passing if e[1] == key and offset >= e[2]]:
                    self._passing.remove(entry)
                    self.air.feel(entry[0])
            self._drained = self._loaded and self._all_drained()
        elif what == "rows":
            table, batches = value
            sink = self._tables.get(str(table))
            if sink is not None:
                for batch in batches:
                    self._rows(sink, batch)
        elif what == "ranges":
            _, partition, sink, ranges = value
            self.judge.claimed(_key_of(partition), sink, list(ranges))
        elif what == "document":
            _, partition, text = value
            self.judge.checkpointed(_key_of(partition), checkpoint(text))

    def _put(self, url: str, operation: str, key: str, body: Any) -> None:
        if operation == "delete":
            if key.endswith(".parquet"):
                sink = next((s.name for s in self.subject.topology.sinks if s.type == "parquet" and s.url == url), url)
                start, stop = (int(text) for text in key.rpartition("/")[2].removesuffix(".parquet").split("-")[:2])
                self.judge.removed(sink, _key_of(key.rpartition("/")[0]), np.arange(start, stop))
            return
        if key.endswith(".json"):
            slug = key.removesuffix(".json").split("/", 2)[2]
            self.judge.checkpointed(_key_of(slug), checkpoint(bytes(body)))
            return
        if not key.endswith(".parquet"):
            return
        folder = key.rpartition("/")[0]
        service = self._services[url]
        sink = next((s.name for s in self.subject.topology.sinks if s.type == "parquet" and s.url == url), service)
        version = self.buckets[url].version_of(body)  # by content, also in a run without the memo: this is not the engine's work
        found = self.subject.memo.read.get(version)
        if found is None:
            found = self.subject.memo.read[version] = self._read(body)
        offsets, contents = found
        key_of = _key_of(folder)
        self.judge.landed(sink, key_of, offsets, self._altered(key_of, sink, offsets, contents))

    def _read(self, body: Any) -> tuple[npt.NDArray[np.int64], Any]:
        prefix = self.subject.topology.prefix
        table = pq.read_table(pa.BufferReader(body))
        offsets = table.column(f"{prefix}source_offset").to_numpy()
        if f"{prefix}payload" not in table.column_names or f"{prefix}message_key" not in table.column_names:
            return offsets, None
        values = (table.column(f"{prefix}{n}").to_pylist() for n in ("payload", "message_key", "source_headers"))
        return offsets, list(zip(*values, strict=True))

    def _altered(self, key: Key, sink: str, offsets: npt.NDArray[np.int64], contents: Any) -> str:
        """What of a raw object is not as it was produced."""
        if contents is None:
            return ""
        entries = self._log_of(key)._log.entries
        known = self._same.get(id(contents))
        if known is not None and known[0] is contents and all(at < len(entries) and entries[at][1] is m for at, m in known[1]):
            return ""
        for at, (value, its_key, headers) in zip(offsets.tolist(), contents, strict=True):
            if at >= len(entries):
                return ""  # a phantom, which the judge names
            message = entries[at][1]
            wanted = [{"key": k, "value": v} for k, v in message.headers] if message.headers else None
            if value != message.value or its_key != message.key or headers != wanted:
                return f"offset {at} is not as it was produced"
        ends = [int(offsets[0]), int(offsets[-1])] if len(offsets) else []
        self._same[id(contents)] = contents, [(at, entries[at][1]) for at in ends]
        return ""

    def _rows(self, sink: str, batch: pa.RecordBatch) -> None:
        found = self._parsed.get(id(batch))
        if found is None:
            found = self._parsed[id(batch)] = (batch, self._places(batch))
        for topic, number, offsets in found[1]:
            key = (topic, self.cluster.topics[topic].incarnation, number)
            self.judge.landed(sink, key, offsets)

    def _places(self, batch: pa.RecordBatch) -> list[tuple[str, int, npt.NDArray[np.int64]]]:
        prefix = self.subject.topology.prefix
        topics = batch.column(f"{prefix}source_topic").to_pylist()
        numbers = batch.column(f"{prefix}source_partition").to_numpy()
        offsets = batch.column(f"{prefix}source_offset").to_numpy()
        out = []
        for topic, number in sorted(set(zip(topics, numbers.tolist(), strict=True))):
            mine = (numbers == number) & np.array([t == topic for t in topics])
            out.append((topic, number, offsets[mine]))
        return out

    def _fall(self, node: str) -> None:
        self.machines[node].kill()

    def _strike(self, fault: Fault) -> None:
        """A fault of time begins."""
        if self.air.calm:
            return
        machine = self.machines.get(fault.node)
        if fault.kind == "kill" and machine is not None and machine.running:
            self.air.fire(fault, machine.name)
            machine.kill()
        elif fault.kind == "pause" and machine is not None and machine.running:
            self.air.fire(fault, machine.name)
            assert machine.power is not None
            self.loop.hold(machine.power)
            self.air.later(fault.for_s, self._go_on, machine.power)
        elif fault.kind in ("cut", "slow", "fill"):
            self.air.fire(fault)
            self.air.begin(fault)
            self.air.later(fault.for_s, self.air.end, fault)
        elif fault.kind == "abort":
            self.air.fire(fault)
            for topic in self.cluster.topics.values():
                for number in range(len(topic.logs)):
                    self.cluster.begin("aborter", topic.name, number, self.subject.load(number, 0, ABORTED))
                self.cluster.end_transaction("aborter", topic.name, commit=False)
                self._felt_past("abort", topic.name, 0)
        elif fault.kind == "echo":
            self.air.fire(fault)
            self._echo = True
        elif fault.kind == "retention":
            self.air.fire(fault)
            for topic in self.cluster.topics.values():
                number = int(fault.node or 0) % len(topic.logs)
                self.cluster.retain(topic.name, number, int(topic.logs[number].end * fault.factor))
        elif fault.kind == "rebalance":
            self.air.fire(fault)
            extra = self.machines.setdefault(f"x{len(self.machines)}", Machine(self, f"x{len(self.machines)}"))
            extra.start()
            self.air.later(fault.for_s, extra.stop)

    def _felt_past(self, kind: str, topic: str, number: int) -> None:
        """A fault of records counts as felt once the group's offset has passed what is in the partition now."""
        there = self.cluster.topics[topic]
        self._passing.append((kind, (topic, there.incarnation, number), there.logs[number].end))

    def _go_on(self, power: Power) -> None:
        if power.held:
            if power.waiting:
                self.air.feel("pause")
            self.loop.release(power)
            self.air.happened(power.name, "node.resumed", "", "")

    def _all_drained(self) -> bool:
        """Whether the group's offsets are at every log's end: the judge looks at the rest."""
        for topic in self.cluster.topics.values():
            for number, log in enumerate(topic.logs):
                if log.stable and self.judge.commits.get((topic.name, topic.incarnation, number), 0) < log.stable:
                    return False
        return True


class Simulation(Stage):
    """One run of `plan` over `subject`. `run` may be called once."""

    def __init__(self, subject: Subject, plan: Plan, *, memo: bool = True, ties: bool = True) -> None:
        super().__init__(plan, ties=ties)
        self.adopt(subject, memo=memo)
        self.machines = {f"w{i}": Machine(self, f"w{i}") for i in range(plan.nodes)}
        self.records = self.batches = 0
        self._shaped: list[Fault] = []  # faults of the workload that have begun

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Both phases and the judgement."""
        plan, topology = self.plan, self.subject.topology
        try:
            for source in topology.sources:
                for topic in source.topics:
                    self.cluster.create(topic, plan.partitions)
            last = self._schedule_load()
            last = max(last, self._schedule_faults())
            for i, machine in enumerate(self.machines.values()):
                self.air.later(0.05 * i, machine.start)
            self._phase(lambda: True, last)
            self._loaded = True
            self._drained = self._all_drained()
            if not self.judge.violations:  # faults of effects that have not come yet wait for them, but not for ever
                self._phase(lambda: not self._drained and bool(self.air.pending), max(last, FAULTS_END_S))
            if not self.judge.violations:
                self._mend()
                drained = self._phase(lambda: not self._drained, self.air.now() + DRAIN_S)
                if not drained:
                    self._not_drained()
            if not self.judge.violations:
                self._phase(lambda: not self._nothing_held(), self.air.now() + STOP_S)
                for machine in self.machines.values():
                    if machine.running and machine.node is not None and machine.node.budget.used_bytes:
                        what = f"{machine.name} holds {machine.node.budget.used_bytes} bytes of budget with nothing to do"
                        self.judge.violations.append(Violation("budget", what))
            if not self.judge.violations:
                for machine in self.machines.values():
                    machine.stop()
                if not self._phase(lambda: any(m.running for m in self.machines.values()), self.air.now() + STOP_S):
                    stuck = [m.name for m in self.machines.values() if m.running]
                    self.judge.violations.append(Violation("stops", f"{', '.join(stuck)} did not stop within {STOP_S:g} s"))
            if not self.judge.violations:
                keys = [(t.name, t.incarnation, n) for t in self.cluster.topics.values() for n in range(len(t.logs))]
                self.judge.final(keys, sorted(topology.gating))
        except Stalled as error:
            self.judge.violations.append(Violation("stalled", str(error)))
        finally:
            result = self._result()
            self.loop.close()
        return result

    def _phase(self, wanted: Callable[[], bool], until: float) -> bool:
        """Run as long as `wanted()`; False when `until` came first. Violations end every phase."""
        try:
            return self.loop.run_while(wanted, until, alarms=self.judge.violations)
        except AssertionError as error:
            if isinstance(error, Stalled):
                raise
            self.judge.violations.append(Violation("livelock" if "steps at" in str(error) else "engine-bug", str(error)))
            return True

    def _schedule_load(self) -> float:
        """Producers: batches of records to each partition, at times of their own stream; when the last one is sent."""
        plan = self.plan
        chance = Random(f"load {plan.load}")
        topics = [t for s in self.subject.topology.sources for t in s.topics]
        spikes = [f for f in plan.faults if f.kind in ("spike", "skew")]
        sizes = _sizes(plan.records, plan.partitions, chance)
        last = 0.0
        for topic in topics:
            numbers = list(range(plan.partitions))
            if plan.notes.get("nondeterminism"):  # planted, to see that it is found: a set of strings moves with the hash seed
                numbers = [int(text.rpartition("/")[2]) for text in {f"{topic}/{n}" for n in numbers}]
            for number in numbers:
                at, index, left = chance.random() * 0.2, 0, sizes[number]
                while left > 0:
                    n = min(left, BATCH * (1 + int(chance.random() * 3)))
                    when = at
                    for fault in spikes:
                        if fault.kind == "spike" and float(fault.at) < when:
                            when = float(fault.at)
                    self.air.later(when, self._produce, topic, number, index, n)
                    last = max(last, when)
                    index, left, at = index + n, left - n, at + 0.05 + chance.random() * 0.4
        return last

    def _produce(self, topic: str, number: int, index: int, n: int) -> None:
        load = self.subject.load
        shaped = [f for f in self.plan.faults if _shapes(f, self.air.now())]
        if any(f.kind == "skew" for f in shaped):
            number = 0
        log = self.cluster.topics[topic].logs[number]
        first = log.end
        self.cluster.produce(topic, number, load(number, first, n))
        if self._echo:
            self._echo = False
            self.cluster.produce(topic, number, load(number, first, n))
            self._felt_past("echo", topic, number)
        for fault in shaped:
            if fault not in self._shaped:
                self._shaped.append(fault)
                self.air.fire(fault)
                self._felt_past(fault.kind, topic, number)
        self.records += n
        self.batches += 1
        self.air.happened("producer", "produce", f"{topic}/{number}", f"{first}+{n}")

    def _schedule_faults(self) -> float:
        last = 0.0
        for fault in self.plan.faults:
            if isinstance(fault.at, str):
                if fault.at.startswith("probe:"):
                    node, _, rest = fault.at.removeprefix("probe:").partition(":")
                    name, _, ordinal = rest.partition("#")
                    self._armed_probes.setdefault(node, []).append((name, int(ordinal or 1), fault))
                continue
            if fault.kind in ("spike", "skew"):
                continue
            self.air.later(fault.at, self._strike, fault)
            last = max(last, fault.at + fault.for_s)
        return min(last, FAULTS_END_S)

    def _mend(self) -> None:
        self.air.clear()
        self.air.happened("world", "calm", "", "")
        for server in self.servers.values():
            server.full = False
        for name, machine in self.machines.items():
            if machine.power is not None and machine.power.held:
                self.loop.release(machine.power)
            if name.startswith("x"):
                machine.stop()
            elif not machine.running:
                machine.start()
        self._drained = self._all_drained()

    def _nothing_held(self) -> bool:
        nodes = [m.node for m in self.machines.values() if m.running and m.node is not None]
        return not any(node.budget.used_bytes for node in nodes)

    def _not_drained(self) -> None:
        ended = [f"{m.name} ended {len(m.ended)} times, last: {m.ended[-1]}" for m in self.machines.values() if m.ended]
        behind = [
            f"{t.name}/{n}: {self.judge.commits.get((t.name, t.incarnation, n), 0)} of {log.stable}"
            for t in self.cluster.topics.values()
            for n, log in enumerate(t.logs)
            if self.judge.commits.get((t.name, t.incarnation, n), 0) < log.stable
        ]
        what = f"not drained {DRAIN_S:g} s after the last fault: {', '.join(behind)}"
        self.judge.violations.append(Violation("liveness", "; ".join([what, *ended])))

    def _result(self) -> Result:
        air = self.air
        return Result(
            self.plan, list(self.judge.violations), air.digest(), air.trace, air.effects, air.armed, air.fired, air.felt,
            air.now(), self.loop.steps, self.records, self.batches, self.judge.repeats,
            sum(max(0, m.starts - 1) for m in self.machines.values()),
        )  # fmt: skip


class _Fresh:
    """A context in which worlds keep no results of pure work: for bugs that are planted in that work."""

    depth = 0

    def __enter__(self) -> None:
        _Fresh.depth += 1

    def __exit__(self, *_: object) -> None:
        _Fresh.depth -= 1


sabotage.FRESH = _Fresh

ABORTED: Final = 5
"""Records of an aborted transaction, in each partition."""

BATCH: Final = 60
"""Records of a producer's smallest batch; they are of one, two or three times as many."""


def _shapes(fault: Fault, now_s: float) -> bool:
    """Whether a batch that is sent now is where, or when, it is because of this fault."""
    return (fault.kind == "skew" and now_s >= float(fault.at)) or (fault.kind == "spike" and now_s == float(fault.at))


def _sizes(records: int, partitions: int, chance: Random) -> list[int]:
    """Records a partition, in whole producer batches where it can be."""
    even = records // partitions
    sizes = [even] * partitions
    sizes[int(chance.random() * partitions)] += records - even * partitions
    return sizes


def _key_of(slug: str) -> Key:
    """A partition slug as the judge's key: the format is in ARCHITECTURE.md."""
    _, topic, tail = slug.rsplit("/", 2)
    number, _, incarnation = tail.partition("@")
    return topic, incarnation, int(number)


def _service_names(topology: Topology) -> dict[str, str]:
    """A short name for each address: the sink's, where one sink has it to itself."""
    users: dict[str, list[str]] = {}
    for sink in topology.sinks:
        users.setdefault(sink.url, []).append("pg" if sink.type == "postgres" and _shared(topology, sink.url) else sink.name)
    names = {url: found[0] for url, found in users.items()}
    names.setdefault(topology.coverage.url, "coverage")
    return names


def _shared(topology: Topology, url: str) -> bool:
    return sum(s.url == url for s in topology.sinks) > 1


def _brief(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(fields.items()))[:300]


class _Clock:
    def __init__(self, loop: SimLoop) -> None:
        self._env = loop.env

    def monotonic(self) -> float:
        return self._env._now

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self._env._now * 1000)


__all__ = ["Machine", "Result", "Simulation", "Stage", "Subject"]
