"""An asyncio event loop whose time is a simulation's.

What is ready runs first come, first served, as asyncio promises of `call_soon`. What waits for a time waits in a
`simpy.Environment`; when nothing is ready, the environment's next event is the present. asyncio promises nothing about the
order of timers that are due at the same instant, so the seed of a run decides it: that order is the run's interleaving.

Nodes share the loop. Each task carries, in its context, the `Power` of the node it belongs to. Power off is a power cut and
no exception: the node's tasks are never stepped again, so no `finally` of theirs runs, and they are kept alive until
`close`, after judgement. Power held is a process that the scheduler has stopped: its steps wait, in order, and go on later.

It never lets a thread, a socket or a process in: those methods raise `Escape`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from heapq import heappush
from itertools import count
from random import Random
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakSet

import simpy

from sim.fence import Escape

T = TypeVar("T")

STEPS_PER_INSTANT_MAX: Final = 100_000
TASKS_MIN: Final = 256
"""Tasks that are kept before those that are done are looked for."""

AWAITS_MAX: Final = 100
"""In the `finally` blocks of one abandoned coroutine."""


class Livelock(AssertionError):
    """Steps without end, and time stands still."""


class Stalled(AssertionError):
    """Nothing is ready and nothing will ever be."""


class Power:
    """Whether the tasks of one incarnation of a node are stepped."""

    __slots__ = ("held", "name", "off", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.off = self.held = False
        self.waiting: list[Call] = []  # steps of a held node


POWER: Final[ContextVar[Power | None]] = ContextVar("POWER", default=None)
"""None: the world's own tasks, which nobody switches off."""


class Call:
    """What asyncio calls a handle."""

    __slots__ = ("args", "callback", "context", "gone")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.args = callback, args
        self.context = copy_context() if context is None else context
        self.gone = False

    def cancel(self) -> None:
        """It will not run. A timer stays where it is until its time comes: nothing else depends on that."""
        self.gone = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.gone


