# mypy: ignore-errors
# It runs in the environment of the peer alone, which is not installed here.
"""Pathway: its Kafka source with a schema and its Postgres sink in large batches. It has no end: the bench stops it.

Usage: leg_pathway.py BROKERS TOPIC RECORDS DSN TABLE COLUMNS
"""

import os
import sys

import pathway as pw

brokers, topic, records, dsn, table, columns = sys.argv[1:]
whole = set("year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance".split())
schema = pw.schema_builder(
    {n: pw.column_definition(dtype=(int if n in whole else str) | None) for n in columns.split(",")}, name="Flight"
)
rows = pw.io.kafka.read(
    {
        "bootstrap.servers": brokers, "group.id": f"pathway-{os.getpid()}", "auto.offset.reset": "earliest",
        "session.timeout.ms": "6000", "fetch.queue.backoff.ms": "5", "queued.min.messages": "1000000",
    },
    topic=topic, schema=schema, format="json", autocommit_duration_ms=500,
)  # fmt: skip
settings = dict(piece.split("=", 1) for piece in dsn.split())
pw.io.postgres.write(rows, settings, table, max_batch_size=20_000)
pw.run(monitoring_level=pw.MonitoringLevel.NONE)
