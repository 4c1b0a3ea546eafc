"""One node's line to one service."""

from __future__ import annotations

import asyncio

from fakes.faults import Calm, Fail, Reply, Wire


class Dead(Calm):
    """The node's power went in the middle of a step, which goes on to its next wait all the same."""

    def alive(self, node: str) -> bool:
        return False


async def test_a_node_without_power_sends_nothing_any_more() -> None:
    arrived: list[str] = []

    def arrive(reply: Reply, _fail: Fail) -> None:
        arrived.append("at the service")
        reply(None)

    sent = Wire(Calm(), "w0", "store").ask("put", arrive, changes=True)
    lost = Wire(Dead(), "w0", "store").ask("put", arrive, changes=True)
    await sent
    await asyncio.sleep(0)
    assert arrived == ["at the service"]
    assert not lost.done()
