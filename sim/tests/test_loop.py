"""The simulated loop: the same coroutines as on stock asyncio with the same outcome, and what it has of its own."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.loop import POWER, STEPS_PER_INSTANT_MAX, Livelock, Power, SimLoop, Stalled

Seen = list[Any]
Program = Callable[[], Coroutine[Any, Any, Seen]]

MS: Final = 0.001
NEVER: Final = 3600.0
"""Seconds that no program waits through: something else comes first."""

PROGRAMS: Final[list[Program]] = []


def same(program: Program) -> Program:
    """What it returns must not depend on the loop."""
    PROGRAMS.append(program)
    return program


def on_stock(program: Program) -> Seen:
    return asyncio.run(program())


def new(seed: int | None) -> SimLoop:
    return SimLoop(None if seed is None else Random(seed))  # type: ignore[abstract]  # the rest are set below the class


def on_sim(program: Program, seed: int | None) -> Seen:
    loop = new(seed)
    try:
        return loop.run_until_complete(program())  # type: ignore[no-any-return]
    finally:
        loop.close()


async def told(seen: Seen, name: object, delay: float = 0.0) -> object:
    """A step, a wait, another step; a cancellation is seen and goes on its way."""
    seen.append(("begin", name))
    try:
        await asyncio.sleep(delay)
    except asyncio.CancelledError:
        seen.append(("cancelled", name))
        raise
    finally:
        seen.append(("end", name))
    return name


async def failing(what: str = "bad", delay: float = 0.0) -> None:
    await asyncio.sleep(delay)
    raise ValueError(what)


def shown(results: Any) -> Seen:
    """Results and exceptions as what can be compared."""
    return [repr(r) if isinstance(r, BaseException) else r for r in results]


# --- tasks ------------------------------------------------------------------------------------------------------------


@same
async def tasks_and_results() -> Seen:
    seen: Seen = []
    tasks = [asyncio.create_task(told(seen, i)) for i in range(3)]
    seen.append("made")
    seen += [await t for t in tasks]
    return [*seen, [t.done() for t in tasks], [t.result() for t in tasks], tasks[0].cancel()]


@same
async def names_and_current_task() -> Seen:
    async def who() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    one = asyncio.create_task(who(), name="one")
    two = asyncio.create_task(who())
    two.set_name("two")
    return [await one, await two, asyncio.current_task() in asyncio.all_tasks(), len(asyncio.all_tasks())]


@same
async def exceptions() -> Seen:
    seen: Seen = []
    task = asyncio.create_task(failing())
    try:
        await task
    except ValueError as error:
        seen.append(repr(error))
    seen += [repr(task.exception()), task.cancelled()]
    pending = asyncio.create_task(asyncio.sleep(NEVER))
    for ask in (pending.result, pending.exception):
        try:
            ask()
        except asyncio.InvalidStateError as error:
            seen.append(repr(error))
    pending.cancel()
    return [*seen, shown(await asyncio.gather(pending, return_exceptions=True))]


@same
async def exception_chains() -> Seen:
    async def outer() -> None:
        try:
            await asyncio.create_task(failing("inner"))
        except ValueError as error:
            raise KeyError("outer") from error

    try:
        await asyncio.create_task(outer())
    except KeyError as error:
        return [repr(error), repr(error.__cause__)]
    return []


@same
async def sleep_zero_interleaves() -> Seen:
    seen: Seen = []

    async def stepping(name: str, n: int) -> None:
        for i in range(n):
            seen.append((name, i))
            await asyncio.sleep(0)

    await asyncio.gather(stepping("a", 3), stepping("b", 2), stepping("c", 4))
    return seen


@same
async def sleeps_by_length() -> Seen:
    seen: Seen = []
    await asyncio.gather(*(told(seen, ms, ms * MS) for ms in (9, 3, 6, 1)))
    return [*seen, await asyncio.sleep(MS, "result"), await asyncio.sleep(-1, "past")]


@same
async def awaiting_oneself_and_twice() -> Seen:
    seen: Seen = []

    async def loops() -> None:
        task = asyncio.current_task()
        assert task is not None
        await task

    for bad in (loops(), twice()):
        try:
            await asyncio.create_task(bad)
        except RuntimeError as error:
            seen.append(str(error).split(":")[0].split("<")[0])
    return seen


async def twice() -> None:
    coro = asyncio.sleep(0)
    await coro
    await coro


# --- cancellation -----------------------------------------------------------------------------------------------------


@same
async def cancel_before_start() -> Seen:
    seen: Seen = []
    task = asyncio.create_task(told(seen, "never begun"))
    seen.append(task.cancel("early"))
    try:
        await task
    except asyncio.CancelledError as error:
        seen.append(error.args)
    return [*seen, task.cancelled(), task.cancel()]


@same
async def cancel_during_sleep() -> Seen:
    seen: Seen = []
    task = asyncio.create_task(told(seen, "t", NEVER))
    await asyncio.sleep(MS)
    seen += [task.cancel("why"), task.cancelling(), task.done()]
    try:
        await task
    except asyncio.CancelledError as error:
        seen.append(error.args)
    return [*seen, task.cancelled(), task.done()]


@same
async def cancel_in_finally() -> Seen:
    seen: Seen = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(NEVER)
        finally:
            seen.append("finally")
            try:
                await asyncio.sleep(NEVER)
            except asyncio.CancelledError:
                seen.append("cancelled in finally")
            await asyncio.sleep(0)
            seen.append("left")

    task = asyncio.create_task(stubborn())
    for _ in range(2):
        await asyncio.sleep(MS)
        task.cancel()
    return [*seen, shown(await asyncio.gather(task, return_exceptions=True)), seen, task.cancelled()]


@same
async def cancel_suppressed() -> Seen:
    async def deaf() -> str:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(NEVER)
        return "heard nothing"

    task = asyncio.create_task(deaf())
    counts = []
    for _ in range(3):
        await asyncio.sleep(MS)
        task.cancel()
        counts.append(task.cancelling())
    return [await task, counts, task.cancelled()]


@same
async def uncancelled() -> Seen:
    seen: Seen = []

    async def forgiving() -> str:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            seen.append((task.cancelling(), task.uncancel(), task.cancelling()))
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(forgiving())
    await asyncio.sleep(0)
    task.cancel()
    return [await task, seen]


@same
async def cancel_reaches_what_is_awaited() -> Seen:
    seen: Seen = []

    async def outer() -> None:
        try:
            await asyncio.create_task(told(seen, "inner", NEVER))
        except asyncio.CancelledError:
            seen.append("outer cancelled")
            raise

    task = asyncio.create_task(outer())
    await asyncio.sleep(MS)
    task.cancel()
    return [shown(await asyncio.gather(task, return_exceptions=True)), seen]


@same
async def cancel_replaced_by_an_error() -> Seen:
    async def translating() -> None:
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            raise ValueError("instead") from None

    task = asyncio.create_task(translating())
    await asyncio.sleep(0)
    task.cancel()
    return [shown(await asyncio.gather(task, return_exceptions=True)), task.cancelled()]


@same
async def cancel_as_it_becomes_ready() -> Seen:
    seen: Seen = []
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def waiting() -> str:
        try:
            return await future
        except asyncio.CancelledError:
            seen.append("cancelled though the result was there")
            raise

    task = asyncio.create_task(waiting())
    await asyncio.sleep(0)
    future.set_result("there")
    seen.append(task.cancel())
    return [*shown(await asyncio.gather(task, return_exceptions=True)), seen, future.result()]


@same
async def cancelling_oneself() -> Seen:
    async def suicidal() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel("me")
        seen.append("still running")
        await asyncio.sleep(0)
        seen.append("not reached")

    seen: Seen = []
    return [shown(await asyncio.gather(asyncio.create_task(suicidal()), return_exceptions=True)), seen]


# --- time limits ------------------------------------------------------------------------------------------------------


@same
async def timeouts() -> Seen:
    seen: Seen = []
    try:
        async with asyncio.timeout(2 * MS) as limit:
            await told(seen, "slow", NEVER)
    except TimeoutError:
        seen.append(("timeout", limit.expired()))
    async with asyncio.timeout(NEVER) as limit:
        await told(seen, "fast", MS)
    seen.append(limit.expired())
    async with asyncio.timeout(None) as limit:
        seen.append((limit.when(), await told(seen, "unlimited")))
    try:
        async with asyncio.timeout(0):
            await asyncio.sleep(NEVER)
    except TimeoutError:
        seen.append("at once")
    try:
        async with asyncio.timeout(NEVER):
            await asyncio.sleep(0)
            raise KeyError("its own error")
    except KeyError as error:
        seen.append(repr(error))
    return seen


@same
async def timeouts_nested() -> Seen:
    seen: Seen = []
    for outer, inner in ((1, 2000), (2000, 1)):
        try:
            async with asyncio.timeout(outer * MS) as o:
                try:
                    async with asyncio.timeout(inner * MS) as i:
                        await asyncio.sleep(NEVER)
                except TimeoutError:
                    seen.append("inner")
                await asyncio.sleep(0)
                seen.append("after inner")
        except TimeoutError:
            seen.append("outer")
        seen.append((o.expired(), i.expired()))
    return seen


@same
async def timeouts_rescheduled() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(MS) as limit:
        limit.reschedule(loop.time() + NEVER)
        await asyncio.sleep(3 * MS)
        seen.append("later")
    try:
        async with asyncio.timeout(NEVER) as limit:
            limit.reschedule(loop.time() + MS)
            await asyncio.sleep(NEVER)
    except TimeoutError:
        seen.append(("sooner", limit.expired()))
    async with asyncio.timeout(MS) as limit:
        limit.reschedule(None)
        await asyncio.sleep(3 * MS)
    seen.append((limit.when(), limit.expired()))
    try:
        limit.reschedule(loop.time())
    except RuntimeError as error:
        seen.append(str(error))
    return seen


@same
async def timeout_at_a_time() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    for when in (loop.time() - 1, loop.time() + 2 * MS):
        try:
            async with asyncio.timeout_at(when) as limit:
                seen.append(limit.when() == when)
                await asyncio.sleep(NEVER)
        except TimeoutError:
            seen.append(limit.expired())
    return seen


@same
async def timeout_and_cancel_from_outside() -> Seen:
    seen: Seen = []

    async def limited() -> None:
        async with asyncio.timeout(NEVER):
            await told(seen, "limited", NEVER)

    task = asyncio.create_task(limited())
    await asyncio.sleep(MS)
    task.cancel()
    return [shown(await asyncio.gather(task, return_exceptions=True)), seen, task.cancelling()]


@same
async def wait_for() -> Seen:
    seen: Seen = [await asyncio.wait_for(told([], "fast"), NEVER), await asyncio.wait_for(told([], "unlimited"), None)]
    for limit in (0, MS):
        try:
            await asyncio.wait_for(told(seen, limit, NEVER), limit)
        except TimeoutError as error:
            seen.append(repr(error))
    try:
        await asyncio.wait_for(failing(), NEVER)
    except ValueError as error:
        seen.append(repr(error))
    done = asyncio.get_running_loop().create_future()
    done.set_result("done before")
    return [*seen, await asyncio.wait_for(done, 0)]


@same
async def wait_for_what_resists() -> Seen:
    seen: Seen = []

    async def resists() -> str:
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            await asyncio.sleep(MS)
            seen.append("cleaned up")
            raise
        return ""

    try:
        await asyncio.wait_for(resists(), MS)
    except TimeoutError:
        seen.append("timeout")
    outer = asyncio.create_task(asyncio.wait_for(resists(), NEVER))
    await asyncio.sleep(MS)
    outer.cancel()
    return [*shown(await asyncio.gather(outer, return_exceptions=True)), *seen]


# --- groups -----------------------------------------------------------------------------------------------------------


@same
async def group_success() -> Seen:
    seen: Seen = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(told(seen, i, i * 2 * MS), name=f"n{i}") for i in (2, 1, 3)]
        seen.append("body")
    return [*seen, [(t.get_name(), t.result()) for t in tasks]]


@same
async def group_one_fails() -> Seen:
    seen: Seen = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(told(seen, "sibling", NEVER))
            group.create_task(failing("one", MS))
            await told(seen, "body", NEVER)
    except* ValueError as errors:
        seen += shown(errors.exceptions)
    return seen


@same
async def group_several_fail() -> Seen:
    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(NEVER)
        finally:
            raise KeyError("on the way out")

    seen: Seen = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails_when_cancelled())
            await asyncio.sleep(0)
            raise ValueError("body")
    except* (ValueError, KeyError) as errors:
        seen += sorted(shown(errors.exceptions))
    return seen


@same
async def group_nested() -> Seen:
    seen: Seen = []
    try:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(told(seen, "outer", NEVER))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(told(seen, "inner", NEVER))
                inner.create_task(failing("deep", MS))
    except* ValueError as errors:
        seen.append(shown([errors.exceptions[0]]))
    return seen


@same
async def group_cancelled_from_outside() -> Seen:
    seen: Seen = []

    async def whole() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(3):
                group.create_task(told(seen, i, NEVER))

    task = asyncio.create_task(whole())
    await asyncio.sleep(MS)
    task.cancel()
    return [*shown(await asyncio.gather(task, return_exceptions=True)), *seen[:3], *sorted(seen[3:], key=str)]


@same
async def group_grows_from_inside() -> Seen:
    seen: Seen = []

    async def grows(group: asyncio.TaskGroup, n: int) -> None:
        seen.append(n)
        if n:
            await asyncio.sleep(0)
            group.create_task(grows(group, n - 1))

    async with asyncio.TaskGroup() as group:
        group.create_task(grows(group, 3))
    late = asyncio.sleep(0)
    try:
        group.create_task(late)
    except RuntimeError as error:
        seen.append(str(error).split(">")[-1])
    late.close()
    return seen


# --- queues -----------------------------------------------------------------------------------------------------------


async def through(queue: asyncio.Queue[Any], items: list[Any]) -> Seen:
    seen: Seen = []

    async def puts() -> None:
        for item in items:
            await queue.put(item)
            seen.append(("put", item, queue.qsize()))

    async def gets() -> None:
        for _ in items:
            item = await queue.get()
            seen.append(("got", item, queue.qsize()))
            queue.task_done()

    await asyncio.gather(puts(), gets())
    await queue.join()
    return seen


@same
async def queue_unbounded() -> Seen:
    return await through(asyncio.Queue(), [3, 1, 2])


@same
async def queue_bounded() -> Seen:
    return await through(asyncio.Queue(2), [5, 3, 1, 4, 2])


@same
async def queue_by_priority() -> Seen:
    return await through(asyncio.PriorityQueue(3), [(5, "e"), (1, "a"), (4, "d"), (2, "b"), (3, "c")])


@same
async def queue_last_in_first_out() -> Seen:
    return await through(asyncio.LifoQueue(3), [1, 2, 3, 4, 5])


@same
async def queue_waiters_in_order_and_cancelled() -> Seen:
    seen: Seen = []
    queue: asyncio.Queue[int] = asyncio.Queue(1)

    async def gets(name: str) -> None:
        seen.append((name, await queue.get()))

    tasks = [asyncio.create_task(gets(n)) for n in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    for i in range(2):
        await queue.put(i)
    try:
        queue.put_nowait(7)
        queue.put_nowait(8)
    except asyncio.QueueFull as error:
        seen.append(repr(error))
    results = shown(await asyncio.gather(*tasks, return_exceptions=True))
    seen.append((queue.full(), queue.empty()))
    while not queue.empty():
        seen.append(queue.get_nowait())
    try:
        queue.get_nowait()
    except asyncio.QueueEmpty as error:
        seen.append(repr(error))
    return [*seen, results]


@same
async def queue_join_waits_for_the_work() -> Seen:
    seen: Seen = []
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def works() -> None:
        while True:
            item = await queue.get()
            await asyncio.sleep(0)
            seen.append(item)
            queue.task_done()

    for i in range(4):
        queue.put_nowait(i)
    workers = [asyncio.create_task(works()) for _ in range(2)]
    await queue.join()
    seen.append("joined")
    for worker in workers:
        worker.cancel()
    return [*seen, shown(await asyncio.gather(*workers, return_exceptions=True))]


# --- locks and the like -----------------------------------------------------------------------------------------------


@same
async def lock_is_fair() -> Seen:
    seen: Seen = []
    lock = asyncio.Lock()

    async def holds(name: str, n: int) -> None:
        for i in range(n):
            async with lock:
                seen.append((name, i))
                await asyncio.sleep(0)

    await asyncio.gather(holds("a", 3), holds("b", 2), holds("c", 2))
    try:
        lock.release()
    except RuntimeError as error:
        seen.append(str(error))
    return [*seen, lock.locked()]


@same
async def lock_waiter_cancelled() -> Seen:
    seen: Seen = []
    lock = asyncio.Lock()

    async def holds(name: str) -> None:
        async with lock:
            await told(seen, name)

    await lock.acquire()
    tasks = [asyncio.create_task(holds(n)) for n in "abc"]
    await asyncio.sleep(0)
    lock.release()
    tasks[0].cancel()  # just woken: the next one must be
    return [*shown(await asyncio.gather(*tasks, return_exceptions=True)), *seen, lock.locked()]


@same
async def semaphores() -> Seen:
    seen: Seen = []
    most = asyncio.Semaphore(2)

    async def within(name: str) -> None:
        async with most:
            await told(seen, name)

    await asyncio.gather(*map(within, "abcde"))
    bounded = asyncio.BoundedSemaphore(1)
    await bounded.acquire()
    seen.append(bounded.locked())
    bounded.release()
    try:
        bounded.release()
    except ValueError as error:
        seen.append(str(error))
    return seen


@same
async def semaphore_waiter_cancelled() -> Seen:
    seen: Seen = []
    most = asyncio.Semaphore(1)

    async def within(name: str) -> None:
        async with most:
            seen.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(within(n)) for n in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    return [*shown(await asyncio.gather(*tasks, return_exceptions=True)), *seen, most.locked()]


@same
async def events() -> Seen:
    seen: Seen = []
    event = asyncio.Event()

    async def waits(name: str) -> None:
        seen.append((name, await event.wait(), event.is_set()))

    tasks = [asyncio.create_task(waits(n)) for n in "abc"]
    await asyncio.sleep(0)
    event.set()
    event.clear()  # who waited is woken all the same
    await asyncio.gather(*tasks)
    event.set()
    await waits("set already")
    return seen


@same
async def conditions() -> Seen:
    seen: Seen = []
    condition = asyncio.Condition()
    stock = 0

    async def takes(name: str, n: int) -> None:
        nonlocal stock
        async with condition:
            await condition.wait_for(lambda: stock >= n)
            stock -= n
            seen.append((name, stock))

    tasks = [asyncio.create_task(takes(*t)) for t in (("a", 2), ("b", 1), ("c", 1), ("d", 9))]
    for n in (1, 1, 2):
        await asyncio.sleep(0)
        async with condition:
            stock += n
            condition.notify(1 if n == 1 else 3)
    await asyncio.sleep(MS)
    async with condition:
        condition.notify_all()
    await asyncio.sleep(MS)
    seen.append([t.done() for t in tasks])
    for task in tasks:
        task.cancel()
    results = shown(await asyncio.gather(*tasks, return_exceptions=True))
    try:
        condition.notify()
    except RuntimeError as error:
        seen.append(str(error))
    return [*seen, results, condition.locked()]


@same
async def barriers() -> Seen:
    seen: Seen = []
    barrier = asyncio.Barrier(3)

    async def arrives(name: str) -> None:
        for turn in range(2):
            try:
                seen.append((name, turn, await barrier.wait()))
            except asyncio.BrokenBarrierError:
                seen.append((name, turn, "broken"))

    await asyncio.gather(*map(arrives, "abc"))
    alone = asyncio.create_task(arrives("alone"))
    await asyncio.sleep(MS)
    seen.append(barrier.n_waiting)
    await barrier.abort()
    await alone
    return [*seen, barrier.broken]


# --- many at once -----------------------------------------------------------------------------------------------------


async def waited(when: str, timeout: float | None, *delays: float, fails: float | None = None) -> Seen:
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(asyncio.sleep(d, d)) for d in delays]
    if fails is not None:
        tasks.append(asyncio.create_task(failing(delay=fails)))
    done, pending = await asyncio.wait(tasks, timeout=timeout, return_when=when)
    seen = [[t in done for t in tasks], [t in pending for t in tasks]]
    for task in pending:
        task.cancel()
    return [*seen, shown(await asyncio.gather(*tasks, return_exceptions=True))]


@same
async def wait_first_completed() -> Seen:
    return await waited(asyncio.FIRST_COMPLETED, None, NEVER, MS, NEVER)


@same
async def wait_first_exception() -> Seen:
    return [
        await waited(asyncio.FIRST_EXCEPTION, None, NEVER, 0, fails=3 * MS),
        await waited(asyncio.FIRST_EXCEPTION, None, MS, 0),
    ]


@same
async def wait_all_completed() -> Seen:
    return await waited(asyncio.ALL_COMPLETED, NEVER, 3 * MS, 0, MS, fails=MS)


@same
async def wait_timeout() -> Seen:
    return [
        await waited(asyncio.ALL_COMPLETED, 5 * MS, NEVER, 0, NEVER),
        await waited(asyncio.FIRST_COMPLETED, 0, NEVER, NEVER),
    ]


@same
async def wait_cancelled_leaves_them_running() -> Seen:
    inner = asyncio.create_task(asyncio.sleep(MS, "went on"))
    waiting = asyncio.create_task(asyncio.wait([inner]))
    await asyncio.sleep(0)
    waiting.cancel()
    return [*shown(await asyncio.gather(waiting, return_exceptions=True)), await inner]


@same
async def gather() -> Seen:
    seen: Seen = []
    results = await asyncio.gather(told(seen, "a", 2 * MS), failing(), told(seen, "b"), return_exceptions=True)
    seen += shown(results)
    others = asyncio.create_task(told(seen, "goes on", MS))
    try:
        await asyncio.gather(others, failing("first"), failing("second", 0))
    except ValueError as error:
        seen.append(repr(error))
    seen += [await others, await asyncio.gather()]
    coro = asyncio.sleep(0, "once")
    return [*seen, await asyncio.gather(coro, coro)]


@same
async def gather_nested_cancel() -> Seen:
    seen: Seen = []
    inner = asyncio.gather(told(seen, "a", NEVER), told(seen, "b", NEVER))
    outer = asyncio.gather(inner, told(seen, "c", NEVER))
    await asyncio.sleep(MS)
    seen.append(outer.cancel())
    for future in (outer, inner):
        try:
            await future
        except asyncio.CancelledError:
            seen.append(("cancelled", future.cancelled()))
    kept = asyncio.gather(told(seen, "d", NEVER), return_exceptions=True)
    await asyncio.sleep(0)
    kept.cancel()
    try:
        await kept
    except asyncio.CancelledError:
        seen.append("kept cancelled")
    return seen


@same
async def shield() -> Seen:
    seen: Seen = []
    inner = asyncio.create_task(told(seen, "shielded", 3 * MS))

    async def outer() -> None:
        await asyncio.shield(inner)

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    seen += shown(await asyncio.gather(task, return_exceptions=True))
    seen.append(inner.done())
    seen.append(await inner)
    dying = asyncio.create_task(told(seen, "dying", NEVER))
    behind = asyncio.shield(dying)
    await asyncio.sleep(0)
    dying.cancel()
    return [*shown(await asyncio.gather(behind, return_exceptions=True)), *seen]


@same
async def as_completed() -> Seen:
    seen: Seen = []
    for coming in asyncio.as_completed([asyncio.sleep(ms * MS, ms) for ms in (8, 1, 4)]):
        seen.append(await coming)
    tasks = [asyncio.create_task(asyncio.sleep(d, d)) for d in (0, NEVER)]
    for late in asyncio.as_completed(tasks, timeout=2 * MS):
        try:
            seen.append(await late)
        except TimeoutError:
            seen.append("timeout")
    tasks[1].cancel()
    return [*seen, shown(await asyncio.gather(*tasks, return_exceptions=True))]


# --- generators and contexts ------------------------------------------------------------------------------------------


async def counting(seen: Seen, n: int = 9) -> AsyncIterator[int]:
    try:
        for i in range(n):
            await asyncio.sleep(0)
            yield i
    except GeneratorExit:
        seen.append("exit")
        raise
    finally:
        await asyncio.sleep(0)
        seen.append("closed")


@same
async def generator_to_the_end() -> Seen:
    seen: Seen = []
    async for i in counting(seen, 3):
        seen.append(i)
    return [*seen, [i async for i in counting([], 4) if i % 2]]


@same
async def generator_aclose_and_athrow() -> Seen:
    seen: Seen = []
    generator: Any = counting(seen)
    seen.append(await anext(generator))
    await generator.aclose()
    seen.append(await anext(generator, "over"))
    thrown: Any = counting(seen)
    await anext(thrown)
    try:
        await thrown.athrow(KeyError("thrown"))
    except KeyError as error:
        seen.append(repr(error))
    unbegun: Any = counting(seen)
    await unbegun.aclose()
    return seen


@same
async def generator_left_half_way_is_finalised() -> Seen:
    seen: Seen = []

    async def breaks() -> None:
        async for i in counting(seen):
            seen.append(i)
            if i == 1:
                break
        seen.append("left")

    await breaks()
    gc.collect()
    await asyncio.sleep(2 * MS)  # the loop closes what was dropped
    return seen


@same
async def generator_cancelled() -> Seen:
    seen: Seen = []

    async def slow() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(NEVER)
        finally:
            seen.append("finally")

    async def reads() -> None:
        async for i in slow():
            seen.append(i)

    task = asyncio.create_task(reads())
    await asyncio.sleep(MS)
    task.cancel()
    return [*shown(await asyncio.gather(task, return_exceptions=True)), *seen]


VAR: ContextVar[str] = ContextVar("VAR", default="unset")


@same
async def contexts_of_tasks() -> Seen:
    seen: Seen = []

    async def sets(value: str) -> None:
        seen.append(VAR.get())
        VAR.set(value)
        await asyncio.sleep(0)
        seen.append(VAR.get())

    VAR.set("parent")
    context = copy_context()
    tasks = [asyncio.create_task(sets("a")), asyncio.create_task(sets("b"), context=context)]
    VAR.set("later")
    await asyncio.gather(*tasks)
    return [*seen, VAR.get(), context[VAR]]


@same
async def contexts_of_callbacks() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    context = copy_context()
    context.run(VAR.set, "its own")
    VAR.set("when asked")
    loop.call_soon(lambda: seen.append(VAR.get()))
    loop.call_soon(lambda: seen.append(VAR.get()), context=context)
    loop.call_later(MS, lambda: seen.append(VAR.get()))
    future.add_done_callback(lambda _: seen.append(VAR.get()))
    future.add_done_callback(lambda _: seen.append(VAR.get()), context=context)
    VAR.set("afterwards")
    future.set_result(None)
    await asyncio.sleep(4 * MS)
    return seen


# --- callbacks --------------------------------------------------------------------------------------------------------


@same
async def call_soon_in_order() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()

    def again(n: int) -> None:
        seen.append(n)
        if n < 30:
            loop.call_soon(again, n + 10)

    for i in range(5):
        (loop.call_soon if i % 2 else loop.call_soon_threadsafe)(again, i)
    seen.append("asked")
    await asyncio.sleep(MS)
    return seen


@same
async def call_later_in_order() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    for ms in (7, 2, 9, 4):
        loop.call_later(ms * MS, seen.append, ms)
    loop.call_later(0, seen.append, "now")
    now = loop.time()
    handle = loop.call_at(now + MS, seen.append, "at")
    seen.append(handle.when() == now + MS)
    await asyncio.sleep(10 * MS)
    return seen


@same
async def call_at_in_the_past() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    now = loop.time()
    for ago in (1, 3, 2):
        loop.call_at(now - ago, seen.append, ago)
    loop.call_soon(seen.append, "soon")
    await asyncio.sleep(2 * MS)
    return seen


@same
async def handles_cancelled() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    handles = [
        loop.call_soon(seen.append, "a"),
        loop.call_soon(seen.append, "b"),
        loop.call_later(MS, seen.append, "c"),
        loop.call_later(2 * MS, seen.append, "d"),
    ]
    for handle in handles[::2]:
        handle.cancel()
    loop.call_later(MS, lambda: handles[3].cancel())  # by another timer
    await asyncio.sleep(5 * MS)
    handles[1].cancel()  # too late, and harmless
    return [seen, [h.cancelled() for h in handles]]


@same
async def futures_with_callbacks() -> Seen:
    seen: Seen = []
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def told_of(name: str, done: asyncio.Future[int]) -> None:
        seen.append((name, done.result()))

    gone = partial(told_of, "gone")
    future.add_done_callback(partial(told_of, "first"))
    future.add_done_callback(gone)
    future.add_done_callback(partial(told_of, "second"))
    seen.append(future.remove_done_callback(gone))
    future.set_result(1)
    seen.append("set")
    future.add_done_callback(partial(told_of, "late"))
    await asyncio.sleep(0)
    try:
        future.set_result(2)
    except asyncio.InvalidStateError as error:
        seen.append(str(error))
    broken: asyncio.Future[int] = loop.create_future()
    broken.set_exception(KeyError("k"))
    dropped: asyncio.Future[int] = loop.create_future()
    dropped.cancel("m")
    seen += shown(await asyncio.gather(broken, dropped, return_exceptions=True))
    return [*seen, future.cancel(), dropped.cancelled(), await asyncio.wrap_future(future)]


@same
async def task_callbacks_and_order_of_waking() -> Seen:
    seen: Seen = []
    task = asyncio.create_task(told(seen, "t"))

    async def waits(name: str) -> None:
        await task
        seen.append(name)

    waiting = [asyncio.create_task(waits(n)) for n in "ab"]
    task.add_done_callback(lambda t: seen.append(("done", t.result())))
    await asyncio.gather(*waiting)
    return seen


@same
async def producers_and_consumers() -> Seen:
    """A pipeline as the engine has them: bounded queues, a limit, a group, and an orderly end."""
    seen: Seen = []
    first: asyncio.Queue[int | None] = asyncio.Queue(2)
    second: asyncio.Queue[int | None] = asyncio.Queue(1)

    async def produces() -> None:
        for i in range(6):
            await first.put(i)
        await first.put(None)

    async def transforms() -> None:
        while (item := await first.get()) is not None:
            async with asyncio.timeout(NEVER):
                await asyncio.sleep(0)
            await second.put(item * item)
        await second.put(None)

    async def consumes() -> None:
        while (item := await second.get()) is not None:
            seen.append(item)

    async with asyncio.TaskGroup() as group:
        for part in (produces, transforms, consumes):
            group.create_task(part())
    return seen


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_same_as_stock_asyncio(program: Program) -> None:
    expected = on_stock(program)
    assert expected
    for seed in (None, 1, 2, 3):
        assert on_sim(program, seed) == expected


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = new(7)
    yield made
    made.close()


def tied(seed: int | None) -> Seen:
    seen: Seen = []
    loop = new(seed)
    for i in range(6):
        loop.call_later(1.0, seen.append, i)
        loop.call_later(2.0, seen.append, i + 10)
    assert not loop.run_while(lambda: True, until=9.0)
    loop.close()
    return seen


def test_the_seed_decides_ties() -> None:
    orders = [tied(seed) for seed in range(20)]
    assert orders == [tied(seed) for seed in range(20)]
    assert len({tuple(o) for o in orders}) > 2
    assert all(sorted(o) == [*range(6), *range(10, 16)] and max(o[:6]) < 10 for o in orders)
    assert tied(None) == [*range(6), *range(10, 16)]


@pytest.mark.parametrize("seed", range(5))
def test_call_soon_is_first_in_first_out_whatever_the_seed(seed: int) -> None:
    async def main() -> Seen:
        seen: Seen = []
        for i in range(50):
            asyncio.get_running_loop().call_soon(seen.append, i)
        await asyncio.sleep(0)
        return seen

    assert on_sim(main, seed) == [*range(50)]


@pytest.mark.parametrize("seed", range(5))
def test_late_timers_are_no_tie(seed: int) -> None:
    async def main() -> Seen:
        seen: Seen = []
        loop = asyncio.get_running_loop()
        await asyncio.sleep(100)
        for when in (100, 97, 99, 98, 50):
            loop.call_at(when, seen.append, when)
        await asyncio.sleep(1)
        return seen

    assert on_sim(main, seed) == [50, 97, 98, 99, 100]


def test_a_group_cancels_its_tasks_in_the_same_order_each_time() -> None:
    """It keeps them in a set, whose order would be that of their addresses."""

    async def main() -> Seen:
        seen: Seen = []

        async def whole() -> None:
            async with asyncio.TaskGroup() as group:
                for i in range(20):
                    litter.append(bytearray(i * 37 % 1000))
                    group.create_task(told(seen, i, NEVER))

        task = asyncio.create_task(whole())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        some = {asyncio.create_task(asyncio.sleep(1, i)) for i in range(20)}
        done, _ = await asyncio.wait(some)
        return [*seen, [t.result() for t in done]]

    litter: Seen = []
    once = on_sim(main, 1)
    for i in range(10):
        litter.append([object() for _ in range(i * 101)])
        assert on_sim(main, 1) == once


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_steps_without_end_are_a_livelock(loop: SimLoop) -> None:
    async def spins() -> None:
        await asyncio.sleep(5)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=f"{STEPS_PER_INSTANT_MAX + 1} steps at 5"):
        loop.run_until_complete(spins())


def test_timers_without_end_that_are_always_due_are_a_livelock(loop: SimLoop) -> None:
    async def spins() -> None:
        await asyncio.sleep(1e9)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1e-9)  # too short to move this clock

    with pytest.raises(Livelock):
        loop.run_until_complete(spins())


def test_many_steps_over_time_are_no_livelock(loop: SimLoop) -> None:
    async def walks() -> None:
        for _ in range(6):
            await asyncio.sleep(1)
            for _ in range(STEPS_PER_INSTANT_MAX // 5):
                await asyncio.sleep(0)

    loop.run_until_complete(walks())
    assert loop.steps > STEPS_PER_INSTANT_MAX


def test_nothing_left_to_happen_is_stalled(loop: SimLoop) -> None:
    async def waits() -> None:
        await asyncio.sleep(3)
        await asyncio.Event().wait()

    with pytest.raises(Stalled, match="after 3"):
        loop.run_until_complete(waits())


def test_run_while_stops_at_its_time(loop: SimLoop) -> None:
    seen: Seen = []

    async def ticks() -> None:
        for i in range(1, 6):
            await asyncio.sleep(10)
            seen.append((i, asyncio.get_running_loop().time()))

    task = loop.create_task(ticks())
    assert not loop.run_while(lambda: not task.done(), until=25)
    assert (seen, loop.time() <= 25) == ([(1, 10), (2, 20)], True)
    assert not loop.run_while(lambda: not task.done(), until=29.9)
    assert len(seen) == 2
    assert loop.run_while(lambda: len(seen) < 4, until=1000)
    assert (len(seen), loop.time()) == (4, 40)
    assert loop.run_while(lambda: not task.done())
    assert loop.time() == 50
    assert not loop.run_while(lambda: True, until=1000)  # nothing left is no stall before a time


def test_one_loop_at_a_time(loop: SimLoop) -> None:
    async def nests() -> None:
        loop.run_while(lambda: True)

    with pytest.raises(RuntimeError, match="runs already"):
        loop.run_until_complete(nests())

    async def on_another() -> None:
        with pytest.raises(RuntimeError, match="runs already"):
            loop.run_while(lambda: True)

    asyncio.run(on_another())
    assert not loop.is_running()


def test_what_a_callback_raises_ends_the_run_and_loses_nothing(loop: SimLoop) -> None:
    seen: Seen = []

    def bad() -> None:
        raise KeyError("callback")

    loop.call_soon(seen.append, 1)
    loop.call_soon(bad)
    loop.call_soon(seen.append, 2)
    with pytest.raises(KeyError, match="callback"):
        loop.run_while(lambda: True)
    assert (seen, loop.is_running(), asyncio._get_running_loop()) == ([1], False, None)
    assert loop.run_while(lambda: not seen[1:])
    future = loop.create_future()
    future.add_done_callback(lambda _: bad())
    future.set_result(None)
    with pytest.raises(KeyError, match="callback"):
        loop.run_while(lambda: True)


def test_time_is_virtual(loop: SimLoop) -> None:
    async def long() -> float:
        begun = asyncio.get_running_loop().time()
        for _ in range(1000):
            await asyncio.sleep(1e6)
        await asyncio.gather(*(asyncio.sleep(1e6) for _ in range(1000)))
        return asyncio.get_running_loop().time() - begun

    assert loop.run_until_complete(long()) == 1001e6


def test_exceptions_that_nobody_hears_are_recorded(loop: SimLoop) -> None:
    async def main() -> None:
        task = asyncio.create_task(failing("unheard"))
        await asyncio.sleep(1)
        del task
        heard = asyncio.create_task(failing("heard"))
        await asyncio.gather(heard, return_exceptions=True)
        del heard
        future = asyncio.get_running_loop().create_future()
        future.set_exception(KeyError("unheard too"))

    loop.run_until_complete(main())
    gc.collect()
    assert shown(u["exception"] for u in loop.unheard) == ["ValueError('unheard')", "KeyError('unheard too')"]
    assert all("never retrieved" in u["message"] for u in loop.unheard)


# --- nodes ------------------------------------------------------------------------------------------------------------


def node(loop: SimLoop, power: Power, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task of a node, begun by the world."""
    context = copy_context()
    context.run(POWER.set, power)
    return loop.create_task(coro, context=context)


