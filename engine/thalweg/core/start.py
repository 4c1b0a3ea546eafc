"""Where to begin reading a partition that was just assigned.

Decides the start cursor from what the source's group stored, what the checkpoint says is durable, and where the log
begins and ends now. It never jumps in silence: positions passed over become an explained gap, or an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.core.coverage import Document
from thalweg.core.topology import OffsetReset
from thalweg.errors import Permanent


@dataclass(frozen=True)
class Start:
    """`base` is where the pipeline's claim on the partition (re)starts, `at` what is read first; between: `reason`."""

    base: int
    at: int
    reason: str = ""


def start_of(
    stored: int | None,
    document: Document | None,
    durable_prefix: int | None,
    low: int,
    high: int,
    reset: OffsetReset,
    where: str,
) -> Start:
    """The start cursor. All positions are *next* positions.

    `stored` is the group's committed cursor; `durable_prefix` up to where every gating sink holds everything from
    `stored` (or the document's base) on; `[low, high]` the log's bounds. Raises `Permanent` when there is nowhere to
    begin, or the stored position is gone, and `reset` is `error`.
    """
    known = stored
    if known is None and document is not None and document.base is not None:
        known = document.base
    if known is None:
        if reset is OffsetReset.ERROR:
            raise Permanent(
                "the group has no stored offset and there is no checkpoint",
                where=where,
                remedy="Set offset_reset to earliest or latest for the first start",
            )
        at = low if reset is OffsetReset.EARLIEST else high
        return Start(at, at)
    reach = max(known, durable_prefix if durable_prefix is not None else known)
    if reach < low:
        _unless_allowed(
            reset, where, f"stored offset {reach} is below the log start {low}: {low - reach} offset(s) are gone (retention)"
        )
        return Start(reach, low if reset is OffsetReset.EARLIEST else high, "retention")
    if reach > high:
        # Reading on from the new end would leave old coverage standing for records that replaced the lost ones.
        raise Permanent(
            f"stored offset {reach} is beyond the log end {high}: the log was truncated, or re-created under the same identity",
            where=where,
            remedy="Give the source a new cluster_id (its records are other records now) and a new group",
        )
    return Start(reach, reach)


def _unless_allowed(reset: OffsetReset, where: str, what: str) -> None:
    if reset is OffsetReset.ERROR:
        raise Permanent(
            what,
            where=where,
            remedy="Set offset_reset to earliest to go on from the log start with an explained gap, or move the group",
        )
