"""Flask with SQLAlchemy: save a row and insert its durable work in one transaction.

Pass the `Session` (of Flask-SQLAlchemy `db.session`) as it is. The engine's URL begins with `postgresql+psycopg://`.

Run it: `python examples/web/flask_orders.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import trio
from flask import Flask, abort, request
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool


class Base(DeclarativeBase): ...


class Customer(Base):
    __tablename__ = "flask_customers"
    email: Mapped[str] = mapped_column(primary_key=True)


@da.job(name="examples:flask welcome", queue="mail")
async def welcome(args: dict[str, str]) -> str:
    return f"welcome, {args['email']}"


def make_app(dsn: str) -> Flask:
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
    )  # or a URL
    Base.metadata.create_all(engine)
    app = Flask("shop")

    @app.post("/customers")
    def register() -> tuple[dict[str, Any], int]:
        email = request.get_json()["email"]
        with Session(engine) as session, session.begin():
            session.add(Customer(email=email))
            number = da.sync.insert(session, welcome, args={"email": email}, max_attempts=5)
            if "@" not in email:
                abort(422)  # rolls both back
        return {"welcome": number}, 201

    @app.get("/welcomes/<int:number>")
    def status(number: int) -> dict[str, Any]:
        with Session(engine) as session:
            instance = da.sync.inspect(session, number)
        return {"status": instance.status, "result": instance.result}

    return app


def web_process(dsn: str) -> list[int]:
    client = make_app(dsn).test_client()
    answers = [client.post("/customers", json={"email": email}) for email in ("ada@example.org", "nobody")]
    print("answers:", [answer.status_code for answer in answers])
    return [answer.get_json()["welcome"] for answer in answers if answer.status_code == 201]


async def main() -> None:
    async with da.open_engine() as engine:
        for number in await trio.to_thread.run_sync(web_process, engine.dsn):
            print("instance", number, "→", await da.result(number, timeout=30))
        print("instances:", len(await da.list_instances(da.Filter(machine=welcome))))


if __name__ == "__main__":
    trio.run(main)
