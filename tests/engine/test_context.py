"""What a step is told about itself, and what it may do to others while it runs."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace
from typing import Any, cast

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.running.step_inputs import NO_INPUTS, StepInputs
from durable_actors._engine.running.step_run import StepRun
from durable_actors.machine import Cancellation
from tests.engine.kit import REAP, Gate, claim, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def leaf():
    class Leaf(da.Machine, name="leaf", queue="nobody"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    return Leaf


async def test_its_fields(durable_dsn, db):
    seen = {}

    class M(da.Machine, name="m", version=4):
        @da.step
        async def start(self, ctx):
            names = ("id", "machine", "version", "step", "attempt", "visit", "state", "parent_id")
            seen.update({name: getattr(ctx, name) for name in names})
            seen.update(signals=ctx.signals, awaited=ctx.awaited, children=ctx.children)
            [(claim, token)] = db.execute("select claim_id::text, claim_token_hash from durable.gen_durable")
            assert ctx.claim_id == claim
            assert token
            assert str(ctx.id) in ctx.idempotency_key
            assert not hasattr(ctx, "token")
            return da.Done()

    async with running(durable_dsn) as run:
        row = await run.run(M, state={"a": 1})
    assert seen == {
        "id": row.id,
        "machine": "m",
        "version": 4,
        "step": "start",
        "attempt": 0,
        "visit": 1,
        "state": {"a": 1},
        "parent_id": None,
        "signals": (),
        "awaited": (),
        "children": (),
    }
    assert db.row(row.id, "claim_id is not null, locked_by") == (
        True,
        None,
    )  # completion keeps the claim's id


async def test_a_crash_is_run_again_under_the_same_key(durable_dsn, db):
    """Nothing of the first run counts: `handle` is not called, the attempt tells, the idempotency key stays."""
    gate, runs, handled = Gate(), [], []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            runs.append((ctx.attempt, ctx.visit, ctx.idempotency_key))
            if not ctx.attempt:
                await gate.wait()
            return da.Done()

        async def handle(self, error, ctx):
            handled.append(error)
            return da.Stop(error)

    async with running(durable_dsn, lease_ttl=60, heartbeat_interval=0.05) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        db.execute(REAP, number)
        row = await run.ended(number)
    (first, second) = runs
    assert (first[0], second[0], first[1:] == second[1:]) == (0, 1, True)
    assert (row.status, row.attempt, row.crashes, handled) == ("done", 1, 1, [])


async def test_what_it_inserts_is_there_at_once_and_once(durable_dsn, db, ahead):
    """A crash re-run of the same visit finds the same instances; another visit makes new ones."""
    Leaf, made = leaf(), []

    class M(da.Machine, run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            ids = [await ctx.insert(Leaf, state={"n": n}) for n in range(2)]
            assert db.execute("select count(*)::int from durable.gen_durable where id = any(%s)", ids) == [
                (2,)
            ]
            made.append(ids)
            if not ctx.attempt:
                db.execute(REAP, ctx.id)
                await trio.sleep_forever()
            return da.Next(self.start) if ctx.visit == 1 else da.Done()

    async with running(durable_dsn, queues={"default": 5}, heartbeat_interval=0.05) as run:
        await run.run(M)
    (one, again, two, last) = made
    assert one == again
    assert two == last
    assert not set(one) & set(two)
    assert db.execute("select count(*)::int from durable.gen_durable where fsm = 'leaf'") == [(4,)]


async def test_a_context_that_outlived_its_step_starts_nothing(durable_dsn, db):
    Leaf, kept = leaf(), []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            kept.append(ctx)
            return da.Done()

    async with running(durable_dsn, queues={"default": 5}) as run:
        await run.run(M)
        for call in (
            lambda ctx: ctx.insert(Leaf),
            lambda ctx: ctx.start_child(Leaf, key="k"),
            lambda ctx: ctx.signal(ctx.id, "s"),
        ):
            with pytest.raises(da.LeaseLost):
                await call(kept[0])
    assert db.execute("select count(*)::int from durable.gen_durable") == [(1,)]


async def test_a_lost_claim_starts_nothing(durable_dsn, db):
    """Fenced in the database: the node need not know yet."""
    gate, Leaf, errors = Gate(), leaf(), []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            if ctx.attempt:
                return da.Done()
            await gate.wait()
            try:
                await ctx.insert(Leaf)
            except da.LeaseLost as exc:
                errors.append(exc)
                raise
            raise AssertionError("it was started")

    async with running(durable_dsn, queues={"default": 5}) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        db.execute(REAP, number)
        gate.open()
        row = await run.ended(number)
        await until(lambda: errors)
    assert (row.status, row.attempt) == ("done", 1)
    assert db.execute("select count(*)::int from durable.gen_durable") == [(1,)]


def context_of(inputs: StepInputs, **columns: Any) -> da.Context[Any]:
    nothing = cast("Any", None)
    node = cast("Any", SimpleNamespace(port=None))
    run = StepRun(node, nothing, ActiveClaim(claim(None, **columns)), nothing, None)
    run.inputs = inputs
    return contextvars.copy_context().run(run._context, {})  # it notes the step that runs, for log records


def test_the_engine_gives_a_context_all_its_fields():
    """It makes them without attrs: a field added there must be added in `step_run`, too."""
    names = {field.name for field in attrs.fields(da.Context)}
    full = context_of(StepInputs(), cancellation=Cancellation("enough"))
    assert set(vars(full)) == names - {"in_handle"}
    made = context_of(NO_INPUTS)
    shared = set(vars(made))
    assert len(shared) <= 10, "a larger dict costs every step 0.2 µs"
    defaults = {field.name: field.default for field in attrs.fields(da.Context) if field.name not in shared}
    assert {name: getattr(made, name) for name in defaults} == defaults
    assert StepInputs() == NO_INPUTS
    assert all(getattr(full, name) == default for name, default in defaults.items() if name != "cancellation")
    assert attrs.evolve(made, attempt=3).attempt == 3
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.state = 1  # type: ignore[misc]
