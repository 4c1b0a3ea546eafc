"""The status pages of a node: /live, /ready, /health, /stats and /metrics, on loopback unless told otherwise.

Renders what `core.health.Board` knows; decides nothing. Metrics are made at scrape time, in a registry of their own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from thalweg.core.health import Board
from thalweg.errors import Permanent


class _BoardCollector(Collector):
    """The board as metric families `thalweg_<name>`, labelled by stage, verdict or partition."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        counters: dict[str, CounterMetricFamily] = {}
        for (name, label), value in sorted(self._board.counters.items()):
            family = counters.setdefault(name, CounterMetricFamily(f"thalweg_{name}", name.replace("_", " "), labels=["of"]))
            family.add_metric([label], value)
        gauges: dict[str, GaugeMetricFamily] = {}
        for (name, label), level in sorted(self._board.gauges.items()):
            gauge = gauges.setdefault(name, GaugeMetricFamily(f"thalweg_{name}", name.replace("_", " "), labels=["of"]))
            gauge.add_metric([label], level)
        up = GaugeMetricFamily("thalweg_stage_up", "1 while the stage works", labels=["of"])
        failures = CounterMetricFamily("thalweg_stage_failures", "failures of the stage", labels=["of"])
        for key, stage in self._board.stages.items():
            up.add_metric([key], 0 if stage.reason else 1)
            failures.add_metric([key], stage.failures)
        ready = GaugeMetricFamily("thalweg_ready", "1 while the node is ready", value=1 if self._board.ready else 0)
        yield from (*counters.values(), *gauges.values(), up, failures, ready)


def application(board: Board) -> Starlette:
    """The pages over one board."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_BoardCollector(board))

    async def live(_: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(_: Request) -> Response:
        return PlainTextResponse("ready\n" if board.ready else "not ready\n", status_code=200 if board.ready else 503)

    async def health(_: Request) -> Response:
        tree = board.health()
        status = 503 if tree["status"] == "fail" else 200
        return JSONResponse(tree, status_code=status, media_type="application/health+json")

    async def stats(_: Request) -> Response:
        return JSONResponse(board.stats())

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    pages = (live, ready, health, stats, metrics)
    return Starlette(routes=[Route(f"/{page.__name__}", page) for page in pages])


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """Signals are the node's."""


class StatusServer:
    """Serves one board at `host:port` (port 0: a free one) on the running loop."""

    def __init__(self, bind: str, board: Board) -> None:
        host, _, port = bind.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        config = uvicorn.Config(
            application(board), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.address = bind

    async def start(self) -> None:
        """Until it listens. Raises `Permanent` when the address cannot be had."""
        try:
            sock = socket.create_server((self._host, self._port), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        except OSError as error:
            raise Permanent(
                f"the status pages cannot be served at {self._host}:{self._port}: {error.strerror}",
                where="observability.http",
                remedy="Name a free port, or 0 for any",
            ) from None
        self.address = f"{self._host}:{sock.getsockname()[1]}"
        self._task = asyncio.create_task(self._server._serve([sock]), name="status-pages")

    async def stop(self) -> None:
        """Answer what is under way, then close."""
        self._server.should_exit = True
        if self._task is not None and (await asyncio.wait({self._task}, timeout=3))[1]:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)
