"""A blocked Postgres and records of 1 MB: memory stays within its limit, the process lives, and all of it lands after."""

from __future__ import annotations

import time

import psutil

from catalogue.given import orders_pipeline
from catalogue.invariants import identities, once
from catalogue.world import Message
from chaos.world import RealWorld

LIMIT = 512 << 20
OVER = 64 << 20
BLOCKED_S = 60.0
RECORDS = 1_200


def test_blocked_postgres_and_large_records(world: RealWorld) -> None:
    """If this is false, an hour's outage of the destination ends with the engine killed for its memory."""
    name = world.name
    world.topic(name, 4, max_message_bytes="2000000")
    pad = b"x" * 999_000  # a record of 1 MB, with what is around it
    batch = [Message(b'{"id":%d,"customer":"c","amount":1,"pad":"%s"}' % (i, pad), i % 4) for i in range(50)]
    engine = world.engine(orders_pipeline(name, "512MiB"))
    process = psutil.Process(engine.process.pid)
    world.produce(name, batch[:4])
    world.wait_until("the first records land", lambda: world.truth.rows(f"select count(*) from {name}") == [(4,)])
    postgres = world.stack.postgres
    assert postgres is not None
    peak = 0
    postgres.pause()
    try:
        until = time.monotonic() + BLOCKED_S
        sent = 4
        while time.monotonic() < until or sent < RECORDS:
            if sent < RECORDS:
                world.produce(name, batch)
                sent += len(batch)
            peak = max(peak, process.memory_info().rss)
            assert engine.process.poll() is None, engine.log()[-3_000:]
            time.sleep(0.05)
    finally:
        postgres.resume()
    ends = world.truth.ends(name)

    def landed() -> bool:
        nonlocal peak
        peak = max(peak, process.memory_info().rss)
        return world.truth.committed(name, name) == ends

    world.wait_until("everything lands once it is unblocked", landed, 180)
    rows = world.truth.rows(f"select _twg_source_partition, _twg_source_offset from {name}")
    assert once("dest", identities([r[0] for r in rows], [r[1] for r in rows])).holds
    assert len(rows) == sent
    assert engine.stop() == 0
    print(f"peak RSS {peak / (1 << 20):.0f} MiB of {LIMIT >> 20} MiB, {sent:,} records of 1 MB, blocked {BLOCKED_S:.0f} s")
    assert peak <= LIMIT + OVER, f"peak RSS {peak / (1 << 20):.0f} MiB"
