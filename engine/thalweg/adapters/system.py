"""Time, threads and signals of the real process. The one room where the standard library's clocks and threads are named.

It decides nothing. The simulator replaces all of it: its own clock, computing in line, no threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import psutil
import pyarrow as pa

from thalweg.errors import Permanent

T = TypeVar("T")

PROBE_VARIABLE: Final = "THALWEG_PROBE_KILL"


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ThreadCompute:
    """CPU work on a few threads: Arrow and the native codecs release the interpreter lock, so the loop stays awake."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="thalweg-compute")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Let running work end; start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class InlineCompute:
    """Computing on the spot, for tests and small tools."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


class Actor:
    """One thread that owns a C client, and a queue of commands to it.

    The loop side calls `ask`; the thread's `main` calls `next` and runs what it gets, whenever its client lets it.
    Commands that come after `main` has returned, or were left by it, are answered by `Permanent`: nobody waits for ever.
    """

    def __init__(self, name: str, main: Callable[[Actor], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._commands: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._name, self._main, self._ended = name, main, False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.monotonic: Callable[[], float] = time.monotonic

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, command: Any) -> asyncio.Future[Any]:
        """Queue a command; its result or error arrives on the loop."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._wake:
            if not self._ended:
                self._commands.append((command, future))
                self._wake.notify()
                return future
        future.set_exception(self._gone())
        future.exception()  # nobody need look
        return future

    def _run(self) -> None:
        try:
            self._main(self)
        finally:
            with self._wake:
                self._ended = True
                left = list(self._commands)
                self._commands.clear()
            for _, future in left:
                self.reply(future, error=self._gone())

    def _gone(self) -> Permanent:
        return Permanent("it has been closed", where=self._name)

    @property
    def waiting(self) -> bool:
        """Whether a command waits (thread side; a hint)."""
        return bool(self._commands)

    def next(self, timeout_s: float) -> tuple[Any, asyncio.Future[Any]] | None:
        """Thread side: the next command, None after `timeout_s`."""
        with self._wake:
            if not self._commands:
                self._wake.wait(timeout_s)
            return self._commands.popleft() if self._commands else None

    def on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Thread side: run `call` on the loop; nothing happens when the loop is gone already."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def reply(self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        """Thread side: answer a command. A caller that gave up is not answered."""

        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
                future.exception()  # somebody may have stopped waiting; that is no news
            else:
                future.set_result(result)

        self.on_loop(settle)

    def alive(self) -> bool:
        return self._thread.is_alive()


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def use_one_allocator() -> None:
    """Let Arrow allocate where everything else does, so that freed memory is shared and can be given back as one."""
    pa.set_memory_pool(pa.system_memory_pool())


def release_memory() -> None:
    """Give freed memory back to the operating system (glibc's malloc_trim, which Arrow's system pool calls)."""
    pa.default_memory_pool().release_unused()


def kill_at_probe() -> Callable[[str, int], None] | None:
    """What `THALWEG_PROBE_KILL=name#ordinal` arms: SIGKILL to this very process at that instant. None where unset."""
    wanted = os.environ.get(PROBE_VARIABLE)
    if not wanted:
        return None
    name, _, ordinal = wanted.partition("#")
    if not name or not (ordinal or "1").isdecimal() or (at := int(ordinal or "1")) < 1:
        raise Permanent(f"{PROBE_VARIABLE}={wanted} arms nothing", remedy="Write name#ordinal, counting from 1: raw.durable#2")

    def kill(reached: str, count: int) -> None:
        if reached == name and count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill
