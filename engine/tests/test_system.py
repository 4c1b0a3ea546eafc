"""The real clock, threads and signals: who is answered, and what may be done when the loop is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from thalweg.adapters.system import (
    PROBE_VARIABLE,
    Actor,
    InlineCompute,
    SystemClock,
    ThreadCompute,
    kill_at_probe,
    release_memory,
    rss_bytes,
)
from thalweg.errors import Permanent


def echo(actor: Actor) -> None:
    """Answers commands with themselves until "end"; an exception is answered as one; "leave" ends without an answer."""
    while True:
        entry = actor.next(1.0)
        if entry is None:
            continue
        command, future = entry
        if command == "leave":
            return
        if isinstance(command, Exception):
            actor.reply(future, error=command)
        else:
            actor.reply(future, command)
        if command == "end":
            return


async def ended(actor: Actor) -> None:
    await asyncio.get_running_loop().run_in_executor(None, actor._thread.join, 10)
    assert not actor.alive()


async def test_commands_are_answered_in_order_with_result_or_error() -> None:
    actor = Actor("echo", echo)
    first, second, third = actor.ask(1), actor.ask(ValueError("no")), actor.ask(3)  # queued before the thread begins
    assert actor.waiting
    actor.begin()
    assert await first == 1
    with pytest.raises(ValueError, match="no"):
        await second
    assert await third == 3
    assert await actor.ask("end") == "end"
    await ended(actor)


async def test_caller_that_gave_up_is_not_answered() -> None:
    actor = Actor("echo", echo)
    given_up = actor.ask(1)
    given_up.cancel()
    actor.begin()
    assert await actor.ask(2) == 2
    assert given_up.cancelled()
    await actor.ask("end")
    await ended(actor)


async def test_error_that_nobody_awaits_makes_no_noise() -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    actor = Actor("echo", echo)
    actor.ask(ValueError("unheard"))
    actor.begin()
    await actor.ask("end")
    await ended(actor)
    assert noise == []


async def test_whoever_asks_after_the_end_is_answered() -> None:
    actor = Actor("echo", echo)
    left = actor.ask("leave"), actor.ask("queued behind it")
    actor.begin()
    with pytest.raises(Permanent, match="closed"):
        await asyncio.wait_for(left[1], 10)
    await ended(actor)
    with pytest.raises(Permanent, match="closed"):
        await actor.ask("late")


async def test_thread_that_fails_answers_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def fails(actor: Actor) -> None:
        raise OSError("no client")

    actor = Actor("fails", fails)
    waiting = actor.ask(1)
    actor.begin()
    with pytest.raises(Permanent):
        await asyncio.wait_for(waiting, 10)
    await ended(actor)
    assert seen == [OSError]


def test_answer_to_a_closed_loop_raises_nothing_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    gone = threading.Event()
    made: list[Actor] = []

    def late(actor: Actor) -> None:
        entry = actor.next(10.0)
        assert entry is not None
        assert gone.wait(10)
        actor.reply(entry[1], "late")
        actor.on_loop(seen.append, "called")

    async def main() -> None:
        made.append(Actor("late", late))
        made[0].ask(1)
        made[0].begin()

    asyncio.run(main())
    gone.set()
    made[0]._thread.join(10)
    assert not made[0].alive()
    assert seen == []


async def test_next_gives_up_after_its_time() -> None:
    actor = Actor("idle", lambda a: None)
    assert actor.next(0.0) is None


async def test_compute_runs_off_the_loop_and_raises_what_the_work_raises() -> None:
    compute = ThreadCompute(1)
    assert await compute.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    compute.close()
    assert await InlineCompute().run(threading.get_ident) == threading.get_ident()


async def test_one_thread_computes_one_thing_at_a_time() -> None:
    compute = ThreadCompute(1)
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    await asyncio.gather(*(compute.run(work) for _ in range(50)))
    assert most == 1
    compute.close()


def test_clock() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall_ms() > 1_700_000_000_000  # milliseconds, not seconds


def test_memory_is_measured_in_bytes() -> None:
    release_memory()
    assert 10_000_000 < rss_bytes() < 1 << 40


def test_probe_unarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROBE_VARIABLE, raising=False)
    assert kill_at_probe() is None


@pytest.mark.parametrize("armed", ["raw.durable#2", "raw.durable#1", "raw.durable"])
def test_probe_kills_at_its_name_and_ordinal(armed: str) -> None:
    script = (
        "from thalweg.adapters.system import kill_at_probe\n"
        "kill = kill_at_probe()\n"
        "for name, count in (('raw.sent', 1), ('raw.sent', 2), ('raw.durable', 1), ('raw.durable', 2)):\n"
        "    print(name, count, flush=True)\n"
        "    kill(name, count)\n"
    )
    environment = {**os.environ, PROBE_VARIABLE: armed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.splitlines()[-1] == f"raw.durable {2 if armed.endswith('2') else 1}"


@pytest.mark.parametrize("armed", ["raw.durable#x", "#1", "raw.durable#0"])
def test_probe_that_could_never_fire_is_refused(armed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBE_VARIABLE, armed)
    with pytest.raises(Permanent, match=PROBE_VARIABLE):
        kill_at_probe()
