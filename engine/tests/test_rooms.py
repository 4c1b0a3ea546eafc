"""The rooms: who may import whom, who may look at a clock, and that no module keeps state.

Two nodes share a process in a simulator, and a module's cache would survive a power cut there: so there is none. Each rule
is proven by violations planted in a copy of the tree: a rule that never fired guards nothing.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "engine" / "thalweg"
ROOMS = ("engine/thalweg", "catalogue", "fakes", "sim", "chaos")

MUTABLE = {
    "list", "dict", "set", "bytearray", "Counter", "defaultdict", "deque", "OrderedDict", "ChainMap", "WeakKeyDictionary",
    "WeakValueDictionary", "WeakSet", "count", "cycle", "Lock", "Event", "Semaphore", "Queue", "ContextVar", "SessionContext",
}  # fmt: skip
MUTATORS = {
    "append", "add", "update", "pop", "popitem", "setdefault", "clear", "extend", "insert", "remove", "discard", "appendleft",
    "sort", "reverse",
}  # fmt: skip
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as lint; lint()"
CACHES = {"cache", "lru_cache", "singledispatch"}


def _called(node: ast.expr) -> str:
    """The last name of what a call calls: `collections.deque[int]()` is deque."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _called(value.func) in MUTABLE
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _is_final(annotation: ast.expr) -> bool:
    return _called(annotation) == "Final" or ast.unparse(annotation).startswith("Sequence")


def state_of(source: str) -> list[str]:
    """What in a module's source is mutable state of the module: `line: what`."""
    tree = ast.parse(source)
    found: list[str] = []
    containers: set[str] = set()
    for node in tree.body:
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        final = False
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value, final = [node.target], node.value, _is_final(node.annotation)
        elif isinstance(node, ast.AugAssign):
            found.append(f"{node.lineno}: a module-level value grows")
        if _is_container(value):
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            containers |= names
            if not final and names != {"__all__"}:
                found.append(f"{node.lineno}: {', '.join(sorted(names))} is a container that is not Final")
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            found.append(f"{inner.lineno}: global {', '.join(inner.names)}")
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [
                f"{inner.lineno}: {inner.name} keeps a cache"
                for decorator in inner.decorator_list
                if _called(decorator.func if isinstance(decorator, ast.Call) else decorator) in CACHES
            ]
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and isinstance(inner.func.value, ast.Name):
            if inner.func.value.id in containers and inner.func.attr in MUTATORS:
                found.append(f"{inner.lineno}: {inner.func.value.id}.{inner.func.attr}() changes a constant")
        elif (
            isinstance(inner, ast.Subscript)
            and not isinstance(inner.ctx, ast.Load)
            and isinstance(inner.value, ast.Name)
            and inner.value.id in containers
        ):
            found.append(f"{inner.lineno}: {inner.value.id}[…] is changed")
    return found


def modules() -> Iterator[Path]:
    yield from sorted(ENGINE.rglob("*.py"))


def test_engine_keeps_no_module_state() -> None:
    found = {str(path.relative_to(ENGINE)): state for path in modules() if (state := state_of(path.read_text()))}
    assert found == {}
    assert len(list(modules())) > 30


@pytest.mark.parametrize(
    "source",
    [
        "SEEN = {}",
        "SEEN: dict[str, int] = {}",
        "SEEN = set()",
        "SEEN = collections.defaultdict(list)",
        "SEEN = [x for x in range(3)]",
        "SEEN: Final = {}\ndef f(x):\n    SEEN[x] = 1",
        "SEEN: Final = []\ndef f(x):\n    SEEN.append(x)",
        "SEEN: Final = {}\ndef f(x):\n    del SEEN[x]",
        "N = 0\ndef f():\n    global N\n    N += 1",
        "N = 0\nN += 1",
        "@functools.lru_cache(maxsize=None)\ndef f(x):\n    return x",
        "@cache\ndef f(x):\n    return x",
        "NUMBERS = itertools.count()",
        "LOCK = asyncio.Lock()",
    ],
)
def test_module_state_is_seen(source: str) -> None:
    assert state_of(source) != []


@pytest.mark.parametrize(
    "source",
    ["A: Final = {1: 2}\ndef f(x):\n    return A[x]", "B = (1, 2)", "C: Final = frozenset({1})", "__all__ = ['A']", "D = 'x'"],
)
def test_constants_are_no_state(source: str) -> None:
    assert state_of(source) == []


