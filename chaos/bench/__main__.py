"""`python -m chaos.bench`: run the contenders in turn and print who is how fast.

--runs N      counted runs of each (5)      --only a,b    some contenders
--records N   how many records (all)        --json PATH   figures for machines (out/bench.json)
--quick       one run of the bare limit and Thalweg on few records, to see that it works
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import platformdirs
import psutil
import psycopg
from confluent_kafka import Consumer, TopicPartition
from rich.console import Console
from rich.table import Table

from chaos.bench import data
from chaos.embedded import EmbeddedPostgres, die_with_parent
from chaos.stack import stack

HERE = Path(__file__).parent
PEERS = ("bytewax", "quix", "pathway", "dlt")
OURS = ("bare-json", "thalweg-json", "thalweg-json-hollow", "bare-avro", "thalweg-avro")
DEADLINE_S = 180.0

PIPELINE = """\
pipeline: {{name: {name}}}
sources:
  - name: flights
    type: kafka
    cluster_id: bench
    topics: [{topic}]
    offset_reset: earliest
    options: {{bootstrap.servers: "{brokers}"}}
    codec: {codec}
transforms:
  - name: flown
    sql: |
      SELECT {columns}
      FROM source
quality:
  rules:
    - {{id: carrier, input: flown, column: carrier, not_null: true, action: dlq}}
    - {{id: distance, input: flown, column: distance, min: 0, max: 10000, action: dlq}}
    - {{id: origin, input: flown, column: origin, accepted: [EWR, JFK, LGA], action: dlq}}
sinks:
{raw}
  - {{name: dest, type: postgres, input: flown, url: "${{env:BENCH_POSTGRES}}", table: {table}, on_failure: hold}}
  - {{name: dlq, type: postgres, role: dlq, url: "${{env:BENCH_POSTGRES}}", table: {table}_dlq}}
flow: {{memory_limit_bytes: 1GiB}}
observability: {{http: "127.0.0.1:0"}}
"""


@dataclass
class Run:
    """One contender's figures of one run."""

    cpu_s: float
    wall_s: float
    rss_mib: float


@dataclass
class Contender:
    name: str
    runs: list[Run] = field(default_factory=list)
    idle: list[Run] = field(default_factory=list)
    failure: str = ""

    def rate(self, records: int) -> float:
        """Records per CPU-second, start-up taken off: the median over the runs."""
        start = statistics.median(r.cpu_s for r in self.idle)
        return statistics.median(per_cpu_second(records - data.FEW, r.cpu_s, start) for r in self.runs)


def per_cpu_second(records: int, cpu_s: float, start_s: float) -> float:
    """Records per CPU-second beyond what starting costs."""
    return records / max(cpu_s - start_s, 1e-3)


