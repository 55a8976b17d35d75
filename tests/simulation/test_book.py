"""The checks themselves, where whole schedules seldom lead: reaps of a node that lives, one interleaving at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from durable_actors._store.claim import Owner
from durable_actors._store.insert import insert_instances
from durable_actors._store.key import lock_node
from durable_actors._store.lease import read_owners, reap_claims
from durable_actors.journal import Problem
from tests.invariants import journal
from tests.simulation.book import Book
from tests.simulation.local import LocalConn
from tests.simulation.process import World
from tests.simulation.server import Server
from tests.simulation.small.plan import make_plan
from tests.simulation.small.run import simulate
from tests.store.kit import SCHEMA, pick, plan

DEAD_AFTER = 2.0
LEASE = 60.0
NAME = "node"


class HeldCommit(LocalConn):
    """Something happens between the statements of its transactions and their COMMIT."""

    before_commit: Callable[[], Awaitable[object]] = staticmethod(trio.lowlevel.checkpoint)

    async def command(self, sql: str, *, commits: bool = False) -> Any:
        if commits:
            await self.before_commit()
        return await super().command(sql, commits=commits)


class Case:
    """A node lives, holds one claim, and has lost the session with its lock; a reaper looks at it."""

    def __init__(self, *broken: str) -> None:
        self.world = World(0)
        self.world.now = 1000.0
        self.server = Server(self.world, frozenset(broken))
        self.book = Book(self.world, self.server, dead_after=DEAD_AFTER)
        self.book.owners[NAME] = SimpleNamespace(name=NAME, dead=False, ended=False)  # type: ignore[assignment]
        self.reaper = HeldCommit(self.server)

    async def begin(self) -> None:
        work: Any = LocalConn(self.server)
        await insert_instances(work, SCHEMA, [plan()])
        first = await self.take_lock()
        await pick(work, owner=Owner(SCHEMA, NAME, b"hash", LEASE))
        first.session.end()

    async def take_lock(self) -> LocalConn:
        """The owner, in a new session."""
        conn: Any = LocalConn(self.server)
        assert (await lock_node(conn, SCHEMA, NAME)).locked
        return conn  # type: ignore[no-any-return]

    async def look(self) -> float:
        """The end of the last lease that the reaper saw."""
        conn: Any = self.reaper
        [owner] = await read_owners(conn, SCHEMA)
        return owner.latest_expiry

    async def look_twice(self) -> float:
        await self.look()
        self.world.now += DEAD_AFTER
        return await self.look()

    async def reap(self, latest_expiry: float) -> int:
        conn: Any = self.reaper
        reaped, _ = await reap_claims(conn, SCHEMA, limit=10, dead={NAME: latest_expiry})
        return len(reaped)

    @property
    def noticed(self) -> str | None:
        return None if self.book.failure is None else self.book.failure.rule


@pytest.mark.parametrize("part", ["check_instance", "row_to_write"])
def test_what_verify_finds_or_a_rebuild_would_change_is_noticed(part: str, monkeypatch: pytest.MonkeyPatch):
    """In a schedule that records everything and is fine."""
    plan = make_plan(0)
    assert simulate(plan).violation is None
    real = getattr(journal, part)

    def wrong(number: int, *given: Any) -> Any:
        if part == "check_instance":
            return [Problem(instance_id=number, reason="gap", rev=1, detail="a problem")]
        return {**real(number, *given), "priority": 99}

    monkeypatch.setattr(journal, part, wrong)
    report = simulate(plan)
    assert report.violation is not None
    assert report.violation.rule == "journal"


async def test_an_owner_may_take_its_lock_back_between_the_statement_of_its_reap_and_the_commit():
    case = Case()
    await case.begin()
    seen = await case.look_twice()
    case.reaper.before_commit = case.take_lock
    assert (await case.reap(seen), case.noticed) == (1, None)


async def test_an_owner_may_take_its_lock_and_lose_it_again_between_two_looks():
    case = Case()
    await case.begin()
    await case.look()
    case.world.now += DEAD_AFTER - 0.5
    (await case.take_lock()).session.end()
    case.world.now += 0.5
    assert (await case.reap(await case.look()), case.noticed) == (1, None)


async def test_a_reap_of_an_owner_that_had_its_lock_back_before_the_statement_is_noticed():
    case = Case("moved")
    await case.begin()
    seen = await case.look_twice()
    lock = await case.take_lock()

    async def lose_it() -> None:
        await trio.lowlevel.checkpoint()
        lock.session.end()

    case.reaper.before_commit = lose_it
    assert (await case.reap(seen), case.noticed) == (1, "I2")


async def test_a_reap_after_one_look_is_noticed_also_if_it_commits_later():
    case = Case()
    await case.begin()

    async def be_slow() -> None:
        await trio.lowlevel.checkpoint()
        case.world.now += DEAD_AFTER

    case.reaper.before_commit = be_slow
    assert (await case.reap(await case.look()), case.noticed) == (1, "I2")


async def test_a_reap_after_looks_of_two_sessions_is_noticed():
    case = Case()
    await case.begin()
    await case.look()
    case.reaper = HeldCommit(case.server)
    case.world.now += DEAD_AFTER
    assert (await case.reap(await case.look()), case.noticed) == (1, "I2")


async def test_a_reap_though_a_look_in_between_found_the_lock_held_is_noticed():
    case = Case()
    await case.begin()
    await case.look()
    lock = await case.take_lock()
    case.world.now += 0.5
    await case.look()
    lock.session.end()
    case.world.now += DEAD_AFTER
    assert (await case.reap(await case.look()), case.noticed) == (1, "I2")


async def test_whatever_was_seen_an_expired_lease_may_be_reaped():
    case = Case()
    await case.begin()
    case.world.now += LEASE
    assert (await case.reap(0.0), case.noticed) == (1, None)
