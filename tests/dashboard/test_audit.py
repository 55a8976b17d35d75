"""The audit: receipts with filters and pages."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
from durable_actors._store import audit as store
from durable_actors.dashboard.views.audit import result_words
from tests.dashboard.conftest import OpenBrowser

NASTY = "<script>alert(1)</script>\x1b[31m"


async def test_no_command_was_given(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert "No command has been given yet" in (await browser.get("/audit")).text
        assert (await browser.get("/api/v1/audit")).json()["receipts"] == []


async def test_who_did_what(open_browser: OpenBrowser, durable_dsn: str, registry: object):
    @da.job
    async def send(args: int) -> None: ...

    async with da.open_client(durable_dsn) as client, open_browser() as browser:
        number = await client.insert(send, args=1)
        assert number is not None
        await client.cancel(number, by="ada", reason=NASTY, meta={"note": NASTY, "password": "hunter2"})
        await client.pause_queue("mail/eu", "shop.Order", by="bob", reason="x" * 2000)
        page = await browser.get("/audit")
        assert page.status == 200
        assert "<script>alert" not in page.text
        assert "\x1b" not in page.text
        assert "hunter2" not in page.text
        assert f'href="/instances/{number}"' in page.text
        assert 'href="/queues/mail%2Feu"' in page.text
        found = (await browser.get("/api/v1/audit")).json()["receipts"]
        assert [(each["command"], each["by"]) for each in found] == [("pause", "bob"), ("cancel", "ada")]
        assert found[1]["reason"] == NASTY
        for query, expected in (
            ("by=ada", ["cancel"]),
            ("command=pause", ["pause"]),
            ("scope=instance", ["cancel"]),
            ("target=Order", ["pause"]),
            ("by=nobody", []),
        ):
            found = (await browser.get(f"/api/v1/audit?{query}")).json()["receipts"]
            assert [each["command"] for each in found] == expected
        assert "No receipt matches" in (await browser.get("/audit?by=%00nobody")).text


async def test_pages_of_receipts(
    open_browser: OpenBrowser, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.receipts (command, scope, target)"
            " select case when n = 1 then 'cancel' else 'retry' end, 'instance', n::text from generate_series(1, 120) n"
        )
    async with open_browser() as browser:
        seen: list[str] = []
        before: int | None = None
        while before is not None or not seen:
            page = (await browser.get(f"/api/v1/audit{f'?before={before}' if before else ''}")).json()
            seen += [each["target"] for each in page["receipts"]]
            before = page["next_before"]
        assert seen == [str(n) for n in range(120, 0, -1)]
        monkeypatch.setitem(store.search_receipts.__kwdefaults__, "window", 100)
        page = await browser.get("/audit?command=cancel")
        assert "None among the 100 receipts that were looked at" in page.text
        before = (await browser.get("/api/v1/audit?command=cancel")).json()["next_before"]
        [found] = (await browser.get(f"/api/v1/audit?command=cancel&before={before}")).json()["receipts"]
        assert found["target"] == "1"


def test_results_in_words():
    bulk = {"count": 7, "done": 5, "skipped": 1, "failed": 1}
    assert result_words("instances", bulk) == "5 done, 1 skipped, 1 failed, of 7"
    assert result_words("instances", {"count": 7}) == "begun, of 7"
    pause = {"queue": "mail", "until": "2026-01-01T12:30:00+00:00"}
    assert result_words("mail", pause) == "until 2026-01-01 12:30 UTC"
    found = [result_words("7", each) for each in ("hastened", 8, 7, True, None, {}, [1])]
    assert found == ["hastened", "8", "", "", "", "", "[1]"]
