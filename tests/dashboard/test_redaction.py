"""Nothing of what is hidden is on any page or in its JSON twin, whoever put it there."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import pytest
from durable_actors.dashboard.redaction import Redactor
from durable_actors.dashboard_options import Dashboard
from durable_actors.testing import Bench
from tests.dashboard.conftest import Browser, OpenBrowser

SECRET = "DE4711"
PAGES = (
    "/", "/queues", "/queues/default", "/instances", "/instances?q=status:failed", "/instances?q=waiting:approval",
    "/approvals", "/triage", "/machines", "/machines/shop.Parent", "/limits", "/schedules", "/nodes", "/audit",
)  # fmt: skip


def hidden(value: Any) -> Any:
    """What a careful author's hook hides: the secret in whatever is shown."""
    if isinstance(value, str):
        return value.replace(SECRET, "(hidden)")
    if isinstance(value, dict):
        return {key: hidden(each) for key, each in value.items()}
    return [hidden(each) for each in value] if isinstance(value, list | tuple) else value


@attrs.frozen
class Account:
    iban: str


@pytest.fixture
def machines(registry: object) -> Any:
    class Child(da.Machine[Account], name="shop.Child", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Account]) -> da.Outcome:
            return da.Approval(self.decided, title="Pay?", data={"iban": SECRET})

        @da.step
        async def decided(self, ctx: da.Context[Account]) -> da.Outcome:
            return da.Await("more", then=self.decided)

    class Failing(da.Machine[Account], name="shop.Failing", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Account]) -> da.Outcome:
            raise ValueError(f"cannot pay to {SECRET}")

        async def handle(self, error: Exception, ctx: da.Context[Account]) -> da.Outcome:
            return da.Stop(error) if ctx.state.iban == SECRET else da.Retry(delay=3600)

    class Parent(da.Machine[Account], name="shop.Parent", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[Account]) -> da.Outcome:
            children = [
                da.Child(Child, state=ctx.state),
                da.Child(Failing, state=Account(f"not {SECRET}")),
                da.Child(Failing, state=ctx.state),
            ]
            return da.ScheduleChildren(self.end, children)

        @da.step
        async def end(self, ctx: da.Context[Account]) -> da.Outcome:
            return da.Done({"iban": SECRET})

    return Parent


async def everything(browser: Browser, ids: list[int]) -> dict[str, str]:
    found: dict[str, str] = {}
    for url in (*PAGES, *(f"/instances/{number}" for number in ids)):
        for each in (url, f"/api/v1{url}"):
            answer = await browser.get(each)
            assert answer.status == 200, each
            found[each] = answer.text
    return found


async def test_what_a_hook_hides_is_on_no_page(open_browser: OpenBrowser, durable: Bench, machines: Any):
    """State, result, errors, meta, signals, questions, decisions, receipts; and what explanations say of children."""
    number = await durable.insert(machines, state=Account(SECRET), meta={"iban": SECRET})
    await durable.drain()
    rows = [each["id"] for each in await _rows(open_browser)]
    assert len(rows) == 4
    async with open_browser() as browser:  # without the hook it is everywhere
        shown = await everything(browser, rows)
        why = (await browser.get(f"/api/v1/instances/{number}")).json()["why"]
        inner = [each["because"]["evidence"] for each in why["blockers"] if each["because"]]
        assert SECRET in str([each["last_error"] for each in inner])
        assert SECRET in str([each["boundary"] for each in inner])
        assert sum(SECRET in text for text in shown.values()) > 10
    async with open_browser(redact=lambda machine, what, value: hidden(value)) as browser:
        assert [url for url, text in (await everything(browser, rows)).items() if SECRET in text] == []
    child = min(each for each in rows if each != number)
    async with open_browser(redact=lambda machine, what, value: hidden(value)) as browser:
        client = browser.app.desk.client
        await client.approve(child, data={"iban": SECRET}, by="ada", meta={"iban": SECRET})
        await client.signal(child, "other", {"iban": SECRET})
        assert [url for url, text in (await everything(browser, rows)).items() if SECRET in text] == []
    async with open_browser(sensitive=["iban"]) as browser:
        page = (await browser.get(f"/api/v1/instances/{child}")).json()
        assert page["instance"]["state"] == {"iban": "[redacted]"}
        assert page["instance"]["decision"]["data"] == {"iban": "[redacted]"}
        assert page["receipts"][0]["data"] == {"iban": "[redacted]"}
        assert page["details"]["receipts"]
        assert SECRET not in str(page["why"])


async def _rows(open_browser: OpenBrowser) -> list[Any]:
    async with open_browser() as browser:
        return (await browser.get("/api/v1/instances")).json()["instances"]


def test_a_hook_that_raises_hides_everything():
    def fail(machine: str, what: str, value: Any) -> Any:
        raise KeyError(machine)

    assert Redactor(Dashboard(redact=fail)).shown("m", "state", {"a": 1}) == "[redacted]"