async def works(seen: Seen, name: str, period: float = 1.0) -> None:
    async def child() -> None:
        try:
            while True:
                await asyncio.sleep(period)
                seen.append((name, "child"))
        finally:
            seen.append((name, "child finally"))

    try:
        task = asyncio.create_task(child())
        while True:
            await asyncio.sleep(period)
            seen.append((name, "step"))
            assert not task.done()
    except BaseException:
        seen.append((name, "except"))
        raise
    finally:
        seen.append((name, "finally"))


def test_a_power_cut_runs_nothing_of_that_node_any_more(loop: SimLoop) -> None:
    seen: Seen = []
    a, b = Power("a"), Power("b")
    tasks = [node(loop, a, works(seen, "a")), node(loop, b, works(seen, "b"))]
    loop.run_while(lambda: True, until=3.5)
    assert {s[0] for s in seen} == {"a", "b"}
    seen.clear()
    loop.cut_power(a)
    tasks[0].cancel()  # whoever else reaches for them
    gc.collect()
    loop.run_while(lambda: True, until=10.5)
    gc.collect()
    assert sorted(set(seen)) == [("b", "child"), ("b", "step")]
    assert len(seen) == 14
    assert not tasks[0].done()
    assert len([t for t in loop._tasks if not t.done()]) == 4  # a root and a child on each
    loop.release(a)
    loop.hold(a)
    loop.release(a)
    loop.run_while(lambda: True, until=20.5)
    assert {s[0] for s in seen} == {"b"}


