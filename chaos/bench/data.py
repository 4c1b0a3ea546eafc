"""What all contenders move: the flights of 2013, as JSON and as Avro, and the table they go to."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import orjson
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from chaos.demo import flights

PARTITIONS = 4
WHOLE = "year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance".split()
TEXT = ("carrier", "tailnum", "origin", "dest", "time_hour")
COLUMNS = (*WHOLE, *TEXT)
FEW = 500

AVRO = {
    "type": "record",
    "name": "flight",
    "fields": [{"name": n, "type": ["null", "int"]} for n in WHOLE] + [{"name": n, "type": ["null", "string"]} for n in TEXT],
}


def create_table(name: str) -> str:
    """The destination, as the bare limit and the peers want it (Thalweg makes its own)."""
    columns = ", ".join(f"{n} {'integer' if n in WHOLE else 'text'}" for n in COLUMNS)
    return f"create table {name} ({columns})"


def rows() -> list[dict[str, Any]]:
    """All flights, only the columns of the table."""
    return [{n: row[n] for n in COLUMNS} for row in flights()]


def as_json(found: list[dict[str, Any]]) -> list[bytes]:
    return [orjson.dumps(row) for row in found]


def as_avro(found: list[dict[str, Any]]) -> list[bytes]:
    """Bare datums: the schema is in a file."""
    import fastavro

    schema = fastavro.parse_schema(json.loads(json.dumps(AVRO)))
    out = []
    for row in found:
        body = io.BytesIO()
        fastavro.schemaless_writer(body, schema, row)
        out.append(body.getvalue())
    return out


def produce(brokers: str, topic: str, payload: list[bytes]) -> None:
    """Into a new topic, spread over its partitions; checked by the watermarks."""
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = Producer(
        {
            "bootstrap.servers": brokers, "compression.type": "zstd", "linger.ms": 20, "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )  # fmt: skip
    for i, body in enumerate(payload):
        producer.produce(topic, body, partition=i % PARTITIONS)
        if i % 5_000 == 0:
            producer.poll(0)
    if producer.flush(120):
        raise SystemExit("producing failed")
    reader = Consumer({"bootstrap.servers": brokers, "group.id": "watermarks"})
    found = np.array([reader.get_watermark_offsets(TopicPartition(topic, p), timeout=10) for p in range(PARTITIONS)])
    reader.close()
    if found[:, 0].any() or found[:, 1].sum() != len(payload):
        raise SystemExit(f"the broker holds only {found.tolist()} of topic {topic}")
