"""Children that come after other children: the spawn, who is told of an end, and what becomes of those that wait."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors import sync
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.graph import read_dependencies, read_graph
from durable_actors._store.lease import reap_claims
from durable_actors._store.retention import Ages, delete_ended
from durable_actors._store.rows import Transition
from durable_actors._store.runner import Claimed, claim_next, complete
from durable_actors.errors import Duplicate
from tests.invariants.journal import journal_problems, read_journal
from tests.store.graph_kit import ending, family, graph_of
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, plan, rows
from tests.store.stepping import commit

DIAMOND = {"a": "", "b": "a", "c": "a", "d": "bc"}
CHAIN = {"a": "", "b": "a", "c": "b", "d": "c"}


async def test_a_spawn_writes_who_comes_after_whom(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, DIAMOND | {"e": ""}, ended="d")
    ids = all_of.ids
    assert rows(db, "child_key, links, hold, status", f"parent_id = {all_of.parent}") == [
        ("a", 2, 0, "runnable"),
        ("b", 3, 5, "runnable"),
        ("c", 3, 5, "runnable"),
        ("d", 1, 5, "runnable"),
        ("e", None, 0, "runnable"),
    ]
    found = db.execute(
        "select id, needs, any_end, waits, feeds, owed from durable.graph order by id"
    ).fetchall()
    a, b, c, d = (ids[key] for key in "abcd")
    assert found == [
        (a, None, False, 0, [b, c], [b, c]),
        (b, [a], False, 1, [d], [d]),
        (c, [a], False, 1, [d], [d]),
        (d, [b, c], True, 2, None, None),
    ]


async def test_a_diamond_runs_in_order(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, DIAMOND)
        assert all_of.offered() == "a"
        assert await all_of.run(a="done") == "a"
        assert all_of.offered() == "bc"
        assert await all_of.run(c="done") == "bc"
        assert all_of.waits() == {"d": 1}
        assert await all_of.run(b="done") == "b"
        assert await all_of.run(d="done") == "d"
    assert rows(db, "status, step", f"id = {all_of.parent}") == [("runnable", "then")]
    assert db.execute("select count(*) from durable.untold").fetchone() == (0,)
    assert db.execute("select count(*) from durable.graph where owed is not null").fetchone() == (0,)


async def test_two_ends_in_one_group_are_both_counted(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, DIAMOND)
        await all_of.run(a="done")
        found = await all_of.claim()
        offered = await commit(conn, ending(found["b"], "done"), ending(found["c"], "done"))
        assert offered == {all_of.ids["b"], all_of.ids["c"]}
        assert all_of.offered() == "d"


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_bad_end_cancels_level_by_level(db: psycopg.Connection, durable_dsn: str, status: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, CHAIN)
        await all_of.run(a=status)  # type: ignore[arg-type]
        assert all_of.offered() == "b", "one level"
        found = await all_of.claim()
        assert found["b"].cancellation is not None
        assert found["b"].cancellation.upstream == all_of.ids["a"]
        said = "upstream failed: a " + ("failed" if status == "failed" else "was cancelled")
        assert found["b"].cancellation.reason == said
        await commit(conn, ending(found["b"], "done"))
        assert all_of.column("b", "status, last_error") == ("cancelled", said)
        await all_of.run(c="done")
        await all_of.run(d="done")
    assert all_of.statuses() == {"a": status, "b": "cancelled", "c": "cancelled", "d": "cancelled"}
    assert rows(db, "status", f"id = {all_of.parent}") == [("runnable",)]


async def test_any_end_is_good_enough_for_some(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "", "c": "ab", "d": "ab"}, ended="c")
        await all_of.run(a="failed")
        assert all_of.offered() == "bd", "d is doomed at once, c waits for b"
        await all_of.run(b="cancelled", d="done")
        assert all_of.offered() == "c"
        [claim] = await claims(conn)
        assert claim.cancellation is None
        found = (await read_dependencies(conn, SCHEMA, [claim.id]))[claim.id]
        assert {key: view.status for key, view in found.items()} == {"a": "failed", "b": "cancelled"}  # type: ignore[union-attr]


async def test_a_claim_knows_its_part(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        for level in range(5):
            all_of = await family(db, conn, {"a": "", "b": "a", "c": ""}, columns={"journal": level})
            found = await all_of.claim()
            assert {key: claim.recorded.links for key, claim in found.items()} == {"a": 2, "c": 0}
            assert {claim.journal for claim in found.values()} == {level}
            assert (found["a"].recorded.lease_until is not None) == (level >= 3)
            await commit(conn, *(ending(each, "done") for each in found.values()))
            [claim] = [each for each in await claims(conn) if each.id == all_of.ids["b"]]
            assert claim.recorded.links == 1
            db.execute("truncate durable.gen_durable cascade")


async def test_dependencies_have_results(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, DIAMOND)
        await all_of.run(a="done")
        await all_of.run(b="done", c="done")
        d, a = all_of.ids["d"], all_of.ids["a"]
        found = await read_dependencies(conn, SCHEMA, [d, a])
        assert found[a] == {}
        views = found[d]
        assert isinstance(views, dict)
        assert {key: (view.id, view.result) for key, view in views.items()} == {
            key: (all_of.ids[key], str(all_of.ids[key])) for key in "bc"
        }


async def test_every_other_end_is_told_by_whoever_comes(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, CHAIN, ended="bd")
        await all_of.claim()
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10, max_crashes=1)
        assert (all_of.column("a"), all_of.offered()) == ("failed", ""), "not in that statement"
        assert await all_of.tell() == "b"
        sync.cancel(db, all_of.ids["c"])
        assert await all_of.tell() == "d"
        assert all_of.offered() == "bd"


async def test_the_same_end_is_told_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "", "c": "ab"})
        await all_of.run(a="done")
        db.execute("insert into durable.untold (id) values (%s), (%s)", [all_of.ids["a"], all_of.ids["a"]])
        assert await all_of.tell() == ""
        assert all_of.waits() == {"c": 1}


async def test_a_child_that_others_come_after_is_not_left_out(db: psycopg.Connection, durable_dsn: str):
    live = ("runnable", "executing", "awaiting_signal", "awaiting_children")
    insert(db, unique_key=b"k", unique_scope=list(live), eligible_at="=now() + interval '1 day'")
    async with connect(durable_dsn) as conn:
        [number] = insert(db)
        [claim] = await claims(conn)
        occupied, free = plan(unique_key=b"k", unique_scope=live), plan()
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)

        async def spawn(*plans: object) -> object:
            given = Spawn(list(plans), "then", None, False, None, graph=graph_of({"a": "", "b": "a"}))  # type: ignore[arg-type]
            return await schedule_children(conn, SCHEMA, after, given, accept_late=True)

        with pytest.raises(Duplicate):
            await spawn(occupied, free)
        assert rows(db, "id", f"parent_id = {number}") == []
        assert await spawn(free, occupied) is not None
    assert rows(db, "child_key, links", f"parent_id = {number}") == [("a", 2)]


# -- commands


async def test_a_paused_child_goes_on_counting(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "", "c": "ab"})
        c = all_of.ids["c"]
        sync.pause(db, c)
        assert all_of.column("c", "hold") == 4
        sync.resume(db, c)
        assert all_of.column("c", "hold") == 5
        sync.pause(db, c)
        await all_of.run(a="done", b="done")
        assert (all_of.column("c", "hold"), all_of.waits()) == (4, {})
        sync.resume(db, c)
        assert all_of.offered() == "c"


async def test_a_paused_child_is_doomed_and_stays_paused(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a"})
        sync.pause(db, all_of.ids["b"])
        await all_of.run(a="failed")
        assert all_of.offered() == ""
        sync.resume(db, all_of.ids["b"])
        await all_of.run(b="done")
        assert all_of.statuses() == {"a": "failed", "b": "cancelled"}


async def test_a_retried_child_waits_for_what_has_failed(db: psycopg.Connection, durable_dsn: str):
    """Mend a, retry b, then a: b runs when a is done; c is retried for itself."""
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "x": "", "b": "ax", "c": "b"})
        await all_of.run(a="failed", x="done")
        await all_of.run(b="done")
        await all_of.run(c="done")
        assert all_of.statuses() == {"a": "failed", "x": "done", "b": "cancelled", "c": "cancelled"}
        sync.retry(db, all_of.ids["b"])
        assert (all_of.column("b", "status, hold, cancellation"), all_of.waits()) == (
            ("runnable", 5, None),
            {"b": 1},
        )
        sync.retry(db, all_of.ids["c"])
        assert all_of.waits() == {"b": 1, "c": 1}
        db.execute("insert into durable.untold (id) values (%s)", [all_of.ids["a"]])
        assert await all_of.tell() == "", "its old end is not told again"
        assert all_of.waits() == {"b": 1, "c": 1}
        sync.retry(db, all_of.ids["a"])
        await all_of.run(a="failed")
        await all_of.run(b="done")
        await all_of.run(c="done")
        assert all_of.statuses() == {"a": "failed", "x": "done", "b": "cancelled", "c": "cancelled"}
        sync.retry(db, all_of.ids["a"])
        sync.retry(db, all_of.ids["b"])
        sync.retry(db, all_of.ids["c"])
        await all_of.run(a="done")
        await all_of.run(b="done")
        await all_of.run(c="done")
    assert set(all_of.statuses().values()) == {"done"}
    assert rows(db, "status", f"id = {all_of.parent}") == [("runnable",)]


async def test_a_doomed_child_ends_without_its_limits_and_a_retry_finds_them(
    db: psycopg.Connection, durable_dsn: str
):
    """Nobody has declared the limit, so what uses it waits; what was doomed runs nothing, and needs none to end."""
    limits = {"limits": "!nowhere", "journal": 4}
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a", "c": "b"}, columns=limits, parent={"journal": 0})
        sync.cancel(db, all_of.ids["a"])
        assert await all_of.tell() == "b"
        assert await all_of.run(b="cancelled") == "b"
        assert await all_of.run(c="cancelled") == "c"
        assert all_of.statuses() == dict.fromkeys("abc", "cancelled")
        rerun = sync.rerun(db, all_of.ids["b"])
        assert rows(db, "rate_limit", f"id = {rerun}") == [("!nowhere",)]
        for key in "cba":
            sync.retry(db, all_of.ids[key])
            assert all_of.column(key, "rate_limit, cancellation") == ("!nowhere", None)
        found = await claims(conn)
        assert [each.id for each in found] == [all_of.parent], "a waits for its limit, the others for a"
    assert journal_problems(*read_journal(db)) == []


async def test_a_retried_child_runs_at_once_if_all_is_done(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a", "c": "b"})
        await all_of.run(a="done")
        await all_of.run(b="failed")
        sync.retry(db, all_of.ids["b"])
        assert all_of.offered() == "bc", "c was doomed by its first end"


async def test_a_child_that_was_cancelled_while_it_waited_and_is_retried_counts_once(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "", "c": "ab"})
        sync.cancel(db, all_of.ids["c"])
        await all_of.run(a="done")
        sync.retry(db, all_of.ids["c"])
        assert all_of.waits() == {"c": 1}
        await all_of.run(b="done")
        assert all_of.offered() == "c"


async def test_a_doomed_child_may_be_cancelled_by_command(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a"})
        await all_of.run(a="failed")
        sync.cancel(db, all_of.ids["b"])
        assert all_of.statuses() == {"a": "failed", "b": "cancelled"}
        sync.retry(db, all_of.ids["b"])
        assert all_of.column("b", "hold, cancellation, request") == (5, None, None)


# -- reads


async def test_read_graph_tells_the_latest_graph(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, DIAMOND, ended="d")
        await all_of.run(a="failed")
        found = {node.key: node for node in await read_graph(conn, SCHEMA, all_of.parent)}
        assert list(found) == list("abcd")
        ids = all_of.ids
        assert (found["d"].needs, found["d"].any_end, found["d"].waits) == ((ids["b"], ids["c"]), True, 2)
        assert (found["a"].status, found["a"].last_error, found["a"].needs) == ("failed", "boom", ())
        assert (found["d"].hold, found["b"].hold) == (5, 0)
        assert found["a"].finished_at is not None
        assert await read_graph(conn, SCHEMA, all_of.parent, 2) == list(found.values())
        assert await read_graph(conn, SCHEMA, all_of.parent, 1) == []
        assert await read_graph(conn, SCHEMA, ids["a"]) == []


async def test_retention_keeps_what_a_live_child_comes_after(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a", "c": "", "d": "c"})
        await all_of.run(a="done", c="done")
        await all_of.run(d="done")
        db.execute(
            "update durable.gen_durable set status = 'done', finished_at = now(), children_pending = 0 where id = %s",
            [all_of.parent],
        )
        await delete_ended(conn, SCHEMA, Ages(0.0, 0.0, 0.0, 0.0), after=0, limit=100, old=0.0)
        assert rows(db, "child_key", "parent_id is not null") == [("a",), ("b",)]
        assert db.execute("select id from durable.graph order by id").fetchall() == [
            (all_of.ids["a"],), (all_of.ids["b"],),
        ]  # fmt: skip
        await all_of.run(b="done")
        await delete_ended(conn, SCHEMA, Ages(0.0, 0.0, 0.0, 0.0), after=0, limit=100, old=0.0)
    assert rows(db, "id") == []
    assert db.execute("select count(*) from durable.graph").fetchone() == (0,)


async def test_why_names_what_a_child_waits_for(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "b": "a", "c": "b"})
        read = sync.inspect(db, all_of.ids["c"])
        assert (read.key, read.waits, read.hold) == ("c", 1, 5)
        found = sync.explain(db, all_of.ids["c"])
        assert (found.reason, [(each.kind, each.id) for each in found.blockers]) == (
            "awaiting_dependencies", [("dependency", all_of.ids["b"])],
        )  # fmt: skip
        assert "b" in found.summary
        because = found.blockers[0].because
        assert because is not None
        assert [each.id for each in because.blockers] == [all_of.ids["a"]]
        await all_of.run(a="failed")
        doomed = sync.explain(db, all_of.ids["b"])
        assert f"instance {all_of.ids['a']}, which it comes after, did not succeed" in doomed.summary
        assert not any("--force" in (each.command or "") for each in doomed.next_actions)
        await all_of.run(b="done")
        assert "did not succeed" in sync.explain(db, all_of.ids["b"]).summary
        sync.retry(db, all_of.ids["b"])
        found = sync.explain(db, all_of.ids["b"])
        assert found.blockers[0].text == f"a (instance {all_of.ids['a']}) has failed: retry it"
        assert f"durable-actors retry {all_of.ids['a']}" in [each.command for each in found.next_actions]
        assert sync.run_now(db, all_of.ids["b"]) == "waiting"
        assert sync.inspect(db, all_of.ids["a"]).waits == 0


async def test_a_runner_gets_dependencies_and_no_doomed_child(db: psycopg.Connection, durable_dsn: str):
    async def take() -> Claimed | None:
        return await claim_next(conn, SCHEMA, queue="default", steps=["m/s"], owner="test", lease=60.0)

    async with connect(durable_dsn) as conn:
        all_of = await family(db, conn, {"a": "", "x": "", "b": "a", "y": "x", "z": "y"})
        for said in (b'{"done": 7}', b'{"stop": "no"}'):
            claimed = await take()
            assert claimed is not None
            assert claimed.dependencies == {}
            await complete(conn, SCHEMA, claimed, said, accept_late=True)
        claimed = await take()
        assert claimed is not None
        assert claimed.id == all_of.ids["b"]
        [(key, view)] = claimed.dependencies.items()
        assert (key, view.key, view.status, view.result) == ("a", "a", "done", 7)
        await complete(conn, SCHEMA, claimed, b'{"done": 8}', accept_late=True)
        assert await take() is None or all_of.column("z") == "cancelled"
        assert await take() is None or all_of.column("z") == "cancelled"
    assert all_of.statuses() == {"a": "done", "x": "failed", "b": "done", "y": "cancelled", "z": "cancelled"}
    assert rows(db, "status", f"id = {all_of.parent}") != [("awaiting_children",)]


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
async def test_an_ended_dependent_is_passed_by(db: psycopg.Connection, durable_dsn: str, status: str):
    async with connect(durable_dsn) as conn:
        for told in (False, True):
            all_of = await family(db, conn, {"a": "", "b": "a"})
            db.execute(
                "update durable.gen_durable set status = %s, finished_at = now(), hold = 0, result = %s where id = %s",
                [status, "1" if status == "done" else None, all_of.ids["b"]],
            )
            before = all_of.column("b", "to_jsonb(gen_durable)")
            if told:
                sync.cancel(db, all_of.ids["a"])
                assert await all_of.tell() == ""
            else:
                await all_of.run(a="failed")
            assert all_of.column("b", "to_jsonb(gen_durable)") == before
