"""The nodes: what the database knows of each, and the live tree of the engine in this process."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors.dashboard.opening import open_app
from durable_actors.dashboard.web import segment
from durable_actors.dashboard_options import Dashboard
from tests.dashboard.conftest import Browser, OpenBrowser

NASTY = "<script>alert(1)</script>\x1b[31m/"


async def test_nobody_works_here(open_browser: OpenBrowser):
    async with open_browser() as browser:
        assert "No node works here" in (await browser.get("/nodes")).text
        assert (await browser.get("/api/v1/nodes")).json()["nodes"] == []
        assert (await browser.get("/nodes/nobody")).status == 404


async def test_a_node_in_this_process_shows_its_tree(durable_dsn: str, registry: object):
    begun, go_on = trio.Event(), trio.Event()

    @da.job(name="shop.mail", queue="mail")
    async def mail(args: int) -> None:
        begun.set()
        await go_on.wait()

    async with da.open_engine(dsn=durable_dsn, queues={"mail": 3}) as engine:
        number = await engine.client.insert(mail, args=1)
        await begun.wait()
        async with open_app(durable_dsn, settings=Dashboard(interval=3600), engine=engine) as app:
            browser = Browser(app)
            [found] = (await browser.get("/api/v1/nodes")).json()["nodes"]
            assert (found["state"], found["queues"], found["here"]) == ("alive", {"mail": 3}, True)
            assert "shop.mail/1" in found["machines"]
            at = f"/nodes/{segment(engine.incarnation)}"
            page = await browser.get(at)
            assert page.status == 200
            assert "supervisor" in page.text
            assert f'href="/instances/{number}"' in page.text
            found = (await browser.get(f"/api/v1{at}")).json()
            assert [each["id"] for each in found["claims"]] == [number]
            assert found["tree"]["kind"] == "supervisor"
            assert found["tree"]["supervisor"]["used"] == 0
            assert "0 of" in page.text, "restarts that it has used"
            assert "pool task" in str(found["tree"]), "what runs is in the tree"
            with psycopg.connect(durable_dsn, autocommit=True) as db:
                db.execute("insert into durable.nodes (incarnation, node) values ('another', 'another')")
            assert (await browser.get("/api/v1/nodes/another")).json()["tree"] is None, "not this one's"
        go_on.set()


async def test_another_process_has_no_tree(open_browser: OpenBrowser, durable_dsn: str, registry: object):
    async with da.open_engine(dsn=durable_dsn, queues={"mail": 3}) as engine, open_browser() as browser:
        at = f"/nodes/{segment(engine.incarnation)}"
        assert "lives in its process" in (await browser.get(at)).text
        assert (await browser.get(f"/api/v1{at}")).json()["tree"] is None
    async with open_browser() as browser:
        [found] = (await browser.get("/api/v1/nodes")).json()["nodes"]
        assert found["state"] == "stopped"


async def test_what_a_hand_has_written_is_shown_as_data(
    open_browser: OpenBrowser, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("durable_actors.dashboard.views.nodes.CLAIMS", 1)
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.gen_durable (fsm, step, status, locked_by, claim_id, lease_expires_at)"
            " select %s, %s, 'executing', %s, gen_random_uuid(), now() from generate_series(1, 2)",
            [NASTY, "x" * 3000, NASTY],
        )
        db.execute("insert into durable.nodes (incarnation, node, about) values ('odd', 'odd', '[1, 2]')")
    async with open_browser() as browser:
        for path in ("/nodes", f"/nodes/{segment(NASTY)}", "/nodes/odd"):
            page = await browser.get(path)
            assert page.status == 200
            assert "<script>alert" not in page.text
            assert "\x1b" not in page.text
        assert "1 of 2" in (await browser.get(f"/nodes/{segment(NASTY)}")).text


async def test_a_long_list_says_what_it_leaves_out(
    open_browser: OpenBrowser, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("durable_actors.dashboard.views.nodes.MOST", 1)
    with psycopg.connect(durable_dsn, autocommit=True) as db:
        db.execute(
            "insert into durable.nodes (incarnation, node, seen_at)"
            " select 'n' || n, 'n', now() - n * interval '1 min' from generate_series(1, 3) n"
        )
    async with open_browser() as browser:
        [found] = (await browser.get("/api/v1/nodes")).json()["nodes"]
        assert found["incarnation"] == "n1"
        assert "2 older ones are not shown" in (await browser.get("/nodes")).text