def test_foreign_memory_has_one_door() -> None:
    for path in modules():
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert path.name == "arrow.py" or not names & {"ctypes", "cffi", "_ctypes"}, path


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, to plant violations in."""
    folder = tmp_path_factory.mktemp("rooms")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def imports_judged(folder: Path) -> tuple[int, str]:
    """Exit status and words of import-linter over a tree."""
    paths = os.pathsep.join((str(folder / "engine"), str(folder)))
    done = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache", str(folder / "pyproject.toml")],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# (module, import that it must not make); every rule of pyproject.toml has at least one.
FORBIDDEN_EDGES = (
    ("thalweg.core.ack", "catalogue.invariants"),
    ("thalweg.core.ack", "fakes"),
    ("fakes", "catalogue.world"),
    ("catalogue.world", "fakes"),
    ("sim", "chaos.stack"),
    ("chaos.stack", "sim"),
    ("catalogue.sabotage", "chaos.world"),
    ("thalweg.core.ack", "thalweg.ports"),
    ("thalweg.core.batch", "thalweg.runtime.worker"),
    ("thalweg.errors", "thalweg.arrow"),
    ("thalweg.arrow", "thalweg.probes"),
    ("thalweg.ports", "thalweg.codecs.codec"),
    ("thalweg.codecs.plain", "thalweg.runtime.lander"),
    ("thalweg.runtime.lander", "thalweg.adapters.system"),
    ("thalweg.adapters.system", "thalweg.runtime.lander"),
    ("thalweg.runtime.lander", "thalweg.node"),
    ("thalweg.node", "thalweg.config"),
    ("thalweg.log", "thalweg.__main__"),
    ("thalweg.core.ack", "asyncio"),
    ("thalweg.codecs.plain", "threading"),
    ("thalweg.runtime.worker", "confluent_kafka"),
    ("thalweg.runtime.table", "psycopg"),
    ("thalweg.adapters.files", "obstore"),
    ("thalweg.adapters.objects", "httpx"),
    ("thalweg.core.sql", "datafusion"),
    ("thalweg.codecs.text", "fastavro"),
    ("thalweg.node", "uvicorn"),
    ("catalogue.invariants", "thalweg.core.coverage"),
)


def file_of(folder: Path, module: str) -> Path:
    """Where a module lives in a copy of the tree."""
    path = folder / ("engine" if module.startswith("thalweg") else "") / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_imports_go_where_they_may(copy: Path) -> None:
    """The tree as it is keeps every contract; each planted edge breaks one, and every contract is broken by some edge."""
    status, words = imports_judged(copy)
    assert status == 0, words
    for module, target in FORBIDDEN_EDGES:
        with file_of(copy, module).open("a") as file:
            file.write(f"\nimport {target}\n")
    stray = copy / "engine" / "thalweg" / "stray.py"
    stray.write_text('"""A module without a layer."""\n')
    status, words = imports_judged(copy)
    assert status == 1, words
    contracts = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [c["name"] for c in contracts if f"{c['name']} BROKEN" not in " ".join(words.split())] == []
    flat = " ".join(words.split())
    missed = [
        (module, target)
        for module, target in FORBIDDEN_EDGES
        if f"{module} -> {target} (l." not in flat  # with the line it was planted in
    ]
    assert missed == []
    assert "thalweg.stray" in flat or "stray" in flat


BANNED = (
    "import time",
    "from time import monotonic",
    "from datetime import datetime\nNOW = datetime.now()",
    "import random",
    "import secrets",
    "from uuid import uuid4",
    "import os\nNOISE = os.urandom(3)",
    "import asyncio\nWORK = asyncio.to_thread",
    "import threading",
    "from concurrent.futures import ThreadPoolExecutor",
    "import multiprocessing",
    "import ctypes",
    "import numpy as np\nNOISE = np.random",
)


@pytest.mark.parametrize("source", BANNED)
def test_clocks_chance_and_threads_are_banned(source: str) -> None:
    """Everywhere in the engine except the one adapter that lets them in."""

    def codes(path: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json", "--stdin-filename", path, "-"],
            input=source + "\n", capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        return {found["code"] for found in json.loads(done.stdout)}

    assert "TID251" in codes("engine/thalweg/runtime/worker.py")
    assert "TID251" not in codes("engine/thalweg/adapters/system.py")
