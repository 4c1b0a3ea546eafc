"""The database port's conformance machine: one generated script, lived on two databases, and told apart by nothing.

Two clients of one database take turns. A step may end at once, or wait for a lock; then the other goes on, and what the
first hears comes when the other lets go. Told are: each step's result or its error (class, code, rows; no words), which
steps had to wait, in what order they ended, and what is stored in the end. `compared` runs a script on two databases and
raises `Broken` where the two stories differ.

A step of a client that waits is left out, and so is one that could wait while the other does: no deadlock is generated,
for its victim depends on who looked first. What is left out follows from the story, so it is the same on both sides.

It knows no technology: the adapter with a server behind it, or the in-memory twin, or one of them with a planted bug.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
from hypothesis import strategies as st

from thalweg.core.coverage import RangeSet
from thalweg.errors import DataRefused, Permanent, RowsRefused, ThalwegError
from thalweg.ports import Database, TableName, Transaction

PLAIN: Final = "plain"
UNIQUE: Final = "unique"
"""Two tables with columns k (int64) and v (text); the second is unique by k. Steps may add columns and indexes."""

LOOK_AGAIN_S: Final = 0.003
"""A pace, no bound: after so long without an answer it is asked who waits for a lock."""

Row: TypeAlias = tuple[int | None, str | None]


# --- steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """`client` is 0 or 1. A step that needs a transaction begins one."""

    client: int


@dataclass(frozen=True)
class Lock(Step):
    row: int


@dataclass(frozen=True)
class Put(Step):
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Copy(Step):
    table: str
    rows: tuple[Row, ...]
    extra: bool = False  # with a column that the table may lack


@dataclass(frozen=True)
class Merge(Step):
    table: str
    rows: tuple[Row, ...]
    update: bool


@dataclass(frozen=True)
class Savepoint(Step):
    pass


@dataclass(frozen=True)
class RollbackTo(Step):
    which: int  # counted from the newest


@dataclass(frozen=True)
class Release(Step):
    which: int


@dataclass(frozen=True)
class Commit(Step):
    pass


@dataclass(frozen=True)
class Abandon(Step):
    quietly: bool  # else by an error of its own


@dataclass(frozen=True)
class PutDocument(Step):
    partition: int
    lag: int  # 0: the current version, else as many behind


@dataclass(frozen=True)
class Look(Step):
    partition: int


@dataclass(frozen=True)
class Ensure(Step):
    """`shape`: which columns and indexes are asked for."""

    table: str
    shape: int


@dataclass(frozen=True)
class Kill(Step):
    """The server ends every session of both clients."""


_IN_TRANSACTION: Final = (Lock, Put, Copy, Merge, Savepoint, RollbackTo, Release)
_MAY_WAIT: Final = (Lock, Put, Copy, Merge, Ensure)

_COLUMNS: Final = [("k", pa.int64()), ("v", pa.string())]
_SHAPES: Final[Sequence[tuple[list[tuple[str, pa.DataType]], tuple[str, ...], tuple[str, ...]]]] = (
    (_COLUMNS, (), ()),
    ([*_COLUMNS, ("w", pa.float64())], (), ()),
    ([*_COLUMNS, ("x", pa.timestamp("ms", "UTC")), ("y", pa.binary())], (), ("k", "v")),
    ([("k", pa.int64()), ("v", pa.list_(pa.int64())), ("z", pa.bool_())], (), ()),  # v is text: refused, but z is added
    (_COLUMNS, ("v",), ()),
    (_COLUMNS, ("k",), ()),
    (_COLUMNS, (), ("nowhere",)),
    ([("ctid", pa.int64())], (), ()),
)

_places = st.integers(0, 1)
_tables = st.sampled_from([PLAIN, UNIQUE, UNIQUE, UNIQUE])
_keys = st.sampled_from([*range(7)] * 4 + [None])
_texts = st.sampled_from(["a", "b", "ü", ""] * 10 + [None, "n\x00l"])
_rows = st.lists(st.tuples(_keys, _texts), min_size=0, max_size=4).map(tuple)


def _often(*weighed: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Of several, so many times each (`one_of` takes twice the same for once)."""
    return st.sampled_from([s for n, s in weighed for _ in range(n)]).flatmap(lambda s: s)


