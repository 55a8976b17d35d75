"""An engine of the release before, in a process of its own, beside one of this release: each does its part of a thing.

The engine of the release before serves the queue `old`, this one the queue `new`: so a test decides who does what.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors._engine.committing.transition import cancellation
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.releases import RELEASES
from tests.engine.kit import Run, running
from tests.invariants.audit import install_audit
from tests.invariants.check import check, read_history
from tests.invariants.effect_log import EffectLog
from tests.kit import PATIENCE, until
from tests.store.kit import claims, connect
from tests.upgrade import program
from tests.upgrade.counting import without_count
from tests.upgrade.old import OldRelease
from tests.warm import Program, Warm

pytestmark = pytest.mark.slow  # whole programs

PROGRAM = Path(__file__).with_name("program.py")
OLD = "0.1.0.dev0"
NEW = da.__version__
MARGIN = 10.0
"""Seconds by which a loaded machine may be late."""


@pytest.fixture(scope="session")
def old_python(old_release: OldRelease) -> Iterator[Warm]:
    warm = Warm(old_release.environ)
    yield warm
    warm.close()


@attrs.define
class Pair:
    """A database that an engine of the release before has made, and that engine."""

    dsn: str
    folder: Path
    python: Warm
    environ: dict[str, str]
    old: Program | None = None
    _logs: list[EffectLog] = attrs.field(factory=list)

    async def start_old(self, *queues: str, name: str = "old") -> Program:
        """Start an engine of the release before; return when it serves."""
        ready, log = self.folder / f"{name}.ready", self.folder / f"{name}.log"
        arguments = ["--dsn", self.dsn, "--node", name, "--effects", str(self.folder / f"{name}.jsonl")]
        arguments += ["--ready", str(ready), *(word for queue in queues for word in ("--queue", queue))]
        with log.open("wb") as out:
            program = self.python.start(
                PROGRAM, arguments, [subprocess.DEVNULL, out, out], cwd=self.folder, env=self.environ
            )
        await until(lambda: ready.exists() or program.poll() is not None)
        if self.old is None:
            self.old = program
        return program

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    @asynccontextmanager
    async def new(self, *queues: str) -> AsyncIterator[Run]:
        """An engine of this release. The first one migrates."""
        name = f"new{len(self._logs)}"
        log = EffectLog(self.folder / f"{name}.jsonl")
        self._logs.append(log)
        program.Probe.log = log
        options = {**program.SETTINGS, "queues": dict.fromkeys(queues, 4), "node": name, "name": name}
        async with running(self.dsn, **options) as run:
            yield run

    def versions(self) -> set[int]:
        with psycopg.connect(self.dsn) as conn:
            return {version for (version,) in conn.execute("select version from durable.migrations")}

    def violations(self) -> str:
        history = read_history(self.dsn, [self.folder], lease=3.0, reap_interval=0.2, margin=MARGIN)
        return "\n".join(map(str, check(without_count(history))))

    def close(self) -> None:
        if self.old is not None:
            self.old.kill()
            self.old.wait()
        for log in self._logs:
            log.close()


@pytest.fixture
async def pair(
    empty_dsn: str, old_python: Warm, old_release: OldRelease, tmp_path: Path
) -> AsyncIterator[Pair]:
    """The release before serves `old` on a schema of its own, and every change is recorded."""
    found = Pair(empty_dsn, tmp_path, old_python, {**os.environ, **old_release.environ})
    try:
        await found.start_old("old")
        assert max(found.versions()) == list(RELEASES.values())[-2], found.log_of("old")
        install_audit(empty_dsn)
        yield found
    finally:
        found.close()


async def results(run: Run, ids: list[int]) -> list[Any]:
    return [await run.engine.client.result(number, timeout=PATIENCE) for number in ids]


async def test_barriers_signals_and_keys_across_releases(pair: Pair):
    async with pair.new("new") as run:
        assert max(pair.versions()) == list(RELEASES.values())[-1]
        client = run.engine.client
        families = [
            await client.insert(program.Family, state={"queues": ["new", "old", "new", "old"]}, queue=queue)
            for queue in ("old", "new")
        ]
        talks = [
            await client.insert(
                program.Talk,
                state={"to": other, "heard": [], "begins": queue == "old"},
                queue=queue,
                unique_key=queue,
            )
            for queue, other in (("new", "old"), ("old", "new"))
        ]
        lane = [
            await client.insert(
                program.keyed, args={"n": n}, queue="old" if n % 2 else "new", partition_key="lane"
            )
            for n in range(12)
        ]
        by_old, by_new = await results(run, families)
        children = [["done", NEW], ["done", OLD], ["done", NEW], ["done", OLD]]
        assert by_old == {"by": OLD, "children": children, "counts": {"done": 4}}
        assert by_new == {"by": NEW, "children": children, "counts": {"done": 4}}
        heard = await results(run, talks)
        assert heard == [
            {"by": NEW, "heard": [1, 3, 5, 7, 9]},
            {"by": OLD, "heard": [2, 4, 6, 8, 10]},
        ]
        assert await results(run, lane) == list(range(12))
        assert began_in_order(pair, lane)
    assert pair.violations() == ""


def began_in_order(pair: Pair, ids: list[int]) -> bool:
    """Rows of a key are claimed in the order in which they were inserted, whoever claims them."""
    query = (
        "select instance from durable_audit.change where (before).status = 'runnable' and (after).status = 'executing'"
        " and instance = any (%s) order by seq"
    )
    with psycopg.connect(pair.dsn) as conn:
        return [number for (number,) in conn.execute(query, [ids])] == ids


async def test_a_cancelled_child_is_counted_and_shown_by_the_release_before(pair: Pair):
    """The parent is the old engine's; its child ends in a way that it does not know."""
    async with pair.new("new") as run, connect(pair.dsn) as conn, connect(pair.dsn, "commit") as commits:
        number = await run.engine.client.insert(
            program.Family, state={"queues": ["cancelled", "old"]}, queue="old"
        )
        step = await see_offered(pair, "cancelled")
        [child] = await claims(conn, queue="cancelled", known=[f"upgrade.leaf/1/{step}"])
        await commit_outcomes(commits, "durable", [cancellation(child, "not needed")], accept_late=True)
        assert await run.engine.client.result(number, timeout=PATIENCE) == {
            "by": OLD,
            "children": [["cancelled", None], ["done", OLD]],
            "counts": {"cancelled": 1, "done": 1},
        }


