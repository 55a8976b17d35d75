"""A monthly report as a graph of eight tasks: one fails, the code is mended, and the report is run again from there.

Run it: `python examples/report_graph.py`. Without DURABLE_DSN it brings its own Postgres.

    orders ──┬─> revenue ──┬─> charts ──┬─> document ──> mail
    refunds ─┘             │            │
    costs ─────────────────┴─> margin ──┘

`orders`, `refunds` and `costs` run side by side; every other task begins when those before it are done. The exchange
rate that `margin` needs is missing at first: `margin` fails, `document` and `mail` are cancelled, and everything else
is done. The second report runs these three again, and takes over the results of the other five.
"""

from __future__ import annotations

import attrs
import durable_actors as da
import trio

RATES: dict[str, float] = {}  # somebody forgot to fill it
RUNS: list[str] = []


@attrs.frozen
class Month:
    year: int
    month: int


@attrs.frozen
class Sales:
    shop: str
    cents: int


def ran(ctx: da.Context[Month]) -> None:
    RUNS.append(ctx.machine.rpartition(".")[2])


class Report(da.Workflow[Month], name="examples:report", queue="reports"):
    @da.task(max_attempts=5)
    async def orders(self, ctx: da.Context[Month]) -> list[Sales]:
        ran(ctx)
        return [Sales("berlin", 120_000), Sales("paris", 90_000)]

    @da.task(max_attempts=5)
    async def refunds(self, ctx: da.Context[Month]) -> list[Sales]:
        ran(ctx)
        return [Sales("paris", 10_000)]

    @da.task(max_attempts=5)
    async def costs(self, ctx: da.Context[Month]) -> int:
        ran(ctx)
        return 150_000

    @da.task(after=[orders, refunds])
    async def revenue(self, ctx: da.Context[Month]) -> dict[str, int]:
        ran(ctx)
        total = {sale.shop: sale.cents for sale in ctx.result_of(self.orders)}
        for refund in ctx.result_of(self.refunds):
            total[refund.shop] -= refund.cents
        return total

    @da.task(after=[revenue, costs], max_attempts=1)
    async def margin(self, ctx: da.Context[Month]) -> float:
        ran(ctx)
        earned = sum(ctx.result_of(self.revenue).values()) * RATES["eur"]
        return round(1 - ctx.result_of(self.costs) / earned, 2)

    @da.task(after=[revenue], queue="drawing", timeout=60)
    def charts(self, ctx: da.Context[Month]) -> list[str]:  # a `def` runs in a thread
        ran(ctx)
        revenue = ctx.result_of(self.revenue)
        return [f"{shop} {'█' * (cents // 20_000)}" for shop, cents in sorted(revenue.items())]

    @da.task(after=[charts, margin])
    async def document(self, ctx: da.Context[Month]) -> str:
        ran(ctx)
        title = f"{ctx.state.year}-{ctx.state.month:02}: margin {ctx.result_of(self.margin):.0%}"
        return "\n".join([title, *ctx.result_of(self.charts)])

    @da.task(after=[document])
    async def mail(self, ctx: da.Context[Month]) -> int:
        ran(ctx)
        return len(ctx.result_of(self.document))

    async def finish(self, ctx: da.Context[Month]) -> str:
        return ctx.result_of(self.document)


async def main() -> None:
    async with da.open_engine(queues={"reports": 10, "drawing": 2}):
        first = await da.insert(Report, state=Month(2026, 10))
        try:
            await da.result(first, timeout=60)
        except da.InstanceFailed as error:
            print(f"the report failed: {error.reason}")
        print(f"{len(RUNS)} tasks ran: {', '.join(sorted(RUNS))}")

        RATES["eur"] = 1.0
        RUNS.clear()
        again = await da.rerun(first, step=Report.margin, by="ada", reason="the rate was missing")
        print(await da.result(again, timeout=60, type=str))
        print(f"{len(RUNS)} tasks ran: {', '.join(sorted(RUNS))}")


if __name__ == "__main__":
    trio.run(main)
