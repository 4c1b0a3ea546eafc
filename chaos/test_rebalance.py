"""Three workers that join and leave under load, on the real broker: nothing missing, nothing extra, and no lag left."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from catalogue.given import orders, orders_pipeline
from catalogue.invariants import committed_within, complete, covered, identities, no_loss, once
from chaos.world import RealEngine, RealWorld

RECORDS = 300_000
PARTITIONS = 6
SLICE = 5_000
NONE = np.array([], dtype=np.int64)


class _Feed(threading.Thread):
    """Produces while the workers come and go."""

    def __init__(self, world: RealWorld, topic: str, pace_s: float) -> None:
        super().__init__(daemon=True)
        self._world, self._topic, self._pace_s = world, topic, pace_s
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._next = threading.Event()

    def run(self) -> None:
        try:
            for start in range(0, RECORDS, SLICE):
                self._world.produce(self._topic, orders(range(start, start + SLICE), PARTITIONS))
                self._next.wait(self._pace_s)  # load, spread over the whole time that workers come and go
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


@pytest.mark.parametrize("turn", range(3))
def test_workers_join_and_leave_under_load(world: RealWorld, turn: int) -> None:
    """If this is false, a deployment or a scale-out loses or doubles records."""
    name = world.name
    world.topic(name, PARTITIONS)
    feed = _Feed(world, name, 0.35)
    feed.start()

    def assigned(engine: RealEngine) -> bool:
        return engine.log().count("partitions.assigned") > 0 and "starts={}" not in engine.log().splitlines()[-1]

    workers = [world.engine(orders_pipeline(name))]
    world.wait_until("the first worker has partitions", lambda: assigned(workers[0]))
    for _ in range(2):
        workers.append(world.engine(orders_pipeline(name)))
        world.wait_until("one more worker has partitions", lambda: assigned(workers[-1]), 90)
    assert workers[0].stop() == 0
    workers.append(world.engine(orders_pipeline(name)))
    world.wait_until("the next has partitions", lambda: assigned(workers[-1]), 90)
    workers[1].kill()
    world.wait_until("everything is produced", feed.done.is_set, 120)
    assert feed.error is None
    ends = world.truth.ends(name)
    assert sum(ends.values()) == RECORDS
    world.wait_until("the group's lag is 0", lambda: world.truth.committed(name, name) == ends, 120)
    for worker in (workers[2], workers[3]):
        assert worker.stop() == 0

    committed, documents, raw = world.truth.committed(name, name), world.truth.checkpoints(), world.truth.raw()
    rows = world.truth.rows(f"select _twg_source_partition, _twg_source_offset from {name}")
    produced, landed = world.truth.produced(name), identities([r[0] for r in rows], [r[1] for r in rows])
    stored = identities([r["_twg_source_partition"] for r in raw], [r["_twg_source_offset"] for r in raw])
    for finding in (
        no_loss(produced, landed, NONE, NONE),
        once("dest", landed),
        complete("raw", produced, stored),
        covered(documents, "raw", ends),
        covered(documents, "dest", ends),
        committed_within(documents, ("raw", "dest", "dlq"), committed),
    ):
        assert finding.holds, finding
    print(f"turn {turn}: {len(landed):,} rows, {len(stored) - len(np.unique(stored)):,} raw rows repeated")
