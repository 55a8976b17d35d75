"""Scenarios of `moving.py`: children that are cancelled, the rest of a barrier, steps that compensate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from durable_actors._store.cascade import cascading
from durable_actors._store.claim import release_claims
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.rows import Raised
from durable_actors._store.runner import claim_next, complete, fail
from tests.store.kit import EXPIRE, SCHEMA, claims, insert, outcome
from tests.store.moving import WIDE, World, scenario
from tests.store.stepping import commit
from tests.support.commands import cancel_instance


@contextmanager
def compensating(world: World) -> Iterator[None]:
    """Instances of m enter step u when they are cancelled."""
    world.db.execute("insert into durable.compensations values ('m', 1, 'u')")
    yield
    world.db.execute("delete from durable.compensations")


async def cascade(world: World) -> None:
    done = await run_dialogue(world.conn, cascading(SCHEMA, rounds=50, children=2))
    assert not done.more


@scenario
async def children_of_every_kind_are_cancelled(world: World) -> None:
    parent = await world.spawn(4)
    executing, asked, parked = await claims(world.conn, limit=3)
    assert await cancel_instance(world.conn, SCHEMA, asked.id) == "requested"
    await commit(world.conn, outcome(parked, "awaiting_signal", awaits=("go",)))
    assert await cancel_instance(world.conn, SCHEMA, parent.id, children=True) == "cancelled"
    await cascade(world)
    await release_claims(world.conn, SCHEMA, [executing, asked], attempts=0)
    await cascade(world)


@scenario
async def children_whose_parent_waits_for_them_are_cancelled(world: World) -> None:
    """Only a hand lets a parent wait for children that are to be cancelled."""
    for key in (None, WIDE):
        parent = await world.spawn(3)
        world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [key, parent.id])
        world.db.execute("select durable.cascade(%s, null, '{}')", [parent.id])
        await cascade(world)
        world.db.execute("delete from durable.gen_durable")


@scenario
async def instances_that_compensate(world: World) -> None:
    with compensating(world):
        parked, parent = await world.park(), await world.spawn(2)
        [failing] = insert(world.db, attempt=2, last_error="no", error_type="E", traceback="t")
        for number in (parked, parent.id, failing):
            assert await cancel_instance(world.conn, SCHEMA, number, children=True) == "requested"
            assert await cancel_instance(world.conn, SCHEMA, number) is None
        assert await cancel_instance(world.conn, SCHEMA, parked, force=True) == "cancelled"
        await cascade(world)


@scenario
async def claims_that_end_before_a_compensation(world: World) -> None:
    with compensating(world):
        held = [await world.claim(children_pending=1, wake_on_failure=True) for _ in range(4)]
        for claim in held[:3]:
            assert await cancel_instance(world.conn, SCHEMA, claim.id) == "requested"
        await release_claims(world.conn, SCHEMA, held[:1], attempts=1)
        await crash_claims(world.conn, SCHEMA, held[1:2], error="E", raised=Raised("E", "t"))
        assert await cancel_instance(world.conn, SCHEMA, held[3].id, force=True) == "requested"
        world.db.execute(EXPIRE)
        await reap_claims(world.conn, SCHEMA, limit=10)
        ended = await claims(world.conn)
        assert len(ended) == 4
        await crash_claims(world.conn, SCHEMA, ended[:2], error="E", raised=Raised("E", "t"), max_crashes=1)
        world.db.execute(EXPIRE)
        await reap_claims(world.conn, SCHEMA, limit=10, max_crashes=1)
        found = world.db.execute(
            "select count(*) from durable.gen_durable where status = 'cancelled'"
        ).fetchone()
        assert found == (4,)


@scenario
async def a_runner_compensates(world: World) -> None:
    with compensating(world):
        for ends in ("complete", "fail", "reap"):
            insert(world.db)
            options = {"queue": "default", "owner": "test", "lease": 60.0}
            mine = await claim_next(world.conn, SCHEMA, steps=["m/s"], **options)
            assert mine is not None
            assert await cancel_instance(world.conn, SCHEMA, mine.id) == "requested"
            if ends == "complete":
                await complete(world.conn, SCHEMA, mine, b'{"next": "t"}', accept_late=True)
            elif ends == "fail":
                await fail(world.conn, SCHEMA, mine, b'"no"', retry_in=9.0, max_attempts=3, accept_late=True)
            else:
                world.db.execute(EXPIRE)
            undo = await claim_next(world.conn, SCHEMA, steps=["m/u"], **options)
            assert undo is not None
            assert undo.cancellation is not None
            if ends == "complete":
                await complete(world.conn, SCHEMA, undo, b'{"done": 7}', accept_late=True)
            else:
                await fail(world.conn, SCHEMA, undo, b'"no"', retry_in=9.0, max_attempts=1, accept_late=True)
        found = world.db.execute(
            "select status::text, result, last_error from durable.gen_durable where finished_at is not null order by id"
        )
        assert found.fetchall() == [
            ("cancelled", None, None),
            ("cancelled", None, "no"),
            ("cancelled", None, "no"),
        ]
