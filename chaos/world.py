"""The world of real servers: the engine is a process of the installed package, the truth is read by other clients.

Servers are shared by the specs of a run; topics, databases and buckets are each spec's own. Decides nothing about what
must hold: that is the catalogue's.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql
from ruamel.yaml import YAML

from catalogue.invariants import Checkpoint, Identities, checkpoint, committed_within, identities
from catalogue.world import Message
from chaos.embedded import die_with_parent, free_ports
from chaos.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.02
JUDGE_S = 0.25
STOP_S = 20.0


class RealEngine:
    """`thalweg run` as a process of the installed package; with a planted bug, the same package run by the catalogue."""

    def __init__(self, folder: Path, number: int, pipeline: str, environment: dict[str, str], http: str, sabotage: str | None):
        self.plan: Any = YAML(typ="safe").load(pipeline)
        self._file, self._log, self._http = folder / f"pipeline-{number}.yaml", folder / f"engine-{number}.log", http
        self._file.write_text(pipeline)
        self.expected_to_end = False
        engine, paths = ["-m", "thalweg"], ""
        if sabotage:  # only the planted bugs come from the checkout: there is no `thalweg` at its root
            engine, paths = ["-m", "catalogue.sabotage", sabotage, "--"], str(ROOT)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *engine, "run", str(self._file)],
                cwd=folder, env=os.environ | {"PYTHONPATH": paths} | environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
            )  # fmt: skip

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_exit(self) -> int:
        self.expected_to_end = True
        return self.process.wait(STOP_S)

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self._http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class RealTruth:
    """What brokers, stores and databases say."""

    def __init__(self, stack: Stack, bucket: str, dsn: str) -> None:
        self._stack, self._bucket, self._dsn = stack, bucket, dsn
        self._produced: dict[str, list[tuple[int, int]]] = {}
        self._log_from = stack.postgres.log.stat().st_size if stack.postgres else 0
        self._readers: dict[str, Consumer] = {}
        self._s3: pafs.S3FileSystem | None = None

    def close(self) -> None:
        """Give the clients back."""
        for reader in self._readers.values():
            reader.close()

    def note(self, topic: str, partition: int, offset: int) -> None:
        """One delivery report."""
        self._produced.setdefault(topic, []).append((partition, offset))

    def produced(self, topic: str) -> Identities:
        at = self._produced.get(topic, [])
        return identities([p for p, _ in at], [o for _, o in at])

    def ends(self, topic: str) -> dict[int, int]:
        reader = self._reader("truth")
        return {p: reader.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in self._partitions(topic)}

    def committed(self, group: str, topic: str) -> dict[int, int]:
        parts = [TopicPartition(topic, p) for p in self._partitions(topic)]
        return {found.partition: found.offset for found in self._reader(group).committed(parts, timeout=10) if found.offset >= 0}

    def checkpoints(self) -> Sequence[Checkpoint]:
        return [checkpoint(body) for body in self._objects("raw/_coverage", ".json")]

    def raw(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for body in self._objects("raw", ".parquet"):
            rows += pq.ParquetFile(pa.BufferReader(body)).read().to_pylist()
        return rows

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._dsn) as connection:
            return connection.execute(query.encode()).fetchall()

    def binary_copies(self) -> int:
        assert self._stack.postgres is not None
        with self._stack.postgres.log.open("rb") as log:
            log.seek(self._log_from)
            text = log.read().decode(errors="replace")
        return len(re.findall(r"statement: COPY\b[^\n]*\bFROM STDIN\b[^\n]*\bBINARY\b", text, re.IGNORECASE))

    def _partitions(self, topic: str) -> list[int]:
        return sorted(self._reader("truth").list_topics(topic, timeout=10).topics[topic].partitions)

    def _reader(self, group: str) -> Consumer:
        """A client that asks about a group and never joins it."""
        if group not in self._readers:
            address = self._stack.endpoints.kafka
            self._readers[group] = Consumer({"bootstrap.servers": address, "group.id": group, "enable.auto.commit": False})
        return self._readers[group]

    def _objects(self, folder: str, ending: str) -> list[bytes]:
        if self._s3 is None:
            ends = self._stack.endpoints
            self._s3 = pafs.S3FileSystem(
                access_key=ends.s3_access_key, secret_key=ends.s3_secret_key, endpoint_override=ends.s3, region="us-east-1"
            )
        selector = pafs.FileSelector(f"{self._bucket}/{folder}", recursive=True, allow_not_found=True)
        paths = sorted(f.path for f in self._s3.get_file_info(selector) if f.is_file and f.path.endswith(ending))
        return [self._whole(self._s3, path) for path in paths]

    @staticmethod
    def _whole(s3: pafs.S3FileSystem, path: str) -> bytes:
        """One version of an object. This client asks for the size first, so what is replaced in between would come cut."""
        while True:
            with s3.open_input_file(path) as file:
                size, body = file.size(), file.read()
            after = s3.get_file_info(path)
            if after.size == size == len(body) and (not path.endswith(".json") or body.endswith(b"}}")):
                return bytes(body)


class RealWorld:
    """Implements `catalogue.world.World` on a running stack."""

    _numbers = itertools.count(1)

    def __init__(self, stack: Stack, folder: Path, sabotage: str | None = None, patience_s: float = float("inf")) -> None:
        self.stack, self._folder, self._sabotage, self._patience_s = stack, folder, sabotage, patience_s
        self.name = f"w{next(self._numbers)}"
        self._engines: list[RealEngine] = []
        self._judged = 0.0
        ends = stack.endpoints
        assert stack.s3 is not None
        bucket = f"spec-{self.name}"
        stack.s3.bucket(bucket)
        with psycopg.connect(ends.postgres, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(self.name)))
        dsn = psycopg.conninfo.make_conninfo(ends.postgres, dbname=self.name)
        self.truth = RealTruth(stack, bucket, dsn)
        lake = f'endpoint: "{ends.s3}", region: us-east-1, allow_http: true'
        secrets = 'access_key_id: "${env:WORLD_S3_KEY}", secret_access_key: "${env:WORLD_S3_SECRET}"'
        self._addresses = {
            "{kafka}": ends.kafka,
            "{postgres}": "${env:WORLD_POSTGRES}",
            "{lake}": f"s3://{bucket}",
            "{lake_options}": f"{{{lake}, {secrets}}}",
        }
        self._environment = {
            "WORLD_POSTGRES": dsn,
            "WORLD_S3_KEY": ends.s3_access_key,
            "WORLD_S3_SECRET": ends.s3_secret_key,
        }

    def topic(self, name: str, partitions: int, **settings: str) -> None:
        """Of one replica, there being one broker; `settings` are the broker's, with _ for the dots."""
        admin = AdminClient({"bootstrap.servers": self.stack.endpoints.kafka})
        config = {key.replace("_", "."): value for key, value in settings.items()}
        for made in admin.create_topics([NewTopic(name, partitions, 1, config=config)]).values():
            made.result(30)

    def producer(self, **settings: str | int | bool) -> Producer:
        """A client of this broker; `settings` are librdkafka's, with _ for the dots."""
        named = {key.replace("_", "."): value for key, value in settings.items()}
        return Producer({"bootstrap.servers": self.stack.endpoints.kafka, **named})

    def produce(self, topic: str, messages: Sequence[Message]) -> None:
        producer = self.producer(acks="all", enable_idempotence=True)
        failed: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(str(error))
            else:
                self.truth.note(topic, message.partition(), message.offset())

        for message in messages:
            headers: Any = list(message.headers)
            producer.produce(
                topic, message.value, message.key, partition=message.partition, headers=headers, on_delivery=delivered
            )
            producer.poll(0)
        if producer.flush(60) or failed:
            raise RuntimeError(f"not everything was produced: {failed[:1]}")

    def engine(self, pipeline: str, **environment: str) -> RealEngine:
        http = f"127.0.0.1:{free_ports(1)[0]}"
        for name, value in {**self._addresses, "127.0.0.1:{http}": http}.items():
            pipeline = pipeline.replace(name, value)
        everything = self._environment | environment
        made = RealEngine(self._folder, len(self._engines), pipeline, everything, http, self._sabotage)
        self._engines.append(made)
        return made

    def wait_until(self, what: str, condition: Callable[[], bool], within_s: float = 60) -> None:
        within_s = min(within_s, self._patience_s)
        until = time.monotonic() + within_s
        while not self._holds(condition):
            for engine in (e for e in self._engines if not e.expected_to_end):
                status = engine.process.poll()
                assert not status or status == -signal.SIGKILL, f"the engine ended with {status}:\n{engine.log()[-4_000:]}"
            tail = self._engines[-1].log()[-4_000:] if self._engines else ""
            assert time.monotonic() < until, f"not within {within_s:.0f} s: {what}\n{tail}"
            if time.monotonic() > self._judged + JUDGE_S:
                self._judge()
            time.sleep(LOOK_S)
        self._judge()

    def _judge(self) -> None:
        """The invariant of a moving system, read in the order commit, coverage: each only grows, so the inclusion is sound."""
        self._judged = time.monotonic()
        for plan in {e.plan["pipeline"]["name"]: e.plan for e in self._engines}.values():
            if not any(s.get("role") == "primary-raw" and s["type"] == "parquet" for s in plan["sinks"]):
                continue  # its checkpoint commits with the rows, in one transaction
            holds = {"quarantine": "isolate"}
            holding = [s["name"] for s in plan["sinks"] if s.get("on_failure", holds.get(s.get("role", ""), "hold")) == "hold"]
            for source in plan["sources"]:
                group = source.get("group", plan["pipeline"]["name"])
                for topic in (t for t in source.get("topics", ()) if not t.startswith("^")):
                    try:
                        committed = self.truth.committed(group, topic)
                        documents = [c for c in self.truth.checkpoints() if c.topic == topic]
                    except (KafkaException, OSError):
                        return  # a server is down: there is nothing to compare now
                    finding = committed_within(documents, holding, committed)
                    assert finding.holds, finding

    @staticmethod
    def _holds(condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except (KafkaException, psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return False  # a server that is down, or a table that is not there yet

    def close(self) -> None:
        """Leave no engine behind; servers are the stack's."""
        for engine in self._engines:
            if engine.process.poll() is None:
                engine.kill()
        self.truth.close()
