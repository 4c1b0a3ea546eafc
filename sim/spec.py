"""The world that a spec of the catalogue gets in the simulator: `catalogue.world.World` over a `Stage`.

A spec is ordinary code that waits; the simulation runs only while it waits, and stands still in between. Every invariant is
judged at every effect meanwhile: a spec that passes has not only seen its own promise kept.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import SessionContext

from catalogue import world as vocabulary
from catalogue.invariants import Checkpoint, Identities, checkpoint, identities
from fakes import kafka
from fakes.faults import REFUSED, REPLY_LOST, TORN, Wire
from fakes.objects import Bucket, ObjectsTwin
from fakes.postgres import PostgresTwin, Server
from sim.loop import Power
from sim.plan import Fault, Plan
from sim.subject import Load
from sim.world import Machine, Stage, Subject
from thalweg import __main__ as command
from thalweg.__main__ import judged_file
from thalweg.core.topology import Topology
from thalweg.errors import ThalwegError, Transient
from thalweg.node import EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, checkpoints_of

EXIT_CONFIG: Final = 78
LOOK_S: Final = 0.01
STEP_S: Final = 120.0
CLIENTS: Final = ("one", "other")
"""Nodes that are no engine: clients of a spec's own."""


class SimEngine:
    """One node of a spec."""

    def __init__(self, world: SimWorld, machine: Machine | None, status: int | None = None) -> None:
        self._world, self._machine, self._status = world, machine, status
        self._log: list[str] = []

    def stop(self) -> int:
        assert self._machine is not None
        self._machine.stop()
        return self.wait_exit()

    def kill(self) -> None:
        assert self._machine is not None
        self._machine.kill()

    def pause(self, for_s: float) -> None:
        assert self._machine is not None
        assert self._machine.power is not None
        stage = self._world.stage
        stage.loop.hold(self._machine.power)
        stage.air.later(for_s, stage._go_on, self._machine.power)

    @property
    def running(self) -> bool:
        return self._machine is not None and self._machine.running

    def wait_exit(self) -> int:
        if self._machine is None:
            assert self._status is not None
            return self._status
        machine = self._machine
        self._world.wait_until("the engine ends", lambda: not machine.running, STEP_S)
        error = machine.failure
        if error is None:
            return EXIT_OK
        return EXIT_UNAVAILABLE if isinstance(error, Transient) else EXIT_FAILED if isinstance(error, ThalwegError) else 1

    def page(self, path: str) -> tuple[int, str]:
        """As `adapters.http` answers, from the same board."""
        if not self.running or self._machine is None or self._machine.node is None:
            return 0, ""
        board = self._machine.node.board
        if path == "/live":
            return 200, "live\n"
        if path == "/ready":
            return (200, "ready\n") if board.ready else (503, "not ready\n")
        if path == "/health":
            tree = board.health()
            return (503 if tree["status"] == "fail" else 200), json.dumps(tree)
        if path == "/stats":
            return 200, json.dumps(board.stats())
        return 404, ""

    def log(self) -> str:
        return "\n".join(self._log)


