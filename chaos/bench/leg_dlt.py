# mypy: ignore-errors
# It runs in the environment of the peer alone, which is not installed here.
"""dlt: a resource over confluent-kafka that yields Arrow tables, loaded as CSV by COPY, as its docs advise for speed.

Usage: leg_dlt.py BROKERS TOPIC RECORDS DSN TABLE COLUMNS
"""

import os
import sys
import tempfile

import dlt
import pyarrow as pa
import pyarrow.json
from confluent_kafka import Consumer

brokers, topic, records, dsn, table, columns = sys.argv[1:]
os.environ["RUNTIME__DLTHUB_TELEMETRY"] = "false"
os.environ["NORMALIZE__DATA_WRITER__DISABLE_COMPRESSION"] = "true"
whole = set("year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance".split())
schema = pa.schema([pa.field(n, pa.int32() if n in whole else pa.string()) for n in columns.split(",")])


@dlt.resource(name=table, write_disposition="append")
def flights():
    consumer = Consumer(
        {
            "bootstrap.servers": brokers, "group.id": f"dlt-{os.getpid()}", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "fetch.queue.backoff.ms": 5, "queued.min.messages": 1_000_000,
        }
    )  # fmt: skip
    consumer.subscribe([topic])
    left = int(records)
    while left:
        messages = consumer.consume(50_000, 0.1)
        if messages:
            body = b"\n".join([m.value() for m in messages])
            yield pa.json.read_json(
                pa.BufferReader(body),
                read_options=pa.json.ReadOptions(use_threads=False, block_size=len(body) + 1),
                parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
            left -= len(messages)
    consumer.close()


parts = dict(piece.split("=", 1) for piece in dsn.split())
url = f"postgresql://{parts['user']}:{parts['password']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
with tempfile.TemporaryDirectory() as folder:
    pipeline = dlt.pipeline("bench", pipelines_dir=folder, destination=dlt.destinations.postgres(url), dataset_name="public")
    pipeline.run(flights(), loader_file_format="csv")
