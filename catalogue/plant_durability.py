"""Planted bugs of the rows about durability and about whole pipelines. Each turns a row red; see `catalogue.sabotage`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from unittest.mock import patch

from catalogue import sabotage
from catalogue.sabotage import Plant


@contextmanager
def isolated_sinks_are_awaited() -> Iterator[None]:
    """No new batch is taken in while a sink still has work, whether it holds the source or not."""
    from thalweg.runtime.pipeline import Pipeline

    digest = Pipeline.digest

    async def patient(self: Pipeline, source: Any, owned: Any, records: Any, held: Any) -> None:
        while owned.alive and any(lane.size_bytes for lane in self.lanes.values() if not lane.holds):
            self.freed.clear()
            await self.freed.wait()
        await digest(self, source, owned, records, held)

    with patch.object(Pipeline, "digest", patient):
        yield


@contextmanager
def gaps_of_isolated_sinks_are_closed() -> Iterator[None]:
    """What an isolated sink in trouble did not take is recorded as if it had."""
    from thalweg.runtime.pipeline import Lane

    trouble, land = Lane._trouble, Lane._land

    async def forgiving(self: Lane, owned: Any, chunk: Any) -> None:
        self.current = owned, chunk  # type: ignore[attr-defined]  # the bug's own
        await land(self, owned, chunk)

    def troubled(self: Lane, error: Any) -> None:
        trouble(self, error)
        if not self.holds:
            owned, chunk = self.current  # type: ignore[attr-defined]  # as above
            owned.landed(self.sink.name, chunk.start, chunk.stop)

    with patch.object(Lane, "_land", forgiving), patch.object(Lane, "_trouble", troubled):
        yield


@contextmanager
def commit_at_send() -> Iterator[None]:
    """The source is told of a chunk when it is sent to raw."""
    from thalweg.core.topology import Role
    from thalweg.runtime.pipeline import Lane
    from thalweg.runtime.worker import Worker

    land, commit = Lane._land, Worker._try_commit
    sent: dict[Any, int] = {}

    async def noted(self: Lane, owned: Any, chunk: Any) -> None:
        if self.sink.role is Role.PRIMARY_RAW:
            sent[owned.part] = max(chunk.stop, sent.get(owned.part, 0))
        await land(self, owned, chunk)

    async def eager(self: Worker, candidates: list[Any]) -> bool:
        at = {o.part: sent[o.part] for o in candidates if o.alive and o.part in sent and sent[o.part] > o.acked}
        if not at:
            return await commit(self, candidates)
        try:
            await self.consumer.commit({part: self._cursor(to) for part, to in at.items()})
        except Exception:
            return False
        for owned in candidates:
            owned.acked = max(owned.acked, at.get(owned.part, 0))
        return True

    with patch.object(Lane, "_land", noted), patch.object(Worker, "_try_commit", eager):
        yield


@contextmanager
def quarantine_is_awaited() -> Iterator[None]:
    """A partition's offset is not committed while rows of it wait for the quarantine."""
    from thalweg.core.topology import Role
    from thalweg.runtime.worker import Worker

    commit = Worker._try_commit

    async def later(self: Worker, candidates: list[Any]) -> bool:
        aside = [lane for lane in self.pipeline.lanes.values() if lane.sink.role is Role.QUARANTINE]
        return await commit(self, [o for o in candidates if all(lane.size_bytes == 0 for lane in aside)])

    with patch.object(Worker, "_try_commit", later):
        yield


@contextmanager
def isolated_sinks_never_let_go() -> Iterator[None]:
    """What an isolated sink in trouble holds it keeps, whoever needs the room."""
    from thalweg.runtime.pipeline import Pipeline

    with patch.object(Pipeline, "_shed", lambda self: None):
        yield


@contextmanager
def shed_rows_are_not_counted() -> Iterator[None]:
    """Rows that an isolated sink in trouble leaves out are counted once a batch."""
    from thalweg.core.health import Board

    shed = Board.shed

    with patch.object(Board, "shed", lambda self, sink, rows: shed(self, sink, min(rows, 1))):
        yield


@contextmanager
def durable_at_upload_start() -> Iterator[None]:
    """An object counts as durable when its upload has begun; how that ends, nobody asks."""
    from thalweg.runtime.lake import LakeLander

    init = LakeLander.__init__

    class Hasty:
        """A store that starts its uploads."""

        def __init__(self, store: Any) -> None:
            self._store, self._started = store, set[asyncio.Task[None]]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def create(self, key: str, body: Any) -> None:
            async def upload() -> None:
                try:
                    await self._store.create(key, body)
                except Exception:
                    return

            self._started.add(asyncio.create_task(upload()))
            await asyncio.sleep(0)

    def hasty(self: LakeLander, store: Any, *words: Any) -> None:
        init(self, Hasty(store), *words)  # type: ignore[arg-type]  # as much of a store as the bug needs

    with patch.object(LakeLander, "__init__", hasty):
        yield


