"""The approvals: what is asked, in which order, and what becomes of a decision."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import durable_actors as da
import pytest
from durable_actors.dashboard.views.approvals import is_flat
from tests.dashboard.conftest import OpenBrowser

NASTY = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture
def machine(registry: object) -> Any:
    class Order(da.Machine[dict[str, Any]], name="shop.Order"):
        @da.step(initial=True)
        async def charge(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            state = ctx.state
            if state.get("pause"):
                return da.Pause(self.ship, title="Wait for stock")
            return da.Approval(
                self.ship, title=state["title"], data=state.get("data"), timeout=state.get("timeout")
            )

        @da.step
        async def ship(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            decision = ctx.decision
            assert decision is not None
            return da.Done({"by": decision.by, "comment": decision.comment, "data": decision.data})

    return Order


@asynccontextmanager
async def asked(dsn: str, machine: Any, *states: dict[str, Any]) -> AsyncIterator[list[int]]:
    """Instances that wait for a person."""
    async with da.open_client(dsn) as client:
        numbers: list[int] = []
        for state in states:
            number = await client.insert(machine, state=state)
            assert number is not None
            assert await client.execute_next() is not None
            numbers.append(number)
        yield numbers


async def test_nobody_is_waited_for(open_browser: OpenBrowser):
    async with open_browser() as browser:
        page = await browser.get("/approvals")
        assert page.status == 200
        assert "Nobody is waited for" in page.text
        assert (await browser.get("/api/v1/approvals")).json()["asks"] == []
        assert (await browser.get("/approvals?kind=nonsense")).status == 400


async def test_the_next_deadline_comes_first(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    states = ({"title": "late", "timeout": 9000}, {"pause": True}, {"title": "soon", "timeout": 60})
    async with asked(durable_dsn, machine, *states) as (late, pause, soon), open_browser() as browser:
        found = (await browser.get("/api/v1/approvals")).json()
        assert [each["id"] for each in found["asks"]] == [soon, late, pause]
        assert found["complete"]
        found = (await browser.get("/api/v1/approvals?kind=pause")).json()
        assert [(each["id"], each["title"]) for each in found["asks"]] == [(pause, "Wait for stock")]


async def test_pages_of_many(
    open_browser: OpenBrowser, durable_dsn: str, machine: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("durable_actors.dashboard.views.approvals.PAGE", 2)
    states = [{"title": f"number {n}"} for n in range(2)] + [{"pause": True}]
    async with asked(durable_dsn, machine, *states) as (first, second, third), open_browser() as browser:
        found = (await browser.get("/api/v1/approvals")).json()
        assert [each["id"] for each in found["asks"]] == [third, second]
        assert found["next_before"] == second
        assert not found["complete"]
        found = (await browser.get(f"/api/v1/approvals?before={second}")).json()
        assert [each["id"] for each in found["asks"]] == [first]
        assert found["next_before"] is None


async def test_what_is_asked_is_shown_as_data(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    states = (
        {"title": NASTY, "data": {"<i>": NASTY, "password": "hunter2"}},
        {"title": "large", "data": "x" * 60_000},
    )
    async with asked(durable_dsn, machine, *states), open_browser() as browser:
        page = await browser.get("/approvals")
        assert page.status == 200
        assert "<script>alert" not in page.text
        assert "<i>" not in page.text.replace("<i></i>", "")
        assert "\x1b" not in page.text
        assert "hunter2" not in page.text
        assert len(page.text) < 60_000
        _, small = sorted(
            (await browser.get("/api/v1/approvals")).json()["asks"], key=lambda each: -each["id"]
        )
        assert small["data"] == {"<i>": NASTY, "password": "[redacted]"}


@pytest.mark.parametrize("elsewhere", ["//example.org", "/\\example.org", "https://example.org"])
async def test_a_form_sends_nobody_elsewhere(
    open_browser: OpenBrowser, durable_dsn: str, machine: Any, elsewhere: str
):
    async with asked(durable_dsn, machine, {"title": "?"}) as (number,), open_browser() as browser:
        answer = await browser.post(f"/instances/{number}/approve", {"next": elsewhere})
        assert (answer.status, answer.headers["location"]) == (303, "/?done=approve")


async def test_one_approves(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    async with asked(durable_dsn, machine, {"title": "?"}) as (number,), open_browser() as browser:
        form = {"comment": "fine", "data": '{"limit": 7}', "reason": "known", "idempotency_key": "k"}
        answer = await browser.post(f"/approvals/{number}/approve", form)
        assert (answer.status, answer.headers["location"]) == (303, "/approvals?done=approve")
        assert "It is approved" in (await browser.get("/approvals?done=approve")).text
        assert (await browser.post(f"/approvals/{number}/approve", form)).status == 303, "the same form again"
        other = await browser.post(f"/approvals/{number}/approve", {"comment": "me, too"})
        assert other.status == 409, "decided meanwhile"
        client = browser.app.desk.client
        [receipt] = await client.receipts(number)
        assert (receipt.command, receipt.by, receipt.reason) == ("approve", "dashboard", "known")
    async with da.open_client(durable_dsn) as client:
        ended = await client.execute_next()
        assert ended is not None
        assert ended.result == {"by": "dashboard", "comment": "fine", "data": {"limit": 7}}


async def test_to_reject_needs_a_tick(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    async with asked(durable_dsn, machine, {"title": "?"}) as (number,), open_browser() as browser:
        assert (await browser.post(f"/approvals/{number}/reject")).status == 400
        answer = await browser.post(
            f"/api/v1/approvals/{number}/reject", {"confirm": "yes", "comment": "too much"}
        )
        assert answer.json() == {"ok": True, "id": number, "decision": "reject"}
        assert (await browser.app.desk.client.inspect(number)).status == "failed"


async def test_what_is_wrong_is_told(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    async with asked(durable_dsn, machine, {"pause": True}) as (number,), open_browser() as browser:
        assert (await browser.post("/approvals/999/proceed")).status == 404
        assert (await browser.post(f"/approvals/{number}/approve")).status == 409, "it is a pause"
        assert (await browser.post(f"/approvals/{number}/proceed", {"data": "{"})).status == 400
        assert (await browser.post(f"/approvals/{number}/proceed", {"comment": "x" * 2001})).status == 400
        assert (await browser.post(f"/approvals/{number}/proceed")).status == 303


async def test_viewers_may_only_read(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    async with (
        asked(durable_dsn, machine, {"title": "?"}) as (number,),
        open_browser(read_only=True) as browser,
    ):
        assert "<button>Approve" not in (await browser.get("/approvals")).text
        assert (await browser.post(f"/approvals/{number}/approve")).status == 403
        assert (await browser.app.desk.client.inspect(number)).boundary is not None


async def test_a_reason_may_be_required(open_browser: OpenBrowser, durable_dsn: str, machine: Any):
    async with (
        asked(durable_dsn, machine, {"title": "?"}) as (number,),
        open_browser(require_reason=True) as browser,
    ):
        assert (await browser.post(f"/approvals/{number}/approve")).status == 400
        assert (await browser.post(f"/approvals/{number}/approve", {"reason": "because"})).status == 303


def test_small_data_are_read_as_names_and_values():
    assert is_flat({"a": 1, "b": "x", "c": None, "d": True})
    for other in ({}, [], "x", None, {"a": {}}, {"a": []}, {str(n): n for n in range(13)}):
        assert not is_flat(other)
