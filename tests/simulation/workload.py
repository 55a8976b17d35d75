"""What runs in a simulated world: machines whose end tells what was lost or done twice, and the client that feeds them.

Every machine's result follows from its arguments alone, whatever crashes, retries and repetitions lie in between.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import durable_actors as da
import psycopg
import trio
from durable_actors._client import Client
from durable_actors.machine import isolated_registry
from tests.simulation.book import Book
from tests.simulation.plan import Item, Order, Plan
from tests.simulation.process import Process, current_process
from tests.simulation.tables import Row

T = TypeVar("T")


class Flop(Exception):
    """A step's own failure."""


def book() -> Book:
    found: Book = current_process.get().book  # type: ignore[attr-defined]
    return found


async def nap(longest: float) -> None:
    """Work for a while; something is seen outside before and after."""
    found = book()
    found.effect()
    await current_process.get().sleep(found.world.random.random() ** 3 * longest)
    found.effect()


def chance(of: float) -> bool:
    return book().world.random.random() < of


@attrs.frozen
class Walk:
    """So many steps to go, so many gone."""

    left: int
    nap: float
    gone: int = 0
    tenant: str = ""


@attrs.frozen
class Basket:
    """What a collector has."""

    wants: int
    nap: float
    got: list[int] = attrs.field(factory=list[int])


@attrs.frozen
class Round:
    """What a courier delivers, and to whom."""

    target: str
    parcels: list[int]
    nap: float


@attrs.frozen
class Chore:
    """A job's arguments."""

    flops: int
    nap: float