def test_a_power_cut_in_the_middle_of_an_instant(loop: SimLoop) -> None:
    seen: Seen = []
    power = Power("a")

    async def main() -> None:
        event = asyncio.Event()

        async def waits() -> None:
            try:
                await event.wait()
                seen.append("not reached")
            finally:
                seen.append("not reached either")

        for _ in range(3):
            node(loop, power, waits())
        node(loop, power, asyncio.sleep(0)).add_done_callback(lambda _: seen.append("the world hears"))
        await asyncio.sleep(1)
        event.set()  # their steps are ready
        loop.cut_power(power)
        await asyncio.sleep(1)
        seen.append("world")

    loop.run_until_complete(main())
    assert seen == ["the world hears", "world"]


def test_a_node_that_cuts_itself_off_ends_its_step(loop: SimLoop) -> None:
    seen: Seen = []
    power = Power("a")

    async def dies() -> None:
        try:
            loop.cut_power(power)
            seen.append("last words")
            await asyncio.sleep(0)
            seen.append("not reached")
        finally:
            seen.append("not reached either")

    node(loop, power, dies())
    assert not loop.run_while(lambda: True, until=5)
    assert seen == ["last words"]


def test_generators_of_a_dead_node_are_not_closed(loop: SimLoop) -> None:
    seen: Seen = []
    power = Power("a")

    async def reads() -> None:
        async for i in counting(seen):
            seen.append(i)
            await asyncio.sleep(10)

    node(loop, power, reads())
    loop.run_while(lambda: True, until=5)
    loop.cut_power(power)
    gc.collect()
    loop.run_while(lambda: True, until=50)
    assert seen == [0]


