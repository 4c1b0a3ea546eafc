# mypy: ignore-errors
# It runs in the environment of the peer alone, which is not installed here.
"""Bytewax: its Kafka source in large batches, orjson, and a sink of ours with COPY (it has none for Postgres).

Usage: leg_bytewax.py BROKERS TOPIC RECORDS DSN TABLE COLUMNS
"""

import sys

import bytewax.operators as op
import orjson
import psycopg
from bytewax.connectors.kafka import KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import run_main

brokers, topic, records, dsn, table, columns = sys.argv[1:]
names = columns.split(",")


class Partition(StatelessSinkPartition):
    def __init__(self):
        self.connection = psycopg.connect(dsn)

    def write_batch(self, items):
        with self.connection.cursor() as cursor, cursor.copy(f"copy {table} ({columns}) from stdin") as copy:
            for row in items:
                copy.write_row([row[n] for n in names])
        self.connection.commit()

    def close(self):
        self.connection.close()


class Sink(DynamicSink):
    def build(self, step_id, worker_index, worker_count):
        return Partition()


flow = Dataflow("bench")
source = KafkaSource(
    [brokers], [topic], tail=False, batch_size=10_000,
    add_config={"fetch.queue.backoff.ms": "5", "queued.min.messages": "1000000"},
)  # fmt: skip
stream = op.input("in", flow, source)
rows = op.flat_map_batch("parse", stream, lambda batch: [orjson.loads(m.value) for m in batch])
op.output("out", rows, Sink())
run_main(flow)