with isolated_registry():

    class Chain(da.Machine[Walk], name="chain"):
        """Steps that count: each must be counted once."""

        @da.step(initial=True)
        async def go(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if ctx.state.gone != ctx.visit - 1:
                    book().fail("I1", f"instance {ctx.id}: state {ctx.state} at visit {ctx.visit}")
                if ctx.state.left == 0:
                    return da.Done(ctx.state.gone)
                if chance(0.1):
                    raise Flop
                if chance(0.1):
                    return da.Retry(delay=0.1)
                walked = attrs.evolve(ctx.state, left=ctx.state.left - 1, gone=ctx.state.gone + 1)
                return da.Next(self.go, walked)

        async def handle(self, error: Exception, ctx: da.Context[Walk]) -> da.Outcome:
            return da.Retry(delay=0.05) if isinstance(error, Flop) else da.Stop(error)

    class Collector(da.Machine[Basket], name="collector"):
        """Awaits one signal after another and keeps what it was handed."""

        @da.step(initial=True)
        async def start(self, ctx: da.Context[Basket]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                return da.Await("item", then=self.take, timeout=2 if chance(0.3) else None)

        @da.step
        async def take(self, ctx: da.Context[Basket]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if chance(0.1):
                    return da.Retry(delay=0.05)
                got = [*ctx.state.got, *(signal.payload for signal in ctx.awaited)]
                if len(got) >= ctx.state.wants:
                    return da.Done(got)
                after = attrs.evolve(ctx.state, got=got)
                seen = [
                    signal.id for signal in ctx.awaited
                ]  # else they would be handed out again with the next
                return da.Await(
                    "item", after, then=self.take, timeout=1 if chance(0.3) else None, consume=seen
                )

    class Packer(da.Machine[Basket], name="packer"):
        """Awaits in the same step until the pack is whole, then takes all of it at once."""

        @da.step(initial=True)
        async def gather(self, ctx: da.Context[Basket]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if len(ctx.awaited) < ctx.state.wants:
                    return da.Await("item", timeout=1 if chance(0.3) else None)
                got = [signal.payload for signal in ctx.awaited]
                return da.Next(self.finish, attrs.evolve(ctx.state, got=got))

        @da.step
        async def finish(self, ctx: da.Context[Basket]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                return da.Done(ctx.state.got)

    class Courier(da.Machine[Round], name="courier"):
        """Signals another instance from inside its step."""

        @da.step(initial=True)
        async def ride(self, ctx: da.Context[Round]) -> da.Outcome:
            with book().step(ctx, calls=True):
                for parcel in ctx.state.parcels:
                    await nap(ctx.state.nap)
                    try:
                        await ctx.signal(ctx.state.target, "item", parcel)
                    except da.NoTarget:
                        book().refused(ctx.state.target)
                return da.Done(len(ctx.state.parcels))

        async def handle(self, error: Exception, ctx: da.Context[Round]) -> da.Outcome:
            # A statement of its own may have been refused; what it sent already is not sent twice.
            return da.Retry(delay=0.1) if isinstance(error, psycopg.Error) else da.Stop(error)

    class Family(da.Machine[Walk], name="family"):
        """Schedules children and adds up what they bring."""

        @da.step(initial=True)
        async def spawn(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                state = Walk(1, ctx.state.nap)
                return da.ScheduleChildren(
                    self.count, [da.Child(Chain, state=state)] * ctx.state.left, timeout=None
                )

        @da.step
        async def count(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                return da.Done(sum(child.result for child in ctx.children if child.result is not None))

    @da.job(name="task", max_attempts=1000, backoff=lambda attempt: 0.1)
    async def task(args: Chore, ctx: da.Context[Chore]) -> int:
        """Comes after `flops` others, at most 2; a negative number fails for good."""
        with book().step(ctx):
            before = [view.status for view in ctx.dependencies.values()]
            if before != ["done"] * max(args.flops, 0):
                book().fail(
                    "graph", f"instance {ctx.id} runs after {before}, not after {args.flops} that are done"
                )
            await nap(args.nap)
            if args.flops < 0:
                raise da.Cancel("broken")
            return 1

    class Plot(da.Machine[Walk], name="graph"):
        """Tasks each of which comes after the two before it. If their number is odd, the first one fails."""

        @da.step(initial=True)
        async def spawn(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                tasks: list[da.Child] = []
                for place in range(ctx.state.left):
                    needs = -1 if place == 0 and ctx.state.left % 2 else min(place, 2)
                    tasks.append(da.Child(task, args=Chore(needs, ctx.state.nap), after=tasks[-2:]))
                return da.ScheduleChildren(self.count, tasks)

        @da.step
        async def count(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                return da.Done(sum(child.result for child in ctx.children if child.result is not None))

    class Sleeper(da.Machine[Walk], name="sleeper"):
        """Awaits what never comes: only deadlines wake it."""

        @da.step(initial=True)
        async def wait(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if ctx.awaited:
                    book().fail("I7", f"instance {ctx.id} was handed {ctx.awaited}, which nobody sent")
                if ctx.state.left == 0:
                    return da.Done(ctx.state.gone)
                after = attrs.evolve(ctx.state, left=ctx.state.left - 1, gone=ctx.state.gone + 1)
                return da.Await("never", after, then=self.wait, timeout=0.3)

    class Stuck(da.Machine[Walk], name="stuck"):
        """Its step never ends by itself."""

        @da.step(initial=True)
        async def wait(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                while True:
                    await nap(3600.0)

    class Meter(da.Machine[Walk], name="meter"):
        """Steps that use a rate, a slot or both, in turn: as many as there are to go."""

        @da.step(initial=True)
        async def call(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if chance(0.05):
                    raise da.RateLimited(retry_after=0.2)
                return self.go_on(ctx)

        @da.step
        async def use(self, ctx: da.Context[Walk]) -> da.Outcome:
            with book().step(ctx):
                await nap(ctx.state.nap)
                if chance(0.1):
                    return da.Retry(delay=0.1)
                return self.go_on(ctx)

        def go_on(self, ctx: da.Context[Walk]) -> da.Outcome:
            if ctx.state.left == 0:
                return da.Done(ctx.state.gone)
            walked = attrs.evolve(ctx.state, left=ctx.state.left - 1, gone=ctx.state.gone + 1)
            tenant, uses = ctx.state.tenant, ctx.state.gone % 3
            if uses == 0:
                return da.Next(self.use, walked, slot=("desks", tenant))
            weight = 1 + (ctx.state.gone % 2)
            slot = ("desks", tenant) if uses == 1 else None
            return da.Next(self.call, walked, rate_limit=("calls", tenant), weight=weight, slot=slot)

    @da.job(name="tick", max_attempts=1000, backoff=lambda attempt: 0.1)
    async def tick(args: Chore, ctx: da.Context[Chore]) -> int:
        """What a schedule starts."""
        with book().step(ctx):
            book().ticked(ctx)
            await nap(args.nap)
            return 1

    @da.job(name="chore", max_attempts=1000, backoff=lambda attempt: 0.1)
    async def chore(args: Chore, ctx: da.Context[Chore]) -> int:
        with book().step(ctx):
            await nap(args.nap)
            if ctx.attempt < args.flops:
                raise Flop
            return args.flops

    @da.job(name="brief", max_attempts=1000, backoff=lambda attempt: 0.1, keep=0)
    async def brief(args: Chore, ctx: da.Context[Chore]) -> int:
        """Its row is deleted by its commit."""
        with book().step(ctx):
            await nap(args.nap)
            return args.flops


SCOPE = ("runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed", "cancelled")
"""For ever: an insert that is repeated finds the first one, also when that has ended."""
MACHINES = (Chain, Collector, Packer, Courier, Family, chore, Sleeper, Stuck, brief, Plot, task, Meter, tick)
LIMITS = {"calls": da.Limit(2, burst=2), "desks": da.Limit(slots=1)}
"""Of each tenant: so slow that somebody waits, and fast enough to end."""
CLOCK = "clock"


def limits(plan: Plan) -> dict[str, da.Limit]:
    """What its engines declare; nothing if nobody uses it, so that seeds without limits stay what they were."""
    return LIMITS if any(item.kind == "meter" for item in plan.items) else {}


def clockwork(plan: Plan) -> list[da.Schedule]:
    """The schedule that the engines of a plan have, if it has one."""
    if (found := plan.clockwork) is None:
        return []
    args = Chore(1, found.nap)
    return [
        da.Schedule(
            CLOCK, tick, every=found.every, remaining=found.slots, overlap=found.overlap, missed=found.missed, args=args
        )
    ]  # fmt: skip


def current_kind(kind: str) -> Any:
    """The machine of an item; they are named alike."""
    return next(each for each in MACHINES if each.__durable__.name == kind)  # type: ignore[attr-defined]


def expected(item: Item) -> object:
    """The result that its instance must have; lists in any order."""
    match item.kind:
        case "graph":
            return 0 if item.size % 2 else item.size
        case "chain" | "courier" | "chore" | "family" | "sleeper" | "meter":
            return item.size
        case _:
            return sorted(item.parcels)


def check_results(items: Sequence[Item], rows: Mapping[int, Row], book: Book) -> None:
    """Every item has ended, and came to what it must."""
    for item in items:
        if item.kind == "brief":
            book.check_finished(book.names[item.name])
            continue
        row = rows[book.names[item.name]]
        if row.status == "cancelled" and book.was_cancelled(row.id):
            continue
        if row.status != "done":
            book.fail("result", f"{item.name} is {row.status}: {row.last_error}")
            return
        found = json.loads(row.result)
        found = sorted(found) if isinstance(found, list) else found
        wanted = expected(item) if item.kind != "family" else book.children_done(row.id, item.size)
        if found != wanted:
            book.fail("result", f"{item.name} came to {found}, not to {wanted}")


# -- the client


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat while the store is away: everything here may be repeated."""
    while True:
        try:
            return await call()
        except (da.StoreUnavailable, psycopg.Error):
            await trio.sleep(0.1)


async def submit(client: Client, item: Item) -> None:
    """Insert an item in its time, then send it what it awaits."""
    await trio.sleep(item.at)
    state: dict[str, Any] = {
        "chain": lambda: Walk(item.size, item.nap),
        "family": lambda: Walk(item.size, item.nap),
        "collector": lambda: Basket(item.size, item.nap),
        "packer": lambda: Basket(item.size, item.nap),
        "courier": lambda: Round(item.target, list(item.parcels), item.nap),
        "chore": lambda: Chore(item.size, item.nap),
        "brief": lambda: Chore(item.size, item.nap),
        "sleeper": lambda: Walk(item.size, item.nap),
        "stuck": lambda: Walk(item.size, item.nap),
        "graph": lambda: Walk(item.size, item.nap),
        "meter": lambda: Walk(item.size, item.nap, tenant=item.tenant),
    }
    world = book().world
    while item.target and item.target not in book().names:
        await trio.sleep(0.1)
    options: dict[str, Any] = {
        "state": state[item.kind](),
        "priority": item.priority,
        "journal": item.journal,
    }
    if item.key is not None:
        options["partition_key"] = item.key
    if item.kind == "meter":
        options["rate_limit"] = ("calls", item.tenant)
    if len(item.name) % 3:  # two of three have one; it means something in fair queues only
        options["fair_key"] = item.name[:1]

    async def insert() -> int | None:
        return await client.insert(
            current_kind(item.kind),
            unique_key=None if item.kind == "brief" else item.name,  # a key that outlives it would keep it
            unique_scope=() if item.kind == "brief" else SCOPE,
            on_duplicate="return",
            **options,
        )

    number = await insist(insert)
    world.log("client", "inserted", item.name, number)
    assert number is not None
    book().names[item.name] = number
    if item.kind in {"collector", "packer"}:
        for parcel in item.sent:
            await trio.sleep(world.random.random() * 0.5)
            await insist(lambda parcel=parcel: send(client, item, number, parcel))  # type: ignore[misc]


async def send(client: Client, item: Item, number: int | None, parcel: int) -> None:
    assert number is not None
    try:
        await client.signal(number, "item", parcel, dedup_key=f"parcel {parcel}")
    except da.NoTarget:
        book().refused(item.name)
    else:
        book().world.log("client", "signalled", item.name, parcel)


def by_target(plan: Plan) -> list[list[Order]]:
    """The commands on each item: they are given in order."""
    found: dict[str, list[Order]] = {item.name: [] for item in plan.items}
    for order in plan.orders:
        if order.target in found:
            found[order.target].append(order)
    return [orders for orders in found.values() if orders]


async def command(client: Client, orders: Sequence[Order]) -> None:
    """Give the commands on one item, each in its time, until it is answered."""
    began = trio.current_time()
    for number, order in enumerate(orders):
        await trio.sleep_until(began + order.at)
        while order.target not in book().names:
            await trio.sleep(0.1)
        target = book().names[order.target]
        if order.child:
            children = [row.id for row in book().server.tables.rows.values() if row.parent_id == target]
            if not children:
                continue
            target = book().world.random.choice(children)
        key = f"{order.target} {number}"
        for _ in range(1 + order.again):
            await insist(partial(give, client, order, target, key))
        if order.rest:
            await trio.sleep(order.rest)
            await insist(partial(resume, client, order, target, f"{key} resume"))


async def give(client: Client, order: Order, target: int, key: str) -> None:
    about: dict[str, Any] = {"by": "operator", "reason": order.command, "idempotency_key": key}
    if order.command in {"cancel", "retry", "pause"}:
        about |= {"force": order.force} if order.command == "cancel" else {}
        call: Callable[..., Awaitable[object]] = getattr(client, order.command)
        await answered(order.command, partial(call, target, **about), target, key)
    else:  # receipts of queues are not modelled
        await client.pause_queue(*queue_of(order), by="operator")
        book().world.log("client", order.command, order.target)


async def resume(client: Client, order: Order, target: int, key: str) -> None:
    """End a pause; one that is over, or was never begun, is a conflict."""
    if order.command == "pause":
        call = partial(client.resume, target, by="operator", idempotency_key=key)
        await answered("resume", call, target, key)
        return
    with suppress(da.Conflict):
        await client.resume_queue(*queue_of(order), by="operator")
    book().world.log("client", "resume_queue", order.target)


def queue_of(order: Order) -> tuple[str, str | None]:
    """The queue that it pauses, or the machine of its item there."""
    return "default", order.target.partition("-")[0] if order.command == "pause_machine" else None


async def answered(command: str, call: Callable[[], Awaitable[object]], target: int, key: str) -> None:
    try:
        answer = await call()
    except (da.Conflict, da.NoTarget) as exc:
        book().world.log("client", command, target, key, type(exc).__name__)
    else:
        book().answered(command, target, key, answer)


async def run_client(process: Process, client: Client, plan: Plan) -> None:
    async with trio.open_nursery() as nursery:
        for item in plan.items:
            nursery.start_soon(submit, client, item)
        for orders in by_target(plan):
            nursery.start_soon(command, client, orders)