def test_hold_and_release_keep_order(loop: SimLoop) -> None:
    seen: Seen = []
    held, other = Power("held"), Power("other")

    async def puts(name: str, n: int) -> None:
        await asyncio.sleep(n)
        for i in range(3):
            seen.append((name, n, i))
            await asyncio.sleep(0)

    async def main() -> None:
        tasks = [node(loop, p, puts(p.name, n)) for n in (4, 2, 3, 1) for p in (held, other)]
        await asyncio.sleep(1.5)
        loop.hold(held)
        seen.append("held")
        await asyncio.sleep(5)
        seen.append("released")
        loop.release(held)
        await asyncio.gather(*tasks)

    loop.run_until_complete(main())
    assert set(seen[:6]) == {(name, 1, i) for name in ("held", "other") for i in range(3)}
    assert seen[6] == "held"
    assert seen[7:17] == [*(("other", n, i) for n in (2, 3, 4) for i in range(3)), "released"]
    assert seen[17:] == [("held", n, i) for i in range(3) for n in (2, 3, 4)]


def test_what_became_due_while_held_comes_before_what_is_ready_at_release(loop: SimLoop) -> None:
    seen: Seen = []
    power = Power("a")
    context = copy_context()
    context.run(POWER.set, power)
    loop.hold(power)
    loop.call_soon(seen.append, 1, context=context)
    loop.call_soon(seen.append, 2, context=context)
    loop.call_soon(loop.release, power)
    loop.call_soon(seen.append, 3, context=context)
    assert loop.run_while(lambda: False)
    assert seen == [1, 2, 3]