async def see_offered(pair: Pair, queue: str) -> str:
    """Wait until the queue has a row; return its step."""
    query = "select step from durable.gen_durable where queue = %s and status = 'runnable'"
    with psycopg.connect(pair.dsn, autocommit=True) as conn:
        [step] = await until(lambda: conn.execute(query, [queue]).fetchone())  # type: ignore[arg-type, return-value]
        return step


async def test_five_steps_begin_in_one_release_and_end_in_the_next(pair: Pair):
    """Drained, the old engine ends what runs there; the new one goes on where it stopped."""
    assert pair.old is not None
    async with pair.new("new") as run:
        client = run.engine.client
        number = await client.insert(program.Walk, state={"by": []}, queue="old")
        await parked(pair, number, "two")
        await client.signal(number, "go")
        await parked(pair, number, "three")
        hanging = await client.insert(program.hang, args={"folder": str(pair.folder)}, queue="old")
        await until((pair.folder / "hangs").exists)
        pair.old.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in pair.log_of("old"))
        (pair.folder / "go on").touch()
        assert await client.result(hanging, timeout=PATIENCE) == OLD
        assert await pair.old.wait_ended() == 0
        async with pair.new("old"):
            for step in ("four", "five", None):
                await client.signal(number, "go")
                if step is not None:
                    await parked(pair, number, step)
            assert await client.result(number, timeout=PATIENCE) == [OLD, OLD, NEW, NEW, NEW]
    assert pair.violations() == ""


async def parked(pair: Pair, number: int, step: str) -> None:
    """It awaits a signal, and enters this step then."""
    query = "select status = 'awaiting_signal' and await_step = %s from durable.gen_durable where id = %s"
    with psycopg.connect(pair.dsn, autocommit=True) as conn:
        await until(lambda: (conn.execute(query, [step, number]).fetchone() or [None])[0])


async def test_a_killed_engine_of_the_release_before_is_reaped_by_the_new_one(pair: Pair):
    assert pair.old is not None
    async with pair.new("new") as run:
        client = run.engine.client
        number = await client.insert(program.hang, args={"folder": str(pair.folder)}, queue="old")
        await until((pair.folder / "hangs").exists)
        pair.old.kill()
        async with pair.new("old"):
            assert await client.result(number, timeout=PATIENCE) == NEW
    with psycopg.connect(pair.dsn) as conn:
        row = conn.execute(
            "select attempt, crashes from durable.gen_durable where id = %s", [number]
        ).fetchone()
    assert row == (1, 1)
    assert pair.violations() == ""


async def test_the_new_engine_names_the_old_one_and_what_it_ignores(
    pair: Pair, caplog: pytest.LogCaptureFixture
):
    async with pair.new("new"):
        [line] = [record.message for record in caplog.records if "which ignores" in record.message]
    assert line.startswith("node old:")
    assert f"runs {OLD}, which ignores: commands to running steps, " in line


async def test_an_engine_of_the_release_before_that_starts_after_the_migration_refuses(pair: Pair):
    """It is as it is: it knows nothing of `works_with`. From this release on an older engine starts."""
    async with pair.new("new"):
        late = await pair.start_old("old", name="late")
    assert await late.wait_ended() == 1
    assert "a newer release has migrated it. Upgrade the package on this node." in pair.log_of("late")
