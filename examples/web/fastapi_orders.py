"""FastAPI with SQLAlchemy's `AsyncSession`: one transaction for the row and its durable work, and a signal.

Pass the session as it is to `durable_actors.aio`. The worker is another process, or runs on Trio in a thread, as here.

Run it: `python examples/web/fastapi_orders.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import durable_actors as da
import httpx
import psycopg
import trio
from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool


class Base(DeclarativeBase): ...


class OrderRow(Base):
    __tablename__ = "fastapi_orders"
    number: Mapped[int] = mapped_column(primary_key=True)


@attrs.frozen
class Order:
    number: int


class Checkout(da.Machine[Order], name="examples:fastapi checkout"):
    @da.step(initial=True)
    async def wait(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Await("paid", then=self.ship)

    @da.step
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done({"shipped": ctx.state.number, "cents": ctx.awaited[0].payload["cents"]})


def make_app(dsn: str) -> FastAPI:
    async def connect() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(dsn)

    engine = create_async_engine(
        "postgresql+psycopg://", async_creator=connect, poolclass=NullPool
    )  # or a URL
    app = FastAPI()

    @app.post("/orders/{number}", status_code=201)
    async def create(number: int) -> dict[str, int]:
        async with AsyncSession(engine) as session, session.begin():
            session.add(OrderRow(number=number))
            return {
                "instance": await da.aio.insert(
                    session, Checkout, state=Order(number), unique_key=f"order:{number}"
                )
            }

    @app.post("/orders/{number}/paid")
    async def paid(number: int, cents: int) -> dict[str, str]:
        async with AsyncSession(engine) as session, session.begin():
            try:
                await da.aio.signal(session, f"order:{number}", "paid", {"cents": cents})
            except da.NoTarget as exc:
                raise HTTPException(404, str(exc)) from exc
        return {"status": "thanks"}

    @app.post("/setup")
    async def setup() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    return app


async def browse(dsn: str) -> list[int]:
    """What customers do."""
    transport = httpx.ASGITransport(app=make_app(dsn))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as browser:
        await browser.post("/setup")
        created = await browser.post("/orders/7")
        codes = [(await browser.post(f"/orders/{number}/paid?cents=4200")).status_code for number in (7, 8)]
        print("created:", created.status_code, "paid:", codes)
    return [created.json()["instance"]]


async def main() -> None:
    async with da.open_engine() as engine:
        for number in await trio.to_thread.run_sync(asyncio.run, browse(engine.dsn)):
            print("instance", number, "→", await da.result(number, timeout=30))


if __name__ == "__main__":
    trio.run(main)
