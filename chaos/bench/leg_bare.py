"""The bare limit: librdkafka → pyarrow.json (or pyruhvro) → binary COPY, and nothing else. At least once, no more.

Usage: leg_bare.py json|avro BROKERS TOPIC RECORDS DSN TABLE
"""

from __future__ import annotations

import json
import os
import sys

import pgpq
import psycopg
import pyarrow as pa
import pyarrow.json
from confluent_kafka import Consumer

from chaos.bench.data import AVRO, COLUMNS, WHOLE

SCHEMA = pa.schema([pa.field(n, pa.int32() if n in WHOLE else pa.string()) for n in COLUMNS])


def parsed_json(values: list[bytes]) -> pa.RecordBatch:
    body = b"\n".join(values)
    table = pa.json.read_json(
        pa.BufferReader(body),
        read_options=pa.json.ReadOptions(use_threads=False, block_size=len(body) + 1),
        parse_options=pa.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
    )
    batch: pa.RecordBatch = table.combine_chunks().to_batches()[0]
    return batch


def parsed_avro(values: list[bytes]) -> pa.RecordBatch:
    import pyruhvro

    return pa.record_batch(pyruhvro.deserialize_array(values, json.dumps(AVRO)))


def main() -> None:
    form, brokers, topic, records, dsn, table = sys.argv[1:]
    parse = parsed_json if form == "json" else parsed_avro
    consumer = Consumer(
        {
            "bootstrap.servers": brokers, "group.id": f"bare-{os.getpid()}", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "fetch.queue.backoff.ms": 5, "queued.min.messages": 1_000_000,
        }
    )  # fmt: skip
    consumer.subscribe([topic])
    left = int(records)
    names = ", ".join(COLUMNS)
    with psycopg.connect(dsn) as connection:
        while left:
            messages = consumer.consume(50_000, 0.1)
            if not messages:
                continue
            batch = parse([m.value() or b"" for m in messages]).select(list(COLUMNS))
            encoder = pgpq.ArrowToPostgresBinaryEncoder(batch.schema)
            with (
                connection.cursor() as cursor,
                cursor.copy(f"copy {table} ({names}) from stdin (format binary)".encode()) as copy,
            ):
                copy.write(encoder.write_header() + encoder.write_batch(batch) + encoder.finish())
            connection.commit()
            consumer.commit(asynchronous=False)
            left -= len(messages)
    consumer.close()


if __name__ == "__main__":
    main()
