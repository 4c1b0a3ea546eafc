# mypy: ignore-errors
# It runs in the environment of the peer alone, which is not installed here.
"""Quix Streams: its own Postgres sink, JSON by orjson, a long commit interval so that batches are large.

Usage: leg_quix.py BROKERS TOPIC RECORDS DSN TABLE COLUMNS
"""

import os
import sys

import orjson
from quixstreams import Application
from quixstreams.models import BytesDeserializer
from quixstreams.sinks.community.postgresql import PostgreSQLSink

brokers, topic, records, dsn, table, columns = sys.argv[1:]
parts = dict(piece.split("=", 1) for piece in dsn.split())
app = Application(
    broker_address=brokers, consumer_group=f"quix-{os.getpid()}", auto_offset_reset="earliest", commit_every=20_000,
    commit_interval=5.0, loglevel="ERROR", auto_create_topics=False,
    consumer_extra_config={"fetch.queue.backoff.ms": 5, "queued.min.messages": 1000000},
)  # fmt: skip
sink = PostgreSQLSink(
    host=parts["host"], port=int(parts["port"]), dbname=parts["dbname"], user=parts["user"], password=parts["password"],
    table_name=table, schema_auto_update=True,
)  # fmt: skip
frame = app.dataframe(app.topic(topic, value_deserializer=BytesDeserializer()))
frame = frame.apply(orjson.loads)
frame.sink(sink)
app.run(count=int(records), timeout=60)
