"""Insert from an asyncio web framework: FastAPI, Starlette, aiohttp.

The handler uses the framework's own asyncio connection; the work runs on Trio in another process (here: thread).

Run it: `python examples/asyncio_handler.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import asyncio
from typing import Any

import durable_actors as da
import psycopg
import trio


@da.job(name="examples:welcome", queue="mail")
async def send_welcome(args: dict[str, Any]) -> dict[str, Any]:
    return {"sent_to": args["email"]}


async def register_user(conn: psycopg.AsyncConnection[Any], email: str) -> dict[str, Any]:
    """Shaped like `@app.post("/users")`; `conn` would be a dependency."""
    async with conn.transaction():
        await conn.execute("insert into example_users values (%s) on conflict do nothing", [email])
        # The key makes a repeated request harmless: while the mail is on its way nobody inserts another.
        number = await da.aio.insert(
            conn, send_welcome, args={"email": email}, unique_key=f"welcome:{email}", on_duplicate="return"
        )
    return {"email": email, "mail": number}


async def web_app(dsn: str) -> list[dict[str, Any]]:
    """The asyncio side: requests come in, two of them for the same address."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("create table if not exists example_users (email text primary key)")
        answers = [await register_user(conn, email) for email in ("ada@example.org", "eve@example.org")]
        await conn.execute("drop table example_users")
    return answers


async def main() -> None:
    async with da.open_engine(poll_interval=0.1) as engine:
        for answer in await trio.to_thread.run_sync(asyncio.run, web_app(engine.dsn)):
            print("201 Created", answer["email"], "→", await da.result(answer["mail"], timeout=30))


if __name__ == "__main__":
    trio.run(main)