@contextmanager
def run_skips_the_rule() -> Iterator[None]:
    """What a primary raw must be is asked by `check` alone."""
    import thalweg.__main__ as command
    from thalweg.core.plan import _Planner, judged

    nothing: Any = lambda *_: None  # noqa: E731

    def lenient(value: Any, inputs: Any, *, strict: bool) -> Any:
        with patch.object(_Planner, "duties", nothing) if strict else nullcontext():
            return judged(value, inputs, strict=strict)

    with patch.object(command, "judged", lenient):
        yield


@contextmanager
def any_sink_will_do() -> Iterator[None]:
    """A primary raw may be of a type whose word is not enough."""
    from thalweg.core.plan import _Planner

    init = _Planner.__init__

    def trusting(self: Any, *words: Any, **more: Any) -> None:
        init(self, *words, **more)
        fault = self.fault

        def heard(path: str, code: str, *rest: Any) -> None:
            if code != "primary-raw-unsupported":
                fault(path, code, *rest)

        self.fault = heard

    with patch.object(_Planner, "__init__", trusting):
        yield


@contextmanager
def childless_parents_wait() -> Iterator[None]:
    """A batch that has no rows for a destination is never reported as landed there."""
    from thalweg.core.topology import Role
    from thalweg.runtime.pipeline import Lane

    put = Lane.put

    def picky(self: Lane, owned: Any, frame: Any, held: Any) -> None:
        if frame.rows.num_rows or self.sink.role is not Role.DESTINATION:
            put(self, owned, frame, held)

    with patch.object(Lane, "put", picky):
        yield


@contextmanager
def children_come_from_the_next_parent() -> Iterator[None]:
    """Rows of an unnest are located by the number of the child, which is right as long as each record has one."""
    from thalweg.runtime import transform

    unnested = transform.unnested

    def one_each(node: Any, given: Any) -> Any:
        import numpy as np
        import pyarrow as pa

        derived = unnested(node, given)
        n = derived.rows.num_rows
        origin = pa.array(np.minimum(np.arange(n), max(len(given.origin) - 1, 0)).astype(np.int32))
        return transform.NodeRows(derived.rows, origin, derived.child)

    with patch.object(transform, "unnested", one_each), sabotage._unmemoised():
        yield


@contextmanager
def inner_sinks_are_ignored() -> Iterator[None]:
    """Only sinks at the end of a branch hold the source; one whose rows another node reads too does not."""
    from thalweg.core.topology import OnFailure, Role, Topology

    def leaves(self: Topology) -> frozenset[str]:
        inner = {node.input for node in self.nodes}
        return frozenset(
            s.name
            for s in self.sinks
            if s.on_failure is OnFailure.HOLD and (s.role is not Role.DESTINATION or s.input not in inner)
        )

    with patch.object(Topology, "gating", property(leaves)):
        yield


@contextmanager
def coordination_starts_anyway() -> Iterator[None]:
    """A part that nothing has switched on looks for its service."""
    from thalweg.core.health import Board, Stage

    init = Board.__init__

    def coordinated(self: Board, *words: Any) -> None:
        init(self, *words)
        self.stages["store:coordination"] = Stage("coordination", "store", True, "nobody else is there")

    with patch.object(Board, "__init__", coordinated):
        yield


PLANTS: Final[Mapping[str, Plant]] = {
    "isolated-sinks-are-awaited": isolated_sinks_are_awaited,
    "gaps-of-isolated-sinks-are-closed": gaps_of_isolated_sinks_are_closed,
    "commit-at-send": commit_at_send,
    "quarantine-is-awaited": quarantine_is_awaited,
    "isolated-sinks-never-let-go": isolated_sinks_never_let_go,
    "shed-rows-are-not-counted": shed_rows_are_not_counted,
    "durable-at-upload-start": durable_at_upload_start,
    "run-skips-the-rule": run_skips_the_rule,
    "any-sink-will-do": any_sink_will_do,
    "childless-parents-wait": childless_parents_wait,
    "children-come-from-the-next-parent": children_come_from_the_next_parent,
    "inner-sinks-are-ignored": inner_sinks_are_ignored,
    "coordination-starts-anyway": coordination_starts_anyway,
}
