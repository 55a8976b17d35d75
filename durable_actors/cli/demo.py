"""`durable-actors demo`: two worker processes run orders, one is killed, and every order is completed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final, cast

import click
import trio
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from durable_actors._dsn import EMBEDDED
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.embedded.server import open_embedded
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._store import migrate as migrating
from durable_actors._store.dialogues import explaining, run_dialogue
from durable_actors._store.journal import read_page
from durable_actors._store.observe import Filter, count_statuses, list_instances, read_nodes
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._timeline import timeline
from durable_actors._wording import counted
from durable_actors.cli.demo_accounts import SCHEMA, Accounts, Order, audit
from durable_actors.cli.demo_workers import MACHINES, POLL_INTERVAL, Worker, open_workers, wait_alive
from durable_actors.cli.options import Whole, bare_errors, import_modules, json_option
from durable_actors.cli.output import plain, print_json, table
from durable_actors.client import open_client
from durable_actors.config import Config
from durable_actors.errors import DurableError
from durable_actors.machine import InsertOptions

ORDERS_TIMEOUT: Final = 60.0
"""Seconds after which the demo stops waiting for the orders; they take 6 to 10."""
CLEANUP_TIMEOUT: Final = 15.0
"""Seconds for dropping the schema; it takes 0.05 unless another session holds a lock in it."""

_HELLO: Final = Statement(
    "demo_hello",
    "select current_setting('server_version'),"
    " pg_try_advisory_lock(hashtextextended('durable_actors demo ' || current_database(), 0))",
)
_PAYMENTS: Final = (
    "create table durable_demo.payments"
    " (key text primary key, number int not null, cents int not null, asked int not null default 1)"
)


@click.command(short_help="Kill a worker and watch its orders recover.")
@click.option("--orders", type=Whole(20, 2000), default=80, help="The number of orders. Default: 80.")
@click.option("--dsn", default=EMBEDDED, metavar="DSN", help="The Postgres server. Default: embedded.")
@json_option
def demo(*, orders: int, dsn: str, as_json: bool) -> None:
    """Run orders on two worker processes, kill one of them, and check that every order is completed.

    The demo uses its own schema, durable_demo, and drops it at the end, also after Ctrl-C.
    """
    console = Console(highlight=False, quiet=as_json)
    import_modules([MACHINES], verbose=False)
    with bare_errors():
        found = trio.run(_until_signal, console, Config(dsn=dsn).dsn, orders)
    if found is None:
        raise click.Abort
    if as_json:
        print_json({**plain(found), "right": found.right})
    if not found.right:
        raise DurableError(f"the totals do not match: {found}")


async def _until_signal(console: Console, dsn: str, orders: int) -> Accounts | None:
    """Run the demo. SIGINT or SIGTERM ends it early: it cleans up and returns None.

    KeyboardInterrupt is not used for that: it can be raised in any line, also during the clean-up, and would break the
    connection that waits for an answer. A second signal has its default effect; the next demo cleans up.
    """
    found: Accounts | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_handle_signals, signals, interrupt := trio.CancelScope())
            with interrupt:
                found = await _demo(console, dsn, orders)
            nursery.cancel_scope.cancel()
    return found


async def _handle_signals(signals: AsyncIterator[int], interrupt: trio.CancelScope) -> None:
    await anext(signals)
    interrupt.cancel()
    number = await anext(signals)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


async def _demo(console: Console, dsn: str, orders: int) -> Accounts:
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        where = "the server"
        if dsn == EMBEDDED:
            with console.status("starting the embedded Postgres (the first start also creates its data) ..."):
                server = await stack.enter_async_context(open_embedded())
            dsn, where = server.dsn(), str(server.data_dir)
        # The lock has its own connection: cancelling a statement may close its connection. The lock would then be
        # free for another demo, whose schema this one would drop.
        guard = await PgConn.open(dsn)
        stack.callback(guard.close)
        [[version, locked]] = (await guard.run(_HELLO)).rows
        if locked != b"t":
            raise DurableError(
                "another demo is running on this server and uses the same schema; wait until it has ended"
            )
        conn = await PgConn.open(dsn)
        stack.callback(conn.close)
        run = Demo(console, conn, dsn, began)
        run.tick(f"PostgreSQL {(version or b'').decode()} in {where}")
        try:
            accounts = await run.show(orders)
        finally:
            await run.clean_up()
        console.print(
            f"\nDone in {time.monotonic() - began:.1f} s. The demo has removed everything it created."
        )
        return accounts


class Demo:
    """One run of the demo."""

    def __init__(self, console: Console, conn: PgConn, dsn: str, began: float) -> None:
        self.console: Final = console
        self.conn: Final = conn
        self.dsn: Final = dsn
        self.began: Final = began
        self.recovered: list[int] = []
        self.watched: Instance | None = None
        """An order that the killed worker was running."""
        self.recovery_seconds = 0.0

    def tick(self, text: str, mark: str = "[green]✓[/]") -> None:
        """Print a line with the time since the start."""
        self.console.print(f"{mark} [dim]{time.monotonic() - self.began:4.1f} s[/]  {text}", soft_wrap=True)

    async def show(self, count: int) -> Accounts:
        """Run the demo from start to end."""
        await self.clean_up()  # a demo that was killed may have left a schema
        found = await migrating.migrate(self.dsn, schema=SCHEMA)
        await self.conn.script(_PAYMENTS)
        self.tick(f"schema {SCHEMA} created, version {found.current}")
        async with open_workers(("worker-1", "worker-2"), dsn=self.dsn, schema=SCHEMA) as workers:
            with self.console.status("starting two worker processes: durable-actors serve ..."):
                nodes = await wait_alive(self.conn, SCHEMA, workers)
            pids = ", ".join(f"{name} (pid {node.pid})" for name, node in nodes.items())
            self.tick(f"two processes of `durable-actors serve` share the work: {pids}")
            placed = await self._place(count)
            with trio.move_on_after(ORDERS_TIMEOUT) as patience:
                await self._work(placed, workers)
            if patience.cancelled_caught:
                self.tick("the orders take too long", mark="[red]✗[/]")
            code = await workers[1].stop()
            self.tick(f"worker-2 received SIGTERM, drained and ended with exit code {code}")
            accounts = await self._audit(placed)
        self._report(accounts)
        await self._tell()
        return accounts

    async def _tell(self) -> None:
        """Print the history of an order that the killed worker was running."""
        if self.watched is None:
            return
        page = await read_page(self.conn, SCHEMA, self.watched.id, after=0, limit=1000)
        self.console.print(
            f"\nWhat happened to order {_number(self.watched)}? `durable-actors history` says:"
        )
        rows = [
            (line.offset, line.kind, Text(line.text, style=line.style)) for line in timeline(page.decoded())
        ]
        self.console.print(table(("", "", ""), rows))

    async def _place(self, count: int) -> list[Order]:
        placed = [Order(number, 100 + number * 7) for number in range(1, count + 1)]
        async with open_client(self.dsn, schema=SCHEMA, name="demo") as client:
            rows: list[InsertOptions] = [{"state": order, "journal": "claims"} for order in placed]
            await client.insert_many("demo:order", rows)
        self.tick(f"{count} orders placed, in one statement")
        return placed

    async def _work(self, placed: list[Order], workers: list[Worker]) -> None:
        """Wait until every order and mail is done; kill the first worker in the meantime."""
        columns = (TextColumn("         {task.description}"), BarColumn(), MofNCompleteColumn())
        total = len(placed)
        die_at = random.randint(total // 4, total // 3)  # noqa: S311 - which moment, not a secret
        killed = 0.0
        held: list[Instance] = []
        reported = 0
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bars = {queue: progress.add_task(f"{queue:<6} done", total=total) for queue in ("orders", "mail")}
            while True:
                counts = await count_statuses(self.conn, SCHEMA)
                done = {queue: counts.get(queue, {}).get("done", 0) for queue in bars}
                for queue, bar in bars.items():
                    progress.update(bar, completed=done[queue])
                if not self.console.is_terminal and done["orders"] >= reported + total // 4:
                    reported = done["orders"]
                    self.tick(f"{reported} of {total} orders done", mark=" ")
                finished = all(each == total for each in done.values())
                if (
                    not killed
                    and done["orders"] >= die_at
                    and (found := await self._kill(workers[0])) is not None
                ):
                    held, killed = found, time.monotonic()
                elif killed and held and await self._came_back(held):
                    self.recovery_seconds = time.monotonic() - killed
                    numbers = ", ".join(map(str, self.recovered))
                    self.tick(
                        f"recovered after {self.recovery_seconds:.1f} s: worker-2 runs orders {numbers} now"
                    )
                    held = []
                if finished and not held:
                    return
                await trio.sleep(POLL_INTERVAL)

    async def _kill(self, worker: Worker) -> list[Instance] | None:
        """Kill a worker while it runs steps; return its orders. Returns None, and kills nothing, if it has none."""
        owner = next(
            each.incarnation for each in await read_nodes(self.conn, SCHEMA) if each.node == worker.name
        )
        if not await self._orders_of(owner):
            return None
        worker.kill()
        await worker.process.wait()
        held = await self._orders_of(owner)
        self.recovered = sorted(map(_number, held))
        numbers = ", ".join(map(str, self.recovered)) or "none"
        self.tick(f"[bold]kill -9 worker-1[/]: it was working on orders {numbers}", mark="[red]✗[/]")
        if held:
            self.watched = held[0]
            why = await run_dialogue(self.conn, explaining(SCHEMA, held[0].id))
            self.tick(f"why does order {_number(held[0])} wait? {escape(why.summary)}", mark=" ")
        return held

    async def _orders_of(self, owner: str) -> list[Instance]:
        filters = Filter(status="executing", machine="demo:order")
        running = await list_instances(self.conn, SCHEMA, filters, limit=1000)
        return [each for each in running.instances if each.locked_by == owner]

    async def _came_back(self, held: list[Instance]) -> bool:
        """Return whether the dead worker holds no claims any more."""
        rows = await read_by_ids(self.conn, SCHEMA, [each.id for each in held])
        return all(row.locked_by != held[0].locked_by for row in rows.values())

    async def _audit(self, placed: list[Order]) -> Accounts:
        orders = await list_instances(self.conn, SCHEMA, Filter(machine="demo:order"), limit=10_000)
        mails = await list_instances(self.conn, SCHEMA, Filter(machine="demo:mail"), limit=10_000)
        async with await TrioConnection.connect(self.dsn) as bank:
            cursor = await bank.execute("select number, cents, asked from durable_demo.payments")
            payments = [(int(row[0]), int(row[1]), int(row[2])) for row in await cursor.fetchall()]
        return audit(
            placed,
            orders.instances,
            mails.instances,
            payments,
            recovered=self.recovered,
            recovery_seconds=round(self.recovery_seconds, 2),
            seconds=round(time.monotonic() - self.began, 1),
        )

    def _report(self, found: Accounts) -> None:
        again = found.asked - found.payments
        self.console.print()
        self.tick(
            f"{found.done} of {found.orders} orders done, {found.lost} lost; {found.twice} committed a step twice"
        )
        self.tick(
            f"placed {_money(found.cents_placed)}, booked {_money(found.cents_done)}, paid {_money(found.cents_paid)}"
        )
        self.tick(f"{found.mailed} of {found.orders} orders got exactly one mail")
        if again:
            requests = counted(again, "more request")
            self.tick(
                f"the bank received {requests} than it paid: a killed step runs again with the same idempotency key"
            )

    async def clean_up(self) -> None:
        """Drop everything that the demo created, also after an interrupt, on new connections."""
        with trio.move_on_after(CLEANUP_TIMEOUT, shield=True) as patience:
            conn = await PgConn.open(self.dsn)
            try:
                await conn.script("drop table if exists durable_demo.payments")
            finally:
                conn.close()
            await migrating.uninstall(self.dsn, schema=SCHEMA)
        if patience.cancelled_caught:
            raise DurableError(
                f"schema {SCHEMA} could not be dropped within {CLEANUP_TIMEOUT:.0f} s, because another session uses it;"
                " the next demo tries again"
            )


def _number(order: Instance) -> int:
    return int(cast("dict[str, int]", order.state)["number"])


def _money(cents: int) -> str:
    return f"{cents / 100:.2f} €"