def _part(c: int) -> st.SearchStrategy[list[Step]]:
    """What client `c` does: single steps, and the turns of a lander."""
    client = st.just(c)
    locks = st.builds(Lock, client, _places)
    puts = st.builds(
        lambda c, row, start, n: Put(c, row, start, start + n), client, _places, st.integers(-3, 30), st.integers(0, 9)
    )
    copies = st.builds(Copy, client, _tables, _rows)
    writes = st.one_of(copies, st.builds(Merge, client, _tables, _rows, st.booleans()))
    ends = _often((3, st.builds(Commit, client)), (1, st.builds(Abandon, client, st.booleans())))
    back = st.builds(RollbackTo, client, st.sampled_from([0, 0, 0, 1, 2]))
    save = st.builds(Savepoint, client)
    document = st.builds(PutDocument, client, st.just(0), st.sampled_from([0, 0, 0, 1, -1]))
    one = _often(
        (2, locks),
        (2, puts),
        (4, writes),
        (2, save),
        (1, back),
        (4, ends),
        (1, st.builds(Copy, client, _tables, _rows, st.booleans())),
        (1, st.builds(Release, client, st.integers(0, 2))),
        (1, st.builds(Put, client, _places, st.just(0), st.sampled_from([2**62, 2**63 - 1, 2**63]))),
        (1, st.builds(Look, client, _places)),
        (2, st.builds(Ensure, client, _tables, st.integers(0, len(_SHAPES) - 1))),
        (1, st.just(Kill(c))),
    ).map(lambda step: (step,))
    turns = _often(
        (5, one),
        (2, st.tuples(locks, copies, puts, ends)),
        (2, st.tuples(writes, save, writes, back, writes, ends)),
        (1, st.tuples(document, document)),
    )
    return st.lists(turns, min_size=2, max_size=5).map(lambda told: [step for turn in told for step in turn])


def _interleaved(one: list[Step], other: list[Step], order: int) -> list[Step]:
    out: list[Step] = []
    while one and other:
        from_one, order = order & 1, order >> 1
        taken, one, other = (one[0], one[1:], other) if from_one else (other[0], one, other[1:])
        out.append(taken)
    return out + one + other


SCRIPTS: Final = st.builds(_interleaved, _part(0), _part(1), st.integers(0, 2**24 - 1))


# --- what a script runs on ----------------------------------------------------------------------------------------


@dataclass
class Outside:
    """A database that no script has used under this `name`, by two clients that nobody has used; they are closed at the end."""

    name: str
    clients: tuple[Database, Database]
    waiting: Callable[[], Awaitable[int]]  # how many requests wait for a lock now
    kill: Callable[[], Awaitable[None]]  # end every session of the clients, and return when they are gone
    rows: Callable[[TableName, Sequence[str]], Awaitable[list[tuple[Any, ...]]]]  # committed, in any order
    columns: Callable[[TableName], Awaitable[list[str]]]  # those of a table

    def table(self, name: str) -> TableName:
        return TableName("", f"{self.name}_{name}")


class Broken(AssertionError):
    """Two databases told different stories."""


class _Left(Permanent):
    """A caller's own reason to leave a transaction."""


Told: TypeAlias = tuple[Any, ...]


@dataclass
class Story:
    told: list[Told] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def say(self, step: str, how: Told) -> None:
        self.told.append((step, *how))
        self.counts[step.split()[-1]] += 1
        self.counts[str(how[0])] += 1


