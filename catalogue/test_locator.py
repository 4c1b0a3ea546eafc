"""Rows of the catalogue about the one name of one record, and what comes with it. They speak of Kafka alone so far."""

from __future__ import annotations

import os
import subprocess
import sys

from catalogue.given import orders
from catalogue.test_durability import at_ends, pipeline
from catalogue.world import Message, Recreate, World
from thalweg.core.batch import Locator, Partition, record_id

ODD = (("k", b"\xff"), ("k", b"2"), ("n", None), ("e", b""))


def test_headers_are_bytes_not_utf8_no_lossy_normalisation(world: World) -> None:
    """If this is false, whoever reads raw later gets headers that no producer ever sent."""
    world.topic(world.name, 1)
    world.engine(pipeline(world.name))
    some = [Message(b'{"id":1}', 0, b"\xfe", ODD), Message(b'{"id":2}', 0, None, ()), Message(None, 0, b"", (("", b"\x00"),))]
    world.produce(world.name, some)
    world.wait_until("committed", lambda: at_ends(world))
    raw = sorted(world.truth.raw(), key=lambda r: r["_twg_source_offset"])
    found = [
        None if r["_twg_source_headers"] is None else [(h["key"], h["value"]) for h in r["_twg_source_headers"]] for r in raw
    ]
    assert found == [list(ODD), None, [("", b"\x00")]]
    assert [r["_twg_message_key"] for r in raw] == [b"\xfe", None, b""]
    assert [r["_twg_payload"] for r in raw] == [b'{"id":1}', b'{"id":2}', None]


def test_deterministic_record_id_includes_source_cluster_id(world: World) -> None:
    """If this is false, two clusters' records are taken for one another, or one record for two after a restart."""

    def part(cluster: str, incarnation: str = "i") -> Partition:
        return Partition("orders", cluster, "t", 0, incarnation)

    ids = {record_id(Locator(part(cluster, inc), at)) for cluster in "ab" for inc in "ij" for at in range(50)}
    assert len(ids) == 200
    code = (
        "from thalweg.core.batch import *\n"
        "for source in ('orders', 'x'): print(record_id(Locator(Partition(source, 'a', 't', 0, 'i'), 7)).hex())"
    )
    here = record_id(Locator(part("a"), 7)).hex()
    another = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": another, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [here, here], "neither the process nor the name of the source in the configuration is in it"

    world.topic(world.name, 1)
    world.engine(pipeline(world.name, on_failure="hold"))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("committed", lambda: at_ends(world))
    world.inject(Recreate(world.name, 1))
    world.produce(world.name, orders(range(20), 1))
    world.wait_until("the new ones are committed", lambda: at_ends(world))
    rows = world.truth.rows(f"select _twg_source_offset, _twg_record_id from {world.name}")
    assert sorted(r[0] for r in rows) == sorted([*range(20)] * 2)
    assert len({bytes(r[1]) for r in rows}) == 40
    assert {bytes(r["_twg_record_id"]) for r in world.truth.raw()} == {bytes(r[1]) for r in rows}, "one name in every sink"
