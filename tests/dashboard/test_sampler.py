"""One sample per interval in the whole cluster; live updates cost one read per ring, however many look."""

from __future__ import annotations

import re
from typing import Any

import durable_actors as da
import msgspec
import pytest
import trio
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.samples import Sample, rates_of, take_sample
from durable_actors.dashboard.attention import attention
from durable_actors.dashboard.desk import LANE
from durable_actors.dashboard.views import PAGES, instances
from tests.dashboard.conftest import Browser, OpenBrowser
from tests.kit import until


async def test_of_two_dashboards_one_takes_the_sample(open_browser: OpenBrowser):
    async with open_browser() as one, open_browser() as other:
        taken = [each.app.desk.sampler.taken for each in (one, other)]
        assert sorted(taken) == [0, 1]
        assert one.app.desk.sampler.latest == other.app.desk.sampler.latest


async def test_a_sample_that_its_taker_did_not_finish_is_passed_over(open_browser: OpenBrowser):
    async with open_browser() as browser:
        sampler = browser.app.desk.sampler
        before = sampler.latest
        async with browser.app.desk.pool.acquire(LANE) as conn:
            await conn.run(
                _statement("insert into durable.samples (slot) select max(slot) + 1 from durable.samples")
            )
        await sampler.refresh()
        assert sampler.latest is before


async def test_old_samples_are_thinned_out(open_browser: OpenBrowser):
    async with open_browser() as browser:
        async with browser.app.desk.pool.acquire(LANE) as conn:
            old = (
                "insert into durable.samples (slot, at, data)"
                " select n, now() - interval '{}', '{{}}' from generate_series({}) n"
            )
            await conn.run(_statement(old.format("2 hours", "1, 120")))
            await conn.run(_statement(old.format("2 days", "1201, 1300")))
            await finish(browser)
            rows = (await conn.run(_statement("select slot from durable.samples where slot < 2000"))).rows
        assert [int(row[0]) for row in rows] == [n for n in range(1, 121) if n % 12 == 0]


def _statement(sql: str) -> Statement:
    return Statement(f"test {hash(sql)}", sql)


async def finish(browser: Browser) -> None:
    """Write a sample again, which thins out old ones."""
    async with browser.app.desk.pool.acquire(LANE) as conn:
        await conn.run(_statement("delete from durable.samples where slot > 2000"))
        assert await take_sample(conn, "durable", interval=3600) is not None


async def test_viewers_share_one_read_per_ring(
    open_browser: OpenBrowser, monkeypatch: pytest.MonkeyPatch, registry: object
):
    reads: list[object] = []
    real = instances.list_instances

    async def counted(*args: Any, **options: Any) -> Any:
        reads.append(args)
        return await real(*args, **options)

    monkeypatch.setattr(instances, "list_instances", counted)
    async with open_browser() as browser:
        for _ in range(20):
            assert (await browser.get("/instances", x_live="1")).status == 200
        assert len(reads) == 1
        browser.app.desk.sampler.bell.ring()
        await browser.get("/instances", x_live="1")
        await browser.get("/instances")  # somebody who opens the page sees what is there now
        assert len(reads) == 3


async def test_pages_of_samples_read_nothing(open_browser: OpenBrowser):
    async with open_browser() as browser:
        pool = browser.app.desk.pool
        held = [pool.acquire(LANE) for _ in range(3)]
        for each in held:
            await each.__aenter__()
        with trio.fail_after(5):
            for path in ("/", "/queues", "/metrics", "/readyz", "/healthz"):
                assert (await browser.get(path)).status == 200
        for each in reversed(held):
            await each.__aexit__(None, None, None)


async def test_without_a_database_pages_say_so(open_browser: OpenBrowser, durable_dsn: str):
    async with open_browser() as browser:
        browser.app.desk.pool.close()
        assert (await browser.get("/instances")).status == 503
        assert (await browser.get("/")).status == 200  # the last sample


async def test_metrics_are_text_for_prometheus(open_browser: OpenBrowser, durable_dsn: str, registry: object):
    @da.job(queue='we"ird\\\n')
    async def send(args: int) -> None: ...

    async with da.open_client(durable_dsn), open_browser() as browser:
        await da.insert(send, args=1)
        await browser.resample()
        text = (await browser.get("/metrics")).text
        assert 'durable_queue_due{queue="we\\"ird\\\\\\n"} 1\n' in text
        assert "durable_dashboard_up 1" in text


async def test_every_page_has_a_json_twin_and_loads_empty(open_browser: OpenBrowser):
    async with open_browser() as browser:
        for page in PAGES:
            if "{" not in page.path:
                assert (await browser.get(page.path)).status == 200, page.path
                twin = await browser.get(f"/api/v1{page.path}".rstrip("/"))
                assert twin.headers["content-type"] == "application/json"
                assert isinstance(twin.json(), dict)
                accepted = await browser.get(page.path, accept="application/json")
                assert accepted.headers["content-type"] == "application/json"


STRANGE = (
    "%00",
    "%ff%fe",
    "a%2F..%2Fb",
    "%3Cscript%3E",
    "x" * 3000,
    "%E6%97%A5%E6%9C%AC",
    "-1",
    "9" * 18,
    "%20",
    "'",
)


PARAMETERS = ("q", "by", "kind", "before", "rev", "done", "next", "command", "scope", "target", "other")


async def test_strange_names_and_parameters_are_no_bugs(open_browser: OpenBrowser):
    """Whatever a path or a parameter says, the answer is a page, or says what is wrong."""
    async with open_browser() as browser:
        for strange in STRANGE:
            for page in PAGES:
                path = re.sub(r"\{\w+(:int)?\}", lambda _, strange=strange: strange, page.path)
                query = "&".join(f"{name}={strange}" for name in PARAMETERS)
                for url in (path, f"{path}?{query}"):
                    answer = await browser.get(url)
                    assert answer.status in {200, 400, 404}, (url[:200], answer.text[-600:])
                    assert "<script>" not in answer.text.replace("<script src=", "")
                    assert (await browser.get("/api/v1" + url.rstrip("/"))).status == answer.status


def test_rates_and_attention_are_pure():
    text = b'{"at": "2026-11-18T12:00:%02d+00:00", "inserts": %d, "updates": 0, "nodes": []}'
    samples = {n: msgspec.json.decode(text % (n, 10 * n), type=Sample) for n in (5, 10, 20)}
    assert [round(each[1]) for each in rates_of(samples)] == [10, 10]
    assert attention(None) == []
    assert "sample is" in attention(samples[5])[0].text  # it is old


async def test_the_sampler_waits_for_a_database_that_is_away(
    open_browser: OpenBrowser, monkeypatch: pytest.MonkeyPatch
):
    async with open_browser() as browser:
        sampler = browser.app.desk.sampler

        async def away() -> None:
            raise da.StoreUnavailable("no route")

        monkeypatch.setattr(sampler, "refresh", away)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampler.run)
            await until(lambda: sampler.trouble)
            nursery.cancel_scope.cancel()
        assert "no route" in (await browser.get("/")).text
        assert (await browser.get("/readyz")).status == 503
