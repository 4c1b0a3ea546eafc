"""The fence: each way out of a simulated world is found where it is taken, and is no hindrance outside of one."""

from __future__ import annotations

import asyncio
import inspect
import io
import multiprocessing
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

from sim import fence
from sim.fence import ESCAPES, Escape
from sim.loop import SimLoop

HERE: Final = str(Path(__file__))
ROOT: Final = Path(__file__).parents[2]

BOUND: Final = """
from asyncio import to_thread
from datetime import date, datetime
from os import urandom
from random import random
from time import monotonic, sleep, time as wall
from uuid import uuid4
from numpy.random import default_rng
"""
"""Names as a module of the engine, of the twins or of the catalogue could have bound them."""


@pytest.fixture(scope="module", autouse=True)
def rooms() -> Iterator[dict[str, Any]]:
    """A module in each room, imported before the fence is in or, at any rate, as if."""
    made: dict[str, Any] = {}
    for room in fence.ROOMS:
        module = made[room] = ModuleType(f"{room}.bound")
        exec(BOUND, module.__dict__)  # noqa: S102
        for name, value in list(vars(module).items()):
            if callable(value):
                setattr(module, name, inspect.unwrap(value))
        sys.modules[module.__name__] = module
    outside = made["outside"] = ModuleType("elsewhere.bound")
    outside.__dict__.update(made["thalweg"].__dict__, __name__=outside.__name__)
    sys.modules[outside.__name__] = outside
    ROOMS.update(made)
    fence.install()
    yield made
    for module in made.values():
        del sys.modules[module.__name__]


ROOMS: Final[dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """The escapes of these tests are nobody else's."""
    before = len(ESCAPES)
    yield
    del ESCAPES[before:]


def inside(reach: Callable[[], Any]) -> Any:
    """Within a simulation, where awaiting is possible too."""

    async def main() -> Any:
        found = reach()
        return await found if inspect.isawaitable(found) else found

    loop = SimLoop()  # type: ignore[abstract]  # the rest are set below the class
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def nothing() -> None:
    return


# Each has its call on a line of its own function, by which it is known.


async def _to_thread() -> None:
    await asyncio.to_thread(nothing)


async def _run_in_executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, nothing)


async def _open_connection() -> None:
    await asyncio.open_connection("localhost", 1)


async def _start_server() -> None:
    await asyncio.start_server(lambda _r, _w: None, "localhost", 0)


async def _create_subprocess() -> None:
    await asyncio.create_subprocess_exec("true")


async def _getaddrinfo() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 1)


def _thread_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(nothing)


def _process_pool() -> None:
    pool: Any = None  # the making of one asks for chance
    ProcessPoolExecutor.submit(pool, nothing)


