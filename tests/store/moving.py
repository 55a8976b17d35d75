"""Every statement that writes instances, run once for each of its moves, with a recorder of what it changed.

`Recorder` sees each change of a row with the statement that made it: a trigger reads the text of the statement, and the
text begins with the header of its file. `SCENARIOS` are short, and each begins with an empty table.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import psycopg
from durable_actors._engine.committing.transition import cancellation
from durable_actors._limits import Limit
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._scheduling.schedule import Definition
from durable_actors._store.boundaries import decide_instance
from durable_actors._store.children import Spawn, child_uid, schedule_children, start_child
from durable_actors._store.claim import ClaimAtOnce, PickFrom, promote_siblings, release_claims
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.holds import HELD, PAUSED, SHELVED
from durable_actors._store.insert import insert_call, insert_instances
from durable_actors._store.lease import crash_claims, reap_claims, renew_leases, sweep_keys
from durable_actors._store.limits import declare_limits, read_thawed
from durable_actors._store.move_parts import Move
from durable_actors._store.move_rules import has_pause
from durable_actors._store.moves import Row, move_of, moves_by
from durable_actors._store.node import register_node, stop_node
from durable_actors._store.rebuild import accepting, rebuilding
from durable_actors._store.recover import recount_barriers, wake_lost_waits
from durable_actors._store.rerun import rerunning
from durable_actors._store.rerun_tasks import Start
from durable_actors._store.retention import Ages, delete_ended, snapshot_journal
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors._store.schedule_commands import putting, running_now
from durable_actors._store.schedules import ScheduledPlan
from durable_actors._store.signal import expire_awaits, send_signals, signal_call, signal_from_step
from durable_actors._store.wakeup import read_intents, record_wakeup
from tests.store.kit import (
    EXPIRE,
    HEAD,
    OWNER,
    SCHEMA,
    address,
    claims,
    insert,
    known_steps,
    outcome,
    pick,
    plan,
)
from tests.store.stepping import commit, deliver
from tests.support.commands import cancel_instance, hasten_instance, retry_instance

WIDE = "k" * 2001
"""A partition key that only SQL by hand can write."""


@attrs.frozen
class Recorded:
    """One change of one row."""

    query: str
    old: Row | None
    new: Row | None

    @property
    def statement(self) -> str | None:
        """The SQL file that made it; None: somebody's own SQL."""
        header = re.match(r"-- (\w+): ", self.query)
        return None if header is None else header[1]

    @property
    def move(self) -> Move | None:
        """The move that it is, of those that its statement declares."""
        return move_of(self.old, self.new, None if self.statement is None else moves_by(self.statement))

    @property
    def breaks_a_pause(self) -> bool:
        """Whether it leaves a paused row that the pick may take, or holds one as paused that is not."""
        new = self.new
        if new is None or (self.old is not None and self.old["hold"] == PAUSED and not has_pause(self.old)):
            return False
        return (new["hold"] == PAUSED) != (new["status"] == "runnable" and has_pause(new))

    def __str__(self) -> str:
        old, new = self.old or {}, self.new or {}
        names = [name for name in old or new if old.get(name) != new.get(name)]
        changes = ", ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names)
        return f"{self.statement or self.query}: {changes}"


