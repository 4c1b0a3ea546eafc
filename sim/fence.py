"""The fence around a simulated world: a real clock, thread, socket, process or source of chance raises where it is reached.

`install` replaces the doors of the standard library and of NumPy once for the process. Outside a simulation they lead where
they always did; within one (a `SimLoop` is running in this thread) they raise `Escape`, which no `except Exception` stops.

Native pools cannot be fenced from here: Arrow and DataFusion are held to one thread instead.
"""

from __future__ import annotations

import _thread
import asyncio
import builtins
import concurrent.futures
import datetime
import io
import multiprocessing.process
import os
import random
import secrets
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, Final

import numpy as np

ROOMS: Final = ("thalweg", "fakes", "catalogue")
"""Packages in whose modules names bound before `install` are replaced too (`from time import monotonic`)."""


class Escape(BaseException):
    """Something of the real world was reached from inside a simulation."""

    def __init__(self, what: str) -> None:
        self.where, via = _call_site()
        super().__init__(f"{what} was reached inside the simulation, at {self.where}" + (via and f", by way of {via}"))
        ESCAPES.append(str(self))


ESCAPES: Final[list[str]] = []
"""Every escape of this process: one that somebody caught and swallowed is an escape all the same."""


_LIBRARIES: Final = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _of_a_library(frame: FrameType) -> bool:
    """Not code of ours, wherever that is installed."""
    if frame.f_globals.get("__name__", "").split(".")[0] in ROOMS:
        return False
    return frame.f_code.co_filename.startswith(("<frozen ", *_LIBRARIES))


def _call_site() -> tuple[str, str]:
    """The line of ours that led here, and the line of a library that it led through, if any."""
    frame: FrameType | None = sys._getframe(1)
    nearest = ours = None
    while frame is not None and ours is None:
        if not frame.f_code.co_filename.endswith(("sim/fence.py", "sim/loop.py")):
            nearest = nearest or frame
            if not _of_a_library(frame):
                ours = frame
        elif frame.f_code.co_name == "run_while":  # a library's own callback
            break
        frame = frame.f_back
    site = ours or nearest
    return _line(site), _line(nearest) if nearest is not site else ""


def _line(frame: FrameType | None) -> str:
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def inside() -> bool:
    """Whether a simulation runs in this thread."""
    loop = asyncio._get_running_loop()
    return loop is not None and type(loop).__name__ == "SimLoop"


HARNESS: Final = "hypothesis."
"""Its callback on garbage collections looks at the clock, whatever runs at the time: that is not the world's doing."""


def _by_the_harness() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(HARNESS)


def _fenced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def door(*args: Any, **kwargs: Any) -> Any:
        if inside() and not _by_the_harness():
            raise Escape(name)
        return real(*args, **kwargs)

    return door


def _seeded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def door(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        if seed is None and inside():
            raise Escape(name)
        return real(seed, *args, **kwargs)

    return door


DOORS: Final[tuple[tuple[Any, str], ...]] = (
    *((time, n) for n in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time",
        "process_time_ns", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "sleep", "localtime", "gmtime", "ctime",
    )),
    *((random, n) for n in (
        "random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "getrandbits", "gauss",
        "expovariate", "betavariate", "randbytes", "seed", "triangular", "normalvariate", "lognormvariate", "vonmisesvariate",
        "gammavariate", "paretovariate", "weibullvariate",
    )),
    *((secrets, n) for n in ("token_bytes", "token_hex", "token_urlsafe", "randbelow", "randbits", "choice")),
    *((uuid, n) for n in ("uuid1", "uuid4")),
    *((np.random, n) for n in np.random.__all__ if type(getattr(np.random, n)) is not type and n[0].islower()
      and n not in ("default_rng", "get_state", "set_state")),
    *((os, n) for n in (
        "urandom", "getrandom", "fork", "forkpty", "system", "posix_spawn", "posix_spawnp", "execv", "execve", "open", "popen",
    )),
    (threading.Thread, "start"),
    (_thread, "start_new_thread"),
    (concurrent.futures.ThreadPoolExecutor, "submit"),
    (concurrent.futures.ProcessPoolExecutor, "submit"),
    (multiprocessing.process.BaseProcess, "start"),
    (subprocess.Popen, "__init__"),
    (socket.socket, "__init__"),
    *((socket, n) for n in ("create_connection", "create_server", "getaddrinfo", "gethostbyname", "socketpair")),
    (builtins, "open"),
    (io, "open"),
)  # fmt: skip


class _Kind(type):
    """Whatever is a real datetime is one of ours too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class _Datetime(datetime.datetime, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A real one: what is made in a room leaves it."""
        return datetime.datetime(*args, **kwargs)  # noqa: DTZ001

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _fenced("datetime.now", datetime.datetime.now)(tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _fenced("datetime.utcnow", datetime.datetime.utcnow)()

    @classmethod
    def today(cls) -> Any:
        return _fenced("datetime.today", datetime.datetime.today)()


class _Date(datetime.date, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return datetime.date(*args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        return _fenced("date.today", datetime.date.today)()


def _seed(real: Callable[..., None]) -> Callable[..., None]:
    """What every `Random` is seeded by, also when it is made. Without a seed it asks the system for one, and not by `os`."""

    @wraps(real)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and inside():
            raise Escape("an unseeded random.Random")
        real(self, a, version)

    return seed


_SWAPS: Final[dict[int, tuple[Any, Any]]] = {}
"""By identity: what was, which must live on lest its id become somebody else's, and what takes its place."""


def install() -> None:
    """Put the doors in, for the rest of the process. Again: only into modules that have been imported since."""
    if not _SWAPS:
        _put_in()
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] in ROOMS:
            for key, value in list(vars(module).items()):
                if id(value) in _SWAPS:
                    setattr(module, key, _SWAPS[id(value)][1])


def _put_in() -> None:
    _SWAPS[id(datetime.datetime)] = datetime.datetime, _Datetime
    _SWAPS[id(datetime.date)] = datetime.date, _Date
    for owner, name in DOORS:
        real = getattr(owner, name, None)
        if real is not None:
            door = _fenced(f"{getattr(owner, '__name__', owner)}.{name}", real)
            setattr(owner, name, door)
            _SWAPS.setdefault(id(real), (real, door))
    unseeded: Any = np.random.default_rng
    np.random.default_rng = _seeded("an unseeded numpy.random.default_rng", unseeded)
    _SWAPS[id(unseeded)] = unseeded, np.random.default_rng
    random.Random.seed = _seed(random.Random.seed)  # type: ignore[method-assign]
    random._urandom = _fenced("os.urandom", random._urandom)  # type: ignore[attr-defined]  # SystemRandom's own name for it