ESCAPING: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "time.time": (lambda: time.time(), "time.time"),
    "time.time_ns": (lambda: time.time_ns(), "time.time_ns"),
    "time.monotonic": (lambda: time.monotonic(), "time.monotonic"),
    "time.perf_counter": (lambda: time.perf_counter(), "time.perf_counter"),
    "time.process_time_ns": (lambda: time.process_time_ns(), "time.process_time_ns"),
    "time.clock_gettime": (lambda: time.clock_gettime(time.CLOCK_MONOTONIC), "time.clock_gettime"),
    "time.sleep": (lambda: time.sleep(0), "time.sleep"),
    "time.localtime": (lambda: time.localtime(), "time.localtime"),
    "datetime.now": (lambda: ROOMS["thalweg"].datetime.now(), "datetime.now"),
    "datetime.now fakes": (lambda: ROOMS["fakes"].datetime.now(), "datetime.now"),
    "datetime.utcnow": (lambda: ROOMS["catalogue"].datetime.utcnow(), "datetime.utcnow"),
    "datetime.today": (lambda: ROOMS["catalogue"].datetime.today(), "datetime.today"),
    "date.today": (lambda: ROOMS["catalogue"].date.today(), "date.today"),
    "bound monotonic": (lambda: ROOMS["thalweg"].monotonic(), "time.monotonic"),
    "bound time": (lambda: ROOMS["fakes"].wall(), "time.time"),
    "bound sleep": (lambda: ROOMS["catalogue"].sleep(0), "time.sleep"),
    "bound urandom": (lambda: ROOMS["thalweg"].urandom(1), "os.urandom"),
    "bound random": (lambda: ROOMS["thalweg"].random(), "random.random"),
    "bound uuid4": (lambda: ROOMS["catalogue"].uuid4(), "uuid.uuid4"),
    "bound to_thread": (lambda: ROOMS["thalweg"].to_thread(nothing).send(None), "loop.run_in_executor"),
    "bound default_rng": (lambda: ROOMS["fakes"].default_rng(), "numpy.random.default_rng"),
    "random.random": (lambda: random.random(), "random.random"),
    "random.gammavariate": (lambda: random.gammavariate(1, 1), "random.gammavariate"),
    "random.seed": (lambda: random.seed(), "random.seed"),
    "random.shuffle": (lambda: random.shuffle([1, 2]), "random.shuffle"),
    "random.Random()": (lambda: random.Random(), "random.Random"),
    "random.Random(1).seed()": (lambda: random.Random(1).seed(), "random.Random"),
    "random.SystemRandom": (lambda: random.SystemRandom().random(), "os.urandom"),
    "random.SystemRandom bits": (lambda: random.SystemRandom().getrandbits(8), "os.urandom"),
    "os.urandom": (lambda: os.urandom(1), "os.urandom"),
    "os.getrandom": (lambda: os.getrandom(1), "os.getrandom"),
    "uuid.uuid1": (lambda: uuid.uuid1(), "uuid.uuid1"),
    "uuid.uuid4": (lambda: uuid.uuid4(), "uuid.uuid4"),
    "secrets.token_hex": (lambda: secrets.token_hex(), "secrets.token_hex"),
    "secrets.randbits": (lambda: secrets.randbits(8), "secrets.randbits"),
    "numpy.random.rand": (lambda: np.random.rand(), "numpy.random.rand"),
    "numpy.random.poisson": (lambda: np.random.poisson(1), "numpy.random.poisson"),
    "numpy.random.seed": (lambda: np.random.seed(), "numpy.random.seed"),
    "numpy default_rng": (lambda: np.random.default_rng(), "numpy.random.default_rng"),
    "numpy default_rng None": (lambda: np.random.default_rng(seed=None), "numpy.random.default_rng"),
    "numpy PCG64": (lambda: np.random.PCG64(), "os.urandom"),
    "numpy RandomState": (lambda: np.random.RandomState(), "os.urandom"),
    "Thread.start": (lambda: threading.Thread(target=nothing).start(), "Thread.start"),
    "Timer.start": (lambda: threading.Timer(0, nothing).start(), "Thread.start"),
    "ThreadPoolExecutor.submit": (_thread_pool, "ThreadPoolExecutor.submit"),
    "ThreadPoolExecutor.map": (lambda: ThreadPoolExecutor(1).map(int, "1"), "ThreadPoolExecutor.submit"),
    "ProcessPoolExecutor.submit": (_process_pool, "ProcessPoolExecutor.submit"),
    "Process.start": (lambda: multiprocessing.Process(target=nothing).start(), "BaseProcess.start"),
    "asyncio.to_thread": (_to_thread, "loop.run_in_executor"),
    "loop.run_in_executor": (_run_in_executor, "loop.run_in_executor"),
    "loop.getaddrinfo": (_getaddrinfo, "loop.getaddrinfo"),
    "asyncio.open_connection": (_open_connection, "loop.create_connection"),
    "asyncio.start_server": (_start_server, "loop.create_server"),
    "asyncio.create_subprocess_exec": (_create_subprocess, "loop.subprocess_exec"),
    "socket.socket": (lambda: socket.socket(), "socket.__init__"),
    "socket.create_connection": (lambda: socket.create_connection(("localhost", 1)), "socket.create_connection"),
    "socket.getaddrinfo": (lambda: socket.getaddrinfo("localhost", 1), "socket.getaddrinfo"),
    "subprocess.Popen": (lambda: subprocess.Popen(["true"]), "Popen.__init__"),
    "subprocess.run": (lambda: subprocess.run(["true"], check=True), "Popen.__init__"),
    "os.fork": (lambda: os.fork(), "os.fork"),
    "os.system": (lambda: os.system("true"), "os.system"),
    "os.open": (lambda: os.open(HERE, os.O_RDONLY), "os.open"),
    "builtins.open": (lambda: open(HERE), "builtins.open"),  # noqa: SIM115
    "io.open": (lambda: io.open(HERE), "io.open"),  # noqa: SIM115, UP020
    "Path.read_text": (lambda: Path(HERE).read_text(), "io.open"),
}  # fmt: skip

CASES: Final = [pytest.param(*case, id=name) for name, case in ESCAPING.items()]


def lines_of(reach: Callable[[], Any]) -> set[int]:
    return {line for *_, line in reach.__code__.co_lines() if line is not None}


def is_told(text: str, reach: Callable[[], Any], what: str) -> bool:
    """Whether it names what was reached, and the line in this file where it was."""
    told = re.fullmatch(r"(.+) was reached inside the simulation, at ([^,]+):(\d+)(, by way of .+:\d+)?", text)
    assert told is not None, text
    return told[1].removeprefix("an unseeded ") == what and told[2] == HERE and int(told[3]) in lines_of(reach)