class Timer(Call):
    """A timer handle, which is also the event that SimPy keeps for it."""

    __slots__ = ("_ok", "_ready", "_when", "callbacks")

    def __init__(
        self,
        ready: deque[Call],
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.callback, self.args = callback, args
        self.context = copy_context() if context is None else context
        self.gone = False
        self._ready, self._when = ready, when
        self._ok, self.callbacks = True, _BECOMES_READY  # all that SimPy looks at

    def when(self) -> float:
        return self._when


def _becomes_ready(timer: Timer) -> None:
    if not timer.gone:
        timer._ready.append(timer)


_BECOMES_READY: Final = (_becomes_ready,)


class Happening:
    """Something that befalls the world and is no node's: SimPy calls it when its time has come, without a turn of asyncio's."""

    __slots__ = ("_args", "_call", "_ok", "callbacks")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._call, self._args = call, args
        self._ok, self.callbacks = True, _HAPPENS


def _happens(happening: Happening) -> None:
    happening._call(*happening._args)


_HAPPENS: Final = (_happens,)


def _nothing() -> None:
    return


class SimTask(asyncio.Task[Any]):
    """A task that knows when it was made. asyncio keeps tasks in sets (a group cancels one), and the order of a set must not be
    that of addresses."""

    __slots__ = ("order",)

    def __init__(self, order: int, coro: Any, loop: SimLoop, name: str, context: Context | None) -> None:
        self.order = order  # first: asyncio puts it in a set at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.order


class SimLoop(asyncio.AbstractEventLoop):
    """One world's loop. `ties` decides the order of timers that are due together; None keeps the order of their making."""

    def __init__(self, ties: Random | None = None) -> None:
        self.env = simpy.Environment()
        self.steps = 0
        self.unheard: list[dict[str, Any]] = []  # what asyncio would have logged: exceptions that nobody retrieved
        self._ties = None if ties is None else ties.random
        self._ready: deque[Call] = deque()
        self._order = count().__next__
        self._closed = self._running = False
        self._tasks: list[SimTask] = []  # also those whose node has no power: until `close` nobody finishes them
        self._tasks_max = TASKS_MIN
        self._worlds: WeakSet[SimTask] = WeakSet()  # tasks of no node, which nobody has to keep alive

    # --- what asyncio asks of a loop ------------------------------------------------------------------------------

    def time(self) -> float:
        return self.env._now

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        return

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **rest: Any
    ) -> asyncio.Task[Any]:
        task = SimTask(self._order(), coro, self, name or "task", context)
        if (POWER.get() if context is None else context.get(POWER)) is None:
            self._worlds.add(task)
            return task
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_max:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._tasks_max = max(TASKS_MIN, 2 * len(self._tasks))
        return task

    def call_soon(  # type: ignore[override]  # typeshed binds the arguments' types to the callback's; nothing here needs it
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        call = Call(callback, args, context)
        if not self._closed:
            self._ready.append(call)
        return call

    def call_soon_threadsafe(  # type: ignore[override]  # as above
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.env._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        timer: Any = Timer(self._ready, when, callback, args, context)
        if not self._closed:
            self._schedule(when, timer)
        return timer

    def befall(self, delay_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Call the world, not a node, after `delay_s`. Nothing can take it back."""
        if not self._closed:
            self._schedule(self.env._now + delay_s, Happening(call, args))

    def _schedule(self, when: float, event: Any) -> None:
        """What `Environment.schedule` does, without its detour."""
        env, ties = self.env, self._ties
        now: Any = env._now
        order: Any = 1 if ties is None else ties()
        if when < now:  # late: before what is due now, and among the late by their times, which are no tie
            when, order = now, when - now
        heappush(env._queue, (when, order, next(env._eid), event))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unheard.append(context)

    default_exception_handler = call_exception_handler

    async def shutdown_asyncgens(self) -> None:
        return

    # --- running --------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Until `future` (or coroutine) is done; its result. Raises `Livelock`, `Stalled`, and what a callback raises."""
        task = future if isinstance(future, asyncio.Future) else self._begun(future)
        self.run_while(lambda: not task.done())
        return task.result()

    def _begun(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        asyncio._set_running_loop(self)
        try:
            return self.create_task(coro, name="main")
        finally:
            asyncio._set_running_loop(None)

    def run_while(self, wanted: Callable[[], bool], until: float = float("inf"), *, alarms: Sequence[object] = ()) -> bool:
        """Run as long as `wanted()`, there are no `alarms`, and the time is before `until`; whether it ended before `until`.

        They are looked at whenever nothing is ready, so a step may find them so already.
        """
        if self._running or asyncio._get_running_loop() is not None:
            raise RuntimeError("a loop runs already")
        self._running = True
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        env, ready, queue = self.env, self._ready, self.env._queue
        instant, steps = env._now, 0
        try:
            while True:
                before = steps
                while ready:
                    call = ready.popleft()
                    if call.gone:
                        continue
                    power = call.context.get(POWER)
                    if power is not None and (power.off or power.held):
                        if power.held and not power.off:
                            power.waiting.append(call)
                        continue
                    steps += 1
                    if steps > STEPS_PER_INSTANT_MAX:
                        raise Livelock(f"{steps} steps at {env._now} s, the last one of {call.callback!r:.200}")
                    call.context.run(call.callback, *call.args)
                self.steps += steps - before
                if alarms or not wanted():
                    return True
                if not queue:
                    if until != float("inf"):
                        return False
                    raise Stalled(f"nothing is left to happen after {env._now} s")
                if queue[0][0] > until:
                    return False
                env.step()
                if env._now != instant:
                    instant, steps = env._now, 0
                else:
                    steps += 1
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)
            self._running = False

    def _finalize(self, generator: Any) -> None:
        """An async generator was dropped half-way: asyncio closes it in a task. A node without power cannot."""
        power = POWER.get()
        if not self._closed and (power is None or not power.off):
            self.create_task(generator.aclose(), name="aclose")

    # --- nodes ----------------------------------------------------------------------------------------------------

    def cut_power(self, power: Power) -> None:
        """No task of this node makes another step. They are kept, unfinished, until `close`."""
        power.off, power.held = True, False
        power.waiting.clear()

    def hold(self, power: Power) -> None:
        """Stop stepping; what becomes due waits."""
        power.held = not power.off

    def release(self, power: Power) -> None:
        """Go on where it stopped, everything that has become due at once and in order."""
        if power.held:
            power.held = False
            self._ready.extendleft(reversed(power.waiting))  # whatever is ready became so after them
            power.waiting.clear()

    def close(self) -> None:
        """The world is over, and has been judged: abandoned tasks may be collected, and whatever their `finally` blocks do
        reaches nothing."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        pending = [t for t in (*self._tasks, *self._worlds) if not t.done()]
        hook = sys.unraisablehook
        sys.unraisablehook = lambda _unraisable: None
        try:
            for task in pending:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch; they are abandoned on purpose
                _thrown_away(task.get_coro())
        finally:
            sys.unraisablehook = hook
        self._tasks.clear()
        self.env._queue.clear()


def _thrown_away(coro: Any) -> None:
    """Close it. A `finally` that awaits is thrown at again, until nothing is left of it."""
    for _ in range(AWAITS_MAX):
        try:
            coro.close()
        except RuntimeError:  # it awaited: "coroutine ignored GeneratorExit"
            continue
        except BaseException:  # whatever its `except` and `finally` blocks make of it; the world is over
            return
        return


def _escapes(name: str) -> Callable[..., NoReturn]:
    def escape(self: SimLoop, *_: Any, **__: Any) -> NoReturn:
        raise Escape(f"loop.{name}")

    return escape


for _name in (
    "run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo", "create_connection", "create_server",
    "create_unix_connection", "create_unix_server", "create_datagram_endpoint", "connect_accepted_socket", "start_tls",
    "sendfile", "connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell", "add_reader",
    "remove_reader", "add_writer", "remove_writer", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into",
    "sock_sendall", "sock_sendto", "sock_connect", "sock_accept", "sock_sendfile", "add_signal_handler",
    "remove_signal_handler",
):  # fmt: skip
    setattr(SimLoop, _name, _escapes(_name))
