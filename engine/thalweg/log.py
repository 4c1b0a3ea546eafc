"""Structured events on standard error, as text for people or JSON lines for machines.

What a configuration calls a password, a token or a key is struck out of every event, wherever it turns up: servers and
client libraries like to repeat what they were given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TextIO
from urllib.parse import unquote

import structlog

from thalweg.core.plan import SECRET_NAME
from thalweg.core.topology import Topology

STRUCK: Final = "***"
SECRET_LENGTH_MIN: Final = 3
"""Shorter ones would strike out half of every event, and protect nothing."""


def secrets_of(topology: Topology) -> frozenset[str]:
    """Every text that must not be seen: secret client settings, and the passwords within URLs and connection strings."""
    options = [*(s.options for s in topology.sources), *(s.options for s in topology.sinks)]
    options += [topology.coverage.options, *(s.codec.registry_options for s in topology.sources)]
    found = {value for said in options for name, value in said.items() if SECRET_NAME.search(name)}
    urls = [s.url for s in topology.sinks] + [s.path for s in topology.sources] + [topology.coverage.url]
    for url in [*urls, *(s.codec.registry_url or "" for s in topology.sources)]:
        for password in re.findall(r"://[^/@\s:]*:([^/\s]+)@|\bpassword\s*=\s*(?:'([^']*)'|([^\s&']+))", url):
            said_as = "".join(password)
            found |= {said_as, unquote(said_as)}
    return frozenset(f for f in found if len(f) >= SECRET_LENGTH_MIN)


class Veil:
    """Strikes secrets out of texts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted(secrets, key=lambda s: (-len(s), s))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def over(self, value: Any) -> Any:
        """`value` with every secret struck out, in the texts within lists and mappings too."""
        if self._pattern is None or value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.over(k): self.over(v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.over(v) for v in value]
        return self._pattern.sub(STRUCK, value if isinstance(value, str) else str(value))


def make_report(form: str, veil: Veil | None = None, stream: TextIO | None = None) -> Callable[..., None]:
    """`report(event, **fields)`; `form` is text or json."""
    out = stream or sys.stderr
    hide = veil or Veil()
    colours = form == "text" and out.isatty()
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str) if form == "json" else structlog.dev.ConsoleRenderer(colors=colours)
    )

    def veiled(_: Any, __: str, event: Any) -> Any:
        return hide.over(event)

    logger = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=[veiled, structlog.processors.TimeStamper(fmt="iso", utc=True), renderer],
    )

    def report(event: str, **fields: Any) -> None:
        logger.msg(event, **fields)

    return report
