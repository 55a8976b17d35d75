"""`Pause` and `Approval`: instances that wait for a person, and what the person decides."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench

pytestmark = pytest.mark.usefixtures("registry")
ASKED: dict[str, Any] = {"on_reject": "sorry", "title": "Refund?", "data": {"eur": [5, None]}}


def refund(**options: Any) -> type[da.Machine[Any]]:
    """Asks for an approval with these options; its steps tell their decision."""

    class Refund(da.Machine[dict[str, Any]], name="Refund", journal="full"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            assert ctx.decision is None
            return da.Approval("pay", {"asked": True}, **options)

        @da.step
        async def pay(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.after, {"told": told(ctx)})

        @da.step
        async def sorry(self, ctx: da.Context) -> da.Outcome:
            return da.Done({"sorry": told(ctx)})

        @da.step
        async def late(self, ctx: da.Context) -> da.Outcome:
            return da.Done({"late": told(ctx)})

        @da.step
        async def after(self, ctx: da.Context) -> da.Outcome:
            assert ctx.decision is None
            return da.Done({"pay": ctx.state["told"]})

    return Refund


def told(ctx: da.Context) -> list[Any]:
    assert ctx.decision is not None
    assert ctx.state == {"asked": True}
    assert (ctx.decision.at is not None, ctx.visit, ctx.attempt) == (True, 2, 0)
    return [ctx.decision.kind, ctx.decision.by, ctx.decision.comment, ctx.decision.data]


async def fits(durable: Bench) -> None:
    """Every journal is what its row says, and builds the same row again."""
    report = await durable.verify()
    assert report.problems == []


async def rebuilt(durable: Bench, number: int) -> None:
    before = await durable.inspect(number)
    await durable.rebuild(number)
    after = await durable.inspect(number)
    assert (after.boundary, after.decision, after.status) == (before.boundary, before.decision, before.status)


# -- routes (case 43)


@pytest.mark.parametrize(
    ("verb", "options", "result"),
    [
        ("approve", ASKED, {"pay": ["approved", "ada", "fine", {"a": None}]}),
        ("reject", ASKED, {"sorry": ["rejected", "ada", "fine", {"a": None}]}),
        ("timeout", {**ASKED, "timeout": 60}, {"sorry": ["timed_out", None, None, None]}),
        (
            "timeout",
            {**ASKED, "timeout": 60, "on_timeout": "late"},
            {"late": ["timed_out", None, None, None]},
        ),
    ],
)
async def test_an_approval_leads_to_the_step_that_the_decision_asks_for(
    durable: Bench, verb: str, options: dict[str, Any], result: object
):
    number = await durable.insert(refund(**options), state={})
    await durable.drain()
    instance = await durable.inspect(number)
    asked = instance.boundary
    assert asked is not None
    assert (instance.waiting, instance.status, instance.step) == ("approval", "awaiting_signal", "start")
    assert (asked.title, asked.data, asked.then, asked.on_reject) == (
        "Refund?",
        {"eur": [5, None]},
        "pay",
        "sorry",
    )
    assert (asked.deadline is None) == ("timeout" not in options)
    await rebuilt(durable, number)
    if verb == "timeout":
        await durable.advance(61)
    else:
        await getattr(durable, verb)(number, by="ada", comment="fine", data={"a": None})
        found = await durable.inspect(number)
        assert (found.boundary, found.decision and found.decision.by, found.waiting) == (None, "ada", None)
        await rebuilt(durable, number)
    await durable.drain()
    assert await durable.result(number) == result
    assert (await durable.inspect(number)).decision is None
    await fits(durable)


async def test_a_pause_ends_when_somebody_lets_it_proceed(durable: Bench):
    class Deploy(da.Machine[dict[str, Any]]):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Pause(self.go, title="look at it")

        @da.step
        async def go(self, ctx: da.Context) -> da.Outcome:
            assert ctx.decision is not None
            return da.Done([ctx.decision.kind, ctx.decision.by])

    number = await durable.insert(Deploy, state={})
    assert "until somebody lets it proceed" in str(await durable.drain())
    with pytest.raises(
        da.Conflict, match="waits for somebody to let it proceed, and only one that waits for an approval"
    ):
        await durable.approve(number)
    await durable.advance("900d")
    assert not (await durable.drain()).ran
    assert await durable.proceed(number, by="ada") == number
    await durable.drain()
    assert await durable.result(number) == ["proceeded", "ada"]
    await fits(durable)


@pytest.mark.parametrize("verb", ["reject", "timeout"])
async def test_without_a_step_for_it_a_rejection_fails_the_instance(durable: Bench, verb: str):
    number = await durable.insert(refund(title="Refund?", timeout=60), state={})
    await durable.drain()
    if verb == "reject":
        await durable.reject(number, by="ada", comment="too expensive")
    else:
        await durable.advance(61)
        await durable.drain()
    text = "rejected by ada: too expensive" if verb == "reject" else "nobody decided in time: Refund?"
    with pytest.raises(da.InstanceFailed) as caught:
        await durable.result(number)
    assert caught.value.reason == text
    with pytest.raises(da.Conflict, match=f"is failed \\({text[:10]}"):
        await durable.approve(number)
    found = await durable.inspect(number)
    assert (found.boundary, found.decision, found.waiting) == (None, None, None)
    await fits(durable)
    await durable.retry(number)  # it asks once more
    await durable.drain()
    assert (await durable.inspect(number)).waiting == "approval"
    await durable.approve(number)
    await fits(durable)


@pytest.mark.parametrize("verb", ["reject", "timeout"])
async def test_a_barrier_counts_a_child_that_was_rejected(durable: Bench, verb: str):
    child = refund(timeout=60)

    class Parent(da.Machine[dict[str, Any]], journal="full"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(child, state={}), da.Child(child, state={})])

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done([each.last_error for each in ctx.children])

    number = await durable.insert(Parent, state={})
    await durable.drain()
    children = await durable.list_instances(da.Filter(waiting="approval"))
    if verb == "reject":
        for each in children:
            await durable.reject(each.id)
    else:
        await durable.advance(61)
    await durable.drain()
    why = "rejected" if verb == "reject" else "nobody decided in time"
    assert await durable.result(number) == [why, why]
    await fits(durable)


# -- nobody but a person decides, and once


async def test_no_signal_can_decide(durable: Bench):
    number = await durable.insert(refund(**ASKED), state={})
    await durable.drain()
    for name in ("approve", "approved", "decision", "pay"):
        await durable.signal(number, name, {"kind": "approved", "by": "mallory"})
    report = await durable.recover()
    assert (list(report.woken), (await durable.drain()).ran) == ([], ())
    assert (await durable.inspect(number)).waiting == "approval"
    await durable.reject(number, by="ada")
    await durable.drain()
    assert await durable.result(number) == {"sorry": ["rejected", "ada", None, None]}


async def test_one_decision_counts(durable: Bench):
    """Case 43: the same key again is harmless, another decision is refused, and says what was decided by whom."""
    number = await durable.insert(refund(**ASKED), state={}, unique_key="order:7")
    await durable.drain()
    assert await durable.approve("order:7", by="ada", comment="ok", idempotency_key="k") == number
    assert await durable.approve(number, by="bob", idempotency_key="k") == number
    for call in (durable.approve(number, idempotency_key="l"), durable.reject(number, idempotency_key="k")):
        with pytest.raises(
            da.Conflict, match=r"runnable \(it was approved by ada at .*: ok\), and only one that waits"
        ):
            await call
    await durable.drain()
    assert await durable.result(number) == {"pay": ["approved", "ada", "ok", None]}
    assert await durable.approve(number, idempotency_key="k") == number, "for ever"
    with pytest.raises(
        da.Conflict, match=r"is done, and only .* can be approved; it was approved by ada at .*: ok$"
    ):
        await durable.approve(number)
    assert [(each.command, each.by, each.data) for each in await durable.receipts(number)] == [
        ("approve", "ada", {"comment": "ok"})
    ]
    with pytest.raises(da.NoTarget):
        await durable.approve(number + 1)


async def test_the_steps_are_those_of_the_pause(durable: Bench):
    """A deploy in between changes nothing (R63): the targets are resolved when the step returns."""
    number = await durable.insert(refund(**ASKED), state={})
    await durable.drain()
    refund(on_reject="late")  # the new code asks in another way
    await durable.reject(number)
    await durable.drain()
    assert await durable.result(number) == {"sorry": ["rejected", None, None, None]}


# -- the decision goes with the visit


async def test_a_crash_and_a_retry_keep_the_decision(durable: Bench):
    seen: list[Any] = []

    class Careful(da.Machine[dict[str, Any]], journal="full"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Approval(self.pay)

        @da.step
        async def pay(self, ctx: da.Context) -> da.Outcome:
            seen.append((ctx.decision and ctx.decision.by, ctx.attempt, [each.name for each in ctx.awaited]))
            match len(seen):
                case 2:
                    return da.Retry()
                case 3:
                    return da.Await("go")
                case 4:
                    raise ValueError("x")
                case 5:
                    return da.Stop("no")
                case _:
                    return da.ScheduleChildren(self.end, [])

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done(ctx.decision is None)

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            assert ctx.decision is not None
            return da.Retry()

    number = await durable.insert(Careful, state={})
    await durable.drain()
    await durable.approve(number, by="ada")
    durable.crash_after(Careful.pay)
    await durable.drain()
    await durable.drain()
    await durable.signal(number, "go")
    await durable.drain()
    assert (await durable.inspect(number)).status == "failed"
    await durable.retry(number)
    await durable.drain()
    assert await durable.result(number) is True
    assert [by for by, *_ in seen] == ["ada"] * 6
    assert seen[3][2] == ["go"]
    await fits(durable)


async def test_cancel_ends_the_boundary_and_keeps_a_decision(durable: Bench):
    machine = refund(**ASKED)
    first, second = [await durable.insert(machine, state={}) for _ in range(2)]
    await durable.drain()
    await durable.approve(second, by="ada")
    for number in (first, second):
        assert await durable.cancel(number) == "cancelled"
        with pytest.raises(da.Conflict, match="is cancelled"):
            await durable.approve(number)
    await fits(durable)
    assert (await durable.inspect(first)).boundary is None
    for number in (first, second):
        await durable.retry(number)
    await durable.drain()
    assert (await durable.inspect(first)).waiting == "approval", "it asks again"
    assert await durable.result(second) == {"pay": ["approved", "ada", None, None]}
    await fits(durable)


async def test_what_comes_with_signals_and_from_handle(durable: Bench):
    """Signals in `ctx.awaited` are consumed, others stay; `handle` may ask, too."""

    class Asking(da.Machine[dict[str, Any]], journal="full"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Await("go", then=self.ask)

        @da.step
        async def ask(self, ctx: da.Context) -> da.Outcome:
            return da.Pause(self.fail)

        @da.step
        async def fail(self, ctx: da.Context) -> da.Outcome:
            raise ValueError("boom")

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            return da.Approval(self.end, title=str(error))

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            assert ctx.decision is not None
            return da.Done([[each.name for each in ctx.signals], ctx.awaited, ctx.decision.kind])

    number = await durable.insert(Asking, state={})
    await durable.drain()
    for name in ("other", "go"):
        await durable.signal(number, name)
    await durable.drain()
    await durable.proceed(number)
    await durable.drain()
    assert (await durable.inspect(number)).last_error == "ValueError: boom"
    await durable.approve(number)
    await durable.drain()
    assert await durable.result(number) == [["other"], [], "approved"]
    await fits(durable)


# -- what is refused


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: da.Approval("nowhere"), "unknown step 'nowhere'"),
        (lambda m: da.Approval("start", on_reject="nowhere"), "unknown step 'nowhere'"),
        (lambda m: da.Approval("start", timeout=1, on_timeout="nowhere"), "unknown step 'nowhere'"),
        (lambda m: da.Pause(refund().pay), "belongs to another machine"),
        (lambda m: da.Pause("start", data=object()), "the data of the pause"),
        (lambda m: da.Approval("start", data="x" * 65_536), "65,?536"),
    ],
)
async def test_a_boundary_that_cannot_be(durable: Bench, make: Any, match: str):
    class Wrong(da.Machine[dict[str, Any]]):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return make(self)

    with pytest.raises((da.InvalidOutcome, da.StateError), match=match):
        await durable.run_step(Wrong.start, {})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"title": ""}, "must not be empty"),
        ({"title": "x" * 2001}, "at most 2000"),
        ({"timeout": -1}, "0 or more"),
        ({"on_timeout": "t"}, "needs a timeout"),
        ({"on_reject": 5}, "is not a step"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str):
    with pytest.raises(da.InvalidOutcome, match=match):
        da.Approval("s", **options)


async def test_a_job_asks_nobody(durable: Bench):
    @da.job
    async def send() -> object:
        return da.Pause("perform")

    with pytest.raises(da.InvalidOutcome, match="For more steps, signals, children or decisions"):
        await durable.run_step(send)


@pytest.mark.parametrize(
    "options",
    [{"comment": ""}, {"comment": "x" * 2001}, {"data": object()}, {"data": "x" * 65_536}, {"by": 5}],
)
async def test_a_decision_that_cannot_be(durable: Bench, options: dict[str, Any]):
    number = await durable.insert(refund(), state={})
    await durable.drain()
    with pytest.raises(da.ConfigError):
        await durable.approve(number, **options)
    assert (await durable.inspect(number)).waiting == "approval"


# -- looking at it


async def test_a_step_is_tried_with_a_decision(durable: Bench):
    decision = da.Decision(kind="approved", by="ada")

    class Ask(da.Machine[dict[str, Any]]):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done(ctx.decision and ctx.decision.by)

    assert await durable.run_step(Ask.start, {}, decision=decision) == da.Done("ada")
    assert await durable.run_step(Ask.start, {}) == da.Done(None)
    with pytest.raises(da.ConfigError, match="must be a Decision"):
        await durable.run_step(Ask.start, {}, decision="yes")  # type: ignore[arg-type]


async def test_who_waits_for_whom(durable: Bench):
    class Other(da.Machine[dict[str, Any]]):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Pause("start") if ctx.id % 2 else da.Await("x")

    machine = refund(**ASKED)
    approval = await durable.insert(machine, state={})
    rest = [await durable.insert(Other, state={}, tags=["t"]) for _ in range(2)]
    await durable.drain()

    async def waiting(**where: Any) -> list[int]:
        return [each.id for each in await durable.list_instances(da.Filter(**where))]

    assert await waiting(waiting="approval") == [approval]
    assert await waiting(waiting="pause") == [each for each in rest if each % 2]
    assert await waiting(waiting="signal") == [each for each in rest if not each % 2]
    assert await waiting(waiting="pause", machine=machine) == []
    assert await waiting(waiting="pause", tag="t") == await waiting(waiting="pause")
    assert await waiting(waiting="children") == []
    [shown] = await durable.list_instances(da.Filter(waiting="approval"))
    assert shown.boundary is not None
    assert (shown.boundary.title, shown.boundary.data) == ("Refund?", None), "lists are redacted"
    explanation = await durable.explain(approval)
    assert explanation.reason == "awaiting_approval"
    assert [each.command for each in explanation.next_actions] == [
        f"durable-actors approve {approval}",
        f"durable-actors reject {approval}",
    ]
    assert (await durable.explain(next(each for each in rest if each % 2))).reason == "awaiting_proceed"


@pytest.mark.parametrize("kind", ['["approval"]', "{}", "7", "null"])
async def test_what_a_hand_has_written_is_no_boundary_and_can_be_read(durable: Bench, kind: str):
    number = await durable.insert(refund(**ASKED), state={})
    await durable.drain()
    with psycopg.connect(durable.dsn, autocommit=True) as conn:
        conn.execute("update durable.gen_durable set manual = jsonb_build_object('kind', %s::jsonb)", [kind])
    [shown] = await durable.list_instances(full=True)
    assert (shown.id, shown.boundary) == (number, None)
    with pytest.raises(da.Conflict, match="awaiting_signal"):
        await durable.approve(number)


async def test_from_a_web_handler(durable: Bench):
    """`sync` in your own transaction and savepoint: what is rolled back was not decided."""
    number = await durable.insert(refund(**ASKED), state={})
    await durable.drain()
    with psycopg.connect(durable.dsn) as conn:
        with conn.transaction(force_rollback=True):
            da.sync.reject(conn, number, by="ada")
        assert da.sync.inspect(conn, number).waiting == "approval"
        with conn.transaction():
            da.sync.approve(conn, number, by="bob", comment="yes")
            with pytest.raises(da.Conflict, match="approved by bob"):
                da.sync.reject(conn, number)
    await durable.drain()
    assert await durable.result(number) == {"pay": ["approved", "bob", "yes", None]}
