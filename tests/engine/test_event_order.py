"""Events come after the commit of what they tell, and tell nothing that was refused (R22). Nothing uses NOTIFY."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import durable_actors as da
import pytest
from durable_actors.telemetry import (
    AwaitTimedOut,
    ClaimsReaped,
    Event,
    OutcomeStale,
    StepCommitted,
    StepStarted,
)
from tests.engine import recorded
from tests.engine.kit import REAP, Db, Gate, parked, refuse_bad, running, saying
from tests.kit import until
from tests.support.sql import count_statements

pytestmark = pytest.mark.usefixtures("registry")

PACKAGE = Path(da.__file__).parent

OUTCOME = (
    "select count(*) from durable.journal where instance_id = %s and visit = %s and attempt = %s"
    " and kind in ('next', 'retry', 'parked', 'spawned', 'done', 'failed')"
)
BEGUN = (
    "select count(*) from durable.journal where instance_id = %s and (kind = 'claimed' and visit = %s and attempt = %s"
    " or kind = 'next' and visit + 1 = %s and (data ->> 'keeps_claim')::boolean)"
)


class Witness:
    """An observer that looks, in a session of its own, whether what it is told is there."""

    def __init__(self, db: Db) -> None:
        self._db = db
        self.seen: dict[type, int] = {}
        self.early: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.seen[type(event)] = self.seen.get(type(event), 0) + 1
        if not self._is_there(event):
            self.early.append(event)

    def _is_there(self, event: Event) -> bool:
        match event:
            case StepCommitted(id=number, visit=visit, attempt=attempt):
                return self._db.value(OUTCOME, number, visit, attempt) > 0
            case StepStarted(id=number, visit=visit, attempt=attempt):
                return self._db.value(BEGUN, number, visit, attempt, visit) > 0
            case AwaitTimedOut():
                return self._count("expired") >= self.seen[AwaitTimedOut]
            case ClaimsReaped(count=count):
                return self._count("reaped") >= count
            case _:
                return True

    def _count(self, kind: str) -> int:
        return self._db.value("select count(*) from durable.journal where kind = %s", kind)


async def test_an_event_comes_after_the_commit_that_it_tells(durable_dsn, db):
    witness = Witness(db)
    walk = recorded.define()
    async with running(
        durable_dsn, journal="full", queues={"default": 5}, reap_interval=0.05, observers=[witness]
    ) as run:
        await recorded.work(run, walk, recorded.plans(53, 15, "nnkreatct"))
        gone = db.insert(
            fsm="walk", step="start", status="executing", claim_id="00000000-0000-0000-0000-000000000001",
            locked_by="dead:1", lease_expires_at="2020-01-01", queue="far", journal=3,
        )  # fmt: skip
        await until(lambda: db.row(gone, "status") == ("runnable",))
        await until(lambda: ClaimsReaped in witness.seen)
    assert witness.early == []
    assert {StepStarted, StepCommitted, AwaitTimedOut, ClaimsReaped} <= set(witness.seen)


async def test_an_outcome_that_is_not_committed_is_not_told(durable_dsn, db):
    """A stale one is told as stale; of one that Postgres refuses only what is stored instead."""
    gate, bad = Gate(), Gate()
    told = []

    class M(da.Machine, name="stale", run_ahead=False):
        @da.step
        async def start(self, ctx):
            if not ctx.attempt:
                await gate.wait()
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            return da.Done()

    async def notify(wakeup: da.Wakeup) -> None:
        told.append(wakeup.runnable_key)

    refuse_bad(db, "P0001")
    async with running(durable_dsn, notifier=notify) as run:
        stale, refused = await run.insert(M), await run.insert(saying(bad), state={"say": "bad"})
        await gate.wait_entered()
        await bad.wait_entered()
        db.execute(REAP, stale)
        await run.events.wait(StepCommitted, id=stale, status="done")
        before = [event for event in run.events.events if getattr(event, "id", None) == stale]
        keys = len(told)
        gate.open()
        await run.events.wait(OutcomeStale, id=stale)
        bad.open()
        assert (await run.ended(refused)).status == "failed"
        after = [event for event in run.events.events if getattr(event, "id", None) == stale]
    commits = [(event.visit, event.attempt) for event in run.events.all(StepCommitted, id=stale)]
    assert sorted(commits) == [(1, 1), (2, 0)], "the owner's"
    assert StepCommitted not in [type(event) for event in after[len(before) :]]
    assert [event.status for event in run.events.all(StepCommitted, id=refused)] == ["failed"]
    # The notifier may be late with the step that the owner's outcome entered.
    late = [key for key in told[keys:] if key != f"{stale}/2/end#0.0"]
    assert late == [], "neither of the two made anything runnable"


async def test_a_conflict_and_a_rebuild_are_no_events(durable_dsn, db):
    told = []

    async def notify(wakeup: da.Wakeup) -> None:
        told.append(wakeup.runnable_key)

    class M(da.Machine, name="waits"):
        @da.step
        async def start(self, ctx):
            return da.Await("go")

    async with running(durable_dsn, journal="full", notifier=notify) as run:
        client = run.engine.client
        number = await run.insert(M, unique_key="k")
        await parked(run, number)
        await until(lambda: client.notifications().told == len(told) > 0)
        events, keys = _about(run.events.events), list(told)
        with pytest.raises(da.Duplicate):
            await client.insert(M, unique_key="k")
        with pytest.raises(da.Conflict):
            await client.retry(number)
        with pytest.raises(da.NoTarget):
            await client.signal(number + 1000, "go")
        await client.rebuild(number)
        await until(lambda: client.notifications().waiting == 0)
        assert (_about(run.events.events), told) == (events, keys)


def _about(events: list[Event]) -> list[Event]:
    """Picks and other events of no instance go on."""
    return [event for event in events if hasattr(event, "id")]


# -- no LISTEN, no NOTIFY

CHANNELS = re.compile(r"""^\s*((un)?listen|notify)\s+["\w*]|\bpg_notify\b""", re.IGNORECASE | re.MULTILINE)


def _texts(path: Path) -> list[str]:
    """What may be sent: SQL without its comments; of Python the literals, without docstrings."""
    text = path.read_text("utf-8")
    if path.suffix == ".sql":
        return [re.sub(r"--[^\n]*", "", text)]
    tree = ast.parse(text)
    said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said
    ]


def test_no_source_listens_or_notifies():
    found = [
        (path.relative_to(PACKAGE).as_posix(), text)
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in {".py", ".sql"}
        for text in _texts(path)
        if CHANNELS.search(text)
    ]
    assert found == []
    assert CHANNELS.search("begin;\nnotify work, 'x'"), "it would be found"


async def test_no_statement_that_is_sent_listens_or_notifies(durable_dsn):
    """The server's own list of statements, of a workload with every outcome, a notifier, and a second node."""

    async def notify(wakeup: da.Wakeup) -> None:
        pass

    walk = recorded.define()
    options: dict[str, Any] = {"journal": "full", "notifier": notify, "queues": {"default": 5}}
    with count_statements(durable_dsn) as count:
        async with running(durable_dsn, **options) as run, running(durable_dsn, name="other", **options):
            await recorded.work(run, walk, recorded.plans(38, 10))
    assert count.total > 100
    assert [each.query for each in count.statements if CHANNELS.search(each.query)] == []