class Bench:
    def __init__(self, brokers: str, postgres: EmbeddedPostgres, folder: Path) -> None:
        self.brokers, self.dsn, self.folder = brokers, postgres.dsn, folder
        self.count = 0
        self.sums: dict[int, int] = {}  # records -> what the flight numbers must add up to

    def run(self, name: str, topic: str, records: int) -> Run:
        """One run; raises `RuntimeError` when it does not end with every record in the table."""
        self.count += 1
        table = f"t{self.count}"
        form = "avro" if name.endswith("avro") else "json"
        topic = f"{topic}-{form}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            if not name.startswith("thalweg") and name not in ("quix", "dlt"):
                extra = ", time bigint, diff bigint" if name == "pathway" else ""
                connection.execute(data.create_table(table).replace(")", f"{extra})").encode())
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # nobody compiles at each start
        command, environment = self._command(name, form, topic, records, table)
        log = self.folder / f"{self.count}-{name}.log"
        begun = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env={**inherited, **environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        status, cpu_s, rss_bytes, wall = self._await(name, process, topic, records, table, begun)
        tail = log.read_text(errors="replace")[-2_000:]
        if status not in (0, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM):
            raise RuntimeError(f"{name} ended with {status}:\n{tail}")
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(f"select count(*), coalesce(sum(flight), 0) from {table}".encode()).fetchone()
        if found is None or found[0] != records or found[1] != self.sums[records]:
            raise RuntimeError(f"{name}: {found} rows and sum, {records} and {self.sums[records]} expected\n{tail}")
        return Run(cpu_s, wall, rss_bytes / (1 << 20))

    def _command(self, name: str, form: str, topic: str, records: int, table: str) -> tuple[list[str], dict[str, str]]:
        root = {"PYTHONPATH": str(HERE.parent.parent)}
        if name.startswith("bare"):
            leg = ["-m", "chaos.bench.leg_bare", form, self.brokers, topic, str(records), self.dsn, table]
            return [sys.executable, *leg], root
        if name.startswith("thalweg"):
            file = self.folder / f"{table}.yaml"
            raw = f"  - {{name: raw, type: parquet, role: primary-raw, url: raw-{table}}}"
            columns = {n: "int32" if n in data.WHOLE else "string" for n in data.COLUMNS}
            codec = f"{{type: json, schema: {json.dumps(columns)}}}"
            if form == "avro":
                (self.folder / "flight.avsc").write_text(json.dumps(data.AVRO))
                codec = "{type: avro, schema_file: flight.avsc, framing: none}"
            file.write_text(
                PIPELINE.format(
                    name=table, topic=topic, brokers=self.brokers, codec=codec, columns=", ".join(data.COLUMNS), table=table,
                    raw=raw,
                )
            )  # fmt: skip
            module = "chaos.bench.leg_hollow" if name.endswith("hollow") else "thalweg"
            return [sys.executable, "-m", module, "run", file.name], {"BENCH_POSTGRES": self.dsn, **root}
        words = [self.brokers, topic, str(records), self.dsn, table, ",".join(data.COLUMNS)]
        return [str(peer_python(name)), str(HERE / f"leg_{name}.py"), *words], {"DO_NOT_TRACK": "1"}

    def _await(
        self, name: str, process: subprocess.Popen[bytes], topic: str, records: int, table: str, begun: float
    ) -> tuple[int, float, int, float]:
        """Until it ends, or has everything and must be told to: status, CPU seconds (children included), peak RSS, wall."""
        told, peak = 0.0, 0
        seen = psutil.Process(process.pid)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            now = time.monotonic()
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage.ru_utime + usage.ru_stime, peak, (told or now) - begun
            # Sampled: the kernel's own maximum counts the moment before exec, when the child still was this process.
            with contextlib.suppress(psutil.Error):
                peak = max(peak, seen.memory_info().rss) if now - begun > 0.3 else peak
            if now - begun > DEADLINE_S:
                os.killpg(process.pid, signal.SIGKILL)
            if not told and (name.startswith("thalweg") or name == "pathway") and self._complete(name, topic, records, table):
                told = now
                process.send_signal(signal.SIGTERM)
            elif told and now - told > 20:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)

    def _complete(self, name: str, topic: str, records: int, table: str) -> bool:
        if name == "pathway":
            with psycopg.connect(self.dsn) as connection:
                found = connection.execute(f"select count(*) from {table}".encode()).fetchone()
            return found is not None and found[0] >= records
        reader = Consumer({"bootstrap.servers": self.brokers, "group.id": table, "log_level": 0})
        try:
            stored = reader.committed([TopicPartition(topic, p) for p in range(data.PARTITIONS)], timeout=10)
        finally:
            reader.close()
        return sum(int(max(0, entry.offset)) for entry in stored) >= records


def peer_python(name: str) -> Path:
    """The interpreter of a peer's own environment, made the first time."""
    wanted = (HERE / "requirement" / f"{name}.txt").read_text()
    digest = hashlib.blake2b(wanted.encode() + sys.version.encode(), digest_size=6).hexdigest()
    folder = Path(platformdirs.user_cache_dir("thalweg")) / "bench" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        without = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")}
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "-r", str(HERE / "requirement" / f"{name}.txt")],
            capture_output=True, text=True, env=without,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    return python


def measure(bench: Bench, names: Sequence[str], runs: int, records: int, console: Console) -> list[Contender]:
    """Turn by turn; a contender that fails is out, with its reason."""
    found = {name: Contender(name) for name in names}
    for turn in range(-1, runs):
        for contender in found.values():
            if contender.failure:
                continue
            try:
                if turn < min(2, runs):
                    contender.idle.append(bench.run(contender.name, "few", data.FEW))
                if turn >= 0:
                    one = bench.run(contender.name, "all", records)
                    contender.runs.append(one)
                    figures = f"cpu {one.cpu_s:.2f} s  wall {one.wall_s:.2f} s  {one.rss_mib:.0f} MiB"
                    console.print(f"{turn + 1}/{runs} {contender.name:<20} {figures}")
            except (RuntimeError, OSError, psycopg.Error) as error:
                contender.failure = str(error)
                console.print(f"[red]{contender.name}: {contender.failure[:1500]}")
    return list(found.values())


