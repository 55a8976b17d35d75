"""The page of an instance, commands on it and on many; data is shown as data."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench
from tests.dashboard.conftest import Browser, OpenBrowser


@attrs.frozen
class Order:
    number: int
    card_token: str = "4242"
    note: str = ""
    street: str = "Hidden Lane"


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\"'`&\x07"


@pytest.fixture
def machines(registry: object) -> Any:
    class Checkout(da.Machine[Order], name="shop.Checkout", journal="full"):
        @da.step(initial=True)
        async def charge(self, ctx: da.Context[Order]) -> da.Outcome:
            if ctx.state.number < 0:
                return da.Stop(ValueError(HOSTILE))
            if ctx.state.number > 100:
                return da.Approval(self.ship, title="Large order", data={"number": ctx.state.number})
            return da.Next(self.ship, attrs.evolve(ctx.state, note="charged"))

        @da.step
        async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Await(["delivered"], then=self.end)

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done({"token": "t0p"})

    return Checkout


async def receipts(browser: Browser, number: int) -> list[Any]:
    return (await browser.get(f"/api/v1/instances/{number}")).json()["receipts"]


async def test_why_timeline_state_and_diagram(open_browser: OpenBrowser, durable: Bench, machines: Any):
    number = await durable.insert(machines, state=Order(7), unique_key="order-7", tags=["web"])
    await durable.drain()
    async with open_browser(sensitive=["street"]) as browser:
        page = await browser.get(f"/instances/{number}")
        assert page.status == 200
        for text in ("It awaits a signal", "charged", "rev 1", "order-7", "<svg", "[redacted]"):
            assert text in page.text
        for secret in ("4242", "Hidden Lane"):
            assert secret not in page.text
        data = (await browser.get(f"/api/v1/instances/{number}")).json()
        assert data["why"]["reason"] == "awaiting_signal"
        assert data["instance"]["state"] == {
            "number": 7, "card_token": "[redacted]", "note": "charged", "street": "[redacted]",
        }  # fmt: skip
        assert data["history"][0]["kind"] == "started"
        revs = {each["kind"]: each["rev"] for each in data["history"]}
        changed = (await browser.get(f"/api/v1/instances/{number}?rev={revs['next']}")).json()["change"]
        before, after = changed["state"]
        assert (before["note"], after["note"], after["street"]) == ("", "charged", "[redacted]")
        assert (await browser.get(f"/instances/{number}?rev=999")).status == 200


async def test_a_missing_instance_is_404(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert (await browser.get("/instances/4711")).status == 404
        assert (await browser.get("/instances/99999999999999999999")).status == 404
        assert (await browser.post("/instances/4711/retry")).status == 404


async def test_hostile_data_is_shown_as_data(open_browser: OpenBrowser, durable: Bench, machines: Any):
    state = Order(-1, note=HOSTILE + "x" * 1_000_000)
    number = await durable.insert(
        machines, state=state, unique_key=HOSTILE, tags=[HOSTILE.replace("\x07", "")]
    )
    await durable.drain()
    async with open_browser() as browser:
        for url in (f"/instances/{number}", "/instances", "/instances?q=" + "%3Cscript%3E"):
            text = (await browser.get(url)).text
            assert "<script>alert" not in text
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert len(text) < 200_000
        text = (await browser.get(f"/instances/{number}")).text
        assert "characters more" in text
        assert "\\u001b" in text
        assert "\\u202e" in text
        assert (
            len((await browser.get(f"/api/v1/instances/{number}")).json()["instance"]["state"]["note"])
            > 1_000_000
        )


async def test_a_hook_hides_errors_wherever_they_are_repeated(
    open_browser: OpenBrowser, durable: Bench, registry: object
):
    """The error of an instance is also in its traceback, its timeline, the drawing, and the pages of its family."""

    class Child(da.Machine, name="shop.Child", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Any]) -> da.Outcome:
            raise ValueError("iban DE4711")

    class Parent(da.Machine, name="shop.Parent", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(Child)])

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            raise RuntimeError(f"iban DE4711 of {len(ctx.children)}")

    def hide(machine: str, what: str, value: Any) -> Any:
        return "(hidden)" if what == "error" and value is not None else value

    parent = await durable.insert(Parent)
    await durable.drain()
    async with open_browser(redact=hide) as browser:
        found = (await browser.get("/api/v1/instances?q=machine:shop.Child")).json()["instances"]
        for number in (parent, found[0]["id"]):
            for url in (f"/instances/{number}", f"/api/v1/instances/{number}", "/triage", "/api/v1/triage"):
                text = (await browser.get(url)).text
                assert "DE4711" not in text, url
            assert "(hidden)" in (await browser.get(f"/instances/{number}")).text
            last = (await browser.get(f"/api/v1/instances/{number}")).json()["history"][-1]
            for prefix in ("", "/api/v1"):
                changed = (await browser.get(f"{prefix}/instances/{number}?rev={last['rev']}")).text
                assert "last_error" in changed
                assert "DE4711" not in changed
    async with open_browser() as browser:
        assert "DE4711" in (await browser.get(f"/instances/{parent}")).text


async def test_long_texts_are_cut_everywhere(open_browser: OpenBrowser, durable: Bench, registry: object):
    class Long(da.Machine, name="shop.Long", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Any]) -> da.Outcome:
            raise ValueError("x" * 1_000_000)

    number = await durable.insert(Long, unique_key="k" * 2000, partition_key="p" * 2000)
    await durable.drain()
    async with open_browser() as browser:
        for url in (f"/instances/{number}", "/triage", "/instances", "/"):
            page = await browser.get(url)
            assert page.status == 200
            assert len(page.text) < 120_000, url


async def test_deep_state_is_shown_and_has_a_json_twin(
    open_browser: OpenBrowser, durable: Bench, machines: Any
):
    number = await durable.insert(machines, state=Order(1))
    depth = 3000
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        deep = "[" * depth + "]" * depth
        db.execute("update durable.gen_durable set state = %s::jsonb where id = %s", [deep, number])
    async with open_browser() as browser:
        for url in (f"/instances/{number}", f"/api/v1/instances/{number}", "/instances"):
            assert (await browser.get(url)).status == 200, url
        assert (await browser.get(f"/api/v1/instances/{number}")).json()["instance"]["id"] == number


async def test_numbers_of_the_json_twin_are_exact_and_valid(
    open_browser: OpenBrowser, durable: Bench, machines: Any
):
    number = await durable.insert(machines, state=Order(1))
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        odd = '{"big": 12345678901234567890123, "huge": 1e999, "tiny": 1e-999}'
        db.execute("update durable.gen_durable set state = %s::jsonb where id = %s", [odd, number])
    async with open_browser() as browser:
        text = (await browser.get(f"/api/v1/instances/{number}")).text
        assert "Infinity" not in text
        assert "NaN" not in text
        assert (await browser.get(f"/instances/{number}")).status == 200


async def test_commands_leave_receipts(open_browser: OpenBrowser, durable: Bench, machines: Any):
    failed = await durable.insert(machines, state=Order(-1))
    parked = await durable.insert(machines, state=Order(1))
    await durable.drain()
    async with open_browser() as browser:
        done = await browser.post(f"/instances/{failed}/retry", {"reason": "the bank is back"})
        assert (done.status, done.headers["location"]) == (303, f"/instances/{failed}?done=retry")
        [receipt] = await receipts(browser, failed)
        assert (receipt["command"], receipt["by"], receipt["reason"]) == (
            "retry",
            "dashboard",
            "the bank is back",
        )
        assert receipt["data"] == {"via": "dashboard"}
        again = await browser.post(f"/instances/{failed}/retry")
        assert (again.status, "Conflict" in again.text) == (409, True)
        assert (await browser.post(f"/instances/{parked}/pause")).status == 303
        assert (await browser.post(f"/instances/{parked}/resume")).status == 303
        assert (await browser.post(f"/instances/{parked}/cancel")).status == 400  # not confirmed
        sent = {"name": "delivered", "payload": '{"by": "courier"}'}
        assert (await browser.post(f"/instances/{parked}/signal", sent)).status == 303
        assert (
            await browser.post(f"/instances/{parked}/signal", {"name": "x", "payload": "{"})
        ).status == 400
        assert (await browser.post(f"/instances/{parked}/cancel", {"confirm": "yes"})).status == 303
        new = await browser.post(f"/api/v1/instances/{parked}/rerun", {"confirm": "yes", "step": "ship"})
        assert (await browser.get(f"/instances/{new.json()['id']}")).status == 200


async def test_a_required_reason_is_required(open_browser: OpenBrowser, durable: Bench, machines: Any):
    number = await durable.insert(machines, state=Order(1))
    async with open_browser(require_reason=True) as browser:
        assert (await browser.post(f"/instances/{number}/pause")).status == 400
        assert (await browser.post(f"/instances/{number}/pause", {"reason": "wait"})).status == 303


async def test_a_person_decides_once(open_browser: OpenBrowser, durable: Bench, machines: Any):
    number = await durable.insert(machines, state=Order(500))
    await durable.drain()
    async with open_browser() as browser:
        assert "Large order" in (await browser.get(f"/instances/{number}")).text
        assert (await browser.post(f"/instances/{number}/approve", {"comment": "fine"})).status == 303
        assert (await browser.post(f"/instances/{number}/reject")).status == 409


async def test_selected_instances(open_browser: OpenBrowser, durable: Bench, machines: Any):
    ids = [await durable.insert(machines, state=Order(-1)) for _ in range(3)]
    await durable.drain()
    async with open_browser() as browser:
        form = {"command": "retry", "scope": "selected", "id": str(ids[0]), "reason": "again"}
        done = (await browser.post("/api/v1/instances/bulk", form)).json()
        assert (done["done"], done["refused"]) == ([ids[0]], {})
        done = (await browser.post("/api/v1/instances/bulk", form)).json()
        assert list(done["refused"]) == [str(ids[0])]
        assert (await browser.post("/instances/bulk", {"command": "retry"})).status == 400
        assert (await browser.post("/instances/bulk", {"command": "drop", "id": "1"})).status == 400


async def test_all_that_match_are_counted_before_anything_happens(
    open_browser: OpenBrowser, durable: Bench, machines: Any
):
    for _ in range(3):
        await durable.insert(machines, state=Order(-1))
    await durable.drain()
    async with open_browser() as browser:
        form = {"command": "retry", "scope": "all", "q": "status:failed machine:shop.Checkout"}
        page = await browser.post("/instances/bulk", form)
        assert "<b>3</b> instances match" in page.text
        assert len((await browser.get("/api/v1/instances?q=status:failed")).json()["instances"]) == 3
        begun = (
            await browser.post("/api/v1/instances/bulk", {**form, "confirm": "yes", "reason": "all"})
        ).json()
        assert begun["count"] == 3
        await durable.drain(max_steps=50)
        assert (await browser.get(f"/instances/{begun['instance']}")).status == 200
        for q in ("", "status:nonsense", "nonsense:1"):
            assert (await browser.post("/instances/bulk", {**form, "q": q})).status == 400


async def test_lists_are_paged_by_id(open_browser: OpenBrowser, durable: Bench, machines: Any):
    ids = [await durable.insert(machines, state=Order(n)) for n in range(1, 61)]
    async with open_browser() as browser:
        first = (await browser.get("/api/v1/instances")).json()
        assert [each["id"] for each in first["instances"]] == ids[:9:-1]
        rest = (await browser.get(f"/api/v1/instances?before={first['next_before']}")).json()
        assert [each["id"] for each in rest["instances"]] == ids[9::-1]
        assert rest["next_before"] is None
        [one] = (await browser.get(f"/api/v1/instances?q={ids[3]}")).json()["instances"]
        assert one["id"] == ids[3]
        assert "takes runnable" in (await browser.get("/instances?q=status:nonsense")).text
