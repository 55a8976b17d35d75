"""The limits: how full each is, who waits and who has the slots; what an operator sets; what nobody has declared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from durable_actors._limits import Limit
from durable_actors._store.limits import LimitCaps, block_limits, declare_limits
from durable_actors.dashboard.views.limits import declared_words
from tests.dashboard.conftest import Browser, OpenBrowser
from tests.store.kit import connect, insert, pick

LIMITS = {
    "api": Limit(10, per=60, burst=2),
    "gpu": Limit(slots=1),
    "idle": Limit(5, slots=3),
}
NASTY = "<script>alert(1)</script>\x1b[31m"


@asynccontextmanager
async def used(dsn: str) -> AsyncIterator[psycopg.Connection]:
    """A rate with three that wait, a slot that is taken, a limit that nobody has declared, one at rest."""
    with psycopg.connect(dsn, autocommit=True) as db:
        async with connect(dsn) as conn:
            await declare_limits(conn, "durable", LIMITS, node="here")
            insert(db, 5, rate_limit="api:acme")
            insert(db, 2, rate_limit="!gpu")
            insert(db, 1, rate_limit="nobody:x")
            await pick(conn)
        yield db


async def listed(browser: Browser) -> dict[str, Any]:
    browser.app.desk.sampler.bell.ring()
    return {each["name"]: each for each in (await browser.get("/api/v1/limits")).json()["limits"]}


async def test_there_are_none(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert "There are no limits" in (await browser.get("/limits")).text
        assert (await browser.get("/api/v1/limits")).json()["limits"] == []
        assert (await browser.get("/limits/nothing")).status == 404
        assert (await browser.get("/limits/%00")).status == 404


async def test_level_next_token_and_who_has_the_slots(open_browser: OpenBrowser, durable_dsn: str):
    async with used(durable_dsn), open_browser() as browser:
        found = await listed(browser)
        assert list(found) == ["api", "gpu", "idle", "nobody"]
        api, gpu, idle, nobody = found.values()
        assert (api["rule"], api["waiting"], api["keys_total"]) == ("10 per minute, 2 at once", 3, 1)
        [acme] = api["keys"]
        assert (acme["key"], acme["waiting"], acme["next_at"] is not None) == ("api:acme", 3, True)
        assert acme["left"] < 1
        assert acme["first"] == [3, 4, 5]
        assert (gpu["rule"], gpu["taken"], gpu["waiting"], gpu["keys"][0]["holders"]) == ("1 slot", 1, 1, [6])
        assert (idle["keys"], idle["rule"]) == ([], "5 per second, 5 at once; 3 slots")
        assert (nobody["known"], nobody["waiting"]) == (False, 1)
        page = (await browser.get("/limits")).text
        assert "not declared" in page
        assert 'href="/limits/api"' in page
        page = (await browser.get("/limits/gpu")).text
        assert 'href="/instances/6"' in page
        assert 'href="/instances/7"' in page
        twin = (await browser.get("/api/v1/limits/gpu")).json()
        assert [(each["id"], each["key"], each["step"]) for each in twin["holders"]] == [(6, "gpu", "s")]
        assert "wait until a node declares it" in (await browser.get("/limits/nobody")).text
        assert "All keys are at rest" in (await browser.get("/limits/idle")).text


async def test_the_first_page_says_what_waits_for_a_limit(open_browser: OpenBrowser, durable_dsn: str):
    async with used(durable_dsn), open_browser() as browser:
        await browser.resample()
        page = await browser.get("/")
        assert "wait for limit nobody, which nobody has declared" in page.text
        assert 'href="/limits/nobody"' in page.text
        [queue] = (await browser.get("/api/v1/queues")).json()["queues"]
        assert (queue["throttled"], queue["executing"]) == (5, 3)
        metrics = (await browser.get("/metrics")).text
        assert 'durable_limit_waiting{limit="api"} 3\n' in metrics
        assert 'durable_instances{queue="default",state="throttled"} 5\n' in metrics
        assert 'durable_queue_paused{queue="default"} 0\n' in metrics


async def test_a_queue_in_which_everything_is_throttled_is_listed(
    open_browser: OpenBrowser, durable_dsn: str
):
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        insert(db, 2, rate_limit="api", limited_by="api", hold=3, queue="slow")
        async with open_browser() as browser:
            await browser.resample()
            assert "No live node serves queue slow: 2 instances wait" in (await browser.get("/")).text


async def test_an_api_has_said_wait(open_browser: OpenBrowser, durable_dsn: str):
    async with used(durable_dsn), open_browser() as browser, connect(durable_dsn) as conn:
        await block_limits(conn, "durable", ["api:acme"], 300)
        assert (await listed(browser))["api"]["blocked_until"] is not None
        assert "as the API said" in (await browser.get("/limits/api")).text


async def test_an_operator_sets_a_limit_and_clears_it(open_browser: OpenBrowser, durable_dsn: str):
    async with used(durable_dsn), open_browser() as browser:
        form = {"rate": "1", "per": "2m", "burst": "3", "reason": "they asked us to slow down"}
        assert (await browser.post("/limits/api/set", form)).status == 400, "a tick is missing"
        sure = {**form, "confirm": "yes", "idempotency_key": "once"}
        answer = await browser.post("/limits/api/set", sure)
        assert (answer.status, answer.headers["location"]) == (303, "/limits/api?done=set_limit")
        assert (await browser.post("/limits/api/set", {**sure, "rate": "9"})).status == 303, "the same form"
        twin = (await browser.get("/api/v1/limits/api")).json()["limit"]
        assert (twin["rule"], twin["declared_rule"], twin["set_by"]) == (
            "1 per 2 min, 3 at once",
            "10 per minute, 2 at once",
            "dashboard",
        )
        page = (await browser.get("/limits/api?done=set_limit")).text
        assert "The limit is set" in page
        assert "they asked us to slow down" in page
        audit = (await browser.get("/audit?scope=limit")).text
        assert 'href="/limits/api"' in audit
        assert (await browser.post("/api/v1/limits/api/clear")).json()["result"] == "cleared"
        assert (await browser.post("/limits/api/clear")).status == 404, "nothing is set any more"
        receipts = (await browser.get("/api/v1/limits/api")).json()["receipts"]
        assert [(each["command"], each["data"]["via"]) for each in receipts] == [
            ("clear", "dashboard"),
            ("set", "dashboard"),
        ]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"rate": "0"},
        {"rate": "nan"},
        {"rate": "1e3"},
        {"rate": "1", "per": "soon"},
        {"burst": "3"},
        {"slots": "0"},
        {"slots": "1.5"},
        {"slots": "99999999"},
    ],
    ids=str,
)
async def test_what_is_no_limit_is_refused(open_browser: OpenBrowser, form: dict[str, str]):
    async with open_browser() as browser:
        assert (await browser.post("/limits/api/set", {**form, "confirm": "yes"})).status == 400
        assert (await browser.post("/limits/no%20name/set", {"slots": "1", "confirm": "yes"})).status == 400
        assert (await browser.get("/api/v1/limits")).json()["limits"] == []


async def test_viewers_only_read(open_browser: OpenBrowser, durable_dsn: str):
    async with used(durable_dsn):
        async with open_browser(read_only=True) as browser:
            for verb in ("set", "clear"):
                assert (
                    await browser.post(f"/limits/api/{verb}", {"slots": "1", "confirm": "yes"})
                ).status == 403
            assert "<summary>Set</summary>" not in (await browser.get("/limits/api")).text
        async with open_browser(require_reason=True) as browser:
            assert (await browser.post("/limits/api/set", {"slots": "1", "confirm": "yes"})).status == 400
            assert (await browser.post("/limits/api/clear")).status == 400


async def test_hostile_names_are_shown_as_data(open_browser: OpenBrowser, durable_dsn: str):
    """Whoever writes rows by hand may write anything there."""
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        insert(db, 1, rate_limit=NASTY, limited_by=NASTY + ":" + NASTY, hold=3)
        db.execute(
            "insert into durable.limit_waits (key, queue, next_at) values (%s, 'default', now())",
            [NASTY + ":" + NASTY],
        )
        async with open_browser() as browser:
            await browser.resample()
            path = "/limits/" + NASTY.replace("<", "%3C").replace("/", "%2F").replace("\x1b", "%1B")
            for url in ("/limits", "/", "/metrics", path):
                page = await browser.get(url)
                assert page.status == 200, url
                assert "<script>alert" not in page.text or url == "/metrics"
                assert "\x1b" not in page.text or url == "/metrics"


async def test_many_keys_are_cut_and_said_so(
    open_browser: OpenBrowser, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    async with used(durable_dsn) as db, open_browser() as browser:
        db.execute(
            "insert into durable.limit_keys (key, tat, at) select 'api:t' || n, now() + interval '1 min', now()"
            " from generate_series(1, 80) n"
        )
        info = (await listed(browser))["api"]
        assert (len(info["keys"]), info["keys_total"], info["keys"][0]["key"]) == (5, 81, "api:acme")
        page = (await browser.get("/limits/api")).text
        assert "50 of 81 keys" in page
        found = (await browser.get("/api/v1/limits/api?q=t77")).json()["limit"]["keys"]
        assert [each["key"] for each in found] == ["api:t77"]
        monkeypatch.setattr(
            "durable_actors.dashboard.views.limits.ONE",
            LimitCaps(keys=50, waiting=2, lines=20),
        )
        page = (await browser.get("/limits/api")).text
        assert "Not everything was looked at" in page
        assert "2+" in page


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (Limit(100, per=60), "100 per minute, 100 at once"),
        (Limit(2.5), "2.5 per second, 3 at once"),
        (Limit(1, per=86400, burst=5), "1 per day, 5 at once"),
        (Limit(3, per=90), "3 per 90 s, 3 at once"),
        (Limit(1000, per=3600, slots=1), "1,000 per hour, 1,000 at once; 1 slot"),
    ],
    ids=str,
)
def test_a_definition_in_words(limit: Limit, words: str):
    assert declared_words(limit.declaration) == words
