"""What a step may do wrong, and who gets to know: `handle`, with a clear error."""

from __future__ import annotations

import threading
import time

import attrs
import durable_actors as da
import msgspec
import pytest
import trio
from durable_actors.telemetry import StepStopped
from tests.engine.kit import running

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Count:
    n: int = 0


class Broken(Exception):
    pass


def machine(body, *, ahead: bool = True, timeout: float | None = None, handle=None):
    """A machine with one step, `body(self, ctx)`, and a `handle` that says what it got."""

    class M(da.Machine[Count], run_ahead=ahead):
        start = da.step(timeout=timeout)(body)

        @da.step
        async def other(self, ctx: da.Context[Count]) -> da.Outcome:
            return da.Done("other")

        if handle is not None:
            locals()["handle"] = handle

    return M


async def raises(self, ctx):
    raise Broken("no luck")


async def test_the_default_handle_stops(durable_dsn, ahead):
    async with running(durable_dsn) as run:
        row = await run.run(machine(raises, ahead=ahead), state=Count(2))
        stopped = await run.events.wait(StepStopped, id=row.id)
    assert (row.status, row.attempt, row.visit, row.state) == ("failed", 0, 1, {"n": 2})
    assert "Broken" in (row.last_error or "")
    assert "no luck" in (row.last_error or "")
    assert stopped.outcome == "Stop"
    assert isinstance(stopped.error, Broken)


async def test_handle_decides(durable_dsn, ahead):
    seen = []

    async def handle(self, error, ctx):
        seen.append((type(error), ctx.attempt, ctx.visit, ctx.step, ctx.state, ctx.signals, ctx.awaited))
        return da.Retry(Count(ctx.state.n + 1)) if ctx.attempt < 2 else da.Next(self.other)

    async with running(durable_dsn) as run:
        row = await run.run(machine(raises, ahead=ahead, handle=handle))
        outcomes = [event.outcome for event in run.events.all(StepStopped, id=row.id)]
    assert seen == [(Broken, n, 1, "start", Count(n), (), ()) for n in range(3)]
    assert outcomes == ["Retry", "Retry", "Next", "Done"]
    assert (row.status, row.result, row.visit) == ("done", "other", 2)


async def test_a_retry_from_handle_remembers_the_error(durable_dsn, db):
    async def handle(self, error, ctx):
        return da.Retry(delay=600)

    async with running(durable_dsn) as run:
        number = await run.insert(machine(raises, handle=handle))
        await run.events.wait(StepStopped, id=number)
        await db.eventually(
            "select status = 'runnable' and attempt = 1 from durable.gen_durable where id = %s", number
        )
        row = await run.engine.client.inspect(number)
    assert "no luck" in (row.last_error or "")


async def test_handle_may_be_a_plain_function(durable_dsn):
    threads = []

    def handle(self, error, ctx):
        threads.append(threading.current_thread())
        return da.Done({"rescued": str(error)})

    async with running(durable_dsn) as run:
        row = await run.run(machine(raises, handle=handle))
    assert row.result == {"rescued": "no luck"}
    assert threads[0] is not threading.main_thread()


async def test_a_handle_that_raises_fails_the_instance(durable_dsn):
    async def handle(self, error, ctx):
        raise ZeroDivisionError("in handle")

    async with running(durable_dsn) as run:
        row = await run.run(machine(raises, handle=handle))
    assert row.status == "failed"
    assert "in handle" in (row.last_error or "")


@pytest.mark.parametrize("nonsense", [None, 7, da.Done, da.Error("x"), "start"])
async def test_a_handle_that_returns_nonsense_fails_the_instance(durable_dsn, nonsense):
    async def handle(self, error, ctx):
        return nonsense

    async with running(durable_dsn) as run:
        row = await run.run(machine(raises, handle=handle))
    assert row.status == "failed"
    assert "InvalidOutcome" in (row.last_error or "")
    assert "handle" in (row.last_error or "")


async def got(self, error, ctx):
    """A handle that hands its error out."""
    return da.Done(
        {"error": type(error).__name__, "text": str(error), "state": msgspec.to_builtins(ctx.state)}
    )