class SimTruth:
    """What the twins hold."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._commits: list[tuple[float, str, str, int, int]] = []

    def produced(self, topic: str) -> Identities:
        logs = self._world.stage.cluster.topics[topic].logs
        pairs = [(number, at) for number, log in enumerate(logs) for at, _ in log.visible()]
        return identities([p for p, _ in pairs], [at for _, at in pairs])

    def ends(self, topic: str) -> dict[int, int]:
        return {number: log.stable for number, log in enumerate(self._world.stage.cluster.topics[topic].logs)}

    def committed(self, group: str, topic: str) -> dict[int, int]:
        found = self._world.stage.cluster.groups.get(group)
        if found is None:
            return {}
        now = self._world.stage.cluster.topics[topic].incarnation
        return {n: offset for (t, n), (offset, of) in found.offsets.items() if t == topic and of == now}

    def commits(self, group: str, topic: str) -> Sequence[tuple[float, int, int]]:
        return [(at, n, offset) for at, g, t, n, offset in self._commits if (g, t) == (group, topic)]

    def checkpoints(self) -> Sequence[Checkpoint]:
        stage = self._world.stage
        bodies = [
            bucket.body(key)
            for bucket in stage.buckets.values()
            for key in sorted(bucket.objects)
            if key.startswith("_coverage/") and key.endswith(".json")
        ]
        bodies += [text.encode() for server in stage.servers.values() for text, _ in server.documents.values()]
        return [checkpoint(body) for body in bodies]

    def raw(self) -> list[dict[str, Any]]:
        """Of objects that hold rows of a primary raw; a destination's have no payload of the source's."""
        rows: list[dict[str, Any]] = []
        for bucket in self._world.stage.buckets.values():
            for key in sorted(bucket.objects):
                if key.endswith(".parquet"):
                    table = pq.read_table(pa.BufferReader(bucket.body(key)))
                    if any(name.endswith("source_headers") for name in table.column_names):
                        rows += table.to_pylist()
        return rows

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        context = SessionContext()
        for server in self._world.stage.servers.values():
            for name in server.tables:
                batches = server.table(str(name))
                if batches:
                    table = pa.concat_tables([pa.Table.from_batches([b]) for b in batches], promote_options="default")
                    context.register_record_batches(str(name), [table.to_batches()])
        try:
            found = context.sql(query).collect()
        except Exception as error:  # DataFusion has no class for a table that is not there
            if "not found" in str(error):
                return []
            raise
        return [tuple(row.values()) for batch in found for row in batch.to_pylist()]

    def contacted(self) -> set[str]:
        nodes = self._world.stage.machines
        calls = (operation for _, node, operation, _, _ in self._world.stage.air.trace if node in nodes)
        services = {"kafka", *self._world.stage._services.values()}
        return {operation.partition(".")[0] for operation in calls} & services

    def binary_copies(self) -> int:
        return sum(
            operation.endswith(".copy") and outcome == "done" for _, _, operation, _, outcome in self._world.stage.air.trace
        )


class SimWorld:
    """One spec's world."""

    def __init__(self, name: str, seed: int = 1) -> None:
        self.name = name
        self.stage = Stage(Plan(name, seed=seed))
        self.stage.restarts_s = None
        self.truth = SimTruth(self)
        self._topology: Topology | None = None
        self._engines: dict[str, SimEngine] = {}
        self.stage.on_report = self._reported
        self.stage.cluster.observe = self._observed

    # --- topics and records ---------------------------------------------------------------------------------------

    def topic(self, name: str, partitions: int, **settings: str) -> None:
        self.stage.cluster.create(name, partitions)

    def produce(self, topic: str, messages: Sequence[vocabulary.Message]) -> None:
        for number, some in _by_partition(messages).items():
            self.stage.cluster.produce(topic, number, some)

    def produce_transaction(self, topic: str, messages: Sequence[vocabulary.Message], *, commit: bool) -> None:
        for number, some in _by_partition(messages).items():
            self.stage.cluster.begin("spec", topic, number, some)
        self.stage.cluster.end_transaction("spec", topic, commit=commit)

    # --- engines --------------------------------------------------------------------------------------------------

    def engine(self, pipeline: str, *, kill_at: str = "", **environment: str) -> SimEngine:
        for placeholder, value in {
            "{kafka}": "kafka:9092", "{postgres}": "postgresql://pg/db", "{lake}": "s3://lake", "{lake_options}": "{}",
            "{http}": "0",
        }.items():  # fmt: skip
            pipeline = pipeline.replace(placeholder, value)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(pipeline, encoding="utf-8")
            found = judged_file(path, strict=True)
        if found.topology is None:
            engine = self._engines[f"refused{len(self._engines)}"] = SimEngine(self, None, EXIT_CONFIG)
            engine._log += [f"[{f.code}] line {f.line}: {f.what}" for f in found.faults]
            return engine
        topology = replace(found.topology, http=None)
        if self._topology is None:
            self._topology = topology
            load = Load(lambda partition, index: kafka.Message(None), topology)
            self.stage.adopt(Subject(self.name, topology, load.some, load.expected))
            self.stage._services = _Services(self.stage._services)
        elif _shape(topology) != _shape(self._topology):
            raise ValueError("a spec's engines all run one pipeline in the simulator")
        number = len(self.stage.machines)
        name = f"w{number}"
        self.stage.machines[name] = machine = Machine(self.stage, name)
        engine = self._engines[name] = SimEngine(self, machine)
        if kill_at:
            probe, _, ordinal = kill_at.partition("#")
            fault = Fault("killed-after", f"probe:{name}:{kill_at}")
            self.stage._armed_probes.setdefault(name, []).append((probe, int(ordinal or 1), fault))
        self.stage.air.later(0.0, machine.start)
        self.stage.loop.run_while(lambda: machine.starts == 0)
        return engine

    def coverage(self, pipeline: str) -> list[dict[str, Any]]:
        """As the command does, over twins."""
        topology = self.stage.subject.topology

        async def found() -> list[dict[str, Any]]:
            store = checkpoints_of(topology, self.stage.outside("cli"))
            await store.open()
            documents = [await store.load(slug) for slug in sorted(await store.partitions())]
            return [row for d in documents if d is not None for row in command.gaps_of(d, [s.name for s in topology.sinks])]

        rows: list[dict[str, Any]] = self._made(found())
        return rows

    def between(self, kind: str, work: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        air = self.stage.air
        if kind == "objects":
            bucket = Bucket(air)
            return self._made(work(*(ObjectsTwin(bucket, Wire(air, node, kind), "s3://between") for node in CLIENTS)))
        server = Server(air)
        return self._made(work(*(PostgresTwin(server, Wire(air, node, kind)) for node in CLIENTS)))

    def _made(self, work: Awaitable[Any]) -> Any:
        """Run it in the world's time, whatever else goes on there."""
        for node in (*CLIENTS, "cli"):
            self.stage.air.powers.setdefault(node, Power(node))

        async def all_of_it() -> Any:
            return await work

        task = self.stage.loop.create_task(all_of_it(), context=Context())
        self.stage.loop.run_while(lambda: not task.done())
        self.judge()
        return task.result()

    def inject(self, fault: vocabulary.Fault) -> None:
        air, stage = self.stage.air, self.stage
        match fault:
            case vocabulary.Cut(service, for_s):
                stage._strike(Fault("cut", air.now(), service=self._service(service), for_s=for_s))
            case vocabulary.Slow(service, factor, for_s):
                stage._strike(Fault("slow", air.now(), service=self._service(service), for_s=for_s, factor=factor))
            case vocabulary.Fill(service, for_s):
                stage._strike(Fault("fill", air.now(), service=self._service(service), for_s=for_s))
            case vocabulary.Tear(service):
                air.next.setdefault(f"{self._service(service)}.create", []).append(TORN)
            case vocabulary.LoseReply(service, operation):
                air.next.setdefault(f"{self._service(service)}.{operation}", []).append(REPLY_LOST)
            case vocabulary.Refuse(service, operation, times):
                air.next.setdefault(f"{self._service(service)}.{operation}", []).extend([REFUSED] * times)
            case vocabulary.Retain(topic, partition, low):
                stage.cluster.retain(topic, partition, low)
            case vocabulary.Recreate(topic, partitions):
                stage.cluster.create(topic, partitions)

    def _service(self, name: str) -> str:
        """The service behind a sink."""
        if name == "kafka" or self._topology is None:
            return name
        sink = next((s for s in self._topology.sinks if s.name == name), None)
        return name if sink is None else self.stage._services[sink.url]

    # --- time -----------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        return self.stage.air.now()

    def pass_time(self, seconds: float) -> None:
        passed: list[bool] = []
        self.stage.air.later(seconds, passed.append, True)  # the clock moves by events alone
        self._run(lambda: bool(passed), seconds + LOOK_S)

    def wait_until(self, what: str, condition: Callable[[], bool], within_s: float = STEP_S) -> None:
        if not self._run(condition, within_s):
            engines = [f"{name}: {e.log()[-600:]}" for name, e in self._engines.items()]
            raise AssertionError(f"not within {within_s:g} s of the world's time: {what}\n" + "\n".join(engines))

    def _run(self, condition: Callable[[], bool], within_s: float) -> bool:
        air, again = self.stage.air, 0.0

        def wanted() -> bool:
            nonlocal again
            if self._violations():
                return False
            if air.now() < again:
                return True
            again = air.now() + LOOK_S
            return not condition()

        done = condition() or self.stage.loop.run_while(wanted, air.now() + within_s)
        self.judge()
        return done

    def _violations(self) -> list[Any]:
        return self.stage.judge.violations if self._topology is not None else []

    def judge(self) -> None:
        """Raises `AssertionError` when an invariant has been broken anywhere."""
        if violations := self._violations():
            raise AssertionError(f"{violations[0]}")

    def close(self) -> None:
        """Throw the world away."""
        self.stage.loop.close()

    # --- what the stage tells -------------------------------------------------------------------------------------

    def _observed(self, what: str, value: Any) -> None:
        if what == "commit":
            group, at = value
            now = self.stage.air.now()
            self.truth._commits += [(now, group, part.topic, part.number, offset) for part, offset in at.items()]
        if self._topology is not None:
            self.stage._observed(what, value)

    def _reported(self, node: str, event: str, fields: Mapping[str, Any]) -> None:
        if node in self._engines:
            self._engines[node]._log.append(f"{self.stage.air.now():.3f} {event} {fields}")


class _Services(dict[str, str]):
    """An address that the pipeline does not name is a service of its own."""

    def __missing__(self, url: str) -> str:
        self[url] = url
        return url


def _by_partition(messages: Sequence[vocabulary.Message]) -> dict[int, list[kafka.Message]]:
    out: dict[int, list[kafka.Message]] = {}
    for m in messages:
        out.setdefault(m.partition, []).append(kafka.Message(m.value, m.key, m.headers))
    return out


def _shape(topology: Topology) -> Any:
    return [(s.name, s.type, s.role, s.table) for s in topology.sinks]


__all__ = ["SimEngine", "SimTruth", "SimWorld"]