def report(contenders: Sequence[Contender], records: int) -> dict[str, object]:
    """Figures and ratios."""
    done = {c.name: c for c in contenders if c.runs and not c.failure}
    rates = {name: c.rate(records) for name, c in done.items()}
    out: dict[str, object] = {
        "records": records,
        "contenders": {
            c.name: {
                "records_per_cpu_second": round(rates[c.name]),
                "records_per_second_wall": round(records / statistics.median(r.wall_s for r in c.runs)),
                "peak_rss_mib": round(statistics.median(r.rss_mib for r in c.runs)),
                "start_cpu_s": round(statistics.median(r.cpu_s for r in c.idle), 2),
                "runs": [asdict(r) for r in c.runs],
            }
            for c in done.values()
        },
        "failed": {c.name: c.failure for c in contenders if c.failure},
    }
    ratios: dict[str, float] = {}
    for form in ("json", "avro"):
        if {f"bare-{form}", f"thalweg-{form}"} <= set(rates):
            ratios[f"thalweg / bare limit, {form}"] = rates[f"thalweg-{form}"] / rates[f"bare-{form}"]
    peers = {name: rate for name, rate in rates.items() if name in PEERS}
    if peers and "thalweg-json" in rates:
        best = max(peers, key=peers.__getitem__)
        ratios[f"thalweg / best peer ({best})"] = rates["thalweg-json"] / peers[best]
    if {"thalweg-json", "thalweg-json-hollow"} <= set(rates):
        ratios["share of client CPU for raw and coverage"] = raw_share(rates["thalweg-json"], rates["thalweg-json-hollow"])
    out["ratios"] = {name: round(value, 3) for name, value in ratios.items()}
    return out


def raw_share(with_raw: float, without: float) -> float:
    """Of the CPU that a record costs with raw, the part that it would not cost without."""
    return 1 - with_raw / without


def show(figures: dict[str, object], console: Console) -> None:
    table = Table("contender", "records / CPU-s", "records / s wall", "peak RSS MiB", "start CPU s")
    contenders: dict[str, dict[str, object]] = figures["contenders"]  # type: ignore[assignment]  # made above
    for name, one in contenders.items():
        numbers = (f"{one[k]:,}" for k in ("records_per_cpu_second", "records_per_second_wall", "peak_rss_mib", "start_cpu_s"))
        table.add_row(name, *numbers)
    console.print(table)
    for name, value in figures["ratios"].items():  # type: ignore[attr-defined]  # a mapping
        console.print(f"{name}: {value}")
    for name, reason in figures["failed"].items():  # type: ignore[attr-defined]  # a mapping
        console.print(f"[red]{name} did not take part: {reason.splitlines()[0]}")


def main() -> int:
    """Exit status 1 when one of our own contenders failed."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--records", type=int, default=0)
    parser.add_argument("--only", default=",".join((*OURS, *PEERS)))
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.records, options.only = 1, 40_000, "bare-json,thalweg-json"
    console = Console()
    names = [n for n in options.only.split(",") if n]
    if unknown := set(names) - {*OURS, *PEERS}:
        parser.error(f"no contender is called {', '.join(sorted(unknown))}; there are {', '.join((*OURS, *PEERS))}")
    with tempfile.TemporaryDirectory(prefix="thalweg-bench-") as folder, stack(("kafka", "postgres")) as servers:
        brokers, postgres = servers.endpoints.kafka, servers.postgres
        assert postgres is not None
        rows = data.rows()
        rows = rows[: options.records] if options.records else rows
        bench = Bench(brokers, postgres, Path(folder))
        bench.sums = {len(some): sum(r["flight"] for r in some) for some in (rows, rows[: data.FEW])}
        for form, encode in (("json", data.as_json), ("avro", data.as_avro)):
            if any(n.endswith("avro") == (form == "avro") for n in names):
                payload = encode(rows)
                data.produce(brokers, f"all-{form}", payload)
                data.produce(brokers, f"few-{form}", payload[: data.FEW])
        figures = report(measure(bench, names, options.runs, len(rows), console), len(rows))
    show(figures, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=2))
    return 1 if any(name in OURS for name in figures["failed"]) else 0  # type: ignore[attr-defined]  # a mapping


if __name__ == "__main__":
    sys.exit(main())
