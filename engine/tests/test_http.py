"""The status pages over a real socket: what each says, on loopback, and that they begin and end with the node."""

from __future__ import annotations

import asyncio
import signal
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from thalweg.adapters.http import StatusServer
from thalweg.core.health import Board
from thalweg.core.topology import CodecPlan, CoveragePlan, Flow, OnFailure, Role, Sink, Source, Topology
from thalweg.errors import Permanent

TOPOLOGY = Topology(
    "p",
    "_twg_",
    (Source("orders", "kafka", "c", CodecPlan("bytes"), topics=("t",)),),
    (),
    (),
    (
        Sink("raw", "parquet", Role.PRIMARY_RAW, OnFailure.HOLD),
        Sink('od"d\n', "postgres", Role.DESTINATION, OnFailure.ISOLATE),
    ),
    CoveragePlan("objects", "x", {}),
    Flow(),
)


class Pages:
    """A running server and a client of it."""

    def __init__(self) -> None:
        self.board = Board(TOPOLOGY)
        self.server = StatusServer("127.0.0.1:0", self.board)

    async def __aenter__(self) -> Pages:
        await self.server.start()
        self.client = httpx.AsyncClient(base_url=f"http://{self.server.address}", trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.server.stop()


async def test_live_is_always_yes_and_ready_follows_the_board() -> None:
    async with Pages() as pages:
        assert (await pages.client.get("/live")).status_code == 200
        assert (await pages.client.get("/ready")).status_code == 503
        pages.board.started("orders")
        assert (await pages.client.get("/ready")).status_code == 200
        pages.board.failing("sink:raw", "disk full")
        assert (await pages.client.get("/ready")).status_code == 503
        assert (await pages.client.get("/live")).status_code == 200


async def test_an_isolated_sink_in_trouble_is_shown_and_changes_nothing() -> None:
    async with Pages() as pages:
        pages.board.started("orders")
        pages.board.failing('sink:od"d\n', "down")
        health = await pages.client.get("/health")
        assert (health.status_code, health.headers["content-type"]) == (200, "application/health+json")
        assert health.json()["status"] == "warn"
        assert health.json()["checks"]['sink:od"d\n'][0]["output"] == "down"
        assert (await pages.client.get("/ready")).status_code == 200
        pages.board.failing("store:coverage", "conflict")
        health = await pages.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "fail")


async def test_stats_and_metrics_tell_the_same_numbers_at_the_time_of_asking() -> None:
    async with Pages() as pages:
        for n in (1, 2):
            pages.board.decoded("orders", 100, 5_000)
            pages.board.landed('od"d\n', 99)
            pages.board.gauge("lag_records", "orders/t/0@x", 40 - n)
            stats = (await pages.client.get("/stats")).json()
            assert stats["records_in"] == {"orders": 100 * n}
            assert stats["lag_records"] == {"orders/t/0@x": 40 - n}
            answer = await pages.client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            samples = {
                (s.name, s.labels.get("of")): s.value for f in text_string_to_metric_families(answer.text) for s in f.samples
            }
            assert samples["thalweg_records_in_total", "orders"] == 100 * n
            assert samples["thalweg_bytes_in_total", "orders"] == 5_000 * n
            assert samples["thalweg_rows_landed_total", 'od"d\n'] == 99 * n
            assert samples["thalweg_lag_records", "orders/t/0@x"] == 40 - n
            assert samples["thalweg_stage_up", "sink:raw"] == 1
            assert samples["thalweg_ready", None] == 0


async def test_two_nodes_of_one_process_share_nothing() -> None:
    async with Pages() as one, Pages() as two:
        assert one.server.address != two.server.address
        one.board.decoded("orders", 7, 70)
        assert "thalweg_records_in_total" in (await one.client.get("/metrics")).text
        assert "thalweg_records_in_total" not in (await two.client.get("/metrics")).text


async def test_a_port_that_is_taken_is_a_plain_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Permanent, match=str(port)) as raised:
            await StatusServer(f"127.0.0.1:{port}", Board(TOPOLOGY)).start()
    assert raised.value.where == "observability.http"


async def test_it_leaves_signals_to_the_node_and_closes_its_socket_when_stopped() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    async with Pages() as pages:
        assert (await pages.client.get("/live")).status_code == 200
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
        host, _, port = pages.server.address.rpartition(":")
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection(host, int(port))
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "status-pages"]


async def test_a_client_that_says_nothing_does_not_keep_it_from_stopping() -> None:
    pages = Pages()
    async with pages:
        host, _, port = pages.server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        assert (await pages.client.get("/live")).status_code == 200
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "status-pages"]
    writer.close()


async def test_it_is_reachable_on_loopback_alone_by_default() -> None:
    async with Pages() as pages:
        assert pages.server.address.startswith("127.0.0.1:")
        assert (await pages.client.get("/nothing")).status_code == 404
        assert (await pages.client.post("/ready")).status_code == 405