def test_a_limit_runs_out_while_held(loop: SimLoop) -> None:
    async def limited() -> str:
        try:
            async with asyncio.timeout(2):
                await asyncio.sleep(1)
                await asyncio.sleep(0)
                return "in time by its own steps"
        except TimeoutError:
            return "late"

    power = Power("a")

    async def main() -> list[Any]:
        task = node(loop, power, limited())
        await asyncio.sleep(0)
        loop.hold(power)
        await asyncio.sleep(9)
        assert not task.done()
        loop.release(power)
        return [await task, loop.time()]

    assert loop.run_until_complete(main()) == ["late", 9]


def test_held_then_cut(loop: SimLoop) -> None:
    seen: Seen = []
    power = Power("a")
    node(loop, power, works(seen, "a"))
    loop.run_while(lambda: True, until=1.5)
    loop.hold(power)
    loop.run_while(lambda: True, until=9.5)
    before = list(seen)
    loop.cut_power(power)
    loop.release(power)
    loop.run_while(lambda: True, until=19.5)
    assert seen == before
    assert before


# --- the end of a world -----------------------------------------------------------------------------------------------


async def awaits_in_finally(seen: Seen) -> None:
    try:
        await asyncio.sleep(NEVER)
    finally:
        await asyncio.sleep(1)
        seen.append("so did")
        await asyncio.Event().wait()


