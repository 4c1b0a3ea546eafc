"""One node: a topology wired to the outside and run to its end.

Decides nothing about data. It picks the adapter for each technology (importing its SDK only then), splits the memory
limit, starts the pipeline and its workers, and turns SIGTERM and SIGINT into a drain.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from thalweg.codecs import codec_of
from thalweg.core.coverage import Document
from thalweg.core.flow import Budget, grantable
from thalweg.core.health import Board
from thalweg.core.topology import Sink, Source, Topology
from thalweg.errors import Permanent, ThalwegError, Transient
from thalweg.ports import Database, LogConsumer, ObjectStore, Outside, SchemaRegistry
from thalweg.probes import Probes
from thalweg.runtime.checkpoint import CheckpointStore, DatabaseCheckpoints, ObjectCheckpoints
from thalweg.runtime.lake import LakeLander
from thalweg.runtime.lander import Lander
from thalweg.runtime.pipeline import Pipeline
from thalweg.runtime.table import TableLander
from thalweg.runtime.transform import Transform
from thalweg.runtime.worker import Worker

EXIT_OK: Final = 0
EXIT_UNAVAILABLE: Final = 69  # EX_UNAVAILABLE of sysexits.h: a service did not answer
EXIT_FAILED: Final = 70  # EX_SOFTWARE: it cannot go on as configured

TRIM_SHARE: Final = 0.8  # of the memory limit, at which freed memory is given back
WATCH_S: Final = 0.1
IDLE_WATCH_S: Final = 0.5  # while nothing is held

EXTRAS: Final = {"kafka": "kafka", "postgres": "postgres", "registry": "registry"}


def _adapter(name: str) -> Any:
    """Module `thalweg.adapters.<name>`, or a plain word about the extra that is not installed."""
    try:
        return import_module(f"thalweg.adapters.{name}")
    except ModuleNotFoundError as error:
        if name not in EXTRAS:
            raise
        raise Permanent(
            f"the {name} adapter needs {error.name}, which is not installed", remedy=f"pip install 'thalweg[{EXTRAS[name]}]'"
        ) from None


def outside(report: Callable[..., None], resources: AsyncExitStack) -> Outside:
    """The real world. Stores and databases are shared by address within a node; `resources` closes them all."""
    system = _adapter("system")
    system.use_one_allocator()
    compute = system.ThreadCompute()
    resources.callback(compute.close)
    opened: dict[tuple[str, str], Any] = {}

    def once(kind: str, address: str, make: Callable[[], Any]) -> Any:
        if (kind, address) not in opened:
            opened[kind, address] = made = make()
            resources.push_async_callback(made.close)
        return opened[kind, address]

    def consumer(source: Source) -> LogConsumer:
        made: LogConsumer
        if source.type == "kafka":
            made = _adapter("kafka").KafkaConsumer(source, report=report)
        else:
            made = _adapter("files").FileSource(source, compute)
        return made

    def objects(url: str, options: Mapping[str, str]) -> ObjectStore:
        store: ObjectStore = once("objects", url, lambda: _adapter("objects").object_store(url, options))
        return store

    def database(dsn: str) -> Database:
        found: Database = once("database", dsn, lambda: _adapter("postgres").PostgresDatabase(dsn, compute))
        return found

    def registry(url: str, options: Mapping[str, str]) -> SchemaRegistry:
        found: SchemaRegistry = once("registry", url, lambda: _adapter("registry").HttpSchemaRegistry(url, options))
        return found

    return Outside(
        system.SystemClock(), compute, consumer, objects, database, registry, system.rss_bytes, system.release_memory, report
    )


def lander_of(topology: Topology, sink: Sink, world: Outside) -> Lander:
    """How `sink` lands."""
    if sink.type == "parquet":
        return LakeLander(world.objects(sink.url, sink.options), world.compute, sink, topology.prefix)
    return TableLander(world.database(sink.url), world.compute, sink, topology.name, topology.prefix)


def checkpoints_of(topology: Topology, world: Outside) -> CheckpointStore:
    """Where coverage is kept."""
    plan = topology.coverage
    if plan.store == "relational":
        return DatabaseCheckpoints(world.database(plan.url), topology.name)
    return ObjectCheckpoints(world.objects(plan.url, plan.options), topology.name)


class Node:
    """A topology in a world. `run` returns when bounded sources are done or after `stop()`."""

    def __init__(self, topology: Topology, world: Outside, probes: Probes) -> None:
        self.world, self.probes, self.topology = world, probes, topology
        self.budget = Budget(0)  # set once everything is open: only then is it known what the node needs idle
        stages = [s.name for s in topology.sources] + [s.name for s in topology.sinks] + ["coverage"]
        self.board = Board(topology, stages)
        self.workers: list[Worker] = []
        self._stopped = False
        self._idle_bytes = self._prefetch_bytes = 0

    def stop(self) -> None:
        """Drain, checkpoint, commit and leave."""
        self._stopped = True
        for worker in self.workers:
            worker.stop()

    async def run(self) -> None:
        """Raises `ThalwegError` for what stops it; several failures come as the first of them."""
        topology, world = self.topology, self.world
        store = checkpoints_of(topology, world)
        landers = {sink.name: lander_of(topology, sink, world) for sink in topology.sinks}
        codecs = {source.name: codec_of(source.codec) for source in topology.sources}
        registries = {
            s.name: world.registry(s.codec.registry_url, s.codec.registry_options)
            for s in topology.sources
            if s.codec.registry_url is not None
        }
        transforms = {source.name: Transform(topology.nodes, topology.rules) for source in topology.sources}
        async with asyncio.TaskGroup() as tasks:
            pipeline = Pipeline(
                topology, world, landers, codecs, registries, transforms, self.budget, self.board, self.probes, tasks
            )
            await pipeline.open()
            await pipeline.retried(store.open, "opening the coverage store", attempts=3)
            prefetch_bytes = self._divide()
            self.workers = [
                Worker(s, world.consumer(replace(s, prefetch_bytes=prefetch_bytes)), store, pipeline) for s in topology.sources
            ]
            watch = tasks.create_task(self._watch(), name="memory")
            if self._stopped:
                self.stop()
            running = [tasks.create_task(worker.run(), name=f"worker:{worker.source.name}") for worker in self.workers]
            await asyncio.gather(*running)
            watch.cancel()
            pipeline.close()

    def _divide(self) -> int:
        """Split what the limit leaves above the idle process; the bytes that each source's client may prefetch."""
        self.world.release_memory()
        self._idle_bytes = self.world.rss_bytes()
        free = grantable(self.topology.flow.memory_limit_bytes, self._idle_bytes)
        self._prefetch_bytes = prefetch = int(free * self.topology.flow.prefetch_share)
        self.budget.limit_bytes = free - prefetch
        self.world.report(
            "node.budget", idle_bytes=self._idle_bytes, budget_bytes=self.budget.limit_bytes, prefetch_bytes=prefetch
        )
        return prefetch // max(1, len(self.topology.sources))

    async def _watch(self) -> None:
        """Measure what the process occupies; before the limit is reached, give back what is free."""
        limit = self.topology.flow.memory_limit_bytes
        while True:
            occupied = self.world.rss_bytes()
            if occupied > TRIM_SHARE * limit:
                await self.world.compute.run(self.world.release_memory)
                occupied = self.world.rss_bytes()
            self.budget.observe(occupied - self._idle_bytes - self._prefetch_bytes)
            self.board.gauge("memory_bytes", "resident", occupied)
            await asyncio.sleep(WATCH_S if self.budget.used_bytes else IDLE_WATCH_S)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a user should read: a deliberate one before a bug."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, ThalwegError)), leaves[0])


