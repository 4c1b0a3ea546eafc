"""The fence around a simulated world: a real clock, thread, socket, process or source of chance raises where it is reached.

`install` replaces the doors of the standard library and of NumPy once for the process. Outside a simulation they lead where
they always did; within one (a `SimLoop` is running in this thread) they raise `Escape`, which no `except Exception` stops.

Native pools cannot be fenced from here: Arrow and DataFusion are held to one thread instead.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import datetime
import multiprocessing.process
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import numpy as np

ROOMS: Final = ("thalweg", "fakes", "catalogue")
"""Packages in whose modules names bound before `install` are replaced too (`from time import monotonic`)."""


class Escape(BaseException):
    """Something of the real world was reached from inside a simulation."""

    def __init__(self, what: str) -> None:
        self.where = _call_site()
        super().__init__(f"{what} was reached inside the simulation, at {self.where}")
        ESCAPES.append(str(self))


ESCAPES: Final[list[str]] = []
"""Every escape of this process: one that somebody caught and swallowed is an escape all the same."""


def _call_site() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("sim/fence.py", "sim/loop.py")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def inside() -> bool:
    """Whether a simulation runs in this thread."""
    loop = asyncio._get_running_loop()
    return loop is not None and type(loop).__name__ == "SimLoop"


def _fenced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def door(*args: Any, **kwargs: Any) -> Any:
        if inside():
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
        "sleep", "localtime", "gmtime", "ctime",
    )),
    *((random, n) for n in (
        "random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "getrandbits", "gauss",
        "expovariate", "betavariate", "randbytes", "seed",
    )),
    *((secrets, n) for n in ("token_bytes", "token_hex", "token_urlsafe", "randbelow", "choice")),
    *((uuid, n) for n in ("uuid1", "uuid4")),
    *((np.random, n) for n in ("random", "rand", "randn", "randint", "choice", "shuffle", "permutation", "normal", "uniform")),
    *((os, n) for n in ("urandom", "getrandom", "fork", "system", "posix_spawn", "open", "popen")),
    (threading.Thread, "start"),
    (threading.Timer, "start"),
    (concurrent.futures.ThreadPoolExecutor, "submit"),
    (concurrent.futures.ProcessPoolExecutor, "submit"),
    (multiprocessing.process.BaseProcess, "start"),
    (subprocess.Popen, "__init__"),
    (socket.socket, "__init__"),
    *((socket, n) for n in ("create_connection", "create_server", "getaddrinfo", "gethostbyname", "socketpair")),
    (builtins, "open"),
)  # fmt: skip


class _Kind(type):
    """Whatever is a real datetime is one of ours too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class _Datetime(datetime.datetime, metaclass=_Kind):
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
    @classmethod
    def today(cls) -> Any:
        return _fenced("date.today", datetime.date.today)()


_installed = False


def install() -> None:
    """Put the doors in. Idempotent; for the rest of the process."""
    global _installed
    if _installed:
        return
    _installed = True
    swaps: dict[int, Any] = {id(datetime.datetime): _Datetime, id(datetime.date): _Date}
    keep: list[Any] = []  # what is replaced must live on, or its id would be somebody else's
    for owner, name in DOORS:
        real = getattr(owner, name, None)
        if real is None:
            continue
        label = f"{getattr(owner, '__name__', owner)}.{name}"
        door = _fenced(label, real)
        setattr(owner, name, door)
        keep.append(real)
        swaps[id(real)] = door
    for owner, name in ((random, "Random"), (np.random, "default_rng")):
        real = getattr(owner, name)
        if isinstance(real, type):
            continue  # a class that others inherit from: its unseeded instances are found by the seed they ask os for
        door = _seeded(f"{owner.__name__}.{name}", real)
        setattr(owner, name, door)
        keep.append(real)
        swaps[id(real)] = door
    random._urandom = _fenced("os.urandom", random._urandom)  # type: ignore[attr-defined]  # SystemRandom's own name for it
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] in ROOMS:
            for key, value in list(vars(module).items()):
                if id(value) in swaps and not isinstance(value, (int, str, bytes, float)):
                    setattr(module, key, swaps[id(value)])
    _KEPT.extend(keep)


_KEPT: Final[list[Any]] = []