async def raises_in_finally() -> None:
    try:
        await asyncio.sleep(NEVER)
    finally:
        raise ValueError("in finally")


async def begins_in_finally() -> None:
    try:
        await asyncio.sleep(NEVER)
    finally:
        await asyncio.create_task(asyncio.sleep(1))


async def reads_forever() -> None:
    async for _ in counting([]):
        await asyncio.sleep(NEVER)


async def within_everything() -> None:
    lock, queue = asyncio.Lock(), asyncio.Queue[int](1)
    async with asyncio.timeout(NEVER), lock, asyncio.TaskGroup() as group:
        group.create_task(queue.get())
        group.create_task(asyncio.wait_for(asyncio.Event().wait(), NEVER))
        await asyncio.shield(asyncio.gather(asyncio.sleep(NEVER), asyncio.sleep(NEVER)))


async def begun(generator: Any) -> None:
    await anext(generator)


async def swallows_everything() -> None:
    for _ in range(5):
        with suppress(BaseException):
            await asyncio.sleep(NEVER)


@pytest.mark.parametrize("how", ["running", "cut", "held", "never begun"])
def test_close_after_abandoned_tasks_is_silent(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    seen: Seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = new(1)
        power = Power("a")
        for coro in (
            works(seen, "a"), awaits_in_finally(seen), raises_in_finally(), begins_in_finally(), reads_forever(),
            within_everything(), swallows_everything(), failing("unheard", 1),
        ):  # fmt: skip
            node(loop, power, coro)
        dropped: Any = counting(seen)
        if how != "never begun":
            loop.run_until_complete(begun(dropped))
            loop.run_while(lambda: True, until=5)
        if how == "held":
            loop.hold(power)
            loop.run_while(lambda: True, until=9)
        if how == "cut":
            loop.cut_power(power)
            loop.run_while(lambda: True, until=9)
        loop.close()
        loop.close()
        assert loop.is_closed()
        del coro, dropped, power, loop
        gc.collect()
    assert capfd.readouterr() == ("", "")


def test_a_closed_loop_takes_nothing_in(loop: SimLoop) -> None:
    seen: Seen = []
    loop.call_soon(seen.append, 1)
    loop.call_later(1, seen.append, 2)
    loop.close()
    loop.call_soon(seen.append, 3)
    loop.call_later(1, seen.append, 4)
    assert not loop.run_while(lambda: True, until=9)
    assert seen == []


# --- a naive model ----------------------------------------------------------------------------------------------------

Operation = tuple[str, int]
Happened = list[tuple[float, int, str]]


@st.composite
def operations(draw: st.DrawFn) -> list[list[Operation]]:
    """2 to 4 tasks. Each delay is a power of two of its own: no two sums of them are equal, so nothing is due together."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    exponents = iter(draw(st.permutations(range(sum(lengths)))))
    kinds = st.sampled_from(["sleep", "put", "get", "set", "clear", "wait", "lock"])
    return [
        [(kind := draw(kinds), 1 << next(exponents) if kind in ("sleep", "lock") else draw(st.integers(0, 1))) for _ in range(n)]
        for n in lengths
    ]


async def acts(program: list[Operation], me: int, seen: Happened, shared: list[Any]) -> None:
    queues, events, lock = shared
    loop = asyncio.get_running_loop()
    for kind, x in program:
        if kind == "sleep":
            await asyncio.sleep(x)
        elif kind == "put":
            await queues[x].put(me)
        elif kind == "get":
            item = await queues[x].get()
            seen.append((loop.time(), me, f"from {item}"))
        elif kind == "set":
            events[x].set()
        elif kind == "clear":
            events[x].clear()
        elif kind == "wait":
            await events[x].wait()
        else:
            async with lock:
                seen.append((loop.time(), me, "locked"))
                await asyncio.sleep(x)
        seen.append((loop.time(), me, kind))


class Model:
    """Tasks that run in turn until they must wait; waits end by a list of times, the soonest first."""

    def __init__(self, programs: list[list[Operation]]) -> None:
        self.now = 0.0
        self.seen: Happened = []
        self.items: list[deque[int]] = [deque(), deque()]
        self.getters: list[deque[int]] = [deque(), deque()]
        self.is_set = [False, False]
        self.waiters: list[list[int]] = [[], []]
        self.lockers: deque[int] = deque()  # the first one has it
        self.ready = deque(range(len(programs)))
        self.times: list[tuple[float, int]] = []
        self.tasks = [self.task(p, me) for me, p in enumerate(programs)]

    def run(self) -> Happened:
        while self.ready or self.times:
            if not self.ready:
                self.times.sort()
                self.now, who = self.times.pop(0)
                self.ready.append(who)
            next(self.tasks[self.ready.popleft()], None)
        return self.seen

    def task(self, program: list[Operation], me: int) -> Iterator[None]:
        for kind, x in program:
            if kind == "sleep":
                self.times.append((self.now + x, me))
                yield
            elif kind == "put":
                self.items[x].append(me)
                if self.getters[x]:
                    self.ready.append(self.getters[x].popleft())
            elif kind == "get":
                while not self.items[x]:
                    self.getters[x].append(me)
                    yield
                item = self.items[x].popleft()
                self.seen.append((self.now, me, f"from {item}"))
            elif kind == "set":
                if not self.is_set[x]:
                    self.is_set[x] = True
                    self.ready += self.waiters[x]
                    self.waiters[x].clear()
            elif kind == "clear":
                self.is_set[x] = False
            elif kind == "wait":
                if not self.is_set[x]:
                    self.waiters[x].append(me)
                    yield
            else:
                self.lockers.append(me)
                if self.lockers[0] != me:
                    yield
                self.seen.append((self.now, me, "locked"))
                self.times.append((self.now + x, me))
                yield
                self.lockers.popleft()
                self.ready += list(self.lockers)[:1]
            self.seen.append((self.now, me, kind))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(programs=operations(), seed=st.integers(0, 9))
def test_small_programs_run_as_in_a_naive_model(programs: list[list[Operation]], seed: int) -> None:
    loop = new(seed)
    seen: Happened = []
    shared = [[asyncio.Queue[int](), asyncio.Queue[int]()], [asyncio.Event(), asyncio.Event()], asyncio.Lock()]
    tasks = [loop.create_task(acts(p, me, seen, shared)) for me, p in enumerate(programs)]
    loop.run_while(lambda: not all(t.done() for t in tasks), until=float(1 << 40))  # some wait for ever
    loop.close()
    assert seen == Model(programs).run()
