"""The schedules: next slots, last outcomes, pause, resume, run now."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from tests.dashboard.conftest import OpenBrowser

NASTY = "<script>alert(1)</script>/\x1b[31m"


@pytest.fixture
def nightly(registry: object) -> Any:
    @da.job(name="shop.nightly", queue="night")
    async def nightly() -> None: ...

    return nightly


async def test_there_are_none(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert "There are no schedules" in (await browser.get("/schedules")).text
        assert (await browser.get("/api/v1/schedules")).json()["schedules"] == []
        assert (await browser.get("/schedules/nothing")).status == 404


async def test_slots_and_outcomes(open_browser: OpenBrowser, durable_dsn: str, nightly: Any):
    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        await client.schedules.put("night/ly", nightly, cron="0 3 * * *", tz="Europe/Berlin")
        await client.schedules.put("often", nightly, every=30)
        number = await client.schedules.run_now("night/ly")
        assert await client.execute_next("night") is not None
        found = (await browser.get("/api/v1/schedules")).json()["schedules"]
        assert [(each["name"], each["words"], each["state"]) for each in found] == [
            ("night/ly", "every day at 03:00, Europe/Berlin", "active"),
            ("often", "every 30 seconds", "active"),
        ]
        assert len(found[0]["next"]) == 5
        [record] = found[0]["records"]
        assert (record["kind"], record["instance_id"], record["status"]) == ("run_now", number, "done")
        assert [
            each["name"] for each in (await browser.get("/api/v1/schedules?q=oft")).json()["schedules"]
        ] == ["often"]
        page = await browser.get("/schedules")
        assert 'href="/schedules/night%2Fly"' in page.text
        assert f'href="/instances/{number}"' in page.text
        page = await browser.get("/schedules/night%2Fly")
        assert (page.status, "every day at 03:00" in page.text) == (200, True)
        assert "night/ly" in (await browser.get("/api/v1/schedules/night%2Fly")).json()["schedule"]["name"]


async def test_slots_that_were_skipped_are_told(open_browser: OpenBrowser, durable_dsn: str, nightly: Any):
    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        await client.schedules.put("often", nightly, every=30)
        with psycopg.connect(durable_dsn, autocommit=True) as db:
            db.execute(
                "insert into durable.schedule_log (name, slot, last_slot, slots, outcome, reason)"
                " values ('often', now() - interval '1 h', now(), null, 'skipped', 'queue_paused'),"
                " ('often', now(), now(), 1, 'buffered', null)"
            )
        for path in ("/schedules", "/schedules/often"):
            page = await browser.get(path)
            assert page.status == 200
            assert "waits until the running instance has ended" in page.text
            assert "more than 1,000 slots" in page.text


async def test_names_are_shown_as_data(open_browser: OpenBrowser, durable_dsn: str, nightly: Any):
    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        await client.schedules.put("x" * 200, nightly, every=30)
        await client.schedules.pause("x" * 200, by=NASTY, reason=NASTY * 50)
        for path in ("/schedules", f"/schedules/{'x' * 200}"):
            page = await browser.get(path)
            assert page.status == 200
            assert "<script>alert" not in page.text
            assert "\x1b" not in page.text


async def test_pause_resume_and_run_now(open_browser: OpenBrowser, durable_dsn: str, nightly: Any):
    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        await client.schedules.put("night/ly", nightly, cron="0 3 * * *")
        at = "/schedules/night%2Fly"
        answer = await browser.post(f"{at}/pause", {"reason": "holidays"})
        assert (answer.status, answer.headers["location"]) == (303, f"{at}?done=pause")
        page = await browser.get(f"{at}?done=pause")
        assert "The schedule is paused." in page.text
        assert "by dashboard: holidays" in page.text
        assert (await browser.post(f"{at}/pause")).status == 409
        assert (await browser.post(f"/api/v1{at}/resume")).json() == {"ok": True, "state": "active"}
        assert (await browser.post(f"{at}/run_now")).status == 400, "a tick is missing"
        sure = {"confirm": "yes", "idempotency_key": "once"}
        first = (await browser.post(f"/api/v1{at}/run_now", sure)).json()["id"]
        assert (await browser.post(f"/api/v1{at}/run_now", sure)).json()["id"] == first, "the same form again"
        assert (await browser.post(f"{at}/run_now", {"confirm": "yes"})).status == 409, "one runs"
        beside = {"confirm": "yes", "overlap": "allow"}
        assert (await browser.post(f"/api/v1{at}/run_now", beside)).json()["id"] != first
        commands = [each["command"] for each in (await browser.get(f"/api/v1{at}")).json()["receipts"]]
        assert commands == ["run_now", "run_now", "resume", "pause", "put"]
        assert (await browser.post("/schedules/nothing/pause")).status == 404


async def test_viewers_may_only_read(open_browser: OpenBrowser, durable_dsn: str, nightly: Any):
    async with da.open_client(durable_dsn) as client:
        await client.schedules.put("often", nightly, every=30)
        async with open_browser(read_only=True) as browser:
            assert "Run now" not in (await browser.get("/schedules/often")).text
            for command in ("pause", "resume", "run_now"):
                assert (await browser.post(f"/schedules/often/{command}", {"confirm": "yes"})).status == 403
        async with open_browser(require_reason=True) as browser:
            assert (await browser.post("/schedules/often/pause")).status == 400
        assert (await client.schedules.get("often")).state == "active"


async def test_a_long_list_says_what_it_leaves_out(
    open_browser: OpenBrowser, durable_dsn: str, nightly: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("durable_actors.dashboard.views.schedules.MOST", 1)
    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        for name in ("a", "b", "c"):
            await client.schedules.put(name, nightly, every=30)
        assert "2 more are not shown" in (await browser.get("/schedules")).text
