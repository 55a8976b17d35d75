"""Input of tests/test_type_checks.py: mypy and pyright must report exactly the marked lines.

A line that ends with E in a comment is an error for both; R gives the revealed type, as a regular expression.
The file is never imported.
"""

from typing import reveal_type

import attrs
import durable_actors as da


@attrs.frozen
class Month:
    year: int
    month: int


@attrs.frozen
class Sales:
    total: int


class Report(da.Workflow[Month], queue="reports", version=2, journal="full", keep=None):
    @da.task(queue="net", max_attempts=5, timeout=30, backoff=lambda attempt: 2.0**attempt)
    async def fetch(self, ctx: da.Context[Month]) -> Sales:
        reveal_type(ctx.state)  # R: Month
        return Sales(ctx.state.year)

    @da.task
    def rates(self, ctx: da.Context[Month]) -> dict[str, float]:
        return {"eur": 1.0}

    @da.task
    async def plain(self, ctx: da.Context[Month]) -> list[int]:
        return [ctx.state.month]

    @da.task(after=rates, slot=("gpu", "acme"), rate_limit="stripe", weight=2)
    def in_thread(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(after=[fetch, rates, "plain"], when="ended", name="convert")
    async def convert(self, ctx: da.Context[Month]) -> float:
        reveal_type(ctx.result_of(self.fetch))  # R: Sales
        reveal_type(ctx.result_of(Report.fetch))  # R: Sales
        reveal_type(ctx.result_of(self.rates))  # R: dict\[(builtins.)?str, (builtins.)?float\]
        reveal_type(ctx.result_of(Report.plain))  # R: list\[(builtins.)?int\]
        reveal_type(ctx.result_of(self.in_thread))  # R: int
        reveal_type(ctx.result_of("fetch"))  # R: Any
        reveal_type(ctx.dependencies["fetch"].result)  # R: Any
        total: str = ctx.result_of(self.fetch)  # E
        ctx.result_of(self.helper)  # E
        ctx.result_of(3)  # E
        return ctx.result_of(self.fetch).total * ctx.result_of(self.rates)["eur"] + len(total)

    def helper(self) -> int:
        return 1

    async def finish(self, ctx: da.Context[Month]) -> float:
        return ctx.result_of(self.convert)


class Mistakes(da.Workflow[Month]):
    def undecorated(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(after=[undecorated])  # E
    async def one(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(when="done")  # E
    async def two(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(after=3)  # E
    async def three(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(slot=3)  # E
    async def slotted(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task(attempts=3)  # E
    async def four(self, ctx: da.Context[Month]) -> int:
        return 1

    @da.task  # E
    async def five(self) -> int:
        return 1


class Graph(da.Machine[Month]):
    @da.step(initial=True)
    async def split(self, ctx: da.Context[Month]) -> da.Outcome:
        left = da.Child(Report, key="left", state=ctx.state)
        right = da.Child(Report.fetch, after=left, when="ended", args=ctx.state)
        last = da.Child("mail", key="last", after=[left, "right"], priority=1)
        da.Child("mail", after=Report)  # E
        da.Child("mail", when="done")  # E
        da.Child("mail", key=3)  # E
        return da.ScheduleChildren(self.join, [left, right, last])

    @da.step
    async def join(self, ctx: da.Context[Month]) -> da.Outcome:
        reveal_type(ctx.children[0].key)  # R: str \| None
        return da.Done(ctx.result_of("left"))


async def use() -> None:
    month = Month(2026, 1)
    number = await da.insert(Report, state=month)
    await da.insert(Report.fetch, args=month)
    await da.rerun(number, step="fetch")
    await da.rerun(number, step=Report.fetch)
    await da.rerun(number, step=3)  # E
    reveal_type(await Report().fetch(da.Context(state=month)))  # R: Sales
    reveal_type(Report().rates(da.Context(state=month)))  # R: dict\[(builtins.)?str, (builtins.)?float\]
    Report().rates(da.Context(state=3))  # E
