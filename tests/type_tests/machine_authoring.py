"""Input of tests/test_type_checks.py: mypy and pyright must report exactly the marked lines.

A line that ends with E in a comment is an error for both; R gives the revealed type, as a regular expression.
The file is never imported.
"""

import abc
from datetime import timedelta
from typing import Any, Generic, TypedDict, TypeVar, reveal_type

import attrs
import durable_actors
import durable_actors.machine as da
import psycopg


@attrs.frozen
class Order:
    order: int
    n: int = 0


@attrs.frozen
class Rush(Order):
    hours: int = 1


class Cart(TypedDict):
    items: list[str]
    total: float


class Checkout(da.Machine[Order], queue="checkout", version=1):
    @da.step(initial=True)
    async def begin(self, ctx: da.Context[Order]) -> da.Outcome:
        reveal_type(ctx.state)  # R: Order
        reveal_type(self.ship)  # R: BoundStep\[.*Order, .*Coroutine.*
        reveal_type(Checkout.ship)  # R: Step\[.*Checkout, .*Order, .*
        outcomes: list[da.Outcome] = [
            da.Next(self.ship),
            da.Next(self.ship, ctx.state),
            da.Next(self.ship, Rush(3)),
            da.Next(self.ship, da.KEEP, partition_key=None, consume=ctx.awaited),
            da.Next(Checkout.ship, Order(1), partition_key="order:1"),
            da.Next(self.blocking, attrs.evolve(ctx.state, n=1)),
            da.Next("ship", {"order": 1}),
            da.Retry(),
            da.Retry(Order(1), delay=timedelta(seconds=1)),
            da.Replay(delay=1),
            da.Await("paid"),
            da.Await(["paid", "cancelled"], Order(1), timeout=3600),
            da.Await("paid", then=self.ship),
            da.Await("paid", Order(1), then=self.ship, consume=[1]),
            da.Await("paid", {"order": 1}, then="ship"),
            da.Pause(self.ship, title="look"),
            da.Approval(self.ship, Order(1), on_reject=self.blocking, timeout=3600, on_timeout="ship"),
            da.ScheduleChildren(self.ship, [Checkout, send, da.Child(send, args=1, priority=-1)], Order(1)),
            da.ScheduleChildren("ship", (Checkout,), join=1, timeout=60),
            da.ScheduleChildren("ship", (Checkout,), deadline=60),  # E
            da.Done({"ok": True}),
            da.Stop("no"),
        ]
        if ctx.attempt == 1:
            return da.Next(self.ship, 3)  # E
        if ctx.attempt == 2:
            return da.Next(self.ship, None)  # E
        if ctx.attempt == 3:
            return da.Next(self.ship, {"order": 1})  # E
        if ctx.attempt == 4:
            return da.Next(Checkout.ship, "x")  # E
        if ctx.attempt == 5:
            return da.Next(self.undecorated, ctx.state)  # E
        if ctx.attempt == 6:
            return da.Next(Checkout.undecorated, ctx.state)  # E
        if ctx.attempt == 7:
            return da.Next(self.ship, ctx.state.order)  # E
        if ctx.attempt == 8:
            return da.Await("paid", 3, then=self.ship)  # E
        if ctx.attempt == 101:
            return da.Approval(self.ship, 3)  # E
        if ctx.attempt == 102:
            return da.Pause(self.ship, 3)  # E
        if ctx.attempt == 9:
            return da.Await("paid", then=self.undecorated)  # E
        if ctx.attempt == 10:
            return da.ScheduleChildren(self.ship, [], 3)  # E
        if ctx.attempt == 11:
            return da.ScheduleChildren(self.undecorated, [])  # E
        if ctx.attempt == 12:
            return da.ScheduleChildren(self.ship, [plain_function])  # E
        if ctx.attempt == 13:
            return da.ScheduleChildren(self.ship, [da.Child(send, prioritty=1)])  # E
        if ctx.attempt == 14:
            return da.Next(self.other_state, ctx.state)  # E
        if ctx.attempt == 15:
            return da.Retry(delay="soon")  # E
        if ctx.attempt == 16:
            return da.Error("for jobs only")  # E
        if ctx.attempt == 17:
            return ctx.state  # E
        return outcomes[0]

    @da.step
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done({"order": ctx.state.order})

    @da.step(timeout=2.5)
    def blocking(self, ctx: da.Context[Order]) -> da.Next | da.Done:
        return da.Next(self.ship, ctx.state) if ctx.attempt else da.Done()

    @da.step
    async def other_state(self, ctx: da.Context[Cart]) -> da.Outcome:
        return da.Done(ctx.state["total"])

    async def undecorated(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done(ctx.id)

    async def handle(self, error: Exception, ctx: da.Context[Order]) -> da.Outcome:
        return da.Retry(delay=2**ctx.attempt) if ctx.attempt < 5 else da.Stop(error)


class Mistakes(da.Machine[Order]):
    @da.step  # E
    async def returns_int(self, ctx: da.Context[Order]) -> int:
        return ctx.id

    @da.step  # E
    async def without_context(self) -> da.Outcome:
        return da.Done()

    @da.step(initial="yes")  # E
    async def start(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done(ctx.id)

    @da.step
    async def writes(self, ctx: da.Context[Order]) -> da.Outcome:
        ctx.state = Order(1)  # E
        da.Next(self.start).step = "x"  # E
        return da.Done()


class Unknown(da.Machine[Order], quue="x"):  # E
    async def perform(self, args: Order) -> None: ...


class Shopping(da.Machine[Cart]):
    @da.step
    async def start(self, ctx: da.Context[Cart]) -> da.Outcome:
        if ctx.state["total"] > 100:
            return da.Next(self.start, {"items": [], "total": 0})
        return da.Next(self.start, {"items": [], "total": "0"})  # E


class Plain(da.Machine):
    @da.step
    async def start(self, ctx: da.Context) -> da.Outcome:
        reveal_type(ctx.state)  # R: Any
        return da.Next(self.count, {"n": 1})

    @da.step
    async def count(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Next(self.count, {**ctx.state, "n": ctx.state["n"] + 1})

    def handle(self, error: Exception, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
        return da.Stop(error)


class Nested(da.Machine):
    @attrs.frozen
    class State:
        n: int = 0

    @da.step
    async def start(self, ctx: da.Context[State]) -> da.Outcome:
        if ctx.state.n:
            return da.Next(self.start, Order(1))  # E
        return da.Next(self.start, Nested.State(ctx.state.n + 1))

    async def handle(self, error: Exception, ctx: da.Context[State]) -> da.Outcome:
        return da.Stop(f"{error} at {ctx.state.n}")


S = TypeVar("S")


class Polling(da.Machine[S], abc.ABC, Generic[S]):
    @da.step
    async def start(self, ctx: da.Context[S]) -> da.Outcome:
        return da.Next(self.start, ctx.state)


class PollingOrder(Polling[Order]):
    @da.step
    async def finish(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Next(self.start, ctx.state)


class Cleanup(da.Machine[Order], max_attempts=3):
    async def perform(self, args: Order, ctx: da.Context[Order]) -> int:
        return args.order + ctx.attempt

    def backoff(self, attempt: int) -> float:
        return 2.0 * attempt


@da.job
async def send(args: Order, ctx: da.Context[Order]) -> dict[str, int] | None:
    return {"order": args.order, "attempt": ctx.attempt}


@da.job(queue="mail", max_attempts=5, backoff=lambda attempt: timedelta(seconds=attempt), timeout=30)
def blocking_job(args: Order) -> str:
    return str(args.order)


@da.job(max_atempts=5)  # E
def misspelt(args: Order) -> None: ...


def plain_function(args: Order) -> None: ...


async def use(ctx: da.Context[Order]) -> None:
    reveal_type(await send(Order(1), ctx))  # R: dict\[.*str, .*int\] \| None
    reveal_type(blocking_job(Order(1)))  # R: str
    outcome = await Checkout().ship(ctx)
    reveal_type(outcome)  # R: .*Next \| .*Retry \| .*Await \| .*ScheduleChildren \| .*Done \| .*Stop
    reveal_type(Checkout().blocking(ctx))  # R: .*Next \| .*Done
    reveal_type(ctx.awaited[0].payload)  # R: Any
    blocking_job("x")  # E
    await send(Order(1))  # E
    await Checkout().ship(3)  # E
    await ctx.insert(Checkout, state=Order(1), unique_key="order:1", schedule_in=timedelta(hours=1))
    reveal_type(await ctx.insert(send, args=Order(1)))  # R: int
    reveal_type(await ctx.insert(send, args=Order(1), on_duplicate="return"))  # R: int
    reveal_type(await ctx.insert(send, args=Order(1), on_duplicate="skip"))  # R: int \| None
    await ctx.insert(send, args=Order(1), on_duplicate="ignore")  # E
    await ctx.start_child(send, key="a", on_duplicate="skip")  # E
    await ctx.insert("shop:Checkout")
    await ctx.insert(plain_function)  # E
    await ctx.insert(Checkout, priority="high")  # E
    await ctx.insert(Checkout, unique_scope=["running"])  # E
    await ctx.signal(1, "paid", {"amount": 100}, dedup_key="evt-7")
    await ctx.signal("order:42", "paid")
    await ctx.signal(b"\x00order", "paid")
    await ctx.start_child(send, key="a", args=Order(1))
    await ctx.start_child(send)  # E
    reveal_type(ctx.children[0].result)  # R: Any
    reveal_type(ctx.children_counts["done"])  # R: int
    ctx.children_counts["lost"]  # E
    reveal_type(ctx.more_signals)  # R: bool
    da.Context(state=Order(1), children=(da.ChildView(1, "m", "done"),), children_counts={"done": 1})
    async for signal in ctx.iter_signals():
        reveal_type(signal.name)  # R: str


async def insert(
    client: durable_actors.Client, conn: psycopg.Connection, other: psycopg.AsyncConnection
) -> None:
    options: da.InsertOptions = {"unique_key": "k"}
    reveal_type(await durable_actors.insert(send, args=Order(1)))  # R: int
    reveal_type(await durable_actors.insert(send, on_duplicate="skip"))  # R: int \| None
    reveal_type(await durable_actors.insert(send, **options))  # R: int \| None
    reveal_type(await durable_actors.insert_many(send, [options]))  # R: list\[.*int \| None\]
    await durable_actors.insert_many(send, [dict(args=Order(1)), dict(args=Order(2), priority=1)])  # noqa: C408
    await durable_actors.insert_many(send, [{"args": Order(n)} for n in range(3)])
    await durable_actors.insert_many(send, [da.InsertOptions(args=Order(n)) for n in range(3)])
    before = [{"args": Order(n)} for n in range(3)]
    await durable_actors.insert_many(send, before)
    await client.insert_many(send, [dict(args=Order(1))])  # noqa: C408
    durable_actors.sync.insert_many(conn, send, [dict(args=Order(1))])  # noqa: C408
    await durable_actors.aio.insert_many(other, send, [dict(args=Order(1))])  # noqa: C408
    rows: list[da.InsertOptions] = [{"prioritty": 1}]  # E
    await durable_actors.insert_many(send, rows)
    await durable_actors.insert_many(send, {"args": 1})  # E
    await durable_actors.insert_many(send, "args")  # E
    reveal_type(await client.insert(send, on_duplicate="return"))  # R: int
    reveal_type(await client.insert(send, on_duplicate="skip"))  # R: int \| None
    reveal_type(durable_actors.sync.insert(conn, send))  # R: int
    reveal_type(durable_actors.sync.insert(conn, send, on_duplicate="skip"))  # R: int \| None
    reveal_type(await durable_actors.aio.insert(other, send, on_duplicate="raise"))  # R: int
    reveal_type(await durable_actors.aio.insert(other, send, on_duplicate="skip"))  # R: int \| None
    await durable_actors.insert(send, on_duplicate=None)  # E
    await durable_actors.insert(send, nonsense=1)  # E


def exhaustive(outcome: da.Outcome) -> str:
    match outcome:
        case da.Next(step=step):
            reveal_type(step)  # R: str
            return step
        case da.Retry(delay=delay):
            reveal_type(delay)  # R: float
            return str(delay)
        case da.Await(names=names):
            reveal_type(names)  # R: tuple\[.*str, \.\.\.\]
            return names[0]
        case da.ScheduleChildren(children=children):
            reveal_type(children)  # R: tuple\[.*Child, \.\.\.\]
            return ""
        case da.Pause(title=title) | da.Approval(title=title):
            reveal_type(title)  # R: str \| None
            return title or ""
        case da.Done() | da.Stop():
            return ""