@pytest.mark.parametrize(("reach", "what"), CASES)
def test_an_escape_is_raised_where_it_is_reached(reach: Callable[[], Any], what: str) -> None:
    before = len(ESCAPES)
    with pytest.raises(Escape) as caught:
        inside(reach)
    assert is_told(str(caught.value), reach, what), caught.value
    assert ESCAPES[before:] == [str(caught.value)]
    assert not isinstance(caught.value, Exception)


@pytest.mark.parametrize(("reach", "what"), CASES)
def test_an_escape_counts_though_it_is_swallowed(reach: Callable[[], Any], what: str) -> None:
    async def swallows() -> str:
        try:
            found = reach()
            if inspect.isawaitable(found):
                await found
        except BaseException:
            return "went on as if nothing had happened"
        return "nothing was raised"

    before = len(ESCAPES)
    assert inside(swallows) == "went on as if nothing had happened"
    assert [is_told(text, reach, what) for text in ESCAPES[before:]] == [True]


def test_the_library_that_led_to_it_is_named_too() -> None:
    with pytest.raises(Escape, match=r"at .*test_fence\.py:\d+, by way of .*streams\.py:\d+$"):
        inside(_open_connection)


def test_a_callback_of_a_library_is_named_by_its_own_line() -> None:
    """Nobody of ours is on the way there, so the nearest line has to do."""

    async def main() -> None:
        asyncio.get_running_loop().call_soon(secrets.SystemRandom().random)
        await asyncio.sleep(1)

    with pytest.raises(Escape, match=r"os\.urandom was reached inside the simulation, at .*random\.py:\d+$"):
        inside(main)


def test_except_exception_does_not_stop_it() -> None:
    async def main() -> None:
        try:
            time.time()
        except Exception:
            raise AssertionError("an Escape must not be caught by this") from None

    with pytest.raises(Escape):
        inside(main)


def test_seeded_chance_is_let_in() -> None:
    def reach() -> tuple[float, float, float]:
        generator = random.Random(1)
        generator.seed(2)
        return generator.random(), random.Random(x).random(), np.random.default_rng(3).random()

    x = "a word"
    before = len(ESCAPES)
    assert inside(reach) == reach() == (random.Random(2).random(), random.Random(x).random(), np.random.default_rng(3).random())
    assert len(ESCAPES) == before


# --- outside of a simulation ------------------------------------------------------------------------------------------


def _joined() -> bool:
    thread = threading.Thread(target=nothing)
    thread.start()
    thread.join()
    return not thread.is_alive()


def _slept() -> bool:
    time.sleep(0)
    return True


def _submitted() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: 5).result()


def _socket_closed() -> bool:
    with socket.socket() as s:
        return s.fileno() >= 0


def _read() -> bool:
    with open(HERE) as file:
        return file.read() == Path(HERE).read_text()


OUTSIDE: Final[dict[str, Callable[[], Any]]] = {
    "time.time": lambda: time.time() > 1e9,
    "time.monotonic": lambda: time.monotonic() <= time.monotonic(),
    "time.perf_counter": lambda: time.perf_counter() <= time.perf_counter(),
    "time.sleep": _slept,
    "datetime.now": lambda: type(ROOMS["thalweg"].datetime.now()) is inspect.unwrap(ROOMS["outside"].datetime),
    "date.today": lambda: type(ROOMS["thalweg"].date.today()) is ROOMS["outside"].date,
    "datetime": lambda: type(ROOMS["thalweg"].datetime(2024, 2, 29)) is ROOMS["outside"].datetime,
    "date": lambda: type(ROOMS["thalweg"].date(2024, 2, 29)) is ROOMS["outside"].date,
    "datetime.fromisoformat": lambda: ROOMS["fakes"].datetime.fromisoformat("2024-02-29").day == 29,
    "isinstance": lambda: isinstance(ROOMS["outside"].datetime(2024, 2, 29), ROOMS["thalweg"].datetime),
    "issubclass": lambda: issubclass(ROOMS["outside"].datetime, ROOMS["thalweg"].date),
    "bound monotonic": lambda: ROOMS["thalweg"].monotonic() > 0,
    "random.random": lambda: 0 <= random.random() < 1,
    "random.Random()": lambda: random.Random().random() != random.Random().random(),
    "random.SystemRandom": lambda: 0 <= random.SystemRandom().random() < 1,
    "os.urandom": lambda: len(os.urandom(9)) == 9,
    "uuid.uuid4": lambda: uuid.uuid4().version == 4,
    "secrets.token_hex": lambda: len(secrets.token_hex(4)) == 8,
    "numpy.random.rand": lambda: np.random.rand(2).shape == (2,),
    "numpy default_rng": lambda: 0 <= np.random.default_rng().random() < 1,
    "Thread.start": _joined,
    "ThreadPoolExecutor.submit": lambda: _submitted() == 5,
    "socket.socket": _socket_closed,
    "subprocess.run": lambda: subprocess.run([sys.executable, "-c", "print(5)"], stdout=-1, check=True).stdout == b"5\n",
    "builtins.open": _read,
}


