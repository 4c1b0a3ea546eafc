"""Structured events on standard error, as text for people or JSON lines for machines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import structlog


def reporter(form: str) -> Callable[..., None]:
    """`report(event, **fields)`; `form` is text or json."""
    colours = form == "text" and sys.stderr.isatty()
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str) if form == "json" else structlog.dev.ConsoleRenderer(colors=colours)
    )
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[structlog.processors.TimeStamper(fmt="iso", utc=True), renderer],
    )

    def report(event: str, **fields: Any) -> None:
        logger.msg(event, **fields)

    return report
