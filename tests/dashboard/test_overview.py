"""The overview, the queues and the list of instances: what they show, and as JSON."""

from __future__ import annotations

import durable_actors as da
from tests.dashboard.conftest import OpenBrowser


async def test_an_empty_database_is_shown(open_browser: OpenBrowser):
    async with open_browser() as browser:
        page = await browser.get("/")
        assert page.status == 200
        assert "No node is alive" in page.text
        assert (await browser.get("/api/v1/")).json()["queues"] == []


async def test_what_waits_is_counted(open_browser: OpenBrowser, durable_dsn: str, registry: object):
    @da.job(queue="mail/eu")
    async def send(args: int) -> None: ...

    async with da.open_client(durable_dsn), open_browser() as browser:
        await da.insert_many(send, [{"args": n} for n in range(3)])
        await browser.resample()
        assert "No live node serves queue mail/eu: 3 instances wait" in (await browser.get("/")).text
        [queue] = (await browser.get("/api/v1/queues")).json()["queues"]
        assert (queue["queue"], queue["due"], queue["nodes"]) == ("mail/eu", 3, 0)
        assert (await browser.get("/queues/mail%2Feu")).status == 200