@pytest.mark.parametrize("call", OUTSIDE.values(), ids=OUTSIDE)
def test_outside_everything_works_as_ever(call: Callable[[], Any]) -> None:
    before = len(ESCAPES)
    assert call() is True
    assert len(ESCAPES) == before


async def test_stock_asyncio_works_as_ever() -> None:
    async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(9))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    before = len(ESCAPES)
    assert await asyncio.to_thread(lambda: 5) == 5
    assert await asyncio.get_running_loop().run_in_executor(None, lambda: 6) == 6
    async with await asyncio.start_server(echoes, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"echo")
        assert await reader.read(9) == b"echo"
        writer.close()
        await writer.wait_closed()
    assert time.time() > 1e9
    assert len(ESCAPES) == before


def test_another_thread_is_outside() -> None:
    """The simulation runs in one thread; a pool that was begun before it is not in it."""
    go, found = threading.Event(), []

    def looks() -> None:
        go.wait()
        found.append(time.time())

    thread = threading.Thread(target=looks)
    thread.start()

    async def main() -> None:
        go.set()
        thread.join()

    inside(main)
    assert found[0] > 1e9


def test_a_simulation_that_is_over_is_outside_again() -> None:
    with pytest.raises(Escape):
        inside(lambda: time.time())
    assert time.time() > 1e9


# --- putting it in ----------------------------------------------------------------------------------------------------


def test_names_are_replaced_in_the_rooms_alone() -> None:
    for name in ("monotonic", "sleep", "wall", "random", "urandom", "uuid4", "datetime", "date", "default_rng"):
        assert len({id(getattr(ROOMS[room], name)) for room in fence.ROOMS}) == 1
        assert getattr(ROOMS["thalweg"], name) is not getattr(ROOMS["outside"], name)
    assert inside(lambda: ROOMS["outside"].monotonic()) > 0


def test_install_is_idempotent() -> None:
    doors = [getattr(owner, name, None) for owner, name in fence.DOORS]
    fence.install()
    assert doors == [getattr(owner, name, None) for owner, name in fence.DOORS]


def test_a_module_imported_later_is_seen_to_by_the_next_install() -> None:
    late = ModuleType("catalogue.late")
    late.__dict__.update(datetime=ROOMS["outside"].datetime, monotonic=ROOMS["outside"].monotonic)
    sys.modules[late.__name__] = late
    try:
        fence.install()
        for reach in (late.datetime.now, late.monotonic):
            with pytest.raises(Escape):
                inside(reach)
    finally:
        del sys.modules[late.__name__]


FRESH: Final = """
import sys
from types import ModuleType

room = ModuleType("thalweg.bound")
exec("from time import monotonic; from datetime import datetime; from random import random", room.__dict__)
sys.modules[room.__name__] = room

from sim import fence
from sim.loop import SimLoop

fence.install()
for reach in (room.monotonic, room.datetime.now, room.random):
    async def main():
        reach()
    try:
        SimLoop().run_until_complete(main())
    except fence.Escape as escape:
        print(str(escape).split(" ")[0])
    reach()
"""


def test_in_a_fresh_process_names_bound_before_are_fenced() -> None:
    out = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (out.stdout, out.stderr) == ("time.monotonic\ndatetime.now\nrandom.random\n", "")


def test_every_way_of_a_loop_to_the_outside_escapes() -> None:
    """What asyncio has and the simulated loop does not know must not lead anywhere."""

    names = [
        n
        for n in vars(asyncio.AbstractEventLoop)
        if re.match("run_in_|get(addr|name)info|sock_|subprocess_|create_|connect_|add_|remove_|send|start_tls", n)
    ]
    ways = [n for n in names if n not in ("create_task", "create_future")]
    assert len(ways) > 20
    loop = SimLoop()  # type: ignore[abstract]  # the rest are set below the class
    for name in ways:
        with pytest.raises(Escape, match=rf"^loop\.{name} was reached inside the simulation, at {re.escape(HERE)}:"):
            getattr(loop, name)()
    loop.close()