class Recorder:
    """Records every change of an instance, from now on, with its statement."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db
        db.execute("""
            create table public.recorded (
                seq bigint generated always as identity, query text, old durable.gen_durable, new durable.gen_durable);
            create function public.record() returns trigger language plpgsql as $$
            begin
                insert into public.recorded (query, old, new) values (current_query(), old, new);
                return null;
            end $$;
            create trigger recorder after insert or update or delete on durable.gen_durable
                for each row execute function public.record();
        """)
        query = (
            "select attname from pg_attribute where attrelid = 'durable.gen_durable'::regclass and attnum > 0"
        )
        self._columns = [name for (name,) in db.execute(f"{query} order by attnum")]

    def changes(self) -> list[Recorded]:
        """All changes so far, in order."""
        found = self._db.execute("select query, (old).*, (new).* from public.recorded order by seq")
        width = len(self._columns)
        return [Recorded(row[0], self._row(row[1 : width + 1]), self._row(row[width + 1 :])) for row in found]

    def _row(self, values: Any) -> Row | None:
        row = dict(zip(self._columns, values, strict=True))
        return None if row["id"] is None else row

    def by_statements(self) -> list[Recorded]:
        """Those that statements of the store have made."""
        return [each for each in self.changes() if each.statement is not None]

    def faults(self) -> list[str]:
        """Changes by statements of the store that are none of their moves, or that offer a paused row."""
        return [str(each) for each in self.by_statements() if each.move is None or each.breaks_a_pause]


@attrs.frozen
class World:
    """What a scenario works with: a connection of a node, and one for SQL by hand."""

    conn: PgConn
    db: psycopg.Connection[Any]
    level: int = 3
    """The level of rows of which every move is to be recorded, unless the test says otherwise."""

    async def claim(self, **columns: Any) -> Claim:
        """A new row, claimed."""
        [number] = insert(self.db, **columns)
        return next(each for each in await claims(self.conn) if each.id == number)

    def change(self, claim: Claim, columns: str) -> Claim:
        """Change a row by hand."""
        self.db.execute(f"update durable.gen_durable set {columns} where id = {claim.id}")
        return claim

    async def park(self, **columns: Any) -> int:
        """A row that awaits `go`."""
        claim = await self.claim(**columns)
        await commit(
            self.conn, outcome(claim, "awaiting_signal", awaits=("go",), await_step="t", timeout=60.0)
        )
        return claim.id

    async def spawn(self, count: int, *, timeout: float | None = None, claim: Claim | None = None) -> Claim:
        """A parent of so many children, claimed before it parked."""
        mine = claim or await self.claim()
        after = Transition(mine, "awaiting_children", mine.step, attempt=0, advance=1)
        children = Spawn([plan()] * count, "then", None, wake_on_failure=False, timeout=timeout)
        assert await schedule_children(self.conn, SCHEMA, after, children, accept_late=True) is not None
        return mine


Scenario = Callable[[World], Awaitable[None]]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@scenario
async def inserts(world: World) -> None:
    await insert_instances(world.conn, SCHEMA, [plan(), plan()])
    live = ("runnable", "executing", "awaiting_signal", "awaiting_children")
    await insert_instances(world.conn, SCHEMA, [plan(unique_key=b"k", unique_scope=live)] * 2)


@scenario
async def claims_of_every_kind(world: World) -> None:
    insert(world.db, 2)
    insert(world.db, 2, partition_key="key")
    insert(world.db, fsm_version=9)
    wide = insert(world.db, fsm_version=9)
    world.db.execute("update durable.gen_durable set fsm = repeat('m', 2601) where id = any (%s)", [wide])
    [shelved] = insert(world.db, hold=SHELVED, shelved_step="s")
    assert len((await pick(world.conn)).claims) == 3
    begin = attrs.evolve(HEAD, shelved=[address("m/1")])
    assert [claim.id for claim in (await pick(world.conn, begin=begin)).claims] == [shelved]


@scenario
async def a_claim_by_id(world: World) -> None:
    ids = insert(world.db, 2)
    await pick(world.conn, begin=PickFrom((), (), (), by_id=ids))


@scenario
async def a_claim_with_the_insert_or_the_signal(world: World) -> None:
    ask = ClaimAtOnce(OWNER, ["default"], known_steps("m/1"), 0.0)
    _, claimed = await world.conn.batch([insert_call([plan()], SCHEMA), ask.call()])
    claims_of = [ask.read(claimed.rows)]
    parked = await world.park(journal=0)
    _, claimed = await world.conn.batch([signal_call(SCHEMA, [deliver(parked)]), ask.call([parked])])
    claims_of.append(ask.read(claimed.rows))
    # What has a record of every move is picked.
    assert all(len(found) <= 1 for found in claims_of)


@scenario
async def an_elder_that_is_held_is_offered_by_the_pick_that_meets_it(world: World) -> None:
    insert(world.db, partition_key="key", hold=HELD)
    insert(world.db, partition_key="key")
    await pick(world.conn)


@scenario
async def limits(world: World) -> None:
    await declare_limits(world.conn, SCHEMA, {"api": Limit(1, per=60), "gpu": Limit(slots=1)}, node="n")
    insert(world.db, 2, rate_limit="api")
    [mine] = await claims(world.conn)
    await commit(
        world.conn, outcome(mine, "runnable", step="t", advance=1, attempt=0, relimits=True, limits="!gpu")
    )
    world.db.execute("update durable.limit_keys set tat = at")
    world.db.execute("update durable.limit_waits set next_at = now()")
    thawed = await read_thawed(world.conn, SCHEMA, "default", limit=9)
    assert len((await pick(world.conn, begin=attrs.evolve(HEAD, extras=thawed.ids))).claims) == 2
    await declare_limits(world.conn, SCHEMA, {"few": Limit(1, per=60, on_full="drop")}, node="n")
    insert(world.db, 2, rate_limit="few")
    await pick(world.conn)
    assert [claim.cancellation is not None for claim in await claims(world.conn)] == [True]


@scenario
async def outcomes_of_plain_steps(world: World) -> None:
    ahead = await world.claim()
    await commit(
        world.conn,
        outcome(ahead, "runnable", step="t", advance=1, attempt=0, keep_claim=True, state=b"[1]"),
        outcome(await world.claim(partition_key="a"), "runnable", step="t", advance=1, rekey=True),
        outcome(await world.claim(attempt=3), "runnable", attempt=4, delay=60.0, state=b"[2]"),
        outcome(await world.claim(), "done", result=b"1"),
        outcome(await world.claim(), "failed", last_error="no"),
        cancellation(await world.claim(), "not wanted"),
    )
    ahead.enter("t", 2, b"[1]", inbox=False)
    await commit(world.conn, outcome(ahead, "runnable", step="u", advance=1, attempt=0))


@scenario
async def outcomes_of_steps_that_waited(world: World) -> None:
    raised = Raised("ValueError", "trace")
    parked = {"awaits": ["go"], "children_total": 2, "inbox": True}
    again = {"awaits": ("go",), "await_step": "t", "timeout": 60.0}
    await commit(
        world.conn,
        outcome(await world.claim(**parked), "runnable", step="t", advance=1, attempt=0),
        outcome(await world.claim(**parked), "runnable", attempt=1, raised=raised, keeps_awaits=True),
        outcome(await world.claim(**parked), "awaiting_signal", **again),
        outcome(await world.claim(**parked), "awaiting_signal", **again, advance=1),
        outcome(await world.claim(**parked), "done", result=b"1"),
        outcome(await world.claim(**parked), "failed", last_error="no", raised=raised),
        cancellation(await world.claim(**parked), None),
    )


@scenario
async def claims_that_are_given_back(world: World) -> None:
    held = [await world.claim(partition_key=f"key {number}") for number in range(4)]
    await release_claims(world.conn, SCHEMA, held[:1], attempts=0)
    await release_claims(world.conn, SCHEMA, held[1:2], attempts=1)
    await release_claims(world.conn, SCHEMA, held[2:3], attempts=0, hold=HELD)
    await release_claims(world.conn, SCHEMA, held[3:], attempts=0, hold=SHELVED, interruptions=1)


@scenario
async def claims_that_are_renewed(world: World) -> None:
    await renew_leases(world.conn, SCHEMA, [await world.claim()], lease_ttl=90.0)


@scenario
async def crashes(world: World) -> None:
    raised = Raised("SystemExit", "trace")
    some = [await world.claim(crashes=crashes) for crashes in (0, 1, 2**31 - 1)]
    some.append(world.change(await world.claim(), f"partition_key = '{WIDE}'"))
    await crash_claims(world.conn, SCHEMA, some, error="SystemExit: 2", raised=raised, max_crashes=2)


@scenario
async def reaps(world: World) -> None:
    for crashes in (0, 1, 2**31 - 1):
        await world.claim(crashes=crashes, last_error="crash 7: an earlier one")
    world.change(await world.claim(), f"partition_key = '{WIDE}'")
    world.db.execute(EXPIRE)
    await reap_claims(world.conn, SCHEMA, limit=10, max_crashes=2)
    await world.claim()
    await register_node(world.conn, SCHEMA, incarnation="node", node="node", about={})
    await stop_node(world.conn, SCHEMA, "node")
    world.db.execute(EXPIRE)
    await reap_claims(world.conn, SCHEMA, limit=10)
    world.db.execute("delete from durable.nodes")


@scenario
async def signals(world: World) -> None:
    [runnable] = insert(world.db, eligible_at="=now() + interval '1 h'")
    parked = [await world.park() for _ in range(3)]
    await send_signals(world.conn, SCHEMA, [deliver(parked[0]), deliver(runnable), deliver(runnable)])
    await send_signals(world.conn, SCHEMA, [deliver(parked[1], "noise")])
    sender = await world.claim()
    world.db.execute("update durable.gen_durable set await_deadline = now() - interval '1 s'")
    deliveries = [deliver(parked[1]), deliver(parked[2], "noise"), deliver(sender.id)]
    await signal_from_step(world.conn, SCHEMA, sender, deliveries)


@scenario
async def a_signal_that_was_there_before_the_park(world: World) -> None:
    claim = await world.claim()
    await send_signals(world.conn, SCHEMA, [deliver(claim.id)])
    await commit(world.conn, outcome(claim, "awaiting_signal", awaits=("go",), await_step="t"))


@scenario
async def deadlines(world: World) -> None:
    await world.park()
    await world.spawn(1, timeout=60.0)
    wide = await world.park()
    world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [WIDE, wide])
    world.db.execute("update durable.gen_durable set await_deadline = now() where await_deadline is not null")
    assert len(await expire_awaits(world.conn, SCHEMA, "default", limit=10)) == 3


PAUSE = {"status": "awaiting_signal", "advance": 1, "attempt": 0, "awaits": ()}


async def ask(world: World, boundary: bytes, claim: Claim | None = None, **columns: Any) -> int:
    """An instance that waits for a person."""
    claim = claim or await world.claim()
    await commit(world.conn, outcome(claim, boundary=boundary, **PAUSE, **columns))
    return claim.id


@scenario
async def decisions(world: World) -> None:
    rejected = b'{"kind": "approval", "then": "t", "on_reject": "u", "data": {"a": null}}'
    for verb in ("approve", "reject"):
        number = await ask(world, rejected)
        assert await decide_instance(world.conn, SCHEMA, number, verb, comment="c", data=[None])
        world.db.execute("delete from durable.gen_durable")
    assert await decide_instance(
        world.conn, SCHEMA, await ask(world, b'{"kind": "pause", "then": "t"}'), "proceed"
    )
    [first] = await claims(world.conn)  # the decision stays while the visit does
    await commit(world.conn, outcome(first, "awaiting_signal", awaits=("go",)))
    world.db.execute("delete from durable.gen_durable")
    for key in (None, WIDE):
        parent = await world.spawn(2)
        world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [key, parent.id])
        for child in await claims(world.conn):
            await ask(world, b'{"kind": "approval", "then": "t"}', child)
            assert await decide_instance(world.conn, SCHEMA, child.id, "reject")
        world.db.execute("delete from durable.gen_durable where status = 'runnable'")


@scenario
async def decisions_that_nobody_made(world: World) -> None:
    due = "update durable.gen_durable set await_deadline = now() where status = 'awaiting_signal'"
    for step in ("v", None):
        await ask(world, b'{"kind": "approval", "then": "t", "title": "ok?"}', await_step=step, timeout=60.0)
    world.db.execute(due)
    found = await expire_awaits(world.conn, SCHEMA, "default", limit=10)
    assert (len(found.woken), len(found.ended)) == (1, 1)
    world.db.execute("delete from durable.gen_durable")
    await world.spawn(2)
    for child in await claims(world.conn):
        await ask(world, b'{"kind": "approval", "then": "t"}', child, timeout=60.0)
        world.db.execute(due)
        assert len((await expire_awaits(world.conn, SCHEMA, "default", limit=10)).ended) == 1


@scenario
async def barriers(world: World) -> None:
    await world.spawn(0)
    world.db.execute("delete from durable.gen_durable")
    for key in (None, WIDE):
        parent = await world.spawn(3)
        world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [key, parent.id])
        first, second, third = await claims(world.conn)
        await commit(world.conn, outcome(first, "failed", last_error="no"))
        assert await retry_instance(world.conn, SCHEMA, first.id)
        [first] = await claims(world.conn)
        await commit(world.conn, cancellation(first, None), outcome(second))
        await commit(world.conn, outcome(third))
        world.db.execute("delete from durable.gen_durable where status = 'runnable'")


@scenario
async def keys_that_become_free(world: World) -> None:
    insert(world.db, hold=HELD, partition_key="key")
    await promote_siblings(world.conn, SCHEMA, ["key"])
    insert(world.db, hold=HELD)
    await sweep_keys(world.conn, SCHEMA, after="", limit=10)


@scenario
async def retries_by_an_operator(world: World) -> None:
    failed, cancelled = await world.claim(), await world.claim()
    await commit(world.conn, outcome(failed, "failed", last_error="no"), cancellation(cancelled, "why"))
    for claim in (failed, cancelled):
        assert await retry_instance(world.conn, SCHEMA, claim.id)


@scenario
async def run_again_by_an_operator(world: World) -> None:
    [number] = insert(world.db)
    await run_dialogue(world.conn, rerunning(SCHEMA, number, Command(), Start()))


@scenario
async def started_by_a_schedule(world: World) -> None:
    schedule = ScheduledPlan("nightly", Definition(every=60.0), plan())
    await run_dialogue(world.conn, putting(SCHEMA, schedule, Command()))
    started = await run_dialogue(world.conn, running_now(SCHEMA, "nightly", Command()))
    assert len(started.ids) == 1


@scenario
async def hastened_by_an_operator(world: World) -> None:
    later = {"eligible_at": "=now() + interval '1 h'"}
    ids = [
        *insert(world.db, **later),
        *insert(world.db, hold=HELD, partition_key="key", **later),
        *insert(world.db),
        *insert(world.db, hold=PAUSED, **later),
        *insert(world.db, hold=PAUSED),
    ]
    said = [await hasten_instance(world.conn, SCHEMA, number) for number in ids]
    assert said == ["hastened", "held", "due", "paused", "held"]


@scenario
async def cancelled_by_an_operator(world: World) -> None:
    executing = await world.claim()
    await world.park()
    await ask(world, b'{"kind": "pause", "then": "t"}')
    await world.spawn(1, timeout=60.0)
    insert(world.db, partition_key="key", attempt=2, last_error="no", error_type="E", traceback="t")
    ids = [row[0] for row in world.db.execute("select id from durable.gen_durable order by id")]
    said = [await cancel_instance(world.conn, SCHEMA, number) for number in ids]
    assert said.count("requested") == 1
    assert await cancel_instance(world.conn, SCHEMA, executing.id, force=True) == "cancelled"
    for key in (None, WIDE):
        parent = await world.spawn(2)
        world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [key, parent.id])
        for child in await claims(world.conn):
            assert await cancel_instance(world.conn, SCHEMA, child.id, force=True) == "cancelled"
        world.db.execute("delete from durable.gen_durable where status = 'runnable'")


@scenario
async def claims_that_end_after_a_request(world: World) -> None:
    parent = await world.spawn(3)
    held = [
        *await claims(world.conn),
        *[await world.claim(wake_on_failure=True, children_pending=2) for _ in range(3)],
    ]
    for claim in held:
        assert await cancel_instance(world.conn, SCHEMA, claim.id) == "requested"
    await release_claims(world.conn, SCHEMA, held[::3], attempts=1, hold=SHELVED, interruptions=1)
    await crash_claims(
        world.conn, SCHEMA, held[1::3], error="SystemExit: 2", raised=Raised("SystemExit", "t")
    )
    world.db.execute(EXPIRE)
    await reap_claims(world.conn, SCHEMA, limit=10)
    found = world.db.execute("select id from durable.gen_durable where status = 'cancelled' order by id")
    assert [number for (number,) in found] == sorted(claim.id for claim in held)
    opened = world.db.execute("select status::text from durable.gen_durable where id = %s", [parent.id])
    assert opened.fetchone() == ("runnable",)


@scenario
async def instances_started_by_a_step(world: World) -> None:
    caller = await world.claim()
    for name, as_child in (("child", True), ("child", True), ("insert", False)):
        uid = child_uid(caller.id, "s", "m", "k", kind=name)
        await start_child(world.conn, SCHEMA, caller, plan(), uid=uid, as_child=as_child)


@scenario
async def wakeups_that_a_notifier_was_told(world: World) -> None:
    [number] = await insert_instances(world.conn, SCHEMA, [plan(journal=world.level)])
    assert number is not None
    [waits] = await read_intents(world.conn, SCHEMA, [number])
    assert await record_wakeup(world.conn, SCHEMA, waits) == waits.recorded
    [claim] = await claims(world.conn)
    [runs] = await read_intents(world.conn, SCHEMA, [number])
    assert runs == waits, "a claim does not change the attempt"
    assert await record_wakeup(world.conn, SCHEMA, runs) == runs.recorded
    await commit(world.conn, outcome(claim))
    assert await read_intents(world.conn, SCHEMA, [number]) == []
    assert not await record_wakeup(world.conn, SCHEMA, runs), "it has ended"


@scenario
async def rows_written_as_their_journals_say(world: World) -> None:
    numbers = await insert_instances(world.conn, SCHEMA, [plan(journal=4), plan(journal=4)])
    runnable, executing = [number for number in numbers if number is not None]
    world.change((await claims(world.conn, limit=1))[0], "eligible_at = eligible_at")
    for number in (runnable, executing):
        await run_dialogue(world.conn, rebuilding(SCHEMA, number, plan_command()))
    world.db.execute("update durable.gen_durable set state = '1' where id = %s", [runnable])
    await run_dialogue(world.conn, rebuilding(SCHEMA, runnable, plan_command()))
    await run_dialogue(world.conn, accepting(SCHEMA, runnable, plan_command()))
    assert await snapshot_journal(world.conn, SCHEMA, runnable, moves=1)
    world.db.execute("delete from durable.gen_durable")
    for number in (runnable, executing):
        await run_dialogue(world.conn, rebuilding(SCHEMA, number, plan_command()))


@scenario
async def rows_that_have_ended_are_deleted(world: World) -> None:
    await commit(world.conn, outcome(await world.claim(journal=2), deletes=True))
    inserted = await world.claim(child_uid="=gen_random_uuid()")  # by a step, which may look for it
    await commit(world.conn, outcome(inserted, deletes=True))
    ends = [outcome(await world.claim(), status) for status in ("done", "failed", "cancelled")]
    await commit(world.conn, *ends)
    over = "update durable.gen_durable set finished_at = now() - interval '2 s' where finished_at is not null"
    world.db.execute(over)
    swept = await delete_ended(world.conn, SCHEMA, Ages(1, 1, 1, 1), after=0, limit=10, old=0)
    assert swept.deleted == 4


@scenario
async def waits_and_barriers_that_a_hand_has_changed(world: World) -> None:
    number = await world.park()
    await send_signals(world.conn, SCHEMA, [deliver(number)])
    world.db.execute(
        "update durable.gen_durable set status = 'awaiting_signal', await_step = 't', rev = rev + 1,"
        " eligible_at = eligible_at - interval '1 s' where id = %s",
        [number],
    )
    assert (await wake_lost_waits(world.conn, SCHEMA, after=0))[0] == [number]
    parents = []
    for pending, level in ((5, 0), (0, 2), (1, 2)):
        parent = await world.spawn(2, claim=await world.claim(journal=level))
        world.db.execute(
            "update durable.gen_durable set children_pending = %s where id = %s", [pending, parent.id]
        )
        parents.append(parent.id)
    lost = await world.spawn(1)
    world.db.execute("delete from durable.gen_durable where parent_id = %s", [lost.id])
    assert (await recount_barriers(world.conn, SCHEMA, after=0))[0] == [*parents, lost.id]
