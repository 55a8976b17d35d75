"""The machines: the graph of each with live counts and ages, from the source or from journals."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store import steps as store
from durable_actors._store.steps import StepCount, Steps
from durable_actors.dashboard.views.machines import tally, with_counts
from durable_actors.dashboard.web import segment
from durable_actors.diagrams import Diagram, DiagramNode
from durable_actors.machine import isolated_registry
from durable_actors.testing import Bench
from tests.dashboard.conftest import Browser, OpenBrowser

NASTY = "<script>alert(1)</script>/\x1b[31m"


@pytest.fixture
def order(registry: object) -> Any:
    class Order(da.Machine[dict[str, Any]], name="shop.Order", journal="outcomes"):
        @da.step(initial=True)
        async def charge(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            if ctx.state.get("poor"):
                return da.Stop("no money")
            return da.Next(self.ship)

        @da.step
        async def ship(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Await(["delivered"], then=self.end)

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done()

    return Order


async def counts(browser: Browser, name: str) -> dict[str, dict[str, int]]:
    """Per step, what stands in it."""
    found = (await browser.get(f"/api/v1/machines/{segment(name)}")).json()["steps"]
    return {each["step"]: {kind: n for kind, n in each["counts"].items() if n} for each in found}


async def test_there_are_none(open_browser: OpenBrowser, registry: object):
    async with open_browser() as browser:
        assert "No node has a machine" in (await browser.get("/machines")).text
        assert (await browser.get("/api/v1/machines")).json()["machines"] == []
        assert (await browser.get("/machines/nothing")).status == 404


async def test_how_many_stand_in_each_step(open_browser: OpenBrowser, durable: Bench, order: Any):
    for state in ({}, {}, {"poor": True}):
        await durable.insert(order, state=state)
    await durable.drain()
    await durable.insert(order, state={})
    await durable.insert(order, state={}, schedule_in=3600)
    async with open_browser() as browser:
        assert await counts(browser, "shop.Order") == {
            "charge": {"ready": 1, "scheduled": 1, "failed": 1},
            "ship": {"waiting": 2},
            "end": {},
        }
        [found] = (await browser.get("/api/v1/machines")).json()["machines"]
        assert (found["name"], found["versions"], found["live"]) == ("shop.Order", [1], 4)
        page = await browser.get("/machines/shop.Order")
        assert page.status == 200
        for text in ("<svg", "2 waiting", "1 ready", "No live node has this machine"):
            assert text in page.text
        assert "<style" not in page.text
        assert "shop.Order" in (await browser.get("/machines?q=Order")).text
        assert "No machine has nothing in its name" in (await browser.get("/machines?q=nothing")).text
        await durable.insert(order, state={})
        assert (await counts(browser, "shop.Order"))["charge"]["ready"] == 1, (
            "once per sample, for all viewers"
        )
        await browser.resample()
        assert (await counts(browser, "shop.Order"))["charge"]["ready"] == 2


async def test_a_machine_whose_source_is_not_here_is_drawn_from_journals(
    open_browser: OpenBrowser, durable: Bench, order: Any
):
    await durable.insert(order, state={})
    await durable.drain()
    with isolated_registry():
        async with open_browser() as browser:
            found = (await browser.get("/api/v1/machines/shop.Order")).json()
            edges = [(each["source"], each["target"]) for each in found["diagram"]["edges"]]
            assert ("step:charge", "step:ship") in edges
            assert found["about"] is None
            assert "<svg" in (await browser.get("/machines/shop.Order")).text


async def test_the_tasks_of_a_workflow_have_their_counts(open_browser: OpenBrowser, durable: Bench):
    class Report(da.Workflow[dict[str, Any]], name="shop.Report"):
        @da.task(backoff=lambda attempt: 3600)
        async def orders(self, ctx: da.Context[dict[str, Any]]) -> int:
            raise RuntimeError("no orders")

        @da.task(after=[orders])
        async def totals(self, ctx: da.Context[dict[str, Any]]) -> None: ...

    await durable.insert(Report, state={})
    await durable.drain()
    async with open_browser() as browser:
        found = (await browser.get("/api/v1/machines/shop.Report")).json()
        counted = [(each["task"], each["counts"]["scheduled"]) for each in found["tasks"]]
        assert counted == [("orders", 1), ("totals", 0)], "it is to be retried"
        assert "1 scheduled" in (await browser.get("/machines/shop.Report")).text


async def test_what_a_hand_has_written_is_shown_as_data(
    open_browser: OpenBrowser, durable_dsn: str, registry: object
):
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.gen_durable (fsm, step) values (%s, %s), ('m', %s)",
            [NASTY, NASTY, "x" * 2000],
        )
    async with open_browser() as browser:
        for path in ("/machines", f"/machines/{segment(NASTY)}", "/machines/m"):
            page = await browser.get(path)
            assert page.status == 200
            assert "<script>alert" not in page.text
            assert "\x1b" not in page.text
            assert len(page.text) < 30_000
        assert await counts(browser, NASTY) == {NASTY: {"ready": 1}}


async def test_caps_say_so(
    open_browser: OpenBrowser, durable_dsn: str, registry: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store.read_steps, "__kwdefaults__", {"cap": 5, "window": 10})
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute("insert into durable.gen_durable (fsm, step) select 'm', 's' from generate_series(1, 12)")
    async with open_browser() as browser:
        found = (await browser.get("/api/v1/machines")).json()
        assert (found["capped"], found["partly"]) == (["ready"], True)
        page = await browser.get("/machines")
        assert ">5+<" in page.text
        assert "older ones are missing" in page.text


async def test_every_kind_of_row_is_counted_once(durable_dsn: str):
    """Also one that waits for a person, with and without a deadline."""
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.gen_durable (fsm, step, hold) values"
            " ('m', 's', 1), ('m', 's', 2), ('m', 's', 4), ('m', 's', 3), ('m', 's', 3), ('m', 's', 5)"
        )
        db.execute(
            "insert into durable.gen_durable (fsm, step, status, awaits, await_deadline, manual)"
            " select 'm', 's', 'awaiting_signal', '{go}', d, m"
            " from unnest(array[null, now()]) d, unnest(array[null, jsonb_build_object('kind', 'approval')]) m"
        )
        db.execute(
            "insert into durable.gen_durable (fsm, step, status, locked_by, claim_id, lease_expires_at)"
            " values ('m', 's', 'executing', 'n', gen_random_uuid(), now())"
        )
    conn = await PgConn.open(durable_dsn)
    try:
        found = await store.read_steps(conn, "durable")
    finally:
        conn.close()
    assert {each.kind: each.count for each in found.counts} == {
        "held": 1, "shelved": 1, "paused": 1, "limited": 2, "waiting": 5, "running": 1,
    }  # fmt: skip
    assert (found.capped, found.partly) == (frozenset(), False)


def test_counts_are_written_into_a_diagram():
    nodes = (
        DiagramNode(id="step:s", label="s", facts={"step": "s"}),
        DiagramNode(id="end:done", label="done"),
    )
    count = StepCount(machine="m", version=1, step="s", kind="waiting", count=1200, oldest=90.0, p95=80.0)
    failed = StepCount(machine="m", version=2, step="s", kind="failed", count=1, oldest=9000.0)
    steps = Steps(counts=(count, failed), capped=frozenset(), partly=False)
    first, last = with_counts(Diagram(kind="steps", title="t", nodes=nodes, edges=()), steps, "m").nodes
    assert (first.detail, first.state) == ("1,200 waiting (90 s) · 1 failed", "waiting")
    assert last == nodes[1]
    assert (tally([count, failed]).live, tally([count, failed]).oldest) == (1200, 90.0)