async def test_a_group_comes_as_it_is(durable_dsn):
    caught = []

    async def body(self, ctx):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, self, ctx)

    async def handle(self, error, ctx):
        caught.append(error)
        return da.Done()

    async with running(durable_dsn) as run:
        assert (await run.run(machine(body, handle=handle))).status == "done"
    assert isinstance(caught[0], ExceptionGroup)
    assert isinstance(caught[0].exceptions[0], Broken)


async def test_a_step_that_takes_too_long(durable_dsn):
    async def body(self, ctx):
        await trio.sleep_forever()

    async with running(durable_dsn) as run:
        row = await run.run(machine(body, timeout=0.05, handle=got))
    assert row.result["error"] == "StepTimeout"
    assert "0.05" in row.result["text"]
    assert issubclass(da.StepTimeout, TimeoutError)


async def test_a_thread_that_takes_too_long(durable_dsn):
    def body(self, ctx):
        time.sleep(0.06)
        return da.Done("too late")

    async with running(durable_dsn) as run:
        row = await run.run(machine(body, timeout=0.05, handle=got))
    assert row.result["error"] == "StepTimeout"


async def test_a_step_within_its_time(durable_dsn):
    async def body(self, ctx):
        return da.Done("in time")

    async with running(durable_dsn) as run:
        assert (await run.run(machine(body, timeout=60, handle=got))).result == "in time"


class Opaque:
    pass


def outcome_of(text: str):
    """Made when the step runs: some of these raise already when they are made."""
    made = {
        "nothing": lambda: None,
        "number": lambda: 7,
        "class": lambda: da.Done,
        "unknown step": lambda: da.Next("nowhere"),
        "bad delay": lambda: da.Retry(delay=-1),
        "no state": lambda: da.Next("other", {"n": "x"}),
        "opaque state": lambda: da.Retry(Opaque()),
        "opaque result": lambda: da.Done(Opaque()),
        "nan": lambda: da.Done(float("nan")),
    }
    return made[text]()


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("nothing", "InvalidOutcome"),
        ("number", "InvalidOutcome"),
        ("class", "InvalidOutcome"),
        ("unknown step", "InvalidOutcome"),
        ("bad delay", "InvalidOutcome"),
        ("no state", "StateError"),
        ("opaque state", "StateError"),
        ("opaque result", "StateError"),
        ("nan", "StateError"),
    ],
)
async def test_bad_outcomes_reach_handle(durable_dsn, what, error):
    async def body(self, ctx):
        return outcome_of(what)

    async with running(durable_dsn) as run:
        row = await run.run(machine(body, handle=got), state=Count(3))
    assert (row.status, row.result["error"], row.result["state"]) == ("done", error, {"n": 3}), row


@pytest.mark.parametrize("place", ["state", "result", "error"])
async def test_what_postgres_refuses_reaches_handle(durable_dsn, place):
    """JSON may hold a NUL that jsonb refuses: found at the commit, handled like any error."""

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            if place == "state":
                return da.Next(self.start, {"s": "a\0b"})
            if place == "error":
                return da.Stop("a\0b")
            return da.Done({"s": "a\0b"})

        async def handle(self, error, ctx):
            return da.Done({"error": type(error).__name__, "state": ctx.state})

    async with running(durable_dsn) as run:
        row = await run.run(M, state={"old": 1})
    if place == "error":  # a reason is text for people: shown without it
        assert (row.status, "\0" in (row.last_error or "")) == ("failed", False)
    else:
        assert row.status == "done"
        assert row.result["state"] == {"old": 1}


async def test_refused_twice_fails(durable_dsn, db):
    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Done("a\0b")

        async def handle(self, error, ctx):
            return da.Done("c\0d")

    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert row.status == "failed"
    assert row.last_error


async def test_a_state_that_does_not_decode(durable_dsn, db):
    async def body(self, ctx):
        raise AssertionError("must not run")

    M = machine(body, handle=got)
    async with running(durable_dsn, queues={}) as client:
        number = await client.insert(M)
    db.execute("""update durable.gen_durable set state = '{"n": "many"}' where id = %s""", number)
    async with running(durable_dsn) as run:
        row = await run.ended(number)
    assert row.result["error"] == "StateError"
    assert row.result["state"] == {"n": "many"}
    for part in ("n", "start", "M"):
        assert part in row.result["text"]
