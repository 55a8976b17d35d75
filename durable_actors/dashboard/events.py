"""The live stream of a page: server-sent events that say only that there is something new."""

from __future__ import annotations

from typing import Final

import trio

from durable_actors.dashboard.sampler import Bell
from durable_actors.dashboard.server import ClientGoneError, Receive, Send
from durable_actors.dashboard.web import Response

KEEP_ALIVE: Final = 15.0
"""Seconds after which a silent stream says something, so that proxies keep it open."""
LEAST_PAUSE: Final = 0.25
"""Seconds between two events of one stream: what happens meanwhile is one event."""
LONGEST: Final = 3600.0
"""Seconds after which a stream ends; the browser opens another one."""


class BellStream(Response):
    """Rings for one viewer until it leaves. No generator: a cancel scope must not be left by a `yield`."""

    def __init__(self, bell: Bell) -> None:
        super().__init__(content_type="text/event-stream", headers=[("Cache-Control", "no-store")])
        self._bell = bell

    async def send_to(self, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or an hour has passed."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers()})
        gone = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, receive, nursery.cancel_scope)
                nursery.cancel_scope.deadline = trio.current_time() + LONGEST
                await self._ring(send)
        except* ClientGoneError:
            gone = True
        if not gone:
            await send({"type": "http.response.body", "body": b""})

    async def _ring(self, send: Send) -> None:
        await send(_part(b"retry: 3000\n\n"))
        heard = self._bell.rung
        while True:
            with trio.move_on_after(KEEP_ALIVE) as quiet:
                heard = await self._bell.wait(heard)
            await send(_part(b": quiet\n\n" if quiet.cancelled_caught else b"event: ring\ndata: 1\n\n"))
            await trio.sleep(LEAST_PAUSE)


def _part(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
