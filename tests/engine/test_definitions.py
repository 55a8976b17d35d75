"""A machine that is redefined under the same version: its instances go on, and the journal says so (C14)."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import durable_actors as da
import pytest
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import StepCommitted
from tests.engine.kit import Db, running

pytestmark = pytest.mark.usefixtures("registry")

WARNING = "was started with another definition of order v1"


@attrs.frozen
class Order:
    n: int = 0


def first() -> type[da.Machine[Order]]:
    class M(da.Machine[Order], name="order"):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("first")

    return M


def same_structure() -> type[da.Machine[Order]]:
    class M(da.Machine[Order], name="order"):
        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("other code")

        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("never")

    return M


def more_steps() -> type[da.Machine[Order]]:
    @da.job(name="leaf")
    async def leaf(args: dict[str, Any]) -> None: ...

    class M(da.Machine[Order], name="order"):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("never")

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.ScheduleChildren(self.joined, [da.Child(leaf, args={})])

        @da.step
        async def joined(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Next(self.last)

        @da.step
        async def last(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("more steps")

    return M


async def started(dsn: str, db: Db, count: int = 1, **options: Any) -> list[int]:
    """Instances that the first definition has parked."""
    with isolated_registry():
        machine = first()
        async with running(dsn) as run:
            ids = [await run.insert(machine, state=Order(), **options) for _ in range(count)]
            for number in ids:
                await run.events.wait(StepCommitted, id=number, status="awaiting_signal")
    return ids


async def finished(dsn: str, define: Any, ids: list[int]) -> list[Any]:
    """The same instances, after a deploy of this definition."""
    with isolated_registry():
        define()
        async with running(dsn):
            for number in ids:
                await da.signal(number, "go")
            return [await da.result(number, timeout=20) for number in ids]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if WARNING in each.getMessage()]


@pytest.mark.parametrize("level", ["outcomes", "claims", "full"])
async def test_another_definition_is_reported_and_runs(durable_dsn, db: Db, caplog, level):
    ids = await started(durable_dsn, db, 2, journal=level)
    [fingerprint] = {db.row(number, "encode(fingerprint, 'hex')")[0] for number in ids}
    assert fingerprint == made(first)
    with caplog.at_level(logging.WARNING, logger="durable_actors"):
        assert await finished(durable_dsn, more_steps, ids) == ["more steps"] * 2
    assert len(warnings(caplog)) == 1, "once per process, not once per instance or step"
    async with da.open_client(durable_dsn) as client:
        records = await client.history(ids[0])
        assert records[0].data["row"]["fingerprint"] == f"\\x{fingerprint}"
        told = {each.kind: each.data.get("definition") for each in records if each.kind != "claimed"}
        other = made(more_steps)
        assert [told[kind] for kind in ("started", "parked")] == [None, None]
        assert [told[kind] for kind in ("spawned", "next", "done")] == [other] * 3
        report = await client.verify()
        assert report.ok
        assert [(each.instance_id, each.reason, each.is_notice) for each in report.problems] == [
            (number, "anomaly", True) for number in ids
        ]
        [found, _] = await client.anomalies()
        assert found.anomaly is not None
        assert (found.anomaly.reason, found.anomaly.detail, found.anomaly.step) == (
            "other_definition",
            other,
            "end",
        )
        assert "a notice" in found.detail
        if level == "full":
            before = db.row(ids[0], "to_jsonb(gen_durable) - '{updated_at,inbox,rev}'::text[]")
            db.execute("delete from durable.gen_durable where id = %s", ids[0])
            assert await client.rebuild(ids[0]) == ids[0]
            assert db.row(ids[0], "to_jsonb(gen_durable) - '{updated_at,inbox,rev}'::text[]") == before
            db.execute("update durable.gen_durable set fingerprint = null where id = %s", ids[0])
            [problem] = [each for each in (await client.verify(ids[0])).problems if not each.is_notice]
            assert (problem.reason, problem.column) == ("divergence", "fingerprint")
            await client.rebuild(ids[0])
            assert db.row(ids[0], "to_jsonb(gen_durable) - '{updated_at,inbox,rev}'::text[]") == before


async def test_the_same_structure_with_other_code_is_not_reported(durable_dsn, db: Db, caplog):
    ids = await started(durable_dsn, db)
    with caplog.at_level(logging.WARNING, logger="durable_actors"):
        assert await finished(durable_dsn, same_structure, ids) == ["other code"]
    assert warnings(caplog) == []
    async with da.open_client(durable_dsn) as client:
        assert (await client.verify()).problems == []


@pytest.mark.parametrize("level", ["off", "auto"])
async def test_what_is_not_recorded_has_no_fingerprint(durable_dsn, db: Db, level):
    """Jobs and journal="off" pay nothing."""

    @da.job(name="plain")
    async def plain(args: dict[str, Any]) -> None: ...

    async with running(durable_dsn) as run:
        number = await run.insert(plain, args={}, journal=level)
        await run.ended(number)
    assert db.row(number, "fingerprint") == (None,)


async def test_a_child_has_its_own(durable_dsn, db: Db):
    class Parent(da.Machine[Order], name="parent"):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            child = await ctx.start_child("order", key="a", state=Order(), journal="outcomes")
            children = [da.Child("order", state=Order(), journal="outcomes")]
            return da.ScheduleChildren(self.end, children, Order(child))

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done()

    first()
    async with running(durable_dsn) as run:
        number = await run.insert(Parent, state=Order())
        await run.events.wait(StepCommitted, id=number, status="awaiting_children")
    rows = db.execute(
        "select encode(fingerprint, 'hex') from durable.gen_durable where parent_id = %s", number
    )
    assert rows == [(made(first),)] * 2


def made(define: Any) -> str:
    with isolated_registry():
        return define().__durable__.fingerprint
