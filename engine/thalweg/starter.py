"""The pipeline that `thalweg new` writes: files in, Parquet out, nothing else needed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from thalweg.errors import Permanent

PIPELINE: Final = """\
# A starter pipeline: orders from a file, checked, kept raw, written as Parquet.
#   thalweg check pipeline.yaml      every fault at once
#   thalweg run pipeline.yaml        ends by itself; run it again and nothing is written twice
#   thalweg coverage pipeline.yaml   which ranges reached which sink
pipeline:
  name: starter

sources:
  - name: orders
    type: files
    cluster_id: starter          # hashed into every record id: choose it once
    path: data/*.ndjson
    codec:
      type: json
      schema:
        id: int64
        customer: string
        amount: float64
        placed_at: "timestamp[ms, tz=UTC]"

transforms:
  - name: priced
    sql: |
      SELECT id, customer, amount, round(amount * 0.2, 2) AS tax, placed_at
      FROM source

quality:
  rules:
    - {id: has-customer, input: priced, column: customer, not_null: true, action: dlq}
    - {id: sane-amount, input: priced, column: amount, min: 0, max: 100000, action: dlq}

sinks:
  - {name: raw, type: parquet, role: primary-raw, url: out/raw}
  - {name: orders, type: parquet, input: priced, on_failure: hold, url: out/orders}
  - {name: rejects, type: parquet, role: dlq, url: out/rejects}

observability:
  http: false
"""

ORDER: Final = '{{"id":{id},"customer":{customer},"amount":{amount},"placed_at":"2026-01-{day:02}T{hour:02}:00:00Z"}}\n'


def write(folder: Path) -> None:
    """Write it into `folder`. Raises `Permanent` where something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Permanent(f"{folder} is not empty", remedy="Name an empty or missing folder")
    (folder / "data").mkdir(parents=True)
    (folder / "pipeline.yaml").write_text(PIPELINE, encoding="utf-8")
    lines = []
    for i in range(1_000):
        customer = "null" if i % 100 == 7 else f'"customer-{i % 37}"'
        amount = -5 if i % 250 == 3 else round(1 + (i * 7919 % 10_000) / 100, 2)
        lines.append(ORDER.format(id=i, customer=customer, amount=amount, day=1 + i % 28, hour=i % 24))
    (folder / "data" / "orders.ndjson").write_text("".join(lines), encoding="utf-8")
