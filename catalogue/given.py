"""Builders that read like a sentence."""

from __future__ import annotations

from collections.abc import Iterable

from catalogue.world import Message

SOURCE = """\
pipeline: {{name: {name}}}
sources:
  - name: orders
    type: kafka
    cluster_id: c1
    topics: [{name}]
    offset_reset: earliest
    options: {{bootstrap.servers: "{{kafka}}", session.timeout.ms: 6000, heartbeat.interval.ms: 500}}
    codec: {{type: json, schema: {schema}}}
"""

ORDERS = """\
transforms:
  - name: priced
    sql: |
      SELECT id, upper(customer) AS customer, amount * 2 AS doubled
      FROM source
sinks:
  - {{name: raw, type: parquet, role: primary-raw, url: "{{lake}}/raw", options: {{lake_options}}, age_ms_max: 500}}
  - {{name: dest, type: postgres, input: priced, url: "{{postgres}}", table: {name}, on_failure: hold}}
  - {{name: dlq, type: postgres, role: dlq, url: "{{postgres}}", table: {name}_dlq}}
coverage: {{interval_ms: 200}}
flow: {{memory_limit_bytes: {memory}}}
observability: {{http: "127.0.0.1:{{http}}"}}
"""


def orders_source(name: str, schema: str = "{id: int64, customer: string, amount: float64}") -> str:
    """How a pipeline of orders begins: its name, which is its topic's too, and where the orders come from."""
    return SOURCE.format(name=name, schema=schema)


def orders_pipeline(name: str, memory: str = "768MiB") -> str:
    """Kafka JSON → raw on the lake and Postgres, with a SQL transform and a DLQ."""
    return orders_source(name) + ORDERS.format(name=name, memory=memory)


def orders(ids: Iterable[int], partitions: int) -> list[Message]:
    """JSON orders, spread over partitions by id."""
    return [Message(b'{"id":%d,"customer":"c-%d","amount":%d.5}' % (i, i % 97, i), i % partitions) for i in ids]
