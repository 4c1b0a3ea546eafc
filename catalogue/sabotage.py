"""Planted bugs: each turns at least one row or invariant red. A check that has never failed is not yet a check.

    python -m catalogue.sabotage NAME -- run pipeline.yaml

plants one in a process of the installed engine. A plant replaces one function of the engine by a wrong one for as long
as its context lasts; when the engine no longer has what it replaces, planting fails loudly.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

Plant = Callable[[], AbstractContextManager[None]]


@contextmanager
def commit_before_durable() -> Iterator[None]:
    """The source's offset moves when records arrive, not when they are stored."""
    from thalweg.adapters.kafka import KafkaConsumer
    from thalweg.ports import Records

    poll = KafkaConsumer.poll

    async def early(self: KafkaConsumer, records_max: int, wait_s: float) -> Any:
        events = await poll(self, records_max, wait_s)
        arrived = {e.part: e.stop for e in events if isinstance(e, Records)}
        if arrived:
            await self.commit(arrived)
            await asyncio.sleep(1)
        return events

    with patch.object(KafkaConsumer, "poll", early):
        yield


@contextmanager
def commit_a_batch_early() -> Iterator[None]:
    """What is committed stops one record short of what is stored."""
    from thalweg.adapters.kafka import KafkaConsumer

    commit = KafkaConsumer.commit

    async def short(self: KafkaConsumer, at: Mapping[Any, Any]) -> Any:
        return await commit(self, {part: type(cursor)(max(cursor.next - 1, 0)) for part, cursor in at.items()})

    with patch.object(KafkaConsumer, "commit", short):
        yield


@contextmanager
def lose_the_last_row() -> Iterator[None]:
    """Each chunk of a table claims its whole interval and writes all rows but the last."""
    from dataclasses import replace

    from thalweg.core.batch import Chunk
    from thalweg.runtime.table import TableLander

    land = TableLander.land

    async def short(self: TableLander, chunk: Chunk, label: str = "") -> None:
        frames = list(chunk.frames)
        if frames and not label:
            last = frames[-1]
            n = last.rows.num_rows - 1
            frames[-1] = replace(
                last, rows=last.rows.slice(0, n), origin=last.origin.slice(0, n),
                child=None if last.child is None else last.child.slice(0, n),
            )  # fmt: skip
        await land(self, replace(chunk, frames=tuple(frames)), label)

    with patch.object(TableLander, "land", short):
        yield


@contextmanager
def insert_instead_of_copy() -> Iterator[None]:
    """Rows reach their table one INSERT at a time."""
    from psycopg import sql

    from thalweg.adapters.postgres import PostgresTransaction

    async def insert(self: Any, table: Any, rows: Any) -> None:
        columns = rows.schema.names
        statement = sql.SQL("insert into {} ({}) values ({})").format(
            sql.Identifier(table.name),
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join(sql.Placeholder() * len(columns)),
        )
        async with self._connection.cursor() as cursor:
            uuids = [{k: UUID(bytes=v) if k.endswith("record_id") else v for k, v in row.items()} for row in rows.to_pylist()]
            await cursor.executemany(statement, [tuple(row.values()) for row in uuids])

    with patch.object(PostgresTransaction, "copy", insert):
        yield


PLANTS: Final[Mapping[str, Plant]] = {
    "commit-before-durable": commit_before_durable,
    "commit-a-batch-early": commit_a_batch_early,
    "lose-the-last-row": lose_the_last_row,
    "insert-instead-of-copy": insert_instead_of_copy,
}


def main() -> None:
    """Plant the bug that is named, then be the engine's command line."""
    name, dashes, *words = sys.argv[1:]
    if dashes != "--" or name not in PLANTS:
        raise SystemExit(f"python -m catalogue.sabotage NAME -- …, where NAME is one of: {', '.join(PLANTS)}")
    from thalweg.__main__ import main as engine

    sys.argv = ["thalweg", *words]
    with PLANTS[name]():
        engine()


if __name__ == "__main__":
    main()