async def run(topology: Topology, report: Callable[..., None]) -> int:
    """Run `topology` on real servers until it ends or the process is asked to stop; the exit status."""
    async with AsyncExitStack() as resources:
        world = outside(report, resources)
        probes = Probes(_adapter("system").kill_at_probe())
        node = Node(topology, world, probes)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.stop)
        if topology.http is not None:
            server = _adapter("http").StatusServer(topology.http, node.board)
            await server.start()
            resources.push_async_callback(server.stop)
            report("http.listening", address=server.address)
        # Objects of one batch die young and together; full collections over the imported modules only cost time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        report("node.started", pipeline=topology.name)
        try:
            await node.run()
        except BaseExceptionGroup as group:
            error = _first(group)
            if not isinstance(error, ThalwegError):
                raise
            report("node.failed", error=str(error), kind=type(error).__name__)
            return EXIT_UNAVAILABLE if isinstance(error, Transient) else EXIT_FAILED
        report("node.stopped", pipeline=topology.name)
        return EXIT_OK


async def coverage(topology: Topology, report: Callable[..., None]) -> list[Document]:
    """The checkpoint of every partition of `topology`, in slug order."""
    async with AsyncExitStack() as resources:
        store = checkpoints_of(topology, outside(report, resources))
        await store.open()
        found = [await store.load(slug) for slug in sorted(await store.partitions())]
        return [document for document in found if document is not None]
