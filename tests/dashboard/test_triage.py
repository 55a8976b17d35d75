"""Triage: groups of failed instances, and the retry of a group after a dry run."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._store import failures
from durable_actors._store.failures import FailureGroup, merged
from durable_actors.dashboard.views.triage import query_of, with_plain_error
from tests.dashboard.conftest import OpenBrowser

NASTY = '<script>alert(1)</script>\x1b[31m"'


def fail(dsn: str, count: int, machine: str, step: str, kind: str | None, text: str) -> None:
    """Failed rows, as the engine leaves them."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.gen_durable (fsm, step, status, finished_at, error_type, last_error)"
            " select %s, %s, 'failed', now(), %s, format(%s, n) from generate_series(1, %s) n",
            [machine, step, kind, text, count],
        )


async def test_nothing_has_failed(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert "No instance has failed" in (await browser.get("/triage")).text
        assert (await browser.get("/api/v1/triage")).json()["groups"] == []
        assert (await browser.get("/triage?by=nonsense")).status == 400


async def test_what_looks_alike_is_one_group(open_browser: OpenBrowser, durable_dsn: str):
    fail(durable_dsn, 3, "shop.Order", "charge", "bank.Timeout", "bank.Timeout: no answer to %s")
    fail(durable_dsn, 2, "shop.Mail", "send", "bank.Timeout", "bank.Timeout: no answer to %s")
    fail(durable_dsn, 1, "shop.Order", "charge", "bank.Timeout", "gave up on %s")  # handle said so
    fail(durable_dsn, 4, "shop.Order", "ship", None, "street %s does not exist")
    async with open_browser() as browser:
        found = (await browser.get("/api/v1/triage")).json()
        assert (found["looked"], found["capped"]) == (10, False)
        assert [(g["machine"], g["step"], g["error"], g["count"]) for g in found["groups"]] == [
            ("shop.Order", "ship", "street ", 4),
            ("shop.Order", "charge", "bank.Timeout", 3),
            ("shop.Mail", "send", "bank.Timeout", 2),
            ("shop.Order", "charge", "gave up on ", 1),
        ]
        found = (await browser.get("/api/v1/triage?by=error")).json()
        first = found["groups"][0]
        assert (first["machine"], first["error"], first["count"]) == (None, "bank.Timeout", 5)
        found = (await browser.get("/api/v1/triage?by=machine")).json()
        assert [(g["machine"], g["error"], g["count"]) for g in found["groups"]] == [
            ("shop.Order", None, 8),
            ("shop.Mail", "bank.Timeout", 2),
        ]
        page = await browser.get("/triage")
        assert "All 10 failed instances were looked at" in page.text


async def test_a_cap_says_so(open_browser: OpenBrowser, durable_dsn: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failures.read_failures, "__kwdefaults__", {"window": 5})
    monkeypatch.setattr("durable_actors.dashboard.views.triage.WINDOW", 5)
    monkeypatch.setattr(failures, "MOST_GROUPS", 1)
    fail(durable_dsn, 4, "m", "s", None, "old %s")
    fail(durable_dsn, 4, "m", "s", None, "new %s")
    async with open_browser() as browser:
        found = (await browser.get("/api/v1/triage")).json()
        assert (found["looked"], found["capped"], found["left_out"]) == (5, True, 1)
        assert "Only the newest 5 failed instances were looked at" in (await browser.get("/triage")).text


async def test_errors_are_shown_as_data(open_browser: OpenBrowser, durable_dsn: str):
    fail(durable_dsn, 1, NASTY, NASTY, None, NASTY)
    fail(durable_dsn, 1, "m", "s", None, "x" * 1_000_000)
    async with open_browser() as browser:
        page = await browser.get("/triage")
        assert page.status == 200
        assert "<script>alert" not in page.text
        assert "\x1b" not in page.text
        assert len(page.text) < 40_000
        assert sorted(len(g["text"]) for g in (await browser.get("/api/v1/triage")).json()["groups"]) == [
            31,
            1000,
        ]
        answer = await browser.post("/triage/retry", {"machine": NASTY, "step": NASTY})
        assert answer.status == 200
        assert "<script>alert" not in answer.text


async def test_a_group_is_counted_and_then_retried(open_browser: OpenBrowser, durable_dsn: str):
    fail(durable_dsn, 3, "shop.Order", "charge", "bank.Timeout", "bank.Timeout: no answer to %s")
    fail(durable_dsn, 2, "shop.Order", "ship", None, "no street %s")
    group = {"machine": "shop.Order", "step": "charge", "error": "bank.Timeout"}
    async with open_browser() as browser:
        client = browser.app.desk.client
        page = await browser.post("/triage/retry", group)
        assert (page.status, "I mean all 3" in page.text) == (200, True)
        assert (await browser.post("/api/v1/triage/retry", group)).json()["dry_run"]
        assert await client.receipts() == [], "nothing has happened"
        sure = {**group, "confirm": "yes", "count": "3", "reason": "the bank is back", "idempotency_key": "k"}
        answer = await browser.post("/api/v1/triage/retry", sure)
        assert {name: answer.json()[name] for name in ("state", "count", "done")} == {
            "state": "finished", "count": 3, "done": 3,
        }  # fmt: skip
        assert (await browser.post("/triage/retry", sure)).status == 303, "the same form again"
        runnable = await client.list_instances(da.Filter(status="runnable"))
        assert {each.step for each in runnable} == {"charge"}
        assert len([each for each in await client.receipts() if each.scope == "bulk"]) == 1
        found = (await browser.get("/api/v1/triage")).json()
        assert [each["step"] for each in found["groups"]] == ["ship"]
        [bulk] = found["bulks"]
        assert (bulk["state"], bulk["done"], bulk["reason"]) == ("finished", 3, "the bank is back")
        assert "the bank is back" in (await browser.get(f"/triage?done={bulk['id']}")).text


async def test_a_large_group_is_retried_in_the_background(open_browser: OpenBrowser, durable_dsn: str):
    fail(durable_dsn, 3, "m", "s", None, "no %s")
    async with open_browser() as browser:
        form = {"machine": "m", "confirm": "yes", "count": "101"}
        answer = (await browser.post("/api/v1/triage/retry", form)).json()
        assert (answer["state"], answer["done"]) == ("running", 0)
        assert (await browser.app.desk.client.inspect(answer["instance"])).queue == "durable.ops"
        assert ">running<" in (await browser.get("/triage")).text


async def test_what_may_not_be_retried(open_browser: OpenBrowser, durable_dsn: str):
    fail(durable_dsn, 1, "m", "s", None, "no")
    async with open_browser(read_only=True) as browser:
        assert "Retry …" not in (await browser.get("/triage")).text
        assert (await browser.post("/triage/retry", {"machine": "m"})).status == 403
    async with open_browser(require_reason=True) as browser:
        assert (await browser.post("/triage/retry", {})).status == 400, "nothing is named"
        sure = {"machine": "m", "confirm": "yes", "count": "1"}
        assert (await browser.post("/triage/retry", sure)).status == 400, "no reason"
        assert (await browser.post("/triage/retry", {**sure, "reason": "so"})).status == 303


def group(**given: Any) -> FailureGroup:
    known: dict[str, Any] = {
        "machine": "m", "step": "s", "error_type": None, "error": "e", "count": 1, "first": None, "last": None,
        "versions": (1,), "newest": 1, "text": None, "machines": ("m",),
    }  # fmt: skip
    return FailureGroup(**{**known, **given})


def test_a_text_with_quotes_can_be_filtered_by():
    assert query_of(group(error='no "x"')) == 'status:failed machine:"m" step:"s" error:"no "'
    assert query_of(group(error='"x"', step=None)) == 'status:failed machine:"m"'


def test_a_form_carries_what_a_page_can_show():
    assert with_plain_error(group(error="no \x1b[31m")).error == "no "
    assert with_plain_error(group(error="\x1b[31m")).error is None


def test_groups_are_put_together():
    several = [
        group(),
        group(step="t", count=5, versions=(2,), newest=7),
        group(machine="n", machines=("n",)),
    ]
    [one, two] = merged(several, "machine")
    assert (one.machine, one.step, one.count, one.versions, one.newest) == ("m", None, 6, (1, 2), 7)
    assert (two.machine, two.step, two.count) == ("n", "s", 1)
    assert merged(several, "all") == tuple(several)
