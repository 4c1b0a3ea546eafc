"""Rows of the catalogue about whole pipelines."""

from __future__ import annotations

import numpy as np

from catalogue.given import orders, orders_pipeline
from catalogue.invariants import committed_within, complete, covered, identities, no_loss, once
from catalogue.world import World

NONE = np.array([], dtype=np.int64)


def test_kafka_to_postgres_happy_path(world: World) -> None:
    """If this is false, the plainest of pipelines loses, doubles or alters records, or commits what it has not stored."""
    name, n, partitions = world.name, 10_000, 4
    world.topic(name, partitions)
    world.produce(name, orders(range(n), partitions))
    engine = world.engine(orders_pipeline(name))
    ends = world.truth.ends(name)
    world.wait_until("offsets at the end of every partition", lambda: world.truth.committed(name, name) == ends)
    assert engine.page("/ready")[0] == 200, (engine.page("/health"), engine.log())
    assert engine.stop() == 0

    committed, documents = world.truth.committed(name, name), world.truth.checkpoints()
    raw = world.truth.raw()
    rows = world.truth.rows(
        f"select _twg_source_partition, _twg_source_offset, id, customer, doubled, _twg_record_id from {name}"
    )
    produced = world.truth.produced(name)
    landed = identities([r[0] for r in rows], [r[1] for r in rows])
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
    assert committed == ends
    assert {r[2:5] for r in rows} == {(i, f"C-{i % 97}", (i + 0.5) * 2) for i in range(n)}
    assert len({r[5] for r in rows}) == n
    assert {r["_twg_payload"] for r in raw} == {m.value for m in orders(range(n), partitions)}
    assert world.truth.binary_copies() > 0