class _Client:
    """One client: at most one open transaction, at most one step under way."""

    def __init__(self, number: int, database: Database, outside: Outside, story: Story) -> None:
        self.number, self.database, self.outside, self.story = number, database, outside, story
        self.transaction: Transaction | None = None
        self.stack = AsyncExitStack()
        self.savepoints: list[int] = []
        self.task: asyncio.Task[None] | None = None
        self.killed = False
        self.heard: list[tuple[str, Told]] = []

    @property
    def busy(self) -> bool:
        return self.task is not None

    def start(self, label: str, step: Step) -> None:
        self.task = asyncio.create_task(self._told(label, self._do(step)))

    async def _told(self, label: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            result = await work
        except RowsRefused as error:
            how: Told = ("RowsRefused", *((r.row, r.code) for r in error.rows))
        except DataRefused as error:
            how = ("DataRefused", error.code, error.row)
        except ThalwegError as error:
            how = (type(error).__name__,)
        else:
            how = ("done", result)
        self.heard.append((label, how))

    async def _begun(self) -> Transaction:
        if self.transaction is None:
            self.stack, self.savepoints = AsyncExitStack(), []
            self.transaction = await self.stack.enter_async_context(self.database.transaction())
        return self.transaction

    async def _left(self, error: ThalwegError | None = None) -> None:
        self.transaction = None
        if error is None:
            await self.stack.aclose()
        else:
            await self.stack.__aexit__(type(error), error, None)

    async def _do(self, step: Step) -> object:
        if isinstance(step, _IN_TRANSACTION):
            return await self._within(await self._begun(), step)
        outside, scope = self.outside, self.outside.name
        match step:
            case Commit():
                if self.transaction is None:
                    return None
                try:
                    await self.transaction.commit()
                except ThalwegError as error:
                    with _suppressed():
                        await self._left(error)
                    raise
                await self._left()
            case Abandon(_, quietly):
                if self.transaction is not None:
                    with _suppressed():
                        await self._left(None if quietly and not self.killed else _Left("enough"))
            case PutDocument(_, partition, lag):
                found = await self.database.get_document(scope, f"p{partition}")
                version = max(0, (0 if found is None else found[1]) - lag)
                return await self.database.put_document(scope, f"p{partition}", f"by {self.number}", version)
            case Look(_, partition):
                return [
                    await self.database.get_document(scope, f"p{partition}"),
                    sorted((await self.database.ranges(scope, f"p{partition}")).items()),
                    list(await self.database.partitions(scope)),
                ]
            case Ensure(_, table, shape):
                columns, unique, index = _SHAPES[shape]
                await self.database.ensure_table(outside.table(table), pa.schema(columns), unique=unique, index=index)
        return None

    async def _within(self, transaction: Transaction, step: Step) -> object:
        outside, scope = self.outside, self.outside.name
        match step:
            case Lock(_, row):
                return await transaction.lock_ranges(scope, f"p{row}", "s")
            case Put(_, row, start, stop):
                await transaction.put_ranges(scope, f"p{row}", "s", RangeSet([(start, stop)]))
            case Copy(_, table, rows, extra):
                batch = _batch(rows)
                if extra:
                    batch = batch.append_column("w", pa.array([0.5] * len(rows), pa.float64()))
                await transaction.copy(outside.table(table), batch)
            case Merge(_, table, rows, update):
                await transaction.merge(outside.table(table), _batch(rows), ("k",), update)
            case Savepoint():
                self.savepoints.append(await transaction.savepoint())
                return self.savepoints[-1]
            case RollbackTo(_, which):
                await transaction.rollback_to(self._chosen(which))
            case Release(_, which):
                await transaction.release(self._chosen(which))
        return None

    def _chosen(self, which: int) -> int:
        return self.savepoints[-1 - which] if which < len(self.savepoints) else 99


class _suppressed:
    """What is said on the way out of a transaction is no part of the port."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ThalwegError)


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    keys, texts = [k for k, _ in rows], [v for _, v in rows]
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), pa.array(texts, pa.string())], schema=pa.schema(_COLUMNS))


# --- a life -------------------------------------------------------------------------------------------------------


async def live(script: Sequence[Step], outside: Outside) -> Story:
    """Run a script to its end. What is open then is abandoned; what is stored then is the end of the story."""
    story = Story()
    clients = [_Client(i, database, outside, story) for i, database in enumerate(outside.clients)]
    for client in clients:
        await client.database.ensure_coverage()
    for table, unique in ((PLAIN, ()), (UNIQUE, ("k",))):
        await clients[0].database.ensure_table(outside.table(table), pa.schema(_COLUMNS), unique=unique)

    async def settled() -> None:
        """Until every step under way has ended or waits for a lock."""
        while tasks := [c.task for c in clients if c.task is not None]:
            done, _ = await asyncio.wait(tasks, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            for client in clients:
                if client.task in done:
                    client.task.result()
                    client.task = None
            if not done and await outside.waiting() >= len(tasks) and not any(task.done() for task in tasks):
                return

    async def taken(number: int, step: Step) -> None:
        client, other = clients[step.client], clients[1 - step.client]
        label = f"{number} {type(step).__name__}"
        if client.busy or (other.busy and isinstance(step, _MAY_WAIT)):
            story.counts["left out"] += 1
            return
        if isinstance(step, Kill):
            await outside.kill()
            client.killed = other.killed = True
            story.say(label, ("killed",))
        elif isinstance(step, Ensure) and client.transaction is not None:
            story.counts["left out"] += 1  # it would wait for itself
            return
        else:
            client.start(label, step)
        await settled()
        for of in (client, other):  # who lets go comes before whom it lets go: their answers travel side by side
            for told in of.heard:
                story.say(*told)
            of.heard.clear()
        if client.busy:
            story.say(label, ("waits",))

    for number, step in enumerate(script):
        await taken(number, step)
    last = len(script)
    for client in sorted(clients, key=lambda c: c.busy):  # who waits comes after whom it waits for
        await taken(last, Abandon(client.number, quietly=False))
    for client in clients:
        await taken(last, Look(client.number, 0))
        await taken(last, Look(client.number, 1))
    for name in (PLAIN, UNIQUE):
        columns = sorted(await outside.columns(outside.table(name)))
        rows = await outside.rows(outside.table(name), columns)
        story.told.append((name, columns, sorted(rows, key=repr)))
    for client in clients:
        await client.database.close()
    return story


async def compared(script: Sequence[Step], one: Outside, other: Outside) -> Story:
    """The story of both; raises `Broken` at the first difference."""
    stories = [await live(script, outside) for outside in (one, other)]
    told, heard = stories[0].told, stories[1].told
    if told != heard:
        longest = max(len(told), len(heard))
        padded = [[*t, *[None] * (longest - len(t))] for t in (told, heard)]
        at = next(i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b)
        before = "\n".join(f"    {line}" for line in told[:at])
        raise Broken(f"after\n{before}\n  one:   {padded[0][at]}\n  other: {padded[1][at]}\nof {list(script)}")
    return stories[0]
