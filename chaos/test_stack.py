"""The servers themselves: kept data, sudden deaths, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pyarrow.fs as pafs
import pytest
from confluent_kafka import Consumer, Producer

from chaos.stack import Stack
from chaos.world import RealWorld

WITHIN_S = 30.0


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture
def chaos(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m chaos …` with a state of its own."""
    environment = os.environ | {"THALWEG_CHAOS_STATE": str(tmp_path / "up.json")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "chaos", *words],
            env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=Path(__file__).parent.parent,
        )  # fmt: skip

    return run


def test_up_status_down(chaos: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    assert chaos("status").returncode == 1
    up = chaos("up", "postgres", "s3")
    assert up.returncode == 0, up.stderr
    ends = json.loads(up.stdout)
    assert json.loads(chaos("up").stdout) == ends == json.loads(chaos("status").stdout)  # up again: the same servers
    with psycopg.connect(ends["postgres"]) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    supervisor = psutil.Process(json.loads((tmp_path / "up.json").read_text())["pid"])
    servers = supervisor.children(recursive=True)
    assert len(servers) > 2
    assert chaos("down").returncode == 0
    assert not any(server.is_running() for server in servers)
    assert chaos("status").returncode == 1


def test_nothing_outlives_a_killed_supervisor(chaos: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    assert chaos("up", "postgres", "s3").returncode == 0
    supervisor = psutil.Process(json.loads((tmp_path / "up.json").read_text())["pid"])
    servers = supervisor.children(recursive=True)
    supervisor.send_signal(signal.SIGKILL)
    wait_for("the servers end with their supervisor", lambda: not any(server.is_running() for server in servers))
    assert chaos("status").returncode == 1


def test_servers_keep_their_data_over_a_sudden_death(servers: Stack, tmp_path: Path) -> None:
    """Also between specs: each server is back at its old address."""
    kafka, postgres, s3 = servers.kafka, servers.postgres, servers.s3
    assert kafka is not None
    assert postgres is not None
    assert s3 is not None
    world = RealWorld(servers, tmp_path)
    world.topic("kept", 1)
    producer = Producer({"bootstrap.servers": servers.endpoints.kafka, "acks": "all", "log_level": 0})
    producer.produce("kept", b"value")
    assert producer.flush(20) == 0
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("create table kept as select 7 as n")
    s3.bucket("kept")
    ends = servers.endpoints
    store = pafs.S3FileSystem(
        access_key=ends.s3_access_key, secret_key=ends.s3_secret_key, endpoint_override=ends.s3, region="us-east-1"
    )
    with store.open_output_stream("kept/object") as out:
        out.write(b"body")

    for server in (kafka, postgres, s3):
        server.kill()
        server.start()

    consumer = Consumer({"bootstrap.servers": ends.kafka, "group.id": "kept", "auto.offset.reset": "earliest", "log_level": 0})
    consumer.subscribe(["kept"])
    message = consumer.poll(20)
    consumer.close()
    assert message is not None
    assert message.value() == b"value"
    with psycopg.connect(postgres.dsn) as connection:
        assert connection.execute("select n from kept").fetchone() == (7,)
        connection.execute("drop table kept")
    with store.open_input_file("kept/object") as file:
        assert file.read() == b"body"
    world.close()


def test_a_paused_server_answers_when_it_goes_on(servers: Stack) -> None:
    assert servers.postgres is not None
    servers.postgres.pause()
    try:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(servers.postgres.dsn, connect_timeout=2)
    finally:
        servers.postgres.resume()
    with psycopg.connect(servers.postgres.dsn) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
